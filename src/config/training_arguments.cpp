#include "hasten/config/training_arguments.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"
#include "hasten/base/world.h"
#include "hasten/config/schedule.h"
#include "hasten/config/training_plan.h"

namespace hasten {

namespace detail {

constexpr const char* kArgumentsPlace = "trainer::training_arguments";

/// Ends included. Batch size * accumulation * processes (kMaxWorldSize) stays below 2^63.
constexpr struct {
  const char* name;
  int64_t least, most;
} kArgumentRanges[] = {{"num_train_epochs", 0, 1'000'000},
                       {"max_steps", -1, kMaxSteps},
                       {"per_device_train_batch_size", 1, 16'777'216},
                       {"per_device_eval_batch_size", 1, 16'777'216},
                       {"gradient_accumulation_steps", 1, 1'048'576},
                       {"shard_size", 0, kMaxWorldSize},
                       {"local_sgd_steps", 0, kMaxSteps},
                       {"local_sgd_post_local_start", 0, kMaxSteps},
                       {"local_sgd_delay", 0, kMaxSteps},
                       {"local_sgd_inner_steps", 0, kMaxSteps},
                       {"local_sgd_group_size", 0, kMaxWorldSize},
                       {"warmup_steps", 0, kMaxSteps},
                       {"logging_steps", 0, kMaxSteps},
                       {"eval_steps", 0, kMaxSteps},
                       {"save_steps", 0, kMaxSteps},
                       {"save_total_limit", 0, kMaxSteps},
                       {"save_replicas", 1, kMaxSteps},
                       {"early_stopping_patience", 0, kMaxSteps},
                       {"dataloader_num_workers", 0, 1024},
                       {"dataloader_prefetch_factor", 1, 1024},
                       {"max_length", 1, 1'048'576}};

/// Throws InputError unless `good`: "name=value. Expected expected. Fix: fix."
void require_argument(bool good, const char* name, const nlohmann::json& value,
                      const std::string& expected, const std::string& fix = {}) {
  if (!good) {
    throw InputError(kArgumentsPlace, std::string(name) + "=" + value.dump(), expected, fix);
  }
}

/// Calls visit("name", field) for each field; `names` is "a.name, a.name, …".
template <typename Visit, typename... Fields>
void visit_fields(const char* names, Visit&& visit, Fields&... fields) {
  const std::vector<std::string> words = split(names, ", ");
  auto name = words.begin();
  (visit((name++)->c_str() + 2, fields), ...);
}
#define HASTEN_VISIT_FIELDS(...) visit_fields(#__VA_ARGS__, visit, __VA_ARGS__)

/// The only list of the fields.
template <typename Arguments, typename Visit>
void visit_arguments(Arguments& a, Visit&& visit) {
  HASTEN_VISIT_FIELDS(
      a.output_dir, a.overwrite_output_dir, a.resume_from_checkpoint, a.allow_changed_arguments,
      a.num_train_epochs, a.max_steps, a.per_device_train_batch_size, a.per_device_eval_batch_size,
      a.gradient_accumulation_steps, a.auto_find_batch_size, a.memory_limit, a.bf16, a.fp16,
      a.precision, a.tf32, a.cuda_graphs, a.strategy, a.shard_size, a.local_sgd_steps,
      a.local_sgd_post_local_start, a.local_sgd_delay, a.local_sgd_outer, a.local_sgd_outer_lr,
      a.local_sgd_outer_momentum, a.local_sgd_inner_steps, a.local_sgd_group_size,
      a.local_sgd_driver, a.device, a.use_cpu, a.ddp_backend, a.ddp_timeout, a.heartbeat_timeout,
      a.label_smoothing_factor, a.class_weights, a.gradient_checkpointing, a.optim, a.optim_args,
      a.learning_rate, a.weight_decay, a.adam_beta1, a.adam_beta2, a.adam_epsilon, a.max_grad_norm,
      a.grad_norm_type, a.max_grad_value, a.lr_scheduler_type, a.lr_scheduler_kwargs,
      a.warmup_steps, a.warmup_ratio, a.logging_steps, a.log_gradient_norms, a.eval_strategy,
      a.eval_steps, a.eval_delay, a.eval_on_start, a.save_strategy, a.save_steps,
      a.save_total_limit, a.save_only_model, a.save_replicas, a.save_on_each_node,
      a.load_best_model_at_end, a.metric_for_best_model, a.greater_is_better,
      a.early_stopping_patience, a.early_stopping_threshold, a.report_to, a.logging_dir,
      a.disable_tqdm, a.seed, a.data_seed, a.train_sampling_strategy, a.dataloader_drop_last,
      a.dataloader_num_workers, a.dataloader_prefetch_factor, a.max_length, a.full_determinism);
}

template <typename T>
nlohmann::json argument_json(const T& value) {
  if constexpr (std::is_enum_v<T>) {
    return spelling(value);
  } else {
    return value;
  }
}
nlohmann::json argument_json(const GradientCheckpointing& value) { return value.text(); }
template <typename T>
nlohmann::json argument_json(const std::optional<T>& value) {
  return value ? nlohmann::json(*value) : nlohmann::json(nullptr);
}

/// The JSON that is expected for a T.
template <typename T>
std::string expected_json() {
  if constexpr (std::is_enum_v<T>) {
    return any_spelling<T>();
  } else if constexpr (std::is_same_v<T, GradientCheckpointing>) {
    return "true, false, or a mode, e.g. full, every:2, budget:50%";
  } else {
    return std::is_same_v<T, bool>          ? "true or false"
           : std::is_same_v<T, std::string> ? "a string"
           : std::is_same_v<T, double>      ? "a number"
           : std::is_same_v<T, uint64_t>    ? "a whole number, 0 or more"
                                            : "a whole number";
  }
}

/// The T in the JSON; empty if it is of another type.
template <typename T>
std::optional<T> read_json(const nlohmann::json& json) {
  if constexpr (std::is_enum_v<T>) {
    return json.is_string() ? spelled<T>(json.get<std::string>()) : std::nullopt;
  } else if constexpr (std::is_same_v<T, GradientCheckpointing>) {
    return json.is_boolean()  ? std::optional<T>(json.get<bool>())
           : json.is_string() ? std::optional<T>(json.get<std::string>())
                              : std::nullopt;
  } else {
    const bool good = std::is_same_v<T, bool>          ? json.is_boolean()
                      : std::is_same_v<T, std::string> ? json.is_string()
                      : std::is_same_v<T, double>      ? json.is_number()
                      : std::is_same_v<T, uint64_t>    ? json.is_number_unsigned()
                                                       : json.is_number_integer();
    return good ? std::optional<T>(json.get<T>()) : std::nullopt;
  }
}

template <typename T>
void read_argument(const char* name, const nlohmann::json& json, T& field) {
  const std::optional<T> value = read_json<T>(json);
  std::string fix;
  if constexpr (std::is_enum_v<T>) {
    fix = json.is_string() ? write_nearest(json.get<std::string>(), spelling_names<T>()) : fix;
  }
  require_argument(value.has_value(), name, json, expected_json<T>(), fix);
  field = *value;
}
template <typename T>
void read_argument(const char* name, const nlohmann::json& json, std::optional<T>& field) {
  field.reset();
  if (!json.is_null()) {
    read_argument(name, json, field.emplace());
  }
}

/// Throws unless the arguments agree with each other.
void require_consistent(bool good, const std::string& what, const std::string& expected,
                        const std::string& fix = {}) {
  if (!good) {
    throw InputError(kArgumentsPlace, what, expected, fix);
  }
}

/// Steps, or a fraction of all steps.
void require_interval(const char* name, double value) {
  require_argument(value > 0 && std::isfinite(value) && (value < 1 || value == std::floor(value)),
                   name, value,
                   "a whole number of steps, or a fraction of all steps above 0 and below 1");
}

void validate_precision(const TrainingArguments& a) {
  const auto contradicts = [&](bool set, Precision meant) {
    return set && a.precision != Precision::no && a.precision != meant;
  };
  const std::string precision = std::string("precision=") + precision_name(a.precision);
  require_consistent(!a.bf16 || !a.fp16, "bf16=true and fp16=true exclude each other",
                     "one of them", "leave fp16 out, because bf16 needs no loss scale");
  require_consistent(!contradicts(a.bf16, Precision::bf16) && !contradicts(a.fp16, Precision::fp16),
                     std::string(a.bf16 ? "bf16" : "fp16") + "=true with " + precision,
                     "one precision", "leave one of them out");
}

void validate_strategy(const TrainingArguments& a) {
  require_consistent(!a.use_cpu || a.device == "auto" || a.device == "cpu",
                     "use_cpu=true with device=" + a.device, "one device", "leave use_cpu out");
  require_argument(
      a.strategy == Strategy::ddp || a.strategy == Strategy::hsdp || a.local_sgd_steps == 0,
      "local_sgd_steps", a.local_sgd_steps,
      "0 unless strategy=ddp or hsdp, because Local SGD averages replicas of a model");
  require_argument(a.shard_size == 0 || (a.shard_size > 0 && a.strategy == Strategy::hsdp),
                   "shard_size", a.shard_size,
                   "0, or with strategy=hsdp the number of ranks that share a replica");
}

void validate_local_sgd(const TrainingArguments& a) {
  const nlohmann::json json = a;
  const int64_t h = a.local_sgd_steps;
  const std::string steps = "local_sgd_steps=" + std::to_string(h);
  const bool outer = a.local_sgd_outer != LocalSGDOuter::none;
  const auto require = [&](const char* name, bool set, bool good, const std::string& expected) {
    if (set) {
      require_argument(h > 0, name, json.at(name), "local_sgd_steps above 0 with it",
                       "set local_sgd_steps");
      require_argument(good, name, json.at(name), expected);
    }
  };
  const auto between = [](const std::optional<double>& number, double least, double end) {
    return !number || (*number >= least && *number < end);
  };
  require("local_sgd_post_local_start", a.local_sgd_post_local_start > 0, true, {});
  require("local_sgd_delay", a.local_sgd_delay > 0, a.local_sgd_delay <= h, "0 to " + steps);
  require("local_sgd_outer", outer, true, {});
  require("local_sgd_outer_lr", a.local_sgd_outer_lr.has_value(),
          outer && between(a.local_sgd_outer_lr, std::numeric_limits<double>::min(),
                           std::numeric_limits<double>::infinity()),
          "a number above 0, with local_sgd_outer=slowmo or diloco");
  require("local_sgd_outer_momentum", a.local_sgd_outer_momentum.has_value(),
          outer && between(a.local_sgd_outer_momentum, 0, 1),
          "0 or more and below 1, with local_sgd_outer=slowmo or diloco");
  require("local_sgd_inner_steps", a.local_sgd_inner_steps > 0,
          h % std::max<int64_t>(1, a.local_sgd_inner_steps) == 0, "0, or a divisor of " + steps);
  require("local_sgd_group_size", a.local_sgd_group_size > 0,
          a.local_sgd_inner_steps > 0 && a.strategy == Strategy::ddp,
          "0 without local_sgd_inner_steps, and with strategy=hsdp");
  require("local_sgd_driver", a.local_sgd_driver, true, {});
}

void validate_graphs(const TrainingArguments& a) {
  const auto exclude = [&](bool other, const std::string& what, const char* why) {
    require_consistent(!a.cuda_graphs || !other, "cuda_graphs=true with " + what, why,
                       "leave one of them out");
  };
  exclude(a.strategy != Strategy::ddp, "strategy=" + spelling(a.strategy),
          "strategy=ddp, because the parameters of a graph stay where they are");
  exclude(a.local_sgd_steps > 0, "local_sgd_steps=" + std::to_string(a.local_sgd_steps),
          "local_sgd_steps=0");
  exclude(static_cast<bool>(a.gradient_checkpointing),
          "gradient_checkpointing=" + a.gradient_checkpointing.text(),
          "gradient_checkpointing=none, because a recomputation sets the random generator");
}

void validate_schedule(const TrainingArguments& a) {
  check_schedule_name(kArgumentsPlace, a.lr_scheduler_type);
  require_argument(a.warmup_steps < 1 || a.warmup_steps == std::floor(a.warmup_steps),
                   "warmup_steps", a.warmup_steps,
                   "a whole number of steps, or a fraction below 1");
  require_argument(a.warmup_ratio >= 0 && a.warmup_ratio <= 1, "warmup_ratio", a.warmup_ratio,
                   "a fraction of all steps, 0 to 1");
  if (!a.lr_scheduler_kwargs.empty()) {
    require_argument(try_parse_json(a.lr_scheduler_kwargs).value.is_object(), "lr_scheduler_kwargs",
                     a.lr_scheduler_kwargs, "a JSON object, e.g. {\"num_cycles\": 2}");
  }
  require_consistent(
      a.lr_scheduler_type != "reduce_lr_on_plateau" || a.eval_strategy != IntervalStrategy::no,
      "lr_scheduler_type=reduce_lr_on_plateau without evaluation: eval_strategy=no", {},
      "set eval_strategy to epoch or steps");
}

void validate_memory(const TrainingArguments& a) {
  if (!a.memory_limit.empty()) {
    int64_t bytes = 0;
    try {
      bytes = parse_bytes(a.memory_limit);
    } catch (const InputError&) {
      // below
    }
    require_argument(bytes > 0, "memory_limit", a.memory_limit, "bytes above 0, e.g. 2GB");
    require_consistent(a.auto_find_batch_size,
                       "memory_limit=" + a.memory_limit + " without auto_find_batch_size",
                       "both or neither");
  }
  require_consistent(
      !a.auto_find_batch_size ||
          a.gradient_checkpointing.mode() != GradientCheckpointing::Mode::budget,
      "auto_find_batch_size=true with gradient_checkpointing=" + a.gradient_checkpointing.text(),
      "one of them, because a budget needs a known batch size",
      "set gradient_checkpointing to full, every:K or ops");
}

void validate_objective(const TrainingArguments& a) {
  require_argument(a.label_smoothing_factor >= 0 && a.label_smoothing_factor < 1,
                   "label_smoothing_factor", a.label_smoothing_factor, "0 or more and below 1");
  class_weight_numbers(a.class_weights);
  require_argument(a.early_stopping_threshold >= 0 && std::isfinite(a.early_stopping_threshold),
                   "early_stopping_threshold", a.early_stopping_threshold, "0 or more");
  require_argument(a.early_stopping_threshold == 0 || a.early_stopping_patience > 0,
                   "early_stopping_threshold", a.early_stopping_threshold,
                   "0 without early_stopping_patience", "set early_stopping_patience");
  require_argument(a.early_stopping_patience == 0 || a.eval_strategy != IntervalStrategy::no,
                   "early_stopping_patience", a.early_stopping_patience, "0 with eval_strategy=no",
                   "set eval_strategy to epoch or steps");
}

void validate_best_model(const TrainingArguments& a) {
  const auto require = [](bool good, const std::string& what, const char* fix) {
    require_consistent(good, "load_best_model_at_end=true " + what, {}, fix);
  };
  require(a.eval_strategy != IntervalStrategy::no, "without evaluation: eval_strategy=no",
          "set eval_strategy to epoch or steps");
  if (a.save_strategy == SaveStrategy::best) {
    return; // each best model is saved
  }
  require(a.eval_strategy == interval_of(a.save_strategy),
          "needs a save for each evaluation: eval_strategy=" + spelling(a.eval_strategy) +
              ", save_strategy=" + spelling(a.save_strategy),
          "make the two strategies equal");
  const double ratio = a.save_steps / a.eval_steps;
  const bool mixed = (a.save_steps < 1) != (a.eval_steps < 1);
  const bool multiple = !mixed && ratio >= 1 && std::abs(ratio - std::round(ratio)) <= 1e-9;
  require(a.eval_strategy != IntervalStrategy::steps || multiple,
          "needs save_steps to be a multiple of eval_steps: save_steps=" +
              nlohmann::json(a.save_steps).dump() +
              ", eval_steps=" + nlohmann::json(a.eval_steps).dump(),
          "make save_steps a multiple of eval_steps");
}

} // namespace detail

void TrainingArguments::validate() const {
  using detail::require_argument;
  const auto not_negative = [](const char* name, double value) {
    require_argument(value >= 0 && std::isfinite(value), name, value, "0 or more");
  };
  require_argument(max_steps > 0 || (num_train_epochs > 0 && std::isfinite(num_train_epochs)),
                   "num_train_epochs", num_train_epochs, "a number above 0");
  require_argument(max_steps > 0 || max_steps == -1, "max_steps", max_steps,
                   "1 or more, or -1 to count epochs");
  for (const nlohmann::json json = *this;
       const auto& [name, least, most] : detail::kArgumentRanges) {
    const auto number = json.at(name).get<double>();
    require_argument(number >= static_cast<double>(least) && number <= static_cast<double>(most),
                     name, json.at(name), std::to_string(least) + " to " + std::to_string(most));
  }
  check_timeout(detail::kArgumentsPlace, "ddp_timeout", ddp_timeout);
  check_timeout(detail::kArgumentsPlace, "heartbeat_timeout", heartbeat_timeout);
  not_negative("learning_rate", learning_rate);
  not_negative("weight_decay", weight_decay);
  not_negative("adam_epsilon", adam_epsilon);
  not_negative("max_grad_norm", max_grad_norm);
  not_negative("max_grad_value", max_grad_value);
  const auto beta = [](const char* name, double value) {
    require_argument(value >= 0 && value < 1, name, value, "0 or more, below 1");
  };
  beta("adam_beta1", adam_beta1);
  beta("adam_beta2", adam_beta2);
  detail::require_interval("logging_steps", logging_steps);
  detail::require_interval("eval_steps", eval_steps);
  detail::require_interval("save_steps", save_steps);
  not_negative("eval_delay", eval_delay);
  require_argument(save_strategy != SaveStrategy::best || eval_strategy != IntervalStrategy::no,
                   "save_strategy", "best", "an evaluation, but eval_strategy=no",
                   "set eval_strategy to epoch or steps");
  require_argument(!output_dir.empty() || save_strategy == SaveStrategy::no, "output_dir",
                   output_dir, "a folder, or save_strategy=no");
  require_argument(
      resume_from_checkpoint.empty() || !overwrite_output_dir, "resume_from_checkpoint",
      resume_from_checkpoint,
      "overwrite_output_dir=false, because one resumes the run in the folder and the other "
      "removes it");
  require_argument(resume_from_checkpoint.empty() || !output_dir.empty(), "resume_from_checkpoint",
                   resume_from_checkpoint, "an output_dir");
  require_argument(!metric_for_best_model.empty(), "metric_for_best_model", metric_for_best_model,
                   "the name of a value in the evaluation record");
  require_argument(tracker_names(report_to).empty() || !output_dir.empty() || !logging_dir.empty(),
                   "report_to", report_to, "none without an output_dir or a logging_dir");
  require_utf8(detail::kArgumentsPlace, nlohmann::json(*this));
  detail::validate_precision(*this);
  detail::validate_strategy(*this);
  detail::validate_local_sgd(*this);
  detail::validate_graphs(*this);
  detail::validate_schedule(*this);
  detail::validate_memory(*this);
  detail::validate_objective(*this);
  if (load_best_model_at_end) {
    detail::validate_best_model(*this);
  }
}

std::vector<double> class_weight_numbers(const std::string& class_weights) {
  std::vector<double> numbers;
  if (class_weights.empty() || class_weights == "balanced") {
    return numbers;
  }
  for (const std::string& item : split(class_weights)) {
    const double number = parse_number<double>(item).value_or(0);
    detail::require_argument(number > 0 && std::isfinite(number), "class_weights", class_weights,
                             "one number above 0 per label, e.g. 0.5,2, or balanced");
    numbers.push_back(number);
  }
  return numbers;
}

std::vector<std::string> tracker_names(const std::string& report_to) {
  if (report_to.empty() || report_to == "none") {
    return {};
  }
  std::vector<std::string> names = split(report_to);
  std::ranges::sort(names);
  names.erase(std::ranges::unique(names).begin(), names.end()); // one file has one writer
  return names;
}

Precision TrainingArguments::effective_precision() const {
  return bf16 ? Precision::bf16 : fp16 ? Precision::fp16 : precision;
}

std::string TrainingArguments::best_metric_name() const {
  return metric_for_best_model.rfind("eval_", 0) == 0 ? metric_for_best_model
                                                      : "eval_" + metric_for_best_model;
}

bool TrainingArguments::best_is_greater() const {
  const bool is_error =
      std::ranges::any_of(std::array{"loss", "perplexity", "mse", "mae"},
                          [&](const char* name) { return metric_for_best_model.ends_with(name); });
  return greater_is_better.value_or(!is_error);
}

void to_json(nlohmann::json& json, const TrainingArguments& arguments) {
  json = nlohmann::json::object();
  detail::visit_arguments(arguments, [&](const char* name, const auto& field) {
    json[name] = detail::argument_json(field);
  });
}

void from_json(const nlohmann::json& given, TrainingArguments& arguments) {
  nlohmann::json json = given;
  if (json.is_object() && json.contains("activation_checkpointing") &&
      !json.contains("gradient_checkpointing")) {
    json["gradient_checkpointing"] = json["activation_checkpointing"];
    json.erase("activation_checkpointing");
  }
  if (!json.is_object()) {
    throw InputError(detail::kArgumentsPlace,
                     std::string("the arguments are a JSON ") + json.type_name(),
                     "a JSON object of names and values");
  }
  std::vector<std::string> names;
  TrainingArguments read = arguments;
  detail::visit_arguments(read, [&](const char* name, auto& field) {
    names.emplace_back(name);
    if (const auto entry = json.find(name); entry != json.end()) {
      detail::read_argument(name, *entry, field);
    }
  });
  for (const auto& [name, value] : json.items()) {
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      throw InputError(detail::kArgumentsPlace, "unknown name: " + name + "=" + value.dump(), {},
                       write_nearest(name, names, "leave it out"));
    }
  }
  arguments = read;
}

} // namespace hasten
