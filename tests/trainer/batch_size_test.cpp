// auto_find_batch_size: the run equals one with the size that was found. Worlds 1 to 4.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/core/device.h"
#include "hasten/core/memory.h"
#include "hasten/trainer/trainer.h"
#include "support/communicator.h"
#include "support/on_device.h"
#include "support/temporary_folder.h"
#include "support/world.h"
#include "trainer/toy_text.h"

namespace hasten::batch_size_test {

constexpr int64_t kRowBytes = 1 << 20;

struct PeakRecorder : TrainerCallback {
  void on_epoch_end(const EpochReport& report) override {
    peak = std::max(peak, report.peak_tensor_bytes);
  }
  int64_t peak = 0;
};

/// A model with dropout. On `hungry` ranks each row needs one MiB in forward.
struct SizedRun {
  SizedRun(const TrainingArguments& arguments, bool hungry = true) {
    install_memory_meter();
    AcceleratorOptions options;
    options.gradient_accumulation_steps = arguments.gradient_accumulation_steps;
    const auto accelerator = std::make_shared<Accelerator>(
        options, testing_support::fresh_communicator_without_memory());
    trainer = std::make_unique<Trainer>(
        model,
        [this, hungry](const Batch& batch) {
          calls.push_back(batch.rows());
          const at::Tensor scratch =
              on_device::empty({hungry ? kRowBytes * batch.rows() : 0}, torch::kByte);
          LossOutput output = toy::loss_function(model)(batch);
          output.loss_sum = output.loss_sum + torch::dropout(model->head->bias, 0.5, true).sum();
          return output;
        },
        arguments, std::make_shared<toy::Texts>(24 * testing_support::test_world().world_size),
        nullptr, ComputeMetrics{}, accelerator);
    trainer->add_callback(peaks);
  }
  std::shared_ptr<toy::Classifier> model = std::make_shared<toy::Classifier>();
  std::shared_ptr<PeakRecorder> peaks = std::make_shared<PeakRecorder>();
  std::vector<int64_t> calls{}; // rows of each call
  std::unique_ptr<Trainer> trainer;
};

TrainingArguments of_size(int64_t rows, int64_t accumulation) {
  TrainingArguments a = toy::arguments();
  a.num_train_epochs = 2;
  a.per_device_train_batch_size = rows;
  a.gradient_accumulation_steps = accumulation;
  return a;
}

std::string bytes_beside_what_lives(int64_t bytes) {
  install_memory_meter();
  return std::to_string(memory_stats(testing_support::run_device()).live_bytes + bytes);
}

TEST(AutoFindBatchSize, TheRunIsThatOfTheSizeFound) {
  SizedRun expected(of_size(2, 4));
  expected.trainer->train();
  TrainingArguments a = of_size(8, 1);
  a.auto_find_batch_size = true;
  // Memory for the model (some kilobytes) and three rows.
  a.memory_limit = bytes_beside_what_lives(3 * kRowBytes + kRowBytes / 2);
  SizedRun run(a);
  const int64_t before = memory_stats(testing_support::run_device()).live_bytes;
  run.trainer->train();
  EXPECT_EQ(run.trainer->arguments().per_device_train_batch_size, 2);
  EXPECT_EQ(run.trainer->arguments().gradient_accumulation_steps, 4);
  EXPECT_EQ(run.trainer->accelerator().options().gradient_accumulation_steps, 4);
  // 8 and 4 rows fail in the first step, 2 rows run two steps. The other calls are training.
  ASSERT_GE(run.calls.size(), 5U);
  EXPECT_EQ(std::vector<int64_t>(run.calls.begin(), run.calls.begin() + 5),
            (std::vector<int64_t>{8, 4, 2, 2, 2}));
  EXPECT_EQ(toy::largest_difference(*run.model, *expected.model), 0);
  EXPECT_EQ(toy::history(*run.trainer, "loss"), toy::history(*expected.trainer, "loss"));
  // The largest peak of any rank. The ranks' limits are nearly equal.
  EXPECT_LE(run.peaks->peak, std::stoll(a.memory_limit) + kRowBytes / 4);
  EXPECT_GT(run.peaks->peak, before);
}

TEST(AutoFindBatchSize, OneRanksShortageLowersAll) {
  const World& world = testing_support::test_world();
  TrainingArguments a = of_size(8, 1);
  a.auto_find_batch_size = true;
  a.memory_limit = bytes_beside_what_lives(3 * kRowBytes + kRowBytes / 2);
  SizedRun run(a, world.rank == world.world_size - 1);
  run.trainer->train();
  EXPECT_EQ(run.trainer->arguments().per_device_train_batch_size, 2);
  EXPECT_EQ(run.trainer->arguments().gradient_accumulation_steps, 4);
}

TEST(AutoFindBatchSize, ASizeThatFitsStays) {
  TrainingArguments a = of_size(4, 2);
  SizedRun expected(a);
  expected.trainer->train();
  a.auto_find_batch_size = true; // the limit is the host's free memory
  SizedRun run(a);
  run.trainer->train();
  EXPECT_EQ(run.trainer->arguments().per_device_train_batch_size, 4);
  EXPECT_EQ(run.trainer->arguments().gradient_accumulation_steps, 2);
  EXPECT_EQ(toy::largest_difference(*run.model, *expected.model), 0);
}

TEST(AutoFindBatchSize, WhereNotOneRowFitsTheModelIsAsItWas) {
  TrainingArguments a = of_size(4, 1);
  a.auto_find_batch_size = true;
  a.memory_limit = bytes_beside_what_lives(kRowBytes / 2);
  SizedRun run(a);
  const toy::Classifier fresh;
  const detail::GeneratorState random;
  const int64_t before = memory_stats(testing_support::run_device()).live_bytes;
  EXPECT_THROW(run.trainer->train(), InputError);
  EXPECT_EQ(memory_stats(testing_support::run_device()).live_bytes, before);
  EXPECT_TRUE(random.again().same_as(random));
  EXPECT_EQ(toy::largest_difference(*run.model, fresh), 0);
  for (const at::Tensor& parameter : run.model->parameters()) {
    EXPECT_FALSE(parameter.grad().defined());
  }
}

TEST(AutoFindBatchSize, AResumedRunKeepsTheSizeThatWasFound) {
  const auto store = testing_support::test_store();
  if (testing_support::test_world().rank == 0) {
    auto folder = std::make_shared<testing_support::TemporaryFolder>();
    testing_support::at_case_end([folder] {});
    store->set("folder", folder->path().string());
  }
  const std::filesystem::path folder = store->get_to_str("folder");
  TrainingArguments a = of_size(8, 1);
  a.auto_find_batch_size = true;
  a.memory_limit = bytes_beside_what_lives(3 * kRowBytes + kRowBytes / 2);
  a.save_strategy = SaveStrategy::steps;
  a.save_steps = 2; // in mid-epoch: three steps each
  a.save_total_limit = 0;
  a.output_dir = (folder / "whole").string();
  SizedRun whole(a);
  whole.trainer->train();
  a.output_dir = (folder / "rest").string();
  a.resume_from_checkpoint = (folder / "whole" / "checkpoint-2").string();
  a.memory_limit = bytes_beside_what_lives(100 * kRowBytes);
  SizedRun rest(a);
  rest.trainer->train();
  EXPECT_EQ(rest.trainer->arguments().per_device_train_batch_size, 2);
  EXPECT_EQ(toy::largest_difference(*whole.model, *rest.model), 0);
}

} // namespace hasten::batch_size_test
