#include "hasten/parallel/comm_hook.h"

#include <ATen/ATen.h>

#include "plain_reduce.h"

namespace hasten {

namespace detail {

std::string bucket_name(const GradientBucket& bucket) {
  return "gradient bucket " + std::to_string(bucket.index);
}

CommHook::Step plain_reduce(Communicator& communicator, const GradientBucket& bucket) {
  Work handle = communicator.all_reduce_async(bucket.buffer, ReduceOp::SUM, bucket_name(bucket));
  return [handle]() mutable {
    handle.wait();
    return false;
  };
}

CommHook::Step compressed_reduce(Communicator& communicator, const GradientBucket& bucket,
                                 const at::Tensor& sent,
                                 std::function<void(const at::Tensor& parts)> add,
                                 std::function<void()> finish) {
  const at::Tensor parts = at::empty_like(sent);
  const std::string name = bucket_name(bucket);
  Work handle = communicator.all_to_all_async(parts, sent, name);
  bool summed = false;
  return [=, &communicator]() mutable {
    handle.wait();
    if (!summed) {
      add(parts);
      handle = communicator.all_gather_async(sent, parts[0], name);
      summed = true;
      return true;
    }
    finish();
    return false;
  };
}

static CommHook::Step cast_reduce(Communicator& communicator, const GradientBucket& bucket,
                                  at::ScalarType wire) {
  if (bucket.buffer.element_size() == 2) {
    return plain_reduce(communicator, bucket);
  }
  const int64_t world = communicator.world_size();
  const int64_t count = bucket.buffer.numel();
  const int64_t part = (count + world - 1) / world;
  const at::Tensor sent = at::empty({world, part}, bucket.buffer.options().dtype(wire));
  const at::Tensor own = sent.view({-1}).narrow(0, 0, count);
  own.copy_(bucket.buffer);
  sent.view({-1}).narrow(0, count, world * part - count).zero_();
  const auto add = [](const at::Tensor& parts) {
    at::Tensor sum = parts[0].to(at::kFloat);
    for (int64_t rank = 1; rank < parts.size(0); ++rank) {
      sum.add_(parts[rank]);
    }
    parts[0].copy_(sum);
  };
  return compressed_reduce(communicator, bucket, sent, add,
                           [own, buffer = bucket.buffer] { buffer.copy_(own); });
}

} // namespace detail

CommHook::Step Fp16CompressHook::reduce(Communicator& communicator, const GradientBucket& bucket) {
  return detail::cast_reduce(communicator, bucket, at::kHalf);
}

CommHook::Step Bf16CompressHook::reduce(Communicator& communicator, const GradientBucket& bucket) {
  return detail::cast_reduce(communicator, bucket, at::kBFloat16);
}

} // namespace hasten
