// A c10d back end for processes of one host, which pass tensors through memory that they share. Any
// program of c10d can use it. A Communicator has it with CommunicatorOptions::backend "shm".
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace hasten {

/// Makes the back end of one group, whose other ranks are processes of this host, this user and this
/// PID namespace. Collective: each rank calls it with the same store, under keys that no other
/// group uses. Blocks until all have, at most `timeout`.
///
///   auto shm = hasten::make_shared_memory_backend(store, rank, size);
///   group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM, shm);
///
/// examples/16_shared_memory.cpp is a whole program.
///
/// It has all collectives of c10d, for contiguous tensors of the CPU, but alltoall with splits and
/// send and recv. Sums, AVG, MIN, MAX and PRODUCT are taken in rank order, so every rank and every run
/// has the same bits; half and bfloat16 in fp32, rounded once. _reduce_scatter_base may have an output
/// of another floating-point dtype than its input.
/// An operation of up to 256 KiB begins when it is called, and ends in wait(), isCompleted() or the
/// next call; with getFuture() it ends by itself. A thread moves larger ones. wait() takes the
/// operation's timeout, and else waits as long as it takes: a peer that died is not noticed here.
/// The ranks compare operation and tensors. If they differ, all waits throw and name two ranks.
/// Memory: 1 MiB for each rank. No file and no process remains, however the ranks end.
/// Threading: one thread starts operations, any thread may wait.
/// Throws Error with the reason, on all ranks, if one of them cannot share its memory.
c10::intrusive_ptr<c10d::Backend> make_shared_memory_backend(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
    std::chrono::milliseconds timeout = std::chrono::minutes(5));

} // namespace hasten
