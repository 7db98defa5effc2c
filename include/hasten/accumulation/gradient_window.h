// A window: the batches, over time and over ranks, that one optimizer step is
// made of. It weighs each loss, decides which backward reduces, and leaves in
// every p.grad() the mean gradient of the window's joined batch, exactly, whatever
// the split into batches and ranks.
// Threading: one thread. Lifetime: shares models and communicator; the destructor
// never communicates. Design: docs/design/gradient_window.md
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "hasten/accumulation/window_control.h"
#include "hasten/core/stateful.h"
#include "hasten/parallel/data_parallel.h"

namespace hasten {

/// How losses are weighed against each other.
enum class LossWeighting {
  /// By their weights: the gradient is that of the joined batch, whatever the
  /// split into batches and ranks.
  joined_batch,
  /// Each batch counts gradient_accumulation_steps⁻¹ · world_size⁻¹, whatever it
  /// holds, as in Accelerate: short last windows step by a part, rows of small
  /// batches count more. For comparing with runs of that kind.
  mean_of_means,
};

struct BackwardOptions {
  /// Keep the graph for another backward through it. Costs its memory.
  bool retain_graph = false;
  /// False where a further backward of the same batch follows: the reduction
  /// waits for that one. Saves a second reduction.
  bool last = true;
};

/// What the ranks agreed on about a window that is complete.
struct WindowReport {
  /// 1 for the first complete window of these models, and so on; 0: none yet.
  uint64_t number = 0;
  /// Sum of weights and of rows over ranks and batches. Rows are 0 where the
  /// batch type does not tell.
  double weight = 0;
  int64_t rows = 0;
  /// Sum of losses over the weight: the joined batch's mean loss.
  double loss = 0;
  /// Losses that were not finite, over all ranks.
  int64_t non_finite = 0;
  /// Ranks in Accelerator::join_uneven_inputs(), which took part with weight 0.
  int joined = 0;
  /// Bits that any rank asked for (WindowShared::requests).
  uint32_t requests = 0;
  /// Of the window's last reduction, all models together: time in which
  /// gradients travelled, and the part of it that this rank waited for after
  /// backward. Seconds; 0 for a rank alone.
  double communication_seconds = 0;
  double exposed_seconds = 0;
};

struct WindowOptions {
  /// Batches of a rank that make one window, ≥ 1.
  int64_t steps = 1;
  LossWeighting weighting = LossWeighting::joined_batch;
  /// Parameters and gradients that somebody changes between a window's batches are
  /// an error. Costs up to 1 us a parameter and batch, but for a window's last.
  bool check = true;
};

/// What is known of a batch before its loss.
struct WindowBatch {
  /// The rank has no batch after it.
  bool data_ends = false;
  /// What its mean loss was divided by. 0: the loss is never looked at; it may be NaN.
  std::optional<double> weight{};
  /// For the report.
  std::optional<int64_t> rows{};
  /// It is there for the loop to run as on other ranks: its losses weigh nothing,
  /// whatever they say, and no backward runs.
  bool stand_in = false;
  /// Peers' backwards wait for this rank's (SyncBatchNorm): it runs whatever the
  /// batch weighs, with zeros where that is nothing.
  bool backward_communicates = false;
};

/// What all windows of an accelerator share.
struct WindowShared {
  /// A check that communicates, when a window's reduction is over. Empty: none.
  std::function<void()> check{};
  /// Stands for the optimizer steps done so far and their order: ranks must agree
  /// when a window is complete.
  uint64_t steps = 0;
  /// WindowTotals::read and range of the batch at hand.
  uint64_t read = 0;
  std::string range{};
  /// The optimizer's step multiplies the gradients: finish() may leave it to that.
  bool steps_scale = false;
  /// What losses of windows to come are multiplied by before their backward; the
  /// gradients are divided by it again when a window is complete. Equal on all ranks.
  double loss_scale = 1;
  /// What this rank tells the others with its next window, which takes it along at
  /// no cost: bits below kWindowRequests.
  uint32_t requests = 0;
};

namespace detail {
class WindowWatch;
/// The ranks that are `here`. Collective, blocking, through the store.
DdpRanks ranks_with_batches(Communicator& communicator, bool here);
} // namespace detail

class GradientWindow : public Stateful {
 public:
  /// `models_mask`: bit i for model i of the accelerator, below 32.
  GradientWindow(std::shared_ptr<Communicator> communicator,
                 std::vector<std::shared_ptr<DataParallel>> models, uint64_t models_mask,
                 WindowOptions options, at::Device device, std::shared_ptr<WindowShared> shared);
  ~GradientWindow() override;

  /// Opens the next batch. Local.
  /// Throws InputError if a batch is open, the last window was left without the
  /// backward that reduces, or batches of backward_outside() are not reduced; and
  /// where a parameter or a gradient was changed since the window's batch before.
  void open(const WindowBatch& batch);
  /// Closes the batch; counts it if it had a backward. After a backward that
  /// threw the window starts afresh. Never communicates.
  void close() noexcept;

  /// Backward of a mean loss (`sum_weight` empty) or of a sum over `sum_weight`
  /// terms. Collective and blocking where it reduces, else local.
  void backward(const at::Tensor& loss, std::optional<double> sum_weight,
                const BackwardOptions& options);

  /// The window's last batch is open or was closed without a backward, and batches
  /// before it had one.
  bool lacks_last_backward() const {
    return begun_ && !complete_ && !outside_ && last_ && !had_backward_ && batches_ > 0;
  }
  /// The data's last batch was alone in its window on this rank and was closed without
  /// a backward.
  bool left_out_last() const {
    return begun_ && !complete_ && !outside_ && batch_.data_ends && !had_backward_ && batches_ == 0;
  }
  /// Completes a window that lacks its last backward by what is there. Collective, as that backward.
  void complete_without_backward();

  /// Backward without a batch being open: a window of its own, whose gradient is
  /// added to what is there. With `reduce` false it waits for the next that
  /// reduces, and both are one window:
  ///   * one mean loss: the mean over all ranks' rows (`batch.weight`; unknown: 1)
  ///   * several mean losses: their sum, each rank's counting equally, since what
  ///     the others' batches hold is not known yet
  ///   * sums: the total over the total weight.
  /// Collective and blocking where it reduces, else local.
  /// Throws InputError in the middle of a window, or for a sum after means.
  void backward_outside(const at::Tensor& loss, std::optional<double> sum_weight,
                        const WindowBatch& batch, bool reduce, bool retain_graph);

  /// Takes part with weight 0 in the window the other ranks announced by
  /// `totals`, and drops its gradients. Collective, blocking.
  /// Throws InputError in the middle of a window.
  void join(const WindowTotals& totals);
  /// Forgets a window that has batches but is not complete. Returns their number.
  int64_t drop();

  /// This rank's part of a state: batches, weight and loss of the window under
  /// way, its scale, the last report. Gradients are the models'. A batch that is
  /// open counts as closed; after its backward only. Local.
  /// Throws InputError between open() and the batch's last backward.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  /// Throws InputError where another number of steps makes a window.
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

  /// Batches of a rank that make the next window. Between windows only.
  void set_steps(int64_t steps) { options_.steps = steps; }
  bool is_open() const { return open_; }
  /// The open batch had a backward.
  bool had_backward() const { return had_backward_; }
  /// The rank has no batch after the open one.
  bool data_ends() const { return batch_.data_ends; }
  /// The open batch completes its window.
  bool is_last() const { return last_; }
  /// With a backward, of the window under way or the last.
  int64_t batches() const { return batches_; }
  /// The next open() begins a window.
  bool opens() const { return !begun_ || complete_; }
  /// Every gradient is final. Until the next open().
  bool is_complete() const { return complete_; }
  /// Batches of backward_outside() wait for one that reduces. Their number.
  int64_t waiting() const { return begun_ && outside_ && !complete_ ? batches_ : 0; }
  /// What the backward that broke the open window threw; empty: none did.
  const std::string& failure() const { return failure_; }
  const WindowReport& report() const { return report_; }
  const std::vector<std::shared_ptr<DataParallel>>& models() const { return models_; }
  /// Bit i: model i of the accelerator.
  uint64_t models_mask() const { return models_mask_; }

 private:
  void begin_window(bool in_place);
  void begin_outside(std::optional<double> sum_weight, const WindowBatch& batch, bool reduce);
  double batch_weight(std::optional<double> sum_weight);
  // `times` turns the loss into a sum; its seed is times / scale_ unless each
  // batch counts the same. 0: it runs where `always`, and adds zeros.
  void run_backward(const at::Tensor& loss, double times, double seed, bool always, bool reduce,
                    bool retain_graph);
  void note_loss(const at::Tensor& loss, double times);
  void forget_losses();
  void start_control();
  double factor_of(const WindowTotals& totals) const;
  void complete();
  void settle(const WindowTotals& totals);
  void fail(const char* what);
  void note_ranks(const WindowTotals& totals, bool here);
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
  std::unique_ptr<detail::WindowWatch> watch_; // of a window under way

  // The window.
  bool begun_ = false;
  bool complete_ = false;
  bool outside_ = false; // made of backward_outside()
  bool outside_sums_ = false; // of sums, not means
  int64_t batches_ = 0; // with a backward, so far
  bool idle_ = true; // all of them are stand-ins
  double scale_ = 0; // n0; 0 until the window's first backward
  double next_scale_; // n0 of the next window
  double loss_scale_ = 1; // WindowShared::loss_scale, for the whole window
  double factor_ = 1; // n0 / W / loss_scale_
  DdpRanks ranks_{}; // that had batches
  double weight_ = 0; // of this rank so far
  double rows_ = 0;
  double host_losses_ = 0; // sum of losses on the CPU
  double host_non_finite_ = 0; // their number
  at::Tensor loss_stats_{}; // [2] fp64, the same of a GPU's; undefined: none

  // The batch.
  bool open_ = false;
  bool last_ = false;
  bool had_backward_ = false;
  WindowBatch batch_{};
  std::optional<double> used_weight_{};
  std::string failure_{};

  WindowReport report_{};
};

} // namespace hasten
