#include <algorithm>
#include <cmath>
#include <numbers>
#include <string>

#include "hasten/base/error.h"
#include "hasten/config/schedule.h"
#include "option_checks.h"

namespace hasten {

namespace detail {

void check_schedule(bool good, const char* name, double value, const char* expected) {
  require_option(good, "config::schedule", name, value, expected);
}

void check_steps(int64_t warmup, int64_t total) {
  check_schedule(total >= 0, "total_steps", static_cast<double>(total), "0 or above");
  check_schedule(warmup >= 0, "warmup_steps", static_cast<double>(warmup), "0 or above");
  if (warmup > total) {
    throw InputError("config::schedule", "warmup_steps=" + std::to_string(warmup),
                     "at most total_steps=" + std::to_string(total),
                     "warm up over fewer steps, or train longer");
  }
}

double risen(int64_t completed, int64_t steps) {
  return static_cast<double>(completed) / static_cast<double>(std::max<int64_t>(1, steps));
}

// Completed share of the steps after the warm-up.
double progress(int64_t completed, int64_t warmup, int64_t total) {
  return risen(completed - warmup, total - warmup);
}

// (1 + cos(2 pi cycles x)) / 2, with the factors in transformers' order.
double cosine_wave(double cycles, double x) {
  return 0.5 * (1.0 + std::cos(std::numbers::pi * cycles * 2.0 * x));
}

// A schedule that starts with the linear warm-up.
template <typename Rest>
Schedule after_warmup(int64_t warmup, Rest rest) {
  return [warmup, rest](int64_t completed) -> double {
    return completed < warmup ? risen(completed, warmup) : rest(completed);
  };
}

double up(PhaseShape shape, double x) {
  return shape == PhaseShape::linear   ? x
         : shape == PhaseShape::cosine ? 0.5 * (1.0 - std::cos(std::numbers::pi * x))
                                       : 1.0 - std::sqrt(1.0 - x);
}

double down(PhaseShape shape, double x, double num_cycles) {
  return shape == PhaseShape::linear   ? 1.0 - x
         : shape == PhaseShape::cosine ? cosine_wave(num_cycles, x)
                                       : 1.0 - std::sqrt(x);
}

} // namespace detail

Schedule linear_schedule(int64_t warmup_steps, int64_t total_steps) {
  detail::check_steps(warmup_steps, total_steps);
  return detail::after_warmup(warmup_steps, [warmup_steps, total_steps](int64_t completed) {
    return std::max(0.0, detail::risen(total_steps - completed, total_steps - warmup_steps));
  });
}

Schedule constant_schedule() {
  return [](int64_t) { return 1.0; };
}

Schedule constant_schedule_with_warmup(int64_t warmup_steps) {
  detail::check_steps(warmup_steps, warmup_steps);
  return detail::after_warmup(warmup_steps, [](int64_t) { return 1.0; });
}

Schedule cosine_schedule(int64_t warmup_steps, int64_t total_steps, double num_cycles) {
  return cosine_with_min_lr_schedule(warmup_steps, total_steps, 0.0, num_cycles);
}

Schedule cosine_with_min_lr_schedule(int64_t warmup_steps, int64_t total_steps, double min_lr_rate,
                                     double num_cycles) {
  detail::check_steps(warmup_steps, total_steps);
  detail::check_schedule(num_cycles > 0, "num_cycles", num_cycles, "above 0");
  detail::check_schedule(min_lr_rate >= 0 && min_lr_rate <= 1, "min_lr_rate", min_lr_rate,
                         "a share of the peak, 0 to 1");
  return detail::after_warmup(warmup_steps, [=](int64_t completed) {
    const double wave =
        detail::cosine_wave(num_cycles, detail::progress(completed, warmup_steps, total_steps));
    return std::max(0.0, wave * (1.0 - min_lr_rate) + min_lr_rate);
  });
}

Schedule cosine_with_restarts_schedule(int64_t warmup_steps, int64_t total_steps,
                                       int64_t num_cycles) {
  detail::check_steps(warmup_steps, total_steps);
  detail::check_schedule(num_cycles >= 1, "num_cycles", static_cast<double>(num_cycles), ">= 1");
  return detail::after_warmup(warmup_steps, [=](int64_t completed) {
    const double p = detail::progress(completed, warmup_steps, total_steps);
    if (p >= 1.0) {
      return 0.0;
    }
    const double x = std::fmod(static_cast<double>(num_cycles) * p, 1.0);
    return std::max(0.0, 0.5 * (1.0 + std::cos(std::numbers::pi * x)));
  });
}

Schedule polynomial_schedule(int64_t warmup_steps, int64_t total_steps, double end_rate,
                             double power) {
  detail::check_steps(warmup_steps, total_steps);
  detail::check_schedule(warmup_steps < total_steps, "warmup_steps",
                         static_cast<double>(warmup_steps), "below total_steps");
  detail::check_schedule(end_rate >= 0 && end_rate < 1, "end_rate", end_rate,
                         "lr_end / peak, at least 0 and below 1");
  detail::check_schedule(power > 0, "power", power, "above 0");
  return detail::after_warmup(warmup_steps, [=](int64_t completed) {
    if (completed > total_steps) {
      return end_rate;
    }
    const double left = 1.0 - detail::progress(completed, warmup_steps, total_steps);
    return (1.0 - end_rate) * std::pow(left, power) + end_rate;
  });
}

Schedule inverse_sqrt_schedule(int64_t warmup_steps, int64_t timescale) {
  detail::check_steps(warmup_steps, warmup_steps);
  detail::check_schedule(timescale >= 0, "timescale", static_cast<double>(timescale),
                         "a number of steps, or 0 for warmup_steps");
  const int64_t t = timescale > 0 ? timescale : warmup_steps > 0 ? warmup_steps : 10'000;
  return detail::after_warmup(warmup_steps, [=](int64_t completed) {
    return 1.0 /
           std::sqrt(static_cast<double>(completed + t - warmup_steps) / static_cast<double>(t));
  });
}

Schedule warmup_stable_decay_schedule(const WarmupStableDecayOptions& options) {
  detail::check_steps(options.warmup_steps,
                      options.warmup_steps + options.stable_steps + options.decay_steps);
  detail::check_schedule(options.stable_steps >= 0, "stable_steps",
                         static_cast<double>(options.stable_steps), "0 or above");
  detail::check_schedule(options.decay_steps >= 0, "decay_steps",
                         static_cast<double>(options.decay_steps), "0 or above");
  detail::check_schedule(options.min_lr_ratio >= 0 && options.min_lr_ratio <= 1, "min_lr_ratio",
                         options.min_lr_ratio, "a share of the peak, 0 to 1");
  detail::check_schedule(options.num_cycles > 0, "num_cycles", options.num_cycles, "above 0");
  return [o = options](int64_t completed) {
    const int64_t decays_from = o.warmup_steps + o.stable_steps;
    const auto above_least = [&o](double share) {
      return std::max(0.0, share * (1.0 - o.min_lr_ratio) + o.min_lr_ratio);
    };
    if (completed < o.warmup_steps) {
      return above_least(detail::up(o.warmup_type, detail::risen(completed, o.warmup_steps)));
    }
    if (completed < decays_from) {
      return 1.0;
    }
    if (completed < decays_from + o.decay_steps) {
      const double x = detail::risen(completed - decays_from, o.decay_steps);
      return above_least(detail::down(o.decay_type, x, o.num_cycles));
    }
    return o.min_lr_ratio;
  };
}

Schedule one_cycle_schedule(const OneCycleOptions& options) {
  const auto n = static_cast<double>(options.total_steps);
  detail::check_schedule(options.total_steps >= 2, "total_steps", n, "2 or more optimizer steps");
  detail::check_schedule(
      options.pct_start > 0 && options.pct_start < (options.three_phase ? 0.5 : 1.0), "pct_start",
      options.pct_start, options.three_phase ? "above 0, below 0.5" : "above 0, below 1");
  detail::check_schedule(options.div_factor > 0, "div_factor", options.div_factor, "above 0");
  detail::check_schedule(options.final_div_factor > 0, "final_div_factor", options.final_div_factor,
                         "above 0");
  struct Phase {
    double end = 0; // in optimizer steps
    double from = 0;
    double to = 0;
  };
  const double first = 1 / options.div_factor;
  const double last = first / options.final_div_factor;
  std::vector<Phase> phases = {{options.pct_start * n - 1, first, 1}};
  if (options.three_phase) {
    phases.push_back({2 * options.pct_start * n - 2, 1, first});
  }
  phases.push_back({n - 1, phases.back().to, last});
  return [phases, cosine = options.cosine](int64_t completed) {
    const auto k = static_cast<double>(completed);
    double begin = 0;
    for (const Phase& phase : phases) {
      if (k <= phase.end) {
        const double x = (k - begin) / (phase.end - begin);
        return cosine ? phase.to +
                            (phase.from - phase.to) / 2.0 * (1.0 + std::cos(std::numbers::pi * x))
                      : phase.from + (phase.to - phase.from) * x;
      }
      begin = phase.end;
    }
    return phases.back().to;
  };
}

} // namespace hasten
