// A collective that has lost its peer leaves undefined values on a device. The Trainer names the
// lost rank, not the values.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/trainer/trainer.h"
#include "support/device_backend.h"
#include "support/spawn.h"
#include "support/test_device.h"
#include "trainer/toy_text.h"

namespace hasten::device_trainer_fault_test {

using testing_support::FaultKind;
using testing_support::FaultRank;

/// `spoil` puts the undefined value into the third loss, or into its gradient. Windows are local, so
/// no other collective of the Trainer finds the loss of the rank first.
void train_until_lost(FaultRank& rank, void (*spoil)(at::Tensor& loss, const at::Tensor& value)) {
  const auto world = testing_support::device_world(rank.world());
  const at::Tensor value = at::ones({}, at::Device(world->options().device));
  world->all_reduce(value, ReduceOp::SUM, "value");
  TrainingArguments a = toy::arguments();
  a.per_device_train_batch_size = 4;
  a.local_sgd_steps = 1000;
  AcceleratorOptions options = accelerator_options(a);
  options.device = "test_device";
  const auto accelerator =
      std::make_shared<Accelerator>(options, world->duplicate({.name = "run"}));
  const auto model = std::make_shared<toy::Classifier>(at::kFloat);
  int calls = 0;
  Trainer trainer(
      model,
      [&, loss = toy::loss_function(model)](const Batch& batch) {
        LossOutput output = loss(batch);
        if (++calls == 3) {
          rank.fault_here();
          EXPECT_THROW(world->all_reduce(value, ReduceOp::SUM, "value"), CommunicationError);
          spoil(output.loss_sum, value);
        }
        return output;
      },
      a, std::make_shared<toy::Texts>(64), nullptr, {}, accelerator);
  trainer.train();
}

HASTEN_RANK_FUNCTION(LoseARankAndSpoilTheLoss) {
  train_until_lost(rank, [](at::Tensor& loss, const at::Tensor& value) { loss = loss * value; });
}

HASTEN_RANK_FUNCTION(LoseARankAndSpoilTheGradient) {
  train_until_lost(rank, [](at::Tensor& loss, const at::Tensor& value) {
    loss.register_hook([value](const at::Tensor& gradient) { return gradient * value; });
  });
}

TEST(DeviceFault, TheTrainerNamesALostRankAndNotTheValuesThatItLeaves) {
  for (const char* function : {"LoseARankAndSpoilTheLoss", "LoseARankAndSpoilTheGradient"}) {
    SCOPED_TRACE(function);
    const auto ranks = testing_support::spawn(2, function, {.kind = FaultKind::kill, .rank = 1});
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "rank 1 died", ranks[0].error);
    EXPECT_NE(ranks[0].error_type.find("CommunicationError"), std::string::npos)
        << ranks[0].error_type;
  }
}

} // namespace hasten::device_trainer_fault_test
