#include "hasten/text/csv.h"

#include <gtest/gtest.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <thread>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "support/temporary_folder.h"

#include <sys/stat.h>

namespace hasten {

using testing_support::TemporaryFolder;
using Record = std::vector<std::string>;

// A file of the given bytes, read as a whole.
struct CsvCase {
  TemporaryFolder folder{};
  std::filesystem::path path{};

  explicit CsvCase(const std::string& bytes, const std::string& name = "data.csv")
      : path(folder / name) {
    std::ofstream(path, std::ios::binary) << bytes;
  }
  std::vector<Record> records(CsvOptions options = {}) const {
    CsvReader reader(path, options);
    std::vector<Record> all{reader.columns()};
    while (reader.next()) {
      all.emplace_back(reader.fields().begin(), reader.fields().end());
    }
    return all;
  }
  // The first error's text after the path, or "" if there is no error.
  std::string error(CsvOptions options = {}) const {
    try {
      records(options);
      return "";
    } catch (const InputError& error) {
      const std::string text = error.what();
      const size_t at = text.find(path.string());
      return at == std::string::npos ? "no path in: " + text
                                     : text.substr(at + path.string().size());
    }
  }
};

TEST(Csv, QuotedFieldsHoldDelimitersLineBreaksAndDoubledQuotes) {
  const CsvCase file(
      "id,text\n"
      "1,\"a, b\"\n"
      "2,\"line one\nline two\r\nline three\"\n"
      "3,\"she said \"\"no\"\"\"\n"
      "4,\"\"\"\"\n"
      "\"5\",\"\"\n"
      "6,5\" disk\n");
  EXPECT_EQ(file.records(), (std::vector<Record>{{"id", "text"},
                                                 {"1", "a, b"},
                                                 {"2", "line one\nline two\r\nline three"},
                                                 {"3", "she said \"no\""},
                                                 {"4", "\""},
                                                 {"5", ""},
                                                 {"6", "5\" disk"}}));
}

TEST(Csv, LineEndsAndByteOrderMarkDoNotChangeTheRecords) {
  const std::vector<Record> expected{{"a", "b"}, {"1", "2"}, {"", "4"}};
  EXPECT_EQ(CsvCase("a,b\n1,2\n,4\n").records(), expected);
  EXPECT_EQ(CsvCase("a,b\n1,2\n,4").records(), expected);
  EXPECT_EQ(CsvCase("a,b\r\n1,2\r\n,4\r\n").records(), expected);
  EXPECT_EQ(CsvCase("a,b\r1,2\r,4\r").records(), expected);
  EXPECT_EQ(CsvCase("\xEF\xBB\xBF\"a\",b\n1,2\n,4\n").records(), expected);
  EXPECT_EQ(CsvCase("\n\na,b\n\n1,2\r\n\r\n,4\n\n").records(), expected);
}

TEST(Csv, ALoneCarriageReturnIsTextWhereLinesEndWithLineFeeds) {
  const std::vector<Record> expected{{"a", "b"}, {"1\r1", "2"}, {"\r3", "4"}};
  EXPECT_EQ(CsvCase("a,b\n1\r1,2\n\"\r3\",4\n").records(), expected);
  EXPECT_EQ(CsvCase("a,b\r\n1\r1,2\r\n\r3,4\r\n").records(), expected);
}

TEST(Csv, DelimiterFollowsTheNameOrTheOption) {
  const std::vector<Record> expected{{"a", "b"}, {"1,5", "2"}};
  EXPECT_EQ(CsvCase("a\tb\n1,5\t2\n", "x.tsv").records(), expected);
  EXPECT_EQ(CsvCase("a;b\n1,5;2\n").records({.delimiter = ';'}), expected);
  EXPECT_EQ(CsvCase("a\tb\n1,5\t2\n").records({.delimiter = '\t'}), expected);
}

TEST(Csv, InTabSeparatedFilesAQuoteCountsOnlyIfItClosesOnItsLine) {
  const CsvCase file(
      "text\tlabel\n"
      "\"an open quote\t1\n"
      "\"half\" quoted\t0\n"
      "\"closed\t\"\"tab\"\"\"\t1\n"
      "say \"x\"\t0\n"
      "\"\t1\n",
      "x.tsv");
  EXPECT_EQ(file.records(), (std::vector<Record>{{"text", "label"},
                                                 {"\"an open quote", "1"},
                                                 {"\"half\" quoted", "0"},
                                                 {"closed\t\"tab\"", "1"},
                                                 {"say \"x\"", "0"},
                                                 {"\"", "1"}}));
}

TEST(Csv, WithoutHeaderColumnsAreNumbersAndTheFirstRecordCounts) {
  const CsvCase file("good\t1\nbad\t0\n", "x.tsv");
  EXPECT_EQ(file.records({.has_header = false}),
            (std::vector<Record>{{"0", "1"}, {"good", "1"}, {"bad", "0"}}));
}

TEST(Csv, LineIsThePhysicalLineWhereTheRecordStarts) {
  const CsvCase file("a,b\n\n\"x\ny\r\nz\",1\r\n2,3\n");
  CsvReader reader(file.path);
  ASSERT_TRUE(reader.next());
  EXPECT_EQ(reader.line(), 3);
  ASSERT_TRUE(reader.next());
  EXPECT_EQ(reader.line(), 6);
  EXPECT_EQ(reader.position(), file.path.string() + ":6");
  EXPECT_FALSE(reader.next());
}

TEST(Csv, BadRecordsAreNamedByLineAndColumn) {
  const auto starts = [](const std::string& text, const std::string& prefix) {
    EXPECT_EQ(text.substr(0, prefix.size()), prefix) << text;
  };
  starts(CsvCase("a,b\n1,2\n1,2,3\n").error(),
         ":3: the record has fields=3, starting with \"1\". Expected 2 fields");
  starts(CsvCase("a,b\n1\n").error(), ":2: the record has fields=1");
  starts(CsvCase("a,b\n1,2\n3,\"never\nclosed\n").error(),
         ":3:3: a quote opens here and is never closed");
  starts(CsvCase("a,b\n1,\"x\"y\n").error(), ":2:6: text follows a closing quote");
  starts(CsvCase("a,b\n\xC3\xA9t\xE9,2\n").error(),
         ":2:3: invalid UTF-8: byte 0xE9 at offset 7 of the file");
  starts(CsvCase("a,b\n1,\"two\nli\xFFnes\"\n").error(),
         ":3:3 (record from line 2): invalid UTF-8: byte 0xFF");
  starts(CsvCase(std::string("a,b\n1,x\0y\n", 10)).error(), ":2:4: a NUL byte at offset 7");
}

TEST(Csv, UnusableFilesAreNamed) {
  const auto contains = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  contains(CsvCase("").error(), " is empty");
  contains(CsvCase("\n\r\n").error(), " is empty");
  contains(CsvCase("\xEF\xBB\xBF").error(), " is empty");
  contains(CsvCase(std::string("\xFF\xFE"
                               "a\0",
                               4))
               .error(),
           "UTF-16");
  CsvCase missing("x");
  missing.path = missing.folder / "missing.csv";
  contains(missing.error(), "No such file");
  missing.path = missing.folder.path();
  contains(missing.error(), "it is a folder");
  contains(CsvCase("a,b\n").error({.delimiter = '"'}), "0x22");
}

TEST(Csv, FilesThatAreNoTextAreNamedForWhatTheyAre) {
  const std::pair<std::string, const char*> cases[] = {
      {"PAR1\x15\x04", "is a Parquet file"},
      {"ARROW1", "is an Arrow file"},
      {"\xFF\xFF\xFF\xFF\x10", "is an Arrow stream"},
      {"PK\x03\x04\x14", "is a zip archive or an Excel sheet"},
      {"\x28\xB5\x2F\xFD", "is compressed by zstd"}};
  for (const auto& [start, part] : cases) {
    const auto error = CsvCase(start + std::string(100, '\x01')).error();
    EXPECT_NE(error.find(part), std::string::npos) << error;
    EXPECT_NE(error.find("Fix: "), std::string::npos) << error;
  }
  EXPECT_EQ(CsvCase("PK,x\nPAR1,ARROW1\n").error(), "");
}

// Records of all kinds. Each turn shifts them by one byte, so that pieces of the file end at each
// of their bytes. CR alone ends lines if the file has no LF.
TEST(Csv, RecordsAreTheSameWhereverAPieceOfTheFileEnds) {
  std::string pattern =
      "plain,\"a, b\"\r\n\"two\nlines \"\"q\"\"\",x\n\n\"\",5\" disk\n"
      "\xC3\xA9,\"end\"\r\n";
  for (const char* kind : {"lf.csv", "cr.csv", "tabs.tsv"}) {
    std::string unit = pattern;
    if (kind != std::string("lf.csv")) {
      const bool tabs = kind == std::string("tabs.tsv");
      unit = tabs ? "plain\t\"a\tb\"\n\"open\tx\n\"in\"\t\"\"\"\"\r\n"
                  : "plain,\"a, b\"\r\"two\rlines\",x\r\rlast,\"\"\"\"\r";
    }
    std::string body;
    while (body.size() < 600'000) {
      body += unit;
    }
    for (size_t shift = 0; shift < unit.size(); shift += 3) {
      const char delimiter = kind[0] == 't' ? '\t' : ',';
      const std::string text =
          std::string(shift + 1, 'h') + delimiter + "b" + (kind[0] == 'c' ? "\r" : "\n") + body;
      const CsvCase file(text, kind);
      CsvReader pieces(file.path);
      CsvReader whole(TextFile::of_text(kind, text));
      bool more = true;
      while (more) {
        more = whole.next();
        ASSERT_EQ(pieces.next(), more) << kind << " " << shift;
        ASSERT_EQ(pieces.fields(), whole.fields()) << pieces.position();
        ASSERT_EQ(pieces.line(), whole.line());
        ASSERT_EQ(pieces.bytes_read(), whole.bytes_read());
      }
      EXPECT_EQ(pieces.bytes_read(), text.size());
    }
  }
}

TEST(Csv, ARecordMayBeLongerThanManyPieces) {
  const std::string longest(3'000'000, 'x');
  const CsvCase file("a,b\n1,\"" + longest + "\n\"\n2,y\n3,\"never\n" + longest);
  CsvReader reader(file.path);
  ASSERT_TRUE(reader.next());
  EXPECT_EQ(reader.fields()[1], longest + "\n");
  ASSERT_TRUE(reader.next());
  EXPECT_EQ(reader.position(), file.path.string() + ":4");
  EXPECT_EQ(file.error().rfind(":5:3: a quote opens here and is never closed", 0), 0u)
      << file.error();
}

TEST(Csv, AFileThatShrinksOrChangesUnderAReaderIsNamed) {
  for (const bool shrinks : {false, true}) {
    std::string text = "a,b\n";
    while (text.size() < 4'000'000) {
      text += "some,words\n";
    }
    const CsvCase file(text);
    CsvReader reader(file.path);
    ASSERT_TRUE(reader.next());
    if (shrinks) {
      std::filesystem::resize_file(file.path, 300'000);
    } else {
      std::ofstream(file.path, std::ios::app) << "more,words\n";
    }
    try {
      while (reader.next()) {
      }
      FAIL() << "read to the end";
    } catch (const InputError& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find("file=" + file.path.string() + " changed while"), std::string::npos)
          << message;
    }
  }
}

TEST(Csv, AListOfManyOrLongColumnsIsShort) {
  std::string header = std::string(1'000'000, 'n');
  for (int i = 0; i < 100'000; ++i) {
    header += ",c" + std::to_string(i);
  }
  CsvReader reader(TextFile::of_text("wide.csv", header + "\n"));
  try {
    reader.column("text", "text_column");
    FAIL();
  } catch (const InputError& error) {
    const std::string message = error.what();
    EXPECT_LT(message.size(), 3000u);
    for (const char* part : {"text_column=text", "wide.csv", "and 99981 more"}) {
      EXPECT_NE(message.find(part), std::string::npos) << message;
    }
  }
}

TEST(Csv, AnUnknownColumnListsTheColumnsWithSamples) {
  const CsvCase file("text,label,source\n\"so\ngood\",pos,imdb\n");
  CsvReader reader(file.path);
  EXPECT_EQ(reader.column("label"), 1u);
  try {
    reader.column("lable", "label_column");
    FAIL();
  } catch (const InputError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("label_column=lable is not a column"), text.npos);
    EXPECT_NE(text.find("text (\"so good\"), label (\"pos\"), source (\"imdb\")"), text.npos)
        << text;
    EXPECT_NE(text.find("did you mean label?"), text.npos);
  }
  EXPECT_TRUE(reader.next()); // the look-ahead did not move the reader
  EXPECT_EQ(reader.fields()[1], "pos");
}

TEST(Csv, AColumnNamedTwiceIsAnErrorOnlyWhereItIsAskedFor) {
  const CsvCase file("x,x,y\n1,2,3\n");
  CsvReader reader(file.path);
  EXPECT_EQ(reader.column("y"), 2u);
  EXPECT_THROW(reader.column("x"), InputError);
}

TEST(Csv, APipeIsReadToo) {
  const TemporaryFolder folder;
  const auto path = folder / "pipe";
  ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
  std::jthread writer([&] { std::ofstream(path) << "a,b\n1,2\n"; });
  CsvReader reader(path);
  ASSERT_TRUE(reader.next());
  EXPECT_EQ(reader.fields()[1], "2");
}

TEST(Csv, WrittenFieldsAreReadBack) {
  const Record values{"", "a", "a,b", "\"", "x\ny", " z ", "\r", "é\"\"", "\""};
  std::string bytes = "0,1,2,3,4,5,6,7,8\n";
  for (size_t i = 0; i < values.size(); ++i) {
    bytes += (i == 0 ? "" : ",") + csv_field(values[i]);
  }
  EXPECT_EQ(CsvCase(bytes + "\n").records()[1], values);
}

TEST(Csv, ReadsFiftyMegabytesASecond) {
  std::string bytes = "text,label\n";
  while (bytes.size() < 8'000'000) {
    bytes +=
        "\"a review, not a long one, with a \"\"quote\"\" and an \xC3\xA9\","
        "pos\nan unquoted field of some words without any comma,neg\n";
  }
  const CsvCase file(bytes);
  double best = 1e9;
  for (int round = 0; round < 3; ++round) {
    const auto start = std::chrono::steady_clock::now();
    CsvReader reader(file.path);
    int64_t records = 0;
    while (reader.next()) {
      ++records;
    }
    EXPECT_GT(records, 1000);
    best = std::min(
        best, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  const double megabytes = static_cast<double>(bytes.size()) / 1e6;
  RecordProperty("megabytes_per_second", std::to_string(megabytes / best));
  EXPECT_LT(best, megabytes / 50);
}

TEST(Csv, ALineThatNamesTheDelimiterIsNoRecord) {
  const std::vector<Record> rows{{"text", "label"}, {"a, b", "1"}};
  EXPECT_EQ(CsvCase("sep=;\r\ntext;label\r\n\"a, b\";1\r\n").records(), rows);
  EXPECT_EQ(CsvCase("\xEF\xBB\xBF\"sep=,\"\ntext,label\n\"a, b\",1\n").records(), rows);
  EXPECT_EQ(CsvCase("sep=\t\ntext\tlabel\na, b\t1\n").records(), rows);
  const auto error = CsvCase("sep=;\ntext;label\na\n").error();
  EXPECT_TRUE(error.starts_with(":3")) << error;
  EXPECT_EQ(CsvCase("sep=\nx\n").records(), (std::vector<Record>{{"sep="}, {"x"}}));
}

TEST(Csv, AnotherDelimiterIsNamedInTheError) {
  const CsvCase semicolons("text;label\n\"a, b\";1\n");
  CsvReader reader(semicolons.path);
  try {
    reader.column("text", "--text-column");
    FAIL();
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("--delimiter ';'"), std::string::npos) << error.what();
  }
}

} // namespace hasten
