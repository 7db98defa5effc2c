// The order between streams of the test device.
#include <ATen/ATen.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include "support/test_device.h"

namespace hasten {

using testing::IsSubstring;
using testing_support::take_device_errors;
using testing_support::test_device;

static const c10::impl::VirtualGuardImpl& streams() {
  static const c10::impl::VirtualGuardImpl guard(at::kPrivateUse1);
  return guard;
}

static c10::Stream side_stream() { return streams().getStreamFromGlobalPool(test_device()); }

/// The errors since the last call, which are expected to be `count`.
static std::string errors(size_t count) {
  std::string text;
  const auto all = take_device_errors();
  EXPECT_EQ(all.size(), count);
  for (const std::string& error : all) {
    text += error + "\n";
  }
  return text;
}

static void order(const c10::Stream& earlier, const c10::Stream& later) {
  c10::Event event(at::kPrivateUse1);
  event.record(earlier);
  event.block(later);
}

TEST(TestDeviceStreams, AMissingEventIsReported) {
  const c10::Stream side = side_stream();
  const at::Tensor x = at::ones({4}, test_device());
  {
    const c10::StreamGuard guard(side);
    x.add_(1);
  }
  const std::string text = errors(1);
  EXPECT_PRED_FORMAT2(IsSubstring, "aten::add.out reads on stream", text);
  EXPECT_PRED_FORMAT2(IsSubstring, "aten::fill_.Scalar writes on stream 0 of device 0", text);
  EXPECT_PRED_FORMAT2(IsSubstring, "Fix: an event", text);
  streams().synchronizeDevice(0); // before the memory is freed
}

TEST(TestDeviceStreams, EventsOrderStreams) {
  const c10::Stream main = streams().getStream(test_device());
  const c10::Stream side = side_stream();
  at::Tensor x = at::ones({4}, test_device());
  order(main, side);
  {
    const c10::StreamGuard guard(side);
    x.add_(1);
  }
  order(side, main);
  x.add_(1);
  EXPECT_EQ(x.sum().item<float>(), 12);
  errors(0);
  order(main, side);
  {
    const c10::StreamGuard guard(side);
    x.add_(1);
  }
  errors(0);
  x.mul(2); // without waiting again
  EXPECT_PRED_FORMAT2(IsSubstring, "aten::mul.out reads on stream 0 of device 0", errors(1));
  order(side, main);
}

TEST(TestDeviceStreams, AHostThatWaitedOrdersStreams) {
  const c10::Stream side = side_stream();
  const at::Tensor x = at::ones({4}, test_device());
  streams().synchronizeDevice(0);
  {
    const c10::StreamGuard guard(side);
    x.add_(1);
  }
  streams().synchronizeStream(side);
  x.add_(1);
  errors(0);
}

TEST(TestDeviceStreams, PartsOfABlockHaveAnOrderEach) {
  const c10::Stream main = streams().getStream(test_device());
  const c10::Stream side = side_stream();
  const at::Tensor x = at::ones({8}, test_device());
  order(main, side);
  x.slice(0, 0, 4).add_(1);
  {
    const c10::StreamGuard guard(side);
    x.slice(0, 4, 8).add_(1);
    errors(0);
    x.slice(0, 3, 5).add_(1);
    errors(1);
  }
  order(side, main);
}

TEST(TestDeviceStreams, AnEarlyFreeIsReported) {
  const c10::Stream main = streams().getStream(test_device());
  const c10::Stream side = side_stream();
  const auto use = [&](const at::Tensor& x) {
    order(main, side);
    const c10::StreamGuard guard(side);
    x.add_(1);
  };
  use(at::ones({4}, test_device()));
  const std::string text = errors(1);
  EXPECT_PRED_FORMAT2(IsSubstring,
                      "memory of stream 0 of device 0 is freed while aten::add.out may use it "
                      "on stream",
                      text);
  EXPECT_PRED_FORMAT2(IsSubstring, "Fix: record_stream", text);
  at::Tensor kept = at::ones({4}, test_device());
  use(kept);
  order(side, main);
  kept.reset();
  at::Tensor recorded = at::ones({4}, test_device());
  use(recorded);
  recorded.record_stream(side);
  recorded.reset();
  errors(0);
}

TEST(TestDeviceStreams, MemoryOfOneStreamUsedFirstByAnotherIsReported) {
  const at::Tensor x = at::empty({4}, test_device());
  const c10::StreamGuard guard(side_stream());
  x.zero_();
  EXPECT_PRED_FORMAT2(IsSubstring, "its allocation writes on stream 0", errors(1));
  streams().synchronizeDevice(0);
}

TEST(TestDeviceStreams, CopiesBetweenDevicesAreOrderedWithBoth) {
  const at::Tensor x = at::ones({4}, test_device(0));
  const at::Tensor y = x.to(test_device(1));
  x.zero_();
  EXPECT_EQ(y.sum().item<float>(), 4);
  errors(0);
}

TEST(TestDeviceStreams, AQueryOfAnEventSaysNoAtFirst) {
  const at::Tensor x = at::ones({4}, test_device());
  c10::Event event(at::kPrivateUse1);
  event.record(streams().getStream(test_device()));
  EXPECT_FALSE(event.query());
  EXPECT_TRUE(event.query());
}

TEST(TestDeviceStreams, BackwardOfASideStreamIsOrdered) {
  const c10::Stream main = streams().getStream(test_device());
  const c10::Stream side = side_stream();
  at::Tensor x = at::ones({4}, test_device()).requires_grad_();
  order(main, side);
  at::Tensor loss;
  {
    const c10::StreamGuard guard(side);
    loss = (x * x).sum();
  }
  order(side, main);
  loss.backward();
  EXPECT_EQ(x.grad().sum().item<float>(), 8);
  order(side, main);
  loss.record_stream(side);
}

} // namespace hasten
