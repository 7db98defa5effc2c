// How ranks find rank 0 without an address or a port: by a file that all of them see.
#pragma once

#include "store.h"

namespace hasten::detail {

/// Of a world with a store_file. Rank 0 listens on a port of its own and writes into
/// the file where; the others wait until somebody listens where the file says. One
/// that an ended run left behind is waited over. Rank 0's goes with this object.
class StoreFile {
 public:
  /// `address`: where others reach rank 0, or its interface; empty: found. `generation` counts the
  /// worlds that this process has joined. Blocks until `deadline`; SIGINT ends it
  /// with Interrupted. Throws InputError where the file cannot be written,
  /// CommunicationError where no rank 0 comes.
  StoreFile(
      const World& world,
      const std::string& address,
      int generation,
      CommClock::time_point deadline);
  ~StoreFile();
  StoreFile(const StoreFile&) = delete;
  StoreFile& operator=(const StoreFile&) = delete;

  /// The same world with master_addr, master_port and, on rank 0, listen_fd; as it
  /// was where it has no store_file.
  const World& world() const { return world_; }

 private:
  void serve(const std::string& address, int generation);
  void find(int generation, CommClock::time_point deadline);

  World world_;
  std::string written_; // by this rank
};

} // namespace hasten::detail
