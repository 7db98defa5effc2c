// The classes with which transformers loads a tokenizer. A class takes the vocabulary and the merges of a
// tokenizer.json, and makes the other parts from its own options in tokenizer_config.json.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace hasten::detail {

/// The class of a folder, by its tokenizer_config.json, config.json and tokenizer.json: "BertTokenizer",
/// "RobertaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer", "LlamaTokenizer" or "XLMRobertaTokenizer".
/// Empty: one that takes tokenizer.json as it is.
std::string tokenizer_class(const nlohmann::json& config, const nlohmann::json& model_config,
                            const nlohmann::json& tokenizer);

/// Replaces the parts of a tokenizer.json (named `file`) by those of the class. Throws InputError for an
/// option of another type, a model of another type, and a special token that the vocabulary lacks.
void apply_tokenizer_class(const std::string& kind, const nlohmann::json& config,
                           const std::string& file, nlohmann::json& tokenizer);

} // namespace hasten::detail
