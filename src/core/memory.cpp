#include "hasten/core/memory.h"

#include <ATen/Context.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/host_memory.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"
#include "hasten/base/world.h"
#include "hasten/core/device.h"
#include "hasten/core/memory_rehearsal.h"

namespace hasten {

namespace detail {

struct MemoryCounters {
  std::atomic<int64_t> live{0};
  std::atomic<int64_t> peak{0};
  std::atomic<int64_t> allocations{0};
  std::atomic<int64_t> limit{std::numeric_limits<int64_t>::max()};

  /// Returns the bytes that are live then. Throws if they exceed the limit.
  int64_t add(int64_t bytes, const char* what) {
    const int64_t now_live = live += bytes;
    if (const int64_t most = limit; now_live > most) {
      live -= bytes;
      throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                                  "out of memory: " + std::to_string(bytes) + " bytes for " + what +
                                      ", with " + std::to_string(now_live - bytes) +
                                      " bytes in use, exceed the limit of " + std::to_string(most));
    }
    return now_live;
  }

  void note(int64_t now_live) {
    int64_t most = peak;
    while (now_live > most && !peak.compare_exchange_weak(most, now_live)) {
    }
    ++allocations;
  }
};

MemoryCounters& memory_counters() {
  static MemoryCounters counters;
  return counters;
}

static thread_local std::shared_ptr<MemoryCounters>* rehearsed_counters = nullptr;

/// The counters that this thread uses.
MemoryCounters& current_counters() {
  return rehearsed_counters != nullptr ? **rehearsed_counters : memory_counters();
}

struct WithoutMemory {
  std::shared_ptr<MemoryCounters> counters = std::make_shared<MemoryCounters>();
  std::shared_ptr<MemoryCounters>* before = std::exchange(rehearsed_counters, &counters);
  ~WithoutMemory() { rehearsed_counters = before; }
};

std::shared_ptr<void> without_memory() {
  install_memory_meter();
  return std::make_shared<WithoutMemory>();
}

// torch's kernels write to scalars that they create, so those have memory.
struct RehearsedBlock {
  std::shared_ptr<MemoryCounters> counters;
  int64_t bytes = 0;
  alignas(16) char scalar[16] = {};
};

void free_rehearsed(void* context) {
  const std::unique_ptr<RehearsedBlock> block(static_cast<RehearsedBlock*>(context));
  block->counters->live -= block->bytes;
}

// The smallest of the live limits counts.
void change_limits(int64_t limit, bool add) {
  static std::mutex mutex;
  static auto* limits = new std::multiset<int64_t>; // never destroyed
  const std::scoped_lock lock(mutex);
  if (add) {
    limits->insert(limit);
  } else {
    limits->erase(limits->find(limit));
  }
  memory_counters().limit =
      limits->empty() ? std::numeric_limits<int64_t>::max() : *limits->begin();
}

// Keeps torch's alignment: c10 allocates memory aligned to 64 bytes.
constexpr size_t kMemoryHeader = 64;

void free_counted(void* data) {
  if (data == nullptr) {
    return;
  }
  c10::profiledCPUMemoryReporter().Delete(data);
  char* const block = static_cast<char*>(data) - kMemoryHeader;
  memory_counters().live -= *reinterpret_cast<int64_t*>(block);
  c10::free_cpu(block);
}

class CountingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) {
      return {nullptr, nullptr, &free_counted, cpu};
    }
    const auto wanted = static_cast<int64_t>(bytes);
    if (rehearsed_counters != nullptr) {
      auto* block = new RehearsedBlock{*rehearsed_counters, wanted, {}};
      block->counters->note(block->counters->live += wanted);
      return {bytes <= sizeof(block->scalar) ? block->scalar : nullptr, block, &free_rehearsed,
              cpu};
    }
    MemoryCounters& counters = memory_counters();
    const int64_t live = counters.add(wanted, "a CPU tensor");
    char* block = nullptr;
    try {
      block = static_cast<char*>(c10::alloc_cpu(bytes + kMemoryHeader));
    } catch (...) {
      counters.live -= wanted;
      throw;
    }
    *reinterpret_cast<int64_t*>(block) = wanted;
    counters.note(live);
    char* const data = block + kMemoryHeader;
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &free_counted, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &free_counted; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

/// A line "VmHWM:   1234 kB" of /proc/self/status, in bytes; 0 if there is none.
int64_t process_status_bytes(const std::string& key) {
  return std::atoll(proc_value("/proc/self/status", key).c_str()) * 1024;
}

} // namespace detail

static std::atomic<bool> metered{false};

bool detail::count_memory(int64_t bytes) {
  MemoryCounters& counters = memory_counters();
  if (!metered) {
    return false;
  }
  counters.note(counters.add(bytes, "shared memory"));
  return true;
}

void detail::uncount_memory(int64_t bytes) { memory_counters().live -= bytes; }

static std::atomic<int64_t> peers_bytes{0};

void detail::map_memory_of_peers(int64_t bytes) { peers_bytes += bytes; }

bool in_memory_rehearsal() { return detail::rehearsed_counters != nullptr; }

void install_memory_meter() {
  static std::once_flag once;
  std::call_once(once, [] {
    // Never freed, because tensors may outlive static destructors.
    c10::SetCPUAllocator(new detail::CountingAllocator, 255);
    metered = true;
  });
}

/// CUDA's allocator knows no device before CUDA has begun.
static c10::DeviceAllocator& allocator_of(const at::Device& device) {
  at::globalContext().lazyInitDevice(device.type());
  return *c10::getDeviceAllocator(device.type());
}

static constexpr auto kAll = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);

MemoryStats memory_stats(const at::Device& device) {
  if (!device.is_cpu()) {
    const auto stats = allocator_of(device).getDeviceStats(device.index());
    return {stats.allocated_bytes[kAll].current, stats.allocated_bytes[kAll].peak,
            stats.allocation[kAll].allocated, stats.num_ooms};
  }
  const detail::MemoryCounters& counters = detail::current_counters();
  return {counters.live, counters.peak, counters.allocations};
}

void reset_peak_memory(const at::Device& device) {
  if (!device.is_cpu()) {
    allocator_of(device).resetPeakStats(device.index());
    return;
  }
  detail::MemoryCounters& counters = detail::current_counters();
  counters.peak = counters.live.load();
}

MemoryLimit::MemoryLimit(int64_t bytes) : bytes_(bytes) {
  if (bytes <= 0) {
    throw InputError("core::MemoryLimit", "bytes=" + std::to_string(bytes), "above 0");
  }
  install_memory_meter();
  detail::change_limits(bytes, true);
}

MemoryLimit::~MemoryLimit() { detail::change_limits(bytes_, false); }

int64_t memory_left(const at::Device& device) {
  if (device.is_cpu()) {
    return available_memory_bytes();
  }
  c10::DeviceAllocator& allocator = allocator_of(device);
  const auto stats = allocator.getDeviceStats(device.index());
  try {
    return static_cast<int64_t>(allocator.getMemoryInfo(device.index()).first) +
           stats.reserved_bytes[kAll].current - stats.allocated_bytes[kAll].current;
  } catch (const c10::Error&) {
    return 0; // not every allocator knows
  }
}

int64_t memory_share(const at::Device& device, const std::string& name) {
  const int64_t left = memory_left(device);
  const int ranks = detail::ranks_on(device, name, world_from_environment());
  return left == 0 ? 0 : memory_stats(device).live_bytes + left / 10 * 9 / ranks;
}

void empty_cache(const at::Device& device) {
  if (!device.is_cpu()) {
    allocator_of(device).emptyCache();
  }
}

static std::atomic<int64_t> planned_bytes{0};

void detail::plan_memory(int64_t bytes) { planned_bytes = bytes; }

void detail::name_shortage(const std::exception& error, std::string_view where,
                           std::string_view running, const at::Device& device) {
  if (device.is_cpu() || !is_out_of_memory(error) ||
      dynamic_cast<const Error*>(&error) != nullptr) {
    return;
  }
  const std::string text = error.what();
  const int64_t planned = planned_bytes;
  throw Error(where,
              "memory of " + device.str() + " ran out in " + std::string(running) + ": " +
                  text.substr(0, text.find('\n')) +
                  " In use: " + format_bytes(memory_stats(device).live_bytes) +
                  ", left: " + format_bytes(memory_left(device)) +
                  ", planned: " + (planned > 0 ? format_bytes(planned) : std::string("nothing")),
              {},
              "use smaller batches (auto_find_batch_size), checkpoint activations, or shard the "
              "model",
              ErrorKind::out_of_memory);
}

bool is_out_of_memory(const std::exception& error) {
  return dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
         (kind_of(error) == ErrorKind::out_of_memory && // std::bad_alloc, too
          dynamic_cast<const CommunicationError*>(&error) == nullptr) || // a peer's
         (dynamic_cast<const c10::Error*>(&error) != nullptr &&
          std::string_view(error.what()).find("DefaultCPUAllocator: can't allocate memory") !=
              std::string_view::npos);
}

ErrorKind error_kind(const std::exception& error) {
  return is_out_of_memory(error) ? ErrorKind::out_of_memory : kind_of(error);
}

int64_t peak_resident_bytes() { return detail::process_status_bytes("VmHWM:") - peers_bytes; }

int64_t resident_bytes() { return detail::process_status_bytes("VmRSS:") - peers_bytes; }

} // namespace hasten
