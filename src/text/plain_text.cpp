#include "plain_text.h"

#include <utility>

#include "hasten/base/error.h"
#include "hasten/text/utf8.h"

namespace hasten::detail {

PlainTextReader::PlainTextReader(std::shared_ptr<const TextFile> file, SampleBy sample_by)
    : RecordReader(std::move(file)), sample_by_(sample_by) {
  columns_ = {"text"};
}

size_t PlainTextReader::column(std::string_view name, std::string_view flag) {
  if (name != "text") {
    fail_unknown_column("data::PlainTextReader", std::string(flag) + "=" + std::string(name), {""});
  }
  return 0;
}

bool PlainTextReader::next() {
  text_.clear();
  line_ = 0;
  std::string_view line;
  while (window_.next_line(next_, line)) {
    ++last_line_;
    if (line.ends_with('\r')) {
      line.remove_suffix(1);
    }
    if (const size_t bad = invalid_utf8_position(line); bad != std::string_view::npos) {
      line_ = last_line_;
      throw InputError("data::PlainTextReader",
                       position() + ": byte " + std::to_string(bad + 1) +
                           " of the line: invalid UTF-8: " + byte_name(line[bad]),
                       "UTF-8", "convert the file");
    }
    const bool ends = sample_by_ == SampleBy::paragraph && is_blank(line);
    if (ends && line_ == 0) {
      continue;
    }
    if (ends) {
      return true;
    }
    text_ += (line_ > 0 ? "\n" : "") + std::string(line);
    line_ = line_ > 0 ? line_ : last_line_;
    if (sample_by_ == SampleBy::line) {
      return true;
    }
  }
  return line_ > 0;
}

} // namespace hasten::detail
