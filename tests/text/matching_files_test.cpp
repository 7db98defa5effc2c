#include <gtest/gtest.h>

#include <fstream>

#include "hasten/base/error.h"
#include "hasten/text/text_file.h"
#include "support/error_of.h"
#include "support/temporary_folder.h"

namespace hasten {

TEST(MatchingFiles, PatternsGiveTheirMatchesInTheOrderOfBytesAndCommasKeepTheOrderGiven) {
  const testing_support::TemporaryFolder folder;
  const std::string here = folder.path().string() + "/";
  for (const char* name : {"p-2", "p-10", "p-B", "p-a", "x,y", "x*z", "xqz"}) {
    std::ofstream(here + name) << "text";
  }
  const auto found = [&](const std::string& names) {
    std::string text;
    for (const auto& path : matching_files(names, "where", "--flag")) {
      text += (text.empty() ? "" : " ") + path.filename().string();
    }
    return text;
  };
  EXPECT_EQ(found(here + "p-*"), "p-10 p-2 p-B p-a");
  EXPECT_EQ(found(here + "p-a," + here + "p-[0-9]*," + here + "none"), "p-a p-10 p-2 none");
  EXPECT_EQ(found(here + "x,y"), "x,y");
  EXPECT_EQ(found(here + "x*z"), "x*z") << "a file of this name is no pattern";
  EXPECT_EQ(found(here + "x?z"), "x*z xqz");
  const auto error = testing_support::error_of<InputError>([&] { found(here + "p-a,q-*"); });
  EXPECT_NE(error.find("[where] --flag=" + here + "p-a,q-*: no file matches q-*. Expected"),
            error.npos)
      << error;
}

} // namespace hasten
