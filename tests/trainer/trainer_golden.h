// Made by tools/golden/trainer.py: torch 2.13.0+cpu, transformers
// 5.23.0, scikit-learn 1.9.1.
#pragma once

#include <cstdint>
#include <vector>

namespace hasten::trainer_golden {

inline const std::vector<double> kLogits = {
    0.13253507932899886, 0.09398311048784817, 3.673077260058803,   2.735380797073556,
    2.2427173277568335,  3.864429720020586,   -2.8836279855045848, 1.4555206957433953,
    -2.6262993156585783, -0.6560003522734006, -2.7043371763011668, 3.5902149678917317,
    0.40239984277621627, -1.047922041424772,  -0.5677579804389583, 0.9051510042020591,
    -3.335458268465753,  -3.1740645938616714, 4.06052665739244,    1.3193046528925003,
    1.0180840593552274};
inline const std::vector<int64_t> kLabels = {0, 2, 1, -100, 1, 0, 2};
inline const std::vector<double> kClassWeights = {0.5, 2.0, 1.25};
inline constexpr double kPlain = 1.5255063729922016;
inline constexpr double kSmoothed = 1.6445665455471166;
inline constexpr double kLabelSmoother = 1.6445665325673453;
inline constexpr double kWeighted = 1.358656785154889;
inline constexpr double kWeightedAndSmoothed = 1.5419150080657906;
inline const std::vector<double> kTargets = {1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0,
                                             0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0};
inline constexpr double kBce = 1.2846921003144185;
inline constexpr double kBcePosWeight = 1.5124362715322592;
inline constexpr double kMse = 6.141296881784577;
inline constexpr double kF1Micro = 0.45454545454545453;
inline constexpr double kF1Macro = 0.4523809523809524;
inline constexpr double kSubsetAccuracy = 0.14285714285714285;
struct StoppingCase {
  int64_t patience;
  double threshold;
  bool greater;
  std::vector<double> values;
  int64_t stops_behind;
};
inline const std::vector<StoppingCase> kStoppingCases = {
    {1, 0.0, false, {1.0, 0.9, 0.95, 0.8}, 3},
    {2, 0.0, false, {1.0, 0.9, 0.95, 0.94, 0.8}, 4},
    {2, 0.1, false, {1.0, 0.95, 0.91, 0.87, 0.5}, 3},
    {3, 0.0, true, {0.1, 0.1, 0.2, 0.2, 0.2, 0.2}, 6},
    {2, 0.05, true, {0.5, 0.56, 0.6, 0.66, 0.7, 0.74}, 6},
    {2, 0.0, true, {0.1, 0.2, 0.3, 0.4}, 0},
};

} // namespace hasten::trainer_golden
