// The output of hasten train, eval and predict is true.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <regex>

#include "cli/small_reviews.h"

namespace hasten::said_programs_test {

using testing_support::ProgramRun;
using testing_support::run_program;
using testing_support::small_reviews;
using testing_support::TemporaryFolder;
using testing_support::train_arguments;

ProgramRun run_reviews(const TemporaryFolder& folder, std::vector<std::string> more) {
  if (!std::filesystem::exists(folder / "train.csv")) {
    write_file_atomically(folder / "train.csv", small_reviews(24));
  }
  return run_program(train_arguments(folder.path(), more));
}

std::string line_of(const std::string& text, const std::string& word) {
  const size_t at = text.find(word);
  return at == std::string::npos ? "" : text.substr(at, text.find('\n', at) - at);
}

/// The first number of a tensor in the file becomes NaN.
void put_nan(const std::filesystem::path& file, const std::string& tensor) {
  std::string bytes = read_file(file);
  uint64_t header = 0;
  std::memcpy(&header, bytes.data(), sizeof header);
  const auto json = nlohmann::json::parse(bytes.substr(8, header));
  const auto begin = json.at(tensor).at("data_offsets").at(0).get<uint64_t>();
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(bytes.data() + 8 + header + begin, &nan, sizeof nan);
  write_file_atomically(file, bytes);
}

TEST(SaidPrograms, ARunsOwnConfigurationRepeatsIt) {
  const TemporaryFolder folder;
  const ProgramRun first = run_reviews(folder, {"--seed", "7", "--learning-rate", "1e-3"});
  ASSERT_EQ(first.code, 0) << first.error;
  const ProgramRun again =
      run_program({"hasten", "train", "--config", folder / "out" / "training_args.json",
                   "--output-dir", folder / "again"});
  ASSERT_EQ(again.code, 0) << again.error;
  EXPECT_EQ(read_file(folder / "again" / "model.safetensors"),
            read_file(folder / "out" / "model.safetensors"));
}

TEST(SaidPrograms, AModelOfNansIsAnErrorThatNamesRowAndWeight) {
  const TemporaryFolder folder;
  const ProgramRun trained = run_reviews(folder, {"--max-steps", "1", "--save-strategy", "no"});
  ASSERT_EQ(trained.code, 0) << trained.error;
  put_nan(folder / "out/model.safetensors", "classifier.weight");
  write_file_atomically(folder / "before.csv", "kept");
  const std::string csv = folder / "train.csv";
  for (const std::vector<std::string>& command : std::vector<std::vector<std::string>>{
           {"hasten", "predict", "--model", folder / "out", "a", "b"},
           {"hasten", "predict", "--model", folder / "out", "--file", csv, "--output",
            folder / "before.csv"},
           {"hasten", "eval", "--model", folder / "out", "--file", csv}}) {
    const ProgramRun run = run_program(command);
    EXPECT_EQ(run.code, 2) << run.out << run.error;
    EXPECT_EQ(run.out, "");
    EXPECT_TRUE(run.said("row=1 of ")) << run.error;
    EXPECT_TRUE(run.said("weight classifier.weight is not finite")) << run.error;
  }
  EXPECT_EQ(read_file(folder / "before.csv"), "kept");
}

TEST(SaidPrograms, ADryRunCountsShardsOfTheirSizeAndSixteenBitsAsSuch) {
  const TemporaryFolder folder;
  const auto memory = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--dry-run", "--nproc", "4"});
    const ProgramRun run = run_reviews(folder, more);
    EXPECT_EQ(run.code, 0) << run.error;
    return line_of(run.out, "memory");
  };
  const auto shards = [&](const char* size) {
    return memory({"--strategy", "hsdp", "--shard-size", size});
  };
  EXPECT_NE(shards("1"), "");
  EXPECT_NE(shards("1"), shards("4"));
  // So many rows that most of the memory is activations.
  const auto rows = [&](std::vector<std::string> precision) {
    precision.insert(precision.end(), {"--batch-size", "4096"});
    return memory(precision);
  };
  EXPECT_EQ(rows({"--fp16"}), rows({"--bf16"}));
  EXPECT_NE(rows({"--fp16"}), rows({}));
}

TEST(SaidPrograms, ADryRunOfTheMostUpdatesAnswersAndMoreAreRefused) {
  const TemporaryFolder folder;
  const ProgramRun most = run_reviews(folder, {"--dry-run", "--max-steps", "1000000000000"});
  EXPECT_EQ(most.code, 0) << most.error;
  EXPECT_NE(most.out.find("0.0003 at step 1,"), std::string::npos) << most.out;
  const ProgramRun endless = run_reviews(folder, {"--num-train-epochs", "1e300"});
  EXPECT_EQ(endless.code, 2);
  EXPECT_TRUE(endless.said("--num-train-epochs=1e+300")) << endless.error;
}

TEST(SaidPrograms, TheLargestBatchAndTheMostWorkersTrain) {
  const TemporaryFolder folder;
  const ProgramRun run =
      run_reviews(folder, {"--max-steps", "1", "--save-strategy", "no",
                           "--per-device-train-batch-size", "16777216", "--dataloader-num-workers",
                           "1024", "--dataloader-prefetch-factor", "1024"});
  EXPECT_EQ(run.code, 0) << run.error;
}

TEST(SaidPrograms, TheBannerIsOfTheWholeModelAndNamesHowItIsTrained) {
  const TemporaryFolder folder;
  const ProgramRun one = run_reviews(folder, {"--max-steps", "1", "--save-strategy", "no"});
  ASSERT_EQ(one.code, 0) << one.error;
  const TemporaryFolder sharded;
  const ProgramRun two =
      run_reviews(sharded, {"--max-steps", "1", "--save-strategy", "no", "--nproc", "2",
                            "--strategy", "fsdp", "--gradient-checkpointing"});
  ASSERT_EQ(two.code, 0) << two.error;
  EXPECT_NE(line_of(one.error, "parameters"), "");
  EXPECT_EQ(line_of(one.error, "parameters"), line_of(two.error, "parameters"));
  EXPECT_TRUE(two.said("strategy fsdp")) << two.error;
  EXPECT_TRUE(two.said("gradient checkpointing full")) << two.error;
  EXPECT_TRUE(one.said("no gradient checkpointing")) << one.error;
  // The cache did not have the ids before.
  EXPECT_EQ(line_of(two.error, "token ids").find("read from"), std::string::npos) << two.error;
}

TEST(SaidPrograms, RandomWeightsGetARateThatTheyLearnAt) {
  const TemporaryFolder folder;
  const ProgramRun run = run_reviews(folder, {"--max-steps", "1", "--save-strategy", "no"});
  ASSERT_EQ(run.code, 0) << run.error;
  EXPECT_TRUE(run.said("learning rate 0.0003")) << run.error;
  const TemporaryFolder next;
  std::filesystem::copy(folder / "train.csv", next / "train.csv");
  const ProgramRun tuned = run_program(
      train_arguments(next.path(), {"--max-steps", "1", "--save-strategy", "no"}, folder / "out"));
  ASSERT_EQ(tuned.code, 0) << tuned.error;
  const auto rate = [](const TemporaryFolder& of) {
    return nlohmann::json::parse(read_file(of / "out/training_args.json"))
        .at("learning_rate")
        .get<double>();
  };
  EXPECT_EQ(rate(folder), 3e-4);
  EXPECT_EQ(rate(next), 5e-5);
}

TEST(SaidPrograms, TheBestModelIsNamedAndSixteenBitsOnACpuAreWarnedOf) {
  const TemporaryFolder folder;
  const ProgramRun run = run_reviews(
      folder, {"--epochs", "2", "--eval-split", "0.2", "--load-best-model-at-end", "--fp16"});
  ASSERT_EQ(run.code, 0) << run.error;
  EXPECT_TRUE(
      std::regex_search(run.error, std::regex("The final model is the best one, .*checkpoint-")))
      << run.error;
  EXPECT_TRUE(run.said("warning: fp16 on a CPU")) << run.error;
}

TEST(SaidPrograms, ADryRunWarnsOfDataOfOneClass) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.csv", "text,label\na,x\nb,x\nc,x\n");
  const ProgramRun run = run_reviews(folder, {"--dry-run"});
  EXPECT_EQ(run.code, 0) << run.error;
  EXPECT_TRUE(run.said("only one class, label=x")) << run.error;
}

TEST(SaidPrograms, ColumnsTwiceAndUnknownHeadsAreRefused) {
  const TemporaryFolder folder;
  const ProgramRun twice = run_reviews(folder, {"--label-columns", "a,b,a"});
  EXPECT_EQ(twice.code, 2);
  EXPECT_TRUE(twice.said("column a is named twice")) << twice.error;
  const ProgramRun text = run_reviews(folder, {"--label-column", "text"});
  EXPECT_EQ(text.code, 2);
  EXPECT_TRUE(text.said("column text is named twice")) << text.error;
  const ProgramRun trained = run_reviews(folder, {"--max-steps", "1", "--save-strategy", "no"});
  ASSERT_EQ(trained.code, 0) << trained.error;
  auto config = nlohmann::json::parse(read_file(folder / "out/config.json"));
  config["problem_type"] = "xx";
  write_file_atomically(folder / "out/config.json", config.dump());
  const ProgramRun unknown = run_program({"hasten", "predict", "--model", folder / "out", "a"});
  EXPECT_EQ(unknown.code, 2) << unknown.out;
  EXPECT_TRUE(unknown.said("problem_type=xx")) << unknown.error;
}

} // namespace hasten::said_programs_test
