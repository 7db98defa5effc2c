#include "launch/node_plan.h"

#include <gtest/gtest.h>

#include "hasten/base/error.h"
#include "hasten/base/store_connection.h"
#include "hasten/base/store_server.h"
#include "support/captured_stderr.h"
#include "support/error_of.h"

namespace hasten {

using detail::Node;
using testing_support::error_of;

static Node node_of(const std::string& host, int node_rank, int nproc = 2) {
  return {.host = host, .pid = 7, .nproc = nproc, .node_rank = node_rank, .same = {{"lr", "0.1"}}};
}

TEST(NodePlan, NodesAreNumberedByTheirRankOrElseByHostNameAfterTheFirst) {
  EXPECT_EQ(detail::node_order({node_of("a", 0), node_of("b", 2), node_of("c", 1)}),
            (std::vector<size_t>{0, 2, 1}));
  EXPECT_EQ(detail::node_order({node_of("z", -1), node_of("b", -1), node_of("a", -1)}),
            (std::vector<size_t>{0, 2, 1}));
}

TEST(NodePlan, HostsThatCannotWorkTogetherAreNamedWithWhatDiffers) {
  EXPECT_EQ(detail::why_not_together({node_of("a", 0), node_of("b", 1)}, 2), "");
  EXPECT_EQ(detail::why_not_together({node_of("a", -1), node_of("a", -1)}, 2), "");
  EXPECT_EQ(detail::why_not_together({node_of("a", 0), node_of("b", 1), node_of("c", 1)}, 3),
            "two launchers have node_rank=1: host b (process 7) and host c (process 7)");
  EXPECT_EQ(detail::why_not_together({node_of("a", 0), node_of("b", -1)}, 2),
            "node_rank: host b has none, host a has 0");
  EXPECT_EQ(detail::why_not_together({node_of("a", 0), node_of("b", 2)}, 2),
            "node_rank=2 of host b with 2 nodes");
  Node other = node_of("b", 1);
  other.same = {{"lr", "0.2"}};
  EXPECT_EQ(detail::why_not_together({node_of("a", 0), other}, 2),
            "lr: host b has 0.2, host a has 0.1");
  other.same = {};
  EXPECT_EQ(detail::why_not_together({node_of("a", 0), other}, 2),
            "lr: host b has none, host a has 0.1");
}

TEST(NodePlan, MissingNodeRanksAreNamed) {
  RendezvousOptions options{.min_nodes = 4, .max_nodes = 4, .node_rank = 0};
  EXPECT_EQ(detail::who_has_come({node_of("a", 0), node_of("b", 2)}, options),
            "a (node rank 0), b (node rank 2); missing: node ranks 1, 3");
  options.node_rank = -1;
  EXPECT_EQ(detail::who_has_come({node_of("a", -1)}, options), "a");
}

TEST(NodePlan, TextsHaveTheRanksOfHostsWithUnequalNumbersOfThem) {
  EXPECT_EQ(detail::node_texts({node_of("a", 0, 2), node_of("b", 1, 1), node_of("c", 2, 3)}),
            (std::vector<std::string>{"a (node 0, ranks 0-1)", "b (node 1, rank 2)",
                                      "c (node 2, ranks 3-5)"}));
}

TEST(Endpoint, HasAHostAndAPortAndIpv6HasBrackets) {
  const auto parsed = [](const char* text) { return detail::parse_endpoint(text).text(); };
  EXPECT_EQ(parsed("host:29500"), "host:29500");
  EXPECT_EQ(parsed("[fe80::1%eth0]:1"), "[fe80::1%eth0]:1");
  for (const char* bad :
       {"host", "host:", ":1", "host:0", "host:70000", "fe80::1:29500", "[::1]"}) {
    EXPECT_THROW(parsed(bad), InputError) << bad;
  }
}

// A store that is no launcher's, of another version, or of another run.
TEST(Rendezvous, ALauncherOfAnotherVersionOrRunIsRefusedByName) {
  detail::StoreServer server({.host = "127.0.0.1", .port = 0});
  const std::atomic<bool> never{false};
  detail::StoreConnection store(server.address(),
                                detail::StoreClock::now() + std::chrono::seconds(10), never);
  const auto refusal = [&](const std::string& facts) {
    detail::StoreReader answer;
    store.request(detail::StoreOp::set, {"nodes/run", facts}, {},
                  detail::StoreClock::now() + std::chrono::seconds(10), answer);
    LaunchOptions options;
    options.argv = {"true"};
    options.rendezvous = {.min_nodes = 2,
                          .max_nodes = 2,
                          .node_rank = 1,
                          .endpoint = server.address().text(),
                          .rdzv_id = "mine"};
    const testing_support::CapturedStderr quiet;
    return error_of<InputError>([&] { launch(options); });
  };
  EXPECT_NE(refusal(R"({"rdzv_id":"theirs","hasten version":")" HASTEN_VERSION R"("})")
                .find("rdzv_id: the launcher at " + server.address().text() +
                      " has theirs, this host has mine"),
            std::string::npos);
  EXPECT_NE(refusal(R"({"rdzv_id":"mine","hasten version":"0.0.1"})")
                .find("hasten version: the launcher at " + server.address().text() +
                      " has 0.0.1, this host has " HASTEN_VERSION),
            std::string::npos);
}

} // namespace hasten
