// Text in markup, and drawings in SVG. Threading: free functions; one writer per thread.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace hasten {

/// The text as valid UTF-8 that changes nothing around it. Invalid bytes and control characters
/// other than tabs and ends of lines become U+FFFD. Marks that change the direction of writing
/// become visible: "<RLO>".
std::string clean_text(std::string_view text);
/// clean_text() for HTML and SVG: between tags, and in attributes in double quotes.
std::string escape_markup(std::string_view text);

/// Round values in [low, high], ascending, about `count`: multiples of 1, 2, 2.5 or 5 times a power
/// of ten. Empty unless low < high.
std::vector<double> round_ticks(double low, double high, int count);

using SvgPoints = std::vector<std::pair<double, double>>;

/// Writes elements in the order of the calls. Coordinates have one decimal place. `attributes` are
/// markup such as `fill="white"`, and are written as they are; texts are escaped.
class SvgWriter {
 public:
  SvgWriter(double width, double height, std::string_view attributes = {});
  void rect(double x, double y, double width, double height, std::string_view attributes);
  void circle(double x, double y, double radius, std::string_view attributes);
  /// `d`: the commands of a path.
  void path(std::string_view d, std::string_view attributes);
  void polyline(const SvgPoints& points, std::string_view attributes);
  void text(double x, double y, std::string_view text, std::string_view attributes = {});
  /// The whole drawing. Call it once, last.
  std::string finish();

 private:
  std::string text_;
};

/// A coordinate: one decimal place, none if it is zero.
std::string svg_number(double value);

} // namespace hasten
