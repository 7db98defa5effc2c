#include "hasten/launch/launch.h"

#include <algorithm>
#include <csignal>
#include <cstring>
#include <tuple>

#include "hasten/base/error.h"
#include "hasten/base/host_memory.h"
#include "hasten/base/log.h"
#include "hasten/base/recorded_error.h"
#include "hasten/base/text.h"
#include "hasten/base/world.h"
#include "rank_group.h"

namespace hasten {

std::string signal_names(const std::vector<int>& signals) {
  std::vector<std::string> names;
  for (const int signal : signals) {
    const char* name = ::sigabbrev_np(signal);
    names.push_back(name == nullptr ? std::to_string(signal) : std::string("SIG") + name);
  }
  return joined(names, ",");
}

std::vector<int> parse_signals(const std::string& text) {
  constexpr int kLastSignal = 31; // the others are real-time signals
  std::vector<int> signals;
  for (const std::string& name : text.empty() ? std::vector<std::string>() : split(text)) {
    int signal = 1;
    while (signal <= kLastSignal && signal_names({signal}) != name) {
      ++signal;
    }
    if (signal > kLastSignal || signal == SIGKILL || signal == SIGSTOP || signal == SIGTSTP ||
        signal == SIGCONT || signal == SIGCHLD) {
      throw InputError("launch::parse_signals", "signals=" + text + ": \"" + name + "\"",
                       "names of signals that the launcher can pass on, e.g. "
                       "SIGTERM,SIGINT,SIGHUP,SIGUSR1");
    }
    signals.push_back(signal);
  }
  return signals;
}

namespace detail {

using LaunchClock = std::chrono::steady_clock;
constexpr LaunchClock::time_point kLaunchNever = LaunchClock::time_point::max();
// Time from SIGKILL until a process that has not ended is given up.
constexpr auto kLaunchKillWait = std::chrono::seconds(5);
constexpr auto kLaunchSecondSignal = std::chrono::seconds(1);

void check_launch_options(const LaunchOptions& options) {
  constexpr const char* kWhere = "launch::launch";
  if (options.nproc < 1) {
    throw InputError(kWhere, "nproc=" + std::to_string(options.nproc), "1 or more");
  }
  if (options.argv.empty()) {
    throw InputError(kWhere, "no program to start", "a program after nproc");
  }
  parse_signals(signal_names(options.signals_to_handle));
  if (options.max_restarts != 0) {
    throw InputError(kWhere, "max_restarts=" + std::to_string(options.max_restarts),
                     "0, because hasten does not restart ranks",
                     "start the program again, and let it resume from its last checkpoint");
  }
  const World outer = world_from_environment();
  if (outer.world_size > 1) {
    throw InputError(kWhere,
                     "nproc=" + std::to_string(options.nproc) +
                         " inside a world of WORLD_SIZE=" + std::to_string(outer.world_size) +
                         " by " + outer.source + " (RANK=" + std::to_string(outer.rank) + ")",
                     "one launcher", "leave nproc out, or start without " + outer.source);
  }
  const std::string warning = oversubscription(options.nproc, threads_per_rank(options.nproc));
  if (!warning.empty()) {
    log_warning(warning);
  }
}

/// The failure of a rank.
struct RankFailure {
  int rank = -1;
  std::chrono::system_clock::time_point time{}; // of its recorded error, or of its end
  bool follows = false; // from a peer's failure, or from the launcher's SIGTERM
  std::string message{}; // that the rank recorded
  bool shown = false; // the rank printed the message on this process's stderr
  bool froze = false;

  /// Equal for ranks that have an error in common: without "rank r/w ".
  std::string_view common() const {
    const std::string_view text = message;
    const bool named = text.starts_with("rank " + std::to_string(rank) + "/");
    return text.substr(named ? std::min(text.find(' ', 5), text.size()) : 0);
  }
};

/// Decides when the ranks get SIGTERM and when SIGKILL.
class LaunchJudge {
 public:
  LaunchJudge(const LaunchOptions& options, RankGroup& group, RankOutput& output)
      : options_(options), group_(group), output_(output) {}

  LaunchResult run() {
    while (!group_.all_ended() && !given_up_) {
      for (const RankEvent& event : group_.wait(std::min(time_left(), look_interval_))) {
        if (event.rank >= 0) {
          on_end(event.rank);
        } else {
          on_signal(event.signal);
        }
      }
      find_frozen();
      act_on_deadlines();
    }
    finish_output();
    return result();
  }

 private:
  std::chrono::milliseconds time_left() const {
    const auto next = std::min(terminate_at_, kill_at_);
    if (next == kLaunchNever) {
      return std::chrono::hours(1);
    }
    return std::chrono::ceil<std::chrono::milliseconds>(next - LaunchClock::now());
  }

  void on_end(int rank) {
    const ProcessEnd& end = group_.end(rank);
    if (failed(rank)) {
      return;
    }
    RankFailure failure{rank, std::chrono::system_clock::now(), terminating_, {}};
    if (const auto error = read_recorded_error(output_.error_file(rank))) {
      failure.time = std::min(failure.time, error->time);
      failure.follows = error->of_a_peer;
      failure.message = error->message;
      failure.shown = error->shown && options_.logs.on_console(rank, Std::err);
    }
    if (end.signal == SIGKILL && memory_kills() > memory_kills_) {
      failure.message =
          "the kernel ended it: the host or its control group (memory.max) ran out of memory. Fix: "
          "lower the batch size or the length of the samples, or raise the limit";
    }
    const bool unsaid = !failure.shown && !failure.message.empty();
    const std::string ended = "rank " + std::to_string(rank) + " " + describe(end) +
                              (unsaid ? ": " + failure.message : "");
    if (end.code == 0 || signal_ != 0) {
      if (unsaid) {
        log_warning(ended);
      }
      return;
    }
    if (options_.keep_going && rank != 0) {
      log_warning(ended + (group_.all_ended() ? "" : "; the other ranks may continue without it"));
      return;
    }
    add_failure(failure, describe(end));
  }

  void add_failure(const RankFailure& failure, const std::string& how) {
    failures_.push_back(failure);
    if (failures_.size() == 1 && !group_.all_ended()) {
      if (!failure.follows) { // otherwise the rank that failed before it is named first
        log_info("rank " + std::to_string(failure.rank) + " " + how +
                 "; the other ranks are stopped");
      }
      terminate_at_ = LaunchClock::now() + options_.settle;
    }
  }

  bool failed(int rank) const {
    return std::ranges::any_of(failures_, [&](const auto& f) { return f.rank == rank; });
  }

  /// A rank that a signal has stopped does nothing, and SIGTERM does not end it.
  void find_frozen() {
    const auto now = LaunchClock::now();
    // If this process was stopped, the times of the ranks say nothing.
    const bool slept = now - looked_ > std::chrono::seconds(1);
    looked_ = now;
    for (int rank = 0; rank < group_.size(); ++rank) {
      auto& since = stopped_since_[static_cast<size_t>(rank)];
      if (!group_.stopped(rank)) {
        since = kLaunchNever;
        continue;
      }
      since = slept || since == kLaunchNever ? now : since;
      if (signal_ == 0 && !terminating_ && !failed(rank) &&
          now - since >= options_.heartbeat_timeout * 4 / 5) {
        on_frozen(rank, std::chrono::ceil<std::chrono::milliseconds>(now - since));
      }
    }
  }

  void on_frozen(int rank, std::chrono::milliseconds stopped_for) {
    const std::string what =
        "process " + std::to_string(group_.pid(rank)) +
        " has been stopped by a signal (SIGSTOP) for " + std::to_string(stopped_for.count()) +
        " ms. Fix: find out what stopped it, or raise HASTEN_HEARTBEAT_TIMEOUT";
    if (options_.keep_going && rank != 0) {
      log_warning("rank " + std::to_string(rank) + " froze: " + what);
    } else {
      const auto at = std::chrono::system_clock::now() - stopped_for;
      add_failure({rank, at, false, what, false, true}, "froze");
    }
    group_.kill_rank(rank);
  }

  /// Waits until all output of the ranks has been copied. A signal ends the wait, because the
  /// console may be stuck.
  void finish_output() {
    output_.drain();
    while (!output_.drained(std::chrono::milliseconds(50))) {
      for (const RankEvent& event : group_.wait(std::chrono::milliseconds(0))) {
        if (event.signal == SIGTSTP) {
          ::raise(SIGSTOP);
        } else if (event.signal != 0) {
          return;
        }
      }
    }
  }

  /// Ctrl-Z: the terminal stops only this process, because the ranks have their own groups.
  void pause() {
    group_.send(SIGSTOP);
    ::raise(SIGSTOP);
    group_.send(SIGCONT); // this process has been continued
  }

  void on_signal(int signal) {
    if (signal == SIGTSTP) {
      pause();
      return;
    }
    group_.send(signal);
    group_.send(SIGCONT); // a stopped rank handles signals only after it continues
    const auto now = LaunchClock::now();
    if (signal_ == 0 && failures_.empty()) {
      signal_ = signal;
      kill_at_ = now + options_.interrupt_grace;
    } else {
      // This is the second signal, or ranks are already being stopped after a failure. The user
      // has waited long enough.
      kill_at_ = std::min(kill_at_, now + kLaunchSecondSignal);
    }
  }

  void act_on_deadlines() {
    const auto now = LaunchClock::now();
    if (now >= terminate_at_) {
      terminate_at_ = kLaunchNever;
      kill_at_ = std::min(kill_at_, now + options_.grace);
      terminating_ = true;
      group_.send(SIGTERM);
      group_.send(SIGCONT);
    }
    if (now >= kill_at_) {
      std::vector<std::string> living;
      bool ending = false; // many processes that end at once take longer than one
      for (int rank = 0; rank < group_.size(); ++rank) {
        if (!group_.ended(rank)) {
          living.push_back(std::to_string(rank));
          ending = ending || process_stat(group_.pid(rank)).state != 'D';
        }
      }
      kill_at_ = now + kLaunchKillWait;
      if (killed_ && ending) {
        return;
      }
      log_warning((living.size() == 1 ? "rank " : "ranks ") + joined(first_items(living, 8)) +
                  " did not end and " + (killed_ ? "cannot" : "must") + " be killed");
      group_.send(SIGKILL);
      given_up_ = killed_;
      killed_ = true;
    }
  }

  LaunchResult result() const {
    LaunchResult result;
    for (int rank = 0; rank < group_.size(); ++rank) {
      result.ends.push_back(group_.ended(rank) ? group_.end(rank)
                                               : ProcessEnd{128 + SIGKILL, SIGKILL});
    }
    if (!failures_.empty()) {
      auto failures = failures_;
      std::ranges::stable_sort(failures, [](const auto& a, const auto& b) {
        return std::tie(a.follows, a.time) < std::tie(b.follows, b.time);
      });
      const int first = failures[0].rank;
      const ProcessEnd& end = group_.end(first);
      result.first_failed_rank = first;
      const bool froze = failures[0].froze;
      result.exit_code = froze ? 1 : end.code;
      result.reason = "rank " + std::to_string(first) + " " + (froze ? "froze" : describe(end));
      std::set<std::string_view> said;
      for (const RankFailure& failure : failures) {
        if (failure.shown) {
          said.insert(failure.common());
        }
      }
      result.shown = !said.insert(failures[0].common()).second;
      if (group_.size() > 1) {
        result.reason += " first";
      }
      result.message =
          failures[0].message.empty() ? output_.stderr_tail(first) : failures[0].message;
      for (size_t i = 1; i < failures.size(); ++i) {
        const RankFailure& other = failures[i];
        const bool unsaid =
            !other.follows && !other.message.empty() && said.insert(other.common()).second;
        result.shown = result.shown && !unsaid;
        result.consequences.push_back("rank " + std::to_string(other.rank) + " " +
                                      describe(group_.end(other.rank)) +
                                      (unsaid ? ": " + other.message : ""));
      }
    } else if (signal_ != 0) {
      const char* name = ::sigdescr_np(signal_);
      result.exit_code = 128 + signal_;
      result.reason =
          "stopped by signal " + std::to_string(signal_) + " (" + (name ? name : "unknown") + ")";
    }
    return result;
  }

  const LaunchOptions& options_;
  RankGroup& group_;
  RankOutput& output_;
  std::vector<RankFailure> failures_; // in the order in which ranks ended
  const int64_t memory_kills_ = memory_kills();
  bool terminating_ = false; // this launcher has sent SIGTERM to the ranks
  int signal_ = 0; // the first signal that was forwarded
  bool killed_ = false;
  bool given_up_ = false;
  LaunchClock::time_point terminate_at_ = kLaunchNever;
  LaunchClock::time_point kill_at_ = kLaunchNever;
  const std::chrono::milliseconds look_interval_ =
      std::clamp(options_.heartbeat_timeout / 20, std::chrono::milliseconds(20),
                 std::chrono::milliseconds(250));
  LaunchClock::time_point looked_ = LaunchClock::now();
  std::vector<LaunchClock::time_point> stopped_since_ = std::vector<LaunchClock::time_point>(
      static_cast<size_t>(group_.size()), kLaunchNever); // [rank]
};

} // namespace detail

LaunchResult launch(const LaunchOptions& options) {
  detail::check_launch_options(options);
  detail::RankOutput output(options);
  detail::RankGroup group(options, output);
  return detail::LaunchJudge(options, group, output).run();
}

} // namespace hasten
