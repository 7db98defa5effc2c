// A run's own part of a state, saving it, and going on from it.
#include <torch/optim/adamw.h>

#include <string>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/io/commit.h"
#include "hasten/trainer/output_folder.h"
#include "hasten/trainer/resume.h"
#include "training_run.h"

namespace hasten::detail {

void RunState::save_state(NamedTensors&, nlohmann::json& values) const {
  if (run_ != nullptr) {
    values = run_->progress();
  }
}

void RunState::load_state(const NamedTensors&, const nlohmann::json& values) {
  if (run_ != nullptr) {
    run_->restore(values);
  }
}

nlohmann::json loss_total_json(const LossTotal& total) { return {total.loss_sum, total.weight}; }

nlohmann::json TrainingRun::progress() const {
  nlohmann::json evaluation = nlohmann::json::object();
  for (const auto& [name, value] : epoch_evaluation_) {
    evaluation[name] = value;
  }
  return {{"state", try_parse_json(trainer_state_json(state_)).value},
          {"epoch_index", epoch_},
          {"epoch_ended", epoch_ended_},
          {"windows_counted", windows_counted_},
          {"since_record", loss_total_json(since_record_)},
          {"of_epoch", loss_total_json(of_epoch_)},
          {"of_run", loss_total_json(of_run_)},
          {"samples", samples_},
          {"samples_before_epoch", samples_before_epoch_},
          {"tokens", {tokens_.real, tokens_.padded}},
          {"tokens_before_epoch", {tokens_before_epoch_.real, tokens_before_epoch_.padded}},
          {"epoch_evaluation", finite_json(std::move(evaluation))},
          {"run_seconds", run_seconds()},
          {"seconds_aside", seconds_aside_},
          {"seconds_trained_before_epoch", seconds_trained_before_epoch_},
          {"stopping", stopping_},
          {"own_learning_rate", own_learning_rate_},
          {"evaluated_step", last_evaluated_step_}};
}

void TrainingRun::restore(const nlohmann::json& values) {
  // All is read before anything is set.
  const TrainerState state = trainer_state_from(values.at("state"));
  const auto read_total = [&](const char* name) {
    const auto& pair = values.at(name);
    return LossTotal{pair.at(0).get<double>(), pair.at(1).get<double>()};
  };
  const auto read_tokens = [&](const char* name) {
    const auto& pair = values.at(name);
    return Tokens{pair.at(0).get<int64_t>(), pair.at(1).get<int64_t>()};
  };
  const auto read_number = [&](const char* name) { return values.at(name).get<double>(); };
  const auto read_count = [&](const char* name) { return values.at(name).get<int64_t>(); };
  const LossTotal since_record = read_total("since_record");
  const LossTotal of_epoch = read_total("of_epoch");
  const LossTotal of_run = read_total("of_run");
  const Tokens tokens = read_tokens("tokens");
  const Tokens tokens_before = read_tokens("tokens_before_epoch");
  std::map<std::string, double> evaluation;
  for (const auto& [name, value] : values.at("epoch_evaluation").items()) {
    if (value.is_number()) {
      evaluation[name] = value.get<double>();
    }
  }
  const int64_t epoch = read_count("epoch_index");
  const bool epoch_ended = values.at("epoch_ended").get<bool>();
  const int64_t windows = read_count("windows_counted");
  const int64_t samples = read_count("samples");
  const int64_t samples_before = read_count("samples_before_epoch");
  const double seconds = read_number("run_seconds");
  const double aside = read_number("seconds_aside");
  const double trained_before = read_number("seconds_trained_before_epoch");
  const bool stopping = values.value("stopping", false);
  const bool own_rate = values.value("own_learning_rate", false);
  const int64_t evaluated = values.value("evaluated_step", int64_t{-1});

  state_ = state;
  epoch_ = epoch;
  epoch_ended_ = epoch_ended;
  windows_counted_ = static_cast<uint64_t>(windows);
  since_record_ = since_record;
  of_epoch_ = of_epoch;
  of_run_ = of_run;
  samples_ = samples;
  samples_before_epoch_ = samples_before;
  tokens_ = tokens;
  tokens_before_epoch_ = tokens_before;
  epoch_evaluation_ = std::move(evaluation);
  run_seconds_before_ = seconds;
  run_time_.restart();
  seconds_aside_ = aside;
  seconds_trained_before_epoch_ = trained_before;
  last_saved_step_ = state_.global_step;
  last_evaluated_step_ = evaluated;
  stopping_ = stopping;
  own_learning_rate_ = own_rate;
}

void TrainingRun::register_states() {
  Accelerator& accelerator = *parts_.accelerator;
  accelerator.register_for_checkpointing("trainer", run_state_);
  if (plateau_) {
    accelerator.register_for_checkpointing("plateau", plateau_);
  }
  for (const auto& [name, callback] : parts_.stateful_callbacks) {
    accelerator.register_for_checkpointing("callback." + name, callback);
  }
}

/// What the file says of an optimizer's options yields to the arguments, which
/// are the same or were allowed to differ; but where rates fell on a plateau or a
/// callback set them, to those rates.
void TrainingRun::load_checkpoint() {
  std::vector<std::unique_ptr<torch::optim::OptimizerOptions>> options;
  for (const auto& group : torch_optimizer_->param_groups()) {
    options.push_back(group.options().clone());
  }
  std::vector<double> peaks = lr_scheduler_->base_lrs();
  parts_.accelerator->load_state(start_.folder, {.verify_checksums = false});
  if (plateau_ || own_learning_rate_) {
    peaks = lr_scheduler_->base_lrs();
  }
  for (size_t i = 0; i < options.size(); ++i) {
    torch_optimizer_->param_groups()[i].set_options(std::move(options[i]));
  }
  lr_scheduler_->set_base_lrs(peaks);
  if (is_local()) { // ranks need not have had equally many
    windows_counted_ = parts_.accelerator->last_window().number;
  }
  if (state_.best_global_step) { // the folder may have been moved
    const auto best = output_dir_ / ("checkpoint-" + std::to_string(*state_.best_global_step));
    std::error_code error;
    if (std::filesystem::exists(best, error)) {
      state_.best_model_checkpoint = best.string();
    }
  }
}

void TrainingRun::open_output_dir() {
  const bool goes_on = start_.own_folder;
  if (goes_on) {
    prepare_resumed_dir(output_dir_, state_.global_step);
  } else {
    clear_output_dir(output_dir_);
  }
  metrics_file_.open(output_dir_ / "metrics.jsonl", goes_on ? std::ios::app : std::ios::trunc);
  if (!metrics_file_) {
    throw InputError("trainer::train",
                     "cannot write path=" + (output_dir_ / "metrics.jsonl").string(),
                     "a folder this user may write to");
  }
  if (!start_.folder.empty()) {
    append_record("resume", {{"step", state_.global_step},
                             {"epoch", state_.epoch},
                             {"from", start_.folder.string()},
                             {"world_size", parts_.accelerator->num_processes()}});
  }
}

nlohmann::json TrainingRun::run_json(bool finished) const {
  const bool at_epoch_end = state_.global_step == epochs_last_step(epoch_);
  const int64_t drop = data_loader_->options().drop_batch;
  return {{"format", 1},
          {"hasten_version", HASTEN_VERSION},
          {"finished", finished},
          {"world_size", parts_.accelerator->num_processes()},
          {"gradient_accumulation_steps", parts_.arguments.gradient_accumulation_steps},
          {"total_batch", total_batch(parts_)},
          {"updates_per_epoch", plan_.updates_per_epoch},
          {"train_rows", parts_.train->size()},
          {"global_step", state_.global_step},
          {"epoch_index", epoch_},
          {"at_epoch_end", at_epoch_end},
          {"epoch_rows_seen", at_epoch_end ? data_loader_->epoch_rows() : loader_->cursor()},
          {"drop_batch", drop > 0 ? drop
                                  : parts_.arguments.per_device_train_batch_size *
                                        parts_.accelerator->num_processes()},
          {"facts", {{"listed", parts_.listed_facts}, {"altering", parts_.altering_facts}}},
          {"samples_seen", samples_},
          {"tokens_seen", tokens_.real},
          {"padded_tokens_seen", tokens_.padded},
          {"train_loss", of_run_.mean()},
          {"class_weights", parts_.class_weights}};
}

/// The model's own files and the records, into a folder in the making.
void TrainingRun::write_model_folder(const std::filesystem::path& folder, bool finished) const {
  parts_.files.save(folder);
  write_file_atomically(folder / "trainer_state.json", trainer_state_json(state_));
  write_file_atomically(folder / kRunFile, finite_json(run_json(finished)).dump(2) + "\n");
  write_file_atomically(folder / "training_args.json",
                        nlohmann::json(parts_.arguments).dump(2) + "\n");
}

void TrainingRun::save_checkpoint() {
  if (last_saved_step_ == state_.global_step) {
    return;
  }
  last_saved_step_ = state_.global_step;
  collect_tokens();
  parts_.require_output_dir();
  const auto folder = output_dir_ / ("checkpoint-" + std::to_string(state_.global_step));
  if (state_.best_global_step == state_.global_step) {
    state_.best_model_checkpoint = folder.string();
  }
  if (parts_.arguments.save_only_model) {
    parts_.accelerator->summon_full_params(
        [&] {
          FolderCommit commit(folder, CommitMode::replace);
          write_model_folder(commit.folder(), false);
          commit.commit();
        },
        parts_.model);
  } else {
    parts_.accelerator->save_state(folder, {.also_write =
                                                [this](const std::filesystem::path& place) {
                                                  write_model_folder(place, false);
                                                },
                                            .replace_any = true});
  }
  if (parts_.is_main()) { // the new one is there: old ones may go
    rotate_checkpoints(output_dir_, parts_.arguments.save_total_limit, state_.best_global_step);
  }
  parts_.accelerator->wait_for_everyone();
  notify([&](TrainerCallback& c) { c.on_save(folder); });
}

void TrainingRun::save_final() {
  collect_tokens();
  parts_.require_output_dir();
  parts_.accelerator->summon_full_params(
      [this] {
        FolderCommit commit(output_dir_, CommitMode::merge);
        write_model_folder(commit.folder(), true);
        commit.commit();
      },
      parts_.model);
}

} // namespace hasten::detail
