#include "pattern.h"

#include <oniguruma.h>

#include <mutex>

#include "hasten/base/error.h"

namespace hasten::detail {

std::shared_ptr<void> compiled(const std::string& expression, std::string& problem) {
  static std::mutex mutex; // Oniguruma compiles with global tables
  const std::lock_guard lock(mutex);
  static const int ready = [] {
    OnigEncoding utf8 = ONIG_ENCODING_UTF8;
    return onig_initialize(&utf8, 1);
  }();
  regex_t* made = nullptr;
  OnigErrorInfo info{};
  const auto* begin = reinterpret_cast<const OnigUChar*>(expression.data());
  const int result = ready != ONIG_NORMAL
                         ? ready
                         : onig_new(&made, begin, begin + expression.size(), ONIG_OPTION_NONE,
                                    ONIG_ENCODING_UTF8, ONIG_SYNTAX_DEFAULT, &info);
  if (result != ONIG_NORMAL) {
    OnigUChar text[ONIG_MAX_ERROR_MESSAGE_LEN] = {};
    onig_error_code_to_str(text, result, &info);
    problem = reinterpret_cast<const char*>(text);
    return nullptr;
  }
  return {made, [](void* regex) { onig_free(static_cast<regex_t*>(regex)); }};
}

Pattern::Pattern(const TokenizerPart& part) {
  if (const auto literal = part["String"]; !literal.is_null()) {
    literal_ = literal.text();
    return;
  }
  const std::string expression = part["Regex"].text();
  std::string problem;
  expression_ = compiled(expression, problem);
  if (!expression_) {
    part.fail("the pattern " + expression + " is wrong: " + problem,
              "a regular expression that Oniguruma accepts");
  }
}

Pattern::Pattern(const char* expression) {
  std::string problem;
  expression_ = compiled(expression, problem);
  if (!expression_) {
    throw Error("text::Pattern", problem);
  }
}

void Pattern::find(std::string_view text, std::vector<TextSpan>& matches) const {
  if (!expression_) {
    for (size_t at = 0; !literal_.empty() && (at = text.find(literal_, at)) != text.npos;) {
      matches.push_back({static_cast<uint32_t>(at), static_cast<uint32_t>(at + literal_.size())});
      at += literal_.size();
    }
    return;
  }
  // A region of its own for each thread: making one costs more than a search.
  thread_local const std::unique_ptr<OnigRegion, void (*)(OnigRegion*)> region(
      onig_region_new(), [](OnigRegion* old) { onig_region_free(old, 1); });
  const auto* begin = reinterpret_cast<const OnigUChar*>(text.data());
  const auto* end = begin + text.size();
  size_t last = SIZE_MAX; // end of the last match
  for (size_t at = 0; at <= text.size();) {
    const int found = onig_search(static_cast<regex_t*>(expression_.get()), begin, end, begin + at,
                                  end, region.get(), ONIG_OPTION_NONE);
    if (found == ONIG_MISMATCH) {
      return;
    }
    if (found < 0) {
      throw InputError(
          "text::Tokenizer",
          "the search of a pattern of tokenizer.json ended with error=" + std::to_string(found) +
              " in a text of bytes=" + std::to_string(text.size()),
          "a text that the pattern splits within Oniguruma's limits",
          "split the text into shorter ones");
    }
    const auto first = static_cast<size_t>(region->beg[0]);
    const auto stop = static_cast<size_t>(region->end[0]);
    if (first == stop && stop == last) { // an empty match at the end of the last one
      if (at >= text.size()) {
        return;
      }
      next_code(text, at);
      continue;
    }
    matches.push_back({static_cast<uint32_t>(first), static_cast<uint32_t>(stop)});
    at = last = stop;
  }
}

} // namespace hasten::detail
