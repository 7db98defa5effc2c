#include <algorithm>
#include <map>
#include <utility>

#include "base/registry.h"
#include "hasten/base/error.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"
#include "hasten/config/training_plan.h"
#include "option_checks.h"

namespace hasten {

namespace detail {

constexpr const char* kMakeSchedule = "config::make_schedule";

NamedOptions schedule_options(const std::string& schedule, const nlohmann::json& kwargs) {
  if (!kwargs.is_null() && !kwargs.is_object()) {
    throw InputError(kMakeSchedule, "lr_scheduler_kwargs=" + kwargs.dump(),
                     "an object, like {\"num_cycles\": 2}");
  }
  std::map<std::string, std::string> texts;
  for (const auto& [name, value] : kwargs.items()) {
    texts[name] = value.dump();
  }
  return {kMakeSchedule, "lr_scheduler_kwargs", schedule, std::move(texts)};
}

/// A ScheduleRequest, with keywords that know what was read.
struct BuiltInRequest {
  const std::string& name;
  NamedOptions& kwargs;
  int64_t warmup = 0;
  int64_t total = 0;
  double peak = 0;

  /// The keyword's value, or `value` if it was not given.
  template <typename T>
  T get(const char* keyword, T value) const {
    kwargs.take(keyword, value);
    return value;
  }
  [[noreturn]] void lacks(const std::string& keyword) const {
    throw InputError(kMakeSchedule, "lr_scheduler_kwargs of " + name + " lack " + keyword, {},
                     "set it, for example --lr-scheduler-kwargs '{\"" +
                         keyword.substr(0, keyword.find(' ')) + "\": …}'");
  }
};

Schedule make_min_lr_schedule(const BuiltInRequest& r) {
  const auto cycles = r.get("num_cycles", 0.5);
  double least = 0, rate = 0;
  const bool has_least = r.kwargs.take("min_lr", least);
  const bool has_rate = r.kwargs.take("min_lr_rate", rate);
  r.kwargs.refuse_others();
  if (has_least == has_rate) {
    r.lacks("min_lr or min_lr_rate (one of them)");
  }
  return cosine_with_min_lr_schedule(r.warmup, r.total, has_rate ? rate : least / r.peak, cycles);
}

Schedule make_stable_schedule(const BuiltInRequest& r) {
  WarmupStableDecayOptions options;
  options.warmup_steps = r.warmup;
  if (!r.kwargs.take("num_decay_steps", options.decay_steps)) {
    r.lacks("num_decay_steps");
  }
  if (!r.kwargs.take("num_stable_steps", options.stable_steps)) {
    options.stable_steps = r.total - r.warmup - options.decay_steps;
    if (options.stable_steps < 0) {
      throw InputError(
          kMakeSchedule,
          "lr_scheduler_kwargs: num_decay_steps=" + std::to_string(options.decay_steps) +
              " after warmup_steps=" + std::to_string(r.warmup) +
              " exceed the run's optimizer steps=" + std::to_string(r.total),
          "at most " + std::to_string(std::max<int64_t>(0, r.total - r.warmup)));
    }
  }
  const std::vector<std::string> shapes = {"linear", "cosine", "1-sqrt"};
  options.warmup_type = static_cast<PhaseShape>(r.kwargs.take_one_of("warmup_type", shapes, 0));
  options.decay_type = static_cast<PhaseShape>(r.kwargs.take_one_of("decay_type", shapes, 1));
  r.kwargs.take("min_lr_ratio", options.min_lr_ratio);
  r.kwargs.take("num_cycles", options.num_cycles);
  r.kwargs.refuse_others();
  return warmup_stable_decay_schedule(options);
}

Schedule make_one_cycle_schedule(const BuiltInRequest& r) {
  OneCycleOptions options;
  options.total_steps = r.total;
  r.kwargs.take("pct_start", options.pct_start);
  options.cosine = r.kwargs.take_one_of("anneal_strategy", {"cos", "linear"}, 0) == 0;
  r.kwargs.take("div_factor", options.div_factor);
  r.kwargs.take("final_div_factor", options.final_div_factor);
  r.kwargs.take("three_phase", options.three_phase);
  r.kwargs.refuse_others();
  return one_cycle_schedule(options);
}

ReduceLrOnPlateauOptions take_plateau_options(NamedOptions& given, bool greater_is_better) {
  ReduceLrOnPlateauOptions options;
  options.greater_is_better =
      given.take_one_of("mode", {"min", "max"}, greater_is_better ? 1 : 0) == 1;
  given.take("factor", options.factor);
  given.take("patience", options.patience);
  given.take("threshold", options.threshold);
  options.relative = given.take_one_of("threshold_mode", {"rel", "abs"}, 0) == 0;
  given.take("cooldown", options.cooldown);
  given.take("min_lr", options.min_lr);
  given.take("eps", options.eps);
  given.refuse_others();
  return options;
}

using Request = const BuiltInRequest&;
static Registry<ScheduleFactory>::Values built_in_schedules() {
  Registry<ScheduleFactory>::Values all;
  const auto add = [&](const char* name, Schedule (*make)(Request)) {
    all.emplace(name, [make](const ScheduleRequest& r) {
      NamedOptions given = schedule_options(r.name, r.kwargs);
      const Schedule schedule = make({r.name, given, r.warmup_steps, r.total_steps, r.peak_lr});
      given.refuse_others();
      return schedule;
    });
  };
  add("linear", [](Request r) { return linear_schedule(r.warmup, r.total); });
  add("cosine",
      [](Request r) { return cosine_schedule(r.warmup, r.total, r.get("num_cycles", 0.5)); });
  add("cosine_with_restarts", [](Request r) {
    return cosine_with_restarts_schedule(r.warmup, r.total, r.get("num_cycles", int64_t{1}));
  });
  add("cosine_with_min_lr", make_min_lr_schedule);
  add("polynomial", [](Request r) {
    const auto lr_end = r.get("lr_end", 1e-7);
    return polynomial_schedule(r.warmup, r.total, lr_end / r.peak, r.get("power", 1.0));
  });
  add("constant", [](Request) { return constant_schedule(); });
  add("constant_with_warmup", [](Request r) { return constant_schedule_with_warmup(r.warmup); });
  add("inverse_sqrt",
      [](Request r) { return inverse_sqrt_schedule(r.warmup, r.get("timescale", int64_t{0})); });
  add("warmup_stable_decay", make_stable_schedule);
  add("reduce_lr_on_plateau", [](Request r) {
    take_plateau_options(r.kwargs, false); // only verifies
    return constant_schedule();
  });
  add("one_cycle", make_one_cycle_schedule);
  return all;
}

static Registry<ScheduleFactory>& registered_schedules() {
  static Registry<ScheduleFactory> all(built_in_schedules());
  return all;
}

} // namespace detail

std::vector<std::string> schedule_names() { return detail::registered_schedules().names(); }

void register_schedule(const std::string& name, ScheduleFactory factory) {
  constexpr const char* kWhere = "config::register_schedule";
  if (!factory) {
    throw InputError(kWhere, "name=" + name + " without a factory", "a factory");
  }
  detail::registered_schedules().add(kWhere, name, std::move(factory));
}

void check_schedule_name(const char* where, const std::string& name) {
  detail::registered_schedules().get(where, "lr_scheduler_type", name);
}

Schedule make_schedule(const std::string& name, int64_t warmup, int64_t total, double peak,
                       const nlohmann::json& kwargs) {
  const ScheduleFactory& make =
      detail::registered_schedules().get(detail::kMakeSchedule, "lr_scheduler_type", name);
  detail::schedule_options(name, kwargs); // an object
  if (warmup > total) {
    throw InputError(detail::kMakeSchedule, "warmup_steps=" + std::to_string(warmup),
                     "at most the run's optimizer steps=" + std::to_string(total),
                     "warm up over fewer steps, or train longer");
  }
  return make({name, warmup, total, peak, kwargs});
}

Schedule make_schedule(const TrainingArguments& a, const TrainingPlan& plan) {
  return make_schedule(a.lr_scheduler_type, plan.warmup_steps, plan.max_steps, a.learning_rate,
                       try_parse_json(a.lr_scheduler_kwargs).value);
}

ReduceLrOnPlateauOptions plateau_options(const nlohmann::json& kwargs, bool greater_is_better) {
  auto given = detail::schedule_options("reduce_lr_on_plateau", kwargs);
  return detail::take_plateau_options(given, greater_is_better);
}

} // namespace hasten
