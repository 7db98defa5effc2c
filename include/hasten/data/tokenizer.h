// BERT's WordPiece tokenizer, cased and uncased, with the ids that Hugging Face's
// BertTokenizerFast gives.
//
// Order of work: special tokens are cut out of the raw text; the rest is cleaned
// (control characters out, white space to spaces), CJK ideographs are set apart,
// accents are stripped (NFD without nonspacing marks), letters are lower-cased one
// by one; words are split at white space and at every punctuation character; each
// word is the longest piece of the vocabulary, then the longest "##" piece, and so
// on; a word with a part that no piece fits, or longer than 100 characters, is
// [UNK]. Character classes are those of utf8proc; where Hugging Face's tables are
// older, ids can differ for characters that Unicode took in after 2015.
//
// Threading: const functions may be called from several threads.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace hasten {

/// Field names are those of tokenizer_config.json.
struct WordPieceOptions {
  bool do_lower_case = true;
  /// Not set: as do_lower_case.
  std::optional<bool> strip_accents{};
  bool tokenize_chinese_chars = true;
  /// Longest sequence the model takes, special tokens counted; 0: not known.
  int64_t model_max_length = 0;
  std::string unk_token = "[UNK]";
  std::string sep_token = "[SEP]";
  std::string pad_token = "[PAD]";
  std::string cls_token = "[CLS]";
  std::string mask_token = "[MASK]";
};

/// A further token that is cut out of the raw text before anything else.
struct AddedToken {
  std::string content{};
  int64_t id = 0;
  bool special = true;
};

/// One text as ids.
struct Encoding {
  std::vector<int64_t> ids{}; // [CLS] pieces [SEP]
  bool truncated = false; // whether max_length cut pieces off
};

class WordPieceTokenizer {
 public:
  /// `vocab`: pieces by id; of two equal ones the later counts.
  /// Throws InputError: a special token (but mask_token) that the vocabulary
  ///   lacks.
  WordPieceTokenizer(std::vector<std::string> vocab, WordPieceOptions options,
                     std::vector<AddedToken> added_tokens = {});

  /// From a Hugging Face folder: vocab.txt, or else the WordPiece model of
  /// tokenizer.json; options from tokenizer_config.json, else from the
  /// normalizer of tokenizer.json, else the defaults.
  /// Throws InputError: no vocabulary, one of another kind, without its special
  ///   tokens, or JSON that cannot be read; each names the file.
  static WordPieceTokenizer load(const std::filesystem::path& folder);

  /// Writes vocab.txt, tokenizer_config.json and tokenizer.json, from which
  /// load() and transformers' AutoTokenizer give the same ids.
  /// Throws Error naming the path (a full disk).
  void save(const std::filesystem::path& folder) const;

  /// [CLS], the text's pieces, [SEP]: at most max_length ids, both special
  /// tokens counted; 0 is no limit. About 15 MB of text a second on one core.
  /// Throws InputError: invalid UTF-8 (names the byte), max_length of 1.
  Encoding encode(std::string_view text, int64_t max_length = 0) const;

  /// The pieces as text, without special tokens around them.
  std::vector<std::string> tokenize(std::string_view text) const;

  /// Pieces of the vocabulary; added tokens beyond it are not counted.
  int64_t vocab_size() const;
  /// Pieces by id.
  const std::vector<std::string>& vocab() const;
  /// Special and other added tokens, the longest first.
  const std::vector<AddedToken>& added_tokens() const;
  /// Piece or added token of an id. Throws InputError for another number.
  const std::string& token(int64_t id) const;
  /// Id of a piece; -1 where the vocabulary lacks it.
  int64_t id(std::string_view token) const;
  int64_t unk_id() const;
  int64_t cls_id() const;
  int64_t sep_id() const;
  int64_t pad_id() const;
  const WordPieceOptions& options() const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_; // immutable, so copies share it
};

struct WordPieceVocabOptions {
  /// Pieces at most, the five special tokens counted. Fewer where the texts do
  /// not hold as many pairs that occur `min_frequency` times.
  int64_t vocab_size = 30522;
  /// A pair of pieces that occurs less often is not joined.
  int64_t min_frequency = 2;
  /// Characters kept, the most frequent ones; words with others become [UNK].
  int64_t limit_alphabet = 1000;
};

/// Learns a vocabulary from texts that come one by one: [PAD] [UNK] [CLS] [SEP]
/// [MASK], the characters (at the start of a word, and with "##" inside one), then
/// pieces joined pair by pair, the most frequent pair first, as Hugging Face's
/// WordPieceTrainer does.
/// Deterministic: equal texts in any order give equal vocabularies.
/// Threading: one thread. Memory: the distinct words, not the texts.
class WordPieceLearner {
 public:
  /// Of `options` those count that say what a word is, and the special tokens.
  explicit WordPieceLearner(WordPieceOptions options);
  ~WordPieceLearner();
  WordPieceLearner(WordPieceLearner&&) noexcept;

  /// Counts the text's words. Throws InputError naming the text's number for
  /// invalid UTF-8.
  void add(std::string_view text);
  /// The vocabulary, [id]. Cost: about a second for 100,000 distinct words.
  /// Throws InputError: no word was seen, vocab_size too small for the
  ///   characters, min_frequency or limit_alphabet below 1.
  std::vector<std::string> learn(const WordPieceVocabOptions& vocab_options = {}) const;

  int64_t texts() const; // added so far
  int64_t words() const; // of them, distinct

 private:
  struct Counts;
  WordPieceOptions options_;
  std::unique_ptr<Counts> counts_;
};

} // namespace hasten
