// The store's server, without a tensor.
#include "hasten/base/store_server.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <vector>

#include "hasten/base/error.h"
#include "store_client.h"

namespace hasten::detail {

TEST(StoreServer, AHostThatDoesNotResolveIsAnErrorThatNamesIt) {
  const auto start = StoreClock::now();
  try {
    connect_store({.host = "nowhere.invalid", .port = 29500}, soon(600), kNever);
    FAIL() << "no error";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("MASTER_ADDR=nowhere.invalid does not resolve"),
              std::string::npos)
        << error.what();
  }
  EXPECT_LT(StoreClock::now() - start, std::chrono::seconds(40));
}

TEST(StoreServer, WaitersAreAnsweredWhenTheLastOfTheirKeysComes) {
  StoreServer server(local_address());
  const auto waiter = connect_store(server.address(), soon(), kNever);
  const auto writer = connect_store(server.address(), soon(), kNever);
  EXPECT_EQ(ask(*waiter, StoreOp::get, {"b", "a"}, 0), "none");
  EXPECT_EQ(ask(*writer, StoreOp::set, {"b", "2"}), "");
  std::string_view frame;
  EXPECT_EQ(waiter->wait(frame, StoreClock::now()), StoreChannel::Next::none);
  // The first key is removed before the other key exists.
  ask(*writer, StoreOp::remove, {"b"});
  ask(*writer, StoreOp::append, {"a", "1"});
  EXPECT_EQ(waiter->wait(frame, StoreClock::now()), StoreChannel::Next::none);
  ask(*writer, StoreOp::compare_set, {"b", "", "3"});
  ASSERT_EQ(waiter->wait(frame, soon()), StoreChannel::Next::frame);
  StoreReader reader{frame};
  reader.number();
  reader.number();
  EXPECT_EQ(reader.text(), "3");
  EXPECT_EQ(reader.text(), "1");
  EXPECT_TRUE(reader.ok && reader.rest.empty());
}

TEST(StoreServer, OneThatGivesUpWaitingIsServedOn) {
  StoreServer server(local_address());
  const auto channel = connect_store(server.address(), soon(), kNever);
  EXPECT_EQ(ask(*channel, StoreOp::wait, {"never"}, 0), "none");
  EXPECT_EQ(ask(*channel, StoreOp::set, {"a", "1"}), "");
  EXPECT_EQ(ask(*channel, StoreOp::set, {"never", "1"}), "");
  std::string_view frame;
  EXPECT_EQ(channel->wait(frame, StoreClock::now()), StoreChannel::Next::none);
}

TEST(StoreServer, WhatOneWroteThatIsGoneWakesTheWaiters) {
  StoreServer server(local_address());
  const auto waiter = connect_store(server.address(), soon(), kNever);
  EXPECT_EQ(ask(*waiter, StoreOp::get, {"k"}, 0), "none");
  connect_store(server.address(), soon(), kNever)->send(request(1, StoreOp::set, {"k", "v"}));
  std::string_view frame;
  EXPECT_EQ(waiter->wait(frame, soon()), StoreChannel::Next::frame);
}

TEST(StoreServer, KeepsNoMoreThanItsLimitOfBytes) {
  StoreServer server(local_address(), {.bytes = 100});
  const auto channel = connect_store(server.address(), soon(), kNever);
  const std::string fits(99, 'x');
  EXPECT_EQ(ask(*channel, StoreOp::set, {"k", fits.c_str()}), "");
  EXPECT_EQ(ask(*channel, StoreOp::set, {"l", ""}), "refused: the store is full: 100 bytes");
  EXPECT_EQ(ask(*channel, StoreOp::append, {"k", "x"}), "refused: the store is full: 100 bytes");
  EXPECT_EQ(ask(*channel, StoreOp::set, {"k", "short"}), "");
  EXPECT_EQ(ask(*channel, StoreOp::set, {"l", "now it fits"}), "");
}

TEST(StoreServer, FramesHaveALimitAndWhatIsNoRequestEndsTheConnection) {
  StoreServer local(local_address());
  StoreServer tcp(tcp_address(1));
  for (const StoreServer* server : {&local, &tcp}) {
    // Before the proof a frame has at most 128 bytes.
    const uint64_t limit = server == &local ? StoreChannel::kMaxFrame : uint64_t{128};
    for (const uint64_t size : {limit + 1, ~uint64_t{0}}) {
      const FileDescriptor fd = try_connect(server->address());
      ASSERT_EQ(::send(fd.get(), &size, sizeof size, 0), ssize_t{sizeof size});
      expect_ended_by(server->address(), fd);
    }
    // At the limit the server waits for the rest. A truncated frame has no effect.
    FileDescriptor fd = try_connect(server->address());
    ASSERT_EQ(::send(fd.get(), &limit, sizeof limit, 0), ssize_t{sizeof limit});
    ASSERT_EQ(::send(fd.get(), "half", 4, 0), 4);
    pollfd ready{fd.get(), POLLIN, 0};
    EXPECT_EQ(::poll(&ready, 1, 50), 0);
    fd.close();
    expect_serves(server->address());
  }
  for (const std::string& bad : {std::string("?"), request(1, static_cast<StoreOp>(99), {}),
                                 request(1, StoreOp::set, {"key without a value"}),
                                 request(1, StoreOp::get, {"a"}) + "tail"}) {
    const auto channel = connect_store(local.address(), soon(), kNever);
    channel->send(bad);
    std::string_view frame;
    EXPECT_EQ(channel->wait(frame, soon()), StoreChannel::Next::broken);
  }
  expect_serves(local.address());
}

TEST(StoreServer, LargeValuesGoThroughAndSlowReadersHoldUpNobody) {
  StoreServer server(tcp_address(1));
  const auto channel = connect_store(server.address(), soon(), kNever);
  const std::string large(16 << 20, 'v');
  EXPECT_EQ(ask(*channel, StoreOp::set, {"large", large.c_str()}), "");
  // Sends requests repeatedly and reads no answer.
  const auto slow = connect_store(server.address(), soon(), kNever);
  for (int i = 0; i < 4; ++i) {
    slow->send(request(i, StoreOp::get, {"large"}));
  }
  expect_serves(server.address());
  EXPECT_EQ(ask(*channel, StoreOp::get, {"large"}), large);
  std::string_view frame;
  for (int64_t i = 0; i < 4; ++i) {
    ASSERT_EQ(slow->wait(frame, soon()), StoreChannel::Next::frame);
    StoreReader reader{frame};
    EXPECT_EQ(reader.number(), i);
    EXPECT_EQ(reader.number(), 0);
    EXPECT_EQ(reader.text().size(), large.size());
  }
}

TEST(StoreServer, AnAddressThatIsTakenIsAnError) {
  for (const StoreAddress& address : {local_address(), tcp_address(1)}) {
    const StoreServer server(address);
    EXPECT_THROW(StoreServer(server.address()), InputError);
  }
  StoreAddress everywhere = tcp_address(1);
  everywhere.host.clear();
  StoreServer server(everywhere);
  expect_serves(server.address());
}

TEST(StoreServer, ServesFiveHundredConnectionsFromOneThread) {
  StoreServer server(local_address());
  std::vector<std::unique_ptr<StoreChannel>> channels;
  for (int i = 0; i < 512; ++i) {
    channels.push_back(connect_store(server.address(), soon(), kNever));
    channels.back()->send(request(i, StoreOp::wait, {"go"}));
  }
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator("/proc/self/task"), {}), 2);
  expect_serves(server.address());
  const auto writer = connect_store(server.address(), soon(), kNever);
  ask(*writer, StoreOp::set, {"go", ""});
  for (const auto& channel : channels) {
    std::string_view frame;
    EXPECT_EQ(channel->wait(frame, soon()), StoreChannel::Next::frame);
  }
}

} // namespace hasten::detail
