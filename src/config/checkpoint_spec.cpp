#include "hasten/config/checkpoint_spec.h"

#include <array>
#include <cmath>

#include "hasten/base/error.h"
#include "hasten/base/text.h"

namespace hasten {

namespace detail {

struct ByteUnit {
  std::string_view name;
  double bytes;
};
constexpr std::array<ByteUnit, 11> kByteUnits{{
    {"KiB", 1024.0},
    {"MiB", 1024.0 * 1024},
    {"GiB", 1024.0 * 1024 * 1024},
    {"kB", 1e3},
    {"KB", 1e3},
    {"MB", 1e6},
    {"GB", 1e9},
    {"B", 1.0},
    {"K", 1024.0}, // a single letter is a power of 1024, as in ulimit and control groups
    {"M", 1024.0 * 1024},
    {"G", 1024.0 * 1024 * 1024},
}};

/// The number if the whole text is a number above 0, else 0.
static double positive_number(std::string_view text) {
  const double value = parse_number<double>(text).value_or(0);
  return std::isfinite(value) && value > 0 ? value : 0;
}

[[noreturn]] static void refuse_spec(std::string_view text) {
  throw InputError("activation_checkpoint::gradient_checkpointing",
                   "gradient_checkpointing=" + std::string(text),
                   "none, full, every:K with K >= 1, ops, or budget:B with B bytes (2GB) or "
                   "a share of the memory without recomputation (50%)");
}

} // namespace detail

int64_t parse_bytes(std::string_view text) {
  double factor = 1;
  std::string_view number = text;
  for (const auto& unit : detail::kByteUnits) {
    if (text.size() > unit.name.size() && text.ends_with(unit.name)) {
      factor = unit.bytes;
      number = text.substr(0, text.size() - unit.name.size());
      break;
    }
  }
  const double bytes = detail::positive_number(number) * factor;
  if (bytes < 1 || bytes > 9e18) {
    throw InputError("activation_checkpoint::parse_bytes", "bytes=" + std::string(text),
                     "a number above 0, with or without kB, MB, GB, KiB, MiB, GiB, or K, M, G");
  }
  return static_cast<int64_t>(bytes);
}

GradientCheckpointing::GradientCheckpointing(std::string_view text) {
  constexpr std::string_view kEvery = "every:";
  constexpr std::string_view kBudget = "budget:";
  if (text == "none" || text == "false") {
    return;
  }
  if (text == "full" || text == "true") {
    mode_ = Mode::full;
  } else if (text == "ops") {
    mode_ = Mode::ops;
  } else if (text.starts_with(kEvery)) {
    mode_ = Mode::every;
    every_ = parse_number<decltype(every_)>(text.substr(kEvery.size())).value_or(0);
    if (every_ < 1) {
      detail::refuse_spec(text);
    }
  } else if (text.starts_with(kBudget)) {
    mode_ = Mode::budget;
    budget_ = text.substr(kBudget.size());
    if (budget_.size() > 1 && budget_.ends_with('%')) {
      share_ =
          detail::positive_number(std::string_view(budget_).substr(0, budget_.size() - 1)) / 100;
      if (share_ <= 0 || share_ > 1) {
        detail::refuse_spec(text);
      }
    } else {
      try {
        bytes_ = parse_bytes(budget_);
      } catch (const InputError&) {
        detail::refuse_spec(text);
      }
    }
  } else {
    detail::refuse_spec(text);
  }
}

std::string GradientCheckpointing::text() const {
  switch (mode_) {
    case Mode::none:
      return "none";
    case Mode::full:
      return "full";
    case Mode::every:
      return "every:" + std::to_string(every_);
    case Mode::ops:
      return "ops";
    case Mode::budget:
      break;
  }
  return "budget:" + budget_;
}

} // namespace hasten
