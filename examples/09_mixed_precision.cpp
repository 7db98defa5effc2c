// The limits of 16 bits, and how a training run handles them: an overflow in fp16, the lower
// precision of bf16, a gradient that is 0 in fp16, and a loss scale that adapts.
//
//   09_mixed_precision
//   hasten launch --nproc 2 09_mixed_precision
#include <torch/torch.h>

#include <cstdio>
#include <limits>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/exit_code.h"
#include "hasten/optim/adamw.h"

namespace examples {

using torch::Tensor;
void numbers() {
  const auto in = [](double x, torch::ScalarType type) {
    return torch::tensor(x, torch::kFloat).to(type).item<double>();
  };
  std::printf("%-22s %-12s %-12s\n", "number", "fp16", "bf16");
  for (const double x : {65504.0, 70000.0, 1e-8, 1.0 + 1.0 / 512, 257.0}) {
    std::printf("%-22.10g %-12.10g %-12.10g\n", x, in(x, torch::kHalf), in(x, torch::kBFloat16));
  }
}

// A product whose result is 70000, above the largest value of fp16.
double product(torch::ScalarType type) {
  const hasten::Autocast autocast({.dtype = type});
  const Tensor x = torch::full({1, 70}, 10.0);
  const Tensor w = torch::full({70, 1}, 100.0);
  return torch::mm(x, w).item<double>();
}

// Eight windows of a small regression; the gradient of the third overflows.
void train(hasten::Precision precision) {
  hasten::Accelerator accelerator( // 09
      {.mixed_precision = precision, .grad_scaler = {.init_scale = 1024}});
  torch::nn::Linear line(8, 1);
  hasten::AdamW adamw(line->parameters(), torch::optim::AdamWOptions(0.1));
  auto [model, optimizer] = accelerator.prepare(line, adamw);
  const Tensor x = torch::linspace(-1, 1, 64).view({8, 8});
  const Tensor y = x.sum(1, true);
  for (int64_t window = 1; window <= 8; ++window) {
    auto guard = accelerator.accumulate(model); // 09: products in 16 bits
    Tensor out = model->forward(x);
    if (window == 3 && accelerator.is_main_process()) {
      out.register_hook([](const Tensor& gradient) {
        return gradient * std::numeric_limits<double>::infinity();
      });
    }
    const Tensor loss = torch::mse_loss(out, y); // fp32
    accelerator.backward(loss * 8, 8); // 09: scaled in fp16
    const bool skipped = optimizer.step().was_skipped();
    optimizer.zero_grad();
    char text[120];
    std::snprintf(text, sizeof text, "%s window %ld: out is %s, loss %.3f, scale %g%s",
                  hasten::precision_name(precision), static_cast<long>(window),
                  c10::toString(out.scalar_type()), loss.item<double>(),
                  accelerator.loss_scale().value(), skipped ? ", step skipped" : "");
    accelerator.print(text);
  }
  accelerator.end_training();
}

} // namespace examples

int main() {
  examples::numbers();
  for (const auto type : {torch::kHalf, torch::kBFloat16}) {
    std::printf("10 * 100 * 70 in %s: %g\n", c10::toString(type), examples::product(type));
  }
  return hasten::record([] { examples::train(hasten::Precision::fp16); });
}
