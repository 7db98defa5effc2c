#include <gtest/gtest.h>

#include "groups/back_ends.h"

namespace hasten::detail {

TEST(ConnectionAdvice, NamesTheRanksThatShareAGpu) {
  const Advice advice = connection_advice(
      "NCCL error in: a.cpp:1, invalid usage\nLast error:\n"
      "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000\nmore");
  EXPECT_EQ(advice.what, "two ranks are on one GPU: rank 1 and rank 0 both on CUDA device 1b000");
  EXPECT_EQ(advice.fix, "give each rank its own GPU, or use --backend gloo");
}

TEST(ConnectionAdvice, SaysHowNcclFindsAnInterface) {
  const Advice advice = connection_advice(
      "ncclSystemError: System call failed\nLast error:\nBootstrap : no socket interface found");
  EXPECT_EQ(advice.what, "NCCL found no network interface");
  EXPECT_NE(advice.fix.find("NCCL_SOCKET_IFNAME"), std::string::npos);
}

TEST(ConnectionAdvice, SaysNothingOfOtherErrors) {
  EXPECT_EQ(connection_advice("unhandled system error").what, "");
}

} // namespace hasten::detail
