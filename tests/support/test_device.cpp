// Streams, events, generators and the hooks by which torch finds the test device.
#include "support/test_device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <utility>

#include "support/device_graph.h"
#include "support/device_memory.h"

namespace hasten::testing_support::machine {

static c10::DeviceIndex index_of(c10::DeviceIndex device) {
  return device < 0 ? current_device() : device;
}

class TestGenerator final : public c10::GeneratorImpl {
 public:
  explicit TestGenerator(c10::DeviceIndex device)
      : c10::GeneratorImpl({kType, device}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::make_generator<at::CPUGeneratorImpl>(c10::default_rng_seed_val)) {}

  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "the test device has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "the test device has no offset"); }
  void set_state(const c10::TensorImpl& state) override {
    host.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return host.unsafeGetGeneratorImpl()->get_state();
  }
  TestGenerator* clone_impl() const override {
    auto* copy = new TestGenerator(device().index());
    copy->host = host.clone();
    return copy;
  }

  at::Generator host;
};

at::Generator& host_generator(at::Generator& generator) {
  return static_cast<TestGenerator*>(generator.unsafeGetGeneratorImpl())->host;
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = new std::array<at::Generator, kTestDevices>{
      at::make_generator<TestGenerator>(0), at::make_generator<TestGenerator>(1)};
  return all->at(static_cast<size_t>(index_of(device)));
}

/// An event that was recorded.
struct Recorded {
  Clock clock{};
  std::chrono::steady_clock::time_point at{};
  bool polled = false;
};

class TestGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return kTestDevices; }
  c10::Device getDevice() const override { return {kType, current_device()}; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {kType, std::exchange(current_device(), index_of(device.index()))};
  }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    current_device() = index_of(device.index());
  }
#if __has_include(<c10/core/DeviceCapability.h>)
  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    const Lock lock(machine().mutex);
    c10::DeviceCapability capability;
    capability.capability_data.supported_scalar_types.has_BFloat16 = machine().has_bf16;
    return capability;
  }
#endif

  c10::Stream getStream(c10::Device device) const override {
    return stream(device, current_streams().at(static_cast<size_t>(index_of(device.index()))));
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(device, 0); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    static std::atomic<int> next{0};
    return stream(device, 1 + next++ % (kStreamsPerDevice - 1));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return getStreamFromGlobalPool(device, false);
  }
  c10::Stream exchangeStream(c10::Stream to) const override {
    int& current = current_streams().at(static_cast<size_t>(to.device_index()));
    return stream(to.device(), std::exchange(current, static_cast<int>(to.id())));
  }
  bool queryStream(const c10::Stream& stream) const override {
    const Lock lock(machine().mutex);
    host_learns(clock(stream));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override { host_waits(clock(stream)); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Clock all{};
    for (int i = 0; i < kStreamsPerDevice; ++i) {
      join(all, machine().streams[static_cast<size_t>(stream_index(index_of(device), i))]);
    }
    host_waits(all);
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator().recordStream(data, stream);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    const Lock lock(machine().mutex);
    if (*event == nullptr) {
      *event = new Recorded;
    }
    *static_cast<Recorded*>(*event) = {clock(stream), std::chrono::steady_clock::now()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    const Lock lock(machine().mutex);
    if (event != nullptr) {
      join(clock(stream), static_cast<Recorded*>(event)->clock);
    }
  }
  /// The first query says no and the second yes, so that a test meets both answers.
  bool queryEvent(void* event) const override {
    const Lock lock(machine().mutex);
    auto* recorded = static_cast<Recorded*>(event);
    if (recorded == nullptr || contains(machine().host, recorded->clock)) {
      return true;
    }
    if (!std::exchange(recorded->polled, true)) {
      return false;
    }
    host_learns(recorded->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      host_waits(static_cast<Recorded*>(event)->clock);
    }
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(static_cast<Recorded*>(to)->at -
                                                     static_cast<Recorded*>(from)->at)
        .count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Recorded*>(event);
  }

 private:
  static c10::Stream stream(c10::Device device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, {kType, index_of(device.index())}, id);
  }
  static Clock& clock(const c10::Stream& stream) {
    return machine().streams[static_cast<size_t>(stream_index(stream.device_index(), stream.id()))];
  }
};

class TestHooks final : public at::PrivateUse1HooksInterface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kTestDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { current_device() = device; }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device(), device);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return std::exchange(current_device(), index_of(device));
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<TestGenerator>(index_of(device));
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override {
    const Lock lock(machine().mutex);
    const Block* block = find_block(data);
    return block != nullptr && block->pinned;
  }
  at::Device getDeviceFromPtr(void* data) const override {
    const Lock lock(machine().mutex);
    const Block* block = find_block(data);
    TORCH_CHECK(block != nullptr && !block->pinned, "this is no memory of the test device");
    return test_device(block->device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const c10::DeviceGuard guard(storage.device());
    machine::refuse_in_capture("a tensor's memory grows");
    c10::DataPtr fresh = device_allocator().allocate(bytes);
    if (const size_t kept = std::min(bytes, impl->nbytes()); kept > 0) {
      device_allocator().copy_data(fresh.get(), impl->data(), kept);
    }
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(bytes);
  }
};

} // namespace hasten::testing_support::machine

namespace hasten::testing_support {

using machine::Lock;

void install_test_device() {
  static std::once_flag once;
  std::call_once(once, [] {
    c10::register_privateuse1_backend("test_device");
    c10::SetAllocator(machine::kType, &machine::device_allocator());
    static const c10::impl::DeviceGuardImplRegistrar guard(machine::kType, new machine::TestGuard);
    at::RegisterPrivateUse1HooksInterface(new machine::TestHooks);
    machine::install_operators();
    machine::install_autocast();
    machine::install_graphs();
    machine::install_fault_messages();
  });
}

at::Device test_device(int index) { return {machine::kType, static_cast<c10::DeviceIndex>(index)}; }

DeviceCounters DeviceCounters::operator-(const DeviceCounters& before) const {
  return {operators - before.operators,
          syncs - before.syncs,
          copies_to_host - before.copies_to_host,
          copies_to_device - before.copies_to_device,
          bytes_to_host - before.bytes_to_host,
          bytes_to_device - before.bytes_to_device,
          pageable_copies - before.pageable_copies};
}

DeviceCounters device_counters() {
  const Lock lock(machine::machine().mutex);
  return machine::machine().counters;
}

std::vector<std::string> take_device_errors() {
  const Lock lock(machine::machine().mutex);
  return std::exchange(machine::machine().errors, {});
}

void set_device_bf16(bool has) {
  const Lock lock(machine::machine().mutex);
  machine::machine().has_bf16 = has;
}

void set_device_memory_limit(size_t bytes) {
  const Lock lock(machine::machine().mutex);
  machine::machine().limit = bytes;
}

} // namespace hasten::testing_support
