// The events that callbacks get in a run of one process, and the requests that they can make.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <map>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/comm/communicator.h"
#include "hasten/trainer/early_stopping.h"
#include "hasten/trainer/output_folder.h"
#include "hasten/trainer/trainer.h"
#include "support/temporary_folder.h"
#include "trainer/toy_text.h"
#include "trainer/trainer_golden.h"

namespace hasten::trainer_callbacks_test {

using testing_support::TemporaryFolder;

/// Stores the name of every event. `at` can make a request in an event.
struct Watcher : TrainerCallback {
  std::vector<std::string> events{};
  std::map<std::string, std::function<void(TrainerControl&)>> at{};

  void heard(const std::string& event) {
    events.push_back(event);
    if (const auto found = at.find(event); found != at.end()) {
      found->second(control());
    }
  }
  void heard(const char* event, const StepProgress& p) {
    heard(event + (" " + std::to_string(p.global_step)));
  }
  void on_train_begin(const RunDescription&) override { heard("train_begin"); }
  void on_epoch_begin(const StepProgress& p) override { heard("epoch_begin", p); }
  void on_step_begin(const StepProgress& p) override { heard("step_begin", p); }
  void on_substep_end(const StepProgress& p) override { heard("substep_end", p); }
  void on_pre_optimizer_step(const StepProgress& p) override { heard("pre_optimizer_step", p); }
  void on_optimizer_step(const StepProgress& p) override { heard("optimizer_step", p); }
  void on_step_end(const StepProgress& p) override { heard("step_end", p); }
  void on_log(const nlohmann::json& r) override { heard("log " + r.at("step").dump()); }
  void on_evaluate(const nlohmann::json& r) override { heard("evaluate " + r.at("step").dump()); }
  void on_predict(const nlohmann::json& r) override {
    heard(r.contains("test_loss") ? "predict" : "predict without a loss");
  }
  void on_save(const std::filesystem::path& path) override {
    heard("save " + path.filename().string());
  }
  void on_epoch_end(const EpochReport& r) override {
    heard("epoch_end " + std::to_string(r.global_step));
  }
  void on_train_end(const nlohmann::json&) override { heard("train_end"); }
};

struct WatchedRun {
  std::shared_ptr<toy::Classifier> model = std::make_shared<toy::Classifier>();
  std::shared_ptr<Watcher> watcher = std::make_shared<Watcher>();
  std::unique_ptr<Trainer> trainer{};

  explicit WatchedRun(const TrainingArguments& arguments, ComputeMetrics metrics = {}) {
    AcceleratorOptions options;
    options.gradient_accumulation_steps = arguments.gradient_accumulation_steps;
    trainer = std::make_unique<Trainer>(
        model, toy::loss_function(model), arguments, std::make_shared<toy::Texts>(12),
        std::make_shared<toy::Texts>(5), std::move(metrics),
        std::make_shared<Accelerator>(options, Communicator::create(World{})));
    trainer->add_callback(watcher);
  }
};

/// Three steps an epoch of 2 x 2 rows; nothing is due by itself but the end's.
TrainingArguments quiet_arguments(const std::string& folder = {}) {
  TrainingArguments a = toy::arguments();
  a.per_device_train_batch_size = 2;
  a.gradient_accumulation_steps = 2;
  a.num_train_epochs = 2;
  a.logging_steps = 100;
  a.output_dir = folder;
  return a;
}

using Events = std::vector<std::string>;

/// The events that begin with one of the words.
Events only(const Events& events, const Events& words) {
  Events kept;
  for (const std::string& event : events) {
    for (const std::string& word : words) {
      if (event.rfind(word, 0) == 0) {
        kept.push_back(event);
        break;
      }
    }
  }
  return kept;
}

TEST(TrainerCallbacks, EventsComeInTheOrderOfTransformers) {
  TrainingArguments a = quiet_arguments();
  a.num_train_epochs = 1;
  a.max_steps = 2;
  a.eval_strategy = IntervalStrategy::steps;
  a.eval_steps = 2;
  WatchedRun run(a);
  run.trainer->train();
  run.trainer->predict(toy::Texts(3));
  EXPECT_EQ(run.watcher->events,
            (Events{"train_begin", "epoch_begin 0", "step_begin 0", "substep_end 0",
                    "pre_optimizer_step 0", "optimizer_step 0", "step_end 1", "step_begin 1",
                    "substep_end 1", "pre_optimizer_step 1", "optimizer_step 1", "step_end 2",
                    "log 2", "evaluate 2", "epoch_end 2", "train_end", "predict"}));
}

TEST(TrainerCallbacks, WhatIsAskedIsDoneBehindTheUpdateThatAsked) {
  const TemporaryFolder folder;
  WatchedRun run(quiet_arguments(folder.path().string()));
  run.watcher->at = {
      {"step_end 1", [](TrainerControl& c) { c.should_save = true; }},
      {"step_end 2", [](TrainerControl& c) { c.should_evaluate = true; }},
      {"evaluate 2", [](TrainerControl& c) { c.should_save = true; }},
      {"step_end 3", [](TrainerControl& c) { c.should_log = true; }},
      {"step_end 5", [](TrainerControl& c) { c.should_training_stop = true; }},
  };
  const TrainOutput output = run.trainer->train();
  EXPECT_EQ(output.global_step, 5); // of 6
  EXPECT_EQ(only(run.watcher->events, {"log", "evaluate", "save", "epoch_end", "train_end"}),
            (Events{"save checkpoint-1", "evaluate 2", "save checkpoint-2", "log 3", "epoch_end 3",
                    "log 5", "epoch_end 5", "train_end"}));
  EXPECT_TRUE(std::filesystem::exists(folder / "model.safetensors"));
}

TEST(TrainerCallbacks, WhatOneRankMayAskIsDoneBehindTheNextUpdate) {
  WatchedRun run(quiet_arguments());
  const auto alone = [](TrainerControl& c) {
    c.should_evaluate = true;
    c.any_rank = true;
  };
  run.watcher->at = {{"step_end 1", alone}, // goes with step 2
                     {"substep_end 3", alone}, // with step 4
                     {"optimizer_step 4", alone}}; // inside a step: the next, 6
  run.trainer->train();
  EXPECT_EQ(only(run.watcher->events, {"evaluate"}),
            (Events{"evaluate 2", "evaluate 4", "evaluate 6"}));
}

TEST(TrainerCallbacks, ALearningRateIsThePeakFromTheNextUpdateOnAlsoWhenResumed) {
  const TemporaryFolder folder;
  const auto rates = [&](const std::string& place, bool resume, double peak = 0.04) {
    TrainingArguments a = quiet_arguments((folder / place).string());
    a.logging_steps = 1;
    a.learning_rate = peak;
    a.allow_changed_arguments = peak != 0.04;
    a.warmup_steps = 0;
    a.lr_scheduler_type = "linear";
    a.save_strategy = SaveStrategy::steps;
    a.save_steps = 1;
    a.save_total_limit = 0;
    a.resume_from_checkpoint = resume ? "auto" : "";
    WatchedRun run(a);
    run.watcher->at = {{"step_end 2", [](TrainerControl& c) { c.learning_rate = 0.006; }}};
    run.trainer->train();
    return toy::history(*run.trainer, "learning_rate");
  };
  const auto whole = rates("whole", false);
  ASSERT_EQ(whole.size(), 6u);
  const double expected[] = {0.04,          0.04 * 5 / 6,  0.006 * 4 / 6,
                             0.006 * 3 / 6, 0.006 * 2 / 6, 0.006 / 6};
  for (size_t i = 0; i < 6; ++i) {
    EXPECT_NEAR(whole[i], expected[i], 1e-15) << i;
  }
  const auto model = read_file(folder / "whole/model.safetensors");
  for (const double peak : {0.04, 1.0}) { // the callback's rate stays
    // As if it had been killed behind step 4.
    for (const char* name : {"checkpoint-5", "checkpoint-6", "hasten_state.json"}) {
      std::filesystem::remove_all(folder / "whole" / name);
    }
    EXPECT_EQ(rates("whole", true, peak), whole) << peak;
    EXPECT_TRUE(read_file(folder / "whole/model.safetensors") == model) << peak;
  }
}

TEST(TrainerCallbacks, ARateThatIsNoneIsRefusedWithItsValue) {
  WatchedRun run(quiet_arguments());
  run.watcher->at = {{"step_end 1", [](TrainerControl& c) { c.learning_rate = -1; }}};
  try {
    run.trainer->train();
    FAIL() << "trained on";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("control().learning_rate=-1"), std::string::npos)
        << error.what();
  }
}

/// "score" of the n-th evaluation.
ComputeMetrics scripted(std::shared_ptr<std::vector<double>> scores) {
  class Score final : public EvaluationMetrics {
   public:
    explicit Score(double value) : value_(value) {}
    void update(const at::Tensor&, const Batch&) override {}
    std::vector<Metric*> metrics() override { return {}; }
    std::map<std::string, double> compute() const override { return {{"score", value_}}; }

   private:
    double value_;
  };
  return
      [scores, next = size_t{0}]() mutable { return std::make_unique<Score>(scores->at(next++)); };
}

TEST(EarlyStopping, StopsBehindTheEvaluationThatTransformersStopsAt) {
  for (const auto& golden : trainer_golden::kStoppingCases) {
    SCOPED_TRACE(std::to_string(golden.patience) + " " + std::to_string(golden.threshold) + " " +
                 std::to_string(golden.values.back()));
    TrainingArguments a = quiet_arguments();
    a.max_steps = static_cast<int64_t>(golden.values.size());
    a.eval_strategy = IntervalStrategy::steps;
    a.eval_steps = 1;
    a.metric_for_best_model = "score";
    a.greater_is_better = golden.greater;
    a.early_stopping_patience = golden.patience;
    a.early_stopping_threshold = golden.threshold;
    WatchedRun run(a, scripted(std::make_shared<std::vector<double>>(golden.values)));
    run.trainer->train();
    EXPECT_EQ(run.trainer->state().global_step,
              golden.stops_behind == 0 ? a.max_steps : golden.stops_behind);
    EXPECT_EQ(run.watcher->events.back(), "train_end");
  }
}

TEST(TrainerCallbacks, EvaluationsMayBeginLateOrAtOnceAndEachBestModelMayBeSaved) {
  const TemporaryFolder folder;
  TrainingArguments a = quiet_arguments((folder / "out").string());
  a.max_steps = 6;
  a.eval_strategy = IntervalStrategy::steps;
  a.eval_steps = 1;
  a.eval_delay = 2;
  a.eval_on_start = true;
  a.save_strategy = SaveStrategy::best;
  a.load_best_model_at_end = true;
  a.metric_for_best_model = "score";
  // That of the start is not the best: no checkpoint has it.
  WatchedRun run(a, scripted(std::make_shared<std::vector<double>>(
                        std::vector<double>{0.9, 0.5, 0.4, 0.7, 0.7, 0.6})));
  run.trainer->train();
  EXPECT_EQ(only(run.watcher->events, {"evaluate", "save"}),
            (Events{"evaluate 0", "evaluate 2", "save checkpoint-2", "evaluate 3", "evaluate 4",
                    "save checkpoint-4", "evaluate 5", "evaluate 6"}));
  EXPECT_EQ(run.trainer->state().best_global_step, 4);
  a.eval_strategy = IntervalStrategy::no;
  EXPECT_THROW(a.validate(), InputError);
}

TEST(EarlyStopping, PatienceIsPartOfCheckpoints) {
  const TemporaryFolder folder;
  TrainingArguments a = quiet_arguments((folder / "out").string());
  a.max_steps = 6;
  a.eval_strategy = IntervalStrategy::steps;
  a.save_strategy = SaveStrategy::steps;
  a.eval_steps = a.save_steps = 1;
  a.save_total_limit = 0;
  a.metric_for_best_model = "score";
  a.early_stopping_patience = 3;
  a.resume_from_checkpoint = "auto";
  const auto steps_of = [&](std::vector<double> scores) {
    WatchedRun run(a, scripted(std::make_shared<std::vector<double>>(std::move(scores))));
    run.trainer->train();
    return run.trainer->state().global_step;
  };
  EXPECT_EQ(steps_of({0.5, 0.4, 0.4, 0.4, 0.9, 0.9}), 4);
  // As if it had been killed behind step 3: two of the three are counted.
  for (const char* name : {"checkpoint-4", "hasten_state.json"}) {
    std::filesystem::remove_all(folder / "out" / name);
  }
  EXPECT_EQ(steps_of({0.4, 0.9, 0.9}), 4);
}

TEST(EarlyStopping, AMetricThatNoEvaluationHasIsRefusedBeforeTraining) {
  TrainingArguments a = quiet_arguments();
  a.eval_strategy = IntervalStrategy::epoch;
  a.early_stopping_patience = 1;
  a.metric_for_best_model = "acuracy";
  try {
    WatchedRun run(a, classification_metrics(toy::kLabels));
    FAIL() << "accepted";
  } catch (const InputError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("metric_for_best_model=acuracy"), text.npos) << text;
    EXPECT_NE(text.find("accuracy, f1"), text.npos) << text;
    EXPECT_NE(text.find("Fix: write accuracy"), text.npos) << text;
  }
}

TEST(SaveOnlyModel, LeavesFoldersOfAModelThatARunCannotGoOnFrom) {
  const TemporaryFolder folder;
  TrainingArguments a = quiet_arguments((folder / "out").string());
  a.save_strategy = SaveStrategy::epoch;
  a.eval_strategy = IntervalStrategy::epoch;
  a.load_best_model_at_end = true;
  a.metric_for_best_model = "score";
  a.save_only_model = true;
  WatchedRun run(a, scripted(std::make_shared<std::vector<double>>(std::vector<double>{0.9, 0.1})));
  run.trainer->train();
  const auto best = folder / "out" / "checkpoint-3";
  for (const auto& entry : std::filesystem::directory_iterator(best)) {
    const std::string name = entry.path().filename().string();
    EXPECT_TRUE(name == "model.safetensors" || name == "trainer_state.json" ||
                name == "hasten_state.json" || name == "training_args.json" ||
                name == "manifest.json")
        << name;
  }
  EXPECT_EQ(read_file(best / "model.safetensors"), read_file(folder / "out" / "model.safetensors"));

  a.output_dir = (folder / "other").string();
  a.load_best_model_at_end = false;
  a.resume_from_checkpoint = best.string();
  try {
    WatchedRun(a).trainer->train();
    FAIL() << "resumed";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("save_only_model"), std::string::npos) << error.what();
  }
}

TEST(OutputDir, AFolderThatARunWritesIsRefusedToAnother) {
  const TemporaryFolder folder;
  TrainingArguments a = quiet_arguments((folder / "out").string());
  a.overwrite_output_dir = true;
  WatchedRun run(a);
  std::string refusal;
  run.watcher->at = {{"step_end 2", [&](TrainerControl&) {
                        try {
                          WatchedRun(a).trainer->train();
                        } catch (const InputError& error) {
                          refusal = error.what();
                        }
                      }}};
  run.trainer->train();
  EXPECT_NE(refusal.find("is in use by another run"), std::string::npos) << refusal;
  WatchedRun(a).trainer->train(); // it has ended
}

} // namespace hasten::trainer_callbacks_test
