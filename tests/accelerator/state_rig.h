// Shared by the tests of states: a model with dropout and a buffer, samples of different lengths,
// and a session: everything that a program makes before its loop.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/data/loader.h"
#include "hasten/optim/adamw.h"
#include "hasten/optim/schedule.h"
#include "support/communicator.h"
#include "support/on_device.h"
#include "support/temporary_folder.h"
#include "support/world.h"

namespace hasten::state_test {

struct RowsOfLengths : Dataset {
  explicit RowsOfLengths(int64_t count) : count(count) {}
  int64_t size() const override { return count; }
  int64_t length(int64_t i) const override { return 1 + (i * 7) % 9; }
  Batch collate(const std::vector<int64_t>& indices) const override {
    const auto rows = static_cast<int64_t>(indices.size());
    at::Tensor x = on_device::empty({rows, 5});
    at::Tensor y = on_device::empty({rows}, torch::kLong);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < 5; ++c) {
        const auto v = static_cast<double>(indices[r] * 5 + c);
        x[r][c] = std::sin(v);
      }
      y[r] = indices[r] % 3;
    }
    return {{{"x", x}, {"y", y}}, indices};
  }
  int64_t count;
};

struct DropNetImpl : torch::nn::Module {
  explicit DropNetImpl(int64_t width = 8) {
    first = register_module("first", torch::nn::Linear(5, width));
    second = register_module("second", torch::nn::Linear(width, 3));
    seen = register_buffer("seen", on_device::zeros({2}));
  }
  at::Tensor forward(const at::Tensor& x) {
    seen.add_(x.detach().sum());
    return second->forward(torch::dropout(torch::tanh(first->forward(x)), 0.3, is_training()));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  at::Tensor seen{};
};
TORCH_MODULE(DropNet);

inline AcceleratorOptions session_options(int64_t steps) {
  AcceleratorOptions options;
  options.gradient_accumulation_steps = steps;
  return options;
}

constexpr int64_t kEpochs = 3;

/// A place in the loop: after this turn of this epoch; turn -1: after the end of the epoch.
struct Place {
  int64_t epoch = 0;
  int64_t turn = 0;
};

struct Session {
  Session(std::shared_ptr<Communicator> communicator, int64_t steps, int64_t rows,
          uint64_t weights = 3, StateScope scope = StateScope::per_rank)
      : accelerator(session_options(steps), std::move(communicator)),
        net((torch::manual_seed(weights), DropNet())),
        adamw(net->parameters(), torch::optim::AdamWOptions(0.05)),
        schedule(adamw, linear_schedule(2, 60)),
        loader(std::make_shared<RowsOfLengths>(rows), {.batch_size = 2, .group_batch = 12}) {
    accelerator.register_for_checkpointing("notes", notes, scope);
  }

  struct Notes : Stateful {
    void save_state(NamedTensors& tensors, nlohmann::json& values) const override {
      values["losses"] = losses;
      tensors["last"] = on_device::tensor(losses, torch::kDouble);
    }
    void load_state(const NamedTensors& tensors, const nlohmann::json& values) override {
      if (tensors.count("last") == 0) {
        throw InputError("test::Notes", "no tensor last");
      }
      values.at("losses").get_to(losses);
    }
    // One value for each window in which this rank had a batch. A rank without a batch in an
    // epoch's last window has fewer values.
    std::vector<double> losses{};
  };

  /// The loop of a user, from the position of the state. Calls `at(place)` at the end of each
  /// turn's body and after each epoch.
  void train(const std::function<void(Place)>& at = {}) {
    auto [model, optimizer, batches, scheduler] = prepared();
    for (auto epoch = static_cast<int64_t>(batches.epoch()); epoch < kEpochs; ++epoch) {
      batches.set_epoch(static_cast<uint64_t>(epoch));
      int64_t turn = first_turn;
      first_turn = 0;
      for (const Batch& batch : batches) {
        auto window = accelerator.accumulate(model);
        rows.insert(rows.end(), batch.indices.begin(), batch.indices.end());
        accelerator.backward(
            torch::nn::functional::cross_entropy(model->forward(batch["x"]), batch["y"]));
        accelerator.clip_grad_norm_(model, 0.5);
        if (optimizer.step()) {
          notes.losses.push_back(accelerator.last_window().loss);
        }
        scheduler.step();
        optimizer.zero_grad();
        if (at) {
          at({epoch, turn});
        }
        ++turn;
      }
      if (at) {
        at({epoch, -1});
      }
    }
  }

  using Handles = decltype(std::declval<Accelerator&>().prepare(
      std::declval<DropNet&>(), std::declval<AdamW&>(), std::declval<DataLoader&>(),
      std::declval<LRScheduler&>()));
  Handles& prepared() {
    if (!handles) {
      handles.emplace(accelerator.prepare(net, adamw, loader, schedule));
      if (hook) {
        accelerator.register_comm_hook(std::get<0>(*handles), hook);
      }
    }
    return *handles;
  }

  /// Everything that must be equal to the last bit. [tensor]
  std::vector<at::Tensor> everything() {
    std::vector<at::Tensor> all;
    for (const auto& parameter : net->parameters()) {
      all.push_back(parameter.detach().clone());
      const auto found = adamw.state().find(parameter.unsafeGetTensorImpl());
      if (found != adamw.state().end()) {
        auto& state = static_cast<torch::optim::AdamWParamState&>(*found->second);
        all.push_back(state.exp_avg().clone());
        all.push_back(state.exp_avg_sq().clone());
        all.push_back(on_device::tensor(state.step()));
      }
    }
    all.push_back(net->seen.clone());
    all.push_back(on_device::tensor(notes.losses, torch::kDouble));
    all.push_back(on_device::tensor(schedule.get_last_lr(), torch::kDouble));
    all.push_back(on_device::rand({4})); // the generator's next numbers
    return all;
  }

  Accelerator accelerator;
  DropNet net;
  AdamW adamw;
  LRScheduler schedule;
  DataLoader loader;
  Notes notes{};
  std::shared_ptr<CommHook> hook{}; // registered after prepare()
  std::optional<Handles> handles{};
  int64_t first_turn = 0;
  std::vector<int64_t> rows{}; // that this rank got, in order
};

inline void expect_equal_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(torch::equal(a[i], b[i])) << i << "\n" << a[i] << "\n" << b[i];
  }
}

/// A folder that all ranks see; rank 0 makes it and removes it at the end of the test. Collective.
inline std::filesystem::path common_folder() {
  const auto store = testing_support::test_store();
  if (testing_support::test_world().rank == 0) {
    auto folder = std::make_shared<testing_support::TemporaryFolder>();
    testing_support::at_case_end([folder] {});
    store->set("state folder", folder->path().string());
  }
  return store->get_to_str("state folder");
}

inline void expect_within(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b,
                          double most) {
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    EXPECT_LE((a[i] - b[i]).abs().max().item<double>(), most) << i;
  }
}

/// Each strategy goes on from a state of each, of one rank alone, and from that rank's. `same`, `other`: by
/// how much a parameter may differ after a step on the same and on other shards. Collective.
template <typename Learner>
void expect_any_strategy_goes_on(double same, double other) {
  const auto folder = common_folder();
  const auto everyone = testing_support::fresh_communicator();
  const auto all = {Strategy::ddp, Strategy::zero1, Strategy::fsdp, Strategy::hsdp};
  for (const Strategy before : all) {
    const auto place = folder / strategy_name(before);
    Learner saving(before, everyone);
    saving.step(0);
    saving.step(1);
    saving.accelerator.save_state(place);
    const auto saved = saving.whole();
    saving.step(2);
    const auto later = saving.whole();
    for (const Strategy after : all) {
      SCOPED_TRACE(std::string(strategy_name(before)) + " to " + strategy_name(after));
      Learner then(after, everyone);
      then.step(5); // something else
      then.accelerator.load_state(place);
      expect_within(then.whole(), saved, 0);
      then.step(2);
      expect_within(then.whole(), later, before == after ? same : other);
    }
    everyone->barrier("loaded");
    if (everyone->is_main()) {
      SCOPED_TRACE("alone");
      Learner alone(Strategy::ddp, Communicator::create(World{}));
      alone.accelerator.load_state(place);
      expect_within(alone.whole(), saved, 0);
      alone.step(2);
      expect_within(alone.whole(), later, other);
      alone.accelerator.save_state(folder / "alone");
    }
    everyone->barrier("saved alone");
    Learner again(Strategy::fsdp, everyone);
    again.accelerator.load_state(folder / "alone");
    expect_within(again.whole(), later, other);
  }
}

template <typename Function>
std::string input_error(const Function& function) {
  try {
    function();
  } catch (const InputError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

} // namespace hasten::state_test
