// Batches that rank 0 reads and sends to all ranks.
#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "hasten/loader/batch.h"

namespace hasten {
class Communicator;
}

namespace hasten::detail {

/// What rank 0 sends for one global batch.
struct DispatchedBatch {
  std::vector<PackedBatch> parts{}; // [rank], then that of ranks without one; empty: the end
  std::vector<int64_t> repeated{}; // [rank]
  int64_t position = 0;
  bool last = false;
  std::shared_ptr<const nlohmann::json> failure{}; // failure_of() an exception in reading, or null
};

void describe_failure(DispatchedBatch& sent, const std::exception_ptr& error);
/// Rank 0 sends each rank its batches; the others give null. Collective.
DispatchedBatch dispatch(Communicator& communicator, DispatchedBatch* sent);

} // namespace hasten::detail
