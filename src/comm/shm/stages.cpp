#include "stages.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace hasten::detail {

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4,
              "processes and the kernel share the counters");

/// Counters may wrap around.
static bool is_above(uint32_t counter, uint32_t stage) {
  return static_cast<int32_t>(counter - stage) > 0;
}

Stages::Stages(int rank, const std::vector<char*>& memory) : rank_(static_cast<size_t>(rank)) {
  for (char* const begin : memory) {
    all_.push_back(reinterpret_cast<StageMemory*>(begin));
  }
}

bool Stages::all_above(std::atomic<uint32_t> StageMemory::*counter, uint32_t stage) {
  for (const StageMemory* peer : all_) {
    const uint32_t seen = (peer->*counter).load(std::memory_order_acquire);
    if (!is_above(seen, stage)) {
      blocked_ = {&(peer->*counter), seen};
      return false;
    }
  }
  return true;
}

char* Stages::reserve(size_t bytes) {
  const uint64_t size = (bytes + 63) / 64 * 64;
  uint64_t begin = head_;
  if (begin % kRing + size > kRing) { // the bytes of a stage lie together
    begin = (begin / kRing + 1) * kRing;
  }
  while (!kept_.empty() && (published_ - kept_.front().stage >= StageMemory::kEntries ||
                            begin + size - kept_.front().begin > kRing)) {
    if (!all_above(&StageMemory::consumed, kept_.front().stage)) {
      return nullptr;
    }
    kept_.pop_front();
  }
  reserved_ = begin;
  reserved_bytes_ = bytes;
  return reinterpret_cast<char*>(all_[rank_] + 1) + begin % kRing;
}

void Stages::publish(std::string_view text, uint64_t text_hash, uint64_t freed) {
  StageMemory::Entry& entry = own().entries[published_ % StageMemory::kEntries];
  entry.offset = reserved_ % kRing;
  entry.bytes = reserved_bytes_;
  entry.text_hash = text_hash;
  entry.freed = freed;
  entry.text_bytes = static_cast<uint32_t>(std::min(text.size(), sizeof(entry.text)));
  std::memcpy(entry.text, text.data(), entry.text_bytes);
  kept_.push_back({published_, reserved_});
  bytes_published += static_cast<int64_t>(reserved_bytes_);
  head_ = reserved_ + (reserved_bytes_ + 63) / 64 * 64;
  advance(own().published, ++published_);
}

bool Stages::arrived(uint32_t stage) { return all_above(&StageMemory::published, stage); }

const StageMemory::Entry& Stages::entry(int rank, uint32_t stage) const {
  return all_[static_cast<size_t>(rank)]->entries[stage % StageMemory::kEntries];
}

const char* Stages::bytes(int rank, uint32_t stage) const {
  return reinterpret_cast<const char*>(all_[static_cast<size_t>(rank)] + 1) +
         entry(rank, stage).offset;
}

void Stages::consume() { advance(own().consumed, ++consumed_); }

void Stages::advance(std::atomic<uint32_t>& counter, uint32_t value) {
  counter.store(value, std::memory_order_seq_cst);
  for (const StageMemory* peer : all_) {
    if (peer->sleepers.load(std::memory_order_seq_cst) > 0) {
      ::syscall(SYS_futex, &counter, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
      return;
    }
  }
}

void Stages::sleep(const Blocked& until, int spins, std::chrono::milliseconds limit) {
  for (int i = 0; i <= spins; ++i) {
    if (until.over()) {
      return;
    }
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  const timespec time{seconds.count(), std::chrono::nanoseconds(limit - seconds).count()};
  own().sleepers.fetch_add(1, std::memory_order_seq_cst);
  if (until.counter->load(std::memory_order_seq_cst) == until.seen) {
    ::syscall(SYS_futex, until.counter, FUTEX_WAIT, until.seen, &time, nullptr, 0);
  }
  own().sleepers.fetch_sub(1, std::memory_order_seq_cst);
}

} // namespace hasten::detail
