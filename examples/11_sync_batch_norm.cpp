// Batch normalisation over the samples of all processes. The images of two classes differ only in
// brightness, and half of each batch is of one class. On two processes each process's own mean
// removes this difference; the mean of all samples does not.
//
//   11_sync_batch_norm
//   hasten launch --nproc 2 11_sync_batch_norm
#include <torch/torch.h>

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/world.h"
#include "hasten/comm/communicator.h"

namespace examples {

using torch::Tensor;
using Images = std::vector<std::pair<Tensor, Tensor>>; // [N, 1, 8, 8], [N]

constexpr int64_t kBatch = 8; // samples per batch, over all processes
constexpr int64_t kSteps = 40;

// Batches of `rows`, in one order: four of one class, four of the other, …
Images make_images(int64_t rows) {
  torch::manual_seed(7);
  const Tensor labels = (torch::arange(kSteps * kBatch) / 4).to(torch::kLong) % 2;
  const Tensor brightness = labels.to(torch::kFloat).view({-1, 1, 1, 1});
  const Tensor x = torch::randn({labels.size(0), 1, 8, 8}) * 0.5 + brightness;
  Images batches;
  for (int64_t first = 0; first < labels.size(0); first += rows) {
    batches.emplace_back(x.narrow(0, first, rows), labels.narrow(0, first, rows));
  }
  return batches;
}
struct BrightnessImpl : torch::nn::Module {
  Tensor forward(const Tensor& x) {
    const Tensor h = torch::relu(norm->forward(conv->forward(x)));
    return linear->forward(h.mean({2, 3}));
  }
  torch::nn::Conv2d conv =
      register_module("conv", torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 4, 3)));
  torch::nn::BatchNorm2d norm = register_module("norm", torch::nn::BatchNorm2d(4)); // torch's own
  torch::nn::Linear linear = register_module("linear", torch::nn::Linear(4, 2));
};
TORCH_MODULE(Brightness);
void train(const std::shared_ptr<hasten::Communicator>& communicator, bool sync) {
  hasten::Accelerator accelerator({.sync_batchnorm = sync}, communicator); // 11
  Images batches = make_images(kBatch / accelerator.num_processes());
  torch::manual_seed(1);
  Brightness net;
  torch::optim::SGD sgd(net->parameters(), 0.5);
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  double loss_sum = 0; // of the last ten steps
  int64_t step = 0;
  for (const auto& [x, y] : loader) {
    auto window = accelerator.accumulate(model);
    accelerator.backward(torch::nn::functional::cross_entropy(model->forward(x), y));
    optimizer.step();
    optimizer.zero_grad();
    loss_sum += ++step > kSteps - 10 ? accelerator.last_window().loss.item() : 0;
  }
  char text[120];
  std::snprintf(text, sizeof text, "%-17s loss %.4f, running mean %.4f, running variance %.4f",
                sync ? "of all samples:" : "of own samples:", loss_sum / 10,
                model->norm->running_mean[0].item<double>(),
                model->norm->running_var[0].item<double>());
  accelerator.print(text);
  accelerator.end_training();
}

// Prints the mean of the first batch on one process and on all.
void show_means(hasten::Communicator& communicator) {
  const Images batches = make_images(kBatch / communicator.world_size());
  const auto mine = static_cast<size_t>(communicator.rank());
  Tensor mean = batches[mine].first.mean().reshape({1});
  const double own = mean.item<double>();
  communicator.all_reduce(mean, hasten::ReduceOp::AVG, "mean");
  if (communicator.is_main()) {
    std::printf("the first batch has mean %.4f, process 0's samples of it %.4f\n",
                mean.item<double>(), own);
  }
}

} // namespace examples

int main() {
  return hasten::record([] {
    auto communicator = hasten::Communicator::create(hasten::world_from_environment());
    examples::show_means(*communicator);
    for (const bool sync : {false, true}) {
      examples::train(communicator, sync);
    }
    communicator->close();
  });
}
