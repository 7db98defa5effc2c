// Configuration of prepared loaders, and their state in the accelerator.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "hasten/core/device.h"
#include "hasten/core/stateful.h"

namespace hasten {

class Communicator;

/// How prepared loaders distribute batches over ranks. The names are Accelerate's.
struct DataLoaderConfiguration {
  /// False: each rank gets a whole batch of the loader, so an optimizer step has world_size times
  /// as many samples. True: each batch is split evenly over ranks, so a step has the same samples
  /// for any world size. If the number of samples is not divisible, the first ranks get one more.
  bool split_batches = false;
  /// Only rank 0 reads, and it sends every rank its batches: for streams that only one process can
  /// read. The other ranks pass a range of the same type, which is not read. Costs world_size times
  /// the bandwidth, and rank 0 reads one batch per rank ahead. All ranks must leave the loop in the
  /// same iteration.
  bool dispatch_batches = false;
  /// Fills the last batches with samples from the beginning of the data, so that every rank gets
  /// equally many batches of equal size. gather_for_metrics drops the repeated samples; training
  /// counts them twice. False: each sample occurs once, and at the end some ranks have smaller
  /// batches or no samples. Ranges without shard() keep one batch per rank in memory.
  bool even_batches = false;
  /// Copies to a device are asynchronous and from pinned memory, into which the thread that reads
  /// the batches copies them first. False: each copy blocks the host. No effect on the CPU.
  bool non_blocking = true;
  /// Number of batches that a background thread prefetches (hasten/data/prefetch.h), in addition to
  /// the one that is always read ahead. 0: no thread.
  int64_t prefetch = 0;
  /// If every rank reads the whole range, the ranks compare a checksum of some of its elements.
  /// They do so in windows and in gather_for_metrics, after the first global batch and at the
  /// end of the pass. A difference is an error that names the range. Set it to false for data sets
  /// that draw random values in threads or from their own generators.
  bool compare_batches = true;
};

namespace detail {

// The accelerator's state of a prepared loader.
struct LoaderState {
  DataLoaderConfiguration config{};
  bool training = false; // accumulate() opens windows on its batches
  bool open = false; // from begin() to the end that all ranks agree on
  bool last = false; // the current batch is this rank's last
  std::optional<int64_t> rows{}; // samples of the current batch
  bool even = false; // the last batches repeat samples of the first
  int64_t repeated = 0; // repeated samples at the end of the current batch
  bool stand_in = false; // the current batch is a stand-in of weight 0
  GeneratorStates random{}; // torch's generators before a stand-in
  bool handed_out = false; // there is a current batch
  bool own_end = false; // inside LocalSGD a pass ends with this rank's data
  std::string range{}; // its name in messages
  // Checksums of this pass: of its first global batch, of all so far, and the one that was compared
  // last. 0: none.
  uint64_t first_read = 0;
  uint64_t read = 0;
  mutable uint64_t compared = 0;
  uint64_t index = 0; // in order of preparation, the same on every rank
  std::weak_ptr<void> loop{}; // the loop's iterators hold it
  std::weak_ptr<Stateful> position{}; // expired: no handle is left
};

// Position of a pass over a loader. `cursor` counts samples or batches of all ranks, or this rank's
// batches.
struct LoaderPosition {
  const char* unit = "rows";
  bool active = false; // from begin() to the end that all ranks agree on
  uint64_t epoch = 0; // of the next begin()
  int64_t start = 0; // the next begin() skips as many
  int64_t cursor = 0; // returned in this pass
  at::Tensor random{}; // the generator from which the range drew at begin()
  at::Tensor start_random{}; // for the next begin()
};

// By which ranks agree, batch by batch, whether one of them has a batch. One answer may be pending.
class RollCall {
 public:
  virtual ~RollCall() = default;
  // Starts the question about the next batch. Collective.
  virtual void start(bool here) = 0;
  virtual bool pending() const = 0;
  // The largest value of all ranks. Collective, blocking.
  virtual int64_t largest(int64_t own) = 0;
  // Whether any rank has it. Throws CommunicationError on every rank if one is elsewhere. Collective.
  virtual bool wait() = 0;
};

// What a prepared loader needs of the accelerator that prepared it.
class LoaderLink {
 public:
  virtual ~LoaderLink() = default;

  virtual Communicator& communicator() const = 0;
  virtual const at::Device& device() const = 0;
  // The seed of ranges that draw from torch's generator. None: they draw as they are.
  virtual std::optional<uint64_t> order_seed() const = 0;
  // A pass begins, and ends on all ranks. Collective for training loaders.
  virtual void begin(LoaderState& loader) const = 0;
  virtual void end(LoaderState& loader) const = 0;
  virtual std::unique_ptr<RollCall> roll_call(const LoaderState& loader) const = 0;
  // False inside LocalSGD, where windows are those of one rank.
  virtual bool trains_together() const = 0;
  // Until its loop ends, `loader` is the innermost.
  virtual void enter_loop(const std::shared_ptr<LoaderState>& loader) const = 0;

  int rank() const;
  int world_size() const;
};
} // namespace detail

} // namespace hasten
