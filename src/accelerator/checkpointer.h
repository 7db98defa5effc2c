// Accelerator::save_state and load_state, over the parts of an accelerator.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "hasten/state/saved_state.h"
#include "uneven_inputs.h"

namespace hasten {
class FolderCommit;
}

namespace hasten::detail {

class Checkpointer : private AcceleratorParts {
 public:
  Checkpointer(const AcceleratorParts& parts, UnevenInputs& uneven)
      : AcceleratorParts(parts), uneven_(uneven) {}

  void save(const std::filesystem::path& folder, const SaveStateOptions& options);
  /// Takes part in a state that others save.
  void save_with_peers();
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
  void write(const std::filesystem::path* folder, const SaveStateOptions* options);

  // load_state.cpp
  void add_to(StateToLoad& load);
  void add_models(StateToLoad& load);
  void add_gradients(StateToLoad& load);
  bool has_gradients(const StateToLoad& load) const;
  void add_objects(StateToLoad& load);
  void add_random(StateToLoad& load);

  UnevenInputs& uneven_;
  std::vector<RegisteredObject> objects_;
};

} // namespace hasten::detail
