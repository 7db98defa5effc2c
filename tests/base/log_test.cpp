#include "hasten/base/log.h"

#include <gtest/gtest.h>

#include <string>
#include <thread>
#include <vector>

#include "hasten/base/progress_bar.h"
#include "hasten/base/text.h"
#include "support/captured_stderr.h"

namespace hasten {

using testing_support::CapturedStderr;

class LogTest : public testing::Test {
 protected:
  void TearDown() override {
    set_log_sink({});
    set_log_levels(LogLevel::info, LogLevel::warning);
    set_log_rank(0, 1);
  }
};

TEST_F(LogTest, ReplicasAreQuieterThanRankZeroAndSayWhoTheyAre) {
  CapturedStderr captured;
  log(LogLevel::debug, "a");
  log_info("b");
  set_log_rank(2, 4);
  log_info("c");
  log_warning("d");
  EXPECT_EQ(captured.take(), "b\n[rank 2/4] warning: d\n");
}

TEST_F(LogTest, LevelsApplyToEachKindOfRank) {
  set_log_levels(LogLevel::off, LogLevel::debug);
  EXPECT_FALSE(log_enabled(LogLevel::error));
  EXPECT_FALSE(log_enabled(LogLevel::off));
  set_log_rank(1, 2);
  EXPECT_TRUE(log_enabled(LogLevel::debug));
}

TEST_F(LogTest, SinkReceivesLinesUntilItIsTakenBack) {
  CapturedStderr captured;
  std::vector<std::string> lines;
  set_log_sink([&](LogLevel level, std::string_view line) {
    lines.push_back(std::to_string(static_cast<int>(level)) + std::string(line));
  });
  log_error("x");
  log(LogLevel::debug, "y");
  EXPECT_EQ(lines, std::vector<std::string>{"3x"});
  EXPECT_EQ(captured.take(), "");
  set_log_sink({});
  log_error("z");
  EXPECT_EQ(captured.take(), "error: z\n");
}

TEST_F(LogTest, LinesOfSeveralThreadsAreNeverTorn) {
  CapturedStderr captured;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([t] {
      for (int i = 0; i < 50; ++i) {
        log_info(std::string(200, static_cast<char>('a' + t)));
      }
    });
  }
  for (auto& thread : threads) {
    thread.join();
  }
  const std::string text = captured.take();
  ASSERT_EQ(text.size(), 4u * 50u * 201u);
  for (size_t i = 0; i < text.size(); i += 201) {
    EXPECT_EQ(text.substr(i, 201), std::string(200, text[i]) + "\n");
  }
}

TEST(ProgressBar, OnATerminalALogLineRemovesTheBarFirst) {
  CapturedStderr captured(true);
  ProgressBar bar("train", 1000, true);
  bar.update(450, "loss 0.41");
  const std::string drawn = captured.take();
  EXPECT_NE(drawn.find("train  45% ["), std::string::npos) << drawn;
  EXPECT_NE(drawn.find("450/1,000"), std::string::npos) << drawn;
  EXPECT_NE(drawn.find("loss 0.41"), std::string::npos) << drawn;
  EXPECT_EQ(drawn.find('\n'), std::string::npos);
  log_info("hello");
  EXPECT_EQ(captured.take(), "\r\x1b[Khello\r\n");
  log_info("again"); // there is no bar to remove
  EXPECT_EQ(captured.take(), "again\r\n");
  bar.finish();
  const std::string last = captured.take();
  EXPECT_EQ(last.substr(last.size() - 2), "\r\n");
}

TEST(ProgressBar, RedrawsAtMostTenTimesASecond) {
  CapturedStderr captured(true);
  ProgressBar bar("x", 100'000, true);
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < 20'000; ++i) {
    bar.update(i);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const std::string text = captured.take();
  size_t draws = 0;
  for (const char c : text) {
    draws += c == '\r';
  }
  EXPECT_GE(draws, 1u);
  EXPECT_LE(draws, 2 + static_cast<size_t>(seconds * 10));
}

TEST(ProgressBar, WithoutATerminalAShortRunIsOnePlainLine) {
  CapturedStderr captured;
  ProgressBar bar("eval", 10, true);
  for (int i = 1; i <= 10; ++i) {
    bar.update(i);
  }
  EXPECT_EQ(captured.take(), "");
  bar.finish();
  bar.finish();
  EXPECT_EQ(captured.take(), "eval 100% 10/10 00:00<00:00\n");
}

TEST(ProgressBar, DisabledSaysNothing) {
  CapturedStderr captured(true);
  ProgressBar bar("x", 10, false);
  bar.update(5);
  bar.clear();
  bar.finish();
  EXPECT_EQ(captured.take(), "");
}

TEST(ProgressBar, NumbersReadAsPeopleWriteThem) {
  EXPECT_EQ(format_duration(3723), "1:02:03");
  EXPECT_EQ(format_duration(59.6), "01:00");
  EXPECT_EQ(format_duration(1.0 / 0.0), "--:--");
  EXPECT_EQ(format_count(33530), "33,530");
  EXPECT_EQ(format_count(-1000), "-1,000");
  EXPECT_EQ(format_count(999), "999");
  EXPECT_EQ(format_count(1'000'000), "1,000,000");
  EXPECT_EQ(format_bytes(1395864371), "1.3 GiB");
  EXPECT_EQ(format_bytes(512), "512 B");
}

} // namespace hasten
