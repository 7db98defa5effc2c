// Accelerator::save_state and load_state, over the parts of an accelerator.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "hasten/core/stateful.h"
#include "hasten/state/saved_state.h"
#include "parts.h"

namespace hasten {
class FolderCommit;
}

namespace hasten::detail {

/// The parts that a saved state has.
struct AcceleratorParts : WindowParts {
  OpenBatch& batch_;
  LoaderSet& loaders_;
  OptimizerSet& optimizers_;
  LocalWindows& local_;
};

class Checkpointer : private AcceleratorParts {
 public:
  explicit Checkpointer(const AcceleratorParts& parts) : AcceleratorParts(parts) {}

  void save(const std::filesystem::path& folder, const SaveStateOptions& options);
  LoadedState load(const std::filesystem::path& folder, const LoadStateOptions& options);
  void add(std::string name, std::shared_ptr<Stateful> object, StateScope scope);

 private:
  struct RegisteredObject {
    std::string name{};
    std::shared_ptr<Stateful> object{};
    StateScope scope = StateScope::shared;
  };

  // checkpointer.cpp: saving.
  StateToSave collect() const;
  void collect_models(StateToSave& parts) const;
  void collect_objects(StateToSave& parts) const;
  void write_models(const std::filesystem::path& folder, NamedTensors& shared) const;
  void write_shared(FolderCommit& commit, StateToSave& parts, const SaveStateOptions& options);

  // load_state.cpp
  void add_to(StateToLoad& load);
  void add_models(StateToLoad& load);
  void add_gradients(StateToLoad& load);
  bool has_gradients(const StateToLoad& load) const;
  void add_objects(StateToLoad& load);
  void add_random(StateToLoad& load);

  std::vector<RegisteredObject> objects_;
};

} // namespace hasten::detail
