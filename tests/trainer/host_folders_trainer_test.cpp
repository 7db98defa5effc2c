// Runs on hosts without a common disk: each has an output folder of its own. Worlds 2 to 4.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "accelerator/state_rig.h"
#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/text.h"
#include "hasten/io/commit.h"
#include "hasten/trainer/output_folder.h"
#include "hasten/trainer/resume.h"
#include "hasten/trainer/trainer.h"
#include "support/on_hosts.h"
#include "support/temporary_folder.h"
#include "trainer/toy_text.h"

namespace hasten::host_folders_trainer_test {

namespace files = std::filesystem;
using testing_support::on_hosts;
using testing_support::two_hosts;

int world() { return testing_support::test_world().world_size; }
int own_host() {
  return two_hosts(world())[static_cast<size_t>(testing_support::test_world().rank)];
}

files::path out_of(const files::path& base, int host) {
  return base / ("host" + std::to_string(host)) / "out";
}

/// Saves after every second of eight steps.
TrainingArguments arguments_in(const files::path& base) {
  TrainingArguments a = toy::arguments();
  a.output_dir = out_of(base, own_host()).string();
  a.per_device_train_batch_size = 2;
  a.max_steps = 8;
  a.save_strategy = SaveStrategy::steps;
  a.save_steps = 2;
  a.save_total_limit = 2;
  a.resume_from_checkpoint = "auto";
  return a;
}

struct Watcher : TrainerCallback {
  void on_train_begin(const RunDescription& run) override { notes = run.notes; }
  void on_save(const files::path& folder) override { saved.push_back(folder); }
  std::vector<std::string> notes{};
  std::vector<files::path> saved{};
};

struct TrainedRun {
  explicit TrainedRun(const TrainingArguments& a,
                      std::shared_ptr<Communicator> group = on_hosts(two_hosts(world()))) {
    AcceleratorOptions options;
    options.strategy = a.strategy;
    const auto loss = toy::loss_function(model);
    trainer = std::make_unique<Trainer>(
        model,
        [loss, this](const Batch& batch) {
          LossOutput output = loss(batch);
          output.loss_sum =
              output.loss_sum + 0.1 * torch::rand({}, at::kDouble); // draws of this rank
          drawn.push_back(output.loss_sum.item<double>());
          return output;
        },
        a, std::make_shared<toy::Texts>(8 * world()), nullptr, ComputeMetrics{},
        std::make_shared<Accelerator>(options, std::move(group)));
    trainer->add_callback(watcher);
    output = trainer->train();
    if (output.already_finished) {
      return;
    }
    trainer->accelerator().summon_full_params(
        [this] {
          for (const auto& parameter : model->parameters()) {
            whole.push_back(parameter.detach().clone());
          }
        },
        model);
  }
  std::shared_ptr<toy::Classifier> model = std::make_shared<toy::Classifier>();
  std::shared_ptr<Watcher> watcher = std::make_shared<Watcher>();
  std::vector<double> drawn{}; // [batch] this rank's loss
  std::vector<at::Tensor> whole{}; // rank 0's
  std::unique_ptr<Trainer> trainer{};
  TrainOutput output{};
};

std::vector<int64_t> steps_in(const files::path& folder) {
  std::vector<int64_t> steps;
  for (const CheckpointFolder& checkpoint : checkpoint_folders(folder)) {
    steps.push_back(checkpoint.global_step);
  }
  return steps;
}

void on_one(const std::function<void()>& change) {
  const auto group = testing_support::fresh_communicator();
  group->barrier("before");
  if (group->is_main()) {
    change();
  }
  group->barrier("after");
}

/// Makes of a finished run's folders those of one that was killed after its last checkpoint.
void forget_end(const files::path& base) {
  on_one([&] {
    for (const int host : {0, 1}) {
      files::remove(out_of(base, host) / "hasten_state.json");
    }
  });
}

/// Drops the draws of the steps before the checkpoint.
std::vector<double> last_draws(const TrainedRun& run, size_t count) {
  return {run.drawn.end() - static_cast<int64_t>(count), run.drawn.end()};
}

TEST(HostFoldersTrainer, ARunGoesOnFromEachHostsOwnDiskBitForBit) {
  if (world() == 1) {
    GTEST_SKIP() << "one host";
  }
  const auto base = state_test::common_folder();
  for (const Strategy strategy : {Strategy::ddp, Strategy::fsdp}) {
    const auto place = base / strategy_name(strategy);
    TrainingArguments a = arguments_in(place);
    a.strategy = strategy;
    const TrainedRun whole(a);
    const files::path own = a.output_dir;
    EXPECT_EQ(steps_in(own), (std::vector<int64_t>{6, 8})) << "each host removes its old ones";
    EXPECT_EQ(files::exists(own / "model.safetensors"), own_host() == 0);
    EXPECT_EQ(files::exists(own / "metrics.jsonl"), own_host() == 0);
    EXPECT_EQ(whole.watcher->saved.back(), own / "checkpoint-8");
    // A finished run is left alone, by all hosts.
    const TrainedRun again(a);
    EXPECT_TRUE(again.output.already_finished);
    EXPECT_TRUE(again.drawn.empty());
    forget_end(place);
    on_one([&] {
      for (const int host : {0, 1}) {
        files::remove_all(out_of(place, host) / "checkpoint-8");
      }
    });
    const TrainedRun resumed(a);
    EXPECT_EQ(resumed.drawn, last_draws(whole, 2));
    state_test::expect_equal_bits(resumed.whole, whole.whole);
    EXPECT_EQ(steps_in(own), (std::vector<int64_t>{6, 8}));
  }
}

TEST(HostFoldersTrainer, ACheckpointThatOneHostDidNotRenameIsSkippedAndTheHostNamed) {
  if (world() == 1) {
    GTEST_SKIP() << "one host";
  }
  const auto base = state_test::common_folder();
  for (const int without : {0, 1}) {
    for (const char* how : {"auto", "latest"}) {
      SCOPED_TRACE(std::to_string(without) + how);
      const auto place = base / (std::to_string(without) + how);
      TrainingArguments a = arguments_in(place);
      const TrainedRun whole(a);
      forget_end(place);
      on_one([&] {
        const auto out = out_of(place, without);
        files::rename(out / "checkpoint-8", out / "checkpoint-8.tmp-77-1");
      });
      a.resume_from_checkpoint = how;
      const TrainedRun resumed(a);
      EXPECT_EQ(resumed.drawn, last_draws(whole, 2));
      state_test::expect_equal_bits(resumed.whole, whole.whole);
      const int lost = without == 0 ? 0 : (world() + 1) / 2;
      const std::string notes = joined(resumed.watcher->notes, "\n");
      EXPECT_NE(notes.find("skipped checkpoint-8: "), std::string::npos) << notes;
      EXPECT_NE(notes.find("; rank " + std::to_string(lost) + "'s host "), std::string::npos)
          << notes;
      EXPECT_NE(notes.find(" has no checkpoint-8"), std::string::npos) << notes;
      EXPECT_NE(notes.find("/checkpoint-6, after step 6"), std::string::npos) << notes;
      EXPECT_FALSE(files::exists(out_of(place, without) / "checkpoint-8.tmp-77-1"));
    }
  }
}

TEST(HostFoldersTrainer, WithTwoReplicasALostOutputFolderIsRestored) {
  if (world() == 1) {
    GTEST_SKIP() << "one host";
  }
  const auto base = state_test::common_folder();
  for (const Strategy strategy : {Strategy::ddp, Strategy::fsdp}) {
    for (const int lost : {0, 1}) {
      SCOPED_TRACE(std::string(strategy_name(strategy)) + std::to_string(lost));
      const auto place = base / (strategy_name(strategy) + std::to_string(lost));
      TrainingArguments a = arguments_in(place);
      a.strategy = strategy;
      a.save_replicas = 2;
      const TrainedRun whole(a);
      forget_end(place);
      on_one([&] {
        files::remove_all(out_of(place, lost));
        files::remove_all(out_of(place, 1 - lost) / "checkpoint-8");
      });
      const TrainedRun resumed(a);
      EXPECT_EQ(resumed.drawn, last_draws(whole, 2));
      state_test::expect_equal_bits(resumed.whole, whole.whole);
      EXPECT_EQ(steps_in(a.output_dir), (std::vector<int64_t>{6, 8}));
      EXPECT_NO_THROW(verify_manifest(files::path(a.output_dir) / "checkpoint-6"));
    }
  }
}

TEST(HostFoldersTrainer, OldCheckpointsStayOnAllHostsIfOneCannotSave) {
  if (world() == 1) {
    GTEST_SKIP() << "one host";
  }
  const auto base = state_test::common_folder();
  TrainingArguments a = arguments_in(base);
  a.save_total_limit = 1;
  a.max_steps = 4;
  const TrainedRun whole(a);
  EXPECT_EQ(steps_in(a.output_dir), std::vector<int64_t>{4});
  forget_end(base);
  on_one([&] { // a file is where the second host's folder must go
    write_file_atomically(out_of(base, 1) / "checkpoint-6", "in the way");
  });
  a.max_steps = 8;
  a.allow_changed_arguments = true;
  std::string text;
  try {
    const TrainedRun stopped(a);
  } catch (const Error& error) {
    text = error.what();
  }
  EXPECT_NE(text.find((out_of(base, 1) / "checkpoint-6").string()), std::string::npos) << text;
  on_one([] {});
  EXPECT_EQ(steps_in(a.output_dir), std::vector<int64_t>{4});
  EXPECT_NO_THROW(verify_manifest(files::path(a.output_dir) / "checkpoint-4"));
}

TEST(HostFoldersTrainer, SaveOnEachNodeWritesTheSameModelOnEachHost) {
  if (world() == 1) {
    GTEST_SKIP() << "one host";
  }
  const auto base = state_test::common_folder();
  for (const Strategy strategy : {Strategy::ddp, Strategy::fsdp}) {
    TrainingArguments a = arguments_in(base / strategy_name(strategy));
    a.strategy = strategy;
    a.save_strategy = SaveStrategy::no;
    a.resume_from_checkpoint = "";
    a.save_on_each_node = true;
    const TrainedRun run(a);
    on_one([&] {
      for (const char* name : {"model.safetensors", "trainer_state.json", "hasten_state.json"}) {
        EXPECT_EQ(read_file(out_of(base / strategy_name(strategy), 0) / name),
                  read_file(out_of(base / strategy_name(strategy), 1) / name))
            << name;
      }
    });
    EXPECT_NO_THROW(verify_manifest(a.output_dir));
  }
}

TEST(HostFoldersTrainer, AnotherRunOnOneHostsDiskIsNamed) {
  if (world() == 1) {
    GTEST_SKIP() << "one host";
  }
  const auto base = state_test::common_folder();
  on_one([&] {
    files::create_directories(out_of(base, 1));
    write_file_atomically(out_of(base, 1) / "metrics.jsonl", "{}\n");
  });
  TrainingArguments a = arguments_in(base);
  a.resume_from_checkpoint = "";
  const std::string text = state_test::input_error([&] { TrainedRun run(a); });
  EXPECT_NE(text.find("output_dir=" + out_of(base, 1).string() + " holds another run"),
            std::string::npos)
      << text;
  a = arguments_in(base / "replicas");
  a.save_replicas = 3;
  EXPECT_NE(state_test::input_error([&] { TrainedRun run(a); }).find("save_replicas=3 on 2 hosts"),
            std::string::npos);
}

} // namespace hasten::host_folders_trainer_test
