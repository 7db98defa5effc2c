#include <ATen/ATen.h>

#include <cmath>
#include <string>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/io/commit.h"
#include "hasten/trainer/output_folder.h"
#include "training_run.h"

namespace hasten::detail {

void TrainingRun::log_training() {
  nlohmann::json record = {
      {"loss", since_record_.mean()},
      {"learning_rate", learning_rate_},
      {"epoch", state_.epoch},
      {"step", state_.global_step}};
  if (parts_.arguments.max_grad_norm > 0) {
    record["grad_norm"] = grad_norm_;
  }
  since_record_ = {};
  state_.log_history.push_back(record);
  append_record("train", record);
  parts_.notify([&](TrainerCallback& c) { c.on_log(record); });
}

void TrainingRun::evaluate_and_log() {
  nlohmann::json record = evaluate_dataset(parts_, *parts_.eval, "eval");
  epoch_evaluation_.clear();
  for (const auto& [name, value] : record.items()) {
    epoch_evaluation_[name] = value.get<double>();
  }
  record["epoch"] = state_.epoch;
  record["step"] = state_.global_step;
  state_.log_history.push_back(record);
  append_record("eval", record);
  parts_.notify([&](TrainerCallback& c) { c.on_evaluate(record); });
}

void TrainingRun::consider_best(
    const nlohmann::json& record, bool will_be_saved) {
  const TrainingArguments& a = parts_.arguments;
  const std::string name = a.best_metric_name();
  const auto value = record.find(name);
  if (value == record.end()) {
    if (!a.load_best_model_at_end) {
      return; // nothing depends on it
    }
    std::string names;
    for (const auto& entry : record.items()) {
      names += (names.empty() ? "" : ", ") + entry.key();
    }
    throw InputError(
        "trainer::train",
        "the evaluation record lacks metric_for_best_model=" +
            a.metric_for_best_model,
        "one of " + names);
  }
  // What was not saved cannot be gone back to.
  if (!will_be_saved && a.save_strategy != IntervalStrategy::no) {
    return;
  }
  const auto metric = value->get<double>();
  const bool better = !state_.best_metric ||
                      (a.best_is_greater() ? metric > *state_.best_metric
                                           : metric < *state_.best_metric);
  if (better && std::isfinite(metric)) {
    state_.best_metric = metric;
    state_.best_global_step = state_.global_step;
  }
}

void TrainingRun::append_record(
    const char* type, const nlohmann::json& record) {
  if (!metrics_file_.is_open()) {
    return; // another rank's, or nothing is written
  }
  nlohmann::json line = finite_json(record);
  line["type"] = type;
  metrics_file_ << line.dump() << '\n' << std::flush;
  if (!metrics_file_) {
    throw Error(
        "trainer::train",
        "cannot write path=" + (output_dir_ / "metrics.jsonl").string(),
        "space on the disk and the right to write");
  }
}

void TrainingRun::collect_tokens() {
  at::Tensor sums = at::tensor(
      {uncollected_.real, uncollected_.padded},
      at::TensorOptions().dtype(at::kLong));
  sums =
      parts_.accelerator->reduce(sums.to(parts_.accelerator->device())).cpu();
  uncollected_ = {};
  tokens_.real += sums[0].item<int64_t>();
  tokens_.padded += sums[1].item<int64_t>();
  state_.num_input_tokens_seen = tokens_.padded;
}

std::string TrainingRun::hasten_state_json() const {
  const nlohmann::json json = {
      {"format", 1},
      {"hasten_version", HASTEN_VERSION},
      {"world_size", parts_.accelerator->num_processes()},
      {"gradient_accumulation_steps",
       parts_.arguments.gradient_accumulation_steps},
      {"updates_per_epoch", plan_.updates_per_epoch},
      {"train_rows", parts_.train->size()},
      {"samples_seen", samples_},
      {"tokens_seen", tokens_.real},
      {"padded_tokens_seen", tokens_.padded},
      {"train_loss", of_run_.mean()}};
  return finite_json(json).dump(2) + "\n";
}

std::string TrainingRun::training_args_json() const {
  return nlohmann::json(parts_.arguments).dump(2) + "\n";
}

void TrainingRun::save_checkpoint() {
  if (last_saved_step_ == state_.global_step) {
    return;
  }
  last_saved_step_ = state_.global_step;
  collect_tokens();
  const auto folder =
      output_dir_ / ("checkpoint-" + std::to_string(state_.global_step));
  if (state_.best_global_step == state_.global_step) {
    state_.best_model_checkpoint = folder.string();
  }
  if (parts_.is_main()) {
    FolderCommit commit(folder, CommitMode::replace);
    parts_.files.save(commit.folder());
    commit.write("trainer_state.json", trainer_state_json(state_));
    commit.write("hasten_state.json", hasten_state_json());
    commit.write("training_args.json", training_args_json());
    commit.commit();
    rotate_checkpoints(
        output_dir_,
        parts_.arguments.save_total_limit,
        state_.best_global_step);
  }
  parts_.accelerator->wait_for_everyone(); // complete for all, or an error
  parts_.notify([&](TrainerCallback& c) { c.on_save(folder); });
}

void TrainingRun::load_best() {
  if (state_.best_model_checkpoint.empty()) {
    return; // no evaluation gave a number: the model as it is
  }
  if (state_.best_global_step != state_.global_step) {
    if (parts_.is_main()) {
      parts_.files.load(state_.best_model_checkpoint);
    }
    broadcast_model(parts_);
  }
  if (parts_.is_main() && parts_.arguments.save_total_limit == 1) {
    keep_only_checkpoint(output_dir_, *state_.best_global_step);
  }
}

void TrainingRun::save_final() {
  collect_tokens();
  if (parts_.is_main()) {
    FolderCommit commit(output_dir_, CommitMode::merge);
    parts_.files.save(commit.folder());
    commit.write("trainer_state.json", trainer_state_json(state_));
    commit.write("hasten_state.json", hasten_state_json());
    commit.write("training_args.json", training_args_json());
    commit.commit();
  }
  parts_.accelerator->wait_for_everyone();
}

} // namespace hasten::detail
