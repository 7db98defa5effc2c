#include "hasten/text/jsonl.h"

#include <gtest/gtest.h>

#include <fstream>
#include <functional>

#include "hasten/base/error.h"
#include "hasten/text/text_classification.h"
#include "support/temporary_folder.h"

namespace hasten {

namespace detail {

std::shared_ptr<const TextFile> jsonl_text(const std::string& text) {
  return TextFile::of_text("rows.jsonl", text);
}

// The error of reading all of `text` with keys "text" and "label".
std::string jsonl_error(const std::string& text) {
  try {
    TextRowReader reader(jsonl_text(text), {});
    while (reader.next()) {
    }
    return "(no error)";
  } catch (const InputError& error) {
    return error.what();
  }
}

} // namespace detail

TEST(Jsonl, RowsEqualThoseOfTheSameTableAsCsv) {
  const auto csv = TextFile::of_text(
      "rows.csv", "text,label,stars\n\"a \"\"b\"\"\nc\",pos,5\n,neg,1\nd,,2\n\xC3\xA9,neg,1\n");
  const auto jsonl = detail::jsonl_text(
      "\xEF\xBB\xBF{\"text\": \"a \\\"b\\\"\\nc\", \"label\": \"pos\", \"stars\": 5}\r\n\n"
      "{\"label\": \"neg\", \"text\": null, \"stars\": 1}\n"
      "{\"text\": \"d\", \"label\": \"\", \"stars\": 2, \"more\": [1]}\n"
      "  {\"text\": \"\\u00e9\", \"label\": \"neg\", \"stars\": 1}");
  for (const char* filter : {"", "stars=1"}) {
    TextTableOptions options;
    if (*filter != '\0') {
      options.filters = {filter};
    }
    TextRowReader a(csv, options), b(jsonl, options);
    while (a.next()) {
      ASSERT_TRUE(b.next());
      EXPECT_EQ(a.text(), b.text());
      EXPECT_EQ(a.label(), b.label());
    }
    EXPECT_FALSE(b.next());
    EXPECT_EQ(a.counts().rows_read, b.counts().rows_read);
    EXPECT_EQ(a.counts().filtered_out, b.counts().filtered_out);
    EXPECT_EQ(a.counts().empty_text, b.counts().empty_text);
    EXPECT_EQ(a.counts().empty_label, b.counts().empty_label);
  }
}

TEST(Jsonl, NumbersAndTruthValuesAreLabels) {
  TextRowReader reader(
      detail::jsonl_text("{\"text\": \"a\", \"label\": 1}\n{\"text\": \"b\", \"label\": true}\n"
                         "{\"text\": \"c\", \"label\": 0.5}\n"),
      {});
  for (const char* label : {"1", "true", "0.5"}) {
    ASSERT_TRUE(reader.next());
    EXPECT_EQ(reader.label(), label);
  }
  EXPECT_EQ(reader.position(), "rows.jsonl:3");
}

TEST(Jsonl, MalformedLinesAreNamedByLineAndByte) {
  const std::string good = "{\"text\": \"a\", \"label\": \"x\"}\n"; // 28 bytes
  struct Case {
    std::string line;
    std::vector<std::string> parts;
  };
  const Case cases[] = {
      {"{\"text\": \"a\" \"label\": 1}",
       {"rows.jsonl:3: byte 20 of the line (byte 76 of the file)"}},
      {"{\"text\": \"a\"", {"rows.jsonl:3: byte 13 of the line"}},
      {"[\"a\", 1]", {"rows.jsonl:3: byte 1 of the line", "not an object"}},
      {"{\"text\": \"\xFF\", \"label\": 1}",
       {"rows.jsonl:3: byte 11 of the line", "UTF-8", "0xFF"}},
      {"{\"text\": \"a\"}", {"rows.jsonl:3", "no \"label\""}},
      {"{\"text\": {\"en\": \"a\"}, \"label\": 1}", {"rows.jsonl:3", "\"text\" is {"}},
      {"{\"text\": \"a\", \"label\": 1e999}", {"rows.jsonl:3"}},
  };
  for (const Case& bad : cases) {
    const std::string error = detail::jsonl_error(good + good + bad.line);
    for (const auto& part : bad.parts) {
      EXPECT_NE(error.find(part), std::string::npos) << part << "\n" << error;
    }
  }
  const std::string error = detail::jsonl_error("{\"txt\": \"a\", \"label\": \"x\"}\n");
  EXPECT_NE(error.find("text_column=text"), std::string::npos) << error;
  EXPECT_NE(error.find("did you mean txt?"), std::string::npos) << error;
  EXPECT_NE(detail::jsonl_error("\n \n").find("is empty"), std::string::npos);
}

TEST(Jsonl, NestingIsReadUpToTheLimitAndNamedByItsLineAboveIt) {
  const auto row = [](int depth) { // inside an object, so one level more
    return "{\"text\": \"a\", \"label\": \"x\", \"more\": " +
           std::string(static_cast<size_t>(depth), '[') +
           std::string(static_cast<size_t>(depth), ']') + "}\n";
  };
  EXPECT_EQ(detail::jsonl_error(row(99) + row(99)), "(no error)");
  for (const int depth : {100, 200'000}) {
    const std::string error = detail::jsonl_error(row(1) + row(depth));
    EXPECT_NE(error.find("rows.jsonl:2: byte 1 of the line"), std::string::npos) << error;
    EXPECT_NE(error.find("nested more than 100 deep"), std::string::npos);
    EXPECT_NE(detail::jsonl_error(row(depth)).find("nested"), std::string::npos);
  }
}

TEST(Jsonl, LinesAreTheSameWhereverAPieceOfTheFileEnds) {
  const testing_support::TemporaryFolder folder;
  const auto path = folder / "rows.jsonl";
  for (size_t shift = 0; shift < 40; ++shift) {
    std::string text(shift, ' ');
    for (int i = 0; text.size() < 600'000; ++i) {
      text += "{\"text\": \"a " + std::to_string(i) + "\", \"label\": 1}\n";
    }
    std::ofstream(path) << text;
    TextRowReader pieces(TextFile::open(path), {});
    TextRowReader whole(TextFile::of_text(path, text), {});
    bool more = true;
    while (more) {
      more = whole.next();
      ASSERT_EQ(pieces.next(), more);
      ASSERT_EQ(pieces.text(), whole.text());
      ASSERT_EQ(pieces.position(), whole.position());
      ASSERT_EQ(pieces.bytes_read(), whole.bytes_read());
    }
  }
}

TEST(Jsonl, OptionsOfDelimitedTextAreRefused) {
  const auto file = detail::jsonl_text("{\"text\": \"a\", \"label\": 1}\n");
  EXPECT_THROW(TextRowReader(file, {.delimiter = ';'}), InputError);
  EXPECT_THROW(TextRowReader(file, {.has_header = false}), InputError);
}

// pandas' to_json(orient="records") and json.dump of a list.
TEST(Jsonl, AnArrayOfRecordsIsReadAsItsLinesAre) {
  std::string array = "\xEF\xBB\xBF [", lines;
  for (int i = 0; i < 20'000; ++i) { // longer than a window
    const std::string row = "{\"text\": \"t\\\"}" + std::to_string(i) +
                            "\", \"label\": " + std::to_string(i % 2) +
                            ", \"more\": [1, {\"a\": \"]\"}]}";
    array += (i == 0 ? "\n  " : ",\n  ") + row;
    lines += row + "\n";
  }
  array += "\n]\n";
  const testing_support::TemporaryFolder folder;
  std::ofstream(folder / "a.json", std::ios::binary) << array;
  TextRowReader a(TextFile::open(folder / "a.json"), {}), b(detail::jsonl_text(lines), {});
  int64_t number = 0;
  while (b.next()) {
    ASSERT_TRUE(a.next());
    ASSERT_EQ(a.text(), b.text());
    ASSERT_EQ(a.label(), b.label());
    ASSERT_EQ(a.line(), ++number + 1);
  }
  EXPECT_FALSE(a.next());
}

TEST(Jsonl, AnArrayThatIsWrongIsNamedWithItsLine) {
  const std::string row = R"({"text": "a", "label": 1})";
  for (const auto& [text, part] :
       {std::pair{"[" + row + ",\n" + row, "rows.jsonl:2: the array is not closed"},
        {"[" + row + "\n" + row + "]", "rows.jsonl:2: a comma is missing"},
        {"[" + row + ",]", "rows.jsonl:1: a comma is missing, or there is one too many"},
        {"[" + row + ", 7]", "rows.jsonl:1: byte 1"},
        {"[" + row + ", {\"text\": ", "rows.jsonl:1: the file ends inside of an element"},
        {"[" + row + "] x", "rows.jsonl:1: text follows the array"},
        {std::string("[]"), "is empty"}}) {
    EXPECT_NE(detail::jsonl_error(text).find(part), std::string::npos)
        << part << " in: " << detail::jsonl_error(text);
  }
  const std::string columns = detail::jsonl_error(R"({"text": {"0": "a"}, "label": {"0": 1}})");
  EXPECT_NE(columns.find("orient='records'"), std::string::npos) << columns;
}

} // namespace hasten
