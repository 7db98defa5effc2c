#include "token_model.h"

#include <xxhash.h>

#include <algorithm>
#include <cstdio>

#include "hasten/text/utf8.h"
#include "unicode_text.h"

namespace hasten::detail {

TokenScratch::Word& TokenScratch::place(std::string_view word) {
  if (words_.empty()) {
    words_.resize(kPlaces);
  }
  return words_[XXH3_64bits(word.data(), word.size()) & (kPlaces - 1)];
}

TokenModel::TokenModel(std::vector<std::string> pieces) : pieces_(std::move(pieces)) {
  ids_.reserve(pieces_.size());
  for (size_t id = 0; id < pieces_.size(); ++id) {
    if (!pieces_[id].empty()) {
      ids_[pieces_[id]] = static_cast<int32_t>(id); // of equal pieces the later counts
    }
  }
}

int32_t TokenModel::id(std::string_view piece) const {
  const auto found = ids_.find(piece);
  return found == ids_.end() ? -1 : found->second;
}

void TokenModel::tokenize(std::string_view word, TokenScratch& scratch,
                          std::vector<WordToken>& out) const {
  if (word.size() > TokenScratch::kLongest) {
    split_word(word, scratch, out);
    return;
  }
  TokenScratch::Word& known = scratch.place(word);
  if (known.text != word) {
    known.tokens.clear();
    known.text.clear();
    split_word(word, scratch, known.tokens);
    known.text = word; // last: split_word may throw
  }
  out.insert(out.end(), known.tokens.begin(), known.tokens.end());
}

std::array<int32_t, 256> TokenModel::fallback_ids() const {
  std::array<int32_t, 256> ids{};
  for (size_t byte = 0; byte < ids.size(); ++byte) {
    char name[8];
    std::snprintf(name, sizeof(name), "<0x%02X>", static_cast<unsigned>(byte));
    ids[byte] = id(name);
  }
  return ids;
}

int32_t TokenModel::required_id(const TokenizerPart& part) const {
  const std::string name = part.text(std::string());
  const int32_t found = id(name);
  if (!name.empty() && found < 0) {
    part.fail_value("a token of the vocabulary of pieces=" + std::to_string(pieces_.size()));
  }
  return found;
}

std::vector<std::string> read_vocab(const TokenizerPart& part) {
  if (!part.json().is_object() || part.json().empty()) {
    part.fail_value("an object with the id of each piece");
  }
  // Ids may have gaps; a wrong one must not take the memory of the machine.
  const auto most = static_cast<int64_t>(2 * part.json().size() + 65536);
  std::vector<std::string> pieces;
  pieces.reserve(part.json().size());
  for (const auto& [piece, value] : part.json().items()) {
    const int64_t id = value.is_number_integer() ? value.get<int64_t>() : -1;
    if (id < 0 || id >= most) {
      part.fail("the piece " + piece + " has id=" + value.dump(-1, ' ', true),
                "a number from 0 to " + std::to_string(most - 1));
    }
    if (static_cast<size_t>(id) >= pieces.size()) {
      pieces.resize(static_cast<size_t>(id) + 1);
    }
    pieces[static_cast<size_t>(id)] = piece;
  }
  return pieces;
}

std::unique_ptr<const TokenModel> TokenModel::read(const TokenizerPart& part, bool bytes) {
  // Old files have no type.
  const std::string type = part["type"].text(
      part["merges"].is_null() ? (part["vocab"].json().is_array() ? "Unigram" : "WordPiece")
                               : "BPE");
  if (type == "BPE") {
    return read_bpe(part, bytes);
  }
  if (type == "Unigram") {
    return read_unigram(part);
  }
  if (type == "WordPiece") {
    return std::make_unique<WordPieceModel>(part);
  }
  part["type"].fail_value("WordPiece, BPE or Unigram");
}

WordPieceModel::WordPieceModel(const TokenizerPart& part)
    : TokenModel(read_vocab(part["vocab"])),
      longest_word_(part["max_input_chars_per_word"].integer(100)) {
  const std::string prefix = part["continuing_subword_prefix"].text("##");
  static const nlohmann::json kUnk = "[UNK]";
  unk_ =
      required_id(part["unk_token"].is_null() ? TokenizerPart(kUnk, part.file(), "model.unk_token")
                                              : part["unk_token"]);
  if (unk_ < 0) {
    part["unk_token"].fail_value("a token of the vocabulary");
  }
  for (size_t id = 0; id < pieces().size(); ++id) {
    if (!pieces()[id].empty()) {
      trie_.insert(pieces()[id], static_cast<int32_t>(id));
    }
  }
  inside_ = trie_.node(prefix);
}

void WordPieceModel::append(std::string_view word, int64_t characters,
                            std::vector<WordToken>& out) const {
  const size_t before = out.size();
  bool known = characters <= longest_word_;
  int32_t node = 0;
  uint32_t begin = 0;
  for (size_t at = 0; known && at < word.size();) {
    const auto [id, bytes] = trie_.longest(word.substr(at), node);
    known = id >= 0;
    if (known) {
      at += bytes;
      out.push_back({id, begin, static_cast<uint32_t>(at)});
      begin = static_cast<uint32_t>(at);
      node = inside_;
    }
  }
  if (!known) {
    out.resize(before);
    out.push_back({unk_, 0, static_cast<uint32_t>(word.size())});
  }
}

void WordPieceModel::split_word(std::string_view word, TokenScratch& /*scratch*/,
                                std::vector<WordToken>& out) const {
  append(word, static_cast<int64_t>(utf8_length(word)), out);
}

const std::array<std::string, 256>& byte_level_characters() {
  static const auto kCharacters = [] {
    std::array<std::string, 256> characters;
    int32_t next = 256; // bytes that are no visible character get the code points from 256 on
    for (int32_t byte = 0; byte < 256; ++byte) {
      const bool visible = (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte != 0xAD);
      append_code(characters[static_cast<size_t>(byte)], visible ? byte : next++);
    }
    return characters;
  }();
  return kCharacters;
}

int byte_of_character(int32_t code) {
  static const auto kBytes = [] {
    std::array<int16_t, 512> bytes{};
    bytes.fill(-1);
    for (size_t byte = 0; byte < 256; ++byte) {
      size_t at = 0;
      bytes[static_cast<size_t>(next_code(byte_level_characters()[byte], at))] =
          static_cast<int16_t>(byte);
    }
    return bytes;
  }();
  return code >= 0 && code < 512 ? kBytes[static_cast<size_t>(code)] : -1;
}

} // namespace hasten::detail
