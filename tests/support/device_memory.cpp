#include "support/device_memory.h"
#include "support/device_graph.h"

#include <ATen/ops/from_blob.h>
#include <execinfo.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <iterator>
#include <utility>

namespace hasten::testing_support::machine {

void join(Clock& to, const Clock& from) {
  std::transform(to.begin(), to.end(), from.begin(), to.begin(),
                 [](uint64_t a, uint64_t b) { return std::max(a, b); });
}

bool contains(const Clock& clock, const Clock& earlier) {
  return std::equal(clock.begin(), clock.end(), earlier.begin(), std::greater_equal<>());
}

Machine& machine() {
  static auto* made = new Machine; // tensors may outlive main()
  return *made;
}

c10::DeviceIndex& current_device() {
  static thread_local c10::DeviceIndex device = 0;
  return device;
}

std::array<int, kTestDevices>& current_streams() {
  static thread_local std::array<int, kTestDevices> streams{};
  return streams;
}

int stream_index(int device, int64_t stream) {
  return device * kStreamsPerDevice + static_cast<int>(stream);
}

int current_stream_index(int device) {
  return stream_index(device, current_streams().at(static_cast<size_t>(device)));
}

static std::string stream_text(int index) {
  return "stream " + std::to_string(index % kStreamsPerDevice) + " of device " +
         std::to_string(index / kStreamsPerDevice);
}

using Blocks = std::map<uintptr_t, Block>;

static Blocks::iterator find(const void* data) {
  Blocks& blocks = machine().blocks;
  const auto address = reinterpret_cast<uintptr_t>(data);
  auto found = blocks.upper_bound(address);
  if (found == blocks.begin()) {
    return blocks.end();
  }
  --found;
  return address < found->first + found->second.mapped ? found : blocks.end();
}

Block* find_block(const void* data) {
  const auto found = find(data);
  return found == machine().blocks.end() ? nullptr : &found->second;
}

static bool known(const Access& access, const Clock& clock) {
  return access.time <= clock[static_cast<size_t>(access.stream)];
}

/// Lets the host use no more of a block than it may at this moment.
static void protect(uintptr_t address, Block& block) {
  int protection = PROT_READ | PROT_WRITE;
  if (block.open == 0 && !block.pinned) {
    protection = PROT_NONE;
  } else if (block.open == 0) {
    for (const Access& access : block.accesses) {
      if (!known(access, machine().host)) {
        protection &= access.write ? PROT_NONE : PROT_READ;
      }
    }
  }
  if (protection != std::exchange(block.protection, protection)) {
    ::mprotect(reinterpret_cast<void*>(address), block.mapped, protection);
  }
  if (block.pinned && protection != (PROT_READ | PROT_WRITE)) {
    machine().pending.insert(address);
  }
}

void host_learns(const Clock& clock) {
  Machine& m = machine();
  join(m.host, clock);
  for (const uintptr_t address : std::exchange(m.pending, {})) {
    if (const auto found = m.blocks.find(address); found != m.blocks.end()) {
      protect(address, found->second);
    }
  }
}

void host_waits(const Clock& clock) {
  refuse_in_capture("the host waits for the device");
  const Lock lock(machine().mutex);
  ++machine().counters.syncs;
  host_learns(clock);
}

void write_block(uintptr_t address, Block& block, const std::function<void(char*)>& write) {
  ++block.open;
  protect(address, block);
  write(reinterpret_cast<char*>(address));
  --block.open;
  protect(address, block);
}

void free_pool(uint64_t pool) {
  std::erase_if(machine().blocks, [pool](const auto& entry) {
    const bool gone = entry.second.pool == pool && entry.second.freed;
    if (gone) {
      ::munmap(reinterpret_cast<void*>(entry.first), entry.second.mapped);
    }
    return gone;
  });
}

static void count_bytes(c10::CachingDeviceAllocator::DeviceStats& stats, size_t bytes, bool taken) {
  // Nothing is cached, so all of these agree.
  for (auto* stat : {&stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes,
                     &stats.requested_bytes}) {
    taken ? (*stat)[0].increase(bytes) : (*stat)[0].decrease(bytes);
  }
  for (auto* stat : {&stats.allocation, &stats.segment, &stats.active}) {
    taken ? (*stat)[0].increase(1) : (*stat)[0].decrease(1);
  }
  ++(taken ? stats.num_device_alloc : stats.num_device_free);
}

static void release(void* data) {
  if (data == nullptr) {
    return;
  }
  Machine& m = machine();
  const Lock lock(m.mutex);
  const auto found = m.blocks.find(reinterpret_cast<uintptr_t>(data));
  Block& block = found->second;
  if (block.pool != 0 && m.pools[block.pool] > 0) {
    count_bytes(m.stats[static_cast<size_t>(block.device)], block.bytes, false);
    block.freed = true;
    return;
  }
  if (!block.pinned) {
    Clock free_at = m.streams[static_cast<size_t>(block.home)];
    join(free_at, m.host);
    for (const Access& access : block.accesses) {
      if (access.stream != block.home && !known(access, free_at) &&
          (block.recorded >> access.stream & 1) == 0) {
        m.errors.push_back("memory of " + stream_text(block.home) + " is freed while " + access.by +
                           " may use it on " + stream_text(access.stream) +
                           ". Fix: record_stream, or an event that the first stream waits for");
        break;
      }
    }
    count_bytes(m.stats[static_cast<size_t>(block.device)], block.bytes, false);
  }
  ::munmap(data, block.mapped);
  m.blocks.erase(found);
}

static c10::DataPtr take(size_t bytes, bool pinned) {
  const c10::Device where = pinned ? c10::Device(c10::kCPU) : c10::Device(kType, current_device());
  if (bytes == 0) {
    return {nullptr, nullptr, &release, where};
  }
  Machine& m = machine();
  const Lock lock(m.mutex);
  Block block;
  block.bytes = bytes;
  block.mapped = (bytes + 4095) / 4096 * 4096;
  block.pinned = pinned;
  block.device = current_device();
  block.home = current_stream_index(block.device);
  block.protection = PROT_READ | PROT_WRITE;
  block.serial = ++m.serials;
  if (const Capture* capture = capture_of(block.home); capture != nullptr && !pinned) {
    block.pool = capture->pool;
  }
  auto& stats = m.stats[static_cast<size_t>(block.device)];
  const auto used = static_cast<size_t>(stats.allocated_bytes[0].current);
  if (!pinned && m.limit > 0 && used + bytes > m.limit) {
    ++stats.num_ooms;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "test device out of memory. Tried to allocate ",
                     bytes, " bytes; ", used, " of ", m.limit, " are in use.");
  }
  void* data = ::mmap(nullptr, block.mapped, block.protection, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(data != MAP_FAILED, "mmap of ", block.mapped, " bytes failed");
  std::memset(data, 0xff, bytes); // NaN in every floating-point type
  const auto address = reinterpret_cast<uintptr_t>(data);
  if (!pinned) {
    // An allocator may hand out memory that earlier work of this stream still uses. So taking it
    // is a write of the stream.
    auto& clock = m.streams[static_cast<size_t>(block.home)];
    block.accesses.push_back({address, address + bytes, block.home,
                              ++clock[static_cast<size_t>(block.home)], true, "its allocation"});
    count_bytes(stats, bytes, true);
  }
  protect(address, m.blocks[address] = std::move(block));
  return {data, data, &release, where};
}

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return take(bytes, true); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

class TestDeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return take(bytes, false); }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    Kernel kernel("copy_data", current_device());
    kernel.touch(from, bytes, false);
    kernel.touch(to, bytes, true);
    std::memcpy(to, from, bytes);
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    const Lock lock(machine().mutex);
    if (Block* block = find_block(data.get())) {
      block->recorded |= uint64_t{1} << stream_index(stream.device_index(), stream.id());
    }
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    const Lock lock(machine().mutex);
    return stats(device);
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    const Lock lock(machine().mutex);
    for_each(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_accumulated(); });
    stats(device).num_ooms = 0;
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    const Lock lock(machine().mutex);
    for_each(device, [](c10::CachingAllocator::Stat& stat) { stat.reset_peak(); });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    const Lock lock(machine().mutex);
    const size_t total = machine().limit > 0 ? machine().limit : size_t{1} << 34;
    return {total - static_cast<size_t>(stats(device).allocated_bytes[0].current), total};
  }

 private:
  static c10::CachingDeviceAllocator::DeviceStats& stats(c10::DeviceIndex device) {
    return machine().stats.at(static_cast<size_t>(device < 0 ? current_device() : device));
  }
  template <typename F>
  static void for_each(c10::DeviceIndex device, const F& f) {
    auto& all = stats(device);
    for (auto* stat : {&all.allocated_bytes, &all.reserved_bytes, &all.active_bytes,
                       &all.requested_bytes, &all.allocation, &all.segment, &all.active}) {
      f((*stat)[0]);
    }
  }
};

c10::DeviceAllocator& device_allocator() {
  static auto* made = new TestDeviceAllocator;
  return *made;
}

c10::Allocator& pinned_allocator() {
  static auto* made = new PinnedAllocator;
  return *made;
}

at::Tensor host_view(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.device().type() != kType) {
    return tensor;
  }
  auto* data = static_cast<char*>(const_cast<void*>(tensor.storage().data()));
  void* first = tensor.numel() == 0
                    ? nullptr
                    : data + static_cast<size_t>(tensor.storage_offset()) * tensor.element_size();
  return at::from_blob(first, tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
}

Kernel::Kernel(std::string name, c10::DeviceIndex device)
    : lock_(machine().mutex), name_(std::move(name)), stream_(current_stream_index(device)) {
  // What the host knows to be done is done before work that it starts now.
  join(machine().streams[static_cast<size_t>(stream_)], machine().host);
}

Kernel::~Kernel() {
  for (const uintptr_t address : open_) {
    const auto found = machine().blocks.find(address);
    if (found != machine().blocks.end()) { // an operator may replace the memory of its output
      --found->second.open;
      protect(address, found->second);
    }
  }
}

void Kernel::touch(const at::Tensor& tensor, bool write) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0 || tensor.is_meta()) {
    return;
  }
  size_t elements = 1; // from the first to the last
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) {
    elements += static_cast<size_t>((tensor.size(dim) - 1) * tensor.stride(dim));
  }
  const auto* data = static_cast<const char*>(tensor.storage().data());
  touch(data + static_cast<size_t>(tensor.storage_offset()) * tensor.element_size(),
        elements * tensor.element_size(), write);
}

void Kernel::touch(const void* data, size_t bytes, bool write) {
  Machine& m = machine();
  const auto found = find(data);
  if (found == m.blocks.end()) {
    return;
  }
  Block& block = found->second;
  Clock& clock = m.streams[static_cast<size_t>(stream_)];
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const Access access{begin, begin + bytes, stream_, ++clock[static_cast<size_t>(stream_)],
                      write, name_};
  for (const Access& other : block.accesses) {
    if (other.begin < access.end && access.begin < other.end && (write || other.write) &&
        !known(other, clock) && !std::exchange(wrong_, true)) {
      m.errors.push_back(name_ + (write ? " writes" : " reads") + " on " + stream_text(stream_) +
                         " memory that " + other.by + (other.write ? " writes" : " reads") +
                         " on " + stream_text(other.stream) + ". Fix: an event between them");
    }
  }
  // What a later access is sure to be ordered after, if it is ordered after this one, is forgotten.
  std::erase_if(block.accesses, [&](const Access& other) {
    const bool covered = access.begin <= other.begin && other.end <= access.end;
    return known(other, m.host) ||
           (covered && known(other, clock) && (write || (!other.write && other.stream == stream_)));
  });
  block.accesses.push_back(access);
  ++block.open;
  open_.push_back(found->first);
  protect(found->first, block);
  if (Capture* capture = capture_of(stream_)) {
    operands_.push_back({data, bytes, write, block.serial});
    if (write && block.serial <= capture->first) {
      const auto* first = reinterpret_cast<const char*>(found->first);
      capture->before.try_emplace(block.serial, first, first + block.bytes);
    }
  }
}

void Kernel::record(std::function<void()> again) {
  if (Capture* capture = capture_of(stream_)) {
    capture->work.push_back({name_, std::move(operands_), std::move(again)});
  }
}

static void say(const char* text) {
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, text, std::strlen(text));
}

/// Says what the host must not do, then lets the access end the process.
static void on_fault(int, siginfo_t* info, void*) {
  if (const Block* block = find_block(info->si_addr)) { // the fault is this thread's own
    say(!block->pinned ? "The host touches memory of the test device.\n"
        : block->protection == PROT_READ
            ? "The host writes pinned memory before the copy from it is done.\n"
            : "The host uses pinned memory before the copy into it is done.\n");
    void* frames[32];
    ::backtrace_symbols_fd(frames, ::backtrace(frames, 32), STDERR_FILENO);
  }
  std::signal(SIGSEGV, SIG_DFL);
}

void install_fault_messages() {
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO;
  ::sigaction(SIGSEGV, &action, nullptr);
}

} // namespace hasten::testing_support::machine
