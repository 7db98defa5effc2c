// Which address a world uses and which tensors it accepts. tests/cli/hosts_test.cpp runs two hosts
// in network namespaces.
#include "meet/network_interface.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "hasten/base/error.h"
#include "support/environment.h"
#include "tensor_checks.h"

namespace hasten::detail {

static Hello at(const std::string& host, const std::string& store_address) {
  Hello hello;
  hello.network_host = host;
  hello.store_address = store_address;
  return hello;
}

TEST(NetworkInterface, TheMastersOwnHostTakesTheAddressThatOthersReach) {
  // Ranks 0 and 1 know their host by Debian's 127.0.1.1.
  const std::vector<Hello> hellos{at("a", "127.0.1.1"), at("a", "127.0.1.1"), at("b", "10.77.0.1")};
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(store_address_of(hellos, rank), "10.77.0.1") << rank;
  }
  EXPECT_EQ(store_address_of({at("a", "fe00::1"), at("b", "10.1.1.1")}, 0), "fe00::1");
  EXPECT_EQ(store_address_of({at("a", "::1"), at("b", "127.0.0.1")}, 1), "");
}

TEST(NetworkInterface, LoopbackIsKnownInBothFamilies) {
  EXPECT_TRUE(is_loopback_address("127.0.1.1"));
  EXPECT_TRUE(is_loopback_address("::1"));
  for (const char* other : {"10.0.0.127", "fe80::1", "localhost", "127.example.org", ""}) {
    EXPECT_FALSE(is_loopback_address(other)) << other;
  }
}

TEST(NetworkInterface, AnOptionIsAnAddressOrANameAndComesBeforeTheVariable) {
  EXPECT_EQ(reachable_address("10.9.8.7", "127.0.0.1"), "10.9.8.7");
  const testing_support::ScopedEnvironment variable(
      testing_support::EnvironmentValues{{std::string("GLOO_SOCKET_IFNAME"), "lo"}});
  EXPECT_EQ(reachable_address("", "198.51.100.1"), "127.0.0.1");
  EXPECT_EQ(reachable_address("10.9.8.7", "127.0.0.1"), "10.9.8.7");
  const testing_support::ScopedEnvironment none(
      testing_support::EnvironmentValues{{std::string("GLOO_SOCKET_IFNAME"), "eth77"}});
  try {
    reachable_address("", "198.51.100.1");
    FAIL() << "eth77 was found";
  } catch (const InputError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("GLOO_SOCKET_IFNAME=eth77 is no interface"), std::string::npos) << text;
    EXPECT_NE(text.find("lo"), std::string::npos) << text;
  }
}

TEST(TensorChecks, TensorsWithoutDataAreRefused) {
  const auto refusal = [](const Collective& what) {
    try {
      check_collective(what, 0, 2);
      return std::string("accepted");
    } catch (const InputError& error) {
      return std::string(error.what());
    }
  };
  using Kind = Collective::Kind;
  const at::Tensor empty = at::empty({2}, at::kMeta);
  EXPECT_NE(refusal({.kind = Kind::broadcast, .output = empty}).find("device=meta"),
            std::string::npos);
  EXPECT_NE(refusal({.kind = Kind::all_gather,
                     .output = at::empty({2, 2}, at::kMeta),
                     .input = at::empty({2})})
                .find("dense tensor with data"),
            std::string::npos);
  EXPECT_EQ(refusal({.kind = Kind::broadcast, .output = at::empty({2})}), "accepted");
}

} // namespace hasten::detail
