// hasten train is killed and started again with the same command line.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <iterator>
#include <thread>

#include "cli/small_reviews.h"

namespace hasten::resume_programs_test {

namespace files = std::filesystem;
using testing_support::ProgramRun;
using testing_support::run_program;
using testing_support::small_reviews;
using testing_support::TemporaryFolder;
using testing_support::train_arguments;

std::vector<std::string> requeued_command(const files::path& folder,
                                          const std::vector<std::string>& more = {}) {
  std::vector<std::string> flags{"--nproc",
                                 "2",
                                 "--epochs",
                                 "4",
                                 "--batch-size",
                                 "4",
                                 "--lr",
                                 "2e-3",
                                 "--eval-split",
                                 "0.2",
                                 "--save-strategy",
                                 "steps",
                                 "--save-steps",
                                 "1",
                                 "--resume-from-checkpoint",
                                 "auto"};
  flags.insert(flags.end(), more.begin(), more.end());
  return train_arguments(folder, flags);
}

/// Waits until no process has the folder in its command line.
void wait_for_the_end_of_all(const files::path& folder) {
  for (int turn = 0; turn < 500; ++turn) {
    bool any = false;
    std::error_code error;
    for (const auto& entry : files::directory_iterator("/proc", error)) {
      std::ifstream file(entry.path() / "cmdline", std::ios::binary);
      const std::string line((std::istreambuf_iterator<char>(file)),
                             std::istreambuf_iterator<char>());
      any = any || line.find(folder.string()) != std::string::npos;
    }
    if (!any) {
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  ADD_FAILURE() << "ranks outlive their launcher";
}

int times_said(const ProgramRun& run, const std::string& text) {
  int times = 0;
  for (size_t at = run.error.find(text); at != std::string::npos;
       at = run.error.find(text, at + text.size())) {
    ++times;
  }
  return times;
}

TEST(ResumedPrograms, KilledRunStartedAgainLeavesTheModelOfAnUninterruptedOne) {
  const TemporaryFolder whole, killed;
  for (const auto* folder : {&whole, &killed}) {
    write_file_atomically(*folder / "train.csv", small_reviews(50));
  }
  const ProgramRun first = run_program(requeued_command(whole.path()));
  ASSERT_EQ(first.code, 0) << first.error;
  EXPECT_TRUE(first.said("the run starts from the beginning")) << first.error;

  bool sent = false;
  const ProgramRun cut =
      run_program(requeued_command(killed.path()), {.watch = [&](pid_t pid, const auto&) {
        // In mid-epoch: 5 steps make one.
                    if (!sent && files::exists(killed / "out/checkpoint-7")) {
                      ::kill(pid, SIGKILL); // its ranks die with it
                      sent = true;
                    }
                  }});
  ASSERT_TRUE(sent);
  ASSERT_NE(cut.code, 0);
  ASSERT_FALSE(files::exists(killed / "out/model.safetensors"));

  wait_for_the_end_of_all(killed.path());
  const ProgramRun again = run_program(requeued_command(killed.path()));
  ASSERT_EQ(again.code, 0) << again.error;
  EXPECT_TRUE(again.said("resumes from " + (killed / "out/checkpoint-").string())) << again.error;
  EXPECT_EQ(read_file(killed / "out/model.safetensors"),
            read_file(whole / "out/model.safetensors"));

  const ProgramRun finished = run_program(requeued_command(killed.path()));
  EXPECT_EQ(finished.code, 0) << finished.error;
  EXPECT_TRUE(finished.said("is finished; there is nothing to do")) << finished.error;
  const ProgramRun changed =
      run_program(requeued_command(killed.path(), {"--weight-decay", "0.1"}));
  EXPECT_EQ(changed.code, 2);
  EXPECT_EQ(times_said(changed, "weight_decay: 0.0 -> 0.1"), 1) << changed.error;
  EXPECT_TRUE(changed.said("--allow-changed-arguments")) << changed.error;

  // An error that only the ranks can detect is also printed once. The run is not complete and would
  // continue from its last checkpoint with other rows.
  files::remove(killed / "out/hasten_state.json");
  write_file_atomically(killed / "train.csv", small_reviews(49));
  const ProgramRun other = run_program(requeued_command(killed.path()));
  EXPECT_EQ(other.code, 2);
  EXPECT_EQ(times_said(other, "train_data: "), 1) << other.error;

  // A checkpoint is a model folder, too.
  const ProgramRun predicted = run_program(
      {"hasten", "predict", "--model", killed / "out/checkpoint-20", "film number 2 was good fun"});
  EXPECT_EQ(predicted.code, 0) << predicted.error;
}

TEST(ResumedPrograms, LatestWithoutACheckpointAndABadPathAreRefusedByName) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.csv", small_reviews(20));
  const ProgramRun latest =
      run_program(train_arguments(folder.path(), {"--resume-from-checkpoint", "latest"}));
  EXPECT_EQ(latest.code, 2);
  EXPECT_TRUE(latest.said("there is no checkpoint-N in")) << latest.error;
  const ProgramRun path =
      run_program(train_arguments(folder.path(), {"--resume-from-checkpoint", folder / "nowhere"}));
  EXPECT_EQ(path.code, 2);
  EXPECT_TRUE(path.said((folder / "nowhere/manifest.json").string())) << path.error;
  const ProgramRun both = run_program(train_arguments(
      folder.path(), {"--resume-from-checkpoint", "auto", "--overwrite-output-dir"}));
  EXPECT_EQ(both.code, 2);
  EXPECT_TRUE(both.said("--overwrite-output-dir")) << both.error;
  EXPECT_FALSE(files::exists(folder / "out"));
}

} // namespace hasten::resume_programs_test
