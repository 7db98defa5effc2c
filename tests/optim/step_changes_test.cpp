// Changes of groups and states between the steps of one optimizer. A new optimizer, which makes its
// first step, is the reference.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <utility>

#include "hasten/optim/make_optimizer.h"
#include "hasten/optim/optimizer_state.h"
#include "support/error_of.h"
#include "support/on_device.h"

namespace hasten::step_changes_test {

using Tensors = std::vector<at::Tensor>;
using Optimizer = torch::optim::Optimizer;

struct Trained {
  Tensors parameters;
  std::unique_ptr<Optimizer> optimizer;

  Trained(const std::string& name, const std::string& args, const Tensors& values) {
    for (const at::Tensor& value : values) {
      parameters.push_back(value.detach().clone().requires_grad_());
    }
    optimizer = make_optimizer(name, {torch::optim::OptimizerParamGroup(parameters)},
                               {.learning_rate = 0.1, .args = args});
  }
  void step(int64_t seed) {
    torch::manual_seed(seed);
    for (at::Tensor& parameter : parameters) {
      parameter.mutable_grad() = torch::randn_like(parameter.detach());
    }
    optimizer->step();
  }
  auto& state(size_t i) { return optimizer->state()[parameters[i].unsafeGetTensorImpl()]; }
  ParameterNames names() const {
    ParameterNames names;
    for (const at::Tensor& parameter : parameters) {
      names[parameter.unsafeGetTensorImpl()] = "p" + std::to_string(names.size());
    }
    return names;
  }
  void load(const Trained& other) {
    NamedTensors tensors;
    nlohmann::json values;
    save_optimizer_state(*other.optimizer, other.names(), tensors, values);
    prepare_optimizer_load(*optimizer, names(), tensors, values)();
  }
};

const Tensors& values() {
  static const Tensors tensors = {on_device::ones({40, 30}), on_device::ones({7}),
                                  on_device::ones({3, 5, 4})};
  return tensors;
}

/// Calls test(run, expect_as_new) for each optimizer, where `run` has made steps.
/// expect_as_new(change) expects that the next step of `run` equals that of a new optimizer with
/// the same parameters after change(the new one).
template <typename Test>
void with_each_optimizer(const Test& test) {
  const std::vector<std::pair<std::string, std::string>> all = {{"adam", ""},
                                                                {"adamw", "amsgrad=true"},
                                                                {"sgd", ""},
                                                                {"sgd", "momentum=0.9"},
                                                                {"lion", ""},
                                                                {"adafactor", "beta1=0.9"},
                                                                {"adamw", "bf16_moments=true"},
                                                                {"adamw_8bit", "min_8bit_size=64"}};
  for (const auto& [name, args] : all) {
    SCOPED_TRACE(name + " " + args);
    Trained run(name, args, values());
    int64_t seed = 0;
    run.step(++seed);
    run.step(++seed);
    test(run, [&, name = name, args = args](const auto& change) {
      Trained fresh(name, args, run.parameters);
      change(fresh);
      run.step(++seed);
      fresh.step(seed);
      for (size_t i = 0; i < values().size(); ++i) {
        EXPECT_TRUE(torch::equal(run.parameters[i], fresh.parameters[i])) << i;
      }
    });
  }
}

TEST(StepChanges, AStateSetsTheOptionsUnlessTheyAreKept) {
  Trained saved("adamw", "beta1=0.5", values());
  saved.step(1);
  for (const bool keep : {false, true}) {
    Trained other("adamw", "", values());
    other.optimizer =
        make_optimizer("adamw", {torch::optim::OptimizerParamGroup(other.parameters)},
                       {.learning_rate = 0.2, .weight_decay = 0.3, .keep_options = keep});
    other.load(saved);
    const auto& options =
        static_cast<torch::optim::AdamWOptions&>(other.optimizer->param_groups()[0].options());
    EXPECT_EQ(options.lr(), keep ? 0.2 : 0.1);
    EXPECT_EQ(options.weight_decay(), keep ? 0.3 : 0.0);
    EXPECT_EQ(std::get<0>(options.betas()), keep ? 0.9 : 0.5);
    EXPECT_NE(other.state(0), nullptr); // moments are loaded anyway
  }
}

TEST(StepChanges, ALaterGroupThatRepeatsParametersIsSeen) {
  with_each_optimizer([](Trained& run, const auto& expect_as_new) {
    const Tensors& p = run.parameters;
    run.optimizer->state().clear(); // torch refuses a parameter that has a state
    run.optimizer->add_param_group(torch::optim::OptimizerParamGroup({p[0], p[1], p[0]}));
    expect_as_new([](Trained&) {});
    EXPECT_EQ(run.optimizer->param_groups()[1].params().size(), 0U);
  });
}

TEST(StepChanges, AParameterInThePlaceOfAnotherIsSeen) {
  with_each_optimizer([](Trained& run, const auto& expect_as_new) {
    run.optimizer->state().clear();
    Tensors& listed = run.optimizer->param_groups()[0].params();
    listed[2] = listed[0];
    expect_as_new([](Trained& fresh) { fresh.optimizer->param_groups()[0].params().pop_back(); });
    EXPECT_EQ(listed.size(), 2U);
  });
}

TEST(StepChanges, LoadedReplacedAndClearedStatesAreSeen) {
  with_each_optimizer([](Trained& run, const auto& expect_as_new) {
    expect_as_new([&](Trained& fresh) { fresh.load(run); });
    for (size_t i = 0; i < values().size(); ++i) { // new tensors in the same states
      visit_state_tensors(*run.state(i), [](at::Tensor& tensor) { tensor = tensor * 0.5; });
    }
    expect_as_new([&](Trained& fresh) { fresh.load(run); });
    for (size_t i = 0; i < values().size(); ++i) { // new states with the same tensors
      run.state(i) = run.state(i)->clone();
    }
    expect_as_new([&](Trained& fresh) { fresh.load(run); });
    run.load(run); // new states with new tensors
    expect_as_new([&](Trained& fresh) { fresh.load(run); });
    run.optimizer->state().erase(run.parameters[1].unsafeGetTensorImpl());
    expect_as_new([&](Trained& fresh) { fresh.load(run); });
    run.optimizer->state().clear();
    expect_as_new([](Trained&) {});
  });
}

// The usual way to page a state out and in: the tensors stay, and their memory changes.
TEST(StepChanges, AStateWithOtherMemoryIsSeen) {
  using Change = std::function<at::Tensor(const at::Tensor&)>;
  const std::vector<Change> changes = {
      [](const at::Tensor& x) { return (x * 0.5).clone(); },
      [](const at::Tensor& x) { return (x * 0.5).to(at::kDouble); },
      [](const at::Tensor& x) { return (x * 0.5).transpose(0, -1).contiguous().transpose(0, -1); }};
  with_each_optimizer([&](Trained& run, const auto& expect_as_new) {
    for (const Change& change : changes) {
      for (size_t i = 0; i < values().size(); ++i) {
        visit_state_tensors(*run.state(i), [&](at::Tensor& tensor) {
          if (tensor.defined()) {
            tensor.set_data(change(tensor));
          }
        });
      }
      expect_as_new([&](Trained& fresh) { fresh.load(run); });
    }
    bool resized = false;
    visit_state_tensors(*run.state(0), [&](at::Tensor& tensor) {
      if (tensor.defined() && !std::exchange(resized, true)) {
        tensor.resize_({2, 3});
      }
    });
    const std::string what = testing_support::error_of([&] { run.step(99); });
    EXPECT_EQ(what.find("the state of a parameter has shape=[2, 3]") != std::string::npos, resized)
        << what;
  });
}

TEST(StepChanges, AStateWithoutMemoryIsAnError) {
  Trained run("adamw", "", values());
  run.step(1);
  visit_state_tensors(*run.state(0), [](at::Tensor& tensor) {
    if (tensor.defined()) {
      tensor.storage().set_data_ptr_noswap(at::DataPtr(nullptr, at::kCPU));
    }
  });
  const std::string what = testing_support::error_of([&] { run.step(2); });
  EXPECT_NE(what.find("its memory"), std::string::npos) << what;
}

TEST(StepChanges, AParameterWithOtherMemoryIsSeen) {
  with_each_optimizer([](Trained& run, const auto& expect_as_new) {
    for (at::Tensor& parameter : run.parameters) {
      parameter.set_data(parameter.detach() + 1);
    }
    expect_as_new([&](Trained& fresh) { fresh.load(run); });
    run.optimizer->state().clear();
    run.parameters[0].set_data(on_device::ones({6, 5}).t());
    expect_as_new([](Trained&) {});
    run.parameters[1].set_data(on_device::ones({9}));
    expect_as_new([&](Trained& fresh) {
      run.optimizer->state().clear();
      fresh.optimizer->state().clear();
    });
  });
}

} // namespace hasten::step_changes_test
