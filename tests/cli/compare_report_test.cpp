// The decisions of hasten compare from measurements.
#include <gtest/gtest.h>

#include <functional>
#include <set>

#include "compare.h"
#include "support/temporary_folder.h"

namespace hasten {

namespace compare_report_test {

using Peaks = std::function<int64_t(int64_t rows)>;

struct Searched {
  int64_t largest = 0;
  int64_t tried = 0;
  /// Sizes that unexpectedly did not fit. Each of them ends a world.
  int64_t surprises = 0;
  /// The search tried the size after the largest, and it did not fit.
  bool refused_next = false;
};

Searched search_with(const Peaks& peak, int64_t limit, int64_t most = 1 << 20) {
  Searched found;
  std::set<int64_t> refused;
  BatchSearch search(limit, most);
  while (const int64_t rows = search.next_rows()) {
    EXPECT_GT(rows, search.largest_rows());
    EXPECT_LE(rows, most);
    EXPECT_LT(++found.tried, 100);
    if (peak(rows) <= limit) {
      search.trials.push_back({rows, peak(rows)});
    } else {
      found.surprises += search.foresees_shortage(rows) ? 0 : 1;
      search.ran_out(rows);
      refused.insert(rows);
    }
  }
  found.largest = search.largest_rows();
  found.refused_next = refused.count(found.largest + 1) > 0;
  return found;
}

StrategyReport report_of(Strategy strategy, double samples_per_second) {
  StrategyReport report;
  report.strategy = strategy;
  report.timing = BatchTiming{.rows = 8,
                              .samples_per_second = samples_per_second,
                              .step_seconds = 0.25,
                              .exposed_share = 0.125,
                              .peak_bytes = 1 << 20};
  return report;
}

StrategyReport short_of(Strategy strategy, int64_t least_bytes) {
  StrategyReport report;
  report.strategy = strategy;
  report.least_bytes = least_bytes;
  return report;
}

} // namespace compare_report_test

TEST(BatchSearch, EndsWithTheLargestThatFitsAndTriedTheNext) {
  using namespace compare_report_test;
  const Peaks straight = [](int64_t rows) { return 1000 + 37 * rows; };
  const Peaks bent =
      [](int64_t rows) { // first the optimizer's step has the peak, for more rows backward
        return std::max<int64_t>(2000, 500 + 90 * rows);
      };
  const Peaks steps = [](int64_t rows) { return 100 * ((rows + 7) / 8); };
  const Peaks curved = [](int64_t rows) { return 10 * rows + rows * rows; };
  for (const Peaks& peak : {straight, bent, steps, curved}) {
    for (const int64_t limit : {1037, 1100, 2000, 2001, 5000, 77777}) {
      int64_t expected = 0;
      while (peak(expected + 1) <= limit) {
        ++expected;
      }
      const Searched found = search_with(peak, limit);
      EXPECT_EQ(found.largest, expected) << limit;
      EXPECT_TRUE(found.refused_next) << limit;
    }
  }
}

TEST(BatchSearch, OfAStraightLineNoShortageIsASurprise) {
  using namespace compare_report_test;
  const Searched found = search_with([](int64_t rows) { return 1000 + 37 * rows; }, 99999);
  EXPECT_EQ(found.largest, (99999 - 1000) / 37);
  EXPECT_EQ(found.surprises, 0);
  EXPECT_LE(found.tried, 14);
}

TEST(BatchSearch, TriesNoMoreThanItMayAndKnowsWhenNothingFits) {
  using namespace compare_report_test;
  const Peaks peak = [](int64_t rows) { return 100 + 10 * rows; };
  EXPECT_EQ(search_with(peak, 1 << 30, 100).largest, 100);
  EXPECT_EQ(search_with(peak, 1 << 30, 1).largest, 1);
  const Searched nothing = search_with(peak, 109);
  EXPECT_EQ(nothing.largest, 0);
  EXPECT_EQ(nothing.tried, 1);
}

TEST(BatchSearch, WhatFittedOnceAndThenNotIsTakenBack) {
  BatchSearch search(1000, 64);
  for (const int64_t rows : {1, 2, 4, 8}) {
    search.trials.push_back({rows, 100 * rows});
  }
  search.ran_out(8);
  EXPECT_EQ(search.largest_rows(), 4);
  const int64_t next = search.next_rows();
  EXPECT_GT(next, 4);
  EXPECT_LT(next, 8);
}

TEST(BatchSearch, GoesOnFromItsFile) {
  BatchSearch search(1000, 64);
  search.trials = {{1, 100}, {2, 190}};
  search.ran_out(16);
  const testing_support::TemporaryFolder folder;
  write_compare_state(folder / "state.json", {Strategy::zero2, search, {.rows = 1}});
  const CompareState again = read_compare_state(folder / "state.json");
  EXPECT_EQ(again.strategy, Strategy::zero2);
  EXPECT_EQ(again.timing.rows, 1);
  EXPECT_EQ(again.search.next_rows(), search.next_rows());
  EXPECT_EQ(again.search.largest_rows(), 2);
  EXPECT_TRUE(again.search.foresees_shortage(12));
  EXPECT_FALSE(again.search.foresees_shortage(11));
}

TEST(Recommend, TakesTheFastest) {
  using namespace compare_report_test;
  const Recommendation advice =
      recommend({report_of(Strategy::ddp, 90), report_of(Strategy::fsdp, 100),
                 report_of(Strategy::zero2, 95)});
  EXPECT_EQ(advice.index, 1u);
  EXPECT_EQ(advice.text, "Take fsdp: the fastest, 100.0 samples/s.");
}

TEST(Recommend, TakesTheSimplerOneOfThoseWithinThreePercent) {
  using namespace compare_report_test;
  const Recommendation advice =
      recommend({report_of(Strategy::fsdp, 100), report_of(Strategy::zero2, 98),
                 report_of(Strategy::ddp, 97.5)});
  EXPECT_EQ(advice.index, 2u);
  EXPECT_EQ(advice.text,
            "Take ddp: 97.5 samples/s, within 3 % of fsdp's 100.0 samples/s, and simpler.");
  EXPECT_EQ(recommend({report_of(Strategy::fsdp, 100), report_of(Strategy::zero2, 98),
                       report_of(Strategy::ddp, 96)})
                .index,
            1u);
}

TEST(Recommend, SaysWhatDoesNotFit) {
  using namespace compare_report_test;
  const Recommendation sharded =
      recommend({short_of(Strategy::ddp, 100 << 20), report_of(Strategy::zero2, 60),
                 report_of(Strategy::fsdp, 50)});
  EXPECT_EQ(sharded.index, 1u);
  EXPECT_EQ(sharded.text,
            "Take zero2: the fastest, 60.0 samples/s; ddp does not fit with even one sample.");
  const Recommendation one = recommend(
      {short_of(Strategy::ddp, 0), short_of(Strategy::zero2, 0), report_of(Strategy::fsdp, 50)});
  EXPECT_EQ(one.index, 2u);
  EXPECT_EQ(one.text,
            "Take fsdp: the only one that fits; ddp and zero2 do not fit with even one sample.");
  const Recommendation none =
      recommend({short_of(Strategy::ddp, 100 << 20), short_of(Strategy::fsdp, 0)});
  EXPECT_FALSE(none.index.has_value());
  EXPECT_NE(none.text.find("ddp 100 MiB, fsdp more"), std::string::npos) << none.text;
}

} // namespace hasten
