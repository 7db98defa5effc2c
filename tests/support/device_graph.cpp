#include "support/device_graph.h"

#if __has_include(<ATen/core/GraphImplInterface.h>) // not in older releases
#include <ATen/core/GraphImplInterface.h>
#define HASTEN_HAS_GRAPHS 1
#endif

#include <cstring>
#include <memory>
#include <utility>

namespace hasten::testing_support::machine {

static Capture* current_capture = nullptr; // guarded by the machine's mutex

Capture* capture_of(int stream) {
  return current_capture != nullptr && current_capture->stream == stream ? current_capture
                                                                         : nullptr;
}

void refuse_in_capture(const char* what) {
  const Lock lock(machine().mutex);
  for (int device = 0; device < kTestDevices; ++device) {
    TORCH_CHECK(capture_of(current_stream_index(device)) == nullptr,
                "operation not permitted when the stream is capturing: ", what);
  }
}

#ifdef HASTEN_HAS_GRAPHS

class TestGraph final : public at::GraphImplInterface {
 public:
  explicit TestGraph(const at::GraphImplArgs&) {}
  ~TestGraph() override { reset(); }

  void capture_begin(at::MempoolId_t pool, at::GraphCaptureMode) override {
    Machine& m = machine();
    const Lock lock(m.mutex);
    TORCH_CHECK(current_capture == nullptr && capture_.pool == 0, "a capture is there already");
    capture_.device = current_device();
    capture_.stream = current_stream_index(capture_.device);
    TORCH_CHECK(capture_.stream % kStreamsPerDevice != 0, "the default stream cannot capture");
    capture_.pool = pool.first != 0 ? pool.first : ++m.serials;
    capture_.first = m.serials;
    ++m.pools[capture_.pool];
    generator_ = default_generator(capture_.device).clone();
    current_capture = &capture_;
  }

  void capture_end() override {
    const Lock lock(machine().mutex);
    TORCH_CHECK(
        current_capture == &capture_ && capture_.stream == current_stream_index(capture_.device),
        "a capture ends on its stream");
    current_capture = nullptr;
    at::Generator generator = default_generator(capture_.device);
    generator.set_state(generator_.get_state());
    for (auto& [address, block] : machine().blocks) {
      if (const auto saved = capture_.before.find(block.serial); saved != capture_.before.end()) {
        write_block(address, block,
                    [&](char* data) { std::memcpy(data, saved->second.data(), block.bytes); });
      } else if (block.pool == capture_.pool && block.serial > capture_.first) {
        write_block(address, block, [&](char* data) { std::memset(data, 0xff, block.bytes); });
      }
    }
    capture_.before.clear();
  }

  void instantiate() override {}

  void replay() override {
    Machine& m = machine();
    const Lock lock(m.mutex);
    refuse_in_capture("a replay");
    ++m.counters.operators;
    for (const RecordedWork& recorded : capture_.work) {
      Kernel kernel("the replay of " + recorded.name, capture_.device);
      for (const Operand& operand : recorded.operands) {
        const Block* block = find_block(operand.data);
        TORCH_CHECK(block != nullptr && block->serial == operand.serial, "the replay of ",
                    recorded.name, " uses memory that was freed after the capture");
        kernel.touch(operand.data, operand.bytes, operand.write);
      }
      recorded.again();
    }
  }

  void reset() override {
    const Lock lock(machine().mutex);
    if (current_capture == &capture_) {
      current_capture = nullptr;
    }
    const uint64_t pool = std::exchange(capture_, {}).pool;
    if (pool != 0 && --machine().pools[pool] == 0) {
      free_pool(pool);
    }
  }

  at::MempoolId_t pool() const override { return {capture_.pool, 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

 private:
  Capture capture_;
  at::Generator generator_{};
};

void install_graphs() {
  at::GraphImplRegistry()->Register(
      c10::DeviceTypeName(kType, false),
      [](const at::GraphImplArgs& args) -> std::unique_ptr<at::GraphImplInterface> {
        return std::make_unique<TestGraph>(args);
      });
}

#else

void install_graphs() {}

#endif

} // namespace hasten::testing_support::machine
