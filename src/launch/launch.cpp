#include "hasten/launch/launch.h"

#include <algorithm>
#include <csignal>
#include <cstring>
#include <memory>
#include <span>
#include <tuple>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/host_memory.h"
#include "hasten/base/log.h"
#include "hasten/base/recorded_error.h"
#include "hasten/base/store_server.h"
#include "hasten/base/text.h"
#include "hasten/base/world.h"
#include "node_link.h"
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

World outer_world(const RendezvousOptions& rendezvous) {
  if (!rendezvous.several()) {
    return world_from_environment();
  }
  try {
    const World world = world_from_environment();
    return world.source == "Slurm" ? World() : world;
  } catch (const InputError&) { // incomplete, like MASTER_ADDR alone: the ranks get all variables
    return {};
  }
}

namespace detail {

using LaunchClock = std::chrono::steady_clock;
constexpr LaunchClock::time_point kLaunchNever = LaunchClock::time_point::max();
// Time from SIGKILL until a process that has not ended is given up.
constexpr auto kLaunchKillWait = std::chrono::seconds(5);
constexpr auto kLaunchSecondSignal = std::chrono::seconds(1);

void check_rendezvous(const RendezvousOptions& r) {
  const auto refuse = [](const std::string& what, const std::string& expected) {
    throw InputError("launch::launch", what, expected);
  };
  if (r.min_nodes < 1 || r.max_nodes < r.min_nodes || r.max_nodes > kMaxWorldSize) {
    refuse("nnodes=" + std::to_string(r.min_nodes) + ":" + std::to_string(r.max_nodes),
           "1 <= min_nodes <= max_nodes <= " + std::to_string(kMaxWorldSize));
  }
  if (r.node_rank >= r.max_nodes || (r.node_rank >= 0 && r.min_nodes != r.max_nodes)) {
    refuse("node_rank=" + std::to_string(r.node_rank) +
               " with nnodes=" + std::to_string(r.min_nodes) + ":" + std::to_string(r.max_nodes),
           "a node rank below a fixed number of nodes");
  }
  if (r.several()) {
    parse_endpoint(r.endpoint);
  }
  if (r.join_timeout.count() < 1 || r.last_call_timeout.count() < 0) {
    refuse("join_timeout=" + std::to_string(r.join_timeout.count()) +
               ", last_call_timeout=" + std::to_string(r.last_call_timeout.count()),
           "join_timeout >= 1 and last_call_timeout >= 0 seconds");
  }
}

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
  check_rendezvous(options.rendezvous);
  const World outer = outer_world(options.rendezvous);
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

/// The failure of a rank of this host.
struct RankFailure {
  int rank = -1; // in the world
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
  /// `link`: to the launchers of other hosts; null if there are none.
  LaunchJudge(const LaunchOptions& options, const LaunchWorld& world, NodeLink* link,
              RankGroup& group, RankOutput& output)
      : options_(options), world_(world), link_(link), group_(group), output_(output) {}

  LaunchResult run() {
    while ((!group_.all_ended() && !given_up_) || !others_ended()) {
      for (const RankEvent& event : group_.wait(std::min(time_left(), look_interval_))) {
        if (event.rank >= 0) {
          on_end(event.rank);
        } else {
          on_signal(event.signal);
        }
      }
      find_frozen();
      listen();
      act_on_deadlines();
    }
    finish_output();
    return result();
  }

 private:
  int in_world(int local_rank) const { return world_.first_rank + local_rank; }
  std::string name(int local_rank) const { return "rank " + std::to_string(in_world(local_rank)); }

  /// Whether nothing more comes from other hosts, which learn that the ranks here have ended.
  bool others_ended() {
    if (link_ != nullptr && !std::exchange(reported_end_, true)) {
      link_->report_end();
    }
    return link_ == nullptr || link_->hear().ended;
  }

  /// Acts on what the launchers of other hosts say.
  void listen() {
    if (link_ == nullptr) {
      return;
    }
    const NodeNews news = link_->hear();
    if (news.signal != 0 && signal_ == 0 && failures_.empty()) {
      on_signal(news.signal);
    }
    if (news.failure && news.failure->node != world_.node && !stopped_by_others_) {
      stopped_by_others_ = true;
      if (!group_.all_ended()) {
        terminate_at_ = std::min(terminate_at_, LaunchClock::now() + options_.settle);
      }
    }
  }

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
    RankFailure failure{in_world(rank), std::chrono::system_clock::now(), terminating_, {}};
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
    const std::string ended =
        name(rank) + " " + describe(end) + (unsaid ? ": " + failure.message : "");
    if (end.code == 0 || signal_ != 0) {
      if (unsaid) {
        log_warning(ended);
      }
      return;
    }
    if (options_.keep_going && failure.rank != 0) {
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
    if (link_ != nullptr) {
      const RankFailure first = in_order()[0];
      const auto age = std::chrono::system_clock::now() - first.time;
      link_->report({.rank = first.rank,
                     .follows = first.follows,
                     .code = code_of(first),
                     .age = std::chrono::duration_cast<std::chrono::milliseconds>(age).count(),
                     .reason = reason_of(first),
                     .message = first.message});
    }
  }

  /// The failures of this host's ranks, the cause first.
  std::vector<RankFailure> in_order() const {
    auto failures = failures_;
    std::ranges::stable_sort(failures, [](const auto& a, const auto& b) {
      return std::tie(a.follows, a.time) < std::tie(b.follows, b.time);
    });
    return failures;
  }
  const ProcessEnd& end_of(const RankFailure& failure) const {
    return group_.end(failure.rank - world_.first_rank);
  }
  int code_of(const RankFailure& failure) const { return failure.froze ? 1 : end_of(failure).code; }
  std::string reason_of(const RankFailure& failure) const {
    return "rank " + std::to_string(failure.rank) +
           (link_ == nullptr ? "" : " on " + world_.hosts[static_cast<size_t>(world_.node)]) + " " +
           (failure.froze ? "froze" : describe(end_of(failure)));
  }

  bool failed(int rank) const {
    return std::ranges::any_of(failures_, [&](const auto& f) { return f.rank == in_world(rank); });
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
    if (options_.keep_going && in_world(rank) != 0) {
      log_warning(name(rank) + " froze: " + what);
    } else {
      const auto at = std::chrono::system_clock::now() - stopped_for;
      add_failure({in_world(rank), at, false, what, false, true}, "froze");
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
      if (link_ != nullptr) {
        link_->report_signal(signal);
      }
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
          living.push_back(std::to_string(in_world(rank)));
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
    const std::vector<RankFailure> failures = in_order();
    const auto elsewhere = link_ == nullptr ? std::nullopt : link_->hear().failure;
    if (elsewhere && elsewhere->node != world_.node) {
      result.exit_code = elsewhere->code;
      result.first_failed_rank = elsewhere->rank;
      result.reason = elsewhere->reason + (elsewhere->rank < 0 ? "" : " first");
      result.message = elsewhere->message;
      add_consequences(failures, {}, result);
    } else if (!failures.empty()) {
      const RankFailure& first = failures[0];
      result.first_failed_rank = first.rank;
      result.exit_code = code_of(first);
      result.reason = reason_of(first) + (world_.world_size > 1 ? " first" : "");
      std::set<std::string_view> said;
      for (const RankFailure& failure : failures) {
        if (failure.shown) {
          said.insert(failure.common());
        }
      }
      result.shown = !said.insert(first.common()).second;
      result.message = first.message.empty() ? output_.stderr_tail(first.rank - world_.first_rank)
                                             : first.message;
      add_consequences(std::span(failures).subspan(1), std::move(said), result);
    } else if (signal_ != 0) {
      const char* name = ::sigdescr_np(signal_);
      result.exit_code = 128 + signal_;
      result.reason =
          "stopped by signal " + std::to_string(signal_) + " (" + (name ? name : "unknown") + ")";
    }
    return result;
  }

  /// `said`: what has been printed.
  void add_consequences(std::span<const RankFailure> failures, std::set<std::string_view> said,
                        LaunchResult& result) const {
    for (const RankFailure& other : failures) {
      const bool unsaid =
          !other.follows && !other.message.empty() && said.insert(other.common()).second;
      result.shown = result.shown && !unsaid;
      result.consequences.push_back("rank " + std::to_string(other.rank) + " " +
                                    describe(end_of(other)) + (unsaid ? ": " + other.message : ""));
    }
  }

  const LaunchOptions& options_;
  const LaunchWorld& world_;
  NodeLink* const link_;
  RankGroup& group_;
  RankOutput& output_;
  std::vector<RankFailure> failures_; // in the order in which ranks ended
  const int64_t memory_kills_ = memory_kills();
  bool reported_end_ = false; // the other launchers know that the ranks here have ended
  bool stopped_by_others_ = false; // a failure on another host is known
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

LaunchWorld one_host_world(int nproc, std::unique_ptr<StoreServer>& store) {
  // A free port, for programs that serve their own c10d store.
  const auto [free_fd, port] = listen_on_loopback();
  FileDescriptor(free_fd).close();
  LaunchWorld world{.world_size = nproc, .master_port = port};
  if (nproc > 1) {
    world.store.socket = unique_socket_name(launcher_socket_start(port));
    store = std::make_unique<StoreServer>(world.store);
  }
  return world;
}

} // namespace detail

LaunchResult launch(const LaunchOptions& options) {
  detail::check_launch_options(options);
  std::unique_ptr<detail::NodeLink> link;
  std::unique_ptr<detail::StoreServer> store; // where the ranks of one host meet
  detail::LaunchWorld world;
  if (options.rendezvous.several()) {
    link = std::make_unique<detail::NodeLink>(options);
    world = link->world();
  } else {
    world = detail::one_host_world(options.nproc, store);
  }
  detail::RankOutput output(options, world.first_rank);
  detail::RankGroup group(options, world, output);
  return detail::LaunchJudge(options, world, link.get(), group, output).run();
}

} // namespace hasten
