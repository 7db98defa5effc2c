// Access to a store: by secret between hosts, by user on one host.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstring>
#include <filesystem>
#include <thread>
#include <vector>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "store_client.h"
#include "support/environment.h"
#include "support/stranger.h"
#include "support/temporary_folder.h"

namespace hasten::detail {

using testing_support::EnvironmentValues;
using testing_support::run_as_stranger;
using testing_support::ScopedEnvironment;
using testing_support::start_stranger;
using testing_support::TemporaryFolder;

TEST(StoreSecret, WhoHasAnotherOrNoneIsNotLetIn) {
  StoreServer server(tcp_address(1));
  for (const unsigned char other : {2, 0}) {
    StoreAddress address = server.address();
    address.key.fill(other);
    try {
      connect_store(address, soon(), kNever);
      FAIL() << "let in";
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find("has another secret"), std::string::npos)
          << error.what();
    }
  }
  // A client that does not check the server's proof.
  StoreChannel liar(try_connect(server.address()));
  liar.send("hasten-store-1" + std::string(32, 'n'));
  std::string_view frame;
  ASSERT_EQ(liar.wait(frame, soon()), StoreChannel::Next::frame);
  liar.send(std::string(32, 'h'));
  EXPECT_EQ(liar.wait(frame, soon()), StoreChannel::Next::broken);
  // A client that sends a request without a proof.
  StoreChannel rude(try_connect(server.address()));
  rude.send(request(1, StoreOp::set, {"failure", "x"}));
  EXPECT_EQ(rude.wait(frame, soon()), StoreChannel::Next::broken);
  expect_serves(server.address());
}

/// All bytes that a client has sent over the network.
static std::string recorded_session(const StoreAddress& address, std::string& answers) {
  StoreServer server(address);
  // A listener between client and server that forwards the bytes of both.
  StoreAddress middle = tcp_address(1);
  const auto [listen_fd, port] = [] {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in any{};
    any.sin_family = AF_INET;
    any.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof any;
    ::bind(fd, reinterpret_cast<sockaddr*>(&any), size);
    ::listen(fd, 1);
    ::getsockname(fd, reinterpret_cast<sockaddr*>(&any), &size);
    return std::pair(fd, ntohs(any.sin_port));
  }();
  middle.port = port;
  std::string sent;
  std::thread tap([&, fd = listen_fd] {
    const int client = ::accept(fd, nullptr, nullptr);
    const FileDescriptor behind = try_connect(server.address());
    pollfd ends[2] = {{client, POLLIN, 0}, {behind.get(), POLLIN, 0}};
    char block[4096];
    for (bool open = true; open;) {
      ::poll(ends, 2, -1);
      for (int i = 0; i < 2 && open; ++i) {
        if (ends[i].revents == 0) {
          continue;
        }
        const ssize_t got = ::read(ends[i].fd, block, sizeof block);
        open = got > 0;
        if (open) {
          (i == 0 ? sent : answers).append(block, static_cast<size_t>(got));
          EXPECT_EQ(::write(ends[1 - i].fd, block, size_t(got)), got);
        }
      }
    }
    ::close(client);
  });
  {
    const auto channel = connect_store(middle, soon(), kNever);
    EXPECT_EQ(ask(*channel, StoreOp::set, {"k", "v"}), "");
  }
  tap.join();
  ::close(listen_fd);
  return sent;
}

TEST(StoreSecret, ARecordedSessionIsWorthNothing) {
  std::string answers;
  const std::string sent = recorded_session(tcp_address(1), answers);
  StoreServer server(tcp_address(1));
  const FileDescriptor fd = try_connect(server.address());
  ASSERT_EQ(::send(fd.get(), sent.data(), sent.size(), 0), static_cast<ssize_t>(sent.size()));
  expect_ended_by(server.address(), fd);
  const auto channel = connect_store(server.address(), soon(), kNever);
  EXPECT_EQ(ask(*channel, StoreOp::wait, {"k"}, 0), "none");
}

/// Both ends of a proved connection. The test forwards the bytes between them.
struct SealedPair {
  SealedPair() {
    int ends[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK, 0, ends), 0);
    server_fd = ends[1];
    client = std::make_unique<StoreChannel>(FileDescriptor(ends[0]));
    server = std::make_unique<StoreChannel>(FileDescriptor(ends[1]));
    std::thread prover(
        [this] { EXPECT_EQ(client->prove(key, soon()), StoreChannel::Proof::right); });
    std::string_view frame;
    while (!server->trusted()) {
      EXPECT_EQ(server->wait(frame, soon()), StoreChannel::Next::frame);
      EXPECT_TRUE(server->admit(frame, key));
    }
    prover.join();
  }
  /// Takes the bytes that the client has sent.
  std::string take() const {
    std::string bytes(4096, '\0');
    const ssize_t got = ::recv(server_fd, bytes.data(), bytes.size(), 0);
    bytes.resize(static_cast<size_t>(std::max<ssize_t>(got, 0)));
    return bytes;
  }
  void put(const std::string& bytes) const { ::send(client->fd(), bytes.data(), bytes.size(), 0); }

  StoreKey key{3};
  int server_fd = -1;
  std::unique_ptr<StoreChannel> client{};
  std::unique_ptr<StoreChannel> server{};
};

TEST(StoreSecret, FramesCannotBeRepeatedReorderedReflectedOrChanged) {
  std::string_view frame;
  for (const char* attack : {"", "repeat", "reorder", "reflect", "change"}) {
    const SealedPair pair;
    pair.client->send("one");
    const std::string one = pair.take();
    pair.client->send("two");
    const std::string two = pair.take();
    const std::string_view what = attack;
    bool refused = true;
    if (what.empty() || what == "repeat") {
      pair.put(one + (what.empty() ? two : one));
      EXPECT_EQ(pair.server->wait(frame, soon()), StoreChannel::Next::frame);
      EXPECT_EQ(frame, "one");
      refused = !what.empty();
    } else if (what == "reorder") {
      pair.put(two);
    } else if (what == "change") {
      std::string changed = one;
      changed[8] ^= 1;
      pair.put(changed);
    } else { // the client receives its own frame
      ::send(pair.server_fd, one.data(), one.size(), 0);
      EXPECT_EQ(pair.client->wait(frame, soon()), StoreChannel::Next::broken);
      continue;
    }
    EXPECT_EQ(pair.server->wait(frame, soon()),
              refused ? StoreChannel::Next::broken : StoreChannel::Next::frame)
        << attack;
  }
}

TEST(StoreSecret, ConnectionsThatProveNothingAreFewAndShort) {
  StoreServer server(tcp_address(1), {.strangers = 4, .proof = std::chrono::milliseconds(300)});
  std::vector<FileDescriptor> fds;
  for (int i = 0; i < 40; ++i) {
    fds.push_back(try_connect(server.address()));
    ASSERT_TRUE(fds.back());
  }
  expect_serves(server.address()); // while the others are connected
  for (const FileDescriptor& fd : fds) {
    expect_ended_by(server.address(), fd);
  }
}

TEST(StoreSecret, ItsFileIsReadOnlyWhereNobodyElseMayReadIt) {
  const TemporaryFolder folder;
  const std::filesystem::path file = folder / "secret";
  write_file_atomically(file, "0123456789abcdef\n");
  const auto key = [&](const char* secret, const std::string& path) {
    const ScopedEnvironment environment(
        EnvironmentValues{{"HASTEN_SECRET", secret}, {"HASTEN_SECRET_FILE", path}});
    return store_key_from_environment();
  };
  EXPECT_FALSE(key("", "").has_value());
  for (const int mode : {0644, 0640, 0604, 0620, 0700}) {
    ::chmod(file.c_str(), static_cast<mode_t>(mode));
    try {
      key("", file.string());
      FAIL() << "read with mode " << mode;
    } catch (const InputError& error) {
      const std::string text = error.what();
      EXPECT_NE(text.find("HASTEN_SECRET_FILE=" + file.string()), text.npos);
      EXPECT_EQ(text.find("0123456789"), text.npos);
    }
  }
  for (const int mode : {0600, 0400}) {
    ::chmod(file.c_str(), static_cast<mode_t>(mode));
    EXPECT_EQ(key("", file.string()), key("0123456789abcdef", ""));
  }
  EXPECT_NE(key("0123456789abcdeF", ""), key("0123456789abcdef", ""));
  EXPECT_THROW(key("0123456789abcde", ""), InputError); // 15 bytes
  EXPECT_THROW(key("", (folder / "none").string()), InputError);
}

TEST(StoreStranger, AnotherUserNeitherReadsNorWrites) {
  if (!testing_support::can_be_a_stranger()) {
    GTEST_SKIP() << "needs root, to become another user";
  }
  StoreServer server(local_address());
  expect_serves(server.address());
  const std::string frames = [] {
    std::string bytes;
    for (const std::string& frame :
         {request(1, StoreOp::set, {"alive", "no"}), request(2, StoreOp::get, {"alive"})}) {
      const uint64_t size = frame.size();
      bytes.append(reinterpret_cast<const char*>(&size), sizeof size);
      bytes += frame;
    }
    return bytes;
  }();
  const StoreAddress address = server.address();
  EXPECT_EQ(run_as_stranger([&] {
              const FileDescriptor fd = try_connect(address);
              ::send(fd.get(), frames.data(), frames.size(), MSG_NOSIGNAL);
              char byte = 0;
              ssize_t got = 0;
              while ((got = ::recv(fd.get(), &byte, 1, 0)) < 0 && errno == EAGAIN) {
                ::usleep(1000);
              }
              return got > 0 ? 1 : 0; // an answer
            }),
            0);
  const auto channel = connect_store(server.address(), soon(), kNever);
  EXPECT_EQ(ask(*channel, StoreOp::get, {"alive"}), "yes");
}

TEST(StoreStranger, AnothersFloodDoesNotStopTheStore) {
  if (!testing_support::can_be_a_stranger()) {
    GTEST_SKIP() << "needs root, to become another user";
  }
  StoreServer local(local_address());
  StoreServer tcp(tcp_address(1), {.strangers = 16});
  for (const StoreServer* server : {&local, &tcp}) {
    const StoreAddress address = server->address();
    const pid_t flood = start_stranger([&]() -> int {
      const std::string junk(100'000, 'j');
      while (true) {
        FileDescriptor fds[64];
        for (FileDescriptor& fd : fds) {
          fd = try_connect(address);
          ::send(fd.get(), junk.data(), junk.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        }
      }
    });
    for (int i = 0; i < 50; ++i) {
      expect_serves(address);
    }
    ::kill(flood, SIGKILL);
    ::waitpid(flood, nullptr, 0);
  }
}

TEST(StoreStranger, ANameThatAnotherUserTookIsAnErrorOnBothSides) {
  if (!testing_support::can_be_a_stranger()) {
    GTEST_SKIP() << "needs root, to become another user";
  }
  const StoreAddress address = local_address();
  int ready[2];
  ASSERT_EQ(::pipe2(ready, O_CLOEXEC), 0);
  const pid_t squatter = start_stranger([&]() -> int {
    const auto [name, size] = abstract_address(address.socket);
    const int fd = ::socket(AF_UNIX, SOCK_STREAM, 0);
    ::bind(fd, reinterpret_cast<const sockaddr*>(&name), size);
    ::listen(fd, 8);
    ::write(ready[1], "r", 1);
    ::pause();
    return 0;
  });
  char byte = 0;
  ASSERT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_THROW(StoreServer{address}, InputError);
  try {
    connect_store(address, soon(), kNever);
    FAIL() << "trusted a stranger";
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("another user (uid 65534) listens"), std::string::npos)
        << error.what();
  }
  ::kill(squatter, SIGKILL);
  ::waitpid(squatter, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
}

} // namespace hasten::detail
