// hasten train, predict and eval from end to end. One run of train makes the model for all tests of
// this file.
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/small_reviews.h"

namespace hasten {

using testing_support::ProgramRun;
using testing_support::run_program;
using testing_support::small_reviews;
using testing_support::TemporaryFolder;
using testing_support::train_arguments;

namespace detail {

namespace paths = std::filesystem;

std::vector<nlohmann::json> json_lines(const std::string& text) {
  std::vector<nlohmann::json> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(nlohmann::json::parse(line));
  }
  return lines;
}

/// Pids of processes with `folder` in their command line.
std::vector<pid_t> processes_of(const paths::path& folder) {
  std::vector<pid_t> found;
  std::error_code error;
  for (const auto& entry : paths::directory_iterator("/proc", error)) {
    const pid_t pid = std::atoi(entry.path().filename().c_str());
    std::ifstream file(entry.path() / "cmdline", std::ios::binary);
    const std::string line((std::istreambuf_iterator<char>(file)),
                           std::istreambuf_iterator<char>());
    if (pid > 0 && line.find(folder.string()) != std::string::npos) {
      found.push_back(pid);
    }
  }
  return found;
}

/// Files and folders below, without the folder itself.
std::vector<std::string> names_in(const paths::path& folder) {
  std::vector<std::string> names;
  for (const auto& entry : paths::directory_iterator(folder)) {
    names.push_back(entry.path().filename());
  }
  std::sort(names.begin(), names.end());
  return names;
}

} // namespace detail

class TrainedPrograms : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = new TemporaryFolder;
    write_file_atomically(*folder_ / "train.csv", small_reviews(40));
    write_file_atomically(*folder_ / "eval.csv", small_reviews(15, 100));
    run_ = new ProgramRun(run_program(
        train_arguments(folder_->path(), {"--eval-file", *folder_ / "eval.csv", "--nproc", "2",
                                          "--epochs", "2", "--batch-size", "4", "--lr", "2e-3"})));
  }
  static void TearDownTestSuite() {
    delete run_;
    delete folder_;
  }
  void SetUp() override { ASSERT_EQ(run_->code, 0) << run_->error; }
  static detail::paths::path model() { return *folder_ / "out"; }

  static TemporaryFolder* folder_;
  static ProgramRun* run_;
};
TemporaryFolder* TrainedPrograms::folder_ = nullptr;
ProgramRun* TrainedPrograms::run_ = nullptr;

TEST_F(TrainedPrograms, TwoProcessesLeaveAWholeModelFolder) {
  for (const char* name :
       {"config.json", "model.safetensors", "vocab.txt", "tokenizer_config.json", "tokenizer.json",
        "training_args.json", "trainer_state.json", "metrics.jsonl"}) {
    EXPECT_TRUE(detail::paths::exists(model() / name)) << name;
  }
  const auto config = nlohmann::json::parse(read_file(model() / "config.json"));
  EXPECT_EQ(config.at("id2label"), nlohmann::json({{"0", "neg"}, {"1", "pos"}}));
}

TEST_F(TrainedPrograms, TheTableOfEpochsIsOnStdoutAndTheBannerOnStderr) {
  std::istringstream lines(run_->out);
  std::string line;
  std::getline(lines, line);
  EXPECT_EQ(line,
            "  epoch  train loss  eval loss  accuracy  macro-F1  samples/s    "
            "tokens/s  peak memory  time left");
  for (const char* epoch : {"    1/2  ", "    2/2  "}) {
    std::getline(lines, line);
    EXPECT_EQ(line.substr(0, 9), epoch) << run_->out;
    EXPECT_EQ(line.find('-'), std::string::npos) << line;
  }
  std::getline(lines, line);
  EXPECT_EQ(line, "");
  std::getline(lines, line); // of the final model
  EXPECT_EQ(line, "label  precision    recall        f1   samples");
  for (const char* said : {"40 samples", "15 samples", "2 x 1 thread, cpu",
                           "4 samples per rank x 2 ranks x 1 accumulation = 8 samples per step",
                           "10 (2 epochs of 5)", "metrics.jsonl"}) {
    EXPECT_TRUE(run_->said(said)) << said << "\n" << run_->error;
  }
}

TEST_F(TrainedPrograms, MetricsFileHoldsEveryRecordAndEveryEpoch) {
  const auto state = nlohmann::json::parse(read_file(model() / "trainer_state.json"));
  const auto lines = detail::json_lines(read_file(model() / "metrics.jsonl"));
  const auto epochs = std::count_if(lines.begin(), lines.end(),
                                    [](const auto& line) { return line.at("type") == "epoch"; });
  EXPECT_EQ(epochs, 2);
  EXPECT_EQ(lines.front().at("type"), "start");
  EXPECT_TRUE(lines.front().at("command").get<std::string>().starts_with("hasten train --"));
  EXPECT_EQ(lines.size() - 3, state.at("log_history").size());
}

TEST_F(TrainedPrograms, EvalEqualsTheLastEvaluationOfTheRun) {
  const ProgramRun run = run_program({"hasten", "eval", "--model", model(), "--file",
                                      *folder_ / "eval.csv", "--batch-size", "3", "--json"});
  ASSERT_EQ(run.code, 0) << run.error;
  const auto result = nlohmann::json::parse(run.out);
  const auto state = nlohmann::json::parse(read_file(model() / "trainer_state.json"));
  nlohmann::json last;
  for (const auto& record : state.at("log_history")) {
    if (record.contains("eval_loss")) {
      last = record;
    }
  }
  EXPECT_EQ(result.at("rows"), 15);
  for (const char* name : {"eval_loss", "eval_accuracy", "eval_f1"}) {
    EXPECT_NEAR(result.at(name).get<double>(), last.at(name).get<double>(), 1e-5) << name;
  }
}

TEST_F(TrainedPrograms, PredictKeepsRowsInOrderAndEachIsThatTextsOwnAnswer) {
  const TemporaryFolder work;
  const std::vector<std::string> texts{
      "a long film, number 3 was bad work and it went on, and on, and on", "good", "",
      "film number 2\nwas good fun", "film number 9 was bad work"};
  std::string csv = "id,review\n";
  for (size_t row = 0; row < texts.size(); ++row) {
    csv += std::to_string(row) + ",\"" + texts[row] + "\"\n";
  }
  write_file_atomically(work / "new.csv", csv);
  const ProgramRun run = run_program({"hasten", "predict", "--model", model(), "--file",
                                      work / "new.csv", "--text-column", "review", "--output",
                                      work / "preds.jsonl", "--with-logits", "--batch-size", "2"});
  ASSERT_EQ(run.code, 0) << run.error;
  EXPECT_EQ(run.out, "");
  const auto rows = detail::json_lines(read_file(work / "preds.jsonl"));
  ASSERT_EQ(rows.size(), texts.size());
  // All rows from stdin at once would also be one batch, so each row is a run.
  for (const size_t row : {0, 1, 4}) {
    EXPECT_EQ(rows[row].at("text"), texts[row]);
    const ProgramRun alone = run_program(
        {"hasten", "predict", "--model", model(), texts[row], "--json", "--with-logits"});
    const auto answer = nlohmann::json::parse(alone.out);
    EXPECT_EQ(answer.at("label"), rows[row].at("label"));
    EXPECT_EQ(answer.at("input_ids"), rows[row].at("input_ids"));
    for (const size_t label : {0, 1}) {
      EXPECT_NEAR(answer.at("logits")[label].get<double>(),
                  rows[row].at("logits")[label].get<double>(), 1e-5);
    }
  }
  EXPECT_EQ(rows[3].at("text"), texts[3]);
}

TEST_F(TrainedPrograms, PredictReadsStdinAndWritesCsv) {
  const TemporaryFolder work;
  const ProgramRun run =
      run_program({"hasten", "predict", "--model", model(), "-", "--output", work / "p.csv"},
                  {.input = "film number 2 was good fun\r\nwas \"bad\", work\n"});
  ASSERT_EQ(run.code, 0) << run.error;
  std::istringstream lines(read_file(work / "p.csv"));
  std::string line;
  std::getline(lines, line);
  EXPECT_EQ(line, "text,label,probability_neg,probability_pos");
  std::getline(lines, line);
  EXPECT_EQ(line.rfind("film number 2 was good fun,", 0), 0u) << line;
  std::getline(lines, line);
  EXPECT_EQ(line.rfind("\"was \"\"bad\"\", work\",", 0), 0u) << line;
  const ProgramRun table =
      run_program({"hasten", "predict", "--model", model(), "film number 2 was good fun"});
  EXPECT_EQ(table.out.rfind("label     neg     pos  text\n", 0), 0u) << table.out;
  EXPECT_EQ(std::count(table.out.begin(), table.out.end(), '\n'), 2);
}

TEST_F(TrainedPrograms, ASecondRunIntoTheFolderNeedsOverwrite) {
  const ProgramRun refused = run_program(train_arguments(folder_->path(), {"--max-steps", "1"}));
  EXPECT_EQ(refused.code, 2);
  EXPECT_TRUE(refused.said("holds another run")) << refused.error;
  const TemporaryFolder copy;
  detail::paths::copy(model(), copy / "out", detail::paths::copy_options::recursive);
  write_file_atomically(copy / "train.csv", small_reviews(8));
  const ProgramRun run =
      run_program(train_arguments(copy.path(), {"--max-steps", "1", "--overwrite-output-dir"}));
  EXPECT_EQ(run.code, 0) << run.error;
  auto names = detail::names_in(copy / "out");
  std::erase_if(names, [](const std::string& name) { return !name.starts_with("checkpoint-"); });
  EXPECT_EQ(names, std::vector<std::string>{"checkpoint-1"}); // older ones are removed
}

TEST_F(TrainedPrograms, TheModelsOwnLabelNumbersWinWhereItHasThem) {
  const TemporaryFolder work;
  // The data has only one of the labels. Without the model's label names it would get number 0.
  write_file_atomically(work / "train.csv", "text,label\nwas good fun,pos\nso good,pos\n");
  const ProgramRun run = run_program(train_arguments(work.path(), {"--max-steps", "1"}, model()));
  ASSERT_EQ(run.code, 0) << run.error;
  EXPECT_TRUE(run.said("only one class")) << run.error;
  EXPECT_FALSE(run.said("is new")) << run.error;
  const auto config = nlohmann::json::parse(read_file(work / "out/config.json"));
  EXPECT_EQ(config.at("id2label").at("1"), "pos");
}

TEST(StoppedPrograms, CtrlCStopsAllRanksWithCode130AndNoOrphans) {
  for (const char* nproc : {"1", "2"}) {
    const TemporaryFolder folder;
    write_file_atomically(folder / "train.csv", small_reviews(40));
    bool sent = false;
    const ProgramRun run = run_program(
        train_arguments(folder.path(),
                        {"--nproc", nproc, "--max-steps", "1000000", "--save-strategy", "no"}),
        {.watch = [&](pid_t pid, const std::string& said) {
          if (!sent && said.find("metrics.jsonl") != std::string::npos) {
            ::kill(pid, SIGINT);
            sent = true;
          }
        }});
    EXPECT_TRUE(sent);
    EXPECT_FALSE(run.timed_out);
    EXPECT_EQ(run.code, 130) << run.error;
    const size_t line = run.error.find("Stopped by Ctrl-C");
    ASSERT_NE(line, std::string::npos) << run.error;
    EXPECT_EQ(run.error.find('\n', line), run.error.size() - 1) << run.error;
    for (const char* noise : {"terminate", "what()", "error", "frame #"}) {
      EXPECT_FALSE(run.said(noise)) << run.error;
    }
    EXPECT_TRUE(detail::processes_of(folder.path()).empty());
    EXPECT_FALSE(detail::paths::exists(folder / "out/model.safetensors"));
  }
}

TEST(StoppedPrograms, AKilledRankIsNamedAndTheOthersEnd) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.csv", small_reviews(40));
  bool killed = false;
  const ProgramRun run = run_program(
      train_arguments(folder.path(),
                      {"--nproc", "2", "--max-steps", "1000000", "--save-strategy", "no"}),
      {.watch = [&](pid_t pid, const std::string& said) {
        if (!killed && said.find("metrics.jsonl") != std::string::npos) {
          for (const pid_t rank : detail::processes_of(folder.path())) {
            std::ifstream file("/proc/" + std::to_string(rank) + "/environ", std::ios::binary);
            const std::string environment((std::istreambuf_iterator<char>(file)),
                                          std::istreambuf_iterator<char>());
            if (rank != pid && environment.find(std::string("\0RANK=1", 7)) != std::string::npos) {
              ::kill(rank, SIGKILL);
              killed = true;
            }
          }
        }
      }});
  EXPECT_TRUE(killed);
  EXPECT_FALSE(run.timed_out);
  EXPECT_EQ(run.code, 137) << run.error;
  EXPECT_TRUE(run.said("rank 1 was killed by signal 9")) << run.error;
  EXPECT_TRUE(detail::processes_of(folder.path()).empty());
}

} // namespace hasten
