// Saved tensors on disk, and where a step's memory goes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace hasten {

struct SavedTensorOffloadOptions {
  /// Where the file is made, which has no name and is gone with the last graph
  /// that uses it. Empty: the system's folder for temporary files.
  std::filesystem::path folder{};
  /// Smaller tensors stay in memory. Bytes.
  int64_t min_bytes = 1 << 20;
};

/// While it lives, what this thread's forward saves for backward goes to a mapped
/// file instead of memory: plain code's saved tensors, and the inputs of regions.
/// Parameters stay; tensors of one storage are written once. Backward maps the
/// file, page by page as it reads. The page cache decides what is really written.
/// Costs a copy of each tensor in forward. Threading: this thread's.
/// Throws InputError where the folder takes no file; Error where it is full.
class [[nodiscard]] SavedTensorOffload {
 public:
  explicit SavedTensorOffload(const SavedTensorOffloadOptions& options = {});
  SavedTensorOffload(const SavedTensorOffload&) = delete;
  SavedTensorOffload& operator=(const SavedTensorOffload&) = delete;
  ~SavedTensorOffload();
  /// Bytes of the file that are in use now.
  int64_t bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Of one block's call, in bytes beyond what was there before the step.
struct BlockMemory {
  std::string name{};
  /// What its forward left: saved for backward, and its output.
  int64_t saved_bytes = 0;
  int64_t forward_peak = 0;
  int64_t backward_peak = 0;
};

struct ActivationReport {
  /// In the order of calls.
  std::vector<BlockMemory> blocks{};
  int64_t peak_bytes = 0;
  /// "backward of encoder.layer.3", "after the last block", …
  std::string peak_at{};
  /// A table.
  std::string text() const;
};

/// Runs one forward and backward of `loss` under what is enabled for the model and
/// says where its memory goes. Gradients, buffers and random state are as before.
/// Installs the memory meter. Before prepare(). Local.
ActivationReport measure_activations(const std::shared_ptr<torch::nn::Module>& model,
                                     const std::function<at::Tensor()>& loss);

} // namespace hasten
