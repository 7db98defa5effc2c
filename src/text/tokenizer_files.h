// The content of a tokenizer's files.
#pragma once

#include <array>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

namespace hasten::detail {

struct TokenizerFiles {
  std::string name{}; // of tokenizer.json or of what stands for it, for messages
  std::string tokenizer{}; // text of tokenizer.json
  std::string config{}; // text of tokenizer_config.json; may be empty
  std::string special_tokens{}; // text of special_tokens_map.json; may be empty
  std::string added_tokens{}; // text of added_tokens.json; may be empty
  std::string chat_template{}; // text of chat_template.jinja, which is kept; may be empty
  std::string tokenizer_class{}; // as tokenizer_class() gives it
};

inline constexpr std::array kSpecialTokens{"bos_token", "eos_token", "unk_token", "sep_token",
                                           "pad_token", "cls_token", "mask_token"};

/// A file's JSON object; an empty one if it has no text. Throws InputError.
nlohmann::json parsed_object(const std::filesystem::path& path, const std::string& text);

/// tokenizer_config.json with what counts of special_tokens_map.json: nothing, if the former has
/// added_tokens_decoder, else each of its keys.
nlohmann::json with_special_tokens(nlohmann::json config, nlohmann::json map);

/// Reads the folder; what it has in older files becomes a tokenizer.json. Throws InputError.
TokenizerFiles read_tokenizer_files(const std::filesystem::path& folder);

} // namespace hasten::detail
