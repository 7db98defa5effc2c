#include "hasten/accumulation/gradient_window.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <sstream>
#include <unordered_set>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/core/gradient_place.h"
#include "hasten/core/memory.h"
#include "window_watch.h"

namespace hasten {

namespace detail {

double nearest_power_of_two(double value) { return std::exp2(std::round(std::log2(value))); }

void check_window_loss(const at::Tensor& loss) {
  if (!loss.defined() || loss.numel() != 1 || !loss.requires_grad()) {
    std::ostringstream what;
    what << "loss ";
    if (!loss.defined()) {
      what << "is undefined";
    } else {
      what << "has shape " << loss.sizes() << (loss.requires_grad() ? "" : " and requires no grad");
    }
    throw InputError("accumulation::backward", what.str(),
                     "a scalar that depends on a trainable parameter");
  }
}

// Buckets of all models together must start in one order on every rank, also on
// those without a graph: the largest model's overlap with backward,
// the others' follow (start_backward's `hold`).
std::vector<std::shared_ptr<DataParallel>> in_reduction_order(
    std::vector<std::shared_ptr<DataParallel>> models) {
  const auto bytes = [](const std::shared_ptr<DataParallel>& model) {
    int64_t sum = 0;
    for (const FlatGroup& group : model->gradients().layout().groups()) {
      sum += group.numel * static_cast<int64_t>(c10::elementSize(group.dtype));
    }
    return sum;
  };
  std::ranges::stable_sort(models,
                           [&bytes](const auto& a, const auto& b) { return bytes(a) > bytes(b); });
  return models;
}

static at::Tensor values_of(const at::Tensor& gradient) {
  return gradient.is_sparse() ? gradient._values() : gradient;
}

// NaN is not zero.
static bool has_nonzero(const at::Tensor& gradient) {
  return gradient.defined() && values_of(gradient).ne(0).any().item<bool>();
}

// The backward of a loss with weight 0.
//
// Note [Nothing in, nothing out] Other ranks may wait in this rank's backward (synchronised batch
// norm, sharded units), so it runs with a seed of 0. But 0 times an infinite or NaN derivative is
// NaN. Therefore each node's results for zeros are replaced by zeros. One kind of node returns
// other values: a custom function that receives gradients from other ranks, such as batch norm over
// all ranks. Its results are kept, and so is everything computed from them, because these samples
// are part of the others' statistics.
class ZeroHook final : public torch::autograd::FunctionPostHook {
 public:
  using Tensors = torch::autograd::variable_list;

  // `custom`: the node is no derivative of torch's.
  explicit ZeroHook(bool custom) : custom_(custom) {}

  Tensors operator()(const Tensors& outputs, const Tensors& inputs) override {
    if (std::ranges::any_of(inputs, has_nonzero)) {
      return outputs; // it follows values that other ranks sent
    }
    Tensors result = outputs;
    for (at::Tensor& gradient : result) {
      if (gradient.defined() && !(custom_ && has_nonzero(gradient) &&
                                  values_of(gradient).isfinite().all().item<bool>())) {
        gradient = at::zeros_like(gradient);
      }
    }
    return result;
  }

 private:
  const bool custom_;
};

/// While the result lives, each node of `root`'s graph returns zeros for zeros. One pass over the
/// graph; in backward, one over each gradient.
static std::shared_ptr<void> zeros_of_zeros(const at::Tensor& root) {
  using Node = decltype(torch::autograd::Edge::function);
  std::vector<std::pair<Node, std::uintptr_t>> hooked;
  std::unordered_set<const torch::autograd::Node*> seen;
  const auto hook = [&](const Node& node) {
    // A leaf, whose node outlives the graph, returns nothing.
    if (node && node->num_outputs() > 0 && seen.insert(node.get()).second) {
      hooked.emplace_back(node,
                          node->add_post_hook(std::make_unique<ZeroHook>(!node->is_traceable())));
    }
  };
  hook(torch::autograd::impl::gradient_edge(root).function);
  for (size_t i = 0; i < hooked.size(); ++i) {
    const Node node = hooked[i].first; // the vector grows
    for (const auto& edge : node->next_edges()) {
      hook(edge.function);
    }
  }
  return {nullptr, [hooked = std::move(hooked)](void*) {
            for (const auto& [node, known_by] : hooked) {
              node->del_post_hook(known_by);
            }
          }};
}

DdpRanks ranks_with_batches(Communicator& communicator, bool here) {
  const auto all = communicator.all_gather_object(here, "ranks with batches");
  DdpRanks ranks{.first = 0, .count = 0, .here = here};
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].get<bool>() && ranks.count++ == 0) {
      ranks.first = static_cast<int>(rank);
    }
  }
  ranks.here = here || ranks.count == 0; // stand-ins on all
  return ranks;
}

} // namespace detail

GradientWindow::GradientWindow(std::shared_ptr<Communicator> communicator,
                               std::vector<std::shared_ptr<DataParallel>> models,
                               uint64_t models_mask, WindowOptions options, at::Device device,
                               std::shared_ptr<WindowShared> shared)
    : communicator_(std::move(communicator)),
      models_(detail::in_reduction_order(std::move(models))),
      models_mask_(models_mask),
      options_(options),
      shared_(std::move(shared)),
      control_(communicator_),
      device_(device),
      watch_(std::make_unique<detail::WindowWatch>()),
      next_scale_(detail::nearest_power_of_two(
          static_cast<double>(options.steps * communicator_->world_size()))) {}

void GradientWindow::begin_window(bool in_place) {
  for (auto& model : models_) {
    model->begin(in_place);
  }
  watch_->forget();
  begun_ = true;
  complete_ = false;
  outside_ = false;
  batches_ = 0;
  idle_ = true;
  scale_ = 0;
  loss_scale_ = shared_->loss_scale;
  weight_ = 0;
  rows_ = 0;
  forget_losses();
}

void GradientWindow::open(const WindowBatch& batch) {
  const char* where = "accumulation::accumulate";
  if (open_) {
    throw InputError(where, "a batch of these models is open already", "one guard at a time",
                     "pass all models of a batch to one accumulate()");
  }
  if (waiting() > 0) {
    throw InputError(where,
                     std::to_string(waiting()) +
                         " backward calls outside accumulate() wait under no_sync() to be reduced",
                     "a backward outside no_sync() that reduces them, before accumulate()",
                     "use only accumulate(): it reduces in a window's last batch");
  }
  if (begun_ && !complete_ && last_ && had_backward_) {
    throw InputError(where,
                     "the last batch of the window before ended with "
                     "backward({.last = false}) or under no_sync()",
                     "its last backward to reduce the gradients",
                     "use neither .last=false nor no_sync() in the last backward of a batch");
  }
  if (!begun_ || complete_) {
    begin_window(false);
  }
  try {
    watch_->check(true);
  } catch (const InputError&) {
    drop(); // the sums are lost
    throw;
  }
  open_ = true;
  last_ = batch.data_ends || batches_ + 1 >= options_.steps;
  had_backward_ = false;
  batch_ = batch;
  used_weight_.reset();
  failure_.clear();
}

void GradientWindow::close() noexcept {
  open_ = false;
  if (!failure_.empty()) {
    begun_ = false;
    complete_ = false;
    failure_.clear();
  } else if (had_backward_) {
    ++batches_;
  }
}

// The weight belongs to the batch: counted at its first backward.
double GradientWindow::batch_weight(std::optional<double> sum_weight) {
  const std::optional<double> weight = sum_weight     ? sum_weight
                                       : used_weight_ ? used_weight_
                                                      : batch_.weight;
  if (!weight) {
    throw InputError("accumulation::backward",
                     "the batch's type has no number of samples, so a mean loss has no weight",
                     "accumulate(loader, weight, model), or a type with rows(batch)",
                     "pass the weight, or call backward(loss_sum, weight)");
  }
  if (!std::isfinite(*weight) || *weight < 0 || (used_weight_ && *used_weight_ != *weight)) {
    throw InputError("accumulation::backward", "weight=" + std::to_string(*weight),
                     used_weight_ ? "the batch's weight, which an earlier backward gave as " +
                                        std::to_string(*used_weight_)
                                  : "a finite number, 0 or above");
  }
  if (!used_weight_) {
    used_weight_ = weight;
    weight_ += *weight;
    rows_ += static_cast<double>(batch_.rows.value_or(0));
  }
  return *weight;
}

// Note [Scale]
// Every loss enters as loss_sum / n0, and the sum over ranks is multiplied by
// n0 / W once, when W, the window's weight, is known. n0 is a power of two near W
// and equal on all ranks, so that sums stay near the gradient's size (16-bit wires
// neither overflow nor lose small terms) and dividing by it is exact. A rank alone
// whose window is one batch knows W beforehand: n0 = W, and nothing is multiplied.
// The multiplication is left to the optimizer's kernel (WindowShared::steps_scale)
// only where the user asked for it: gradients are not final then when backward
// returns, which torch's clip and optimizers and a user's logging rely on, for one
// pass over memory out of the dozen of a step. A loss scale (fp16) goes the same way:
// into the seed, and out with n0 / W, so that it costs no pass of its own.
void GradientWindow::backward(const at::Tensor& loss, std::optional<double> sum_weight,
                              const BackwardOptions& options) {
  if (!open_ || !failure_.empty()) {
    throw InputError(
        "accumulation::backward",
        open_ ? "an earlier backward of this batch threw: " + failure_ : "no window is open",
        open_ ? "a new window" : "auto window = accelerator.accumulate(model)");
  }
  detail::check_window_loss(loss);
  watch_->check(false);
  const double weight = batch_.stand_in ? 0 : batch_weight(sum_weight);
  if (scale_ == 0) {
    scale_ = alone() && last_ && weight > 0 ? weight
             : alone() && report_.number == 0 && weight > 0
                 ? detail::nearest_power_of_two(weight * static_cast<double>(options_.steps))
                 : next_scale_;
  }
  // Turns the loss into a sum.
  const double times = sum_weight && weight > 0 ? 1.0 : weight;
  const double batches = static_cast<double>(options_.steps * communicator_->world_size());
  const double seed = !equal_batches() ? times / scale_ : weight > 0 ? times / weight / batches : 0;
  idle_ = idle_ && batch_.stand_in;
  run_backward(loss, times, seed, batch_.backward_communicates, last_ && options.last,
               options.retain_graph);
}

void GradientWindow::complete_without_backward() {
  watch_->check(false);
  scale_ = scale_ == 0 ? next_scale_ : scale_;
  run_backward(at::Tensor(), 0, 0, false, true, false);
}

void GradientWindow::begin_outside(std::optional<double> sum_weight, const WindowBatch& batch,
                                   bool reduce) {
  const bool sums = sum_weight.has_value();
  // A single rank adds mean losses unchanged.
  begin_window(alone() && shared_->loss_scale == 1 && (!sums || reduce || equal_batches()));
  outside_ = true;
  outside_sums_ = sums;
  if (!sums) {
    weight_ = batch.stand_in ? 0 : reduce && !equal_batches() ? batch.weight.value_or(1) : 1;
  }
  const double known = reduce ? sum_weight.value_or(weight_) : weight_;
  scale_ = alone() && known > 0 ? known : next_scale_;
}

void GradientWindow::backward_outside(const at::Tensor& loss, std::optional<double> sum_weight,
                                      const WindowBatch& batch, bool reduce, bool retain_graph) {
  const char* where = "accumulation::backward";
  detail::check_window_loss(loss);
  if (sum_weight && !(std::isfinite(*sum_weight) && *sum_weight >= 0)) {
    throw InputError(where, "weight=" + std::to_string(*sum_weight), "a finite number, 0 or above");
  }
  if (begun_ && !complete_ && !outside_) {
    throw InputError(where,
                     "no batch is open, and a window of these models has " +
                         std::to_string(batches_) + " of " + std::to_string(options_.steps) +
                         " batches",
                     "accumulate() around every batch until the window is complete",
                     "auto window = accelerator.accumulate(model) before the forward");
  }
  if (waiting() > 0 && outside_sums_ != sum_weight.has_value()) {
    throw InputError(where,
                     std::string("a ") + (sum_weight ? "sum" : "mean") + " after " +
                         std::to_string(waiting()) + (sum_weight ? " mean" : " sum") +
                         " losses that wait under no_sync() to be reduced",
                     "means or sums, not both, until they are reduced",
                     "call backward(loss, weight) for all of them, or use accumulate()");
  }
  failure_.clear();
  if (waiting() == 0) {
    begin_outside(sum_weight, batch, reduce);
  }
  if (!batch.stand_in) {
    weight_ += sum_weight.value_or(0);
    if (!sum_weight && batches_ > 0) {
      weight_ = 1; // only stand-ins came before
    }
  }
  rows_ += static_cast<double>(batch.rows.value_or(0));
  last_ = reduce;
  idle_ = idle_ && batch.stand_in;
  const bool nothing = batch.stand_in || sum_weight.value_or(batch.weight.value_or(1)) == 0;
  const double times = nothing ? 0 : sum_weight ? 1.0 : weight_;
  const double count = sum_weight.value_or(weight_); // what `times` · loss is divided by
  const double seed = !equal_batches() ? times / scale_
                      : count > 0      ? times / count / communicator_->world_size()
                                       : 0;
  run_backward(loss, times, seed, batch.backward_communicates, reduce, retain_graph);
  ++batches_;
}

void GradientWindow::run_backward(const at::Tensor& loss, double times, double seed, bool always,
                                  bool reduce, bool retain_graph) {
  const bool runs = times != 0 || always;
  empty_ = batches_ == 0 && !loss.defined();
  try {
    if (times != 0) {
      note_loss(loss, times);
    }
    if (reduce && !alone()) {
      control_.start(own_totals());
      start_loss_sum();
    }
    for (auto& model : models_) {
      model->start_backward(reduce, {.loss = runs ? loss : at::Tensor(),
                                     .hold = model != models_.front(),
                                     .factor = [this] { return factor_of(control_.wait()); }});
    }
    if (runs) {
      // In 16 bits neither the weight nor the scale would be exact.
      const bool narrow = loss.scalar_type() == at::kHalf || loss.scalar_type() == at::kBFloat16;
      const at::Tensor wide = narrow ? loss.to(at::kFloat) : loss;
      const auto zeros = times == 0 ? detail::zeros_of_zeros(wide) : nullptr;
      const detail::GradientPlaceScope places([this](const at::Tensor& parameter) {
        at::Tensor place;
        for (size_t i = 0; i < models_.size() && !place.defined(); ++i) {
          place = models_[i]->reserve_gradient_place(parameter);
        }
        return place;
      });
      wide.backward(at::full_like(wide, seed * loss_scale_), retain_graph);
    }
    for (auto& model : models_) {
      model->finish_backward();
    }
    had_backward_ = true;
    watch_->forget();
    if (reduce) {
      complete();
    } else if (open_ && options_.check) {
      watch_->remember(models_);
    }
  } catch (const std::exception& error) {
    fail(error.what(), error_kind(error));
    throw;
  } catch (...) {
    fail("an exception that is not a std::exception", ErrorKind::other);
    throw;
  }
}

void GradientWindow::forget_losses() {
  host_losses_ = host_non_finite_ = 0;
  device_losses_.reset();
  loss_sum_ = {};
}

// Losses on the CPU are read immediately: a few small tensor operations would cost a small model's
// step more than all the rest. Losses on another device are not waited for.
void GradientWindow::note_loss(const at::Tensor& loss, double times) {
  at::NoGradGuard no_grad;
  if (device_.is_cpu()) {
    const double value = loss.item<double>();
    host_losses_ += value * times;
    host_non_finite_ += std::isfinite(value) ? 0 : 1;
    return;
  }
  const at::Tensor value = loss.detach().reshape({1}).to(device_, at::kDouble);
  device_losses_ = device_losses_.defined() ? device_losses_.add_(value, times) : value * times;
}

// The sum over ranks, on the device. It follows the control vector on every rank.
void GradientWindow::start_loss_sum() {
  if (device_.is_cpu()) {
    return;
  }
  if (!device_losses_.defined()) {
    device_losses_ = at::zeros({1}, at::TensorOptions(at::kDouble).device(device_));
  }
  loss_sum_ = communicator_->all_reduce_async(device_losses_, ReduceOp::SUM, "losses of a window");
}

// A backward that threw leaves partial gradients, so the window starts anew.
void GradientWindow::fail(const char* what, ErrorKind kind) {
  failure_ = what;
  failure_kind_ = kind;
  complete_ = false;
  begun_ = open_;
  for (auto& model : models_) {
    model->cancel();
  }
}

// This rank's values. Takes the requests.
WindowTotals GradientWindow::own_totals() {
  WindowTotals mine;
  mine.extra = complete_;
  mine.loss = host_losses_;
  mine.non_finite = host_non_finite_;
  mine.weight = complete_ ? 0 : weight_;
  mine.rows = complete_ ? 0 : rows_;
  mine.idle = !complete_ && idle_ ? 1 : 0;
  mine.empty = empty_ ? 1 : 0;
  mine.models = models_mask_;
  mine.number = report_.number + (complete_ ? 0 : 1);
  mine.outside = outside_;
  mine.steps = shared_->steps;
  mine.read = shared_->read;
  mine.range = shared_->range;
  mine.loss_scale = loss_scale_;
  if (!complete_ && options_.all_ranks) {
    mine.requests = std::exchange(shared_->requests, 0u);
  }
  return mine;
}

// The factor of the reduced sum. A window without any weight has no mean; its sum stays as it is.
double GradientWindow::factor_of(const WindowTotals& totals) const {
  if (totals.extra) {
    return factor_;
  }
  return (totals.weight > 0 && !equal_batches() ? scale_ / totals.weight : 1.0) / loss_scale_;
}

void GradientWindow::complete() {
  WindowTotals totals;
  if (!complete_) {
    ranks_ = {};
  }
  if (!alone()) {
    totals = control_.wait();
    for (auto& model : models_) {
      model->wait();
    }
    note_ranks(totals);
  } else {
    totals = own_totals();
  }
  if (totals.empty == communicator_->world_size()) {
    drop();
  } else {
    settle(totals);
  }
}

// Which rank's buffers are used may depend on which ranks had a sample.
void GradientWindow::note_ranks(const WindowTotals& totals) {
  const bool even_out = std::ranges::any_of(
      models_, [](const auto& model) { return model->evens_out_buffers(true); });
  if (even_out && !totals.extra && totals.idle > 0) {
    ranks_ = detail::ranks_with_batches(*communicator_, !idle_);
  }
}

void GradientWindow::settle(const WindowTotals& totals) {
  if (loss_sum_) {
    std::exchange(loss_sum_, {}).wait();
  }
  DeviceScalar loss = totals.loss;
  DeviceScalar non_finite = totals.non_finite;
  if (device_losses_.defined()) {
    loss = DeviceScalar(device_losses_);
    non_finite = loss.then([](double sum) { return std::isfinite(sum) ? 0 : 1; });
  }
  const auto mean_over = [&](double weight) {
    return weight > 0 ? loss.then([weight](double sum) { return sum / weight; }) : DeviceScalar(0);
  };
  if (totals.extra) { // on another device this waits
    report_.loss = report_.loss + mean_over(report_.weight);
    report_.non_finite = report_.non_finite + non_finite;
  } else {
    factor_ = factor_of(totals);
    if (totals.weight > 0) {
      next_scale_ = detail::nearest_power_of_two(totals.weight);
    }
    report_.number += 1;
    report_.weight = totals.weight;
    report_.rows = std::llround(totals.rows);
    report_.loss = mean_over(totals.weight);
    report_.non_finite = non_finite;
    shared_->heard |= totals.requests;
  }
  forget_losses(); // another backward reports only what it adds
  report_.communication_seconds = report_.exposed_seconds = 0;
  for (auto& model : models_) {
    model->finish(factor_, ranks_, shared_->steps_scale && !totals.extra);
    report_.communication_seconds += model->reduction().communication_seconds;
    report_.exposed_seconds += model->reduction().exposed_seconds;
  }
  complete_ = true;
}

int64_t GradientWindow::drop() {
  if (!begun_ || complete_) {
    return 0;
  }
  for (auto& model : models_) {
    model->cancel();
  }
  begun_ = false;
  last_ = had_backward_ = false;
  return std::exchange(batches_, 0);
}

} // namespace hasten
