// What a prepared loader is told, and what the accelerator knows of it.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <typeinfo>
#include <vector>

#include "hasten/core/stateful.h"

namespace hasten {

/// How prepared loaders share batches out over ranks; Accelerate's words.
struct DataLoaderConfiguration {
  /// False: a loader's batch is one rank's; ranks × batches make a step. True: it
  /// is cut into equal parts, so that a step holds the same rows on any number of
  /// ranks. Where rows do not divide, the first ranks have one more.
  bool split_batches = false;
  /// Rank 0 alone reads, and sends every rank its batches: for streams that only
  /// one process can read. The other ranks give a range of the same type, which is
  /// not touched. Costs world_size times the bandwidth, and one batch a rank is
  /// read ahead on rank 0. Leave the loop on all ranks in the same turn.
  bool dispatch_batches = false;
  /// The tail of the data is filled up with rows from its beginning, so that every
  /// rank gets equally many batches of equal size. gather_for_metrics leaves the
  /// repeated rows out again; training counts them twice. False: every row once,
  /// and ranks with smaller batches, or without rows, at the end. Ranges that do
  /// not deal themselves keep one batch for each rank in memory.
  bool even_batches = false;
  /// Copies to a GPU go from pinned memory without waiting. No effect on the CPU.
  bool non_blocking = false;
  /// Batches read ahead in a background thread (hasten/data/prefetch.h), beside
  /// the one that is always read ahead. 0: none, no thread.
  int64_t prefetch = 0;
  /// Where every rank reads the whole range, ranks compare a checksum of it (of a sample
  /// of its numbers) in windows and gather_for_metrics, after the first round and at the
  /// pass's end: a difference is an error that names the range. False: for data sets
  /// that draw random numbers in threads or from generators of their own.
  bool compare_batches = true;
};

namespace detail {

class AcceleratorCore;

// What the core knows of a prepared loader.
struct LoaderState {
  DataLoaderConfiguration config{};
  bool training = false; // windows are opened on its batches
  bool open = false; // between begin() and the end every rank agreed on
  bool last = false; // the batch handed out is this rank's last
  std::optional<int64_t> rows{}; // of the batch handed out
  bool even = false; // fills the last round up with rows of the first
  int64_t repeated = 0; // such rows, at the end of the batch handed out
  bool stand_in = false; // all of them: the batch weighs nothing
  std::vector<at::Tensor> random{}; // torch's generators before a stand-in
  bool handed_out = false; // a batch, whose loop goes on
  std::string range{}; // which it is, for messages
  // Checksums of this pass: the first round, all, what was compared last. 0: none.
  uint64_t first_read = 0;
  uint64_t read = 0;
  mutable uint64_t compared = 0;
  uint64_t index = 0; // in order of preparation, the same on every rank
  std::weak_ptr<void> loop{}; // what the loop's iterators hold
  std::weak_ptr<Stateful> position{}; // expired: its handles are gone
};

// Where a pass over a loader stands. What `cursor` counts: rows or batches over
// all ranks, or this rank's batches.
struct LoaderPosition {
  const char* unit = "rows";
  bool active = false; // between begin() and the end every rank agreed on
  uint64_t epoch = 0; // of the next begin()
  int64_t start = 0; // what the next begin() leaves out
  int64_t cursor = 0; // handed out in this pass
  int64_t read = 0; // `cursor` of what is read ahead
  at::Tensor random{}; // what the range drew from at begin()
  at::Tensor start_random{}; // for the next begin()
};
void save_position(const LoaderPosition& position, const Stateful* range, NamedTensors& tensors,
                   nlohmann::json& values);
void load_position(LoaderPosition& position, Stateful* range, const NamedTensors& tensors,
                   const nlohmann::json& values);
// None: ranges draw from torch's own.
std::optional<uint64_t> core_order_seed(const AcceleratorCore& core);
// "loader 1 (std::vector)"; 0: one that has no number.
std::string range_name(const std::type_info& type, uint64_t index);
// The generator that a range draws from in an epoch, the same on every rank.
at::Tensor order_state(uint64_t seed, uint64_t index, uint64_t epoch);
// Torch's default generator of the CPU.
at::Tensor random_state();
void set_random_state(const at::Tensor& state);
// While it lives, torch's default generator of the CPU draws from `state`, which goes
// on; behind it, the generator is as it was. Undefined: nothing happens.
class RangeRandom {
 public:
  explicit RangeRandom(at::Tensor& state) : state_(state) {
    if (state_.defined()) {
      before_ = random_state();
      set_random_state(state_);
    }
  }
  ~RangeRandom() {
    if (state_.defined()) {
      state_ = random_state();
      set_random_state(before_);
    }
  }
  RangeRandom(const RangeRandom&) = delete;
  RangeRandom& operator=(const RangeRandom&) = delete;

 private:
  at::Tensor& state_;
  at::Tensor before_{};
};
// The CPU's and that of `device`, where it is another.
std::vector<at::Tensor> random_states(const at::Device& device);
void set_random_states(const at::Device& device, const std::vector<at::Tensor>& states);

// Non-template doors into the core, so that this header needs none of it.
void core_begin_range(AcceleratorCore& core, LoaderState& loader);
void core_end_range(AcceleratorCore& core, LoaderState& loader);
// Until its loop ends, `loader` is the innermost.
void core_enter_loop(AcceleratorCore& core, const std::shared_ptr<LoaderState>& loader);
at::Device core_device(const AcceleratorCore& core);
int core_rank(const AcceleratorCore& core);
int core_world_size(const AcceleratorCore& core);
[[noreturn]] void throw_no_empty_batch();
// This rank has no row of `range` to train on: ends the others, too.
[[noreturn]] void core_refuse_no_row(AcceleratorCore& core, const std::string& range);
[[noreturn]] void throw_cannot_deal(const char* option);
void check_configuration(const DataLoaderConfiguration& config, int64_t skip);

} // namespace detail

} // namespace hasten
