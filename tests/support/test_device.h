// A device for tests on machines without a GPU: LibTorch's back end PrivateUse1, in host memory.
// Errors that a GPU forgives most of the time, and a CPU always, occur here every time:
// - The host touches memory of the device, reads pinned memory before the copy into it is done, or
//   writes pinned memory before the copy from it is done. The process ends by SIGSEGV, with a line
//   that says which of them.
// - An operator uses memory that another stream may still use, without an event between them. Or
//   memory is freed while another stream may use it, without record_stream. Both are recorded:
//   take_device_errors(). Vector clocks find them, so nothing depends on who wins a race.
// - An operator gets tensors of two devices. It throws.
// - An operator reads memory that nobody wrote. It is full of NaN.
// Operators run at once, in the calling thread, by the kernels of the CPU. So results equal the
// CPU's, and only the order between streams is simulated.
// Threading: any thread. One operator runs at a time.
// Lifetime: a program installs the device once and keeps it.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace hasten::testing_support {

constexpr int kTestDevices = 2;

/// Makes the device known to torch. Call it before the first tensor, in a program whose tests all
/// expect it: at::getAccelerator() is this device from then on. A second call does nothing.
void install_test_device();

at::Device test_device(int index = 0);

/// What has happened since the program began, on all test devices.
struct DeviceCounters {
  int64_t operators = 0;
  /// How often the host waited for a device: explicitly, for a value (item), for a shape (nonzero),
  /// or for a copy from or to memory that is not pinned.
  int64_t syncs = 0;
  int64_t copies_to_host = 0;
  int64_t copies_to_device = 0;
  int64_t bytes_to_host = 0;
  int64_t bytes_to_device = 0;
  /// Copies with non_blocking from or to memory that is not pinned. The host waits for them.
  int64_t pageable_copies = 0;

  DeviceCounters operator-(const DeviceCounters& before) const;
};
DeviceCounters device_counters();

/// The errors between streams since the last call, one sentence each. main() of the device's tests
/// fails a test that leaves any.
std::vector<std::string> take_device_errors();

/// Whether the devices state that they compute bf16 in hardware. main() makes it true after each
/// test.
void set_device_bf16(bool has);

/// Allocations that would exceed this many bytes on one device throw c10::OutOfMemoryError. 0: no
/// limit. main() removes the limit after each test.
void set_device_memory_limit(size_t bytes);

} // namespace hasten::testing_support
