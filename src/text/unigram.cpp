// The unigram model: of all ways to write a word by pieces, the one with the highest sum of scores.
#include <algorithm>
#include <cstdint>

#include "hasten/base/error.h"
#include "token_model.h"
#include "unicode_text.h"

namespace hasten::detail {

constexpr double kUnknownPenalty = 10; // below the lowest score

struct ScoredPieces {
  std::vector<std::string> pieces{};
  std::vector<double> scores{}; // [id]
};

ScoredPieces read_scored_pieces(const TokenizerPart& part) {
  ScoredPieces read;
  for (const auto& entry : part.json().is_array() ? part.json() : nlohmann::json::array()) {
    if (!entry.is_array() || entry.size() != 2 || !entry[0].is_string() || !entry[1].is_number()) {
      part.fail("the entry number " + std::to_string(read.pieces.size()) + " is " +
                    entry.dump(-1, ' ', true).substr(0, 80),
                "a piece and its score");
    }
    read.pieces.push_back(entry[0].get<std::string>());
    read.scores.push_back(entry[1].get<double>());
  }
  if (read.pieces.empty()) {
    part.fail_value("an array of pieces with their scores");
  }
  return read;
}

class UnigramModel final : public TokenModel {
 public:
  UnigramModel(const TokenizerPart& part, ScoredPieces read)
      : TokenModel(std::move(read.pieces)),
        scores_(std::move(read.scores)),
        unk_(static_cast<int32_t>(
            std::min<int64_t>(part["unk_id"].integer(int64_t{-1}), INT32_MAX))) {
    if (unk_ >= std::ssize(pieces())) {
      part["unk_id"].fail_value("an id of the vocabulary of pieces=" +
                                std::to_string(pieces().size()));
    }
    fallback_.fill(-1);
    if (part["byte_fallback"].flag(false)) {
      fallback_ = fallback_ids();
    }
    for (size_t id = 0; id < pieces().size(); ++id) {
      if (!pieces()[id].empty()) {
        trie_.insert(pieces()[id], static_cast<int32_t>(id));
      }
    }
    unknown_score_ = *std::ranges::min_element(scores_) - kUnknownPenalty;
  }

 private:
  void split_word(std::string_view word, TokenScratch& scratch,
                  std::vector<WordToken>& out) const override {
    find_paths(word, scratch.paths);
    const size_t before = out.size();
    bool unknown = false; // the last token of `out` may grow to the left
    for (auto end = static_cast<uint32_t>(word.size()); end > 0;) {
      const auto& node = scratch.paths[end];
      if (node.id == unk_ && unknown) {
        out.back().begin = node.begin;
      } else {
        out.push_back({node.id, node.begin, end});
      }
      unknown = node.id == unk_;
      end = node.begin;
    }
    std::reverse(out.begin() + static_cast<ptrdiff_t>(before), out.end());
    replace_unknown(word, before, out);
  }

  void find_paths(std::string_view word, std::vector<TokenScratch::Best>& paths) const {
    paths.assign(word.size() + 1, {});
    for (size_t at = 0; at < word.size();) {
      const double score = paths[at].score;
      size_t next = at;
      next_code(word, next);
      bool single = false; // a piece is this one character
      const auto reach = [&](size_t end, int32_t id, double with) {
        auto& best = paths[end];
        if (best.begin == UINT32_MAX || with > best.score) {
          best = {with, id, static_cast<uint32_t>(at)};
        }
      };
      trie_.each_prefix(word.substr(at), [&](int32_t id, size_t bytes) {
        reach(at + bytes, id, scores_[static_cast<size_t>(id)] + score);
        single = single || at + bytes == next;
      });
      if (!single) {
        reach(next, unk_, unknown_score_ + score);
      }
      at = next;
    }
  }

  // Joined unknown characters may be a piece, and otherwise become tokens of their bytes.
  void replace_unknown(std::string_view word, size_t first, std::vector<WordToken>& out) const {
    for (size_t i = first; i < out.size(); ++i) {
      const WordToken token = out[i];
      if (token.id != unk_) {
        continue;
      }
      const auto text = word.substr(token.begin, token.end - token.begin);
      if (const int32_t whole = id(text); whole >= 0) {
        out[i].id = whole;
        continue;
      }
      std::vector<WordToken> bytes;
      for (const char byte : text) {
        bytes.push_back({fallback_[static_cast<unsigned char>(byte)], token.begin, token.end});
      }
      if (std::ranges::all_of(bytes, [](const WordToken& one) { return one.id >= 0; })) {
        const auto place = out.erase(out.begin() + static_cast<ptrdiff_t>(i));
        out.insert(place, bytes.begin(), bytes.end());
        i += bytes.size() - 1;
      } else if (unk_ < 0) {
        throw InputError(
            "text::Tokenizer",
            "the vocabulary has neither the character of \"" + std::string(text) + "\" nor unk_id",
            "a text of the vocabulary's characters", "use a vocabulary with unk_id");
      }
    }
  }

  std::vector<double> scores_; // [id]
  int32_t unk_; // -1: none
  double unknown_score_ = 0;
  std::array<int32_t, 256> fallback_{};
  ByteTrie trie_{};
};

std::unique_ptr<const TokenModel> read_unigram(const TokenizerPart& part) {
  return std::make_unique<UnigramModel>(part, read_scored_pieces(part["vocab"]));
}

} // namespace hasten::detail
