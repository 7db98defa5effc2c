// How a bucket of gradients gets summed over the ranks: a hook replaces the plain
// all-reduce, to send less. torch's register_comm_hook, with a sum for a mean:
// weights of batches are in the gradients already.
//
//   ddp.register_comm_hook(std::make_shared<Bf16CompressHook>());
//
// Threading: the thread of the backward, one call at a time. A hook serves one
// model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "hasten/comm/communicator.h"
#include "hasten/core/stateful.h"

namespace hasten {

struct BucketGradient {
  /// The parameter's name; stays the same where buckets do not.
  std::string name{};
  /// In the parameter's shape, a view of the bucket's buffer.
  at::Tensor gradient{};
};

/// A contiguous piece of the flat gradients, all of one dtype.
struct GradientBucket {
  /// Buckets come in this order on every rank, 0 first.
  int64_t index = 0;
  /// The last of this reduction.
  bool last = false;
  /// 1-d, padding between the gradients included (zeros). This rank's share
  /// goes in, the sum over ranks comes out, in place.
  at::Tensor buffer{};
  std::vector<BucketGradient> gradients{};
};

class CommHook : public Stateful {
 public:
  /// Goes on with a reduction: may wait and communicate. True: call it again,
  /// after the other buckets had their turn. Called in the order of the buckets
  /// once the last of them was started; dropped where a backward failed.
  using Step = std::function<bool()>;

  /// Starts summing `bucket` while backward goes on: issues its first
  /// collective and does not wait for peers. Every rank comes here with the same
  /// buckets in the same order. Gradients are those of the joined batch's mean
  /// (scaled before, not after), so what a hook keeps from one step to the next
  /// has one scale.
  virtual Step reduce(Communicator& communicator, const GradientBucket& bucket) = 0;

  /// Name and settings; must be the same on all ranks.
  virtual std::string description() const = 0;

  /// Sent for each number of an fp32 bucket, where the plain all-reduce has 4.
  virtual double bytes_per_number() const { return 4; }

  /// Forgets what it keeps of earlier reductions, after the group of ranks has
  /// become another one. On all ranks; local.
  virtual void reset() {}

  /// State of a rank: it differs between ranks and is saved by each.
  void save_state(NamedTensors&, nlohmann::json&) const override {}
  void load_state(const NamedTensors&, const nlohmann::json&) override {}
};

/// Sends half-precision numbers (fp16) of fp32 and fp64 gradients and sums them
/// in fp32: each rank sums one part of the bucket, in rank order, and every rank
/// gets that sum rounded once. Half the bytes of the plain all-reduce on any
/// number of ranks. Relative error of a sum: 2^-11 for its rounding and as much
/// for each rank's share; above 65504 it is infinite (then use bfloat16).
/// Buckets of 16-bit gradients go the plain way. Memory: three 16-bit copies and
/// 1/world fp32 copies of the buckets under way.
class Fp16CompressHook : public CommHook {
 public:
  Step reduce(Communicator& communicator, const GradientBucket& bucket) override;
  std::string description() const override { return "fp16_compress"; }
  double bytes_per_number() const override { return 2; }
};

/// The same with bfloat16: fp32's range, 2^-8 relative error. No error feedback:
/// each number's error is a share of that number, so none is lost from step to
/// step as those far below a block's largest are with eight bits, and a copy of the
/// buckets would buy nothing that training shows (averaged changes of Local SGD
/// included).
class Bf16CompressHook : public CommHook {
 public:
  Step reduce(Communicator& communicator, const GradientBucket& bucket) override;
  std::string description() const override { return "bf16_compress"; }
  double bytes_per_number() const override { return 2; }
};

/// Eight bits of fp32 numbers, with one scale for each 256 of them: a quarter of
/// the bytes. Sums are fp32; error of a number: 2^-8 of the largest in its block,
/// for each rank's share and for the sum. With error feedback what was lost is
/// added to the next reduction, and forgotten where a bucket has got other gradients
/// since. Other dtypes go the plain way. Memory: error feedback keeps a copy of the
/// buckets, and 1/world of one.
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
  /// Columns of the two factors that are sent for a gradient of n x m: r(n + m)
  /// numbers instead of n m. >= 1.
  int64_t matrix_approximation_rank = 1;
  /// Reductions that go the plain way before compression starts. With error
  /// feedback or warm start at least 2, as early gradients change a lot.
  int64_t start_powerSGD_iter = 1000;
  /// A gradient is compressed where n m > (n + m) r times this; vectors never
  /// are. > 0.
  double min_compression_rate = 2;
  /// Adds what one step left out to the next step's gradient. Memory: one copy
  /// of the compressed gradients.
  bool use_error_feedback = true;
  /// Starts from the last step's factor instead of random numbers.
  bool warm_start = true;
  /// Of the random factors; the same on all ranks.
  uint64_t random_seed = 0;
};

/// PowerSGD: a gradient matrix M (first dimension by all others) is sent as the
/// product P Q^T of rank r, by one step of power iteration: P = orth(sum M Q),
/// Q = sum M^T P. Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical
/// Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019,
/// algorithms 1 and 2. Error feedback keeps this rank's M - P (M^T P)^T. What is
/// not compressed goes together in one plain all-reduce.
class PowerSgdHook : public CommHook {
 public:
  /// Throws InputError for options out of range.
  explicit PowerSgdHook(PowerSgdOptions options = {});

  Step reduce(Communicator& communicator, const GradientBucket& bucket) override;
  std::string description() const override;

  /// Reductions begun so far.
  int64_t iteration() const { return iteration_; }
  /// Numbers of the gradients over numbers sent, since construction; 1 while
  /// nothing is compressed.
  double compression_rate() const;
  double bytes_per_number() const override { return 4 / compression_rate(); }
  /// Begins anew, with the reductions that go the plain way.
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
  bool send_second_factor(Communicator& communicator, Pending& pending);
  void finish(Pending& pending);

  PowerSgdOptions options_;
  int64_t iteration_ = 0;
  int64_t numbers_ = 0; // of gradients
  int64_t sent_ = 0;
  std::unordered_map<std::string, at::Tensor> factors_{}; // Q, by name
  std::unordered_map<std::string, at::Tensor> errors_{}; // by name
};

} // namespace hasten
