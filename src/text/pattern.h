// A text or a regular expression of a tokenizer.json that is searched in texts. Regular expressions
// are Oniguruma's.
// Threading: const functions may be called from several threads.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "aligned_text.h"
#include "tokenizer_part.h"

namespace hasten::detail {

class Pattern {
 public:
  /// {"String": …} or {"Regex": …}. Throws InputError.
  explicit Pattern(const TokenizerPart& part);
  /// A regular expression of our own.
  explicit Pattern(const char* expression);

  /// Appends the matches in `text`, from left to right: bytes of it. Throws InputError if the
  /// search takes too many steps.
  void find(std::string_view text, std::vector<TextSpan>& matches) const;

 private:
  std::string literal_{}; // if there is no expression
  std::shared_ptr<void> expression_{}; // regex_t of Oniguruma
};

} // namespace hasten::detail
