// Adapters on several ranks: only they are trained, sent and saved.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <filesystem>

#include "hasten/accelerator/accelerator.h"
#include "hasten/io/safetensors.h"
#include "hasten/local_sgd/local_sgd.h"
#include "hasten/models/lora.h"
#include "models/small_family.h"
#include "support/communicator.h"
#include "support/temporary_folder.h"

namespace hasten::lora_world_test {

using namespace testing_support;
using Values = std::map<std::string, at::Tensor>;

constexpr int64_t kRows = 12; // of a joined batch: a multiple of 1, 2, 3 and 4
constexpr int64_t kTokens = 6;

static std::vector<at::Tensor> trained_of(const torch::nn::Module& model) {
  std::vector<at::Tensor> trained;
  for (const auto& parameter : model.parameters()) {
    if (parameter.requires_grad()) {
      trained.push_back(parameter);
    }
  }
  return trained;
}

static Values values_of(const torch::nn::Module& model, bool trained) {
  Values values;
  for (const auto& item : model.named_parameters()) {
    if (item.value().requires_grad() == trained) {
      values[item.key()] = item.value().detach().clone();
    }
  }
  return values;
}

static void expect_near(const Values& a, const Values& b, double tolerance) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, value] : a) {
    EXPECT_TRUE(at::allclose(value, b.at(name), 0, tolerance)) << name; // also of empty shards
  }
}

/// Equal on all ranks.
static PreTrainedModel adapted_llama() {
  torch::manual_seed(9);
  PreTrainedModel model = model_from_config(small_config("llama"), ModelTask::causal_lm);
  get_peft_model(model.ptr(), {.r = 2,
                               .target_modules = {"q_proj", "v_proj", "down_proj", "embed_tokens"},
                               .use_dora = true});
  return model;
}

/// A module that this library does not know, [rows, kTokens] numbers to [rows, 3].
static torch::nn::Sequential adapted_sequential(const std::string& bias = "none") {
  torch::manual_seed(9);
  torch::nn::Sequential model(torch::nn::Linear(kTokens, 24), torch::nn::ReLU(),
                              torch::nn::Linear(24, 24), torch::nn::ReLU(),
                              torch::nn::Linear(24, 3));
  get_peft_model(model.ptr(), {.r = 2, .target_modules = {"all-linear"}, .bias = bias});
  return model;
}

static at::Tensor summed_loss(PreTrainedModel& model, const at::Tensor& ids) {
  return at::cross_entropy_loss(model->logits({ids}).flatten(0, 1), ids.flatten(), {},
                                at::Reduction::Sum);
}

static at::Tensor summed_loss(torch::nn::Sequential& model, const at::Tensor& ids) {
  return at::cross_entropy_loss(model->forward(ids.to(at::kFloat) / 32).to(at::kFloat),
                                ids.select(1, 0).remainder(3), {}, at::Reduction::Sum);
}

static at::Tensor joined_batch(int64_t step) {
  auto generator = torch::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(70 + step));
  return torch::randint(4, kSmallVocab, {kRows, kTokens}, generator, torch::kLong);
}

template <typename Model>
Values train_alone(Model model, int64_t steps) {
  torch::optim::SGD optimizer(trained_of(*model), torch::optim::SGDOptions(0.02).momentum(0.9));
  for (int64_t step = 0; step < steps; ++step) {
    optimizer.zero_grad();
    (summed_loss(model, joined_batch(step)) / kRows).backward();
    optimizer.step();
  }
  return values_of(*model, true);
}

struct Run {
  Strategy strategy = Strategy::ddp;
  Precision precision = Precision::no;
  int64_t steps = 4;
};

static AcceleratorOptions options_of(const Run& run) {
  AcceleratorOptions options;
  options.strategy = run.strategy;
  options.mixed_precision = run.precision;
  options.save_frozen_weights = false;
  options.device = "cpu";
  return options;
}

template <typename Model, typename Optimizer>
void steps_of(Accelerator& accelerator, Model& model, Optimizer& optimizer, int64_t from,
              int64_t to, LocalSGD* local = nullptr) {
  const int64_t rows = kRows / accelerator.num_processes();
  for (int64_t step = from; step < to; ++step) {
    const at::Tensor ids = joined_batch(step).narrow(0, accelerator.process_index() * rows, rows);
    auto window = accelerator.accumulate(model);
    const at::Tensor loss = [&] {
      const auto autocast = accelerator.autocast();
      return summed_loss(model, ids);
    }();
    accelerator.backward(loss, rows);
    optimizer.step();
    optimizer.zero_grad();
    if (local != nullptr) {
      local->step();
    }
  }
}

/// The adapters' values after training; the frozen weights must not move.
template <typename Model>
Values train(Model model, const Run& run) {
  const Values frozen = values_of(*model, false);
  Accelerator accelerator(options_of(run), fresh_communicator());
  torch::optim::SGD own(trained_of(*model), torch::optim::SGDOptions(0.02).momentum(0.9));
  auto [prepared, optimizer] = accelerator.prepare(model, own);
  steps_of(accelerator, prepared, optimizer, 0, run.steps);
  Values trained;
  accelerator.summon_full_params(
      [&] {
        trained = values_of(*model, true);
        if (accelerator.process_index() == 0) {
          expect_near(values_of(*model, false), frozen, 0);
        }
      },
      prepared);
  const bool first = accelerator.process_index() == 0;
  accelerator.end_training();
  return first ? trained : Values();
}

TEST(LoraWorld, RanksEqualOneRankOnTheJoinedBatch) {
  const OneThread one_thread;
  const Values llama = train_alone(adapted_llama(), 4);
  const Values sequential = train_alone(adapted_sequential("all"), 4);
  for (const Strategy strategy : {Strategy::ddp, Strategy::fsdp}) {
    SCOPED_TRACE(spelling(strategy));
    for (const auto& [ours, expected] :
         {std::pair(train(adapted_llama(), {.strategy = strategy}), llama),
          std::pair(train(adapted_sequential("all"), {.strategy = strategy}), sequential)}) {
      if (!ours.empty()) { // rank 0
        expect_near(ours, expected, 1e-5);
      }
    }
  }
}

TEST(LoraWorld, Bf16TrainsAdaptersOfAForeignModule) {
  const OneThread one_thread;
  const Values expected = train_alone(adapted_sequential(), 4);
  double moved = 0; // B is 0 at first
  for (const auto& [name, value] : expected) {
    moved = name.find("lora_B") == std::string::npos
                ? moved
                : std::max(moved, value.abs().max().item<double>());
  }
  for (const Strategy strategy : {Strategy::ddp, Strategy::fsdp}) {
    SCOPED_TRACE(spelling(strategy));
    torch::nn::Sequential model = adapted_sequential();
    cast_frozen_weights(*model, at::kBFloat16);
    const Values ours = train(model, {.strategy = strategy, .precision = Precision::bf16});
    if (!ours.empty()) {
      expect_near(ours, expected, 0.05 * moved);
    }
  }
}

TEST(LoraWorld, LocalSgdSendsOnlyAdapters) {
  const OneThread one_thread;
  PreTrainedModel model = adapted_llama();
  const auto [trainable, all] = get_nb_trainable_parameters(*model);
  Accelerator accelerator(options_of({}), fresh_communicator());
  torch::optim::SGD own(trained_of(*model), torch::optim::SGDOptions(0.02).momentum(0.9));
  auto [prepared, optimizer] = accelerator.prepare(model, own);
  const Values frozen = values_of(*model, false);
  LocalSGD local(accelerator, prepared, {.local_sgd_steps = 2});
  steps_of(accelerator, prepared, optimizer, 0, 4, &local);
  local.finish();
  if (accelerator.num_processes() > 1) {
    EXPECT_GT(local.report().rounds, 0);
    EXPECT_GT(local.report().bytes, 0);
    // An all-reduce sends at most twice what it reduces.
    EXPECT_LE(local.report().bytes, local.report().rounds * (2 * 4 * trainable + 4096));
    EXPECT_LT(trainable, all / 4);
  }
  expect_near(values_of(*model, false), frozen, 0);
  accelerator.end_training();
}

TEST(LoraWorld, AStateHasNoFrozenWeightsAndResumesBitForBit) {
  const OneThread one_thread;
  for (const Strategy strategy : {Strategy::ddp, Strategy::fsdp}) {
    SCOPED_TRACE(spelling(strategy));
    const auto communicator = fresh_communicator();
    const auto shared = std::make_shared<TemporaryFolder>(); // rank 0's
    const std::filesystem::path folder =
        std::filesystem::path(
            communicator->broadcast_object(shared->path().string(), "folder").get<std::string>()) /
        "state";
    const auto run = [&](int64_t from, int64_t to) {
      Accelerator accelerator(options_of({.strategy = strategy}), fresh_communicator());
      PreTrainedModel model = adapted_llama();
      torch::optim::SGD own(trained_of(*model), torch::optim::SGDOptions(0.02).momentum(0.9));
      auto [prepared, optimizer] = accelerator.prepare(model, own);
      if (from > 0) {
        accelerator.load_state(folder);
      }
      steps_of(accelerator, prepared, optimizer, from, to);
      if (to == 2) {
        accelerator.save_state(folder);
      }
      const Values values = values_of(*model, true);
      accelerator.end_training();
      return values;
    };
    const Values whole = run(0, 4);
    run(0, 2);
    int64_t adapters = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder)) {
      if (entry.path().extension() == ".safetensors") {
        const SafetensorsReader reader(entry.path());
        for (const std::string& name : reader.names()) {
          EXPECT_EQ(name.find("q_proj.weight"), std::string::npos) << name;
          adapters += name.find("lora_A") != std::string::npos;
        }
      }
    }
    EXPECT_GT(adapters, 0);
    expect_near(run(2, 4), whole, 0);
    communicator->barrier("read the state");
  }
}

} // namespace hasten::lora_world_test
