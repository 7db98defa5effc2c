// The current batch: accumulate(), backward() inside and outside of it, no_sync(), and what ranks
// agree on between batches.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "hasten/accumulation/gradient_window.h"
#include "hasten/accumulation/window_control.h"
#include "hasten/parallel/fully_shard.h"
#include "parts.h"

namespace hasten::detail {

class OpenBatch : private WindowParts {
 public:
  OpenBatch(const WindowParts& parts, LoaderSet& loaders) : WindowParts(parts), loaders_(loaders) {}

  /// accumulate(). `loader` null: the one that is tied to the models.
  void open(std::shared_ptr<LoaderState> loader, std::optional<double> weight,
            const std::vector<torch::nn::Module*>& modules);
  void close(bool unwinding) noexcept;
  bool is_open() const { return window_ != nullptr; }
  void backward(const at::Tensor& loss, std::optional<double> sum_weight,
                const BackwardOptions& options);
  /// See Note [A last batch without a backward].
  void complete_open_window(const std::vector<SlotList>& lists);
  /// False: no rank has a batch in the window, so it is dropped.
  bool complete_without_backward(GradientWindow& last);

  uint64_t push_sync(const std::vector<torch::nn::Module*>& models, bool sync);
  void pop_sync(uint64_t id) noexcept;
  bool sync_gradients() const;

  /// Mask of the models whose window has batches and is not complete.
  uint64_t unfinished() const;
  /// A pass over an evaluation loader begins.
  void begin_evaluation();
  /// Makes buffers of these models equal, if they have some that the policy covers. `forward`: also
  /// checks that a forward of those that communicate in it comes on all ranks. Collective.
  void even_out_buffers(uint64_t models, bool forward = false);
  /// The ranks whom windows of these models concern: inside LocalSGD those of one replica.
  const std::shared_ptr<Communicator>& peers(uint64_t models) const;
  /// All ranks are at this place, outside a window. Collective. Throws CommunicationError on every
  /// rank if one is elsewhere.
  void agree(const WindowTotals& place);
  /// The data of `loader` (null: of the run) has ended on all ranks, after the same steps. The same.
  void agree_on_end(const LoaderState* loader);
  /// In a forward of this model with layers that communicate: whether this rank's
  /// samples count.
  bool rows_count(size_t model);
  void check_parameters();

  /// After a state was loaded.
  void reset(bool completed);

 private:
  struct SyncScope {
    uint64_t id = 0;
    uint64_t models = 0; // mask
    bool sync = false;
  };

  void backward_outside(const at::Tensor& loss, std::optional<double> sum_weight,
                        const BackwardOptions& options);
  /// A batch of `loader`, or null.
  WindowBatch begin(uint64_t models, const LoaderState* loader, std::optional<double> weight);
  void refuse_sharded_outside(const std::vector<size_t>& models) const;
  uint64_t unsynced_models() const;
  bool reduces(uint64_t models) const;
  void completed_window(const GradientWindow& window, bool outside, bool again);
  void announce_forward(uint64_t models);

  LoaderSet& loaders_;
  uint64_t announced_ = 0; // mask: forwards outside accumulate(), since the last window
  GradientWindow* window_ = nullptr; // the open batch's
  bool stands_in_ = false; // that batch
  int64_t shortages_ = 0; // of the device, when it opened
  std::vector<std::unique_ptr<ForwardScope>> forwards_; // of the open batch
  std::vector<SyncScope> sync_scopes_; // innermost last
  std::vector<uint64_t> opened_; // batches. [model]
  uint64_t next_scope_ = 0;
  bool last_batch_completed_ = true;
  uint64_t closed_without_backward_ = 0; // mask: the last guard was
  bool warned_of_steps_ = false;
};

} // namespace hasten::detail
