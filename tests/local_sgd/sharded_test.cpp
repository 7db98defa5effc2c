// Sharded models through the Accelerator, worlds 1, 2 and 4. The training equals that of whole
// copies, also together with the Accelerator's other features.
#include "accelerator/sharded_rig.h"
#include "hasten/base/log.h"
#include "hasten/core/memory.h"
#include "hasten/local_sgd/local_sgd.h"
#include "hasten/optim/adafactor.h"
#include "support/on_device.h"

namespace hasten::sharded_test {

constexpr Strategy kSharded[] = {Strategy::zero1, Strategy::zero2, Strategy::fsdp};

// fp64: sums in another order differ by less than 1e-10 after all steps.
TEST(Sharded, TrainingIsThatOfWholeCopies) {
  const Result whole = train({});
  for (const Strategy strategy : kSharded) {
    SCOPED_TRACE(strategy_name(strategy));
    expect_close(whole, train({.strategy = strategy}), 1e-10);
  }
}

TEST(Sharded, ADeferredModelTrainsAsOneThatWasWhole) {
  for (const Strategy strategy : {Strategy::ddp, Strategy::zero1, Strategy::fsdp}) {
    SCOPED_TRACE(strategy_name(strategy));
    expect_close(train({.strategy = strategy}), train({.strategy = strategy, .deferred = true}), 0);
  }
}

TEST(Sharded, SoItIsWithAccumulationCheckpointingAndDropout) {
  Training run{.accumulation = 3, .checkpointing = "full", .dropout = 0.2};
  const Result whole = train(run);
  EXPECT_LT(whole.losses.size(), 22u);
  for (const Strategy strategy : kSharded) {
    SCOPED_TRACE(strategy_name(strategy));
    run.strategy = strategy;
    run.checkpointing = "";
    expect_close(whole, train(run), 1e-10);
    for (const char* mode : {"full", "ops", "every:2"}) {
      SCOPED_TRACE(mode);
      run.checkpointing = mode;
      expect_close(whole, train(run), 1e-10);
    }
  }
}

// AdamW in fp32 compares losses, to 1e-5. In 16 bits, products have the same fp32 weights.
TEST(Sharded, SoItIsWithAdamWAndInSixteenBits) {
  for (const Precision precision : {Precision::no, Precision::bf16, Precision::fp16}) {
    SCOPED_TRACE(precision_name(precision));
    Training run{.precision = precision, .dtype = at::kFloat, .adamw = true};
    run.batches = 12;
    const Result whole = train(run);
    run.strategy = Strategy::fsdp;
    const Result sharded = train(run);
    ASSERT_EQ(whole.losses.size(), sharded.losses.size());
    for (size_t i = 0; i < whole.losses.size(); ++i) {
      EXPECT_NEAR(whole.losses[i], sharded.losses[i], precision == Precision::no ? 1e-5 : 1e-2);
    }
  }
}

TEST(Sharded, AnInfinityInOneRanksRowsLeavesEveryRankAsItWas) {
  Training run{.strategy = Strategy::fsdp, .precision = Precision::fp16};
  run.dtype = at::kFloat;
  run.change = [](AcceleratorOptions& o) { o.grad_scaler.init_scale = 1024; };
  Accelerator accelerator(options_of(run), testing_support::fresh_communicator());
  Stack stack = make_stack(run, accelerator.process_index());
  AdamW adamw(stack->parameters(), torch::optim::AdamWOptions(0.01));
  auto [model, optimizer] = accelerator.prepare(stack, adamw);
  for (int guilty = -1; guilty < accelerator.num_processes(); ++guilty) {
    const std::vector<Tensor> before = whole_parameters(accelerator, stack);
    const double scale = accelerator.loss_scale().value();
    auto window = accelerator.accumulate(model);
    const auto rows = batches(1)[0];
    Tensor logits = stack->forward(rows.first);
    if (guilty == accelerator.process_index()) {
      logits.register_hook([](const Tensor& gradient) { return gradient * INFINITY; });
    }
    accelerator.backward(torch::nn::functional::cross_entropy(logits, rows.second), 1);
    EXPECT_EQ(bool(optimizer.step().was_skipped()), guilty >= 0);
    optimizer.zero_grad();
    EXPECT_EQ(accelerator.loss_scale().value(), guilty >= 0 ? scale / 2 : scale);
    const std::vector<Tensor> after = whole_parameters(accelerator, stack);
    for (size_t i = 0; i + 1 < after.size(); ++i) { // the last is frozen
      EXPECT_EQ(torch::equal(before[i], after[i]), guilty >= 0) << i;
    }
  }
  accelerator.end_training();
}

TEST(Sharded, NormsAreThoseOfTheWhole) {
  const auto norms = [](Strategy strategy) {
    const Training run{.strategy = strategy};
    Accelerator accelerator(options_of(run), testing_support::fresh_communicator());
    Stack stack = make_stack(run, accelerator.process_index());
    accelerator.prepare(stack);
    auto window = accelerator.accumulate(stack);
    accelerator.backward(loss_of(stack, batches(3)[2]), 3);
    std::vector<double> result;
    for (const double type : {1.0, 2.0, std::numeric_limits<double>::infinity()}) {
      const GradientNorms found =
          accelerator.gradient_norms(stack, {.norm_type = type, .of = NormsOf::parameter});
      result.insert(result.end(), found.norms.begin(), found.norms.end());
      result.push_back(found.total);
      result.push_back(accelerator.clip_grad_norm_(stack, 1e6, type));
    }
    result.push_back(accelerator.clip_grad_value_(stack, 1e-3));
    result.push_back(accelerator.clip_grad_norm_(stack, 1e6));
    accelerator.end_training();
    return result;
  };
  const std::vector<double> whole = norms(Strategy::ddp);
  const std::vector<double> sharded = norms(Strategy::fsdp);
  ASSERT_EQ(whole.size(), sharded.size());
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_NEAR(whole[i], sharded[i], 1e-12) << i;
  }
}

// The moments of whole parameters become moments of shards.
TEST(Sharded, AnOptimizerThatHasSteppedBeforeGoesOn) {
  const auto train_on = [](Strategy strategy) {
    const Training run{.strategy = strategy, .adamw = true};
    Accelerator accelerator(options_of(run), testing_support::fresh_communicator());
    Stack stack = make_stack(run, 0);
    const auto own = optimizer_of(run, stack);
    const auto rows = batches(6);
    const auto steps = [&](auto& optimizer, size_t from, size_t to) {
      for (size_t i = from; i < to; ++i) {
        if (from == 0) { // the optimizer steps before prepare()
          loss_of(stack, rows[i]).backward();
          optimizer.step();
          optimizer.zero_grad();
          continue;
        }
        auto window = accelerator.accumulate(stack);
        accelerator.backward(loss_of(stack, rows[i]), 1);
        optimizer.step();
        optimizer.zero_grad();
      }
    };
    steps(*own, 0, 3);
    auto [model, optimizer] = accelerator.prepare(stack, *own);
    steps(optimizer, 3, 6);
    auto parameters = whole_parameters(accelerator, stack);
    accelerator.end_training();
    return parameters;
  };
  const auto whole = train_on(Strategy::ddp);
  const auto rows = train_on(Strategy::fsdp);
  ASSERT_EQ(whole.size(), rows.size());
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_LE((whole[i] - rows[i]).abs().max().item<double>(), 1e-10) << i;
  }
}

// 1.2 MB of parameters are 4.7 MB with gradients and moments. With two ranks each rank has half of
// them, and the blocks that are gathered at the moment. Their number depends on when Gloo frees the
// buffers that it has sent.
TEST(Sharded, TrainsUnderALimitThatWholeCopiesExceed) {
  install_memory_meter();
  const auto fits = [](Strategy strategy) {
    const int64_t before = memory_stats(testing_support::run_device()).live_bytes;
    Accelerator accelerator({.device = testing_support::run_device().str(), .strategy = strategy},
                            testing_support::fresh_communicator_without_memory());
    torch::nn::Sequential model;
    for (int i = 0; i < 8; ++i) {
      model->push_back(torch::nn::Linear(192, 192));
    }
    AdamW adamw(model->parameters());
    auto [prepared, optimizer] = accelerator.prepare(model, adamw);
    const MemoryLimit limit(before + 4'100'000);
    try {
      for (int step = 0; step < 3; ++step) {
        auto window = accelerator.accumulate(prepared);
        accelerator.backward(model->forward(on_device::ones({4, 192})).square().mean(), 4);
        optimizer.step();
        optimizer.zero_grad();
      }
    } catch (const std::exception& error) {
      EXPECT_TRUE(is_out_of_memory(error)) << error.what();
      return false;
    }
    accelerator.end_training();
    return true;
  };
  if (testing_support::test_world().world_size > 1) {
    EXPECT_TRUE(fits(Strategy::fsdp));
  }
  EXPECT_FALSE(fits(Strategy::ddp));
}

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const InputError& error) {
    return error.what();
  }
  return {};
}

TEST(Sharded, WhatNeedsWholeParametersIsRefused) {
  const Training run{.strategy = Strategy::fsdp};
  Accelerator accelerator(options_of(run), testing_support::fresh_communicator());
  if (accelerator.num_processes() == 1) {
    accelerator.end_training();
    return; // a single rank has whole parameters
  }
  Stack stack = make_stack(run, accelerator.process_index());
  Adafactor adafactor(stack->parameters());
  accelerator.prepare(stack);
  EXPECT_NE(refusal([&] {
              accelerator.prepare(adafactor);
            }).find("optimizer=Adafactor with strategy=fsdp"),
            std::string::npos);
  EXPECT_NE(refusal([&] {
              accelerator.register_comm_hook(stack, std::make_shared<Bf16CompressHook>());
            }).find("FullyShard"),
            std::string::npos);
  EXPECT_NE(refusal([&] {
              LocalSGD local(accelerator, stack, {.local_sgd_steps = 2});
            }).find("shards of one replica"),
            std::string::npos);
  const Tensor loss = stack->words->weight.sum();
  EXPECT_NE(refusal([&] { accelerator.backward(loss); }).find("outside accumulate()"),
            std::string::npos);
  accelerator.end_training();
}

TEST(Sharded, AModelWithoutBlocksIsWarnedOnceThatAllIsGatheredTogether) {
  Accelerator accelerator(options_of({.strategy = Strategy::fsdp}),
                          testing_support::fresh_communicator());
  torch::nn::Linear model(8, 8);
  std::string lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines += line; });
  accelerator.prepare(model);
  set_log_sink({});
  const bool warned = accelerator.num_processes() > 1 && accelerator.is_main_process();
  EXPECT_EQ(lines.find("hasten::call_block") != std::string::npos, warned) << lines;
  accelerator.end_training();
}

} // namespace hasten::sharded_test
