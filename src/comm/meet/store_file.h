// How ranks find rank 0 without an address or a port: through a file that all ranks can read.
#pragma once

#include "store.h"

namespace hasten::detail {

/// For a world with a store_file. Rank 0 writes the address of its server to the file. The others
/// wait until a server listens at the address in the file. A file that an earlier run left is
/// ignored. Rank 0's file is removed with this object.
class StoreFile {
 public:
  /// `address`: address or interface at which others reach rank 0; empty: choose one. `generation`
  /// counts the worlds that this process has joined. `server` is this process's server, or null.
  /// Blocks until `deadline`. SIGINT ends it with Interrupted. Throws InputError if the file cannot
  /// be written, CommunicationError if rank 0 does not come.
  StoreFile(const World& world, const std::string& address, int generation,
            CommClock::time_point deadline, const StoreServer* server);
  ~StoreFile();
  StoreFile(const StoreFile&) = delete;
  StoreFile& operator=(const StoreFile&) = delete;

  /// The world with master_addr and master_port set. Unchanged if it has no store_file.
  const World& world() const { return world_; }
  /// The store's address for this process, unless an agent serves the store.
  const StoreAddress& store() const { return store_; }

 private:
  void serve(const std::string& address, int generation);
  void find(int generation, CommClock::time_point deadline);

  World world_;
  StoreAddress store_;
  std::string written_; // the text that this rank wrote
};

} // namespace hasten::detail
