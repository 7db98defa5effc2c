// The backward: starts buckets while it runs, and exchanges the agreement after it.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <unordered_set>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/parallel/ddp.h"
#include "module_buffers.h"
#include "sync_batch_norm_function.h"

namespace hasten {

namespace detail {

// Rows of the agreement.
enum AgreementRow { kUsed, kMissing, kFrozen, kDefined, kAgreementRows };

} // namespace detail

// Note [Sparse gradients]
// Every rank gets all ranks' rows and adds those of one index. If a rank's gradient is dense, as of tied
// weights, all sum dense ones, in `range`.
static void sum_rows(Communicator& communicator, FlatGradients& gradients, int64_t slot,
                     const at::Tensor& range, double factor) {
  const at::NoGradGuard no_grad;
  const FlatSlot& entry = gradients.layout().slots()[static_cast<size_t>(slot)];
  const std::string name = "gradient of " + entry.name;
  at::Tensor& grad = entry.parameter.mutable_grad();
  const at::Tensor dense = at::full({1}, grad.defined() && !grad.is_sparse(), at::kLong);
  communicator.all_reduce(dense, ReduceOp::MAX, "form of the " + name);
  if (dense.item<int64_t>() != 0) {
    gradients.install_slot(slot);
    communicator.all_reduce(range, ReduceOp::SUM, name);
    range.mul_(factor);
    return;
  }
  if (!grad.defined()) {
    grad = at::sparse_coo_tensor(entry.sizes, entry.parameter.options().layout(at::kSparse));
  }
  const at::Tensor own = grad.coalesce().to(flat_gradient_dtype(entry.dtype));
  const at::Tensor rows =
      communicator.all_gather_rows(own._indices().flatten().contiguous(), "rows of the " + name);
  const at::Tensor values =
      communicator.all_gather_rows(own._values().contiguous(), "values of the " + name);
  grad = at::sparse_coo_tensor(rows.unsqueeze(0), values, entry.sizes).coalesce();
  grad.mul_(factor);
}

// Gradients that this backward is expected to make. [slot]
std::vector<char> Ddp::awaited(const DdpBackward& backward) const {
  const auto& slots = gradients_.layout().slots();
  std::vector<char> waits(slots.size(), 1);
  if (!static_ready_.empty()) {
    waits = static_ready_;
  } else if (options_.find_unused_parameters && backward.loss.defined()) {
    waits = gradients_.layout().reachable(backward.loss);
  }
  for (size_t slot = 0; slot < slots.size(); ++slot) {
    waits[slot] = waits[slot] != 0 && slots[slot].parameter.requires_grad() ? 1 : 0;
  }
  return waits;
}

void Ddp::start_backward(bool reduce, DdpBackward backward) {
  if (final_) {
    apply_pending_factor();
    keep_earlier_gradients();
    gradients_.reset();
    final_ = false;
    further_ = true;
  }
  if (!alone_) {
    gradients_.mark_written();
  }
  gradients_.open_places(!alone_);
  std::lock_guard lock(mutex_);
  in_backward_ = true;
  reduce_ = reduce;
  reducing_ = reduce && !alone_;
  if (!reducing_) {
    return;
  }
  next_bucket_ = 0;
  report_ = {};
  operations_.clear();
  violation_.clear();
  prescale_.reset();
  waits_ = awaited(backward);
  backward.loss.reset(); // keeps no graph alive
  backward_ = std::move(backward);
  // Ranks that use other parameters would start a bucket before or after a layer's own operations.
  if (!syncs_statistics_ && (options_.find_unused_parameters || options_.static_graph)) {
    syncs_statistics_ = detail::has_sync_batch_norm(*module_);
  }
  backward_.hold = backward_.hold || syncs_statistics_.value_or(false);
  ready_.assign(waits_.size(), 0);
  if (learned_.empty()) {
    ready_order_.clear();
  }
  for (Bucket& bucket : buckets_) {
    bucket.pending = 0;
    for (const int64_t slot : bucket.slots) {
      const bool waits = waits_[static_cast<size_t>(slot)];
      bucket.pending += waits;
      if (!waits) {
        gradients_.install_slots({slot}); // zero, unless an earlier batch used it
      }
    }
  }
  if (!backward_.hold) {
    launch_ready_buckets(false);
  }
}

void Ddp::gradient_ready(int64_t slot) {
  const auto i = static_cast<size_t>(slot);
  const FlatSlot& entry = gradients_.layout().slots()[i];
  std::lock_guard lock(mutex_);
  if (!in_backward_) {
    if (!begun_) {
      foreign_ = true; // the user's own backward; harmless unless an optimizer uses it
      gradients_.mark_written();
      return;
    }
    throw InputError(
        "parallel::Ddp",
        "loss.backward(), or a loss of other models, reached parameter \"" + entry.name +
            "\", whose model is in the middle of a window",
        "accelerator.backward() of a loss that depends only on the models of its accumulate()",
        "use that, or torch::autograd::grad for your own gradients; for other models' losses freeze "
        "this model (requires_grad_(false), and back afterwards) or detach() its part");
  }
  if (entry.parameter.grad().requires_grad()) {
    throw InputError(
        "parallel::Ddp",
        "the gradient of parameter \"" + entry.name + "\" was made with create_graph",
        "a gradient without a graph, because it is summed in a buffer",
        "compute it by torch::autograd::grad(…, create_graph) and use the result in the loss");
  }
  const bool late = reducing_ && bucket_of_[i] < next_bucket_;
  if (late) {
    throw InputError("parallel::Ddp",
                     "parameter \"" + entry.name + "\" got a gradient after its bucket was sent",
                     options_.static_graph
                         ? "the parameters of the first backward (static_graph)"
                         : "one gradient per parameter and backward, and no parameter in "
                           "a part of the graph that is built during backward",
                     options_.static_graph ? "leave static_graph off" : "");
  }
  const at::Tensor& gradient = entry.parameter.grad();
  if (!alone_ && gradient.is_cpu()) { // else with the bucket's others
    gradients_.install_slots({slot});
  }
  used_[i] = 1;
  if (!reducing_ || ready_[i]) {
    return;
  }
  ready_[i] = 1;
  if (learned_.empty()) {
    ready_order_.push_back(slot);
  }
  if (waits_[i] && --buckets_[bucket_of_[i]].pending == 0 && !backward_.hold) {
    launch_ready_buckets(false);
  }
}

void Ddp::launch(size_t index) {
  Bucket& bucket = buckets_[index];
  if (bucket.sparse) {
    return; // wait() has more to exchange
  }
  if (!bucket.range.is_cpu()) { // one copy for all
    gradients_.install_slots(bucket.slots);
  }
  const at::NoGradGuard no_grad;
  const auto& slots = gradients_.layout().slots();
  const bool real = !bucket.range.is_complex(); // hooks and sums take no other numbers
  Operation operation;
  if (hook_) {
    if (backward_.factor && !prescale_) {
      prescale_ = backward_.factor();
    }
    if (prescale_.value_or(1) != 1) {
      bucket.range.mul_(*prescale_);
    }
  }
  if (hook_ && real) {
    GradientBucket gradients;
    gradients.index = static_cast<int64_t>(index);
    gradients.last = index + 1 == buckets_.size();
    gradients.buffer = bucket.range;
    for (const int64_t slot : bucket.slots) {
      gradients.gradients.push_back({slots[static_cast<size_t>(slot)].name, gradients_.view(slot)});
    }
    operation.started = Clock::now();
    operation.step = hook_->reduce(*communicator_, gradients);
  } else {
    operation.started = Clock::now();
    operation.handle =
        communicator_->all_reduce_async(real ? bucket.range : at::view_as_real(bucket.range),
                                        ReduceOp::SUM, "gradient bucket " + std::to_string(index));
  }
  report_.buckets += 1;
  report_.bytes += static_cast<int64_t>(bucket.range.nbytes());
  operations_.push_back(std::move(operation));
}

// Only in the buckets' order, so that every rank has the same sequence of operations. The caller
// holds the mutex.
void Ddp::launch_ready_buckets(bool all) {
  while (next_bucket_ < buckets_.size() && (all || buckets_[next_bucket_].pending == 0)) {
    launch(next_bucket_);
    report_.overlapped += !all && !buckets_[next_bucket_].sparse;
    ++next_bucket_;
  }
}

void Ddp::finish_backward() {
  std::lock_guard lock(mutex_);
  in_backward_ = false;
  gradients_.open_places(false);
  if (!alone_) {
    gradients_.install(); // zeros for missing gradients
  }
  if (reducing_) {
    launch_ready_buckets(true);
    check_static_graph();
    start_agreement();
  } else if (reduce_ && std::find(used_.begin(), used_.end(), 0) != used_.end()) {
    const std::string replaced = detail::replaced_parameter(*module_, parameters_);
    if (!replaced.empty()) {
      throw InputError(
          "parallel::Ddp",
          "parameter \"" + replaced + "\" was replaced by another tensor after prepare()",
          "the same parameters", "assign values with copy_(), or call prepare() afterwards");
    }
  }
}

void Ddp::check_static_graph() {
  const bool any = std::find(ready_.begin(), ready_.end(), 1) != ready_.end();
  if (!options_.static_graph || further_ || !any) {
    return;
  }
  if (static_ready_.empty()) {
    static_ready_ = ready_;
    return;
  }
  for (size_t slot = 0; slot < ready_.size(); ++slot) {
    if (ready_[slot] != static_ready_[slot]) {
      violation_ =
          "parameter \"" + gradients_.layout().slots()[slot].name +
          (ready_[slot] ? "\" has a gradient, and had none" : "\" has no gradient, and had one") +
          " in the first backward";
      return;
    }
  }
}

// Note [Agreement]
// After the buckets one small all-reduce (maximum of bytes) exchanges, per slot: whether a rank
// used the parameter in this window, misses its gradient, has it frozen, or had grad() defined
// before. The consequences are then equal on all ranks without further messages: an error, or
// which gradients are undefined at the end. One more byte says whether a module's buffer was
// written. Until the order of buckets is known, rank 0's order of gradients is sent, too.
void Ddp::start_agreement() {
  using namespace detail;
  const auto& slots = gradients_.layout().slots();
  const auto count = static_cast<int64_t>(slots.size());
  const auto send = [&](Work handle) {
    operations_.push_back({.handle = std::move(handle), .started = Clock::now()});
  };
  agreement_ = at::zeros({kAgreementRows * count + 1}, at::kByte);
  auto* rows = agreement_.mutable_data_ptr<uint8_t>();
  // A rank whose batch had no samples made no gradient at all; then it misses none.
  const bool strict = !options_.find_unused_parameters && !options_.static_graph && !further_ &&
                      std::find(used_.begin(), used_.end(), 1) != used_.end();
  missing_.clear();
  for (int64_t i = 0; i < count; ++i) {
    const auto slot = static_cast<size_t>(i);
    const bool trainable = slots[slot].parameter.requires_grad();
    rows[kUsed * count + i] = static_cast<uint8_t>(used_[slot]);
    rows[kMissing * count + i] = strict && trainable && !used_[slot];
    if (rows[kMissing * count + i] != 0) {
      missing_.push_back('"' + slots[slot].name + '"');
    }
    rows[kFrozen * count + i] = !trainable;
    rows[kDefined * count + i] = static_cast<uint8_t>(defined_[slot]);
  }
  rows[kAgreementRows * count] = detail::versions_of(module_buffers_) != buffer_versions_;
  send(communicator_->all_reduce_async(agreement_, ReduceOp::MAX, "parameters in use"));
  if (learned_.empty()) {
    order_ = at::zeros({count + 1}, at::kInt);
    if (communicator_->rank() == 0) {
      auto* values = order_.mutable_data_ptr<int32_t>();
      values[0] = static_cast<int32_t>(ready_order_.size());
      std::copy(ready_order_.begin(), ready_order_.end(), values + 1);
    }
    send(communicator_->broadcast_async(order_, 0, "bucket order"));
  }
}

void Ddp::wait() {
  if (operations_.empty()) {
    return;
  }
  const auto from = Clock::now();
  finish_hooks();
  for (Operation& operation : operations_) {
    if (operation.handle) {
      operation.handle.wait();
      const Clock::time_point ended = operation.handle.ended();
      // On a device it may still run.
      operation.ended = ended == Clock::time_point{} ? Clock::now() : ended;
    }
  }
  report_operations(from);
  operations_.clear();
  for (const Bucket& bucket : buckets_) {
    if (bucket.sparse) {
      sum_rows(*communicator_, gradients_, bucket.slots[0], bucket.range, prescale_.value_or(1));
    }
  }
  gradients_.mark_written();
  reducing_ = false;
  settle_agreement();
}

// Calls each hook in turn, so that the second messages of several buckets overlap.
void Ddp::finish_hooks() {
  at::NoGradGuard no_grad;
  for (bool more = true; more;) {
    more = false;
    for (Operation& operation : operations_) {
      if (operation.step && !operation.step()) {
        operation.step = nullptr;
        operation.ended = Clock::now();
      }
      more = more || operation.step;
    }
  }
}

void Ddp::report_operations(Clock::time_point waited_from) {
  using Seconds = std::chrono::duration<double>;
  report_.exposed_seconds = Seconds(Clock::now() - waited_from).count();
  Clock::time_point until{};
  double busy = 0;
  for (const Operation& operation : operations_) { // they started in this order
    const auto started = std::max(operation.started, until);
    if (operation.ended > started) {
      busy += Seconds(operation.ended - started).count();
      until = operation.ended;
    }
  }
  report_.communication_seconds = busy;
}

void Ddp::settle_agreement() {
  using namespace detail;
  const auto& slots = gradients_.layout().slots();
  const auto count = static_cast<int64_t>(slots.size());
  if (order_.defined()) {
    const auto* values = order_.const_data_ptr<int32_t>();
    if (values[0] > 0) {
      learned_.assign(values + 1, values + 1 + values[0]);
      const std::unordered_set<int64_t> seen(learned_.begin(), learned_.end());
      for (const int64_t slot : gradients_.layout().order()) {
        if (seen.count(slot) == 0) {
          learned_.push_back(slot);
        }
      }
    }
    order_ = at::Tensor();
  }
  if (!violation_.empty()) {
    throw InputError("parallel::Ddp", std::exchange(violation_, {}),
                     "the same parameters in every backward (static_graph)",
                     "leave static_graph off");
  }
  const at::Tensor agreed = std::exchange(agreement_, at::Tensor());
  const auto* rows = agreed.const_data_ptr<uint8_t>();
  bool missing = false;
  for (int64_t i = 0; i < count; ++i) {
    const auto slot = static_cast<size_t>(i);
    used_[slot] = static_cast<char>(rows[kUsed * count + i]);
    defined_[slot] = static_cast<char>(rows[kDefined * count + i]);
    missing = missing || rows[kMissing * count + i] != 0;
    if (rows[kFrozen * count + i] != 0 && (used_[slot] || rows[kMissing * count + i] != 0)) {
      throw InputError(
          "parallel::Ddp",
          "parameter \"" + slots[slot].name + "\" is frozen on some ranks and trainable on others",
          "the same on every rank", "set requires_grad equally on all ranks");
    }
  }
  if (missing) {
    throw_unused();
  }
  buffers_changed_ = rows[kAgreementRows * count] != 0;
}

void Ddp::throw_unused() {
  nlohmann::json mine = nlohmann::json::object();
  if (!missing_.empty()) {
    mine["unused"] = joined(first_items(missing_, 8));
    mine["replaced"] = detail::replaced_parameter(*module_, parameters_);
  }
  const auto all = communicator_->all_gather_object(mine, "unused parameters");
  std::string what;
  bool replaced = false;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].contains("unused")) {
      what += (what.empty() ? "" : "; ") + ("rank " + std::to_string(rank)) +
              ": no gradient for parameter " + all[rank]["unused"].get<std::string>();
      const auto other = all[rank]["replaced"].get<std::string>();
      if (!other.empty()) {
        what += ", and parameter \"" + other + "\" was replaced by another tensor after prepare()";
        replaced = true;
      }
    }
  }
  throw InputError("parallel::Ddp", what,
                   "losses of each window that depend on every trainable parameter, on every rank",
                   replaced ? "assign values with copy_(), or call prepare() afterwards"
                            : "set find_unused_parameters, or freeze them before prepare() "
                              "(requires_grad_(false)); if a batch has several losses, pass "
                              "{.last = false} to backward() for all but the last");
}

} // namespace hasten
