// The parent: starts the ranks, reads their reports, decides which cases passed.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>

#include "support/rank_process.h"
#include "support/world_run.h"

namespace hasten::testing_support {

// How long the other ranks may continue after one has failed, and how late a watchdog may be before
// the parent acts instead. Seconds.
static double grace_seconds() { return std::min(3.0, case_seconds() / 2); }

// How long the ranks may take to start. It takes a second on a busy machine.
static constexpr double kStartSeconds = 60;

/// The ranks' reports of one case.
struct CaseState {
  std::set<int> started{};
  std::set<int> ended{};
  std::map<std::string, std::set<int>> problems{}; // message to ranks
  std::string skip_reason{};
  bool skipped = false;
  bool outside = false; // not a case: before the first or after the last one
  double start = 0; // machine_seconds() of the first rank's
};

/// One world, from its start to its end or its first failed case.
class WorldLife {
 public:
  WorldLife(int world_size, const std::vector<std::string>& argv)
      : current_(static_cast<size_t>(world_size)),
        plans_(static_cast<size_t>(world_size), -1),
        done_(static_cast<size_t>(world_size), -1),
        ranks_(start_ranks(world_size, argv, {})) {}

  void run() {
    double last_progress = machine_seconds() + kStartSeconds;
    while (!all_ended(ranks_)) {
      wait_for_reports(ranks_, 100);
      for (int rank = 0; rank < size(); ++rank) {
        RankProcess& process = ranks_[static_cast<size_t>(rank)];
        if (process.ended) {
          continue;
        }
        for (const auto& report : read_reports(process)) {
          last_progress = machine_seconds();
          handle(rank, report);
        }
        if (process.ended) {
          judge_end(rank);
        }
      }
      // A rank's own watchdog acts earlier, unless the rank is frozen.
      if (machine_seconds() > last_progress + case_seconds() + grace_seconds()) {
        stop_all("did not end in time, and its watchdog is silent");
      } else if (failing_ && machine_seconds() > failed_at_ + grace_seconds()) {
        stop_all("was ended by the harness after another rank had failed");
      }
    }
    check_counts();
  }

  bool failing() const { return failing_; }
  /// A failure before the first case, after the last, or at an unknown place.
  bool hopeless() const { return hopeless_; }
  int planned() const { return plans_[0]; }
  const std::vector<std::string>& order() const { return order_; }
  const CaseState& state(const std::string& name) const { return cases_.at(name); }
  bool finished(const std::string& name) const {
    const CaseState& state = cases_.at(name);
    return !state.problems.empty() || state.ended.size() == ranks_.size();
  }
  int size() const { return static_cast<int>(ranks_.size()); }

 private:
  void handle(int rank, const nlohmann::json& report) {
    const auto index = static_cast<size_t>(rank);
    const std::string event = report.at("event");
    if (event == "plan") {
      plans_[index] = report.at("cases");
      compare_plans();
    } else if (event == "start") {
      current_[index] = report.at("case");
      CaseState& state = cases_[current_[index]];
      if (state.started.empty()) {
        order_.push_back(current_[index]);
        state.start = machine_seconds();
        std::printf("[ RUN      ] %s\n", current_[index].c_str());
        std::fflush(stdout);
      }
      state.started.insert(rank);
    } else if (event == "failure") {
      const std::string at = report.value("at", "");
      problem(rank, (at.empty() ? "" : at + " ") + std::string(report["message"]));
    } else if (event == "skip") {
      cases_[current_[index]].skipped = true;
      cases_[current_[index]].skip_reason = report.at("reason");
    } else if (event == "end") {
      end_case(rank);
    } else if (event == "done") {
      done_[index] = report.at("cases");
      current_[index].clear();
    }
  }

  void end_case(int rank) {
    const std::string& name = current_[static_cast<size_t>(rank)];
    CaseState& state = cases_[name];
    state.ended.insert(rank);
    if (state.ended.size() == ranks_.size() && state.problems.empty()) {
      std::printf("[%s] %s (%.0f ms)\n", state.skipped ? "  SKIPPED " : "       OK ", name.c_str(),
                  (machine_seconds() - state.start) * 1000);
      std::fflush(stdout);
    }
  }

  void problem(int rank, const std::string& message) {
    std::string name = current_[static_cast<size_t>(rank)];
    if (name.empty()) {
      hopeless_ = true;
      const bool after = done_[static_cast<size_t>(rank)] >= 0;
      name = after ? "after the last case" : "before the first case";
      if (cases_[name].started.empty()) {
        order_.push_back(name);
        cases_[name].started.insert(rank);
        cases_[name].outside = true;
      }
    }
    cases_[name].problems[message].insert(rank);
    if (!failing_) {
      failing_ = true;
      failed_at_ = machine_seconds();
    }
  }

  void judge_end(int rank) {
    const auto index = static_cast<size_t>(rank);
    const ProcessEnd& end = ranks_[index].end;
    const bool reported = end.code == kWatchdogExit || end.code == kFailedCaseExit;
    if (done_[index] >= 0 ? end.code != 0 : !reported) {
      problem(rank, describe(end));
    }
  }

  void stop_all(const char* why) {
    for (int rank = 0; rank < size(); ++rank) {
      RankProcess& process = ranks_[static_cast<size_t>(rank)];
      if (!process.ended) {
        problem(rank, is_stopped(process) ? "was stopped by a signal" : why);
        kill_rank(process);
      }
    }
  }

  void check_counts() {
    for (int rank = 0; rank < size() && !failing_; ++rank) {
      const auto index = static_cast<size_t>(rank);
      if (done_[index] != plans_[index]) {
        problem(rank, "ran " + std::to_string(done_[index]) + " of " +
                          std::to_string(plans_[index]) + " cases");
      }
    }
  }

  void compare_plans() {
    if (std::count(plans_.begin(), plans_.end(), -1) > 0) {
      return;
    }
    for (int rank = 1; rank < size(); ++rank) {
      const int plan = plans_[static_cast<size_t>(rank)];
      if (plan != plans_[0]) {
        current_[static_cast<size_t>(rank)].clear();
        problem(rank,
                "has " + std::to_string(plan) + " cases, rank 0 has " + std::to_string(plans_[0]));
      }
    }
  }

  std::vector<std::string> current_; // case by rank
  std::vector<int> plans_; // cases to run, by rank; -1: unknown
  std::vector<int> done_; // cases that ran, by rank; -1: the rank is not done
  std::vector<RankProcess> ranks_;
  std::map<std::string, CaseState> cases_;
  std::vector<std::string> order_; // cases in the order of their start
  bool failing_ = false;
  bool hopeless_ = false;
  double failed_at_ = 0;
};

/// "[rank 0,2/4] Ddp.X: message".
static void print_problems(const std::string& name, const CaseState& state, int world_size) {
  for (const auto& [message, ranks] : state.problems) {
    std::string who;
    for (const int rank : ranks) {
      who += (who.empty() ? "" : ",") + std::to_string(rank);
    }
    std::printf("[rank %s/%d] %s: %s\n", who.c_str(), world_size, name.c_str(), message.c_str());
  }
  std::printf("[  FAILED  ] %s\n", name.c_str());
}

/// `filter` without the cases that have run already.
static std::string filter_without(std::string filter, const std::vector<std::string>& finished) {
  bool negative = filter.find('-') != std::string::npos;
  for (const std::string& name : finished) {
    filter += (negative ? ":" : "-") + name;
    negative = true;
  }
  return filter;
}

/// The results of all worlds.
struct WorldTotals {
  std::vector<std::string> finished{};
  std::vector<std::string> failed{};
  std::vector<std::string> skipped{}; // with reasons
  int planned = -1;
  bool hopeless = false;

  void add(const WorldLife& life) {
    planned = planned < 0 ? life.planned() : planned;
    hopeless = life.hopeless();
    for (const std::string& name : life.order()) {
      if (!life.finished(name)) {
        continue; // did not fail, and runs again
      }
      const CaseState& state = life.state(name);
      if (!state.outside) {
        finished.push_back(name);
      }
      if (!state.problems.empty()) {
        failed.push_back(name);
        print_problems(name, state, life.size());
      } else if (state.skipped) {
        skipped.push_back(name + ": " + state.skip_reason);
      }
    }
  }
};

static int print_totals(const WorldTotals& totals, int world_size) {
  for (const std::string& line : totals.skipped) {
    std::printf("[  SKIPPED ] %s\n", line.c_str());
  }
  for (const std::string& name : totals.failed) {
    std::printf("[  FAILED  ] %s\n", name.c_str());
  }
  const auto ran = static_cast<int>(totals.finished.size());
  const bool complete = ran == totals.planned;
  if (!complete) {
    std::printf("[  FAILED  ] %d of %d planned cases were run\n", ran, totals.planned);
  }
  std::printf("[==========] %d cases ran on %d ranks: %d passed, %d failed, %d skipped.\n", ran,
              world_size,
              std::max(0, ran - static_cast<int>(totals.failed.size() + totals.skipped.size())),
              static_cast<int>(totals.failed.size()), static_cast<int>(totals.skipped.size()));
  return totals.failed.empty() && complete ? 0 : 1;
}

int run_as_parent(int world_size, const std::vector<std::string>& argv) {
  std::vector<std::string> rank_argv = {"/proc/self/exe"};
  std::string filter = "*";
  if (const char* variable = std::getenv("GTEST_FILTER")) {
    filter = variable;
  }
  for (size_t i = 1; i < argv.size(); ++i) {
    constexpr std::string_view kFilter = "--gtest_filter=";
    if (argv[i].starts_with(kFilter)) {
      filter = argv[i].substr(kFilter.size());
    } else if (argv[i].starts_with("--gtest_")) {
      rank_argv.push_back(argv[i]);
    }
  }
  rank_argv.emplace_back();
  WorldTotals totals;
  while (true) {
    rank_argv.back() = "--gtest_filter=" + filter_without(filter, totals.finished);
    WorldLife life(world_size, rank_argv);
    life.run();
    const size_t before = totals.finished.size();
    totals.add(life);
    const bool stuck = totals.finished.size() == before;
    const bool complete = static_cast<int>(totals.finished.size()) >= totals.planned;
    if (!life.failing() || life.hopeless() || stuck || complete) {
      break;
    }
    std::printf("[ RESTART  ] %d ranks\n", world_size);
  }
  return print_totals(totals, world_size);
}

} // namespace hasten::testing_support
