#include "hasten/base/svg.h"

#include <cmath>
#include <initializer_list>
#include <nlohmann/json.hpp>

#include "hasten/base/text.h"

namespace hasten {

using TextPairs = std::initializer_list<std::pair<const char*, const char*>>;

/// The text with each `from` replaced by its `to`, pair after pair.
static std::string replaced(std::string text, TextPairs pairs) {
  for (const auto& [from, to] : pairs) {
    text = joined(split(text, from), to);
  }
  return text;
}

std::string clean_text(std::string_view text) {
  static constexpr TextPairs kMarks = {
      {"\u061C", "<ALM>"}, {"\u200E", "<LRM>"}, {"\u200F", "<RLM>"}, {"\u202A", "<LRE>"},
      {"\u202B", "<RLE>"}, {"\u202C", "<PDF>"}, {"\u202D", "<LRO>"}, {"\u202E", "<RLO>"},
      {"\u2066", "<LRI>"}, {"\u2067", "<RLI>"}, {"\u2068", "<FSI>"}, {"\u2069", "<PDI>"}};
  // dump() replaces bytes that are not UTF-8.
  const nlohmann::json valid = nlohmann::json::parse(
      nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  std::string clean = replaced(valid.get<std::string>(), kMarks);
  for (size_t at = 0; at < clean.size(); ++at) {
    const auto byte = static_cast<unsigned char>(clean[at]);
    const bool c1 = byte == 0xC2 && static_cast<unsigned char>(clean[at + 1]) < 0xA0;
    const bool space = byte == '\t' || byte == '\n' || byte == '\r';
    if (c1 || byte == 0x7F || (byte < 0x20 && !space)) {
      clean.replace(at, c1 ? 2 : 1, "\uFFFD");
    }
  }
  return clean;
}

std::string escape_markup(std::string_view text) {
  return replaced(clean_text(text),
                  {{"&", "&amp;"}, {"<", "&lt;"}, {">", "&gt;"}, {"\"", "&quot;"}, {"'", "&#39;"}});
}

std::vector<double> round_ticks(double low, double high, int count) {
  std::vector<double> ticks;
  const double range = high - low;
  if (!(range > 0) || !std::isfinite(range) || count < 1) {
    return ticks;
  }
  const double power = std::pow(10.0, std::floor(std::log10(range / count)));
  const double least = range * 0.999 / count / power;
  const double step = power * (least <= 1     ? 1
                               : least <= 2   ? 2
                               : least <= 2.5 ? 2.5
                               : least <= 5   ? 5
                                              : 10);
  // A range far from zero may have no value that differs by a step.
  for (double i = std::ceil(low / step - 1e-6); i * step <= high + 1e-6 * step; ++i) {
    if (!ticks.empty() && i * step <= ticks.back()) {
      break;
    }
    ticks.push_back(i * step);
  }
  return ticks;
}

std::string svg_number(double value) {
  return format_exact(std::round(value * 10) / 10 + 0.0); // + 0.0: no "-0"
}

using SvgNumbers = std::initializer_list<std::pair<const char*, double>>;

/// "<circle cx="1" cy="2" …", without its end.
static std::string opened(const char* element, SvgNumbers numbers, std::string_view attributes) {
  std::string text = std::string("<") + element;
  for (const auto& [name, value] : numbers) {
    text += std::string(" ") + name + "=\"" + svg_number(value) + "\"";
  }
  return text + " " + std::string(attributes);
}

SvgWriter::SvgWriter(double width, double height, std::string_view attributes) {
  text_ = opened("svg", {{"width", width}, {"height", height}}, attributes) +
          " xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + svg_number(width) + " " +
          svg_number(height) + "\">\n";
}

void SvgWriter::rect(double x, double y, double width, double height, std::string_view attributes) {
  text_ += opened("rect", {{"x", x}, {"y", y}, {"width", width}, {"height", height}}, attributes) +
           "/>\n";
}

void SvgWriter::circle(double x, double y, double radius, std::string_view attributes) {
  text_ += opened("circle", {{"cx", x}, {"cy", y}, {"r", radius}}, attributes) + "/>\n";
}

void SvgWriter::path(std::string_view d, std::string_view attributes) {
  text_ += "<path d=\"" + std::string(d) + "\" " + std::string(attributes) + "/>\n";
}

void SvgWriter::polyline(const SvgPoints& points, std::string_view attributes) {
  text_ += "<polyline fill=\"none\" " + std::string(attributes) + " points=\"";
  for (const auto& [x, y] : points) {
    text_ += svg_number(x) + "," + svg_number(y) + " ";
  }
  text_ += "\"/>\n";
}

void SvgWriter::text(double x, double y, std::string_view text, std::string_view attributes) {
  text_ +=
      opened("text", {{"x", x}, {"y", y}}, attributes) + ">" + escape_markup(text) + "</text>\n";
}

std::string SvgWriter::finish() {
  text_ += "</svg>\n";
  return std::move(text_);
}

} // namespace hasten
