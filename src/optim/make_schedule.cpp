#include "hasten/optim/make_schedule.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>

#include "hasten/base/error.h"
#include "option_checks.h"

namespace hasten {

namespace detail {

constexpr const char* kMakeSchedule = "optim::make_schedule";

/// The keywords of one schedule. Each is read once; the remaining ones are unknown.
class ScheduleKwargs {
 public:
  ScheduleKwargs(const std::string& schedule, const nlohmann::json& kwargs)
      : schedule_(schedule), left_(kwargs) {
    if (left_.is_null()) {
      left_ = nlohmann::json::object();
    }
    if (!left_.is_object()) {
      throw InputError(kMakeSchedule, "lr_scheduler_kwargs=" + kwargs.dump(),
                       "an object, like {\"num_cycles\": 2}");
    }
  }

  /// Whether the keyword was given.
  bool take(const char* name, double& field) {
    return take(name, field, "a number",
                [](const nlohmann::json& value) { return value.is_number(); });
  }
  bool take(const char* name, int64_t& field) {
    return take(name, field, "a whole number", [](const nlohmann::json& value) {
      return value.is_number_integer() &&
             std::abs(value.get<double>()) < 9.0e15; // sums fit in 63 bits
    });
  }
  bool take(const char* name, bool& field) {
    return take(name, field, "true or false",
                [](const nlohmann::json& value) { return value.is_boolean(); });
  }
  /// Index of the given spelling, or `otherwise` if the keyword is absent.
  int64_t take_one_of(const char* name, const std::vector<std::string>& spellings,
                      int64_t otherwise) {
    const std::string all = "one of " + joined_names(spellings);
    std::string text;
    const auto is_one = [&](const nlohmann::json& value) {
      return value.is_string() && std::find(spellings.begin(), spellings.end(),
                                            value.get<std::string>()) != spellings.end();
    };
    return take(name, text, all.c_str(), is_one)
               ? std::find(spellings.begin(), spellings.end(), text) - spellings.begin()
               : otherwise;
  }
  [[noreturn]] void lacks(const std::string& name) const {
    throw InputError(kMakeSchedule, "lr_scheduler_kwargs of " + schedule_ + " lack " + name, {},
                     "set it, for example --lr-scheduler-kwargs '{\"" +
                         name.substr(0, name.find(' ')) + "\": …}'");
  }
  void refuse_others() const {
    if (left_.empty()) {
      return;
    }
    refuse_name(
        kMakeSchedule, "lr_scheduler_kwargs", left_.begin().key(), known_,
        (known_.empty() ? "no names" : "one of " + joined_names(known_)) + " for " + schedule_);
  }

 private:
  template <typename T, typename IsGood>
  bool take(const char* name, T& field, const char* expected, const IsGood& good) {
    known_.emplace_back(name);
    const auto found = left_.find(name);
    if (found == left_.end()) {
      return false;
    }
    if (!good(*found)) {
      throw InputError(kMakeSchedule,
                       std::string("lr_scheduler_kwargs: ") + name + "=" + found->dump(), expected);
    }
    field = found->template get<T>();
    left_.erase(found);
    return true;
  }

  std::string schedule_;
  nlohmann::json left_;
  std::vector<std::string> known_{};
};

Schedule make_min_lr_schedule(ScheduleKwargs& kwargs, int64_t warmup, int64_t total, double peak) {
  double cycles = 0.5, least = 0, rate = 0;
  kwargs.take("num_cycles", cycles);
  const bool has_least = kwargs.take("min_lr", least);
  const bool has_rate = kwargs.take("min_lr_rate", rate);
  kwargs.refuse_others();
  if (has_least == has_rate) {
    kwargs.lacks("min_lr or min_lr_rate (one of them)");
  }
  return cosine_with_min_lr_schedule(warmup, total, has_rate ? rate : least / peak, cycles);
}

Schedule make_stable_schedule(ScheduleKwargs& kwargs, int64_t warmup, int64_t total) {
  WarmupStableDecayOptions options;
  options.warmup_steps = warmup;
  if (!kwargs.take("num_decay_steps", options.decay_steps)) {
    kwargs.lacks("num_decay_steps");
  }
  if (!kwargs.take("num_stable_steps", options.stable_steps)) {
    options.stable_steps = total - warmup - options.decay_steps;
    if (options.stable_steps < 0) {
      throw InputError(
          kMakeSchedule,
          "lr_scheduler_kwargs: num_decay_steps=" + std::to_string(options.decay_steps) +
              " after warmup_steps=" + std::to_string(warmup) +
              " exceed the run's optimizer steps=" + std::to_string(total),
          "at most " + std::to_string(std::max<int64_t>(0, total - warmup)));
    }
  }
  const std::vector<std::string> shapes = {"linear", "cosine", "1-sqrt"};
  options.warmup_type = static_cast<PhaseShape>(kwargs.take_one_of("warmup_type", shapes, 0));
  options.decay_type = static_cast<PhaseShape>(kwargs.take_one_of("decay_type", shapes, 1));
  kwargs.take("min_lr_ratio", options.min_lr_ratio);
  kwargs.take("num_cycles", options.num_cycles);
  kwargs.refuse_others();
  return warmup_stable_decay_schedule(options);
}

Schedule make_one_cycle_schedule(ScheduleKwargs& kwargs, int64_t total) {
  OneCycleOptions options;
  options.total_steps = total;
  kwargs.take("pct_start", options.pct_start);
  options.cosine = kwargs.take_one_of("anneal_strategy", {"cos", "linear"}, 0) == 0;
  kwargs.take("div_factor", options.div_factor);
  kwargs.take("final_div_factor", options.final_div_factor);
  kwargs.take("three_phase", options.three_phase);
  kwargs.refuse_others();
  return one_cycle_schedule(options);
}

} // namespace detail

const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names = {"linear",
                                                 "cosine",
                                                 "cosine_with_restarts",
                                                 "cosine_with_min_lr",
                                                 "polynomial",
                                                 "constant",
                                                 "constant_with_warmup",
                                                 "inverse_sqrt",
                                                 "warmup_stable_decay",
                                                 "reduce_lr_on_plateau",
                                                 "one_cycle"};
  return names;
}

Schedule make_schedule(const std::string& name, int64_t warmup, int64_t total, double peak,
                       const nlohmann::json& kwargs) {
  detail::ScheduleKwargs given(name, kwargs);
  if (warmup > total) {
    throw InputError(detail::kMakeSchedule, "warmup_steps=" + std::to_string(warmup),
                     "at most the run's optimizer steps=" + std::to_string(total),
                     "warm up over fewer steps, or train longer");
  }
  if (name == "reduce_lr_on_plateau") {
    plateau_options(kwargs, false); // only verifies
    return constant_schedule();
  }
  if (name == "cosine_with_min_lr") {
    return detail::make_min_lr_schedule(given, warmup, total, peak);
  }
  if (name == "warmup_stable_decay") {
    return detail::make_stable_schedule(given, warmup, total);
  }
  if (name == "one_cycle") {
    return detail::make_one_cycle_schedule(given, total);
  }
  double cycles = 0.5, lr_end = 1e-7, power = 1;
  int64_t whole_cycles = 1, timescale = 0;
  Schedule schedule;
  if (name == "linear") {
    schedule = linear_schedule(warmup, total);
  } else if (name == "cosine") {
    given.take("num_cycles", cycles);
    schedule = cosine_schedule(warmup, total, cycles);
  } else if (name == "cosine_with_restarts") {
    given.take("num_cycles", whole_cycles);
    schedule = cosine_with_restarts_schedule(warmup, total, whole_cycles);
  } else if (name == "polynomial") {
    given.take("lr_end", lr_end);
    given.take("power", power);
    schedule = polynomial_schedule(warmup, total, lr_end / peak, power);
  } else if (name == "constant") {
    schedule = constant_schedule();
  } else if (name == "constant_with_warmup") {
    schedule = constant_schedule_with_warmup(warmup);
  } else if (name == "inverse_sqrt") {
    given.take("timescale", timescale);
    schedule = inverse_sqrt_schedule(warmup, timescale);
  }
  given.refuse_others();
  if (schedule) {
    return schedule;
  }
  const auto& names = schedule_names();
  const std::string near = nearest_name(name, names.data(), names.data() + names.size());
  throw InputError(detail::kMakeSchedule, "lr_scheduler_type=" + name, "a name of schedule_names()",
                   near.empty() ? "" : "write " + near);
}

ReduceLrOnPlateauOptions plateau_options(const nlohmann::json& kwargs, bool greater_is_better) {
  detail::ScheduleKwargs given("reduce_lr_on_plateau", kwargs);
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

} // namespace hasten
