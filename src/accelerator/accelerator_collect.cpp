// Collect: collectives on values other than gradients, and functions that run on certain ranks.
#include <ATen/ATen.h>

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "accelerator_core.h"
#include "hasten/accelerator/collect.h"
#include "hasten/base/error.h"
#include "hasten/comm/agree.h"
#include "hasten/comm/few_sizes.h"

namespace hasten {

namespace detail {

void throw_no_tensor_inside() {
  throw InputError("accelerator::Collect", "no tensor is found in the value",
                   "a Tensor, or a pair, tuple, vector, map or struct of them",
                   "define flatten(visit, value) for the struct");
}

at::Tensor rows_on_cpu(const at::Tensor& tensor) {
  const at::Tensor own = tensor.detach().cpu();
  return own.dim() == 0 ? own.reshape({1}) : own.contiguous();
}

// Throws InputError on every rank unless all texts are equal. Collective.
void require_same(Communicator& communicator, const char* where, const std::string& text) {
  const auto all = communicator.all_gather_object(text, where);
  const auto other = std::ranges::find_if(all, [&](const auto& t) { return t != all[0]; });
  if (other != all.end()) {
    throw InputError(std::string("accelerator::") + where,
                     "rank " + std::to_string(other - all.begin()) + " has " +
                         other->get<std::string>() + ", rank 0 has " + all[0].get<std::string>(),
                     "the same on all ranks",
                     "see pad_across_processes and gather_for_metrics for shapes that differ");
  }
}

// In debug mode: throws unless the ranks' tensors have one shape and dtype and the ranks' `behind`
// texts are equal. Collective then.
void check_form_in_debug(const AcceleratorCore& core, const char* where, const at::Tensor& tensor,
                         const std::string& behind = {}) {
  if (core.run.order_check() != nullptr) {
    require_same(*core.run.communicator(), where,
                 c10::str(tensor.scalar_type(), ' ', tensor.sizes(), behind));
  }
}

// Every rank's contiguous tensor of one shape: [rank, ...]. Collective.
at::Tensor stack_ranks(const AcceleratorCore& core, const at::Tensor& own, const char* where) {
  check_form_in_debug(core, where, own);
  auto sizes = own.sizes().vec();
  sizes.insert(sizes.begin(), core.run.world().world_size);
  at::Tensor all = at::empty(sizes, own.options());
  core.run.communicator()->all_gather_async(all, own, where).wait();
  return all;
}

// Compares what the ranks read in the caller's loop. Collective if it is due, on which ranks agree.
void compare_reading(const AcceleratorCore& core, const LoaderState& loader) {
  const uint64_t now = loader.last ? loader.read : loader.first_read;
  if (loader.training || now == 0 || now == loader.compared ||
      (loader.compared != 0 && !loader.last)) {
    return;
  }
  loader.compared = now;
  const at::Tensor all =
      stack_ranks(core, at::tensor({static_cast<int64_t>(now)}, at::kLong), "what the ranks read");
  if (!all.eq(all[0]).all().item<bool>()) {
    throw_other_batches(loader.range);
  }
}

} // namespace detail

Collect::Collect(std::shared_ptr<detail::AcceleratorCore> core) : core_(std::move(core)) {}

at::Device Collect::device() const { return core_->run.device(); }
int Collect::process_index() const { return core_->run.world().rank; }
int Collect::local_process_index() const { return core_->run.world().local_rank; }
int Collect::num_processes() const { return core_->run.world().world_size; }

const std::shared_ptr<Communicator>& Collect::communicator() const {
  return core_->run.communicator();
}

at::Tensor Collect::gather(const at::Tensor& tensor) {
  const at::Tensor own = detail::rows_on_cpu(tensor);
  if (num_processes() == 1) {
    return own.to(tensor.device());
  }
  return detail::stack_ranks(*core_, own, "gather").flatten(0, 1).to(tensor.device());
}

at::Tensor Collect::gather_for_metrics(const at::Tensor& rows) {
  at::Tensor own = detail::rows_on_cpu(rows);
  const detail::LoaderState* loader = core_->loaders.active();
  if (loader != nullptr) {
    detail::compare_reading(*core_, *loader);
  }
  if (loader != nullptr && loader->stand_in) {
    own = own.narrow(0, 0, 0); // its samples were gathered before
  } else if (loader != nullptr && loader->even && loader->last) {
    const int64_t batch = loader->rows.value_or(-1);
    nlohmann::json wrong;
    if (own.size(0) != batch) {
      wrong = std::to_string(own.size(0)) + " samples for a batch of " + std::to_string(batch);
    }
    const auto all = communicator()->all_gather_object(wrong, "gather_for_metrics");
    for (size_t rank = 0; rank < all.size(); ++rank) {
      if (!all[rank].is_null()) {
        throw InputError(
            "accelerator::gather_for_metrics",
            "rank " + std::to_string(rank) + " has " + all[rank].get<std::string>() +
                ", some of them repeated",
            "one value per sample of the batch",
            "use gather() for values that are not one per sample, or even_batches=false");
      }
    }
    own = own.narrow(0, 0, batch - loader->repeated);
  }
  if (num_processes() > 1) {
    own = communicator()->all_gather_rows(own, "gather_for_metrics");
  }
  return own.to(rows.device());
}

at::Tensor Collect::reduce(const at::Tensor& tensor, ReduceOp op, double scale) {
  at::Tensor result = tensor.detach().cpu().clone(at::MemoryFormat::Contiguous);
  const bool widen = scale != 1 && result.is_floating_point() && result.element_size() == 2;
  if (widen) {
    result = result.to(at::kFloat); // rounded once, after scaling
  }
  if (num_processes() > 1) {
    detail::check_form_in_debug(*core_, "reduce", result);
    communicator()->all_reduce(result, op, "reduce");
  }
  if (scale != 1) {
    result = result * scale;
  }
  return result.to(tensor.device(), widen ? tensor.scalar_type() : result.scalar_type());
}

void detail::reduce_in_place(AcceleratorCore& core, Metric& metric) {
  const int ranks = core.run.communicator()->world_size();
  if (ranks == 1) {
    return;
  }
  const char* where = "reduce(metric)";
  const at::Tensor state = metric.state().contiguous();
  if (metric.state_is_sum()) {
    check_form_in_debug(core, where, state);
    core.run.communicator()->all_reduce(state, ReduceOp::SUM, where);
    metric.set_state(state);
    return;
  }
  const at::Tensor all = stack_ranks(core, state, where);
  metric.set_state(all[0]);
  for (int rank = 1; rank < ranks; ++rank) {
    metric.merge_state(all[rank]);
  }
}

at::Tensor Collect::broadcast(at::Tensor tensor, int from) {
  if (num_processes() == 1 && from == 0) {
    return tensor;
  }
  const at::Tensor target = tensor.detach();
  const at::Tensor sent = target.cpu().contiguous();
  detail::check_form_in_debug(*core_, "broadcast", sent, " from rank " + std::to_string(from));
  communicator()->broadcast(sent, from, "broadcast");
  if (!sent.is_same(target) && sent.data_ptr() != target.data_ptr()) {
    target.copy_(sent);
  }
  return tensor;
}

at::Tensor Collect::pad_across_processes(const at::Tensor& tensor, int64_t dim, double pad_index,
                                         bool pad_first) {
  const char* where = "pad_across_processes";
  const auto all = gather_object(tensor.sizes().vec());
  const auto other =
      std::ranges::find_if(all, [&](const auto& s) { return s.size() != all[0].size(); });
  if (other != all.end()) {
    throw InputError(std::string("accelerator::") + where,
                     "rank " + std::to_string(other - all.begin()) + " has sizes " + other->dump() +
                         ", rank 0 has " + all[0].dump(),
                     "tensors with the same number of dimensions on all ranks");
  }
  const int64_t at_dim = dim < 0 ? dim + tensor.dim() : dim;
  if (at_dim < 0 || at_dim >= tensor.dim()) {
    return tensor.detach();
  }
  int64_t largest = 0;
  for (const auto& sizes : all) {
    largest = std::max(largest, sizes[static_cast<size_t>(at_dim)].get<int64_t>());
  }
  const int64_t own = tensor.size(at_dim);
  auto sizes = tensor.sizes().vec();
  sizes[static_cast<size_t>(at_dim)] = largest;
  at::Tensor padded = at::full(sizes, pad_index, tensor.options());
  padded.narrow(at_dim, pad_first ? largest - own : 0, own).copy_(tensor.detach());
  return padded;
}

nlohmann::json Collect::broadcast_object(const nlohmann::json& value, int from) {
  std::vector<uint8_t> own;
  if (process_index() == from) {
    own = nlohmann::json::to_cbor(value); // text has no NaN
  }
  const at::Tensor bytes = detail::broadcast_bytes(
      *communicator(), at::from_blob(own.data(), {static_cast<int64_t>(own.size())}, at::kByte),
      from, "broadcast_object");
  const auto* first = bytes.const_data_ptr<uint8_t>();
  return nlohmann::json::from_cbor(first, first + bytes.numel());
}

std::vector<nlohmann::json> Collect::gather_object(const nlohmann::json& value) {
  std::vector<uint8_t> bytes = nlohmann::json::to_cbor(value);
  const auto length = static_cast<int64_t>(bytes.size());
  const at::Tensor lengths = gather(at::tensor({length}, at::kLong));
  const at::Tensor own = at::from_blob(bytes.data(), {length}, at::kByte);
  const at::Tensor all =
      num_processes() == 1 ? own : communicator()->all_gather_rows(own, "gather_object");
  std::vector<nlohmann::json> values;
  const auto* next = all.const_data_ptr<uint8_t>();
  for (int rank = 0; rank < num_processes(); ++rank) {
    const auto* end = next + lengths[rank].item<int64_t>();
    values.push_back(nlohmann::json::from_cbor(next, end));
    next = end;
  }
  return values;
}

std::pair<int64_t, int64_t> Collect::split_between_processes(int64_t count) const {
  const int64_t each = count / num_processes();
  const int64_t more = count % num_processes();
  const int64_t rank = process_index();
  const int64_t begin = rank * each + std::min(rank, more);
  return {begin, begin + each + (rank < more ? 1 : 0)};
}

at::Tensor Collect::split_between_processes(const at::Tensor& rows, bool apply_padding) const {
  if (rows.dim() == 0) {
    throw InputError("accelerator::split_between_processes", "the tensor has no dimension",
                     "a tensor with dimension 0");
  }
  const auto [begin, end] = split_between_processes(rows.size(0));
  at::Tensor part = rows.narrow(0, begin, end - begin);
  const int64_t missing = (rows.size(0) + num_processes() - 1) / num_processes() - part.size(0);
  if (apply_padding && missing > 0) {
    const int64_t last = part.size(0) > 0 ? end - 1 : rows.size(0) - 1;
    auto sizes = rows.sizes().vec();
    sizes[0] = missing;
    part = at::cat({part, rows.narrow(0, last, 1).expand(sizes)});
  }
  return part;
}

void Collect::take_turns(bool first, const char* name, const std::function<void()>& body) {
  for (const bool runs_first : {true, false}) {
    detail::on_every_rank(*communicator(), std::string("accelerator::") + name, [&] {
      if (first == runs_first) {
        body();
      }
      return nullptr;
    });
  }
}

void Collect::set_trigger() { triggered_ = true; }

bool Collect::check_trigger() {
  const at::Tensor flag = at::tensor({triggered_ ? 1 : 0}, at::kInt);
  triggered_ = false;
  if (num_processes() > 1) {
    communicator()->all_reduce(flag, ReduceOp::MAX, "check_trigger");
  }
  return flag.item<int32_t>() != 0;
}

void Collect::wait_for_everyone() { communicator()->barrier("wait_for_everyone"); }

void Collect::print(std::string_view line) const { print(std::cout, line); }

void Collect::print(std::ostream& out, std::string_view line) const {
  if (is_main_process()) {
    out << line << std::endl; // flushed: ranks' output is often piped
  }
}

} // namespace hasten
