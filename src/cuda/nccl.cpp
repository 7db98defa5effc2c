// The library hasten_nccl: NCCL by torch's ProcessGroupNCCL, behind one C function.
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <array>
#include <chrono>
#include <cstdlib>
#include <utility>

/// Torch's threads would end the process when an operation fails or is late. hasten has
/// its own watch, which ends the operation and throws. They read this when a group is made.
static void quiet_torch() {
  constexpr std::array<std::pair<const char*, const char*>, 10> settings{{
      {"TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"}, // no abort() of the process, nothing torn down
      {"TORCH_NCCL_BLOCKING_WAIT", "0"}, // wait() is for streams
      {"TORCH_NCCL_ENABLE_MONITORING", "0"}, // nobody kills the process if the watchdog is stuck
      {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "2000000"}, // the thread exists even so, and sleeps
      {"TORCH_NCCL_COORD_CHECK_MILSEC", "2000000000"}, // and does not poll the store
      {"TORCH_NCCL_DUMP_ON_TIMEOUT", "0"},
      {"TORCH_NCCL_PROPAGATE_ERROR", "0"},
      {"TORCH_NCCL_DESYNC_DEBUG", "0"},
      {"TORCH_NCCL_RETHROW_CUDA_ERRORS", "0"}, // an exception would leave its thread
      {"TORCH_NCCL_LOG_CPP_STACK_ON_UNCLEAN_SHUTDOWN", "0"},
  }};
  for (const auto& [name, value] : settings) {
    ::setenv(name, value, 1);
  }
}

/// Collective. The caller owns a reference. Throws what torch throws.
extern "C" __attribute__((visibility("default"))) c10d::Backend* hasten_make_nccl(
    c10d::Store& store, int rank, int world_size, int device) {
  quiet_torch();
  const auto options = c10d::ProcessGroupNCCL::Options::create();
  options->timeout = std::chrono::hours(24 * 365); // hasten's watch has the timeout
  const auto group = c10::make_intrusive<c10d::ProcessGroupNCCL>(
      c10::intrusive_ptr<c10d::Store>::reclaim_copy(&store), rank, world_size, options);
  const at::Device own(at::kCUDA, static_cast<c10::DeviceIndex>(device));
  group->setBoundDeviceId(own);
  group->eagerConnectSingleDevice(own);
  return c10::intrusive_ptr<c10d::Backend>(group).release();
}
