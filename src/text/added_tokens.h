// Added tokens and where they are in a text.
// Threading: const functions may be called from several threads.
#pragma once

#include <array>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "byte_trie.h"
#include "hasten/text/tokenizer.h"
#include "text_steps.h"

namespace hasten::detail {

class AddedTokens {
 public:
  /// `shown` is what texts have: the content, normalized if the token asks for that. Replaces a token
  /// of the same content if `replace`, else leaves it.
  void add(const AddedToken& token, std::string shown, bool replace = false);
  /// The id of a new token, where the model has `vocab_size` pieces: as Python's tokenizers counts.
  int64_t next_id(int64_t vocab_size) const;
  std::set<std::string> contents() const;
  /// By id. Call it after the last add().
  void sort();

  bool has(std::string_view content) const { return ids_.contains(std::string(content)); }
  /// Null if there is none.
  const AddedToken* find(int64_t id) const;
  const AddedToken* find(std::string_view content) const;
  /// What decode() gives its steps: the content, normalized if the token asks for that.
  const std::string& shown(const AddedToken& token) const;
  const std::vector<AddedToken>& all() const { return tokens_; }
  bool any_normalized() const { return normalized_.used; }

  /// The parts of `text` in order: added tokens, and what is between them (added = -1). Positions
  /// are bytes of it. Of several tokens at one place the longest counts.
  void split(std::string_view text, bool normalized, std::vector<Word>& parts) const;

 private:
  struct Search {
    ByteTrie trie{}; // of indices in tokens_
    std::array<bool, 256> starts{};
    bool used = false;
  };

  std::vector<AddedToken> tokens_{};
  std::vector<std::string> shown_{}; // [index in tokens_]
  std::unordered_map<std::string, size_t> ids_{}; // content to the index in tokens_
  std::unordered_map<int64_t, size_t> by_id_{};
  Search raw_{};
  Search normalized_{};
};

/// An entry of added_tokens. Throws InputError.
AddedToken read_added_token(const TokenizerPart& part, int64_t id);
/// A special token of tokenizer_config.json: a text, or an object as of added_tokens that says that it is
/// one. Its id is -1.
AddedToken read_special_token(const TokenizerPart& part);
/// The tokens of added_tokens_decoder in tokenizer_config.json, or if it has none of added_tokens.json
/// (`plain`). Throws InputError.
std::vector<AddedToken> read_added_tokens(const nlohmann::json& config,
                                          const nlohmann::json& plain);

} // namespace hasten::detail
