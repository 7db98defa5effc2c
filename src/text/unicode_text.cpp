#include "unicode_text.h"

#include <algorithm>
#include <array>

namespace hasten::detail {

bool is_ascii(std::string_view text) {
  return std::ranges::all_of(text, [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

bool is_white_space(int32_t code) {
  return code == ' ' || (code >= 9 && code <= 13) || code == 0x85 || code == 0xA0 ||
         code == 0x1680 || (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 ||
         code == 0x202F || code == 0x205F || code == 0x3000;
}

bool is_word_code(int32_t code) {
  if (code < 0x80) {
    return (code >= '0' && code <= '9') || (code >= 'a' && code <= 'z') ||
           (code >= 'A' && code <= 'Z') || code == '_';
  }
  switch (utf8proc_category(code)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default: // joiners, and symbols that are letters in a circle or a square
      return code == 0x200C || code == 0x200D || (code >= 0x24B6 && code <= 0x24E9) ||
             (code >= 0x1F130 && code <= 0x1F149) || (code >= 0x1F150 && code <= 0x1F169) ||
             (code >= 0x1F170 && code <= 0x1F189);
  }
}

bool is_bert_punctuation(int32_t code) {
  if (code < 0x80) {
    return code > 32 && code < 127 && (code == '_' || !is_word_code(code));
  }
  const auto category = utf8proc_category(code);
  return category >= UTF8PROC_CATEGORY_PC && category <= UTF8PROC_CATEGORY_PO;
}

bool is_bert_ideograph(int32_t code) {
  return (code >= 0x4E00 && code <= 0x9FFF) || (code >= 0x3400 && code <= 0x4DBF) ||
         (code >= 0x20000 && code <= 0x2A6DF) || (code >= 0x2A700 && code <= 0x2B73F) ||
         (code >= 0x2B740 && code <= 0x2B81F) || (code >= 0x2B920 && code <= 0x2CEAF) ||
         (code >= 0xF900 && code <= 0xFAFF) || (code >= 0x2F800 && code <= 0x2FA1F);
}

bool is_number(int32_t code) {
  if (code < 0x80) {
    return code >= '0' && code <= '9';
  }
  const auto category = utf8proc_category(code);
  return category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO;
}

bool is_mark(int32_t code) {
  const auto category = utf8proc_category(code);
  return category >= UTF8PROC_CATEGORY_MN && category <= UTF8PROC_CATEGORY_ME;
}

void append_lower(std::string& text, int32_t code) {
  if (code == 0x130) {
    text += "i\xCC\x87";
  } else {
    append_code(text, code < 0x80 ? (code >= 'A' && code <= 'Z' ? code + 32 : code)
                                  : utf8proc_tolower(code));
  }
}

struct ClassedCode {
  int32_t code = 0;
  int change = 0;
  int combining = 0;
};

std::vector<ClassedCode> decomposed(std::string_view text, bool compatible) {
  const auto options =
      static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | (compatible ? UTF8PROC_COMPAT : 0));
  std::vector<ClassedCode> codes;
  codes.reserve(text.size());
  size_t ready = 0; // the codes before it are in their order
  const auto sort_marks = [&] {
    std::ranges::stable_sort(codes.begin() + static_cast<ptrdiff_t>(ready), codes.end(), {},
                             &ClassedCode::combining);
    ready = codes.size();
  };
  for (size_t at = 0; at < text.size();) {
    const int32_t code = next_code(text, at);
    std::array<utf8proc_int32_t, 32> parts{code};
    int bound = 0;
    const auto count =
        code < 0x80
            ? 1
            : std::clamp<utf8proc_ssize_t>(
                  utf8proc_decompose_char(code, parts.data(), parts.size(), options, &bound), 1,
                  parts.size());
    for (utf8proc_ssize_t i = 0; i < count; ++i) {
      const int combining = utf8proc_get_property(parts[i])->combining_class;
      if (combining == 0) {
        sort_marks();
      }
      codes.push_back({parts[i], i > 0, combining});
    }
  }
  sort_marks();
  return codes;
}

// The character that two compose to, or -1.
int32_t composed_pair(int32_t first, const ClassedCode& second) {
  const bool hangul = second.code >= 0x1161 && second.code <= 0x11C2;
  if (second.code < 0x300 || (second.combining == 0 && !hangul &&
                              utf8proc_get_property(second.code)->comb_index == UINT16_MAX)) {
    return -1;
  }
  utf8proc_int32_t both[2] = {first, second.code};
  const auto left = utf8proc_normalize_utf32(
      both, 2, static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
  return left == 1 ? both[0] : -1;
}

std::vector<CodeChange> normal_form(std::string_view text, NormalForm form) {
  const bool compose = form == NormalForm::nfc || form == NormalForm::nfkc;
  const auto codes = decomposed(text, form == NormalForm::nfkc || form == NormalForm::nfkd);
  std::vector<CodeChange> result;
  result.reserve(codes.size());
  size_t starter = SIZE_MAX; // index in `result` of what the next marks compose with
  int last = 0; // combining class of the last code after the starter; 0 if there is none
  for (const ClassedCode& code : codes) {
    if (compose && starter != SIZE_MAX && (last == 0 || last < code.combining)) {
      if (const int32_t one = composed_pair(result[starter].code, code); one >= 0) {
        result[starter] = {one, result[starter].change + code.change - 1};
        continue;
      }
    }
    if (code.combining == 0) {
      starter = result.size();
    }
    last = code.combining;
    result.push_back({code.code, code.change});
  }
  return result;
}

} // namespace hasten::detail
