#include "hasten/base/error.h"

#include <gtest/gtest.h>

#include <iterator>

namespace hasten {

TEST(Error, MessageNamesPlaceValueExpectationAndFix) {
  const InputError error(
      "comm::init", "MASTER_PORT=99999 is not a port", "1..65535", "set it");
  EXPECT_STREQ(
      error.what(),
      "[comm::init] MASTER_PORT=99999 is not a port. Expected 1..65535. "
      "Fix: set it.");
}

TEST(Error, MessageStartsWithTheRankInALargerWorld) {
  set_error_rank(1, 4);
  const Error error("a::b", "x=1");
  set_error_rank(0, 1);
  EXPECT_STREQ(error.what(), "rank 1/4 [a::b] x=1.");
}

TEST(Error, NearestNameIsOfferedOnlyWhenItIsNear) {
  const std::string names[] = {"text", "label", "source"};
  EXPECT_EQ(nearest_name("lable", std::begin(names), std::end(names)), "label");
  EXPECT_EQ(nearest_name("zzzzz", std::begin(names), std::end(names)), "");
}

} // namespace hasten
