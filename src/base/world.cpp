#include "hasten/base/world.h"

#include <unistd.h>
#include <xxhash.h>

#include <algorithm>
#include <fstream>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <optional>

#include "hasten/base/error.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"

namespace hasten {

namespace detail {

constexpr int kMaxThreads = 4096;
constexpr const char* kWorldWhere = "base::world_from_environment";

constexpr int kAnyNumber = std::numeric_limits<int>::max();

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
struct RankNames {
  std::string rank;
  std::string size;
  std::string local_rank;
  std::string local_size;
};

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

/// MASTER_PORT, or a port between 15000 and 24999 that is derived from `job`.
int master_port_or(WorldVariables& variables, int64_t job) {
  return variables.number("MASTER_PORT", 1, 65535, 15'000 + static_cast<int>(job % 10'000));
}

/// HASTEN_STORE_FILE if no port is set; else empty.
std::string store_file_name() {
  return environment_value("MASTER_PORT") ? std::string()
                                          : environment_value("HASTEN_STORE_FILE").value_or("");
}

World read_ranks(WorldVariables& variables, const RankNames& names, const char* source) {
  World world;
  world.source = source;
  world.rank = variables.number(names.rank, 0, kAnyNumber, 0);
  world.world_size = variables.number(names.size, 1, kMaxWorldSize, kAnyNumber);
  world.local_rank = variables.number(names.local_rank, 0, kAnyNumber, 0);
  world.local_world_size = variables.number(names.local_size, 1, kMaxWorldSize, 1);
  return world;
}

void compare_ranks(WorldVariables& variables, const RankNames& names, const World& world) {
  variables.below(names.rank, world.rank, names.size, world.world_size);
  variables.below(names.local_rank, world.local_rank, names.local_size, world.local_world_size);
  variables.below(names.local_size, world.local_world_size - 1, names.size, world.world_size);
}

// Each reads the world from one family, whose variables must all be set.
World torchrun_world() {
  WorldVariables variables;
  const RankNames names{"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"};
  const bool ours = environment_value("HASTEN_LAUNCHER").has_value();
  World world = read_ranks(variables, names, ours ? "hasten launch" : "torchrun");
  world.master_port = variables.number("MASTER_PORT", 1, 65535, 0);
  compare_ranks(variables, names, world);
  variables.check("RANK < WORLD_SIZE and LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE",
                  "start with hasten launch or torchrun, or unset them");
  world.master_addr = environment_value("MASTER_ADDR").value_or(world.master_addr);
  world.agent_store = environment_value("TORCHELASTIC_USE_AGENT_STORE") == "True";
  return world;
}

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
  const std::string older = environment_value("OMPI_MCA_ess_base_jobid").value_or("");
  const std::string name = environment_value("PMIX_NAMESPACE").value_or(older);
  if (name.empty() || rank_variable == "PMI_RANK") {
    return launcher_process(rank_variable);
  }
  return static_cast<int64_t>(XXH3_64bits(name.data(), name.size()) >> 1);
}

/// Of mpirun and mpiexec. `command` starts ranks on several hosts.
World mpi_world(const RankNames& names, const char* source, const std::string& command) {
  WorldVariables variables;
  World world = read_ranks(variables, names, source);
  compare_ranks(variables, names, world);
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

constexpr size_t kMostHosts = 65'536;

/// Appends each number of "08-10,12", with leading zeros, to each of `stems`. False if the text has
/// another form.
bool append_ranges(const std::string& ranges, std::vector<std::string>& stems) {
  std::vector<std::string> numbers;
  for (const std::string& range : split(ranges)) {
    const size_t dash = range.find('-');
    const std::string first = range.substr(0, dash);
    const auto low = parse_number<int>(first);
    const auto high = dash == std::string::npos ? low : parse_number<int>(range.substr(dash + 1));
    if (!low || !high || *low < 0 || *high < *low ||
        numbers.size() + static_cast<size_t>(*high - *low) >= kMostHosts) {
      return false;
    }
    for (int number = *low; number <= *high; ++number) {
      const std::string digits = std::to_string(number);
      const size_t width = std::max(first.size(), digits.size());
      numbers.push_back(std::string(width - digits.size(), '0') + digits);
    }
  }
  if (stems.size() * numbers.size() > kMostHosts) {
    return false;
  }
  std::vector<std::string> names;
  for (const std::string& stem : stems) {
    for (const std::string& number : numbers) {
      names.push_back(stem + number);
    }
  }
  stems = std::move(names);
  return true;
}

/// The hosts of one element: "rack[1-2]-n[01-04]".
std::vector<std::string> expand_host_pattern(const std::string& pattern) {
  std::vector<std::string> names{""};
  for (size_t at = 0; at < pattern.size();) {
    const size_t open = std::min(pattern.find('[', at), pattern.size());
    for (std::string& name : names) {
      name += pattern.substr(at, open - at);
    }
    if (open == pattern.size()) {
      break;
    }
    const size_t close = pattern.find(']', open);
    if (close == std::string::npos ||
        !append_ranges(pattern.substr(open + 1, close - open - 1), names)) {
      return {};
    }
    at = close + 1;
  }
  return names;
}

std::vector<std::string> expand_host_list(const std::string& text) {
  std::vector<std::string> hosts;
  for (size_t at = 0; at <= text.size();) {
    // A comma in brackets separates ranges, not hosts.
    size_t end = at;
    for (bool inside = false; end < text.size() && (inside || text[end] != ','); ++end) {
      inside = text[end] == '[' || (inside && text[end] != ']');
    }
    const std::string pattern = text.substr(at, end - at);
    const auto some = expand_host_pattern(pattern);
    if (pattern.empty() || pattern[0] == '[' || some.empty() ||
        hosts.size() + some.size() > kMostHosts) {
      return {};
    }
    hosts.insert(hosts.end(), some.begin(), some.end());
    at = end + 1;
  }
  return hosts;
}

std::vector<int> expand_task_counts(const std::string& text) {
  std::vector<int> counts;
  for (const std::string& part : split(text)) {
    const size_t times = std::min(part.find("(x"), part.size());
    const auto tasks = parse_number<int>(part.substr(0, times));
    std::optional<int> hosts = 1;
    if (times != part.size()) {
      hosts = part.back() == ')'
                  ? parse_number<int>(part.substr(times + 2, part.size() - times - 3))
                  : std::nullopt;
    }
    if (!tasks || !hosts || *tasks < 0 || *hosts < 1 ||
        counts.size() + static_cast<size_t>(*hosts) > kMostHosts) {
      return {};
    }
    counts.insert(counts.end(), static_cast<size_t>(*hosts), *tasks);
  }
  return counts;
}

World slurm_world() {
  WorldVariables variables;
  World world;
  world.source = "Slurm";
  world.rank = variables.number("SLURM_PROCID", 0, kAnyNumber, 0);
  world.world_size = variables.number("SLURM_STEP_NUM_TASKS", 1, kMaxWorldSize, 1);
  world.local_rank = variables.number("SLURM_LOCALID", 0, kAnyNumber, 0);
  world.cpus_per_task = variables.number("SLURM_CPUS_PER_TASK", 1, kMaxWorldSize, 0);
  const int node = variables.number("SLURM_NODEID", 0, kAnyNumber, 0);
  const int job = variables.number("SLURM_JOB_ID", 0, kAnyNumber, 0);
  const std::string list = *environment_value("SLURM_STEP_NODELIST");
  const std::string tasks = *environment_value("SLURM_STEP_TASKS_PER_NODE");
  const auto hosts = expand_host_list(list);
  const auto counts = expand_task_counts(tasks);
  variables.below("SLURM_PROCID", world.rank, "SLURM_STEP_NUM_TASKS", world.world_size);
  if (hosts.empty()) {
    variables.problem("SLURM_STEP_NODELIST=" + list + " is not a list of hosts");
  }
  if (counts.empty() || counts.size() != hosts.size() ||
      std::accumulate(counts.begin(), counts.end(), int64_t{0}) != world.world_size) {
    variables.problem("SLURM_STEP_TASKS_PER_NODE=" + tasks + " with SLURM_STEP_NODELIST=" + list +
                      " and SLURM_STEP_NUM_TASKS=" + std::to_string(world.world_size));
  } else if (static_cast<size_t>(node) >= counts.size()) {
    variables.problem("SLURM_NODEID=" + std::to_string(node) + " with SLURM_STEP_NODELIST=" + list);
  } else {
    world.local_world_size = counts[static_cast<size_t>(node)];
    variables.below("SLURM_LOCALID", world.local_rank, "SLURM_STEP_TASKS_PER_NODE",
                    world.local_world_size);
  }
  // Concurrent steps of one job get different ports.
  const auto step = parse_number<int>(environment_value("SLURM_STEP_ID").value_or("0"));
  world.master_port = master_port_or(variables, job + int64_t{1009} * step.value_or(0));
  variables.check("what srun sets in a step", "start with srun, torchrun or hasten launch");
  if (hosts.size() > 1) {
    world.master_addr = environment_value("MASTER_ADDR").value_or(hosts[0]);
  }
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
    return std::ranges::any_of(
        signs, [](const auto& sign) { return environment_value(sign).has_value(); });
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
  if (environment_value("LOCAL_RANK") || environment_value("LOCAL_WORLD_SIZE")) {
    family.needed.insert(family.needed.end(), {"LOCAL_RANK", "LOCAL_WORLD_SIZE"});
  }
  return family;
}

/// In order of precedence.
std::vector<WorldFamily> world_families() {
  std::vector<WorldFamily> families{torchrun_family()};
  const auto add_mpi = [&](const char* source, const RankNames& n, const char* command) {
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
    std::erase(others, used->name + "'s");
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
