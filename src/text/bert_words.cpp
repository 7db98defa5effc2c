#include "hasten/text/bert_words.h"

#include <utf8proc.h>

#include <array>

namespace hasten::detail {

enum class BertChar : uint8_t { letter, space, punctuation, removed };

constexpr std::array<BertChar, 128> bert_ascii_table() {
  std::array<BertChar, 128> table{};
  for (int c = 0; c < 128; ++c) {
    const bool alphanumeric =
        (c >= '0' && c <= '9') || (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z');
    table[c] = c == ' ' || c == '\t' || c == '\n' || c == '\r' ? BertChar::space
               : c < 32 || c == 127                            ? BertChar::removed
               : alphanumeric                                  ? BertChar::letter
                                                               : BertChar::punctuation;
  }
  return table;
}

constexpr auto kBertAscii = bert_ascii_table();

// The ranges in BERT's code. BERT has 2B920 where Unicode has 2B820.
bool is_bert_cjk(int32_t code) {
  return (code >= 0x4E00 && code <= 0x9FFF) || (code >= 0x3400 && code <= 0x4DBF) ||
         (code >= 0x20000 && code <= 0x2A6DF) || (code >= 0x2A700 && code <= 0x2B73F) ||
         (code >= 0x2B740 && code <= 0x2B81F) || (code >= 0x2B920 && code <= 0x2CEAF) ||
         (code >= 0xF900 && code <= 0xFAFF) || (code >= 0x2F800 && code <= 0x2FA1F);
}

// Class of a code point. Separators count as white space, as in BERT. Unassigned code points stay,
// as in Hugging Face's tokenizers (the original BERT removes them).
BertChar bert_class(int32_t code) {
  if (code < 128) {
    return kBertAscii[code];
  }
  switch (utf8proc_category(code)) {
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return BertChar::space;
    case UTF8PROC_CATEGORY_PC:
    case UTF8PROC_CATEGORY_PD:
    case UTF8PROC_CATEGORY_PS:
    case UTF8PROC_CATEGORY_PE:
    case UTF8PROC_CATEGORY_PI:
    case UTF8PROC_CATEGORY_PF:
    case UTF8PROC_CATEGORY_PO:
      return BertChar::punctuation;
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
      return BertChar::removed;
    default:
      return code == 0xFFFD ? BertChar::removed : BertChar::letter;
  }
}

class BertWordSplitter {
 public:
  BertWordSplitter(const BertWordOptions& options, BertWords& out) : options_(options), out_(out) {
    out_.text.clear();
    out_.words.clear();
    out_.run.clear();
  }

  void split(std::string_view text) {
    const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
    const auto size = static_cast<utf8proc_ssize_t>(text.size());
    out_.text.reserve(text.size());
    for (utf8proc_ssize_t at = 0; at < size;) {
      if (bytes[at] < 128) {
        take_ascii(static_cast<char>(bytes[at++]));
        continue;
      }
      utf8proc_int32_t code = 0;
      at += utf8proc_iterate(bytes + at, size - at, &code);
      take_code(code);
    }
    flush_run();
    end_word();
  }

 private:
  void take_ascii(char c) {
    const BertChar kind = kBertAscii[static_cast<unsigned char>(c)];
    if (kind == BertChar::removed) {
      return;
    }
    if (!out_.run.empty()) {
      flush_run();
    }
    put_ascii(c, kind);
  }

  void put_ascii(char c, BertChar kind) {
    switch (kind) {
      case BertChar::letter:
        out_.text +=
            options_.lower_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c;
        ++characters_;
        break;
      case BertChar::punctuation:
        end_word();
        out_.text += c;
        characters_ = 1;
        end_word();
        break;
      default:
        end_word();
    }
  }

  // Cleans one code point. Normalisation needs the whole run of code points beyond ASCII, because
  // decomposition reorders combining marks.
  void take_code(int32_t code) {
    const BertChar kind = bert_class(code);
    if (kind == BertChar::removed) {
      return;
    }
    if (kind == BertChar::space) {
      flush_run();
      end_word();
    } else if (options_.tokenize_chinese_chars && is_bert_cjk(code)) {
      out_.run.push_back(' ');
      out_.run.push_back(code);
      out_.run.push_back(' ');
    } else {
      out_.run.push_back(code);
    }
  }

  void flush_run() {
    if (out_.run.empty()) {
      return;
    }
    if (options_.strip_accents) {
      put_decomposed();
    } else {
      for (const int32_t code : out_.run) {
        put_code(code);
      }
    }
    out_.run.clear();
  }

  void put_decomposed() {
    std::string run;
    for (const int32_t code : out_.run) {
      append(run, code);
    }
    const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(run.data());
    const auto size = static_cast<utf8proc_ssize_t>(run.size());
    std::vector<utf8proc_int32_t> codes(out_.run.size() * 4);
    auto count = utf8proc_decompose(
        bytes, size, codes.data(), static_cast<utf8proc_ssize_t>(codes.size()), UTF8PROC_DECOMPOSE);
    if (count > static_cast<utf8proc_ssize_t>(codes.size())) {
      codes.resize(static_cast<size_t>(count));
      count = utf8proc_decompose(bytes, size, codes.data(), count, UTF8PROC_DECOMPOSE);
    }
    for (utf8proc_ssize_t i = 0; i < count; ++i) {
      if (utf8proc_category(codes[i]) != UTF8PROC_CATEGORY_MN) {
        put_code(codes[i]);
      }
    }
  }

  void put_code(int32_t code) {
    if (code < 128) { // for example K from the Kelvin sign
      put_ascii(static_cast<char>(code), kBertAscii[code]);
      return;
    }
    if (options_.lower_case) {
      if (code == 0x130) { // the only letter whose lower case has two characters
        out_.text += "i\xCC\x87";
        characters_ += 2;
        return;
      }
      code = utf8proc_tolower(code);
    }
    const bool alone = bert_class(code) == BertChar::punctuation;
    if (alone) {
      end_word();
    }
    append(out_.text, code);
    ++characters_;
    if (alone) {
      end_word();
    }
  }

  static void append(std::string& text, int32_t code) {
    utf8proc_uint8_t bytes[4];
    const auto count = utf8proc_encode_char(code, bytes);
    text.append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(count));
  }

  void end_word() {
    if (out_.text.size() > begin_) {
      out_.words.push_back({begin_, out_.text.size(), characters_});
      begin_ = out_.text.size();
    }
    characters_ = 0;
  }

  const BertWordOptions options_;
  BertWords& out_;
  size_t begin_ = 0; // of the current word
  int64_t characters_ = 0; // in the current word
};

void split_bert_words(std::string_view text, const BertWordOptions& options, BertWords& words) {
  BertWordSplitter(options, words).split(text);
}

} // namespace hasten::detail
