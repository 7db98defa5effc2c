// What a Trainer prints by default. Worlds 1 to 4.
#include "hasten/trainer/progress_callback.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "hasten/accelerator/accelerator.h"
#include "hasten/trainer/trainer.h"
#include "support/captured_stderr.h"
#include "support/communicator.h"
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
    trainer.add_callback(
        std::make_shared<ProgressCallback>("my run", BannerLines{{"data", "made up"}}));
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
  EXPECT_NE(epoch_header(epoch).find("perplexi"), std::string::npos);
  EXPECT_NE(epoch_line(epoch).find("2.2500"), std::string::npos);
  EXPECT_EQ(epoch_header(epoch).size(), epoch_line(epoch).size());
}

} // namespace hasten::progress_callback_test
