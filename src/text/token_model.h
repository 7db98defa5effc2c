// The models of a tokenizer: what makes tokens of one word. WordPiece, BPE and Unigram.
// Threading: const functions may be called from several threads, each with its own TokenScratch.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "byte_trie.h"
#include "tokenizer_part.h"

namespace hasten::detail {

/// A token: its id and the bytes [begin, end) of the word.
struct WordToken {
  int32_t id = 0;
  uint32_t begin = 0;
  uint32_t end = 0;
};

/// Working memory of one thread and the tokens of words that it has met. Its size is limited: a new
/// word takes the place of one with the same place in the table.
class TokenScratch {
 public:
  static constexpr size_t kPlaces = size_t{1} << 14;
  static constexpr size_t kLongest = 128; // bytes of a word that is kept

  struct Word {
    std::string text{};
    std::vector<WordToken> tokens{};
  };
  Word& place(std::string_view word);

  struct Symbol {
    int32_t id = 0;
    int32_t before = -1;
    int32_t after = -1;
    uint32_t begin = 0;
    uint32_t end = 0;
  };
  struct Best {
    double score = 0;
    int32_t id = 0;
    uint32_t begin = UINT32_MAX; // not reached
  };
  std::vector<Symbol> symbols{}; // of BPE
  std::vector<uint64_t> queue{}; // of BPE
  std::vector<Best> paths{}; // of Unigram
  std::string text{};

 private:
  std::vector<Word> words_{};
};

class TokenModel {
 public:
  /// Reads the part "model" of a tokenizer.json. Throws InputError. `bytes`: the words are given as
  /// they are, although the vocabulary writes bytes as ByteLevel does. Only BPE can do this.
  static std::unique_ptr<const TokenModel> read(const TokenizerPart& part, bool bytes);
  virtual ~TokenModel() = default;

  /// Appends the tokens of a word that is not empty.
  void tokenize(std::string_view word, TokenScratch& scratch, std::vector<WordToken>& out) const;
  /// Pieces by id; "" for an id that no piece has.
  const std::vector<std::string>& pieces() const { return pieces_; }
  /// Id of the piece, or -1.
  int32_t id(std::string_view piece) const;

 protected:
  explicit TokenModel(std::vector<std::string> pieces);
  virtual void split_word(std::string_view word, TokenScratch& scratch,
                          std::vector<WordToken>& out) const = 0;
  /// Ids of the tokens <0x00> to <0xFF>, or -1.
  std::array<int32_t, 256> fallback_ids() const;
  /// Id of the piece, or -1 if the name is empty. Throws InputError if there is no such piece.
  int32_t required_id(const TokenizerPart& part) const;

 private:
  std::vector<std::string> pieces_;
  std::unordered_map<std::string_view, int32_t> ids_{}; // views into pieces_
};

/// WordPiece for the tokenizer's short way: no offsets, and words that bert_words.h has split.
class WordPieceModel final : public TokenModel {
 public:
  explicit WordPieceModel(const TokenizerPart& part);
  /// Appends the ids of a word with this many characters.
  void append(std::string_view word, int64_t characters, std::vector<WordToken>& out) const;

 private:
  void split_word(std::string_view word, TokenScratch& scratch,
                  std::vector<WordToken>& out) const override;

  int32_t unk_ = 0;
  int64_t longest_word_ = 100; // characters
  ByteTrie trie_{};
  int32_t inside_ = 0; // node of the pieces that continue a word
};

std::unique_ptr<const TokenModel> read_bpe(const TokenizerPart& part, bool bytes);
std::unique_ptr<const TokenModel> read_unigram(const TokenizerPart& part);

/// Pieces by id of {"piece": id, …}.
std::vector<std::string> read_vocab(const TokenizerPart& part);

/// The character by which ByteLevel writes a byte, in UTF-8.
const std::array<std::string, 256>& byte_level_characters();
/// The byte that the character stands for, or -1.
int byte_of_character(int32_t code);

} // namespace hasten::detail
