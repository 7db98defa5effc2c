// Memory and streams of the test device, for the files that implement it.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <array>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "support/test_device.h"

namespace hasten::testing_support::machine {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kStreamsPerDevice = 16;
constexpr int kStreams = kTestDevices * kStreamsPerDevice;

/// [stream] The last access of each stream that is known to be done.
using Clock = std::array<uint64_t, kStreams>;

void join(Clock& to, const Clock& from);
bool contains(const Clock& clock, const Clock& earlier);

/// One use of a part of a block by an operator.
struct Access {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  int stream = 0;
  uint64_t time = 0; // in the stream's own count
  bool write = false;
  std::string by{};
};

/// Memory from one allocation.
struct Block {
  size_t bytes = 0;
  size_t mapped = 0; // bytes, whole pages
  bool pinned = false;
  int device = 0;
  int home = 0; // the stream on which it was allocated
  uint64_t serial = 0; // no other block has had it
  uint64_t pool = 0; // of the graphs whose capture took it
  bool freed = false; // but a graph of its pool may use it
  uint64_t recorded = 0; // bits of the streams from record_stream
  int open = 0; // running operators that use it
  int protection = 0;
  /// Those that some stream may not know of.
  std::vector<Access> accesses{};
};

/// One for the process.
struct Machine {
  std::recursive_mutex mutex; // an operator holds it while it runs
  std::map<uintptr_t, Block> blocks; // by address
  std::set<uintptr_t> pending; // pinned blocks that the host must not use freely yet
  std::array<Clock, kStreams> streams{};
  Clock host{};
  DeviceCounters counters;
  std::vector<std::string> errors;
  std::array<c10::CachingDeviceAllocator::DeviceStats, kTestDevices> stats;
  size_t limit = 0;
  bool has_bf16 = true;
  uint64_t serials = 0;
  std::map<uint64_t, int> pools; // graphs of each
};
Machine& machine();
using Lock = std::lock_guard<std::recursive_mutex>;

/// The calling thread's.
c10::DeviceIndex& current_device();
/// [device] The calling thread's. The number of a stream on its device.
std::array<int, kTestDevices>& current_streams();
/// The index of a stream in a Clock.
int stream_index(int device, int64_t stream);
int current_stream_index(int device);

/// The block that has this address, or nullptr: pageable memory.
Block* find_block(const void* data);
/// Writes a block from outside any stream. The caller holds the mutex.
void write_block(uintptr_t address, Block& block, const std::function<void(char*)>& write);
/// No graph uses the pool any more. The caller holds the mutex.
void free_pool(uint64_t pool);
/// The host knows that this work is done. The caller holds the mutex.
void host_learns(const Clock& clock);
/// The host waits for this work.
void host_waits(const Clock& clock);

c10::DeviceAllocator& device_allocator();
c10::Allocator& pinned_allocator();

/// The same memory as a tensor of the CPU. Only for use while a Kernel has it open.
at::Tensor host_view(const at::Tensor& tensor);

/// Memory that recorded work touched.
struct Operand {
  const void* data = nullptr;
  size_t bytes = 0;
  bool write = false;
  uint64_t serial = 0; // of its block
};

/// While it lives, the host can use the memory that it touches. Each touch is an access of the
/// device's current stream, and its order is checked.
class Kernel {
 public:
  Kernel(std::string name, c10::DeviceIndex device);
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;
  ~Kernel();

  /// Pageable memory has no order and is ignored. Records the operator's first error.
  void touch(const at::Tensor& tensor, bool write);
  void touch(const void* data, size_t bytes, bool write);
  /// If the stream captures: a replay calls `again`, which may use what was touched.
  void record(std::function<void()> again);

 private:
  const Lock lock_;
  const std::string name_;
  const int stream_;
  bool wrong_ = false;
  std::vector<uintptr_t> open_; // keys of blocks; one may occur several times
  std::vector<Operand> operands_; // only in a capture
};

/// The generator of the CPU in which a generator of the device keeps its state.
at::Generator& host_generator(at::Generator& generator);
const at::Generator& default_generator(c10::DeviceIndex device);

/// The parts of install_test_device().
void install_fault_messages();
void install_operators();
void install_autocast();
void install_graphs();

} // namespace hasten::testing_support::machine
