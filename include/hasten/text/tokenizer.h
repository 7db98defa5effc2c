// BERT's WordPiece tokenizer, cased and uncased. It gives the same ids as Hugging Face's
// BertTokenizerFast.
//
// encode() finds special tokens in the raw text first. It cleans the rest: it removes control
// characters, turns white space into spaces and separates CJK ideographs. It strips accents (NFD
// without nonspacing marks) and lower-cases letters one by one. It splits the text into words at
// white space and at every punctuation character. It replaces each word by the longest matching
// piece of the vocabulary, then the longest matching "##" piece, and so on. A word becomes [UNK] if
// no piece matches some part of it, or if it has more than 100 characters. Character classes are
// those of utf8proc. Hugging Face's tables are older, so ids can differ for characters that Unicode
// added after 2015.
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
  /// If not set, the value of do_lower_case.
  std::optional<bool> strip_accents{};
  bool tokenize_chinese_chars = true;
  /// Longest sequence that the model accepts, with special tokens; 0: unknown.
  int64_t model_max_length = 0;
  std::string unk_token = "[UNK]";
  std::string sep_token = "[SEP]";
  std::string pad_token = "[PAD]";
  std::string cls_token = "[CLS]";
  std::string mask_token = "[MASK]";
};

/// An additional token that is found in the raw text before all other steps.
struct AddedToken {
  std::string content{};
  int64_t id = 0;
  bool special = true;
};

/// The ids of one text.
struct Encoding {
  std::vector<int64_t> ids{}; // [CLS] pieces [SEP]
  bool truncated = false; // max_length removed pieces
};

class WordPieceTokenizer {
 public:
  /// `vocab` has the piece of each id. If a piece occurs twice, its later id is used. Throws
  /// InputError if the vocabulary lacks a special token other than mask_token.
  WordPieceTokenizer(std::vector<std::string> vocab, WordPieceOptions options,
                     std::vector<AddedToken> added_tokens = {});

  /// Loads a Hugging Face folder. The vocabulary comes from vocab.txt, or else from the WordPiece
  /// model of tokenizer.json. Options come from tokenizer_config.json, or else from the normalizer
  /// of tokenizer.json, or else are the defaults.
  /// Throws InputError with the file's name if there is no vocabulary, it is not WordPiece, it
  /// lacks special tokens, or the JSON cannot be read.
  static WordPieceTokenizer load(const std::filesystem::path& folder);

  /// Writes vocab.txt, tokenizer_config.json and tokenizer.json. load() and transformers'
  /// AutoTokenizer read them and give the same ids. Throws Error with the path (for example if the
  /// disk is full).
  void save(const std::filesystem::path& folder) const;

  /// Returns [CLS], the text's pieces and [SEP]: at most max_length ids, including both special
  /// tokens; 0 is no limit. About 15 MB of text per second on one core.
  /// Throws InputError for invalid UTF-8 (the message has the byte) and for a max_length of 1.
  Encoding encode(std::string_view text, int64_t max_length = 0) const;

  /// The text's pieces, without [CLS] and [SEP].
  std::vector<std::string> tokenize(std::string_view text) const;

  /// The text of `ids` without special tokens: pieces with spaces between them, "##" pieces joined to
  /// the piece before. Throws InputError for an unknown id.
  std::string decode(const std::vector<int64_t>& ids) const;

  /// Number of pieces in the vocabulary, without added tokens beyond it.
  int64_t vocab_size() const;
  /// Pieces by id.
  const std::vector<std::string>& vocab() const;
  /// Special tokens and other added tokens, the longest first.
  const std::vector<AddedToken>& added_tokens() const;
  /// Piece or added token with this id. Throws InputError if there is none.
  const std::string& token(int64_t id) const;
  /// Id of a piece, or -1 if the vocabulary lacks it.
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
  /// Largest size of the vocabulary, including the five special tokens. It is smaller if too few
  /// pairs occur `min_frequency` times.
  int64_t vocab_size = 30522;
  /// Pairs of pieces that occur less often are not merged.
  int64_t min_frequency = 2;
  /// Keeps the most frequent characters, at most this many. Words with others become [UNK].
  int64_t limit_alphabet = 1000;
};

/// Learns a vocabulary from texts that are added one by one. The vocabulary has [PAD] [UNK] [CLS]
/// [SEP] [MASK], then the characters (at the start of a word, and with "##" inside one), then
/// pieces that are merged pair by pair, the most frequent pair first, as in Hugging Face's
/// WordPieceTrainer.
/// Deterministic: the vocabulary does not depend on the order of the texts.
/// Threading: one thread. Memory: the distinct words, not the texts.
class WordPieceLearner {
 public:
  /// Uses those of `options` that define words, and the special tokens.
  explicit WordPieceLearner(WordPieceOptions options);
  ~WordPieceLearner();
  WordPieceLearner(WordPieceLearner&&) noexcept;

  /// Counts the text's words. Throws InputError with the text's number for invalid UTF-8.
  void add(std::string_view text);
  /// Returns the vocabulary, [id]. Cost: about a second for 100,000 distinct words.
  /// Throws InputError if no word was added, vocab_size is too small for the characters, or
  /// min_frequency or limit_alphabet is below 1.
  std::vector<std::string> learn(const WordPieceVocabOptions& vocab_options = {}) const;

  int64_t texts() const; // texts added so far
  int64_t words() const; // distinct words in them

 private:
  struct Counts;
  WordPieceOptions options_;
  std::unique_ptr<Counts> counts_;
};

} // namespace hasten
