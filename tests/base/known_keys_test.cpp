// What hasten makes of the keys of other programs' files.
#include "known_keys.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "support/error_of.h"

namespace hasten::known_keys_test {

using testing_support::error_of;

/// The lines that are logged meanwhile.
class Logged {
 public:
  Logged() {
    set_log_sink([this](LogLevel, std::string_view line) { lines.emplace_back(line); });
  }
  ~Logged() { set_log_sink({}); }
  std::vector<std::string> lines{};
};

static void check(const char* file, const char* part, const nlohmann::json& json) {
  detail::check_known_keys("test", "/folder/file.json", file, part, json);
}

TEST(KnownKeys, AnOptionThatHastenLacksIsRefusedUnlessItChangesNothing) {
  const auto error = [](const nlohmann::json& json) {
    return error_of<InputError>([&] { check("generation_config.json", "*", json); });
  };
  EXPECT_EQ(
      error({{"num_beams", 4}}),
      "[test] /folder/file.json: num_beams=4. Expected 1, or no such key, because hasten does "
      "not have this option.");
  for (const nlohmann::json& value : {nlohmann::json(1), nlohmann::json(nullptr)}) {
    EXPECT_EQ(error({{"num_beams", value}}), "") << value;
  }
  EXPECT_NE(error({{"num_beams", "4"}}), "") << "a wrong type";
}

TEST(KnownKeys, AKeyOfOneTaskIsRefusedByThisTaskAlone) {
  const nlohmann::json untied{{"tie_word_embeddings", false}};
  check("config.json", "bert", untied);
  check("config.json", "bert:SequenceClassification", untied);
  EXPECT_NE(error_of<InputError>([&] { check("config.json", "bert:MaskedLM", untied); }), "");
}

TEST(KnownKeys, UnknownKeysAreNamedOnceAndManyAreCounted) {
  Logged logged;
  nlohmann::json json{{"hidden_size", 8}, {"a_first", 3}};
  check("config.json", "llama", json);
  check("config.json", "llama", json);
  EXPECT_EQ(logged.lines,
            std::vector<std::string>{"[test] config.json: unknown key a_first=3 is ignored"});
  for (const char* key : {"b_2", "b_3", "b_4", "b_5", "b_6", "b_7", "b_8"}) {
    json[key] = 0;
  }
  check("config.json", "llama", json);
  ASSERT_EQ(logged.lines.size(), 6u);
  EXPECT_EQ(logged.lines.back(), "[test] config.json: 3 more unknown keys are ignored");
}

TEST(KnownKeys, AFamilyOfAProgramKnowsItsOwnKeys) {
  Logged logged;
  check("config.json", "a_family_of_a_program", {{"num_wheels", 4}});
  EXPECT_TRUE(logged.lines.empty());
}

} // namespace hasten::known_keys_test
