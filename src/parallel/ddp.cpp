#include "hasten/parallel/ddp.h"

#include <ATen/ATen.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <unordered_set>

#include "hasten/base/error.h"

namespace hasten {

namespace detail {

FlatLayout::NamedParameters unique_tensors(
    const torch::OrderedDict<std::string, at::Tensor>& named) {
  std::unordered_set<const void*> seen;
  FlatLayout::NamedParameters unique;
  for (const auto& item : named) {
    if (item.value().defined() &&
        seen.insert(item.value().unsafeGetTensorImpl()).second) {
      unique.emplace_back(item.key(), item.value());
    }
  }
  return unique;
}

} // namespace detail

Ddp::Ddp(
    std::shared_ptr<Communicator> communicator,
    std::shared_ptr<torch::nn::Module> module,
    DdpOptions options)
    : communicator_(std::move(communicator)),
      module_(std::move(module)),
      options_(options),
      parameters_(detail::unique_tensors(module_->named_parameters())),
      module_buffers_(detail::unique_tensors(module_->named_buffers())),
      gradients_((verify_and_broadcast(), FlatLayout(parameters_))) {
  if (!(options_.bucket_cap_mb > 0) || !(options_.first_bucket_mb > 0)) {
    throw InputError(
        "parallel::Ddp",
        "bucket_cap_mb=" + std::to_string(options_.bucket_cap_mb) +
            ", first_bucket_mb=" + std::to_string(options_.first_bucket_mb),
        "both above 0");
  }
  make_buckets();
  const auto& slots = gradients_.layout().slots();
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    hooks_.push_back(
        add_grad_hook(slots[slot].parameter, [this, slot](const at::Tensor&) {
          gradient_ready(static_cast<int64_t>(slot));
        }));
  }
}

void Ddp::make_buckets() {
  const FlatLayout& layout = gradients_.layout();
  bucket_of_.resize(layout.slots().size());
  double cap_mb = options_.first_bucket_mb;
  for (size_t g = 0; g < layout.groups().size(); ++g) {
    const FlatGroup& group = layout.groups()[g];
    const auto bytes = static_cast<double>(c10::elementSize(group.dtype));
    int64_t first = group.first_slot;
    int64_t begin = 0;
    for (int64_t slot = first; slot < group.last_slot; ++slot) {
      const bool last = slot + 1 == group.last_slot;
      const int64_t end =
          last ? group.numel
               : layout.slots()[static_cast<size_t>(slot) + 1].offset;
      bucket_of_[static_cast<size_t>(slot)] =
          static_cast<int64_t>(buckets_.size());
      const double mb = static_cast<double>(end - begin) * bytes / (1 << 20);
      if (last || mb >= cap_mb) {
        buckets_.push_back(
            {gradients_.buffer(static_cast<int64_t>(g))
                 .narrow(0, begin, end - begin),
             first,
             slot + 1,
             0});
        first = slot + 1;
        begin = end;
        cap_mb = options_.bucket_cap_mb;
      }
    }
  }
}

std::vector<int64_t> Ddp::bucket_sizes() const {
  std::vector<int64_t> sizes;
  for (const Bucket& bucket : buckets_) {
    sizes.push_back(bucket.range.numel());
  }
  return sizes;
}

void Ddp::begin(bool keep, bool in_place) {
  for (const auto& [name, parameter] : parameters_) {
    if (parameter.requires_grad() && gradients_.layout().find(parameter) < 0) {
      throw InputError(
          "parallel::Ddp",
          "parameter \"" + name + "\" was unfrozen after it was prepared",
          "the trainable parameters of that time",
          "call requires_grad_(true) before prepare()");
    }
  }
  for (GradHook& hook : hooks_) {
    hook.ensure_installed();
  }
  gradients_.install();
  final_ = false;
  aside_.clear();
  carried_ = keep || (!in_place && !gradients_.all_zero());
  foreign_ = foreign_ && !gradients_.all_zero();
  if (carried_) {
    set_aside();
  }
  begun_ = true;
}

// Note [Set aside]
// Two things must not be summed over ranks or scaled with this window's weight:
// gradients that nobody zeroed before the window, and a sum that is final when
// another backward of its window comes. Both wait in a copy while the buffers,
// zeroed, take the new sum, and are added to it at the end. The views stay where
// they are.
void Ddp::set_aside() {
  at::NoGradGuard no_grad;
  aside_.clear();
  for (size_t g = 0; g < gradients_.layout().groups().size(); ++g) {
    aside_.push_back(gradients_.buffer(static_cast<int64_t>(g)).clone());
  }
  gradients_.zero_();
}

void Ddp::start_backward(bool reduce, bool hold) {
  if (final_) {
    set_aside();
    final_ = false;
  }
  gradients_.install();
  gradients_.mark_written();
  std::lock_guard lock(mutex_);
  in_backward_ = true;
  // A rank alone has its sum already: nothing to wait for, nothing to copy.
  reducing_ = reduce && communicator_->world_size() > 1;
  hold_ = hold;
  next_bucket_ = 0;
  overlapped_ = 0;
  handles_.clear();
  for (Bucket& bucket : buckets_) {
    bucket.pending = bucket.last_slot - bucket.first_slot;
  }
}

void Ddp::gradient_ready(int64_t slot) {
  std::lock_guard lock(mutex_);
  if (!in_backward_) {
    if (!begun_) {
      foreign_ = true; // the user's own; harmless unless it is stepped with
      gradients_.mark_written();
      return;
    }
    throw InputError(
        "parallel::Ddp",
        "loss.backward() inside a window reached parameter \"" +
            gradients_.layout().slots()[static_cast<size_t>(slot)].name + "\"",
        "accelerator.backward(loss), which weighs the loss",
        "use that, or torch::autograd::grad for a gradient of your own");
  }
  if (!reducing_) {
    return;
  }
  gradients_.install_slot(slot);
  Bucket& bucket =
      buckets_[static_cast<size_t>(bucket_of_[static_cast<size_t>(slot)])];
  if (--bucket.pending == 0 && !hold_) {
    launch_ready_buckets(false);
  }
}

// In layout order only, so that every rank's group sees one sequence. The mutex
// is held.
void Ddp::launch_ready_buckets(bool all) {
  while (next_bucket_ < buckets_.size() &&
         (all || buckets_[next_bucket_].pending == 0)) {
    handles_.push_back(communicator_->all_reduce_async(
        buckets_[next_bucket_].range,
        ReduceOp::sum,
        "gradient bucket " + std::to_string(next_bucket_)));
    ++next_bucket_;
    overlapped_ += !all;
  }
}

void Ddp::finish_backward() {
  std::lock_guard lock(mutex_);
  in_backward_ = false;
  gradients_.install(); // copies in what was replaced meanwhile
  if (reducing_) {
    launch_ready_buckets(true);
  }
}

void Ddp::wait() {
  for (CommHandle& handle : handles_) {
    handle.wait();
  }
  handles_.clear();
  reducing_ = false;
}

void Ddp::finish(double factor) {
  wait();
  at::NoGradGuard no_grad;
  for (size_t g = 0; g < gradients_.layout().groups().size(); ++g) {
    at::Tensor buffer = gradients_.buffer(static_cast<int64_t>(g));
    if (factor != 1.0) {
      buffer.mul_(factor);
    }
    if (!aside_.empty()) {
      buffer.add_(aside_[g]);
    }
  }
  aside_.clear();
  gradients_.mark_written();
  final_ = true;
  begun_ = false;
  if (options_.broadcast_buffers && communicator_->world_size() > 1) {
    std::vector<CommHandle> handles;
    for (auto& [name, buffer] : module_buffers_) {
      if (buffer.is_floating_point()) {
        handles.push_back(
            communicator_->broadcast_async(buffer, 0, "buffer " + name));
      }
    }
    for (CommHandle& handle : handles) {
      handle.wait();
    }
  }
}

bool Ddp::has_foreign_gradients() {
  foreign_ = foreign_ && !gradients_.cleared();
  return foreign_;
}

void Ddp::swap_aside() {
  at::NoGradGuard no_grad;
  for (size_t g = 0; g < aside_.size(); ++g) {
    at::Tensor buffer = gradients_.buffer(static_cast<int64_t>(g));
    const at::Tensor kept = buffer.clone();
    buffer.copy_(aside_[g]);
    aside_[g].copy_(kept);
  }
}

void Ddp::drop_aside() { aside_.clear(); }

void Ddp::cancel() noexcept {
  std::lock_guard lock(mutex_);
  in_backward_ = false;
  reducing_ = false;
  handles_.clear();
  aside_.clear();
  final_ = false;
  begun_ = false;
  gradients_.zero_();
}

} // namespace hasten
