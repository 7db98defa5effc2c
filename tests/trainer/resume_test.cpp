// Runs that continue from a checkpoint.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <numeric>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/state/saved_state.h"
#include "hasten/trainer/output_folder.h"
#include "hasten/trainer/resume.h"
#include "hasten/trainer/trainer.h"
#include "support/communicator.h"
#include "support/temporary_folder.h"
#include "support/world.h"
#include "trainer/toy_text.h"

namespace hasten::resume_test {

namespace files = std::filesystem;

/// Three steps an epoch of 2 x 2 rows a rank; the last has one row in all.
int64_t train_rows() { return 8 * testing_support::test_world().world_size + 1; }

/// The toy model's loss with dropout on the words. Stores the rows that it got.
LossFunction dropped_loss(std::shared_ptr<toy::Classifier> model, double p,
                          std::vector<int64_t>* seen = nullptr) {
  return [model, p, seen](const Batch& batch) {
    const at::Tensor words =
        torch::dropout(model->embedding->forward(batch["input_ids"]), p, model->is_training());
    const at::Tensor weights = batch["attention_mask"].unsqueeze(-1).to(words.scalar_type());
    const at::Tensor logits =
        model->head->forward(model->LayerNorm->forward((words * weights).sum(1) / weights.sum(1)));
    if (seen != nullptr && model->is_training()) {
      seen->insert(seen->end(), batch.indices.begin(), batch.indices.end());
    }
    return LossOutput{torch::nn::functional::cross_entropy(
                          logits, batch["labels"],
                          torch::nn::functional::CrossEntropyFuncOptions().reduction(torch::kSum)),
                      static_cast<double>(batch.rows()), logits};
  };
}

TrainingArguments resume_arguments(const files::path& folder) {
  TrainingArguments a = toy::arguments();
  a.output_dir = folder.string();
  a.train_sampling_strategy = SamplingStrategy::group_by_length;
  a.per_device_train_batch_size = 2;
  a.gradient_accumulation_steps = 2;
  a.logging_steps = 3;
  a.eval_strategy = IntervalStrategy::steps;
  a.eval_steps = 1;
  a.save_strategy = SaveStrategy::steps;
  a.save_steps = 1;
  a.save_total_limit = 0;
  a.load_best_model_at_end = true;
  a.resume_from_checkpoint = "auto";
  return a;
}

struct CountSteps : TrainerCallback, Stateful {
  void on_train_begin(const RunDescription& run) override { begun = run; }
  void on_step_end(const StepProgress&) override { ++steps; }
  void on_epoch_end(const EpochReport& report) override { epochs.push_back(report.training_loss); }
  void save_state(NamedTensors&, nlohmann::json& values) const override { values["steps"] = steps; }
  void load_state(const NamedTensors&, const nlohmann::json& values) override {
    values.at("steps").get_to(steps);
  }
  RunDescription begun{};
  std::vector<double> epochs{};
  int64_t steps = 0;
};

struct WholeRun {
  std::shared_ptr<toy::Classifier> model = std::make_shared<toy::Classifier>();
  std::shared_ptr<CountSteps> counter = std::make_shared<CountSteps>();
  std::vector<int64_t> seen{}; // this rank's training rows, in order
  std::unique_ptr<Trainer> trainer{};
  TrainOutput output{};

  WholeRun(const TrainingArguments& arguments, std::shared_ptr<Communicator> communicator,
           double dropout = 0.2, int64_t rows = train_rows()) {
    AcceleratorOptions options;
    options.gradient_accumulation_steps = arguments.gradient_accumulation_steps;
    trainer = std::make_unique<Trainer>(
        model, dropped_loss(model, dropout, &seen), arguments, std::make_shared<toy::Texts>(rows),
        std::make_shared<toy::Texts>(7), ComputeMetrics{},
        std::make_shared<Accelerator>(options, std::move(communicator)));
    trainer->add_callback(counter, "counter");
    output = trainer->train();
  }

  /// Records without the values that depend on the clock.
  nlohmann::json history() const {
    nlohmann::json records = nlohmann::json::array();
    for (nlohmann::json record : trainer->state().log_history) {
      std::erase_if(record.get_ref<nlohmann::json::object_t&>(), [](const auto& entry) {
        return entry.first.ends_with("_runtime") || entry.first.ends_with("_per_second");
      });
      records.push_back(finite_json(std::move(record)));
    }
    return records;
  }
};

void expect_same_model(const torch::nn::Module& a, const torch::nn::Module& b) {
  for (const auto& entry : a.named_parameters()) {
    EXPECT_TRUE(torch::equal(entry.value(), b.named_parameters()[entry.key()])) << entry.key();
  }
}

files::path resume_folder() {
  const auto store = testing_support::test_store();
  if (testing_support::test_world().rank == 0) {
    auto folder = std::make_shared<testing_support::TemporaryFolder>();
    testing_support::at_case_end([folder] {});
    store->set("resume folder", folder->path().string());
  }
  return store->get_to_str("resume folder");
}

/// The folder of a run that was killed some time after its checkpoint `step`.
files::path interrupted_copy(Communicator& communicator, const files::path& whole,
                             const std::string& name, int64_t step) {
  const auto folder = whole.parent_path() / name;
  const std::string checkpoint = "checkpoint-" + std::to_string(step);
  if (communicator.is_main()) {
    files::create_directories(folder);
    files::copy(whole / checkpoint, folder / checkpoint, files::copy_options::recursive);
    files::copy(whole / "metrics.jsonl", folder / "metrics.jsonl");
    files::create_directories(folder / "checkpoint-99.tmp-1-1");
  }
  communicator.barrier("copied");
  return folder;
}

template <typename Function>
std::string refusal(const Function& function) {
  try {
    function();
  } catch (const InputError& error) {
    return error.what();
  }
  return "nothing was thrown";
}

#define EXPECT_HAS(text, part) EXPECT_NE((text).find(part), std::string::npos) << (text)

TEST(TrainerResume, AtAnyUpdateEqualsTheUninterruptedRunBitForBit) {
  const auto communicator = testing_support::fresh_communicator();
  const auto folder = resume_folder();
  const WholeRun whole(resume_arguments(folder / "whole"), communicator);
  const int64_t steps = whole.output.global_step;
  const int64_t per_epoch = 3;
  ASSERT_EQ(steps, 3 * per_epoch);
  for (const int64_t step : {int64_t{1}, per_epoch, per_epoch + 1, steps}) {
    SCOPED_TRACE("behind step " + std::to_string(step));
    const auto copy =
        interrupted_copy(*communicator, folder / "whole", "from-" + std::to_string(step), step);
    const WholeRun resumed(resume_arguments(copy), communicator);
    EXPECT_EQ(resumed.counter->begun.resumed_step, step);
    EXPECT_EQ(resumed.output.global_step, steps);
    expect_same_model(*resumed.model, *whole.model);
    EXPECT_EQ(resumed.history(), whole.history());
    EXPECT_EQ(resumed.trainer->state().best_metric, whole.trainer->state().best_metric);
    EXPECT_EQ(resumed.output.training_loss, whole.output.training_loss);
    EXPECT_EQ(resumed.counter->steps, steps); // the callback has its own state
    // The remaining epochs' reports. The interrupted epoch's report counts the whole epoch.
    ASSERT_FALSE(resumed.counter->epochs.empty());
    EXPECT_TRUE(std::equal(resumed.counter->epochs.rbegin(), resumed.counter->epochs.rend(),
                           whole.counter->epochs.rbegin()));
    EXPECT_EQ(static_cast<int64_t>(resumed.counter->epochs.size()), 3 - (step - 1) / per_epoch);
    EXPECT_EQ(read_file(copy / "model.safetensors"),
              read_file(folder / "whole" / "model.safetensors"));
    EXPECT_FALSE(files::exists(copy / "checkpoint-99.tmp-1-1"));
    // One record of each kind and step, as if nothing had been.
    std::ifstream metrics(copy / "metrics.jsonl");
    int64_t lines = 0;
    for (std::string line; std::getline(metrics, line);) {
      lines += nlohmann::json::parse(line).at("type") != "resume";
    }
    // Reports of three epochs and the start are no part of the history.
    EXPECT_EQ(lines, static_cast<int64_t>(whole.history().size()) + 4);
    communicator->barrier("looked");
  }
}

TEST(TrainerResume, ACheckpointHasEachFactOfTheProgressInOneFile) {
  const auto communicator = testing_support::fresh_communicator();
  const auto folder = resume_folder();
  const WholeRun whole(resume_arguments(folder / "whole"), communicator);
  const auto json_of = [&](const char* file) {
    return nlohmann::json::parse(read_file(folder / "whole/checkpoint-2" / file));
  };
  std::map<std::string, int> files_with;
  for (const auto& json : {json_of("trainer_state.json"), json_of(kRunFile),
                           json_of(kStateFile).at("objects").at("trainer").at("values")}) {
    for (const auto& [fact, value] : json.items()) {
      ++files_with[fact];
    }
  }
  for (const char* fact : {"global_step", "log_history", "epoch_index", "samples_seen",
                           "tokens_seen", "num_input_tokens_seen", "of_run", "own_learning_rate"}) {
    EXPECT_EQ(files_with[fact], 1) << fact;
  }
  for (const auto& [fact, files] : files_with) {
    EXPECT_EQ(files, 1) << fact;
  }
  for (const char* fact : {"state", "samples", "tokens", "train_loss"}) { // by another name
    EXPECT_FALSE(files_with.contains(fact)) << fact;
  }
}

TEST(TrainerResume, AutoIsRightForTheFirstStartForEveryLaterOneAndWhenFinished) {
  const auto communicator = testing_support::fresh_communicator();
  const auto folder = resume_folder() / "out";
  TrainingArguments a = resume_arguments(folder);
  a.save_total_limit = 2;
  const WholeRun first(a, communicator);
  ASSERT_FALSE(first.counter->begun.notes.empty());
  EXPECT_HAS(first.counter->begun.notes[0], "starts from the beginning");
  EXPECT_FALSE(first.output.already_finished);
  const WholeRun again(a, communicator);
  EXPECT_TRUE(again.output.already_finished);
  EXPECT_EQ(again.output.global_step, first.output.global_step);
  EXPECT_TRUE(again.seen.empty());
  EXPECT_EQ(again.history(), first.history());

  TrainingArguments latest = resume_arguments(folder.parent_path() / "none");
  latest.resume_from_checkpoint = "latest";
  EXPECT_HAS(refusal([&] { WholeRun run(latest, communicator); }), "no checkpoint-N in");
}

TEST(TrainerResume, ChangedArgumentsAreListedAndRefusedWhereTheyAlterTheRun) {
  const auto communicator = testing_support::fresh_communicator();
  const auto folder = resume_folder();
  TrainingArguments a = resume_arguments(folder / "whole");
  const WholeRun whole(a, communicator);
  const auto copy = interrupted_copy(*communicator, folder / "whole", "copy", 2);
  a.output_dir = copy.string();
  a.logging_steps = 1;
  TrainingArguments other = a;
  other.learning_rate = 0.01;
  other.seed = 7;
  const auto text = refusal([&] { WholeRun run(other, communicator); });
  EXPECT_HAS(text, "learning_rate: 0.05 -> 0.01");
  EXPECT_HAS(text, "seed: 42 -> 7");
  EXPECT_EQ(text.find("logging_steps"), text.npos) << text;
  EXPECT_HAS(text, "--allow-changed-arguments");
  EXPECT_HAS(refusal([&] { WholeRun run(a, communicator, 0.2, train_rows() + 1); }),
             "train_data: ");
  EXPECT_TRUE(files::exists(copy / "checkpoint-99.tmp-1-1")); // untouched

  const WholeRun harmless(a, communicator);
  EXPECT_HAS(harmless.counter->begun.notes.at(1), "changed since: logging_steps: 3.0 -> 1.0");
  expect_same_model(*harmless.model, *whole.model);

  // Another rate from step 3 on, and it is the new one that is used.
  const auto changed = interrupted_copy(*communicator, folder / "whole", "changed", 2);
  other = resume_arguments(changed);
  other.learning_rate = 0.01;
  other.weight_decay = 0;
  other.allow_changed_arguments = true;
  other.logging_steps = 1;
  const WholeRun allowed(other, communicator);
  const auto rates = toy::history(*allowed.trainer, "learning_rate");
  const auto before = toy::history(*whole.trainer, "learning_rate"); // of steps 3, 6, 9
  ASSERT_EQ(rates.size(), 7U); // of steps 3 to 9
  for (const size_t i : {0, 1, 2}) {
    EXPECT_NEAR(rates[3 * i], before.at(i) / 5, 1e-15);
  }
  const auto saved = nlohmann::json::parse(read_file(changed / "checkpoint-9/state.json"));
  const auto& group = saved.at("optimizers").at(0).at("values").at("groups").at(0);
  EXPECT_EQ(group.at("weight_decay"), 0);
}

TEST(TrainerResume, DamagedCheckpointsArePassedOverNamedAndRenamed) {
  const auto communicator = testing_support::fresh_communicator();
  const auto folder = resume_folder();
  const WholeRun whole(resume_arguments(folder / "whole"), communicator);
  const auto copy = interrupted_copy(*communicator, folder / "whole", "copy", 1);
  const auto damage = [&](const files::path& file) {
    std::string bytes = read_file(file);
    bytes[bytes.size() / 2] ^= 1;
    std::ofstream(file, std::ios::binary) << bytes;
  };
  if (communicator->is_main()) {
    files::copy(folder / "whole" / "checkpoint-2", copy / "checkpoint-2",
                files::copy_options::recursive);
    damage(copy / "checkpoint-2" / "state.safetensors");
  }
  communicator->barrier("damaged");
  const WholeRun resumed(resume_arguments(copy), communicator);
  const auto& notes = resumed.counter->begun.notes;
  ASSERT_GE(notes.size(), 2u);
  EXPECT_HAS(notes[0], "skipped checkpoint-2: ");
  EXPECT_HAS(notes[0], "state.safetensors: xxh3=");
  EXPECT_EQ(resumed.counter->begun.resumed_step, 1);
  expect_same_model(*resumed.model, *whole.model);
  EXPECT_TRUE(files::exists(copy / "checkpoint-2.set-aside"));
  communicator->barrier("looked");

  // If no checkpoint is valid, the run does not start from the beginning and removes nothing.
  const auto bad = interrupted_copy(*communicator, folder / "whole", "bad", 1);
  if (communicator->is_main()) {
    files::resize_file(bad / "checkpoint-1" / "state_rank_0.safetensors", 40);
  }
  communicator->barrier("cut");
  const auto text = refusal([&] { WholeRun run(resume_arguments(bad), communicator); });
  EXPECT_HAS(text, "no checkpoint in " + bad.string() + " can be resumed from");
  EXPECT_HAS(text, "state_rank_0.safetensors: size=40");
  EXPECT_TRUE(files::exists(bad / "checkpoint-1"));
  communicator->barrier("looked again");
}

TEST(TrainerResume, AnotherWorldSizeWithTheSameUpdatesGivesTheSameRun) {
  const auto communicator = testing_support::fresh_communicator();
  const int world = communicator->world_size();
  const auto folder = resume_folder();
  const WholeRun whole(resume_arguments(folder / "whole"), communicator, 0.0);
  const auto copy = interrupted_copy(*communicator, folder / "whole", "copy", 1);
  if (communicator->is_main()) {
    TrainingArguments a = resume_arguments(copy);
    const auto alone = Communicator::create(World{});
    if (world > 1) {
      const auto text = refusal([&] { WholeRun run(a, alone, 0.0); });
      EXPECT_HAS(text, "total_batch: " + std::to_string(4 * world) + " -> 4");
    }
    a.gradient_accumulation_steps *= world;
    const WholeRun resumed(a, alone, 0.0);
    EXPECT_EQ(resumed.output.global_step, whole.output.global_step);
    EXPECT_LE(toy::largest_difference(*resumed.model, *whole.model), 1e-9);

    // Other steps: each row of the epoch is still seen once.
    const auto other = folder / "other";
    files::create_directories(other);
    files::copy(folder / "whole" / "checkpoint-1", other / "checkpoint-1",
                files::copy_options::recursive);
    a = resume_arguments(other);
    a.per_device_train_batch_size = 3;
    a.allow_changed_arguments = true;
    const WholeRun allowed(a, alone, 0.0);
    const int64_t left = train_rows() - std::min<int64_t>(train_rows(), 4 * world);
    ASSERT_EQ(static_cast<int64_t>(allowed.seen.size()), left + 2 * train_rows());
    std::vector<int64_t> rest(allowed.seen.begin(), allowed.seen.begin() + left);
    std::sort(rest.begin(), rest.end());
    EXPECT_EQ(std::adjacent_find(rest.begin(), rest.end()), rest.end());
    EXPECT_EQ(allowed.output.global_step, 1 + (left + 5) / 6 + 2 * ((train_rows() + 5) / 6));
    EXPECT_NEAR(allowed.trainer->state().epoch, 3.0, 1e-12);
  }
  communicator->barrier("compared");
}

} // namespace hasten::resume_test
