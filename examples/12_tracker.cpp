// A tracker of your own. It prints a bar for each loss that it gets; TensorBoard's files are
// written, too, if a folder is given.
//
//   12_tracker [FOLDER]
//   hasten launch --nproc 2 12_tracker [FOLDER]
#include <torch/torch.h>

#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/exit_code.h"
#include "hasten/tracking/tracker.h"

namespace examples {

// [tracker]
class BarTracker final : public hasten::GeneralTracker {
 public:
  std::string name() const override { return "bars"; }
  void store_init_configuration(const nlohmann::json& values) override {
    std::printf("%s\n", values.dump().c_str());
  }
  void log(const nlohmann::json& values, std::optional<int64_t> step) override {
    const double loss = values.at("train/loss");
    const std::string bar(static_cast<size_t>(loss * 20), '#');
    std::printf("step %2d  %.4f %s\n", static_cast<int>(step.value_or(0)), loss, bar.c_str());
  }
  void finish() override { std::printf("%s: done\n", name().c_str()); }
};
// [/tracker]

void train(const std::string& folder) {
  // [accelerator]
  hasten::AcceleratorOptions options;
  options.log_with = {std::make_shared<BarTracker>()};
  if (!folder.empty()) {
    options.log_with.emplace_back("tensorboard");
    options.project_dir = folder;
  }
  hasten::Accelerator accelerator(options);
  accelerator.init_trackers("line", {{"learning_rate", 0.1}, {"steps", 24}});
  // [/accelerator]

  torch::nn::Linear line(torch::nn::LinearOptions(2, 1));
  const torch::Tensor x = torch::randn({192, 2});
  const torch::Tensor y = x.matmul(torch::tensor({{0.5}, {-1.0}})) + 0.25;
  std::vector<std::pair<torch::Tensor, torch::Tensor>> batches;
  const int64_t rows = 8 / accelerator.num_processes();
  for (int64_t first = 0; first < x.size(0); first += rows) {
    batches.emplace_back(x.narrow(0, first, rows), y.narrow(0, first, rows));
  }
  torch::optim::SGD sgd(line->parameters(), 0.1);
  auto [model, optimizer, loader] = accelerator.prepare(line, sgd, batches);
  int64_t step = 0;
  for (const auto& [input, target] : loader) {
    auto window = accelerator.accumulate(model);
    accelerator.backward(torch::mse_loss(model->forward(input), target));
    optimizer.step();
    optimizer.zero_grad();
    if (++step % 4 == 0) {
      accelerator.log({{"train/loss", accelerator.last_window().loss}}, step);
    }
  }
  accelerator.end_training();
}

} // namespace examples

int main(int argc, char** argv) {
  return hasten::record([&] { examples::train(argc > 1 ? argv[1] : ""); });
}
