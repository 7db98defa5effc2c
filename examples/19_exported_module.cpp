// Trains a network of images that Python exported once, without Python, with batch statistics of all ranks.
// The file or folder is one of docs/guides/any-model.md, a ResNet or a vision transformer.
//
//   19_exported_module net.pt2
//   hasten launch --nproc 2 19_exported_module net.pt2
#include <torch/torch.h>

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/exit_code.h"
#include "hasten/exported/exported_module.h"

namespace examples {

constexpr int64_t kBatch = 8; // samples per batch, over all processes

// Images of two classes, which differ in the brightness of the first channel.
std::vector<std::pair<torch::Tensor, torch::Tensor>> make_images(const hasten::ExportedInput& input,
                                                                 int64_t rows) {
  torch::manual_seed(7);
  std::vector<int64_t> sizes{rows};
  for (size_t i = 1; i < input.sizes.size(); ++i) { // all but the first are fixed
    sizes.push_back(std::stoll(input.sizes[i]));
  }
  std::vector<std::pair<torch::Tensor, torch::Tensor>> batches;
  for (int64_t first = 0; first < 30 * kBatch; first += rows) {
    const torch::Tensor labels = torch::randint(0, 2, {rows}, torch::kLong);
    torch::Tensor images = 0.5 * torch::randn(sizes);
    images.select(1, 0) += labels.view({-1, 1, 1});
    batches.emplace_back(images, labels);
  }
  return batches;
}

void train(const std::string& file) {
  // [module]
  hasten::Accelerator accelerator({.sync_batchnorm = true});
  auto net = hasten::ExportedModule::load(file);
  const std::string input = net->inputs()[0].name; // "images", or "pixel_values" of transformers
  const std::string output = net->outputs()[0];
  auto batches = make_images(net->inputs()[0], kBatch / accelerator.num_processes());
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));
  auto [model, optimizer, loader] = accelerator.prepare(net, sgd, batches);
  for (const auto& [images, labels] : loader) {
    auto window = accelerator.accumulate(model);
    const auto logits = model->forward({{input, images}}).at(output);
    accelerator.backward(torch::nn::functional::cross_entropy(logits, labels));
    optimizer.step();
    optimizer.zero_grad();
  }
  // [/module]
  accelerator.print(net->describe());
  char text[60];
  std::snprintf(text, sizeof text, "loss of the last step: %.4f",
                accelerator.last_window().loss.item());
  accelerator.print(text);
  accelerator.end_training();
}

} // namespace examples

int main(int argc, char** argv) {
  return hasten::record([&] {
    if (argc != 2) {
      throw hasten::InputError("example", "no file", "19_exported_module net.pt2");
    }
    examples::train(argv[1]);
  });
}
