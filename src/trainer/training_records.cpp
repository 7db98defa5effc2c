#include <ATen/ATen.h>

#include <cmath>
#include <string>
#include <utility>

#include "hasten/base/error.h"
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

} // namespace hasten::detail
