// Trackers that fail, trackers by name.
#include "hasten/tracking/tracker.h"

#include <gtest/gtest.h>

#include <regex>
#include <stdexcept>

#include "hasten/base/error.h"
#include "support/captured_stderr.h"
#include "support/temporary_folder.h"

namespace hasten::tracker_test {
namespace {

using testing_support::CapturedStderr;
using testing_support::TemporaryFolder;

/// Throws in the call of this number.
class Fragile final : public GeneralTracker {
 public:
  explicit Fragile(int last, int* calls) : last_(last), calls_(calls) {}
  std::string name() const override { return "fragile"; }
  void log(const nlohmann::json&, std::optional<int64_t>) override {
    if (++*calls_ == last_) {
      throw std::runtime_error("the service is gone\nand more");
    }
  }
  void finish() override { throw 7; }

 private:
  int last_;
  int* calls_;
};

TEST(SafeTracker, ReportsTheFirstFailureOnceAndCallsTheTrackerNoMore) {
  CapturedStderr stderr_now;
  int calls = 0;
  SafeTracker tracker("fragile", [&] { return std::make_shared<Fragile>(2, &calls); });
  for (int64_t step = 0; step < 5; ++step) {
    tracker.log({{"loss", 1}}, step);
  }
  tracker.finish();
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(stderr_now.take(),
            "warning: tracker fragile stops, training continues: the service is gone\n");
}

TEST(SafeTracker, CatchesExceptionsOfAnyTypeInAnyCall) {
  CapturedStderr stderr_now;
  int calls = 0;
  SafeTracker tracker("fragile", [&] { return std::make_shared<Fragile>(100, &calls); });
  tracker.store_init_configuration({{"lr", 1}}); // these do nothing by default
  tracker.log_histogram("w", {1}, 1);
  EXPECT_EQ(stderr_now.take(), "");
  tracker.finish();
  EXPECT_NE(stderr_now.take().find("an exception of an unknown type"), std::string::npos);
}

TEST(SafeTracker, ATrackerThatCannotBeMadeIsAWarning) {
  CapturedStderr stderr_now;
  const TemporaryFolder folder;
  SafeTracker tracker("csv", [&] { return make_tracker("csv", "/proc/no/such/folder"); });
  tracker.log({{"loss", 1}}, 1);
  tracker.finish();
  const std::string said = stderr_now.take();
  EXPECT_TRUE(std::regex_search(
      said, std::regex("^warning: tracker csv stops, training continues: "
                       "\\[tracking::make_tracker\\] /proc/no/such/folder/metrics.csv: ")))
      << said;
}

TEST(SafeTracker, WithoutATrackerDoesNothing) {
  CapturedStderr stderr_now;
  SafeTracker tracker("mine", nullptr);
  tracker.store_init_configuration({{"a", 1}});
  tracker.log({{"a", 1}}, {});
  tracker.finish();
  EXPECT_EQ(tracker.name(), "mine");
  EXPECT_EQ(stderr_now.take(), "");
}

TEST(MakeTracker, RefusesUnknownNamesWithTheList) {
  const TemporaryFolder folder;
  try {
    make_tracker("tensorbord", folder.path());
    FAIL();
  } catch (const InputError& error) {
    EXPECT_STREQ(error.what(),
                 "[tracking::make_tracker] tracker=tensorbord. Expected one of csv, html, json, "
                 "tensorboard. Fix: write tensorboard.");
  }
}

TEST(MakeTracker, ARegisteredNameMakesItsTracker) {
  const TemporaryFolder folder;
  // [register]
  register_tracker("second-csv", [](const TrackerRequest& request) {
    return make_tracker("csv", request.folder / "second", request.resumed_step, request.where);
  });
  // [/register]
  make_tracker("second-csv", folder.path())->log({{"loss", 0.5}}, 1);
  EXPECT_TRUE(std::filesystem::exists(folder / "second/metrics.csv"));
  EXPECT_NO_THROW(check_trackers("test", "second-csv,json"));
  EXPECT_THROW(check_trackers("test", "second-csv,wandb"), InputError);
  const auto factory = [](const TrackerRequest&) { return std::shared_ptr<GeneralTracker>(); };
  for (const char* name : {"", "csv", "second-csv", "a,b"}) {
    EXPECT_THROW(register_tracker(name, factory), InputError) << name;
  }
  EXPECT_THROW(register_tracker("none-yet", nullptr), InputError);
}

TEST(MakeTracker, MakesTheFolderAndATrackerOfThatName) {
  const TemporaryFolder folder;
  for (const std::string name : {"tensorboard", "csv", "json"}) {
    const auto tracker = make_tracker(name, folder / "a" / name);
    EXPECT_EQ(tracker->name(), name);
    tracker->log({{"loss", 0.5}}, 1);
    tracker->finish();
    EXPECT_FALSE(std::filesystem::is_empty(folder / "a" / name));
  }
}

TEST(MakeTracker, TheDefaultFolderIsNamedAsTransformersNamesIt) {
  EXPECT_TRUE(std::regex_match(
      default_logging_dir().string(),
      std::regex("runs/[A-Z][a-z][a-z][0-3][0-9]_[0-2][0-9]-[0-5][0-9]-[0-6][0-9]_.+")))
      << default_logging_dir();
}

} // namespace
} // namespace hasten::tracker_test
