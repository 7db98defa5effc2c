// Compression to eight bits.
#include <ATen/ATen.h>

#include <algorithm>
#include <cinttypes>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "hasten/base/error.h"
#include "hasten/core/random.h"
#include "hasten/parallel/comm_hook.h"
#include "plain_reduce.h"

namespace hasten {

namespace detail {

// Elements per scale. A part of a bucket is a sequence of blocks: a float, which is the scale, and
// this many bytes.
constexpr int64_t kInt8Block = 256;
constexpr int64_t kInt8BlockBytes = kInt8Block + 4;

// Compresses `values` [blocks * kInt8Block] into `bytes` and leaves the rounding errors in them.
void quantize_blocks(float* values, int8_t* bytes, int64_t blocks) {
  for (int64_t b = 0; b < blocks; ++b) {
    float* v = values + b * kInt8Block;
    int8_t* out = bytes + b * kInt8BlockBytes;
    float largest = 0;
    for (int64_t i = 0; i < kInt8Block; ++i) {
      largest = std::max(largest, std::abs(v[i]));
    }
    // With NaN or infinity the whole block becomes NaN on every rank, and its error is dropped.
    const bool good = std::isfinite(largest);
    bool any = good;
    for (int64_t i = 0; i < kInt8Block && good; ++i) {
      any = any && !std::isnan(v[i]);
    }
    const float scale = any ? largest / 127 : std::nanf("");
    std::memcpy(out, &scale, 4);
    for (int64_t i = 0; i < kInt8Block; ++i) {
      // The scale of a block of subnormals is coarse: elements may be up to 190 times the scale.
      const float q =
          any && scale > 0 ? std::clamp(std::nearbyint(v[i] / scale), -127.0f, 127.0f) : 0;
      out[4 + i] = static_cast<int8_t>(q);
      v[i] = any ? v[i] - q * scale : 0;
    }
  }
}

// values += (or =) the decompressed `bytes`.
void dequantize_blocks(const int8_t* bytes, float* values, int64_t blocks, bool add) {
  for (int64_t b = 0; b < blocks; ++b) {
    const int8_t* in = bytes + b * kInt8BlockBytes;
    float* v = values + b * kInt8Block;
    float scale = 0;
    std::memcpy(&scale, in, 4);
    for (int64_t i = 0; i < kInt8Block; ++i) {
      const float number = scale * static_cast<float>(in[4 + i]);
      // A scale of NaN marks a block of NaN.
      v[i] = (add ? v[i] : 0.0f) + (scale == scale ? number : scale);
    }
  }
}

// A hash of the layout of a bucket.
uint64_t layout_of(const GradientBucket& bucket, int64_t world) {
  std::string text;
  for (const BucketGradient& entry : bucket.gradients) {
    text += entry.name + '\n' + std::to_string(entry.gradient.numel()) + '\n';
  }
  return stream_seed(text, static_cast<uint64_t>(bucket.buffer.numel()),
                     static_cast<uint64_t>(world));
}

} // namespace detail

// Note [Eight bits]
// Note [Compressed sum] with rounding errors that stay on their rank and are added to the next
// bucket of that index and layout, so nothing is lost over several reductions (error feedback).
CommHook::Step Int8CompressHook::reduce(Communicator& communicator, const GradientBucket& bucket) {
  if (bucket.buffer.scalar_type() != at::kFloat) {
    return detail::plain_reduce(communicator, bucket);
  }
  const int64_t world = communicator.world_size();
  const int64_t count = bucket.buffer.numel();
  const int64_t share = (count + world - 1) / world;
  const int64_t blocks = (share + detail::kInt8Block - 1) / detail::kInt8Block;
  const int64_t part = blocks * detail::kInt8Block;
  const auto floats = at::TensorOptions().dtype(at::kFloat);
  const uint64_t layout = detail::layout_of(bucket, world);
  Lost& kept = errors_[bucket.index];
  if (!kept.numbers.defined() || kept.layout != layout || !error_feedback_) {
    kept = {layout, at::zeros({(world + 1) * part}, floats)};
  }
  const at::Tensor lost = kept.numbers.narrow(0, 0, world * part);
  const at::Tensor lost_of_sum = kept.numbers.narrow(0, world * part, part);
  lost.narrow(0, 0, count).add_(bucket.buffer.cpu()); // the kernels are the CPU's
  const at::Tensor sent =
      at::empty({world, blocks * detail::kInt8BlockBytes}, at::TensorOptions().dtype(at::kChar));
  detail::quantize_blocks(lost.mutable_data_ptr<float>(), sent.mutable_data_ptr<int8_t>(),
                          world * blocks);
  const auto add = [blocks, lost_of_sum](const at::Tensor& parts) {
    auto* sum = lost_of_sum.mutable_data_ptr<float>();
    for (int64_t rank = 0; rank < parts.size(0); ++rank) {
      detail::dequantize_blocks(parts[rank].const_data_ptr<int8_t>(), sum, blocks, true);
    }
    detail::quantize_blocks(sum, parts[0].mutable_data_ptr<int8_t>(), blocks);
  };
  const auto finish = [=, buffer = bucket.buffer] {
    const at::Tensor values = at::empty({world * part}, floats);
    detail::dequantize_blocks(sent.const_data_ptr<int8_t>(), values.mutable_data_ptr<float>(),
                              world * blocks, false);
    buffer.copy_(values.narrow(0, 0, count));
  };
  return detail::compressed_reduce(communicator, bucket, sent, add, finish);
}

void Int8CompressHook::save_state(NamedTensors& tensors, nlohmann::json&) const {
  for (const auto& [index, lost] : errors_) {
    tensors.emplace("error." + std::to_string(index) + "." + std::to_string(lost.layout),
                    lost.numbers);
  }
}

void Int8CompressHook::load_state(const NamedTensors& tensors, const nlohmann::json&) {
  errors_.clear();
  for (const auto& [name, error] : tensors) {
    int64_t index = 0;
    uint64_t layout = 0;
    if (std::sscanf(name.c_str(), "error.%" SCNd64 ".%" SCNu64, &index, &layout) != 2 ||
        error.scalar_type() != at::kFloat) {
      throw InputError("parallel::Int8CompressHook", "tensor \"" + name + "\" in the state",
                       "the state of this hook");
    }
    errors_[index] = {layout, error.clone()};
  }
}

} // namespace hasten
