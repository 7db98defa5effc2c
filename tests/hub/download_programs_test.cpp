#include <gtest/gtest.h>

#include "cli/run_program.h"
#include "cli/small_reviews.h"
#include "hub/hub_server.h"

namespace hasten {

using testing_support::HubServer;
using testing_support::ProgramOptions;
using testing_support::run_program;
using testing_support::small_reviews;
using testing_support::TemporaryFolder;
using testing_support::train_arguments;

namespace detail {

// A hub, and the environment of programs that use it.
struct HubOfPrograms {
  TemporaryFolder folder{};
  HubServer hub{};
  std::filesystem::path cache = folder / "home/hub";
  ProgramOptions options{};

  HubOfPrograms() {
    write_file_atomically(folder / "train.csv", small_reviews(12));
    options.environment = {{"HF_ENDPOINT", hub.url()},   {"HF_HUB_OFFLINE", ""},
                           {"HF_HOME", folder / "home"}, {"HF_HUB_CACHE", ""},
                           {"HF_TOKEN", "hf_secret"},    {"no_proxy", "127.0.0.1"}};
  }
};

// With a model that was trained for a step.
struct HubOfReviews : HubOfPrograms {
  size_t served = 0; // files that a model needs

  HubOfReviews() {
    const auto first =
        run_program(train_arguments(folder.path(), {"--max-steps", "1", "--save-strategy", "no"}));
    EXPECT_EQ(first.code, 0) << first.error;
    for (const char* name : {"config.json", "model.safetensors", "tokenizer.json", "vocab.txt",
                             "tokenizer_config.json", "special_tokens_map.json"}) {
      if (std::filesystem::exists(folder / "out" / name)) {
        hub.files[name] = {read_file(folder / "out" / name), "tag-" + std::to_string(++served)};
      }
    }
    std::filesystem::rename(folder / "out", folder / "first");
  }
};

} // namespace detail

TEST(HubPrograms, WhatDownloadFetchedTrainUsesWithoutAsking) {
  const detail::HubOfReviews reviews;
  const auto download = run_program({"hasten", "download", "org/tiny"}, reviews.options);
  ASSERT_EQ(download.code, 0) << download.error;
  const auto snapshot = reviews.cache / "models--org--tiny/snapshots" / reviews.hub.commit;
  EXPECT_EQ(download.out, snapshot.string() + "\n");
  const size_t asked = reviews.hub.requests().size();
  const auto train =
      run_program(train_arguments(reviews.folder.path(),
                                  {"--max-steps", "1", "--save-strategy", "no"}, "org/tiny"),
                  reviews.options);
  EXPECT_EQ(train.code, 0) << train.error;
  EXPECT_EQ(reviews.hub.requests().size(), asked);
  EXPECT_FALSE(train.said("hf_secret") || download.said("hf_secret"));
}

TEST(HubPrograms, TrainFetchesANameOnceBeforeItsRanksStart) {
  const detail::HubOfReviews reviews;
  const auto train = run_program(
      train_arguments(reviews.folder.path(),
                      {"--max-steps", "1", "--save-strategy", "no", "--nproc", "2"}, "org/tiny"),
      reviews.options);
  EXPECT_EQ(train.code, 0) << train.error;
  EXPECT_EQ(reviews.hub.count("GET", "/api/"), 1u);
  EXPECT_EQ(reviews.hub.count("GET", "/resolve/"), reviews.served);
}

TEST(HubPrograms, AnEstimateFetchesTheConfigurationAlone) {
  const detail::HubOfReviews reviews;
  const auto estimate =
      run_program({"hasten", "estimate-memory", "--model", "org/tiny"}, reviews.options);
  EXPECT_EQ(estimate.code, 0) << estimate.error;
  EXPECT_EQ(reviews.hub.count("GET", "/resolve/"), 1u);
}

TEST(HubPrograms, WhatNeedsNoModelIsCheckedBeforeTheFirstRequest) {
  const detail::HubOfPrograms files;
  const std::string train = files.folder / "train.csv", none = files.folder / "none.csv";
  const std::string output = files.folder / "out", two = files.folder / "two.csv";
  write_file_atomically(two, "text,label\ngood,1\n");
  const std::vector<std::pair<std::vector<std::string>, std::string>> refused{
      {{"train", "--train-file", none, "--output-dir", output}, "none.csv does not exist"},
      {{"train", "--train-file", train, "--output-dir", train}, "is a file"},
      {{"train", "--train-file", train, "--output-dir", output, "--nproc", "9999"}, "--nproc=9999"},
      {{"train", "--train-file", two, "--output-dir", output, "--nproc", "4"}, "at most 3 samples"},
      {{"eval", "--file", none}, "none.csv does not exist"},
      {{"predict", "--file", none}, "none.csv does not exist"},
      {{"generate", "--file", none}, "none.csv does not exist"},
      {{"merge", "--output-dir", files.folder.path()}, "is not empty"},
      {{"compare", "--json", files.folder / "none/a.json"}, "cannot be written"}};
  for (auto [arguments, said] : refused) {
    arguments.insert(arguments.begin(), "hasten");
    arguments.insert(arguments.end(), {"--model", "org/tiny"});
    const auto program = run_program(arguments, files.options);
    EXPECT_EQ(program.code, 2) << said;
    EXPECT_TRUE(program.said(said)) << program.error;
  }
  EXPECT_EQ(files.hub.requests().size(), 0u);
}

TEST(HubPrograms, TheBaseOfAnAdapterIsFetchedWithIt) {
  const detail::HubOfReviews reviews;
  const auto in_folder = [&](const char* name) { return (reviews.folder / name).string(); };
  const auto train = run_program(
      train_arguments(reviews.folder.path(),
                      {"--max-steps", "1", "--save-strategy", "no", "--lora-r", "2"}, "org/tiny"),
      reviews.options);
  ASSERT_EQ(train.code, 0) << train.error;
  // An adapter of the hub that is in the cache already.
  const auto adapter = in_folder("home/hub/models--org--adapter/snapshots/main");
  const std::vector<std::vector<std::string>> commands{
      {"predict", "--model", in_folder("out"), "good"},
      {"predict", "--model", "org/adapter", "good"},
      {"eval", "--model", in_folder("out"), "--file", in_folder("train.csv")},
      {"merge", "--model", "org/adapter", "--output-dir", in_folder("merged")}};
  for (auto arguments : commands) {
    std::filesystem::remove_all(reviews.cache);
    std::filesystem::create_directories(adapter);
    std::filesystem::copy(in_folder("out"), adapter);
    arguments.insert(arguments.begin(), "hasten");
    const size_t asked = reviews.hub.count("GET", "model.safetensors");
    const auto program = run_program(arguments, reviews.options);
    EXPECT_EQ(program.code, 0) << program.error;
    EXPECT_EQ(reviews.hub.count("GET", "model.safetensors"), asked + 1) << joined(arguments);
  }
  std::filesystem::remove_all(reviews.cache);
  const auto offline = run_program(
      {"hasten", "predict", "--model", in_folder("out"), "--offline", "good"}, reviews.options);
  EXPECT_EQ(offline.code, 2);
  EXPECT_TRUE(offline.said("base_model_name_or_path=org/tiny is not there")) << offline.error;
}

TEST(HubPrograms, ARunKeepsItsModelsCommitWhichItsRanksShare) {
  detail::HubOfReviews reviews;
  const auto in_folder = [&](const char* name) { return (reviews.folder / name).string(); };
  const std::string first = reviews.hub.commit, second(40, 'd');
  for (const auto& [home, commit] : {std::pair("home0", first), std::pair("home1", second)}) {
    reviews.hub.commit = commit;
    reviews.options.environment.emplace_back("HF_HOME", in_folder(home));
    EXPECT_EQ(run_program({"hasten", "download", "org/tiny"}, reviews.options).code, 0);
  }
  auto train = train_arguments(reviews.folder.path(), {"--max-steps", "1", "--save-strategy", "no"},
                               "org/tiny");
  const auto alone = run_program(train, reviews.options);
  EXPECT_TRUE(alone.said("commit " + second)) << alone.error;
  const auto state = nlohmann::json::parse(read_file(reviews.folder / "out/hasten_state.json"));
  EXPECT_EQ(state["facts"]["altering"]["model_commit"], second);
  std::filesystem::remove_all(reviews.folder / "out");
  train[0] = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "hasten";
  const auto apart =
      run_program({"hasten", "launch", "--nproc", "2", "sh", "-c",
                   "HF_HOME=" + in_folder("home") + "$RANK exec " + joined(train, " ")},
                  reviews.options);
  EXPECT_NE(apart.code, 0);
  EXPECT_TRUE(apart.said("rank 1's data has model_commit as " + second + ", rank 0 as " + first))
      << apart.error;
}

TEST(HubPrograms, OfflineTheErrorNamesTheCommandThatDownloads) {
  const detail::HubOfReviews reviews;
  const auto plan = run_program(
      {"hasten", "plan", "--model", "org/tiny", "--batch", "2x8", "--offline"}, reviews.options);
  EXPECT_EQ(plan.code, 2);
  EXPECT_TRUE(plan.said("Fix: hf download org/tiny.")) << plan.error;
  EXPECT_EQ(reviews.hub.requests().size(), 0u);
}

TEST(HubPrograms, ASlipInTheNameOfAShapeIsNotAskedFor) {
  const detail::HubOfReviews reviews;
  const auto plan =
      run_program({"hasten", "plan", "--model", "bert-tyni", "--batch", "2x8"}, reviews.options);
  EXPECT_EQ(plan.code, 2);
  EXPECT_TRUE(plan.said("Fix: write bert-tiny.")) << plan.error;
  EXPECT_EQ(reviews.hub.requests().size(), 0u);
}

TEST(HubPrograms, AnUnknownNameIsSaidOnceWithTheFlag) {
  const detail::HubOfReviews reviews;
  const auto predict =
      run_program({"hasten", "predict", "--model", "org/none", "good"}, reviews.options);
  EXPECT_EQ(predict.code, 2);
  EXPECT_TRUE(predict.said("[hub::download] --model=org/none: neither a file or folder here nor"))
      << predict.error;
  EXPECT_EQ(predict.times("error:"), 1u);
}

} // namespace hasten
