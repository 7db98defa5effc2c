#include "tokenizer_part.h"

#include <algorithm>

#include "base/known_keys.h"
#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "unicode_text.h"

namespace hasten::detail {

void fail_tokenizer_file(const std::string& file, const std::string& what,
                         const std::string& expected, const std::string& fix) {
  throw InputError("text::AutoTokenizer", file + ": " + what, expected, fix);
}

void TokenizerPart::fail(const std::string& what, const std::string& expected,
                         const std::string& fix) const {
  fail_tokenizer_file(file_, path_.empty() ? what : path_ + ": " + what, expected, fix);
}

void TokenizerPart::fail_value(const std::string& expected) const {
  const auto shown = json_->is_structured() ? std::string(json_->type_name())
                                            : shortened(json_->dump(-1, ' ', true), 80);
  fail_tokenizer_file(file_, (path_.empty() ? "the file" : path_) + "=" + shown, expected);
}

TokenizerPart TokenizerPart::operator[](const char* name) const {
  static const nlohmann::json kNull;
  if (!json_->is_object() && !json_->is_null()) {
    fail_value("an object");
  }
  const auto found = json_->is_object() ? json_->find(name) : json_->end();
  return {found == json_->end() ? kNull : *found, file_, path_.empty() ? name : path_ + "." + name};
}

std::vector<TokenizerPart> TokenizerPart::items() const {
  if (!json_->is_array()) {
    fail_value("an array");
  }
  std::vector<TokenizerPart> items;
  items.reserve(json_->size());
  for (size_t i = 0; i < json_->size(); ++i) {
    items.emplace_back((*json_)[i], file_, path_ + "[" + std::to_string(i) + "]");
  }
  return items;
}

std::string TokenizerPart::text() const {
  if (!json_->is_string()) {
    fail_value("a text");
  }
  return json_->get<std::string>();
}

int64_t TokenizerPart::integer() const {
  if (!json_->is_number_integer() || json_->get<int64_t>() < 0) {
    fail_value("a whole number, 0 or more");
  }
  return json_->get<int64_t>();
}

double TokenizerPart::number() const {
  if (!json_->is_number()) {
    fail_value("a number");
  }
  return json_->get<double>();
}

bool TokenizerPart::flag(bool otherwise) const {
  if (!json_->is_null() && !json_->is_boolean()) {
    fail_value("true or false");
  }
  return json_->is_null() ? otherwise : json_->get<bool>();
}

int32_t TokenizerPart::character() const {
  const std::string value = text();
  size_t at = 0;
  const int32_t code = value.empty() ? 0 : next_code(value, at);
  if (at == 0 || at != value.size()) {
    fail_value("one character");
  }
  return code;
}

size_t TokenizerPart::one_of(const std::vector<std::string>& names) const {
  const auto found = std::ranges::find(names, text());
  if (found == names.end()) {
    fail_value("one of " + joined(names));
  }
  return static_cast<size_t>(found - names.begin());
}

void check_tokenizer_keys(const std::string& file, const std::string& part,
                          const nlohmann::json& json) {
  const auto type = json.is_object() ? json.value("type", nlohmann::json()) : nlohmann::json();
  check_known_keys("text::AutoTokenizer", part == "*" ? file : file + ": " + part, "tokenizer.json",
                   type.is_string() ? part + ":" + type.get<std::string>() : part, json);
  for (const auto& [key, value] : json.items()) {
    const bool whole = part == "*"; // the file itself: its parts
    if (whole && value.is_object()) {
      check_tokenizer_keys(file, key, value);
    } else if (!whole && value.is_array() && key.ends_with("ers")) { // of a Sequence
      for (const auto& inner : value) {
        check_tokenizer_keys(file, part, inner);
      }
    }
  }
}

} // namespace hasten::detail
