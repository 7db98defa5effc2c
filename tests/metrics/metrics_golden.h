// Written by tools/golden/metrics.py with scikit-learn 1.9.1 and SciPy
// 1.17.1.
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

namespace hasten::golden {

inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

inline const std::vector<int64_t> kLabels = {
    2, 1, 1, 2, 2, 0, 1, 2, 1, 2, 1, 0, 0, 0, 2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 2, 1, 2, 0, 1, 0,
    2, 2, 2, 2, 2, 0, 2, 1, 2, 0, 1, 2, 1, 2, 2, 2, 2, 0, 2, 2, 0, 2, 2, 2, 2, 1, 2, 2, 0, 0};
inline const std::vector<int64_t> kPredicted = {
    2, 1, 1, 3, 0, 1, 2, 2, 0, 2, 1, 0, 0, 0, 2, 3, 3, 2, 1, 2, 2, 2, 2, 1, 2, 1, 2, 1, 1, 0,
    2, 2, 2, 0, 2, 0, 2, 1, 2, 0, 1, 2, 1, 2, 0, 2, 2, 0, 1, 2, 0, 2, 1, 2, 1, 3, 2, 2, 0, 2};
inline constexpr double kAccuracy = 0.7333333333333333;
inline constexpr double kMatthews = 0.5884531962971027;
inline constexpr double kMicroPrecision = 0.7333333333333333;
inline constexpr double kMicroRecall = 0.7333333333333333;
inline constexpr double kMicroF1 = 0.7333333333333333;
inline constexpr double kMacroPrecision = 0.5552197802197802;
inline constexpr double kMacroRecall = 0.5555555555555556;
inline constexpr double kMacroF1 = 0.5497916666666667;
inline constexpr double kWeightedPrecision = 0.8156043956043957;
inline constexpr double kWeightedRecall = 0.7333333333333333;
inline constexpr double kWeightedF1 = 0.7648333333333334;
inline const std::vector<int64_t> kConfusion = {9, 2, 1, 0, 0, 1, 9, 1, 1, 0, 3, 4, 26,
                                                3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0};
inline const std::vector<int64_t> kBinaryLabels = {
    1, 0, 1, 0, 1, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0,
    0, 0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0};
inline const std::vector<double> kScores = {
    0.98, 0.52, 0.99, 0.57, 0.8,  0.15, 0.37, 0.35, 0.42, 0.18, 0.19, 0.17, 0.66,
    0.82, 0.99, 0.72, 0.14, 0.77, 0.52, 0.55, 0.61, 0.21, 0.54, 0.24, 0.44, 0.07,
    0.73, 0.07, 0.9,  0.51, 0.18, 1.0,  0.43, 0.93, 0.73, 0.24, 0.11, 0.76, 0.47,
    1.0,  0.37, 0.24, 0.56, 0.87, 0.32, 0.38, 0.39, 1.0,  0.08, 0.51};
inline constexpr double kAuroc = 0.8616298811544991;
inline constexpr double kAurocOneClass = kNan;
inline const std::vector<double> kTargets = {0.8, 6.1, 4.1,  4.8, 2.7, 3.8, 0.8, 2.0, 5.7,  -0.7,
                                             3.1, 5.4, 5.2,  4.3, 3.0, 5.7, 2.4, 2.9, -0.4, 3.6,
                                             2.4, 3.0, -1.5, 0.6, 2.7, 0.6, 4.3, 7.1, 2.9,  3.8,
                                             2.1, 2.0, 0.0,  4.0, 0.3, 1.9, 1.7, 0.4, 1.4,  2.5};
inline const std::vector<double> kPredictions = {
    1.5, 4.1, 4.0, 3.6, 1.9,  3.0, 0.1, 2.2, 4.0,  -0.5, 3.8,  2.8,  2.5, 2.8,
    2.3, 3.5, 2.4, 2.2, -0.0, 1.1, 3.2, 2.1, -2.0, 1.7,  1.8,  -0.4, 1.8, 4.9,
    1.3, 1.6, 1.3, 1.1, -0.6, 3.6, 1.6, 2.7, 0.7,  -0.3, -0.6, 1.4};
inline constexpr double kMse = 1.8477500000000002;
inline constexpr double kRmse = 1.359319682782531;
inline constexpr double kMae = 1.1425;
inline constexpr double kR2 = 0.5303238515858957;
inline constexpr double kPearson = 0.8430532757583256;
inline constexpr double kSpearman = 0.8098680822031874;
inline constexpr double kR2AlikeRight = 1.0;
inline constexpr double kR2AlikeWrong = 0.0;
inline constexpr double kR2OneRow = kNan;
inline constexpr double kPearsonAlike = kNan;
inline constexpr double kSpearmanAlike = kNan;

} // namespace hasten::golden
