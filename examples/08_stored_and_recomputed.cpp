// What a forward stores for backward, and what a region recomputes instead. The function is
// A + B = C, with A = exp(sin(x)) and B = tanh(cos(x)):
//
//   x --> sin --> exp --> A --+
//    \                        + --> C
//     +-> cos --> tanh -> B --+
//
//   08_stored_and_recomputed
#include <torch/torch.h>

#include <cstdio>
#include <functional>
#include <string>

#include "hasten/activation_checkpoint/activation_checkpoint.h"
#include "hasten/activation_checkpoint/op_policy.h"
#include "hasten/base/exit_code.h"
#include "hasten/core/memory.h"

namespace examples {

using torch::Tensor;

constexpr int64_t kBytes = 1'000'000; // of each tensor

// [function]
Tensor make_a(const Tensor& x) { return x.sin().exp(); }
Tensor make_b(const Tensor& x) { return x.cos().tanh(); }
Tensor make_c(const Tensor& x) { return make_a(x) + make_b(x); }
// [/function]

// Prints how many tensors of x's size, without C, are stored after forward, and whether backward
// runs forward again.
void show(const char* how, const std::function<Tensor(const Tensor&)>& run) {
  const Tensor x = torch::linspace(-1, 1, kBytes / 4).requires_grad_();
  const int64_t before = hasten::memory_stats().live_bytes;
  const Tensor c = run(x);
  const int64_t stored = hasten::memory_stats().live_bytes - before - kBytes; // without C
  const auto counts = hasten::recompute_counts();
  c.sum().backward();
  const bool again = hasten::recompute_counts().recomputed > counts.recomputed;
  std::printf("%-28s %ld tensors stored, forward %s, gradient %.6f\n", how,
              static_cast<long>(stored / kBytes), again ? "runs again" : "runs once",
              x.grad().sum().item<double>());
}

void demonstrate() {
  hasten::install_memory_meter();
  // [regions]
  show("plain", [](const Tensor& x) { return make_c(x); });
  show("region", [](const Tensor& x) { return hasten::activation_checkpoint(make_c, x); });
  show("region around A, B plain",
       [](const Tensor& x) { return hasten::activation_checkpoint(make_a, x) + make_b(x); });
  show("region that keeps tanh", [](const Tensor& x) {
    return hasten::activation_checkpoint(
        make_c, x,
        hasten::ActivationCheckpointOptions{.policy = hasten::OpPolicy::keep({"aten::tanh"})});
  });
  // [/regions]
}

} // namespace examples

int main() { return hasten::record(examples::demonstrate); }
