#include "hasten/trainer/trainer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <csignal>
#include <string>
#include <utility>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "hasten/core/deferred_init.h"
#include "hasten/core/memory.h"
#include "hasten/core/named_tensors.h"
#include "hasten/io/safetensors.h"
#include "hasten/trainer/early_stopping.h"
#include "hasten/trainer/progress_callback.h"
#include "hasten/trainer/tracker_callback.h"
#include "training_run.h"

namespace hasten {

namespace detail {

constexpr const char* kWeightsFile = "model.safetensors";

void load_weights(torch::nn::Module& model, const std::filesystem::path& folder) {
  const SafetensorsReader reader(folder / kWeightsFile);
  NamedTensors targets = named_model_tensors(model);
  for (const auto& [name, target] : targets) { // checks all before it copies any
    const SafetensorsEntry& entry = reader.entry(name);
    if (target.sizes() != at::IntArrayRef(entry.shape)) {
      throw InputError("trainer::load_model",
                       "tensor " + name + " in " + (folder / kWeightsFile).string() +
                           " has shape=" + c10::str(at::IntArrayRef(entry.shape)),
                       "the model's " + c10::str(target.sizes()));
    }
  }
  const at::NoGradGuard no_grad;
  for (auto& [name, target] : targets) {
    target.copy_(reader.read(name));
  }
}

/// Leaves the model alone if all its tensors are on the device.
void move_model(torch::nn::Module& model, const at::Device& device) {
  const auto tensors = named_model_tensors(model);
  if (std::ranges::any_of(tensors, [&](const auto& t) { return t.second.device() != device; })) {
    materialize(model, device);
    model.to(device); // what a module's own to() moves, too
  }
}

/// The output of a finished run, from the last of its records.
TrainOutput output_of_finished_run(TrainerParts& parts, const nlohmann::json& run) {
  TrainOutput output;
  output.already_finished = true;
  parts.state = trainer_state_of(run.at("trainer_state"));
  output.global_step = parts.state.global_step;
  if (!parts.state.log_history.empty()) {
    output.metrics = parts.state.log_history.back();
    output.training_loss = output.metrics.value("train_loss", 0.0);
  }
  return output;
}

void settle_precision(TrainerParts& parts, const std::string& kept) {
  if (std::exchange(parts.precision_settled, true)) {
    return;
  }
  TrainingArguments& a = parts.arguments;
  Precision wanted = a.effective_precision();
  if (wanted == Precision::automatic) {
    if (const auto found = spelled<Precision>(kept)) {
      wanted = *found;
      log_info("precision: " + kept + ", as at the start of the run");
    }
  }
  Accelerator& accelerator = *parts.accelerator;
  if (wanted != Precision::no && wanted != accelerator.mixed_precision()) {
    accelerator.set_mixed_precision(wanted);
  }
  a.precision = accelerator.mixed_precision();
  if (a.precision == Precision::fp16 && accelerator.device().is_cpu() && parts.is_main()) {
    log_warning(
        "fp16 on a CPU is many times slower than fp32 and bf16; hasten env "
        "measures them on this machine");
  }
  a.bf16 = a.precision == Precision::bf16;
  a.fp16 = a.precision == Precision::fp16;
}

/// Throws unless the arguments and a given accelerator agree.
void require_same_options(const TrainerParts& parts) {
  const TrainingArguments& a = parts.arguments;
  const AcceleratorOptions& given = parts.accelerator->options();
  const auto require = [](bool same, const std::string& name, const std::string& asked,
                          const std::string& has, const char* expected) {
    if (!same) {
      throw InputError("trainer::Trainer",
                       name + "=" + asked + " in the arguments and " + has + " in the accelerator",
                       expected);
    }
  };
  require(given.gradient_accumulation_steps == a.gradient_accumulation_steps,
          "gradient_accumulation_steps", std::to_string(a.gradient_accumulation_steps),
          std::to_string(given.gradient_accumulation_steps), "the same number in both");
  const Precision asked = a.effective_precision();
  require(given.mixed_precision == Precision::no || asked == Precision::no ||
              asked == given.mixed_precision,
          "precision", precision_name(asked), precision_name(given.mixed_precision),
          "the same precision in both, or a precision in only one");
  require(given.strategy == a.strategy, "strategy", strategy_name(a.strategy),
          strategy_name(given.strategy), "the same in both");
}

/// True if an argument depends on metric_for_best_model.
bool needs_metric(const TrainingArguments& a) {
  return a.load_best_model_at_end || a.early_stopping_patience > 0 ||
         a.lr_scheduler_type == "reduce_lr_on_plateau";
}

/// Throws, before training, for a metric that no evaluation will have.
void require_known_metric(const TrainingArguments& a, std::vector<std::string> names) {
  names.insert(names.begin(), {"loss", "runtime", "samples_per_second", "steps_per_second"});
  const std::string wanted = a.best_metric_name().substr(5); // "eval_"
  if (std::ranges::find(names, wanted) == names.end()) {
    throw InputError(
        "trainer::Trainer",
        "metric_for_best_model=" + a.metric_for_best_model + " is not a metric of the evaluation",
        "one of " + joined(names), write_nearest(wanted, names));
  }
}

void refuse_metric(const std::string& metric, const nlohmann::json& record) {
  throw InputError(
      "trainer::train", "the evaluation record lacks metric_for_best_model=" + metric,
      "one of " + joined(mapped(record.items(), [](const auto& e) { return e.key(); })));
}

/// Names a shortage of memory in the loss function.
LossFunction with_named_shortage(LossFunction loss, at::Device device) {
  return [loss = std::move(loss), device](const Batch& batch) {
    try {
      return loss(batch);
    } catch (const std::exception& error) {
      name_shortage(error, "trainer::train", "forward", device);
      throw;
    }
  };
}

/// Applies label smoothing and class weights of the arguments to the loss function.
void set_objective(TrainerParts& parts) {
  const TrainingArguments& a = parts.arguments;
  parts.class_weights = resolve_class_weights(a.class_weights, parts.train.get());
  if (a.label_smoothing_factor > 0 || !a.class_weights.empty()) {
    parts.loss_function = with_objective(
        std::move(parts.loss_function),
        {.label_smoothing = a.label_smoothing_factor, .class_weights = parts.class_weights},
        a.class_weights == "balanced");
  }
}

void require_parts(const TrainerParts& parts) {
  parts.arguments.validate();
  check_trackers("trainer::Trainer", parts.arguments.report_to);
  if (!parts.model || !parts.loss_function) {
    throw InputError("trainer::Trainer",
                     std::string(parts.model ? "loss_function" : "model") + "=null",
                     "a model and a loss function");
  }
  const TrainingArguments& a = parts.arguments;
  if (a.load_best_model_at_end && !parts.eval) {
    throw InputError("trainer::Trainer", "load_best_model_at_end=true without evaluation data", {},
                     "pass evaluation data, or unset load_best_model_at_end");
  }
  if (a.early_stopping_patience > 0 && parts.train && !parts.eval) {
    throw InputError("trainer::Trainer",
                     "early_stopping_patience=" + std::to_string(a.early_stopping_patience) +
                         " without evaluation data",
                     {}, "pass evaluation data, or unset early_stopping_patience");
  }
  const auto* named = parts.compute_metrics.target<NamedFactory>();
  if (parts.eval && needs_metric(a) && (named || !parts.compute_metrics)) {
    require_known_metric(a, named ? named->names : std::vector<std::string>());
  }
}

} // namespace detail

AcceleratorOptions accelerator_options(const TrainingArguments& arguments) {
  return {.gradient_accumulation_steps = arguments.gradient_accumulation_steps,
          .tf32 = arguments.tf32,
          .full_determinism = arguments.full_determinism,
          .seed = arguments.seed,
          .device = arguments.use_cpu ? "cpu" : arguments.device,
          .strategy = arguments.strategy,
          .shard_size = static_cast<int>(arguments.shard_size),
          .timeout = from_seconds(arguments.ddp_timeout),
          .heartbeat_timeout = from_seconds(arguments.heartbeat_timeout),
          .backend = arguments.ddp_backend};
}

ModelFiles default_model_files(std::shared_ptr<torch::nn::Module> model) {
  ModelFiles files;
  files.save = [model](const std::filesystem::path& folder) {
    write_safetensors(folder / detail::kWeightsFile, detail::named_model_tensors(*model));
  };
  files.load = [model](const std::filesystem::path& folder) {
    detail::load_weights(*model, folder);
  };
  return files;
}

struct Trainer::Impl {
  detail::TrainerParts parts{};
  std::unique_ptr<detail::TrainingRun> run{}; // kept, because the accelerator refers to it
};

Trainer::Trainer(std::shared_ptr<torch::nn::Module> model, LossFunction loss_function,
                 TrainingArguments arguments, std::shared_ptr<const Dataset> train,
                 std::shared_ptr<const Dataset> eval, ComputeMetrics compute_metrics,
                 std::shared_ptr<Accelerator> accelerator)
    : impl_(std::make_unique<Impl>()) {
  detail::TrainerParts& parts = impl_->parts;
  parts.model = std::move(model);
  parts.loss_function = std::move(loss_function);
  parts.arguments = std::move(arguments);
  parts.train = std::move(train);
  parts.eval = std::move(eval);
  parts.compute_metrics = std::move(compute_metrics);
  detail::require_parts(parts);
  detail::set_objective(parts);
  parts.accelerator = accelerator
                          ? std::move(accelerator)
                          : std::make_shared<Accelerator>(accelerator_options(parts.arguments));
  detail::require_same_options(parts);
  parts.loss_function =
      detail::with_named_shortage(std::move(parts.loss_function), parts.accelerator->device());
  parts.files = default_model_files(parts.model);
  // prepare() makes a deferred model of shards unit by unit.
  if (parts.arguments.strategy == Strategy::ddp || !is_deferred(*parts.model)) {
    detail::move_model(*parts.model, parts.accelerator->device());
  }
  if (!parts.arguments.disable_tqdm) {
    add_callback(std::make_shared<ProgressCallback>());
  }
  if (!tracker_names(parts.arguments.report_to).empty()) {
    add_callback(std::make_shared<TrackerCallback>());
  }
}

static LossFunction loss_of(const TrainerParameters& parameters) {
  const LossFunction& loss =
      parameters.compute_loss_func ? parameters.compute_loss_func : parameters.model.loss_function;
  if (!loss) {
    throw InputError("trainer::Trainer", "compute_loss_func=empty for a model without a loss",
                     "a model whose forward(const Batch&) returns a LossOutput, or a loss function",
                     "set compute_loss_func");
  }
  return loss;
}

Trainer::Trainer(TrainerParameters parameters)
    : Trainer(parameters.model.module, loss_of(parameters), parameters.args,
              parameters.train_dataset, parameters.eval_dataset, parameters.compute_metrics,
              parameters.accelerator) {
  for (auto& callback : parameters.callbacks) {
    add_callback(std::move(callback));
  }
}

Trainer::~Trainer() = default;

void Trainer::set_model_files(ModelFiles files) { impl_->parts.files = std::move(files); }

void Trainer::add_callback(std::shared_ptr<TrainerCallback> callback,
                           const std::string& state_name) {
  if (!state_name.empty()) {
    auto stateful = std::dynamic_pointer_cast<Stateful>(callback);
    if (!stateful) {
      throw InputError("trainer::add_callback",
                       "state_name=" + state_name + " for a callback without state",
                       "a callback that derives from hasten::Stateful");
    }
    impl_->parts.stateful_callbacks[state_name] = std::move(stateful);
  }
  if (!impl_->parts.is_main() && std::dynamic_pointer_cast<TrackerCallback>(callback)) {
    return;
  }
  auto& callbacks = impl_->parts.callbacks;
  const auto shows = [](const std::shared_ptr<TrainerCallback>& c) {
    return std::dynamic_pointer_cast<ProgressCallback>(c) != nullptr;
  };
  if (shows(callback)) {
    callbacks.erase(std::remove_if(callbacks.begin(), callbacks.end(), shows), callbacks.end());
    if (!impl_->parts.is_main()) {
      return;
    }
  }
  callbacks.push_back(std::move(callback));
}

void Trainer::set_run_facts(nlohmann::json listed, nlohmann::json altering) {
  impl_->parts.listed_facts = std::move(listed);
  impl_->parts.altering_facts = std::move(altering);
}

TrainOutput Trainer::train() {
  detail::TrainerParts& parts = impl_->parts;
  if (impl_->run) {
    throw InputError("trainer::train", "train() was called before", "one run per Trainer",
                     "make a new Trainer with the same model");
  }
  if (!parts.train) {
    throw InputError("trainer::train", "train=null", "training data");
  }
  const int world_size = parts.accelerator->num_processes();
  if (parts.train->size() < world_size) {
    throw InputError("trainer::train",
                     "training samples=" + std::to_string(parts.train->size()) +
                         " for processes=" + std::to_string(world_size),
                     "at least one sample per process", "use fewer processes or more samples");
  }
  const auto unlock = c10::make_scope_exit([&] {
    parts.output_lock.reset();
    detail::plan_memory(0);
  });
  detail::lock_output_dir(parts);
  detail::StartingPoint start = detail::decide_starting_point(parts);
  if (start.finished) {
    return detail::output_of_finished_run(parts, start.run);
  }
  detail::settle_precision(parts, start.precision);
  parts.notify([&](TrainerCallback& c) { c.on_precision(parts.arguments.precision); });
  detail::find_batch_size(parts, detail::first_batch_size(parts, start));
  DataLoader counted(parts.train,
                     detail::train_loader_options(parts.arguments, world_size, start.drop_batch));
  counted.shard(parts.accelerator->process_index(), world_size);
  TrainingPlan plan = make_training_plan(parts.arguments, counted.size());
  plan = make_training_plan(parts.arguments, counted.size(),
                            detail::step_shift_of(start, plan, parts, counted.epoch_rows()));
  if (parts.arguments.early_stopping_patience > 0) {
    add_callback(
        std::make_shared<EarlyStoppingCallback>(EarlyStoppingOptions{
            parts.arguments.early_stopping_patience, parts.arguments.early_stopping_threshold}),
        "early_stopping");
  }
  impl_->run = std::make_unique<detail::TrainingRun>(parts, plan, std::move(start));
  TrainOutput output = impl_->run->run();
  if (impl_->run->terminated()) {
    throw Interrupted(SIGTERM); // on every rank, after the save
  }
  return output;
}

nlohmann::json Trainer::evaluate(const Dataset& dataset, const std::string& prefix) {
  return detail::evaluate_dataset(impl_->parts, dataset, prefix);
}

nlohmann::json Trainer::evaluate() {
  if (!impl_->parts.eval) {
    throw InputError("trainer::evaluate", "eval=null", "evaluation data");
  }
  return evaluate(*impl_->parts.eval);
}

const nlohmann::json& Trainer::evaluation_report() const { return impl_->parts.evaluation_report; }

void Trainer::save_metrics(const std::string& split, const nlohmann::json& metrics, bool combined) {
  const std::filesystem::path folder = impl_->parts.arguments.output_dir;
  if (!impl_->parts.is_main() || folder.empty()) {
    return;
  }
  const auto write = [&](const std::string& name, const nlohmann::json& values) {
    write_file_atomically(folder / (name + "_results.json"), finite_json(values).dump(4) + "\n");
  };
  write(split, metrics);
  if (!combined) {
    return;
  }
  const std::filesystem::path file = folder / "all_results.json";
  std::error_code error;
  nlohmann::json all = std::filesystem::exists(file, error)
                           ? read_json_file("trainer::save_metrics", file)
                           : nlohmann::json::object();
  for (const auto& [name, value] : metrics.items()) {
    if (value.is_primitive()) {
      all[name] = value;
    }
  }
  write("all", all);
}

PredictionOutput Trainer::predict(const Dataset& dataset) {
  PredictionOutput result;
  result.metrics = detail::evaluate_dataset(impl_->parts, dataset, "test", &result.outputs);
  impl_->parts.notify([&](TrainerCallback& c) { c.on_predict(result.metrics); });
  return result;
}

const TrainingArguments& Trainer::arguments() const { return impl_->parts.arguments; }

const TrainerState& Trainer::state() const { return impl_->parts.state; }

Accelerator& Trainer::accelerator() { return *impl_->parts.accelerator; }

} // namespace hasten
