// Files, vocabularies, generated reviews and the token cache, with the built programs.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <sstream>

#include "cli/small_reviews.h"
#include "support/hub_cache.h"

namespace hasten {

using testing_support::ProgramRun;
using testing_support::run_program;
using testing_support::small_reviews;
using testing_support::TemporaryFolder;
using testing_support::train_arguments;

namespace detail {

// The rows of small_reviews() as JSON lines.
std::string reviews_as_jsonl(int rows) {
  std::istringstream csv(small_reviews(rows));
  std::string out, line;
  std::getline(csv, line);
  while (std::getline(csv, line)) {
    const size_t comma = line.rfind(',');
    out +=
        nlohmann::json{{"text", line.substr(0, comma)}, {"label", line.substr(comma + 1)}}.dump() +
        "\n";
  }
  return out;
}

// hasten train on `file`, a few steps, its token ids in folder/cache.
ProgramRun cached_train(const TemporaryFolder& folder, const std::string& file,
                        const std::string& out, std::vector<std::string> more = {}) {
  std::vector<std::string> arguments{
      "hasten",      "train",          "--model",         "bert-tiny", "--output-dir", folder / out,
      "--cache-dir", folder / "cache", "--save-strategy", "no",        "--max-steps",  "3"};
  if (!file.empty()) {
    arguments.insert(arguments.end(), {"--train-data", folder / file});
  }
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_program(arguments);
}

int times_said(const ProgramRun& run, const std::string& text) {
  int times = 0;
  for (size_t at = run.error.find(text); at != std::string::npos;
       at = run.error.find(text, at + 1)) {
    ++times;
  }
  return times;
}

} // namespace detail

TEST(DataPrograms, JsonLinesTrainTheModelThatCsvDoes) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.csv", small_reviews(20));
  write_file_atomically(folder / "train.jsonl", detail::reviews_as_jsonl(20));
  for (const char* kind : {"csv", "jsonl"}) {
    const auto run =
        detail::cached_train(folder, std::string("train.") + kind, kind, {"--eval-split", "0.2"});
    ASSERT_EQ(run.code, 0) << run.error;
  }
  EXPECT_EQ(read_file(folder / "csv/model.safetensors"),
            read_file(folder / "jsonl/model.safetensors"));
  const auto eval = run_program(
      {"hasten", "eval", "--model", folder / "csv", "--file", folder / "train.jsonl", "--json"});
  ASSERT_EQ(eval.code, 0) << eval.error;
  EXPECT_EQ(nlohmann::json::parse(eval.out).at("rows"), 20);

  write_file_atomically(folder / "bad.jsonl",
                        detail::reviews_as_jsonl(2) + "{\"text\": \"a\" \"label\": 1}\n");
  const auto bad = detail::cached_train(folder, "bad.jsonl", "bad");
  EXPECT_EQ(bad.code, 2);
  EXPECT_TRUE(bad.said("bad.jsonl:3: byte 20 of the line")) << bad.error;
  EXPECT_FALSE(std::filesystem::exists(folder / "bad"));
}

TEST(DataPrograms, FilesOfAPatternTrainAndEvaluateAsTheJoinedFileDoes) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.csv", small_reviews(24));
  for (const int part : {0, 1, 2}) {
    write_file_atomically(folder / ("part-" + std::to_string(part) + ".csv"),
                          small_reviews(8, 8 * part));
  }
  const std::vector<std::string> more{"--eval-split", "0.2", "--nproc", "2"};
  ASSERT_EQ(detail::cached_train(folder, "train.csv", "whole", more).code, 0);
  const auto parts = detail::cached_train(folder, "part-*.csv", "parts", more);
  ASSERT_EQ(parts.code, 0) << parts.error;
  EXPECT_EQ(read_file(folder / "whole/model.safetensors"),
            read_file(folder / "parts/model.safetensors"));
  const auto card = read_file(folder / "parts/README.md");
  EXPECT_NE(card.find("fine-tuned on part-\\*.csv"), card.npos) << card;
  for (const char* command : {"eval", "predict"}) {
    const auto run = [&](const std::string& files) {
      return run_program(
          {"hasten", command, "--model", folder / "whole", "--file", files, "--json"});
    };
    const auto joined = run(folder / "train.csv");
    const auto split =
        run((folder / "part-[01].csv").string() + "," + (folder / "part-2.csv").string());
    ASSERT_EQ(split.code, 0) << split.error;
    EXPECT_EQ(split.out.substr(0, split.out.find("runtime")),
              joined.out.substr(0, joined.out.find("runtime")));
  }
  const auto none = detail::cached_train(folder, "piece-*.csv", "none");
  EXPECT_EQ(none.code, 2);
  EXPECT_TRUE(none.said("--train-file=" + (folder / "piece-*.csv").string() + ": no file matches"))
      << none.error;
  write_file_atomically(folder / "part-1.csv", "text\ngood\n");
  const auto bad = detail::cached_train(folder, "part-*.csv", "bad");
  EXPECT_EQ(bad.code, 2);
  EXPECT_TRUE(bad.said("label_column=label is not a column of " + (folder / "part-1.csv").string()))
      << bad.error;
}

TEST(DataPrograms, AModelInTheCacheOfHuggingFaceIsGivenByName) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.csv", small_reviews(20));
  const auto first = detail::cached_train(folder, "train.csv", "first");
  ASSERT_EQ(first.code, 0) << first.error;
  testing_support::add_to_hub_cache(folder / "hub", "org/reviews", folder / "first", "c0ffee");
  const testing_support::ProgramOptions cache{
      .environment = {{"HF_HUB_CACHE", folder / "hub"}, {"HOME", folder.path()}}};
  const auto predict =
      run_program({"hasten", "predict", "--model", "org/reviews", "good fun", "--json"}, cache);
  EXPECT_EQ(predict.code, 0) << predict.error;
  EXPECT_EQ(
      predict.out,
      run_program({"hasten", "predict", "--model", folder / "first", "good fun", "--json"}).out);
  const auto tuned =
      run_program(train_arguments(folder.path(), {"--max-steps", "1", "--save-strategy", "no"},
                                  "org/reviews@c0ffee"),
                  cache);
  ASSERT_EQ(tuned.code, 0) << tuned.error;
  const auto card = read_file(folder / "out/README.md");
  EXPECT_NE(card.find("base_model: \"org/reviews\"\n"), card.npos) << card;
  EXPECT_NE(card.find("# org/reviews@c0ffee fine-tuned"), card.npos) << card;
  EXPECT_EQ(nlohmann::json::parse(read_file(folder / "out/training_args.json")).at("model"),
            "org/reviews@c0ffee");
  const auto absent =
      run_program({"hasten", "plan", "--model", "org/none", "--batch", "2x8"}, cache);
  EXPECT_EQ(absent.code, 2);
  EXPECT_TRUE(absent.said("[cli::plan] --model=org/none does not exist")) << absent.error;
  EXPECT_TRUE(absent.said((folder / "hub").string() + ". Expected")) << absent.error;
  EXPECT_TRUE(absent.said("Fix: hf download org/none.")) << absent.error;
}

TEST(DataPrograms, ASecondRunReadsTheTokenIdsOfTheFirstAndTrainsTheSame) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.csv", small_reviews(24));
  const std::vector<std::string> two{"--nproc", "2", "--batch-size", "4"};
  const auto first = detail::cached_train(folder, "train.csv", "first", two);
  ASSERT_EQ(first.code, 0) << first.error;
  const auto second = detail::cached_train(folder, "train.csv", "second", two);
  ASSERT_EQ(second.code, 0) << second.error;
  EXPECT_TRUE(second.said("read from " + (folder / "cache").string())) << second.error;
  auto workers = two;
  workers.insert(workers.end(), {"--dataloader-num-workers", "2"});
  const auto third = detail::cached_train(folder, "train.csv", "third", workers);
  ASSERT_EQ(third.code, 0) << third.error;
  for (const char* out : {"second", "third"}) {
    EXPECT_EQ(read_file(folder / "first/model.safetensors"),
              read_file(folder / out / "model.safetensors"))
        << out;
  }
  std::vector<std::filesystem::path> kept;
  for (const auto& entry : std::filesystem::directory_iterator(folder / "cache/tokens")) {
    kept.push_back(entry.path());
  }
  ASSERT_EQ(kept.size(), 1U);
  write_file_atomically(kept[0], "something else");
  const auto again = detail::cached_train(folder, "train.csv", "again", two);
  ASSERT_EQ(again.code, 0) << again.error;
  EXPECT_EQ(detail::times_said(again, "tokenized again"), 1) << again.error;
}

TEST(DataPrograms, WhereNoCacheCanBeOneWarningIsSaidByAllRanksTogether) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.csv", small_reviews(24));
  write_file_atomically(folder / "cache", "a file");
  const auto run =
      detail::cached_train(folder, "train.csv", "out", {"--nproc", "2", "--batch-size", "4"});
  ASSERT_EQ(run.code, 0) << run.error;
  EXPECT_EQ(detail::times_said(run, "warning:"), 1) << run.error;
  EXPECT_TRUE(run.said("not cached for later runs")) << run.error;
}

TEST(DataPrograms, TrainingWithoutFilesLearnsSyntheticReviews) {
  const TemporaryFolder folder;
  const auto run = detail::cached_train(folder, "", "out");
  ASSERT_EQ(run.code, 0) << run.error;
  EXPECT_TRUE(run.said("bert-tiny learns synthetic reviews")) << run.error;
  EXPECT_TRUE(run.said("3603 samples")) << run.error;
  EXPECT_TRUE(run.said("397 samples")) << run.error;
}

TEST(DataPrograms, SynthWritesTheSameRowsInEveryKind) {
  const TemporaryFolder folder;
  const auto synth = [&](std::vector<std::string> more) {
    std::vector<std::string> arguments{"hasten", "synth", "reviews", "--rows", "30"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const auto run = run_program(arguments);
    EXPECT_EQ(run.code, 0) << run.error;
    return run.out;
  };
  const std::string csv = synth({});
  EXPECT_EQ(csv.substr(0, csv.find('\n')), "text,label,product");
  EXPECT_EQ(synth({"--output", folder / "r.csv"}), "");
  EXPECT_EQ(read_file(folder / "r.csv"), csv);
  EXPECT_NE(synth({"--seed", "1"}), csv);
  synth({"--output", folder / "r.jsonl"});
  const std::string jsonl = read_file(folder / "r.jsonl");
  EXPECT_EQ(std::count(jsonl.begin(), jsonl.end(), '\n'), 30);
  EXPECT_EQ(run_program({"hasten", "synth", "poems"}).code, 2);
  EXPECT_EQ(run_program({"hasten", "synth", "reviews", "--output", "r.xml"}).code, 2);
}

TEST(DataPrograms, ATokenizerIsLearnedFromTextsWhateverTheirOrder) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "a.csv", small_reviews(10));
  write_file_atomically(folder / "b.txt", "film number good\nbad work\n");
  const auto learn = [&](const std::vector<std::string>& files, const std::string& out) {
    std::vector<std::string> arguments{"hasten", "tokenizer", "train"};
    for (const auto& file : files) {
      arguments.push_back(folder / file);
    }
    arguments.insert(arguments.end(), {"--vocab-size", "70", "--output", folder / out});
    return run_program(arguments);
  };
  const auto run = learn({"a.csv", "b.txt"}, "one");
  ASSERT_EQ(run.code, 0) << run.error;
  EXPECT_TRUE(run.said("12 texts")) << run.error;
  ASSERT_EQ(learn({"b.txt", "a.csv"}, "two").code, 0);
  for (const char* file : {"vocab.txt", "tokenizer.json", "tokenizer_config.json"}) {
    EXPECT_EQ(read_file(folder / "one" / file), read_file(folder / "two" / file)) << file;
  }
  const auto encoded = run_program(
      {"hasten", "tokenizer", "encode", folder / "b.txt", "--tokenizer", folder / "one"});
  ASSERT_EQ(encoded.code, 0) << encoded.error;
  std::istringstream lines(encoded.out);
  std::string line;
  ASSERT_TRUE(std::getline(lines, line));
  const auto ids = nlohmann::json::parse(line).at("input_ids");
  EXPECT_EQ(ids.front(), 2); // [CLS]
  EXPECT_EQ(ids.back(), 3); // [SEP]
  write_file_atomically(folder / "bad.txt",
                        "good\nb\xFF"
                        "d\n");
  const auto bad = learn({"bad.txt"}, "three");
  EXPECT_EQ(bad.code, 2);
  EXPECT_TRUE(bad.said("bad.txt:2")) << bad.error;
  EXPECT_FALSE(std::filesystem::exists(folder / "three"));
  EXPECT_EQ(learn({}, "four").code, 2);
}

} // namespace hasten
