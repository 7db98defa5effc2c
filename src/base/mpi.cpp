// The variables of Open MPI's mpirun, and of MPICH's and Intel MPI's (PMI).
#include <unistd.h>
#include <xxhash.h>

#include <fstream>
#include <iterator>
#include <string>

#include "hasten/base/process.h"
#include "world_variables.h"

namespace hasten {

namespace detail {

/// The nearest ancestor process that does not have `variable`: the launcher, even if a script is
/// between them. 1 if /proc does not show it.
int launcher_process(const std::string& variable) {
  int process = ::getppid();
  while (process > 1) {
    std::ifstream file("/proc/" + std::to_string(process) + "/environ");
    const std::string environment = '\0' + std::string(std::istreambuf_iterator<char>(file), {});
    if (environment.find('\0' + variable + "=") == std::string::npos) {
      return process;
    }
    process = process_stat(process).parent;
  }
  return 1;
}

/// A number that is the same in all ranks of this host and very probably another in other worlds.
int64_t mpi_job(const std::string& rank_variable) {
  std::string name;
  for (const char* variable : {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}) {
    if (const auto value = environment_value(variable); value && name.empty()) {
      name = *value;
    }
  }
  if (name.empty() || rank_variable == "PMI_RANK") {
    return launcher_process(rank_variable);
  }
  return static_cast<int64_t>(XXH3_64bits(name.data(), name.size()) >> 1);
}

World mpi_world(const MpiNames& names, const char* source, const std::string& command) {
  WorldVariables variables;
  World world;
  world.source = source;
  world.rank = variables.number(names.rank, 0, kAnyNumber, 0);
  world.world_size = variables.number(names.size, 1, kMaxWorldSize, kAnyNumber);
  world.local_rank = variables.number(names.local_rank, 0, kAnyNumber, 0);
  world.local_world_size = variables.number(names.local_size, 1, kMaxWorldSize, 1);
  variables.below(names.rank, world.rank, names.size, world.world_size);
  variables.below(names.local_rank, world.local_rank, names.local_size, world.local_world_size);
  variables.below(names.local_size, world.local_world_size - 1, names.size, world.world_size);
  if (world.local_world_size == world.world_size) {
    world.master_port = master_port_or(variables, mpi_job(names.rank));
  } else {
    for (const char* name : {"MASTER_ADDR", "MASTER_PORT"}) {
      if (!environment_value(name) && store_file_name().empty()) {
        variables.problem(std::string(name) + " is not set, with " + names.local_size + "=" +
                          std::to_string(world.local_world_size) + " and " + names.size + "=" +
                          std::to_string(world.world_size));
      }
    }
    world.master_port = variables.number("MASTER_PORT", 1, 65535, 0);
    world.master_addr = environment_value("MASTER_ADDR").value_or(world.master_addr);
  }
  variables.check(names.rank + " < " + names.size + ", " + names.local_rank + " < " +
                      names.local_size + " <= " + names.size +
                      ", and on several hosts the address of rank 0's",
                  command);
  return world;
}

} // namespace detail

} // namespace hasten
