// The durations of rounds decide whether delayed averages are faster. Worlds 1 to 4.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "local_sgd_scope.h"
#include "support/communicator.h"

namespace hasten::delay_trial_test {

// The test sets the clock. Immediate and delayed rounds have fixed durations. The process
// stops for an hour before one of the rounds.
TEST(DelayTrial, AResumedTrialDecidesByWhatItHasTimed) {
  const auto communicator = testing_support::fresh_communicator();
  using Trial = detail::DelayTrial;
  for (const bool pays : {true, false}) {
    for (int stopped = 0; stopped <= 4; ++stopped) {
      SCOPED_TRACE(testing::Message() << pays << " stopped at " << stopped);
      Trial::Clock::time_point now{std::chrono::hours(1000)};
      Trial trial(true, true);
      std::vector<bool> late;
      for (int round = 0; round < 7; ++round) {
        if (round == stopped) {
          const auto state = nlohmann::json::parse(trial.state(now).dump());
          now += std::chrono::hours(1);
          trial = Trial(true, true);
          trial.restore(state, now);
        }
        now += std::chrono::milliseconds(400); // the rest of the previous round
        late.push_back(trial.next_is_delayed(*communicator, now));
        now += std::chrono::milliseconds(late.back() == pays ? 100 : 300);
      }
      EXPECT_EQ(late, (std::vector<bool>{false, false, true, true, pays, pays, pays}));
      EXPECT_FALSE(trial.undecided());
    }
  }
}

} // namespace hasten::delay_trial_test
