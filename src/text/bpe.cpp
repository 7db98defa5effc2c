// Byte-pair encoding.
//
// Note [Merging pairs]
// A word starts as its characters. Of all neighbours that have a merge, those with the lowest rank
// become one symbol, the leftmost first, until no neighbours have one. The symbols are a linked
// list in the order of the text. The queue has rank and position of each pair; a pair that has
// changed since it was queued has another rank, and is dropped. So a word of n characters takes
// O(n log n) steps.
#include <algorithm>
#include <functional>

#include "token_model.h"
#include "unicode_text.h"

namespace hasten::detail {

class BpeModel final : public TokenModel {
 public:
  BpeModel(const TokenizerPart& part, bool bytes)
      : TokenModel(read_vocab(part["vocab"])),
        bytes_(bytes),
        unk_(required_id(part["unk_token"])),
        fuse_unk_(part["fuse_unk"].flag(false)),
        ignore_merges_(part["ignore_merges"].flag(false)),
        prefix_(part["continuing_subword_prefix"].text(std::string())),
        suffix_(part["end_of_word_suffix"].text(std::string())) {
    if (const auto dropout = part["dropout"]; !dropout.is_null() && dropout.number() != 0) {
      dropout.fail_value("null: equal texts must give equal ids");
    }
    fallback_.fill(-1);
    if (part["byte_fallback"].flag(false)) {
      fallback_ = fallback_ids();
    }
    for (size_t byte = 0; byte < 256; ++byte) {
      byte_ids_[byte] = id(byte_level_characters()[byte]);
    }
    read_merges(part["merges"]);
  }

 private:
  void read_merges(const TokenizerPart& part) {
    if (!part.json().is_array()) {
      part.fail_value("an array of merges");
    }
    uint64_t rank = 0;
    for (const auto& merge : part.json()) {
      std::string left;
      std::string right;
      if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
        left = merge[0].get<std::string>();
        right = merge[1].get<std::string>();
      } else if (merge.is_string()) {
        const auto text = merge.get<std::string>();
        const size_t space = text.find(' ');
        left = text.substr(0, space);
        right = space == text.npos ? "" : text.substr(space + 1);
      }
      const int32_t first = id(left);
      const int32_t second = id(right);
      const int32_t joined =
          right.size() < prefix_.size() ? -1 : id(left + right.substr(prefix_.size()));
      if (first < 0 || second < 0 || joined < 0) {
        part.fail("the merge number " + std::to_string(rank) + " is " +
                      merge.dump(-1, ' ', true).substr(0, 80),
                  "two pieces of the vocabulary that make a third one together");
      }
      merges_.emplace(pair(first, second), 0) = rank << 32 | static_cast<uint32_t>(joined);
      ++rank;
    }
  }

  static uint64_t pair(int32_t left, int32_t right) {
    return static_cast<uint64_t>(left) << 32 | static_cast<uint32_t>(right);
  }

  void split_word(std::string_view word, TokenScratch& scratch,
                  std::vector<WordToken>& out) const override {
    if (ignore_merges_) {
      if (const int32_t whole = whole_word(word, scratch.text); whole >= 0) {
        out.push_back({whole, 0, static_cast<uint32_t>(word.size())});
        return;
      }
    }
    scratch.symbols.clear();
    add_symbols(word, scratch);
    merge_symbols(scratch);
    for (int32_t at = scratch.symbols.empty() ? -1 : 0; at >= 0;) {
      const auto& symbol = scratch.symbols[static_cast<size_t>(at)];
      out.push_back({symbol.id, symbol.begin, symbol.end});
      at = symbol.after;
    }
  }

  int32_t whole_word(std::string_view word, std::string& text) const {
    if (!bytes_) {
      return id(word);
    }
    text.clear();
    for (const char byte : word) {
      text += byte_level_characters()[static_cast<unsigned char>(byte)];
    }
    return id(text);
  }

  static void add(TokenScratch& scratch, int32_t id, size_t begin, size_t end) {
    const auto at = static_cast<int32_t>(scratch.symbols.size());
    if (at > 0) {
      scratch.symbols.back().after = at;
    }
    scratch.symbols.push_back(
        {id, at - 1, -1, static_cast<uint32_t>(begin), static_cast<uint32_t>(end)});
  }

  void add_symbols(std::string_view word, TokenScratch& scratch) const {
    bool after_unk = false;
    for (size_t at = 0; at < word.size();) {
      const size_t begin = at;
      if (bytes_) {
        ++at;
      } else {
        next_code(word, at);
      }
      const auto character = word.substr(begin, at - begin);
      int32_t found = -1;
      if (bytes_ && prefix_.empty() && suffix_.empty()) {
        found = byte_ids_[static_cast<unsigned char>(character[0])];
      } else {
        scratch.text.assign(begin > 0 ? prefix_ : std::string());
        scratch.text += bytes_ ? byte_level_characters()[static_cast<unsigned char>(character[0])]
                               : std::string(character);
        scratch.text += at == word.size() ? suffix_ : std::string();
        found = id(scratch.text);
        if (found < 0 && add_bytes(scratch.text, begin, scratch)) {
          after_unk = false;
          continue;
        }
      }
      if (found < 0 && after_unk && fuse_unk_) {
        scratch.symbols.back().end = static_cast<uint32_t>(at);
      } else if (found >= 0 || unk_ >= 0) {
        add(scratch, found >= 0 ? found : unk_, begin, at);
      }
      after_unk = found < 0 && unk_ >= 0;
    }
  }

  // The character as tokens of its bytes, if the vocabulary has them all.
  bool add_bytes(std::string_view character, size_t begin, TokenScratch& scratch) const {
    const auto token = [this](char byte) { return fallback_[static_cast<unsigned char>(byte)]; };
    if (!std::ranges::all_of(character, [&](char byte) { return token(byte) >= 0; })) {
      return false;
    }
    for (size_t i = 0; i < character.size(); ++i) {
      add(scratch, token(character[i]), begin + i, begin + i + 1);
    }
    return true;
  }

  // See Note [Merging pairs].
  void merge_symbols(TokenScratch& scratch) const {
    auto& symbols = scratch.symbols;
    auto& queue = scratch.queue;
    queue.clear();
    const auto merge_at = [&](int32_t at) -> const uint64_t* {
      const auto& left = symbols[static_cast<size_t>(at)];
      return left.after < 0
                 ? nullptr
                 : merges_.find(pair(left.id, symbols[static_cast<size_t>(left.after)].id));
    };
    const auto entry = [](uint64_t merge, int32_t at) {
      return (merge & ~uint64_t{0xFFFFFFFF}) | static_cast<uint32_t>(at);
    };
    for (int32_t at = 0; at + 1 < std::ssize(symbols); ++at) {
      if (const uint64_t* merge = merge_at(at)) {
        queue.push_back(entry(*merge, at));
      }
    }
    std::ranges::make_heap(queue, std::greater<>());
    while (!queue.empty()) {
      const uint64_t top = queue.front();
      std::ranges::pop_heap(queue, std::greater<>());
      queue.pop_back();
      const auto at = static_cast<int32_t>(top & 0xFFFFFFFF);
      auto& left = symbols[static_cast<size_t>(at)];
      const uint64_t* merge = left.id < 0 ? nullptr : merge_at(at);
      if (merge == nullptr || *merge >> 32 != top >> 32) {
        continue;
      }
      auto& right = symbols[static_cast<size_t>(left.after)];
      left.id = static_cast<int32_t>(*merge & 0xFFFFFFFF);
      left.end = right.end;
      left.after = right.after;
      right.id = -1; // gone
      if (left.after >= 0) {
        symbols[static_cast<size_t>(left.after)].before = at;
      }
      for (const int32_t changed : {left.before, at}) {
        if (const uint64_t* next = changed < 0 ? nullptr : merge_at(changed)) {
          queue.push_back(entry(*next, changed));
          std::ranges::push_heap(queue, std::greater<>());
        }
      }
    }
  }

  bool bytes_;
  int32_t unk_; // -1: characters without a token are dropped
  bool fuse_unk_;
  bool ignore_merges_;
  std::string prefix_;
  std::string suffix_;
  std::array<int32_t, 256> byte_ids_{}; // [byte] of the character that stands for it, or -1
  std::array<int32_t, 256> fallback_{};
  NumberMap merges_{}; // pair() to the rank, and in the lower half the id that they make
};

std::unique_ptr<const TokenModel> read_bpe(const TokenizerPart& part, bool bytes) {
  return std::make_unique<BpeModel>(part, bytes);
}

} // namespace hasten::detail
