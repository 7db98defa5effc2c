// How many functions lie between DDP and the memory that ranks share.
#include <cxxabi.h>
#include <dlfcn.h>
#include <execinfo.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <memory>
#include <string>

#include "comm/shm/transfer_queue.h"
#include "parallel/ddp_rig.h"

namespace hasten::ddp_test {

static std::array<void*, 64> frames;
static int frame_count = 0;

/// Of the first operation.
static void take_frames() {
  frame_count = frame_count > 0 ? frame_count : ::backtrace(frames.data(), 64);
}

static std::string function_at(void* address) {
  Dl_info found{};
  if (::dladdr(address, &found) == 0 || found.dli_sname == nullptr) {
    return "?";
  }
  int status = 0;
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(found.dli_sname, nullptr, nullptr, &status), std::free);
  return name ? name.get() : found.dli_sname;
}

// A call that the compiler has inlined has no frame. So the limit holds for the source in builds
// without optimization; in others for what a debugger and a profile show.
TEST(Ddp, ABucketReachesTheSharedMemoryThroughFewFunctions) {
  auto communicator = fresh_communicator();
  if (communicator->options().backend != "shm") {
    GTEST_SKIP() << "no memory that ranks share";
  }
  torch::manual_seed(1);
  torch::nn::Linear net(32, 32);
  net->to(torch::kDouble);
  Ddp ddp(communicator, net.ptr(), {});
  detail::TransferQueue::at_start = take_frames;
  reduce_once(ddp, communicator->rank(), [&](int rank) {
    frame_count = 0;
    return net->forward(rows_of(rank, 32)).square().sum();
  });
  detail::TransferQueue::at_start = nullptr;
  std::string names;
  int launch = 0;
  int enqueue = 0; // the first frame below take_frames()
  for (int i = 0; i < frame_count && launch == 0; ++i) {
    const std::string name = function_at(frames[static_cast<size_t>(i)]);
    enqueue = name.find("TransferQueue::start(") != std::string::npos ? i : enqueue;
    launch = name.find("Ddp::launch") != std::string::npos ? i : 0;
    names += name + '\n';
  }
  ASSERT_GT(enqueue, 0) << names;
  ASSERT_GT(launch, enqueue) << names;
  EXPECT_LE(launch - enqueue + 1, 6) << names;
}

} // namespace hasten::ddp_test
