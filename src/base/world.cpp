#include "hasten/base/world.h"

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

#include "hasten/base/error.h"

namespace hasten {

namespace detail {

/// The variable's value; nothing where it is not set or empty.
std::optional<std::string> environment_value(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') {
    return std::nullopt;
  }
  return value;
}

std::optional<int> whole_number(std::string_view text) {
  int value = 0;
  const auto [end, error] =
      std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) {
    return std::nullopt;
  }
  return value;
}

/// Reads numbers from the environment and remembers all that is wrong.
class WorldReader {
 public:
  bool any_set() const {
    for (const char* name :
         {"RANK",
          "WORLD_SIZE",
          "LOCAL_RANK",
          "LOCAL_WORLD_SIZE",
          "MASTER_ADDR",
          "MASTER_PORT"}) {
      if (environment_value(name)) {
        return true;
      }
    }
    return false;
  }

  void require(const char* name) {
    if (!environment_value(name)) {
      problem(std::string(name) + " is not set");
    }
  }

  /// `otherwise` where it is not set, or is not a number (then a problem).
  int number(const char* name, int least, int most, int otherwise) {
    const auto text = environment_value(name);
    if (!text) {
      return otherwise;
    }
    const auto value = whole_number(*text);
    if (!value || *value < least || *value > most) {
      std::string range = std::to_string(least) + "..";
      range +=
          most == std::numeric_limits<int>::max() ? "" : std::to_string(most);
      problem(std::string(name) + "=" + *text + " is not in " + range);
      return otherwise;
    }
    return *value;
  }

  void problem(std::string text) { problems_.push_back(std::move(text)); }

  void throw_problems() const {
    if (problems_.empty()) {
      return;
    }
    std::string what;
    for (const std::string& problem : problems_) {
      what += (what.empty() ? "" : ", ") + problem;
    }
    throw InputError(
        "base::world_from_environment",
        what,
        "all of RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, with RANK < "
        "WORLD_SIZE and LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE, or none",
        "start with hasten launch or torchrun, or unset them");
  }

 private:
  std::vector<std::string> problems_;
};

/// True where `fd` is a TCP socket that listens on `port`.
bool listens_on(int fd, int port) {
  int listening = 0;
  socklen_t size = sizeof listening;
  if (::getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &size) != 0 ||
      listening == 0) {
    return false;
  }
  sockaddr_storage address{};
  size = sizeof address;
  if (::getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    return false;
  }
  if (address.ss_family == AF_INET) {
    return ntohs(reinterpret_cast<sockaddr_in&>(address).sin_port) == port;
  }
  return address.ss_family == AF_INET6 &&
         ntohs(reinterpret_cast<sockaddr_in6&>(address).sin6_port) == port;
}

/// The handed-down descriptor, or -1.
int usable_listen_fd(int rank, int port) {
  const auto text = environment_value("HASTEN_LISTEN_FD");
  const auto fd = text ? whole_number(*text) : std::nullopt;
  if (rank != 0 || !fd || *fd < 0 || !listens_on(*fd, port)) {
    return -1;
  }
  ::fcntl(*fd, F_SETFD, FD_CLOEXEC);
  return *fd;
}

} // namespace detail

World world_from_environment() {
  constexpr int kMost = std::numeric_limits<int>::max();
  detail::WorldReader reader;
  World world;
  if (!reader.any_set()) {
    return world;
  }
  for (const char* name :
       {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
    reader.require(name);
  }
  const bool has_local_rank =
      detail::environment_value("LOCAL_RANK").has_value();
  if (has_local_rank !=
      detail::environment_value("LOCAL_WORLD_SIZE").has_value()) {
    reader.require(has_local_rank ? "LOCAL_WORLD_SIZE" : "LOCAL_RANK");
  }
  world.rank = reader.number("RANK", 0, kMost, 0);
  world.world_size = reader.number("WORLD_SIZE", 1, kMost, kMost);
  world.local_rank = reader.number("LOCAL_RANK", 0, kMost, 0);
  world.local_world_size = reader.number("LOCAL_WORLD_SIZE", 1, kMost, 1);
  world.master_port = reader.number("MASTER_PORT", 1, 65535, 1);
  const auto below =
      [&](const char* name, int value, const char* limit_name, int limit) {
        if (value >= limit) {
          reader.problem(
              std::string(name) + "=" + std::to_string(value) + " with " +
              limit_name + "=" + std::to_string(limit));
        }
      };
  below("RANK", world.rank, "WORLD_SIZE", world.world_size);
  if (has_local_rank) {
    below(
        "LOCAL_RANK",
        world.local_rank,
        "LOCAL_WORLD_SIZE",
        world.local_world_size);
  }
  if (world.local_world_size > world.world_size) {
    reader.problem(
        "LOCAL_WORLD_SIZE=" + std::to_string(world.local_world_size) +
        " with WORLD_SIZE=" + std::to_string(world.world_size));
  }
  reader.throw_problems();
  world.master_addr = *detail::environment_value("MASTER_ADDR");
  world.agent_store =
      detail::environment_value("TORCHELASTIC_USE_AGENT_STORE") == "True";
  world.listen_fd = detail::usable_listen_fd(world.rank, world.master_port);
  world.source = "torchrun";
  return world;
}

int threads_per_rank(int local_world_size) {
  if (const auto text = detail::environment_value("OMP_NUM_THREADS")) {
    // "4,2" is one number a nesting level; ours is the first.
    const auto value = detail::whole_number(text->substr(0, text->find(',')));
    if (!value || *value < 1) {
      throw InputError(
          "base::threads_per_rank",
          "OMP_NUM_THREADS=" + *text + " is not a number of threads",
          "1 or more",
          "unset it, or set it to the cores a rank may use");
    }
    return *value;
  }
  return std::max(1, allowed_cores() / std::max(1, local_world_size));
}

} // namespace hasten
