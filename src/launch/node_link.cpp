#include "node_link.h"

#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <csignal>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/json.h"
#include "hasten/base/log.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"

namespace hasten::detail {

using std::chrono::milliseconds;

constexpr const char* kNodesWhere = "launch::rendezvous";
constexpr milliseconds kNodesLook{100};
// Keys in the store.
constexpr const char* kNodesRun = "nodes/run";
constexpr const char* kNodesHost = "nodes/host";
constexpr const char* kNodesJoined = "nodes/joined";
constexpr const char* kNodesPlan = "nodes/plan";
constexpr const char* kNodesRead = "nodes/read";
constexpr const char* kNodesAll = "nodes/all";

static std::string join_key(size_t slot) { return "nodes/join/" + std::to_string(slot); }
static std::string news_key(int node) { return "nodes/news/" + std::to_string(node); }

static void to_json(nlohmann::json& json, const NodeNews& news) {
  json = {{"beat", news.beat}, {"signal", news.signal}, {"ended", news.ended}};
  json["failure"] = news.failure ? nlohmann::json(*news.failure) : nlohmann::json();
}

static void from_json(const nlohmann::json& json, NodeNews& news) {
  news = {.beat = json.at("beat"), .signal = json.at("signal"), .ended = json.at("ended")};
  if (!json.at("failure").is_null()) {
    news.failure = json.at("failure").get<NodeFailure>();
  }
}

/// Whether one of the host's addresses is this host's: an own socket can have it.
static bool is_own_address(const std::string& host) {
  const auto all = host_addresses(host, 0);
  for (const addrinfo* a = all.get(); a != nullptr; a = a->ai_next) {
    const FileDescriptor fd(::socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (::bind(fd.get(), a->ai_addr, a->ai_addrlen) == 0) {
      return true;
    }
  }
  return false;
}

/// What launchers of one run have in common.
using RunFacts = std::map<std::string, std::string>;
static RunFacts run_facts(const RendezvousOptions& options) {
  return {{"rdzv_id", options.rdzv_id}, {"hasten version", HASTEN_VERSION}};
}

NodeLink::NodeLink(const LaunchOptions& options)
    : options_(options.rendezvous),
      own_(own_node(options)),
      limit_(options.heartbeat_timeout),
      longest_end_(options.settle + options.grace + options.interrupt_grace + 2 * limit_),
      keep_going_(options.keep_going),
      address_(parse_endpoint(options_.endpoint)) {
  address_.key = store_key_from_environment().value_or(StoreKey{});
  connect();
  const auto slot = static_cast<size_t>(add(kNodesJoined, 1) - 1);
  set(join_key(slot), nlohmann::json(own_).dump());
  if (server_) { // in slot 0, because the others wait for this key
    set(kNodesRun, nlohmann::json(run_facts(options_)).dump());
    std::vector<size_t> slots;
    const std::vector<Node> nodes = gather(slots);
    const auto [free_fd, port] = listen_on_loopback();
    FileDescriptor(free_fd).close(); // for programs that serve their own c10d store
    for (int node = 0; node < std::ssize(nodes); ++node) {
      set(news_key(node), nlohmann::json(NodeNews{}).dump());
    }
    set(kNodesAll, nlohmann::json(NodeNews{}).dump());
    set(kNodesPlan, nlohmann::json{{"nodes", nodes}, {"slots", slots}, {"port", port}}.dump());
    set_plan(nodes, slots, port, slot);
  } else {
    wait_for_plan(slot);
  }
  heard_ = Clock::now();
  peers_.resize(server_ ? static_cast<size_t>(world_.nodes) : 0);
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before); // another thread handles signals
  thread_ = std::thread([this] { run(); });
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

NodeLink::~NodeLink() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
    wanted_.notify_all();
  }
  if (thread_.joinable()) {
    thread_.join();
  }
  if (cut_) {
    return;
  }
  try { // node 0 lasts until the others have read the end
    add(kNodesRead, 1);
    const auto living = std::ranges::count(peers_, false, &Peer::lost);
    const auto until = Clock::now() + std::chrono::seconds(2);
    while (server_ && add(kNodesRead, 0) < living && Clock::now() < until) {
      std::this_thread::sleep_for(milliseconds(20));
    }
  } catch (const Error&) { // the connection is gone
  }
}

StoreReader NodeLink::ask(StoreOp op, const std::vector<std::string_view>& texts,
                          std::optional<int64_t> number) {
  StoreReader answer;
  const auto outcome = connection_->request(op, texts, number, Clock::now() + limit_, answer);
  if (outcome != StoreConnection::Outcome::answered) {
    const bool late = outcome == StoreConnection::Outcome::late;
    throw CommunicationError(
        kNodesWhere,
        "the launcher of node 0 at " + address_.text() +
            (late ? " has not answered for " + std::to_string(limit_.count()) + " ms"
                  : " has ended, or the connection to it broke"),
        {}, "read its messages, and check the network between the hosts");
  }
  return answer;
}

std::vector<std::string> NodeLink::get(const std::vector<std::string>& keys) {
  StoreReader reader = ask(StoreOp::get, {keys.begin(), keys.end()});
  return mapped(keys, [&](const std::string&) { return std::string(reader.text()); });
}

/// Serves the store, or connects to node 0's.
void NodeLink::connect() {
  const bool numbered = options_.node_rank >= 0;
  const bool serves = numbered           ? options_.node_rank == 0
                      : options_.is_host ? *options_.is_host
                                         : is_own_address(address_.host);
  StoreAddress own = address_;
  own.host.clear();
  if (serves) {
    try {
      server_ = std::make_unique<StoreServer>(own);
    } catch (const InputError&) {
      if (numbered || options_.is_host || !try_connect(address_)) {
        throw;
      } // another launcher on this host is node 0
    }
  }
  static const std::atomic<bool> never{false};
  const auto deadline = Clock::now() + options_.join_timeout;
  const StoreAddress& place = server_ ? server_->address() : address_;
  if (!server_ && !try_connect(place)) {
    log_info("waiting up to " + std::to_string(options_.join_timeout.count()) +
             " s for the launcher of node 0: nothing answers at " + place.text() + " yet");
  }
  connection_ = std::make_unique<StoreConnection>(place, deadline, never);
  if (server_) {
    require_found();
  } else {
    require_same_run();
  }
}

/// Throws if the others find another launcher at the endpoint than this one.
void NodeLink::require_found() {
  const std::string own = own_.host + " " + std::to_string(own_.pid);
  set(kNodesHost, own);
  StoreReader answer;
  try {
    static const std::atomic<bool> never{false};
    const auto soon = Clock::now() + milliseconds(500);
    StoreConnection found(address_, soon, never);
    if (found.request(StoreOp::get, {kNodesHost}, {}, soon, answer) !=
        StoreConnection::Outcome::answered) {
      return;
    }
  } catch (const CommunicationError&) { // this host cannot reach its own address (NAT)
    return;
  }
  const std::string_view other = answer.text();
  if (other != own) {
    throw InputError(kNodesWhere,
                     "two launchers have node_rank=0: at " + address_.text() + " is that of host " +
                         std::string(other.substr(0, other.find(' '))) + ", this host is " +
                         own_.host,
                     "a different node rank on each host", "give this host another one");
  }
}

void NodeLink::require_same_run() {
  const std::string place = address_.text();
  const auto patience = Clock::now() + std::chrono::seconds(10);
  while (!exists(kNodesRun)) {
    if (Clock::now() > patience) {
      throw InputError(kNodesWhere, "the store at " + place + " is not that of a launcher",
                       "the launcher of node 0", "choose another port");
    }
    std::this_thread::sleep_for(kNodesLook);
  }
  const auto theirs = parse_json(kNodesWhere, kNodesRun, get({kNodesRun})[0]).get<RunFacts>();
  for (const auto& [name, value] : run_facts(options_)) {
    const auto other = theirs.find(name);
    const std::string text = other == theirs.end() ? "none" : other->second;
    if (text != value) {
      throw InputError(
          kNodesWhere,
          name + ": the launcher at " + place + " has " + text + ", this host has " + value,
          "one run with one version on all hosts",
          "check --rdzv-id and the endpoint, or install the same version");
    }
  }
}

[[noreturn]] static void throw_refusal(const std::string& why, bool late) {
  if (late) {
    throw CommunicationError(kNodesWhere, why, "the launchers of all hosts",
                             "start the missing ones, or raise join_timeout of --rdzv-conf");
  }
  throw InputError(kNodesWhere, why, "launchers of one run, each with its own node rank",
                   "start every host with the same command line");
}

void NodeLink::refuse(const std::string& why, bool late) {
  set(kNodesPlan, nlohmann::json{{"refused", why}, {"late", late}}.dump());
  const auto until = Clock::now() + std::chrono::seconds(2);
  while (add(kNodesRead, 0) + 1 < add(kNodesJoined, 0) && Clock::now() < until) {
    std::this_thread::sleep_for(milliseconds(20)); // launchers that have ended never read
  }
  throw_refusal(why, late);
}

std::vector<Node> NodeLink::gather(std::vector<size_t>& slots) {
  struct Arrival {
    std::string record{};
    Clock::time_point seen{};
    Node node{};
  };
  std::map<size_t, Arrival> arrivals; // by slot
  const auto deadline = Clock::now() + options_.join_timeout;
  std::optional<Clock::time_point> enough;
  Clock::time_point differs_since = Clock::time_point::max();
  while (true) {
    const auto now = Clock::now();
    const auto joined_so_far = static_cast<size_t>(add(kNodesJoined, 0));
    std::vector<Node> living;
    slots.clear();
    for (size_t slot = 0; slot < joined_so_far; ++slot) {
      if (!exists(join_key(slot))) {
        continue;
      }
      Arrival& arrival = arrivals[slot];
      // A waiting launcher writes its record again and again, with a count.
      if (std::string record = get({join_key(slot)})[0]; record != arrival.record) {
        arrival.node = parse_json(kNodesWhere, join_key(slot), record).get<Node>();
        arrival.record = std::move(record);
        arrival.seen = now;
      }
      if (slot == 0 || now - arrival.seen < limit_) {
        living.push_back(arrival.node);
        slots.push_back(slot);
      }
    }
    const std::string why = why_not_together(living, options_.max_nodes);
    if (why.empty()) {
      differs_since = Clock::time_point::max();
      const auto count = std::ssize(living);
      enough = count < options_.min_nodes ? std::nullopt : enough ? enough : std::optional(now);
      if (count >= options_.max_nodes || (enough && now - *enough > options_.last_call_timeout)) {
        const std::vector<size_t> order = node_order(living);
        slots = mapped(order, [&](size_t i) { return slots[i]; });
        return mapped(order, [&](size_t i) { return living[i]; });
      }
    } else if (differs_since == Clock::time_point::max()) {
      differs_since = now; // a launcher that was started again replaces the one that has ended
    } else if (now - differs_since > limit_) {
      refuse(why, false);
    }
    if (now > deadline) {
      refuse(std::to_string(living.size()) + " of " + std::to_string(options_.min_nodes) +
                 " hosts have come within " + std::to_string(options_.join_timeout.count()) +
                 " s: " + who_has_come(living, options_),
             true);
    }
    std::this_thread::sleep_for(kNodesLook);
  }
}

void NodeLink::wait_for_plan(size_t slot) {
  nlohmann::json record = own_;
  while (!exists(kNodesPlan)) {
    record["beat"] = ++beat_;
    set(join_key(slot), record.dump());
    std::this_thread::sleep_for(kNodesLook);
  }
  const nlohmann::json plan = parse_json(kNodesWhere, kNodesPlan, get({kNodesPlan})[0]);
  if (plan.contains("refused")) {
    add(kNodesRead, 1);
    throw_refusal(plan.at("refused"), plan.at("late"));
  }
  const auto nodes = plan.at("nodes").get<std::vector<Node>>();
  const auto slots = plan.at("slots").get<std::vector<size_t>>();
  if (std::ranges::count(slots, slot) == 0) {
    throw InputError(kNodesWhere,
                     "the run at " + address_.text() + " has already begun with " +
                         joined(node_texts(nodes)) + "; this host is " + own_.host,
                     "a launcher that comes before the last of them",
                     "wait until that run has ended, or choose another port");
  }
  set_plan(nodes, slots, plan.at("port"), slot);
}

void NodeLink::set_plan(const std::vector<Node>& nodes, const std::vector<size_t>& slots, int port,
                        size_t own_slot) {
  world_ = {.node = static_cast<int>(std::ranges::find(slots, own_slot) - slots.begin()),
            .nodes = static_cast<int>(nodes.size()),
            .world_size = 0,
            .master_addr = address_.host,
            .master_port = port,
            .store = server_ ? server_->address() : address_,
            .rdzv_id = options_.rdzv_id,
            .hosts = node_texts(nodes)};
  for (int node = 0; node < world_.nodes; ++node) {
    world_.first_rank += node < world_.node ? nodes[static_cast<size_t>(node)].nproc : 0;
    world_.world_size += nodes[static_cast<size_t>(node)].nproc;
  }
  if (world_.node == 0) {
    log_info("hosts: " + joined(world_.hosts));
  }
}

void NodeLink::report(const NodeFailure& failure) {
  const std::lock_guard<std::mutex> lock(mutex_);
  own_news_.failure = failure;
  own_news_.failure->node = world_.node;
  own_failed_ = Clock::now() - milliseconds(failure.age);
  first_failed_ = first_failed_.value_or(Clock::now());
  wanted_.notify_all();
}

void NodeLink::report_signal(int signal) {
  const std::lock_guard<std::mutex> lock(mutex_);
  own_news_.signal = signal;
  wanted_.notify_all();
}

void NodeLink::report_end() {
  const std::lock_guard<std::mutex> lock(mutex_);
  own_news_.ended = true;
  wanted_.notify_all();
}

NodeNews NodeLink::hear() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  NodeNews news = all_;
  news.ended = own_news_.ended && over();
  return news;
}

/// With the mutex. After a failure nobody is waited for without end.
bool NodeLink::over() const {
  return all_.ended || (first_failed_ && Clock::now() - *first_failed_ > longest_end_);
}

void NodeLink::run() {
  const auto interval = std::clamp(limit_ / 20, milliseconds(20), milliseconds(250));
  auto last = Clock::now();
  bool answers = true;
  std::unique_lock<std::mutex> lock(mutex_);
  while (!stopping_ && answers) {
    lock.unlock();
    const auto now = Clock::now();
    if (now - last > limit_ / 2 + std::chrono::seconds(1)) { // this process was stopped
      heard_ = now;
      for (Peer& peer : peers_) {
        peer.seen = now;
      }
    }
    last = now;
    answers = exchange();
    lock.lock();
    if (all_.ended) {
      break;
    }
    if (!stopping_ && answers) {
      wanted_.wait_for(lock, interval);
    }
  }
}

bool NodeLink::exchange() {
  NodeNews own;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    own = own_news_;
    if (own.failure) {
      own.failure->age =
          std::chrono::duration_cast<milliseconds>(Clock::now() - own_failed_).count();
    }
  }
  own.beat = ++beat_;
  try {
    set(news_key(world_.node), nlohmann::json(own).dump());
    if (server_) {
      std::vector<std::string> keys;
      for (int node = 0; node < world_.nodes; ++node) {
        keys.push_back(news_key(node));
      }
      look_at(get(keys));
      set(kNodesAll, nlohmann::json(all_).dump()); // only this thread writes it
      return true;
    }
    const auto all = parse_json(kNodesWhere, kNodesAll, get({kNodesAll})[0]).get<NodeNews>();
    heard_ = all.beat != all_.beat ? Clock::now() : heard_;
    learn(all);
  } catch (const Error& error) {
    lose(0, std::string(error.text()));
    return false;
  }
  if (Clock::now() - heard_ > limit_) {
    lose(0, "it has sent no heartbeat for " + std::to_string(limit_.count()) + " ms");
    return false;
  }
  return true;
}

void NodeLink::look_at(const std::vector<std::string>& records) {
  const auto now = Clock::now();
  for (size_t i = 0; i < peers_.size(); ++i) {
    Peer& peer = peers_[i];
    if (peer.lost) {
      continue;
    }
    if (peer.record != records[i]) {
      const bool had_failed = peer.news.failure.has_value();
      peer.record = records[i];
      peer.seen = now;
      peer.news =
          parse_json(kNodesWhere, news_key(static_cast<int>(i)), records[i]).get<NodeNews>();
      if (peer.news.failure && !had_failed) {
        peer.failed = now - milliseconds(peer.news.failure->age);
      }
    } else if (now - peer.seen > limit_) {
      lose(static_cast<int>(i),
           "its launcher has sent no heartbeat for " + std::to_string(limit_.count()) + " ms");
    }
  }
  NodeNews all;
  all.ended =
      std::ranges::all_of(peers_, [](const Peer& peer) { return peer.lost || peer.news.ended; });
  const Peer* first = nullptr;
  for (const Peer& peer : peers_) {
    all.signal = all.signal != 0 ? all.signal : peer.news.signal;
    if (peer.news.failure &&
        (first == nullptr || std::pair(peer.news.failure->follows, peer.failed) <
                                 std::pair(first->news.failure->follows, first->failed))) {
      first = &peer;
    }
  }
  all.failure = first != nullptr ? first->news.failure : std::nullopt;
  all.beat = all_.beat + 1;
  learn(all);
}

void NodeLink::learn(const NodeNews& all) {
  const std::lock_guard<std::mutex> lock(mutex_);
  all_ = all;
  if (all.failure && !first_failed_) {
    first_failed_ = Clock::now();
  }
}

/// A node that is not 0 loses node 0 only. Then nothing more will come.
void NodeLink::lose(int node, const std::string& why) {
  const NodeFailure failure{.node = node,
                            .reason = "host " + world_.hosts[static_cast<size_t>(node)] +
                                      " cannot be reached, or its launcher has ended",
                            .message = why};
  if (server_) {
    Peer& peer = peers_[static_cast<size_t>(node)];
    peer.lost = true;
    peer.failed = peer.seen;
    if (keep_going_) {
      log_warning(failure.reason + ": " + why + "; the others may continue without it");
    } else if (!peer.news.ended) {
      peer.news.failure = failure;
    }
    return;
  }
  cut_ = true;
  NodeNews all = all_;
  all.failure = all.failure ? all.failure : failure;
  all.ended = true;
  learn(all);
}

} // namespace hasten::detail
