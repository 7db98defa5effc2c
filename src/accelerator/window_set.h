// The accumulation windows: one for each set of models that are trained together.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "hasten/accumulation/gradient_window.h"
#include "parts.h"

namespace hasten::detail {

/// Added to the mask of the models in the key of windows that reduce nothing beyond their replica.
inline constexpr uint64_t kLocalWindow = uint64_t{1} << 63;

class WindowSet {
 public:
  /// What a handle does with the gradients of its parameters: nothing inside a window,
  /// once for each complete one, or always (backward outside accumulate()).
  enum class Acts { in_window, once, always };

  WindowSet(RunContext& run, ModelSet& models);

  const std::shared_ptr<WindowShared>& shared() const { return shared_; }

  /// Creates it at the first call. Throws InputError for local and other models.
  GradientWindow& get(uint64_t models, const char* where);
  /// The models are in this window now, with a batch of `feeder`.
  void enter(GradientWindow& window, bool outside, const LoaderState* feeder);
  /// The models are in no window any more: its backward failed.
  void leave(const GradientWindow& window);
  /// Its parameters have changed: drops its windows. Throws InputError inside one or in LocalSGD's scope.
  void leave(size_t model);
  /// The gradients of the window are final. Does nothing new for a window that was complete and was
  /// reduced again (`again`).
  void complete(const GradientWindow& window, bool outside, bool again = false);

  /// Report of a model's window.
  bool in_window(size_t model) const;
  const GradientWindow* of(size_t model) const { return model_window(model).window; }
  uint64_t completed(size_t model) const { return model_window(model).completed; }
  /// The last window that an optimizer's step was attempted for.
  uint64_t attempted(size_t model) const { return model_window(model).attempted; }
  void note_attempt(size_t model, bool of_last = true);

  /// 0 if one of the models is inside a window.
  uint64_t completed_window(const std::vector<SlotList>& lists) const;
  Acts acts(const std::vector<SlotList>& lists) const;
  /// Throws InputError for gradients that only this rank has.
  void check_reduced(const std::vector<SlotList>& lists, const char* where) const;
  const WindowReport& report() const { return report_; }
  /// Complete windows so far.
  uint64_t serial() const { return serial_; }

  /// Windows of local models reduce nothing beyond their replica.
  bool is_local(size_t model) const { return model_window(model).local; }
  bool has_local(uint64_t models) const;
  void set_local(size_t model, bool local);

  /// Called at the end of the data of `loader`; null: of all loaders.
  std::vector<GradientWindow*> lacking_backward(const LoaderState* loader);
  void drop_unfinished(const LoaderState* loader);

  /// Throws InputError inside a window.
  void set_steps(int64_t steps);

  // For saved states.
  void collect(StateToSave& parts) const;
  void add_to(StateToLoad& load);

 private:
  struct ModelWindow {
    GradientWindow* window = nullptr; // the last one it took part in
    uint64_t completed = 0; // serial of its last complete window; 0: none yet
    uint64_t attempted = 0; // serial of the last one stepped for, or skipped
    bool local = false; // its windows reduce nothing
    bool outside = false; // the last one was made outside accumulate()
  };
  const ModelWindow& model_window(size_t model) const;
  ModelWindow& ensure_model_window(size_t model);
  uint64_t key_of(uint64_t models) const;
  bool feeds(uint64_t key, const LoaderState* loader) const;
  GradientWindow& window_at(uint64_t key);
  std::shared_ptr<Communicator> communicator_of(uint64_t key);
  WindowOptions window_options(uint64_t key) const;

  RunContext& run_;
  ModelSet& models_;
  std::shared_ptr<WindowShared> shared_;
  std::vector<ModelWindow> model_windows_; // [model]
  std::map<uint64_t, GradientWindow> windows_; // by key_of()
  // Loaders whose batches are in a window. Pointers are compared, no more.
  std::map<uint64_t, std::vector<const LoaderState*>> fed_by_; // by key_of()
  std::shared_ptr<Communicator> alone_; // a world of one, for local windows
  WindowReport report_{};
  uint64_t serial_ = 0; // complete windows
  bool accumulates_ = false; // accumulate() was called
};

} // namespace hasten::detail
