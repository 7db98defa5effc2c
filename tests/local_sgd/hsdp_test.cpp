// Replicas of a sharded model, worlds 1 to 4. The training equals that of replicas that are not
// sharded. Also replicas that train independently between averages.
#include "accelerator/sharded_rig.h"
#include "accelerator/state_rig.h"
#include "hasten/local_sgd/local_sgd.h"

namespace hasten::sharded_test {

// The possible numbers of ranks in a replica.
std::vector<int> shard_sizes(int world) {
  std::vector<int> sizes;
  for (int size = 1; size <= world; ++size) {
    if (world % size == 0) {
      sizes.push_back(size);
    }
  }
  return sizes;
}

Training copies_of(int shard_size) {
  Training run{.strategy = Strategy::hsdp};
  run.change = [shard_size](AcceleratorOptions& o) { o.shard_size = shard_size; };
  return run;
}

TEST(Hsdp, TrainingIsThatOfWholeCopies) {
  const Result whole = train({.accumulation = 2});
  for (const int size : shard_sizes(testing_support::test_world().world_size)) {
    SCOPED_TRACE(size);
    Training run = copies_of(size);
    run.accumulation = 2;
    expect_close(whole, train(run), 1e-10);
    run.checkpointing = "full";
    expect_close(whole, train(run), 1e-10);
  }
}

using Rows = std::pair<Tensor, Tensor>;

// Joins what the ranks of a replica read in a window into one batch. One batch for each replica.
std::vector<Rows> joined_for_copies(const std::vector<Rows>& all, size_t shard_size) {
  std::vector<Rows> joined;
  for (size_t first = 0; first < all.size(); first += shard_size) {
    std::vector<Tensor> ids;
    std::vector<Tensor> labels;
    for (size_t i = first; i < std::min(all.size(), first + shard_size); ++i) {
      ids.push_back(all[i].first);
      labels.push_back(all[i].second);
    }
    joined.emplace_back(torch::cat(ids), torch::cat(labels));
  }
  return joined;
}

struct Averaged {
  std::vector<Tensor> parameters{};
  int64_t steps = 0;
  int64_t rounds = 0;
  int ranks_per_copy = 0;
};

Averaged train_locally(const Training& run, const std::vector<Rows>& data,
                       const LocalSGDOptions& how, std::shared_ptr<Communicator> communicator) {
  Accelerator accelerator(options_of(run), std::move(communicator));
  Stack stack = make_stack(run, accelerator.process_index());
  const auto own = optimizer_of(run, stack);
  auto range = data;
  auto [model, optimizer, loader] = accelerator.prepare(stack, *own, range);
  LocalSGD local(accelerator, model, how);
  for (int epoch = 0; epoch < 2; ++epoch) {
    for (const auto& rows : loader) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(loss_of(stack, rows));
      if (accelerator.sync_gradients()) {
        accelerator.clip_grad_norm_(model, 0.5);
      }
      optimizer.step();
      optimizer.zero_grad();
      local.step();
    }
  }
  local.finish();
  const LocalSGDReport report = local.report();
  Averaged result{whole_parameters(accelerator, stack), report.steps, report.rounds,
                  report.ranks_per_copy};
  accelerator.end_training();
  return result;
}

// The reference has one rank for each replica. That rank reads what the replica's ranks read.
void expect_copies_equal_ranks(int shard_size, bool adamw, LocalSGDOptions how,
                               const std::function<std::shared_ptr<OuterStep>()>& outer = {}) {
  const auto everyone = testing_support::fresh_communicator();
  const int copies = everyone->world_size() / shard_size;
  const auto data = batches(22);
  Training run = copies_of(shard_size);
  run.adamw = adamw;
  how.average.outer = outer ? outer() : nullptr;
  const Averaged sharded = train_locally(run, data, how, everyone);
  EXPECT_EQ(sharded.ranks_per_copy, shard_size);
  const auto again = testing_support::fresh_communicator();
  std::vector<int> ranks;
  for (int copy = 0; copy < copies; ++copy) {
    ranks.push_back(copy);
  }
  if (again->rank() < copies) {
    CommunicatorOptions options = again->options();
    options.name += " reference";
    const auto group = again->new_group(ranks, options);
    how.average.outer =
        outer ? outer() : nullptr; // a new one for each run, because it has momentum
    const Averaged whole = train_locally(
        {.adamw = adamw}, joined_for_copies(data, static_cast<size_t>(shard_size)), how, group);
    EXPECT_EQ(sharded.steps, whole.steps);
    EXPECT_EQ(sharded.rounds, whole.rounds);
    for (size_t i = 0; again->rank() == 0 && i < whole.parameters.size(); ++i) {
      EXPECT_LE((sharded.parameters[i] - whole.parameters[i]).abs().max().item<double>(), 1e-10)
          << i;
    }
    group->close();
  }
  again->barrier("compared");
}

TEST(Hsdp, CopiesUnderLocalSGDAreRanksThatReadTheirRows) {
  const int world = testing_support::test_world().world_size;
  for (const int size : shard_sizes(world)) {
    if (size == world) {
      continue; // a single replica
    }
    SCOPED_TRACE(size);
    expect_copies_equal_ranks(size, false, {.local_sgd_steps = 2});
    expect_copies_equal_ranks(
        size, true,
        {.local_sgd_steps = 2, .weigh_by_samples = true, .moments = MomentPolicy::average});
    expect_copies_equal_ranks(size, false, {.local_sgd_steps = 3, .delay = 1});
    expect_copies_equal_ranks(size, false, {.local_sgd_steps = 2, .post_local_start = 2},
                              [] { return std::make_shared<DiLoCo>(); });
  }
}

std::string refused(const std::function<void()>& call) { return state_test::input_error(call); }

TEST(Hsdp, WhatCannotBeIsRefused) {
  const auto everyone = testing_support::fresh_communicator();
  const int world = everyone->world_size();
  if (world == 1) {
    return;
  }
  const auto open = [&](int size, LocalSGDOptions how) {
    return refused([&] {
      const Training run = copies_of(size);
      Accelerator accelerator(options_of(run), everyone);
      Stack stack = make_stack(run, 0);
      AdamW adamw(stack->parameters());
      accelerator.prepare(stack, adamw);
      LocalSGD local(accelerator, stack, std::move(how));
      local.finish();
    });
  };
  EXPECT_NE(open(world + 1, {}).find("shard_size=" + std::to_string(world + 1)), std::string::npos);
  EXPECT_NE(open(world, {}).find("shards of one replica"), std::string::npos);
  EXPECT_NE(open(1, {.on_peer_failure = PeerFailure::survivors}).find("survivors"),
            std::string::npos);
  EXPECT_EQ(open(1, {}), "nothing was thrown");
}

// Inside the scope the replicas differ. A state contains all of them.
TEST(Hsdp, AStateSavedInsideAScopeGoesOn) {
  const int world = testing_support::test_world().world_size;
  if (world != 4) {
    return;
  }
  const auto folder = state_test::common_folder();
  const auto steps = [&](Accelerator& accelerator, Stack& stack,
                         PreparedOptimizer<torch::optim::Optimizer>& optimizer, LocalSGD& local,
                         size_t from, size_t to) {
    const auto rows = batches(24);
    for (size_t i = from; i < to; ++i) {
      auto window = accelerator.accumulate(stack);
      const size_t mine = 4 * i + static_cast<size_t>(accelerator.process_index());
      accelerator.backward(loss_of(stack, rows[mine]), 1);
      optimizer.step();
      optimizer.zero_grad();
      local.step();
    }
  };
  std::vector<Tensor> straight;
  for (const bool loads : {false, true}) {
    Training run = copies_of(2);
    run.adamw = true;
    Accelerator accelerator(options_of(run), testing_support::fresh_communicator());
    Stack stack = make_stack(run, 0);
    const auto own = optimizer_of(run, stack);
    auto [model, optimizer] = accelerator.prepare(stack, *own);
    LocalSGD local(accelerator, stack, {.local_sgd_steps = 2});
    if (loads) {
      accelerator.load_state(folder / "state");
    } else {
      steps(accelerator, stack, optimizer, local, 0, 3);
      accelerator.save_state(folder / "state");
    }
    steps(accelerator, stack, optimizer, local, 3, 6);
    local.finish();
    const auto now = whole_parameters(accelerator, stack);
    for (size_t i = 0; loads && i < now.size(); ++i) {
      EXPECT_TRUE(torch::equal(now[i], straight[i])) << i;
    }
    straight = now;
    accelerator.end_training();
  }
}

} // namespace hasten::sharded_test
