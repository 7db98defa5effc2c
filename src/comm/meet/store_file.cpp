#include "store_file.h"

#include <filesystem>
#include <fstream>
#include <thread>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/process.h"
#include "network_interface.h"

namespace hasten::detail {

// The first word of the file. The generation, the address and the port follow.
constexpr const char* kStoreFileMark = "hasten-store";

StoreFile::StoreFile(const World& world, const std::string& address, int generation,
                     CommClock::time_point deadline, const StoreServer* server)
    : world_(world) {
  if (server != nullptr) {
    store_ = server->address();
  }
  if (world_.store_file.empty()) {
    store_ = server == nullptr ? store_address(world) : store_;
  } else if (server != nullptr) {
    serve(address, generation);
  } else {
    find(generation, deadline);
  }
}

StoreFile::~StoreFile() {
  std::error_code error;
  std::ifstream stream(world_.store_file);
  const std::string text(std::istreambuf_iterator<char>(stream), {});
  if (!written_.empty() && text == written_) { // otherwise another job has written it
    std::filesystem::remove(world_.store_file, error);
  }
}

void StoreFile::serve(const std::string& address, int generation) {
  world_.master_port = store_.port;
  // An unused address of the Internet: selects the interface of the default route.
  world_.master_addr =
      store_.socket.empty() ? reachable_address(address, "198.51.100.1") : "@" + store_.socket;
  written_ = kStoreFileMark + (" " + std::to_string(generation)) + " " + world_.master_addr + " " +
             std::to_string(store_.port) + "\n";
  write_file_atomically(world_.store_file, written_);
}

void StoreFile::find(int generation, CommClock::time_point deadline) {
  const StoreKey key = store_key_from_environment().value_or(StoreKey{});
  std::string found = "it has no address of this run";
  while (CommClock::now() < deadline) {
    throw_if_interrupted();
    std::ifstream stream(world_.store_file);
    std::string mark;
    std::string address;
    int number = -1;
    int port = 0;
    if (stream >> mark >> number >> address >> port && mark == kStoreFileMark &&
        number == generation) {
      store_ = address[0] == '@' ? StoreAddress{.socket = address.substr(1)}
                                 : StoreAddress{.host = address, .port = port, .key = key};
      if (try_connect(store_)) {
        world_.master_addr = address;
        world_.master_port = port;
        return;
      }
      found = "nothing listens at " + store_.text() + ", which the file names";
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  throw CommunicationError("comm::create",
                           "rank 0 has not written the store file in time: store_file=" +
                               world_.store_file + " (" + found + ")",
                           "a path that every rank can read, and rank 0 to start",
                           "start rank 0, and check HASTEN_STORE_FILE");
}

} // namespace hasten::detail
