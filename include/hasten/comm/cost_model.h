// What collectives cost between the ranks of a group: the alpha-beta model, in which an operation on
// b bytes takes alpha + beta * b seconds.
//
//   const hasten::CostModel model = hasten::measure_cost_model(*communicator);
//   model.operations.front().alpha; // of all_reduce
//
// Threading: none needed. Design: docs/design/communication.md
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hasten/comm/communicator.h"

namespace hasten {

struct OperationCost {
  struct Point {
    int64_t bytes = 0;
    /// Of a blocking call, on the slowest rank.
    double seconds = 0;
  };

  Collective::Kind kind = Collective::Kind::all_reduce;
  /// Ascending in bytes; at least one. Bytes of all ranks' rows, or of the whole tensor.
  std::vector<Point> points{};
  /// Latency in seconds, and seconds per byte (1 / bandwidth), both >= 0: of the line through the first
  /// and the last point.
  double alpha = 0;
  double beta = 0;
};

struct CostModel {
  std::string backend{};
  int world_size = 1;
  double barrier_seconds = 0;
  /// all_reduce, reduce_scatter, all_gather, broadcast. A broadcast's time is that of one of
  /// world_size operations, one from each rank, as FullyShard gathers parameters.
  std::vector<OperationCost> operations{};
};

/// Measures the group's back end with tensors of allocate_tensor() on the device of its options,
/// 4 KiB to 64 MiB, while every rank does the same. The input of reduce_scatter is not of
/// allocate_tensor(), because the gradients of FullyShard are not. Leaves out sizes that would take
/// too long. The numbers are equal on all ranks. In a world of one rank it measures nothing.
/// Collective, blocking, less than a second. Memory: 160 MiB meanwhile.
/// Throws CommunicationError if a peer fails.
CostModel measure_cost_model(Communicator& group);

/// Where the ranks are and what is between them: "4 ranks on 2 hosts (a: 0-1, b: 2-3): memory inside a
/// host, Gloo over eth0 between (940 Mbit/s, 0.20 ms)". Rate and latency are those of rank 0's host in
/// an all_reduce of 256 KiB to 16 MiB, which takes about a tenth of a second. Empty for a group on one
/// host, without communication. Collective, blocking. Throws CommunicationError if a peer fails.
std::string describe_hosts(Communicator& group);

} // namespace hasten
