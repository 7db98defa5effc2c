// Whether delayed averages pay: decided by the rounds' times. Worlds 1 to 4.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "local_sgd_scope.h"
#include "support/communicator.h"

namespace hasten::delay_trial_test {

// By a clock of its own: rounds at once and late ones of these lengths, and the
// process stopped for an hour before any of them.
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
        now += std::chrono::milliseconds(400); // the rest of the round before
        late.push_back(trial.next_is_delayed(*communicator, now));
        now += std::chrono::milliseconds(late.back() == pays ? 100 : 300);
      }
      EXPECT_EQ(late, (std::vector<bool>{false, false, true, true, pays, pays, pays}));
      EXPECT_FALSE(trial.undecided());
    }
  }
}

} // namespace hasten::delay_trial_test
