// Making sure that ranks have the same model before anything is sent: Gloo ends
// the process where sizes differ.
#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <nlohmann/json.hpp>

#include <sstream>

#include "hasten/base/error.h"
#include "hasten/core/deferred_init.h"
#include "hasten/parallel/ddp.h"
#include "verify.h"

namespace hasten {

namespace detail {

std::string describe_tensor(const at::Tensor& tensor, bool parameter) {
  std::ostringstream text;
  text << tensor.sizes() << " " << c10::toString(tensor.scalar_type());
  if (parameter && !tensor.requires_grad()) {
    text << " frozen";
  }
  return text.str();
}

nlohmann::json describe_tensors(
    const FlatLayout::NamedParameters& parameters,
    const FlatLayout::NamedParameters& buffers) {
  auto list = nlohmann::json::array();
  for (const auto& [name, tensor] : parameters) {
    list.push_back(
        {"parameter \"" + name + "\"", describe_tensor(tensor, true)});
  }
  for (const auto& [name, tensor] : buffers) {
    list.push_back({"buffer \"" + name + "\"", describe_tensor(tensor, false)});
  }
  return list;
}

// How `mine` differs first from rank 0's; empty where it does not.
std::string first_difference(
    const nlohmann::json& mine, const nlohmann::json& main) {
  for (size_t i = 0; i < std::max(mine.size(), main.size()); ++i) {
    if (i >= mine.size()) {
      return "has no " + main[i][0].get<std::string>() + ", rank 0 has";
    }
    if (i >= main.size() || mine[i][0] != main[i][0]) {
      return "has " + mine[i][0].get<std::string>() + ", rank 0 has " +
             (i < main.size() ? main[i][0].get<std::string>() : "no more") +
             " in its place";
    }
    if (mine[i][1] != main[i][1]) {
      return "has " + mine[i][0].get<std::string>() + " as " +
             mine[i][1].get<std::string>() + ", rank 0 as " +
             main[i][1].get<std::string>();
    }
  }
  return {};
}

void require_equal_lists(
    Communicator& communicator,
    const nlohmann::json& mine,
    const char* where,
    const std::string& subject,
    const char* expected,
    const char* fix) {
  const auto main = communicator.broadcast_json(mine, subject + " of rank 0");
  const auto differences = communicator.gather_json(
      first_difference(mine, main), subject + " differences");
  for (size_t rank = 0; rank < differences.size(); ++rank) {
    if (!differences[rank].get<std::string>().empty()) {
      throw InputError(
          where,
          "rank " + std::to_string(rank) + "'s " + subject + " " +
              differences[rank].get<std::string>(),
          expected,
          fix);
    }
  }
}

void materialize_start(
    const FlatLayout::NamedParameters& tensors, bool with_values) {
  std::vector<at::Tensor> deferred;
  for (const auto& [name, tensor] : tensors) {
    deferred.push_back(tensor);
  }
  with_values ? materialize(deferred) : allocate_deferred(deferred);
}

} // namespace detail

void Ddp::verify_and_broadcast() {
  const bool alone = communicator_->world_size() == 1;
  if (!alone) {
    detail::require_equal_lists(
        *communicator_,
        detail::describe_tensors(parameters_, module_buffers_),
        "parallel::Ddp",
        "model",
        "the same model on every rank",
        "build it from the same options everywhere");
  }
  detail::materialize_start(parameters_, communicator_->rank() == 0);
  detail::materialize_start(module_buffers_, communicator_->rank() == 0);
  if (alone) {
    return;
  }
  at::NoGradGuard no_grad;
  std::vector<CommHandle> handles;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies; // target, contiguous
  for (const auto* list : {&parameters_, &module_buffers_}) {
    for (const auto& [name, tensor] : *list) {
      at::Tensor data = tensor.detach();
      if (!data.is_contiguous()) {
        copies.emplace_back(data, data.contiguous());
        data = copies.back().second;
      }
      handles.push_back(
          communicator_->broadcast_async(data, 0, "initial " + name));
    }
  }
  for (CommHandle& handle : handles) {
    handle.wait();
  }
  for (auto& [target, source] : copies) {
    target.copy_(source);
  }
}

} // namespace hasten
