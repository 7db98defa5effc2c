// The pre-tokenizers of a tokenizer.json: what splits a text into words.
#include <algorithm>
#include <utility>

#include "pattern.h"
#include "text_steps.h"
#include "token_model.h"

namespace hasten::detail {

enum class SplitBehavior { removed, isolated, merged_with_previous, merged_with_next, contiguous };

SplitBehavior read_behavior(const TokenizerPart& part, SplitBehavior otherwise) {
  static const std::vector<std::string> kNames{"Removed", "Isolated", "MergedWithPrevious",
                                               "MergedWithNext", "Contiguous"};
  return part.is_null() ? otherwise : static_cast<SplitBehavior>(part.one_of(kNames));
}

struct Stretch {
  uint32_t begin = 0;
  uint32_t end = 0;
  bool match = false;
};

// Appends the words that the stretches of one word become.
void add_words(std::vector<Stretch>& stretches, SplitBehavior behavior, std::vector<Word>& out) {
  const bool backwards = behavior == SplitBehavior::merged_with_next;
  const bool contiguous = behavior == SplitBehavior::contiguous;
  const bool merges = contiguous || backwards || behavior == SplitBehavior::merged_with_previous;
  if (backwards) {
    std::ranges::reverse(stretches);
  }
  const size_t first = out.size();
  bool before = false; // the stretch before was a match
  for (const Stretch& stretch : stretches) {
    const bool joins = contiguous ? stretch.match == before : stretch.match && !before;
    before = stretch.match;
    if (merges && joins && out.size() > first) {
      (backwards ? out.back().begin : out.back().end) = backwards ? stretch.begin : stretch.end;
    } else if (!stretch.match || behavior != SplitBehavior::removed) {
      out.push_back({stretch.begin, stretch.end});
    }
  }
  if (backwards) {
    std::reverse(out.begin() + static_cast<ptrdiff_t>(first), out.end());
  }
  out.erase(std::remove_if(out.begin() + static_cast<ptrdiff_t>(first), out.end(),
                           [](const Word& word) { return word.begin == word.end; }),
            out.end());
}

// Splits each word at the matches that find(text of the word, matches) appends.
template <typename Find>
void split_words(Words& words, SplitBehavior behavior, bool invert, Find&& find) {
  std::vector<Word> made;
  made.reserve(words.words.size() + words.text.text.size() / 4);
  std::vector<Stretch> stretches;
  for (const Word& word : words.words) {
    if (word.added >= 0) {
      made.push_back(word);
      continue;
    }
    words.matches.clear();
    stretches.clear();
    const auto text = std::string_view(words.text.text).substr(word.begin, word.end - word.begin);
    find(text, words.matches);
    uint32_t last = 0;
    const auto add = [&](uint32_t begin, uint32_t end, bool match) {
      stretches.push_back({word.begin + begin, word.begin + end, match != invert});
    };
    for (const TextSpan& match : words.matches) {
      if (last != match.begin) {
        add(last, match.begin, false);
      }
      add(match.begin, match.end, true);
      last = match.end;
    }
    if (last != text.size()) {
      add(last, static_cast<uint32_t>(text.size()), false);
    }
    add_words(stretches, behavior, made);
  }
  words.words = std::move(made);
}

template <typename Test>
PreTokenizerStep split_at_codes(SplitBehavior behavior, Test test) {
  return [=](Words& words) {
    split_words(words, behavior, false, [&](std::string_view text, std::vector<TextSpan>& found) {
      for (size_t at = 0; at < text.size();) {
        const auto begin = static_cast<uint32_t>(at);
        if (test(next_code(text, at))) {
          found.push_back({begin, static_cast<uint32_t>(at)});
        }
      }
    });
  };
}

PreTokenizerStep split_at_pattern(Pattern pattern, SplitBehavior behavior, bool invert) {
  return [pattern = std::move(pattern), behavior, invert](Words& words) {
    split_words(words, behavior, invert,
                [&](std::string_view text, auto& found) { pattern.find(text, found); });
  };
}

// Runs of word characters, and runs of others that are no white space.
void split_word_runs(Words& words) {
  split_words(words, SplitBehavior::removed, true, [](std::string_view text, auto& found) {
    const auto kind = [](int32_t code) {
      return is_word_code(code) ? 1 : is_white_space(code) ? 0 : 2;
    };
    int last = 0;
    for (size_t at = 0; at < text.size();) {
      const auto begin = static_cast<uint32_t>(at);
      const int now = kind(next_code(text, at));
      if (now != 0 && now == last) {
        found.back().end = static_cast<uint32_t>(at);
      } else if (now != 0) {
        found.push_back({begin, static_cast<uint32_t>(at)});
      }
      last = now;
    }
  });
}

// Writes all words anew: write(word, made) appends the text of one that is no added token.
template <typename Write>
void rewrite_words(Words& words, Write&& write) {
  AlignedText made = words.text.emptied();
  made.text.reserve(words.text.text.size() + 16);
  for (Word& word : words.words) {
    const auto begin = static_cast<uint32_t>(made.text.size());
    if (word.added >= 0) {
      made.append_from(words.text, word.begin, word.end);
    } else {
      write(std::as_const(word), made);
    }
    word.begin = begin;
    word.end = static_cast<uint32_t>(made.text.size());
  }
  words.text = std::move(made);
}

void prefix_spaces(Words& words) {
  if (std::ranges::all_of(words.words, [&](const Word& word) {
        return word.added >= 0 || words.text.text[word.begin] == ' ';
      })) {
    return;
  }
  rewrite_words(words, [&](const Word& word, AlignedText& made) {
    if (words.text.text[word.begin] != ' ') {
      made.append(" ", words.text.from(word.begin));
    }
    made.append_from(words.text, word.begin, word.end);
  });
}

void write_bytes(Words& words) {
  rewrite_words(words, [&](const Word& word, AlignedText& made) {
    for (size_t at = word.begin; at < word.end; ++at) {
      made.append(byte_level_characters()[static_cast<unsigned char>(words.text.text[at])],
                  words.text.from(at));
    }
  });
}

constexpr const char* kByteLevelWords =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

void read_byte_level(const TokenizerPart& part, PreTokenizer& out) {
  if (part["add_prefix_space"].is_null()) { // which Python's tokenizers need
    part["add_prefix_space"].fail_value("true or false");
  }
  if (part["add_prefix_space"].flag(true)) {
    out.steps.emplace_back(prefix_spaces);
  }
  if (part["use_regex"].flag(true)) {
    out.steps.push_back(split_at_pattern(Pattern(kByteLevelWords), SplitBehavior::isolated, false));
  }
}

void read_metaspace(const TokenizerPart& part, PreTokenizer& out) {
  std::string mark;
  const int32_t code = part["replacement"].character();
  append_code(mark, code);
  static const std::vector<std::string> kSchemes{"always", "never", "first"};
  const auto named = part["prepend_scheme"];
  size_t scheme = named.is_null() ? 0 : named.one_of(kSchemes);
  if (!part["add_prefix_space"].flag(true)) {
    if (scheme == 2) {
      named.fail_value("never, because add_prefix_space=false");
    }
    scheme = 1;
  }
  out.needs_origins = out.needs_origins || scheme == 2;
  out.steps.emplace_back([=](Words& words) {
    rewrite_words(words, [&](const Word& word, AlignedText& made) {
      const auto text = std::string_view(words.text.text).substr(word.begin, word.end - word.begin);
      if (!text.starts_with(mark) && !text.starts_with(' ') &&
          (scheme == 0 || (scheme == 2 && words.text.from(word.begin).begin == 0))) {
        made.append(mark, words.text.from(word.begin));
      }
      size_t last = 0;
      for (size_t at = 0; (at = text.find(' ', at)) != text.npos; last = ++at) {
        made.append_from(words.text, word.begin + last, word.begin + at);
        made.append(mark, words.text.from(word.begin + at));
      }
      made.append_from(words.text, word.begin + last, word.end);
    });
  });
  if (part["split"].flag(true)) {
    out.steps.push_back(split_at_codes(SplitBehavior::merged_with_next,
                                       [code](int32_t other) { return other == code; }));
  }
}

void read_pre_tokenizer(const TokenizerPart& part, bool bpe, bool last, PreTokenizer& out) {
  if (part.is_null()) {
    return;
  }
  static const std::vector<std::string> kTypes{"Sequence",   "BertPreTokenizer", "ByteLevel",
                                               "Whitespace", "WhitespaceSplit",  "Punctuation",
                                               "Digits",     "Metaspace",        "Split"};
  switch (part["type"].one_of(kTypes)) {
    case 0: {
      const auto inner = part["pretokenizers"].items();
      for (size_t i = 0; i < inner.size(); ++i) {
        read_pre_tokenizer(inner[i], bpe, last && i + 1 == inner.size(), out);
      }
      return;
    }
    case 1:
      out.steps.push_back(split_at_codes(SplitBehavior::removed, is_white_space));
      out.steps.push_back(split_at_codes(SplitBehavior::isolated, is_bert_punctuation));
      return;
    case 2:
      read_byte_level(part, out);
      out.model_writes_bytes = bpe && last;
      if (!out.model_writes_bytes) {
        out.steps.emplace_back(write_bytes);
      }
      return;
    case 3:
      return out.steps.push_back(split_word_runs);
    case 4:
      return out.steps.push_back(split_at_codes(SplitBehavior::removed, is_white_space));
    case 5:
      return out.steps.push_back(split_at_codes(
          read_behavior(part["behavior"], SplitBehavior::isolated), is_bert_punctuation));
    case 6:
      return out.steps.push_back(split_at_codes(part["individual_digits"].flag(false)
                                                    ? SplitBehavior::isolated
                                                    : SplitBehavior::contiguous,
                                                is_number));
    case 7:
      return read_metaspace(part, out);
    default:
      return out.steps.push_back(split_at_pattern(
          Pattern(part["pattern"]), read_behavior(part["behavior"], SplitBehavior::isolated),
          part["invert"].flag(false)));
  }
}

PreTokenizer read_pre_tokenizer(const TokenizerPart& part, bool bpe) {
  PreTokenizer made;
  read_pre_tokenizer(part, bpe, true, made);
  return made;
}

} // namespace hasten::detail
