#include "support/run_device.h"

#include <ATen/Parallel.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "hasten/base/world.h"
#include "hasten/core/device.h"
#include "support/test_device.h"

namespace hasten::testing_support {

static at::Device chosen = at::kCPU; // choose_run_device() sets it once

at::Device run_device() { return chosen; }

void choose_run_device() {
  const char* wanted = std::getenv("HASTEN_TEST_DEVICE");
  if (wanted == nullptr) {
    return;
  }
  if (std::string(wanted) == "test_device") {
    install_test_device();
    // Operators run kernels of the CPU, whose sums depend on the number of threads. Autograd's thread
    // of the device, which recomputes, may have another number than the thread of a forward.
    ::setenv("OMP_NUM_THREADS", "1", 1); // an Accelerator reads it
    at::set_num_threads(1);
  }
  const char* rank = std::getenv("LOCAL_RANK");
  World world;
  world.local_rank = rank != nullptr ? std::atoi(rank) : 0;
  chosen = detail::choose_device(wanted, world, true).device;
  c10::impl::VirtualGuardImpl(chosen.type()).setDevice(chosen);
}

class DeviceListener : public testing::EmptyTestEventListener {
  void OnTestStart(const testing::TestInfo&) override { before_ = device_counters(); }
  void OnTestEnd(const testing::TestInfo& info) override {
    set_device_memory_limit(0);
    set_device_bf16(true);
    for (const std::string& error : take_device_errors()) {
      ADD_FAILURE() << error;
    }
    if ((device_counters() - before_).operators == 0) {
      unused_ += std::string(" ") + info.test_suite_name() + "." + info.name();
    } else {
      ++used_;
    }
  }
  void OnTestProgramEnd(const testing::UnitTest&) override {
    if (run_device().is_privateuseone() && run_device().index() == 0) {
      std::printf("[  DEVICE  ] %d cases ran operators on the device. Without:%s\n", used_,
                  unused_.c_str());
    }
  }

  DeviceCounters before_;
  int used_ = 0; // cases
  std::string unused_; // the names of the others
};

void check_device_after_each_case() {
  testing::UnitTest::GetInstance()->listeners().Append(new DeviceListener); // owned by gtest
}

} // namespace hasten::testing_support
