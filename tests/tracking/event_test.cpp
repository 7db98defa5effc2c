// TensorBoard's records. Golden records are those of torch.utils.tensorboard's writer.
#include "event.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "tracking/event_golden.h"

namespace hasten::detail::event_test {
namespace {

std::string hex(const std::string& bytes) {
  std::string text;
  for (const char byte : bytes) {
    text += "0123456789abcdef"[static_cast<uint8_t>(byte) >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

TEST(Event, Crc32cIsThatOfRfc3720) {
  EXPECT_EQ(crc32c(""), 0u);
  EXPECT_EQ(crc32c("123456789"), 0xe3069283u);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aau);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43u);
  std::string rising;
  for (char c = 0; c < 32; ++c) {
    rising += c;
  }
  EXPECT_EQ(crc32c(rising), 0x46dd794eu);
}

TEST(Event, RecordsEqualThoseOfTensorBoardsWriter) {
  constexpr double kNow = golden::kNow;
  EXPECT_EQ(hex(version_record(kNow)), golden::kVersion);
  EXPECT_EQ(hex(scalar_record(kNow, 7, "train/loss", 0.625)), golden::kScalar);
  EXPECT_EQ(hex(scalar_record(kNow, 0, "zero", 0)), golden::kZero);
  EXPECT_EQ(hex(scalar_record(kNow, 300, "nan", NAN)), golden::kNan);
  EXPECT_EQ(hex(text_record(kNow, 0, "args", "two\nlines")), golden::kText);
}

TEST(Event, HistogramsHaveTorchsBins) {
  constexpr double kNow = golden::kNow;
  EXPECT_EQ(hex(histogram_record(kNow, 7, "w", {1, 1, 1.25, 3})), golden::kPositive);
  EXPECT_EQ(hex(histogram_record(kNow, 7, "w", {-0.5, -0.5, -0.375})), golden::kNegative);
  EXPECT_EQ(hex(histogram_record(kNow, 7, "w", {0})), golden::kNought);
  // Values that are not finite do not count.
  EXPECT_EQ(hex(histogram_record(kNow, 7, "w", {NAN, 0, INFINITY, -INFINITY})), golden::kNought);
  EXPECT_EQ(histogram_record(kNow, 7, "w", {}), "");
  EXPECT_EQ(histogram_record(kNow, 7, "w", {NAN}), "");
}

TEST(Event, HistogramsKeepValuesOutsideTorchsBins) {
  for (const double value : {1e300, -1e300}) {
    EXPECT_GT(histogram_record(0, 7, "w", {value, value}).size(), 60u);
  }
}

TEST(Event, HyperParametersEqualThoseOfTensorBoardsWriter) {
  constexpr double kNow = golden::kNow;
  EXPECT_EQ(hex(hparams_record(kNow, {{"x", 0.001}})), golden::kHparamsNumber);
  EXPECT_EQ(hex(hparams_record(kNow, {{"x", true}})), golden::kHparamsBool);
  EXPECT_EQ(hex(hparams_record(kNow, {{"x", "adamw"}})), golden::kHparamsText);
  EXPECT_EQ(hex(hparams_record(kNow, {{"x", "adamw"}, {"y", nullptr}})), golden::kHparamsText);
  EXPECT_EQ(hex(hparams_end_record(kNow)), golden::kHparamsEnd);
}

TEST(Event, ARecordFramesItsDataWithLengthAndChecksums) {
  const std::string record = event_record("abc");
  ASSERT_EQ(record.size(), 8u + 4 + 3 + 4);
  EXPECT_EQ(hex(record.substr(0, 8)), "0300000000000000");
  EXPECT_EQ(record.substr(12, 3), "abc");
  EXPECT_NE(record.substr(8, 4), record.substr(15, 4));
}

} // namespace
} // namespace hasten::detail::event_test
