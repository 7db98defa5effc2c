// What nobody but the window may change before it is complete.
//
// Autograd's version counters move with most writes; torch's optimizers and its clip write
// through data(), which moves none, so the bits of a few elements are kept, too: of the
// CPU's, since a GPU would be waited for. Parameters are looked at from a backward to the
// next batch alone: a forward may write them (Embedding's max_norm). Gradients of sharded
// models are where nobody else finds them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "hasten/parallel/data_parallel.h"

namespace hasten::detail {

class WindowWatch {
 public:
  /// Of whole models, as they are now.
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
    // A copy in a gradient's place is as good.
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
