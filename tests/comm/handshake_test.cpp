#include "hasten/comm/handshake.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "hasten/base/process.h"
#include "hasten/comm/communicator.h"

namespace hasten::detail {

static std::vector<std::optional<Hello>> three_equal_hellos() {
  std::vector<std::optional<Hello>> hellos;
  for (int rank = 0; rank < 3; ++rank) {
    World world;
    world.rank = rank;
    world.world_size = 3;
    hellos.push_back(own_hello(world, "cpu", "gloo"));
  }
  return hellos;
}

TEST(Handshake, RanksOfOneKindAgree) { EXPECT_EQ(first_difference(three_equal_hellos()), ""); }

TEST(Handshake, EachDifferenceIsNamedWithBothRanksAndValues) {
  auto hellos = three_equal_hellos();
  hellos[2]->torch_version = "1.0";
  EXPECT_EQ(first_difference(hellos),
            "torch version: rank 2 has 1.0, rank 0 has " + hellos[0]->torch_version);
  hellos = three_equal_hellos();
  hellos[1]->hasten_version = "9.9";
  EXPECT_EQ(first_difference(hellos),
            "hasten version: rank 1 has 9.9, rank 0 has " + hellos[0]->hasten_version);
  hellos = three_equal_hellos();
  hellos[1]->world_size = 4;
  hellos[2].reset(); // has not arrived
  EXPECT_EQ(first_difference(hellos), "world size: rank 1 has 4, rank 0 has 3");
  hellos = three_equal_hellos();
  hellos[1]->device_kind = "cuda";
  EXPECT_EQ(first_difference(hellos), "device kind: rank 1 has cuda, rank 0 has cpu");
  hellos = three_equal_hellos();
  hellos[2]->backend = "nccl";
  EXPECT_EQ(first_difference(hellos), "back end: rank 2 has nccl, rank 0 has gloo");
  hellos[0].reset(); // nothing to compare with yet
  EXPECT_EQ(first_difference(hellos), "");
}

TEST(Handshake, HellosSurviveTheWire) {
  const Hello hello = *three_equal_hellos()[1];
  const auto copy = nlohmann::json(hello).get<Hello>();
  EXPECT_EQ(nlohmann::json(copy), nlohmann::json(hello));
  EXPECT_EQ(copy.pid, getpid());
  EXPECT_GT(copy.start_time, 0u);
  EXPECT_FALSE(copy.process_host.empty());
}

} // namespace hasten::detail
