// fp16 in a LocalSGD scope. Each rank has its own overflows and its own scale. Rounds are at the
// same steps as without overflows.
#include "accelerator/precision_rig.h"
#include "hasten/local_sgd/local_sgd.h"

namespace hasten::precision_test {

TEST(MixedPrecisionLocalSGD, ASkippedStepCountsForTheNextAverage) {
  for (const auto precision : {Precision::fp16, Precision::bf16}) {
    auto accelerator =
        accelerator_with({.mixed_precision = precision, .grad_scaler = {.init_scale = 2048}});
    const int world = accelerator.num_processes();
    const bool guilty = accelerator.process_index() + 1 == world && precision == Precision::fp16;
    Learner learner(accelerator, true);
    for (int64_t step = 0; step < 2; ++step) {
      learner.learn(accelerator, 90 + step, false, Clip::norm); // the rate was 0
    }
    LocalSGD local(accelerator, learner.net, {.local_sgd_steps = 2});
    for (int64_t step = 1; step <= 4; ++step) {
      const auto before = copies(learner.net->parameters());
      const double rate = learner.rate();
      const bool overflows = guilty && step == 2;
      const StepResult result = learner.learn(accelerator, step, overflows, Clip::norm);
      EXPECT_EQ(bool(result), !overflows) << step;
      EXPECT_EQ(same_bits(before, learner.net->parameters()), overflows);
      EXPECT_EQ(learner.rate() == rate, overflows);
      EXPECT_EQ(local.step(), step % 2 == 0 && world > 1) << step;
      if (step % 2 == 0) {
        expect_equal_on_ranks(accelerator, learner.net->parameters());
      }
    }
    EXPECT_EQ(accelerator.loss_scale().value(), precision == Precision::bf16 ? 1
                                                : guilty                     ? 1024
                                                                             : 2048);
    local.finish();
    if (precision == Precision::fp16) { // all ranks have the smallest scale
      EXPECT_EQ(accelerator.loss_scale().value(), 1024);
    }
    // Outside the scope windows reduce again, with one scale.
    learner.learn(accelerator, 9, false, Clip::norm);
    expect_equal_on_ranks(accelerator, learner.net->parameters());
    accelerator.end_training();
  }
}

} // namespace hasten::precision_test
