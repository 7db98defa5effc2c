// What a run writes: records, checkpoints, its own part of a state.
#include <ATen/ATen.h>
#include <torch/optim/adamw.h>

#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/io/commit.h"
#include "hasten/trainer/output_folder.h"
#include "hasten/trainer/resume.h"
#include "training_run.h"

namespace hasten::detail {

void TrainingRun::collect_losses() {
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
  for (LossTotal* total : {&since_record_, &of_epoch_, &of_run_}) {
    total->loss_sum += sum[0];
    total->weight += sum[1];
  }
  // The ranks of a copy have all counted what they did together.
  samples_ += static_cast<int64_t>(sum[2]) / rounds.ranks_per_copy;
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
  nlohmann::json record = {{"loss", since_record_.mean()},
                           {"learning_rate", learning_rate_},
                           {"epoch", state_.epoch},
                           {"step", state_.global_step}};
  if (step_->scales_losses()) {
    record["loss_scale"] = parts_.accelerator->loss_scale().value();
    record["overflows"] = step_->overflows();
  }
  if (parts_.arguments.max_grad_norm > 0) {
    record["grad_norm"] = is_local() ? mean_grad_norm_ : step_->grad_norm();
  }
  describe_gradient_norms(record);
  if (is_local()) {
    describe_rounds(record);
  }
  since_record_ = {};
  state_.log_history.push_back(record);
  append_record("train", record);
  control_.notify([&](TrainerCallback& c) { c.on_log(record); });
}

void TrainingRun::evaluate_and_log() {
  last_evaluated_step_ = state_.global_step;
  nlohmann::json record = evaluate_dataset(parts_, *parts_.eval, "eval");
  control_.take_controls(/*common=*/false); // of on_prediction_step
  epoch_evaluation_.clear();
  for (const auto& [name, value] : record.items()) {
    epoch_evaluation_[name] = value.get<double>();
  }
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
    std::vector<double> rates;
    for (const auto& group : torch_optimizer_->param_groups()) {
      rates.push_back(group.options().get_lr());
    }
    lr_scheduler_->set_base_lrs(std::move(rates)); // which it keeps
    next_learning_rate_ = lr_scheduler_->get_last_lr().at(0);
  }
}

void TrainingRun::consider_best(const nlohmann::json& record, bool will_be_saved) {
  const TrainingArguments& a = parts_.arguments;
  const std::string name = a.best_metric_name();
  const auto value = record.find(name);
  if (value == record.end()) {
    if (!a.load_best_model_at_end) {
      return; // nothing depends on it
    }
    refuse_metric(parts_.arguments.metric_for_best_model, record);
  }
  // What was not saved cannot be gone back to.
  if (!will_be_saved && a.save_strategy != IntervalStrategy::no) {
    return;
  }
  const auto metric = value->get<double>();
  const bool better = !state_.best_metric || (a.best_is_greater() ? metric > *state_.best_metric
                                                                  : metric < *state_.best_metric);
  if (better && std::isfinite(metric)) {
    state_.best_metric = metric;
    state_.best_global_step = state_.global_step;
  }
}

void TrainingRun::append_record(const char* type, const nlohmann::json& record) {
  if (!metrics_file_.is_open()) {
    return; // another rank's, or nothing is written
  }
  parts_.require_output_dir();
  nlohmann::json line = finite_json(record);
  line["type"] = type;
  metrics_file_ << line.dump() << '\n' << std::flush;
  std::error_code error;
  if (!metrics_file_ || !std::filesystem::exists(output_dir_ / "metrics.jsonl", error)) {
    throw Error("trainer::train", "cannot write path=" + (output_dir_ / "metrics.jsonl").string(),
                "free disk space, a writable file, and that nobody removes it during the run");
  }
}

void TrainingRun::collect_tokens() {
  at::Tensor sums =
      at::tensor({uncollected_.real, uncollected_.padded}, at::TensorOptions().dtype(at::kLong));
  sums = parts_.accelerator->reduce(sums.to(parts_.accelerator->device())).cpu();
  uncollected_ = {};
  tokens_.real += sums[0].item<int64_t>();
  tokens_.padded += sums[1].item<int64_t>();
  state_.num_input_tokens_seen = tokens_.padded;
}

void TrainingRun::load_best() {
  if (state_.best_model_checkpoint.empty()) {
    return; // no evaluation gave a number: the model as it is
  }
  if (state_.best_global_step != state_.global_step) {
    parts_.accelerator->load_full_params(
        [this] { parts_.files.load(state_.best_model_checkpoint); }, parts_.model);
  }
  if (parts_.is_main() && parts_.arguments.save_total_limit == 1) {
    keep_only_checkpoint(output_dir_, *state_.best_global_step);
  }
}

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
          {"stopping", control_.stopping()},
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
  control_.set_stopping(stopping);
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

/// The arguments override the optimizer's options in the file; they are equal or were allowed to
/// differ. The learning rate of the file stays if a plateau or a callback has set it.
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
  if (is_local()) { // numbers of windows may differ between ranks
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
                     "a writable folder");
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
          {"steps_per_epoch", plan_.steps_per_epoch},
          {"train_rows", parts_.train->size()},
          {"global_step", state_.global_step},
          {"epoch_index", epoch_},
          {"at_epoch_end", at_epoch_end},
          {"epoch_rows_seen", at_epoch_end ? data_loader_->epoch_rows() : step_->loader().cursor()},
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

/// Writes the model's files and the records into the folder of an unfinished save.
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
  if (parts_.is_main()) { // after the new one is complete
    rotate_checkpoints(output_dir_, parts_.arguments.save_total_limit, state_.best_global_step);
  }
  parts_.accelerator->wait_for_everyone();
  control_.notify([&](TrainerCallback& c) { c.on_save(folder); });
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
