// How ranks find rank 0 without an address or a port: by a file that all of them see.
#pragma once

#include "store.h"

namespace hasten::detail {

/// Of a world with a store_file: rank 0 writes into it where its server listens; the
/// others wait until somebody listens where the file says. One that an ended run left
/// behind is waited over. Rank 0's goes with this object.
class StoreFile {
 public:
  /// `address`: where others reach rank 0, or its interface; empty: found. `generation`
  /// counts the worlds that this process has joined. `server` is this process's, or
  /// null. Blocks until `deadline`; SIGINT ends it
  /// with Interrupted. Throws InputError where the file cannot be written,
  /// CommunicationError where no rank 0 comes.
  StoreFile(const World& world, const std::string& address, int generation,
            CommClock::time_point deadline, const StoreServer* server);
  ~StoreFile();
  StoreFile(const StoreFile&) = delete;
  StoreFile& operator=(const StoreFile&) = delete;

  /// The same world with master_addr and master_port; as it was where it has no
  /// store_file.
  const World& world() const { return world_; }
  /// Where this process reaches the store, unless an agent serves it.
  const StoreAddress& store() const { return store_; }

 private:
  void serve(const std::string& address, int generation);
  void find(int generation, CommClock::time_point deadline);

  World world_;
  StoreAddress store_;
  std::string written_; // by this rank
};

} // namespace hasten::detail
