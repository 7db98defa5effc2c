// What a program can register by name, for the rest of the process.
// Threading: any thread may call every function.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/base/text.h"

namespace hasten::detail {

/// Values by name. They stay where they are.
template <typename Value>
class Registry {
 public:
  using Values = std::map<std::string, Value, std::less<>>;
  explicit Registry(Values values) : values_(std::move(values)) {}

  /// Throws InputError "[where] …" for an empty name and one that is there.
  void add(const char* where, const std::string& name, Value value) {
    const std::lock_guard lock(mutex_);
    if (name.empty() || !values_.try_emplace(name, std::move(value)).second) {
      throw InputError(where, "name=" + name, "a name, and not one that is registered already");
    }
  }
  /// Null: none of this name.
  const Value* find(std::string_view name) const {
    const std::lock_guard lock(mutex_);
    const auto found = values_.find(name);
    return found == values_.end() ? nullptr : &found->second;
  }
  /// Throws InputError "[where] what=name" that has all names, if there is none of this one.
  const Value& get(const char* where, const std::string& what, std::string_view name) const {
    const Value* found = find(name);
    if (found == nullptr) {
      throw InputError(where, what + "=" + std::string(name), "one of " + joined(names()),
                       write_nearest(name, names()));
    }
    return *found;
  }
  /// Sorted.
  std::vector<std::string> names() const {
    const std::lock_guard lock(mutex_);
    return mapped(values_, [](const auto& entry) { return entry.first; });
  }

 private:
  mutable std::mutex mutex_{};
  Values values_;
};

} // namespace hasten::detail
