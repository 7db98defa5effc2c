// The memory of a rehearsed training step compared with the memory meter in a real one.
#include "hasten/models/step_memory.h"

#include <ATen/cpu/Utils.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>

#include "hasten/base/error.h"
#include "hasten/core/autocast.h"
#include "hasten/core/memory.h"
#include "hasten/models/auto_model.h"
#include "small_family.h"

namespace hasten {

using testing_support::small_config;

struct MemoryCase {
  const char* name;
  PreTrainedConfig config{};
  int64_t rows = 0;
  int64_t tokens = 0;
  ModelTask task = ModelTask::sequence_classification;
};

/// Large enough that oneDNN's scratch memory of about 0.5 MB does not matter.
std::vector<MemoryCase> memory_cases() {
  std::vector<MemoryCase> cases{
      {"tiny", AutoConfig::from_shape("bert-tiny", 500), 48, 64},
      {"tiny, a large vocabulary", AutoConfig::from_shape("bert-tiny"), 2, 16},
      {"mini, long rows", AutoConfig::from_shape("bert-mini", 500), 4, 256},
      {"mini", AutoConfig::from_shape("bert-mini", 2000), 8, 128},
      {"without dropout", AutoConfig::from_shape("bert-mini", 500), 8, 64},
      {"attention keeps all", AutoConfig::from_shape("bert-mini", 500), 8, 64},
      {"three layers", AutoConfig::from_shape("bert-tiny", 500), 48, 64}};
  for (const char* type : {"distilbert", "roberta", "gpt2", "llama", "modernbert"}) {
    MemoryCase family{type, AutoConfig::for_model(type), 16, 96};
    family.config.vocab_size = 500;
    family.config.num_hidden_layers = 4;
    family.config.hidden_size = 256;
    family.config.num_attention_heads = 4;
    family.config.intermediate_size = 1024;
    family.config.max_position_embeddings = 128;
    family.config.pad_token_id = 0;
    cases.push_back(family);
  }
  cases.back().config.other_keys = R"({"local_attention": 32})"; // ModernBERT's
  cases[4].config.hidden_dropout_prob = 0;
  cases[4].config.attention_probs_dropout_prob = 0;
  cases[5].config.attention_probs_dropout_prob = 0;
  cases[6].config.num_hidden_layers = 3;
  for (const char* shape : {"gpt2-mini", "llama-mini"}) { // one tied
    PreTrainedConfig config = AutoConfig::from_shape(shape, 9000);
    config.num_hidden_layers = 1;
    cases.push_back({"a language model", config, 6, 128, ModelTask::causal_lm});
  }
  PreTrainedConfig several = AutoConfig::from_shape("gpt2-mini", 17'000); // slices of logits
  several.num_hidden_layers = 1;
  cases.push_back({"slices of logits", several, 20, 128, ModelTask::causal_lm});
  for (const ModelTask task : {ModelTask::token_classification, ModelTask::masked_lm}) {
    cases.push_back({"a head for tokens", AutoConfig::from_shape("bert-mini", 2000), 8, 64, task});
  }
  return cases;
}

// CPUs without 16-bit instructions make fp32 copies for 16-bit products, which a rehearsal does not
// include, and need minutes for them. They leave bf16 out.
TEST(StepMemory, IsWithinThreePercentOfTheMeter) {
  install_memory_meter();
  const auto cpu = at::cpu::get_cpu_capabilities();
  const auto narrow_products = cpu.find("avx512_bf16");
  const bool has_narrow = narrow_products != cpu.end() && narrow_products->second.toBool();
  for (const MemoryCase& c : memory_cases()) {
    for (const bool fresh : {true, false}) {
      for (const bool narrow : {false, true}) {
        if (narrow && !has_narrow) {
          continue;
        }
        auto model = model_from_config(c.config, c.task);
        model->train();
        for (const at::Tensor& p : model->parameters()) {
          if (!fresh) {
            p.mutable_grad() = torch::zeros_like(p);
          }
        }
        const int64_t before = memory_stats().live_bytes;
        const auto step = [&] {
          const at::Tensor ids = torch::ones({c.rows, c.tokens}, torch::kLong);
          const at::Tensor mask = torch::ones_like(ids);
          const at::Tensor types = torch::ones_like(ids);
          const at::Tensor places = torch::arange(c.tokens).expand({c.rows, -1}).contiguous();
          const at::Tensor loss = [&] {
            const Autocast autocast({.enabled = narrow});
            if (c.task == ModelTask::causal_lm) {
              return model->causal_loss({.input_ids = ids, .labels = mask, .position_ids = places})
                  .loss_sum;
            }
            const at::Tensor logits = model->forward({ids, mask}).logits.flatten(0, -2);
            return torch::nn::functional::cross_entropy(
                logits.to(torch::kFloat), torch::zeros({logits.size(0)}, torch::kLong),
                torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
          }();
          const int64_t saved = memory_stats().live_bytes - before;
          loss.backward();
          return saved;
        };
        reset_peak_memory();
        const int64_t saved = step();
        const int64_t peak = memory_stats().peak_bytes - before;
        const StepMemory formula = step_memory(
            c.config, c.rows, c.tokens, fresh ? GradientPlace::fresh : GradientPlace::existing,
            narrow ? at::kBFloat16 : at::kFloat, c.task);
        SCOPED_TRACE(c.name);
        const auto share = [](int64_t a, int64_t b) {
          return static_cast<double>(a) / static_cast<double>(b);
        };
        EXPECT_NEAR(share(formula.saved_bytes, saved), 1, 0.01)
            << formula.saved_bytes << " " << saved;
        EXPECT_NEAR(share(formula.peak_bytes, peak), 1, 0.03)
            << formula.peak_bytes << " " << peak << (fresh ? " fresh" : "")
            << (narrow ? " bf16" : "");
        EXPECT_LE(formula.activation_bytes, formula.peak_bytes);
      }
    }
  }
}

TEST(StepMemory, ParameterShapesAreTheModels) {
  for (const std::string& type : model_types()) {
    for (const ModelTask task : model_family(type).tasks) {
      const PreTrainedConfig config = small_config(type);
      const PreTrainedModel model = model_from_config(config, task);
      std::vector<std::vector<int64_t>> shapes;
      for (const at::Tensor& p : model->parameters()) {
        shapes.push_back(p.sizes().vec());
      }
      auto formula = parameter_shapes(config, task);
      std::sort(shapes.begin(), shapes.end());
      std::sort(formula.begin(), formula.end());
      EXPECT_EQ(formula, shapes) << type;
      EXPECT_EQ(block_shapes(config).size(), model->blocks().back()->parameters().size()) << type;
    }
  }
}

TEST(StepMemory, RefusesBatchesThatTheModelDoes) {
  const PreTrainedConfig config = AutoConfig::from_shape("bert-tiny");
  for (const auto& [rows, tokens] : {std::pair<int64_t, int64_t>{0, 8}, {8, 0}, {1, 513}}) {
    EXPECT_THROW(step_memory(config, rows, tokens, GradientPlace::fresh), InputError);
  }
}

} // namespace hasten
