// Tensors in memory that the other ranks of the host can map, so that a collective reads them where
// they are, and how the ranks of a group find out where that is.
//
// Note [Places]
// A tensor of shared_zeros() is memory of its own with a number. A transfer of much data begins with
// an Opening of each rank: where its tensor is, or that it is elsewhere. If it is elsewhere on one
// rank, the data is copied through the rings. If a rank has not mapped a peer's memory yet, it does so
// now, and a second stage says whether all ranks could. All ranks read the same, so they choose the
// same way. Each stage of any operation can name memory that its rank has freed: the others unmap it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "shared_memory.h"

namespace hasten::detail {

/// Less data is copied: that is faster than an Opening.
constexpr size_t kLeastShared = size_t{256} << 10; // bytes

/// Zeros in memory of their own. Ordinary zeros if they have less than kLeastShared bytes, are not for
/// the CPU, or this host lacks the memory. Local.
at::Tensor shared_zeros(int64_t numel, const at::TensorOptions& options);

/// Where data of shared_zeros() is.
struct SharedPlace {
  std::shared_ptr<const SharedMemory> memory{};
  uint64_t number = 0;
  uint64_t offset = 0; // bytes
};
/// Of data that begins there; none if it is not of shared_zeros().
std::optional<SharedPlace> find_shared(const char* begin);

/// What one rank of a group knows of the others' tensors. Used by one thread at a time.
class SharedPlaces {
 public:
  struct Opening {
    uint64_t number = 0; // 0: elsewhere
    uint64_t offset = 0;
    SharedMemoryAddress address{};
  };
  enum class Way { copied, asked, direct };

  SharedPlaces(int rank, int world_size) : rank_(rank), known_(static_cast<size_t>(world_size)) {}

  /// This rank's Opening, at `to`.
  void write(const std::optional<SharedPlace>& own, char* to);
  /// [rank] The openings of all. `asked`: somebody has to map memory first, in map().
  Way read(const std::vector<const char*>& openings);
  /// Maps what read() found. Whether it could.
  bool map();
  /// Whether all ranks could: `answers` has a byte of each, not zero if so.
  Way settle(const std::vector<const char*>& answers);
  /// [rank] Where the tensors begin, if they are direct. Null for this rank.
  std::vector<const char*> data() const;
  /// The number of memory that peers may have mapped and this rank has freed, once. 0: none.
  uint64_t take_freed();
  /// Unmaps it.
  void forget(int rank, uint64_t freed);

 private:
  /// Null for this rank's own, which it need not map. Empty: a rank could not map it.
  using Mapped = std::optional<std::shared_ptr<const SharedMemory>>;

  const int rank_;
  std::vector<std::map<uint64_t, Mapped>> known_; // [rank] by number
  std::vector<Opening> openings_{}; // [rank] of the last read()
  std::vector<size_t> asked_{}; // ranks whose memory it found new
  std::set<uint64_t> named_{}; // own memory that peers may have mapped
  uint64_t looked_at_ = 0; // how much memory this process had freed when all of it was there
};

} // namespace hasten::detail
