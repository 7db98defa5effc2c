#include "hasten/parallel/ddp.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "module_buffers.h"
#include "verify.h"

namespace hasten {

Ddp::Ddp(std::shared_ptr<Communicator> communicator, std::shared_ptr<torch::nn::Module> module,
         DdpOptions options)
    : communicator_(std::move(communicator)),
      alone_(communicator_->world_size() == 1),
      module_(std::move(module)),
      options_(options),
      parameters_(detail::unique_tensors(module_->named_parameters())),
      module_buffers_(detail::unique_tensors(module_->named_buffers())),
      gradients_((detail::verify_and_broadcast(*communicator_, parameters_, module_buffers_),
                  FlatLayout(parameters_)),
                 std::bind_front(&Communicator::allocate_tensor, communicator_)) {
  if (!(options_.bucket_cap_mb > 0) || !(options_.first_bucket_mb > 0)) {
    throw InputError("parallel::Ddp",
                     "bucket_cap_mb=" + std::to_string(options_.bucket_cap_mb) +
                         ", first_bucket_mb=" + std::to_string(options_.first_bucket_mb),
                     "both above 0");
  }
  for (const auto& visited : module_->modules()) {
    const auto* single = dynamic_cast<const torch::nn::EmbeddingImpl*>(visited.get());
    const auto* bag = dynamic_cast<const torch::nn::EmbeddingBagImpl*>(visited.get());
    const bool sparse =
        (single && single->options.sparse()) || (bag != nullptr && bag->options.sparse());
    const int64_t slot =
        sparse ? gradients_.layout().find(single ? single->weight : bag->weight) : -1;
    if (slot >= 0) {
      gradients_.leave_sparse(slot);
    }
  }
  make_buckets();
  buffer_versions_ = detail::versions_of(module_buffers_);
  const auto& slots = gradients_.layout().slots();
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    hooks_.emplace_back(slots[slot].parameter, [this, slot](const at::Tensor&) {
      gradient_ready(static_cast<int64_t>(slot));
    });
  }
}

// Each group has one open bucket, to which parameters are added in order. Buckets are in the order
// in which their last gradients are complete.
void Ddp::make_buckets() {
  const FlatLayout& layout = gradients_.layout();
  std::vector<Bucket> open(layout.groups().size()); // [group]
  std::vector<int64_t> begin(open.size(), 0); // [group] of the open bucket, in elements
  buckets_.clear();
  bucket_of_.assign(layout.slots().size(), 0);
  const auto close = [&](size_t g) {
    Bucket bucket = std::exchange(open[g], {});
    for (const int64_t slot : bucket.slots) {
      bucket_of_[static_cast<size_t>(slot)] = buckets_.size();
    }
    if (!alone_) {
      bucket.range = gradients_.buffers()[g].narrow(0, begin[g], bucket.numel);
    }
    begin[g] += bucket.numel;
    buckets_.push_back(std::move(bucket));
  };
  std::vector<size_t> last_come; // groups, by their last slot
  for (const int64_t index : layout.order()) {
    const FlatSlot& slot = layout.slots()[static_cast<size_t>(index)];
    const auto g = static_cast<size_t>(slot.group);
    const at::ScalarType dtype = layout.groups()[g].dtype;
    const bool sparse = gradients_.leaves(index);
    if (sparse && !open[g].slots.empty()) {
      std::erase(last_come, g);
      close(g);
    }
    open[g].sparse = sparse;
    open[g].slots.push_back(index);
    open[g].numel += detail::flat_padded(slot.numel, dtype);
    const double mb = static_cast<double>(open[g].numel) *
                      static_cast<double>(c10::elementSize(dtype)) / (1 << 20);
    std::erase(last_come, g);
    if (sparse || mb >= (buckets_.empty() ? options_.first_bucket_mb : options_.bucket_cap_mb)) {
      close(g);
    } else {
      last_come.push_back(g);
    }
  }
  std::for_each(last_come.begin(), last_come.end(), close);
}

std::vector<int64_t> Ddp::bucket_sizes() const { return mapped(buckets_, &Bucket::numel); }

void Ddp::check_parameters() const {
  for (const auto& [name, parameter] : parameters_) {
    const int64_t slot = gradients_.layout().find(parameter);
    if (slot < 0) {
      if (parameter.requires_grad()) {
        throw InputError(
            "parallel::Ddp", "parameter \"" + name + "\" was unfrozen after it was prepared",
            "the same trainable parameters", "call prepare() again after requires_grad_(true)");
      }
      continue;
    }
    if (!gradients_.layout().fits(slot)) {
      const FlatSlot& was = gradients_.layout().slots()[static_cast<size_t>(slot)];
      const FlatGroup& group = gradients_.layout().groups()[static_cast<size_t>(was.group)];
      throw InputError(
          "parallel::Ddp",
          c10::str("parameter \"", name, "\" is ", parameter.sizes(), " ", parameter.scalar_type(),
                   " on ", parameter.device(), " now, and was ", at::IntArrayRef(was.sizes), " ",
                   was.dtype, " on ", group.device, " when it was prepared"),
          "the same shape, dtype and device", "call prepare() again after converting or moving it");
    }
  }
}

void Ddp::register_comm_hook(std::shared_ptr<CommHook> hook) {
  if (begun_) {
    throw InputError("parallel::register_comm_hook", "an accumulation window is open",
                     "a call between windows");
  }
  const std::string mine = hook ? hook->description() : "none";
  const auto all = communicator_->all_gather_object(mine, "communication hook");
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] != all[0]) {
      throw InputError("parallel::register_comm_hook",
                       "rank " + std::to_string(rank) + " has " + all[rank].get<std::string>() +
                           ", rank 0 has " + all[0].get<std::string>(),
                       "the same hook with the same settings on every rank");
    }
  }
  hook_ = std::move(hook);
}

// Note [Bucket order]
// Buckets follow the order in which rank 0's gradients were complete in the first reduced
// backward. All ranks get the order with that reduction and use it from their next sum on, so all
// switch at the same time. Gradients that rank 0 did not have come last. Only offsets change; slots
// keep their numbers.
void Ddp::use_learned_order() {
  if (alone_ || learned_.empty() || learned_in_use_) { // in LocalSGD buckets have no buffers
    return;
  }
  gradients_.reorder(learned_);
  make_buckets();
  learned_in_use_ = true;
}

// Note [A rank alone]
// Without peers nothing is sent, so gradients stay where autograd puts them, as in
// a plain loop: no copy into the buffers and no memory for them. finish()
// multiplies them there. Only earlier gradients that must be kept go through the buffers.
void Ddp::begin(bool in_place) {
  apply_pending_factor();
  check_parameters();
  for (GradHook& hook : hooks_) {
    hook.ensure_installed();
  }
  use_learned_order();
  final_ = further_ = false;
  earlier_gradients_.clear();
  used_.assign(hooks_.size(), 0);
  defined_.clear();
  for (const FlatSlot& slot : gradients_.layout().slots()) {
    defined_.push_back(slot.parameter.grad().defined() ? 1 : 0);
  }
  if (gradients_.release()) {
    foreign_ = false;
    defined_.assign(hooks_.size(), 0);
  } else if (alone_ && (in_place || gradients_.cleared(false))) { // Note [A rank alone]
    foreign_ = foreign_ && in_place && !gradients_.cleared();
  } else {
    gradients_.install();
    const bool zero = gradients_.all_zero() &&
                      std::ranges::none_of(gradients_.layout().slots(), [](const FlatSlot& slot) {
                        return slot.parameter.grad().defined() && slot.parameter.grad().is_sparse();
                      });
    foreign_ = foreign_ && !zero;
    if (!in_place && !zero) {
      keep_earlier_gradients();
    }
    if (!in_place) {
      gradients_.reset();
    }
  }
  begun_ = true;
}

void Ddp::set_local(bool local) {
  if (begun_) {
    throw InputError("parallel::Ddp", "an accumulation window is open", "a call between windows");
  }
  alone_ = local || communicator_->world_size() == 1;
}

// Note [Earlier gradients]
// Two kinds of gradients must not be summed over ranks or scaled with this window's weight: those
// that were not zeroed before the window, and a sum that is already final when another backward of
// its window comes. Both are copied. The buffers then count as zero and take the new sum, to which
// the copy is added at the end.
void Ddp::keep_earlier_gradients() {
  at::NoGradGuard no_grad;
  gradients_.install(true);
  earlier_gradients_ =
      mapped(gradients_.buffers(), [](const at::Tensor& buffer) { return buffer.clone(); });
}

void Ddp::finish(double factor, const DdpRanks& ranks, bool defer) {
  wait();
  at::NoGradGuard no_grad;
  if (prescale_) {
    factor = 1;
    prescale_.reset();
  }
  pending_factor_ = factor;
  if (!earlier_gradients_.empty()) {
    gradients_.install(true);
  }
  if (!defer || !earlier_gradients_.empty()) {
    apply_pending_factor();
  }
  for (size_t g = 0; g < earlier_gradients_.size(); ++g) {
    gradients_.buffers()[g].add_(earlier_gradients_[g]);
  }
  earlier_gradients_.clear();
  if (!alone_) {
    gradients_.mark_written();
  }
  for (size_t slot = 0; slot < used_.size(); ++slot) {
    at::Tensor& grad = gradients_.layout().slots()[slot].parameter.mutable_grad();
    if (grad.defined() && grad.is_sparse()) {
      grad = grad.coalesce();
    }
    if (!used_[slot] && !defined_[slot]) { // as without a backward
      grad.reset();
    }
  }
  final_ = true;
  begun_ = false;
  if (buffers_changed_ || evens_out_buffers()) {
    sync_buffers(ranks);
  }
}

void Ddp::apply_pending_factor() {
  const double factor = std::exchange(pending_factor_, 1);
  if (factor == 1) {
    return;
  }
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> gradients;
  bool in_place = true;
  for (size_t slot = 0; slot < hooks_.size(); ++slot) {
    const at::Tensor& gradient = gradients_.layout().slots()[slot].parameter.grad();
    in_place = in_place && gradients_.installed(static_cast<int64_t>(slot));
    if (gradient.defined() && gradient.is_sparse()) {
      at::Tensor(gradient).mul_(factor);
    } else if (gradient.defined()) {
      gradients.push_back(gradient);
    }
  }
  if (in_place) { // few large tensors instead of many
    gradients = gradients_.buffers();
  }
  if (!gradients.empty()) {
    at::_foreach_mul_(gradients, factor);
  }
}

bool Ddp::evens_out_buffers(bool any_dtype) const {
  return !alone_ && detail::to_even_out(module_buffers_, options_.broadcast_buffers, any_dtype);
}

void Ddp::sync_buffers(const DdpRanks& ranks) {
  if (alone_ || module_buffers_.empty() || options_.broadcast_buffers == BroadcastBuffers::off) {
    return;
  }
  detail::even_out_buffers(*communicator_, module_buffers_, options_.broadcast_buffers, ranks);
  buffer_versions_ = detail::versions_of(module_buffers_);
}

bool Ddp::has_foreign_gradients() {
  foreign_ = foreign_ && !gradients_.cleared();
  return foreign_;
}

void Ddp::cancel() noexcept {
  std::lock_guard lock(mutex_);
  in_backward_ = reducing_ = false;
  operations_.clear();
  agreement_ = order_ = at::Tensor();
  backward_ = {};
  prescale_.reset();
  violation_.clear();
  earlier_gradients_.clear();
  pending_factor_ = 1;
  begun_ = final_ = false;
  gradients_.open_places(false);
  gradients_.reset();
}

} // namespace hasten
