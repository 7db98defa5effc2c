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
};

inline constexpr std::array kSpecialTokens{"bos_token", "eos_token", "unk_token", "sep_token",
                                           "pad_token", "cls_token", "mask_token"};

/// Reads the folder; what it has in older files becomes a tokenizer.json. Throws InputError.
TokenizerFiles read_tokenizer_files(const std::filesystem::path& folder);

} // namespace hasten::detail
