#include "hasten/parallel/fully_shard.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "hasten/base/error.h"
#include "module_buffers.h"
#include "shard_schedule.h"

namespace hasten {

ForwardScope::ForwardScope(const std::shared_ptr<detail::ShardSchedule>& schedule)
    : schedule_(schedule),
      forward_(schedule->open_forward()),
      exceptions_(std::uncaught_exceptions()) {}

ForwardScope::~ForwardScope() {
  const auto schedule = schedule_.lock();
  if (!schedule) {
    return;
  }
  try {
    schedule->close_forward(forward_, std::uncaught_exceptions() > exceptions_);
  } catch (...) { // the group has failed; its next operation reports it
  }
}

FullyShard::~FullyShard() {
  schedule_->cancel();
  for (const auto& unwrap : unwrap_) {
    unwrap();
  }
}

bool FullyShard::unshard() {
  const bool idle = schedule_->idle();
  if (idle) {
    schedule_->unshard();
  }
  return idle;
}

bool FullyShard::reshard() {
  const bool idle = schedule_->idle();
  if (idle) {
    schedule_->reshard();
  }
  return idle;
}

[[noreturn]] static void throw_changed(const std::string& name) {
  throw InputError(
      "parallel::FullyShard",
      "parameter \"" + name + "\" was replaced, moved or converted after it was sharded",
      "the same parameters",
      "assign values with copy_() or load_parameter(); convert or move the "
      "model before it is sharded");
}

static void check_replaced(const torch::nn::Module& module,
                           const std::vector<ShardedParameter>& parameters) {
  FlatLayout::NamedParameters known;
  for (const ShardedParameter& entry : parameters) {
    known.emplace_back(entry.name, entry.parameter);
  }
  if (const auto name = detail::replaced_parameter(module, known); !name.empty()) {
    throw_changed(name);
  }
}

void FullyShard::check_parameters() const {
  for (const auto& unit : schedule_->units()) {
    if (const auto name = unit->changed_parameter(); !name.empty()) {
      throw_changed(name);
    }
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (parameters_[i].parameter.requires_grad() && !tensor_of(i).trainable) {
      throw InputError(
          "parallel::FullyShard",
          "parameter \"" + parameters_[i].name + "\" was unfrozen after it was sharded",
          "the same trainable parameters", "call prepare() again after requires_grad_(true)");
    }
  }
}

void FullyShard::begin() {
  schedule_->settle();
  check_parameters();
  for (GradHook& hook : hooks_) {
    hook.ensure_installed();
  }
  agreed_ = {};
  agreement_.reset();
  open_sum();
}

// Earlier gradients, or a sum that is already final when another backward of its window comes, are
// shards. They are kept apart: unsharded gradients need their place, and they must not be summed
// again or scaled.
void FullyShard::open_sum() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    at::Tensor& grad = parameters_[i].parameter.mutable_grad();
    detail::ShardTensor& tensor = tensor_of(i);
    const at::Tensor& flat = tensor.flat->gradient;
    const bool shared = grad.defined() && flat.defined() && grad.is_alias_of(flat);
    tensor.earlier = shared ? grad.detach().clone() : grad.defined() ? grad.detach() : at::Tensor();
    grad.reset();
  }
  for (const auto& unit : schedule_->units()) {
    unit->restart_sum();
  }
  schedule_->open_window();
  final_ = false;
  begun_ = true;
}

void FullyShard::start_backward(bool reduce) {
  if (!begun_ && !final_) {
    throw InputError("parallel::FullyShard", "start_backward() without a sum",
                     "a call of begin() before the forward");
  }
  if (final_) {
    open_sum();
  }
  schedule_->open_backward(reduce);
}

at::Tensor FullyShard::reserve_gradient_place(const at::Tensor& parameter) {
  const auto found = index_.find(parameter.unsafeGetTensorImpl());
  if (found == index_.end() || !schedule_->in_backward() || parameter.grad().defined()) {
    return {};
  }
  const size_t i = found->second;
  return schedule_->units()[parameters_[i].unit]->reserve_gradient_place(tensor_of(i));
}

void FullyShard::gradient_ready(size_t parameter) {
  const ShardedParameter& entry = parameters_[parameter];
  if (entry.parameter.grad().is_sparse()) {
    entry.parameter.mutable_grad().reset();
    throw InputError(
        "parallel::FullyShard", "the gradient of parameter \"" + entry.name + "\" is sparse",
        "dense gradients", "build the embedding with sparse=false, or use strategy=ddp");
  }
  const bool whole =
      schedule_->units()[entry.unit]->state() == detail::ShardUnit::State::unsharded &&
      entry.parameter.grad().sizes() == at::IntArrayRef(entry.sizes);
  if (!schedule_->in_backward() || !whole) {
    entry.parameter.mutable_grad().reset();
    throw InputError(
        "parallel::FullyShard",
        "a gradient reached parameter \"" + entry.name + "\" " +
            (whole ? "outside start_backward() and finish_backward()"
                   : "while it is sharded, because it was used outside its block"),
        whole
            ? "a backward between the two"
            : "blocks that are called through call_block, and parameters used only in their block",
        whole
            ? "use accelerator.backward(loss); for another model's loss freeze this model or detach()"
            : "do not shard this block; its parameters then belong to the root unit");
  }
  if (entry.parameter.grad().requires_grad()) {
    throw InputError("parallel::FullyShard",
                     "the gradient of parameter \"" + entry.name + "\" was made with create_graph",
                     "a gradient without a graph, because it is summed over ranks");
  }
  detail::ShardUnit::take(tensor_of(parameter));
}

void FullyShard::finish_backward() {
  const bool last = schedule_->is_last();
  schedule_->close_backward();
  if (last) {
    start_agreement();
  }
}

// Note [Agreement of shards]
// At the end of a sum one small all-reduce (maximum of bytes) exchanges which parameters got a
// gradient, so that a parameter that no rank used has none on any rank; whether a buffer was
// written; and a hash of the sequence of gathers and reductions, with its complement. If all
// hashes are equal, the two maxima add up to 255 in each byte.
void FullyShard::start_agreement() {
  if (communicator_->world_size() == 1 && replicas() == nullptr) {
    return;
  }
  const auto count = static_cast<int64_t>(parameters_.size()) + 1;
  agreement_ = at::zeros({count + 16}, at::kByte);
  auto* bytes = agreement_.mutable_data_ptr<uint8_t>();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    bytes[i] = tensor_of(i).used;
  }
  bytes[count - 1] = detail::versions_of(module_buffers_) != buffer_versions_;
  if (communicator_->world_size() == 1) {
    return; // settle_agreement() exchanges with the replicas
  }
  for (int64_t i = 0; i < 8; ++i) {
    const auto byte = static_cast<uint8_t>(schedule_->fingerprint() >> (8 * i) & 0xff);
    bytes[count + i] = byte;
    bytes[count + 8 + i] = static_cast<uint8_t>(255 - byte);
  }
  agreed_ = reductions_->all_reduce_async(agreement_, ReduceOp::MAX, "parameters in use");
}

void FullyShard::settle_agreement() {
  if (agreed_) {
    agreed_.wait();
    agreed_ = {};
    const auto count = static_cast<int64_t>(parameters_.size()) + 1;
    const auto* bytes = agreement_.const_data_ptr<uint8_t>();
    for (int64_t i = count; i < count + 8; ++i) {
      if (bytes[i] + bytes[i + 8] != 255) {
        throw CommunicationError(
            "parallel::FullyShard",
            "ranks gathered or reduced different units, or in a different order",
            "the same blocks in the same order on every rank, also in recomputations",
            "look for a part of the model's forward that depends on the rank or its data");
      }
    }
  }
  if (!agreement_.defined()) {
    return;
  }
  if (replicas() != nullptr) {
    replicas()->all_reduce(agreement_, ReduceOp::MAX, "parameters in use");
  }
  const auto* bytes = agreement_.const_data_ptr<uint8_t>();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    tensor_of(i).used = bytes[i] != 0;
  }
  buffers_changed_ = bytes[parameters_.size()] != 0;
  agreement_.reset();
}

void FullyShard::wait() {
  schedule_->wait();
  settle_agreement();
}

void FullyShard::finish(double factor, const DdpRanks& ranks) {
  wait();
  const at::NoGradGuard no_grad;
  schedule_->close_window();
  const auto& units = schedule_->units();
  if (std::ranges::any_of(places_,
                          [](auto* tensor) { return tensor->trainable && !tensor->used; })) {
    check_replaced(*module_, parameters_);
  }
  for (const auto& unit : units) {
    unit->scale_gradients(factor);
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    detail::ShardTensor& tensor = tensor_of(i);
    at::Tensor gradient =
        tensor.used ? units[parameters_[i].unit]->gradient_of(tensor) : at::Tensor();
    if (tensor.earlier.defined()) {
      gradient = gradient.defined() ? gradient.add_(tensor.earlier) : std::move(tensor.earlier);
      tensor.earlier.reset();
    }
    // Optimizer::zero_grad detaches in place, which views do not allow.
    parameters_[i].parameter.mutable_grad() = gradient.defined() ? gradient.detach() : gradient;
  }
  begun_ = false;
  final_ = true;
  if (std::exchange(buffers_changed_, false) || evens_out_buffers()) {
    sync_buffers(ranks);
  }
}

bool FullyShard::evens_out_buffers(bool any_dtype) const {
  return (communicator_->world_size() > 1 || replicas() != nullptr) &&
         detail::to_even_out(module_buffers_, options_.broadcast_buffers, any_dtype);
}

void FullyShard::sync_buffers(const DdpRanks& ranks) {
  if (module_buffers_.empty() || options_.broadcast_buffers == BroadcastBuffers::off) {
    return;
  }
  const bool together = replicas() != nullptr && options_.everyone;
  detail::even_out_buffers(together ? *options_.everyone : *communicator_, module_buffers_,
                           options_.broadcast_buffers, ranks);
  if (replicas() != nullptr && !together) {
    detail::even_out_buffers(*replicas(), module_buffers_, options_.broadcast_buffers, {});
  }
  buffer_versions_ = detail::versions_of(module_buffers_);
}

void FullyShard::set_local(bool local) {
  if (begun_) {
    throw InputError("parallel::FullyShard", "set_local() in the middle of a sum",
                     "a call before a sum or after its end");
  }
  local_ = local;
  schedule_->set_replicas(local ? nullptr : options_.replicas);
}

void FullyShard::close() noexcept {
  schedule_->close();
  reductions_->close();
}

void FullyShard::cancel() noexcept {
  schedule_->cancel();
  agreed_ = {};
  agreement_.reset();
  for (const auto& unit : schedule_->units()) {
    unit->restart_sum();
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    parameters_[i].parameter.mutable_grad().reset();
    tensor_of(i).earlier.reset();
  }
  begun_ = final_ = false;
}

} // namespace hasten
