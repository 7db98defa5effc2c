// Curves as SVG, and their points for the script.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <utility>

#include "hasten/base/svg.h"
#include "hasten/base/text.h"
#include "page.h"

namespace hasten::detail::run_report {

Series decimated(const Series& series, size_t limit) {
  const size_t size = series.values.size();
  if (size <= limit) {
    return series;
  }
  const auto begin = series.values.begin();
  const auto groups = static_cast<ptrdiff_t>((limit - 2) / 2);
  const auto between = static_cast<ptrdiff_t>(size - 2);
  std::set<ptrdiff_t> kept{0, between + 1};
  for (ptrdiff_t group = 0; group < groups; ++group) {
    const auto [least, greatest] = std::minmax_element(begin + 1 + between * group / groups,
                                                       begin + 1 + between * (group + 1) / groups);
    kept.insert({least - begin, greatest - begin});
  }
  Series some;
  for (const ptrdiff_t i : kept) {
    some.steps.push_back(series.steps[static_cast<size_t>(i)]);
    some.values.push_back(begin[i]);
  }
  return some;
}

/// The mean over a window of a 40th of the series around each point, symmetric at the ends, too.
Series smoothed(const Series& series) {
  const size_t size = series.values.size();
  std::vector<double> sums(size + 1, 0.0);
  std::partial_sum(series.values.begin(), series.values.end(), sums.begin() + 1);
  Series means{.steps = series.steps};
  for (size_t i = 0; i < size; ++i) {
    const size_t reach = std::min({size / 80, i, size - 1 - i});
    means.values.push_back((sums[i + reach + 1] - sums[i - reach]) /
                           static_cast<double>(2 * reach + 1));
  }
  return means;
}

/// "b" for bytes, "s" for seconds, or empty.
std::string unit_of(const std::string& key) {
  const auto has = [&](const char* part) { return key.find(part) != std::string::npos; };
  if (has("per_second")) {
    return {};
  }
  return has("bytes") ? "b" : has("seconds") || has("runtime") ? "s" : "";
}

std::string value_text(double value, const std::string& key) {
  const std::string unit = unit_of(key);
  if (std::abs(value) >= 1e15) {
    return format_digits(value, 4);
  }
  if (unit == "b") {
    return format_bytes(static_cast<int64_t>(value));
  }
  if (unit == "s") {
    return value < 60 ? format_digits(value, 3) + " s" : format_duration(value);
  }
  return std::abs(value) >= 1000 ? format_count(std::llround(value)) : format_digits(value, 4);
}

std::string tick_text(double value, const std::string& key) {
  const double size = std::abs(value);
  if (size >= 1e5 && size < 1e15 && unit_of(key).empty()) {
    const bool millions = size >= 1e6;
    return format_digits(value / (millions ? 1e6 : 1e3), 4) + (millions ? "M" : "k");
  }
  std::string text = value_text(size < 1e-12 ? 0 : value, key);
  if (const size_t at = text.find("e-0"); at != std::string::npos) {
    text.erase(at + 2, 1);
  }
  return text;
}

/// Draws one chart. The page scales it to the width of its column.
class ChartDrawing {
 public:
  explicit ChartDrawing(const Chart& chart)
      : chart_(chart),
        svg_(440, 232, "role=\"img\" aria-label=\"" + escape_markup(description()) + "\"") {
    set_range();
  }

  std::string draw(nlohmann::json& data) {
    draw_axes();
    nlohmann::json curves = nlohmann::json::array();
    for (const Curve& curve : chart_.curves) {
      curves.push_back(draw_curve(curve));
    }
    data.push_back({{"t", clean_text(chart_.title)},
                    {"x", {kLeft, kRight, chart_.last_step}},
                    {"y", {kBottom, kTop}},
                    {"v", {low_, high_, log_}},
                    {"u", unit_of(chart_.key)},
                    {"e", chart_.steps_per_epoch},
                    {"s", std::move(curves)}});
    return svg_.finish();
  }

 private:
  static constexpr double kLeft = 52;
  static constexpr double kRight = 430;
  static constexpr double kTop = 20;
  static constexpr double kBottom = 206;

  double x(double step) const { return kLeft + (kRight - kLeft) * step / chart_.last_step; }
  double y(double value) const {
    return kBottom -
           (kBottom - kTop) * ((log_ ? std::log10(value) : value) - low_) / (high_ - low_);
  }

  void set_range() {
    double typical = std::numeric_limits<double>::infinity();
    for (const Curve& curve : chart_.curves) {
      std::vector<double> sorted = curve.series->values;
      std::sort(sorted.begin(), sorted.end());
      low_ = std::min(low_, sorted.front());
      high_ = std::max(high_, sorted.back());
      typical = std::min(typical, sorted[sorted.size() / 2]);
    }
    // A few values far above the others would press them flat.
    log_ = !chart_.from_zero && low_ > 0 && high_ > 20 * typical;
    low_ = log_ ? std::log10(low_) : chart_.from_zero ? std::min(low_, 0.0) : low_;
    high_ = log_ ? std::log10(high_) : high_;
    const double room = std::max({(high_ - low_) * 0.05, std::abs(high_) * 1e-6, 1e-12});
    low_ -= chart_.from_zero && low_ == 0 ? 0 : room;
    high_ += room;
  }

  std::vector<double> value_ticks() const {
    const double unit = unit_of(chart_.key) == "b" && high_ > 1
                            ? std::pow(1024.0, std::floor(std::log2(high_) / 10))
                            : 1;
    std::vector<double> ticks = round_ticks(low_ / unit, high_ / unit, 4);
    if (log_) {
      std::erase_if(ticks, [&](double t) { return high_ - low_ > 2 && t != std::floor(t); });
    }
    for (double& tick : ticks) {
      tick = log_ ? std::pow(10.0, tick) : tick * unit;
    }
    return ticks;
  }

  /// For screen readers.
  std::string description() const {
    std::string text = chart_.title + " by step.";
    for (const Curve& curve : chart_.curves) {
      text += " " + curve.label + ": from " + value_text(curve.series->values.front(), chart_.key) +
              " to " + value_text(curve.series->values.back(), chart_.key) + ".";
    }
    return text;
  }

  void draw_axes() {
    const auto line = [&](double x0, double y0, const std::string& to, const char* name) {
      svg_.path("M" + svg_number(x0) + " " + svg_number(y0) + to, name);
    };
    for (const double tick : value_ticks()) {
      line(kLeft, y(tick), "H" + svg_number(kRight), "class=\"grid\"");
      svg_.text(kLeft - 6, y(tick) + 3.5, tick_text(tick, chart_.key), "class=\"end\"");
    }
    const double length = chart_.steps_per_epoch;
    const double epochs = length > 0 ? chart_.last_step / length + 1e-6 : 0;
    const double every = std::max(1.0, std::ceil(epochs / 10));
    for (double epoch = every; epoch <= epochs; epoch += every) {
      line(x(epoch * length), kTop, "V" + svg_number(kBottom), "class=\"epoch\"");
      svg_.text(x(epoch * length), kTop - 7,
                (epoch == every ? "epoch " : "") + format_digits(epoch), "class=\"mid\"");
    }
    line(kLeft, kBottom, "H" + svg_number(kRight), "class=\"axis\"");
    for (const double tick : round_ticks(0, chart_.last_step, 5)) {
      if (tick == std::floor(tick)) {
        svg_.text(x(tick), kBottom + 15, tick_text(tick, {}), "class=\"mid\"");
      }
    }
  }

  /// Returns its points for the script.
  nlohmann::json draw_curve(const Curve& curve) {
    const std::string colour = std::to_string(curve.colour);
    const auto line = [&](const Series& series, const char* kind) {
      SvgPoints points;
      for (size_t i = 0; i < series.values.size(); ++i) {
        points.emplace_back(x(series.steps[i]), y(series.values[i]));
      }
      svg_.polyline(points, "class=\"line s" + colour + kind + "\"");
    };
    const Series shown = decimated(*curve.series);
    const bool smooth = chart_.smooth && curve.series->values.size() >= 80;
    line(shown, smooth ? " raw" : "");
    if (smooth) {
      line(decimated(smoothed(*curve.series), 400), "");
    }
    nlohmann::json values = nlohmann::json::array();
    for (size_t i = 0; i < shown.values.size(); ++i) {
      values.push_back(*parse_number<double>(format_digits(shown.values[i])));
      if (shown.values.size() <= 40) {
        svg_.circle(x(shown.steps[i]), y(shown.values[i]), 2.6, "class=\"f" + colour + "\"");
      }
    }
    return {{"n", clean_text(curve.label)},
            {"c", curve.colour},
            {"x", std::vector<int64_t>(shown.steps.begin(), shown.steps.end())},
            {"y", std::move(values)}};
  }

  const Chart& chart_;
  SvgWriter svg_;
  /// Of the axis; logarithms to base 10 if `log_`.
  double low_ = std::numeric_limits<double>::infinity();
  double high_ = -low_;
  bool log_ = false;
};

std::string draw_chart(const Chart& chart, nlohmann::json& data) {
  std::string names;
  for (const Curve& curve : chart.curves) {
    names +=
        chart.curves.size() == 1 ? "" : " " + bdi(curve.label, "f" + std::to_string(curve.colour));
  }
  const std::string index = std::to_string(data.size()); // before the drawing adds to it
  return "<figure tabindex=\"0\" data-chart=\"" + index + "\"><figcaption>" +
         escape_markup(chart.title) + " <small>" + escape_markup(chart.subtitle) + "</small>" +
         names + "</figcaption>" + ChartDrawing(chart).draw(data) + "</figure>\n";
}

} // namespace hasten::detail::run_report
