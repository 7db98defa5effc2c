#include "dropout.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/ops/add.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/empty_like.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <mutex>

// Clones for wider vectors are chosen when the library is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define HASTEN_VECTOR_CLONES \
  __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define HASTEN_VECTOR_CLONES
#endif

namespace hasten::detail {

// Elements that share one pair of 32-bit keys.
constexpr int64_t kDropoutBlock = 4096;

uint64_t dropout_block_key(uint64_t seed, uint64_t block) {
  uint64_t z = seed + (block + 1) * 0x9E3779B97F4A7C15ull; // splitmix64
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// A 32-bit hash of the counter decides: integer multiplies and shifts alone, so
// that the loop runs on whole vectors.
HASTEN_VECTOR_CLONES
void dropout_block(
    const float* in,
    const float* residual,
    float* out,
    int32_t count,
    uint32_t key0,
    uint32_t key1,
    uint32_t threshold,
    float scale) {
  for (int32_t i = 0; i < count; ++i) {
    uint32_t h = static_cast<uint32_t>(i) * 0x9E3779B9u + key0;
    h = (h ^ (h >> 16)) * 0x21F0AAADu;
    h = ((h ^ (h >> 15)) + key1) * 0x735A2D97u;
    h = h ^ (h >> 15);
    const float kept = h >= threshold ? in[i] * scale : 0.0f;
    out[i] = residual != nullptr ? residual[i] + kept : kept;
  }
}

uint64_t draw_dropout_seed() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

void apply_dropout(
    const float* in,
    const float* residual,
    float* out,
    int64_t first,
    int64_t count,
    uint64_t seed,
    double p) {
  const auto threshold = static_cast<uint32_t>(
      std::min(std::round(p * 4294967296.0), 4294967295.0));
  const auto scale = static_cast<float>(1.0 / (1.0 - p));
  for (int64_t at = 0; at < count; at += kDropoutBlock) {
    const uint64_t key = dropout_block_key(
        seed, static_cast<uint64_t>((first + at) / kDropoutBlock));
    dropout_block(
        in + at,
        residual == nullptr ? nullptr : residual + at,
        out + at,
        static_cast<int32_t>(std::min(kDropoutBlock, count - at)),
        static_cast<uint32_t>(key),
        static_cast<uint32_t>(key >> 32),
        threshold,
        scale);
  }
}

static at::Tensor dropout_tensor(
    const at::Tensor& x, const at::Tensor& residual, uint64_t seed, double p) {
  const at::Tensor in = x.contiguous();
  const at::Tensor add = residual.defined() ? residual.contiguous() : residual;
  at::Tensor out = at::empty_like(in);
  const float* in_data = in.const_data_ptr<float>();
  const float* add_data = add.defined() ? add.const_data_ptr<float>() : nullptr;
  float* out_data = out.mutable_data_ptr<float>();
  const int64_t count = in.numel();
  const int64_t blocks = (count + kDropoutBlock - 1) / kDropoutBlock;
  at::parallel_for(0, blocks, 8, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kDropoutBlock;
    apply_dropout(
        in_data + first,
        add_data == nullptr ? nullptr : add_data + first,
        out_data + first,
        first,
        std::min(end * kDropoutBlock, count) - first,
        seed,
        p);
  });
  return out;
}

class DropoutAdd : public torch::autograd::Function<DropoutAdd> {
 public:
  static at::Tensor forward(
      torch::autograd::AutogradContext* context,
      const at::Tensor& x,
      const std::optional<at::Tensor>& residual,
      double p) {
    const uint64_t seed = draw_dropout_seed();
    context->saved_data["seed"] = static_cast<int64_t>(seed);
    context->saved_data["p"] = p;
    context->saved_data["adds"] = residual.has_value();
    return dropout_tensor(x, residual.value_or(at::Tensor()), seed, p);
  }

  static torch::autograd::variable_list backward(
      torch::autograd::AutogradContext* context,
      torch::autograd::variable_list gradients) {
    const auto seed =
        static_cast<uint64_t>(context->saved_data["seed"].toInt());
    const double p = context->saved_data["p"].toDouble();
    return {
        dropout_tensor(gradients[0], {}, seed, p),
        context->saved_data["adds"].toBool() ? gradients[0] : at::Tensor(),
        at::Tensor()};
  }
};

at::Tensor dropout_add(
    const at::Tensor& x, const at::Tensor& residual, double p) {
  if (p <= 0) {
    return residual.defined() ? at::add(residual, x) : x;
  }
  if (!x.is_cpu() || x.scalar_type() != at::kFloat ||
      (residual.defined() && (residual.scalar_type() != at::kFloat ||
                              residual.sizes() != x.sizes()))) {
    const at::Tensor dropped = at::dropout(x, p, true);
    return residual.defined() ? at::add(residual, dropped) : dropped;
  }
  return DropoutAdd::apply(
      x,
      residual.defined() ? std::optional<at::Tensor>(residual) : std::nullopt,
      p);
}

} // namespace hasten::detail
