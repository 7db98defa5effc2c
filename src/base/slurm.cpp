// Slurm's variables in a step, and the short forms of its lists.
#include <algorithm>
#include <numeric>

#include "hasten/base/text.h"
#include "world_variables.h"

namespace hasten {

namespace detail {

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

} // namespace detail

} // namespace hasten
