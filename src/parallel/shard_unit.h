// The parameters of one unit of a FullyShard: shards at rest, whole for a while,
// gradients on their way into shards. What is done when, and in which order on all
// ranks, is ShardSchedule's.
//
// Note [Shard layout]
// Parameters of one dtype lie in one flat shard, each from a multiple of 64 bytes on,
// its chunk padded to ceil(rows / ranks) rows on every rank: what all ranks send has
// one size. The whole of a parameter lies at `ranks` times that offset, chunk behind
// chunk, so it is contiguous. Small parameters travel together and are copied between
// rank-major messages and their places; a large one travels alone, from and to its
// place, and is not copied.
//
// Note [Identity]
// A parameter is one TensorImpl for ever; its data is the shard, or the whole. The
// whole's StorageImpl is one, too, since autograd saves views of it: only the memory
// behind it comes and goes. A gradient accumulator knows the shape that its parameter
// had, and lives as long as a graph: Tensor::set_data would leave it for the other
// shape. Here each change of data ends it, so calls of a unit have one each and their
// gradients are added here.
#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hasten/comm/communicator.h"
#include "hasten/parallel/fully_shard.h"
#include "shard_buffers.h"

namespace hasten::detail {

struct ShardTensor {
  std::string name{};
  at::Tensor parameter{};
  std::vector<int64_t> sizes{}; // of the whole
  std::vector<int64_t> shard_sizes{};
  bool trainable = true;
  int64_t dim0 = 1;
  int64_t rows = 0; // of a chunk
  int64_t inner = 1; // elements of a row
  int64_t first_row = 0; // of this rank's
  int64_t own_rows = 0;
  int64_t offset = 0; // of the chunk in the flat shard, elements
  at::Tensor shard{}; // own rows
  at::Tensor whole{}; // in the compute dtype
  // Gradients, whole: this backward's, and those that no reduction has taken yet (of
  // a rank alone: none ever does).
  at::Tensor taken{};
  at::Tensor sum{};
  at::Tensor aside{}; // a shard's, to be added at the end
  bool used = false; // got a gradient in this sum: here, then anywhere

  int64_t chunk() const { return rows * inner; }
  int64_t own_numel() const { return own_rows * inner; }
};

// What is sent in one message: a range of the flat shard.
struct ShardPiece {
  int64_t begin = 0; // elements
  int64_t numel = 0;
  bool direct = false; // one tensor, sent from its place
  bool trainable = true;
  std::vector<size_t> tensors{};
};

// Parameters of one dtype.
struct ShardFlat {
  at::ScalarType dtype = at::kFloat;
  at::ScalarType compute = at::kFloat; // of the whole
  at::ScalarType summed = at::kFloat; // of gradients
  at::ScalarType wire = at::kFloat; // of gradients on their way
  bool in_place = false; // a rank alone: the whole is the shard
  int64_t numel = 0; // of a shard, padding included
  int64_t trainable = 0; // of which the first so many have gradients
  std::vector<ShardTensor> tensors{};
  std::vector<ShardPiece> pieces{};
  at::Tensor shard{}; // [numel]
  at::Tensor whole{}; // [ranks * numel]
  at::Tensor gradient{}; // [trainable]; undefined until a reduction
};

class ShardUnit {
 public:
  enum class State { sharded, gathering, whole };

  ShardUnit(std::string name, MixedPrecisionPolicy precision, std::shared_ptr<ShardBuffers> buffers,
            int rank, int ranks);

  /// Before shard(). Returns where: flat and index in it may change until then.
  void add(const std::string& name, const at::Tensor& parameter);
  /// Makes shards of the parameters as they are.
  void shard();

  /// Whether a parameter is another tensor, or has other data, than it was given.
  /// Empty: none.
  std::string changed_parameter() const;

  // The whole. Nothing where it is in that state already.
  void start_gather(Communicator& communicator);
  void finish_gather();
  /// Parameters are shards again. Not while gathering.
  void reshard();
  State state() const { return state_; }
  int64_t whole_bytes() const;

  // Gradients.
  /// Takes the gradient off a parameter, for the reduction to come.
  void take(size_t flat, size_t index);
  /// Adds what was taken to the sums that wait here.
  void keep_taken();
  /// Sends what was taken, and what waits, to the ranks whose rows it is.
  void start_reduction(Communicator& communicator);
  void finish_reduction();
  /// What is on its way goes nowhere.
  void drop_reduction() noexcept { reductions_.clear(); }
  bool alone() const { return ranks_ == 1; }
  /// Sums shards' gradients over replicas, in place.
  std::vector<Work> sum_over(Communicator& replicas);
  /// This rank's gradient of a sum: a shard's; undefined where there is none.
  at::Tensor gradient_of(const ShardFlat& flat, const ShardTensor& tensor) const;
  void scale_gradients(double factor);
  /// The sum is zero again; what was set aside stays.
  void restart_sum();
  /// Forgets all gradients.
  void reset_gradients();

  const std::string& name() const { return name_; }
  const MixedPrecisionPolicy& precision() const { return precision_; }
  std::vector<ShardFlat>& flats() { return flats_; }
  const std::vector<ShardFlat>& flats() const { return flats_; }
  ShardUnitReport& report() { return report_; }
  /// A state's sum: makes room for it.
  void restore_sum();

 private:
  using Clock = std::chrono::steady_clock;
  // A message under way.
  struct Gather {
    std::vector<Work> handles{};
    size_t flat = 0;
    size_t piece = 0;
    at::Tensor rows{}; // undefined: in place
  };
  struct Reduction {
    Work handle{};
    at::Tensor to{}; // the gradient's range
    at::Tensor part{}; // to be added to it; undefined: summed in place
  };

  void lay_out(ShardFlat& flat) const;
  void place(ShardTensor& tensor) const;
  void make_shards(ShardFlat& flat);
  at::Tensor whole_chunks(const ShardFlat& flat, const ShardTensor& tensor) const;
  void gather(size_t index, Communicator& communicator);
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
  std::vector<Gather> gathers_{};
  std::vector<Reduction> reductions_{};
  bool summed_ = false; // the flat gradients hold a part of this sum
  ShardUnitReport report_{};
};

/// The tensor's data is `data`'s from now on; it stays the same tensor.
void put_data(const at::Tensor& tensor, const at::Tensor& data);

} // namespace hasten::detail
