// Reads the documents of a text file.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "hasten/text/packing.h"
#include "hasten/text/text_file.h"

namespace hasten::detail {

/// Records of one column, "text": a line, the lines between empty lines (with their line feeds, without
/// the last), or the whole file.
class PlainTextReader final : public RecordReader {
 public:
  PlainTextReader(std::shared_ptr<const TextFile> file, SampleBy sample_by);

  size_t column(std::string_view name, std::string_view flag = "column") override;
  /// Throws InputError with file and line for invalid UTF-8.
  bool next() override;
  std::string_view field(size_t) const override { return text_; }

 private:
  SampleBy sample_by_;
  std::string text_{};
  int64_t last_line_ = 0; // read so far
};

} // namespace hasten::detail
