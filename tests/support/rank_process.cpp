#include "support/rank_process.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <sstream>
#include <stdexcept>

#include "hasten/base/files.h"

namespace hasten::testing_support {

static constexpr const char* kReportVariable = "HASTEN_TEST_REPORT_FD";

/// HASTEN_TEST_HOSTS=2 makes the ranks believe that they are on so many hosts, if it divides their
/// number. HASTEN_TEST_HOSTS=0,1,0 names the host of each. [rank]
static std::vector<int> hosts_of(int world_size, const EnvironmentList& environment) {
  const char* variable = std::getenv("HASTEN_TEST_HOSTS");
  std::string text = variable == nullptr ? "1" : variable;
  for (const auto& [name, value] : environment) {
    text = name == "HASTEN_TEST_HOSTS" ? value : text;
  }
  const bool named = text.find(',') != std::string::npos;
  const int count = std::atoi(text.c_str());
  const int of_host = count > 0 && world_size % count == 0 ? world_size / count : world_size;
  std::istringstream names(text);
  std::vector<int> hosts;
  for (int rank = 0; rank < world_size; ++rank) {
    std::string name;
    hosts.push_back(named && std::getline(names, name, ',') ? std::stoi(name) : rank / of_host);
  }
  return hosts;
}

std::vector<RankProcess> start_ranks(int world_size, const std::vector<std::string>& argv,
                                     const EnvironmentList& environment) {
  // No other process has this port, and so the store's name, until the ranks have started.
  const auto [port_fd, port] = listen_on_loopback();
  const auto [store_fd, store_port] = listen_on_loopback();
  std::vector<RankProcess> ranks;
  const std::vector<int> hosts = hosts_of(world_size, environment);
  for (int rank = 0; rank < world_size; ++rank) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) {
      throw std::runtime_error("no pipe for a rank");
    }
    const auto own = hosts.begin() + rank;
    const auto of_host = std::count(hosts.begin(), hosts.end(), *own);
    SpawnOptions options;
    options.environment = {{"RANK", std::to_string(rank)},
                           {"WORLD_SIZE", std::to_string(world_size)},
                           {"LOCAL_RANK", std::to_string(std::count(hosts.begin(), own, *own))},
                           {"LOCAL_WORLD_SIZE", std::to_string(of_host)},
                           {"MASTER_ADDR", "127.0.0.1"},
                           {"MASTER_PORT", std::to_string(port)},
                           {"OMP_NUM_THREADS", "1"},
                           {"HASTEN_TEST_STORE_PORT", std::to_string(store_port)},
                           {kReportVariable, std::to_string(ends[1])}};
    options.keep_fds = {ends[1]};
    if (of_host < world_size) {
      options.environment.emplace_back("HASTEN_TEST_HOST", "host" + std::to_string(*own));
      options.environment.emplace_back("HASTEN_SECRET", "of this test's hosts");
    }
    if (rank == 0) {
      options.environment.emplace_back("HASTEN_TEST_STORE_FD", std::to_string(store_fd));
      options.keep_fds.push_back(store_fd);
    }
    options.environment.insert(options.environment.end(), environment.begin(), environment.end());
    RankProcess process;
    process.pid = spawn_process(argv, options);
    process.reports_fd = ends[0];
    ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
    ::close(ends[1]);
    ranks.push_back(std::move(process));
  }
  ::close(port_fd);
  ::close(store_fd);
  return ranks;
}

static void reap(RankProcess& rank) {
  if (rank.reports_fd >= 0) {
    ::close(rank.reports_fd);
    rank.reports_fd = -1;
  }
  int status = 0;
  while (::waitpid(rank.pid, &status, 0) < 0 && errno == EINTR) {
  }
  rank.end = process_end(status);
  rank.ended = true;
}

std::vector<nlohmann::json> read_reports(RankProcess& rank) {
  std::vector<nlohmann::json> reports;
  char block[65536];
  while (rank.reports_fd >= 0) {
    const ssize_t got = ::read(rank.reports_fd, block, sizeof block);
    if (got < 0) {
      break; // no more bytes now
    }
    if (got == 0) {
      reap(rank);
      break;
    }
    rank.unread.append(block, static_cast<size_t>(got));
    for (size_t end; (end = rank.unread.find('\n')) != std::string::npos;) {
      reports.push_back(nlohmann::json::parse(rank.unread.substr(0, end)));
      rank.unread.erase(0, end + 1);
    }
  }
  return reports;
}

void wait_for_reports(const std::vector<RankProcess>& ranks, int milliseconds) {
  std::vector<pollfd> waiting;
  for (const RankProcess& rank : ranks) {
    if (rank.reports_fd >= 0) {
      waiting.push_back({.fd = rank.reports_fd, .events = POLLIN, .revents = 0});
    }
  }
  ::poll(waiting.data(), waiting.size(), milliseconds);
}

bool is_stopped(const RankProcess& rank) {
  if (rank.ended) {
    return false;
  }
  const std::string stat = read_file("/proc/" + std::to_string(rank.pid) + "/stat");
  const size_t state = stat.rfind(") "); // "12 (name) T …"
  return state != std::string::npos && stat[state + 2] == 'T';
}

void kill_rank(RankProcess& rank) {
  if (!rank.ended) {
    ::kill(-rank.pid, SIGKILL);
    ::kill(rank.pid, SIGKILL);
    reap(rank);
  }
}

bool all_ended(const std::vector<RankProcess>& ranks) {
  return std::all_of(ranks.begin(), ranks.end(),
                     [](const RankProcess& rank) { return rank.ended; });
}

ReportWriter::ReportWriter() {
  const char* text = std::getenv(kReportVariable);
  if (text == nullptr) {
    throw std::runtime_error("this process is not a rank of the harness");
  }
  fd_ = std::atoi(text);
  ::fcntl(fd_, F_SETFD, FD_CLOEXEC);
}

void ReportWriter::send(const nlohmann::json& report) {
  const std::string line =
      report.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace) + "\n";
  const std::unique_lock lock(mutex_, std::chrono::seconds(1));
  for (size_t sent = 0; sent < line.size();) {
    const ssize_t n = ::write(fd_, line.data() + sent, line.size() - sent);
    if (n < 0 && errno != EINTR) {
      return; // the parent has ended, so this process ends soon
    }
    sent += n > 0 ? static_cast<size_t>(n) : 0;
  }
}

bool is_rank_process() { return std::getenv(kReportVariable) != nullptr; }

double machine_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

} // namespace hasten::testing_support
