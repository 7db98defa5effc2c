// Models of all families give transformers' numbers (tools/golden/families.py).
#include <gtest/gtest.h>

#include <set>

#include "golden_family.h"
#include "hasten/models/model_family.h"
#include "small_family.h"

namespace hasten::family_golden_test {

using namespace testing_support;

class FamilyGolden : public testing::Test {
  OneThread one_thread_{};
};

TEST_F(FamilyGolden, EveryFamilyAndTaskIsThere) {
  std::set<std::pair<std::string, std::string>> expected, there;
  for (const std::string& type : model_types()) {
    for (const ModelTask task : model_family(type).tasks) {
      // encoder_test.cpp has BERT's classifier. XLM-RoBERTa and CamemBERT are RoBERTa under other names. Decoders
      // share their head for tokens, but for GPT-2.
      const bool elsewhere =
          (type == "bert" && task == ModelTask::sequence_classification) ||
          (type == "xlm-roberta" && task == ModelTask::token_classification) ||
          (type == "camembert" && task != ModelTask::masked_lm) ||
          (task == ModelTask::token_classification && type != "llama" && type != "gpt2" &&
           model_family(type).tasks.front() == ModelTask::causal_lm);
      if (!elsewhere && !type.starts_with("test_")) {
        expected.emplace(type, task_name(task));
      }
    }
  }
  for (const std::string& name : golden_cases()) {
    const PreTrainedConfig config = golden_config(name);
    there.emplace(config.model_type, task_name(golden_task(config)));
  }
  EXPECT_EQ(there, expected);
}

TEST_F(FamilyGolden, LogitsOnAPaddedBatchEqualTransformers) {
  for (const std::string& name : golden_cases()) {
    SCOPED_TRACE(name);
    PreTrainedModel model = golden_model(name);
    model->eval();
    const torch::NoGradGuard no_grad;
    ModelInputs inputs = golden_batch(0, model);
    inputs.labels = at::Tensor();
    const ModelOutput output = model->forward(inputs);
    EXPECT_FALSE(output.loss.defined());
    at::Tensor expected = golden_families().read(name + ".logits");
    at::Tensor logits = output.logits;
    ASSERT_EQ(logits.sizes(), expected.sizes());
    if (logits.dim() == 3) { // of tokens, not of padding
      logits = logits.index({inputs.attention_mask.to(at::kBool)});
      expected = expected.index({inputs.attention_mask.to(at::kBool)});
    }
    EXPECT_LE((logits - expected).abs().max().item<double>(), 1e-5);
  }
}

TEST_F(FamilyGolden, TenAdamWStepsHaveTheLossesOfTransformers) {
  for (const std::string& name : golden_cases()) {
    SCOPED_TRACE(name);
    PreTrainedModel model = golden_model(name); // the configurations have dropout 0
    torch::optim::AdamW optimizer(model->parameters(),
                                  torch::optim::AdamWOptions(1e-3).weight_decay(0.01));
    const at::Tensor losses = golden_families().read(name + ".losses");
    for (int64_t step = 0; step < losses.size(0); ++step) {
      const at::Tensor loss = model->forward(golden_batch(step + 1, model)).loss;
      EXPECT_NEAR(loss.item<double>(), losses[step].item<double>(), 1e-5) << step;
      optimizer.zero_grad();
      loss.backward();
      optimizer.step();
    }
  }
}

} // namespace hasten::family_golden_test
