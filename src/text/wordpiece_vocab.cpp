// Learning a WordPiece vocabulary.
//
// Note [Joining pairs]
// Words are counted once, and each starts as its characters. The most frequent pair of neighbours
// over all words becomes a new piece in every word; then the next pair, and so on. A pair has its
// count and the words in which it was seen, so a join changes only these words. The queue may have
// old counts. They are corrected when they reach the top, because a count only decreases while its
// pair is queued, or the pair is queued again. Ties go to the pieces with the smaller ids.
// Characters get their ids in sorted order, so nothing depends on the order of the texts.
#include <algorithm>
#include <map>
#include <queue>
#include <set>
#include <unordered_map>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/text/bert_words.h"
#include "hasten/text/tokenizer.h"
#include "hasten/text/utf8.h"

namespace hasten {

namespace detail {

constexpr const char* kLearner = "data::WordPieceLearner";
constexpr int64_t kLongestLearnedWord = 100; // characters; longer are [UNK]

using WordCounts = std::vector<std::pair<std::string, int64_t>>;

// Bytes of the character that starts at `at`.
size_t character_bytes(std::string_view text, size_t at) {
  size_t end = at + 1;
  while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) {
    ++end;
  }
  return end - at;
}

// The most frequent characters.
std::set<std::string> learned_alphabet(const WordCounts& words, int64_t limit) {
  std::map<std::string, int64_t> counts;
  for (const auto& [word, count] : words) {
    for (size_t at = 0; at < word.size();) {
      const size_t bytes = character_bytes(word, at);
      counts[word.substr(at, bytes)] += count;
      at += bytes;
    }
  }
  std::set<std::pair<int64_t, std::string>> ranked; // the most frequent first
  for (const auto& [character, count] : counts) {
    ranked.emplace(-count, character);
  }
  std::set<std::string> alphabet;
  for (auto at = ranked.begin(); at != ranked.end() && std::ssize(alphabet) < limit; ++at) {
    alphabet.insert(at->second);
  }
  return alphabet;
}

// See Note [Joining pairs].
class PairJoiner {
 public:
  PairJoiner(std::vector<std::string> vocab, const WordCounts& words, int64_t min_frequency)
      : vocab_(std::move(vocab)), min_frequency_(min_frequency) {
    for (size_t id = 0; id < vocab_.size(); ++id) {
      ids_.emplace(vocab_[id], static_cast<int32_t>(id));
    }
    for (const auto& [word, count] : words) {
      add_word(word, count);
    }
    for (const auto& [pair, occurrences] : pairs_) {
      queue_.push({occurrences.count, pair});
    }
  }

  std::vector<std::string> join_until(size_t vocab_size) {
    while (vocab_.size() < vocab_size && !queue_.empty()) {
      const Candidate top = queue_.top();
      queue_.pop();
      auto& occurrences = pairs_[top.pair];
      if (occurrences.count < min_frequency_) {
        continue;
      }
      if (occurrences.count != top.count) {
        queue_.push({occurrences.count, top.pair});
        continue;
      }
      join(top.pair);
    }
    return std::move(vocab_);
  }

 private:
  // Left piece in the upper half, right piece in the lower.
  using Pair = uint64_t;
  struct Occurrences {
    int64_t count = 0;
    std::vector<int32_t> words{}; // may have a word twice, or a word that lost the pair
  };
  struct Candidate {
    int64_t count = 0;
    Pair pair = 0;
    bool operator<(const Candidate& other) const {
      return count < other.count || (count == other.count && pair > other.pair);
    }
  };
  struct Word {
    std::vector<int32_t> pieces{};
    int64_t count = 0;
  };

  static Pair pair_of(int32_t left, int32_t right) {
    return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
  }

  // Words with a character outside the alphabet become [UNK] and are not counted.
  void add_word(const std::string& text, int64_t count) {
    Word word{.count = count};
    for (size_t at = 0; at < text.size();) {
      const size_t bytes = character_bytes(text, at);
      const auto found = ids_.find((at == 0 ? "" : "##") + text.substr(at, bytes));
      if (found == ids_.end()) {
        return;
      }
      word.pieces.push_back(found->second);
      at += bytes;
    }
    const auto index = static_cast<int32_t>(words_.size());
    for (size_t i = 0; i + 1 < word.pieces.size(); ++i) {
      auto& seen = pairs_[pair_of(word.pieces[i], word.pieces[i + 1])];
      seen.count += count;
      seen.words.push_back(index);
    }
    words_.push_back(std::move(word));
  }

  void join(Pair pair) {
    const auto left = static_cast<int32_t>(pair >> 32);
    const auto right = static_cast<int32_t>(pair & 0xFFFFFFFFu);
    const std::string piece = vocab_[left] + vocab_[right].substr(2);
    const auto [entry, fresh] = ids_.emplace(piece, static_cast<int32_t>(vocab_.size()));
    if (fresh) {
      vocab_.push_back(piece);
    }
    const auto touched = std::move(pairs_[pair].words);
    pairs_[pair] = {};
    changed_.clear();
    for (const int32_t word : touched) {
      join_in_word(word, left, right, entry->second);
    }
    pairs_[pair].count = 0;
    std::ranges::sort(changed_);
    changed_.erase(std::unique(changed_.begin(), changed_.end()), changed_.end());
    for (const Pair grown : changed_) {
      queue_.push({pairs_[grown].count, grown});
    }
  }

  void join_in_word(int32_t index, int32_t left, int32_t right, int32_t joined) {
    Word& word = words_[index];
    auto& pieces = word.pieces;
    for (size_t i = 0; i + 1 < pieces.size(); ++i) {
      if (pieces[i] != left || pieces[i + 1] != right) {
        continue;
      }
      if (i > 0) {
        pairs_[pair_of(pieces[i - 1], left)].count -= word.count;
        grow(pair_of(pieces[i - 1], joined), index, word.count);
      }
      if (i + 2 < pieces.size()) {
        pairs_[pair_of(right, pieces[i + 2])].count -= word.count;
        grow(pair_of(joined, pieces[i + 2]), index, word.count);
      }
      pieces[i] = joined;
      pieces.erase(pieces.begin() + static_cast<ptrdiff_t>(i) + 1);
    }
  }

  void grow(Pair pair, int32_t word, int64_t count) {
    auto& seen = pairs_[pair];
    seen.count += count;
    seen.words.push_back(word);
    changed_.push_back(pair);
  }

  std::vector<std::string> vocab_;
  int64_t min_frequency_;
  std::unordered_map<std::string, int32_t> ids_{};
  std::vector<Word> words_{};
  std::unordered_map<Pair, Occurrences> pairs_{};
  std::priority_queue<Candidate> queue_{};
  std::vector<Pair> changed_{}; // pairs whose count the current join increased
};

} // namespace detail

struct WordPieceLearner::Counts {
  std::unordered_map<std::string, int64_t> counts{};
  int64_t texts = 0;
  detail::BertWords split{}; // working memory
  std::string word{};
};

WordPieceLearner::WordPieceLearner(WordPieceOptions options)
    : options_(std::move(options)), counts_(std::make_unique<Counts>()) {}

WordPieceLearner::~WordPieceLearner() = default;
WordPieceLearner::WordPieceLearner(WordPieceLearner&&) noexcept = default;

void WordPieceLearner::add(std::string_view text) {
  Counts& c = *counts_;
  if (const size_t bad = invalid_utf8_position(text); bad != std::string_view::npos) {
    throw InputError(detail::kLearner,
                     "text=" + std::to_string(c.texts) + " has invalid UTF-8: " +
                         byte_name(text[bad]) + " at position " + std::to_string(bad),
                     "UTF-8");
  }
  ++c.texts;
  detail::split_bert_words(text, options_, c.split);
  for (size_t i = 0; i < c.split.words.size(); ++i) {
    if (c.split.words[i].characters <= detail::kLongestLearnedWord) {
      c.word = c.split[i];
      ++c.counts[c.word];
    }
  }
}

int64_t WordPieceLearner::texts() const { return counts_->texts; }
int64_t WordPieceLearner::words() const { return static_cast<int64_t>(counts_->counts.size()); }

std::vector<std::string> WordPieceLearner::learn(const WordPieceVocabOptions& vocab_options) const {
  if (vocab_options.min_frequency < 1 || vocab_options.limit_alphabet < 1) {
    throw InputError(detail::kLearner,
                     "min_frequency=" + std::to_string(vocab_options.min_frequency) +
                         ", limit_alphabet=" + std::to_string(vocab_options.limit_alphabet),
                     "at least 1 each");
  }
  detail::WordCounts words(counts_->counts.begin(), counts_->counts.end());
  std::ranges::sort(words);
  if (words.empty()) {
    throw InputError(detail::kLearner, "texts=" + std::to_string(texts()) + " contain no word",
                     "texts to learn a vocabulary from");
  }
  std::vector<std::string> vocab{options_.pad_token, options_.unk_token, options_.cls_token,
                                 options_.sep_token, options_.mask_token};
  const auto alphabet = detail::learned_alphabet(words, vocab_options.limit_alphabet);
  const size_t least = vocab.size() + 2 * alphabet.size();
  if (vocab_options.vocab_size < static_cast<int64_t>(least)) {
    throw InputError(detail::kLearner, "vocab_size=" + std::to_string(vocab_options.vocab_size),
                     "at least " + std::to_string(least) + ": 5 special tokens and " +
                         std::to_string(alphabet.size()) + " characters in two forms",
                     "raise it, or lower limit_alphabet");
  }
  for (const char* prefix : {"", "##"}) {
    for (const auto& character : alphabet) {
      vocab.push_back(prefix + character);
    }
  }
  return detail::PairJoiner(std::move(vocab), words, vocab_options.min_frequency)
      .join_until(static_cast<size_t>(vocab_options.vocab_size));
}

} // namespace hasten
