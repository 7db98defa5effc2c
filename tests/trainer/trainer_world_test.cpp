// Results that do not depend on the number of ranks.

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <cmath>
#include <filesystem>
#include <limits>

#include "hasten/accelerator/accelerator.h"
#include "hasten/base/error.h"
#include "hasten/io/safetensors.h"
#include "hasten/trainer/output_folder.h"
#include "hasten/trainer/trainer.h"
#include "support/communicator.h"
#include "support/temporary_folder.h"
#include "support/world.h"
#include "trainer/toy_text.h"

namespace hasten {

namespace detail {

/// A communicator of the case's ranks, or of this process only.
std::shared_ptr<Accelerator> trainer_accelerator(int64_t window, bool alone) {
  AcceleratorOptions options;
  options.gradient_accumulation_steps = window;
  return std::make_shared<Accelerator>(
      options, alone ? Communicator::create(World{}) : testing_support::fresh_communicator());
}

struct SplitRun {
  std::shared_ptr<toy::Classifier> model{};
  std::unique_ptr<Trainer> trainer{};
};

SplitRun run_split(TrainingArguments arguments, int64_t rows, int64_t batch, int64_t window,
                   bool alone) {
  arguments.per_device_train_batch_size = batch;
  arguments.gradient_accumulation_steps = window;
  SplitRun run;
  run.model = std::make_shared<toy::Classifier>();
  run.trainer = std::make_unique<Trainer>(run.model, toy::loss_function(run.model), arguments,
                                          std::make_shared<toy::Texts>(rows), nullptr,
                                          ComputeMetrics{}, trainer_accelerator(window, alone));
  run.trainer->train();
  return run;
}

/// {rows of a micro-batch, micro-batches} that make `total` rows a step.
std::vector<std::pair<int64_t, int64_t>> splits(int64_t total, int world_size) {
  std::vector<std::pair<int64_t, int64_t>> found;
  for (const int64_t window : {1, 2, 4}) {
    if (total % (window * world_size) == 0) {
      found.emplace_back(total / (window * world_size), window);
    }
  }
  return found;
}

void expect_near(const std::vector<double>& values, const std::vector<double>& expected,
                 double tolerance) {
  ASSERT_EQ(values.size(), expected.size());
  for (size_t i = 0; i < values.size(); ++i) {
    EXPECT_NEAR(values[i], expected[i], tolerance) << "record " << i;
  }
}

/// A folder of rank 0 that all ranks use. Collective.
std::filesystem::path shared_folder() {
  const auto store = testing_support::test_store();
  if (testing_support::test_world().rank == 0) {
    auto folder = std::make_shared<testing_support::TemporaryFolder>();
    testing_support::at_case_end([folder] {});
    store->set("folder", folder->path().string());
  }
  return store->get_to_str("folder");
}

/// Rows and the sum of their numbers.
class CountedRows : public Metric {
 public:
  void add(const Batch& batch) {
    rows_ += batch.rows();
    for (const int64_t row : batch.indices) {
      row_numbers_ += row;
    }
  }
  int64_t rows() const { return rows_; }
  int64_t row_numbers() const { return row_numbers_; }

  at::Tensor state() const override { return at::tensor({rows_, row_numbers_}, at::kLong); }
  void set_state(const at::Tensor& state) override {
    rows_ = state[0].item<int64_t>();
    row_numbers_ = state[1].item<int64_t>();
  }
  void merge_state(const at::Tensor& other) override { set_state(state() + other); }
  void reset() override { rows_ = row_numbers_ = 0; }

 private:
  int64_t rows_ = 0;
  int64_t row_numbers_ = 0;
};

/// Counts rows and returns a score with the name "score".
class ScriptedMetrics : public EvaluationMetrics {
 public:
  explicit ScriptedMetrics(double score) : score_(score) {}
  void update(const at::Tensor& outputs, const Batch& batch) override {
    counted_.add(batch);
    EXPECT_EQ(outputs.size(0), batch.rows());
    EXPECT_FALSE(outputs.requires_grad());
  }
  std::vector<Metric*> metrics() override { return {&counted_}; }
  std::map<std::string, double> compute() const override {
    return {{"rows", static_cast<double>(counted_.rows())},
            {"row_numbers", static_cast<double>(counted_.row_numbers())},
            {"score", score_}};
  }

 private:
  double score_;
  CountedRows counted_{};
};

} // namespace detail

TEST(TrainerWorld, AnySplitGivesTheUpdatesOfAPlainLoopOverTheJoinedBatch) {
  // 26 = 12 + 12 + 2: with four ranks the last step has rows on two of them.
  const int64_t rows = 26, total = 12;
  const auto reference = toy::plain_run(toy::Texts(rows), toy::arguments(), total);
  const int world_size = testing_support::test_world().world_size;
  for (const auto& [batch, window] : detail::splits(total, world_size)) {
    SCOPED_TRACE(std::to_string(batch) + " rows x " + std::to_string(window));
    const auto run = detail::run_split(toy::arguments(), rows, batch, window, false);
    EXPECT_LE(toy::largest_difference(*run.model, *reference.model), 1e-9);
    detail::expect_near(toy::history(*run.trainer, "loss"), reference.losses, 1e-10);
    // Ranks that had no row in a step do not know its norm.
    if (testing_support::test_world().rank == 0) {
      detail::expect_near(toy::history(*run.trainer, "grad_norm"), reference.grad_norms, 1e-10);
    }
  }
}

TEST(TrainerWorld, GroupingByLengthGivesTheSameUpdatesForAnySplit) {
  TrainingArguments arguments = toy::arguments();
  arguments.train_sampling_strategy = SamplingStrategy::group_by_length;
  arguments.logging_steps = 3;
  const int64_t rows = 77, total = 12;
  const auto reference = detail::run_split(arguments, rows, total, 1, true);
  const auto expected = toy::history(*reference.trainer, "loss");
  EXPECT_EQ(expected.size(), 7u); // 21 steps
  const int world_size = testing_support::test_world().world_size;
  for (const auto& [batch, window] : detail::splits(total, world_size)) {
    const auto run = detail::run_split(arguments, rows, batch, window, false);
    EXPECT_LE(toy::largest_difference(*run.model, *reference.model), 1e-9);
    detail::expect_near(toy::history(*run.trainer, "loss"), expected, 1e-10);
  }
}

TEST(TrainerWorld, EpochReportCountsTheBytesThatRanksSend) {
  struct Sent : TrainerCallback {
    std::vector<int64_t> bytes{}; // [epoch]
    void on_epoch_end(const EpochReport& epoch) override { bytes.push_back(epoch.bytes_sent); }
  };
  const int64_t ranks = testing_support::test_world().world_size;
  auto model = std::make_shared<toy::Classifier>();
  TrainingArguments arguments = toy::arguments();
  arguments.num_train_epochs = 2;
  arguments.per_device_train_batch_size = 2;
  Trainer trainer(model, toy::loss_function(model), arguments,
                  std::make_shared<toy::Texts>(10 * ranks), nullptr, {},
                  detail::trainer_accelerator(1, false));
  const auto sent = std::make_shared<Sent>();
  trainer.add_callback(sent);
  trainer.train();
  int64_t gradients = 0;
  for (const at::Tensor& parameter : model->parameters()) {
    gradients += static_cast<int64_t>(parameter.nbytes());
  }
  ASSERT_EQ(sent->bytes.size(), 2u);
  // Shared memory takes them once, a ring all but one rank's part twice; 5 steps an epoch.
  const int64_t of_epoch = ranks > 1 ? 5 * gradients : 0;
  EXPECT_GE(sent->bytes[0], of_epoch);
  EXPECT_GE(sent->bytes[1], sent->bytes[0] + of_epoch);
}

TEST(TrainerWorld, EvaluationCountsEveryRowOnceAndPredictionKeepsTheOrder) {
  for (const int64_t rows : {1, 2, 13}) {
    const toy::Texts texts(rows);
    auto model = std::make_shared<toy::Classifier>();
    TrainingArguments arguments = toy::arguments();
    arguments.per_device_eval_batch_size = 3;
    Trainer trainer(
        model, toy::loss_function(model), arguments, nullptr, nullptr,
        [] { return std::make_unique<detail::ScriptedMetrics>(0); },
        detail::trainer_accelerator(1, false));
    const auto record = trainer.evaluate(texts);
    EXPECT_EQ(record.at("eval_rows"), rows);
    EXPECT_EQ(record.at("eval_row_numbers"), rows * (rows - 1) / 2);

    std::vector<int64_t> all(rows);
    std::iota(all.begin(), all.end(), 0);
    const Batch joined = toy::on_run_device(texts.collate(all));
    model->eval();
    const LossOutput expected = toy::loss_function(model)(joined);
    EXPECT_NEAR(record.at("eval_loss").get<double>(),
                expected.loss_sum.item<double>() / static_cast<double>(rows), 1e-12);
    const PredictionOutput predicted = trainer.predict(texts);
    ASSERT_EQ(predicted.outputs.sizes(), expected.outputs.sizes());
    EXPECT_LE((predicted.outputs.cpu() - expected.outputs.cpu()).abs().max().item<double>(), 1e-12);
    EXPECT_EQ(predicted.metrics.at("test_loss"), record.at("eval_loss"));
  }
}

TEST(TrainerWorld, LossThatIsNotFiniteStopsAllRanksNamingUpdateAndRank) {
  const World& world = testing_support::test_world();
  const int culprit = world.world_size - 1;
  auto model = std::make_shared<toy::Classifier>();
  int calls = 0;
  const auto loss = toy::loss_function(model);
  TrainingArguments arguments = toy::arguments();
  arguments.per_device_train_batch_size = 2;
  Trainer trainer(
      model,
      [&](const Batch& batch) {
        LossOutput output = loss(batch);
        if (++calls == 2 && world.rank == culprit) {
          output.loss_sum = output.loss_sum * std::numeric_limits<double>::quiet_NaN();
        }
        return output;
      },
      arguments, std::make_shared<toy::Texts>(8 * world.world_size), nullptr, {},
      detail::trainer_accelerator(1, false));
  try {
    trainer.train();
    FAIL() << "trained on";
  } catch (const TrainingError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("step 2 of 12"), text.npos) << text;
    EXPECT_NE(text.find("rank " + std::to_string(culprit) + " (loss="), text.npos) << text;
  }
  EXPECT_EQ(trainer.state().global_step, 1);
  for (const at::Tensor& parameter : model->parameters()) {
    EXPECT_TRUE(parameter.isfinite().all().item<bool>());
  }
}

TEST(TrainerWorld, RankThatThrowsEndsTheOthersWithItsReason) {
  const World& world = testing_support::test_world();
  const int culprit = world.world_size - 1;
  auto model = std::make_shared<toy::Classifier>();
  int calls = 0;
  const auto loss = toy::loss_function(model);
  TrainingArguments arguments = toy::arguments();
  arguments.per_device_train_batch_size = 2;
  Trainer trainer(
      model,
      [&](const Batch& batch) {
        if (++calls == 3 && world.rank == culprit) {
          throw std::runtime_error("row 7 is bad");
        }
        return loss(batch);
      },
      arguments, std::make_shared<toy::Texts>(8 * world.world_size), nullptr, {},
      detail::trainer_accelerator(1, false));
  try {
    trainer.train();
    FAIL() << "trained on";
  } catch (const CommunicationError& error) {
    EXPECT_NE(world.rank, culprit);
    EXPECT_NE(std::string(error.what()).find("row 7 is bad"), std::string::npos) << error.what();
  } catch (const std::runtime_error& error) {
    EXPECT_EQ(world.rank, culprit) << error.what();
    EXPECT_STREQ(error.what(), "row 7 is bad");
  }
}

TEST(TrainerWorld, BestModelIsLoadedOnEveryRankAndItsFolderIsKept) {
  const auto folder = detail::shared_folder();
  const World& world = testing_support::test_world();
  auto model = std::make_shared<toy::Classifier>(at::kFloat);
  TrainingArguments arguments = toy::arguments();
  arguments.output_dir = (folder / "out").string();
  arguments.num_train_epochs = 4;
  arguments.eval_strategy = IntervalStrategy::epoch;
  arguments.save_strategy = SaveStrategy::epoch;
  arguments.save_total_limit = 1;
  arguments.load_best_model_at_end = true;
  arguments.metric_for_best_model = "score";
  arguments.per_device_train_batch_size = 4;
  std::vector<double> scores = {0.5, 0.9, 0.7, 0.8};
  size_t evaluation = 0;
  const auto train = std::make_shared<toy::Texts>(8 * world.world_size);
  Trainer trainer(
      model, toy::loss_function(model), arguments, train, std::make_shared<toy::Texts>(5),
      [&] { return std::make_unique<detail::ScriptedMetrics>(scores[evaluation++]); },
      detail::trainer_accelerator(1, false));
  struct CountFolders : TrainerCallback {
    explicit CountFolders(std::vector<size_t>& c) : counts(c) {}
    void on_save(const std::filesystem::path& path) override {
      counts.push_back(checkpoint_folders(path.parent_path()).size());
    }
    std::vector<size_t>& counts;
  };
  std::vector<size_t> saves;
  trainer.add_callback(std::make_shared<CountFolders>(saves));
  const TrainOutput output = trainer.train();
  EXPECT_EQ(output.global_step, 8); // 2 steps an epoch
  EXPECT_EQ(trainer.state().best_metric, 0.9);
  EXPECT_EQ(trainer.state().best_global_step, 4);
  // During the run the newest checkpoint exists, too. At the end a limit of 1 keeps only one.
  if (world.rank == 0) { // the rank that removes them
    EXPECT_EQ(saves, (std::vector<size_t>{1, 1, 2, 2}));
  }
  const auto folders = checkpoint_folders(folder / "out");
  ASSERT_EQ(folders.size(), 1u);
  EXPECT_EQ(folders[0].global_step, 4);

  const auto largest_change = [&](const std::filesystem::path& path) {
    const SafetensorsReader reader(path / "model.safetensors");
    double largest = 0;
    for (const auto& entry : model->named_parameters()) {
      largest = std::max(
          largest, (reader.tensor(entry.key()) - entry.value().cpu()).abs().max().item<double>());
    }
    return largest;
  };
  EXPECT_EQ(largest_change(folders[0].path), 0);
  EXPECT_EQ(largest_change(folder / "out"), 0);
  trainer.accelerator().wait_for_everyone(); // all ranks have checked
}

TEST(TrainerWorld, FolderOfAnotherRunIsRefusedOnEveryRank) {
  const auto folder = detail::shared_folder();
  const auto train = [&](bool overwrite) {
    auto model = std::make_shared<toy::Classifier>();
    TrainingArguments arguments = toy::arguments();
    arguments.output_dir = folder.string();
    arguments.overwrite_output_dir = overwrite;
    arguments.max_steps = 1;
    arguments.warmup_steps = 0;
    Trainer trainer(model, toy::loss_function(model), arguments, std::make_shared<toy::Texts>(9),
                    nullptr, {}, detail::trainer_accelerator(1, false));
    trainer.train();
    trainer.accelerator().wait_for_everyone();
  };
  train(false);
  try {
    train(false);
    FAIL() << "not refused";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("holds another run"), std::string::npos)
        << error.what();
  }
  train(true);
}

TEST(TrainerWorld, MoreProcessesThanRowsIsAnErrorThatNamesBoth) {
  const World& world = testing_support::test_world();
  auto model = std::make_shared<toy::Classifier>();
  Trainer trainer(model, toy::loss_function(model), toy::arguments(),
                  std::make_shared<toy::Texts>(world.world_size - 1), nullptr, {},
                  detail::trainer_accelerator(1, false));
  try {
    trainer.train();
    FAIL() << "trained on";
  } catch (const InputError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("processes=" + std::to_string(world.world_size)), text.npos) << text;
  }
}

} // namespace hasten
