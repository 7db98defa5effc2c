// main() of programs whose cases run on several ranks:
//   hasten_dist_tests --world 2 [--gtest_filter=…]
#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "support/rank_process.h"
#include "support/run_device.h"
#include "support/world_run.h"

int main(int argc, char** argv) {
  using namespace hasten::testing_support;
  const std::vector<std::string> all(argv, argv + argc);
  testing::InitGoogleTest(&argc, argv);
  if (is_rank_process()) {
    choose_run_device();
    return run_as_rank();
  }
  if (GTEST_FLAG_GET(list_tests)) {
    return RUN_ALL_TESTS();
  }
  int world_size = 2;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--world" && i + 1 < argc) {
      world_size = std::atoi(argv[++i]);
    } else {
      std::fprintf(stderr, "unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  if (world_size < 1) {
    std::fprintf(stderr, "--world must be 1 or more\n");
    return 2;
  }
  return run_as_parent(world_size, all);
}
