#include "hasten/text/conll.h"

#include <gtest/gtest.h>

#include "hasten/base/error.h"
#include "support/error_of.h"

namespace hasten {

using testing_support::error_of;

namespace {

std::vector<std::string> records(const std::string& text, const std::string& column) {
  ConllReader reader(TextFile::of_text("a.conll", text));
  const size_t at = reader.column(column);
  std::vector<std::string> found;
  while (reader.next()) {
    found.push_back(std::to_string(reader.line()) + ":" + std::string(reader.field(at)));
  }
  return found;
}

} // namespace

TEST(Conll, ASentenceEndsAtAnEmptyLineAndIsNamedByItsFirstLine) {
  const std::string text = "-DOCSTART- -X- O\n\nEU NNP B-ORG\nrejects VBZ O\n\n\n# NN O\n";
  EXPECT_EQ(records(text, "tokens"),
            (std::vector<std::string>{R"(3:["EU","rejects"])", R"(7:["#"])"}));
  EXPECT_EQ(records(text, "1"), (std::vector<std::string>{R"(3:["NNP","VBZ"])", R"(7:["NN"])"}));
  EXPECT_EQ(records(text, "ner_tags"),
            (std::vector<std::string>{R"(3:["B-ORG","O"])", R"(7:["O"])"}));
}

TEST(Conll, TabsSeparateColumnsWithSpacesAndLinesMayEndWithCarriageReturns) {
  EXPECT_EQ(records("New York\tB-LOC\r\nis\tO\r\n\r\n", "tokens"),
            (std::vector<std::string>{R"(1:["New York","is"])"}));
}

TEST(Conll, DamageIsAnErrorWithItsLine) {
  EXPECT_NE(error_of([] { records("a O\nb\n", "tokens"); }).find("a.conll:2 has columns=1"),
            std::string::npos);
  EXPECT_NE(error_of([] { records("a O\n\xff O\n", "tokens"); }).find("a.conll:2: byte 1"),
            std::string::npos);
  EXPECT_NE(error_of([] { records("\n\n", "tokens"); }).find("has no sentence"), std::string::npos);
  const std::string column = error_of([] { records("a O\n", "tags"); });
  EXPECT_NE(column.find("ner_tags (\"O\")"), std::string::npos) << column;
}

TEST(Conll, AWordListHasTextsAndWholeNumbers) {
  EXPECT_EQ(read_word_list(R"(["a", 3])", "f:1", "tokens"), (std::vector<std::string>{"a", "3"}));
  for (const char* wrong : {"text", "[1.5]", "[[]]", "{}", "[\"a\""}) {
    const std::string error = error_of([&] { read_word_list(wrong, "f:1", "tokens"); });
    EXPECT_NE(error.find("f:1: tokens="), std::string::npos) << error;
  }
}

} // namespace hasten
