#include "training_run.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <unordered_set>
#include <utility>

#include "accelerator/accelerator_core.h"
#include "hasten/activation_checkpoint/activation_checkpoint.h"
#include "hasten/base/error.h"
#include "hasten/base/json.h"
#include "hasten/base/log.h"
#include "hasten/base/process.h"
#include "hasten/core/memory.h"
#include "hasten/optim/param_groups.h"
#include "hasten/trainer/output_folder.h"

namespace hasten {

OptimizerSettings optimizer_settings(const TrainingArguments& a) {
  return {.learning_rate = a.learning_rate,
          .weight_decay = a.weight_decay,
          .adam_beta1 = a.adam_beta1,
          .adam_beta2 = a.adam_beta2,
          .adam_epsilon = a.adam_epsilon,
          .args = a.optim_args,
          .keep_options = true}; // the arguments of a resumed run may be other ones
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(EpochReport, epoch, training_loss, samples, train_seconds,
                                   samples_per_second, tokens_per_second, padded_tokens_per_second,
                                   padding_waste, peak_tensor_bytes, peak_resident_bytes,
                                   bytes_sent, seconds_left)

namespace detail {

int64_t numbers_in(const std::vector<at::Tensor>& tensors) {
  std::unordered_set<const void*> seen;
  int64_t numbers = 0;
  for (const at::Tensor& tensor : tensors) {
    if (seen.insert(tensor.unsafeGetTensorImpl()).second) {
      numbers += tensor.numel();
    }
  }
  return numbers;
}

} // namespace detail

RunDescription describe_run(const TrainingArguments& a, const TrainingPlan& plan,
                            const torch::nn::Module& model, int world_size) {
  RunDescription d;
  d.world_size = world_size;
  d.batch_per_rank = a.per_device_train_batch_size;
  d.gradient_accumulation_steps = a.gradient_accumulation_steps;
  d.total_batch = d.batch_per_rank * d.gradient_accumulation_steps * world_size;
  d.local_sgd_steps = world_size > 1 ? a.local_sgd_steps : 0;
  d.plan = plan;
  const auto groups = decay_groups(model, a.weight_decay);
  d.parameters = detail::numbers_in(model.parameters());
  d.decayed_parameters = detail::numbers_in(groups[0].params());
  d.trainable_parameters = d.decayed_parameters + detail::numbers_in(groups[1].params());
  d.precision = precision_name(a.effective_precision());
  d.output_dir = a.output_dir;
  d.metrics_file = a.output_dir.empty() ? std::filesystem::path() : d.output_dir / "metrics.jsonl";
  d.arguments = a;
  return d;
}

namespace detail {

LoaderOptions train_loader_options(const TrainingArguments& a, int world_size, int64_t drop_batch) {
  LoaderOptions options;
  options.batch_size = a.per_device_train_batch_size;
  options.shuffle = a.train_sampling_strategy != SamplingStrategy::sequential;
  options.group_by_length = a.train_sampling_strategy == SamplingStrategy::group_by_length;
  options.group_batch = a.per_device_train_batch_size * a.gradient_accumulation_steps * world_size;
  options.drop_last = a.dataloader_drop_last;
  options.drop_batch = drop_batch;
  options.seed = a.order_seed();
  options.num_workers = a.dataloader_num_workers;
  options.prefetch_factor = a.dataloader_prefetch_factor;
  return options;
}

LocalSGDOptions local_sgd_options(const TrainingArguments& a, int rank) {
  LocalSGDOptions options{.local_sgd_steps = a.local_sgd_steps,
                          .inner_steps = a.local_sgd_inner_steps,
                          .delay = a.local_sgd_delay};
  if (a.local_sgd_group_size > 0) {
    options.group = std::to_string(rank / a.local_sgd_group_size);
  }
  if (a.local_sgd_outer == LocalSGDOuter::slowmo) {
    SlowMoOptions slowmo;
    slowmo.slowmo_lr = a.local_sgd_outer_lr.value_or(slowmo.slowmo_lr);
    slowmo.slowmo_factor = a.local_sgd_outer_momentum.value_or(slowmo.slowmo_factor);
    options.average.outer = std::make_shared<SlowMo>(slowmo);
  } else if (a.local_sgd_outer == LocalSGDOuter::diloco) {
    DiLoCoOptions diloco;
    diloco.lr = a.local_sgd_outer_lr.value_or(diloco.lr);
    diloco.momentum = a.local_sgd_outer_momentum.value_or(diloco.momentum);
    options.average.outer = std::make_shared<DiLoCo>(diloco);
  }
  options.average.sync = a.local_sgd_driver ? SyncStrategy::driver : SyncStrategy::all_reduce;
  return options;
}

TrainingRun::TrainingRun(TrainerParts& parts, const TrainingPlan& plan, StartingPoint start)
    : parts_(parts),
      state_(parts.state),
      plan_(plan),
      start_(std::move(start)),
      run_reference_(std::make_shared<RunReference>(this)),
      output_dir_(parts.arguments.output_dir),
      groups_(decay_groups(*parts.model, parts.arguments.weight_decay)),
      torch_optimizer_(make_optimizer(spelling(parts.arguments.optim), groups_,
                                      optimizer_settings(parts.arguments))),
      lr_scheduler_(
          std::make_shared<LRScheduler>(*torch_optimizer_, make_schedule(parts.arguments, plan))),
      control_(parts, *lr_scheduler_),
      data_loader_(std::make_shared<DataLoader>(
          parts.train, train_loader_options(parts.arguments, parts.accelerator->num_processes(),
                                            start_.drop_batch))) {
  const TrainingArguments& a = parts.arguments;
  // Before prepare(), which may shard the model.
  description_ = describe_run(a, plan, *parts.model, parts.accelerator->num_processes());
  if (a.lr_scheduler_type == "reduce_lr_on_plateau") {
    plateau_ = std::make_shared<ReduceLrOnPlateau>(
        *torch_optimizer_,
        plateau_options(try_parse_json(a.lr_scheduler_kwargs).value, a.best_is_greater()));
  }
}

TrainOutput TrainingRun::run() {
  std::optional<TerminationDeferral> deferral;
  try {
    begin();
    if (!output_dir_.empty()) { // SIGTERM takes effect at the end of a step, after a save
      deferral.emplace();
    }
    if (progress_.epoch_ended &&
        (last_step() || state_.global_step == epochs_last_step(progress_.epoch_index))) {
      end_epoch(); // the checkpoint was saved before the epoch's report
      ++progress_.epoch_index;
    }
    for (; !last_step() && !terminated_; ++progress_.epoch_index) {
      run_epoch();
    }
    return terminated_ ? TrainOutput{} : finish();
  } catch (const std::exception& error) {
    deferral.reset();
    parts_.communicator().abort(error);
    if (local_sgd_) {
      local_sgd_->abort();
    }
    // A peer that got the signal first looks like a failed one here.
    if (dynamic_cast<const CommunicationError*>(&error) != nullptr) {
      throw_if_interrupted();
    }
    throw;
  }
}

void TrainingRun::begin() {
  Accelerator& accelerator = *parts_.accelerator;
  parts_.model->train();
  enable_checkpointing(parts_);
  // Sharding wraps a Sequential's own entries, so regions must be attached after it.
  const bool after =
      accelerator.options().strategy != Strategy::ddp && parts_.checkpointing.has_value();
  if (after) {
    gradient_checkpointing_disable(parts_.model);
  }
  auto handles = accelerator.prepare(parts_.model, torch_optimizer_, data_loader_, lr_scheduler_);
  if (after) {
    gradient_checkpointing_enable(parts_.model, *parts_.checkpointing);
  }
  step_.emplace(parts_, plan_, control_,
                TrainStep::Handles{std::move(std::get<1>(handles)), std::move(std::get<2>(handles)),
                                   std::move(std::get<3>(handles))});
  state_ = TrainerState{};
  if (!output_dir_.empty()) {
    register_states();
  }
  open_local_sgd(start_.folder.empty() ? 0 : start_.run.at("global_step").get<int64_t>());
  run_time_.restart();
  if (!start_.folder.empty()) {
    load_checkpoint();
  }
  state_.max_steps = plan_.max_steps;
  state_.num_train_epochs = plan_.epochs;
  state_.logging_steps = plan_.logging_steps;
  state_.eval_steps = plan_.eval_steps;
  state_.save_steps = plan_.save_steps;
  state_.train_batch_size = parts_.arguments.per_device_train_batch_size;
  if (parts_.leads_folder() && !output_dir_.empty()) {
    open_output_dir();
  }
  reset_peak_memory(parts_.accelerator->device());
  bytes_sent_before_ = bytes_sent();
  control_.compare_callbacks();
  accelerator.core()->windows.shared()->heard = 0; // of an earlier run
  const RunDescription description = describe();
  control_.notify([&](TrainerCallback& c) { c.on_train_begin(description); });
  if (parts_.arguments.eval_on_start && parts_.eval &&
      progress_.last_evaluated_step != state_.global_step) {
    const Stopwatch not_training;
    evaluate_and_log();
    progress_.seconds_not_training += not_training.seconds();
  }
}

void TrainingRun::open_local_sgd(int64_t steps) {
  const TrainingArguments& a = parts_.arguments;
  if (a.local_sgd_steps == 0 || local_sgd_ || steps < a.local_sgd_post_local_start) {
    return;
  }
  take_losses(); // of windows of all ranks
  local_sgd_.emplace(*parts_.accelerator, parts_.model,
                     local_sgd_options(a, parts_.accelerator->process_index()));
  step_->set_local_sgd(&*local_sgd_);
}

RunDescription TrainingRun::describe() const {
  RunDescription d = description_;
  d.train_rows = parts_.train->size();
  d.eval_rows = parts_.eval ? parts_.eval->size() : 0;
  d.threads = at::get_num_threads();
  d.local_sgd_steps = local_sgd_ && !is_local() ? 0 : d.local_sgd_steps;
  d.device = parts_.accelerator->device().str();
  d.resumed_step = start_.folder.empty() ? 0 : state_.global_step;
  d.notes = start_.notes;
  return d;
}

StepProgress TrainingRun::step_progress() const {
  return {state_.global_step, plan_.max_steps, state_.epoch,
          state_.global_step > 0 ? seconds_left() : 0};
}

void TrainingRun::run_epoch() {
  const StepProgress before = step_progress();
  control_.notify([&](TrainerCallback& c) { c.on_epoch_begin(before); });
  if (last_step()) {
    return;
  }
  step_->loader().set_epoch(static_cast<uint64_t>(progress_.epoch_index));
  step_seconds_.lap(nullptr);
  for (const Batch& batch : step_->loader()) {
    step_seconds_.lap(&step_seconds_.data);
    // The dataset knows the lengths, so no tensor of the device is read.
    if (batch.has("attention_mask")) {
      uncollected_.padded += batch["attention_mask"].numel();
      for (const int64_t row : batch.indices) {
        uncollected_.real += parts_.train->length(row);
      }
    }
    const bool stepped = step_->run(batch, step_progress());
    step_seconds_.lap(&step_seconds_.compute);
    if (!stepped) {
      continue;
    }
    count_step();
    // At the end of an epoch records and saves wait for the loader's end, which is collective.
    if (state_.global_step != epochs_last_step(progress_.epoch_index)) {
      if (last_step()) {
        break; // in the middle of an epoch, where every rank has samples
      }
      after_step(false);
      if (control_.stopping()) {
        break;
      }
      if (control_.terminating()) {
        return terminate();
      }
    }
    step_seconds_.lap(nullptr);
  }
  after_step(true);
  if (control_.terminating() && !last_step()) {
    return terminate();
  }
  end_epoch();
}

void TrainingRun::terminate() {
  if (local_sgd_) {
    local_sgd_->synchronize();
  }
  collect_losses();
  save_checkpoint();
  terminated_ = true;
  if (local_sgd_) {
    local_sgd_->abort(); // it was synchronised above
  }
  if (parts_.is_main()) {
    log_info("SIGTERM: saved after step " + std::to_string(state_.global_step) + " of " +
             std::to_string(plan_.max_steps) + " in " +
             (output_dir_ / ("checkpoint-" + std::to_string(state_.global_step))).string());
  }
  try {
    // No rank closes the group before all are here.
    parts_.communicator().barrier("stopping at SIGTERM");
  } catch (const CommunicationError&) {
    // A peer ended first. All has been saved.
  }
}

// Steps whose losses stay on the device at most, for runs that seldom write a record.
constexpr int64_t kMaxPendingSteps = 1000;

void TrainingRun::take_losses() {
  for (const WindowReport& window : step_->take_windows()) {
    if (is_local()) {
      uncollected_losses_.add(window);
      continue;
    }
    for (LossTotal* total : {&progress_.since_record, &progress_.of_epoch, &progress_.of_run}) {
      total->add(window);
    }
  }
}

void TrainingRun::count_step() {
  const WindowReport& window = parts_.accelerator->last_window();
  lr_scheduler_->close_step();
  (is_local() ? uncollected_rows_ : progress_.samples) += window.rows;
  control_.hear();
  step_->counted(state_.global_step + 1, window);
  if (parts_.accelerator->device().is_cpu() || step_->pending_steps() == kMaxPendingSteps) {
    take_losses();
  }
  ++state_.global_step;
  ++step_seconds_.steps;
  if (parts_.checkpointing && !std::exchange(blocks_looked_for_, true) && parts_.is_main() &&
      !gradient_checkpointing_called(parts_.model)) {
    log_warning("gradient_checkpointing=" + parts_.arguments.gradient_checkpointing.text() +
                " recomputes nothing, because the model calls no block. Call its layers through "
                "hasten::call_block");
  }
  state_.epoch = static_cast<double>(state_.global_step + plan_.step_shift) /
                 static_cast<double>(plan_.steps_per_epoch);
  const StepProgress progress = step_progress();
  control_.notify([&](TrainerCallback& c) { c.on_step_end(progress); });
}

void TrainingRun::after_step(bool epoch_ended) {
  progress_.epoch_ended = epoch_ended;
  const TrainingArguments& a = parts_.arguments;
  open_local_sgd(state_.global_step); // here, where every rank comes
  const auto due = [&](IntervalStrategy strategy, int64_t steps) {
    switch (strategy) {
      case IntervalStrategy::no:
        return false;
      case IntervalStrategy::epoch:
        return epoch_ended;
      case IntervalStrategy::steps:
        break;
    }
    return state_.global_step % steps == 0 || last_step();
  };
  const bool log = control_.take(kRequestLog) || last_step();
  if ((step_->record_due(state_.global_step) || log) && last_logged_step_ != state_.global_step) {
    log_training();
  }
  const Stopwatch not_training;
  const auto save_due = [&] {
    return (control_.take(kRequestSave) && !output_dir_.empty()) ||
           due(interval_of(a.save_strategy), plan_.save_steps);
  };
  const bool delayed = a.eval_delay - 1e-9 > (a.eval_strategy == IntervalStrategy::epoch
                                                  ? state_.epoch
                                                  : static_cast<double>(state_.global_step));
  const bool evaluate =
      (control_.take(kRequestEvaluate) || (due(a.eval_strategy, plan_.eval_steps) && !delayed)) &&
      parts_.eval && progress_.last_evaluated_step != state_.global_step;
  bool save = save_due();
  if (local_sgd_ && (save || evaluate)) {
    local_sgd_->synchronize(); // so that ranks evaluate and save the same model
  }
  if (save || evaluate) {
    collect_losses();
  }
  if (evaluate) {
    evaluate_and_log();
    step_plateau(state_.log_history.back());
    save = save_due() || save; // on_evaluate may request it, or the end of training
    save = consider_best(state_.log_history.back(), save) || save;
    ++evaluations_.times;
    evaluations_.seconds += not_training.seconds();
  }
  if (save) {
    const double before = evaluate ? not_training.seconds() : 0;
    save_checkpoint();
    ++saves_.times;
    saves_.seconds += not_training.seconds() - before;
    step_seconds_.save += not_training.seconds() - before;
  }
  progress_.seconds_not_training += not_training.seconds();
}

void StepSeconds::lap(double* part) {
  const double seconds = time_.seconds();
  const double waited = seconds_waited();
  const double recomputed = recompute_counts().seconds;
  if (part != nullptr) {
    communication += waited - waited_;
    recompute += recomputed - recomputed_;
    *part += seconds - (waited - waited_) - (recomputed - recomputed_);
  }
  time_.restart();
  waited_ = waited;
  recomputed_ = recomputed;
}

double TrainingRun::seconds_trained() const {
  return run_seconds() - progress_.seconds_not_training;
}

double TrainingRun::seconds_left() const {
  const TrainingArguments& a = parts_.arguments;
  const int64_t step = state_.global_step;
  // What is due after this step may be still to do.
  const auto left = [&](IntervalStrategy strategy, int64_t every, int64_t last) {
    return times_after(plan_, strategy, every, std::max(last, step - 1));
  };
  WorkTime evaluations = evaluations_;
  WorkTime saves = saves_;
  evaluations.left =
      parts_.eval ? left(a.eval_strategy, plan_.eval_steps, progress_.last_evaluated_step) : 0;
  saves.left = left(interval_of(a.save_strategy), plan_.save_steps, last_saved_step_);
  return seconds_for({{step, seconds_trained(), plan_.max_steps - step}, evaluations, saves});
}

void TrainingRun::end_epoch() {
  progress_.epoch_ended = false;
  collect_tokens();
  collect_losses();
  const at::Device& device = parts_.accelerator->device();
  at::Tensor own = at::tensor(
      {memory_stats(device).peak_bytes, peak_resident_bytes(), bytes_sent() - bytes_sent_before_},
      at::kLong);
  const at::Tensor of_ranks = parts_.accelerator->gather(own.view({1, 3}).to(device)).cpu();
  const at::Tensor peaks = of_ranks.amax(0);

  EpochReport report;
  report.epoch = progress_.epoch_index + 1;
  report.epochs = plan_.epochs;
  report.global_step = state_.global_step;
  report.training_loss = progress_.of_epoch.mean();
  report.evaluation = std::exchange(progress_.epoch_evaluation, {});
  report.samples =
      progress_.samples - std::exchange(progress_.samples_before_epoch, progress_.samples);
  const double trained = seconds_trained();
  report.train_seconds = trained - std::exchange(progress_.seconds_trained_before_epoch, trained);
  const TokenCount before = std::exchange(progress_.tokens_before_epoch, progress_.tokens);
  const auto real = static_cast<double>(progress_.tokens.real - before.real);
  const auto padded = static_cast<double>(progress_.tokens.padded - before.padded);
  const double seconds = std::max(report.train_seconds, 1e-9);
  report.samples_per_second = static_cast<double>(report.samples) / seconds;
  report.tokens_per_second = real / seconds;
  report.padded_tokens_per_second = padded / seconds;
  report.padding_waste = padded > 0 ? 1.0 - real / padded : 0.0;
  report.peak_tensor_bytes = peaks[0].item<int64_t>();
  report.peak_resident_bytes = peaks[1].item<int64_t>();
  report.bytes_sent = peaks[2].item<int64_t>();
  report.seconds_left = seconds_left();
  progress_.of_epoch = {};

  nlohmann::json record = report;
  record["step"] = report.global_step;
  record.update(nlohmann::json(report.evaluation));
  for (const auto& [column, name] :
       {std::pair(0, "peak_tensor_bytes_by_rank"), std::pair(1, "peak_resident_bytes_by_rank")}) {
    const at::Tensor values = of_ranks.select(1, column).contiguous();
    const auto* bytes = values.const_data_ptr<int64_t>();
    record[name] = std::vector<int64_t>(bytes, bytes + values.numel());
  }
  append_record("epoch", record);
  control_.notify([&](TrainerCallback& c) { c.on_epoch_end(report); });
}

TrainOutput TrainingRun::finish() {
  collect_losses();
  if (local_sgd_) {
    local_sgd_->finish();
  }
  const double seconds = run_seconds();
  const TrainingArguments& a = parts_.arguments;
  nlohmann::json record = {
      {"train_runtime", seconds},
      {"train_samples_per_second", static_cast<double>(progress_.samples) / seconds},
      {"train_steps_per_second", static_cast<double>(state_.global_step) / seconds},
      {"train_loss", progress_.of_run.mean()},
      {"epoch", state_.epoch},
      {"step", state_.global_step}};
  if (a.load_best_model_at_end) {
    load_best();
    if (!state_.best_model_checkpoint.empty()) {
      // Only its name, because the folder may be moved.
      record["best_model_checkpoint"] =
          std::filesystem::path(state_.best_model_checkpoint).filename().string();
      record["best_metric"] = *state_.best_metric;
    }
  }
  state_.log_history.push_back(record);
  append_record("end", record);
  if (!output_dir_.empty()) {
    save_final();
  }
  control_.notify([&](TrainerCallback& c) { c.on_train_end(record); });
  return {state_.global_step, progress_.of_run.mean(), std::move(record)};
}

} // namespace detail

} // namespace hasten
