#include "hasten/base/json.h"

#include <gtest/gtest.h>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "support/temporary_folder.h"

namespace hasten {

namespace detail {

std::string nested_arrays(int depth) {
  return std::string(static_cast<size_t>(depth), '[') +
         std::string(static_cast<size_t>(depth), ']');
}

} // namespace detail

TEST(Json, ValuesAreThoseOfTheParserUnderneath) {
  for (const char* text : {"1", "-3", "18446744073709551615", "2.5e-3", "\"\\u00e9 \\n\"", "null",
                           "[]", "{}", "[[],{},[{\"a\":[1,2,{\"b\":null}]}],true]",
                           "{\"a\":{\"b\":{\"c\":[false]}},\"d\":\"e\",\"f\":[{},[]]}",
                           "{\"a\":{\"b\":1},\"a\":[2]}"}) {
    const ParsedJson parsed = try_parse_json(text);
    EXPECT_EQ(parsed.problem, "") << text;
    EXPECT_EQ(parsed.value, nlohmann::json::parse(text)) << text;
  }
}

TEST(Json, NestingUpToTheLimitIsReadAndOneMoreIsRefused) {
  for (const int limit : {1, 3, kMaxJsonDepth}) {
    const JsonRules rules{.max_depth = limit};
    const auto good = try_parse_json(detail::nested_arrays(limit), rules);
    EXPECT_EQ(good.problem, "");
    EXPECT_EQ(good.value.dump(), detail::nested_arrays(limit));
    for (const int depth : {limit + 1, 1'000'000}) {
      const auto bad = try_parse_json(detail::nested_arrays(depth), rules);
      EXPECT_EQ(bad.problem, "it is nested more than " + std::to_string(limit) + " deep");
      EXPECT_TRUE(bad.value.is_null());
    }
  }
}

TEST(Json, ProblemsAreNamedWithTheirPlace) {
  struct Case {
    const char* text;
    JsonRules rules;
    const char* part; // of the error's message; empty: no error
  };
  const Case cases[] = {
      {"[1, 1e999]", {}, "near byte=9 (line 1, column 9): number overflow parsing '1e999'"},
      {"[1, 1e308]", {}, ""},
      {"[1,\n2", {}, "near byte=6 (line 2, column 2): syntax error"},
      {"[1] 2", {}, "near byte=5 (line 1, column 5): syntax error"},
      {"", {}, "near byte=1 (line 1, column 1): syntax error"},
      {"\"\xFF\"", {}, "ill-formed UTF-8"},
      {"[1] // one", {}, "near byte=5"},
      {"[1] // one", {.comments = true}, ""},
      {"{\"a\":1,\"a\":2}", {}, ""},
      {"{\"a\":1,\"a\":2}", {.unique_keys = true}, "\"a\" occurs twice"},
      {"[{\"a\":1},{\"a\":2}]", {.unique_keys = true}, ""},
  };
  const testing_support::TemporaryFolder folder;
  const auto path = folder / "x.json";
  for (const Case& bad : cases) {
    write_file_atomically(path, bad.text);
    std::string message;
    try {
      read_json_file("a::b", path, bad.rules);
    } catch (const InputError& error) {
      message = error.what();
      EXPECT_EQ(message.rfind("[a::b] " + path.string() + ": ", 0), 0u);
    }
    EXPECT_EQ(message.empty(), bad.part[0] == '\0') << message;
    EXPECT_NE(message.find(bad.part), std::string::npos) << message;
  }
}

TEST(Json, TextThatJsonCannotHoldIsNamed) {
  EXPECT_NO_THROW(require_utf8("a::b", {{"dir", "\xC3\xA9"}, {"n", 1}}));
  try {
    require_utf8("a::b", {{"a", 1}, {"dir", "caf\xE9"}});
    FAIL();
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("dir has"), std::string::npos);
  }
}

} // namespace hasten
