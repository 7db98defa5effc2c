#include "hasten/base/error.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <iterator>
#include <new>
#include <stdexcept>
#include <system_error>

namespace hasten {

TEST(Error, MessageNamesPlaceValueExpectationAndFix) {
  const InputError error("comm::init", "MASTER_PORT=99999 is not a port", "1..65535", "set it");
  EXPECT_STREQ(error.what(),
               "[comm::init] MASTER_PORT=99999 is not a port. Expected 1..65535. Fix: set it.");
}

TEST(Error, MessageStartsWithTheRankInALargerWorld) {
  set_error_rank(1, 4);
  const Error error("a::b", "x=1");
  set_error_rank(0, 1);
  EXPECT_STREQ(error.what(), "rank 1/4 [a::b] x=1.");
}

TEST(Error, TextIsTheMessageWithoutItsPlace) {
  set_error_rank(1, 4);
  const Error error("a::b", "x=[1] y", "[2] z");
  set_error_rank(0, 1);
  EXPECT_EQ(error.text(), "x=[1] y. Expected [2] z.");
}

TEST(Error, KindsAreThoseOfTheStandardLibrarysErrorsToo) {
  EXPECT_EQ(kind_of(Error("a::b", "No space left on device")), ErrorKind::other);
  EXPECT_EQ(kind_of(CommunicationError("a::b", "late", {}, {}, ErrorKind::timed_out)),
            ErrorKind::timed_out);
  EXPECT_EQ(kind_of(std::bad_alloc()), ErrorKind::out_of_memory);
  EXPECT_EQ(kind_of(std::system_error(ENOSPC, std::generic_category())), ErrorKind::full_disk);
  EXPECT_EQ(kind_of(std::system_error(EACCES, std::generic_category())), ErrorKind::other);
  EXPECT_EQ(kind_of(std::runtime_error("out of memory")), ErrorKind::other);
}

TEST(Error, NearestNameIsOfferedOnlyWhenItIsNear) {
  const std::string names[] = {"text", "label", "source"};
  EXPECT_EQ(nearest_name("lable", names), "label");
  EXPECT_EQ(nearest_name("zzzzz", names), "");
}

// The value in the message has a megabyte, with or without spaces. "column=12" follows it.
TEST(Error, MessagesAreBoundedAndKeepTheirPlace) {
  const std::string word(1'000'000, 'x');
  std::string words;
  while (words.size() < 1'000'000) {
    words += "some words ";
  }
  for (const std::string& value : {word, words}) {
    const InputError error("data::Reader",
                           "file.csv:7: the value " + value + " is wrong in column=12",
                           "one of: " + value, "leave out " + value);
    const std::string text = error.what();
    EXPECT_LE(text.size(), 8000u);
    for (const char* part : {"[data::Reader] file.csv:7: the value ",
                             " is wrong in column=12. Expected one of: ", ". Fix: leave out "}) {
      EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
    }
  }
  const std::string at_limit(512, 'y');
  EXPECT_NE(std::string(Error("a::b", at_limit).what()).find(at_limit), std::string::npos);
  const std::string character = "\xE2\x82\xAC"; // a character is never cut in the middle
  std::string euros;
  for (int i = 0; i < 1000; ++i) {
    euros += character;
  }
  std::string kept = Error("a::b", euros).what();
  for (size_t at = 0; (at = kept.find(character)) != std::string::npos;) {
    kept.erase(at, character.size());
  }
  EXPECT_EQ(kept.find('\xE2'), kept.find("\xE2\x80\xA6"))
      << kept; // only the ellipsis has this byte
  EXPECT_EQ(nearest_name(word, {&word, 1}), ""); // returns immediately
}

} // namespace hasten
