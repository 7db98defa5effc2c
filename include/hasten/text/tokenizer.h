// Tokenizers in Hugging Face's files. They give the same ids as Python's tokenizers and transformers.
//
// AutoTokenizer::from_pretrained() reads a folder. tokenizer.json describes a tokenizer as parts: a
// normalizer, a pre-tokenizer, a model (WordPiece, BPE or Unigram), a post-processor and a decoder.
// hasten has the parts that BERT, DistilBERT, RoBERTa, XLM-RoBERTa, ModernBERT, GPT-2, Llama 2 and
// 3, Mistral, Qwen2 and Qwen3 use. A part that it does not have is an error with the part's name.
//
// encode() finds added tokens, such as [MASK], in the text first. It normalizes the rest, splits it
// into words, and replaces each word by tokens of the model. Then it truncates and adds the special
// tokens. Texts are UTF-8; replace_invalid_utf8() in utf8.h repairs others. Character classes are
// those of utf8proc and Oniguruma. Hugging Face's tables are older or newer, so ids can differ for
// characters that Unicode added after 2015.
//
// Threading: const functions may be called from several threads. Each thread that encodes at the
// same time has a table of the last words, usually of 3 MB and at most of 30.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace hasten {

/// A token that is found in the text before all other steps.
struct AddedToken {
  std::string content{};
  int64_t id = 0;
  /// decode() can leave it out.
  bool special = true;
  /// Not inside a word.
  bool single_word = false;
  /// Takes the white space before it, and after it.
  bool lstrip = false;
  bool rstrip = false;
  /// It is normalized, and found in the normalized text.
  bool normalized = false;
};

enum class TruncationStrategy { longest_first, only_first, only_second, do_not_truncate };
enum class TokenSide { right, left };

struct EncodeOptions {
  /// Most ids, with special tokens; 0 is no limit.
  int64_t max_length = 0;
  TruncationStrategy truncation = TruncationStrategy::longest_first;
  /// The end at which truncation removes tokens. If not set, the tokenizer's truncation_side().
  std::optional<TokenSide> truncation_side{};
  bool add_special_tokens = true;
  bool return_offsets_mapping = false;
  bool return_word_ids = false;
};

/// The tokens of one text or of a pair; vectors of equal length.
struct Encoding {
  std::vector<int64_t> ids{};
  std::vector<int64_t> token_type_ids{};
  std::vector<int64_t> attention_mask{};
  std::vector<int64_t> special_tokens_mask{}; // 1 for tokens that the post-processor added
  /// First byte of each token in its text and the byte after its last; (0, 0) for tokens that are
  /// not from a text. Python counts characters, not bytes. Empty without return_offsets_mapping.
  std::vector<std::pair<int64_t, int64_t>> offset_mapping{};
  /// Index of each token's word in its text; -1 for tokens that the post-processor added (Python's
  /// None). The words of encode() are those that the pre-tokenizer makes, and added tokens. Empty
  /// without return_word_ids.
  std::vector<int64_t> word_ids{};
  bool truncated = false; // max_length removed tokens
};

struct DecodeOptions {
  bool skip_special_tokens = false;
  /// Removes spaces before punctuation and contractions. If not set, the value of
  /// tokenizer_config.json, or else false. BPE ignores it, as transformers does.
  std::optional<bool> clean_up_tokenization_spaces{};
};

struct PaddingOptions {
  /// Token id that fills samples up to the longest of the batch.
  int64_t pad_id = 0;
  /// Rounds the batch's length up to a multiple of this. 1 does not round.
  int64_t pad_to_multiple_of = 1;
  /// Pads every batch to this length instead. 0 pads to the batch's longest sample.
  int64_t pad_to_length = 0;
  TokenSide padding_side = TokenSide::right;
};

namespace detail {
struct TokenizerFiles;
} // namespace detail

/// Copies share their data, which does not change. Make one with AutoTokenizer.
class Tokenizer {
 public:
  /// The ids of a text, or of a pair. Time: about as the length; 3 to 15 MB per second on one core.
  /// Throws InputError for invalid UTF-8 (the message has the byte), for a max_length that is less
  /// than the number of special tokens, for a text of 2 GB, and if a strategy cannot reach max_length.
  Encoding encode(std::string_view text, const EncodeOptions& options = {}) const;
  Encoding encode(std::string_view text, std::string_view text_pair,
                  const EncodeOptions& options = {}) const;
  /// The ids of a text that is given as words: Python's is_split_into_words=True. Each word is
  /// normalized and split by itself. word_ids are indices of `words`, and offsets are in the word. A
  /// word may have several tokens, or none: an empty one, or one of control characters. For
  /// byte-level BPE each word has the tokens that it has after a space, as with Python's
  /// add_prefix_space=True. Throws as encode() does.
  Encoding encode_words(std::span<const std::string> words,
                        const EncodeOptions& options = {}) const;
  /// The text's tokens, without special tokens.
  std::vector<std::string> tokenize(std::string_view text) const;
  /// The text of `ids`. Bytes that are not UTF-8 become U+FFFD. Throws InputError for an unknown id.
  std::string decode(const std::vector<int64_t>& ids, const DecodeOptions& options = {}) const;
  /// Makes all encodings equally long. Throws InputError if one is longer than pad_to_length, or
  /// pad_id is negative.
  static void pad(std::vector<Encoding>& encodings, const PaddingOptions& options);

  /// Pad token and side for pad() and TokenizedDataset. pad_id is -1 without a pad token.
  PaddingOptions padding() const;
  TokenSide truncation_side() const;
  /// Longest sequence that the model accepts, with special tokens; 0: unknown.
  int64_t model_max_length() const;
  /// WordPiece, BPE or Unigram.
  const std::string& model_type() const;

  /// One more than the largest id of the model's vocabulary, without added tokens beyond it.
  int64_t vocab_size() const;
  /// One more than the largest id.
  int64_t size() const;
  /// Pieces of the model by id; "" for an id without a piece.
  const std::vector<std::string>& vocab() const;
  /// Special tokens and other added tokens, by id.
  const std::vector<AddedToken>& added_tokens() const;
  /// Piece or added token with this id. Throws InputError if there is none.
  const std::string& token(int64_t id) const;
  /// Id of a piece or added token, or -1.
  int64_t id(std::string_view token) const;
  /// Id of "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token" or
  /// "mask_token", or -1 if the tokenizer has none.
  int64_t special_id(const std::string& name) const;
  int64_t unk_id() const { return special_id("unk_token"); }
  int64_t cls_id() const { return special_id("cls_token"); }
  int64_t sep_id() const { return special_id("sep_token"); }
  int64_t pad_id() const { return special_id("pad_token"); }

  /// Hash of everything that determines the ids; 32 hex digits.
  const std::string& hash() const;
  /// Writes tokenizer.json, tokenizer_config.json and, for WordPiece, vocab.txt. Copies
  /// special_tokens_map.json, added_tokens.json and chat_template.jinja if it was read from a
  /// folder that had them. from_pretrained() and transformers' AutoTokenizer read them and give the
  /// same ids. Throws Error with the path (for example if the disk is full).
  void save_pretrained(const std::filesystem::path& folder) const;

 protected:
  /// Reads the content of the files. Throws InputError.
  explicit Tokenizer(const detail::TokenizerFiles& files);

 private:
  friend class AutoTokenizer;
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

class AutoTokenizer {
 public:
  /// Loads a Hugging Face folder, or a repository in its cache by name (pretrained_folder):
  /// tokenizer.json, or else vocab.txt (WordPiece), or else vocab.json and merges.txt (GPT-2 or
  /// RoBERTa, as tokenizer_config.json or config.json say). Special tokens and lengths come from
  /// tokenizer_config.json, or if it has no added_tokens_decoder first from special_tokens_map.json and
  /// added_tokens.json. A class that tokenizer_config.json or config.json names (BertTokenizer,
  /// GPT2Tokenizer, …) takes of tokenizer.json only what it takes in transformers: the vocabulary, and not
  /// the parts that it makes from its own options, such as do_lower_case and add_prefix_space. Logs keys
  /// that transformers does not have either.
  /// Throws InputError with the file's name if there is no vocabulary, hasten lacks a part, special
  /// tokens are missing, or the JSON cannot be read. Time: up to a second for 250,000 pieces.
  /// Memory: about four times the files.
  static Tokenizer from_pretrained(const std::filesystem::path& folder);
};

/// How BERT cleans texts. Field names are those of tokenizer_config.json.
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

/// BERT's tokenizer of a vocabulary. It removes control characters, separates CJK ideographs,
/// strips accents and lower-cases. It splits the text at white space and at every punctuation
/// character, and replaces each word by the longest matching piece, then the longest matching "##"
/// piece, and so on. A word becomes [UNK] if no piece matches some part of it, or if it has more
/// than 100 characters.
class WordPieceTokenizer : public Tokenizer {
 public:
  /// `vocab` has the piece of each id. If a piece occurs twice, its later id is used. Throws
  /// InputError if the vocabulary lacks a special token other than mask_token.
  explicit WordPieceTokenizer(const std::vector<std::string>& vocab,
                              const WordPieceOptions& options = {},
                              const std::vector<AddedToken>& added_tokens = {});
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
