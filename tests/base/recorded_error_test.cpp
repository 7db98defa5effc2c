#include "hasten/base/recorded_error.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "support/environment.h"
#include "support/temporary_folder.h"

namespace hasten {

using testing_support::EnvironmentValues;
using testing_support::ScopedEnvironment;
using testing_support::TemporaryFolder;

TEST(RecordedError, TheFirstErrorStaysInTheFormThatTorchrunReads) {
  const TemporaryFolder folder;
  const auto path = folder / "error.json";
  EXPECT_FALSE(read_recorded_error(path));
  const ScopedEnvironment environment(
      EnvironmentValues{{"TORCHELASTIC_ERROR_FILE", path.string()}});
  const auto before = std::chrono::system_clock::now();
  record_error(Error("part::f", "no luck \xff"));
  record_error(CommunicationError("part::g", "later"));
  const auto error = read_recorded_error(path);
  ASSERT_TRUE(error);
  EXPECT_NE(error->message.find("[part::f] no luck"), std::string::npos);
  EXPECT_FALSE(error->of_a_peer);
  EXPECT_LT(std::chrono::abs(error->time - before), std::chrono::seconds(60));
  const auto json = nlohmann::json::parse(read_file(path)).at("message");
  const std::string seconds = json.at("extraInfo").at("timestamp");
  EXPECT_GT(std::stoll(seconds), 1'700'000'000);
}

TEST(RecordedError, WhatFollowsFromAPeerIsMarked) {
  const TemporaryFolder folder;
  const auto path = folder / "error.json";
  const ScopedEnvironment environment(
      EnvironmentValues{{"TORCHELASTIC_ERROR_FILE", path.string()}});
  record_error(CommunicationError("part::g", "rank 1 died"));
  EXPECT_TRUE(read_recorded_error(path)->of_a_peer);
}

TEST(RecordedError, PythonsFileIsReadAndOthersAreNot) {
  const TemporaryFolder folder;
  const auto path = folder / "error.json";
  write_file_atomically(path,
                        R"({"message": {"message": "ValueError: no", "extraInfo":
          {"py_callstack": "Traceback", "timestamp": "1700000000"}}})");
  const auto error = read_recorded_error(path);
  ASSERT_TRUE(error);
  EXPECT_EQ(error->message, "ValueError: no");
  EXPECT_EQ(error->time,
            std::chrono::system_clock::time_point(std::chrono::seconds(1'700'000'000)));
  for (const char* bad : {"", "{}", "{\"message\": 3}", "not json"}) {
    write_file_atomically(path, bad);
    EXPECT_FALSE(read_recorded_error(path)) << bad;
  }
}

TEST(RecordedError, WithoutALauncherNothingIsWritten) {
  const TemporaryFolder folder;
  const auto before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path());
  const std::string no_such_folder = folder / "missing/error.json";
  for (const std::optional<std::string>& file :
       {std::optional<std::string>(), {""}, {no_such_folder}}) {
    const ScopedEnvironment environment(EnvironmentValues{{"TORCHELASTIC_ERROR_FILE", file}});
    record_error(Error("part::f", "no luck"));
    EXPECT_TRUE(std::filesystem::is_empty(folder.path())) << file.value_or("not set");
  }
  std::filesystem::current_path(before);
}

} // namespace hasten
