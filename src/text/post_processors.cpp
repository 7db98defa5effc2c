// The post-processors and decoders of a tokenizer.json.
#include <algorithm>
#include <map>

#include "hasten/base/text.h"
#include "hasten/text/utf8.h"
#include "pattern.h"
#include "text_steps.h"
#include "token_model.h"

namespace hasten::detail {

int32_t read_token_id(const TokenizerPart& part) {
  return static_cast<int32_t>(std::min<int64_t>(part.integer(), INT32_MAX));
}

std::vector<TemplatePiece> read_template(const TokenizerPart& part, const TokenizerPart& specials) {
  std::vector<TemplatePiece> pieces;
  for (const auto& item : part.items()) {
    const auto sequence = item["Sequence"];
    const auto token = sequence.is_null() ? item["SpecialToken"] : sequence;
    TemplatePiece piece{.type_id = token["type_id"].integer()};
    if (!sequence.is_null()) {
      piece.sequence = static_cast<int>(token["id"].one_of({"A", "B"}));
    } else {
      const std::string name = token["id"].text();
      for (const auto& id : specials[name.c_str()]["ids"].items()) {
        piece.ids.push_back(read_token_id(id));
      }
    }
    pieces.push_back(std::move(piece));
  }
  return pieces;
}

void read_post_processor(const TokenizerPart& part, PostProcessor& out, bool& has_template) {
  static const std::vector<std::string> kTypes{"Sequence", "ByteLevel", "TemplateProcessing",
                                               "BertProcessing", "RobertaProcessing"};
  const size_t type = part["type"].one_of(kTypes);
  if (type == 0) {
    for (const auto& inner : part["processors"].items()) {
      read_post_processor(inner, out, has_template);
    }
    return;
  }
  if (type == 1 || type == 4) {
    const bool prefix = part["add_prefix_space"].flag(true);
    if (part["trim_offsets"].flag(true)) {
      out.trim_prefix_space = prefix;
    }
    if (type == 1) {
      return;
    }
  }
  if (has_template) {
    part.fail_value("one part that adds special tokens");
  }
  has_template = true;
  if (type == 2) {
    out.single = read_template(part["single"], part["special_tokens"]);
    out.pair = read_template(part["pair"], part["special_tokens"]);
    return;
  }
  const auto id_of = [&](const char* name) {
    const auto items = part[name].items();
    if (items.size() != 2) {
      part[name].fail_value("a token and its id");
    }
    return read_token_id(items[1]);
  };
  const TemplatePiece cls{.ids = {id_of("cls")}};
  const TemplatePiece sep{.ids = {id_of("sep")}};
  const int64_t second = type == 3 ? 1 : 0; // RoBERTa has one type
  out.single = {cls, {.sequence = 0}, sep};
  out.pair = out.single;
  if (type == 4) {
    out.pair.push_back(sep);
  }
  out.pair.push_back({.sequence = 1, .type_id = second});
  out.pair.push_back({.ids = sep.ids, .type_id = second});
}

PostProcessor read_post_processor(const TokenizerPart& part) {
  PostProcessor made;
  bool has_template = false;
  if (!part.is_null()) {
    read_post_processor(part, made, has_template);
  }
  const auto uses = [](const std::vector<TemplatePiece>& pieces, int sequence) {
    return std::ranges::count(pieces, sequence, &TemplatePiece::sequence);
  };
  if (uses(made.single, 0) != 1 || uses(made.single, 1) != 0 || uses(made.pair, 0) != 1 ||
      uses(made.pair, 1) != 1) {
    part.fail_value("templates in which each sequence is once: A, and in `pair` A and B");
  }
  return made;
}

void replace_all(std::string& text, std::string_view old, std::string_view made) {
  for (size_t at = 0; !old.empty() && (at = text.find(old, at)) != text.npos; at += made.size()) {
    text.replace(at, old.size(), made);
  }
}

void clean_up_spaces(std::string& text, bool with_do_not) {
  static constexpr std::pair<const char*, const char*> kPairs[] = {
      {" .", "."},     {" ?", "?"},   {" !", "!"},   {" ,", ","},     {" ' ", "'"},
      {" n't", "n't"}, {" 'm", "'m"}, {" 's", "'s"}, {" 've", "'ve"}, {" 're", "'re"}};
  for (const auto& [old, made] : kPairs) {
    replace_all(text, old, made);
  }
  if (with_do_not) {
    replace_all(text, " do not", " don't");
  }
}

void decode_word_pieces(std::vector<std::string>& tokens, const std::string& prefix, bool clean) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    if (i > 0 && tokens[i].starts_with(prefix)) {
      tokens[i].erase(0, prefix.size());
    } else if (i > 0) {
      tokens[i].insert(0, " ");
    }
    if (clean) {
      clean_up_spaces(tokens[i], true);
    }
  }
}

void decode_byte_level(std::vector<std::string>& tokens) {
  std::string bytes;
  for (const std::string& token : tokens) {
    const size_t before = bytes.size();
    for (size_t at = 0; at < token.size();) {
      const int byte = byte_of_character(next_code(token, at));
      if (byte < 0) { // an added token with other characters stays as it is
        bytes.resize(before);
        bytes += token;
        break;
      }
      bytes += static_cast<char>(byte);
    }
  }
  tokens = {replace_invalid_utf8(bytes)};
}

void decode_fallback(std::vector<std::string>& tokens) {
  std::vector<std::string> made;
  std::string bytes;
  const auto flush = [&] {
    if (invalid_utf8_position(bytes) == std::string::npos) {
      made.push_back(bytes);
    } else {
      made.insert(made.end(), bytes.size(), "\xEF\xBF\xBD");
    }
    bytes.clear();
  };
  for (std::string& token : tokens) {
    unsigned value = 0;
    const auto hex = std::string_view(token).substr(std::min<size_t>(token.size(), 3), 2);
    if (token.size() == 6 && token.starts_with("<0x") && token.ends_with('>') &&
        std::from_chars(hex.data(), hex.data() + 2, value, 16).ptr == hex.data() + 2) {
      bytes += static_cast<char>(value);
      continue;
    }
    if (!bytes.empty()) {
      flush();
    }
    made.push_back(std::move(token));
  }
  if (!bytes.empty()) {
    flush();
  }
  tokens = std::move(made);
}

void decode_metaspace(std::vector<std::string>& tokens, const std::string& mark, bool prepended) {
  for (size_t i = 0; i < tokens.size(); ++i) {
    replace_all(tokens[i], mark, i == 0 && prepended ? "" : " ");
  }
}

void strip_token(std::string& token, const std::string& content, int64_t start, int64_t stop) {
  for (; start > 0 && token.starts_with(content); --start) {
    token.erase(0, content.size());
  }
  for (; stop > 0 && token.ends_with(content); --stop) {
    token.resize(token.size() - content.size());
  }
}

DecoderStep each_token(std::function<void(std::string&)> change) {
  return [change = std::move(change)](std::vector<std::string>& tokens) {
    std::ranges::for_each(tokens, change);
  };
}

void replace_in_token(std::string& token, const Pattern& pattern, const std::string& content) {
  std::vector<TextSpan> matches;
  pattern.find(token, matches);
  for (size_t i = matches.size(); i-- > 0;) {
    token.replace(matches[i].begin, matches[i].end - matches[i].begin, content);
  }
}

void read_decoder(const TokenizerPart& part, std::vector<DecoderStep>& steps) {
  static const std::vector<std::string> kTypes{"Sequence",  "WordPiece",    "ByteLevel",
                                               "Metaspace", "ByteFallback", "Fuse",
                                               "Replace",   "Strip",        "BPEDecoder"};
  switch (part["type"].one_of(kTypes)) {
    case 0:
      for (const auto& inner : part["decoders"].items()) {
        read_decoder(inner, steps);
      }
      return;
    case 1:
      return steps.push_back(
          [prefix = part["prefix"].text("##"), clean = part["cleanup"].flag(true)](auto& tokens) {
            decode_word_pieces(tokens, prefix, clean);
          });
    case 2:
      return steps.push_back(decode_byte_level);
    case 3: {
      std::string mark;
      append_code(mark, part["replacement"].character());
      const bool prepended =
          part["prepend_scheme"].text("always") != "never" && part["add_prefix_space"].flag(true);
      return steps.push_back([=](auto& tokens) { decode_metaspace(tokens, mark, prepended); });
    }
    case 4:
      return steps.push_back(decode_fallback);
    case 5:
      return steps.push_back([](auto& tokens) { tokens = {joined(tokens, "")}; });
    case 6:
      return steps.push_back(
          each_token([pattern = Pattern(part["pattern"]), content = part["content"].text()](
                         auto& token) { replace_in_token(token, pattern, content); }));
    case 7: {
      std::string content;
      append_code(content, part["content"].character());
      const int64_t start = part["start"].integer();
      const int64_t stop = part["stop"].integer();
      return steps.push_back(
          each_token([=](auto& token) { strip_token(token, content, start, stop); }));
    }
    default:
      return steps.push_back([suffix = part["suffix"].text("</w>")](auto& tokens) {
        for (size_t i = 0; i < tokens.size(); ++i) {
          replace_all(tokens[i], suffix, i + 1 == tokens.size() ? "" : " ");
        }
      });
  }
}

} // namespace hasten::detail
