// What a run writes: records, checkpoints, its own part of a state.
#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/optim/adamw.h>
#include <torch/version.h>

#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"
#include "hasten/base/world.h"
#include "hasten/io/commit.h"
#include "hasten/trainer/output_folder.h"
#include "hasten/trainer/resume.h"
#include "training_run.h"

namespace hasten::detail {

void TrainingRun::collect_losses() {
  take_losses();
  if (!is_local()) {
    return;
  }
  const LocalSGDReport rounds = local_sgd_->report();
  const double grad_norm = step_->grad_norm();
  const bool has_norm = std::isfinite(grad_norm);
  at::Tensor sums = at::tensor({uncollected_losses_.loss_sum, uncollected_losses_.weight,
                                static_cast<double>(uncollected_rows_), has_norm ? grad_norm : 0.0,
                                has_norm ? 1.0 : 0.0, rounds.seconds, rounds.communication_share},
                               at::kDouble);
  sums = parts_.accelerator->reduce(sums.to(parts_.accelerator->device())).cpu();
  const double* sum = sums.const_data_ptr<double>();
  for (LossTotal* total : {&progress_.since_record, &progress_.of_epoch, &progress_.of_run}) {
    total->loss_sum += sum[0];
    total->weight += sum[1];
  }
  // The ranks of a copy have all counted what they did together.
  progress_.samples += static_cast<int64_t>(sum[2]) / rounds.ranks_per_copy;
  mean_grad_norm_ = sum[3] / sum[4];
  const int ranks = parts_.accelerator->num_processes();
  round_seconds_ = sum[5] / ranks;
  communication_share_ = sum[6] / ranks;
  uncollected_losses_ = {};
  uncollected_rows_ = 0;
}

void TrainingRun::describe_rounds(nlohmann::json& record) {
  const LocalSGDReport rounds = local_sgd_->report();
  record["local_sgd_rounds"] = rounds.rounds;
  record["local_sgd_spread"] = rounds.last.spread;
  record["local_sgd_bytes"] = rounds.bytes;
  record["local_sgd_seconds"] = round_seconds_;
  record["local_sgd_share"] = communication_share_;
}

/// Of a name in GradientNorms.
std::string norm_key(const std::string& name) {
  return "grad_norm/" + (name.empty() ? "model" : name);
}

void TrainingRun::describe_gradient_norms(nlohmann::json& record) {
  if (parts_.arguments.log_gradient_norms == LogGradientNorms::no) {
    return;
  }
  const GradientNorms& norms = step_->gradient_norms();
  if (is_local()) {
    // A rank whose window had no row has none.
    std::map<std::string, std::pair<double, int>> sums;
    for (const auto& theirs : parts_.communicator().all_gather_object(
             {{"names", norms.names}, {"norms", norms.norms}}, "gradient norms")) {
      for (size_t i = 0; i < theirs.at("names").size(); ++i) {
        auto& [sum, ranks] = sums[theirs["names"][i].get<std::string>()];
        sum += theirs["norms"][i].get<double>();
        ++ranks;
      }
    }
    for (const auto& [name, sum] : sums) {
      record[norm_key(name)] = sum.first / sum.second;
    }
    return;
  }
  for (size_t i = 0; i < norms.names.size(); ++i) {
    record[norm_key(norms.names[i])] = norms.norms[i];
  }
}

void TrainingRun::log_training() {
  collect_losses();
  last_logged_step_ = state_.global_step;
  nlohmann::json record = {{"loss", progress_.since_record.mean()},
                           {"learning_rate", lr_scheduler_->used_lr().at(0)},
                           {"epoch", state_.epoch},
                           {"step", state_.global_step}};
  if (step_->scales_losses()) {
    record["loss_scale"] = parts_.accelerator->loss_scale().value();
    record["overflows"] = step_->overflows();
  }
  if (parts_.arguments.max_grad_norm > 0) {
    record["grad_norm"] = is_local() ? mean_grad_norm_ : step_->grad_norm().item();
  }
  describe_gradient_norms(record);
  if (is_local()) {
    describe_rounds(record);
  }
  progress_.since_record = {};
  state_.log_history.push_back(record);
  record.update(take_speed());
  control_.notify([&](TrainerCallback& c) { c.on_log(record); });
  append_record("train", record);
}

nlohmann::json TrainingRun::take_speed() {
  const StepSeconds& s = step_seconds_;
  const double trained = seconds_trained();
  const double seconds = trained - std::exchange(seconds_at_record_, trained);
  const int64_t samples = progress_.samples - std::exchange(samples_at_record_, progress_.samples);
  const auto steps = static_cast<double>(std::max<int64_t>(1, s.steps));
  nlohmann::json speed = {{"samples_per_second", static_cast<double>(samples) / seconds},
                          {"step_seconds",
                           {{"compute", s.compute / steps},
                            {"recompute", s.recompute / steps},
                            {"communication", s.communication / steps},
                            {"data", s.data / steps},
                            {"save", s.save / steps}}}};
  step_seconds_ = {};
  return speed;
}

void TrainingRun::evaluate_and_log() {
  progress_.last_evaluated_step = state_.global_step;
  nlohmann::json record = evaluate_dataset(parts_, *parts_.eval, "eval");
  control_.take_controls(/*common=*/false); // of on_prediction_step
  record.get_to(progress_.epoch_evaluation);
  record["epoch"] = state_.epoch;
  record["step"] = state_.global_step;
  state_.log_history.push_back(record);
  append_record("eval", record);
  control_.notify([&](TrainerCallback& c) { c.on_evaluate(record); });
}

void TrainingRun::step_plateau(const nlohmann::json& record) {
  if (!plateau_) {
    return;
  }
  const auto value = record.find(parts_.arguments.best_metric_name());
  if (value == record.end()) {
    refuse_metric(parts_.arguments.metric_for_best_model, record);
  }
  if (plateau_->step(value->get<double>())) {
    lr_scheduler_->set_base_lrs(mapped(torch_optimizer_->param_groups(), [](const auto& group) {
      return group.options().get_lr();
    })); // which it keeps
  }
}

bool TrainingRun::consider_best(const nlohmann::json& record, bool will_be_saved) {
  const TrainingArguments& a = parts_.arguments;
  const std::string name = a.best_metric_name();
  const auto value = record.find(name);
  if (value == record.end()) {
    if (!a.load_best_model_at_end && a.save_strategy != SaveStrategy::best) {
      return false; // nothing depends on it
    }
    refuse_metric(parts_.arguments.metric_for_best_model, record);
  }
  // What is not saved cannot be gone back to.
  const bool saves_best = a.save_strategy == SaveStrategy::best;
  if (!will_be_saved && a.save_strategy != SaveStrategy::no && !saves_best) {
    return false;
  }
  const auto metric = value->get<double>();
  const bool better = !state_.best_metric || (a.best_is_greater() ? metric > *state_.best_metric
                                                                  : metric < *state_.best_metric);
  if (better && std::isfinite(metric)) {
    state_.best_metric = metric;
    state_.best_global_step = state_.global_step;
    return saves_best;
  }
  return false;
}

void TrainingRun::append_record(const char* type, const nlohmann::json& record) {
  if (!metrics_) {
    return; // another rank's, or nothing is written
  }
  parts_.require_output_dir();
  nlohmann::json line = record;
  line["type"] = type;
  metrics_->log(line, std::nullopt);
}

void TrainingRun::collect_tokens() {
  at::Tensor sums =
      at::tensor({uncollected_.real, uncollected_.padded}, at::TensorOptions().dtype(at::kLong));
  sums = parts_.accelerator->reduce(sums.to(parts_.accelerator->device())).cpu();
  uncollected_ = {};
  progress_.tokens.real += sums[0].item<int64_t>();
  progress_.tokens.padded += sums[1].item<int64_t>();
  state_.num_input_tokens_seen = progress_.tokens.padded;
}

void TrainingRun::load_best() {
  if (state_.best_model_checkpoint.empty()) {
    return; // no evaluation gave a number: the model as it is
  }
  if (state_.best_global_step != state_.global_step) {
    parts_.accelerator->load_full_params(
        [this] { parts_.files.load(state_.best_model_checkpoint); }, parts_.model);
  }
  if (parts_.leads_folder() && parts_.arguments.save_total_limit == 1) {
    keep_only_checkpoint(output_dir_, *state_.best_global_step);
  }
}

void RunReference::save_state(NamedTensors&, nlohmann::json& values) const {
  if (run_ != nullptr) {
    values = run_->saved_progress();
  }
}

void RunReference::load_state(const NamedTensors&, const nlohmann::json& values) {
  if (run_ != nullptr) {
    run_->restore(values);
  }
}

void to_json(nlohmann::json& json, const LossTotal& total) {
  json = {total.loss_sum, total.weight};
}
void from_json(const nlohmann::json& json, LossTotal& total) {
  total = {json.at(0).get<double>(), json.at(1).get<double>()};
}
void to_json(nlohmann::json& json, const TokenCount& count) { json = {count.real, count.padded}; }
void from_json(const nlohmann::json& json, TokenCount& count) {
  count = {json.at(0).get<int64_t>(), json.at(1).get<int64_t>()};
}

// What every state has. trainer_state.json and hasten_state.json have the rest; see
// load_checkpoint().
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(RunProgress, epoch_ended, since_record, of_epoch, of_run,
                                   samples_before_epoch, tokens_before_epoch,
                                   seconds_trained_before_epoch)

nlohmann::json TrainingRun::saved_progress() const {
  nlohmann::json values = progress_;
  values.update({{"epoch_evaluation", finite_json(progress_.epoch_evaluation)},
                 {"run_seconds", run_seconds()},
                 {"seconds_aside", progress_.seconds_not_training},
                 {"stopping", control_.stopping()},
                 {"own_learning_rate", control_.own_learning_rate()},
                 {"evaluated_step", progress_.last_evaluated_step}});
  return values;
}

void TrainingRun::restore(const nlohmann::json& values) {
  // All is read before anything is set.
  auto progress = values.get<RunProgress>();
  progress.seconds_not_training = values.at("seconds_aside").get<double>();
  for (const auto& [name, value] : values.at("epoch_evaluation").items()) {
    if (value.is_number()) {
      progress.epoch_evaluation[name] = value.get<double>();
    }
  }
  progress.last_evaluated_step = values.value("evaluated_step", int64_t{-1});
  const auto seconds = values.at("run_seconds").get<double>();
  const bool stopping = values.value("stopping", false);
  const bool own_learning_rate = values.value("own_learning_rate", false);

  progress_ = std::move(progress);
  run_seconds_before_ = seconds;
  run_time_.restart();
  control_.restore(stopping, own_learning_rate);
}

void TrainingRun::register_states() {
  Accelerator& accelerator = *parts_.accelerator;
  accelerator.register_for_checkpointing("trainer", run_reference_);
  if (plateau_) {
    accelerator.register_for_checkpointing("plateau", plateau_);
  }
  for (const auto& [name, callback] : parts_.stateful_callbacks) {
    accelerator.register_for_checkpointing("callback." + name, callback);
  }
}

/// The file's peak stays if a plateau or a callback set it; else the arguments' may differ from it.
void TrainingRun::load_checkpoint() {
  parts_.accelerator->load_state(start_.folder, {.verify_checksums = false});
  if (!plateau_ && !control_.own_learning_rate()) {
    lr_scheduler_->set_base_lrs(std::vector(groups_.size(), parts_.arguments.learning_rate));
  }
  state_ = read_trainer_state(start_.folder / "trainer_state.json");
  start_.run.at("epoch_index").get_to(progress_.epoch_index);
  start_.run.at("samples_seen").get_to(progress_.samples);
  progress_.tokens = {start_.run.at("tokens_seen").get<int64_t>(), state_.num_input_tokens_seen};
  last_saved_step_ = state_.global_step;
  seconds_at_record_ = seconds_trained();
  samples_at_record_ = progress_.samples;
  if (state_.best_global_step) { // the folder may have been moved
    const auto best = output_dir_ / ("checkpoint-" + std::to_string(*state_.best_global_step));
    std::error_code error;
    if (std::filesystem::exists(best, error)) {
      state_.best_model_checkpoint = best.string();
    }
  }
}

void TrainingRun::open_output_dir() {
  if (start_.own_folder) {
    prepare_resumed_dir(output_dir_, state_.global_step, state_.best_global_step);
  } else {
    clear_output_dir(output_dir_);
  }
  if (!parts_.is_main()) {
    return; // rank 0 writes the records
  }
  metrics_ = make_tracker("json", output_dir_, std::nullopt, "trainer::train");
  if (!start_.own_folder) {
    append_record("start", {{"command", command_line()},
                            {"host", host_name()},
                            {"cpu", proc_value("/proc/cpuinfo", "model name")},
                            {"allowed_cores", allowed_cores()},
                            {"threads", at::get_num_threads()},
                            {"device", parts_.accelerator->device().str()},
                            {"libtorch_version", TORCH_VERSION}});
  }
  if (!start_.folder.empty()) {
    append_record("resume", {{"step", state_.global_step},
                             {"epoch", state_.epoch},
                             {"from", start_.folder.string()},
                             {"world_size", parts_.accelerator->num_processes()}});
  }
}

nlohmann::json TrainingRun::run_json(bool finished) const {
  const bool at_epoch_end = state_.global_step == epochs_last_step(progress_.epoch_index);
  const int64_t drop = data_loader_->options().drop_batch;
  return {{"format", 1},
          {"hasten_version", HASTEN_VERSION},
          {"finished", finished},
          {"world_size", parts_.accelerator->num_processes()},
          {"total_batch", total_batch(parts_)},
          {"steps_per_epoch", plan_.steps_per_epoch},
          {"train_rows", parts_.train->size()},
          {"epoch_index", progress_.epoch_index},
          {"at_epoch_end", at_epoch_end},
          {"epoch_rows_seen", at_epoch_end ? data_loader_->epoch_rows() : step_->loader().cursor()},
          {"drop_batch", drop > 0 ? drop
                                  : parts_.arguments.per_device_train_batch_size *
                                        parts_.accelerator->num_processes()},
          {"facts", {{"listed", parts_.listed_facts}, {"altering", parts_.altering_facts}}},
          {"samples_seen", progress_.samples},
          {"tokens_seen", progress_.tokens.real},
          {"class_weights", parts_.class_weights}};
}

/// Writes the model's files and the records into the folder of an unfinished save.
void TrainingRun::write_model_folder(const std::filesystem::path& folder, bool finished) const {
  write_file_atomically(folder / "trainer_state.json", trainer_state_json(state_));
  write_file_atomically(folder / kRunFile, finite_json(run_json(finished)).dump(2) + "\n");
  write_file_atomically(folder / "training_args.json",
                        nlohmann::json(parts_.arguments).dump(2) + "\n");
  parts_.files.save(folder); // may add to these files
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
                                            .replace_any = true,
                                            .replicas = parts_.arguments.save_replicas});
  }
  if (parts_.leads_folder()) { // after the new one is complete
    if (state_.best_global_step == state_.global_step) {
      link_best_checkpoint(output_dir_, state_.global_step);
    }
    rotate_checkpoints(output_dir_, parts_.arguments.save_total_limit, state_.best_global_step);
  }
  parts_.accelerator->wait_for_everyone();
  control_.notify([&](TrainerCallback& c) { c.on_save(folder); });
}

void TrainingRun::save_final() {
  collect_tokens();
  parts_.require_output_dir();
  std::unique_ptr<FolderCommit> commit;
  const bool on_each = parts_.arguments.save_on_each_node && parts_.folders.several();
  const auto begin = [&] {
    commit = std::make_unique<FolderCommit>(output_dir_, CommitMode::merge);
  };
  parts_.accelerator->summon_full_params(
      [&] {
        begin();
        write_model_folder(commit->folder(), true);
        if (!on_each) {
          commit->commit();
        }
      },
      parts_.model);
  if (!on_each) {
    return;
  }
  const auto agreed = [&](const auto& step) {
    on_every_rank(parts_.communicator(), "trainer::train", [&] {
      step();
      return nlohmann::json();
    });
  };
  agreed([&] {
    if (!commit && parts_.leads_folder()) {
      begin();
    }
  });
  share_files(parts_.communicator(), parts_.folders, 1, commit.get()); // all equal to rank 0's
  agreed([&] {
    if (commit) {
      commit->commit();
    }
  });
}

} // namespace hasten::detail
