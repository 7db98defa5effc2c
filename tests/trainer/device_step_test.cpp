// What a step of the Trainer costs on a device, and what happens to a step with a value that is not
// finite. A step without a record does not wait for the device; one with a record waits once.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/core/deferred_init.h"
#include "hasten/models/auto_model.h"
#include "hasten/trainer/trainer.h"
#include "support/device_backend.h"
#include "support/error_of.h"
#include "support/spawn.h"
#include "support/test_device.h"
#include "trainer/toy_text.h"

namespace hasten::device_step_test {

using testing_support::device_counters;
using testing_support::DeviceCounters;
using testing_support::FaultRank;

PreTrainedModel bert() {
  PreTrainedConfig config = AutoConfig::from_shape("bert-tiny", toy::kWords);
  config.max_position_embeddings = 16;
  config.id2label = {"no", "maybe", "yes"};
  torch::manual_seed(5);
  return AutoModelForSequenceClassification::from_config(config);
}

/// What each step costs on the device, and the parameters after it.
struct StepCounts : TrainerCallback {
  void on_step_end(const StepProgress&) override {
    const DeviceCounters now = device_counters();
    steps.push_back(now - before_);
    before_ = now;
  }
  std::vector<DeviceCounters> steps{};

 private:
  DeviceCounters before_ = device_counters();
};

TrainingArguments arguments() {
  TrainingArguments a = toy::arguments();
  a.per_device_train_batch_size = 4;
  a.num_train_epochs = 1;
  a.learning_rate = 1e-3;
  a.logging_steps = 100;
  return a;
}

std::shared_ptr<Accelerator> accelerator_for(const TrainingArguments& a, Communicator& world) {
  static int runs = 0;
  AcceleratorOptions options = accelerator_options(a);
  options.device = "test_device";
  options.grad_scaler.init_scale = 1024;
  options.dataloader_config.non_blocking = true;
  return std::make_shared<Accelerator>(options,
                                       world.duplicate({.name = "run " + std::to_string(runs++)}));
}

LossFunction loss_of(PreTrainedModel model) {
  return [model](const Batch& rows) mutable {
    const at::Tensor logits = model->forward({rows["input_ids"], rows["attention_mask"]}).logits;
    return LossOutput{torch::nn::functional::cross_entropy(
                          logits, rows["labels"],
                          torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum)),
                      static_cast<double>(rows.rows()), logits};
  };
}

constexpr int64_t kSteps = 7;

/// Of the steps after the first three.
nlohmann::json count_steps(Communicator& world, const TrainingArguments& a) {
  PreTrainedModel model = bert();
  const auto accelerator = accelerator_for(a, world);
  const auto rows =
      kSteps * a.per_device_train_batch_size * a.gradient_accumulation_steps * world.world_size();
  Trainer trainer(model.ptr(), loss_of(model), a, std::make_shared<toy::Texts>(rows), nullptr, {},
                  accelerator);
  const auto counts = std::make_shared<StepCounts>();
  trainer.add_callback(counts);
  trainer.train();
  EXPECT_EQ(std::ssize(counts->steps), kSteps);
  nlohmann::json steps = nlohmann::json::array();
  for (size_t i = 3; i + 1 < counts->steps.size(); ++i) {
    const DeviceCounters& step = counts->steps[i];
    steps.push_back({{"operators", step.operators},
                     {"syncs", step.syncs},
                     {"copies", step.copies_to_host + step.copies_to_device},
                     {"bytes", step.bytes_to_host + step.bytes_to_device},
                     {"pageable", step.pageable_copies}});
  }
  return steps;
}

HASTEN_RANK_FUNCTION(CountSteps) {
  const auto world = testing_support::device_world(rank.world());
  const bool alone = world->world_size() == 1;
  for (const Strategy strategy : {Strategy::ddp, Strategy::fsdp}) {
    if (alone && strategy == Strategy::fsdp) {
      continue;
    }
    for (const bool bf16 : {false, true}) {
      for (const int64_t accumulation : {1, 4}) {
        for (const char* checkpointing : {"no", "full"}) {
          TrainingArguments a = arguments();
          a.strategy = strategy;
          a.bf16 = bf16;
          a.gradient_accumulation_steps = accumulation;
          if (checkpointing == std::string("full")) {
            a.gradient_checkpointing = checkpointing;
          }
          rank.report(std::string(strategy_name(strategy)) + " | " +
                          std::to_string(world->world_size()) + " | " + (bf16 ? "bf16" : "fp32") +
                          " | " + std::to_string(accumulation) + " | " + checkpointing,
                      count_steps(*world, a));
        }
      }
    }
  }
  world->close();
}

/// Runs CountSteps. `check` gets each step of each row.
void expect_counts(
    int ranks,
    const std::function<void(const std::string& row, const nlohmann::json& step)>& check) {
  const auto reports =
      testing_support::spawn(ranks, "CountSteps", {}, {.deadline = std::chrono::seconds(120)});
  for (const auto& report : reports) {
    EXPECT_EQ(report.error, "");
    EXPECT_EQ(report.end.code, 0);
  }
  for (const auto& [row, steps] : reports.at(0).values.items()) {
    SCOPED_TRACE(row);
    for (const auto& step : steps) {
      SCOPED_TRACE(step.dump());
      check(row, step);
    }
    testing::Test::RecordProperty(row, steps.dump()); // for tools/device_counts.py
  }
}

/// Of a step of one batch without checkpointing; others have no limit. bf16 has casts.
int64_t most_operators(const std::string& row) {
  if (!row.ends_with(" | 1 | no")) {
    return INT64_MAX;
  }
  return row.find("bf16") != std::string::npos ? 280 : 200;
}

TEST(DeviceStep, OneRankWaitsForNothing) {
  expect_counts(1, [](const std::string& row, const nlohmann::json& step) {
    EXPECT_EQ(step["syncs"], 0);
    EXPECT_LE(step["operators"], most_operators(row));
  });
}

TEST(DeviceStep, TwoRanksWaitForNothing) {
  expect_counts(2, [](const std::string& row, const nlohmann::json& step) {
    EXPECT_EQ(step["syncs"], 0);
    EXPECT_LE(step["operators"], most_operators(row));
  });
}

HASTEN_RANK_FUNCTION(TrainADeferredModel) {
  const auto world = testing_support::device_world(rank.world());
  TrainingArguments a = arguments();
  a.strategy = Strategy::fsdp;
  std::vector<at::Tensor> shards[2];
  for (const bool deferred : {false, true}) {
    PreTrainedModel model = deferred ? deferred_init(bert) : bert();
    Trainer trainer(model.ptr(), loss_of(model), a, std::make_shared<toy::Texts>(24), nullptr, {},
                    accelerator_for(a, *world));
    EXPECT_EQ(is_deferred(*model), deferred) << "prepare() makes it";
    trainer.train();
    shards[deferred] = model->parameters();
  }
  ASSERT_EQ(shards[0].size(), shards[1].size());
  for (size_t i = 0; i < shards[0].size(); ++i) {
    EXPECT_TRUE(at::equal(shards[0][i], shards[1][i])) << i;
  }
  world->close();
}

TEST(DeviceStep, ADeferredModelTrainsLikeAWholeOne) {
  for (const auto& report : testing_support::spawn(2, "TrainADeferredModel", {},
                                                   {.deadline = std::chrono::seconds(60)})) {
    EXPECT_EQ(report.error, "");
    EXPECT_EQ(report.end.code, 0);
  }
}

HASTEN_RANK_FUNCTION(CountStepsThatRead) {
  const auto world = testing_support::device_world(rank.world());
  TrainingArguments a = arguments();
  if (world->world_size() > 1) {
    a.strategy = Strategy::fsdp;
  }
  a.fp16 = true;
  rank.report("fp16", count_steps(*world, a));
  a.max_grad_norm = 0;
  rank.report("fp16 without clipping", count_steps(*world, a));
  a.max_grad_norm = 1;
  a.logging_steps = 1;
  rank.report("fp16 with a record", count_steps(*world, a));
  a.fp16 = false;
  rank.report("fp32 with a record", count_steps(*world, a));
  a.bf16 = true;
  a.strategy = Strategy::ddp;
  rank.report("bf16 with a record", count_steps(*world, a));
  world->close();
}

TEST(DeviceStep, ARecordOrALossScaleWaitsOnce) {
  for (const int ranks : {1, 2}) {
    const auto reports = testing_support::spawn(ranks, "CountStepsThatRead", {},
                                                {.deadline = std::chrono::seconds(60)});
    for (const auto& report : reports) {
      EXPECT_EQ(report.error, "");
    }
    EXPECT_EQ(reports[0].values.size(), 5u);
    for (const auto& [row, steps] : reports[0].values.items()) {
      for (const auto& step : steps) {
        EXPECT_EQ(step["syncs"], 1) << ranks << " " << row;
      }
    }
  }
}

std::vector<at::Tensor> copies(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> result;
  for (const at::Tensor& tensor : tensors) {
    result.push_back(tensor.detach().cpu().clone());
  }
  return result;
}

/// The parameters after each step.
struct Parameters : TrainerCallback {
  explicit Parameters(std::shared_ptr<torch::nn::Module> module) : module_(std::move(module)) {}
  void on_step_end(const StepProgress&) override { steps.push_back(copies(module_->parameters())); }
  std::vector<std::vector<at::Tensor>> steps{};

 private:
  std::shared_ptr<torch::nn::Module> module_;
};

/// Trains until a value of step 5 is not finite, on the last rank. Records are due every 4 steps.
/// With Local SGD the ranks average every 3 steps.
std::string train_to_the_end(Communicator& world, TrainingArguments a, bool bad_loss) {
  PreTrainedModel model = bert();
  const auto accelerator = accelerator_for(a, world);
  int64_t batches = 0;
  const bool last_rank = world.rank() + 1 == world.world_size();
  const auto loss = [&, inner = loss_of(model)](const Batch& rows) {
    LossOutput output = inner(rows);
    if (++batches == 5 && last_rank) { // the root's derivative at 0 is infinite, and 0 of it NaN
      output.loss_sum = bad_loss ? output.loss_sum * NAN
                                 : output.loss_sum + (output.outputs * 0).square().sum().sqrt();
    }
    return output;
  };
  a.logging_steps = 4;
  Trainer trainer(model.ptr(), loss, a, std::make_shared<toy::Texts>(12 * 4 * world.world_size()),
                  nullptr, {}, accelerator);
  const auto parameters = std::make_shared<Parameters>(model.ptr());
  trainer.add_callback(parameters);
  const std::string error =
      a.local_sgd_steps > 0 && !last_rank
          ? testing_support::error_of<CommunicationError>([&] { trainer.train(); })
          : testing_support::error_of<TrainingError>([&] { trainer.train(); });
  EXPECT_EQ(parameters->steps.size(), 8u);
  // Before the fifth step, or after the average that followed it.
  const size_t kept = a.local_sgd_steps == 0 ? 3 : last_rank ? 5 : 7;
  const auto now = copies(model->parameters());
  bool moved = false;
  for (size_t i = 0; i < now.size(); ++i) {
    EXPECT_TRUE(now[i].isfinite().all().item<bool>()) << i;
    EXPECT_TRUE(at::equal(now[i], parameters->steps.at(kept)[i])) << i;
    moved = moved || !at::equal(now[i], parameters->steps.at(kept - 1)[i]);
  }
  EXPECT_TRUE(moved);
  return error;
}

struct BadStep {
  TrainingArguments arguments;
  bool bad_loss;
};

/// By name. Those with fsdp are for several ranks.
std::map<std::string, BadStep> bad_steps(bool alone) {
  TrainingArguments a = arguments();
  a.max_grad_norm = 1;
  std::map<std::string, BadStep> all{{"loss", {a, true}}, {"gradient", {a, false}}};
  TrainingArguments by_value = a;
  by_value.bf16 = true;
  by_value.max_grad_norm = 0;
  by_value.max_grad_value = 0.1;
  all["gradient, clipped by value"] = {by_value, false};
  if (!alone) {
    a.strategy = Strategy::fsdp;
    all["loss, fsdp"] = {a, true};
    all["gradient, fsdp"] = {a, false};
    a.strategy = Strategy::ddp;
    a.local_sgd_steps = 3;
    all["loss, local_sgd"] = {a, true};
    all["gradient, local_sgd"] = {a, false};
    return all;
  }
  for (const OptimizerType optim : {OptimizerType::adam, OptimizerType::sgd, OptimizerType::lion,
                                    OptimizerType::adafactor, OptimizerType::adamw_8bit}) {
    a.optim = optim;
    all[std::string("loss, ") + spelling(optim)] = {a, true};
  }
  return all;
}

void expect_names_the_step(const std::string& error, const BadStep& of) {
  const std::string what = of.bad_loss ? "the loss" : "the gradient";
  EXPECT_NE(error.find(what + " is not finite in step 5 of 12"), std::string::npos) << error;
}

TEST(DeviceStep, ABadStepIsLeftOutAndTheNextRecordNamesIt) {
  for (const auto& [name, step] : bad_steps(true)) {
    SCOPED_TRACE(name);
    const auto world = testing_support::device_world(World{}); // an error ends a run's groups
    expect_names_the_step(train_to_the_end(*world, step.arguments, step.bad_loss), step);
  }
}

HASTEN_RANK_FUNCTION(TrainToABadStep) {
  const auto world = testing_support::device_world(rank.world());
  const BadStep step = bad_steps(false).at(std::getenv("HASTEN_BAD_STEP"));
  const std::string error = train_to_the_end(*world, step.arguments, step.bad_loss);
  expect_names_the_step(error, step);
  if (step.bad_loss) {
    EXPECT_NE(error.find("on rank 1 (loss=nan)"), std::string::npos) << error;
  }
  world->close();
}

TEST(DeviceStep, ABadStepOfOneRankIsLeftOutOnAll) {
  for (const auto& [name, step] : bad_steps(false)) {
    SCOPED_TRACE(name);
    for (const auto& report : testing_support::spawn(
             2, "TrainToABadStep", {},
             {.deadline = std::chrono::seconds(60), .environment = {{"HASTEN_BAD_STEP", name}}})) {
      EXPECT_EQ(report.error, "");
      EXPECT_EQ(report.end.code, 0);
    }
  }
}

TEST(DeviceStep, ClippingWaitsOnlyWhenTheNormIsRead) {
  const auto world = testing_support::device_world(World{});
  TrainingArguments a = arguments();
  const auto accelerator = accelerator_for(a, *world);
  auto net = std::make_shared<torch::nn::LinearImpl>(3, 2);
  auto [model, optimizer] =
      accelerator->prepare(net, std::make_shared<torch::optim::SGD>(net->parameters(), /*lr=*/0.0));
  const at::Tensor x = torch::ones({4, 3}, accelerator->device());
  const auto window = accelerator->accumulate(model);
  const DeviceCounters before = device_counters();
  accelerator->backward(model->forward(x).square().sum(), 8);
  const DeviceScalar norm = accelerator->clip_grad_norm_(model, 1e-3);
  optimizer.step();
  EXPECT_EQ((device_counters() - before).syncs, 0);
  EXPECT_TRUE(norm.pending());
  EXPECT_GT(norm, 0.01);
  EXPECT_GT(accelerator->last_window().loss, 0);
  EXPECT_EQ(norm.item(), norm.item());
  EXPECT_EQ((device_counters() - before).syncs, 1) << "both are read together";
  EXPECT_NEAR(accelerator->clip_grad_norm_(model, 1.0), 1e-3, 1e-6);
}

} // namespace hasten::device_step_test
