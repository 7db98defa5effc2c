// --config of hasten train.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "commands.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "support/environment.h"
#include "support/temporary_folder.h"

namespace hasten::config_file_test {

using testing_support::TemporaryFolder;

struct ConfigFile {
  TemporaryFolder folder{};
  std::filesystem::path path = folder / "run.json";

  TrainCommand read(const std::string& text, std::vector<std::string> flags = {}) const {
    write_file_atomically(path, text);
    std::vector<std::string> arguments{"train", "--config", path.string()};
    arguments.insert(arguments.end(), flags.begin(), flags.end());
    return std::get<TrainCommand>(parse_command_line(arguments));
  }
  std::string refusal(const std::string& text, std::vector<std::string> flags = {}) const {
    try {
      read(text, std::move(flags));
    } catch (const InputError& error) {
      return error.what();
    }
    return "no error";
  }
};

const std::string kNeeded = R"("model": "bert-tiny", "train_file": "t.csv", "output_dir": "out")";

TEST(ConfigFile, SetsWhatTheCommandLineDoesNotAndFlagsOverrideIt) {
  const ConfigFile file;
  const TrainCommand command =
      file.read("{" + kNeeded + R"(, "learning_rate": 1e-4, "epochs": 2, "seed": 7,
        "nproc": 2, "cased": true, "filter": ["a=b", "c=d"], "delimiter": "tab",
        "gradient_checkpointing": true, "lr_scheduler_type": "cosine",
        "lr_scheduler_kwargs": {"num_cycles": 1}, "data_seed": null,
        "eval_split": 0.5, "greater_is_better": true})",
                {"--lr", "3e-4", "--seed=9", "--filter", "e=f"});
  EXPECT_EQ(command.model, "bert-tiny");
  EXPECT_EQ(command.train_file, "t.csv");
  EXPECT_EQ(command.arguments.output_dir, "out");
  EXPECT_EQ(command.arguments.learning_rate, 3e-4);
  EXPECT_EQ(command.arguments.num_train_epochs, 2);
  EXPECT_EQ(command.arguments.seed, 9u);
  EXPECT_EQ(command.nproc, 2);
  EXPECT_FALSE(command.nproc_given);
  EXPECT_TRUE(command.cased);
  EXPECT_EQ(command.table.filters, (std::vector<std::string>{"e=f"}));
  EXPECT_EQ(command.table.delimiter, '\t');
  EXPECT_EQ(command.arguments.gradient_checkpointing.text(), "full");
  EXPECT_EQ(command.arguments.lr_scheduler_type, "cosine");
  EXPECT_EQ(command.arguments.lr_scheduler_kwargs, R"({"num_cycles":1})");
  EXPECT_EQ(command.arguments.data_seed, std::nullopt);
  EXPECT_EQ(command.arguments.greater_is_better, true);
  EXPECT_EQ(file.read("{" + kNeeded + R"(, "filter": ["a=b", "c=d"]})").table.filters,
            (std::vector<std::string>{"a=b", "c=d"}));
}

TEST(ConfigFile, TrainingArgumentsOfAnEarlierRunCanBeGivenBack) {
  const ConfigFile file;
  TrainingArguments a;
  a.output_dir = "earlier";
  a.learning_rate = 0.125;
  a.precision = Precision::bf16;
  a.bf16 = true;
  a.data_seed = 3;
  a.greater_is_better = false;
  a.early_stopping_patience = 2;
  a.class_weights = "1,2.5";
  a.gradient_checkpointing = std::string("every:2");
  const std::string saved = nlohmann::json(a).dump(2);
  const std::vector<std::string> flags{"--model", "bert-tiny",    "--train-file",
                                       "t.csv",   "--eval-split", "0.1"};
  EXPECT_EQ(nlohmann::json(file.read(saved, flags).arguments), nlohmann::json(a));

  // One word on the precision is the last one.
  auto other = flags;
  other.insert(other.end(), {"--precision", "fp32", "--output-dir", "new"});
  const TrainingArguments again = file.read(saved, other).arguments;
  EXPECT_EQ(again.effective_precision(), Precision::no);
  EXPECT_EQ(again.output_dir, "new");
  other = flags;
  other.push_back("--fp16");
  EXPECT_EQ(file.read(saved, other).arguments.effective_precision(), Precision::fp16);
}

TEST(ConfigFile, ARunsOwnFileSetsAllThatItsCommandLineSet) {
  const ConfigFile file;
  const TrainCommand first = file.read(
      "{" + kNeeded + "}", {"--eval-split", "0.25", "--filter", "a=b", "--filter", "c=d", "--bf16",
                            "--gradient-checkpointing", "every:2", "--data-seed", "3",
                            "--learning-rate", "3e-5", "--nproc", "2", "--delimiter", "tab"});
  const TrainCommand again = file.read(first.run_config, {"--output-dir", "again"});
  EXPECT_EQ(again.arguments.output_dir, "again");
  EXPECT_EQ(file.read(again.run_config, {"--output-dir", "out"}).run_config, first.run_config);
  EXPECT_EQ(again.table.filters, (std::vector<std::string>{"a=b", "c=d"}));
  EXPECT_EQ(again.table.delimiter, '\t');
  EXPECT_EQ(again.arguments.learning_rate, 3e-5);
  EXPECT_EQ(again.arguments.data_seed, 3);
  EXPECT_EQ(again.nproc, 2);
}

std::string printed(std::vector<std::string> arguments) {
  arguments.insert(arguments.begin(), "train");
  arguments.emplace_back("--print-config");
  return std::get<Answer>(parse_command_line(arguments)).text;
}

TEST(ConfigFile, APrintedFileIsReadBackAsTheSameCommand) {
  const ConfigFile file;
  const std::vector<std::string> least{"--model", "bert-tiny", "--output-dir", "o"};
  auto many = least;
  many.insert(many.end(), {"--train-file",
                           "t.csv",
                           "--filter",
                           "a=b // c",
                           "--filter",
                           "d=\"e\"",
                           "--bf16",
                           "--gradient-checkpointing",
                           "every:2",
                           "--delimiter",
                           "tab",
                           "--lr-scheduler-kwargs",
                           R"({"num_cycles": 2})",
                           "--lr-scheduler-type",
                           "cosine",
                           "--nproc",
                           "2",
                           "--tee",
                           "0:3,1:2",
                           "--eval-split",
                           "0.25",
                           "--resume-from-checkpoint",
                           "auto",
                           "--dry-run",
                           "--data-seed",
                           "3"});
  for (const auto& flags : {least, many}) {
    const std::string text = printed(flags);
    auto arguments = flags;
    arguments.insert(arguments.begin(), "train");
    const auto given = std::get<TrainCommand>(parse_command_line(arguments));
    const TrainCommand again = file.read(text);
    EXPECT_EQ(again.run_config, given.run_config) << text;
    EXPECT_EQ(nlohmann::json(again.arguments), nlohmann::json(given.arguments));
    EXPECT_EQ(again.dry_run, given.dry_run);
    EXPECT_EQ(again.logs.tee.ranks, given.logs.tee.ranks);
    // Printed once more it is the same text.
    EXPECT_EQ(printed({"--config", file.path.string()}), text);
  }
}

TEST(ConfigFile, APrintedFileHasEveryFlagInItsGroupWithItsHelp) {
  const std::string text = printed({"--model", "bert-tiny", "--output-dir", "o", "--lr", "0.5"});
  const std::string help = std::get<Answer>(parse_command_line({"train", "--help"})).text;
  std::istringstream lines(help);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind("  --", 0) != 0) {
      continue;
    }
    std::string name = line.substr(4, line.find_first_of(", ", 4) - 4);
    std::replace(name.begin(), name.end(), '-', '_');
    const bool in_files = name != "config" && name != "print_config";
    EXPECT_EQ(text.find("\"" + name + "\": ") != std::string::npos, in_files) << name;
  }
  EXPECT_NE(text.find("\n\n  // ---- Optimizer and schedule ----\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\n  // peak learning rate; 3e-4 for a shape [5e-05]\n"
                      "  \"learning_rate\": 0.5,\n"),
            std::string::npos)
      << text;
  EXPECT_NE(text.find("\n  // \"eval_file\": \"\"\n"), std::string::npos) << text;
  EXPECT_NE(text.find("\n  \"data_seed\": null,\n"), std::string::npos) << text;
}

TEST(ConfigFile, AFileCannotAskForAPrintedOne) {
  EXPECT_NE(ConfigFile{}
                .refusal("{" + kNeeded + R"(, "print_config": true})")
                .find("/print_config: unknown name"),
            std::string::npos);
}

std::string refused(const std::vector<std::string>& arguments) {
  try {
    parse_command_line(arguments);
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

TEST(FlagsOfTheEnvironment, ComeBetweenTheFileAndTheCommandLine) {
  const ConfigFile file;
  const testing_support::ScopedEnvironment environment({{"HASTEN_LR", "1e-4"},
                                                        {"HASTEN_SEED", "8"},
                                                        {"HASTEN_NPROC", "2"},
                                                        {"HASTEN_CASED", "1"},
                                                        {"HASTEN_DATALOADER_DROP_LAST", "false"},
                                                        {"HASTEN_FILTER", "e=f"},
                                                        {"HASTEN_EVAL_SPLIT", "0.5"},
                                                        {"HASTEN_FP16", "true"},
                                                        {"HASTEN_OPTIM", ""}});
  const TrainCommand command =
      file.read("{" + kNeeded + R"(, "seed": 7, "learning_rate": 1, "filter": ["a=b", "c=d"],
        "dataloader_drop_last": true, "optim": "lion", "bf16": true})",
                {"--seed", "9"});
  EXPECT_EQ(command.arguments.learning_rate, 1e-4);
  EXPECT_EQ(command.arguments.seed, 9u);
  EXPECT_EQ(command.nproc, 2);
  EXPECT_FALSE(command.nproc_given); // ranks of another launcher inherit it
  EXPECT_TRUE(command.cased);
  EXPECT_FALSE(command.arguments.dataloader_drop_last);
  EXPECT_EQ(command.table.filters, (std::vector<std::string>{"e=f"}));
  EXPECT_EQ(command.eval_split, 0.5);
  EXPECT_EQ(command.arguments.effective_precision(), Precision::fp16);
  EXPECT_EQ(command.arguments.optim, OptimizerType::lion); // an empty variable sets nothing
  EXPECT_EQ(file.read("{" + kNeeded + "}", {"--filter", "g=h"}).table.filters,
            (std::vector<std::string>{"g=h"}));
  EXPECT_EQ(file.read("{" + kNeeded + "}", {"--bf16"}).arguments.effective_precision(),
            Precision::bf16);
}

TEST(FlagsOfTheEnvironment, GiveTheFileAndRequiredFlagsToo) {
  const ConfigFile file;
  write_file_atomically(file.path, "{" + kNeeded + R"(, "seed": 7})");
  const testing_support::ScopedEnvironment environment({{"HASTEN_CONFIG", file.path.string()},
                                                        {"HASTEN_MODEL", "bert-mini"},
                                                        {"HASTEN_FILE", "f.csv"},
                                                        {"HASTEN_BATCH_SIZE", "3"}});
  const auto train = std::get<TrainCommand>(parse_command_line({"train"}));
  EXPECT_EQ(train.model, "bert-mini");
  EXPECT_EQ(train.arguments.seed, 7u);
  EXPECT_EQ(train.arguments.per_device_train_batch_size, 3);
  EXPECT_EQ(std::get<TrainCommand>(parse_command_line({"train", "--config", file.path.string()}))
                .run_config,
            train.run_config);
  const auto eval = std::get<EvalCommand>(parse_command_line({"eval", "--model", "m"}));
  EXPECT_EQ(eval.model, "m");
  EXPECT_EQ(eval.file, "f.csv");
  EXPECT_EQ(eval.batch_size, 3);
  // Other commands do not read them.
  EXPECT_NE(refused({"predict", "a text"}).find("--model is missing"), std::string::npos);
}

TEST(FlagsOfTheEnvironment, AMistakeNamesTheVariable) {
  const std::vector<std::string> train{"train", "--model", "bert-tiny", "--output-dir", "o"};
  const struct {
    testing_support::EnvironmentValues values;
    std::string said;
  } cases[] = {
      {{{"HASTEN_LEARNING_RATE", "fast"}}, "HASTEN_LEARNING_RATE=fast. Expected a number"},
      {{{"HASTEN_LR", "-1"}}, "HASTEN_LR=-1.0. Expected 0 or more"},
      {{{"HASTEN_NPROC", "0"}}, "HASTEN_NPROC=0. Expected 1 to 65536, auto, cpu or gpu"},
      {{{"HASTEN_OPTIM", "adamm"}}, "Fix: write adam."},
      {{{"HASTEN_BF16", "yes"}}, "HASTEN_BF16=yes. Expected true or false"},
      {{{"HASTEN_LR", "1"}, {"HASTEN_LEARNING_RATE", "1"}}, "--learning-rate is given twice"},
      {{{"HASTEN_LEARNING_RTE", "1"}},
       "unknown variable of the environment: HASTEN_LEARNING_RTE. Fix: write HASTEN_LEARNING_RATE"},
  };
  for (const auto& wrong : cases) {
    const testing_support::ScopedEnvironment environment(wrong.values);
    EXPECT_NE(refused(train).find(wrong.said), std::string::npos) << refused(train);
    EXPECT_NE(std::get<Answer>(parse_command_line({"train", "--help"})).text, "");
  }
}

TEST(FlagsOfTheEnvironment, VariablesOfHastenAndOfOtherCommandsAreNotMisspelt) {
  testing_support::EnvironmentValues values;
  for (const char* name : {"HASTEN_CACHE",       "HASTEN_COMM_CHECK",        "HASTEN_COMPARE_STATE",
                           "HASTEN_DEBUG",       "HASTEN_LAUNCHER",          "HASTEN_SECRET",
                           "HASTEN_SECRET_FILE", "HASTEN_STORE_FILE",        "HASTEN_STORE_SOCKET",
                           "HASTEN_TORCH",       "HASTEN_PEER_PYTHON",       "HASTEN_JOBS",
                           "HASTEN_CCACHE",      "HASTEN_SANITIZE",          "HASTEN_COMBINATIONS",
                           "HASTEN_KILL_TRIAL",  "HASTEN_EXACTNESS_TABLE",   "HASTEN_TEST_FAULT",
                           "HASTEN_TEST_FOLDER", "HASTEN_TEST_CASE_SECONDS", "HASTEN_MAX_ROWS",
                           "HASTEN_MAX_STEPS",   "HASTEN_COMM_BACKEND"}) {
    values.emplace_back(name, "3");
  }
  values.emplace_back("HASTEN_HEARTBEAT_TIMEOUT", "2");
  values.emplace_back("HASTEN_DDP_TIMEOUT", "4");
  const testing_support::ScopedEnvironment environment(values);
  const auto command = std::get<TrainCommand>(
      parse_command_line({"train", "--model", "bert-tiny", "--output-dir", "o"}));
  EXPECT_EQ(command.arguments.heartbeat_timeout, 2);
  EXPECT_EQ(command.arguments.ddp_timeout, 4);
  EXPECT_EQ(command.arguments.max_steps, 3);
  EXPECT_EQ(command.secret_file, ""); // the ranks read HASTEN_SECRET_FILE themselves
  EXPECT_EQ(refused({"eval", "--model", "m", "--file", "f.csv"}), "no error");
}

TEST(ConfigFile, WhatIsWrongIsNamedByPathAndWhatIsExpected) {
  const ConfigFile file;
  const struct {
    std::string text;
    std::vector<std::string> said;
  } cases[] = {
      {R"({"learning_rate": "high"})", {"run.json: /learning_rate=\"high\"", "Expected a number"}},
      {R"({"seed": 1.5})", {"/seed=1.5", "a whole number, 0 or more"}},
      {R"({"max_steps": true})", {"/max_steps=true", "a whole number"}},
      {R"({"bf16": 1})", {"/bf16=1", "true or false"}},
      {R"({"output_dir": 3})", {"/output_dir=3", "a string"}},
      {R"({"output_dir": null})", {"/output_dir=null", "a string"}},
      {R"({"filter": "a=b"})", {"/filter=\"a=b\"", "an array of strings"}},
      {R"({"filter": ["a=b", 2]})", {"/filter=[", "an array of strings"}},
      {R"({"eval_strategy": "steps!"})", {"/eval_strategy=\"steps!\"", "one of epoch, no, steps"}},
      {R"({"gradient_checkpointing": 2})",
       {"/gradient_checkpointing=2", "true, false, or a string"}},
      {R"({"learning_rat": 1})", {"/learning_rat: unknown name", "Fix: write learning_rate"}},
      {R"({"config": "x.json"})", {"/config: unknown name", "leave it out"}},
      {R"({"epochs": 1, "num_train_epochs": 2})", {"--num-train-epochs is given twice"}},
      {R"(["model"])", {"run.json holds a JSON array", "a JSON object"}},
      {"{\"model\": \n }", {"run.json: ", "line 2, column 2"}},
      {"{ // model\n  /* a */ \"seed\": 1,,\n}", {"run.json: ", "line 2, column 21"}},
      {R"({"learning_rate": 0.1})", {"--model is missing"}},
  };
  for (const auto& bad : cases) {
    const std::string error = file.refusal(bad.text);
    for (const std::string& part : bad.said) {
      EXPECT_NE(error.find(part), std::string::npos) << part << "\nin: " << error;
    }
  }
  const std::string missing = [&] {
    try {
      parse_command_line({"train", "--config", file.folder / "no.json"});
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string();
  }();
  EXPECT_NE(missing.find("no.json cannot be read"), std::string::npos) << missing;
}

TEST(ProblemType, FlagsThatContradictItAreRefusedByName) {
  const ConfigFile file;
  const struct {
    std::vector<std::string> flags;
    std::string said;
  } cases[] = {
      {{"--problem-type", "regresion"}, "Fix: write regression"},
      {{"--problem-type", "multi_label_classification"}, "--label-columns or"},
      {{"--problem-type", "regression", "--label-columns", "a,b"},
       "--problem-type=regression with several labels per sample"},
      {{"--problem-type", "regression", "--label-smoothing-factor", "0.1"},
       "--label-smoothing-factor=0.1 with --problem-type=regression"},
      {{"--problem-type", "regression", "--class-weights", "1,2"},
       "--class-weights=1,2 with --problem-type=regression"},
      {{"--label-separator", "|", "--class-weights", "balanced"},
       "--class-weights=balanced with several labels per sample"},
      {{"--problem-type", "regression", "--metric-for-best-model", "f1"},
       "one of loss, mse, mae, pearson, spearman"},
      {{"--early-stopping-patience", "2"}, "--early-stopping-patience without evaluation data"},
      {{"--early-stopping-threshold", "0.2"}, "--early-stopping-threshold=0.2"},
      {{"--class-weights", "1,x"}, "--class-weights=\"1,x\""},
      {{"--label-smoothing-factor", "1"}, "--label-smoothing-factor=1.0"},
  };
  for (const auto& bad : cases) {
    const std::string error = file.refusal("{" + kNeeded + "}", bad.flags);
    EXPECT_NE(error.find(bad.said), std::string::npos) << bad.said << "\nin: " << error;
  }
  EXPECT_EQ(file.read("{" + kNeeded + "}", {"--label-columns", "a,b"}).problem_type,
            "multi_label_classification");
}

} // namespace hasten::config_file_test
