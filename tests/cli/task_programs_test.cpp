// hasten train, eval and predict for each task, as a user runs them.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

#include "cli/run_program.h"
#include "cli/small_reviews.h"
#include "hasten/base/files.h"
#include "hasten/base/text.h"
#include "text/tokenizer_folder.h"

namespace hasten::task_programs_test {

using testing_support::ProgramRun;
using testing_support::run_program;
using testing_support::TemporaryFolder;

/// Sentences in which three names of people and two of places are to be found.
std::string tagged_sentences(int sentences, int first) {
  const std::vector<std::string> people{"ada", "grace", "alan"}, places{"london", "paris"};
  std::string text;
  for (int i = first; i < first + sentences; ++i) {
    text += people[i % 3] + " B-PER\n" + (i % 2 == 0 ? "smith I-PER\n" : "") +
            (i % 5 < 2 ? "saw O\n" : "left O\n") + places[i % 2] + " B-LOC\n" +
            (i % 7 == 0 ? "again O\n" : "") + ". O\n\n";
  }
  return text;
}

nlohmann::json results_of(const TemporaryFolder& folder) {
  return nlohmann::json::parse(read_file(folder / "out/eval_results.json"));
}

ProgramRun train(const TemporaryFolder& folder, const std::string& task, const std::string& file,
                 const std::vector<std::string>& more) {
  std::vector<std::string> arguments{"hasten",          "train",        "--task",          task,
                                     "--model",         "bert-tiny",    "--train-file",    file,
                                     "--output-dir",    folder / "out", "--nproc",         "2",
                                     "--save-strategy", "no",           "--learning-rate", "3e-3"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return run_program(arguments);
}

nlohmann::json evaluate(const TemporaryFolder& folder, const std::string& file,
                        const std::vector<std::string>& more) {
  std::vector<std::string> arguments{"hasten", "eval", "--model", folder / "out",
                                     "--file", file,   "--json"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  const ProgramRun run = run_program(arguments);
  EXPECT_EQ(run.code, 0) << run.error;
  return nlohmann::json::parse(run.out, nullptr, false);
}

TEST(TaskPrograms, TokenClassificationLearnsEntitiesAndFindsThemInTexts) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.conll", tagged_sentences(90, 0));
  write_file_atomically(folder / "eval.conll", tagged_sentences(30, 91));
  // Sentences that training has are no evaluation data: these differ in their full stop.
  std::string other = read_file(folder / "eval.conll");
  for (size_t at = 0; (at = other.find(". O", at)) != std::string::npos; ++at) {
    other[at] = '!';
  }
  write_file_atomically(folder / "eval.conll", other);
  const ProgramRun run = train(folder, "token-classification", folder / "train.conll",
                               {"--eval-file", folder / "eval.conll", "--num-train-epochs", "8",
                                "--metric-for-best-model", "f1"});
  ASSERT_EQ(run.code, 0) << run.error;
  const nlohmann::json results = results_of(folder);
  EXPECT_GT(results.at("eval_f1"), 0.95) << results.dump();
  EXPECT_EQ(results.at("per_class").size(), 2U) << results.dump();

  for (const char* processes : {"1", "2"}) {
    const auto again =
        evaluate(folder, folder / "eval.conll", {"--nproc", processes, "--batch-size", "3"});
    EXPECT_EQ(again.at("eval_f1"), results.at("eval_f1"));
    EXPECT_NEAR(again.at("eval_loss").get<double>(), results.at("eval_loss").get<double>(), 1e-6);
  }
  const ProgramRun texts = run_program(
      {"hasten", "predict", "--model", folder / "out", "--json", "Grace Smith left Paris ."});
  ASSERT_EQ(texts.code, 0) << texts.error;
  const auto entities = nlohmann::json::parse(texts.out).at("entities");
  ASSERT_EQ(entities.size(), 2U) << texts.out;
  EXPECT_EQ(entities[0].at("word"), "Grace Smith");
  EXPECT_EQ(entities[1].at("entity_group"), "LOC");
  EXPECT_EQ(entities[1].at("start"), 17);

  const ProgramRun words =
      run_program({"hasten", "predict", "--model", folder / "out", "--file", folder / "train.conll",
                   "--max-rows", "2", "--output", folder / "tags.jsonl"});
  ASSERT_EQ(words.code, 0) << words.error;
  const std::string lines = read_file(folder / "tags.jsonl");
  const auto first = nlohmann::json::parse(lines.substr(0, lines.find('\n')));
  EXPECT_EQ(first.at("ner_tags"),
            (std::vector<std::string>{"B-PER", "I-PER", "O", "B-LOC", "O", "O"}));
}

TEST(TaskPrograms, FillMaskLearnsWordsAndItsPerplexityIsThatOfAnySplit) {
  const TemporaryFolder folder;
  std::string text = "text\n";
  for (int i = 0; i < 120; ++i) {
    text += "the " + std::string(i % 2 == 0 ? "cat drinks milk" : "dog eats meat") + " on day " +
            std::to_string(i) + "\n";
  }
  write_file_atomically(folder / "train.csv", text);
  const ProgramRun run = train(folder, "fill-mask", folder / "train.csv",
                               {"--eval-split", "0.2", "--num-train-epochs", "10",
                                "--whole-word-mask", "--metric-for-best-model", "perplexity"});
  ASSERT_EQ(run.code, 0) << run.error;
  EXPECT_TRUE(run.said("[MASK]")) << run.error; // the command that the run suggests
  const nlohmann::json results = results_of(folder);
  EXPECT_LT(results.at("eval_perplexity"), 12) << results.dump();
  EXPECT_NEAR(std::log(results.at("eval_perplexity").get<double>()), results.at("eval_loss"), 1e-6);

  const auto one = evaluate(folder, folder / "train.csv", {"--batch-size", "5"});
  const auto two = evaluate(folder, folder / "train.csv", {"--nproc", "2", "--batch-size", "16"});
  EXPECT_NEAR(one.at("eval_perplexity").get<double>(), two.at("eval_perplexity").get<double>(),
              1e-5);
  const ProgramRun mask = run_program({"hasten", "predict", "--model", folder / "out", "--json",
                                       "--top-k", "2", "the cat drinks [MASK] on day 4"});
  ASSERT_EQ(mask.code, 0) << mask.error;
  const auto answer = nlohmann::json::parse(mask.out).at("masks").at(0);
  ASSERT_EQ(answer.size(), 2U);
  EXPECT_EQ(answer[0].at("token_str"), "milk") << mask.out;
  EXPECT_EQ(answer[0].at("sequence"), "the cat drinks milk on day 4");
}

/// A byte-level tokenizer with a token that ends texts.
std::string text_tokenizer(const TemporaryFolder& folder) {
  const auto path = folder / "tokenizer";
  std::filesystem::create_directory(path);
  std::filesystem::copy_file(std::filesystem::path(testing_support::kTokenizerFolder) / "gpt2.json",
                             path / "tokenizer.json");
  write_file_atomically(path / "tokenizer_config.json", R"({"eos_token": "<|endoftext|>"})");
  return path;
}

TEST(TaskPrograms, TextGenerationLearnsTextsAndItsPerplexityIsThatOfAnySplit) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 80; ++i) {
    text += "the " + std::string(i % 2 == 0 ? "cat drinks milk" : "dog eats meat") + " on day " +
            std::to_string(i) + "\n";
  }
  write_file_atomically(folder / "train.txt", text);
  const ProgramRun run = run_program({"hasten",
                                      "train",
                                      "--task",
                                      "text-generation",
                                      "--model",
                                      "llama-mini",
                                      "--tokenizer",
                                      text_tokenizer(folder),
                                      "--train-file",
                                      folder / "train.txt",
                                      "--output-dir",
                                      folder / "out",
                                      "--nproc",
                                      "2",
                                      "--save-strategy",
                                      "no",
                                      "--eval-split",
                                      "0.2",
                                      "--block-size",
                                      "48",
                                      "--num-train-epochs",
                                      "4",
                                      "--per-device-train-batch-size",
                                      "2",
                                      "--learning-rate",
                                      "2e-3",
                                      "--metric-for-best-model",
                                      "perplexity"});
  ASSERT_EQ(run.code, 0) << run.error;
  EXPECT_TRUE(run.said("hasten generate")) << run.error; // the command that the run suggests
  EXPECT_TRUE(run.said("rows of 48")) << run.error;
  const nlohmann::json results = results_of(folder);
  EXPECT_LT(results.at("eval_perplexity"), 4) << results.dump();
  EXPECT_NEAR(std::log(results.at("eval_perplexity").get<double>()), results.at("eval_loss"), 1e-6);

  std::vector<double> perplexities;
  for (const auto& [processes, batch] : {std::pair("1", "3"), {"2", "8"}}) {
    perplexities.push_back(
        evaluate(folder, folder / "train.txt", {"--nproc", processes, "--batch-size", batch})
            .at("eval_perplexity"));
  }
  EXPECT_NEAR(perplexities[0], perplexities[1], 1e-6 * perplexities[0]);
  const ProgramRun more = run_program(
      {"hasten", "generate", "--model", folder / "out", "--max-new-tokens", "40", "the cat"});
  EXPECT_NE(more.out.find("the cat drinks milk on day"), std::string::npos) << more.out;
  const ProgramRun labels = run_program({"hasten", "predict", "--model", folder / "out", "x"});
  EXPECT_EQ(labels.code, 2);
  EXPECT_TRUE(labels.said("hasten generate")) << labels.error;
}

// Documents have different lengths, so every batch and every rank has another number of tokens.
TEST(TaskPrograms, TextGenerationIsThatOfAnySplitIntoRanksAndAccumulationAndResumes) {
  const TemporaryFolder folder;
  std::string text;
  for (int i = 0; i < 40; ++i) {
    text += "day " + std::to_string(i);
    for (int word = 0; word < i % 7; ++word) {
      text += " the cat drinks milk";
    }
    text += "\n";
  }
  write_file_atomically(folder / "train.txt", text);
  const std::string tokenizer = text_tokenizer(folder);
  const auto learn = [&](const std::string& out, std::vector<std::string> more) {
    more.insert(more.begin(), {"hasten",          "train",
                               "--task",          "text-generation",
                               "--model",         "llama-mini",
                               "--tokenizer",     tokenizer,
                               "--train-file",    folder / "train.txt",
                               "--output-dir",    folder / out,
                               "--block-size",    "48",
                               "--max-steps",     "4",
                               "--learning-rate", "1e-3",
                               "--eval-split",    "0.2",
                               "--logging-steps", "1"});
    const ProgramRun run = run_program(more);
    EXPECT_EQ(run.code, 0) << run.error;
    return nlohmann::json::parse(read_file(folder / out / "all_results.json"));
  };
  const auto one = learn("one", {"--per-device-train-batch-size", "4", "--save-strategy", "steps",
                                 "--save-steps", "2"});
  const auto split = learn("split", {"--nproc", "2", "--per-device-train-batch-size", "1",
                                     "--gradient-accumulation-steps", "2"});
  for (const char* name : {"train_loss", "eval_loss", "eval_perplexity"}) {
    const double value = one.at(name);
    EXPECT_NEAR(split.at(name), value, 1e-5 * value) << name;
  }
  learn("resumed", {"--per-device-train-batch-size", "4", "--resume-from-checkpoint",
                    folder / "one/checkpoint-2"});
  EXPECT_EQ(read_file(folder / "resumed/model.safetensors"),
            read_file(folder / "one/model.safetensors"));
}

TEST(TaskPrograms, TextGenerationRefusesWhatItCannotTrainOn) {
  const TemporaryFolder folder;
  const std::string tokenizer = text_tokenizer(folder);
  write_file_atomically(folder / "train.txt", "one two three\nfour five six\n");
  write_file_atomically(folder / "empty.jsonl",
                        "{\"prompt\": \"a\", \"completion\": \"b\"}\n{\"prompt\": \"a\"}\n");
  write_file_atomically(folder / "chat.jsonl", "{\"messages\": [{\"role\": \"user\"}]}\n");
  for (const auto& [file, model, more, said] :
       {std::tuple<std::string, std::string, std::vector<std::string>, std::string>{
            "train.txt",
            "gpt2-mini",
            {"--tokenizer", tokenizer, "--block-size", "1025"},
            "the model's positions: 1024"},
        {"train.txt", "gpt2-mini", {}, "without --tokenizer"},
        {"train.txt", "bert-tiny", {}, "a decoder, such as gpt2-mini"},
        {"train.txt",
         "gpt2-mini",
         {"--tokenizer", tokenizer, "--max-length", "64"},
         "write --block-size"},
        {"train.txt",
         "gpt2-mini",
         {"--tokenizer", tokenizer, "--sample-by", "word"},
         "--sample-by=word"},
        {"empty.jsonl", "gpt2-mini", {"--tokenizer", tokenizer}, "empty.jsonl:2"},
        {"chat.jsonl", "gpt2-mini", {"--tokenizer", tokenizer}, "chat template"}}) {
    std::vector<std::string> arguments{
        "hasten", "train",        "--task",      "text-generation", "--model",
        model,    "--train-file", folder / file, "--output-dir",    folder / "out"};
    arguments.insert(arguments.end(), more.begin(), more.end());
    const ProgramRun run = run_program(arguments);
    EXPECT_EQ(run.code, 2) << run.error;
    EXPECT_TRUE(run.said(said)) << said << "\n" << run.error;
    EXPECT_FALSE(std::filesystem::exists(folder / "out"));
  }
}

TEST(TaskPrograms, PairsOfTextsAreClassified) {
  const TemporaryFolder folder;
  std::string text = "question,answer,label\n";
  for (int i = 0; i < 40; ++i) {
    text +=
        "number " + std::to_string(i) + "?," + (i % 2 == 0 ? "it is good,yes\n" : "it is bad,no\n");
  }
  write_file_atomically(folder / "train.csv", text);
  const std::vector<std::string> columns{"--text-column", "question", "--text-pair-column",
                                         "answer"};
  std::vector<std::string> flags{"--num-train-epochs", "6", "--eval-split", "0.2"};
  flags.insert(flags.end(), columns.begin(), columns.end());
  const ProgramRun run = train(folder, "text-classification", folder / "train.csv", flags);
  ASSERT_EQ(run.code, 0) << run.error;
  EXPECT_EQ(results_of(folder).at("eval_accuracy"), 1);
  EXPECT_EQ(evaluate(folder, folder / "train.csv", columns).at("eval_accuracy"), 1);
  std::vector<std::string> predict{"hasten",       "predict", "--model",
                                   folder / "out", "--file",  folder / "train.csv",
                                   "--max-rows",   "2",       "--json"};
  predict.insert(predict.end(), columns.begin(), columns.end());
  const ProgramRun answers = run_program(predict);
  ASSERT_EQ(answers.code, 0) << answers.error;
  EXPECT_EQ(nlohmann::json::parse(answers.out.substr(0, answers.out.find('\n'))).at("label"),
            "yes");
}

TEST(TaskPrograms, FlagsOfAnotherTaskAreErrors) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.conll", tagged_sentences(4, 0));
  const std::string file = folder / "train.conll";
  for (const auto& [task, more, said] :
       {std::tuple<std::string, std::vector<std::string>, std::string>{
            "token-classification", {"--problem-type", "regression"}, "--problem-type=regression"},
        {"token-classification", {"--delimiter", ";"}, "is read as CoNLL"},
        {"text-classification", {"--whole-word-mask"}, "--task fill-mask"},
        {"fill-mask", {"--label-column", "x"}, "--label-column=x"},
        {"fill-mask", {"--metric-for-best-model", "f1"}, "perplexity"},
        {"fill-mask", {"--block-size", "64"}, "--task text-generation"},
        {"token-clasification", {}, "write token-classification"}}) {
    const ProgramRun run = train(folder, task, file, more);
    EXPECT_EQ(run.code, 2) << run.error;
    EXPECT_TRUE(run.said(said)) << run.error;
  }
}

/// The bytes of the frozen weights that the banner shows.
std::string frozen_bytes(const ProgramRun& run) {
  const std::string shown = run.out + run.error;
  const size_t begin = shown.find(" trained, "), end = shown.find(" frozen", begin);
  EXPECT_NE(end, std::string::npos) << shown;
  return end == std::string::npos ? "" : shown.substr(begin, end - begin);
}

static const std::vector<std::string> kAdapter{"--lora-r",
                                               "2",
                                               "--lora-use-dora",
                                               "--lora-bias",
                                               "lora_only",
                                               "--lora-layers-to-transform",
                                               "1",
                                               "--lora-rank-pattern",
                                               "query=3,val.*=1"};

TEST(TaskPrograms, AnAdapterTrainsResumesPredictsAndMerges) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "reviews.csv", testing_support::small_reviews(48));
  const auto run = [&](std::vector<std::string> arguments) {
    arguments.insert(arguments.begin(), "hasten");
    const ProgramRun made = run_program(arguments);
    EXPECT_EQ(made.code, 0) << made.error;
    return made;
  };
  const std::vector<std::string> data{"--train-file", folder / "reviews.csv", "--max-length",
                                      "16",           "--eval-split",         "0.25"};
  const auto train = [&](std::vector<std::string> more) {
    more.insert(more.begin(), "train");
    more.insert(more.end(), data.begin(), data.end());
    return run(more);
  };
  train({"--model", "bert-tiny", "--output-dir", folder / "base", "--max-steps", "2",
         "--save-strategy", "no"});
  const auto adapt = [&](const std::string& out, std::vector<std::string> more) {
    more.insert(more.begin(), kAdapter.begin(), kAdapter.end());
    more.insert(more.begin(),
                {"--model", folder / "base", "--output-dir", folder / out, "--lora-dropout", "0.1",
                 "--nproc", "2", "--max-steps", "4", "--save-strategy", "steps", "--save-steps",
                 "2", "--learning-rate", "1e-2"});
    return train(more);
  };
  const ProgramRun adapted = adapt("out", {});
  EXPECT_TRUE(adapted.said(" parameters are trained"));
  std::vector<std::string> estimates{"estimate-memory", "--model", folder / "base",
                                     "--nproc",         "2",       "--json"};
  estimates.insert(estimates.end(), kAdapter.begin(), kAdapter.end());
  const auto estimate = nlohmann::json::parse(run(estimates).out);
  const auto sent = estimate.at("sent_bytes").get<int64_t>();
  EXPECT_LT(sent, estimate.at("parameter_count").get<int64_t>());
  EXPECT_TRUE(adapted.said(format_bytes(sent) + " sent by each rank in a step")) << adapted.error;
  EXPECT_TRUE(std::filesystem::exists(folder / "out/adapter_config.json"));
  EXPECT_FALSE(std::filesystem::exists(folder / "out/model.safetensors"));
  const std::string adapter = read_file(folder / "out/adapter_model.safetensors");
  EXPECT_NE(adapter.find("base_model.model.classifier.weight"), std::string::npos);
  EXPECT_NE(adapter.find("layer.1.attention.self.query.lora_magnitude_vector"), std::string::npos);
  // The state has no weights of the base: the file is hardly larger than the adapter's.
  EXPECT_LT(std::filesystem::file_size(folder / "out/checkpoint-2/model.safetensors"),
            adapter.size() + 4096);
  // An automatic precision, here that of the checkpoint, is known later. The base gets its dtype, too.
  const ProgramRun bf16 = adapt("bf16", {"--bf16"});
  const ProgramRun kept = adapt(
      "kept", {"--precision", "auto", "--resume-from-checkpoint", folder / "bf16/checkpoint-2"});
  EXPECT_NE(frozen_bytes(bf16), frozen_bytes(adapted));
  EXPECT_EQ(frozen_bytes(kept), frozen_bytes(bf16));
  EXPECT_EQ(read_file(folder / "kept/adapter_model.safetensors"),
            read_file(folder / "bf16/adapter_model.safetensors"));
  adapt("resumed", {"--resume-from-checkpoint", folder / "out/checkpoint-2"});
  EXPECT_EQ(read_file(folder / "resumed/adapter_model.safetensors"), adapter);

  const auto logits = [&](const std::string& model) {
    const ProgramRun made =
        run({"predict", "--model", folder / model, "--with-logits", "--json", "a good phone"});
    return nlohmann::json::parse(made.out).at("logits").get<std::vector<double>>();
  };
  run({"eval", "--model", folder / "out", "--file", folder / "reviews.csv"});
  run({"merge", "--model", folder / "out", "--output-dir", folder / "merged"});
  const auto apart = logits("out"), merged = logits("merged");
  EXPECT_NE(apart, logits("base"));
  for (size_t i = 0; i < apart.size(); ++i) {
    EXPECT_NEAR(apart[i], merged[i], 1e-6);
  }

  for (const auto& file : std::filesystem::directory_iterator(folder / "out")) {
    if (!file.path().filename().string().starts_with("adapter_")) { // PEFT writes no more
      std::filesystem::remove_all(file);
    }
  }
  EXPECT_EQ(logits("out"), apart);

  std::filesystem::rename(folder / "base", folder / "moved");
  const ProgramRun missing = run_program({"hasten", "predict", "--model", folder / "out", "text"});
  EXPECT_EQ(missing.code, 2);
  EXPECT_TRUE(
      missing.said("base_model_name_or_path=" + (folder / "base").string() + " is not there"))
      << missing.error;
}

TEST(TaskPrograms, LoraFlagsThatCannotWorkAreRefused) {
  const TemporaryFolder folder;
  const auto refused = [&](std::vector<std::string> more, const std::string& said) {
    more.insert(more.begin(), {"hasten", "train", "--output-dir", folder / "out"});
    const ProgramRun made = run_program(more);
    EXPECT_EQ(made.code, 2);
    EXPECT_TRUE(made.said(said)) << made.error;
  };
  refused({"--model", "bert-tiny", "--lora-alpha", "4"}, "--lora-r is missing");
  refused({"--model", "bert-tiny", "--lora-r", "0"}, "--lora-r=0. Expected at least 1");
  refused({"--model", "bert-tiny", "--lora-r", "4", "--lora-dropout", "1"}, "--lora-dropout=1");
  refused({"--model", "bert-tiny", "--lora-r", "4", "--lora-rank-pattern", "query"},
          "--lora-rank-pattern=query. Expected numbers by pattern");
  refused({"--model", "bert-tiny", "--lora-r", "4"}, "Expected a trained model");
  write_file_atomically(folder / "adapter_config.json", "{}");
  refused({"--model", folder.path().string()}, "is an adapter");
}

} // namespace hasten::task_programs_test
