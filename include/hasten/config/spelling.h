// How users spell the values of an enumeration in flags, JSON and messages.
// Threading: free functions.
#pragma once

#include <array>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hasten/base/text.h"

namespace hasten {

/// The spellings of E, in the order of its values, which count from 0. An enumeration that users
/// name in flags or JSON specialises kSpellings as a std::array of texts.
template <typename E>
inline constexpr std::array<const char*, 0> kSpellings{};

/// Additional spellings, for example other libraries' names. They are read, never written.
template <typename E>
inline constexpr std::array<std::pair<const char*, E>, 0> kOtherSpellings{};

template <typename E>
std::string spelling(E value) {
  return kSpellings<E>.at(static_cast<size_t>(value));
}

/// All values, by spelling.
template <typename E>
std::map<std::string, E> spellings() {
  std::map<std::string, E> all;
  for (size_t i = 0; i < kSpellings<E>.size(); ++i) {
    all.emplace(kSpellings<E>[i], static_cast<E>(i));
  }
  return all;
}

/// The value that `text` spells; empty if there is none.
template <typename E>
std::optional<E> spelled(const std::string& text) {
  auto all = spellings<E>();
  all.insert(kOtherSpellings<E>.begin(), kOtherSpellings<E>.end());
  const auto found = all.find(text);
  return found == all.end() ? std::nullopt : std::optional<E>(found->second);
}

template <typename E>
std::vector<std::string> spelling_names() {
  return mapped(spellings<E>(), [](const auto& of) { return of.first; });
}

/// "one of a, b, c", for the "Expected" of an error.
template <typename E>
std::string any_spelling() {
  return "one of " + joined(spelling_names<E>());
}

} // namespace hasten
