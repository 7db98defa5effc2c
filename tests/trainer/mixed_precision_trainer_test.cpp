// bf16, fp16 and auto in a Trainer: records, saved state, errors and skipped steps.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/comm/communicator.h"
#include "hasten/trainer/resume.h"
#include "support/run_device.h"
#include "support/temporary_folder.h"
#include "trainer/toy_text.h"

namespace hasten::precision_trainer_test {

struct PrecisionRun {
  std::shared_ptr<toy::Classifier> model = std::make_shared<toy::Classifier>(at::kFloat);
  std::shared_ptr<Accelerator> accelerator = std::make_shared<Accelerator>(
      AcceleratorOptions{.device = testing_support::run_device().str()},
      Communicator::create(World{}));
  std::vector<at::ScalarType> types{}; // dtypes of the logits
  int64_t calls = 0;
  int64_t overflow_at = 0; // index of a training call of the loss function
  std::unique_ptr<Trainer> trainer{};

  struct PrecisionRecorder : TrainerCallback {
    explicit PrecisionRecorder(PrecisionRun& of) : run(of) {}
    void on_precision(Precision precision) override {
      EXPECT_TRUE(run.types.empty()) << "before the first forward pass";
      precisions.push_back(precision);
    }
    PrecisionRun& run;
    std::vector<Precision> precisions{};
  };
  std::shared_ptr<PrecisionRecorder> recorder = std::make_shared<PrecisionRecorder>(*this);

  LossFunction loss() {
    return [this](const Batch& batch) {
      const at::Tensor logits = model->forward(batch["input_ids"], batch["attention_mask"]);
      types.push_back(logits.scalar_type());
      if (model->is_training() && ++calls == overflow_at) {
        logits.register_hook([](const at::Tensor& gradient) {
          return gradient * std::numeric_limits<double>::infinity();
        });
      }
      return LossOutput{at::cross_entropy_loss(logits, batch["labels"], {}, at::Reduction::Sum),
                        static_cast<double>(batch.rows()), logits};
    };
  }
  TrainOutput train(TrainingArguments arguments) {
    arguments.per_device_train_batch_size = 4;
    trainer =
        std::make_unique<Trainer>(model, loss(), arguments, std::make_shared<toy::Texts>(24),
                                  std::make_shared<toy::Texts>(6), ComputeMetrics{}, accelerator);
    trainer->add_callback(recorder);
    return trainer->train();
  }
};

TEST(TrainerPrecision, TrainsAndEvaluatesInWhatTheArgumentsSay) {
  for (const auto& [precision, type] :
       {std::pair(Precision::no, at::kFloat), std::pair(Precision::bf16, at::kBFloat16),
        std::pair(Precision::fp16, at::kHalf)}) {
    TrainingArguments a = toy::arguments();
    a.bf16 = precision == Precision::bf16;
    a.precision = precision == Precision::fp16 ? precision : Precision::no;
    PrecisionRun run;
    const TrainOutput output = run.train(a);
    EXPECT_TRUE(std::isfinite(output.training_loss));
    for (const auto logits : run.types) {
      EXPECT_EQ(logits, type);
    }
    EXPECT_EQ(run.trainer->arguments().precision, precision);
    const auto predicted = run.trainer->predict(toy::Texts(6));
    EXPECT_EQ(predicted.outputs.scalar_type(), at::kFloat);
    EXPECT_EQ(run.recorder->precisions, std::vector{precision});
  }
}

TEST(TrainerPrecision, AnOverflowLeavesOutTheUpdateAndTheSchedulesTick) {
  TrainingArguments a = toy::arguments();
  a.fp16 = true;
  a.num_train_epochs = 1;
  a.logging_steps = 1;
  PrecisionRun run;
  run.overflow_at = 3;
  EXPECT_EQ(run.train(a).global_step, 6);
  std::vector<double> rates, scales, overflows;
  for (const auto& record : run.trainer->state().log_history) {
    if (record.contains("learning_rate")) {
      rates.push_back(record.at("learning_rate"));
      scales.push_back(record.at("loss_scale"));
      overflows.push_back(record.at("overflows"));
    }
  }
  ASSERT_EQ(rates.size(), 6u);
  EXPECT_EQ(rates[2], rates[3]) << "no tick for the step left out";
  EXPECT_GT(rates[3], rates[4]);
  EXPECT_EQ(scales[1], 65536);
  EXPECT_EQ(scales[2], 32768);
  EXPECT_EQ(overflows, (std::vector<double>{0, 0, 1, 1, 1, 1}));
}

TEST(TrainerPrecision, GradientsThatOverflowWithoutAScaleEndTheRun) {
  TrainingArguments a = toy::arguments();
  a.fp16 = true;
  a.num_train_epochs = 12;
  PrecisionRun run;
  const auto train = [&] {
    auto loss = run.loss();
    Trainer trainer(
        run.model,
        [&](const Batch& batch) {
          run.overflow_at = run.calls + 1; // each step overflows
          return loss(batch);
        },
        a, std::make_shared<toy::Texts>(24), std::make_shared<toy::Texts>(6), ComputeMetrics{},
        run.accelerator);
    trainer.train();
  };
  try {
    train();
    FAIL();
  } catch (const TrainingError& error) {
    EXPECT_NE(std::string(error.what()).find("loss_scale="), std::string::npos) << error.what();
  }
}

TEST(TrainerPrecision, ARunThatGoesOnKeepsWhatWasChosen) {
  const testing_support::TemporaryFolder folder;
  TrainingArguments a = toy::arguments();
  a.output_dir = (folder / "run").string();
  a.save_strategy = SaveStrategy::epoch;
  a.num_train_epochs = 2;
  a.max_steps = -1;
  {
    TrainingArguments first = a;
    first.precision = Precision::bf16; // as if auto had chosen it
    PrecisionRun run;
    run.train(first);
  }
  const auto saved = nlohmann::json::parse(read_file(folder / "run" / "training_args.json"));
  EXPECT_EQ(saved.at("precision"), "bf16");
  EXPECT_EQ(saved.at("bf16"), true);
  EXPECT_EQ(saved.at("fp16"), false);
  a.resume_from_checkpoint = (folder / "run" / "checkpoint-6").string();
  a.output_dir = (folder / "on").string();
  {
    TrainingArguments other = a;
    other.fp16 = true;
    PrecisionRun run;
    EXPECT_THROW(run.train(other), InputError) << "another trajectory";
  }
  a.precision = Precision::automatic;
  PrecisionRun run;
  run.train(a);
  EXPECT_EQ(run.trainer->arguments().precision, Precision::bf16);
  EXPECT_EQ(run.accelerator->mixed_precision(), Precision::bf16);
  EXPECT_EQ(run.recorder->precisions, std::vector{Precision::bf16});
}

TEST(TrainerPrecision, RefusesContradictions) {
  const auto refuses = [](TrainingArguments a, const char* what) {
    try {
      a.validate();
      ADD_FAILURE() << what;
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find(what), std::string::npos) << error.what();
    }
  };
  TrainingArguments both = toy::arguments();
  both.bf16 = both.fp16 = true;
  refuses(both, "bf16=true and fp16=true exclude each other");
  TrainingArguments mixed = toy::arguments();
  mixed.bf16 = true;
  mixed.precision = Precision::fp16;
  refuses(mixed, "bf16=true with precision=fp16");
  TrainingArguments read;
  try {
    nlohmann::json{{"precision", "bf166"}}.get_to(read);
    ADD_FAILURE();
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("write bf16"), std::string::npos) << error.what();
  }
}

} // namespace hasten::precision_trainer_test
