// Recorded steps of the strategies have the operations that the strategies send, and real steps
// follow them.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <memory>
#include <utility>

#include "hasten/accelerator/accelerator.h"
#include "hasten/comm/step_prediction.h"
#include "hasten/local_sgd/local_sgd.h"
#include "support/communicator.h"

namespace hasten {

namespace step_trace_test {

using Kind = Collective::Kind;
constexpr int64_t kWidth = 128;
constexpr int64_t kSmallBytes = 16 << 10; // what ranks agree on is smaller
constexpr int64_t kParameterBytes = 4 * 2 * (kWidth * kWidth + kWidth);

/// Bytes of each kind in the second of two recorded steps.
std::map<Kind, int64_t> recorded_bytes(Strategy strategy, int64_t local_steps = 0) {
  const auto recorder = std::make_shared<StepRecorder>(testing_support::fresh_communicator());
  AcceleratorOptions options{.device = "cpu", .strategy = strategy};
  Accelerator accelerator(options, recorder);
  torch::nn::Sequential net(torch::nn::Linear(kWidth, kWidth), torch::nn::Linear(kWidth, kWidth));
  torch::optim::SGD sgd(net->parameters(), 1e-3);
  auto [model, optimizer] = accelerator.prepare(net, sgd);
  std::unique_ptr<LocalSGD> scope;
  if (local_steps > 0) {
    scope = std::make_unique<LocalSGD>(accelerator, model,
                                       LocalSGDOptions{.local_sgd_steps = local_steps});
  }
  const torch::Tensor x = torch::randn({4, kWidth});
  const auto step = [&, &model = model, &optimizer = optimizer] {
    {
      auto window = accelerator.accumulate(model);
      accelerator.backward(model->forward(x).square().sum(), 4);
    }
    optimizer.step();
    optimizer.zero_grad();
    if (scope) {
      scope->step();
    }
  };
  StepTrace trace;
  for (const bool record : {false, false, true, true, false, false}) {
    if (record) {
      trace = recorder->record(step).back();
    } else {
      step();
    }
  }
  if (scope) {
    scope->finish();
  }
  accelerator.end_training();
  std::map<Kind, int64_t> bytes;
  for (const StepTrace::Operation& operation : trace.operations) {
    if (operation.bytes >= kSmallBytes) {
      bytes[operation.kind] += operation.bytes;
    }
  }
  return bytes;
}

/// At least `least` bytes, and padding.
void expect_about(int64_t bytes, int64_t least) {
  EXPECT_GE(bytes, least);
  EXPECT_LE(bytes, least + least / 50);
}

} // namespace step_trace_test

TEST(StepTrace, OfDdpHasItsGradientsOnce) {
  using namespace step_trace_test;
  const auto bytes = recorded_bytes(Strategy::ddp);
  if (testing_support::fresh_communicator()->world_size() == 1) {
    EXPECT_TRUE(bytes.empty());
    return;
  }
  ASSERT_EQ(bytes.size(), 1u);
  expect_about(bytes.at(Kind::all_reduce), kParameterBytes);
}

TEST(StepTrace, OfFsdpHasItsParametersAndItsGradients) {
  using namespace step_trace_test;
  const int world = testing_support::fresh_communicator()->world_size();
  auto bytes = recorded_bytes(Strategy::fsdp);
  if (world == 1) {
    EXPECT_TRUE(bytes.empty());
    return;
  }
  const int64_t weight = 4 * kWidth * kWidth; // messages of biases are small
  EXPECT_GE(bytes[Kind::all_gather] + bytes[Kind::broadcast], 2 * weight);
  EXPECT_LE(bytes[Kind::all_gather] + bytes[Kind::broadcast], 2 * kParameterBytes + weight / 10);
  EXPECT_GE(bytes[Kind::reduce_scatter], 2 * weight);
  EXPECT_LE(bytes[Kind::reduce_scatter], kParameterBytes + weight / 10);
}

TEST(StepTrace, OfLocalSgdHasAllParametersInTheStepThatAverages) {
  using namespace step_trace_test;
  const int world = testing_support::fresh_communicator()->world_size();
  EXPECT_TRUE(recorded_bytes(Strategy::ddp, 3).empty()); // averages after the third step
  const auto bytes = recorded_bytes(Strategy::ddp, 2);
  if (world == 1) {
    EXPECT_TRUE(bytes.empty());
    return;
  }
  ASSERT_EQ(bytes.size(), 1u);
  expect_about(bytes.at(Kind::all_reduce), kParameterBytes);
}

} // namespace hasten
