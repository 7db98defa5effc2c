// Plans: their cost, files, tables and plots.
#include <algorithm>
#include <cmath>
#include <iomanip>
#include <nlohmann/json.hpp>
#include <sstream>

#include "block_regions.h"
#include "hasten/activation_checkpoint/planner.h"
#include "hasten/base/error.h"
#include "hasten/base/svg.h"
#include "hasten/base/text.h"

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

  struct Item {
    int64_t first = 0;
    int64_t last = 0;
    const PlanRegion* region = nullptr; // null: a block that is kept

    bool ops() const { return region->choice == BlockChoice::keep_ops; }
  };

  // Blocks [first, last) under the outermost of the regions from index `skip` on.
  std::vector<Item> items(int64_t first, int64_t last, size_t skip) const {
    std::vector<Item> found;
    for (int64_t block = first; block < last; block = found.back().last) {
      const auto region = std::find_if(
          regions_.begin() + static_cast<int64_t>(skip), regions_.end(),
          [&](const PlanRegion& other) { return other.first == block && other.last <= last; });
      found.push_back(region == regions_.end() ? Item{block, block + 1, nullptr}
                                               : Item{block, region->last, &*region});
    }
    return found;
  }

  // Runs blocks [first, last) under the regions from index `skip` on. In a recomputation the last
  // block counts only up to the point where it stops.
  void forward(int64_t first, int64_t last, size_t skip, bool again) {
    const int64_t gradient = again ? at(last - 1).output_bytes : 0;
    for (const Item& item : items(first, last, skip)) {
      const BlockProfile& head = at(item.first);
      const bool ends = again && item.last == last;
      if (item.region == nullptr) {
        note(used_ + (ends ? alone_bytes(head) : gradient + head.saved_bytes + head.forward_extra));
        seconds_ += ends ? head.recompute_seconds : head.forward_seconds;
        used_ += head.saved_bytes;
        continue;
      }
      for (int64_t i = item.first; i < item.last; ++i) {
        const BlockProfile& b = at(i);
        const int64_t input = i == item.first ? 0 : at(i - 1).output_bytes;
        note(used_ + gradient + input +
             (item.ops() ? b.saved_bytes + b.forward_extra : b.dropped_peak));
        seconds_ += ends ? 0 : b.forward_seconds;
      }
      used_ += item.ops() ? head.ops_saved_bytes : at(item.last - 1).output_bytes;
    }
  }

  void backward(int64_t first, int64_t last, size_t skip, bool again) {
    const std::vector<Item> forward_items = items(first, last, skip);
    for (auto item = forward_items.rbegin(); item != forward_items.rend(); ++item) {
      const BlockProfile& end = at(item->last - 1);
      if (item->region == nullptr) {
        if (!again || item->last != last) { // else counted with its recomputation
          note(used_ + end.output_bytes + end.backward_extra);
        }
        used_ -= end.saved_bytes;
        seconds_ += end.backward_seconds;
      } else if (item->ops()) {
        note(used_ + end.output_bytes + end.ops_backward_extra);
        used_ -= end.ops_saved_bytes;
        seconds_ += end.backward_seconds + end.ops_recompute_seconds;
      } else {
        // Its output is no longer needed; the output's gradient stays.
        used_ -= end.output_bytes;
        const auto inner = static_cast<size_t>(item->region - regions_.data()) + 1;
        forward(item->first, item->last, inner, true);
        backward(item->first, item->last, inner, true);
      }
    }
  }

  const ChainProfile& profile_;
  const std::vector<PlanRegion>& regions_;
  int64_t used_ = 0;
  int64_t peak_ = 0;
  double seconds_ = 0;
};

std::vector<SimplePlan> simple_plans(const ChainProfile& profile) {
  const auto blocks = static_cast<int64_t>(profile.blocks.size());
  return {{"keep everything", keep_all_regions(blocks)},
          {"sqrt(n) regions", sqrt_regions(blocks)},
          {"each block", each_block_regions(blocks)}};
}

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

static std::vector<PlanRegion> equal_regions(int64_t blocks, int64_t parts) {
  std::vector<PlanRegion> regions;
  for (int64_t part = 0; part < parts; ++part) {
    regions.push_back({blocks * part / parts, blocks * (part + 1) / parts, BlockChoice::keep});
  }
  return regions;
}

std::vector<PlanRegion> each_block_regions(int64_t blocks) { return equal_regions(blocks, blocks); }

std::vector<PlanRegion> sqrt_regions(int64_t blocks) {
  return equal_regions(blocks,
                       static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(blocks)))));
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

static void to_json(nlohmann::json& json, const PlanRegion& region) {
  json = {{"first", region.first},
          {"last", region.last},
          {"keep_ops", region.choice == BlockChoice::keep_ops}};
}

static void from_json(const nlohmann::json& json, PlanRegion& region) {
  json.at("first").get_to(region.first);
  json.at("last").get_to(region.last);
  region.choice = json.at("keep_ops").get<bool>() ? BlockChoice::keep_ops : BlockChoice::keep;
}

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(ActivationPlan, shapes_hash, blocks, regions, budget_bytes,
                                   predicted_peak_bytes, predicted_seconds, observed_peak_bytes)

nlohmann::json ActivationPlan::to_json() const {
  nlohmann::json json = *this;
  json["version"] = 1;
  return json;
}

ActivationPlan ActivationPlan::from_json(const nlohmann::json& json, const std::string& source) {
  ActivationPlan plan;
  try {
    if (json.at("version").get<int>() != 1) {
      detail::refuse_plan(source, "version=" + json.at("version").dump());
    }
    json.get_to(plan);
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
  const PlanCost full = plan_cost(profile, {});
  std::ostringstream text;
  text << std::fixed;
  const auto row = [&](const std::string& name, const PlanCost& cost) {
    const double percent =
        100.0 * static_cast<double>(cost.peak_bytes) / static_cast<double>(full.peak_bytes);
    text << std::left << std::setw(24) << name << std::right << std::setw(12)
         << format_bytes(cost.peak_bytes) << std::setw(7) << std::setprecision(0) << percent << " %"
         << std::setw(11) << std::setprecision(4) << cost.seconds << " s" << std::setw(8)
         << std::setprecision(2) << cost.seconds / full.seconds << "\n";
  };
  text << "plan                            peak            time   ratio\n";
  for (const detail::SimplePlan& rule : detail::simple_plans(profile)) {
    row(rule.name, plan_cost(profile, rule.regions));
  }
  for (const auto& plan : plans) {
    const auto ops = std::count_if(
        plan->regions.begin(), plan->regions.end(),
        [](const PlanRegion& region) { return region.choice == BlockChoice::keep_ops; });
    const int64_t whole = static_cast<int64_t>(plan->regions.size()) - ops;
    row(std::to_string(whole) + " regions, " + std::to_string(ops) + " ops",
        {plan->predicted_peak_bytes, plan->predicted_seconds});
  }
  return text.str();
}

std::string pareto_svg(const ChainProfile& profile,
                       const std::vector<std::shared_ptr<const ActivationPlan>>& plans) {
  std::vector<std::pair<const char*, PlanCost>> others;
  for (const detail::SimplePlan& rule : detail::simple_plans(profile)) {
    others.emplace_back(rule.name, plan_cost(profile, rule.regions));
  }
  const PlanCost full = others[0].second; // keeps everything
  double slowest = full.seconds;
  double largest = static_cast<double>(full.peak_bytes);
  for (const auto& plan : plans) {
    slowest = std::max(slowest, plan->predicted_seconds);
    largest = std::max(largest, static_cast<double>(plan->predicted_peak_bytes));
  }
  for (const auto& [label, cost] : others) {
    slowest = std::max(slowest, cost.seconds);
  }
  // 640 x 400, the plot from (70, 20) to (620, 340).
  const auto x = [&](int64_t bytes) { return 70 + 550 * static_cast<double>(bytes) / largest; };
  const auto y = [&](double seconds) {
    const double range = std::max(slowest - full.seconds, 1e-12);
    return 340 - 320 * (seconds - full.seconds) / range;
  };
  SvgWriter svg(640, 400, R"(font-family="sans-serif" font-size="12")");
  svg.rect(0, 0, 640, 400, R"(fill="white")");
  svg.path("M70 20V340H620", R"(fill="none" stroke="black")");
  svg.text(345, 385,
           "peak of activations, right end " + format_bytes(static_cast<int64_t>(largest)),
           R"(text-anchor="middle")");
  svg.text(20, 180,
           "time beyond keeping everything, top +" +
               format_fixed(100 * (slowest / full.seconds - 1), 1) + " %",
           R"svg(transform="rotate(-90 20 180)" text-anchor="middle")svg");
  SvgPoints curve;
  for (const auto& plan : plans) {
    curve.emplace_back(x(plan->predicted_peak_bytes), y(plan->predicted_seconds));
  }
  svg.polyline(curve, R"(stroke="steelblue")");
  for (const auto& [at, height] : curve) {
    svg.circle(at, height, 3, R"(fill="steelblue")");
  }
  for (const auto& [label, cost] : others) {
    // Labels go to the right of a point, where the falling curve leaves space. Near the right end
    // the curve is flat, so they go above it.
    const double at = x(cost.peak_bytes);
    const double height = y(cost.seconds);
    const bool right = at < 345;
    svg.circle(at, height, 4, R"(fill="firebrick")");
    svg.text(at + (right ? 6 : -6), height - (right ? 6 : 14), label,
             right ? R"(text-anchor="start")" : R"(text-anchor="end")");
  }
  return svg.finish();
}

} // namespace hasten
