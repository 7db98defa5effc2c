// A program that was not written for hasten. With six changed lines it runs on any number of
// processes and computes the same as before.
#include <torch/serialize.h>

#include "examples/example_files.h"

namespace hasten {
namespace {

using namespace testing_support;

// All tensors of a file that torch::save() wrote, by their paths in the archive.
void collect_tensors(torch::serialize::InputArchive& archive, const std::string& prefix,
                     NamedTensors& tensors) {
  for (const std::string& key : archive.keys()) {
    at::Tensor tensor;
    torch::serialize::InputArchive inside;
    if (archive.try_read(key, inside)) {
      collect_tensors(inside, prefix + key + "/", tensors);
    } else if (archive.try_read(key, tensor) || archive.try_read(key, tensor, /*is_buffer=*/true)) {
      tensors[prefix + key] = tensor;
    }
  }
}

struct DiscsRun {
  std::string out{};
  NamedTensors models{}; // parameters and running statistics of both
};

// A run with batches of `batch` rows over all processes.
DiscsRun run_discs(const std::string& program, int nproc, int64_t batch,
                   const std::vector<std::string>& flags) {
  const TemporaryFolder folder;
  std::vector<std::string> command{program, "--batch", std::to_string(batch / nproc), "--save",
                                   folder / "discs"};
  command.insert(command.end(), flags.begin(), flags.end());
  DiscsRun run;
  run.out = run_example(nproc, command).out;
  for (const char* name : {"net", "doubt"}) {
    torch::serialize::InputArchive archive;
    archive.load_from(folder / (std::string("discs.") + name + ".pt"));
    collect_tensors(archive, std::string(name) + "/", run.models);
  }
  return run;
}

TEST(Adopt, SixLinesOfTheProgramChanged) {
  const auto before = example_lines("adopt/discs.cpp");
  const auto after = example_lines("adopt/discs_adopted.cpp");
  EXPECT_GE(before.size(), 300);
  // The longest common subsequence: the lines that diff does not mark.
  std::vector<std::vector<size_t>> kept(before.size() + 1, std::vector<size_t>(after.size() + 1));
  for (size_t i = 1; i <= before.size(); ++i) {
    for (size_t j = 1; j <= after.size(); ++j) {
      kept[i][j] = before[i - 1] == after[j - 1] ? kept[i - 1][j - 1] + 1
                                                 : std::max(kept[i - 1][j], kept[i][j - 1]);
    }
  }
  const size_t same = kept[before.size()][after.size()];
  EXPECT_LE(after.size() - same, 6) << "lines that are new or changed";
  EXPECT_LE(before.size() - same, 6) << "lines that are gone or changed";
  for (const char* file : {"adopt/discs.cpp", "adopt/disc_nets.h"}) {
    for (const std::string& line : example_lines(file)) {
      EXPECT_EQ(line.find("hasten"), std::string::npos) << file << ": " << line;
    }
  }
}

TEST(Adopt, OneProcessGivesTheOriginalsBits) {
  for (const char* norm : {"--freeze-norm", "--every"}) {
    std::vector<std::string> flags{"--epochs", "2", "--images", "200", norm};
    if (flags.back() == "--every") {
      flags.push_back("1");
    }
    const DiscsRun before = run_discs("discs", 1, 64, flags);
    const DiscsRun after = run_discs("discs_adopted", 1, 64, flags);
    EXPECT_EQ(before.out, after.out);
    EXPECT_EQ(distance(before.models, after.models), 0);
  }
}

// 200 images: the last batch of 64 has 8, which are too few for a batch on every
// process; 194: 2 for four processes. What clips and steps there is torch's own.
TEST(Adopt, AnyNumberOfProcessesEqualsTheOriginalOnTheJoinedBatch) {
  for (const int64_t batch : {64, 63}) {
    for (const char* images : {"200", "194"}) {
      const std::vector<std::string> flags{"--epochs", "2", "--images", images, "--freeze-norm"};
      const DiscsRun before = run_discs("discs", 1, batch, flags);
      for (const int nproc : batch == 64 ? std::vector{2, 4} : std::vector{3}) {
        const DiscsRun after = run_discs("discs_adopted", nproc, batch, flags);
        // fp32, about ten steps of SGD with momentum and half as many of Adam.
        EXPECT_LE(distance(before.models, after.models), 1e-5) << images << " images on " << nproc;
      }
    }
  }
}

TEST(Adopt, GoesOnFromWhatTheOriginalSaved) {
  const TemporaryFolder folder;
  const std::string saved = folder / "before";
  run_example(1, {"discs", "--images", "128", "--epochs", "1", "--freeze-norm", "--save", saved});
  const std::vector<std::string> flags{"--images",      "128",    "--epochs", "1",
                                       "--freeze-norm", "--load", saved};
  const DiscsRun before = run_discs("discs", 1, 64, flags);
  const DiscsRun after = run_discs("discs_adopted", 2, 64, flags);
  EXPECT_LE(distance(before.models, after.models), 1e-5);
  // The run has read the state: one epoch without it gives another result.
  const DiscsRun fresh = run_discs("discs", 1, 64, {flags.begin(), flags.end() - 2});
  EXPECT_GT(distance(before.models, fresh.models), 1e-3);
}

} // namespace
} // namespace hasten
