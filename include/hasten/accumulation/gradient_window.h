// An accumulation window: the batches, over time and over ranks, of one optimizer step. It weights
// each loss, decides which backward reduces, and leaves the mean gradient of the window's joined
// batch in every p.grad(). The split into batches and ranks does not change it.
// Threading: one thread. Lifetime: shares models and communicator; the destructor never
// communicates. Design: docs/design/gradient_window.md
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "hasten/accumulation/window_control.h"
#include "hasten/core/device_scalar.h"
#include "hasten/core/stateful.h"
#include "hasten/parallel/data_parallel.h"

namespace hasten {

/// How losses are weighted.
enum class LossWeighting {
  /// By their weights (token mean): the gradient is that of the joined batch, for any split into
  /// batches and ranks.
  joined_batch,
  /// Each batch counts gradient_accumulation_steps⁻¹ · world_size⁻¹ whatever its size (batch mean),
  /// as in Accelerate. Short last windows then make smaller steps, and samples of small batches
  /// count more. For comparisons with such runs.
  mean_of_means,
};

struct BackwardOptions {
  /// Keeps the graph for another backward through it. Costs its memory.
  bool retain_graph = false;
  /// Set it to false if another backward of the same batch follows. The reduction then waits for
  /// that one, which saves a second reduction.
  bool last = true;
};

/// What the ranks agreed on for a complete window.
struct WindowReport {
  /// Number of the window among the complete windows of these models, from 1. 0: none yet.
  uint64_t number = 0;
  /// Sum of weights, and of samples, over ranks and batches. `rows` is 0 if the batch type does not
  /// have a number of samples.
  double weight = 0;
  int64_t rows = 0;
  /// Sum of losses divided by the weight: the joined batch's mean loss.
  DeviceScalar loss = 0;
  /// Number of losses that were not finite, over all ranks; on a device other than the CPU 1 if
  /// there are any.
  DeviceScalar non_finite = 0;
  /// The window's last reduction, over all models: how long gradients were being sent, and how much
  /// of that time this rank waited after backward. Seconds; 0 with one rank.
  double communication_seconds = 0;
  double exposed_seconds = 0;
};

struct WindowOptions {
  /// Batches of a rank in one window. ≥ 1.
  int64_t steps = 1;
  LossWeighting weighting = LossWeighting::joined_batch;
  /// Throws if parameters or gradients change between a window's batches. Costs up to 1 us per
  /// parameter and batch, except for a window's last.
  bool check = true;
  /// False: the ranks of the window are not all of the world, so requests wait for another message.
  bool all_ranks = true;
};

/// Facts about a batch that are known before its loss.
struct WindowBatch {
  /// The rank has no batch after it.
  bool data_ends = false;
  /// The number that its mean loss was divided by. 0: the loss is ignored and may be NaN.
  std::optional<double> weight{};
  /// For the report.
  std::optional<int64_t> rows{};
  /// A stand-in batch, so that the loop runs as often as on other ranks. Its losses have weight 0,
  /// and no backward runs.
  bool stand_in = false;
  /// The peers' backwards wait for this rank's (SyncBatchNorm). So its backward runs for any
  /// weight, with zeros if the weight is 0.
  bool backward_communicates = false;
};

/// What all windows of an accelerator share.
struct WindowShared {
  /// A hash of the optimizer steps so far and their order. Ranks must agree on it when a window is
  /// complete.
  uint64_t steps = 0;
  /// WindowTotals::read and range of the current batch.
  uint64_t read = 0;
  std::string range{};
  /// The optimizer's step multiplies the gradients, so finish() may leave the multiplication to it.
  bool steps_scale = false;
  /// The factor of the losses of later windows before backward. When a window is complete, its
  /// gradients are divided by it. Equal on all ranks.
  double loss_scale = 1;
  /// Bits below kWindowRequests that this rank sends to the others with its next window, or with the
  /// next synchronisation of Local SGD, at no cost.
  uint32_t requests = 0;
  /// Bits that any rank sent, until somebody takes them.
  uint32_t heard = 0;
};

namespace detail {
class WindowWatch;
/// The ranks that are `here`. Collective, blocking, through the store.
DdpRanks ranks_with_batches(Communicator& communicator, bool here);
} // namespace detail

class GradientWindow : public Stateful {
 public:
  /// `models_mask`: bit i is model i of the accelerator, i < 32.
  GradientWindow(std::shared_ptr<Communicator> communicator,
                 std::vector<std::shared_ptr<DataParallel>> models, uint64_t models_mask,
                 WindowOptions options, at::Device device, std::shared_ptr<WindowShared> shared);
  ~GradientWindow() override;

  /// Opens the next batch. Local. Throws InputError if a batch is open, if the last window ended
  /// without the backward that reduces, if batches of backward_outside() are not reduced, or if a
  /// parameter or gradient was changed since the window's previous batch.
  void open(const WindowBatch& batch);
  /// Closes the batch, and counts it if it had a backward. If a backward threw, the window starts
  /// anew. Never communicates.
  void close() noexcept;

  /// Backward of a mean loss (`sum_weight` empty) or of a sum over `sum_weight` terms. Collective
  /// and blocking if it reduces, else local.
  void backward(const at::Tensor& loss, std::optional<double> sum_weight,
                const BackwardOptions& options);

  /// True if the last batch of the window, or of the data, is open or was closed without a backward.
  bool lacks_last_backward() const {
    return begun_ && !complete_ && !outside_ && !had_backward_ &&
           (batches_ > 0 ? last_ : batch_.data_ends);
  }
  /// Completes a window that lacks its last backward with the gradients so far. A window that has no
  /// batch on any rank is dropped. Collective, as that backward.
  void complete_without_backward();

  /// Backward without an open batch. With `reduce` true it is one whole window, and its gradient
  /// is added to the existing one. With false it waits for the next call that reduces, and all
  /// these calls are one window:
  ///   * one mean loss: the mean over all ranks' samples (`batch.weight`; unknown: 1)
  ///   * several mean losses: their sum, with equal weight for each rank, since the number of
  ///     samples in the others' batches is not known yet
  ///   * sums: the total over the total weight.
  /// Collective and blocking if it reduces, else local. Throws InputError in the middle of a
  /// window, and for a sum after means.
  void backward_outside(const at::Tensor& loss, std::optional<double> sum_weight,
                        const WindowBatch& batch, bool reduce, bool retain_graph);

  /// Drops a window that has batches but is not complete. Returns the number of its batches.
  int64_t drop();

  /// This rank's part of a state: batches, weight and loss of the open window, its scale, the last
  /// report. The models save the gradients. An open batch counts as closed; this requires its
  /// backward. Local. Throws InputError between open() and the batch's last backward.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  /// Throws InputError if the saved number of batches per window differs.
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

  /// Sets the number of batches of a rank in the next window. Call it between windows only.
  void set_steps(int64_t steps) { options_.steps = steps; }
  bool is_open() const { return open_; }
  /// True if the open batch had a backward.
  bool had_backward() const { return had_backward_; }
  /// True if the rank has no batch after the open one.
  bool data_ends() const { return batch_.data_ends; }
  /// True if the open batch completes its window.
  bool is_last() const { return last_; }
  /// Number of batches with a backward in the open window, or in the last one.
  int64_t batches() const { return batches_; }
  /// True if the next open() begins a window.
  bool opens() const { return !begun_ || complete_; }
  /// True from the time when every gradient is final until the next open().
  bool is_complete() const { return complete_; }
  /// Number of batches of backward_outside() that are not reduced yet.
  int64_t waiting() const { return begun_ && outside_ && !complete_ ? batches_ : 0; }
  /// The message of the backward that failed in the open window; empty if none did.
  const std::string& failure() const { return failure_; }
  ErrorKind failure_kind() const { return failure_kind_; }
  const WindowReport& report() const { return report_; }
  const std::vector<std::shared_ptr<DataParallel>>& models() const { return models_; }
  /// Bit i: model i of the accelerator.
  uint64_t models_mask() const { return models_mask_; }

 private:
  void begin_window(bool in_place);
  void begin_outside(std::optional<double> sum_weight, const WindowBatch& batch, bool reduce);
  double batch_weight(std::optional<double> sum_weight);
  // `times` turns the loss into a sum. The seed of backward is times / scale_ unless batches count
  // equally. With seed 0 backward runs only if `always`, and adds zeros.
  void run_backward(const at::Tensor& loss, double times, double seed, bool always, bool reduce,
                    bool retain_graph);
  void note_loss(const at::Tensor& loss, double times);
  void forget_losses();
  WindowTotals own_totals();
  double factor_of(const WindowTotals& totals) const;
  void start_loss_sum();
  void complete();
  void settle(const WindowTotals& totals);
  void fail(const char* what, ErrorKind kind);
  void note_ranks(const WindowTotals& totals);
  bool alone() const { return communicator_->world_size() == 1; }
  bool equal_batches() const { return options_.weighting == LossWeighting::mean_of_means; }

  // Set at construction.
  std::shared_ptr<Communicator> communicator_;
  std::vector<std::shared_ptr<DataParallel>> models_; // in the order of reduction
  uint64_t models_mask_;
  WindowOptions options_;
  std::shared_ptr<WindowShared> shared_;
  WindowControl control_;
  at::Device device_;
  std::unique_ptr<detail::WindowWatch> watch_; // of an open window

  // The window.
  bool begun_ = false;
  bool complete_ = false;
  bool outside_ = false; // a window of backward_outside()
  bool outside_sums_ = false; // its losses are sums
  int64_t batches_ = 0; // batches with a backward, so far
  bool idle_ = true; // all its batches are stand-ins
  bool empty_ = false; // it is completed without a batch
  double scale_ = 0; // n0; 0 until the window's first backward
  double next_scale_; // n0 of the next window
  double loss_scale_ = 1; // WindowShared::loss_scale, for the whole window
  double factor_ = 1; // n0 / W / loss_scale_
  DdpRanks ranks_{}; // the ranks with batches
  double weight_ = 0; // this rank's, so far
  double rows_ = 0;
  double host_losses_ = 0; // sum of losses
  double host_non_finite_ = 0; // number of non-finite losses
  at::Tensor device_losses_{}; // [1] fp64, instead of both on another device; undefined: none
  Work loss_sum_{}; // of device_losses_, over ranks

  // The batch.
  bool open_ = false;
  bool last_ = false;
  bool had_backward_ = false;
  WindowBatch batch_{};
  std::optional<double> used_weight_{};
  std::string failure_{};
  ErrorKind failure_kind_ = ErrorKind::other;

  WindowReport report_{};
};

} // namespace hasten
