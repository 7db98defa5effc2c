// The records of a run of hasten train: its trackers' files, and the page of hasten report.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <tuple>
#include <utility>

#include "cli/small_reviews.h"

namespace hasten::record_programs_test {

namespace files = std::filesystem;
using testing_support::ProgramRun;
using testing_support::run_program;
using testing_support::small_reviews;
using testing_support::TemporaryFolder;
using testing_support::train_arguments;

class RecordPrograms : public testing::Test {
 protected:
  /// One finished run of 6 steps with its trackers' files in folder/logs.
  static void SetUpTestSuite() {
    folder_ = new TemporaryFolder;
    write_file_atomically(*folder_ / "train.csv", small_reviews(24));
    run_ = new ProgramRun(train({"--eval-strategy", "steps", "--eval-steps", "2", "--save-strategy",
                                 "steps", "--save-steps", "2", "--save-total-limit", "0"}));
  }
  static void TearDownTestSuite() {
    delete run_;
    delete folder_;
  }
  void SetUp() override { ASSERT_EQ(run_->code, 0) << run_->error; }

  static ProgramRun train(std::vector<std::string> more) {
    const std::vector<std::string> common{"--max-steps",
                                          "6",
                                          "--batch-size",
                                          "4",
                                          "--eval-split",
                                          "0.25",
                                          "--lr",
                                          "2e-3",
                                          "--logging-steps",
                                          "1",
                                          "--report-to",
                                          "tensorboard,csv",
                                          "--logging-dir",
                                          *folder_ / "logs"};
    more.insert(more.end(), common.begin(), common.end());
    return run_program(train_arguments(folder_->path(), more));
  }

  /// A folder with the records of the run and these lines of metrics.jsonl.
  static files::path records_in(const TemporaryFolder& folder, const std::string& name,
                                const std::string& metrics) {
    files::create_directory(folder / name);
    files::copy(*folder_ / "out/training_args.json", folder / name);
    write_file_atomically(folder / name / "metrics.jsonl", metrics);
    return folder / name;
  }
  static std::string metrics() { return read_file(*folder_ / "out/metrics.jsonl"); }
  /// Up to the middle of the training record of `step`.
  static std::string metrics_into(int step) {
    const std::string all = metrics();
    for (size_t at = 0; at < all.size(); at = all.find('\n', at) + 1) {
      const std::string line = all.substr(at, all.find('\n', at) - at);
      const auto record = nlohmann::json::parse(line);
      if (record.at("type") == "train" && record.at("step") == step) {
        return all.substr(0, at + line.size() / 2);
      }
    }
    return {};
  }

  static TemporaryFolder* folder_;
  static ProgramRun* run_;
};

TemporaryFolder* RecordPrograms::folder_ = nullptr;
ProgramRun* RecordPrograms::run_ = nullptr;

/// "x": the steps and "y": the values of the training loss of each run on a page.
nlohmann::json training_losses(const std::string& page) {
  const std::string open = "id=\"data\">";
  const size_t at = page.find(open) + open.size();
  nlohmann::json losses = nlohmann::json::array();
  for (const auto& chart :
       nlohmann::json::parse(page.substr(at, page.find("</script>", at) - at))) {
    for (const auto& series : chart.at("s")) {
      if (chart.at("t") == "Loss: training" ||
          (chart.at("t") == "Loss" && series.at("n") == "training")) {
        losses.push_back(series);
      }
    }
  }
  return losses;
}

TEST_F(RecordPrograms, TheReportOfAFinishedRunHasEachLoss) {
  const ProgramRun run = run_program({"hasten", "report", *folder_ / "out"});
  ASSERT_EQ(run.code, 0) << run.error;
  EXPECT_TRUE(run.said("wrote " + (*folder_ / "out/report.html").string())) << run.error;
  const std::string page = read_file(*folder_ / "out/report.html");
  EXPECT_NE(page.find("finished\">finished</span>"), page.npos);
  const auto losses = training_losses(page);
  ASSERT_EQ(losses.size(), 1u);
  EXPECT_EQ(losses[0].at("x"), (std::vector<int>{1, 2, 3, 4, 5, 6}));
  std::istringstream lines(metrics());
  for (std::string line; std::getline(lines, line);) {
    const auto record = nlohmann::json::parse(line);
    if (record.at("type") == "train") {
      EXPECT_NEAR(losses[0].at("y").at(record.at("step").get<size_t>() - 1), record.at("loss"),
                  1e-5);
    }
  }
}

TEST_F(RecordPrograms, TheReportOfTwoRunsHasTheLossesOfBoth) {
  const TemporaryFolder folder;
  const std::string half = metrics_into(4);
  const auto other = records_in(folder, "other", half.substr(0, half.rfind('\n') + 1));
  const ProgramRun run =
      run_program({"hasten", "report", *folder_ / "out", other, "--output", folder / "both.html"});
  ASSERT_EQ(run.code, 0) << run.error;
  const auto losses = training_losses(read_file(folder / "both.html"));
  ASSERT_EQ(losses.size(), 2u);
  EXPECT_EQ(losses[0].at("n"), (*folder_ / "out").string());
  EXPECT_EQ(losses[1].at("n"), other.string());
  EXPECT_EQ(losses[0].at("x").size(), 6u);
  EXPECT_EQ(losses[1].at("x").size(), 3u);
  EXPECT_FALSE(files::exists(other / "report.html"));
}

TEST_F(RecordPrograms, TheReportOfARunThatWasCutOffSaysSoAndShowsTheRest) {
  const TemporaryFolder folder;
  const auto cut = records_in(folder, "cut", metrics_into(3));
  const ProgramRun run = run_program({"hasten", "report", cut});
  ASSERT_EQ(run.code, 0) << run.error;
  const std::string page = read_file(cut / "report.html");
  EXPECT_NE(page.find("The last line of metrics.jsonl is incomplete"), page.npos);
  EXPECT_EQ(page.find("finished\">finished</span>"), page.npos);
  EXPECT_EQ(training_losses(page).at(0).at("x"), (std::vector<int>{1, 2}));
}

TEST_F(RecordPrograms, TheReportHasNoTextsOfSamplesIfTheyAreOff) {
  const TemporaryFolder folder;
  const auto out = records_in(folder, "out", metrics());
  write_file_atomically(out / "eval_results.json",
                        R"({"most_wrong": [{"text": "a private film", "label": "pos",
                            "predicted": "neg", "loss": 3.25}]})");
  for (const auto& [texts, code, shown] :
       {std::tuple("on", 0, true), {"off", 0, false}, {"of", 2, false}}) {
    files::remove(out / "report.html");
    const ProgramRun run = run_program({"hasten", "report", out, "--report-texts", texts});
    EXPECT_EQ(run.code, code) << texts << run.error;
    EXPECT_EQ(files::exists(out / "report.html"), code == 0) << texts;
    if (code == 0) {
      const std::string page = read_file(out / "report.html");
      EXPECT_EQ(page.find("a private film") != page.npos, shown) << texts;
      EXPECT_NE(page.find("3.25"), page.npos) << texts;
    } else {
      EXPECT_TRUE(run.said("--report-texts=of. Expected on or off")) << run.error;
    }
  }
}

TEST_F(RecordPrograms, AFolderWithoutRecordsIsRefusedAndNoPageIsWritten) {
  const TemporaryFolder folder;
  files::create_directory(folder / "empty");
  for (const std::vector<std::string>& folders : std::vector<std::vector<std::string>>{
           {folder / "empty"}, {*folder_ / "out", folder / "empty"}}) {
    std::vector<std::string> command{"hasten", "report", "--output", folder / "page.html"};
    command.insert(command.end(), folders.begin(), folders.end());
    const ProgramRun run = run_program(command);
    EXPECT_EQ(run.code, 2);
    EXPECT_TRUE(run.said((folder / "empty").string() +
                         " is not the folder of a run: it has no metrics.jsonl"))
        << run.error;
    EXPECT_EQ(std::count(run.error.begin(), run.error.end(), '\n'), 1) << run.error;
    EXPECT_FALSE(files::exists(folder / "page.html"));
  }
}

TEST_F(RecordPrograms, AnUnknownTrackerIsRefusedByNameBeforeAnythingIsWritten) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.csv", small_reviews(4));
  for (const auto& [names, said] :
       {std::pair("csv,tensorbord",
                  "--report-to=tensorbord. Expected one of csv, html, json, tensorboard. "
                  "Fix: write tensorboard."),
        {"none,csv", "--report-to=none. Expected one of csv, html, json, tensorboard"}}) {
    const ProgramRun run = run_program(train_arguments(folder.path(), {"--report-to", names}));
    EXPECT_EQ(run.code, 2);
    EXPECT_TRUE(run.said(said)) << run.error;
    EXPECT_FALSE(files::exists(folder / "out"));
  }
}

TEST_F(RecordPrograms, TrackersThatCannotWriteWarnOnceAndTheRunSucceeds) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.csv", small_reviews(24));
  const ProgramRun run = run_program(train_arguments(
      folder.path(), {"--max-steps", "3", "--save-strategy", "no", "--logging-steps", "1",
                      "--report-to", "csv", "--logging-dir", folder / "train.csv/logs"}));
  EXPECT_EQ(run.code, 0) << run.error;
  const size_t first = run.error.find("warning: tracker csv stops, training continues");
  EXPECT_NE(first, run.error.npos) << run.error;
  EXPECT_EQ(run.error.find("tracker csv", first + 20), run.error.npos) << run.error;
  EXPECT_TRUE(files::exists(folder / "out/model.safetensors"));
}

/// "step,tag,value" of the losses in folder/logs, and the event files by name.
struct Logged {
  std::vector<std::string> losses{};
  std::map<std::string, std::string> events{};

  explicit Logged(const files::path& logs) {
    std::istringstream lines(read_file(logs / "metrics.csv"));
    for (std::string line; std::getline(lines, line);) {
      if (line.find(",train/loss,") != line.npos) {
        losses.push_back(line);
      }
    }
    for (const auto& entry : files::directory_iterator(logs)) {
      if (entry.path().filename() != "metrics.csv") {
        events[entry.path().filename()] = read_file(entry.path());
      }
    }
  }
};

// Changes the run, so it is the last.
TEST_F(RecordPrograms, ResumingIntoTheSameLoggingDirKeepsTheFirstPartAndContinuesItsSteps) {
  const Logged before(*folder_ / "logs");
  ASSERT_EQ(before.losses.size(), 6u);
  ASSERT_EQ(before.events.size(), 1u);
  const auto link = *folder_ / "out/checkpoint-best";
  files::remove(link);
  files::create_directory_symlink("checkpoint-6", link); // whichever was the best

  const ProgramRun run =
      train({"--resume-from-checkpoint", *folder_ / "out/checkpoint-2", "--save-strategy", "no"});
  ASSERT_EQ(run.code, 0) << run.error;
  const Logged after(*folder_ / "logs");
  EXPECT_EQ(after.losses, before.losses); // each step once, with the value of the first time
  EXPECT_EQ(after.events.size(), 2u);
  const auto& [name, bytes] = *before.events.begin();
  ASSERT_TRUE(after.events.contains(name));
  EXPECT_EQ(after.events.at(name), bytes);

  // The checkpoints of steps 4 and 6 were renamed.
  EXPECT_TRUE(files::exists(*folder_ / "out/checkpoint-6.set-aside"));
  ASSERT_TRUE(files::is_symlink(link));
  EXPECT_EQ(files::read_symlink(link).string(), "checkpoint-2");
}

} // namespace hasten::record_programs_test
