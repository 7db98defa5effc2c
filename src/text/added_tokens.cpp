#include "added_tokens.h"

#include <algorithm>
#include <utility>

#include "hasten/base/text.h"

namespace hasten::detail {

void AddedTokens::add(const AddedToken& token, std::string shown, bool replace) {
  if (token.content.empty() || shown.empty()) {
    return;
  }
  const auto [place, is_new] = ids_.emplace(token.content, tokens_.size());
  if (is_new) {
    tokens_.push_back(token);
    shown_.push_back(std::move(shown));
  } else if (replace) {
    tokens_[place->second] = token;
    shown_[place->second] = std::move(shown);
  }
}

std::set<std::string> AddedTokens::contents() const {
  std::set<std::string> all;
  for (const AddedToken& token : tokens_) {
    all.insert(token.content);
  }
  return all;
}

int64_t AddedTokens::next_id(int64_t vocab_size) const {
  int64_t next = vocab_size;
  for (const AddedToken& token : tokens_) {
    next = std::max(next, token.id + 1);
  }
  return next;
}

void AddedTokens::sort() {
  std::vector<size_t> order(tokens_.size());
  for (size_t i = 0; i < order.size(); ++i) {
    order[i] = i;
  }
  std::ranges::stable_sort(order, {}, [&](size_t i) { return tokens_[i].id; });
  std::vector<AddedToken> tokens;
  std::vector<std::string> shown;
  for (const size_t i : order) {
    ids_[tokens_[i].content] = tokens.size();
    by_id_[tokens_[i].id] = tokens.size();
    Search& search = tokens_[i].normalized ? normalized_ : raw_;
    search.used = true;
    search.starts[static_cast<unsigned char>(shown_[i][0])] = true;
    search.trie.insert(shown_[i], static_cast<int32_t>(tokens.size()));
    tokens.push_back(std::move(tokens_[i]));
    shown.push_back(std::move(shown_[i]));
  }
  tokens_ = std::move(tokens);
  shown_ = std::move(shown);
}

const AddedToken* AddedTokens::find(int64_t id) const {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &tokens_[found->second];
}

const AddedToken* AddedTokens::find(std::string_view content) const {
  const auto found = ids_.find(std::string(content));
  return found == ids_.end() ? nullptr : &tokens_[found->second];
}

const std::string& AddedTokens::shown(const AddedToken& token) const {
  return shown_[static_cast<size_t>(&token - tokens_.data())];
}

AddedToken read_added_token(const TokenizerPart& part, int64_t id) {
  AddedToken token{.content = part["content"].text(), .id = id};
  token.special = part["special"].flag(false);
  token.single_word = part["single_word"].flag(false);
  token.lstrip = part["lstrip"].flag(false);
  token.rstrip = part["rstrip"].flag(false);
  token.normalized = part["normalized"].flag(!token.special);
  if (id > INT32_MAX) {
    part.fail("the added token " + token.content + " has id=" + std::to_string(id),
              "an id of at most " + std::to_string(INT32_MAX));
  }
  return token;
}

AddedToken read_special_token(const TokenizerPart& part) {
  AddedToken token{.id = -1};
  if (!part.json().is_object()) {
    token.content = part.text();
    return token;
  }
  if (part["__type"].text("") != "AddedToken") {
    part.fail_value("a text, or \"__type\": \"AddedToken\" among its keys");
  }
  token.content = part["content"].text();
  token.lstrip = part["lstrip"].flag(false);
  token.rstrip = part["rstrip"].flag(false);
  token.single_word = part["single_word"].flag(false);
  return token;
}

std::vector<AddedToken> read_added_tokens(const nlohmann::json& config,
                                          const nlohmann::json& plain) {
  std::vector<AddedToken> tokens;
  if (!config.is_object() || !config.contains("added_tokens_decoder")) {
    for (const auto& [content, id] : plain.items()) {
      tokens.push_back({.content = content,
                        .id = TokenizerPart(id, "added_tokens.json", content).integer(),
                        .special = false,
                        .normalized = true});
    }
    std::ranges::sort(tokens, {}, &AddedToken::id);
    return tokens;
  }
  const auto part = TokenizerPart(config, "tokenizer_config.json")["added_tokens_decoder"];
  if (!part.json().is_object()) {
    part.fail_value("an object");
  }
  for (const auto& [id, entry] : part.json().items()) {
    const auto number = parse_number<int64_t>(id);
    if (!number || *number < 0) {
      part.fail("the key \"" + id + "\"", "a number");
    }
    tokens.push_back(read_added_token(
        TokenizerPart(entry, "tokenizer_config.json", "added_tokens_decoder." + id), *number));
  }
  std::ranges::sort(tokens, {}, &AddedToken::id);
  return tokens;
}

// Whether the token may stand at [begin, end) of the text.
bool fits_as_word(std::string_view text, size_t begin, size_t end) {
  if (begin > 0) {
    size_t at = code_before(text, begin);
    if (is_word_code(next_code(text, at))) {
      return false;
    }
  }
  return end == text.size() || !is_word_code(next_code(text, end));
}

void AddedTokens::split(std::string_view text, bool normalized, std::vector<Word>& parts) const {
  const Search& search = normalized ? normalized_ : raw_;
  size_t last = 0;
  const auto add = [&](size_t begin, size_t end, int32_t id) {
    if (begin < end) {
      parts.push_back({static_cast<uint32_t>(begin), static_cast<uint32_t>(end), id});
    }
  };
  for (size_t at = 0; search.used && at < text.size();) {
    const auto found = search.starts[static_cast<unsigned char>(text[at])]
                           ? search.trie.longest(text.substr(at))
                           : ByteTrie::Found{};
    if (found.id < 0) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<size_t>(found.id)];
    size_t begin = at;
    size_t end = at + found.bytes;
    at = end;
    if (token.single_word && !fits_as_word(text, begin, end)) {
      continue;
    }
    while (token.lstrip && begin > last) {
      size_t before = code_before(text, begin);
      if (!is_white_space(next_code(text, before))) {
        break;
      }
      begin = code_before(text, begin);
    }
    for (size_t next = end; token.rstrip && next < text.size();) {
      if (!is_white_space(next_code(text, next))) {
        break;
      }
      end = next;
    }
    add(last, begin, -1);
    add(begin, end, static_cast<int32_t>(token.id));
    last = end;
  }
  add(last, text.size(), -1);
}

} // namespace hasten::detail
