// The parameters of one unit of a FullyShard: shards at rest, unsharded for a while, and the
// reduction of gradients into shards. ShardSchedule decides when these happen, in one order on all
// ranks.
//
// Note [Shard layout]
// Parameters of one dtype are in one flat shard, each aligned to 64 bytes. A parameter's chunk is
// padded to ceil(rows / ranks) rows, so all ranks send messages of one size. The unsharded
// parameter is at `ranks` times that offset, one rank's chunk after the other, so it is contiguous.
// Small parameters share a message and are copied between rank-major messages and their places. A
// large one has its own message, from and to its place, without a copy. Its gradient has one, too,
// unless it needs a copy anyway on a device, for a cast or for padding: then it shares that of the
// small ones, because a copy is one launch for all. The messages of a unit start together. A layer of
// ours makes a large gradient in memory that the ranks share (reserve_gradient_place); others are
// staged.
//
// Note [Identity]
// A parameter stays one TensorImpl; its data is the shard or the unsharded parameter. The latter
// keeps one StorageImpl, because autograd saves views of it; only its memory is allocated and
// freed. A gradient accumulator records its parameter's shape and lives as long as a graph.
// Tensor::set_data would leave an accumulator with the other shape. Here each change of data
// resets the accumulator. So each call of a unit has its own, and their gradients are added here.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <ranges>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hasten/comm/communicator.h"
#include "hasten/parallel/fully_shard.h"
#include "shard_buffers.h"

namespace hasten::detail {

struct ShardFlat;

struct ShardTensor {
  ShardedParameter* entry = nullptr; // of the FullyShard
  ShardFlat* flat = nullptr; // which it is a part of, once sharded
  std::vector<int64_t> shard_sizes{};
  bool trainable = true;
  int64_t dim0 = 1;
  int64_t rows = 0; // of a chunk
  int64_t inner = 1; // elements of a row
  int64_t offset = 0; // of the chunk in the flat shard, elements
  at::Tensor shard{}; // own rows
  at::Tensor whole{}; // unsharded, in the compute dtype
  // Unsharded gradients: of this backward, and those that have not been reduced yet (with one rank
  // they never are).
  at::Tensor taken{};
  at::Tensor sum{};
  at::Tensor earlier{}; // gradient of the shard, to be added at the end
  bool sent_alone = false; // its gradient
  bool used = false; // got a gradient in this sum: here, then on any rank

  int64_t chunk() const { return rows * inner; }
  int64_t own_numel() const { return entry->rows * inner; }
};

// The content of one message: a range of the flat shard.
struct ShardPiece {
  int64_t begin = 0; // elements
  int64_t numel = 0;
  bool direct = false; // one tensor, sent from its place
  std::vector<size_t> tensors{};
  std::vector<int64_t> widths{}; // of each tensor's chunk and of what pads it, elements
  std::vector<at::Tensor> places{}; // of gathered ones, unsharded, [ranks, width]
};

// Parameters of one dtype.
struct ShardFlat {
  at::ScalarType dtype = at::kFloat;
  at::ScalarType compute = at::kFloat; // of unsharded parameters
  at::ScalarType summed = at::kFloat; // of sums of gradients
  at::ScalarType wire = at::kFloat; // of gradients in messages
  at::Device device{at::kCPU};
  bool in_place = false; // one rank: the shard is the unsharded parameter
  int64_t numel = 0; // of a shard, padding included
  int64_t trainable = 0; // the first elements, which have gradients
  std::vector<ShardTensor> tensors{};
  std::vector<ShardPiece> gathered{};
  std::vector<ShardPiece> reduced{};
  at::Tensor shard{}; // [numel]
  at::Tensor whole{}; // [ranks * numel]
  at::Tensor gradient{}; // [trainable]; undefined until a reduction
  at::Tensor zeros{}; // bytes that pad gradients
};

class ShardUnit {
 public:
  enum class State { sharded, unsharding, unsharded };

  ShardUnit(std::string name, MixedPrecisionPolicy precision, std::shared_ptr<ShardBuffers> buffers,
            int rank, int ranks);

  /// Adds a parameter, and computes this rank's rows of it. Call it before shard(). `device`: where
  /// the parameter will be then.
  void add(ShardedParameter& entry, const at::Device& device);
  /// Shards the parameters.
  void shard();

  /// The name of a parameter whose tensor or data was replaced from outside; empty: none.
  std::string changed_parameter() const;

  // Unsharding. These do nothing if the unit is already in that state.
  /// Starts the all-gathers. wait_for_unshard() completes them.
  void unshard(Communicator& communicator);
  void wait_for_unshard();
  /// Reshards the parameters. Not while unsharding.
  void reshard();
  State state() const { return state_; }
  int64_t whole_bytes() const;

  // Gradients.
  /// Memory for an unsharded gradient that is sent from there; undefined if it is not.
  at::Tensor reserve_gradient_place(const ShardTensor& tensor);
  /// Moves the gradient from a parameter to this unit, for the next reduction.
  static void take(ShardTensor& tensor);
  /// Adds the taken gradients to the unsharded sums.
  void keep_taken();
  /// Reduce-scatters the taken gradients and the unsharded sums.
  void start_reduction(Communicator& communicator);
  void finish_reduction();
  /// Discards the reductions in flight.
  void drop_reduction() noexcept {
    reducing_ = {};
    additions_ = {};
  }
  bool alone() const { return ranks_ == 1; }
  /// Sums shards' gradients over replicas, in place.
  std::vector<Work> sum_over(Communicator& replicas);
  /// This rank's shard of the summed gradient; undefined if there is none.
  at::Tensor gradient_of(const ShardTensor& tensor) const;
  void scale_gradients(double factor);
  /// Forgets all gradients, but for the earlier ones, which are added at the end.
  void restart_sum();

  const std::string& name() const { return name_; }
  const MixedPrecisionPolicy& precision() const { return precision_; }
  /// The tensors of all flats.
  auto tensors() { return flats_ | std::views::transform(&ShardFlat::tensors) | std::views::join; }
  ShardUnitReport& report() { return report_; }
  /// Allocates the sum, for loading a state.
  void restore_sum();

 private:
  using Clock = std::chrono::steady_clock;

  void lay_out(ShardFlat& flat) const;
  void make_shards(ShardFlat& flat);
  void allocate_whole(ShardFlat& flat, Communicator& communicator);
  void all_gather(ShardFlat& flat, std::string_view what, std::vector<Collective>& operations);
  at::Tensor rows_to_send(ShardFlat& flat, const ShardPiece& piece);
  void wait(Work& handle);

  // Set at construction.
  std::string name_;
  MixedPrecisionPolicy precision_;
  std::shared_ptr<ShardBuffers> buffers_;
  int rank_;
  int ranks_;

  std::vector<ShardFlat> flats_{};
  State state_ = State::sharded;
  Work gathering_{};
  std::vector<std::pair<const ShardPiece*, at::Tensor>> gathers_{}; // not sent to their places
  Work reducing_{};
  std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>> additions_{}; // sums, parts
  bool summed_ = false; // the flat gradients hold a part of this sum
  ShardUnitReport report_{};
};

/// Replaces the tensor's data by `data`'s; it stays the same tensor.
void put_data(const at::Tensor& tensor, const at::Tensor& data);

} // namespace hasten::detail
