// Reads a part of a tokenizer's JSON files. Each error names the file and the path in it.
// Threading: const functions may be called from several threads.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace hasten::detail {

class TokenizerPart {
 public:
  /// Keeps a reference to `json`. `file` is the file's name, `path` the path in it.
  TokenizerPart(const nlohmann::json& json, std::string file, std::string path = {})
      : json_(&json), file_(std::move(file)), path_(std::move(path)) {}

  bool is_null() const { return json_->is_null(); }
  const nlohmann::json& json() const { return *json_; }
  const std::string& file() const { return file_; }
  /// The member; a part that is null if this is null or lacks it. Throws InputError if this is
  /// neither null nor an object.
  TokenizerPart operator[](const char* name) const;
  /// The elements of an array.
  std::vector<TokenizerPart> items() const;
  std::string text() const;
  int64_t integer() const;
  double number() const;
  /// The value, or `otherwise` if this is null.
  bool flag(bool otherwise) const;
  std::string text(const std::string& otherwise) const { return is_null() ? otherwise : text(); }
  int64_t integer(int64_t otherwise) const { return is_null() ? otherwise : integer(); }
  std::string type() const { return (*this)["type"].text(); }
  /// One character.
  int32_t character() const;
  /// Position of the text in `names`.
  size_t one_of(const std::vector<std::string>& names) const;

  /// Throws InputError "[text::AutoTokenizer] file: path: what. Expected …".
  [[noreturn]] void fail(const std::string& what, const std::string& expected,
                         const std::string& fix = {}) const;
  [[noreturn]] void fail_value(const std::string& expected) const;

 private:
  const nlohmann::json* json_;
  std::string file_;
  std::string path_;
};

[[noreturn]] void fail_tokenizer_file(const std::string& file, const std::string& what,
                                      const std::string& expected, const std::string& fix = {});

/// Checks the keys of a part of tokenizer.json and of the parts in it (check_known_keys). `part` is its
/// name in the file, such as "normalizer"; "*": the file.
void check_tokenizer_keys(const std::string& file, const std::string& part,
                          const nlohmann::json& json);

} // namespace hasten::detail
