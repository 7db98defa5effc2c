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
#include "hasten/parallel/ddp.h"

namespace hasten {

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
  /// Ranks that had run out of batches and joined with weight 0.
  int joined = 0;
};

/// How ranks that ran out of batches learn what the others do with a window's
/// gradients (clip, step, tick), to do the same.
struct WindowExchange {
  /// On ranks with batches: what was done since the last complete window. An
  /// object; "kept" is added to it: gradients were left for the next to add to.
  std::function<nlohmann::json()> record{};
  /// On the others: do it, with that window's gradients in place.
  std::function<void(const nlohmann::json&)> replay{};
  /// A joined window's record has not been replayed yet.
  bool pending = false;
};

class GradientWindow : public Stateful {
 public:
  /// `models_mask`: bit i for model i of the accelerator, below 32.
  /// `steps` ≥ 1 batches of a rank make one window.
  GradientWindow(
      std::shared_ptr<Communicator> communicator,
      std::vector<std::shared_ptr<Ddp>> models,
      uint64_t models_mask,
      int64_t steps,
      at::Device device,
      std::shared_ptr<WindowExchange> exchange);

  /// Opens the next batch. `data_ends`: the rank has no batch after it. `weight`
  /// of the batch's mean loss, if known; `rows` for the report. Local.
  /// Throws InputError if a batch is open, or the last window was left with
  /// backward({.last = false}).
  void open(
      bool data_ends,
      std::optional<double> weight,
      std::optional<int64_t> rows);
  /// Closes the batch; counts it if it had a backward. After a backward that
  /// threw the window starts afresh. Never communicates.
  void close() noexcept;

  /// Backward of a mean loss (`sum_weight` empty) or of a sum over `sum_weight`
  /// terms. Collective and blocking where it reduces, else local.
  void backward(
      const at::Tensor& loss,
      std::optional<double> sum_weight,
      const BackwardOptions& options);

  /// Takes part with weight 0 in the window the other ranks announced by
  /// `totals`. Collective.
  void join(const WindowTotals& totals);
  /// Forgets a window that has batches but is not complete. Returns their number.
  int64_t drop();

  /// This rank's part of a state: batches, weight and loss of the window under
  /// way, its scale, the last report. Gradients are the models'. A batch that is
  /// open counts as closed; after its backward only. Local.
  /// Throws InputError between open() and the batch's last backward.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  /// Throws InputError where another number of steps makes a window.
  void load_state(
      const NamedTensors& tensors, const nlohmann::json& values) override;

  bool is_open() const { return open_; }
  /// The open batch completes its window.
  bool is_last() const { return last_; }
  /// Every gradient is final. Until the next open().
  bool is_complete() const { return complete_; }
  /// What the backward that broke the open window threw; empty: none did.
  const std::string& failure() const { return failure_; }
  const WindowReport& report() const { return report_; }
  const std::vector<std::shared_ptr<Ddp>>& models() const { return models_; }

 private:
  void begin_window();
  double batch_weight(std::optional<double> sum_weight);
  void start_control();
  void complete();
  void settle(const WindowTotals& totals);
  void fail(const char* what);
  nlohmann::json exchange_records(const nlohmann::json& mine);

  // Set at construction.
  std::shared_ptr<Communicator> communicator_;
  std::vector<std::shared_ptr<Ddp>> models_;
  uint64_t models_mask_;
  int64_t steps_;
  std::shared_ptr<WindowExchange> exchange_;
  WindowControl control_;
  at::Device device_;

  // The window.
  bool begun_ = false;
  bool complete_ = false;
  int64_t batches_ = 0; // with a backward, so far
  double scale_ = 0; // n0; 0 until the window's first backward
  double next_scale_; // n0 of the next window
  double factor_ = 1; // n0 / W
  double weight_ = 0; // of this rank so far
  double rows_ = 0;
  at::Tensor loss_stats_{}; // [2] fp64: sum of losses, number not finite

  // The batch.
  bool open_ = false;
  bool last_ = false;
  bool had_backward_ = false;
  int64_t known_rows_ = 0;
  std::optional<double> known_weight_{};
  std::optional<double> used_weight_{};
  std::string failure_{};

  WindowReport report_{};
};

} // namespace hasten
