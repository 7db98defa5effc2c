// Reads a family of environment variables and collects all problems. Private to src/base.
#pragma once

#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "hasten/base/world.h"

namespace hasten::detail {

constexpr int kAnyNumber = std::numeric_limits<int>::max();

/// The variable's value. Empty if it is not set or empty.
std::optional<std::string> environment_value(const std::string& name);

class WorldVariables {
 public:
  /// Returns `otherwise` if the variable is not set, or is not a number (which is a problem).
  int number(const std::string& name, int least, int most, int otherwise);
  /// Adds a problem unless `value` < `limit`. The names are those of variables.
  void below(const std::string& name, int value, const std::string& limit_name, int limit);
  void problem(std::string text) { problems_.push_back(std::move(text)); }
  /// Throws InputError with all problems, if there are any.
  void check(const std::string& expected, const std::string& fix) const;

 private:
  std::vector<std::string> problems_;
};

/// Names of variables.
struct MpiNames {
  std::string rank;
  std::string size;
  std::string local_rank;
  std::string local_size;
};

/// HASTEN_STORE_FILE if no port is set; else empty.
std::string store_file_name();

/// MASTER_PORT, or a port between 15000 and 24999 that is derived from `job`.
int master_port_or(WorldVariables& variables, int64_t job);

// Each reads the world from one family, whose variables must all be set.
World torchrun_world();
/// Of mpirun and mpiexec. `command` starts ranks on several hosts.
World mpi_world(const MpiNames& names, const char* source, const std::string& command);
World slurm_world();

} // namespace hasten::detail
