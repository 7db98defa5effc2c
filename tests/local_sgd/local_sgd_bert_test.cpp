// A BERT classifier under LocalSGD with AdamW against the trajectory that
// transformers and torch.optim made (tools/golden/local_sgd_bert.py). World 2.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>

#include "golden_folder.h"
#include "hasten/io/safetensors.h"
#include "hasten/models/auto_model.h"
#include "hasten/optim/adamw.h"
#include "local_sgd/local_sgd_rig.h"
#include "support/on_device.h"

namespace hasten::accelerator_test {

// Eight elements of each parameter, in the order of names.
Tensor sampled_parameters(const torch::nn::Module& model) {
  std::map<std::string, Tensor> by_name;
  for (const auto& parameter : model.named_parameters()) {
    by_name.emplace(parameter.key(), parameter.value());
  }
  std::vector<Tensor> values;
  for (const auto& [name, parameter] : by_name) {
    const Tensor flat = parameter.detach().flatten();
    values.push_back(
        flat.index_select(0, (on_device::arange(8) * (flat.numel() - 1)).div(7, "floor")));
  }
  return torch::cat(values);
}

TEST(LocalSGDBert, TrajectoryIsThatOfTransformersWithAdamW) {
  const std::string folder = testing_support::kBertGoldenFolder;
  auto accelerator = local_accelerator();
  if (accelerator.num_processes() != 2) {
    GTEST_SKIP() << "two replicas made the golden file";
  }
  const bool first = accelerator.process_index() == 0;
  const auto batches = SafetensorsReader(folder + "/golden.safetensors").read_all();
  auto bert = AutoModelForSequenceClassification::from_pretrained(folder);
  bert->to(testing_support::run_device(), torch::kDouble);
  bert->train();
  AdamW inner(bert->parameters(), torch::optim::AdamWOptions(1e-3).weight_decay(0.01));
  auto [model, optimizer] = accelerator.prepare(bert, inner);
  LocalSGD local_sgd(accelerator, model, {.local_sgd_steps = 4});
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (int step = 0; step < (first ? 10 : 9); ++step) {
      const auto rows = [&](const char* key) {
        return on_device::moved(
            batches.at("step" + std::to_string(step) + "." + key).narrow(0, first ? 0 : 2, 2));
      };
      auto window = accelerator.accumulate(model);
      accelerator.backward(
          torch::nn::functional::cross_entropy(
              model->forward({rows("input_ids"), rows("attention_mask")}).logits, rows("labels"),
              torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum)),
          2);
      optimizer.step();
      optimizer.zero_grad();
      local_sgd.step();
    }
    accelerator.join_uneven_inputs();
  }
  local_sgd.finish();
  const Tensor golden =
      SafetensorsReader(folder + "/local_sgd.safetensors").read_all().at("parameters");
  const Tensor ours = sampled_parameters(*bert).cpu();
  ASSERT_EQ(ours.sizes(), golden.sizes());
  EXPECT_LE((ours - golden).abs().max().item<double>(), 1e-9);
  accelerator.end_training();
}

} // namespace hasten::accelerator_test
