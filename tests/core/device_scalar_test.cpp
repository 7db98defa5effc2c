#include "hasten/core/device_scalar.h"

#include <ATen/ATen.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include <cmath>

#include "hasten/core/side_stream.h"
#include "support/test_device.h"

namespace hasten {

using testing_support::device_counters;
using testing_support::test_device;

TEST(DeviceScalar, NumbersOfAStreamAreReadWithOneWait) {
  const DeviceScalar loss(at::full({1}, 2.5, test_device()));
  const DeviceScalar norm = DeviceScalar(at::full({}, 9.0, test_device())).then([](double square) {
    return std::sqrt(square);
  });
  const auto before = device_counters();
  EXPECT_EQ(loss.item(), 2.5);
  EXPECT_FALSE(norm.pending());
  EXPECT_EQ(norm.item(), 3);
  EXPECT_EQ((device_counters() - before).syncs, 1);
}

TEST(DeviceScalar, ANumberIsReadOnItsStream) {
  const DeviceScalar here(at::full({1}, 1.0, test_device()));
  const detail::SideStream side(test_device());
  const DeviceScalar there = [&] {
    const c10::StreamGuard guard(side.stream());
    return DeviceScalar(at::full({1}, 2.0, test_device()));
  }();
  EXPECT_EQ(here.item(), 1);
  EXPECT_TRUE(there.pending());
  EXPECT_EQ(there.item(), 2);
}

} // namespace hasten
