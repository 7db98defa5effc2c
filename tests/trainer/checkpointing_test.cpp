// TrainingArguments::gradient_checkpointing: the same run, less memory.
#include <nlohmann/json.hpp>

#include "activation_checkpoint/block_rig.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/base/log.h"
#include "hasten/comm/communicator.h"
#include "hasten/trainer/trainer.h"

namespace hasten::checkpoint_test {

using namespace testing_support;

class Rows : public Dataset {
 public:
  int64_t size() const override { return 48; }
  int64_t length(int64_t index) const override { return 1 + index % 3; }
  Batch collate(const std::vector<int64_t>& indices) const override {
    std::vector<Tensor> x;
    for (const int64_t index : indices) {
      auto generator = torch::make_generator<at::CPUGeneratorImpl>(index);
      x.push_back(torch::randn({16, 8}, generator));
    }
    return {{{"x", at::stack(x)}, {"labels", at::tensor(indices) % 2}}, indices};
  }
};

static std::pair<std::vector<Tensor>, std::vector<int>> train_rows(GradientCheckpointing how,
                                                                   bool model_decides = false) {
  torch::manual_seed(1);
  Straight chain(4);
  if (model_decides) {
    gradient_checkpointing_enable(chain, {.mode = "every:4"});
  }
  TrainingArguments arguments;
  arguments.disable_tqdm = true;
  arguments.max_steps = 3;
  arguments.gradient_accumulation_steps = 2;
  arguments.save_strategy = SaveStrategy::no;
  arguments.gradient_checkpointing = std::move(how);
  const auto loss = [chain](const Batch& batch) mutable {
    const Tensor logits = chain->forward(batch["x"]).mean(1);
    return LossOutput{at::cross_entropy_loss(logits, batch["labels"], {}, at::Reduction::Sum),
                      static_cast<double>(batch.rows()), logits};
  };
  AcceleratorOptions options;
  options.gradient_accumulation_steps = 2;
  Trainer trainer(chain.ptr(), loss, arguments, std::make_shared<Rows>(), nullptr, {},
                  std::make_shared<Accelerator>(options, Communicator::create(World{})));
  trainer.train();
  std::vector<Tensor> parameters;
  for (const Tensor& parameter : chain->parameters()) {
    parameters.push_back(parameter.detach().clone());
  }
  auto calls = calls_of(*chain);
  gradient_checkpointing_disable(chain);
  return {parameters, calls};
}

TEST(TrainerCheckpointing, EveryFormGivesTheSameParameters) {
  const auto plain = train_rows(false);
  EXPECT_EQ(plain.second[0], 6);
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  for (const char* how : {"full", "every:2", "ops", "budget:60%"}) {
    const auto run = train_rows(how);
    for (size_t i = 0; i < plain.first.size(); ++i) {
      EXPECT_TRUE(torch::equal(plain.first[i], run.first[i])) << how << i;
    }
    EXPECT_GT(run.second[0] + run.second[1], 12) << how;
  }
  set_log_sink({});
  ASSERT_EQ(lines.size(), 1);
  expect_says(lines[0], {"budget:60%", "regions over 4 blocks", "peak"});
  // The model's own choice stays.
  const auto own = train_rows(true, true);
  EXPECT_EQ(own.second, (std::vector<int>{12, 6, 6, 6}));
}

TEST(TrainerCheckpointing, AModelWithoutBlocksIsWarnedOnceThatNothingIsRecomputed) {
  torch::nn::Linear model(8, 2); // calls no block
  TrainingArguments arguments;
  arguments.disable_tqdm = true;
  arguments.max_steps = 3;
  arguments.save_strategy = SaveStrategy::no;
  arguments.gradient_checkpointing = std::string("full");
  const auto loss = [&model](const Batch& batch) {
    const Tensor logits = model->forward(batch["x"]).mean(1);
    return LossOutput{at::cross_entropy_loss(logits, batch["labels"], {}, at::Reduction::Sum),
                      static_cast<double>(batch.rows()), logits};
  };
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines.emplace_back(line); });
  Trainer(model.ptr(), loss, arguments, std::make_shared<Rows>()).train();
  set_log_sink({});
  const auto warnings = std::count_if(lines.begin(), lines.end(), [](const std::string& line) {
    return line.find("gradient_checkpointing=full recomputes nothing") != std::string::npos &&
           line.find("hasten::call_block") != std::string::npos;
  });
  EXPECT_EQ(warnings, 1);
}

TEST(TrainerCheckpointing, JsonTakesBothNamesAndBothForms) {
  TrainingArguments arguments;
  from_json({{"gradient_checkpointing", true}}, arguments);
  EXPECT_EQ(arguments.gradient_checkpointing.text(), "full");
  from_json({{"activation_checkpointing", "budget:2GB"}}, arguments);
  EXPECT_EQ(arguments.gradient_checkpointing.budget_bytes(), 2'000'000'000);
  nlohmann::json json = arguments;
  EXPECT_EQ(json["gradient_checkpointing"], "budget:2GB");
  EXPECT_FALSE(json.contains("activation_checkpointing"));
  EXPECT_THROW(from_json({{"gradient_checkpointing", 3}}, arguments), InputError);
}

} // namespace hasten::checkpoint_test
