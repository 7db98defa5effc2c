// GradScaler with ranks that have different gradients (shards, or no reduction).
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>

#include "hasten/amp/grad_scaler.h"
#include "hasten/optim/adamw.h"
#include "support/communicator.h"
#include "support/on_device.h"

namespace hasten {

// Each rank in turn has an infinity; then no rank steps.
TEST(GradScalerAgreement, AnOverflowOnOneRankSkipsTheStepOfAll) {
  const auto communicator = testing_support::fresh_communicator();
  const int world = communicator->world_size();
  for (const bool clips : {false, true}) {
    GradScaler scaler({}, communicator);
    auto p = on_device::ones({4}, torch::requires_grad());
    AdamW optimizer({p});
    for (int guilty = 0; guilty <= world; ++guilty) { // in the last turn no rank
      const auto before = p.detach().clone();
      const double scale = scaler.get_scale();
      optimizer.zero_grad();
      scaler.scale((p * (1 + communicator->rank())).sum()).backward();
      if (communicator->rank() == guilty) {
        p.mutable_grad()[guilty % 4] = -INFINITY;
      }
      if (clips) {
        scaler.clip_grad_norm_(optimizer, 1.0);
      }
      EXPECT_EQ(scaler.step(optimizer), guilty == world);
      scaler.update();
      EXPECT_EQ(torch::equal(before, p), guilty < world);
      EXPECT_EQ(scaler.get_scale(), guilty < world ? scale / 2 : scale);
    }
    EXPECT_EQ(optimizer.state().size(), 1u); // made by the one step
  }
}

} // namespace hasten
