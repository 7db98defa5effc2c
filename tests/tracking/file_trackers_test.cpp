// The files of trackers: their content, kills, full disks, resumed runs.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <csignal>
#include <thread>

#include "event.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/tracking/tracker.h"
#include "support/error_of.h"
#include "support/full_disk.h"
#include "support/temporary_folder.h"

namespace hasten::file_trackers_test {
namespace {

using testing_support::error_of;
using testing_support::FullDisk;
using testing_support::TemporaryFolder;

/// The data of the file's whole records. Fails for a checksum that is wrong. `rest`: the bytes of a
/// torn last record.
std::vector<std::string> records_of(const std::string& bytes, size_t* rest = nullptr) {
  std::vector<std::string> all;
  size_t at = 0;
  while (at + 12 <= bytes.size()) {
    size_t length = 0;
    for (size_t i = 0; i < 8; ++i) {
      length |= static_cast<size_t>(static_cast<uint8_t>(bytes[at + i])) << (8 * i);
    }
    if (at + 12 + length + 4 > bytes.size()) {
      break;
    }
    all.push_back(bytes.substr(at + 12, length));
    EXPECT_EQ(bytes.substr(at, 12 + length + 4), detail::event_record(all.back()));
    at += 12 + length + 4;
  }
  if (rest != nullptr) {
    *rest = bytes.size() - at;
  } else {
    EXPECT_EQ(at, bytes.size());
  }
  return all;
}

using TrackerPtr = std::shared_ptr<GeneralTracker>;

std::string event_file(const std::filesystem::path& folder) {
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    if (entry.path().filename().string().rfind("events.out.tfevents.", 0) == 0) {
      return entry.path().string();
    }
  }
  return {};
}

TEST(TensorBoardTracker, WritesARecordForEachValue) {
  const TemporaryFolder folder;
  const TrackerPtr tracker = make_tracker("tensorboard", folder.path());
  tracker->store_init_configuration({{"lr", 0.5}});
  tracker->log({{"loss", 1.5}, {"note", "text"}, {"none", nullptr}, {"ok", true}}, 3);
  tracker->log({{"eval", {{"f1", 0.5}, {"by", {{"class", 1}}}}}}, 4);
  tracker->log_histogram("w", {1, 2}, 4);
  tracker->log_histogram("w", {}, 4);
  tracker->finish();
  tracker->finish();
  tracker->log({{"late", 1}}, 5); // after finish(): nothing
  const auto records = records_of(read_file(event_file(folder.path())));
  const std::vector<std::string> expected{"brain.Event:2",
                                          "session_start_info",
                                          "args/text_summary",
                                          "loss",
                                          "note/text_summary",
                                          "ok",
                                          "eval/by/class",
                                          "eval/f1",
                                          "w",
                                          "session_end_info"};
  ASSERT_EQ(records.size(), expected.size());
  for (size_t i = 0; i < records.size(); ++i) {
    EXPECT_NE(records[i].find(expected[i]), std::string::npos) << i;
  }
}

TEST(TensorBoardTracker, EachTrackerHasAFileOfItsOwn) {
  const TemporaryFolder folder;
  const TrackerPtr first = make_tracker("tensorboard", folder.path());
  const TrackerPtr second = make_tracker("tensorboard", folder.path(), 5);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder.path()), {}), 2);
}

TEST(TensorBoardTracker, AResumedRunHidesTheLaterStepsOfEarlierFiles) {
  const TemporaryFolder folder;
  make_tracker("tensorboard", folder.path(), 5)->finish();
  const std::string restart = detail::restart_record(0, 6);
  const auto records = records_of(read_file(event_file(folder.path())));
  ASSERT_EQ(records.size(), 3u);
  // The wall time, which takes 9 bytes, differs.
  EXPECT_EQ(records[1].substr(9), restart.substr(12, restart.size() - 16));
}

// The writer is killed with records in its queue.
TEST(TensorBoardTracker, AFileIsReadableAfterAKill) {
  const TemporaryFolder folder;
  int pipe[2];
  ASSERT_EQ(::pipe(pipe), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    const TrackerPtr tensorboard = make_tracker("tensorboard", folder.path());
    const TrackerPtr csv = make_tracker("csv", folder.path());
    for (int64_t step = 0;; ++step) {
      tensorboard->log({{"train/loss", step}}, step);
      csv->log({{"train/loss", step}}, step);
      if (step == 5000 && ::write(pipe[1], "x", 1) != 1) {
        ::_exit(1);
      }
    }
  }
  char byte = 0;
  ASSERT_EQ(::read(pipe[0], &byte, 1), 1);
  ::kill(child, SIGKILL);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  ::close(pipe[0]);
  ::close(pipe[1]);
  ASSERT_TRUE(WIFSIGNALED(status));
  size_t rest = 0;
  const auto records = records_of(read_file(event_file(folder.path())), &rest);
  EXPECT_GE(records.size(), 5000u - 1024); // at most the queue is lost
  EXPECT_EQ(rest, 0u); // one write for each record
  const std::string csv = read_file(folder / "metrics.csv");
  EXPECT_EQ(csv.back(), '\n');
}

TEST(FileTrackers, AFullDiskIsAnErrorOfALaterCall) {
  const TemporaryFolder folder;
  for (const std::string name : {"csv", "tensorboard"}) {
    const TrackerPtr tracker = make_tracker(name, folder.path());
    const FullDisk full;
    const std::string error = error_of([&] {
      for (int64_t step = 0; step < 100000; ++step) {
        tracker->log({{"train/loss", 1}}, step);
      }
      tracker->finish();
    });
    EXPECT_NE(error.find("File too large"), std::string::npos) << error;
    EXPECT_NE(error.find(folder.path().string()), std::string::npos) << error;
    const std::string again = error_of([&] { tracker->log({{"train/loss", 1}}, 1); });
    EXPECT_EQ(again, error);
  }
  // The reader of TensorBoard stops before the torn record.
  size_t rest = 0;
  EXPECT_GT(records_of(read_file(event_file(folder.path())), &rest).size(), 50u);
}

TEST(FileTrackers, AFullDeviceIsAnErrorOfFinish) {
  const TemporaryFolder folder;
  std::filesystem::create_symlink("/dev/full", folder / "metrics.csv");
  const TrackerPtr tracker = make_tracker("csv", folder.path());
  tracker->log({{"loss", 1}}, 1);
  const std::string error = error_of([&] { tracker->finish(); });
  EXPECT_NE(error.find("No space left on device. Fix: free space"), std::string::npos) << error;
}

TEST(FileTrackers, AFileThatIsRemovedIsAnError) {
  const TemporaryFolder folder;
  const TrackerPtr tracker = make_tracker("csv", folder.path());
  std::filesystem::remove_all(folder.path());
  std::string error;
  for (int i = 0; i < 1000 && error.empty(); ++i) {
    error = error_of([&] { tracker->log({{"loss", 1}}, 1); });
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_NE(error.find("No such file or directory"), std::string::npos) << error;
}

TEST(CsvTracker, WritesALineForEachValue) {
  const TemporaryFolder folder;
  {
    const TrackerPtr tracker = make_tracker("csv", folder.path());
    tracker->store_init_configuration({{"lr", 5e-5}, {"optim", "adamw"}});
    tracker->log({{"train/loss", 0.1}, {"n", 3}, {"nan", NAN}, {"eval", {{"f1", 1.5}}}}, 7);
    tracker->log({{"note", "a \"b\",\nc"}}, std::nullopt);
  } // the destructor writes what waits
  EXPECT_EQ(read_file(folder / "metrics.csv"),
            "step,tag,value\n"
            ",config/lr,5e-05\n"
            ",config/optim,adamw\n"
            "7,eval/f1,1.5\n"
            "7,n,3\n"
            "7,nan,nan\n"
            "7,train/loss,0.1\n"
            ",note,\"a \"\"b\"\", c\"\n");
}

TEST(CsvTracker, AResumedRunDropsLaterLinesAndAnIncompleteOne) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "metrics.csv",
                        "step,tag,value\n,config/lr,1\n1,loss,3\n2,loss,2\n3,loss,1\n4,lo");
  {
    const TrackerPtr tracker = make_tracker("csv", folder.path(), 2);
    tracker->log({{"loss", 0.5}}, 3);
  }
  const std::string kept = "step,tag,value\n,config/lr,1\n1,loss,3\n2,loss,2\n3,loss,0.5\n";
  EXPECT_EQ(read_file(folder / "metrics.csv"), kept);
  make_tracker("csv", folder.path());
  EXPECT_EQ(read_file(folder / "metrics.csv"), kept);
}

TEST(JsonTracker, WritesALineBeforeTheCallReturns) {
  const TemporaryFolder folder;
  const auto path = folder / "metrics.jsonl";
  const TrackerPtr tracker = make_tracker("json", folder.path());
  tracker->store_init_configuration({{"lr", 1}});
  tracker->log({{"loss", 0.1}, {"bad", NAN}}, 7);
  tracker->log({{"b", 1}, {"a", "x"}}, std::nullopt);
  EXPECT_EQ(read_file(path),
            "{\"config\":{\"lr\":1},\"type\":\"config\"}\n"
            "{\"bad\":null,\"loss\":0.1,\"step\":7}\n"
            "{\"a\":\"x\",\"b\":1}\n");
  std::filesystem::remove(path);
  EXPECT_NE(error_of([&] { tracker->log({{"a", 1}}, 1); }).find("cannot write path="),
            std::string::npos);
}

TEST(JsonTracker, AppendsToItsFile) {
  const TemporaryFolder folder;
  make_tracker("json", folder.path())->log({{"a", 1}}, {});
  make_tracker("json", folder.path())->log({{"a", 2}}, {});
  EXPECT_EQ(read_file(folder / "metrics.jsonl"), "{\"a\":1}\n{\"a\":2}\n");
  std::filesystem::create_directories(folder / "b" / "metrics.jsonl");
  EXPECT_THROW(make_tracker("json", folder / "b"), InputError);
}

} // namespace
} // namespace hasten::file_trackers_test
