// An output folder that is moved or removed during a run. Worlds 1 to 4.
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/trainer/trainer.h"
#include "support/communicator.h"
#include "support/temporary_folder.h"
#include "support/world.h"
#include "trainer/toy_text.h"

namespace hasten::output_folder_world_test {

namespace files = std::filesystem;

/// A folder of rank 0 that all ranks use. Collective.
files::path shared_folder() {
  const auto store = testing_support::test_store();
  if (testing_support::test_world().rank == 0) {
    auto folder = std::make_shared<testing_support::TemporaryFolder>();
    testing_support::at_case_end([folder] {});
    store->set("folder", folder->path().string());
  }
  return store->get_to_str("folder");
}

/// Does something to the folder behind step 3, on rank 0.
struct Meddler : TrainerCallback {
  explicit Meddler(std::function<void()> meddle) : meddle_(std::move(meddle)) {}
  void on_step_end(const StepProgress& progress) override {
    if (progress.global_step == 3) {
      meddle_();
    }
  }
  std::function<void()> meddle_;
};

/// The error that train() threw on this rank.
std::string failure_with(const files::path& out, double logging_steps,
                         std::function<void()> meddle) {
  TrainingArguments a = toy::arguments();
  a.output_dir = out.string();
  a.max_steps = 6;
  a.logging_steps = logging_steps;
  a.save_strategy = SaveStrategy::epoch;
  const auto model = std::make_shared<toy::Classifier>();
  AcceleratorOptions options;
  Trainer trainer(model, toy::loss_function(model), a, std::make_shared<toy::Texts>(64), nullptr,
                  ComputeMetrics{},
                  std::make_shared<Accelerator>(options, testing_support::fresh_communicator()));
  if (testing_support::test_world().rank == 0) {
    trainer.add_callback(std::make_shared<Meddler>(std::move(meddle)));
  }
  try {
    trainer.train();
    return {};
  } catch (const std::exception& error) {
    return error.what();
  }
}

TEST(OutputFolderWorld, MovedRemovedOrReplacedInMidRunItEndsTheRunByName) {
  const files::path top = shared_folder();
  for (const double logging_steps : {1.0, 100.0}) { // a record fails, or the last save fails
    const files::path out = top / "out";
    const files::path away = top / "away";
    struct Case {
      std::function<void()> meddle;
      const char* said;
    };
    const Case cases[] = {{[&] { files::rename(out, away); }, "moved to "},
                          {[&] { files::remove_all(out); }, "was removed"},
                          {[&] {
                             files::rename(out, away);
                             files::create_directory(out);
                           },
                           "another folder is in its place"},
                          {[&] { files::remove(out / "metrics.jsonl"); }, "metrics.jsonl"}};
    for (const Case& bad : cases) {
      SCOPED_TRACE(bad.said);
      if (testing_support::test_world().rank == 0) {
        files::remove_all(out);
        files::remove_all(away);
      }
      const std::string failure = failure_with(out, logging_steps, bad.meddle);
      if (testing_support::test_world().rank == 0) {
        EXPECT_NE(failure.find(bad.said), std::string::npos) << failure;
        EXPECT_NE(failure.find(out.string()), std::string::npos) << failure;
        // The run did not make a new folder.
        EXPECT_FALSE(files::exists(out / "model.safetensors"));
      } else {
        EXPECT_NE(failure, "");
      }
    }
  }
}

} // namespace hasten::output_folder_world_test
