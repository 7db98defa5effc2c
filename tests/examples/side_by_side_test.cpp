// The loops of docs/guides/side-by-side.md run on one process and on two, those that compute the
// same print the same loss, and none has many more lines than the Python loop above it.
#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "examples/example_files.h"

namespace hasten {
namespace {

using namespace testing_support;

using SectionLosses = std::map<std::string, double>; // by the section's name

const std::map<std::string, std::vector<std::string>> kSideBySide{
    {"side_by_side_loops", {"by hand", "Accelerator", "LocalSGD"}},
    {"side_by_side_trainer", {"Trainer", "Trainer, checkpointed", "loop, checkpointed"}},
    {"side_by_side_parallel", {"DDP", "FSDP", "SyncBatchNorm"}},
    {"side_by_side_precision", {"fp16", "bf16"}}};

// Runs the four programs. Each prints one line for each section, on one rank.
SectionLosses run_sections(int nproc) {
  const std::string printed = ": final loss ";
  SectionLosses losses;
  for (const auto& [program, sections] : kSideBySide) {
    const ProgramRun run = run_example(nproc, {program});
    size_t lines = 0;
    for (size_t at = run.out.find(printed); at != std::string::npos;
         at = run.out.find(printed, at + 1)) {
      ++lines;
    }
    EXPECT_EQ(lines, sections.size()) << program << " on " << nproc << ":\n" << run.out;
    for (const std::string& section : sections) {
      const size_t at = run.out.find(section + printed);
      if (at == std::string::npos) {
        ADD_FAILURE() << section << " of " << program << " on " << nproc << ":\n" << run.out;
        continue;
      }
      losses[section] = std::stod(run.out.substr(at + section.size() + printed.size()));
    }
  }
  return losses;
}

// The same run gives the same bits: each is made once.
const SectionLosses& section_losses(int nproc) {
  static std::map<int, SectionLosses> runs;
  const auto [place, is_new] = runs.try_emplace(nproc);
  if (is_new) {
    place->second = run_sections(nproc);
  }
  return place->second;
}

void expect_equal_losses(const SectionLosses& losses, const std::string& name,
                         const std::vector<std::string>& others) {
  for (const std::string& other : others) {
    // Printed to six places.
    EXPECT_NEAR(losses.at(other), losses.at(name), 2e-6) << other << " and " << name;
  }
}

TEST(SideBySide, EverySectionLearnsOnOneProcessAndOnTwo) {
  for (const int nproc : {1, 2}) {
    const SectionLosses& losses = section_losses(nproc);
    EXPECT_EQ(losses.size(), 11u);
    for (const auto& [section, loss] : losses) {
      EXPECT_TRUE(std::isfinite(loss)) << section << " on " << nproc;
      // Four classes: ln 4 = 1.386 without training. A simulation of the smallest number of steps
      // gives 0.5.
      EXPECT_LT(loss, 1.2) << section << " on " << nproc;
    }
  }
}

TEST(SideBySide, LoopsThatComputeTheSamePrintTheSameLoss) {
  const SectionLosses& one = section_losses(1);
  const SectionLosses& two = section_losses(2);
  ASSERT_EQ(one.size(), 11u);
  ASSERT_EQ(two.size(), 11u);
  expect_equal_losses(one, "by hand",
                      {"Accelerator", "LocalSGD", "loop, checkpointed", "DDP", "FSDP"});
  expect_equal_losses(two, "Accelerator", {"loop, checkpointed", "DDP", "FSDP"});
  for (const SectionLosses& losses : {one, two}) {
    expect_equal_losses(losses, "Trainer", {"Trainer, checkpointed"});
  }
  // Each process by itself.
  EXPECT_NEAR(one.at("by hand"), two.at("by hand"), 2e-6);
  EXPECT_NEAR(one.at("fp16"), two.at("fp16"), 1e-3);
  // On two processes a step has twice the samples, and with Local SGD its own.
  EXPECT_GT(std::abs(two.at("Accelerator") - one.at("Accelerator")), 1e-3);
  EXPECT_GT(std::abs(two.at("LocalSGD") - two.at("Accelerator")), 1e-5);
}

TEST(SideBySide, NoLoopHasManyMoreLinesThanPythons) {
  std::map<std::string, double> lines; // by language, of the block that was read last
  std::string language;
  int pairs = 0;
  for (const std::string& line : example_lines("../docs/guides/side-by-side.md")) {
    if (line.rfind("```", 0) == 0) {
      if (language == "cpp") {
        if (lines["python"] > 0) { // the page has C++ loops of their own, too
          ++pairs;
          EXPECT_LE(lines["cpp"], 1.3 * lines["python"]) << "pair " << pairs;
          EXPECT_GT(lines["cpp"], 3) << "pair " << pairs;
        }
        lines.clear();
      }
      language = language.empty() ? line.substr(3) : "";
    } else if (!language.empty() && line.find_first_not_of(' ') != std::string::npos) {
      ++lines[language];
    }
  }
  EXPECT_GE(pairs, 9);
}

} // namespace
} // namespace hasten
