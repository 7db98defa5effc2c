#include <ATen/ATen.h>

#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/trainer/output_folder.h"
#include "training_run.h"

namespace hasten::detail {

void TrainingRun::collect_losses() {
  if (!is_local()) {
    return;
  }
  const LocalSGDReport rounds = local_sgd_->report();
  const bool has_norm = std::isfinite(grad_norm_);
  at::Tensor sums = at::tensor({uncollected_losses_.loss_sum, uncollected_losses_.weight,
                                static_cast<double>(uncollected_rows_), has_norm ? grad_norm_ : 0.0,
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
  GradientNorms& norms = gradient_norms_;
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
  if (scales_losses()) {
    record["loss_scale"] = parts_.accelerator->loss_scale().value();
    record["overflows"] = overflows_;
  }
  if (parts_.arguments.max_grad_norm > 0) {
    record["grad_norm"] = is_local() ? mean_grad_norm_ : grad_norm_;
  }
  describe_gradient_norms(record);
  if (is_local()) {
    describe_rounds(record);
  }
  since_record_ = {};
  state_.log_history.push_back(record);
  append_record("train", record);
  notify([&](TrainerCallback& c) { c.on_log(record); });
}

void TrainingRun::evaluate_and_log() {
  last_evaluated_step_ = state_.global_step;
  nlohmann::json record = evaluate_dataset(parts_, *parts_.eval, "eval");
  take_controls(/*common=*/false); // of on_prediction_step
  epoch_evaluation_.clear();
  for (const auto& [name, value] : record.items()) {
    epoch_evaluation_[name] = value.get<double>();
  }
  record["epoch"] = state_.epoch;
  record["step"] = state_.global_step;
  state_.log_history.push_back(record);
  append_record("eval", record);
  notify([&](TrainerCallback& c) { c.on_evaluate(record); });
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
                "space on the disk, the right to write, and a file that nobody "
                "removes while the run lasts");
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

} // namespace hasten::detail
