#include "hasten/text/tokenizer.h"

#include <c10/util/flat_hash_map.h>

#include <algorithm>
#include <array>
#include <set>
#include <unordered_map>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/text/bert_words.h"
#include "hasten/text/utf8.h"

namespace hasten {

namespace detail {

constexpr int64_t kMaxWordCharacters = 100;
constexpr const char* kTokenizer = "data::WordPieceTokenizer";

// The pieces as a trie over bytes. One walk over a word finds the longest piece at a position.
class PieceTrie {
 public:
  static constexpr int32_t kStart = 0; // pieces that start a word
  static constexpr int32_t kInside = 1; // pieces with "##", stored without it

  explicit PieceTrie(const std::vector<std::string>& vocab) {
    for (size_t id = 0; id < vocab.size(); ++id) {
      const std::string_view piece = vocab[id];
      const bool inside = piece.size() > 2 && piece.starts_with("##");
      insert(inside ? kInside : kStart, inside ? piece.substr(2) : piece, static_cast<int32_t>(id));
    }
  }

  // Id and bytes of the longest piece that `text` starts with; id -1 if there is none.
  std::pair<int32_t, size_t> longest(std::string_view text, int32_t node) const {
    std::pair<int32_t, size_t> best{-1, 0};
    for (size_t i = 0; i < text.size(); ++i) {
      const auto edge = edges_.find(key(node, text[i]));
      if (edge == edges_.end()) {
        break;
      }
      node = edge->second;
      if (piece_[node] >= 0) {
        best = {piece_[node], i + 1};
      }
    }
    return best;
  }

 private:
  static uint64_t key(int32_t node, char byte) {
    return static_cast<uint64_t>(node) << 8 | static_cast<unsigned char>(byte);
  }

  void insert(int32_t node, std::string_view piece, int32_t id) {
    for (const char byte : piece) {
      const auto [edge, fresh] =
          edges_.emplace(key(node, byte), static_cast<int32_t>(piece_.size()));
      if (fresh) {
        piece_.push_back(-1);
      }
      node = edge->second;
    }
    piece_[node] = id; // if a piece occurs twice, the later id wins
  }

  ska::flat_hash_map<uint64_t, int32_t> edges_{}; // key() to the next node
  std::vector<int32_t> piece_{-1, -1}; // [node] id of the piece that ends there, or -1
};

} // namespace detail

struct WordPieceTokenizer::Impl {
  std::vector<std::string> vocab;
  WordPieceOptions options;
  std::vector<AddedToken> added; // the longest first
  std::unordered_map<std::string_view, int64_t> ids; // views into vocab, added
  detail::PieceTrie trie;
  std::array<bool, 256> starts_added{}; // first bytes of added tokens
  int64_t unk = 0;
  int64_t cls = 0;
  int64_t sep = 0;
  int64_t pad = 0;

  Impl(std::vector<std::string> pieces, WordPieceOptions given, std::vector<AddedToken> tokens)
      : vocab(std::move(pieces)), options(std::move(given)), added(std::move(tokens)), trie(vocab) {
    for (size_t id = 0; id < vocab.size(); ++id) {
      ids[vocab[id]] = static_cast<int64_t>(id);
    }
    std::erase_if(added, [](const AddedToken& token) { return token.content.empty(); });
    unk = special(options.unk_token, "unk_token");
    cls = special(options.cls_token, "cls_token");
    sep = special(options.sep_token, "sep_token");
    pad = special(options.pad_token, "pad_token");
    for (const auto& token : {options.unk_token, options.sep_token, options.pad_token,
                              options.cls_token, options.mask_token}) {
      if (const auto found = ids.find(token); !token.empty() && found != ids.end()) {
        added.push_back({token, found->second, true});
      }
    }
    std::ranges::stable_sort(added, [](const auto& a, const auto& b) {
      return a.content.size() > b.content.size() ||
             (a.content.size() == b.content.size() && a.content < b.content);
    });
    added.erase(std::unique(added.begin(), added.end(),
                            [](const auto& a, const auto& b) { return a.content == b.content; }),
                added.end());
    for (const auto& token : added) {
      ids[token.content] = token.id;
      starts_added[static_cast<unsigned char>(token.content[0])] = true;
    }
  }

  int64_t special(const std::string& token, const char* name) const {
    for (const auto& other : added) {
      if (other.content == token) {
        return other.id;
      }
    }
    const auto found = ids.find(token);
    if (token.empty() || found == ids.end()) {
      throw InputError(detail::kTokenizer,
                       std::string("the vocabulary lacks ") + name + "=" + token,
                       "[UNK], [CLS], [SEP] and [PAD] among its pieces",
                       "use the vocabulary the model was trained with");
    }
    return found->second;
  }

  // The longest added token at position `at` of `text`, or null.
  const AddedToken* added_at(std::string_view text, size_t at) const {
    for (const auto& token : added) {
      if (text.compare(at, token.content.size(), token.content) == 0) {
        return &token;
      }
    }
    return nullptr;
  }

  // Appends the ids of `text`. Stops when there are more than `limit`.
  void append_text(std::string_view text, size_t limit, detail::BertWords& scratch,
                   std::vector<int64_t>& out) const {
    size_t begin = 0;
    for (size_t at = 0; at < text.size();) {
      const AddedToken* token =
          starts_added[static_cast<unsigned char>(text[at])] ? added_at(text, at) : nullptr;
      if (token == nullptr) {
        ++at;
        continue;
      }
      append_words(text.substr(begin, at - begin), limit, scratch, out);
      out.push_back(token->id);
      at += token->content.size();
      begin = at;
    }
    append_words(text.substr(begin), limit, scratch, out);
  }

  void append_words(std::string_view text, size_t limit, detail::BertWords& scratch,
                    std::vector<int64_t>& out) const {
    if (text.empty() || out.size() > limit) {
      return;
    }
    detail::split_bert_words(text, options, scratch);
    for (size_t i = 0; i < scratch.words.size() && out.size() <= limit; ++i) {
      append_pieces(scratch[i], scratch.words[i].characters, out);
    }
  }

  void append_pieces(std::string_view word, int64_t characters, std::vector<int64_t>& out) const {
    const size_t before = out.size();
    bool known = characters <= detail::kMaxWordCharacters;
    int32_t node = detail::PieceTrie::kStart;
    while (known && !word.empty()) {
      const auto [id, bytes] = trie.longest(word, node);
      known = id >= 0;
      if (known) {
        out.push_back(id);
        word.remove_prefix(bytes);
        node = detail::PieceTrie::kInside;
      }
    }
    if (!known) {
      out.resize(before);
      out.push_back(unk);
    }
  }

  void check_utf8(std::string_view text) const {
    if (const size_t bad = invalid_utf8_position(text); bad != std::string_view::npos) {
      throw InputError(detail::kTokenizer,
                       "invalid UTF-8 in the text: " + byte_name(text[bad]) +
                           " at position=" + std::to_string(bad),
                       "UTF-8", "convert the text");
    }
  }
};

WordPieceTokenizer::WordPieceTokenizer(std::vector<std::string> vocab, WordPieceOptions options,
                                       std::vector<AddedToken> added_tokens)
    : impl_(std::make_shared<const Impl>(std::move(vocab), std::move(options),
                                         std::move(added_tokens))) {}

Encoding WordPieceTokenizer::encode(std::string_view text, int64_t max_length) const {
  if (max_length < 0 || max_length == 1) {
    throw InputError(detail::kTokenizer, "max_length=" + std::to_string(max_length),
                     "at least 2 ([CLS] and [SEP]), or 0 for no limit");
  }
  impl_->check_utf8(text);
  // The ids already have [CLS]; so more than `limit` ids are too many.
  const size_t limit = max_length == 0 ? ~size_t{0} - 1 : static_cast<size_t>(max_length) - 1;
  detail::BertWords scratch;
  Encoding encoding{.ids = {impl_->cls}};
  impl_->append_text(text, limit, scratch, encoding.ids);
  if (encoding.ids.size() > limit) {
    encoding.ids.resize(limit);
    encoding.truncated = true;
  }
  encoding.ids.push_back(impl_->sep);
  return encoding;
}

std::vector<std::string> WordPieceTokenizer::tokenize(std::string_view text) const {
  impl_->check_utf8(text);
  detail::BertWords scratch;
  std::vector<int64_t> ids;
  impl_->append_text(text, ~size_t{0} - 1, scratch, ids);
  return mapped(ids, [this](int64_t id) { return std::string(token(id)); });
}

std::string WordPieceTokenizer::decode(const std::vector<int64_t>& ids) const {
  const WordPieceOptions& o = options();
  const std::set<std::string> special{o.unk_token, o.sep_token, o.pad_token, o.cls_token,
                                      o.mask_token};
  std::string text;
  for (const int64_t id : ids) {
    const std::string& piece = token(id);
    if (piece.starts_with("##")) {
      text += piece.substr(2);
    } else if (!special.contains(piece)) {
      text += (text.empty() ? "" : " ") + piece;
    }
  }
  return text;
}

int64_t WordPieceTokenizer::vocab_size() const { return static_cast<int64_t>(impl_->vocab.size()); }

const std::string& WordPieceTokenizer::token(int64_t id) const {
  if (id >= 0 && id < vocab_size()) {
    return impl_->vocab[id];
  }
  for (const auto& token : impl_->added) {
    if (token.id == id) {
      return token.content;
    }
  }
  throw InputError(detail::kTokenizer, "no piece has id=" + std::to_string(id),
                   "0 to " + std::to_string(vocab_size() - 1));
}

int64_t WordPieceTokenizer::id(std::string_view token) const {
  const auto found = impl_->ids.find(token);
  return found == impl_->ids.end() ? -1 : found->second;
}

const std::vector<std::string>& WordPieceTokenizer::vocab() const { return impl_->vocab; }
const std::vector<AddedToken>& WordPieceTokenizer::added_tokens() const { return impl_->added; }
int64_t WordPieceTokenizer::unk_id() const { return impl_->unk; }
int64_t WordPieceTokenizer::cls_id() const { return impl_->cls; }
int64_t WordPieceTokenizer::sep_id() const { return impl_->sep; }
int64_t WordPieceTokenizer::pad_id() const { return impl_->pad; }
const WordPieceOptions& WordPieceTokenizer::options() const { return impl_->options; }

} // namespace hasten
