// Saved tensors on disk or in the host's memory, and a report of a step's memory.
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
  /// Folder of the file. The file has no name and disappears with the last graph that uses it.
  /// Empty: the system's temporary folder.
  std::filesystem::path folder{};
  /// Smaller tensors stay where they are. In bytes.
  int64_t min_bytes = 1 << 20;
};

/// While it lives, tensors that this thread's forward saves for backward, and the inputs of
/// regions, go elsewhere. Parameters stay. A storage that several tensors share is copied once.
///   * Tensors of the CPU go to a mapped file. Backward maps the file and reads it page by page. The
///     page cache decides what goes to disk. Cost: one copy of each tensor in forward.
///   * Tensors of other devices go to pinned memory of the host, on a side stream. The host
///     waits for no copy. The device's stream waits for the third-last one, so that at most two
///     storages that forward no longer uses are on the device. Backward fetches each storage and, in
///     advance, the one that was offloaded before it. Cost: two copies between host and device.
///     As without offload, nothing may write into a saved tensor before its backward.
/// Threading: affects only its thread.
/// Throws InputError if no file can be made in the folder, and Error if the disk is full or another
/// autograd engine is installed.
class [[nodiscard]] SavedTensorOffload {
 public:
  explicit SavedTensorOffload(const SavedTensorOffloadOptions& options = {});
  SavedTensorOffload(const SavedTensorOffload&) = delete;
  SavedTensorOffload& operator=(const SavedTensorOffload&) = delete;
  ~SavedTensorOffload();
  /// Bytes of the file, and of the host's pinned memory, in use now.
  int64_t bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// Memory of one block's call. Peaks are bytes above those before the step.
struct BlockMemory {
  std::string name{};
  /// Bytes that forward left: saved tensors and the output.
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
  /// The report as a table.
  std::string text() const;
};

/// Runs one forward and backward of `loss` with the enabled checkpointing and reports the memory.
/// Restores gradients, buffers and random state. Installs the memory meter. Call it before
/// prepare(). Local.
ActivationReport measure_activations(const std::shared_ptr<torch::nn::Module>& model,
                                     const std::function<at::Tensor()>& loss);

} // namespace hasten
