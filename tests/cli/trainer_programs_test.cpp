// hasten train: SIGTERM, two jobs in one folder, a dry run, heads with numbers as labels.
#include <gtest/gtest.h>

#include <cmath>
#include <csignal>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/small_reviews.h"

namespace hasten::trainer_programs_test {

namespace files = std::filesystem;
using testing_support::ProgramRun;
using testing_support::run_program;
using testing_support::small_reviews;
using testing_support::TemporaryFolder;
using testing_support::train_arguments;

/// Sixty steps on two ranks with an evaluation at each epoch's end.
std::vector<std::string> stopped_command(const files::path& folder) {
  return train_arguments(folder,
                         {"--nproc", "2", "--epochs", "20", "--batch-size", "4", "--lr", "2e-3",
                          "--eval-split", "0.2", "--resume-from-checkpoint", "auto"});
}

int64_t updates_done(const files::path& out) {
  std::error_code error;
  if (!files::exists(out / "metrics.jsonl", error)) {
    return 0;
  }
  std::istringstream lines(read_file(out / "metrics.jsonl"));
  int64_t step = 0;
  for (std::string line; std::getline(lines, line);) {
    const auto json = nlohmann::json::parse(line, nullptr, false);
    if (json.is_object()) {
      step = json.value("step", step);
    }
  }
  return step;
}

TEST(TrainerPrograms, SigtermSavesAndTheNextStartEndsAsIfNothingHadHappened) {
  const TemporaryFolder whole, stopped;
  for (const auto* folder : {&whole, &stopped}) {
    write_file_atomically(*folder / "train.csv", small_reviews(50));
  }
  const ProgramRun first = run_program(stopped_command(whole.path()));
  ASSERT_EQ(first.code, 0) << first.error;

  bool sent = false;
  std::string second_job;
  const ProgramRun cut =
      run_program(stopped_command(stopped.path()), {.watch = [&](pid_t pid, const auto&) {
                    if (!sent && updates_done(stopped / "out") >= 2) {
                      second_job = run_program(stopped_command(stopped.path())).error;
                      ::kill(pid, SIGTERM);
                      sent = true;
                    }
                  }});
  ASSERT_TRUE(sent);
  EXPECT_EQ(cut.code, 128 + SIGTERM) << cut.error;
  EXPECT_TRUE(cut.said("SIGTERM: saved after step")) << cut.error;
  EXPECT_NE(second_job.find("is in use by another run"), std::string::npos) << second_job;
  EXPECT_FALSE(files::exists(stopped / "out/model.safetensors"));

  const ProgramRun again = run_program(stopped_command(stopped.path()));
  ASSERT_EQ(again.code, 0) << again.error;
  EXPECT_TRUE(again.said("resumes from")) << again.error;
  EXPECT_EQ(read_file(stopped / "out/model.safetensors"),
            read_file(whole / "out/model.safetensors"));

  // The saved arguments start the same run in another folder.
  const ProgramRun given_back =
      run_program({"hasten", "train", "--config", whole / "out/training_args.json", "--model",
                   "bert-tiny", "--train-file", whole / "train.csv", "--eval-split", "0.2",
                   "--nproc", "2", "--output-dir", whole / "again"});
  ASSERT_EQ(given_back.code, 0) << given_back.error;
  EXPECT_EQ(read_file(whole / "again/model.safetensors"),
            read_file(whole / "out/model.safetensors"));
}

TEST(TrainerPrograms, ADryRunSaysThePlanAndLeavesNothing) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.csv", small_reviews(50));
  const ProgramRun run = run_program(train_arguments(
      folder.path(), {"--dry-run", "--nproc", "2", "--batch-size", "4", "--eval-split", "0.2",
                      "--warmup-steps", "3", "--load-best-model-at-end", "--metric-for-best-model",
                      "f1", "--early-stopping-patience", "2"}));
  ASSERT_EQ(run.code, 0) << run.error;
  for (const char* part :
       {"Dry run: nothing is trained or written.", "40 samples",
        "4 samples per rank x 2 ranks x 1 accumulation = 8 samples per step",
        "15 (3 epochs of 5), the first 3 warm up", "linear: 0 at step 1, 0.0003 at step 4, ",
        "at each epoch's end: 3, on 10 samples; training stops after 2 without a better eval_f1",
        "the final model is the best by eval_f1 (greater)",
        "of tensors per process on the longest samples", "warmup_steps=3.0"}) {
    EXPECT_NE(run.out.find(part), std::string::npos) << part << "\n" << run.out;
  }
  EXPECT_FALSE(files::exists(folder / "out"));
}

nlohmann::json evaluated(const files::path& folder, std::vector<std::string> more = {}) {
  std::vector<std::string> arguments{
      "hasten", "eval", "--model", folder / "out", "--file", folder / "train.csv", "--json"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const ProgramRun run = run_program(arguments);
  EXPECT_EQ(run.code, 0) << run.error;
  return nlohmann::json::parse(run.out, nullptr, false);
}

std::vector<nlohmann::json> predicted(const files::path& folder) {
  const ProgramRun run = run_program(
      {"hasten", "predict", "--model", folder / "out", "--file", folder / "train.csv", "--json"});
  EXPECT_EQ(run.code, 0) << run.error;
  std::istringstream lines(run.out);
  std::vector<nlohmann::json> rows;
  for (std::string line; std::getline(lines, line);) {
    rows.push_back(nlohmann::json::parse(line));
  }
  return rows;
}

TEST(TrainerPrograms, ARegressionLearnsNumbersAndSaysThem) {
  const TemporaryFolder folder;
  std::string text = "text,stars\n";
  for (int row = 0; row < 64; ++row) {
    text += "film number " + std::to_string(row) +
            (row % 2 == 0 ? " was good fun,4.5\n" : " was bad work,-1.5\n");
  }
  write_file_atomically(folder / "train.csv", text);
  const ProgramRun run = run_program(train_arguments(
      folder.path(), {"--problem-type", "regression", "--label-column", "stars", "--epochs", "10",
                      "--nproc", "2", "--batch-size", "4", "--lr", "2e-3", "--eval-split", "0.25",
                      "--load-best-model-at-end", "--metric-for-best-model", "pearson"}));
  ASSERT_EQ(run.code, 0) << run.error;
  EXPECT_NE(run.out.find("pearson"), std::string::npos) << run.out;
  EXPECT_TRUE(run.said("stars from -1.5 to 4.5, mean ")) << run.error;
  const auto config = nlohmann::json::parse(read_file(folder / "out/config.json"));
  EXPECT_EQ(config.at("problem_type"), "regression");
  EXPECT_EQ(config.at("id2label"), (nlohmann::json{{"0", "stars"}}));

  const nlohmann::json values = evaluated(folder.path(), {"--label-column", "stars"});
  EXPECT_EQ(values.at("rows"), 64);
  EXPECT_GT(values.at("eval_pearson").get<double>(), 0.9) << values;
  EXPECT_NEAR(values.at("eval_loss").get<double>(), values.at("eval_mse").get<double>(), 1e-5);
  const auto rows = predicted(folder.path());
  ASSERT_EQ(rows.size(), 64u);
  double error = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const double expected = i % 2 == 0 ? 4.5 : -1.5;
    error += std::pow(rows[i].at("value").get<double>() - expected, 2) / 64;
  }
  EXPECT_NEAR(error, values.at("eval_mse").get<double>(), 1e-3);

  // The model's configuration has the problem type.
  write_file_atomically(folder / "bad.csv", "text,stars\na film,4.5\nb film,two\n");
  const ProgramRun bad =
      run_program({"hasten", "train", "--model", folder / "out", "--train-file", folder / "bad.csv",
                   "--label-column", "stars", "--output-dir", folder / "more"});
  EXPECT_EQ(bad.code, 2);
  EXPECT_TRUE(bad.said("bad.csv:3: stars=two. Expected a finite number")) << bad.error;
}

TEST(TrainerPrograms, SeveralLabelsARowFromColumnsOrOneField) {
  const TemporaryFolder columns, field;
  std::string by_column = "text,fun,long\n", by_field = "text,tags\n";
  for (int row = 0; row < 64; ++row) {
    const bool fun = row % 2 == 0, lengthy = row % 4 < 2;
    const std::string text = "film number " + std::to_string(row) +
                             (fun ? " was good fun" : " was bad work") +
                             (lengthy ? " and endless" : " and over soon");
    by_column += text + (fun ? ",1" : ",0") + (lengthy ? ",1\n" : ",0\n");
    by_field += text + "," +
                (fun && lengthy ? "fun|long"
                 : fun          ? "fun"
                 : lengthy      ? "long"
                                : "") +
                "\n";
  }
  write_file_atomically(columns / "train.csv", by_column);
  write_file_atomically(field / "train.csv", by_field);
  const std::vector<std::string> common{"--epochs", "30",   "--batch-size",    "4",
                                        "--lr",     "5e-4", "--save-strategy", "no"};
  const auto train = [&](const TemporaryFolder& folder, std::vector<std::string> labels) {
    labels.insert(labels.end(), common.begin(), common.end());
    const ProgramRun run = run_program(train_arguments(folder.path(), labels));
    ASSERT_EQ(run.code, 0) << run.error;
  };
  train(columns, {"--label-columns", "fun,long"});
  train(field, {"--label-separator", "|", "--label-column", "tags"});
  EXPECT_EQ(read_file(columns / "out/model.safetensors"),
            read_file(field / "out/model.safetensors"));
  const nlohmann::json values = evaluated(columns.path());
  EXPECT_EQ(values, [&] {
    nlohmann::json other =
        evaluated(field.path(), {"--label-separator", "|", "--label-column", "tags"});
    for (const auto& [name, value] : values.items()) {
      if (name.find("runtime") != std::string::npos ||
          name.find("per_second") != std::string::npos) {
        other[name] = value;
      }
    }
    return other;
  }());
  EXPECT_GT(values.at("eval_f1_micro").get<double>(), 0.9) << values;
  const auto rows = predicted(columns.path());
  ASSERT_EQ(rows.size(), 64u);
  EXPECT_TRUE(rows[0].at("labels").is_array());
  const double both = rows[0].at("probabilities").at("fun").get<double>() +
                      rows[0].at("probabilities").at("long").get<double>();
  EXPECT_GT(both, 1.2); // each label has its own probability; they do not sum to 1

  write_file_atomically(columns / "bad.csv", "text,fun,long\na film,1,maybe\n");
  const ProgramRun bad =
      run_program({"hasten", "eval", "--model", columns / "out", "--file", columns / "bad.csv"});
  EXPECT_EQ(bad.code, 2);
  EXPECT_TRUE(bad.said("bad.csv:2: long=maybe. Expected 0 or 1")) << bad.error;
}

} // namespace hasten::trainer_programs_test
