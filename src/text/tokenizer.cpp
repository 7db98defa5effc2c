#include "hasten/text/tokenizer.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "added_tokens.h"
#include "base/known_keys.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"
#include "hasten/text/bert_words.h"
#include "hasten/text/pretrained_folder.h"
#include "hasten/text/utf8.h"
#include "text_steps.h"
#include "text_tokens.h"
#include "token_model.h"
#include "tokenizer_class.h"
#include "tokenizer_files.h"

namespace hasten {

namespace detail {

// Hugging Face writes a length of at least this for "no limit known".
constexpr double kNoMaxLength = 1e9;
constexpr size_t kMaxTextBytes = (size_t{1} << 31) - (size_t{1} << 20);

TokenSide read_side(const TokenizerPart& part) {
  return !part.is_null() && part.one_of({"right", "left"}) == 1 ? TokenSide::left
                                                                : TokenSide::right;
}

} // namespace detail

struct Tokenizer::Impl {
  detail::TokenizerFiles files;
  nlohmann::json config;
  std::vector<detail::NormalizerStep> normalizer{};
  detail::PreTokenizer pre_tokenizer{};
  std::unique_ptr<const detail::TokenModel> model{};
  detail::PostProcessor post_processor{};
  std::vector<detail::DecoderStep> decoder{};
  bool has_decoder = false; // which may have no steps
  TokenSide padding_side{}, truncation_side{};
  bool clean_up = false;
  detail::AddedTokens added{};
  std::string model_type{};
  std::map<std::string, int64_t> special{};
  std::string hash{};
  // BERT's parts in one pass, without offsets; null if the tokenizer has others.
  const detail::WordPieceModel* short_way = nullptr;
  WordPieceOptions short_way_options{};
  mutable std::mutex mutex{};
  mutable std::vector<std::unique_ptr<detail::TokenScratch>> idle{};

  explicit Impl(const detail::TokenizerFiles& given);
  void read_parts(nlohmann::json& json);
  void read_added(const nlohmann::json& json, const nlohmann::json& plain);
  void add_token(AddedToken token, bool replace, const std::string& where);
  void read_special(const detail::TokenizerPart& part, const std::string& name,
                    const std::set<std::string>& given);
  void read_all_special(const detail::TokenizerPart& part);

  void split_words(std::string_view text, bool after_space, detail::Words& words) const;
  void add_words(std::string_view text, size_t at, detail::Words& words) const;
  void add_tokens(std::string_view text, const EncodeOptions& options, size_t limit,
                  detail::TextTokens& out, int64_t given = -1) const;
  void tokenize_short_way(std::string_view text, size_t limit, detail::TextTokens& out) const;
  void tokenize_words(const detail::Words& words, size_t limit, detail::TokenScratch& scratch,
                      detail::TextTokens& out) const;
  void trim(detail::TextTokens& tokens) const;
  Encoding assembled(detail::TextTokens& first, detail::TextTokens* second, size_t special_count,
                     const EncodeOptions& options) const;
  Encoding encode(detail::TextTokens first, const std::string_view* pair,
                  const EncodeOptions& options) const;

  std::unique_ptr<detail::TokenScratch> take_scratch() const {
    const std::lock_guard lock(mutex);
    if (idle.empty()) {
      return std::make_unique<detail::TokenScratch>();
    }
    auto scratch = std::move(idle.back());
    idle.pop_back();
    return scratch;
  }
  void give_back(std::unique_ptr<detail::TokenScratch> scratch) const {
    const std::lock_guard lock(mutex);
    idle.push_back(std::move(scratch));
  }
};

Tokenizer::Impl::Impl(const detail::TokenizerFiles& given) : files(given) {
  constexpr const char* kWhere = "text::AutoTokenizer";
  auto json = detail::parsed_object(files.name, files.tokenizer);
  config = detail::parsed_object("tokenizer_config.json", files.config);
  const auto map = detail::parsed_object("special_tokens_map.json", files.special_tokens);
  const std::string& kind = files.tokenizer_class;
  detail::check_known_keys(kWhere, "tokenizer_config.json", "tokenizer_config.json",
                           kind.empty() ? "*" : kind, config);
  detail::check_known_keys(kWhere, "special_tokens_map.json", "special_tokens_map.json", "*", map);
  config = detail::with_special_tokens(config, map);
  detail::check_tokenizer_keys(files.name, "*", json);
  detail::apply_tokenizer_class(kind, config, files.name, json);
  read_parts(json);
  read_added(json, detail::parsed_object("added_tokens.json", files.added_tokens));
  const detail::TokenizerPart options(config, "tokenizer_config.json");
  read_all_special(options);
  padding_side = detail::read_side(options["padding_side"]);
  truncation_side = detail::read_side(options["truncation_side"]);
  clean_up = options["clean_up_tokenization_spaces"].flag(false);
  if (!options["model_max_length"].is_null()) {
    options["model_max_length"].number();
  }
  added.sort();
  hash = hash_hex(files.tokenizer + '\0' + files.config + '\0' + files.special_tokens + '\0' +
                  files.added_tokens + '\0' + kind);
}

void Tokenizer::Impl::read_parts(nlohmann::json& json) {
  const detail::TokenizerPart part(json, files.name);
  const nlohmann::json& normal = part["normalizer"].json();
  const bool bert =
      normal.is_object() && normal.value("type", nlohmann::json()) == "BertNormalizer";
  const auto kind = part["model"]["type"];
  const bool bpe = kind.is_null() ? !part["model"]["merges"].is_null() : kind.json() == "BPE";
  detail::read_normalizer(part["normalizer"], normalizer);
  pre_tokenizer = detail::read_pre_tokenizer(part["pre_tokenizer"], bpe);
  model = detail::TokenModel::read(part["model"], pre_tokenizer.model_writes_bytes);
  post_processor = detail::read_post_processor(part["post_processor"]);
  has_decoder = !part["decoder"].is_null();
  if (has_decoder) {
    detail::read_decoder(part["decoder"], decoder);
  }
  const auto* word_piece = dynamic_cast<const detail::WordPieceModel*>(model.get());
  model_type = word_piece != nullptr ? "WordPiece" : bpe ? "BPE" : "Unigram";
  const auto pre = part["pre_tokenizer"];
  if (word_piece != nullptr && bert && part["normalizer"]["clean_text"].flag(true) &&
      pre.json().is_object() && pre.type() == "BertPreTokenizer") {
    short_way = word_piece;
    short_way_options.do_lower_case = part["normalizer"]["lowercase"].flag(true);
    short_way_options.strip_accents =
        part["normalizer"]["strip_accents"].flag(short_way_options.do_lower_case);
    short_way_options.tokenize_chinese_chars =
        part["normalizer"]["handle_chinese_chars"].flag(true);
  }
}

// A token with the id -1 gets that of the vocabulary or the next free one. Others must have it: Python's
// tokenizers give it, whatever the file says.
void Tokenizer::Impl::add_token(AddedToken token, bool replace, const std::string& where) {
  const AddedToken* there = added.find(token.content);
  const int64_t known = there != nullptr ? there->id : model->id(token.content);
  const auto pieces = std::ssize(model->pieces()) - std::ranges::count(model->pieces(), "");
  const int64_t expected = known >= 0 ? known : added.next_id(pieces);
  if (token.id >= 0 && token.id != expected) {
    detail::fail_tokenizer_file(
        files.name,
        where + ": the added token " + token.content + " has id=" + std::to_string(token.id),
        std::to_string(expected) +
            (known >= 0 ? ", its id in the vocabulary" : ", the first one that is free"));
  }
  token.id = expected;
  std::string shown = token.content;
  if (token.normalized) {
    detail::AlignedText text;
    text.append_original(shown, 0);
    for (const auto& step : normalizer) {
      step(text);
    }
    shown = std::move(text.text);
  }
  added.add(token, std::move(shown), replace);
}

// `plain`: added_tokens.json.
void Tokenizer::Impl::read_added(const nlohmann::json& json, const nlohmann::json& plain) {
  const auto part = detail::TokenizerPart(json, files.name)["added_tokens"];
  const bool decoder = config.contains("added_tokens_decoder");
  // A class that makes its own parts takes these tokens from one place.
  const bool left_out = part.is_null() || (decoder && !files.tokenizer_class.empty());
  for (const auto& entry : left_out ? std::vector<detail::TokenizerPart>() : part.items()) {
    detail::check_known_keys("text::AutoTokenizer", files.name + ": added_tokens", "tokenizer.json",
                             "added_token", entry.json());
    add_token(detail::read_added_token(entry, entry["id"].integer()), false, "added_tokens");
  }
  for (const AddedToken& token : detail::read_added_tokens(config, plain)) {
    add_token(token, decoder, decoder ? "added_tokens_decoder" : "added_tokens.json");
  }
}

// A special token by its name; null: none. One that neither the vocabulary nor the added tokens have
// gets a new id. Of equal new ones the last counts.
void Tokenizer::Impl::read_special(const detail::TokenizerPart& part, const std::string& name,
                                   const std::set<std::string>& given) {
  if (part.is_null()) {
    return;
  }
  if (AddedToken token = detail::read_special_token(part); !token.content.empty()) {
    const bool plain = files.tokenizer_class == "Qwen2Tokenizer"; // which adds all of them again
    token = plain ? AddedToken{.content = token.content, .id = -1} : token;
    add_token(token, plain || !given.contains(token.content), name);
    special[name] = added.find(token.content)->id;
  }
}

// The seven named ones, other keys that end in "_token", and those of the lists, in this order.
void Tokenizer::Impl::read_all_special(const detail::TokenizerPart& part) {
  const std::set<std::string> given = added.contents();
  for (const char* name : detail::kSpecialTokens) {
    read_special(part[name], name, given);
  }
  for (const auto& [key, value] : part.json().items()) {
    const bool flag = key == "add_bos_token" || key == "add_eos_token";
    if (key.ends_with("_token") && !flag && !special.contains(key) &&
        (value.is_string() || value.is_object())) {
      read_special(part[key.c_str()], key, given);
    }
  }
  const auto more = part["extra_special_tokens"];
  const bool none = more.is_null() || more.json().empty();
  for (const auto& listed :
       {part["model_specific_special_tokens"], none ? part["additional_special_tokens"] : more}) {
    if (listed.json().is_object()) {
      for (const auto& [key, value] : listed.json().items()) {
        read_special(listed[key.c_str()], key, given);
      }
    } else if (!listed.is_null()) {
      for (const auto& each : listed.items()) {
        read_special(each, "", given);
      }
    }
  }
  special.erase("");
}

// Appends a part of the text without added tokens, which begins at byte `at` of the original.
void Tokenizer::Impl::add_words(std::string_view text, size_t at, detail::Words& words) const {
  detail::AlignedText section = words.text.emptied();
  section.append_original(text, at);
  for (const auto& step : normalizer) {
    step(section);
  }
  const auto begin = static_cast<uint32_t>(words.text.text.size());
  const size_t first = words.words.size();
  added.split(section.text, true, words.words);
  for (size_t i = first; i < words.words.size(); ++i) {
    words.words[i].begin += begin;
    words.words[i].end += begin;
  }
  words.text.append_from(section, 0, section.text.size());
}

void Tokenizer::Impl::split_words(std::string_view text, bool after_space,
                                  detail::Words& words) const {
  std::vector<detail::Word> parts;
  added.split(text, false, parts);
  for (const detail::Word& part : parts) {
    const auto piece = text.substr(part.begin, part.end - part.begin);
    if (part.added < 0) {
      add_words(piece, part.begin, words);
      continue;
    }
    const auto begin = static_cast<uint32_t>(words.text.text.size());
    words.text.append_original(piece, part.begin);
    words.words.push_back({begin, static_cast<uint32_t>(words.text.text.size()), part.added});
  }
  if (after_space) {
    detail::prefix_spaces(words);
  }
  for (const auto& step : pre_tokenizer.steps) {
    step(words);
  }
}

void Tokenizer::Impl::tokenize_short_way(std::string_view text, size_t limit,
                                         detail::TextTokens& out) const {
  std::vector<detail::Word> parts;
  added.split(text, false, parts);
  detail::BertWords words;
  for (const detail::Word& part : parts) {
    if (part.added >= 0) {
      out.tokens.push_back({part.added});
      continue;
    }
    detail::split_bert_words(text.substr(part.begin, part.end - part.begin), short_way_options,
                             words);
    for (size_t i = 0; i < words.words.size(); ++i) {
      if (out.tokens.size() >= limit) {
        out.cut = true;
        return;
      }
      short_way->append(words[i], words.words[i].characters, out.tokens);
    }
  }
}

void Tokenizer::Impl::tokenize_words(const detail::Words& words, size_t limit,
                                     detail::TokenScratch& scratch, detail::TextTokens& out) const {
  for (size_t index = 0; index < words.words.size(); ++index) {
    const detail::Word& word = words.words[index];
    if (out.tokens.size() >= limit) {
      out.cut = true;
      return;
    }
    const size_t first = out.tokens.size();
    if (word.added >= 0) {
      out.tokens.push_back({word.added, 0, word.end - word.begin});
    } else {
      model->tokenize(std::string_view(words.text.text).substr(word.begin, word.end - word.begin),
                      scratch, out.tokens);
    }
    for (size_t i = first; words.text.tracked && i < out.tokens.size(); ++i) {
      auto& token = out.tokens[i];
      const auto from = words.text.from(word.begin + token.begin, word.begin + token.end);
      token.begin = from.begin;
      token.end = from.end;
    }
    if (out.given.empty()) {
      out.words.resize(out.tokens.size(), static_cast<int64_t>(index));
    }
  }
}

// Appends the tokens of the text, or of given word `given`.
void Tokenizer::Impl::add_tokens(std::string_view text, const EncodeOptions& options, size_t limit,
                                 detail::TextTokens& out, int64_t given) const {
  if (const size_t bad = invalid_utf8_position(text); bad != std::string_view::npos) {
    throw InputError(detail::kTokenizer,
                     "invalid UTF-8 in " +
                         (given < 0 ? "the text" : "words[" + std::to_string(given) + "]") + ": " +
                         byte_name(text[bad]) + " at position=" + std::to_string(bad),
                     "UTF-8", "convert the text, or call replace_invalid_utf8");
  }
  if (text.size() > detail::kMaxTextBytes) {
    throw InputError(detail::kTokenizer, "the text has bytes=" + std::to_string(text.size()),
                     "at most " + std::to_string(detail::kMaxTextBytes), "split the text");
  }
  const bool needs_words = options.return_word_ids && given < 0;
  if (short_way != nullptr && !added.any_normalized() && !options.return_offsets_mapping &&
      !needs_words) {
    return tokenize_short_way(text, limit, out);
  }
  detail::Words words;
  words.text.tracked = options.return_offsets_mapping || pre_tokenizer.needs_origins;
  split_words(text, given >= 0 && pre_tokenizer.model_writes_bytes, words);
  auto scratch = take_scratch();
  tokenize_words(words, limit, *scratch, out);
  give_back(std::move(scratch));
}

// Leaves the white space of tokens out of their spans, except one space that was put in front.
void Tokenizer::Impl::trim(detail::TextTokens& tokens) const {
  static const int32_t kSpace = 0x120; // of ByteLevel
  for (size_t i = 0; i < tokens.tokens.size(); ++i) {
    auto& span = tokens.tokens[i];
    const bool in_words = !tokens.given.empty();
    const std::string_view text =
        in_words ? tokens.given[static_cast<size_t>(tokens.words[i])] : tokens.text;
    const std::string_view shown =
        added.find(int64_t{span.id}) != nullptr
            ? text.substr(span.begin, span.end - span.begin)
            : std::string_view(model->pieces()[static_cast<size_t>(span.id)]);
    const auto blank = [&](size_t at) {
      const int32_t code = detail::next_code(shown, at);
      return code == kSpace || detail::is_white_space(code);
    };
    size_t leading = 0; // characters
    for (size_t at = 0; at < shown.size() && blank(at); detail::next_code(shown, at)) {
      ++leading;
    }
    size_t trailing = 0;
    for (size_t end = shown.size(); end > 0 && blank(detail::code_before(shown, end));) {
      end = detail::code_before(shown, end);
      ++trailing;
    }
    const bool prefixed = in_words || *post_processor.trim_prefix_space;
    if ((i == 0 || span.begin == 0) && prefixed && leading == 1) {
      leading = 0;
    }
    size_t begin = span.begin;
    for (; leading > 0 && begin < span.end; --leading) {
      detail::next_code(text, begin);
    }
    size_t end = span.end;
    for (; trailing > 0 && end > 0; --trailing) {
      end = detail::code_before(text, end);
    }
    span.begin = static_cast<uint32_t>(begin);
    span.end = trailing > 0 ? span.end : std::max(static_cast<uint32_t>(end), span.begin);
  }
}

Encoding Tokenizer::Impl::assembled(detail::TextTokens& first, detail::TextTokens* second,
                                    size_t special_count, const EncodeOptions& options) const {
  const bool offsets = options.return_offsets_mapping;
  if (offsets && post_processor.trim_prefix_space) {
    trim(first);
    if (second != nullptr) {
      trim(*second);
    }
  }
  Encoding made;
  made.truncated = first.cut || (second != nullptr && second->cut);
  const size_t count =
      special_count + first.tokens.size() + (second != nullptr ? second->tokens.size() : 0);
  made.ids.reserve(count);
  made.token_type_ids.reserve(count);
  made.special_tokens_mask.reserve(count);
  made.attention_mask.assign(count, 1);
  made.offset_mapping.reserve(offsets ? count : 0);
  for (const auto& piece : second != nullptr ? post_processor.pair : post_processor.single) {
    if (piece.sequence < 0 && options.add_special_tokens) {
      made.ids.insert(made.ids.end(), piece.ids.begin(), piece.ids.end());
    } else if (piece.sequence >= 0) {
      const auto& sequence = piece.sequence == 0 ? first : *second;
      for (const auto& token : sequence.tokens) {
        made.ids.push_back(token.id);
        if (offsets) {
          made.offset_mapping.emplace_back(token.begin, token.end);
        }
      }
      if (options.return_word_ids) {
        made.word_ids.insert(made.word_ids.end(), sequence.words.begin(), sequence.words.end());
      }
    }
    made.token_type_ids.resize(made.ids.size(), piece.type_id);
    made.special_tokens_mask.resize(made.ids.size(), piece.sequence < 0);
    made.offset_mapping.resize(offsets ? made.ids.size() : 0);
    made.word_ids.resize(options.return_word_ids ? made.ids.size() : 0, -1);
  }
  return made;
}

// `first` has the text or the given words, and no tokens yet.
Encoding Tokenizer::Impl::encode(detail::TextTokens first, const std::string_view* pair,
                                 const EncodeOptions& options) const {
  size_t special_count = 0;
  for (const auto& piece : pair != nullptr ? post_processor.pair : post_processor.single) {
    special_count += options.add_special_tokens ? piece.ids.size() : 0;
  }
  const bool truncates =
      options.max_length != 0 && options.truncation != TruncationStrategy::do_not_truncate;
  if (options.max_length < 0 ||
      (truncates && options.max_length < static_cast<int64_t>(special_count))) {
    throw InputError(detail::kTokenizer, "max_length=" + std::to_string(options.max_length),
                     "at least the number of special tokens, " + std::to_string(special_count) +
                         ", or 0 for no limit");
  }
  if (truncates && pair == nullptr && options.truncation == TruncationStrategy::only_second) {
    throw InputError(detail::kTokenizer, "truncation=only_second without a second text",
                     "a pair of texts", "use longest_first");
  }
  const auto side = options.truncation_side.value_or(truncation_side);
  // Of a pair both lengths count, and from the left the end does.
  const size_t most = static_cast<size_t>(options.max_length) - special_count;
  const bool ends_early = truncates && pair == nullptr && side == TokenSide::right;
  const size_t limit = ends_early ? most : SIZE_MAX;
  for (size_t i = 0; i < first.given.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    add_tokens(first.given[i], options, limit, first, index);
    first.words.resize(first.tokens.size(), index);
  }
  if (first.given.empty()) {
    add_tokens(first.text, options, limit, first);
  }
  detail::TextTokens second;
  if (pair != nullptr) {
    second.text = *pair;
    add_tokens(*pair, options, SIZE_MAX, second);
  }
  if (truncates) {
    detail::truncate_tokens(first, pair != nullptr ? &second : nullptr, most, options, side);
  }
  return assembled(first, pair != nullptr ? &second : nullptr, special_count, options);
}

Tokenizer::Tokenizer(const detail::TokenizerFiles& files)
    : impl_(std::make_shared<const Impl>(files)) {}

Encoding Tokenizer::encode(std::string_view text, const EncodeOptions& options) const {
  return impl_->encode({.text = text}, nullptr, options);
}

Encoding Tokenizer::encode(std::string_view text, std::string_view text_pair,
                           const EncodeOptions& options) const {
  return impl_->encode({.text = text}, &text_pair, options);
}

Encoding Tokenizer::encode_words(std::span<const std::string> words,
                                 const EncodeOptions& options) const {
  return impl_->encode({.given = words}, nullptr, options);
}

std::vector<std::string> Tokenizer::tokenize(std::string_view text) const {
  return mapped(encode(text, {.add_special_tokens = false}).ids,
                [this](int64_t id) { return std::string(token(id)); });
}

std::string Tokenizer::decode(const std::vector<int64_t>& ids, const DecodeOptions& options) const {
  std::vector<std::string> tokens;
  for (const int64_t id : ids) {
    const AddedToken* other = impl_->added.find(id);
    if (other == nullptr) {
      tokens.push_back(token(id));
    } else if (!other->special || !options.skip_special_tokens) {
      tokens.push_back(impl_->added.shown(*other));
    }
  }
  for (const auto& step : impl_->decoder) {
    step(tokens);
  }
  std::string text = joined(tokens, impl_->has_decoder ? "" : " ");
  if (model_type() != "BPE" && options.clean_up_tokenization_spaces.value_or(impl_->clean_up)) {
    detail::clean_up_spaces(text, false);
  }
  return text;
}

PaddingOptions Tokenizer::padding() const {
  return {.pad_id = pad_id(), .padding_side = impl_->padding_side};
}

TokenSide Tokenizer::truncation_side() const { return impl_->truncation_side; }

int64_t Tokenizer::model_max_length() const {
  const auto length = impl_->config.value("model_max_length", nlohmann::json());
  return length.is_number() && length.get<double>() >= 0 &&
                 length.get<double>() < detail::kNoMaxLength
             ? length.get<int64_t>()
             : 0;
}

const std::string& Tokenizer::model_type() const { return impl_->model_type; }
int64_t Tokenizer::vocab_size() const { return std::ssize(vocab()); }
const std::vector<std::string>& Tokenizer::vocab() const { return impl_->model->pieces(); }

int64_t Tokenizer::size() const {
  const auto& tokens = added_tokens();
  return std::max(vocab_size(), tokens.empty() ? 0 : tokens.back().id + 1);
}

const std::vector<AddedToken>& Tokenizer::added_tokens() const { return impl_->added.all(); }

const std::string& Tokenizer::token(int64_t id) const {
  if (const AddedToken* token = impl_->added.find(id)) {
    return token->content;
  }
  if (id < 0 || id >= vocab_size() || vocab()[static_cast<size_t>(id)].empty()) {
    throw InputError(detail::kTokenizer, "no piece has id=" + std::to_string(id),
                     "0 to " + std::to_string(size() - 1));
  }
  return vocab()[static_cast<size_t>(id)];
}

int64_t Tokenizer::id(std::string_view token) const {
  const AddedToken* found = impl_->added.find(token);
  return found != nullptr ? found->id : impl_->model->id(token);
}

int64_t Tokenizer::special_id(const std::string& name) const {
  const auto found = impl_->special.find(name);
  return found == impl_->special.end() ? -1 : found->second;
}

const std::string& Tokenizer::hash() const { return impl_->hash; }

void Tokenizer::save_pretrained(const std::filesystem::path& folder) const {
  const auto& pieces = vocab();
  if (model_type() == "WordPiece" && std::ranges::find(pieces, "") == pieces.end()) {
    write_file_atomically(folder / "vocab.txt", joined(pieces, "\n") + "\n");
  }
  write_file_atomically(folder / "tokenizer.json", impl_->files.tokenizer);
  for (const auto& [name, text] : {std::pair{"tokenizer_config.json", &impl_->files.config},
                                   {"special_tokens_map.json", &impl_->files.special_tokens},
                                   {"added_tokens.json", &impl_->files.added_tokens},
                                   {"chat_template.jinja", &impl_->files.chat_template}}) {
    if (!text->empty()) {
      write_file_atomically(folder / name, *text);
    }
  }
}

Tokenizer AutoTokenizer::from_pretrained(const std::filesystem::path& folder) {
  return Tokenizer(detail::read_tokenizer_files(pretrained_folder(folder, "text::AutoTokenizer")));
}

} // namespace hasten
