// The texts of tools/golden/tokenizers_golden.py, and the folder of what it has written.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "hasten/base/files.h"
#include "support/temporary_folder.h"
#include "text/tokenizer_folder.h"

namespace hasten::testing_support {

inline std::filesystem::path tokenizer_file(const std::string& name) {
  return std::filesystem::path(kTokenizerFolder) / name;
}

inline const std::vector<std::string>& tokenizer_kinds() {
  static const std::vector<std::string> kKinds{
      "bert",      "bert_cased",    "roberta",          "gpt2",       "gpt2_prefix",
      "llama2",    "llama3",        "mistral",          "modernbert", "qwen",
      "other_bpe", "other_unigram", "other_word_piece", "xlm_roberta"};
  return kKinds;
}

/// A folder with the tokenizer.json of the kind.
class KindFolder : public TemporaryFolder {
 public:
  explicit KindFolder(const std::string& kind) {
    std::filesystem::copy_file(tokenizer_file(kind + ".json"), *this / "tokenizer.json");
  }
};

/// Text `number`: words, letters of all scripts and odd characters. One in eight is no UTF-8.
class TokenizerTexts {
 public:
  std::string operator[](uint64_t number) {
    state_ = 1000003 + number;
    std::string text;
    for (uint64_t count = draw(tables_["longest"].get<uint64_t>()); count > 0; --count) {
      const uint64_t kind = draw(8);
      if (kind < 4) {
        text += pick("words").get<std::string>();
      } else if (kind < 7) {
        const auto& range = pick("ranges");
        const auto first = range[0].get<uint64_t>();
        for (uint64_t letters = 1 + draw(6); letters > 0; --letters) {
          append(text, first + draw(range[1].get<uint64_t>() - first + 1));
        }
      } else {
        append(text, pick("odd").get<uint64_t>());
      }
    }
    if (draw(8) == 0) {
      for (uint64_t count = 1 + draw(3); count > 0; --count) {
        const auto at = static_cast<size_t>(draw(text.size() + 1));
        const auto byte = static_cast<char>(pick("never").get<int>());
        text.replace(at, static_cast<size_t>(draw(2)), 1, byte);
      }
    }
    return text;
  }

 private:
  uint64_t draw(uint64_t below) {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return (state_ >> 33) % below;
  }
  const nlohmann::json& pick(const char* table) {
    return tables_[table][static_cast<size_t>(draw(tables_[table].size()))];
  }
  static void append(std::string& text, uint64_t code) {
    const auto tail = [&](int shift) { text += static_cast<char>(0x80 | (code >> shift & 0x3F)); };
    if (code < 0x80) {
      text += static_cast<char>(code);
    } else if (code < 0x800) {
      text += static_cast<char>(0xC0 | code >> 6);
      tail(0);
    } else {
      text += static_cast<char>(code < 0x10000 ? 0xE0 | code >> 12 : 0xF0 | code >> 18);
      if (code >= 0x10000) {
        tail(12);
      }
      tail(6);
      tail(0);
    }
  }

  nlohmann::json tables_ = nlohmann::json::parse(read_file(tokenizer_file("texts.json")));
  uint64_t state_ = 0;
};

} // namespace hasten::testing_support
