// Graphs of the test device behave as CUDA's.
#include <ATen/core/GraphImplInterface.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <exception>
#include <functional>
#include <memory>

#include "hasten/core/side_stream.h"
#include "support/test_device.h"

namespace hasten::device_graph_test {

using testing_support::device_counters;
using testing_support::test_device;
using Graph = std::unique_ptr<at::GraphImplInterface>;

Graph captured(const std::function<void()>& work) {
  Graph graph = at::create_graph_impl(test_device().type());
  const detail::SideStream side(test_device());
  side.follow();
  std::exception_ptr failure;
  {
    const c10::StreamGuard here(side.stream());
    graph->capture_begin();
    try {
      work();
    } catch (const c10::Error&) {
      failure = std::current_exception();
    }
    graph->capture_end();
  }
  side.join();
  if (failure) {
    std::rethrow_exception(failure);
  }
  return graph;
}

TEST(DeviceGraph, ACaptureComputesNothingAndAReplayAll) {
  const at::Tensor x = at::ones({3}, test_device());
  at::Tensor y;
  const Graph graph = captured([&] {
    x.add_(1);
    y = at::cat({x * 2, x.sum().view({1})});
  });
  EXPECT_TRUE(x.cpu().equal(at::ones({3})));
  EXPECT_TRUE(y.cpu().isnan().all().item<bool>());
  graph->replay();
  EXPECT_TRUE(y.cpu().equal(at::tensor({4.f, 4.f, 4.f, 6.f})));
  x.fill_(0);
  const auto before = device_counters();
  graph->replay();
  EXPECT_EQ((device_counters() - before).operators, 1);
  EXPECT_TRUE(y.cpu().equal(at::tensor({2.f, 2.f, 2.f, 3.f})));
}

TEST(DeviceGraph, EachReplayDrawsAnew) {
  torch::manual_seed(1);
  const at::Tensor eager = at::rand({8}, test_device());
  const at::Tensor next = at::rand({8}, test_device());
  torch::manual_seed(1);
  at::Tensor drawn;
  const Graph graph = captured([&] { drawn = at::rand({8}, test_device()); });
  graph->replay();
  EXPECT_TRUE(drawn.cpu().equal(eager.cpu()));
  graph->replay();
  EXPECT_TRUE(drawn.cpu().equal(next.cpu()));
}

TEST(DeviceGraph, MemoryOfTheCaptureStaysAndOtherMemoryMust) {
  at::Tensor x = at::ones({3}, test_device());
  const at::Tensor y = at::zeros({3}, test_device());
  const Graph graph = captured([&] { y.copy_(x * 2 + 1); }); // both products are freed
  graph->replay();
  EXPECT_TRUE(y.cpu().equal(at::full({3}, 3.f)));
  x = at::ones({3}, test_device());
  EXPECT_THROW(graph->replay(), c10::Error);
}

TEST(DeviceGraph, WhatWaitsForTheHostCannotBeCaptured) {
  const at::Tensor x = at::ones({3}, test_device());
  const at::Tensor host = at::ones({3});
  const at::Tensor pinned = host.pin_memory();
  for (const std::function<void()>& work :
       {std::function<void()>([&] { x.sum().item<float>(); }),
        {[&] { x.copy_(host); }},
        {[&] { x.nonzero(); }},
        {[&] { x.copy_(pinned, true); }},
        {[] { c10::impl::VirtualGuardImpl(test_device().type()).synchronizeDevice(0); }}}) {
    EXPECT_THROW(captured(work), c10::Error);
  }
  EXPECT_NO_THROW(captured([&] { x.add_(1); })) << "the captures that failed are over";
  EXPECT_TRUE(x.cpu().equal(host));
}

} // namespace hasten::device_graph_test
