// Detects changes of parameters and gradients in the middle of a window.
//
// Autograd's version counters change with most writes. torch's optimizers and its clip write
// through data(), which changes none. Therefore the bits of a few elements are kept, too: only on
// the CPU, because a GPU would be waited for. Parameters are checked only from a backward to the
// next batch, because a forward may write them (Embedding's max_norm). Gradients of sharded models
// are not checked, because user code does not find them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "hasten/parallel/data_parallel.h"

namespace hasten::detail {

class WindowWatch {
 public:
  /// Records the current values; unsharded models only.
  void remember(const std::vector<std::shared_ptr<DataParallel>>& models);
  void forget() noexcept { seen_.clear(); }
  /// Throws InputError naming the first gradient, or, with `parameters`, the first
  /// parameter that was changed since.
  void check(bool parameters) const;

 private:
  struct Mark {
    const void* data = nullptr;
    uint32_t version = 0;
    uint64_t sample = 0;
    // A copy in place of a gradient is not a change.
    bool operator==(const Mark& other) const {
      return sample == other.sample &&
             (data == other.data ? version == other.version
                                 : data != nullptr && other.data != nullptr);
    }
  };
  struct Seen {
    const FlatSlot* slot = nullptr;
    Mark parameter{};
    Mark gradient{};
  };
  static Mark mark_of(const at::Tensor& tensor);

  std::vector<Seen> seen_{};
};

} // namespace hasten::detail
