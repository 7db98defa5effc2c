// Verifies that ranks have the same model before anything is sent, because Gloo ends the process
// if sizes differ.
#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <nlohmann/json.hpp>

#include <optional>

#include "comm/tensor_checks.h"
#include "hasten/base/error.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"
#include "hasten/core/deferred_init.h"
#include "hasten/parallel/ddp.h"
#include "verify.h"

namespace hasten::detail {

std::string describe_tensor(const at::Tensor& tensor, bool parameter) {
  return c10::str(tensor.sizes(), " ", c10::toString(tensor.scalar_type()),
                  parameter && !tensor.requires_grad() ? " frozen" : "");
}

std::string describe_strides(const at::Tensor& tensor) {
  if (tensor.is_contiguous() || !tensor.is_non_overlapping_and_dense()) {
    return {};
  }
  std::vector<int64_t> strides = tensor.strides().vec();
  for (size_t dim = 0; dim < strides.size(); ++dim) {
    strides[dim] = tensor.sizes()[dim] == 1 ? 0 : strides[dim];
  }
  return " with strides " + c10::str(at::IntArrayRef(strides));
}

// Strides matter for trainable parameters, because gradients have the same strides in the buffers
// that are summed.
nlohmann::json describe_tensors(const FlatLayout::NamedParameters& parameters,
                                const FlatLayout::NamedParameters& buffers) {
  auto list = nlohmann::json::array();
  for (const auto& [name, tensor] : parameters) {
    list.push_back(
        {"parameter \"" + name + "\"",
         describe_tensor(tensor, true) + (tensor.requires_grad() ? describe_strides(tensor) : "")});
  }
  for (const auto& [name, tensor] : buffers) {
    list.push_back({"buffer \"" + name + "\"", describe_tensor(tensor, false)});
  }
  return list;
}

// The first difference of `mine` from rank 0's list; empty if there is none.
std::string first_difference(const nlohmann::json& mine, const nlohmann::json& main) {
  for (size_t i = 0; i < std::max(mine.size(), main.size()); ++i) {
    if (i >= mine.size()) {
      return "has no " + main[i][0].get<std::string>() + ", rank 0 has";
    }
    if (i >= main.size() || mine[i][0] != main[i][0]) {
      return "has " + mine[i][0].get<std::string>() + ", rank 0 has " +
             (i < main.size() ? main[i][0].get<std::string>() : "nothing") + " in its place";
    }
    if (mine[i][1] != main[i][1]) {
      return "has " + mine[i][0].get<std::string>() + " as " + mine[i][1].get<std::string>() +
             ", rank 0 as " + main[i][1].get<std::string>();
    }
  }
  return {};
}

void require_equal_lists(Communicator& communicator, const nlohmann::json& mine, const char* where,
                         const std::string& subject, const char* expected, const char* fix) {
  const auto main = communicator.broadcast_object(mine, subject + " of rank 0");
  const auto all = communicator.all_gather_object({first_difference(mine, main), host_name()},
                                                  subject + " differences");
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const auto difference = all[rank][0].get<std::string>();
    if (!difference.empty()) {
      const auto host = all[rank][1].get<std::string>();
      const auto main_host = all[0][1].get<std::string>();
      throw InputError(where,
                       "rank " + std::to_string(rank) + "'s " + subject + " " + difference +
                           (host == main_host ? "" : ": hosts " + host + " and " + main_host),
                       expected, fix);
    }
  }
}

void materialize_start(const FlatLayout::NamedParameters& tensors, bool with_values,
                       const std::optional<at::Device>& device) {
  std::vector<at::Tensor> deferred;
  for (const auto& [name, tensor] : tensors) {
    if (device && tensor.device() != *device) { // one by one, for the host's memory
      materialize_start({{name, tensor}}, with_values);
      tensor.set_data(tensor.to(*device));
    }
    deferred.push_back(tensor);
  }
  with_values ? materialize(deferred) : allocate_deferred(deferred);
}

// Limit of the small tensors in one operation. Bytes.
constexpr size_t kPack = 4 << 20;

// The tensors of one operation.
struct Pack {
  std::vector<at::Tensor> tensors{};
  size_t bytes = 0;
  at::Tensor sent{}; // a single tensor itself, or a copy of all
  Work handle{};

  bool takes(const at::Tensor& other) const {
    return bytes + other.nbytes() <= kPack && tensors[0].device() == other.device();
  }
  void add(const at::Tensor& tensor) {
    tensors.push_back(tensor.detach());
    bytes += tensor.nbytes();
  }
  void start(Communicator& communicator, const std::string& what) {
    if (tensors.size() == 1) {
      sent = tensors[0].contiguous();
    } else {
      sent = at::cat(
          mapped(tensors, [](const at::Tensor& tensor) { return bytes_of(tensor.contiguous()); }));
    }
    handle = communicator.broadcast_async(sent, 0, what);
  }
  void finish() {
    handle.wait();
    if (tensors.size() == 1) {
      tensors[0].copy_(sent); // nothing if it is the tensor itself
      return;
    }
    int64_t begin = 0;
    for (const at::Tensor& tensor : tensors) {
      const auto size = static_cast<int64_t>(tensor.nbytes());
      const at::Tensor whole = tensor.contiguous(); // in most cases the tensor itself
      bytes_of(whole).copy_(sent.narrow(0, begin, size));
      tensor.copy_(whole); // nothing if it is
      begin += size;
    }
  }
};

void broadcast_tensors(Communicator& communicator, const FlatLayout::NamedParameters& tensors,
                       const std::string& what) {
  const at::NoGradGuard no_grad;
  std::vector<Pack> packs;
  std::optional<size_t> open; // the pack to which small tensors are added
  for (const auto& [name, tensor] : tensors) {
    // Depends only on the shape, because strides may differ between ranks.
    if (static_cast<int64_t>(tensor.nbytes()) >= kTravelsAlone) {
      packs.emplace_back().add(tensor);
      continue;
    }
    if (!open || !packs[*open].takes(tensor)) {
      open = packs.size();
      packs.emplace_back();
    }
    packs[*open].add(tensor);
  }
  for (Pack& pack : packs) {
    pack.start(communicator, what);
  }
  for (Pack& pack : packs) {
    pack.finish();
  }
}

void verify_and_broadcast(Communicator& communicator, const FlatLayout::NamedParameters& parameters,
                          const FlatLayout::NamedParameters& buffers) {
  const bool alone = communicator.world_size() == 1;
  if (!alone) {
    require_equal_lists(communicator, describe_tensors(parameters, buffers), "parallel::Ddp",
                        "model", "the same model on every rank",
                        "build it from the same options everywhere; convert the memory format "
                        "(channels_last) on every rank or on none");
  }
  materialize_start(parameters, communicator.rank() == 0);
  materialize_start(buffers, communicator.rank() == 0);
  if (alone) {
    return;
  }
  broadcast_tensors(communicator, parameters, "initial parameters");
  broadcast_tensors(communicator, buffers, "initial buffers");
}

} // namespace hasten::detail
