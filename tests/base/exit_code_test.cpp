#include "hasten/base/exit_code.h"

#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cerrno>
#include <cstring>
#include <functional>
#include <optional>
#include <stdexcept>
#include <system_error>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/recorded_error.h"
#include "support/captured_stderr.h"
#include "support/environment.h"
#include "support/temporary_folder.h"

namespace hasten {

using testing_support::CapturedStderr;
using testing_support::EnvironmentValues;
using testing_support::ScopedEnvironment;
using testing_support::TemporaryFolder;

namespace detail {

struct RecordedMain {
  int code = -1;
  std::string said{};
  std::string recorded{};
};

template <typename Main>
RecordedMain run_recorded(Main&& main) {
  const TemporaryFolder folder;
  const auto path = folder / "error.json";
  const ScopedEnvironment environment(
      EnvironmentValues{{"TORCHELASTIC_ERROR_FILE", path.string()}});
  RecordedMain run;
  CapturedStderr error;
  run.code = record(std::forward<Main>(main));
  run.said = error.take();
  if (const auto recorded = read_recorded_error(path)) {
    run.recorded = recorded->message;
  }
  return run;
}

} // namespace detail

TEST(Record, AnErrorThatIsNotHastensHasTheRankToo) {
  set_error_rank(1, 3);
  const auto run = detail::run_recorded([] { throw std::runtime_error("shapes differ"); });
  set_error_rank(0, 1);
  EXPECT_EQ(run.said, "error: rank 1/3 shapes differ\n");
  EXPECT_EQ(run.recorded, "rank 1/3 shapes differ");
}

TEST(Record, APeersErrorIsSaidUnlessAnotherRankOfTheHostSaysIt) {
  for (const bool said : {false, true}) {
    const auto run = detail::run_recorded([said] {
      set_said_by_peer(said);
      throw PeerInputError("part::f", "rank 1 failed: rows=0");
    });
    EXPECT_EQ(run.code, 2);
    EXPECT_EQ(run.said.empty(), said) << run.said;
  }
  set_said_by_peer(false);
}

TEST(Record, AWriteBeyondTheLimitOfFilesIsAnErrorThatNamesIt) {
  const TemporaryFolder folder;
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  const auto run = detail::run_recorded([&] {
    const rlimit small{.rlim_cur = 4096, .rlim_max = before.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &small);
    try {
      write_file_atomically(folder / "large", std::string(100'000, 'x'));
    } catch (...) {
      ::setrlimit(RLIMIT_FSIZE, &before);
      throw;
    }
    ::setrlimit(RLIMIT_FSIZE, &before);
  });
  EXPECT_EQ(run.code, 2);
  EXPECT_NE(run.said.find("raise ulimit -f"), std::string::npos) << run.said;
}

TEST(Record, WhatMainReturnsIsTheExitCode) {
  EXPECT_EQ(record([] {}), 0);
  EXPECT_EQ(record([] { return 7; }), 7);
}

TEST(Record, ExceptionsAreSaidRecordedAndBecomeExitCodes) {
  struct Case {
    std::function<void()> main;
    int code;
    std::string message;
  };
  const Case cases[] = {
      {[] { throw InputError("part::f", "rows=0"); }, 2, "[part::f] rows=0"},
      {[] { throw TrainingError("part::f", "loss=nan"); }, 1, "[part::f] loss=nan"},
      {[] { throw std::runtime_error("no luck"); }, 1, "no luck"},
      {[] { detail::throw_file_error("part::f", "a.bin", ENOSPC); }, 2, std::strerror(ENOSPC)},
      {[] { throw std::system_error(EDQUOT, std::generic_category(), "a.bin"); }, 2, "a.bin"},
      {[] { detail::throw_file_error("part::f", "a.bin", EIO); }, 1, "[part::f] a.bin"},
      // The kind counts, not the text.
      {[] { throw Error("part::f", std::strerror(ENOSPC)); }, 1, std::strerror(ENOSPC)}};
  for (const Case& bad : cases) {
    SCOPED_TRACE(bad.message);
    const auto run = detail::run_recorded(bad.main);
    EXPECT_EQ(run.code, bad.code);
    EXPECT_EQ(run.said.find("error: "), 0u) << run.said;
    EXPECT_NE(run.said.find(bad.message), std::string::npos) << run.said;
    EXPECT_NE(run.recorded.find(bad.message), std::string::npos);
  }
}

TEST(Record, UnderHastensLauncherOnlyTheFirstRankSaysAnErrorThatTheLauncherCanRead) {
  const auto says = [](int local_rank, const std::optional<std::string>& launcher,
                       bool readable = true) {
    const TemporaryFolder folder;
    const auto path = folder / (readable ? "error.json" : "none/error.json");
    const ScopedEnvironment environment(EnvironmentValues{
        {"TORCHELASTIC_ERROR_FILE", path.string()}, {"HASTEN_LAUNCHER", launcher}});
    CapturedStderr error;
    EXPECT_EQ(exit_code_of(local_rank, 2, []() -> int { throw InputError("part::f", "rows=0"); }),
              kExitBadInput);
    const bool said = !error.take().empty();
    const auto recorded = read_recorded_error(path);
    EXPECT_EQ(recorded.has_value(), readable);
    if (recorded) {
      EXPECT_EQ(recorded->shown, said);
      EXPECT_TRUE(recorded->message.starts_with("[part::f] rows=0"));
    }
    return said;
  };
  EXPECT_TRUE(says(0, "1"));
  EXPECT_FALSE(says(1, "1"));
  EXPECT_TRUE(says(1, "1", false));
  EXPECT_TRUE(says(1, {})); // another launcher may not show what is recorded
}

TEST(Record, LibTorchsStackTraceIsLeftOut) {
  const auto run = detail::run_recorded([] {
    throw std::runtime_error("shapes differ\nException raised from f at f.cpp:1\nframe #0");
  });
  EXPECT_EQ(run.said, "error: shapes differ\n");
}

TEST(Record, ASignalEndsWith128AndItsNumber) {
  EXPECT_EQ(detail::run_recorded([] { throw Interrupted(15); }).code, 143);
}

TEST(Record, AnEnvironmentThatIsNoWorldIsBadInputBeforeMain) {
  const ScopedEnvironment environment(EnvironmentValues{
      {"RANK", "3"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "1"}});
  bool called = false;
  const auto run = detail::run_recorded([&] { called = true; });
  EXPECT_EQ(run.code, 2);
  EXPECT_FALSE(called);
  EXPECT_NE(run.said.find("RANK=3"), std::string::npos) << run.said;
}

} // namespace hasten
