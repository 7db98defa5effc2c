// A CommHook replaces the all-reduce that sums a bucket of gradients over the ranks, to send less.
// It is torch's register_comm_hook with a sum instead of a mean, because gradients already contain
// the weights of their batches.
//
//   ddp.register_comm_hook(std::make_shared<Bf16CompressHook>());
//
// Threading: the thread of the backward, one call at a time. A hook belongs to one model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
#include <unordered_map>
#include <vector>

#include "hasten/comm/communicator.h"
#include "hasten/core/stateful.h"

namespace hasten {

struct BucketGradient {
  /// The parameter's name. It stays the same when buckets change.
  std::string name{};
  /// A view of the bucket's buffer in the parameter's shape.
  at::Tensor gradient{};
};

/// A contiguous part of the flat gradients, all of one dtype.
struct GradientBucket {
  /// Position in the order of reduction, from 0, the same on every rank.
  int64_t index = 0;
  /// True for the last bucket of this reduction.
  bool last = false;
  /// 1-d, with zeros as padding between the gradients. Contains this rank's gradients before and
  /// the sum over ranks after the reduction, in place.
  at::Tensor buffer{};
  std::vector<BucketGradient> gradients{};
};

class CommHook : public Stateful {
 public:
  /// Continues a reduction; may wait and communicate. Returns true if it must be called again after
  /// the other buckets had a call. Called in the order of the buckets after the last of them was
  /// started. Not called after a backward that failed.
  using Step = std::function<bool()>;

  /// Starts to sum `bucket` while backward runs: issues its first collective and does not wait for
  /// peers. Every rank calls it with the same buckets in the same order. Gradients are already
  /// scaled to the mean of the joined batch, so what a hook keeps from one optimizer step to the
  /// next has one scale.
  virtual Step reduce(Communicator& communicator, const GradientBucket& bucket) = 0;

  /// Name and settings; must be the same on all ranks.
  virtual std::string description() const = 0;

  /// Bytes sent per element of an fp32 bucket; 4 for the plain all-reduce.
  virtual double bytes_per_number() const { return 4; }

  /// Clears what the hook keeps of earlier reductions. Called on all ranks after the group of ranks
  /// has changed. Local.
  virtual void reset() {}

  /// This rank's state. It differs between ranks, so each rank saves its own.
  void save_state(NamedTensors&, nlohmann::json&) const override {}
  void load_state(const NamedTensors&, const nlohmann::json&) override {}
};

/// Sends gradients of fp32 and fp64 in half precision (fp16) and sums them in fp32. Each rank sums
/// one part of the bucket in rank order, and every rank gets that sum rounded once. This sends half
/// the bytes of the plain all-reduce on any number of ranks. Relative error of a sum: 2^-11 for its
/// rounding and 2^-11 for each rank's term. Sums above 65504 become infinite; use bfloat16 then.
/// Buckets of 16-bit gradients use the plain all-reduce. Memory: three 16-bit copies and 1/world
/// fp32 copies of the buckets in flight.
class Fp16CompressHook : public CommHook {
 public:
  Step reduce(Communicator& communicator, const GradientBucket& bucket) override;
  std::string description() const override { return "fp16_compress"; }
  double bytes_per_number() const override { return 2; }
};

/// The same with bfloat16: fp32's range, relative error 2^-8. It has no error feedback. An
/// element's error is proportional to that element, while 8 bits lose elements far below a block's
/// largest in every step. So error feedback would cost a copy of the buckets without a visible
/// effect on training, also for the averaged changes of Local SGD.
class Bf16CompressHook : public CommHook {
 public:
  Step reduce(Communicator& communicator, const GradientBucket& bucket) override;
  std::string description() const override { return "bf16_compress"; }
  double bytes_per_number() const override { return 2; }
};

/// Sends fp32 gradients with 8 bits per element and one scale for each 256 elements: a quarter of
/// the bytes. Sums are fp32. The error of an element is 2^-8 of the largest in its block, for each
/// rank's term and for the sum. With error feedback the error is added to the next reduction,
/// unless the bucket has other gradients by then. Other dtypes use the plain all-reduce. Memory:
/// error feedback keeps one copy of the buckets, and 1/world of one.
class Int8CompressHook : public CommHook {
 public:
  explicit Int8CompressHook(bool error_feedback = true) : error_feedback_(error_feedback) {}
  Step reduce(Communicator& communicator, const GradientBucket& bucket) override;
  std::string description() const override {
    return error_feedback_ ? "int8_compress" : "int8_compress without feedback";
  }
  double bytes_per_number() const override { return 1 + 4.0 / 256; }
  void reset() override { errors_.clear(); }
  /// This rank's errors.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  struct Lost {
    uint64_t layout = 0; // hash of the bucket's gradients and of the ranks
    at::Tensor numbers{}; // of this rank's [world * part], then of its sum [part]
  };
  bool error_feedback_;
  std::unordered_map<int64_t, Lost> errors_{}; // by the bucket's index
};

struct PowerSgdOptions {
  /// Columns of the two factors that are sent for a gradient of n x m: r(n + m) elements instead of
  /// n m. >= 1.
  int64_t matrix_approximation_rank = 1;
  /// Reductions by plain all-reduce before compression starts. At least 2 with error feedback or
  /// warm start, because early gradients change a lot.
  int64_t start_powerSGD_iter = 1000;
  /// Compresses an n x m gradient (m: all dimensions but the first) if n m / ((n + m) rank) is
  /// above this. Vectors are never compressed. >
  /// 0.
  double min_compression_rate = 2;
  /// Adds one step's error to the next step's gradient. Memory: one copy of the compressed
  /// gradients.
  bool use_error_feedback = true;
  /// Starts from the last step's factor instead of random values.
  bool warm_start = true;
  /// Seed of the random factors; the same on all ranks.
  uint64_t random_seed = 0;
};

/// PowerSGD: a gradient matrix M (first dimension by all others) is sent as the product P Q^T of
/// rank r, by one step of power iteration: P = orth(sum M Q), Q = sum M^T P. Source: Vogels,
/// Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
/// Optimization", NeurIPS 2019, algorithms 1 and 2. Error feedback keeps this rank's M - P (M^T
/// P)^T. All uncompressed gradients share one plain all-reduce.
class PowerSgdHook : public CommHook {
 public:
  /// Throws InputError for options out of range.
  explicit PowerSgdHook(PowerSgdOptions options = {});

  Step reduce(Communicator& communicator, const GradientBucket& bucket) override;
  std::string description() const override;

  /// Number of reductions started.
  int64_t iteration() const { return iteration_; }
  /// Elements of the gradients divided by elements sent, since construction. 1 while nothing is
  /// compressed.
  double compression_rate() const;
  double bytes_per_number() const override { return 4 / compression_rate(); }
  /// Starts again with the uncompressed reductions.
  void reset() override;

  /// Iteration, factors and this rank's error.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  struct Matrix;
  struct Pending;
  bool compresses(const at::Tensor& gradient) const;
  Matrix make_matrix(const BucketGradient& entry);
  void start(Communicator& communicator, Pending& pending);
  // Sends one factor of all matrices. The factors become views of the message, which is the sum
  // once factor_sum is complete.
  static void sum_factors(Communicator& communicator, Pending& pending, at::Tensor Matrix::*factor,
                          const char* name);
  bool send_second_factor(Communicator& communicator, Pending& pending);
  void finish(Pending& pending);

  PowerSgdOptions options_;
  int64_t iteration_ = 0;
  int64_t numbers_ = 0; // elements of gradients
  int64_t sent_ = 0;
  NamedTensors factors_{}; // Q
  NamedTensors errors_{};
};

} // namespace hasten
