#include "tokenizer_class.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "tokenizer_part.h"

namespace hasten::detail {

constexpr const char* kMetaspaceMark = "\xE2\x96\x81";
constexpr const char* kQwen2Words =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// The class of the models of a type.
struct ClassOfModel {
  std::string_view model_type;
  std::string_view tokenizer_class; // empty: one that takes tokenizer.json as it is
  bool always; // also where tokenizer_config.json names another: published files name wrong ones
};
constexpr ClassOfModel kClassesOfModels[] = {
    {"bert", "BertTokenizer", false},
    {"distilbert", "BertTokenizer", false},
    {"ernie", "BertTokenizer", false},
    {"gpt2", "GPT2Tokenizer", false},
    {"ministral", "", true},
    {"ministral3", "", true},
    {"mistral", "", true},
    {"modernbert", "", true},
    {"phi3", "", true},
    {"qwen2", "Qwen2Tokenizer", true},
    {"qwen3", "Qwen2Tokenizer", false},
    {"roberta", "RobertaTokenizer", false},
    {"xlm-roberta", "XLMRobertaTokenizer", false},
};
constexpr std::string_view kClasses[] = {"BertTokenizer",    "GPT2Tokenizer",
                                         "LlamaTokenizer",   "Qwen2Tokenizer",
                                         "RobertaTokenizer", "XLMRobertaTokenizer"};

static std::string named_class(const nlohmann::json& config, const char* file) {
  std::string name = TokenizerPart(config, file)["tokenizer_class"].text("");
  if (name.ends_with("Fast")) {
    name.resize(name.size() - 4);
  }
  return name == "DistilBertTokenizer" ? "BertTokenizer" : name;
}

std::string tokenizer_class(const nlohmann::json& config, const nlohmann::json& model_config,
                            const nlohmann::json& tokenizer) {
  std::string named = named_class(config, "tokenizer_config.json");
  if (named.empty()) {
    named = named_class(model_config, "config.json");
  }
  const auto type = TokenizerPart(model_config, "config.json")["model_type"].text("");
  const auto* model = std::ranges::find(kClassesOfModels, type, &ClassOfModel::model_type);
  const bool known = model != std::end(kClassesOfModels);
  if (known && (named.empty() || model->always)) {
    return std::string(model->tokenizer_class);
  }
  for (const char* part : {"pre_tokenizer", "decoder"}) {
    const std::string text = tokenizer.value(part, nlohmann::json()).dump();
    if (named == "LlamaTokenizer" && text.find("\"ByteLevel\"") != std::string::npos) {
      return "";
    }
  }
  return std::ranges::find(kClasses, named) == std::end(kClasses) ? "" : named;
}

// The parts of one class. The options of each are null, or of the class's own type.
class ClassParts {
 public:
  ClassParts(std::string kind, const nlohmann::json& config, const std::string& file,
             nlohmann::json& json)
      : kind_(std::move(kind)),
        config_(config, "tokenizer_config.json"),
        file_(TokenizerPart(json, file)),
        json_(json) {
    if (kind_ == "BertTokenizer") {
      apply_bert();
    } else if (kind_ == "XLMRobertaTokenizer") {
      apply_xlm_roberta();
    } else if (kind_ == "LlamaTokenizer") {
      apply_llama();
    } else {
      apply_byte_level(kind_ == "Qwen2Tokenizer");
    }
  }

 private:
  // An option that may not be null, where it is given.
  TokenizerPart given(const char* name, const char* expected) const {
    const TokenizerPart part = config_[name];
    if (part.is_null() && config_.json().contains(name)) {
      part.fail_value(expected);
    }
    return part;
  }
  bool flag(const char* name, bool otherwise) const {
    return given(name, "true or false").flag(otherwise);
  }
  std::string token(const char* name, const char* otherwise) const {
    const TokenizerPart part = given(name, "a text");
    return part.json().is_object() ? part["content"].text() : part.text(otherwise);
  }
  // The text and the id of a special token.
  nlohmann::json special(const char* name, const char* otherwise) const {
    const std::string text = token(name, otherwise);
    for (const auto& each : json_.value("added_tokens", nlohmann::json::array())) {
      if (each.is_object() && each.value("content", nlohmann::json()) == text) {
        return {text, each.value("id", nlohmann::json())};
      }
    }
    for (const auto& [key, value] : json_.at("model").at("vocab").items()) {
      const bool listed = value.is_array() && !value.empty() && value[0] == text; // of a Unigram
      if (listed || key == text) {
        return {text, listed ? nlohmann::json(std::stoll(key)) : value};
      }
    }
    file_.fail("the vocabulary lacks " + std::string(name) + "=" + text,
               "the tokens of " + kind_ + ", or other names in tokenizer_config.json");
  }

  // A model with the vocabulary alone, for options of the class.
  nlohmann::json& bare_model(const std::string& type) {
    const TokenizerPart model = file_["model"];
    const std::string there = model["type"].text(!model["merges"].is_null()         ? "BPE"
                                                 : model["vocab"].json().is_array() ? "Unigram"
                                                                                    : "WordPiece");
    if (there != type) {
      file_.fail("tokenizer_class=" + kind_ + " with a " + there + " model",
                 "a " + type + " model");
    }
    nlohmann::json bare{{"type", type}};
    for (const char* kept : {"vocab", "merges"}) {
      if (json_["model"].contains(kept)) {
        bare[kept] = std::move(json_["model"][kept]);
      }
    }
    return json_["model"] = std::move(bare);
  }

  void apply_bert() {
    const auto accents = config_["strip_accents"];
    bare_model("WordPiece")["unk_token"] = token("unk_token", "[UNK]");
    json_["normalizer"] = {{"type", "BertNormalizer"},
                           {"handle_chinese_chars", flag("tokenize_chinese_chars", true)},
                           {"strip_accents", accents.json()},
                           {"lowercase", flag("do_lower_case", true)}};
    accents.flag(true); // or null
    json_["pre_tokenizer"] = {{"type", "BertPreTokenizer"}};
    json_["post_processor"] = {{"type", "BertProcessing"},
                               {"sep", special("sep_token", "[SEP]")},
                               {"cls", special("cls_token", "[CLS]")}};
    json_["decoder"] = {{"type", "WordPiece"}};
  }

  // GPT-2, RoBERTa and Qwen2.
  void apply_byte_level(bool qwen2) {
    const bool prefix =
        qwen2 ? config_["add_prefix_space"].flag(false) : flag("add_prefix_space", false);
    const nlohmann::json bytes{
        {"type", "ByteLevel"}, {"add_prefix_space", prefix}, {"use_regex", !qwen2}};
    const nlohmann::json split{
        {"type", "Split"}, {"pattern", {{"Regex", kQwen2Words}}}, {"behavior", "Isolated"}};
    bare_model("BPE");
    json_["normalizer"] = qwen2 ? nlohmann::json{{"type", "NFC"}} : nlohmann::json();
    json_["pre_tokenizer"] =
        qwen2 ? nlohmann::json{{"type", "Sequence"}, {"pretokenizers", {split, bytes}}} : bytes;
    json_["decoder"] = {{"type", "ByteLevel"}};
    if (kind_ == "RobertaTokenizer") {
      json_["post_processor"] = {{"type", "RobertaProcessing"},
                                 {"trim_offsets", flag("trim_offsets", true)},
                                 {"add_prefix_space", prefix},
                                 {"sep", special("sep_token", "</s>")},
                                 {"cls", special("cls_token", "<s>")}};
    }
  }

  static nlohmann::json metaspace(const char* scheme, bool split) {
    return {{"type", "Metaspace"},
            {"replacement", kMetaspaceMark},
            {"prepend_scheme", scheme},
            {"split", split}};
  }

  void apply_llama() {
    const bool prefix = config_["add_prefix_space"].flag(true);
    const bool legacy = flag("legacy", false);
    nlohmann::json& model = bare_model("BPE");
    model["fuse_unk"] = model["byte_fallback"] = true;
    json_["normalizer"] = nullptr;
    json_["pre_tokenizer"] = metaspace(!prefix ? "never" : legacy ? "always" : "first", false);
    nlohmann::json steps{
        {{"type", "Replace"}, {"pattern", {{"String", kMetaspaceMark}}}, {"content", " "}},
        {{"type", "ByteFallback"}},
        {{"type", "Fuse"}}};
    if (prefix) {
      steps.push_back({{"type", "Strip"}, {"content", " "}, {"start", 1}, {"stop", 0}});
    }
    json_["decoder"] = {{"type", "Sequence"}, {"decoders", steps}};
  }

  void apply_xlm_roberta() {
    // Python takes null for false.
    const bool prefix =
        config_["add_prefix_space"].flag(!config_.json().contains("add_prefix_space"));
    bare_model("Unigram")["unk_id"] = 3;
    json_["decoder"] = metaspace(prefix ? "always" : "never", true);
    json_["pre_tokenizer"] = {{"type", "Sequence"},
                              {"pretokenizers", {{{"type", "WhitespaceSplit"}}, json_["decoder"]}}};
    const auto normalizer = std::exchange(json_["normalizer"], nullptr);
    const bool sequence = normalizer.is_object() && normalizer.contains("normalizers");
    for (const auto& step :
         sequence ? normalizer["normalizers"] : nlohmann::json::array({normalizer})) {
      if (json_["normalizer"].is_null() && step.is_object() &&
          step.value("type", nlohmann::json()) == "Precompiled") {
        json_["normalizer"] = step;
      }
    }
    json_["post_processor"] = {{"type", "RobertaProcessing"},
                               {"trim_offsets", false},
                               {"sep", special("eos_token", "</s>")},
                               {"cls", special("bos_token", "<s>")}};
  }

  std::string kind_;
  TokenizerPart config_;
  TokenizerPart file_;
  nlohmann::json& json_;
};

void apply_tokenizer_class(const std::string& kind, const nlohmann::json& config,
                           const std::string& file, nlohmann::json& tokenizer) {
  if (!kind.empty()) {
    ClassParts(kind, config, file, tokenizer);
  }
}

} // namespace hasten::detail
