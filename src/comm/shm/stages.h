// How ranks of one host pass bytes to each other through memory.
//
// Note [Stages]
// Each rank has memory that it alone writes and the others read: counters, a table of entries and a
// ring of bytes. In a stage every rank publishes one entry, with bytes or without, and then reads
// those of the others. All ranks go through the same stages in the same order.
//   published  Counts a rank's entries. Entry and bytes of stage i are complete once it is above i.
//   consumed   Counts the stages that a rank has read. Once it is above i on all ranks, the owner
//              may use the place of its entry i and of its bytes again.
// A rank may publish ahead of what it has read, as far as its ring and its table have room.
// No rank writes to another's memory, and there is no lock in it. So a rank that dies or freezes at
// any instruction leaves stages that never come, and nothing else; and one that wakes up after the
// others have gone on without it writes only what nobody reads.
// A thread that waits sleeps on a peer's counter with a futex, and says so in its own `sleepers`.
// The owner of the counter wakes it if any peer has sleepers. The waiting side writes `sleepers`
// and then reads the counter, the other one writes the counter and then reads `sleepers`, all in
// one order (seq_cst): so at least one of the two sees the other.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string_view>
#include <vector>

namespace hasten::detail {

/// The memory of one rank, before its ring.
struct StageMemory {
  static constexpr uint32_t kEntries = 16;
  struct Entry {
    uint64_t offset = 0; // of the bytes in the ring
    uint64_t bytes = 0;
    uint64_t text_hash = 0;
    uint64_t freed = 0; // memory that the rank does not have any more; 0: none. See Note [Places]
    uint32_t text_bytes = 0;
    char text[220]{}; // the beginning
  };
  alignas(64) std::atomic<uint32_t> published{0};
  alignas(64) std::atomic<uint32_t> consumed{0};
  alignas(64) std::atomic<uint32_t> sleepers{0};
  alignas(64) Entry entries[kEntries]{};
};

class Stages {
 public:
  /// Bytes of the ring. A stage has at most a quarter of it.
  static constexpr size_t kRing = size_t{1} << 20;
  static constexpr size_t kMaximum = kRing / 4;
  /// Memory that a rank needs.
  static constexpr size_t kBytes = sizeof(StageMemory) + kRing;
  /// Bytes that this process has published so far, in all groups, also those that peers read elsewhere.
  static inline std::atomic<int64_t> bytes_published{0};

  /// [rank] The beginnings of the ranks' memory, zeros at first. Only that of `rank` is written.
  Stages(int rank, const std::vector<char*>& memory);

  int world_size() const { return static_cast<int>(all_.size()); }
  uint32_t published() const { return published_; }

  /// Place for this rank's bytes in its next stage. Null while a peer may still read what is there.
  char* reserve(size_t bytes);
  /// Publishes the bytes that were reserved. `text`: what the stage is for. `freed`: see Entry.
  void publish(std::string_view text, uint64_t text_hash, uint64_t freed);
  /// Whether all ranks have published the stage.
  bool arrived(uint32_t stage);
  /// Of a stage that has arrived and is not consumed.
  const StageMemory::Entry& entry(int rank, uint32_t stage) const;
  const char* bytes(int rank, uint32_t stage) const;
  /// This rank does not read the next stage's bytes any more.
  void consume();

  /// What the last reserve() or arrived() waits for.
  struct Blocked {
    const std::atomic<uint32_t>* counter = nullptr;
    uint32_t seen = 0;
    bool over() const {
      return counter == nullptr || counter->load(std::memory_order_acquire) != seen;
    }
  };
  const Blocked& blocked() const { return blocked_; }
  /// Returns when the counter changes, after `limit`, or for no reason. First looks at it once and
  /// `spins` times more, then sleeps. Any thread, also beside the one that uses the other functions.
  void sleep(const Blocked& until, int spins, std::chrono::milliseconds limit);

 private:
  StageMemory& own() const { return *all_[rank_]; }
  /// Also wakes who sleeps on the counter.
  void advance(std::atomic<uint32_t>& counter, uint32_t value);
  /// Whether that counter of all ranks is above the stage. If not, blocked() is the first that is not.
  bool all_above(std::atomic<uint32_t> StageMemory::*counter, uint32_t stage);

  const size_t rank_;
  std::vector<StageMemory*> all_; // [rank]
  uint32_t published_ = 0;
  uint32_t consumed_ = 0;
  Blocked blocked_{};
  struct Kept {
    uint32_t stage;
    uint64_t begin; // position in the endless ring
  };
  std::deque<Kept> kept_; // stages that peers may still read
  uint64_t head_ = 0; // the end of the last one
  uint64_t reserved_ = 0;
  size_t reserved_bytes_ = 0;
};

} // namespace hasten::detail
