// The Trainer on a device that is not the CPU trains as on the CPU, on 1 and 2 ranks. Kernels of
// the test device are the CPU's, so losses differ only where hasten has kernels of its own.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <map>

#include "hasten/accelerator/accelerator.h"
#include "hasten/models/auto_model.h"
#include "hasten/trainer/trainer.h"
#include "support/device_backend.h"
#include "support/spawn.h"
#include "support/temporary_folder.h"
#include "trainer/toy_text.h"

namespace hasten::device_trainer_test {

using testing_support::FaultRank;
using testing_support::TemporaryFolder;

PreTrainedModel bert() {
  PreTrainedConfig config = AutoConfig::from_shape("bert-tiny", toy::kWords);
  config.hidden_dropout_prob = config.attention_probs_dropout_prob = 0;
  config.max_position_embeddings = 16;
  config.id2label = {"no", "maybe", "yes"};
  torch::manual_seed(5);
  return AutoModelForSequenceClassification::from_config(config);
}

struct Trained {
  std::vector<double> losses{}; // of the steps, then of the evaluation
  std::map<std::string, at::Tensor> parameters{}; // on the CPU
};

Trained train(Communicator& world, const std::string& device, TrainingArguments a) {
  static int runs = 0;
  PreTrainedModel model = bert();
  AcceleratorOptions options = accelerator_options(a);
  options.device = device;
  const auto accelerator = std::make_shared<Accelerator>(
      options, world.duplicate({.name = "run " + std::to_string(runs++)}));
  const auto loss = [model](const Batch& rows) mutable {
    const at::Tensor logits = model->forward({rows["input_ids"], rows["attention_mask"]}).logits;
    return LossOutput{torch::nn::functional::cross_entropy(
                          logits, rows["labels"],
                          torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum)),
                      static_cast<double>(rows.rows()), logits};
  };
  const auto texts = std::make_shared<toy::Texts>(25);
  Trainer trainer(model.ptr(), loss, a, texts, std::make_shared<toy::Texts>(9),
                  classification_metrics(toy::kLabels), accelerator);
  trainer.train();
  Trained run{toy::history(trainer, "loss"), {}};
  run.losses.push_back(trainer.evaluate().at("eval_loss"));
  accelerator->summon_full_params(
      [&] {
        for (const auto& entry : model->named_parameters()) {
          run.parameters[entry.key()] = entry.value().detach().to(at::kCPU, at::kDouble).clone();
        }
      },
      model.ptr());
  return run;
}

TrainingArguments arguments() {
  TrainingArguments a = toy::arguments();
  a.per_device_train_batch_size = 4;
  a.num_train_epochs = 2;
  a.learning_rate = 1e-3;
  return a;
}

void expect_alike(const Trained& device, const Trained& cpu, double tolerance) {
  ASSERT_EQ(device.losses.size(), cpu.losses.size());
  for (size_t i = 0; i < cpu.losses.size(); ++i) {
    EXPECT_NEAR(device.losses[i], cpu.losses[i], tolerance) << "record " << i;
  }
  for (const auto& [name, value] : cpu.parameters) {
    EXPECT_LE((device.parameters.at(name) - value).abs().max().item<double>(), 10 * tolerance)
        << name;
  }
}

HASTEN_RANK_FUNCTION(TrainOnBothDevices) {
  const auto world = testing_support::device_world(rank.world());
  const auto compare = [&](const char* what, const TrainingArguments& a, double tolerance) {
    SCOPED_TRACE(what);
    expect_alike(train(*world, "test_device", a), train(*world, "cpu", a), tolerance);
  };
  TrainingArguments a = arguments();
  compare("ddp", a, 1e-5);
  a.gradient_accumulation_steps = 2;
  a.gradient_checkpointing = "full";
  compare("ddp, checkpointing, two batches a step", a, 1e-5);
  a.gradient_checkpointing = "ops";
  a.strategy = Strategy::fsdp;
  compare("fsdp, operators kept, two batches a step", a, 1e-5);
  a = arguments();
  a.bf16 = true;
  compare("bf16", a, 0.03);
  a = arguments();
  a.local_sgd_steps = 2;
  compare("Local SGD", a, 1e-5);
  world->close();
}

TEST(DeviceTrainer, TrainsAsOnTheCpu) {
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    for (const auto& report : testing_support::spawn(ranks, "TrainOnBothDevices", {},
                                                     {.deadline = std::chrono::seconds(120)})) {
      EXPECT_EQ(report.error, "");
      EXPECT_EQ(report.end.code, 0);
    }
  }
}

HASTEN_RANK_FUNCTION(ResumeOnTheOtherDevice) {
  const auto world = testing_support::device_world(rank.world());
  const TemporaryFolder folder;
  TrainingArguments a = arguments();
  a.save_strategy = SaveStrategy::epoch;
  a.output_dir = folder / "whole";
  const Trained whole = train(*world, "cpu", a);
  for (const auto& [first, second] :
       {std::pair("cpu", "test_device"), std::pair("test_device", "cpu")}) {
    SCOPED_TRACE(first);
    TrainingArguments part = a;
    part.output_dir = folder / first;
    train(*world, first, part);
    part.resume_from_checkpoint = part.output_dir + "/checkpoint-7"; // after the first epoch
    part.output_dir += " resumed";
    const Trained resumed = train(*world, second, part);
    EXPECT_NEAR(resumed.losses.back(), whole.losses.back(), 1e-5);
  }
  world->close();
}

TEST(DeviceTrainer, AStateOfOneDeviceGoesOnOnAnother) {
  const auto reports = testing_support::spawn(1, "ResumeOnTheOtherDevice", {},
                                              {.deadline = std::chrono::seconds(60)});
  EXPECT_EQ(reports[0].error, "");
  EXPECT_EQ(reports[0].end.code, 0);
}

} // namespace hasten::device_trainer_test
