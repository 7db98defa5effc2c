// Sets environment variables during a scope.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace hasten::testing_support {

/// Values by name. An empty optional unsets the variable.
using EnvironmentValues = std::vector<std::pair<std::string, std::optional<std::string>>>;

/// Unsets every variable by which a launcher describes this process.
inline EnvironmentValues without_launchers() {
  EnvironmentValues values{
      {"RANK", {}}, {"WORLD_SIZE", {}}, {"MASTER_ADDR", {}}, {"MASTER_PORT", {}}};
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string text = *entry;
    for (const char* start : {"LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "HASTEN_STORE_SOCKET",
                              "HASTEN_STORE_FILE", "OMPI_", "PMIX_", "PMI_", "MPI_", "SLURM_"}) {
      if (text.rfind(start, 0) == 0) {
        values.emplace_back(text.substr(0, text.find('=')), std::nullopt);
      }
    }
  }
  return values;
}

class ScopedEnvironment {
 public:
  explicit ScopedEnvironment(const EnvironmentValues& values) {
    for (const auto& [name, value] : values) {
      const char* old = std::getenv(name.c_str());
      old_.emplace_back(name, old ? std::optional<std::string>(old) : std::nullopt);
      put(name, value);
    }
  }
  ~ScopedEnvironment() {
    for (auto entry = old_.rbegin(); entry != old_.rend(); ++entry) {
      put(entry->first, entry->second);
    }
  }
  ScopedEnvironment(const ScopedEnvironment&) = delete;
  ScopedEnvironment& operator=(const ScopedEnvironment&) = delete;

 private:
  static void put(const std::string& name, const std::optional<std::string>& value) {
    if (value) {
      ::setenv(name.c_str(), value->c_str(), 1);
    } else {
      ::unsetenv(name.c_str());
    }
  }

  EnvironmentValues old_;
};

} // namespace hasten::testing_support
