// Compares hasten estimate-memory with the measured memory of real runs of hasten train.
#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "cli/small_reviews.h"

namespace hasten {

using testing_support::ProgramRun;
using testing_support::run_program;
using testing_support::TemporaryFolder;
using testing_support::train_arguments;

namespace estimate_memory_test {

/// Rows of more than 64 tokens, so that every batch has the largest length.
std::string long_reviews(int rows) {
  std::string text = "text,label\n";
  for (int row = 0; row < rows; ++row) {
    for (int word = 0; word < 70; ++word) {
      text += "film ";
    }
    text += row % 2 == 0 ? "good,pos\n" : "bad,neg\n";
  }
  return text;
}

nlohmann::json last_epoch(const std::filesystem::path& metrics) {
  std::ifstream file(metrics);
  nlohmann::json found;
  for (std::string line; std::getline(file, line);) {
    auto record = nlohmann::json::parse(line);
    if (record.at("type") == "epoch") {
      found = std::move(record);
    }
  }
  return found;
}

} // namespace estimate_memory_test

TEST(EstimateMemory, IsWithinThreePercentOfWhatTrainingTakes) {
  const std::vector<std::vector<std::string>> cases = {
      {},
      {"--gradient-accumulation-steps", "2", "--optim", "lion"},
      {"--nproc", "2", "--optim", "sgd", "--optim-args", "momentum=0.9"},
      {"--bf16"},
      {"--bf16", "--nproc", "2"},
      {"--task", "fill-mask"},
      {"--nproc", "2", "--strategy", "fsdp"},
      {"--bf16", "--nproc", "2", "--strategy", "fsdp"},
      {"--nproc", "2", "--strategy", "zero2", "--optim", "sgd"},
      {"--nproc", "2", "--local-sgd-steps", "2"},
      {"--nproc", "2", "--local-sgd-steps", "2", "--gradient-accumulation-steps", "2"}};
  for (const auto& more : cases) {
    const TemporaryFolder folder;
    std::ofstream(folder / "train.csv") << estimate_memory_test::long_reviews(256);
    auto train = more;
    train.insert(train.end(), {"--batch-size", "32", "--max-length", "64", "--epochs", "1",
                               "--save-strategy", "no", "--eval-strategy", "no"});
    const ProgramRun trained = run_program(train_arguments(folder.path(), train));
    ASSERT_EQ(trained.code, 0) << trained.error;
    const auto record = estimate_memory_test::last_epoch(folder / "out" / "metrics.jsonl");
    const auto config = nlohmann::json::parse(std::ifstream(folder / "out" / "config.json"));

    std::vector<std::string> estimate = {"hasten",       "estimate-memory", "--json", "--model",
                                         folder / "out", "--batch",         "32x64"};
    for (size_t i = 0; i < more.size(); ++i) {
      if (more[i] == "--local-sgd-steps") {
        estimate.insert(estimate.end(), {"--strategy", "local_sgd"});
        ++i;
      } else {
        estimate.push_back(more[i]);
      }
    }
    const ProgramRun run = run_program(estimate);
    ASSERT_EQ(run.code, 0) << run.error;
    const auto answer = nlohmann::json::parse(run.out);
    const double ratio =
        answer.at("peak_bytes").get<double>() / record.at("peak_tensor_bytes").get<double>();
    EXPECT_NEAR(ratio, 1, 0.03) << run.out << record.dump();
    if (answer.at("nproc").get<int>() > 1) {
      const int steps = record.at("step").get<int>();
      const int every = answer.at("strategy") == "local_sgd" ? 2 : 1;
      EXPECT_NEAR(answer.at("sent_bytes").get<double>() * (steps / every) /
                      record.at("bytes_sent").get<double>(),
                  1, 0.03)
          << run.out << record.dump();
    }
    EXPECT_EQ(answer.at("host_peak_bytes").get<int64_t>(),
              answer.at("nproc").get<int64_t>() * answer.at("peak_bytes").get<int64_t>());
  }
}

TEST(EstimateMemory, PrintsATableOfWhatTakesTheMemory) {
  const ProgramRun run = run_program({"hasten", "estimate-memory", "--model", "bert-base",
                                      "--optim", "adamw", "--bf16", "--nproc", "4"});
  EXPECT_EQ(run.code, 0) << run.error;
  for (const char* part :
       {"bert-base, 109,483,778 parameters, adamw, bf16, ddp on 4 processes", "optimizer state",
        "communication", "peak per process", "of 4 processes", "sent in a step"}) {
    EXPECT_NE(run.out.find(part), std::string::npos) << part << "\n" << run.out;
  }
  EXPECT_EQ(run.out.find("activations"), std::string::npos);
}

TEST(EstimateMemory, RefusesWhatTrainingRefuses) {
  const ProgramRun run =
      run_program({"hasten", "estimate-memory", "--model", "bert-tiny", "--batch", "8x1000"});
  EXPECT_EQ(run.code, 2);
  EXPECT_TRUE(run.said("tokens=1000")) << run.error;
}

} // namespace hasten
