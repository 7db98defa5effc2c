// What a Trainer prints by default. Worlds 1 to 4.
#include "hasten/trainer/progress_callback.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/text.h"
#include "hasten/trainer/trainer.h"
#include "support/captured_stderr.h"
#include "support/communicator.h"
#include "support/environment.h"
#include "support/world.h"
#include "trainer/toy_text.h"

namespace hasten::progress_callback_test {

struct Shown {
  std::string out{};
  std::string error{};
};

/// Runs two epochs with an evaluation at the end of each. Calls `add` with the Trainer before them.
template <typename Add>
Shown shown_by(bool disable_tqdm, bool terminal, Add&& add) {
  TrainingArguments a = toy::arguments();
  a.disable_tqdm = disable_tqdm;
  a.num_train_epochs = 2;
  a.eval_strategy = IntervalStrategy::epoch;
  const auto model = std::make_shared<toy::Classifier>();
  AcceleratorOptions options;
  Trainer trainer(model, toy::loss_function(model), a, std::make_shared<toy::Texts>(32),
                  std::make_shared<toy::Texts>(5), classification_metrics(toy::kLabels),
                  std::make_shared<Accelerator>(options, testing_support::fresh_communicator()));
  add(trainer);
  testing_support::CapturedStderr error(terminal);
  testing::internal::CaptureStdout();
  trainer.train();
  return {testing::internal::GetCapturedStdout(), error.take()};
}

int64_t lines_of(const std::string& text) { return std::count(text.begin(), text.end(), '\n'); }

TEST(ProgressCallback, IsThereByDefaultAndRankZeroAloneShowsBannerBarAndTable) {
  const Shown shown = shown_by(false, true, [](Trainer&) {});
  if (testing_support::test_world().rank > 0) {
    EXPECT_EQ(shown.out, "");
    EXPECT_EQ(shown.error, "");
    return;
  }
  for (const char* word : {"parameters", "ranks", "steps", "train  ", "% [="}) {
    EXPECT_NE(shown.error.find(word), std::string::npos) << shown.error;
  }
  EXPECT_EQ(lines_of(shown.out), 3) << shown.out; // the header and two epochs
  for (const char* word : {"train loss", "accuracy", "1/2", "2/2"}) {
    EXPECT_NE(shown.out.find(word), std::string::npos) << shown.out;
  }
}

TEST(ProgressCallback, DisableTqdmShowsNothing) {
  const Shown shown = shown_by(true, true, [](Trainer&) {});
  EXPECT_EQ(shown.out, "");
  EXPECT_EQ(shown.error, "");
}

TEST(ProgressCallback, OneThatIsAddedTakesItsPlaceOnRankZero) {
  const Shown shown = shown_by(false, false, [](Trainer& trainer) {
    trainer.add_callback(std::make_shared<ProgressCallback>(
        "my run", [] { return BannerLines{{"data", "made up"}}; }));
  });
  const bool main = testing_support::test_world().rank == 0;
  EXPECT_EQ(lines_of(shown.out), main ? 3 : 0) << shown.out; // only one rank prints the table
  EXPECT_EQ(shown.error.find("my run\n") == 0, main) << shown.error;
  EXPECT_EQ(shown.error.find("made up") != std::string::npos, main);
}

TEST(ProgressCallback, TheTableHasTheMetricsThatTheEvaluationHas) {
  EpochReport epoch;
  epoch.evaluation = {{"eval_loss", 0.5},
                      {"eval_runtime", 1.0},
                      {"eval_samples_per_second", 9.0},
                      {"eval_perplexity", 2.25}};
  EXPECT_NE(epoch_header(epoch).find("  ppl  "), std::string::npos);
  EXPECT_NE(epoch_line(epoch).find("2.2500"), std::string::npos);
  EXPECT_EQ(epoch_header(epoch).size(), epoch_line(epoch).size());
  epoch.evaluation = {{"eval_accuracy", 1.0}, {"eval_f1", 0.75}, {"eval_precision", 0.5}};
  EXPECT_NE(epoch_header(epoch).find("entity-F1  accuracy"), std::string::npos);
  epoch.evaluation = {{"eval_structural", 0.5}};
  EXPECT_NE(epoch_header(epoch).find("structur"), std::string::npos);
}

EpochReport epoch_with(int64_t number, double loss, double accuracy) {
  EpochReport epoch;
  epoch.epoch = number;
  epoch.epochs = 3;
  epoch.training_loss = 0.5;
  epoch.evaluation = {{"eval_loss", loss}, {"eval_accuracy", accuracy}, {"eval_f1", 0.25}};
  return epoch;
}

TEST(ProgressCallback, ANarrowTerminalsTableLeavesOutColumnsFromTheRight) {
  const EpochReport epoch = epoch_with(1, 0.4, 0.75);
  const std::string whole = epoch_header(epoch);
  EXPECT_EQ(whole,
            "  epoch  train loss  eval loss  accuracy  macro-F1  samples/s    tokens/s  peak memory"
            "  time left");
  EXPECT_EQ(epoch_header(epoch, 160), whole);
  EXPECT_EQ(epoch_header(epoch, 80), whole.substr(0, whole.find("  peak memory")));
  EXPECT_EQ(epoch_header(epoch, 60), whole.substr(0, whole.find("  samples/s")));
  EXPECT_EQ(epoch_header(epoch, 10), whole.substr(0, whole.find("  macro-F1"))); // these stay
  for (const int columns : {0, 10, 60, 80, 97, 160}) {
    EXPECT_EQ(epoch_line(epoch, columns).size(), epoch_header(epoch, columns).size());
  }
}

TEST(ProgressCallback, BannerTextsAreWrappedUnderTheirColumn) {
  const BannerLines lines{{"batch", "8 samples per rank x 2 ranks x 4 accumulation = 64"},
                          {"output", "/a/folder/with/a/name/that/is/longer/than/the/line"}};
  EXPECT_EQ(joined(banner_text(lines, 40), "\n"),
            "  batch       8 samples per rank x 2\n"
            "              ranks x 4 accumulation =\n"
            "              64\n"
            "  output      /a/folder/with/a/name/that/is/longer/than/the/line");
  EXPECT_EQ(banner_text(lines).size(), 2u);
}

/// What a run of three epochs with falling losses shows on terminals of so many columns.
Shown shown_on_terminals(int columns) {
  std::cout.flush();
  testing_support::CapturedStderr out(true, columns, STDOUT_FILENO);
  testing_support::CapturedStderr error(true, columns);
  RunDescription run;
  run.plan.max_steps = 8;
  run.arguments.metric_for_best_model = "accuracy";
  ProgressCallback callback("a title");
  callback.on_train_begin(run);
  for (int step = 0; step < 8; ++step) {
    callback.on_log({{"loss", 0.8 - 0.1 * step}});
  }
  callback.on_epoch_end(epoch_with(1, 0.5, 0.7));
  callback.on_epoch_end(epoch_with(2, 0.4, 0.9));
  callback.on_epoch_end(epoch_with(3, 0.3, 0.8));
  callback.on_train_end({{"train_runtime", 60.0}, {"train_loss", 0.45}});
  return {out.take(), error.take()};
}

TEST(ProgressCallback, OnATerminalTitlesAreBoldAndEachBestMetricIsGreen) {
  if (testing_support::test_world().rank > 0) {
    return;
  }
  const Shown shown = shown_on_terminals(80);
  EXPECT_EQ(shown.error.find("\x1b[1ma title\x1b[0m\r\n"), 0u) << shown.error;
  EXPECT_EQ(shown.out.find("\x1b[1m  epoch"), 0u) << shown.out;
  for (const char* best : {"\x1b[32m0.7000\x1b[0m", "\x1b[32m0.9000\x1b[0m"}) {
    EXPECT_NE(shown.out.find(best), std::string::npos) << shown.out;
  }
  EXPECT_NE(shown.out.find("  0.8000  "), std::string::npos) << shown.out; // not better
}

TEST(ProgressCallback, OnAUtf8TerminalTheCurveOfTheTrainingLossEndsTheRun) {
  if (testing_support::test_world().rank > 0) {
    return;
  }
  const auto ends_with = [](int columns, const char* locale, const std::string& end) {
    const testing_support::ScopedEnvironment environment(
        testing_support::EnvironmentValues{{"LC_ALL", locale}});
    return shown_on_terminals(columns).error.ends_with("Training loss 0.8000 " + end +
                                                       " 0.1000\r\n");
  };
  EXPECT_TRUE(ends_with(60, "C.UTF-8", "█▇▆▅▄▃▂▁"));
  EXPECT_TRUE(ends_with(160, "de_DE.utf8", "█▇▆▅▄▃▂▁"));
  EXPECT_FALSE(ends_with(80, "C", "█▇▆▅▄▃▂▁"));
  EXPECT_FALSE(ends_with(30, "C.UTF-8", "█▇▆▅▄▃▂▁")); // no room
}

} // namespace hasten::progress_callback_test
