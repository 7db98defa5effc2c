// hasten completion lists what --help names.
#include <gtest/gtest.h>

#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "commands.h"
#include "hasten/base/error.h"

namespace hasten::completion_test {

using Words = std::vector<std::string>;

std::string answer(const Words& arguments) {
  return std::get<Answer>(parse_command_line(arguments)).text;
}

/// What is listed after "hasten", without the help of each word.
std::set<std::string> listed(const Words& words) {
  Words arguments{"completion", "--"};
  arguments.insert(arguments.end(), words.begin(), words.end());
  std::istringstream lines(answer(arguments));
  std::set<std::string> found;
  for (std::string line; std::getline(lines, line);) {
    found.insert(line.substr(0, line.find('\t')));
  }
  return found;
}

using Found = std::set<std::string>;

const Words kCommands{"train",    "predict", "generate", "eval",   "plan",      "estimate-memory",
                      "compare",  "state",   "merge",    "export", "tokenizer", "synth",
                      "download", "report",  "launch",   "env"};

TEST(Completion, ListsEveryCommand) {
  Found expected(kCommands.begin(), kCommands.end());
  expected.insert({"--help", "--version"});
  EXPECT_EQ(listed({""}), expected);
  EXPECT_EQ(listed({}), expected);
  EXPECT_EQ(listed({"t"}), (Found{"train", "tokenizer"}));
  EXPECT_EQ(listed({"trian", "--"}), Found{});
  for (const std::string& command : kCommands) {
    EXPECT_NE(answer({"--help"}).find("\n  " + command), std::string::npos) << command;
  }
}

TEST(Completion, ListsTheFlagsThatHelpNames) {
  for (const std::string& command : kCommands) {
    Found expected{"--help"};
    std::istringstream lines(answer({command, "--help"}));
    for (std::string line; std::getline(lines, line);) {
      if (line.rfind("  --", 0) != 0) {
        continue;
      }
      std::istringstream words(line); // "--a, --b UNIT  help"
      for (std::string word; words >> word && word.rfind("--", 0) == 0;) {
        const bool more = word.back() == ',';
        expected.insert(word.substr(0, word.size() - (more ? 1 : 0)));
        if (!more) {
          break;
        }
      }
    }
    EXPECT_EQ(listed({command, "-"}), expected) << command;
  }
  EXPECT_EQ(listed({"train", "--learn"}), Found{"--learning-rate"});
  EXPECT_EQ(listed({"train", ""}), Found{}); // names of files
}

TEST(Completion, ListsTheValuesOfAnEnumeration) {
  const Found strategies{"ddp", "fsdp", "hsdp", "zero1", "zero2"};
  EXPECT_EQ(listed({"train", "--strategy", ""}), strategies);
  EXPECT_EQ(listed({"train", "--strategy", "z"}), (Found{"zero1", "zero2"}));
  EXPECT_EQ(listed({"train", "--seed", "1", "--strategy", "fs"}), Found{"fsdp"});
  EXPECT_EQ(listed({"train", "--strategy=fs"}), Found{"--strategy=fsdp"});
  EXPECT_EQ(listed({"train", "--strategy", "="}), strategies); // as bash splits it
  EXPECT_EQ(listed({"train", "--strategy", "=", "fs"}), Found{"fsdp"});
  EXPECT_EQ(listed({"train", "--output-dir", "--"}), Found{});
  EXPECT_EQ(listed({"train", "--bf16", "--fp"}), Found{"--fp16"});
}

TEST(Completion, HasAScriptForThreeShells) {
  for (const char* shell : {"bash", "zsh", "fish"}) {
    EXPECT_NE(answer({"completion", shell}).find("hasten completion "), std::string::npos);
  }
  for (const Words& wrong : {Words{"completion"}, Words{"completion", "tcsh"}}) {
    EXPECT_THROW(parse_command_line(wrong), InputError);
  }
}

} // namespace hasten::completion_test
