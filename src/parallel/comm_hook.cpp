#include "hasten/parallel/comm_hook.h"

#include <ATen/ATen.h>

#include <nlohmann/json.hpp>

#include "plain_reduce.h"

namespace hasten {

namespace detail {

CommHook::Step plain_reduce(Communicator& communicator, const GradientBucket& bucket) {
  Work handle = communicator.all_reduce_async(bucket.buffer, ReduceOp::SUM,
                                              "gradient bucket " + std::to_string(bucket.index));
  return [handle]() mutable {
    handle.wait();
    return false;
  };
}

bool has_16_bits(const at::Tensor& buffer) { return buffer.element_size() == 2; }

// Note [Wire type]
// An all-reduce of 16-bit data would add in 16 bits. Here each rank gets its part of every rank's
// bucket (all-to-all), adds these in fp32 and sends the rounded sum to all. That sends
// 2 (W - 1) / W 16-bit elements per gradient element, and rounds each term once and the sum once.
CommHook::Step compressed_reduce(Communicator& communicator, const GradientBucket& bucket,
                                 at::ScalarType wire) {
  if (has_16_bits(bucket.buffer)) {
    return plain_reduce(communicator, bucket);
  }
  const int64_t world = communicator.world_size();
  const int64_t count = bucket.buffer.numel();
  const int64_t part = (count + world - 1) / world;
  const at::Tensor all = at::empty({world, part}, bucket.buffer.options().dtype(wire));
  const at::Tensor flat = all.view({-1});
  flat.narrow(0, 0, count).copy_(bucket.buffer);
  flat.narrow(0, count, world * part - count).zero_();
  const at::Tensor parts = at::empty_like(all);
  const std::string name = "gradient bucket " + std::to_string(bucket.index);
  Work handle = communicator.all_to_all_async(parts, all, name);
  bool summed = false;
  return [=, &communicator, buffer = bucket.buffer]() mutable {
    handle.wait();
    if (!summed) {
      at::Tensor sum = parts[0].to(at::kFloat);
      for (int64_t rank = 1; rank < world; ++rank) {
        sum.add_(parts[rank]);
      }
      at::Tensor mine = parts[0];
      mine.copy_(sum);
      handle = communicator.all_gather_async(all, mine, name);
      summed = true;
      return true;
    }
    buffer.copy_(flat.narrow(0, 0, count));
    return false;
  };
}

} // namespace detail

CommHook::Step Fp16CompressHook::reduce(Communicator& communicator, const GradientBucket& bucket) {
  return detail::compressed_reduce(communicator, bucket, at::kHalf);
}

CommHook::Step Bf16CompressHook::reduce(Communicator& communicator, const GradientBucket& bucket) {
  return detail::compressed_reduce(communicator, bucket, at::kBFloat16);
}

} // namespace hasten
