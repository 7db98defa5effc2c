#include "hasten/base/svg.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>

namespace hasten {

std::string clean_text(std::string_view text) {
  // dump() replaces bytes that are not UTF-8.
  std::string clean =
      nlohmann::json::parse(
          nlohmann::json(text).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace))
          .get<std::string>();
  const auto replace_at = [&](size_t at, size_t length, const char* by) {
    clean.replace(at, length, by);
    return at + std::string_view(by).size();
  };
  constexpr const char* kReplacement = "\xEF\xBF\xBD"; // U+FFFD
  for (size_t at = 0; at < clean.size();) {
    const auto byte = [&](size_t i) { return static_cast<unsigned char>(clean.c_str()[at + i]); };
    const bool space = byte(0) == '\t' || byte(0) == '\n' || byte(0) == '\r';
    if ((byte(0) < 0x20 && !space) || byte(0) == 0x7F) {
      at = replace_at(at, 1, kReplacement);
    } else if (byte(0) == 0xC2 && byte(1) < 0xA0) {
      at = replace_at(at, 2, kReplacement);
    } else if (byte(0) == 0xE2 && byte(1) == 0x80 && (byte(2) == 0x8E || byte(2) == 0x8F)) {
      at = replace_at(at, 3, byte(2) == 0x8E ? "<LRM>" : "<RLM>");
    } else if (byte(0) == 0xE2 && byte(1) == 0x80 && byte(2) >= 0xAA && byte(2) <= 0xAE) {
      constexpr const char* kMarks[] = {"<LRE>", "<RLE>", "<PDF>", "<LRO>", "<RLO>"};
      at = replace_at(at, 3, kMarks[byte(2) - 0xAA]);
    } else if (byte(0) == 0xE2 && byte(1) == 0x81 && byte(2) >= 0xA6 && byte(2) <= 0xA9) {
      constexpr const char* kMarks[] = {"<LRI>", "<RLI>", "<FSI>", "<PDI>"};
      at = replace_at(at, 3, kMarks[byte(2) - 0xA6]);
    } else if (byte(0) == 0xD8 && byte(1) == 0x9C) {
      at = replace_at(at, 2, "<ALM>");
    } else {
      ++at;
    }
  }
  return clean;
}

std::string escape_markup(std::string_view text) {
  std::string escaped;
  for (const char c : clean_text(text)) {
    switch (c) {
      case '&':
        escaped += "&amp;";
        break;
      case '<':
        escaped += "&lt;";
        break;
      case '>':
        escaped += "&gt;";
        break;
      case '"':
        escaped += "&quot;";
        break;
      case '\'':
        escaped += "&#39;";
        break;
      default:
        escaped += c;
    }
  }
  return escaped;
}

std::vector<double> round_ticks(double low, double high, int count) {
  std::vector<double> ticks;
  const double range = high - low;
  if (!(range > 0) || !std::isfinite(range) || count < 1) {
    return ticks;
  }
  const double power = std::pow(10.0, std::floor(std::log10(range / count)));
  double step = 10 * power;
  for (const double factor : {1.0, 2.0, 2.5, 5.0}) {
    if (factor * power * count >= range * 0.999) {
      step = factor * power;
      break;
    }
  }
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
  std::array<char, 400> text{};
  const double tenths = std::round(value * 10) / 10 + 0.0; // + 0.0: no "-0"
  char* end =
      std::to_chars(text.data(), text.data() + text.size(), tenths, std::chars_format::fixed, 1)
          .ptr;
  return {text.data(), end[-1] == '0' ? end - 2 : end};
}

SvgWriter::SvgWriter(double width, double height, std::string_view attributes) {
  const std::string size[] = {svg_number(width), svg_number(height)};
  text_ = "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"" + size[0] + "\" height=\"" +
          size[1] + "\" viewBox=\"0 0 " + size[0] + " " + size[1] + "\" " +
          std::string(attributes) + ">\n";
}

void SvgWriter::rect(double x, double y, double width, double height, std::string_view attributes) {
  text_ += "<rect x=\"" + svg_number(x) + "\" y=\"" + svg_number(y) + "\" width=\"" +
           svg_number(width) + "\" height=\"" + svg_number(height) + "\" " +
           std::string(attributes) + "/>\n";
}

void SvgWriter::circle(double x, double y, double radius, std::string_view attributes) {
  text_ += "<circle cx=\"" + svg_number(x) + "\" cy=\"" + svg_number(y) + "\" r=\"" +
           svg_number(radius) + "\" " + std::string(attributes) + "/>\n";
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
  text_ += "<text x=\"" + svg_number(x) + "\" y=\"" + svg_number(y) + "\" " +
           std::string(attributes) + ">" + escape_markup(text) + "</text>\n";
}

std::string SvgWriter::finish() {
  text_ += "</svg>\n";
  return std::move(text_);
}

} // namespace hasten
