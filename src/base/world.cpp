#include "hasten/base/world.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <functional>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "world_variables.h"

namespace hasten {

namespace detail {

constexpr int kMaxThreads = 4096;
constexpr const char* kWorldWhere = "base::world_from_environment";

std::optional<std::string> environment_value(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  if (value == nullptr || *value == '\0') {
    return std::nullopt;
  }
  return value;
}

int WorldVariables::number(const std::string& name, int least, int most, int otherwise) {
  const auto text = environment_value(name);
  if (!text) {
    return otherwise;
  }
  const auto value = parse_number<int>(*text);
  if (!value || *value < least || *value > most) {
    std::string range = std::to_string(least) + "..";
    range += most == kAnyNumber ? "" : std::to_string(most);
    problem(name + "=" + *text + " is not in " + range);
    return otherwise;
  }
  return *value;
}

void WorldVariables::below(const std::string& name, int value, const std::string& limit_name,
                           int limit) {
  if (value >= limit) {
    problem(name + "=" + environment_value(name).value_or("") + " with " + limit_name + "=" +
            environment_value(limit_name).value_or(""));
  }
}

void WorldVariables::check(const std::string& expected, const std::string& fix) const {
  if (!problems_.empty()) {
    throw InputError(kWorldWhere, joined(problems_), expected, fix);
  }
}

int master_port_or(WorldVariables& variables, int64_t job) {
  return variables.number("MASTER_PORT", 1, 65535, 15'000 + static_cast<int>(job % 10'000));
}

std::string store_file_name() {
  return environment_value("MASTER_PORT") ? std::string()
                                          : environment_value("HASTEN_STORE_FILE").value_or("");
}

World torchrun_world() {
  WorldVariables variables;
  World world;
  world.source = "torchrun";
  world.rank = variables.number("RANK", 0, kAnyNumber, 0);
  world.world_size = variables.number("WORLD_SIZE", 1, kMaxWorldSize, kAnyNumber);
  world.local_rank = variables.number("LOCAL_RANK", 0, kAnyNumber, 0);
  world.local_world_size = variables.number("LOCAL_WORLD_SIZE", 1, kMaxWorldSize, 1);
  world.master_port = variables.number("MASTER_PORT", 1, 65535, 0);
  variables.below("RANK", world.rank, "WORLD_SIZE", world.world_size);
  variables.below("LOCAL_RANK", world.local_rank, "LOCAL_WORLD_SIZE", world.local_world_size);
  variables.below("LOCAL_WORLD_SIZE", world.local_world_size - 1, "WORLD_SIZE", world.world_size);
  variables.check("RANK < WORLD_SIZE and LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE",
                  "start with hasten launch or torchrun, or unset them");
  world.master_addr = environment_value("MASTER_ADDR").value_or(world.master_addr);
  world.agent_store = environment_value("TORCHELASTIC_USE_AGENT_STORE") == "True";
  return world;
}

/// The variables of a launcher.
struct WorldFamily {
  std::string name;
  /// If any of them is set, this launcher has set variables.
  std::vector<std::string> signs;
  /// If all of them are set, the world can be read.
  std::vector<std::string> needed;
  std::function<World()> read;

  bool present() const {
    return std::any_of(signs.begin(), signs.end(),
                       [](const auto& sign) { return environment_value(sign).has_value(); });
  }
  /// "RANK is not set, WORLD_SIZE is not set"; empty if complete.
  std::string missing() const {
    std::vector<std::string> texts;
    for (const std::string& variable : needed) {
      if (!environment_value(variable)) {
        texts.push_back(variable + " is not set");
      }
    }
    return joined(texts);
  }
};

/// torchrun's family. If one of the local variables is set, both are needed.
WorldFamily torchrun_family() {
  WorldFamily family{"torchrun",
                     {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
                     {"RANK", "WORLD_SIZE"},
                     torchrun_world};
  if (store_file_name().empty()) {
    family.needed.insert(family.needed.end(), {"MASTER_ADDR", "MASTER_PORT"});
  }
  for (const char* local : {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}) {
    if (environment_value("LOCAL_RANK") || environment_value("LOCAL_WORLD_SIZE")) {
      family.needed.emplace_back(local);
    }
  }
  return family;
}

/// In order of precedence.
std::vector<WorldFamily> world_families() {
  std::vector<WorldFamily> families{torchrun_family()};
  const auto add_mpi = [&](const char* source, const MpiNames& n, const char* command) {
    families.push_back(
        {source, {n.rank, n.size}, {n.rank, n.size, n.local_rank, n.local_size}, [=] {
           return mpi_world(n, source, command);
         }});
  };
  const char* mpiexec = "mpiexec -genv MASTER_ADDR <rank 0's host> -genv MASTER_PORT 29500 …";
  add_mpi("Open MPI",
          {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
           "OMPI_COMM_WORLD_LOCAL_SIZE"},
          "mpirun -x MASTER_ADDR=<rank 0's host> -x MASTER_PORT=29500 …");
  add_mpi("PMI", {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"}, mpiexec);
  // A shell that srun --pty started among several tasks is not a rank.
  const bool shell = environment_value("SLURM_PTY_PORT") && ::isatty(STDIN_FILENO) == 1 &&
                     environment_value("SLURM_STEP_NUM_TASKS").value_or("1") != "1";
  if (!shell) {
    families.push_back({"Slurm",
                        {"SLURM_STEP_NUM_TASKS"},
                        {"SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID",
                         "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE", "SLURM_JOB_ID"},
                        slurm_world});
  }
  if (environment_value("PMI_LOCAL_SIZE")) {
    add_mpi("PMI", {"PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"}, mpiexec);
  }
  return families;
}

} // namespace detail

World world_from_environment() {
  std::vector<std::string> incomplete;
  std::vector<std::string> others;
  const detail::WorldFamily* used = nullptr;
  const auto families = detail::world_families();
  for (const detail::WorldFamily& family : families) {
    if (!family.present()) {
      continue;
    }
    const std::string missing = family.missing();
    if (used == nullptr && missing.empty()) {
      used = &family;
      continue;
    }
    incomplete.push_back(family.name + ": " + missing);
    if ((used == nullptr || used->name != family.name) &&
        (others.empty() || others.back() != family.name + "'s")) {
      others.push_back(family.name + "'s");
    }
  }
  if (used != nullptr) {
    World world = used->read();
    others.erase(std::remove(others.begin(), others.end(), used->name + "'s"), others.end());
    world.passed_over = joined(others);
    world.store_file = detail::store_file_name();
    return world;
  }
  // A job's script sets these for its steps. Elsewhere they are an incomplete world.
  const bool master =
      detail::environment_value("MASTER_ADDR") || detail::environment_value("MASTER_PORT");
  if (incomplete.empty() && master && !detail::environment_value("SLURM_JOB_ID")) {
    incomplete.push_back("torchrun: " + families[0].missing());
  }
  if (!incomplete.empty()) {
    throw InputError(detail::kWorldWhere, joined(incomplete, "; "),
                     incomplete.size() == 1 ? "all variables of a launcher, or none"
                                            : "all variables of one launcher, or none of any",
                     "start with hasten launch, torchrun, srun or mpirun, or unset them");
  }
  return {};
}

std::string describe(const World& world) {
  std::string text = world.source == "alone"
                         ? std::string("no other ranks")
                         : "world of " + std::to_string(world.world_size) +
                               (world.world_size == 1 ? " rank by " : " ranks by ") + world.source;
  if (world.world_size > 1) {
    text += ", " + std::to_string(world.local_world_size) + " on this host, " +
            (world.store_file.empty()
                 ? "master at " + world.master_addr + ":" + std::to_string(world.master_port)
                 : "store file " + world.store_file);
  }
  if (!world.passed_over.empty()) {
    text += "; " + world.passed_over + " variables are ignored";
  }
  return text;
}

int threads_per_rank(int local_world_size) {
  if (const auto text = detail::environment_value("OMP_NUM_THREADS")) {
    // "4,2" has one number per nesting level. The first one is used.
    const auto value = parse_number<int>(text->substr(0, text->find(',')));
    if (!value || *value < 1 || *value > detail::kMaxThreads) {
      throw InputError("base::threads_per_rank",
                       "OMP_NUM_THREADS=" + *text + " is not a number of threads",
                       "1 to " + std::to_string(detail::kMaxThreads),
                       "unset it, or set it to the cores a rank may use");
    }
    return *value;
  }
  return std::max(1, allowed_cores() / std::max(1, local_world_size));
}

int threads_per_rank(const World& world) {
  if (world.cpus_per_task == 0 || detail::environment_value("OMP_NUM_THREADS")) {
    return threads_per_rank(world.local_world_size);
  }
  return std::min(world.cpus_per_task, allowed_cores());
}

std::string oversubscription(int local_world_size, int threads) {
  const int cores = allowed_cores();
  if (int64_t{local_world_size} * threads <= cores) {
    return {};
  }
  return std::to_string(local_world_size) + (local_world_size == 1 ? " rank" : " ranks") + " of " +
         std::to_string(threads) + (threads == 1 ? " thread" : " threads") + " share " +
         std::to_string(cores) + (cores == 1 ? " core" : " cores") +
         " (affinity and cgroup quota) and will wait for each other. Fix: " +
         (threads == 1 ? "fewer ranks" : "fewer ranks, or unset OMP_NUM_THREADS") + ".";
}

} // namespace hasten
