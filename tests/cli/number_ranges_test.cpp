// Every whole number of every command has a range. The ends of the range are accepted. Other values
// are errors with the flag's name, before anything is allocated or started.
#include <gtest/gtest.h>

#include <sstream>

#include "checks.h"
#include "commands.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/world.h"
#include "hasten/config/training_plan.h"
#include "support/environment.h"
#include "support/temporary_folder.h"

namespace hasten {

namespace detail {

std::vector<std::string> range_words(const std::string& text) {
  std::istringstream stream(text);
  std::vector<std::string> words;
  for (std::string word; stream >> word;) {
    words.push_back(word);
  }
  return words;
}

/// The error of parsing the line; empty if there is none.
std::string refusal_of(const std::string& line) {
  try {
    parse_command_line(range_words(line));
    return {};
  } catch (const InputError& error) {
    return error.what();
  }
}

struct FlagRange {
  std::string command;
  std::string flag;
  int64_t least;
  int64_t most;
};

const std::string kTrainLine = "train --model bert-tiny --output-dir out ";
const std::string kPredictLine = "predict --model out --file a.csv ";
const std::string kEvalLine = "eval --model out --file a.csv ";
const std::string kEstimateLine = "estimate-memory --model bert-tiny ";
const std::string kCompareLine = "compare --model bert-tiny --nproc 2 ";
const std::string kTokenizerLine = "tokenizer train a.csv --output out ";
constexpr int64_t kTrillion = 1'000'000'000'000;

const FlagRange kFlagRanges[] = {
    {kTrainLine, "--nproc", 1, 65536},
    {kTrainLine, "--per-device-train-batch-size", 1, 16'777'216},
    {kTrainLine, "--per-device-eval-batch-size", 1, 16'777'216},
    {kTrainLine, "--gradient-accumulation-steps", 1, 1'048'576},
    {kTrainLine, "--dataloader-num-workers", 0, 1024},
    {kTrainLine, "--dataloader-prefetch-factor", 1, 1024},
    {kTrainLine, "--max-steps", 1, kTrillion},
    {kTrainLine, "--num-train-epochs", 1, 1'000'000},
    {kTrainLine, "--local-sgd-steps", 0, kTrillion},
    {kTrainLine + "--local-sgd-steps 2 ", "--local-sgd-post-local-start", 0, kTrillion},
    {kTrainLine + "--local-sgd-steps 1000000000000 ", "--local-sgd-delay", 0, kTrillion},
    {kTrainLine + "--local-sgd-steps 1000000000000 ", "--local-sgd-inner-steps", 0, kTrillion},
    {kTrainLine + "--local-sgd-steps 2 --local-sgd-inner-steps 1 ", "--local-sgd-group-size", 0,
     65536},
    {kTrainLine, "--warmup-steps", 0, kTrillion},
    {kTrainLine, "--logging-steps", 1, kTrillion},
    {kTrainLine, "--eval-steps", 1, kTrillion},
    {kTrainLine, "--save-steps", 1, kTrillion},
    {kTrainLine, "--save-total-limit", 0, kTrillion},
    {kTrainLine + "--eval-split 0.5 ", "--early-stopping-patience", 0, kTrillion},
    {kTrainLine + "--strategy hsdp ", "--shard-size", 0, 65536},
    {kTrainLine, "--max-length", 1, 1'048'576},
    {kTrainLine, "--max-train-rows", 0, kTrillion},
    {kTrainLine, "--max-eval-rows", 0, kTrillion},
    {kTrainLine, "--vocab-size", 6, 16'777'216},
    {kPredictLine, "--batch-size", 1, 16'777'216},
    {kPredictLine, "--max-rows", 0, kTrillion},
    {kPredictLine, "--max-length", 0, 1'048'576},
    {kEvalLine, "--batch-size", 1, 16'777'216},
    {kEstimateLine, "--nproc", 1, 65536},
    {kEstimateLine, "--vocab-size", 1, 16'777'216},
    {kEstimateLine, "--num-labels", 2, 1'048'576},
    {kEstimateLine, "--gradient-accumulation-steps", 1, 1'048'576},
    {kCompareLine, "--steps", 1, 1'000'000},
    {kCompareLine, "--max-batch-size", 1, 16'777'216},
    {kCompareLine, "--vocab-size", 2, 16'777'216},
    {kTokenizerLine, "--vocab-size", 6, 16'777'216},
    {kTokenizerLine, "--min-frequency", 1, kTrillion},
    {kTokenizerLine, "--limit-alphabet", 1, 1'114'112},
    {"state consolidate f --output a.safetensors ", "--model-index", 0, 1'000'000},
    {"synth reviews ", "--rows", 1, 10'000'000},
};

} // namespace detail

TEST(NumberRanges, EndsAreTakenAndWhatLiesBeyondIsRefusedByName) {
  for (const detail::FlagRange& range : detail::kFlagRanges) {
    const auto refusal = [&](int64_t value) {
      return detail::refusal_of(range.command + range.flag + "=" + std::to_string(value));
    };
    EXPECT_EQ(refusal(range.least), "");
    EXPECT_EQ(refusal(range.most), "");
    for (const int64_t beyond : {range.least - 1, range.most + 1}) {
      const std::string text = refusal(beyond);
      EXPECT_NE(text.find(range.flag + "=" + std::to_string(beyond)), std::string::npos)
          << range.command << range.flag << ": " << text;
      EXPECT_NE(text.find("Expected"), std::string::npos) << text;
    }
  }
}

TEST(NumberRanges, BatchesOfPlanAndEstimateHaveThemToo) {
  for (const std::string command :
       {"plan --model bert-tiny ", "estimate-memory --model bert-tiny "}) {
    const auto refusal = [&](const char* batch) {
      return detail::refusal_of(command + "--batch " + batch);
    };
    EXPECT_EQ(refusal("16777216x1048576"), "");
    EXPECT_NE(refusal("16777217x8").find("16777217x8"), std::string::npos);
    EXPECT_NE(refusal("8x1048577").find("8x1048577"), std::string::npos);
  }
}

TEST(NumberRanges, NoProductOfNumbersThatAreTakenOverflows) {
  TrainingArguments a;
  a.num_train_epochs = 1'000'000;
  EXPECT_EQ(make_training_plan(a, 1'000'000).max_steps, kMaxSteps);
  EXPECT_THROW(make_training_plan(a, 1'000'001), InputError);
  // Rows of a step, as everybody computes them.
  int64_t rows = 0;
  EXPECT_FALSE(
      __builtin_mul_overflow(int64_t{16'777'216} * 1'048'576, int64_t{kMaxWorldSize}, &rows));
}

TEST(NumberRanges, ProcessesOfAWorldAreBoundedInTheEnvironmentToo) {
  using testing_support::EnvironmentValues;
  using testing_support::ScopedEnvironment;
  const auto refused = [](const std::string& size) {
    const ScopedEnvironment environment(EnvironmentValues{
        {"RANK", "0"}, {"WORLD_SIZE", size}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1"}});
    try {
      world_from_environment();
      return std::string();
    } catch (const InputError& error) {
      return std::string(error.what());
    }
  };
  EXPECT_EQ(refused("65536"), "");
  EXPECT_NE(refused("65537").find("WORLD_SIZE=65537 is not in 1..65536"), std::string::npos);
  EXPECT_NE(refused("1000000000").find("WORLD_SIZE=1000000000"), std::string::npos);
}

TEST(NumberRanges, SixteenProcessesACoreAndMoreOnlyIfAskedFor) {
  const int most = 16 * allowed_cores();
  EXPECT_NO_THROW(check_nproc("train", most, false, {}));
  EXPECT_NO_THROW(check_nproc("train", most + 1, true, {}));
  try {
    check_nproc("launch", most + 1, false, {});
    ADD_FAILURE();
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("--oversubscribe"), std::string::npos);
  }
}

TEST(NumberRanges, MoreProcessesThanLinesAreRefusedBeforeTheyStart) {
  const testing_support::TemporaryFolder folder;
  const auto file = folder / "train.csv";
  write_file_atomically(file, "text,label\na,x\nb,y\n");
  EXPECT_NO_THROW(check_lines(file, 4)); // who reads it knows better
  EXPECT_THROW(check_lines(file, 5), InputError);
  const std::string twice = file.string() + "," + file.string();
  EXPECT_NO_THROW(check_lines(twice, 8));
  EXPECT_THROW(check_lines(twice, 9), InputError);
}

} // namespace hasten
