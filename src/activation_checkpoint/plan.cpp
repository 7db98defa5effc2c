// Plans: their cost, files, tables and plots.
#include <algorithm>
#include <cmath>
#include <iomanip>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>

#include "hasten/activation_checkpoint/planner.h"
#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "plan_cost.h"

namespace hasten {

namespace detail {

// Simulates a step under a plan and adds up bytes and seconds.
class PlanWalk {
 public:
  PlanWalk(const ChainProfile& profile, const std::vector<PlanRegion>& regions)
      : profile_(profile), regions_(regions) {}

  PlanCost cost() {
    const auto n = static_cast<int64_t>(profile_.blocks.size());
    used_ = profile_.before_bytes;
    forward(0, n, 0, false);
    note(used_ + profile_.after_bytes);
    used_ += profile_.after_left_bytes;
    backward(0, n, 0, false);
    note(profile_.first_peak_bytes);
    return {peak_, seconds_ + profile_.other_seconds};
  }

 private:
  const BlockProfile& at(int64_t i) const { return profile_.blocks[static_cast<size_t>(i)]; }
  void note(int64_t bytes) { peak_ = std::max(peak_, bytes); }

  // The outermost region that begins at `block`, without the first `skip` regions.
  int64_t region_at(int64_t block, int64_t last, size_t skip) const {
    for (size_t i = skip; i < regions_.size(); ++i) {
      if (regions_[i].first == block && regions_[i].last <= last) {
        return static_cast<int64_t>(i);
      }
    }
    return -1;
  }

  // Runs blocks [first, last) under the regions from index `skip` on. In a recomputation the last
  // block counts only up to the point where it stops.
  void forward(int64_t first, int64_t last, size_t skip, bool again) {
    const int64_t gradient = again ? at(last - 1).output_bytes : 0;
    for (int64_t block = first; block < last;) {
      const int64_t found = region_at(block, last, skip);
      if (found < 0) {
        const BlockProfile& b = at(block);
        if (again && block + 1 == last) {
          note(used_ + alone_bytes(b));
          seconds_ += b.recompute_seconds;
        } else {
          note(used_ + gradient + b.saved_bytes + b.forward_extra + b.unit_bytes);
          seconds_ += b.forward_seconds;
        }
        used_ += b.saved_bytes;
        ++block;
        continue;
      }
      const PlanRegion& region = regions_[static_cast<size_t>(found)];
      const bool ops = region.choice == BlockChoice::keep_ops;
      for (int64_t i = region.first; i < region.last; ++i) {
        const BlockProfile& b = at(i);
        const int64_t input = i == region.first ? 0 : at(i - 1).output_bytes;
        note(used_ + gradient + input + b.unit_bytes +
             (ops ? b.saved_bytes + b.forward_extra : b.dropped_peak));
        seconds_ += again && region.last == last ? 0 : b.forward_seconds;
      }
      used_ += ops ? at(block).ops_saved_bytes : at(region.last - 1).output_bytes;
      block = region.last;
    }
  }

  void backward(int64_t first, int64_t last, size_t skip, bool again) {
    // The items in the order of forward; backward goes from the last to the first.
    std::vector<std::pair<int64_t, int64_t>> items; // block, region or -1
    for (int64_t block = first; block < last;) {
      const int64_t found = region_at(block, last, skip);
      items.emplace_back(block, found);
      block = found < 0 ? block + 1 : regions_[static_cast<size_t>(found)].last;
    }
    for (auto item = items.rbegin(); item != items.rend(); ++item) {
      const auto [block, found] = *item;
      if (found < 0) {
        const BlockProfile& b = at(block);
        if (!again || block + 1 != last) { // else counted with its recomputation
          note(used_ + b.output_bytes + b.backward_extra + b.unit_bytes);
        }
        used_ -= b.saved_bytes;
        seconds_ += b.backward_seconds;
        continue;
      }
      const PlanRegion& region = regions_[static_cast<size_t>(found)];
      const BlockProfile& end = at(region.last - 1);
      if (region.choice == BlockChoice::keep_ops) {
        note(used_ + end.output_bytes + end.ops_backward_extra + end.unit_bytes);
        used_ -= end.ops_saved_bytes;
        seconds_ += end.backward_seconds + end.ops_recompute_seconds;
        continue;
      }
      // Its output is no longer needed; the output's gradient stays.
      used_ -= end.output_bytes;
      if (region.last - region.first > 1) {
        for (int64_t i = region.first; i < region.last; ++i) {
          seconds_ += at(i).gather_seconds;
        }
      }
      const auto inner = static_cast<size_t>(found) + 1;
      forward(region.first, region.last, inner, true);
      backward(region.first, region.last, inner, true);
    }
  }

  const ChainProfile& profile_;
  const std::vector<PlanRegion>& regions_;
  int64_t used_ = 0;
  int64_t peak_ = 0;
  double seconds_ = 0;
};

[[noreturn]] static void refuse_plan(const std::string& source, const std::string& what) {
  throw InputError("activation_checkpoint::ActivationPlan", source + ": " + what,
                   "a plan as ActivationPlan::to_json() writes it", "plan again");
}

static void require_nested(const std::string& source, const ActivationPlan& plan) {
  const auto blocks = static_cast<int64_t>(plan.blocks.size());
  std::vector<PlanRegion> open;
  for (const PlanRegion& region : plan.regions) {
    const std::string text =
        "region=[" + std::to_string(region.first) + ", " + std::to_string(region.last) + ")";
    if (region.first < 0 || region.first >= region.last || region.last > blocks) {
      refuse_plan(source, text + " of blocks=" + std::to_string(blocks));
    }
    if (region.choice == BlockChoice::keep_ops && region.last - region.first != 1) {
      refuse_plan(source, text + " keeps operators over several blocks");
    }
    while (!open.empty() && open.back().last <= region.first) {
      open.pop_back();
    }
    if (!open.empty() && (region.last > open.back().last ||
                          (region.first == open.back().first && region.last == open.back().last))) {
      refuse_plan(source, text + " is not inside the one before it");
    }
    if (!open.empty() && region.first < open.back().first) {
      refuse_plan(source, text + " is out of order");
    }
    open.push_back(region);
  }
}

} // namespace detail

PlanCost plan_cost(const ChainProfile& profile, const std::vector<PlanRegion>& regions) {
  return detail::PlanWalk(profile, regions).cost();
}

std::vector<PlanRegion> keep_all_regions(int64_t) { return {}; }

std::vector<PlanRegion> each_block_regions(int64_t blocks) {
  std::vector<PlanRegion> regions;
  for (int64_t i = 0; i < blocks; ++i) {
    regions.push_back({i, i + 1, BlockChoice::keep});
  }
  return regions;
}

std::vector<PlanRegion> sqrt_regions(int64_t blocks) {
  const auto parts = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(blocks))));
  std::vector<PlanRegion> regions;
  for (int64_t part = 0; part < parts; ++part) {
    regions.push_back({blocks * part / parts, blocks * (part + 1) / parts, BlockChoice::keep});
  }
  return regions;
}

std::shared_ptr<const ActivationPlan> make_plan(const ChainProfile& profile,
                                                std::vector<PlanRegion> regions) {
  auto plan = std::make_shared<ActivationPlan>();
  for (const BlockProfile& block : profile.blocks) {
    plan->blocks.push_back(block.name);
  }
  plan->regions = std::move(regions);
  plan->shapes_hash = profile.shapes_hash;
  detail::require_nested("plan", *plan);
  const PlanCost cost = plan_cost(profile, plan->regions);
  plan->predicted_peak_bytes = cost.peak_bytes;
  plan->predicted_seconds = cost.seconds;
  return plan;
}

nlohmann::json ActivationPlan::to_json() const {
  nlohmann::json list = nlohmann::json::array();
  for (const PlanRegion& region : regions) {
    list.push_back({{"first", region.first},
                    {"last", region.last},
                    {"keep_ops", region.choice == BlockChoice::keep_ops}});
  }
  return {{"version", 1},
          {"shapes_hash", shapes_hash},
          {"blocks", blocks},
          {"regions", list},
          {"budget_bytes", budget_bytes},
          {"predicted_peak_bytes", predicted_peak_bytes},
          {"predicted_seconds", predicted_seconds},
          {"observed_peak_bytes", observed_peak_bytes}};
}

ActivationPlan ActivationPlan::from_json(const nlohmann::json& json, const std::string& source) {
  ActivationPlan plan;
  try {
    if (json.at("version").get<int>() != 1) {
      detail::refuse_plan(source, "version=" + json.at("version").dump());
    }
    plan.shapes_hash = json.at("shapes_hash").get<std::string>();
    plan.blocks = json.at("blocks").get<std::vector<std::string>>();
    for (const auto& entry : json.at("regions")) {
      plan.regions.push_back(
          {entry.at("first").get<int64_t>(), entry.at("last").get<int64_t>(),
           entry.at("keep_ops").get<bool>() ? BlockChoice::keep_ops : BlockChoice::keep});
    }
    plan.budget_bytes = json.at("budget_bytes").get<int64_t>();
    plan.predicted_peak_bytes = json.at("predicted_peak_bytes").get<int64_t>();
    plan.predicted_seconds = json.at("predicted_seconds").get<double>();
    plan.observed_peak_bytes = json.at("observed_peak_bytes").get<int64_t>();
  } catch (const nlohmann::json::exception& error) {
    detail::refuse_plan(source, error.what());
  }
  detail::require_nested(source, plan);
  return plan;
}

void ActivationPlan::require_shapes(const ChainProfile& profile) const {
  if (shapes_hash != profile.shapes_hash) {
    throw InputError(
        "activation_checkpoint::ActivationPlan",
        "shapes_hash=" + shapes_hash + ", but the model and batch have " + profile.shapes_hash,
        "a plan for these shapes", "plan again");
  }
}

std::string pareto_table(const ChainProfile& profile,
                         const std::vector<std::shared_ptr<const ActivationPlan>>& plans) {
  const auto n = static_cast<int64_t>(profile.blocks.size());
  const PlanCost full = plan_cost(profile, keep_all_regions(n));
  std::ostringstream text;
  text << std::fixed;
  const auto row = [&](const std::string& name, int64_t peak, double seconds) {
    text << std::left << std::setw(24) << name << std::right << std::setw(12) << format_bytes(peak)
         << std::setw(7) << std::setprecision(0)
         << 100.0 * static_cast<double>(peak) / static_cast<double>(full.peak_bytes) << " %"
         << std::setw(11) << std::setprecision(4) << seconds << " s" << std::setw(8)
         << std::setprecision(2) << seconds / full.seconds << "\n";
  };
  text << "plan                            peak            time   ratio\n";
  row("keep everything", full.peak_bytes, full.seconds);
  const PlanCost sqrt = plan_cost(profile, sqrt_regions(n));
  row("sqrt(n) regions", sqrt.peak_bytes, sqrt.seconds);
  const PlanCost each = plan_cost(profile, each_block_regions(n));
  row("each block", each.peak_bytes, each.seconds);
  for (const auto& plan : plans) {
    int64_t whole = 0;
    int64_t ops = 0;
    for (const PlanRegion& region : plan->regions) {
      (region.choice == BlockChoice::keep_ops ? ops : whole) += 1;
    }
    row(std::to_string(whole) + " regions, " + std::to_string(ops) + " ops",
        plan->predicted_peak_bytes, plan->predicted_seconds);
  }
  return text.str();
}

std::string pareto_svg(const ChainProfile& profile,
                       const std::vector<std::shared_ptr<const ActivationPlan>>& plans) {
  const auto n = static_cast<int64_t>(profile.blocks.size());
  const PlanCost full = plan_cost(profile, keep_all_regions(n));
  struct Point {
    PlanCost cost;
    const char* label;
  };
  const std::vector<Point> others{{full, "keep everything"},
                                  {plan_cost(profile, sqrt_regions(n)), "sqrt(n) regions"},
                                  {plan_cost(profile, each_block_regions(n)), "each block"}};
  double slowest = full.seconds;
  double largest = static_cast<double>(full.peak_bytes);
  for (const auto& plan : plans) {
    slowest = std::max(slowest, plan->predicted_seconds);
    largest = std::max(largest, static_cast<double>(plan->predicted_peak_bytes));
  }
  for (const Point& point : others) {
    slowest = std::max(slowest, point.cost.seconds);
  }
  // 640 x 400, the plot from (70, 20) to (620, 340).
  const auto x = [&](int64_t bytes) { return 70 + 550 * static_cast<double>(bytes) / largest; };
  const auto y = [&](double seconds) {
    const double range = std::max(slowest - full.seconds, 1e-12);
    return 340 - 320 * (seconds - full.seconds) / range;
  };
  std::ostringstream svg;
  svg << std::fixed << std::setprecision(1)
      << R"(<svg xmlns="http://www.w3.org/2000/svg" width="640" height="400" )"
      << R"(font-family="sans-serif" font-size="12">)" << "\n"
      << R"(<rect width="640" height="400" fill="white"/>)" << "\n"
      << R"(<path d="M70 20V340H620" fill="none" stroke="black"/>)" << "\n"
      << R"(<text x="345" y="385" text-anchor="middle">peak of activations, )"
      << "right end " << format_bytes(static_cast<int64_t>(largest)) << "</text>\n"
      << R"svg(<text x="20" y="180" transform="rotate(-90 20 180)" )svg"
      << R"(text-anchor="middle">time beyond keeping everything, top +)"
      << 100 * (slowest / full.seconds - 1) << " %</text>\n"
      << R"(<polyline fill="none" stroke="steelblue" points=")";
  for (const auto& plan : plans) {
    svg << x(plan->predicted_peak_bytes) << "," << y(plan->predicted_seconds) << " ";
  }
  svg << "\"/>\n";
  for (const auto& plan : plans) {
    svg << R"(<circle r="3" fill="steelblue" cx=")" << x(plan->predicted_peak_bytes) << R"(" cy=")"
        << y(plan->predicted_seconds) << "\"/>\n";
  }
  for (const Point& point : others) {
    // Labels go to the right of a point, where the falling curve leaves space. Near the right end
    // the curve is flat, so they go above it.
    const double at = x(point.cost.peak_bytes);
    const bool right = at < 345;
    svg << R"(<circle r="4" fill="firebrick" cx=")" << at << R"(" cy=")" << y(point.cost.seconds)
        << "\"/>\n"
        << R"(<text text-anchor=")" << (right ? "start" : "end") << R"(" x=")"
        << at + (right ? 6 : -6) << R"(" y=")" << y(point.cost.seconds) - (right ? 6 : 14) << "\">"
        << point.label << "</text>\n";
  }
  svg << "</svg>\n";
  return svg.str();
}

} // namespace hasten
