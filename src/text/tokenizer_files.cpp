// Hugging Face's tokenizer files: vocab.txt, tokenizer_config.json, tokenizer.json.
#include <algorithm>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"
#include "hasten/text/tokenizer.h"
#include "hasten/text/utf8.h"

namespace hasten {

namespace detail {

using TokenizerJson = nlohmann::ordered_json; // for writing: keeps the order of keys

constexpr const char* kLoadTokenizer = "data::WordPieceTokenizer::load";

// Hugging Face writes a length of at least this for "no limit known".
constexpr double kNoMaxLength = 1e9;

[[noreturn]] void fail_tokenizer_file(const std::filesystem::path& path, const std::string& what,
                                      const std::string& expected, const std::string& fix = "") {
  throw InputError(kLoadTokenizer, path.string() + ": " + what, expected, fix);
}

nlohmann::json read_tokenizer_json(const std::filesystem::path& path) {
  auto json = read_json_file(kLoadTokenizer, path);
  if (!json.is_object()) {
    fail_tokenizer_file(path, "not a JSON object", "an object");
  }
  return json;
}

// The member, or null if the object or the member is missing.
const nlohmann::json& tokenizer_member(const nlohmann::json& json, const char* name) {
  static const nlohmann::json kNull;
  const auto found = json.is_object() ? json.find(name) : json.end();
  return found == json.end() ? kNull : *found;
}

void read_flag(const nlohmann::json& json, const char* name, bool& value) {
  if (const auto& member = tokenizer_member(json, name); member.is_boolean()) {
    value = member.get<bool>();
  }
}

void read_flag(const nlohmann::json& json, const char* name, std::optional<bool>& value) {
  if (const auto& member = tokenizer_member(json, name); member.is_boolean()) {
    value = member.get<bool>();
  } else if (json.is_object() && json.contains(name)) {
    value.reset();
  }
}

// A token is a string, or an object with its content.
void read_token(const nlohmann::json& json, const char* name, std::string& value) {
  const auto& member = tokenizer_member(json, name);
  const auto& content = member.is_object() ? tokenizer_member(member, "content") : member;
  if (content.is_string()) {
    value = content.get<std::string>();
  }
}

std::vector<std::string> read_vocab_txt(const std::filesystem::path& path) {
  const std::string text = read_file(path);
  if (const size_t bad = invalid_utf8_position(text); bad != std::string::npos) {
    fail_tokenizer_file(
        path, "invalid UTF-8: " + byte_name(text[bad]) + " at offset " + std::to_string(bad),
        "one piece per line in UTF-8");
  }
  std::vector<std::string> vocab = split(text, "\n");
  if (vocab.back().empty()) {
    vocab.pop_back(); // the end of the last line
  }
  for (std::string& piece : vocab) {
    if (piece.ends_with('\r')) {
      piece.pop_back();
    }
  }
  return vocab;
}

std::vector<std::string> read_json_vocab(const std::filesystem::path& path,
                                         const nlohmann::json& json) {
  const auto& model = tokenizer_member(json, "model");
  const auto& entries = tokenizer_member(model, "vocab");
  const std::string type = tokenizer_member(model, "type").is_string()
                               ? tokenizer_member(model, "type").get<std::string>()
                           : entries.is_object() && !model.contains("merges") ? "WordPiece"
                                                                              : "(none)";
  if (type != "WordPiece" || !entries.is_object()) {
    fail_tokenizer_file(path, "model.type=" + type,
                        "WordPiece with a vocabulary; other types are not supported",
                        "use a BERT model");
  }
  std::vector<std::string> vocab(entries.size());
  for (const auto& [piece, id] : entries.items()) {
    const int64_t number = id.is_number_integer() ? id.get<int64_t>() : -1;
    if (number < 0 || number >= static_cast<int64_t>(vocab.size())) {
      fail_tokenizer_file(path, "the piece " + piece + " has id=" + id.dump(),
                          "a number from 0 to " + std::to_string(vocab.size() - 1));
    }
    vocab[number] = piece;
  }
  return vocab;
}

// Reads the normalizer of tokenizer.json, then tokenizer_config.json, which overrides it.
WordPieceOptions tokenizer_options(const nlohmann::json& json, const nlohmann::json& config) {
  WordPieceOptions options;
  const auto& normalizer = tokenizer_member(json, "normalizer");
  read_flag(normalizer, "lowercase", options.do_lower_case);
  read_flag(normalizer, "strip_accents", options.strip_accents);
  read_flag(normalizer, "handle_chinese_chars", options.tokenize_chinese_chars);
  read_flag(config, "do_lower_case", options.do_lower_case);
  read_flag(config, "strip_accents", options.strip_accents);
  read_flag(config, "tokenize_chinese_chars", options.tokenize_chinese_chars);
  read_token(config, "unk_token", options.unk_token);
  read_token(config, "sep_token", options.sep_token);
  read_token(config, "pad_token", options.pad_token);
  read_token(config, "cls_token", options.cls_token);
  read_token(config, "mask_token", options.mask_token);
  if (const auto& length = tokenizer_member(config, "model_max_length");
      length.is_number() && length.get<double>() < kNoMaxLength) {
    options.model_max_length = length.get<int64_t>();
  }
  return options;
}

// One entry of added_tokens (tokenizer.json) or added_tokens_decoder (config).
AddedToken added_token(const std::filesystem::path& path, const nlohmann::json& entry, int64_t id) {
  AddedToken token{.id = id};
  read_token(entry, "content", token.content);
  read_flag(entry, "special", token.special);
  for (const char* name : {"lstrip", "rstrip", "single_word"}) {
    bool set = false;
    read_flag(entry, name, set);
    if (set) {
      fail_tokenizer_file(path, "the added token " + token.content + " has " + name + "=true",
                          "added tokens that match exactly their own characters",
                          "set it to false");
    }
  }
  return token;
}

std::vector<AddedToken> read_added_tokens(const std::filesystem::path& folder,
                                          const nlohmann::json& json,
                                          const nlohmann::json& config) {
  std::vector<AddedToken> tokens;
  for (const auto& entry : tokenizer_member(json, "added_tokens")) {
    const auto& id = tokenizer_member(entry, "id");
    if (id.is_number_integer()) {
      tokens.push_back(added_token(folder / "tokenizer.json", entry, id.get<int64_t>()));
    }
  }
  if (!tokens.empty()) {
    return tokens;
  }
  const auto path = folder / "tokenizer_config.json";
  const auto& decoder = tokenizer_member(config, "added_tokens_decoder");
  for (const auto& [id, entry] : decoder.items()) {
    try {
      tokens.push_back(added_token(path, entry, std::stoll(id)));
    } catch (const std::logic_error&) {
      fail_tokenizer_file(path, "added_tokens_decoder has the key \"" + id + "\"", "a number");
    }
  }
  return tokens;
}

// The vocabulary itself must have the special tokens, with the ids of the folder's other files.
// Otherwise added tokens would hide a truncated vocabulary.
void check_special_tokens(const std::filesystem::path& path, const std::vector<std::string>& vocab,
                          const WordPieceOptions& options, const std::vector<AddedToken>& added) {
  for (const auto& token :
       {options.unk_token, options.cls_token, options.sep_token, options.pad_token}) {
    for (const AddedToken& other : added) {
      const auto id = static_cast<size_t>(other.id);
      if (other.content == token && (id >= vocab.size() || vocab[id] != token)) {
        fail_tokenizer_file(path,
                            "the vocabulary of pieces=" + std::to_string(vocab.size()) +
                                " does not have " + token + " at id=" + std::to_string(other.id) +
                                ", where the folder's added tokens have it",
                            "the complete vocabulary that the model was trained with",
                            "copy it from the model again");
      }
    }
    if (std::ranges::find(vocab, token) == vocab.end()) {
      fail_tokenizer_file(
          path, "the vocabulary of pieces=" + std::to_string(vocab.size()) + " lacks " + token,
          "[UNK], [CLS], [SEP] and [PAD], or the names in tokenizer_config.json",
          "use the vocabulary the model was trained with");
    }
  }
}

TokenizerJson added_token_json(const AddedToken& token) {
  return {{"content", token.content}, {"single_word", false}, {"lstrip", false},
          {"rstrip", false},          {"normalized", false},  {"special", token.special}};
}

std::vector<AddedToken> added_by_id(const WordPieceTokenizer& tokenizer) {
  auto tokens = tokenizer.added_tokens();
  std::ranges::sort(tokens, [](const auto& a, const auto& b) { return a.id < b.id; });
  return tokens;
}

TokenizerJson strip_accents_json(const WordPieceOptions& options) {
  return options.strip_accents ? TokenizerJson(*options.strip_accents) : TokenizerJson();
}

std::string tokenizer_config_text(const WordPieceTokenizer& tokenizer) {
  const auto& options = tokenizer.options();
  TokenizerJson config;
  config["added_tokens_decoder"] = TokenizerJson::object();
  for (const auto& token : added_by_id(tokenizer)) {
    config["added_tokens_decoder"][std::to_string(token.id)] = added_token_json(token);
  }
  config["clean_up_tokenization_spaces"] = true;
  config["cls_token"] = options.cls_token;
  config["do_lower_case"] = options.do_lower_case;
  if (tokenizer.id(options.mask_token) >= 0) {
    config["mask_token"] = options.mask_token;
  }
  if (options.model_max_length > 0) {
    config["model_max_length"] = options.model_max_length;
  }
  config["pad_token"] = options.pad_token;
  config["sep_token"] = options.sep_token;
  config["strip_accents"] = strip_accents_json(options);
  config["tokenize_chinese_chars"] = options.tokenize_chinese_chars;
  config["tokenizer_class"] = "BertTokenizer";
  config["unk_token"] = options.unk_token;
  return config.dump(2) + "\n";
}

TokenizerJson template_piece(const char* kind, const std::string& id, int type) {
  return {{kind, {{"id", id}, {"type_id", type}}}};
}

TokenizerJson post_processor_json(const WordPieceTokenizer& tokenizer) {
  const auto& cls = tokenizer.options().cls_token;
  const auto& sep = tokenizer.options().sep_token;
  TokenizerJson json;
  json["type"] = "TemplateProcessing";
  json["single"] = {template_piece("SpecialToken", cls, 0), template_piece("Sequence", "A", 0),
                    template_piece("SpecialToken", sep, 0)};
  json["pair"] = json["single"];
  json["pair"].push_back(template_piece("Sequence", "B", 1));
  json["pair"].push_back(template_piece("SpecialToken", sep, 1));
  json["special_tokens"] = TokenizerJson::object();
  for (const auto& token : {cls, sep}) {
    json["special_tokens"][token] = {
        {"id", token}, {"ids", {tokenizer.id(token)}}, {"tokens", {token}}};
  }
  return json;
}

std::string tokenizer_json_text(const WordPieceTokenizer& tokenizer) {
  const auto& options = tokenizer.options();
  TokenizerJson json{{"version", "1.0"},
                     {"truncation", nullptr},
                     {"padding", nullptr},
                     {"added_tokens", TokenizerJson::array()}};
  for (const auto& token : added_by_id(tokenizer)) {
    TokenizerJson entry{{"id", token.id}};
    entry.update(added_token_json(token));
    json["added_tokens"].push_back(std::move(entry));
  }
  json["normalizer"] = {{"type", "BertNormalizer"},
                        {"clean_text", true},
                        {"handle_chinese_chars", options.tokenize_chinese_chars},
                        {"strip_accents", strip_accents_json(options)},
                        {"lowercase", options.do_lower_case}};
  json["pre_tokenizer"] = {{"type", "BertPreTokenizer"}};
  json["post_processor"] = post_processor_json(tokenizer);
  json["decoder"] = {{"type", "WordPiece"}, {"prefix", "##"}, {"cleanup", true}};
  json["model"] = {{"type", "WordPiece"},
                   {"unk_token", options.unk_token},
                   {"continuing_subword_prefix", "##"},
                   {"max_input_chars_per_word", 100}};
  // ordered_json searches keys linearly, so the 30,000 keys are appended directly.
  auto vocab = TokenizerJson::object();
  std::vector<std::pair<const std::string, TokenizerJson>>& entries =
      vocab.get_ref<TokenizerJson::object_t&>();
  for (int64_t id = 0; id < tokenizer.vocab_size(); ++id) {
    const auto& piece = tokenizer.vocab()[id];
    if (tokenizer.id(piece) == id) { // if a piece occurs twice, the later id wins
      entries.emplace_back(piece, id);
    }
  }
  json["model"]["vocab"] = std::move(vocab);
  return json.dump(2) + "\n";
}

} // namespace detail

WordPieceTokenizer WordPieceTokenizer::load(const std::filesystem::path& folder) {
  const auto vocab_path = folder / "vocab.txt";
  const auto json_path = folder / "tokenizer.json";
  const auto config_path = folder / "tokenizer_config.json";
  const bool has_text = std::filesystem::exists(vocab_path);
  nlohmann::json json;
  nlohmann::json config;
  if (std::filesystem::exists(json_path)) {
    json = detail::read_tokenizer_json(json_path);
  }
  if (std::filesystem::exists(config_path)) {
    config = detail::read_tokenizer_json(config_path);
  }
  if (!has_text && json.is_null()) {
    detail::fail_tokenizer_file(
        folder,
        std::filesystem::exists(folder / "merges.txt")
            ? "a byte-pair vocabulary (vocab.json, merges.txt), as in GPT-2 and RoBERTa"
            : "the folder has no vocabulary",
        "WordPiece, in vocab.txt or tokenizer.json",
        "copy it from the model that these weights come from");
  }
  auto vocab =
      has_text ? detail::read_vocab_txt(vocab_path) : detail::read_json_vocab(json_path, json);
  const auto options = detail::tokenizer_options(json, config);
  auto added = detail::read_added_tokens(folder, json, config);
  detail::check_special_tokens(has_text ? vocab_path : json_path, vocab, options, added);
  return WordPieceTokenizer(std::move(vocab), options, std::move(added));
}

void WordPieceTokenizer::save(const std::filesystem::path& folder) const {
  std::string text;
  for (const auto& piece : vocab()) {
    text += piece + "\n";
  }
  write_file_atomically(folder / "vocab.txt", text);
  write_file_atomically(folder / "tokenizer_config.json", detail::tokenizer_config_text(*this));
  write_file_atomically(folder / "tokenizer.json", detail::tokenizer_json_text(*this));
}

} // namespace hasten
