#include "hasten/base/log.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <thread>
#include <vector>

#include "hasten/base/progress_bar.h"
#include "hasten/base/text.h"
#include "support/captured_stderr.h"
#include "support/environment.h"

namespace hasten {

using testing_support::CapturedStderr;
using testing_support::EnvironmentValues;
using testing_support::ScopedEnvironment;

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

TEST_F(LogTest, OnATerminalErrorsAreRedAndWarningsYellow) {
  CapturedStderr captured(true);
  log_error("a");
  log_warning("b");
  log_info("c");
  EXPECT_EQ(captured.take(), "\x1b[31merror:\x1b[0m a\r\n\x1b[33mwarning:\x1b[0m b\r\nc\r\n");
}

TEST_F(LogTest, ColoursNeedATerminalThatIsNotDumbAndNoNoColor) {
  const auto error_of = [](bool terminal, const EnvironmentValues& values) {
    CapturedStderr captured(terminal);
    const ScopedEnvironment environment(values);
    log_error("a");
    return captured.take();
  };
  const std::string red = "\x1b[31merror:\x1b[0m a\r\n";
  EXPECT_EQ(error_of(false, {{"TERM", "xterm"}, {"NO_COLOR", {}}}), "error: a\n");
  EXPECT_EQ(error_of(true, {{"NO_COLOR", "1"}}), "error: a\r\n");
  EXPECT_EQ(error_of(true, {{"NO_COLOR", "0"}}), "error: a\r\n"); // any value that is not empty
  EXPECT_EQ(error_of(true, {{"NO_COLOR", ""}}), red);
  EXPECT_EQ(error_of(true, {{"TERM", "dumb"}}), "error: a\r\n");
  EXPECT_EQ(error_of(true, {{"TERM", {}}}), red);
}

TEST_F(LogTest, ATerminalsErrorIsWrappedBetweenWordsUnderItsBeginning) {
  const std::string line = "[part::f] rows=0 of the file reviews.csv. Expected 1 row or more.";
  {
    CapturedStderr captured(true, 40);
    const ScopedEnvironment plain(EnvironmentValues{{"NO_COLOR", "1"}});
    log_error(line);
    log_info(line); // commands in it can be copied
    EXPECT_EQ(captured.take(),
              "error: [part::f] rows=0 of the file\r\n"
              "       reviews.csv. Expected 1 row or\r\n"
              "       more.\r\n" +
                  line + "\r\n");
  }
  CapturedStderr file;
  log_error(line);
  EXPECT_EQ(file.take(), "error: " + line + "\n");
}

TEST_F(LogTest, ASinkGetsNeitherColoursNorColumns) {
  CapturedStderr captured(true, 60);
  EXPECT_EQ(terminal_columns(), 60);
  set_log_sink([](LogLevel, std::string_view) {});
  EXPECT_EQ(terminal_columns(), 0);
  EXPECT_EQ(styled("a", Style::bold), "a");
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

TEST(ProgressBar, ANarrowTerminalShowsTheLastOfTheNoteAndNoPartOfANumber) {
  const auto drawn = [](int columns) {
    CapturedStderr captured(true, columns);
    ProgressBar bar("train", 100'000, true);
    bar.update(45'000, "epoch 0.45 loss 0.4100", 3600);
    return captured.take();
  };
  const std::string wide = drawn(160);
  EXPECT_NE(wide.find("] 45,000/100,000 00:00<1:00:00 epoch 0.45 loss 0.4100"), std::string::npos)
      << wide;
  const std::string narrow = drawn(60);
  EXPECT_EQ(narrow.find("epoch"), std::string::npos) << narrow;
  EXPECT_NE(narrow.find("00:00<1:00:00 loss 0.4100"), std::string::npos) << narrow;
  for (const int columns : {20, 40, 60, 80, 160}) {
    EXPECT_LT(drawn(columns).size(), static_cast<size_t>(columns) + 4) << columns; // "\r\x1b[K"
  }
}

TEST(ProgressBar, ADumbTerminalGetsPlainLines) {
  CapturedStderr captured(true);
  const ScopedEnvironment dumb(EnvironmentValues{{"TERM", "dumb"}});
  ProgressBar bar("eval", 10, true);
  bar.update(5);
  bar.finish();
  EXPECT_EQ(captured.take(), "eval  50% 5/10 00:00<00:00\r\n");
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

TEST(Text, MappedKeepsTheOrderAndCopiesWhatAMemberRefersTo) {
  const std::map<std::string, int> sizes{{"b", 2}, {"a", 1}};
  auto names = mapped(sizes, [](const auto& of) { return of.first; });
  EXPECT_EQ(names, (std::vector<std::string>{"a", "b"}));
  const auto texts = mapped(std::vector<int>{3, 1, 2}, [](int n) { return std::to_string(n); });
  EXPECT_EQ(joined(texts, ""), "312");
  EXPECT_TRUE(mapped(std::vector<int>(), [](int n) { return n; }).empty());
  struct Named {
    std::string name{};
  };
  const std::vector<Named> people{{"x"}, {"y"}};
  EXPECT_EQ(mapped(people, &Named::name), (std::vector<std::string>{"x", "y"}));
}

TEST(Text, SumOfAddsWhatTheFunctionReturns) {
  const std::vector<std::string> words{"one", "three"};
  EXPECT_EQ(sum_of(words, [](const std::string& word) { return word.size(); }), 8U);
  EXPECT_EQ(sum_of(std::vector<double>(), [](double x) { return x; }), 0.0);
}

TEST(Text, WrappedBreaksBetweenWordsAndKeepsLongOnes) {
  EXPECT_EQ(wrapped("one two three four five", 22, 2), "one two three four\n  five");
  EXPECT_EQ(wrapped("a /a/path/that/is/longer/than/a/line b", 22, 2),
            "a\n  /a/path/that/is/longer/than/a/line\n  b");
  EXPECT_EQ(wrapped("ä ö ü ä ö ü ä ö ü ä ö", 21, 0), "ä ö ü ä ö ü ä ö ü ä ö"); // 21 columns
  for (const int columns : {0, 21}) { // no terminal; too few columns left
    EXPECT_EQ(wrapped("one two three four five", columns, 2), "one two three four five");
  }
}

} // namespace hasten
