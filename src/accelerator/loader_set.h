// The prepared loaders: which one feeds which model, and which loop is running.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "hasten/loader/loader_state.h"
#include "parts.h"

namespace hasten::detail {

class LoaderSet {
 public:
  /// Ties the loaders of one prepare() call to its models.
  void add(const std::vector<std::shared_ptr<LoaderState>>& loaders,
           const std::vector<size_t>& models, bool with_optimizer);
  void train_on(const std::shared_ptr<LoaderState>& loader);
  /// Which loader feeds these models. Null: none is prepared. Throws InputError if
  /// several could.
  std::shared_ptr<LoaderState> training_loader(const std::vector<size_t>& models) const;

  /// `loader` is the innermost loop until it ends.
  void enter_loop(const std::shared_ptr<LoaderState>& loader);
  /// The loader of the innermost loop that runs; null outside of loops.
  const LoaderState* active();
  /// The loader whose batch a loss of these models outside accumulate() uses; may be null.
  const LoaderState* current(const std::vector<size_t>& models) const;

  bool in_pass() const;
  /// Returns whether a pass was open.
  bool close_passes();

  void collect(StateToSave& parts, const at::Device& device) const;
  void add_to(StateToLoad& load);

 private:
  std::vector<std::shared_ptr<LoaderState>> loaders_; // all, as prepared
  std::vector<std::shared_ptr<LoaderState>> training_;
  std::map<size_t, std::shared_ptr<LoaderState>> of_model_;
  std::vector<std::shared_ptr<LoaderState>> loops_; // innermost last
};

} // namespace hasten::detail
