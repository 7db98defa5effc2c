#include "hasten/parallel/comm_hook.h"

#include <ATen/ATen.h>

namespace hasten {

namespace detail {

// Note [Compressed sum]
// An all-reduce of compressed data would add in the compressed form. Here each rank gets its part
// of every rank's bucket (all-to-all), adds these in fp32 and sends the compressed sum to all. That
// sends 2 (W - 1) / W compressed elements per gradient element, and rounds each term once and the
// sum once.
static CommHook::Step cast_reduce(Communicator& communicator, const GradientBucket& bucket,
                                  at::ScalarType wire) {
  const std::string name = "gradient bucket " + std::to_string(bucket.index);
  const at::ScalarType dtype = bucket.buffer.scalar_type();
  if (dtype != at::kFloat && dtype != at::kDouble) { // 16 bits already, or complex
    return [handle = communicator.all_reduce_async(bucket.buffer, ReduceOp::SUM, name)]() mutable {
      handle.wait();
      return false;
    };
  }
  const int64_t world = communicator.world_size();
  const int64_t count = bucket.buffer.numel();
  const int64_t part = (count + world - 1) / world;
  const at::Tensor sent = at::empty({world, part}, bucket.buffer.options().dtype(wire));
  const at::Tensor own = sent.view({-1}).narrow(0, 0, count);
  own.copy_(bucket.buffer);
  sent.view({-1}).narrow(0, count, world * part - count).zero_();
  const at::Tensor parts = at::empty_like(sent);
  Work handle = communicator.all_to_all_async(parts, sent, name);
  return [=, &communicator, buffer = bucket.buffer, summed = false]() mutable {
    handle.wait();
    if (!summed) {
      at::Tensor sum = parts[0].to(at::kFloat);
      for (int64_t rank = 1; rank < world; ++rank) {
        sum.add_(parts[rank]);
      }
      parts[0].copy_(sum);
      handle = communicator.all_gather_async(sent, parts[0], name);
      return summed = true;
    }
    buffer.copy_(own);
    return false;
  };
}

} // namespace detail

CommHook::Step Fp16CompressHook::reduce(Communicator& communicator, const GradientBucket& bucket) {
  return detail::cast_reduce(communicator, bucket, at::kHalf);
}

CommHook::Step Bf16CompressHook::reduce(Communicator& communicator, const GradientBucket& bucket) {
  return detail::cast_reduce(communicator, bucket, at::kBFloat16);
}

} // namespace hasten
