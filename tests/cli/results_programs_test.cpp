// What a run of hasten train leaves next to its model, and what hasten eval says of it.
#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>

#include "cli/run_program.h"
#include "cli/small_reviews.h"
#include "hasten/base/files.h"

namespace hasten::results_programs_test {

using testing_support::ProgramRun;
using testing_support::run_program;
using testing_support::small_reviews;
using testing_support::TemporaryFolder;
using testing_support::train_arguments;
namespace files = std::filesystem;

nlohmann::json json_of(const files::path& file) {
  return nlohmann::json::parse(read_file(file), nullptr, false);
}

/// Trains on two processes; the best model is not the last one for sure.
ProgramRun train(const TemporaryFolder& folder) {
  write_file_atomically(folder / "train.csv", small_reviews(40));
  write_file_atomically(folder / "eval.csv", small_reviews(18, 100)); // other texts
  return run_program(train_arguments(
      folder.path(),
      {"--nproc", "2", "--eval-file", folder / "eval.csv", "--eval-strategy", "epoch",
       "--save-strategy", "epoch", "--save-total-limit", "0", "--load-best-model-at-end",
       "--num-train-epochs", "3", "--learning-rate", "3e-3"}));
}

ProgramRun evaluate(const TemporaryFolder& folder, std::vector<std::string> more) {
  std::vector<std::string> arguments{
      "hasten", "eval", "--model", folder / "out", "--file", folder / "eval.csv", "--json"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_program(arguments);
}

TEST(ResultsPrograms, TheResultsAreThoseOfTheFinalModelOnAnyNumberOfProcesses) {
  const TemporaryFolder folder;
  const ProgramRun run = train(folder);
  ASSERT_EQ(run.code, 0) << run.error;
  EXPECT_NE(run.out.find("precision    recall        f1   samples"), std::string::npos) << run.out;
  EXPECT_NE(run.out.find("predicted as"), std::string::npos) << run.out;

  const auto left = json_of(folder / "out/eval_results.json");
  const auto all = json_of(folder / "out/all_results.json");
  EXPECT_EQ(left.at("eval_samples"), 18);
  EXPECT_EQ(all.at("eval_loss"), left.at("eval_loss"));
  EXPECT_EQ(all.at("train_loss"), json_of(folder / "out/train_results.json").at("train_loss"));
  EXPECT_FALSE(all.contains("per_class")); // only numbers and texts
  int64_t mistakes = 0;
  for (const size_t label : {0, 1}) {
    mistakes += left.at("confusion_matrix").at("counts")[label][1 - label].get<int64_t>();
  }
  auto worst = left.at("most_wrong");
  EXPECT_EQ(std::ssize(worst), mistakes);
  const std::string texts = read_file(folder / "eval.csv");
  for (auto& sample : worst) {
    const auto text = sample.at("text").get<std::string>();
    EXPECT_NE(texts.find(text.substr(0, text.find(' '))), std::string::npos) << text;
    sample.erase("text");
  }
  for (const char* nproc : {"1", "2", "3"}) {
    SCOPED_TRACE(nproc);
    const ProgramRun again = evaluate(folder, {"--nproc", nproc});
    ASSERT_EQ(again.code, 0) << again.error;
    const auto said = nlohmann::json::parse(again.out);
    EXPECT_EQ(said.at("rows"), 18);
    EXPECT_NEAR(said.at("eval_loss"), left.at("eval_loss"), 1e-6);
    EXPECT_EQ(said.at("eval_accuracy"), left.at("eval_accuracy"));
    EXPECT_EQ(said.at("per_class"), left.at("per_class"));
    EXPECT_EQ(said.at("confusion_matrix"), left.at("confusion_matrix"));
    ASSERT_EQ(said.at("most_wrong").size(), worst.size());
    for (size_t i = 0; i < worst.size(); ++i) {
      EXPECT_NEAR(said["most_wrong"][i].at("loss"), worst[i].at("loss"), 1e-5);
      EXPECT_EQ(said["most_wrong"][i].at("sample"), worst[i].at("sample"));
    }
  }

  const auto link = folder / "out/checkpoint-best";
  ASSERT_TRUE(files::is_symlink(link));
  EXPECT_EQ(files::read_symlink(link).string(),
            json_of(folder / "out/train_results.json").at("best_model_checkpoint"));
  EXPECT_EQ(read_file(link / "model.safetensors"), read_file(folder / "out/model.safetensors"));
}

TEST(ResultsPrograms, ThePredictionsOfAnEvaluationMakeItsConfusionMatrix) {
  const TemporaryFolder folder;
  ASSERT_EQ(train(folder).code, 0);
  const ProgramRun run =
      evaluate(folder, {"--nproc", "2", "--predictions", folder / "predictions.jsonl"});
  ASSERT_EQ(run.code, 0) << run.error;
  const auto matrix = nlohmann::json::parse(run.out).at("confusion_matrix");
  std::map<std::pair<std::string, std::string>, int64_t> counts;
  std::istringstream lines(read_file(folder / "predictions.jsonl"));
  int64_t rows = 0;
  for (std::string line; std::getline(lines, line); ++rows) {
    const auto json = nlohmann::json::parse(line);
    ++counts[{json.at("true_label"), json.at("label")}];
    // The texts are in the order of the file.
    EXPECT_NE(read_file(folder / "eval.csv").find(json.at("text").get<std::string>()),
              std::string::npos);
  }
  EXPECT_EQ(rows, 18);
  const auto& labels = matrix.at("labels");
  for (size_t truth = 0; truth < labels.size(); ++truth) {
    for (size_t said = 0; said < labels.size(); ++said) {
      EXPECT_EQ(matrix.at("counts")[truth][said], (counts[{labels[truth], labels[said]}]));
    }
  }

  const ProgramRun csv = evaluate(folder, {"--predictions", folder / "predictions.csv"});
  ASSERT_EQ(csv.code, 0) << csv.error;
  EXPECT_EQ(read_file(folder / "predictions.csv").rfind("text,true_label,label,probability_", 0),
            0u);
  for (const auto& [flag, value] : {std::pair("--predictions", "predictions.txt"),
                                    std::pair("--precision", "fp12"), std::pair("--nproc", "0")}) {
    const ProgramRun bad = evaluate(folder, {flag, value});
    EXPECT_EQ(bad.code, 2) << flag;
    EXPECT_TRUE(bad.said(std::string(flag) + "=" + value)) << bad.error;
  }
}

TEST(ResultsPrograms, AModelCardIsWrittenUnlessTheUserHasAReadme) {
  const TemporaryFolder folder;
  files::create_directory(folder / "out");
  write_file_atomically(folder / "out/README.md", "mine\n");
  const ProgramRun kept = train(folder);
  ASSERT_EQ(kept.code, 0) << kept.error;
  EXPECT_EQ(read_file(folder / "out/README.md"), "mine\n");
  EXPECT_TRUE(kept.said("README.md was there before")) << kept.error;

  files::remove_all(folder / "out");
  ASSERT_EQ(train(folder).code, 0);
  const std::string card = read_file(folder / "out/README.md");
  EXPECT_EQ(card.rfind("---\nlibrary_name: transformers\npipeline_tag: text-classification\n", 0),
            0u);
  for (const char* part :
       {"model-index:\n- name: \"out\"", "- type: \"accuracy\"\n      value: ",
        "# bert-tiny fine-tuned on train.csv", "pipeline(\"text-classification\"",
        "hasten predict --model .", "| learning\\_rate | 0.003 |"}) {
    EXPECT_NE(card.find(part), std::string::npos) << part << "\n" << card;
  }
}

} // namespace hasten::results_programs_test
