// The normalizers of a tokenizer.json.
#include <algorithm>
#include <array>
#include <memory>

#include "pattern.h"
#include "text_steps.h"

namespace hasten::detail {

// Calls write(made, code, origin) for each character; the text becomes `made`.
template <typename Write>
void map_codes(AlignedText& text, Write&& write) {
  AlignedText made = text.emptied();
  made.text.reserve(text.text.size());
  for (size_t at = 0; at < text.text.size();) {
    const TextSpan from = text.from(at);
    write(made, next_code(text.text, at), from);
  }
  text = std::move(made);
}

void keep_codes(AlignedText& text, bool (*keep)(int32_t)) {
  map_codes(text, [&](AlignedText& made, int32_t code, TextSpan from) {
    if (keep(code)) {
      made.append(code, from);
    }
  });
}

void lower_text(AlignedText& text) {
  std::string lower;
  map_codes(text, [&](AlignedText& made, int32_t code, TextSpan from) {
    lower.clear();
    append_lower(lower, code);
    made.append(lower, from);
  });
}

void normalize_form(AlignedText& text, NormalForm form) {
  if (!is_ascii(text.text)) {
    text.rewrite(normal_form(text.text, form));
  }
}

void strip_text(AlignedText& text, bool left, bool right) {
  size_t begin = 0;
  size_t end = text.text.size();
  for (size_t at = 0; left && at < end && is_white_space(next_code(text.text, at));) {
    begin = at;
  }
  while (right && end > begin) {
    size_t at = code_before(text.text, end);
    if (!is_white_space(next_code(text.text, at))) {
      break;
    }
    end = code_before(text.text, end);
  }
  AlignedText made = text.emptied();
  made.append_from(text, begin, end);
  text = std::move(made);
}

void replace_matches(AlignedText& text, const Pattern& pattern, const std::string& content) {
  std::vector<TextSpan> matches;
  pattern.find(text.text, matches);
  if (matches.empty()) {
    return;
  }
  AlignedText made = text.emptied();
  made.text.reserve(text.text.size());
  size_t last = 0;
  for (const TextSpan& match : matches) {
    made.append_from(text, last, match.begin);
    made.append(content, match.end > 0 ? text.from(match.end - 1) : TextSpan{});
    last = match.end;
  }
  made.append_from(text, last, text.text.size());
  text = std::move(made);
}

void prepend_text(AlignedText& text, const std::string& content) {
  if (text.text.empty()) {
    return;
  }
  AlignedText made = text.emptied();
  made.append(content, text.from(0));
  made.append_from(text, 0, text.text.size());
  text = std::move(made);
}

// Whether BERT removes the character. Unassigned ones stay.
bool is_bert_removed(int32_t code) {
  const auto category = utf8proc_category(code);
  return code == 0 || code == 0xFFFD ||
         (category >= UTF8PROC_CATEGORY_CC && code != '\t' && code != '\n' && code != '\r');
}

NormalizerStep bert_normalizer(const TokenizerPart& part) {
  const bool clean = part["clean_text"].flag(true);
  const bool ideographs = part["handle_chinese_chars"].flag(true);
  const bool lower = part["lowercase"].flag(true);
  const bool accents = part["strip_accents"].flag(lower);
  return [=](AlignedText& text) {
    if (clean) {
      map_codes(text, [](AlignedText& made, int32_t code, TextSpan from) {
        if (!is_bert_removed(code)) {
          made.append(is_white_space(code) ? ' ' : code, from);
        }
      });
    }
    if (ideographs) {
      map_codes(text, [](AlignedText& made, int32_t code, TextSpan from) {
        const bool apart = is_bert_ideograph(code);
        made.append(apart ? " " : "", from);
        made.append(code, from);
        made.append(apart ? " " : "", from);
      });
    }
    if (accents) {
      normalize_form(text, NormalForm::nfd);
      keep_codes(text,
                 [](int32_t code) { return utf8proc_category(code) != UTF8PROC_CATEGORY_MN; });
    }
    if (lower) {
      lower_text(text);
    }
  };
}

void read_normalizer(const TokenizerPart& part, std::vector<NormalizerStep>& steps) {
  if (part.is_null()) {
    return;
  }
  static const std::vector<std::string> kTypes{
      "Sequence",  "BertNormalizer", "NFC",   "NFD",     "NFKC",    "NFKD",
      "Lowercase", "StripAccents",   "Strip", "Replace", "Prepend", "Precompiled"};
  switch (part["type"].one_of(kTypes)) {
    case 0:
      for (const auto& inner : part["normalizers"].items()) {
        read_normalizer(inner, steps);
      }
      return;
    case 1:
      return steps.push_back(bert_normalizer(part));
    case 2:
      return steps.push_back([](auto& text) { normalize_form(text, NormalForm::nfc); });
    case 3:
      return steps.push_back([](auto& text) { normalize_form(text, NormalForm::nfd); });
    case 4:
      return steps.push_back([](auto& text) { normalize_form(text, NormalForm::nfkc); });
    case 5:
      return steps.push_back([](auto& text) { normalize_form(text, NormalForm::nfkd); });
    case 6:
      return steps.push_back(lower_text);
    case 7:
      return steps.push_back(
          [](AlignedText& text) { keep_codes(text, [](int32_t code) { return !is_mark(code); }); });
    case 8: {
      const bool left = part["strip_left"].flag(true);
      const bool right = part["strip_right"].flag(true);
      return steps.push_back([=](auto& text) { strip_text(text, left, right); });
    }
    case 9:
      return steps.push_back([pattern = Pattern(part["pattern"]), content = part["content"].text()](
                                 auto& text) { replace_matches(text, pattern, content); });
    case 10:
      return steps.push_back(
          [content = part["prepend"].text()](auto& text) { prepend_text(text, content); });
    default:
      return steps.push_back(precompiled_normalizer(part));
  }
}

// A SentencePiece map: the size of a double array of 32-bit units, the units, and the replacements,
// each ended by a 0 byte.
class PrecompiledMap {
 public:
  explicit PrecompiledMap(const TokenizerPart& part) {
    const std::string bytes = decoded_base64(part);
    const auto number = [&](size_t at) {
      uint32_t value = 0;
      for (size_t i = 4; i-- > 0;) {
        value = value << 8 | static_cast<unsigned char>(bytes[at + i]);
      }
      return value;
    };
    const size_t size = bytes.size() < 4 ? 0 : number(0);
    if (size < 4 || size % 4 != 0 || size > bytes.size() - 4) {
      part.fail("the table is cut off or not one", "the charsmap of SentencePiece in base64");
    }
    units_.resize(size / 4);
    for (size_t i = 0; i < units_.size(); ++i) {
      units_[i] = number(4 + 4 * i);
    }
    replacements_ = bytes.substr(4 + size);
    replacements_ += '\0';
  }

  // The replacement of the shortest prefix of `text` that has one, or null. The reference takes this
  // prefix, too, and then replaces the whole text.
  const char* find(std::string_view text) const {
    size_t node = offset(units_[0]);
    for (const char character : text) {
      const auto byte = static_cast<unsigned char>(character);
      node ^= byte;
      if (byte == 0 || node >= units_.size() || (units_[node] & 0x800000FF) != byte) {
        return nullptr;
      }
      const uint32_t unit = units_[node];
      node ^= offset(unit);
      if ((unit >> 8 & 1) != 0) {
        const size_t at = node < units_.size() ? units_[node] & 0x7FFFFFFF : replacements_.size();
        return at < replacements_.size() ? replacements_.data() + at : nullptr;
      }
    }
    return nullptr;
  }

 private:
  static size_t offset(uint32_t unit) { return size_t{unit >> 10} << ((unit & 512) >> 6); }

  static std::string decoded_base64(const TokenizerPart& part) {
    static constexpr std::string_view kDigits =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::array<int8_t, 256> values{};
    values.fill(-1);
    for (size_t i = 0; i < kDigits.size(); ++i) {
      values[static_cast<unsigned char>(kDigits[i])] = static_cast<int8_t>(i);
    }
    std::string bytes;
    uint32_t bits = 0;
    int count = 0;
    for (const char digit : part.text()) {
      const int value = values[static_cast<unsigned char>(digit)];
      if (value < 0 && digit != '=') {
        part.fail("it has a character that is not base64", "base64");
      }
      if (value < 0) {
        break;
      }
      bits = bits << 6 | static_cast<uint32_t>(value);
      count += 6;
      if (count >= 8) {
        count -= 8;
        bytes += static_cast<char>(bits >> count & 0xFF);
      }
    }
    return bytes;
  }

  std::vector<uint32_t> units_{};
  std::string replacements_{};
};

void add_replacement(std::vector<CodeChange>& codes, std::string_view old, std::string_view text) {
  const size_t before = codes.size();
  for (size_t at = 0; at < text.size();) {
    codes.push_back({next_code(text, at), 0});
  }
  int difference = static_cast<int>(codes.size() - before);
  for (size_t at = 0; at < old.size(); --difference) {
    next_code(old, at);
  }
  for (int i = 0; i < difference; ++i) {
    codes[codes.size() - 1 - static_cast<size_t>(i)].change = 1;
  }
  if (difference < 0 && !codes.empty()) {
    codes.back().change += difference;
  }
}

void apply_map(AlignedText& text, const PrecompiledMap& map) {
  std::vector<CodeChange> codes;
  codes.reserve(text.text.size());
  const std::string_view all = text.text;
  bool changed = false;
  const auto replace = [&](std::string_view part) {
    const char* found = map.find(part);
    if (found != nullptr) {
      changed = true;
      add_replacement(codes, part, found);
    }
    return found != nullptr;
  };
  for (size_t at = 0; at < all.size();) {
    size_t end = at; // of the grapheme
    int32_t last = next_code(all, end);
    for (utf8proc_int32_t state = 0; end < all.size();) {
      size_t next = end;
      const int32_t code = next_code(all, next);
      if (utf8proc_grapheme_break_stateful(last, code, &state)) {
        break;
      }
      last = code;
      end = next;
    }
    if (end - at < 6 && replace(all.substr(at, end - at))) {
      at = end;
    }
    while (at < end) {
      const size_t begin = at;
      const int32_t code = next_code(all, at);
      if (!replace(all.substr(begin, at - begin))) {
        codes.push_back({code, 0});
      }
    }
  }
  if (changed) {
    text.rewrite(codes);
  }
}

NormalizerStep precompiled_normalizer(const TokenizerPart& part) {
  return [map = std::make_shared<const PrecompiledMap>(part["precompiled_charsmap"])](
             AlignedText& text) { apply_map(text, *map); };
}

} // namespace hasten::detail
