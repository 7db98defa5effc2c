// The trackers of a Trainer: report_to and TrackerCallback.
#include "hasten/trainer/tracker_callback.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <stdexcept>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "hasten/trainer/trainer.h"
#include "support/communicator.h"
#include "support/temporary_folder.h"
#include "support/world.h"
#include "trainer/toy_text.h"

namespace hasten::tracker_callback_test {

using testing_support::TemporaryFolder;

/// Four steps and an evaluation after each second one.
std::vector<nlohmann::json> history(const TrainingArguments& changed,
                                    std::shared_ptr<GeneralTracker> tracker = nullptr) {
  TrainingArguments arguments = changed;
  arguments.max_steps = 4;
  arguments.eval_strategy = IntervalStrategy::steps;
  arguments.eval_steps = 2;
  torch::manual_seed(3);
  const auto model = std::make_shared<toy::Classifier>();
  Trainer trainer(
      model, toy::loss_function(model), arguments, std::make_shared<toy::Texts>(64),
      std::make_shared<toy::Texts>(8), ComputeMetrics{},
      std::make_shared<Accelerator>(AcceleratorOptions{}, testing_support::fresh_communicator()));
  if (tracker) {
    trainer.add_callback(std::make_shared<TrackerCallback>(tracker));
  }
  trainer.train();
  auto records = trainer.state().log_history;
  for (nlohmann::json& record : records) { // these depend on time
    for (const char* name : {"train_runtime", "train_samples_per_second", "train_steps_per_second",
                             "eval_runtime", "eval_samples_per_second", "eval_steps_per_second"}) {
      record.erase(name);
    }
  }
  return records;
}

bool is_main() { return testing_support::test_world().rank == 0; }

TEST(TrackerCallback, ReportToRecordsTheRunOnRankZeroAndChangesNothing) {
  const TemporaryFolder folder; // each rank has its own
  TrainingArguments arguments = toy::arguments();
  const auto plain = history(arguments);
  arguments.report_to = "tensorboard,csv,json";
  arguments.logging_dir = folder.path().string();
  EXPECT_EQ(history(arguments), plain);
  if (!is_main()) {
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
    return;
  }
  const std::string csv = read_file(folder / "metrics.csv");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 2); // no json
  for (const nlohmann::json& record : plain) {
    const std::string step = record.at("step").dump();
    for (const char* name : {"loss", "learning_rate", "grad_norm", "epoch", "train_loss"}) {
      if (record.contains(name) && !record.contains("eval_loss")) {
        const std::string value = format_exact(record.at(name).get<double>());
        EXPECT_NE(csv.find("\n" + step + ",train/" + name + "," + value + "\n"), std::string::npos)
            << name << " " << value << "\n"
            << csv;
      }
    }
    if (record.contains("eval_loss")) {
      const std::string value = format_exact(record.at("eval_loss").get<double>());
      EXPECT_NE(csv.find("\n" + step + ",eval/loss," + value + "\n"), std::string::npos) << csv;
    }
  }
  EXPECT_NE(csv.find("\n,config/learning_rate,0.05\n"), std::string::npos);
  EXPECT_NE(csv.find(",train/samples_per_second,"), std::string::npos);
  EXPECT_NE(csv.find(",train/step_seconds/communication,"), std::string::npos);
}

TEST(TrackerCallback, ReportToHtmlWritesThePageOnRankZeroAndChangesNothing) {
  const TemporaryFolder folder; // rank 0's is the one in use
  TrainingArguments arguments = toy::arguments();
  const auto plain = history(arguments);
  arguments.report_to = "html";
  const auto communicator = testing_support::fresh_communicator();
  arguments.output_dir = communicator->broadcast_object(folder.path().string(), "folder");
  EXPECT_EQ(history(arguments), plain);
  if (is_main()) {
    const std::string page = read_file(folder / "report.html");
    EXPECT_NE(page.find("<svg"), std::string::npos);
    EXPECT_EQ(page.find("http-equiv=\"refresh\""), std::string::npos) << "the run has ended";
  }
  communicator->barrier("the page was read");
}

/// Throws in every call.
class Broken final : public GeneralTracker {
 public:
  std::string name() const override { return "broken"; }
  void log(const nlohmann::json&, std::optional<int64_t>) override {
    throw std::runtime_error("no service");
  }
};

TEST(TrackerCallback, ATrackerThatFailsDoesNotEndTraining) {
  int warnings = 0;
  set_log_sink([&](LogLevel, std::string_view line) {
    warnings += line.find("tracker broken stops, training continues: no service") == 0 ? 1 : 0;
  });
  const auto records = history(toy::arguments(), std::make_shared<Broken>());
  set_log_sink({});
  EXPECT_EQ(records, history(toy::arguments()));
  EXPECT_EQ(warnings, is_main() ? 1 : 0);
}

TEST(TrackerCallback, UnknownNamesAndAMissingFolderAreErrors) {
  const auto error = [](const std::string& report_to) -> std::string {
    TrainingArguments arguments = toy::arguments();
    arguments.report_to = report_to;
    try {
      check_trackers("test", arguments.report_to);
      arguments.validate();
    } catch (const InputError& caught) {
      return caught.what();
    }
    return {};
  };
  for (const char* text : {"report_to=wandb. Expected one of ", "csv, html, json, tensorboard"}) {
    EXPECT_NE(error("csv,wandb").find(text), std::string::npos) << error("csv,wandb");
  }
  EXPECT_NE(error("csv").find("an output_dir or a logging_dir"), std::string::npos);
  EXPECT_EQ(error("none"), "");
  EXPECT_EQ(tracker_names("json,csv,json"), (std::vector<std::string>{"csv", "json"}));
  EXPECT_EQ(error(""), "");
}

TEST(TrackerCallback, ReportToFindsARegisteredTracker) {
  class Counting final : public GeneralTracker {
   public:
    explicit Counting(std::shared_ptr<int> calls) : calls_(std::move(calls)) {}
    std::string name() const override { return "counting"; }
    void log(const nlohmann::json&, std::optional<int64_t>) override { ++*calls_; }

   private:
    std::shared_ptr<int> calls_;
  };
  const auto calls = std::make_shared<int>(0);
  register_tracker("counting",
                   [=](const TrackerRequest&) { return std::make_shared<Counting>(calls); });
  const TemporaryFolder folder;
  TrainingArguments arguments = toy::arguments();
  arguments.report_to = "counting";
  arguments.logging_dir = folder.path().string();
  history(arguments);
  EXPECT_EQ(*calls > 0, is_main());
  arguments.report_to = "countin";
  EXPECT_THROW(history(arguments), InputError);
}

} // namespace hasten::tracker_callback_test
