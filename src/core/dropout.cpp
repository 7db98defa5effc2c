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

#include "hasten/core/memory_rehearsal.h"
#include "hasten/core/random.h"
#include "hasten/core/vector_kernels.h"

namespace hasten::detail {

// Elements that share one BlockDropout.
constexpr int64_t kDropoutBlock = 4096;

BlockDropout block_dropout(uint64_t seed, int64_t block, double p) {
  if (p <= 0) {
    return {};
  }
  const uint64_t key = splitmix64(seed, static_cast<uint64_t>(block));
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32),
          static_cast<uint32_t>(std::min(std::round(p * 4294967296.0), 4294967295.0)),
          static_cast<float>(1.0 / (1.0 - p))};
}

HASTEN_VECTOR_CLONES
void drop_block(const float* in, const float* residual, float* out, int32_t count,
                const BlockDropout dropout) {
  for (int32_t i = 0; i < count; ++i) {
    const uint32_t h = random_bits(static_cast<uint32_t>(i), dropout.key0, dropout.key1);
    const float kept = h >= dropout.threshold ? in[i] * dropout.scale : 0.0f;
    out[i] = residual != nullptr ? residual[i] + kept : kept;
  }
}

uint64_t draw_dropout_seed() {
  if (in_memory_rehearsal()) {
    return 0;
  }
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard<std::mutex> lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

HASTEN_VECTOR_CLONES
void widen_block(const uint16_t* in, float* out, int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    out[i] = from_bf16(in[i]);
  }
}

HASTEN_VECTOR_CLONES
void narrow_block(const float* in, uint16_t* out, int32_t count) {
  for (int32_t i = 0; i < count; ++i) {
    out[i] = to_bf16(in[i]);
  }
}

/// Elements of a contiguous tensor, fp32 or bf16.
struct DropoutNumbers {
  explicit DropoutNumbers(const at::Tensor& tensor)
      : data(tensor.defined() ? tensor.data_ptr() : nullptr),
        narrow(tensor.defined() && tensor.scalar_type() == at::kBFloat16) {}
  /// The elements as fp32, in place or in `buffer`.
  const float* read(int64_t at, int32_t count, float* buffer) const {
    if (data == nullptr || !narrow) {
      return data == nullptr ? nullptr : static_cast<const float*>(data) + at;
    }
    widen_block(static_cast<const uint16_t*>(data) + at, buffer, count);
    return buffer;
  }
  void* data;
  bool narrow;
};

static void apply_dropout(const DropoutNumbers& in, const DropoutNumbers& residual,
                          const DropoutNumbers& out, int64_t first, int64_t count, uint64_t seed,
                          double p) {
  alignas(64) float in_buffer[kDropoutBlock];
  alignas(64) float residual_buffer[kDropoutBlock];
  alignas(64) float out_buffer[kDropoutBlock];
  for (int64_t at = first; at < first + count; at += kDropoutBlock) {
    const auto size = static_cast<int32_t>(std::min(kDropoutBlock, first + count - at));
    float* target = out.narrow ? out_buffer : static_cast<float*>(out.data) + at;
    drop_block(in.read(at, size, in_buffer), residual.read(at, size, residual_buffer), target, size,
               block_dropout(seed, at / kDropoutBlock, p));
    if (out.narrow) {
      narrow_block(out_buffer, static_cast<uint16_t*>(out.data) + at, size);
    }
  }
}

static at::Tensor dropout_tensor(const at::Tensor& x, const at::Tensor& residual,
                                 at::ScalarType type, uint64_t seed, double p) {
  const at::Tensor in = x.contiguous();
  const at::Tensor add = residual.defined() ? residual.contiguous() : residual;
  at::Tensor out = at::empty_like(in, in.options().dtype(type));
  if (in_memory_rehearsal()) {
    return out;
  }
  const DropoutNumbers in_data(in);
  const DropoutNumbers add_data(add);
  const DropoutNumbers out_data(out);
  const int64_t count = in.numel();
  const int64_t blocks = (count + kDropoutBlock - 1) / kDropoutBlock;
  at::parallel_for(0, blocks, 8, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kDropoutBlock;
    apply_dropout(in_data, add_data, out_data, first, std::min(end * kDropoutBlock, count) - first,
                  seed, p);
  });
  return out;
}

// It is linear in x, so its derivative is the same function of the gradient, with the same seed.
class DropoutAdd : public torch::autograd::Function<DropoutAdd> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const std::optional<at::Tensor>& residual, at::ScalarType type,
                            int64_t seed, double p) {
    const at::Tensor add = residual.value_or(at::Tensor());
    context->saved_data["seed"] = seed;
    context->saved_data["p"] = p;
    context->saved_data["x"] = x.scalar_type();
    context->saved_data["adds"] = residual.has_value();
    context->saved_data["residual"] = add.defined() ? add.scalar_type() : x.scalar_type();
    return dropout_tensor(x, add, type, static_cast<uint64_t>(seed), p);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const int64_t seed = context->saved_data["seed"].toInt();
    const double p = context->saved_data["p"].toDouble();
    const at::ScalarType type = context->saved_data["x"].toScalarType();
    const at::Tensor of_x =
        at::GradMode::is_enabled() // of a gradient that is differentiated again
            ? DropoutAdd::apply(gradients[0], std::nullopt, type, seed, p)
            : dropout_tensor(gradients[0], {}, type, static_cast<uint64_t>(seed), p);
    const at::Tensor of_residual =
        context->saved_data["adds"].toBool()
            ? gradients[0].to(context->saved_data["residual"].toScalarType())
            : at::Tensor();
    return {of_x, of_residual, {}, {}, {}};
  }
};

static bool takes_dropout(const at::Tensor& x) {
  return x.is_cpu() && (x.scalar_type() == at::kFloat || x.scalar_type() == at::kBFloat16);
}

at::Tensor dropout_add(const at::Tensor& x, const at::Tensor& residual, double p) {
  if (p <= 0) {
    return residual.defined() ? at::add(residual, x) : x;
  }
  if (!takes_dropout(x) ||
      (residual.defined() && (!takes_dropout(residual) || residual.sizes() != x.sizes()))) {
    const at::Tensor dropped = at::dropout(x, p, true);
    return residual.defined() ? at::add(residual, dropped) : dropped;
  }
  const std::optional<at::Tensor> add = residual.defined() ? std::optional(residual) : std::nullopt;
  const at::ScalarType type =
      add ? c10::promoteTypes(x.scalar_type(), add->scalar_type()) : x.scalar_type();
  return DropoutAdd::apply(x, add, type, static_cast<int64_t>(draw_dropout_seed()), p);
}

} // namespace hasten::detail
