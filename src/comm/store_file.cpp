#include "store_file.h"

#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <thread>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/process.h"
#include "network_interface.h"

namespace hasten::detail {

// The file's first word. Then the world's number in this process, the address and
// the port.
constexpr const char* kStoreFileMark = "hasten-store";

/// A socket on every interface and a port that the system chooses.
std::pair<int, int> listen_everywhere() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t size = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  if (fd < 0 || bind(fd, any, size) != 0 || listen(fd, 1024) != 0 ||
      getsockname(fd, any, &size) != 0) {
    const int error = errno;
    if (fd >= 0) {
      ::close(fd);
    }
    throw Error(
        "comm::create",
        std::string("no port to listen on (") + std::strerror(error) + ")");
  }
  return {fd, ntohs(address.sin_port)};
}

StoreFile::StoreFile(
    const World& world,
    const std::string& address,
    int generation,
    CommClock::time_point deadline)
    : world_(world) {
  if (world_.store_file.empty()) {
    return;
  }
  if (world_.rank == 0) {
    serve(address, generation);
  } else {
    find(generation, deadline);
  }
}

StoreFile::~StoreFile() {
  std::error_code error;
  std::ifstream stream(world_.store_file);
  const std::string text(std::istreambuf_iterator<char>(stream), {});
  if (!written_.empty() && text == written_) { // else another job's
    std::filesystem::remove(world_.store_file, error);
  }
}

void StoreFile::serve(const std::string& address, int generation) {
  const bool one_host = world_on_one_host(world_);
  const auto [fd, port] = one_host ? listen_on_loopback() : listen_everywhere();
  world_.listen_fd = fd;
  world_.master_port = port;
  // An address of the Internet that nobody has: on the default route.
  world_.master_addr =
      one_host ? "127.0.0.1" : reachable_address(address, "198.51.100.1");
  std::ostringstream text;
  text << kStoreFileMark << ' ' << generation << ' ' << world_.master_addr
       << ' ' << port << '\n';
  try {
    write_file_atomically(world_.store_file, text.str());
  } catch (...) {
    ::close(fd);
    throw;
  }
  written_ = text.str();
}

void StoreFile::find(int generation, CommClock::time_point deadline) {
  std::string found = "there is none";
  while (CommClock::now() < deadline) {
    throw_if_interrupted();
    std::ifstream stream(world_.store_file);
    std::string mark;
    std::string address;
    int number = -1;
    int port = 0;
    if (stream >> mark >> number >> address >> port && mark == kStoreFileMark &&
        number == generation) {
      if (!listening_address(address, port).empty()) {
        world_.master_addr = address;
        world_.master_port = port;
        return;
      }
      found = "nobody listens at " + address + ":" + std::to_string(port) +
              ", of which it tells";
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  throw CommunicationError(
      "comm::create",
      "rank 0 has not written the store file in time: store_file=" +
          world_.store_file + " (" + found + ")",
      "one path that every rank sees, and rank 0 to start",
      "start rank 0, and check HASTEN_STORE_FILE");
}

} // namespace hasten::detail
