// How the ranks of a world introduce themselves to each other, through its store.
//
// Note [Hellos]
// Each rank appends its hello to a list. Rank 0 reads the list, compares, and writes all hellos as one
// value, which each rank reads. So a rank reads one key, and the store answers a number of requests
// that grows with the number of ranks, not with its square.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <vector>

#include "hasten/comm/handshake.h"
#include "store.h"

namespace hasten::detail {

/// The hellos in the list, as far as this rank has read it.
struct ArrivedHellos {
  std::mutex mutex{};
  std::vector<std::optional<Hello>> hellos{}; // [rank] guarded by the mutex
  int64_t count = 0; // in the list
};

/// Appends the hello. The store has then what Liveness needs. Throws InputError if another process
/// has this rank.
void say_hello(c10d::Store& store, const Hello& own);
/// Reads what has been appended since. Blocks for no rank.
void read_arrived(c10d::Store& store, ArrivedHellos& arrived);
/// Rank 0: read_arrived(), then answers if all have arrived or one differs.
void answer_hellos(c10d::Store& store, ArrivedHellos& arrived);
/// The hellos of rank 0's answer; nullopt before it. Throws InputError at a difference, once all
/// ranks can have read it.
std::optional<std::vector<Hello>> read_answer(c10d::Store& store,
                                              const std::atomic<bool>& cancelled, const Hello& own,
                                              const World& world);

/// All of it, until `cancelled`. Runs in the store's thread. Returns the hellos of all ranks. `arrived`
/// outlives it, for the error after `deadline`: it has then the ranks that are not missing.
std::vector<Hello> exchange_hellos(c10d::Store& store, const std::atomic<bool>& cancelled,
                                   Hello own, const World& world, ArrivedHellos& arrived,
                                   CommClock::time_point deadline);

} // namespace hasten::detail
