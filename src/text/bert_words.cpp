#include "hasten/text/bert_words.h"

#include <utf8proc.h>

#include <array>
#include <iterator>

#include "hasten/text/tokenizer.h"
#include "unicode_text.h"

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
  BertWordSplitter(const WordPieceOptions& options, BertWords& out)
      : options_(options),
        strip_accents_(options.strip_accents.value_or(options.do_lower_case)),
        out_(out) {
    out_.text.clear();
    out_.words.clear();
    out_.run.clear();
  }

  void split(std::string_view text) {
    const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
    const auto size = static_cast<utf8proc_ssize_t>(text.size());
    out_.text.reserve(text.size());
    for (utf8proc_ssize_t at = 0; at < size;) {
      utf8proc_int32_t code = bytes[at];
      at += code < 128 ? 1 : utf8proc_iterate(bytes + at, size - at, &code);
      take_code(code);
    }
    flush_run();
    end_word();
  }

 private:
  // Cleans one code point. Normalisation needs the whole run of code points beyond ASCII, because
  // decomposition reorders combining marks.
  void take_code(int32_t code) {
    const BertChar kind = bert_class(code);
    if (kind == BertChar::removed) {
      return;
    }
    if (code < 128 || kind == BertChar::space) {
      flush_run();
      put_code(code);
    } else if (options_.tokenize_chinese_chars && is_bert_ideograph(code)) {
      out_.run += ' ';
      append(out_.run, code);
      out_.run += ' ';
    } else {
      append(out_.run, code);
    }
  }

  void flush_run() {
    if (out_.run.empty()) {
      return;
    }
    // A code point beyond ASCII has at least two bytes and decomposes into at most four.
    std::vector<utf8proc_int32_t> codes(2 * out_.run.size());
    const auto* bytes = reinterpret_cast<const utf8proc_uint8_t*>(out_.run.data());
    codes.resize(static_cast<size_t>(
        utf8proc_decompose(bytes, std::ssize(out_.run), codes.data(), std::ssize(codes),
                           strip_accents_ ? UTF8PROC_DECOMPOSE : utf8proc_option_t{})));
    for (const utf8proc_int32_t code : codes) {
      if (!strip_accents_ || utf8proc_category(code) != UTF8PROC_CATEGORY_MN) {
        put_code(code);
      }
    }
    out_.run.clear();
  }

  // Appends a code point to the word, or ends the word.
  void put_code(int32_t code) {
    if (options_.do_lower_case && code == 0x130) { // only its lower case has two characters
      out_.text += "i\xCC\x87";
      characters_ += 2;
      return;
    }
    if (options_.do_lower_case) {
      code = code >= 128 ? utf8proc_tolower(code) : code >= 'A' && code <= 'Z' ? code + 32 : code;
    }
    const BertChar kind = bert_class(code);
    if (kind != BertChar::letter) {
      end_word();
    }
    if (kind != BertChar::space) {
      append(out_.text, code);
      ++characters_;
    }
    if (kind == BertChar::punctuation) {
      end_word();
    }
  }

  static void append(std::string& text, int32_t code) {
    if (code < 128) {
      text += static_cast<char>(code);
      return;
    }
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

  const WordPieceOptions& options_;
  const bool strip_accents_;
  BertWords& out_;
  size_t begin_ = 0; // of the current word
  int64_t characters_ = 0; // in the current word
};

void split_bert_words(std::string_view text, const WordPieceOptions& options, BertWords& words) {
  BertWordSplitter(options, words).split(text);
}

} // namespace hasten::detail
