// The connection between the launchers of several hosts.
//
// Note [Launchers]
// Each launcher has one record in the store of node 0's launcher, which it writes four times a second
// (with the default heartbeat limit): a count as its heartbeat, its first failure, the signal that it
// got, and whether its ranks have ended. Node 0 reads all records and writes one: the first failure of
// all, the signal, and whether all have ended. The others read that one. So the messages grow with the
// hosts, and no clock is compared: a failure travels with its age.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "hasten/base/store_connection.h"
#include "hasten/base/store_server.h"
#include "node_plan.h"

namespace hasten::detail {

/// The first failure of a host's ranks, or the loss of a host.
struct NodeFailure {
  int node = -1; // that reported it
  int rank = -1; // -1: a host was lost
  bool follows = false; // from a peer's failure
  int code = 1; // exit code
  int64_t age = 0; // milliseconds
  std::string reason; // "rank 3 exited with code 1"
  std::string message; // that the rank recorded
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(NodeFailure, node, rank, follows, code, age, reason,
                                                message)

/// A launcher's record; node 0's other one is that of all.
struct NodeNews {
  int64_t beat = 0;
  std::optional<NodeFailure> failure{};
  int signal = 0;
  bool ended = false; // its ranks have; of all
};

/// Threading: a thread of its own exchanges the records. One thread calls the functions.
class NodeLink {
 public:
  /// Meets the launchers of the other hosts. Blocks up to join_timeout. Throws as launch() says.
  explicit NodeLink(const LaunchOptions& options);
  /// Node 0 first waits, shortly, until the others have read what happened.
  ~NodeLink();
  NodeLink(const NodeLink&) = delete;
  NodeLink& operator=(const NodeLink&) = delete;

  const LaunchWorld& world() const { return world_; }
  /// News of this host for the others.
  void report(const NodeFailure& failure);
  void report_signal(int signal);
  void report_end();
  /// What is known of all hosts. `ended`: nothing more will come.
  NodeNews hear() const;

 private:
  using Clock = StoreClock;
  void connect();
  void require_found();
  void require_same_run();
  /// Node 0: waits for the others, and says which node each is.
  std::vector<Node> gather(std::vector<size_t>& slots);
  void wait_for_plan(size_t slot);
  [[noreturn]] void refuse(const std::string& why, bool late);
  void set_plan(const std::vector<Node>& nodes, const std::vector<size_t>& slots, int port,
                size_t own_slot);

  void run();
  /// One exchange of records. False if the store has not answered.
  bool exchange();
  void look_at(const std::vector<std::string>& records);
  void lose(int node, const std::string& why);
  /// What is known of all hosts from now on.
  void learn(const NodeNews& all);
  bool over() const;

  // Requests to the store. They throw CommunicationError if it does not answer, or is gone.
  StoreReader ask(StoreOp op, const std::vector<std::string_view>& texts,
                  std::optional<int64_t> number = {});
  bool exists(const std::string& key) { return ask(StoreOp::check, {key}).number() != 0; }
  void set(const std::string& key, const std::string& value) { ask(StoreOp::set, {key, value}); }
  int64_t add(const std::string& key, int64_t more) {
    return ask(StoreOp::add, {key}, more).number();
  }
  std::vector<std::string> get(const std::vector<std::string>& keys);

  const RendezvousOptions options_;
  const Node own_;
  const std::chrono::milliseconds limit_; // without a heartbeat
  const std::chrono::milliseconds longest_end_; // of a launch after its first failure
  const bool keep_going_;
  StoreAddress address_;
  std::unique_ptr<StoreServer> server_{}; // of node 0
  std::unique_ptr<StoreConnection> connection_{};
  LaunchWorld world_{};

  // Of the thread.
  struct Peer {
    std::string record{};
    Clock::time_point seen = Clock::now();
    NodeNews news{};
    Clock::time_point failed{}; // when its failure happened
    bool lost = false;
  };
  std::vector<Peer> peers_{}; // [node] of node 0
  Clock::time_point heard_ = Clock::now(); // of another node: from node 0
  int64_t beat_ = 0;
  bool cut_ = false; // node 0 is lost

  mutable std::mutex mutex_; // guards the members below
  std::condition_variable wanted_;
  bool stopping_ = false;
  NodeNews own_news_{};
  Clock::time_point own_failed_{};
  NodeNews all_{};
  std::optional<Clock::time_point> first_failed_{}; // when a failure was first known
  std::thread thread_;
};

} // namespace hasten::detail
