#include "hasten/trainer/output_folder.h"

#include <gtest/gtest.h>

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/trainer/resume.h"
#include "hasten/trainer/trainer_state.h"
#include "support/temporary_folder.h"

namespace hasten {

namespace detail {

void make_checkpoints(const std::filesystem::path& folder, std::initializer_list<int> steps) {
  for (const int step : steps) {
    const auto path = folder / ("checkpoint-" + std::to_string(step));
    std::filesystem::create_directories(path);
    write_file_atomically(path / "model.safetensors", "x");
  }
}

std::vector<int64_t> checkpoint_steps(const std::filesystem::path& folder) {
  std::vector<int64_t> steps;
  for (const auto& checkpoint : checkpoint_folders(folder)) {
    steps.push_back(checkpoint.global_step);
  }
  return steps;
}

} // namespace detail

// The process that took the lock has ended, and what it held goes a little later, as with a run that
// was killed and frees its memory.
TEST(OutputFolder, WaitsForARunThatIsEnding) {
  const testing_support::TemporaryFolder scratch;
  int ready[2];
  ASSERT_EQ(::pipe(ready), 0);
  const pid_t holder = ::fork();
  if (holder == 0) {
    const OutputDirLock lock(scratch.path());
    if (::fork() == 0) {
      ::usleep(900'000);
      ::_exit(0);
    }
    ::write(ready[1], "x", 1);
    ::_exit(0);
  }
  char byte = 0;
  EXPECT_EQ(::read(ready[0], &byte, 1), 1);
  EXPECT_NO_THROW(OutputDirLock(scratch.path()));
  ::waitpid(holder, nullptr, 0);
  ::close(ready[0]);
  ::close(ready[1]);
}

TEST(OutputFolder, IsRefusedWhereItHoldsAnotherRunAndNothingIsTouched) {
  const testing_support::TemporaryFolder scratch;
  TrainingArguments arguments;
  arguments.output_dir = (scratch.path() / "new").string();
  EXPECT_NO_THROW(require_free_output_dir(arguments));
  EXPECT_FALSE(std::filesystem::exists(arguments.output_dir));

  clear_output_dir(arguments.output_dir);
  write_file_atomically(scratch.path() / "new" / "notes.txt", "mine");
  EXPECT_NO_THROW(require_free_output_dir(arguments));
  detail::make_checkpoints(arguments.output_dir, {5});
  try {
    require_free_output_dir(arguments);
    FAIL() << "not refused";
  } catch (const InputError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("holds another run (checkpoint-5)"), text.npos) << text;
    EXPECT_NE(text.find("--overwrite-output-dir"), text.npos) << text;
  }
  EXPECT_EQ(detail::checkpoint_steps(arguments.output_dir).size(), 1u);

  arguments.overwrite_output_dir = true;
  EXPECT_NO_THROW(require_free_output_dir(arguments));
  clear_output_dir(arguments.output_dir);
  EXPECT_TRUE(trace_of_a_run(arguments.output_dir).empty());
  EXPECT_TRUE(std::filesystem::exists(scratch.path() / "new" / "notes.txt"));

  arguments.output_dir = (scratch.path() / "new" / "notes.txt").string();
  EXPECT_THROW(require_free_output_dir(arguments), InputError);
}

TEST(OutputFolder, WhatWritersThatWereKilledLeftIsRemoved) {
  const testing_support::TemporaryFolder scratch;
  const auto out = scratch / "out";
  detail::make_checkpoints(out, {5});
  detail::make_checkpoints(scratch / "out.tmp-71-0", {1});
  std::filesystem::create_directories(out / "checkpoint-9.tmp-71-3" / "a");
  const char* files[] = {"trainer_state.json.tmp-71-12", "notes.tmp", "notes.tmp-1", "a.tmp-x-1"};
  for (const char* name : files) {
    write_file_atomically(out / name, "x");
  }
  write_file_atomically(scratch / "other.tmp-71-0", "x");
  remove_unfinished_saves(out);
  for (const char* name :
       {"out/trainer_state.json.tmp-71-12", "out/checkpoint-9.tmp-71-3", "out.tmp-71-0"}) {
    EXPECT_FALSE(std::filesystem::exists(scratch / name)) << name;
  }
  for (const char* name : {"out/checkpoint-5/model.safetensors", "out/notes.tmp", "out/notes.tmp-1",
                           "out/a.tmp-x-1", "other.tmp-71-0"}) {
    EXPECT_TRUE(std::filesystem::exists(scratch / name)) << name;
  }
}

TEST(OutputFolder, ACheckpointWhoseRemovalIsKilledIsNoCheckpointAnyMore) {
  const testing_support::TemporaryFolder scratch;
  detail::make_checkpoints(scratch.path(), {1, 2});
  constexpr int kFiles = 3000;
  const auto first = scratch / "checkpoint-1";
  for (int i = 0; i < kFiles; ++i) {
    std::ofstream(first / std::to_string(i)) << "x";
  }
  const auto files_of = [](const std::filesystem::path& folder) {
    std::error_code error;
    int count = 0;
    for (std::filesystem::directory_iterator entry(folder, error), end; !error && entry != end;
         entry.increment(error)) {
      ++count;
    }
    return count;
  };
  const pid_t child = ::fork();
  if (child == 0) {
    rotate_checkpoints(scratch.path(), 1, {});
    ::_exit(0);
  }
  while (files_of(first) > kFiles) { // also the model's file
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  for (const auto& checkpoint : checkpoint_folders(scratch.path())) {
    EXPECT_EQ(checkpoint.global_step, 2);
  }
  remove_unfinished_saves(scratch.path());
  EXPECT_EQ(files_of(scratch.path()), 1);
}

TEST(Resume, FieldsOfAnotherTypeOrRangeAreNamedWithTheirFile) {
  const nlohmann::json good{
      {"trainer_state.json", {{"global_step", 5}}},
      {"training_args.json", {{"precision", "fp32"}, {"gradient_accumulation_steps", 1}}},
      {kRunFile,
       {{"epoch_index", 0},
        {"epoch_rows_seen", 40},
        {"samples_seen", 40},
        {"tokens_seen", 80},
        {"at_epoch_end", false},
        {"finished", false},
        {"drop_batch", 8},
        {"total_batch", 8},
        {"world_size", 1},
        {"facts", nlohmann::json::object()}}}};
  const testing_support::TemporaryFolder folder;
  std::string changed;
  const auto error_with = [&](const char* name, const nlohmann::json& value) {
    for (auto [file, fields] : good.items()) {
      auto now = fields;
      if (now.contains(name)) {
        now[name] = value;
        changed = file;
      }
      write_file_atomically(folder / file, now.dump());
    }
    try {
      EXPECT_EQ(read_saved_run(folder.path()).run.at(name), value);
    } catch (const InputError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(error_with("global_step", int64_t{1} << 62), "");
  const std::pair<const char*, nlohmann::json> cases[] = {{"global_step", "five"},
                                                          {"global_step", -1},
                                                          {"global_step", 18446744073709551615u},
                                                          {"epoch_index", 0.5},
                                                          {"samples_seen", nullptr},
                                                          {"at_epoch_end", 1},
                                                          {"finished", "yes"},
                                                          {"gradient_accumulation_steps", 0},
                                                          {"world_size", 0},
                                                          {"facts", nullptr}};
  for (const auto& [name, value] : cases) {
    const std::string error = error_with(name, value);
    EXPECT_NE(error.find((folder / changed).string() + ": " + name + "=" + value.dump()),
              error.npos)
        << name << "\n"
        << error;
  }
}

TEST(OutputFolder, RotationGoesByNumberAndKeepsTheBestAndTheNewest) {
  const testing_support::TemporaryFolder scratch;
  // By number 9 is before 10 and 100, by name after them. The library does not write
  // checkpoint-x.
  detail::make_checkpoints(scratch.path(), {100, 9, 10, 11});
  std::filesystem::create_directories(scratch.path() / "checkpoint-x");
  EXPECT_EQ(rotate_checkpoints(scratch.path(), 0, {}).size(), 0u);
  rotate_checkpoints(scratch.path(), 2, 9);
  EXPECT_EQ(detail::checkpoint_steps(scratch.path()), (std::vector<int64_t>{9, 100}));
  rotate_checkpoints(scratch.path(), 1, 9);
  EXPECT_EQ(detail::checkpoint_steps(scratch.path()), (std::vector<int64_t>{9, 100}));
  rotate_checkpoints(scratch.path(), 1, {});
  EXPECT_EQ(detail::checkpoint_steps(scratch.path()), (std::vector<int64_t>{100}));
  EXPECT_TRUE(std::filesystem::exists(scratch.path() / "checkpoint-x"));
}

TEST(OutputFolder, AResumedRunHasNoLinkToACheckpointThatWasRenamed) {
  const testing_support::TemporaryFolder scratch;
  const auto link = scratch / "checkpoint-best";
  const auto linked_after = [&](int64_t resumed_step, std::optional<int64_t> best_step) {
    detail::make_checkpoints(scratch.path(), {2, 4, 6});
    link_best_checkpoint(scratch.path(), 6);
    prepare_resumed_dir(scratch.path(), resumed_step, best_step);
    return std::filesystem::is_symlink(link) ? std::filesystem::read_symlink(link).string() : "";
  };
  EXPECT_EQ(linked_after(6, 2), "checkpoint-6"); // still there
  EXPECT_EQ(linked_after(4, 2), "checkpoint-2");
  EXPECT_EQ(linked_after(4, 3), ""); // step 3 was not saved
  EXPECT_EQ(linked_after(2, {}), "");
}

TEST(OutputFolder, AResumedRunKeepsItsStartAndTheRecordsUpToItsCheckpoint) {
  const testing_support::TemporaryFolder scratch;
  const std::string kept =
      "{\"type\":\"start\",\"host\":\"a\"}\n"
      "{\"type\":\"train\",\"step\":2}\n";
  write_file_atomically(scratch / "metrics.jsonl", kept +
                                                       "{\"type\":\"train\",\"step\":3}\n"
                                                       "{\"type\":\"train\",\"st");
  prepare_resumed_dir(scratch.path(), 2, {});
  EXPECT_EQ(read_file(scratch / "metrics.jsonl"), kept);
}

TEST(TrainerState, FileHasHuggingFacesKeysAndNoNumberThatJsonLacks) {
  TrainerState state;
  state.global_step = 7;
  state.epoch = 0.5;
  state.best_metric = 0.25;
  state.best_global_step = 5;
  state.best_model_checkpoint = "out/checkpoint-5";
  state.log_history.push_back({{"loss", std::nan("")}, {"step", 7}, {"epoch", 0.5}});
  const std::string text = trainer_state_json(state);
  EXPECT_EQ(text.back(), '\n');
  const nlohmann::json json = nlohmann::json::parse(text);
  // The fields of transformers.TrainerState.
  const std::vector<std::string> expected = {"best_global_step",
                                             "best_metric",
                                             "best_model_checkpoint",
                                             "epoch",
                                             "eval_steps",
                                             "global_step",
                                             "is_hyper_param_search",
                                             "is_local_process_zero",
                                             "is_world_process_zero",
                                             "log_history",
                                             "logging_steps",
                                             "max_steps",
                                             "num_input_tokens_seen",
                                             "num_train_epochs",
                                             "save_steps",
                                             "stateful_callbacks",
                                             "total_flos",
                                             "train_batch_size",
                                             "trial_name",
                                             "trial_params"};
  std::vector<std::string> names;
  for (const auto& [name, value] : json.items()) {
    names.push_back(name);
  }
  EXPECT_EQ(names, expected);
  EXPECT_TRUE(json.at("log_history").at(0).at("loss").is_null());

  const testing_support::TemporaryFolder scratch;
  write_file_atomically(scratch.path() / "trainer_state.json", text);
  const TrainerState again = read_trainer_state(scratch.path() / "trainer_state.json");
  EXPECT_EQ(trainer_state_json(again), text);
  write_file_atomically(scratch.path() / "trainer_state.json", "{\"a\": 1");
  EXPECT_THROW(read_trainer_state(scratch.path() / "trainer_state.json"), InputError);
}

TEST(OutputDirLock, KeepsASecondWriterOutAndNamesTheFirst) {
  const testing_support::TemporaryFolder folder;
  const auto out = folder / "runs/out";
  {
    const OutputDirLock first(out);
    EXPECT_TRUE(std::filesystem::is_directory(out));
    for (const bool only_looking : {false, true}) {
      try {
        if (only_looking) {
          require_unlocked_output_dir(out);
        } else {
          const OutputDirLock second(out);
        }
        FAIL() << "both write";
      } catch (const InputError& error) {
        const std::string text = error.what();
        EXPECT_NE(text.find("output_dir=" + out.string()), text.npos) << text;
        EXPECT_NE(text.find("is in use by another run"), text.npos);
      }
    }
    EXPECT_NO_THROW(OutputDirLock(folder / "runs/other"));
  }
  EXPECT_FALSE(std::filesystem::exists(out)); // the lock made it, and it is still empty
  std::filesystem::create_directories(out);
  EXPECT_NO_THROW(require_unlocked_output_dir(out));
  { const OutputDirLock again(out); }
  EXPECT_TRUE(std::filesystem::exists(out)); // existed before
  EXPECT_NO_THROW(OutputDirLock(""));
}

} // namespace hasten
