// Bad input that only the worker can detect. Each run ends with code 2 and one error that names the
// place, and writes nothing.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "cli/small_reviews.h"

namespace hasten {

using testing_support::ProgramRun;
using testing_support::run_program;
using testing_support::small_reviews;
using testing_support::TemporaryFolder;
using testing_support::train_arguments;

namespace detail {

int count_of(const std::string& text, const std::string& word) {
  int count = 0;
  for (size_t at = text.find(word); at != std::string::npos; at = text.find(word, at + 1)) {
    ++count;
  }
  return count;
}

/// Expects exit code 2, one error that contains `messages`, and no written file.
void expect_refused(const TemporaryFolder& folder, const std::vector<std::string>& more,
                    const std::vector<std::string>& messages,
                    const std::string& model = "bert-tiny") {
  const ProgramRun run = run_program(train_arguments(folder.path(), more, model));
  EXPECT_EQ(run.code, 2) << run.error;
  for (const std::string& message : messages) {
    EXPECT_TRUE(run.said(message)) << message << "\n" << run.error;
  }
  EXPECT_EQ(count_of(run.error, "error:"), 1) << run.error;
  EXPECT_EQ(run.out, "");
  EXPECT_FALSE(std::filesystem::exists(folder / "out")) << messages[0];
  for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
    EXPECT_EQ(entry.path().filename().string().find("out.tmp"), std::string::npos);
  }
}

} // namespace detail

TEST(BadInput, TablesAreRefusedWithFileLineAndColumn) {
  struct Case {
    std::string content;
    std::vector<std::string> messages;
  };
  const Case cases[] = {
      {"text,label\ngood,pos\nbad,neg,more\n", {"train.csv:3"}},
      {"text,label\ngood,pos\n\"never closed,neg\n", {"train.csv:3"}},
      {"text,label\ngood,pos\nb\xff"
       "d,neg\n",
       {"train.csv:3", "UTF-8"}},
      {"review,label\ngood,pos\n", {"text_column=text", "review (\"good\")", "label (\"pos\")"}},
      {"text,label\n", {"train.csv"}},
      {"PAR1\x15\x04\x15\x10", {"train.csv is a Parquet file", "/train.csv').to_json("}},
      {"\x1F\x8B\x08", {"train.csv is cut off, at byte 3 of the gzip file"}},
  };
  const TemporaryFolder folder;
  for (const Case& bad : cases) {
    write_file_atomically(folder / "train.csv", bad.content);
    detail::expect_refused(folder, {}, bad.messages);
  }
}

TEST(BadInput, MessagesAreShortHoweverLongTheirValuesAre) {
  const TemporaryFolder folder;
  const std::string word(3'000'000, 'x');
  write_file_atomically(folder / "train.csv", word + ",label\n" + word + ",pos\n");
  const ProgramRun unknown = run_program(train_arguments(folder.path(), {}));
  EXPECT_EQ(unknown.code, 2);
  EXPECT_TRUE(unknown.said("text_column=text")) << unknown.error;
  EXPECT_LT(unknown.error.size(), 10'000u);
  write_file_atomically(folder / "train.csv",
                        "text,label\ngood," + word + "\nbad,neg\nfine," + word + "\nworse,neg\n");
  const ProgramRun labels =
      run_program(train_arguments(folder.path(), {"--max-steps", "1", "--save-strategy", "no"}));
  EXPECT_EQ(labels.code, 0);
  EXPECT_LT(labels.error.size(), 30'000u);
}

TEST(BadInput, WhatOneProcessCanReadOnceIsRefusedForSeveral) {
  const TemporaryFolder folder;
  std::filesystem::create_symlink("/dev/null", folder / "train.csv");
  detail::expect_refused(folder, {"--nproc", "2"},
                         {"train.csv is not a regular file, with processes=2"});
}

TEST(BadInput, JsonNestedWithoutEndIsRefusedWithItsFile) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.csv", small_reviews(8));
  const std::string deep = std::string(200'000, '[') + std::string(200'000, ']');
  write_file_atomically(folder / "flags.json", "{\"seed\": " + deep + "}");
  detail::expect_refused(folder, {"--config", folder / "flags.json"}, {"flags.json", "nested"});
  std::filesystem::create_directory(folder / "model");
  write_file_atomically(folder / "model/config.json",
                        "{\"model_type\": \"bert\", \"x\": " + deep + "}");
  detail::expect_refused(folder, {}, {"config.json", "nested"}, folder / "model");
}

TEST(BadInput, NamesThatAreNoUtf8AreRefusedByTheirFlag) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.csv", small_reviews(8));
  auto arguments = train_arguments(folder.path(), {});
  for (auto& argument : arguments) {
    if (argument == (folder / "out").string()) {
      argument += "\xE9";
    }
  }
  const ProgramRun run = run_program(arguments);
  EXPECT_EQ(run.code, 2) << run.error;
  EXPECT_TRUE(run.said("--output-dir has bytes that are not UTF-8")) << run.error;
}

TEST(BadInput, ABudgetBelowTheLeastNamesTheLeast) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.csv", small_reviews(8));
  detail::expect_refused(folder, {"--gradient-checkpointing", "budget:1000"},
                         {"budget=1000", "at least"});
}

TEST(BadInput, ALabelThatTrainingLacksIsNamedWithItsPlace) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.csv", small_reviews(8));
  write_file_atomically(folder / "eval.csv", "text,label\nwell,mixed\n");
  detail::expect_refused(folder, {"--eval-file", folder / "eval.csv"}, {"eval.csv:2", "mixed"});
}

TEST(BadInput, MoreProcessesThanRowsIsSaidOnce) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.csv", small_reviews(2));
  detail::expect_refused(folder, {"--nproc", "3"},
                         {"more processes than samples: processes=3, training samples=2"});
}

TEST(BadInput, ModelFoldersAreRefusedWithFileOrTensor) {
  namespace paths = std::filesystem;
  const TemporaryFolder made;
  write_file_atomically(made / "train.csv", small_reviews(8));
  const ProgramRun trained =
      run_program(train_arguments(made.path(), {"--max-steps", "1", "--save-strategy", "no"}));
  ASSERT_EQ(trained.code, 0) << trained.error;

  using Break = std::function<void(const paths::path&)>;
  struct Case {
    const char* name;
    Break damage;
    std::vector<std::string> messages;
  };
  const auto edit_config = [](const char* key, const nlohmann::json& value) {
    return [=](const paths::path& model) {
      auto config = nlohmann::json::parse(read_file(model / "config.json"));
      config[key] = value;
      write_file_atomically(model / "config.json", config.dump());
    };
  };
  const Case cases[] = {
      {"truncated",
       [](const paths::path& model) {
         const auto file = model / "model.safetensors";
         paths::resize_file(file, paths::file_size(file) / 2);
       },
       {"model.safetensors"}},
      {"lying",
       [](const paths::path& model) {
         std::string bytes = read_file(model / "model.safetensors");
         const std::string shape = "\"shape\":[2,128]"; // of the classifier
         const size_t at = bytes.find(shape);
         ASSERT_NE(at, std::string::npos);
         bytes.replace(at, shape.size(), "\"shape\":[2,129]");
         write_file_atomically(model / "model.safetensors", bytes);
       },
       {"model.safetensors", "weight"}},
      {"unknown type", edit_config("model_type", "t5"), {"t5", "bert"}},
      {"pickle only",
       [](const paths::path& model) {
         paths::rename(model / "model.safetensors", model / "pytorch_model.bin");
       },
       {"pytorch_model.bin"}},
      {"no [UNK]",
       [](const paths::path& model) {
         std::string vocab = read_file(model / "vocab.txt");
         vocab.replace(vocab.find("[UNK]"), 5, "[OOV]");
         write_file_atomically(model / "vocab.txt", vocab);
         // Both of them have the token.
         paths::remove(model / "tokenizer.json");
         paths::remove(model / "tokenizer_config.json");
       },
       {"[UNK]"}},
  };
  for (const Case& bad : cases) {
    SCOPED_TRACE(bad.name);
    const TemporaryFolder folder;
    write_file_atomically(folder / "train.csv", small_reviews(8));
    paths::copy(made / "out", folder / "model");
    bad.damage(folder / "model");
    detail::expect_refused(folder, {}, bad.messages, folder / "model");
  }
}

TEST(BadInput, LongAndEmptyTextsAreCountedNotRefused) {
  const TemporaryFolder folder;
  std::string long_text;
  for (int word = 0; word < 50; ++word) {
    long_text += "good ";
  }
  write_file_atomically(folder / "train.csv",
                        small_reviews(6) + long_text + ",pos\n,neg\nno label,\n");
  const ProgramRun run = run_program(train_arguments(
      folder.path(), {"--max-steps", "1", "--max-length", "16", "--save-strategy", "no"}));
  EXPECT_EQ(run.code, 0) << run.error;
  EXPECT_TRUE(run.said("1 truncated to 16")) << run.error;
  EXPECT_TRUE(run.said("1 with empty text, 1 with empty label")) << run.error;
}

TEST(BadInput, AFileThatCannotBeWrittenWholeLeavesNoModel) {
  // A limit on file sizes makes the write fail, like a full disk.
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.csv", small_reviews(8));
  std::vector<std::string> command{"/bin/sh", "-c", "trap '' XFSZ; ulimit -f 64; exec \"$@\"",
                                   "sh"};
  auto train = train_arguments(folder.path(), {"--max-steps", "1"});
  train[0] = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "hasten";
  command.insert(command.end(), train.begin(), train.end());
  const ProgramRun run = run_program(command);
  EXPECT_EQ(run.code, 2) << run.error;
  EXPECT_TRUE(run.said("model.safetensors")) << run.error;
  EXPECT_EQ(detail::count_of(run.error, "error:"), 1) << run.error;
  EXPECT_FALSE(std::filesystem::exists(folder / "out/model.safetensors"));
  EXPECT_FALSE(std::filesystem::exists(folder / "out/checkpoint-1"));
}

} // namespace hasten
