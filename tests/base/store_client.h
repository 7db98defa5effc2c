// Requests of tests to a StoreServer, as bytes.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "hasten/base/store_server.h"

namespace hasten::detail {

inline const std::atomic<bool> kNever{false};

inline StoreClock::time_point soon(int seconds = 60) {
  return StoreClock::now() + std::chrono::seconds(seconds);
}

inline StoreAddress local_address() { return {.socket = unique_socket_name("hasten-test-")}; }

inline StoreAddress tcp_address(unsigned char secret) {
  StoreAddress address{.host = "127.0.0.1"};
  address.key.fill(secret);
  return address;
}

inline std::string request(int64_t number, StoreOp op, std::initializer_list<const char*> texts) {
  StoreWriter writer;
  writer.number(number);
  writer.number(static_cast<int64_t>(op));
  for (const char* text : texts) {
    writer.text(text);
  }
  return writer.bytes;
}

/// The answer's first text; "refused: …", "none" or "broken".
inline std::string ask(StoreChannel& channel, StoreOp op, std::initializer_list<const char*> texts,
                       int seconds = 60) {
  channel.send(request(7, op, texts));
  std::string_view frame;
  switch (channel.wait(frame, soon(seconds))) {
    case StoreChannel::Next::none:
      return "none";
    case StoreChannel::Next::broken:
      return "broken";
    case StoreChannel::Next::frame:
      break;
  }
  StoreReader reader{frame};
  EXPECT_EQ(reader.number(), 7);
  const bool refused = reader.number() != 0;
  return refused ? "refused: " + std::string(reader.text()) : std::string(reader.text());
}

/// Expects that the server answers requests.
inline void expect_serves(const StoreAddress& address) {
  const auto channel = connect_store(address, soon(), kNever);
  EXPECT_EQ(ask(*channel, StoreOp::set, {"alive", "yes"}), "");
  EXPECT_EQ(ask(*channel, StoreOp::get, {"alive"}), "yes");
}

/// Expects that the server ends the connection `fd` and still serves others.
inline void expect_ended_by(const StoreAddress& address, const FileDescriptor& fd) {
  pollfd ready{fd.get(), POLLIN, 0};
  ASSERT_EQ(::poll(&ready, 1, 60'000), 1);
  char block[4096];
  ssize_t got = 0;
  while ((got = ::recv(fd.get(), block, sizeof block, 0)) > 0 || (got < 0 && errno == EAGAIN)) {
    ::poll(&ready, 1, 60'000);
  }
  expect_serves(address);
}

} // namespace hasten::detail
