// A model of each family on several ranks: DDP, shards and Local SGD take the steps of one process
// with the joined batch.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "hasten/local_sgd/local_sgd.h"
#include "hasten/models/auto_model.h"
#include "local_sgd/local_sgd_rig.h"
#include "models/small_family.h"
#include "support/on_device.h"
#include "support/run_device.h"
#include "support/world.h"

namespace hasten::model_families_test {

using namespace testing_support;
using at::Tensor;

constexpr int64_t kRows = 3; // of a rank
constexpr int64_t kSteps = 3;

struct Setting {
  const char* name;
  Strategy strategy = Strategy::ddp;
  bool checkpointing = false;
  bool local_sgd = false;
};

PreTrainedModel make(const std::string& type, ModelTask task) {
  torch::manual_seed(5);
  PreTrainedModel model = model_from_config(small_config(type), task);
  model->to(run_device(), torch::kDouble);
  return model;
}

/// Of one step and all ranks.
ModelInputs joined_batch(int64_t step, int64_t ranks) {
  torch::manual_seed(100 + static_cast<uint64_t>(step));
  ModelInputs inputs = small_inputs(kRows * ranks, 13);
  inputs.labels = torch::randint(3, {kRows * ranks});
  return inputs;
}

Tensor summed_loss(PreTrainedModel& model, const ModelInputs& inputs, int64_t first, int64_t rows) {
  const auto part = [&](const Tensor& x) { return on_device::moved(x.narrow(0, first, rows)); };
  const Tensor logits =
      model->forward({part(inputs.input_ids), part(inputs.attention_mask)}).logits;
  const Tensor of_samples = model->task() == ModelTask::sequence_classification
                                ? logits
                                : logits.select(1, 0); // of the first token, so all count alike
  return torch::nn::functional::cross_entropy(
      of_samples, part(inputs.labels),
      torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum));
}

torch::optim::SGD plain_sgd(PreTrainedModel& model) {
  return torch::optim::SGD(model->parameters(), torch::optim::SGDOptions(0.1));
}

std::vector<Tensor> copied(PreTrainedModel& model) {
  std::vector<Tensor> values;
  for (const Tensor& parameter : model->parameters()) {
    values.push_back(parameter.detach().cpu().clone());
  }
  return values;
}

std::vector<Tensor> of_one_process(const std::string& type, ModelTask task, int64_t ranks) {
  PreTrainedModel model = make(type, task);
  auto optimizer = plain_sgd(model);
  for (int64_t step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const Tensor loss = summed_loss(model, joined_batch(step, ranks), 0, kRows * ranks);
    (loss / static_cast<double>(kRows * ranks)).backward();
    optimizer.step();
  }
  return copied(model);
}

std::vector<Tensor> of_ranks(const std::string& type, ModelTask task, const Setting& setting) {
  AcceleratorOptions options{.strategy = setting.strategy};
  options.seed.reset();
  Accelerator accelerator(options, fresh_communicator());
  PreTrainedModel own = make(type, task);
  if (setting.checkpointing) {
    own->gradient_checkpointing_enable();
  }
  auto sgd = plain_sgd(own);
  auto [model, optimizer] = accelerator.prepare(own, sgd);
  std::optional<LocalSGD> local_sgd;
  if (setting.local_sgd) {
    local_sgd.emplace(accelerator, model, LocalSGDOptions{.local_sgd_steps = 1});
  }
  for (int64_t step = 0; step < kSteps; ++step) {
    auto window = accelerator.accumulate(model);
    accelerator.backward(summed_loss(own, joined_batch(step, accelerator.num_processes()),
                                     accelerator.process_index() * kRows, kRows),
                         kRows);
    optimizer.step();
    optimizer.zero_grad();
    if (local_sgd) {
      local_sgd->step();
    }
  }
  if (local_sgd) {
    local_sgd->finish();
  }
  std::vector<Tensor> values;
  accelerator.summon_full_params([&] { values = copied(own); }, model);
  accelerator.end_training();
  return values;
}

TEST(ModelFamilies, RanksTakeTheStepsOfOneProcessWithTheJoinedBatch) {
  const int ranks = test_world().world_size;
  const Setting settings[] = {
      {"ddp"},
      {.name = "ddp, checkpointed", .checkpointing = true},
      {.name = "fsdp", .strategy = Strategy::fsdp},
      {.name = "fsdp, checkpointed", .strategy = Strategy::fsdp, .checkpointing = true},
      {.name = "Local SGD", .local_sgd = true}};
  for (const std::string& type : model_types()) {
    for (const ModelTask task : model_family(type).tasks) {
      if (task == ModelTask::token_classification) {
        continue; // what a masked_lm has and no more
      }
      const auto expected = of_one_process(type, task, ranks);
      for (const Setting& setting : settings) {
        SCOPED_TRACE(type + ", " + std::string(task_name(task)) + ", " + setting.name);
        const auto values = of_ranks(type, task, setting);
        if (test_world().rank > 0) {
          continue; // rank 0 has the whole parameters
        }
        ASSERT_EQ(values.size(), expected.size());
        for (size_t i = 0; i < values.size(); ++i) {
          EXPECT_LE((values[i] - expected[i]).abs().max().item<double>(), 1e-10) << i;
        }
      }
    }
  }
}

} // namespace hasten::model_families_test
