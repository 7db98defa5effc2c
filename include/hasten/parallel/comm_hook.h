// A CommHook replaces the all-reduce that sums a bucket of gradients over the ranks, to send less.
// It is torch's register_comm_hook with a sum instead of a mean, because gradients already contain
// the weights of their batches.
//
//   ddp.register_comm_hook(std::make_shared<Bf16CompressHook>());
//
// Hooks of your own, with 8 bits and with PowerSGD: examples/17_int8_comm_hook.cpp and
// examples/18_power_sgd_comm_hook.cpp.
// Threading: the thread of the backward, one call at a time. A hook belongs to one model.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <string>
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
/// Buckets of other gradients use the plain all-reduce. Memory: three 16-bit copies and 1/world
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

} // namespace hasten
