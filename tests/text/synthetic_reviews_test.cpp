#include "hasten/text/synthetic_reviews.h"

#include <gtest/gtest.h>

#include <set>

#include "hasten/base/error.h"
#include "hasten/text/text_table.h"

namespace hasten {

TEST(SyntheticReviews, ASeedGivesTheSameRowsAndMoreRowsBeginWithThem) {
  const auto few = synthetic_reviews({.rows = 50, .seed = 7});
  const auto many = synthetic_reviews({.rows = 200, .seed = 7});
  const auto other = synthetic_reviews({.rows = 50, .seed = 8});
  int equal = 0;
  for (size_t row = 0; row < few.size(); ++row) {
    EXPECT_EQ(few[row].text, many[row].text);
    EXPECT_EQ(few[row].label, many[row].label);
    equal += few[row].text == other[row].text;
  }
  EXPECT_LE(equal, 2);
  // The reviews must be the same on every machine, version and compiler.
  const auto promised = synthetic_reviews({.rows = 1000});
  EXPECT_EQ(promised[2].text, "I would never say that the burr is unreliable.");
  EXPECT_EQ(promised[999].text,
            "Nobody could call the pole set reliable, and the zip turned out to be "
            "unreliable. One week was enough for me.");
  EXPECT_EQ(promised[999].product, "tent");
  EXPECT_THROW(synthetic_reviews({.rows = 0}), InputError);
}

TEST(SyntheticReviews, LabelsAreHalvesAndLengthsAndProductsVary) {
  const auto reviews = synthetic_reviews();
  std::set<std::string> products, texts;
  std::set<size_t> lengths;
  int positive = 0, negations = 0;
  for (const auto& review : reviews) {
    products.insert(review.product);
    texts.insert(review.text);
    lengths.insert(review.text.size());
    positive += review.label == "positive";
    negations += review.text.find(" not ") != std::string::npos ||
                 review.text.find("obody") != std::string::npos ||
                 review.text.find("nothing") != std::string::npos;
  }
  const int rows = static_cast<int>(reviews.size());
  EXPECT_EQ(products.size(), 12U);
  EXPECT_GT(static_cast<int>(texts.size()), rows * 95 / 100);
  EXPECT_NEAR(positive, rows / 2, rows / 25);
  EXPECT_GT(negations, rows / 5);
  EXPECT_LT(*lengths.begin(), 50U);
  EXPECT_GT(*lengths.rbegin(), 400U);
}

TEST(SyntheticReviews, TablesOfAllKindsHoldTheSameRows) {
  const auto reviews = synthetic_reviews({.rows = 100});
  const std::pair<char, const char*> kinds[] = {{',', "r.csv"}, {'\t', "r.tsv"}, {'\0', "r.jsonl"}};
  for (const auto& [delimiter, name] : kinds) {
    TextRowReader reader(TextFile::of_text(name, synthetic_reviews_table({.rows = 100}, delimiter)),
                         {});
    for (const auto& review : reviews) {
      ASSERT_TRUE(reader.next());
      EXPECT_EQ(reader.text(), review.text);
      EXPECT_EQ(reader.label(), review.label);
    }
    EXPECT_FALSE(reader.next());
  }
}

} // namespace hasten
