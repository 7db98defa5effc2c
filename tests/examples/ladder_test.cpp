// The series of examples. Each marks the lines that it adds to the previous one. Each runs on one
// and on two processes. All ways to accumulate compute the same.
#include <algorithm>
#include <map>
#include <regex>
#include <set>
#include <tuple>

#include "examples/example_files.h"

namespace hasten {
namespace {

using namespace testing_support;

std::string without_comment(const std::string& line) {
  return std::regex_replace(line, std::regex("\\s*//.*"), "");
}

// Lines of `name` that none of `before` has and that have no mark of the example that added them. A
// mark is "// 03" at the end of the statement, or a separate part such as "// [trainer]".
std::vector<std::string> unmarked_lines(const std::string& name,
                                        const std::vector<std::string>& before) {
  static const std::regex mark("// (0[2-8]|10)\\b"), comment("\\s*//.*");
  static const std::regex piece("\\s*// \\[(/?)(\\w+)\\]");
  std::multiset<std::string> known;
  for (const auto& other : before) {
    const auto lines = example_lines(other);
    for (const std::string& line : lines) {
      known.insert(without_comment(line));
    }
  }
  std::vector<std::string> unmarked, statement;
  bool own_piece = false;
  for (const std::string& line : example_lines(name)) {
    std::smatch found;
    if (std::regex_match(line, found, piece)) {
      own_piece = found[1].length() == 0 && found[2] != "loop" && found[2] != "batch";
    }
    if (own_piece || line.empty() || std::regex_match(line, comment)) {
      continue;
    }
    if (std::regex_search(line, mark)) {
      statement.clear();
    } else if (known.count(without_comment(line)) == 0) {
      statement.push_back(line);
    }
    if (std::regex_search(line, std::regex("[;{}]( //.*)?$"))) {
      unmarked.insert(unmarked.end(), statement.begin(), statement.end());
      statement.clear();
    }
  }
  return unmarked;
}

TEST(Ladder, EveryLineAStepBringsIsMarked) {
  const std::map<std::string, std::vector<std::string>> steps{
      {"02_accumulation_by_hand", {"01_plain_loop.cpp"}},
      {"03_accelerator", {"01_plain_loop.cpp"}},
      {"04_accumulate", {"03_accelerator.cpp"}},
      {"04b_accumulate_by_hand", {"02_accumulation_by_hand.cpp", "03_accelerator.cpp"}},
      {"05_trainer", {"04_accumulate.cpp"}},
      {"06_local_sgd", {"03_accelerator.cpp"}},
      {"07_local_sgd_accumulate", {"04_accumulate.cpp"}},
      {"08a_checkpointed_trainer", {"05_trainer.cpp"}},
      {"08b_checkpointed_loop", {"04_accumulate.cpp"}},
      {"08c_whole_loop", {"07_local_sgd_accumulate.cpp", "08b_checkpointed_loop.cpp"}},
      {"10a_fsdp", {"04_accumulate.cpp"}},
      {"10b_fsdp_checkpointed_bf16", {"08b_checkpointed_loop.cpp", "10a_fsdp.cpp"}}};
  for (const auto& [name, before] : steps) {
    EXPECT_EQ(unmarked_lines(name + ".cpp", before), std::vector<std::string>()) << name;
  }
}

// Runs an example and returns its parameters and its output.
struct LadderRun {
  NamedTensors parameters;
  std::vector<std::string> lines;
};
// Equal runs give equal bits, so each run is made once.
const LadderRun& run_step(const std::string& name, int rows, int nproc = 1) {
  static std::map<std::tuple<std::string, int, int>, LadderRun> runs;
  const auto [place, is_new] = runs.try_emplace({name, rows, nproc});
  LadderRun& result = place->second;
  if (!is_new) {
    return result;
  }
  const TemporaryFolder folder;
  write_reviews(folder / "reviews.csv", rows);
  const auto run = run_example(nproc, {name, folder / "reviews.csv", folder / "model.safetensors"});
  if (run.code == 0) {
    result.parameters = SafetensorsReader(folder / "model.safetensors").read_all();
  }
  std::istringstream out(run.out);
  for (std::string line; std::getline(out, line);) {
    result.lines.push_back(line);
  }
  return result;
}

double number_after(const std::string& line, const std::string& word) {
  const size_t at = line.find(word + " ");
  return at == std::string::npos ? -1 : std::stod(line.substr(at + word.size()));
}

// 262 rows: 210 are for training, in 13 batches of 16 and one of 2. Windows have four batches, the
// last one has two. 251 rows: the last batch has one row, so one of two processes has none.
constexpr int kRaggedRows = 262;
constexpr int kLonelyRows = 251;
// fp32, AdamW, different orders of summation. Measured: 2e-8. If the last window were divided by
// four and not by its number of batches: 2e-3.
constexpr double kSame = 1e-6;

TEST(Ladder, EveryStepLearnsAndPrintsTheSameNumbersOnTwoProcesses) {
  for (const auto& [name, reference] :
       std::map<std::string, std::string>{{"03_accelerator", "01_plain_loop"},
                                          {"04_accumulate", "02_accumulation_by_hand"},
                                          {"04b_accumulate_by_hand", "02_accumulation_by_hand"},
                                          {"10a_fsdp", "02_accumulation_by_hand"},
                                          {"05_trainer", "02_accumulation_by_hand"}}) {
    const LadderRun plain = run_step(reference, kRaggedRows);
    ASSERT_EQ(plain.lines.size(), 6) << reference;
    EXPECT_LT(number_after(plain.lines[5], "loss"), 0.9 * number_after(plain.lines[0], "loss"));
    EXPECT_GT(number_after(plain.lines[5], "accuracy"), 0.7);
    for (const int nproc : {1, 2}) {
      const LadderRun run = run_step(name, kRaggedRows, nproc);
      ASSERT_EQ(run.lines.size(), 6) << name << " on " << nproc;
      for (size_t epoch = 0; epoch < 6; ++epoch) {
        for (const char* word : {"epoch", "loss", "accuracy"}) {
          // Printed with four decimals.
          EXPECT_NEAR(number_after(run.lines[epoch], word), number_after(plain.lines[epoch], word),
                      1.01e-4)
              << name << " on " << nproc << ": " << run.lines[epoch];
        }
      }
    }
  }
}

TEST(Ladder, TheAcceleratorOnTwoProcessesGivesThePlainLoopsParameters) {
  for (const int rows : {kRaggedRows, kLonelyRows}) {
    const auto plain = run_step("01_plain_loop", rows).parameters;
    for (const int nproc : {1, 2}) {
      EXPECT_LE(distance(plain, run_step("03_accelerator", rows, nproc).parameters), kSame)
          << nproc << " processes, " << rows << " rows";
    }
  }
}

TEST(Ladder, CheckpointingChangesNoBit) {
  for (const auto& [name, reference] :
       std::map<std::string, std::string>{{"08a_checkpointed_trainer", "05_trainer"},
                                          {"08b_checkpointed_loop", "04_accumulate"},
                                          {"08c_whole_loop", "07_local_sgd_accumulate"}}) {
    for (const int nproc : {1, 2}) {
      const LadderRun plain = run_step(reference, kRaggedRows, nproc);
      const LadderRun run = run_step(name, kRaggedRows, nproc);
      EXPECT_EQ(run.lines, plain.lines) << name << " on " << nproc;
      ASSERT_EQ(plain.parameters.size(), run.parameters.size());
      EXPECT_EQ(distance(plain.parameters, run.parameters), 0) << name << " on " << nproc;
    }
  }
}

TEST(Ladder, ShardedCheckpointedAndInSixteenBitsItLearns) {
  for (const int nproc : {1, 2}) {
    const LadderRun run = run_step("10b_fsdp_checkpointed_bf16", kRaggedRows, nproc);
    ASSERT_EQ(run.lines.size(), 6) << nproc;
    EXPECT_GT(number_after(run.lines[5], "accuracy"), 0.7) << nproc;
  }
}

TEST(Ladder, WhatIsStoredIsWhatTheGuideSays) {
  const auto run = run_example(1, {"08_stored_and_recomputed"});
  std::vector<std::string> stored;
  std::istringstream out(run.out);
  for (std::string line; std::getline(out, line);) {
    stored.push_back(line.substr(29, line.find(", gradient") - 29));
  }
  EXPECT_EQ(stored,
            (std::vector<std::string>{
                "2 tensors stored, forward runs once", "0 tensors stored, forward runs again",
                "1 tensors stored, forward runs again", "1 tensors stored, forward runs again"}));
}

TEST(Ladder, SixteenBitsHoldWhatTheGuideSays) {
  for (const int nproc : {1, 2}) {
    const auto run = run_example(nproc, {"09_mixed_precision"});
    const auto says = [&](const char* text) {
      EXPECT_NE(run.out.find(text), std::string::npos) << text << " on " << nproc << " processes:\n"
                                                       << run.out;
    };
    says("70000                  inf          70144");
    says("1e-08                  0            1.001171768e-08");
    says("257                    257          256");
    says("10 * 100 * 70 in Half: inf");
    says("10 * 100 * 70 in BFloat16: 70144");
    says("fp16 window 2: out is Half");
    says("scale 512, step skipped");
    says("fp16 window 8: out is Half");
    EXPECT_EQ(run.out.find("window 8: out is Half, loss nan"), std::string::npos);
  }
}

TEST(Ladder, SynchronisedBatchNormOnTwoProcessesIsThatOfOne) {
  const auto one = run_example(1, {"11_sync_batch_norm"});
  const auto two = run_example(2, {"11_sync_batch_norm"});
  const auto line_of = [](const std::string& out, const std::string& start) {
    const size_t at = out.find(start);
    return at == std::string::npos ? "" : out.substr(at, out.find('\n', at) - at);
  };
  const std::string alone = line_of(one.out, "of own samples:");
  const std::string own = line_of(two.out, "of own samples:");
  const std::string joined = line_of(two.out, "of all samples:");
  for (const char* word : {"loss", "running mean", "running variance"}) {
    EXPECT_NEAR(number_after(joined, word), number_after(alone, word), 2e-4);
    EXPECT_NE(number_after(own, word), -1) << two.out;
  }
  EXPECT_LT(number_after(joined, "loss"), 0.2) << two.out;
  EXPECT_GT(number_after(own, "loss"), 0.4) << two.out;
  EXPECT_GT(number_after(joined, "running variance"), number_after(own, "running variance"));
}

TEST(Ladder, OnlyTheMainProcessCallsATracker) {
  for (const int nproc : {1, 2}) {
    const std::string out = run_example(nproc, {"12_tracker"}).out;
    EXPECT_EQ(out.find(R"({"learning_rate":0.1,"steps":24})"), 0u) << out;
    EXPECT_EQ(std::count(out.begin(), out.end(), '\n'), 8) << out;
    EXPECT_NE(out.find("step 24  "), std::string::npos) << out;
    EXPECT_NE(out.find("bars: done\n"), std::string::npos) << out;
  }
}

TEST(Ladder, AModelOfAFamilyOfItsOwnIsSavedAndLoaded) {
  for (const int nproc : {1, 2}) {
    const TemporaryFolder folder;
    const std::string reviews = std::string(HASTEN_EXAMPLES_FOLDER) + "/reviews.csv";
    const std::string out =
        run_example(nproc, {"13_model_family", reviews, folder.path().string()}).out;
    EXPECT_GE(number_after(out, "right:"), 5) << out;
    EXPECT_NE(out.find("saved: the same logits"), std::string::npos) << out;
    EXPECT_NE(read_file(folder / "config.json").find("\"model_type\": \"conv-reader\""),
              std::string::npos);
  }
}

TEST(Ladder, ALanguageModelFromNothingContinuesTexts) {
  const TemporaryFolder folder;
  const std::string reviews = std::string(HASTEN_EXAMPLES_FOLDER) + "/reviews.csv";
  const std::string out =
      run_example(2, {"14_language_model", reviews, folder.path().string()}).out;
  EXPECT_LT(number_after(out, "per byte:"), 4.5) << out; // 257 without training
  EXPECT_EQ(std::count(out.begin(), out.end(), '\n'), 3) << out;
  const ProgramRun more =
      run_program({"hasten", "generate", "--model", folder.path().string(), "the new"});
  EXPECT_EQ(more.code, 0) << more.error;
}

TEST(Ladder, AnAdapterIsTrainedOnAShardedModel) {
  for (const int nproc : {1, 2}) {
    const std::string out = run_example(nproc, {"15_lora"}).out;
    EXPECT_EQ(out.find("4096 of "), 0u) << out;
    EXPECT_NE(out.find(" parameters trained, loss "), std::string::npos) << out;
  }
}

TEST(Ladder, AProgramOfC10dAloneSumsThroughSharedMemory) {
  const std::string out = run_example(2, {"16_shared_memory"}).out;
  for (const char* rank : {"0", "1"}) {
    EXPECT_NE(out.find(std::string("rank ") + rank + ": the sum of the ranks' gradients is 3\n"),
              std::string::npos)
        << out;
  }
}

// The last two lines are about all sums of 400 steps with one gradient.
TEST(Ladder, AHookSendsLessLearnsAndWithFeedbackLosesLittle) {
  for (const auto& [name, most_bytes] : std::map<std::string, double>{
           {"17_int8_comm_hook", 1.02}, {"18_power_sgd_comm_hook", 1.0}}) {
    const LadderRun run = run_step(name, kLonelyRows, 2);
    ASSERT_EQ(run.lines.size(), 8) << name;
    EXPECT_LT(number_after(run.lines[5], "loss"), 0.7 * number_after(run.lines[0], "loss")) << name;
    const double bytes = number_after(run.lines[6], "sent");
    EXPECT_GT(bytes, 0) << name;
    EXPECT_LT(bytes, most_bytes) << name;
    EXPECT_LT(number_after(run.lines[7], "missing"), 0.1) << run.lines[7];
    EXPECT_GT(number_after(run.lines[7], "feedback"), 0.5) << run.lines[7];
  }
}

TEST(Ladder, AModuleThatPythonExportedLearns) {
  for (const int nproc : {1, 2}) {
    const std::string out = run_example(nproc, {"19_exported_module", HASTEN_EXAMPLES_FOLDER
                                                "/../tests/golden/exported/conv_net.pt2"})
                                .out;
    EXPECT_NE(out.find(", 3, 6, 6]\noutputs: output\nblocks: blocks.0, blocks.1\n"),
              std::string::npos)
        << out;
    EXPECT_LT(number_after(out, "loss of the last step:"), 0.3) << out;
  }
}

TEST(Ladder, EveryWayOfAccumulatingGivesTheSameParameters) {
  for (const int rows : {kRaggedRows, kLonelyRows}) {
    const auto by_hand = run_step("02_accumulation_by_hand", rows).parameters;
    // The example accumulates: its result differs from a step for each batch.
    EXPECT_GT(distance(by_hand, run_step("01_plain_loop", rows).parameters), 0.05);
    for (const char* name : {"04_accumulate", "04b_accumulate_by_hand", "05_trainer", "10a_fsdp"}) {
      for (const int nproc : {1, 2}) {
        const auto run = run_step(name, rows, nproc).parameters;
        EXPECT_LE(distance(by_hand, run), kSame)
            << name << " on " << nproc << " processes, " << rows << " rows";
      }
    }
  }
}

// A single process has nothing to average. Two processes differ between averages, learn as well,
// and end with one model.
TEST(Ladder, LocalSGDIsPlainTrainingAloneAndLearnsOnTwoProcesses) {
  for (const auto& [name, reference] :
       std::map<std::string, std::string>{{"06_local_sgd", "01_plain_loop"},
                                          {"07_local_sgd_accumulate", "02_accumulation_by_hand"}}) {
    const LadderRun plain = run_step(reference, kLonelyRows);
    EXPECT_LE(distance(plain.parameters, run_step(name, kLonelyRows).parameters), kSame) << name;
    const LadderRun two = run_step(name, kLonelyRows, 2);
    ASSERT_EQ(two.lines.size(), 6) << name;
    const double apart = distance(plain.parameters, two.parameters);
    EXPECT_GT(apart, 1e-3) << name << ": gradients were averaged";
    EXPECT_LT(apart, 0.5) << name;
    EXPECT_LT(number_after(two.lines[5], "loss"), 0.9 * number_after(two.lines[0], "loss")) << name;
    EXPECT_GT(number_after(two.lines[5], "accuracy"), 0.7) << name;
  }
}

} // namespace
} // namespace hasten
