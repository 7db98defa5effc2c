#include "hasten/base/timeouts.h"

#include <gtest/gtest.h>

#include <cmath>

#include "hasten/base/error.h"
#include "support/environment.h"

namespace hasten {

using std::chrono::milliseconds;
using testing_support::ScopedEnvironment;

TEST(Timeouts, TheEnvironmentSetsDefaultsWithinTheirRange) {
  {
    const ScopedEnvironment none(
        {{"HASTEN_DDP_TIMEOUT", std::nullopt}, {"HASTEN_HEARTBEAT_TIMEOUT", ""}});
    EXPECT_EQ(default_ddp_timeout(), milliseconds(600'000));
    EXPECT_EQ(default_heartbeat_timeout(), milliseconds(5'000));
  }
  const ScopedEnvironment ends(
      {{"HASTEN_DDP_TIMEOUT", "1e7"}, {"HASTEN_HEARTBEAT_TIMEOUT", "0.1"}});
  EXPECT_EQ(default_ddp_timeout(), milliseconds(10'000'000'000));
  EXPECT_EQ(default_heartbeat_timeout(), milliseconds(100));
  for (const char* wrong : {"0.099", "-1", "1.0001e7", "nan", "inf", "5s", " 5"}) {
    const ScopedEnvironment bad(
        testing_support::EnvironmentValues{{std::string("HASTEN_DDP_TIMEOUT"), wrong}});
    EXPECT_THROW(default_ddp_timeout(), InputError) << wrong;
  }
  EXPECT_THROW(check_timeout("here", "x", std::nan("")), InputError);
}

} // namespace hasten
