#include <gtest/gtest.h>

#include "support/rank_process.h"
#include "support/spawn.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (hasten::testing_support::is_rank_process()) {
    return hasten::testing_support::run_rank_function();
  }
  return RUN_ALL_TESTS();
}
