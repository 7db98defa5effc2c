// The arithmetic of the cost model and of the prediction, on given numbers.
#include "hasten/comm/step_prediction.h"

#include <gtest/gtest.h>

#include "hasten/base/error.h"

namespace hasten {

namespace step_prediction_test {

using Kind = Collective::Kind;

/// An all_reduce of `bytes` takes 1 ms + bytes * 1 ns.
CostModel straight_model(double stretch = 1, double stolen = 0) {
  CostModel model{.backend = "shm", .world_size = 2, .stretch = stretch, .stolen = stolen};
  model.operations.push_back(
      {.kind = Kind::all_reduce, .points = {{1000, 0.001001}, {1'000'000, 0.002}}});
  model.operations.back().fit();
  return model;
}

/// A backward of 0.1 s that starts transfers of 9 ms after 0.05 s and at its end, waits for both,
/// and steps for 0.02 s.
StepTrace two_buckets(int second_queue = 0) {
  return {
      .operations = {{Kind::all_reduce, 8'000'000, 0}, {Kind::all_reduce, 8'000'000, second_queue}},
      .events = {{0.05, 0, true}, {0.1, 1, true}, {0.1, 0, false}, {0.1, 1, false}},
      .seconds = 0.12};
}

} // namespace step_prediction_test

TEST(CostModel, FitsTheLineThroughItsFirstAndLastPoint) {
  const CostModel model = step_prediction_test::straight_model();
  EXPECT_NEAR(model.operations[0].alpha, 1e-3, 1e-9);
  EXPECT_NEAR(model.operations[0].beta, 1e-9, 1e-15);
}

TEST(CostModel, FitsNoNegativeLatencyAndOnePointIsALatency) {
  OperationCost falling{.points = {{1000, 2e-6}, {1'000'000, 1e-6}}};
  falling.fit();
  EXPECT_EQ(falling.beta, 0);
  EXPECT_DOUBLE_EQ(falling.alpha, 2e-6);
  OperationCost one{.points = {{1000, 1e-6}}};
  one.fit();
  EXPECT_DOUBLE_EQ(one.alpha, 1e-6);
  EXPECT_DOUBLE_EQ(one.seconds(1 << 20), 1e-6);
}

TEST(CostModel, InterpolatesBetweenPointsAndGoesOnWithBeta) {
  using namespace step_prediction_test;
  const CostModel model = straight_model();
  EXPECT_DOUBLE_EQ(model.seconds(Kind::all_reduce, 4), 0.001001);
  EXPECT_NEAR(model.seconds(Kind::all_reduce, 500'500), 0.0015005, 1e-12);
  EXPECT_NEAR(model.seconds(Kind::all_reduce, 8'000'000), 0.009, 1e-9);
  EXPECT_NEAR(model.seconds(Kind::reduce, 500'500), 0.0015005, 1e-12); // not measured
  EXPECT_EQ(CostModel().seconds(Kind::all_reduce, 8), 0);
}

TEST(PredictStep, HidesATransferBehindComputationWhereThereIsAFreeCore) {
  using namespace step_prediction_test;
  const StepPrediction predicted =
      predict_step({two_buckets(), two_buckets()}, straight_model())[0];
  EXPECT_NEAR(predicted.seconds, 0.129, 1e-6);
  EXPECT_NEAR(predicted.exposed_seconds, 0.009, 1e-6);
  EXPECT_NEAR(predicted.communication_seconds, 0.018, 1e-6);
}

TEST(PredictStep, ChargesTheComputationWhereTransfersShareItsCore) {
  using namespace step_prediction_test;
  const StepPrediction predicted =
      predict_step({two_buckets(), two_buckets()}, straight_model(2, 1))[0];
  EXPECT_NEAR(predicted.seconds, 0.138, 1e-6);
  EXPECT_NEAR(predicted.exposed_seconds, 0.009, 1e-6);
}

TEST(PredictStep, RunsTransfersOfAQueueInOrderAndThoseOfTwoTogether) {
  using namespace step_prediction_test;
  StepTrace trace = two_buckets();
  trace.events = {{0.1, 0, true}, {0.1, 1, true}, {0.1, 1, false}};
  EXPECT_NEAR(predict_step({trace, trace}, straight_model())[1].seconds, 0.138, 1e-6);
  trace = two_buckets(1);
  trace.events = {{0.1, 0, true}, {0.1, 1, true}, {0.1, 1, false}};
  EXPECT_NEAR(predict_step({trace, trace}, straight_model())[1].seconds, 0.138,
              1e-6); // they share its speed
}

TEST(PredictStep, BeginsATransferWhenTheLastRankHasStartedIt) {
  using namespace step_prediction_test;
  StepTrace late = two_buckets();
  for (StepTrace::Event& event : late.events) {
    event.seconds += 0.03;
  }
  late.seconds += 0.03;
  const StepPrediction predicted = predict_step({two_buckets(), late}, straight_model())[0];
  EXPECT_NEAR(predicted.seconds, 0.159, 1e-6);
  EXPECT_NEAR(predicted.exposed_seconds, 0.039, 1e-6); // of the rank that is not late
}

TEST(PredictStep, RefusesRanksThatDoNotStartTheSame) {
  using namespace step_prediction_test;
  StepTrace lacking = two_buckets();
  lacking.events.erase(lacking.events.begin());
  EXPECT_THROW(predict_step({two_buckets(), lacking}, straight_model()), InputError);
}

TEST(PredictStep, OfNoCommunicationIsTheStepItself) {
  const StepPrediction predicted =
      predict_step({{.seconds = 0.25}, {.seconds = 0.25}}, CostModel{})[0];
  EXPECT_DOUBLE_EQ(predicted.seconds, 0.25);
  EXPECT_EQ(predicted.exposed_seconds, 0);
}

} // namespace hasten
