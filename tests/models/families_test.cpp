// What holds for every family: blocks, dropout, bf16, checkpointing, folders.
#include <gtest/gtest.h>

#include <fstream>

#include "activation_checkpoint/block_rig.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/core/autocast.h"
#include "hasten/core/block_call.h"
#include "hasten/core/random.h"
#include "hasten/io/safetensors.h"
#include "small_family.h"
#include "support/error_of.h"
#include "support/temporary_folder.h"

namespace hasten::families_test {

using namespace testing_support;
using at::Tensor;

constexpr auto kClasses = ModelTask::sequence_classification;

class Families : public testing::TestWithParam<std::string> {
 protected:
  PreTrainedModel make(double dropout = 0, ModelTask task = kClasses) const {
    set_seed(7);
    return model_from_config(small_config(GetParam(), dropout), task);
  }

  const std::vector<ModelTask>& tasks() const { return model_family(GetParam()).tasks; }
  /// The task of a pretrained model.
  ModelTask language_task() const {
    return std::ranges::find(tasks(), ModelTask::causal_lm) != tasks().end() ? ModelTask::causal_lm
                                                                             : ModelTask::masked_lm;
  }

 private:
  OneThread one_thread_{};
};

std::string family_name(const testing::TestParamInfo<std::string>& info) {
  std::string name = info.param;
  std::erase(name, '-');
  return name;
}

INSTANTIATE_TEST_SUITE_P(All, Families, testing::ValuesIn(model_types()), family_name);

double distance(const Tensor& a, const Tensor& b) { return (a - b).abs().max().item<double>(); }

class CallCounter : public BlockInterceptor {
 public:
  std::vector<Tensor> intercept(const BlockCall&, std::vector<Tensor> inputs,
                                Forward forward) override {
    ++calls;
    return forward(std::move(inputs));
  }
  int calls = 0;
};

TEST_P(Families, EveryBlockIsCalledOncePerForward) {
  for (const ModelTask task : tasks()) {
    PreTrainedModel model = make(0, task);
    const auto counter = std::make_shared<CallCounter>();
    std::vector<BlockAttachment> attachments;
    for (const auto& block : model->blocks()) {
      attachments.push_back(attach_block(block, BlockStage::checkpoint, counter));
    }
    model->forward(small_inputs(2, 9));
    EXPECT_EQ(attachments.size(), 3u);
    EXPECT_EQ(counter->calls, 3) << task_name(task);
  }
}

TEST_P(Families, PaddingFurtherChangesNoLogit) {
  for (const ModelTask task : tasks()) {
    SCOPED_TRACE(task_name(task));
    PreTrainedModel model = make(0, task);
    const ModelInputs inputs = small_inputs(4, 21);
    const Tensor logits = model->forward(inputs).logits;
    const auto pad = [](const Tensor& x, int64_t value) {
      return torch::constant_pad_nd(x, {0, 13}, value);
    };
    Tensor wider = model->forward({pad(inputs.input_ids, 1), pad(inputs.attention_mask, 0)}).logits;
    // A sample without its padding and without a mask.
    Tensor alone = model->forward({inputs.input_ids.slice(0, 1, 2).slice(1, 0, 14)}).logits;
    Tensor same = logits;
    if (logits.dim() == 3) {
      same = logits.masked_fill(inputs.attention_mask.unsqueeze(-1) == 0, 0);
      wider = wider.slice(1, 0, 21).masked_fill(inputs.attention_mask.unsqueeze(-1) == 0, 0);
      alone = torch::constant_pad_nd(alone, {0, 0, 0, 7});
    }
    EXPECT_LE(distance(wider, same), 1e-5);
    EXPECT_LE(distance(alone[0], same[1]), 1e-5);
  }
}

TEST_P(Families, RecomputedBlocksHaveTheSameDropoutAndKeepLess) {
  PreTrainedModel model = make(0.1);
  const ModelInputs inputs = small_inputs(4, 24);
  const auto logits = [&] { return model->forward(inputs).logits; };
  const auto run = [&] {
    return derive(model->parameters(), [&] { return logits().square().sum(); });
  };
  const auto kept = [&] {
    const LiveBytes bytes;
    const Tensor loss = logits().sum();
    return bytes.extra();
  };
  const Derived plain = run();
  const int64_t all = kept();
  for (const char* mode : {"full", "ops", "every:2"}) {
    model->gradient_checkpointing_enable({.mode = mode});
    expect_same_bits(plain, run());
    EXPECT_LT(kept(), 0.95 * static_cast<double>(all)) << mode;
  }
  model->gradient_checkpointing_disable();
  EXPECT_EQ(kept(), all);
}

TEST_P(Families, GradientsInBf16FollowThoseInFp32) {
  for (const ModelTask task : tasks()) {
    PreTrainedModel model = make(0, task);
    const ModelInputs inputs = small_inputs(4, 33);
    const auto gradient = [&](bool bf16) {
      model->zero_grad();
      Tensor sum;
      {
        const Autocast autocast({.enabled = bf16});
        const Tensor logits = model->forward(inputs).logits;
        EXPECT_EQ(logits.scalar_type(), bf16 ? at::kBFloat16 : at::kFloat);
        // Not of padding: a query whose keys are all masked has no meaningful gradient.
        const Tensor first = torch::log_softmax(logits.to(at::kFloat), -1).select(-1, 0);
        sum = first.dim() == 2 ? (first * inputs.attention_mask).mean() : first.mean();
      }
      sum.backward();
      std::vector<Tensor> flat;
      for (const Tensor& parameter : model->parameters()) {
        flat.push_back(parameter.grad().defined() ? parameter.grad().flatten().clone()
                                                  : torch::zeros({parameter.numel()}));
      }
      return torch::cat(flat);
    };
    const Tensor wide = gradient(false);
    EXPECT_LT(((gradient(true) - wide).norm() / wide.norm()).item<double>(), 0.08)
        << task_name(task);
  }
}

TEST_P(Families, EveryParameterOfATrainedModelHasAGradient) {
  for (const ModelTask task : tasks()) {
    PreTrainedModel model = make(0.1, task);
    ModelInputs inputs = small_inputs(4, 24);
    inputs.labels = task == kClasses ? torch::randint(3, {4}) : torch::randint(3, {4, 24});
    model->forward(inputs).loss.backward();
    for (const auto& parameter : model->named_parameters()) {
      // BERT's texts have one type here; no gradient reaches keys' biases, because softmax ignores
      // what all its inputs share.
      EXPECT_TRUE(parameter.value().grad().defined()) << parameter.key();
    }
  }
}

TEST_P(Families, ASavedFolderIsTheModel) {
  for (const ModelTask task : tasks()) {
    SCOPED_TRACE(task_name(task));
    const TemporaryFolder folder;
    PreTrainedModel model = make(0, task);
    model->save_pretrained(folder.path());
    PreTrainedModel loaded = model_from_pretrained(folder.path().string(), task);
    EXPECT_TRUE(loaded->loading_info().report.empty());
    EXPECT_EQ(loaded->config().to_json(), model->config().to_json());
    EXPECT_TRUE(loaded->config().has_head(task));
    const ModelInputs inputs = small_inputs(3, 17);
    EXPECT_TRUE(torch::equal(loaded->forward(inputs).logits, model->forward(inputs).logits));
  }
}

/// A folder of the family's language model: what a pretrained model is.
void save_language_model(PreTrainedModel model, const std::filesystem::path& folder,
                         const std::function<std::string(const std::string&)>& renamed) {
  model->save_pretrained(folder);
  NamedTensors weights;
  for (const auto& [name, tensor] : SafetensorsReader(folder / "model.safetensors").read_all()) {
    weights[renamed(name)] = tensor;
  }
  write_safetensors(folder / "model.safetensors", weights);
}

TEST_P(Families, APretrainedLanguageModelGetsANewHeadThatIsNamed) {
  PreTrainedModel language_model = make(0, language_task());
  const std::string base = model_family(GetParam()).base_model_prefix + ".";
  const auto with_prefix = [](const std::string& name) { return name; };
  const auto without_prefix = [&](const std::string& name) {
    return name.starts_with(base) ? name.substr(base.size()) : name;
  };
  for (const auto& renamed :
       {std::function<std::string(const std::string&)>(with_prefix), {without_prefix}}) {
    const TemporaryFolder folder;
    save_language_model(language_model, folder.path(), renamed);
    for (const ModelTask task : tasks()) {
      if (task == language_task()) {
        continue;
      }
      PreTrainedModel model = model_from_pretrained(folder.path().string(), task);
      EXPECT_TRUE(model->loading_info().new_output);
      std::string report;
      for (const std::string& line : model->loading_info().report) {
        report += line + "\n";
      }
      EXPECT_NE(report.find("new, with random weights"), std::string::npos) << report;
      const auto theirs = language_model->named_parameters();
      int64_t same = 0;
      for (const auto& parameter : model->named_parameters()) {
        if (parameter.key().starts_with(base) &&
            parameter.key().find("pooler") == std::string::npos) {
          EXPECT_TRUE(torch::equal(parameter.value(), theirs[parameter.key()]));
          ++same;
        }
        EXPECT_TRUE(parameter.value().isfinite().all().item<bool>()) << parameter.key();
      }
      EXPECT_GT(same, 10);
    }
  }
}

TEST_P(Families, AClassifierOfAnotherTaskIsNoClassifierOfThis) {
  const auto& tasks = model_family(GetParam()).tasks;
  if (std::ranges::find(tasks, ModelTask::token_classification) == tasks.end()) {
    GTEST_SKIP() << "it has one kind of classifier";
  }
  const TemporaryFolder folder;
  make(0, ModelTask::token_classification)->save_pretrained(folder.path());
  const auto model = AutoModelForSequenceClassification::from_pretrained(folder.path().string());
  EXPECT_TRUE(model->loading_info().new_output);
}

TEST_P(Families, LossesAreThoseOfTheProblemType) {
  PreTrainedConfig config = small_config(GetParam());
  ModelInputs inputs = small_inputs(4, 9);
  const auto loss_of = [&](const char* problem, int64_t labels, const Tensor& wanted) {
    config.problem_type = problem;
    config.id2label.assign(static_cast<size_t>(labels), "x");
    set_seed(7);
    PreTrainedModel model = model_from_config(config, kClasses);
    inputs.labels = wanted;
    const auto [loss, logits] = model->forward(inputs);
    return std::pair(loss.item<double>(), logits);
  };
  const Tensor classes = torch::tensor({0, 2, 1, 1});
  const Tensor sets = torch::tensor({{1.0, 0.0, 1.0}}).expand({4, 3});
  const Tensor numbers = torch::tensor({0.5, -1.0, 2.0, 3.0});
  for (const char* problem : {"", "single_label_classification"}) {
    const auto [loss, logits] = loss_of(problem, 3, classes);
    EXPECT_NEAR(loss, torch::nn::functional::cross_entropy(logits, classes).item<double>(), 1e-6);
  }
  for (const char* problem : {"", "multi_label_classification"}) {
    const auto [loss, logits] = loss_of(problem, 3, sets);
    EXPECT_NEAR(loss, torch::binary_cross_entropy_with_logits(logits, sets).item<double>(), 1e-6);
  }
  for (const char* problem : {"", "regression"}) {
    const auto [loss, logits] = loss_of(problem, 1, numbers);
    EXPECT_NEAR(loss, torch::mse_loss(logits.squeeze(1), numbers).item<double>(), 1e-6);
  }
  EXPECT_NEAR(loss_of("regression", 3, sets).first,
              torch::mse_loss(loss_of("regression", 3, sets).second, sets).item<double>(), 1e-6);
}

TEST(ModelFamily, OtherTypesAreRefusedWithTheListOfOurs) {
  for (const char* type : {"deberta-v2", "electra", "t5", "mamba"}) {
    const std::string error = error_of(
        [&] { PreTrainedConfig::from_json({{"model_type", type}}, "folder/config.json"); });
    EXPECT_NE(error.find("folder/config.json: model_type=\"" + std::string(type)),
              std::string::npos)
        << error;
    EXPECT_NE(error.find("bert, distilbert, "), std::string::npos) << error;
  }
}

TEST(ModelFamily, OptionsThatGiveOtherResultsAreRefusedByName) {
  const auto error_with = [](const char* type, const char* key, const nlohmann::json& value) {
    PreTrainedConfig config = small_config(type);
    nlohmann::json json = config.to_json();
    json[key] = value;
    return error_of([&] {
      model_from_config(PreTrainedConfig::from_json(json), model_family(type).tasks.back(), false);
    });
  };
  const std::pair<std::string, std::string> cases[] = {
      {error_with("bert", "tie_word_embeddings", false), "tie_word_embeddings=false"},
      {error_with("roberta", "is_decoder", true), "is_decoder=true"},
      {error_with("roberta", "pad_token_id", 39), "pad_token_id=39"},
      {error_with("distilbert", "activation", "mish"), "hidden_act=\"mish\""},
      {error_with("distilbert", "dim", 33), "hidden_size=33"},
      {error_with("llama", "num_key_value_heads", 3), "num_key_value_heads=3"},
      {error_with("qwen2", "layer_types",
                  {"full_attention", "sliding_attention", "full_attention"}),
       "layer_types=full_attention, sliding_attention"},
      {error_with("qwen3", "layer_types", {"full_attention"}), "num_hidden_layers=3"},
      {error_with("mistral", "sliding_window", -1), "sliding_window=-1"},
      {error_with("smollm3", "no_rope_layers", {1}), "no_rope_layers has 1 numbers"},
      {error_with("smollm3", "no_rope_layer_interval", 0), "no_rope_layer_interval=0"},
      {error_with("modernbert", "layer_types", {"full_attention"}), "num_hidden_layers=3"},
      {error_with("bert", "quantization_config", {{"bits", 4}}), "quantization_config="},
      {error_with("llama", "rope_scaling", {{"rope_type", "proportional"}}),
       "rope_type=proportional"},
      {error_with("llama", "rope_scaling", {{"rope_type", "yarn"}}),
       "Expected factor of this type"},
      {error_with("llama", "rope_scaling",
                  {{"rope_type", "yarn"}, {"factor", 2.0}, {"beta_fast", 0.5}}),
       "\"beta_fast\":0.5"},
      {error_with("phi3", "rope_scaling",
                  {{"type", "su"}, {"short_factor", {1.0}}, {"long_factor", {1.0, 2.0}}}),
       "Expected 6 positive numbers in short_factor"},
      {error_with("phi3", "rope_scaling", {{"rope_type", "linear"}, {"factor", 2.0}}),
       "rope_type=linear"},
      {error_with("ministral3", "rope_parameters", {{"rope_type", "default"}}),
       "without llama_4_scaling_beta"},
      {error_with("phi3", "partial_rotary_factor", 0.25), "rotates an even number of elements"},
      {error_with("gemma3_text", "rope_parameters", {{"rope_theta", 10.0}}),
       "rope_parameters has rope_theta"},
      {error_with("gemma3_text", "sliding_window_pattern", 0), "sliding_window_pattern=0"},
      {error_with("gemma2", "use_bidirectional_attention", true),
       "use_bidirectional_attention=true"},
      {error_with("gemma2", "query_pre_attn_scalar", 0), "query_pre_attn_scalar=0"},
      {error_with("ministral", "sliding_window", nullptr), ""},
      {error_with("gpt2", "scale_attn_by_inverse_layer_idx", true),
       "scale_attn_by_inverse_layer_idx=true"},
  };
  for (const auto& [message, part] : cases) {
    EXPECT_NE(message.find(part), std::string::npos) << part << " in: " << message;
  }
}

} // namespace hasten::families_test
