// Wrong uses of a scope of LocalSGD are errors. Worlds 1 to 4.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "accelerator/state_rig.h"
#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "local_sgd/local_sgd_rig.h"

namespace hasten::accelerator_test {

using state_test::input_error;

void expect_in(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << text;
}

struct Scoped {
  explicit Scoped(Accelerator& accelerator)
      : inner(net->parameters(), 0.1), handles(accelerator.prepare(net, inner)) {}
  void step(Accelerator& accelerator) {
    accelerator.backward(mean_loss(net, make_batches(2)[1]));
    std::get<1>(handles).step();
    std::get<1>(handles).zero_grad();
  }
  Net net = net_of_seed(1);
  torch::optim::SGD inner;
  std::tuple<Net, PreparedOptimizer<torch::optim::SGD>> handles;
};

TEST(LocalSGDMisuse, IsNamed) {
  auto accelerator = local_accelerator(2);
  const bool alone = accelerator.num_processes() == 1;
  Net stranger;
  expect_in(input_error([&] { LocalSGD(accelerator, stranger, {}); }),
            "a model that was not prepared");
  Net without = net_of_seed(1);
  accelerator.prepare(without);
  Scoped scoped(accelerator);
  expect_in(input_error([&] { LocalSGD(accelerator, scoped.net, {.local_sgd_steps = 0}); }),
            "steps=0");
  const std::vector<std::pair<LocalSGDOptions, std::string>> bad{
      {{.post_local_start = -1}, "post_local_start=-1"},
      {{.local_sgd_steps = 4, .inner_steps = 3}, "inner_steps=3"},
      {{.local_sgd_steps = 4, .delay = 5}, "delay=5"},
      {{.local_sgd_steps = 4, .delay = 3, .average = {.fragments = 2}}, "delay=3"},
      {{.delay = 1, .average = {.transactional = false}}, "delay=1"},
      {{.local_sgd_steps = 2, .average = {.fragments = 3}}, "fragments=3"}};
  for (const auto& [options, text] : bad) {
    expect_in(input_error([&] { LocalSGD(accelerator, scoped.net, options); }), text);
  }
  expect_in(input_error([&] {
              LocalSGD(accelerator, scoped.net, {.average = {.slice_mb = -1}});
              if (alone) {
                throw InputError("x", "slice_mb=-1"); // nothing is averaged
              }
            }),
            "slice_mb=-1");
  if (alone) {
    return;
  }
  expect_in(input_error([&] { LocalSGD(accelerator, without, {}); }),
            "no prepared optimizer has parameters of the model");
  expect_in(input_error([&] {
              LocalSGD(accelerator, scoped.net,
                       {.local_sgd_steps = accelerator.process_index() + 2});
            }),
            "rank 1 opens a scope with");
  LocalSGD open(accelerator, scoped.net, {.local_sgd_steps = 2});
  expect_in(input_error([&] { LocalSGD(accelerator, scoped.net, {}); }),
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
  expect_in(input_error([&] { open.step(); }),
            "an optimizer of the model was prepared inside the scope");
  open.finish();
}

TEST(LocalSGDMisuse, AScopeThatIsNotFinishedIsAnErrorInTheLog) {
  auto accelerator = local_accelerator();
  Scoped scoped(accelerator);
  std::string lines;
  set_log_sink([&](LogLevel, std::string_view line) { lines += line; });
  {
    LocalSGD scope(accelerator, scoped.net, {.local_sgd_steps = 4});
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

} // namespace hasten::accelerator_test
