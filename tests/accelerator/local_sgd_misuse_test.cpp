// What a scope of LocalSgd refuses, and its state. Worlds 1 to 4.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <nlohmann/json.hpp>

#include "accelerator/local_sgd_rig.h"
#include "accelerator/state_rig.h"
#include "hasten/base/error.h"
#include "hasten/base/log.h"

namespace hasten::accelerator_test {

using state_test::input_error;

void expect_in(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

struct Scoped {
  explicit Scoped(Accelerator& accelerator)
      : inner(net->parameters(), 0.1),
        handles(accelerator.prepare(net, inner)) {}
  void step(Accelerator& accelerator) {
    accelerator.backward(mean_loss(net, make_batches(2)[1]));
    std::get<1>(handles).step();
    std::get<1>(handles).zero_grad();
  }
  Net net = net_of_seed(1);
  torch::optim::SGD inner;
  std::tuple<Net, PreparedOptimizer<torch::optim::SGD>> handles;
};

TEST(LocalSgdMisuse, IsNamed) {
  auto accelerator = local_accelerator(2);
  const bool alone = accelerator.num_processes() == 1;
  Net stranger;
  expect_in(
      input_error([&] { LocalSgd(accelerator, stranger, {}); }),
      "a model that was not prepared");
  Net without = net_of_seed(1);
  accelerator.prepare(without);
  Scoped scoped(accelerator);
  expect_in(
      input_error([&] { LocalSgd(accelerator, scoped.net, {.steps = 0}); }),
      "steps=0");
  const std::vector<std::pair<LocalSgdOptions, std::string>> bad{
      {{.post_local_start = -1}, "post_local_start=-1"},
      {{.steps = 4, .inner_steps = 3}, "inner_steps=3"},
      {{.steps = 4, .delay = 5}, "delay=5"},
      {{.steps = 4, .delay = 3, .average = {.fragments = 2}}, "delay=3"},
      {{.delay = 1, .average = {.transactional = false}}, "delay=1"},
      {{.steps = 2, .average = {.fragments = 3}}, "fragments=3"}};
  for (const auto& [options, text] : bad) {
    expect_in(
        input_error([&] { LocalSgd(accelerator, scoped.net, options); }), text);
  }
  expect_in(
      input_error([&] {
        LocalSgd(accelerator, scoped.net, {.average = {.slice_mb = -1}});
        if (alone) {
          throw InputError("x", "slice_mb=-1"); // nothing is averaged
        }
      }),
      "slice_mb=-1");
  if (alone) {
    return;
  }
  expect_in(
      input_error([&] { LocalSgd(accelerator, without, {}); }),
      "no prepared optimizer has parameters of the model");
  expect_in(
      input_error([&] {
        LocalSgd(
            accelerator,
            scoped.net,
            {.steps = accelerator.process_index() + 2});
      }),
      "rank 1 opens a scope with");
  LocalSgd open(accelerator, scoped.net, {.steps = 2});
  expect_in(
      input_error([&] { LocalSgd(accelerator, scoped.net, {}); }),
      "a scope of this accelerator is open already");
  {
    auto window = accelerator.accumulate(scoped.net);
    accelerator.backward(mean_loss(scoped.net, make_batches(2)[1]), 4.0);
    EXPECT_FALSE(open.step()) << "inside a window";
  }
  auto two = accelerator.accumulate(scoped.net);
  accelerator.backward(mean_loss(scoped.net, make_batches(2)[1]), 4.0);
  torch::optim::SGD other(scoped.net->parameters(), 0.1);
  accelerator.prepare(other);
  expect_in(
      input_error([&] { open.step(); }),
      "an optimizer of the model was prepared inside the scope");
  open.finish();
}

TEST(LocalSgdMisuse, AScopeThatIsNotFinishedIsAnErrorInTheLog) {
  auto accelerator = local_accelerator();
  Scoped scoped(accelerator);
  std::string lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines += line; });
  {
    LocalSgd scope(accelerator, scoped.net, {.steps = 4});
    scoped.step(accelerator);
    scope.step();
  }
  set_log_sink({});
  if (accelerator.num_processes() > 1) {
    expect_in(lines, "destroyed without finish()");
  } else {
    EXPECT_EQ(lines, "");
  }
  scoped.step(accelerator); // reduces again
}

// The loop of a user, from where the state stands.
struct LocalSession : state_test::Session {
  using Session::Session;
  void run(
      LocalSgdOptions options,
      const std::filesystem::path& load,
      const std::function<void(state_test::Place)>& at = {}) {
    auto [model, optimizer, batches, scheduler] = prepared();
    LocalSgd local_sgd(accelerator, model, std::move(options));
    if (!load.empty()) {
      accelerator.load_state(load);
    }
    for (auto epoch = static_cast<int64_t>(batches.epoch());
         epoch < state_test::kEpochs;
         ++epoch) {
      batches.set_epoch(static_cast<uint64_t>(epoch));
      int64_t turn = 0;
      for (const Batch& batch : batches) {
        auto window = accelerator.accumulate(model);
        accelerator.backward(torch::nn::functional::cross_entropy(
            model->forward(batch["x"]), batch["y"]));
        optimizer.step();
        scheduler.step();
        optimizer.zero_grad();
        local_sgd.step();
        if (at) {
          at({epoch, turn});
        }
        ++turn;
      }
    }
    local_sgd.finish();
  }
};

TEST(LocalSgdState, ResumedInMidRoundItIsTheUninterruptedRunBitForBit) {
  const auto communicator = testing_support::fresh_communicator();
  const auto folder = state_test::common_folder();
  const int64_t rows = 24 * communicator->world_size();
  // An outer step with momentum; a difference that is on its way when the state is
  // written.
  const std::vector<std::function<LocalSgdOptions()>> kinds{
      [] {
        return LocalSgdOptions{
            .steps = 5, .average = {.outer = std::make_shared<DiLoCo>()}};
      },
      [] {
        return LocalSgdOptions{
            .steps = 5, .delay = 3, .delay_only_if_it_pays = false};
      },
      // Saved before and after plain training has ended, with moments averaged.
      [] {
        return LocalSgdOptions{
            .steps = 3,
            .post_local_start = 15,
            .moments = MomentPolicy::average};
      }};
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    SCOPED_TRACE(kind);
    LocalSession saving(communicator, 2, rows);
    saving.run(kinds[kind](), {}, [&](state_test::Place here) {
      if (here.epoch == 1 && (here.turn == 3 || here.turn == 6)) {
        saving.accelerator.save_state(
            folder / ("state-" + std::to_string(here.turn)));
      }
    });
    const auto expected = saving.everything();
    for (const char* name :
         {"state-3", "state-6"}) { // a whole window, and half
      LocalSession resumed(communicator, 2, rows, /*weights=*/99);
      resumed.run(kinds[kind](), folder / name);
      state_test::expect_equal_bits(resumed.everything(), expected);
    }
  }
  if (communicator->world_size() > 1) {
    LocalSession outside(communicator, 2, rows);
    outside.prepared();
    expect_in(
        input_error(
            [&] { outside.accelerator.load_state(folder / "state-3"); }),
        "inside a LocalSgd scope");
  }
}

} // namespace hasten::accelerator_test
