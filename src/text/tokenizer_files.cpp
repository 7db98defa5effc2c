// Hugging Face's tokenizer files. vocab.txt, or vocab.json and merges.txt, become the tokenizer.json
// that transformers makes of them.
#include "tokenizer_files.h"

#include <algorithm>
#include <filesystem>
#include <optional>
#include <unordered_map>
#include <utility>

#include "added_tokens.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"
#include "hasten/text/tokenizer.h"
#include "hasten/text/utf8.h"
#include "tokenizer_class.h"
#include "tokenizer_part.h"

namespace hasten {

namespace detail {

using TokenizerJson = nlohmann::ordered_json; // for writing: keeps the order of keys

constexpr const char* kAutoTokenizer = "text::AutoTokenizer";

// The content of a file of the folder; empty if there is none.
std::string optional_file(const std::filesystem::path& path) {
  return std::filesystem::exists(path) ? read_file(path) : std::string();
}

nlohmann::json parsed_object(const std::filesystem::path& path, const std::string& text) {
  auto json =
      text.empty() ? nlohmann::json::object() : parse_json(kAutoTokenizer, path.string(), text);
  if (!json.is_object()) {
    fail_tokenizer_file(path.string(), "not a JSON object", "an object");
  }
  return json;
}

std::vector<std::string> read_vocab_txt(const std::filesystem::path& path) {
  const std::string text = read_file(path);
  if (const size_t bad = invalid_utf8_position(text); bad != std::string::npos) {
    fail_tokenizer_file(
        path.string(),
        "invalid UTF-8: " + byte_name(text[bad]) + " at offset " + std::to_string(bad),
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

// A token is a text, or an object with its content.
std::string token_name(const nlohmann::json& config, const char* name,
                       const std::string& otherwise) {
  const TokenizerPart part = TokenizerPart(config, "tokenizer_config.json")[name];
  return part.json().is_object() ? part["content"].text() : part.text(otherwise);
}

// Options of BERT for a vocab.txt: those of tokenizer_config.json override the normalizer of a
// tokenizer.json that has no model.
WordPieceOptions word_piece_options(const nlohmann::json& json, const nlohmann::json& config,
                                    const std::string& name) {
  const auto normalizer = TokenizerPart(json, name)["normalizer"];
  const TokenizerPart given(config, "tokenizer_config.json");
  WordPieceOptions options;
  options.do_lower_case = given["do_lower_case"].flag(normalizer["lowercase"].flag(true));
  const auto accents =
      config.contains("strip_accents") ? given["strip_accents"] : normalizer["strip_accents"];
  if (!accents.is_null()) {
    options.strip_accents = accents.flag(true);
  }
  options.tokenize_chinese_chars =
      given["tokenize_chinese_chars"].flag(normalizer["handle_chinese_chars"].flag(true));
  for (const auto& [token, member] : {std::pair{"unk_token", &WordPieceOptions::unk_token},
                                      {"sep_token", &WordPieceOptions::sep_token},
                                      {"pad_token", &WordPieceOptions::pad_token},
                                      {"cls_token", &WordPieceOptions::cls_token},
                                      {"mask_token", &WordPieceOptions::mask_token}}) {
    options.*member = token_name(config, token, options.*member);
  }
  return options;
}

// The vocabulary must have the special tokens, with the ids of the folder's other files. Otherwise
// added tokens would hide a truncated vocabulary.
void check_special_tokens(const std::string& path, const std::vector<std::string>& vocab,
                          const WordPieceOptions& options, const nlohmann::json& config) {
  const std::string size = "the vocabulary of pieces=" + std::to_string(vocab.size());
  const auto decoder = config.find("added_tokens_decoder");
  for (const auto& token :
       {options.unk_token, options.cls_token, options.sep_token, options.pad_token}) {
    if (std::ranges::find(vocab, token) == vocab.end()) {
      fail_tokenizer_file(path, size + " lacks " + token,
                          "[UNK], [CLS], [SEP] and [PAD], or the names in tokenizer_config.json",
                          "use the vocabulary the model was trained with");
    }
    if (decoder == config.end() || !decoder->is_object()) {
      continue;
    }
    for (const auto& [id, entry] : decoder->items()) {
      const auto number = parse_number<size_t>(id).value_or(0);
      if (entry.is_object() && entry.value("content", nlohmann::json()) == token &&
          (number >= vocab.size() || vocab[number] != token)) {
        fail_tokenizer_file(path,
                            size + " does not have " + token + " at id=" + id +
                                ", where tokenizer_config.json has it",
                            "the complete vocabulary that the model was trained with",
                            "copy it from the model again");
      }
    }
  }
}

// A folder with both must have one vocabulary.
void check_same_vocab(const std::string& path, const std::vector<std::string>& vocab,
                      const nlohmann::json& pieces) {
  for (const auto& [piece, id] : pieces.items()) {
    if (id.is_number_unsigned() &&
        (id.get<size_t>() >= vocab.size() || vocab[id.get<size_t>()] != piece)) {
      fail_tokenizer_file(path,
                          "the vocabulary of pieces=" + std::to_string(vocab.size()) +
                              " does not have " + piece + " at id=" + id.dump() +
                              ", where tokenizer.json has it",
                          "the same vocabulary in both files", "copy them from the model again");
    }
  }
}

TokenizerJson added_token_json(const AddedToken& token) {
  return {{"id", token.id},          {"content", token.content}, {"single_word", token.single_word},
          {"lstrip", token.lstrip},  {"rstrip", token.rstrip},   {"normalized", token.normalized},
          {"special", token.special}};
}

TokenizerJson template_piece(const char* kind, const std::string& id, int type) {
  return {{kind, {{"id", id}, {"type_id", type}}}};
}

TokenizerJson bert_post_processor(const std::string& cls, int64_t cls_id, const std::string& sep,
                                  int64_t sep_id) {
  TokenizerJson json;
  json["type"] = "TemplateProcessing";
  json["single"] = {template_piece("SpecialToken", cls, 0), template_piece("Sequence", "A", 0),
                    template_piece("SpecialToken", sep, 0)};
  json["pair"] = json["single"];
  json["pair"].push_back(template_piece("Sequence", "B", 1));
  json["pair"].push_back(template_piece("SpecialToken", sep, 1));
  json["special_tokens"] = TokenizerJson::object();
  for (const auto& [token, id] : {std::pair{cls, cls_id}, {sep, sep_id}}) {
    json["special_tokens"][token] = {{"id", token}, {"ids", {id}}, {"tokens", {token}}};
  }
  return json;
}

TokenizerJson strip_accents_json(const WordPieceOptions& options) {
  return options.strip_accents ? TokenizerJson(*options.strip_accents) : TokenizerJson();
}

TokenizerJson word_piece_model(const std::vector<std::string>& vocab,
                               const std::unordered_map<std::string_view, int64_t>& ids,
                               const std::string& unk) {
  TokenizerJson model{{"type", "WordPiece"},
                      {"unk_token", unk},
                      {"continuing_subword_prefix", "##"},
                      {"max_input_chars_per_word", 100}};
  // ordered_json searches keys linearly, so the 30,000 keys are appended directly.
  auto pieces = TokenizerJson::object();
  std::vector<std::pair<const std::string, TokenizerJson>>& entries =
      pieces.get_ref<TokenizerJson::object_t&>();
  for (size_t id = 0; id < vocab.size(); ++id) {
    if (ids.at(vocab[id]) == static_cast<int64_t>(id)) {
      entries.emplace_back(vocab[id], id);
    }
  }
  model["vocab"] = std::move(pieces);
  return model;
}

TokenizerFiles word_piece_files(const std::vector<std::string>& vocab,
                                const WordPieceOptions& options, std::vector<AddedToken> added) {
  std::unordered_map<std::string_view, int64_t> ids;
  for (size_t id = 0; id < vocab.size(); ++id) {
    ids[vocab[id]] = static_cast<int64_t>(id); // of equal pieces the later counts
  }
  std::erase_if(added, [](const AddedToken& token) { return token.content.empty(); });
  const auto required = [&](const std::string& token, const char* name) {
    const auto found = ids.find(token);
    const auto other = std::ranges::find(added, token, &AddedToken::content);
    if (other == added.end() && (token.empty() || found == ids.end())) {
      throw InputError(kAutoTokenizer, std::string("the vocabulary lacks ") + name + "=" + token,
                       "[UNK], [CLS], [SEP] and [PAD] among its pieces",
                       "use the vocabulary the model was trained with");
    }
    return other != added.end() ? other->id : found->second;
  };
  required(options.unk_token, "unk_token");
  required(options.pad_token, "pad_token");
  const int64_t cls = required(options.cls_token, "cls_token");
  const int64_t sep = required(options.sep_token, "sep_token");
  TokenizerJson config{{"clean_up_tokenization_spaces", true},
                       {"do_lower_case", options.do_lower_case},
                       {"strip_accents", strip_accents_json(options)},
                       {"tokenize_chinese_chars", options.tokenize_chinese_chars},
                       {"tokenizer_class", "BertTokenizer"}};
  for (const auto& [name, token] : {std::pair{"unk_token", options.unk_token},
                                    {"sep_token", options.sep_token},
                                    {"pad_token", options.pad_token},
                                    {"cls_token", options.cls_token},
                                    {"mask_token", options.mask_token}}) {
    const bool listed = std::ranges::count(added, token, &AddedToken::content) > 0;
    if (!listed && ids.contains(token)) {
      added.push_back({.content = token, .id = ids.at(token)});
    }
    if (listed || ids.contains(token)) {
      config[name] = token;
    }
  }
  std::ranges::stable_sort(added, {}, &AddedToken::id);
  if (options.model_max_length > 0) {
    config["model_max_length"] = options.model_max_length;
  }
  config["added_tokens_decoder"] = TokenizerJson::object();
  TokenizerJson json{{"version", "1.0"}, {"truncation", nullptr}, {"padding", nullptr}};
  json["added_tokens"] = TokenizerJson::array();
  for (const AddedToken& token : added) {
    auto entry = added_token_json(token);
    json["added_tokens"].push_back(entry);
    entry.erase("id");
    config["added_tokens_decoder"][std::to_string(token.id)] = std::move(entry);
  }
  json["normalizer"] = {{"type", "BertNormalizer"},
                        {"clean_text", true},
                        {"handle_chinese_chars", options.tokenize_chinese_chars},
                        {"strip_accents", strip_accents_json(options)},
                        {"lowercase", options.do_lower_case}};
  json["pre_tokenizer"] = {{"type", "BertPreTokenizer"}};
  json["post_processor"] = bert_post_processor(options.cls_token, cls, options.sep_token, sep);
  json["decoder"] = {{"type", "WordPiece"}, {"prefix", "##"}, {"cleanup", true}};
  json["model"] = word_piece_model(vocab, ids, options.unk_token);
  return {.name = "the vocabulary",
          .tokenizer = json.dump(2) + "\n",
          .config = config.dump(2) + "\n",
          .tokenizer_class = "BertTokenizer"};
}

// GPT-2's or RoBERTa's tokenizer.json from vocab.json and merges.txt.
class BytePairFiles {
 public:
  BytePairFiles(const std::filesystem::path& folder, const nlohmann::json& config)
      : folder_(folder), vocab_(read_json_file(kAutoTokenizer, folder / "vocab.json")) {
    const bool roberta = is_roberta(config);
    kind_ = roberta ? "RobertaTokenizer" : "GPT2Tokenizer";
    config_ =
        roberta
            ? nlohmann::json{{"bos_token", "<s>"},
                             {"eos_token", "</s>"},
                             {"sep_token", "</s>"},
                             {"cls_token", "<s>"},
                             {"unk_token", "<unk>"},
                             {"pad_token", "<pad>"},
                             {"mask_token",
                              {{"__type", "AddedToken"}, {"content", "<mask>"}, {"lstrip", true}}},
                             {"tokenizer_class", "RobertaTokenizer"}}
            : nlohmann::json{{"bos_token", "<|endoftext|>"},
                             {"eos_token", "<|endoftext|>"},
                             {"unk_token", "<|endoftext|>"},
                             {"tokenizer_class", "GPT2Tokenizer"}};
    config_.update(config);
    for (const char* name : {"add_bos_token", "add_eos_token"}) {
      const auto part = TokenizerPart(config_, "tokenizer_config.json")[name];
      if (part.flag(false) && !roberta) {
        part.fail_value("false, or a tokenizer.json, whose post_processor adds these tokens");
      }
    }
    const bool prefix =
        TokenizerPart(config_, "tokenizer_config.json")["add_prefix_space"].flag(false);
    json_["pre_tokenizer"] = {{"type", "ByteLevel"}, {"add_prefix_space", prefix}};
    json_["post_processor"] = {{"type", "ByteLevel"}, {"trim_offsets", false}};
    if (roberta) {
      json_["post_processor"] = {{"type", "RobertaProcessing"},
                                 {"trim_offsets", true},
                                 {"add_prefix_space", prefix},
                                 {"sep", token("sep_token")},
                                 {"cls", token("cls_token")}};
    }
    json_["decoder"] = {{"type", "ByteLevel"}};
    json_["model"] = {{"type", "BPE"}, {"vocab", std::move(vocab_)}, {"merges", merges()}};
  }

  TokenizerFiles files() const {
    return {.name = (folder_ / "vocab.json").string(),
            .tokenizer = json_.dump() + "\n",
            .config = config_.dump(2) + "\n",
            .added_tokens = optional_file(folder_ / "added_tokens.json"),
            .chat_template = optional_file(folder_ / "chat_template.jinja"),
            .tokenizer_class = kind_};
  }

 private:
  bool is_roberta(const nlohmann::json& config) const {
    std::string kind = TokenizerPart(config, "tokenizer_config.json")["tokenizer_class"].text("");
    const auto path = folder_ / "config.json";
    if (kind.empty() && std::filesystem::exists(path)) {
      kind =
          TokenizerPart(read_json_file(kAutoTokenizer, path), path.string())["model_type"].text("");
    }
    for (char& letter : kind) {
      letter = letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter + 32) : letter;
    }
    for (const auto& [name, roberta] : {std::pair{"roberta", true},
                                        {"bart", true},
                                        {"longformer", true},
                                        {"gpt2", false},
                                        {"gpt_neo", false}}) {
      if (kind.starts_with(name)) {
        return roberta;
      }
    }
    fail_tokenizer_file(folder_.string(),
                        "vocab.json and merges.txt of " + (kind.empty() ? "an unknown kind" : kind),
                        "tokenizer.json, or GPT-2 or RoBERTa as tokenizer_class in "
                        "tokenizer_config.json or as model_type in config.json",
                        "load the folder with transformers and call save_pretrained");
  }

  nlohmann::json token(const char* name) const {
    const std::string content = token_name(config_, name, "");
    const auto found = vocab_.is_object() ? vocab_.find(content) : vocab_.end();
    if (found == vocab_.end()) {
      fail_tokenizer_file((folder_ / "vocab.json").string(),
                          "it lacks " + std::string(name) + "=" + content,
                          "the vocabulary that the model was trained with");
    }
    return {content, *found};
  }

  nlohmann::json merges() const {
    nlohmann::json merges = nlohmann::json::array();
    const auto path = folder_ / "merges.txt";
    const std::string text = read_file(path);
    if (const size_t bad = invalid_utf8_position(text); bad != std::string::npos) {
      fail_tokenizer_file(path.string(), "invalid UTF-8 at offset " + std::to_string(bad), "UTF-8");
    }
    for (std::string& line : split(text, "\n")) {
      if (line.ends_with('\r')) {
        line.pop_back();
      }
      if (!line.empty() && !line.starts_with("#version")) {
        merges.push_back(std::move(line));
      }
    }
    return merges;
  }

  std::filesystem::path folder_;
  nlohmann::json vocab_;
  nlohmann::json config_{};
  std::string kind_{};
  nlohmann::json json_{{"version", "1.0"}};
};

nlohmann::json with_special_tokens(nlohmann::json config, nlohmann::json map) {
  const bool has_more =
      config.contains("extra_special_tokens") || config.contains("additional_special_tokens");
  if (config.contains("added_tokens_decoder")) {
    return config;
  }
  for (auto [key, value] : map.items()) {
    if (value.is_object() && value.contains("content")) {
      value["__type"] = "AddedToken"; // as tokenizer_config.json says it
    }
    if (key == "extra_special_tokens" && value.is_array() && config[key].is_array()) {
      config[key].insert(config[key].end(), value.begin(), value.end());
    } else if (key != "additional_special_tokens" || !has_more) {
      config[key] = value;
    }
  }
  return config;
}

TokenizerFiles read_tokenizer_files(const std::filesystem::path& folder) {
  const auto json_path = folder / "tokenizer.json";
  const auto vocab_path = folder / "vocab.txt";
  TokenizerFiles files{.name = json_path.string(),
                       .tokenizer = optional_file(json_path),
                       .config = optional_file(folder / "tokenizer_config.json"),
                       .special_tokens = optional_file(folder / "special_tokens_map.json"),
                       .added_tokens = optional_file(folder / "added_tokens.json"),
                       .chat_template = optional_file(folder / "chat_template.jinja")};
  const auto config = parsed_object(folder / "tokenizer_config.json", files.config);
  const auto map = parsed_object(folder / "special_tokens_map.json", files.special_tokens);
  const auto merged = with_special_tokens(config, map);
  const bool has_vocab = std::filesystem::exists(vocab_path);
  if (!files.tokenizer.empty() || has_vocab) {
    const auto json = parsed_object(json_path, files.tokenizer);
    const auto vocab = has_vocab ? read_vocab_txt(vocab_path) : std::vector<std::string>();
    if (json.contains("model")) {
      if (has_vocab) {
        check_same_vocab(vocab_path.string(), vocab,
                         TokenizerPart(json, files.name)["model"]["vocab"].json());
      }
      const auto model = folder / "config.json";
      files.tokenizer_class =
          tokenizer_class(merged, parsed_object(model, optional_file(model)), json);
      return files;
    }
    if (!has_vocab) {
      fail_tokenizer_file(files.name, "it has no model", "a tokenizer.json with a vocabulary");
    }
    const auto options = word_piece_options(json, merged, files.name);
    check_special_tokens(vocab_path.string(), vocab, options, config);
    auto made = word_piece_files(
        vocab, options,
        read_added_tokens(config, parsed_object(folder / "added_tokens.json", files.added_tokens)));
    made.name = vocab_path.string();
    auto known = TokenizerJson::parse(made.config);
    known.update(TokenizerJson(merged));
    made.config = known.dump(2) + "\n";
    made.chat_template = files.chat_template;
    return made;
  }
  if (std::filesystem::exists(folder / "vocab.json") &&
      std::filesystem::exists(folder / "merges.txt")) {
    return BytePairFiles(folder, merged).files();
  }
  for (const char* name : {"sentencepiece.bpe.model", "spiece.model", "tokenizer.model"}) {
    if (std::filesystem::exists(folder / name)) {
      fail_tokenizer_file((folder / name).string(), "a SentencePiece model without tokenizer.json",
                          "tokenizer.json",
                          "load the folder with transformers and call save_pretrained");
    }
  }
  fail_tokenizer_file(
      folder.string(), "the folder has no vocabulary",
      "vocab.txt or tokenizer.json, or vocab.json and merges.txt",
      "copy it from the model that these weights come from, or complete a folder of "
      "Hugging Face's cache with hf download");
}

} // namespace detail

WordPieceTokenizer::WordPieceTokenizer(const std::vector<std::string>& vocab,
                                       const WordPieceOptions& options,
                                       const std::vector<AddedToken>& added_tokens)
    : Tokenizer(detail::word_piece_files(vocab, options, added_tokens)) {}

} // namespace hasten
