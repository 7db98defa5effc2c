#include "hasten/trainer/trainer.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <map>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/comm/communicator.h"
#include "hasten/io/commit.h"
#include "hasten/trainer/output_folder.h"
#include "support/temporary_folder.h"
#include "trainer/toy_text.h"

namespace hasten {

namespace detail {

std::shared_ptr<Accelerator> lone_accelerator(int64_t window = 1) {
  AcceleratorOptions options;
  options.gradient_accumulation_steps = window;
  return std::make_shared<Accelerator>(options, Communicator::create(World{}));
}

/// Two interleaved classes of points, no tokens, no lengths.
class Points : public Dataset {
 public:
  int64_t size() const override { return 40; }
  Batch collate(const std::vector<int64_t>& indices) const override {
    at::Tensor x = at::empty({static_cast<int64_t>(indices.size()), 2});
    at::Tensor y = at::empty({static_cast<int64_t>(indices.size()), 1});
    auto x_at = x.accessor<float, 2>();
    auto y_at = y.accessor<float, 2>();
    for (size_t r = 0; r < indices.size(); ++r) {
      const float angle = 0.3F * static_cast<float>(indices[r]);
      const auto row = static_cast<int64_t>(r);
      x_at[row][0] = std::cos(angle);
      x_at[row][1] = std::sin(angle);
      y_at[row][0] = std::cos(angle) > 0 ? 1.0F : 0.0F;
    }
    return {{{"x", x}, {"y", y}}, indices};
  }
};

/// Stores the events of a run, in order.
struct Recorder : TrainerCallback {
  std::vector<std::string> events{};
  RunDescription description{};
  std::vector<EpochReport> epochs{};
  std::vector<int64_t> steps{};
  void on_train_begin(const RunDescription& d) override {
    description = d;
    events.push_back("begin");
  }
  void on_step_end(const StepProgress& p) override { steps.push_back(p.global_step); }
  void on_log(const nlohmann::json& record) override {
    events.push_back("log " + record.at("step").dump());
  }
  void on_evaluate(const nlohmann::json& record) override {
    events.push_back("evaluate " + record.at("step").dump());
  }
  void on_save(const std::filesystem::path& path) override {
    EXPECT_NO_THROW(verify_manifest(path));
    events.push_back("save " + path.filename().string());
  }
  void on_epoch_end(const EpochReport& report) override {
    epochs.push_back(report);
    events.push_back("epoch " + std::to_string(report.epoch));
  }
  void on_train_end(const nlohmann::json&) override { events.push_back("end"); }
};

struct ToyRun {
  std::shared_ptr<toy::Classifier> model{};
  std::shared_ptr<Recorder> recorder = std::make_shared<Recorder>();
  std::unique_ptr<Trainer> trainer{};
  TrainOutput output{};
};

ToyRun train_toy(const TrainingArguments& arguments, int64_t rows, int64_t eval_rows = 0) {
  ToyRun run;
  run.model = std::make_shared<toy::Classifier>();
  run.trainer = std::make_unique<Trainer>(
      run.model, toy::loss_function(run.model), arguments, std::make_shared<toy::Texts>(rows),
      eval_rows > 0 ? std::make_shared<toy::Texts>(eval_rows) : nullptr,
      classification_metrics(toy::kLabels),
      lone_accelerator(arguments.gradient_accumulation_steps));
  run.trainer->add_callback(run.recorder);
  run.output = run.trainer->train();
  return run;
}

std::vector<nlohmann::json> json_lines(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::vector<nlohmann::json> lines;
  for (std::string line; std::getline(file, line);) {
    lines.push_back(nlohmann::json::parse(line));
  }
  return lines;
}

} // namespace detail

struct PointsLossImpl : torch::nn::Module {
  PointsLossImpl() : line(register_module("line", torch::nn::Linear(2, 1))) {}
  LossOutput forward(const Batch& batch) {
    const at::Tensor logits = line->forward(batch["x"]);
    return {torch::binary_cross_entropy_with_logits(logits, batch["y"], {}, {}, at::Reduction::Sum),
            static_cast<double>(batch.rows()), logits};
  }
  torch::nn::Linear line;
};
TORCH_MODULE(PointsLoss);

TEST(Trainer, NamedParametersTrainAsTheLongConstructorDoes) {
  TrainingArguments arguments;
  arguments.disable_tqdm = true;
  arguments.save_strategy = SaveStrategy::no;
  arguments.num_train_epochs = 2;
  std::vector<at::Tensor> weights;
  for (const bool named : {false, true}) {
    torch::manual_seed(1);
    PointsLoss model;
    const auto points = std::make_shared<detail::Points>();
    const auto accelerator = detail::lone_accelerator();
    if (named) {
      Trainer({.model = model,
               .args = arguments,
               .train_dataset = points,
               .eval_dataset = points,
               .accelerator = accelerator})
          .train();
    } else {
      Trainer(
          model.ptr(), [model](const Batch& batch) mutable { return model->forward(batch); },
          arguments, points, points, {}, accelerator)
          .train();
    }
    weights.push_back(model->line->weight.detach().clone());
  }
  EXPECT_TRUE(torch::equal(weights[0], weights[1]));
  EXPECT_THROW(Trainer({.model = torch::nn::Linear(2, 1)}), InputError);
}

TEST(Trainer, TrainsAPlainModuleOnADatasetOfItsOwn) {
  torch::manual_seed(1);
  auto model = std::make_shared<torch::nn::SequentialImpl>(
      torch::nn::Linear(2, 16), torch::nn::Tanh(), torch::nn::Linear(16, 1));
  TrainingArguments arguments;
  arguments.disable_tqdm = true;
  arguments.save_strategy = SaveStrategy::no;
  arguments.num_train_epochs = 20;
  arguments.learning_rate = 0.03;
  Trainer trainer(
      model,
      [model](const Batch& batch) {
        const at::Tensor logits = model->forward(batch["x"]);
        return LossOutput{
            torch::binary_cross_entropy_with_logits(logits, batch["y"], {}, {}, at::Reduction::Sum),
            static_cast<double>(batch.rows()), logits};
      },
      arguments, std::make_shared<detail::Points>(), std::make_shared<detail::Points>(), {},
      detail::lone_accelerator());
  const double before = trainer.evaluate().at("eval_loss").get<double>();
  EXPECT_TRUE(model->is_training());
  trainer.train();
  const double after = trainer.evaluate().at("eval_loss").get<double>();
  EXPECT_NEAR(before, std::log(2.0), 0.2);
  EXPECT_LT(after, 0.1);
  EXPECT_EQ(toy::history(trainer, "eval_loss").size(), 20u);
  EXPECT_THROW(trainer.train(), InputError); // a Trainer runs once
}

TEST(Trainer, RecordsAndFilesSayWhatHappened) {
  const testing_support::TemporaryFolder folder;
  TrainingArguments arguments = toy::arguments();
  arguments.output_dir = folder.path().string();
  arguments.num_train_epochs = 2;
  arguments.per_device_train_batch_size = 3;
  arguments.gradient_accumulation_steps = 2;
  arguments.logging_steps = 2;
  arguments.eval_strategy = IntervalStrategy::epoch;
  arguments.save_strategy = SaveStrategy::epoch;
  // 16 rows: 6 batches of 3, the last of 1; 3 steps an epoch.
  const auto run = detail::train_toy(arguments, 16, 7);
  const std::vector<std::string> events = {
      "begin", "log 2",      "evaluate 3",        "save checkpoint-3", "epoch 1", "log 4",
      "log 6", "evaluate 6", "save checkpoint-6", "epoch 2",           "end"};
  EXPECT_EQ(run.recorder->events, events);
  EXPECT_EQ(run.recorder->steps, (std::vector<int64_t>{1, 2, 3, 4, 5, 6}));

  const RunDescription& d = run.recorder->description;
  EXPECT_EQ(d.total_batch, 6);
  EXPECT_EQ(d.plan.max_steps, 6);
  EXPECT_EQ(d.parameters, 23 * 6 + 6 + 6 + 6 * 3 + 3);
  EXPECT_EQ(d.decayed_parameters, 23 * 6 + 6 * 3);
  int64_t tokens = 0;
  for (int64_t i = 0; i < 16; ++i) {
    tokens += toy::Texts(16).length(i);
  }
  for (const EpochReport& epoch : run.recorder->epochs) {
    EXPECT_EQ(epoch.samples, 16);
    EXPECT_NEAR(epoch.tokens_per_second * epoch.train_seconds, static_cast<double>(tokens), 1e-6);
    EXPECT_GT(epoch.padding_waste, 0);
    EXPECT_LT(epoch.padding_waste, 1);
    EXPECT_GT(epoch.peak_resident_bytes, 1 << 20);
    EXPECT_EQ(epoch.bytes_sent, 0);
    for (const char* name : {"eval_loss", "eval_accuracy", "eval_f1"}) {
      EXPECT_TRUE(epoch.evaluation.count(name)) << name;
    }
  }
  EXPECT_NEAR(run.recorder->epochs.back().seconds_left, 0, 1e-12);

  std::map<std::string, int> types;
  for (const auto& line : detail::json_lines(folder / "metrics.jsonl")) {
    ++types[line.at("type").get<std::string>()];
    if (line.at("type") == "train") {
      const auto& seconds = line.at("step_seconds");
      EXPECT_GT(seconds.at("compute"), 0);
      EXPECT_GT(seconds.at("data"), 0);
      EXPECT_EQ(seconds.at("communication"), 0);
      EXPECT_EQ(seconds.at("recompute"), 0);
      EXPECT_EQ(seconds.at("save") > 0, line.at("step") == 4) << line; // saved after step 3
      EXPECT_GT(line.at("samples_per_second"), 0);
    } else if (line.at("type") == "epoch") {
      EXPECT_EQ(line.at("peak_resident_bytes_by_rank"),
                nlohmann::json({line.at("peak_resident_bytes")}));
    } else if (line.at("type") == "start") {
      EXPECT_NE(line.at("command").get<std::string>().find("hasten_unit_tests"), std::string::npos);
    }
  }
  EXPECT_EQ(types, (std::map<std::string, int>{
                       {"start", 1}, {"train", 3}, {"eval", 2}, {"epoch", 2}, {"end", 1}}));
  for (const char* place : {"", "checkpoint-3", "checkpoint-6"}) {
    for (const char* name :
         {"model.safetensors", "trainer_state.json", "hasten_state.json", "training_args.json"}) {
      EXPECT_TRUE(std::filesystem::exists(folder.path() / place / name)) << place << " " << name;
    }
  }
  const TrainerState state = read_trainer_state(folder / "trainer_state.json");
  EXPECT_EQ(state.global_step, 6);
  EXPECT_EQ(state.log_history, run.trainer->state().log_history);
  EXPECT_EQ(nlohmann::json::parse(read_file(folder / "training_args.json"))
                .get<TrainingArguments>()
                .logging_steps,
            2);
}

TEST(Trainer, LoggedLossIsTheMeanOverTheRowsSinceTheLastRecord) {
  TrainingArguments arguments = toy::arguments();
  arguments.num_train_epochs = 1;
  arguments.per_device_train_batch_size = 4;
  const auto every = detail::train_toy(arguments, 26); // 26 rows: 6 batches of 4 and one of 2
  arguments.logging_steps = 4;
  const auto some = detail::train_toy(arguments, 26);
  const auto l = toy::history(*every.trainer, "loss");
  ASSERT_EQ(l.size(), 7u);
  const auto logged = toy::history(*some.trainer, "loss");
  ASSERT_EQ(logged.size(), 2u); // also a record for the last window
  EXPECT_NEAR(logged[0], (l[0] + l[1] + l[2] + l[3]) / 4, 1e-12);
  EXPECT_NEAR(logged[1], (4 * l[4] + 4 * l[5] + 2 * l[6]) / 10, 1e-12);
  EXPECT_NEAR(some.output.training_loss, (16 * logged[0] + 10 * logged[1]) / 26, 1e-12);
  // The rate a step used, not the next one's: warm-up over 2 of 7 steps.
  const auto rates = toy::history(*every.trainer, "learning_rate");
  EXPECT_EQ(rates[0], 0.0);
  EXPECT_NEAR(rates[1], 0.05 / 2, 1e-15);
  EXPECT_NEAR(rates[6], 0.05 * 1 / 5, 1e-15);
}

TEST(Trainer, MaxStepsAndFractionalEpochsEndInMidEpoch) {
  TrainingArguments arguments = toy::arguments();
  arguments.eval_strategy = IntervalStrategy::epoch;
  arguments.per_device_train_batch_size = 4;
  arguments.num_train_epochs = 1.5;
  auto run = detail::train_toy(arguments, 16, 3); // 4 steps an epoch
  EXPECT_EQ(run.output.global_step, 6);
  EXPECT_EQ(run.trainer->state().epoch, 1.5);
  EXPECT_EQ(toy::history(*run.trainer, "eval_loss").size(), 2u);
  EXPECT_EQ(run.recorder->epochs.back().samples, 8);

  arguments.max_steps = 9; // replaces num_train_epochs: ends in a third epoch
  run = detail::train_toy(arguments, 16, 3);
  EXPECT_EQ(run.output.global_step, 9);
  EXPECT_EQ(run.recorder->epochs.size(), 3u);
  EXPECT_EQ(run.recorder->epochs.back().samples, 4);
}

TEST(Trainer, EvaluatesAndSavesEverySoManyUpdatesAndAtTheLast) {
  const testing_support::TemporaryFolder folder;
  TrainingArguments arguments = toy::arguments();
  arguments.output_dir = folder.path().string();
  arguments.max_steps = 7;
  arguments.per_device_train_batch_size = 8;
  arguments.logging_steps = 100;
  arguments.eval_strategy = IntervalStrategy::steps;
  arguments.eval_steps = 2;
  arguments.save_strategy = SaveStrategy::steps;
  arguments.save_steps = 4;
  arguments.load_best_model_at_end = true;
  const auto run = detail::train_toy(arguments, 64, 5);
  const std::vector<std::string> events = {
      "begin", "evaluate 2", "evaluate 4",        "save checkpoint-4", "evaluate 6",
      "log 7", "evaluate 7", "save checkpoint-7", "epoch 1",           "end"};
  EXPECT_EQ(run.recorder->events, events);
  // Only a saved model can be loaded as the best model.
  ASSERT_TRUE(run.trainer->state().best_global_step.has_value());
  const int64_t best = *run.trainer->state().best_global_step;
  EXPECT_TRUE(best == 4 || best == 7) << best;
  EXPECT_EQ(run.trainer->state().best_model_checkpoint,
            (folder / ("checkpoint-" + std::to_string(best))).string());
}

TEST(Trainer, ContradictionsAreRefusedBeforeAnythingIsWritten) {
  const testing_support::TemporaryFolder folder;
  TrainingArguments arguments = toy::arguments();
  arguments.output_dir = (folder / "out").string();
  const auto error = [&](int64_t accelerators_window) -> std::string {
    auto model = std::make_shared<toy::Classifier>();
    try {
      Trainer trainer(model, toy::loss_function(model), arguments, std::make_shared<toy::Texts>(8),
                      nullptr, {}, detail::lone_accelerator(accelerators_window));
    } catch (const InputError& e) {
      return e.what();
    }
    return "no error";
  };
  EXPECT_EQ(error(1), "no error");
  EXPECT_NE(error(2).find("gradient_accumulation_steps=1"), std::string::npos);
  arguments.per_device_train_batch_size = 0;
  EXPECT_NE(error(1).find("per_device_train_batch_size=0"), std::string::npos);
  arguments.per_device_train_batch_size = 1;
  arguments.eval_strategy = IntervalStrategy::epoch;
  arguments.save_strategy = SaveStrategy::epoch;
  arguments.load_best_model_at_end = true;
  EXPECT_NE(error(1).find("without evaluation data"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(arguments.output_dir));
}

} // namespace hasten
