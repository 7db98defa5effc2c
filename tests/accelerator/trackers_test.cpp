// Accelerator::init_trackers, log and get_tracker.
#include <gtest/gtest.h>

#include <stdexcept>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/log.h"
#include "support/communicator.h"
#include "support/error_of.h"
#include "support/temporary_folder.h"

namespace hasten::trackers_test {

using testing_support::error_of;
using testing_support::fresh_communicator;
using testing_support::TemporaryFolder;

/// Keeps the calls. From the call of number `fails` on it throws.
class Recorder final : public GeneralTracker {
 public:
  explicit Recorder(size_t fails = 1000) : fails_(fails) {}
  std::string name() const override { return "recorder"; }
  void store_init_configuration(const nlohmann::json& values) override { add("init", values, {}); }
  void log(const nlohmann::json& values, std::optional<int64_t> step) override {
    add("log", values, step);
  }
  void log_histogram(const std::string& tag, const std::vector<double>& values,
                     std::optional<int64_t> step) override {
    add(tag, values, step);
  }
  void finish() override { add("finish", {}, {}); }

  std::vector<nlohmann::json> calls{};

 private:
  void add(const std::string& call, const nlohmann::json& values, std::optional<int64_t> step) {
    if (calls.size() + 1 >= fails_) {
      throw std::runtime_error("the recorder is full");
    }
    calls.push_back({call, values, step.value_or(-1)});
  }
  size_t fails_;
};

#define EXPECT_SAYS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(Trackers, OnlyRankZeroCallsThem) {
  const TemporaryFolder folder; // each rank has its own
  const auto recorder = std::make_shared<Recorder>();
  AcceleratorOptions options;
  options.log_with = {recorder, "csv"};
  options.project_dir = folder.path();
  Accelerator accelerator(options, fresh_communicator());
  accelerator.init_trackers("reviews", {{"lr", 0.5}});
  accelerator.log({{"loss", accelerator.process_index() + 1.5}}, 3);
  accelerator.get_tracker("recorder")->log_histogram("w", {1, 2}, 4);
  accelerator.get_tracker("csv")->log_histogram("w", {1, 2}, 4); // not of this tracker
  accelerator.end_training();
  accelerator.end_training();
  accelerator.log({{"loss", 1}}, 4); // after the end: nothing
  if (accelerator.is_main_process()) {
    EXPECT_EQ(nlohmann::json(recorder->calls).dump(),
              R"([["init",{"lr":0.5},-1],["log",{"loss":1.5},3],["w",[1.0,2.0],4],)"
              R"(["finish",null,-1]])");
    EXPECT_EQ(read_file(folder / "reviews/metrics.csv"),
              "step,tag,value\n,config/lr,0.5\n3,loss,1.5\n");
  } else {
    EXPECT_TRUE(recorder->calls.empty());
    EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  }
}

TEST(Trackers, ATrackerThatFailsIsReportedOnceAndTheOthersContinue) {
  std::vector<std::string> warnings;
  set_log_sink([&](LogLevel level, std::string_view line) {
    if (level == LogLevel::warning) {
      warnings.emplace_back(line);
    }
  });
  const TemporaryFolder folder;
  std::filesystem::create_directories(folder / "p");
  write_file_atomically(folder / "p/reviews", "a file where a folder should be");
  const auto fragile = std::make_shared<Recorder>(3), sound = std::make_shared<Recorder>();
  AcceleratorOptions options;
  options.log_with = {"tensorboard", fragile, sound};
  options.project_dir = folder / "none";
  options.logging_dir = folder / "p";
  Accelerator accelerator(options, fresh_communicator());
  accelerator.init_trackers("reviews");
  for (int64_t step = 0; step < 5; ++step) {
    accelerator.log({{"loss", 1}}, step);
  }
  accelerator.end_training();
  set_log_sink({});
  const bool main = accelerator.is_main_process();
  EXPECT_EQ(sound->calls.size(), main ? 7u : 0u); // init, five times log, finish
  EXPECT_EQ(fragile->calls.size(), main ? 2u : 0u);
  ASSERT_EQ(warnings.size(), main ? 2u : 0u);
  if (main) {
    EXPECT_SAYS(warnings[0], "tracker tensorboard stops, training continues: ");
    EXPECT_SAYS(warnings[0], "Not a directory");
    EXPECT_SAYS(warnings[1], "tracker recorder stops, training continues: the recorder is full");
  }
}

TEST(Trackers, MistakesAreErrorsOnEveryRank) {
  const auto made_with = [](std::vector<TrackerChoice> log_with) {
    return error_of<InputError>([&] {
      AcceleratorOptions options;
      options.log_with = std::move(log_with);
      const Accelerator accelerator(options, fresh_communicator());
    });
  };
  EXPECT_SAYS(made_with({"tensorbord"}),
              "log_with=tensorbord. Expected one of "); // other cases add names
  EXPECT_SAYS(made_with({"tensorbord"}), "csv, html, json, tensorboard. Fix: write tensorboard.");
  EXPECT_SAYS(made_with({"csv"}), "log_with=csv without a folder. Expected a project_dir");
  EXPECT_SAYS(made_with({std::shared_ptr<GeneralTracker>()}), "log_with=null");
  AcceleratorOptions options;
  options.log_with = {std::make_shared<Recorder>()};
  Accelerator accelerator(options, fresh_communicator());
  EXPECT_SAYS(error_of<InputError>([&] { accelerator.log({{"a", 1}}); }),
              "a call before init_trackers()");
  accelerator.init_trackers("p");
  EXPECT_SAYS(error_of<InputError>([&] { accelerator.get_tracker("wandb"); }), "tracker=wandb");
  accelerator.end_training();
  Accelerator silent({}, fresh_communicator());
  silent.init_trackers("p");
  silent.log({{"a", 1}}, 1); // no trackers: nothing
  silent.end_training();
}

} // namespace hasten::trackers_test
