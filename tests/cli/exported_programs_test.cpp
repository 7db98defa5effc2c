// hasten export, and the commands with a folder that it wrote, as a user runs them.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>

#include "cli/run_program.h"
#include "exported_golden.h"
#include "hasten/base/files.h"

namespace hasten::exported_programs_test {

using testing_support::ProgramRun;
using testing_support::run_program;
using testing_support::TemporaryFolder;

/// A golden model of hasten export, with a vocabulary of its eleven tokens.
void copy_exported(const std::string& name, const std::string& to) {
  std::filesystem::copy(exported_test::kGoldenFolder + name, to);
  write_file_atomically(to + "/vocab.txt",
                        "[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\ngood\nbad\nfilm\nplot\na\n.\n");
  write_file_atomically(
      to + "/tokenizer_config.json",
      R"({"tokenizer_class": "BertTokenizer", "model_max_length": 16, "eos_token": "[SEP]"})");
}

TEST(ExportedPrograms, AnExportedClassifierTrainsAsAFamilyDoes) {
  const TemporaryFolder folder;
  copy_exported("reader", folder / "reader");
  std::string reviews = "text,label\n";
  for (int i = 0; i < 24; ++i) {
    reviews += std::string("a ") + (i % 3 == 0 ? "good" : "bad") +
               (i % 2 == 0 ? " film" : " plot .") + "," + (i % 3 == 0 ? "yes" : "no") + "\n";
  }
  write_file_atomically(folder / "reviews.csv", reviews);
  const auto train = [&](const std::string& out, std::vector<std::string> more) {
    more.insert(more.begin(),
                {"hasten", "train", "--model", folder / "reader", "--train-file",
                 folder / "reviews.csv", "--nproc", "2", "--batch-size", "4", "--max-steps", "12",
                 "--learning-rate", "3e-2", "--output-dir", folder / out});
    const ProgramRun run = run_program(more);
    EXPECT_EQ(run.code, 0) << run.error;
    return run;
  };
  const ProgramRun ddp = train("ddp", {"--save-strategy", "no"});
  EXPECT_TRUE(ddp.said("the classifier is new")) << ddp.error; // three labels were exported
  train("fsdp", {"--strategy", "fsdp", "--bf16", "--gradient-checkpointing", "full"});
  EXPECT_TRUE(train("lora", {"--lora-r", "2", "--lora-target-modules", "dense"}).said("rank 2"));
  for (const char* model : {"ddp", "fsdp", "lora"}) {
    const ProgramRun run = run_program(
        {"hasten", "predict", "--model", folder / model, "--json", "a good film", "a bad plot ."});
    EXPECT_EQ(run.code, 0) << run.error;
    EXPECT_NE(run.out.find("\"yes\""), std::string::npos) << model << run.out;
    EXPECT_NE(run.out.find("\"no\""), std::string::npos) << model << run.out;
  }
  // A run that goes on from its checkpoint has the bits of one that did not stop; Local SGD, too.
  for (const std::vector<std::string>& way :
       {std::vector<std::string>{"--strategy", "fsdp"}, {"--local-sgd-steps", "2"}}) {
    const auto all = [&](std::vector<std::string> more) {
      more.insert(more.end(), way.begin(), way.end());
      more.insert(more.end(), {"--save-strategy", "steps", "--save-steps", "6"});
      return more;
    };
    const std::string whole = "whole" + way[1], rest = "rest" + way[1];
    train(whole, all({}));
    train(rest, all({"--resume-from-checkpoint", folder / (whole + "/checkpoint-6")}));
    EXPECT_EQ(read_file(folder / (rest + "/model.safetensors")),
              read_file(folder / (whole + "/model.safetensors")))
        << way[0];
  }
  const ProgramRun described = run_program({"hasten", "export", "--describe", folder / "ddp"});
  EXPECT_TRUE(described.out.starts_with("input_ids: Long [")) << described.out << described.error;
  EXPECT_TRUE(described.out.ends_with("blocks: reader.layer.0, reader.layer.1\n"));
}

TEST(ExportedPrograms, AnExportedLanguageModelPacksRowsWhereItKeepsTextsApart) {
  const TemporaryFolder folder;
  std::string texts;
  for (int i = 0; i < 40; ++i) {
    texts += std::string("a ") + (i % 2 == 0 ? "good" : "bad") + " film .\n";
  }
  write_file_atomically(folder / "texts.txt", texts);
  for (const char* name : {"writer", "mixing_writer"}) {
    const bool packs = name == std::string("writer");
    copy_exported(name, folder / name);
    const ProgramRun run = run_program(
        {"hasten", "train", "--task", "text-generation", "--model", folder / name, "--train-file",
         folder / "texts.txt", "--nproc", "2", "--batch-size", "2", "--max-steps", "3",
         "--save-strategy", "no", "--output-dir", folder / (name + std::string("_out"))});
    EXPECT_EQ(run.code, 0) << run.error;
    EXPECT_TRUE(run.said(packs ? "(bfd_split)" : "(none)")) << run.error;
    EXPECT_EQ(run.said("does not keep the texts of a row apart"), !packs) << run.error;
  }
  const ProgramRun made = run_program(
      {"hasten", "generate", "--model", folder / "writer_out", "a good", "--max-new-tokens", "3"});
  EXPECT_EQ(made.code, 0) << made.error;
  EXPECT_EQ(made.times("a graph without a cache"), 1u) << made.error;
}

TEST(ExportedPrograms, ExportStartsPythonWithTheUsersArguments) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "python3",
                        "#!/bin/sh\necho \"$1|$2|$3 $4 $5 $6 $7 $8\"\nexit 3\n");
  std::filesystem::permissions(folder / "python3", std::filesystem::perms::owner_all);
  const std::vector<std::string> arguments{"hasten", "export",    "--model",      "m",
                                           "--task", "fill-mask", "--output-dir", "out"};
  const ProgramRun run = run_program(
      arguments, {.environment = {{"PATH", folder.path().string() + ":/bin:/usr/bin"}}});
  EXPECT_EQ(run.code, 3) << run.error;
  EXPECT_TRUE(run.out.starts_with("-c|\"\"\"Exports a model of transformers once")) << run.out;
  EXPECT_TRUE(run.out.ends_with("|--model m --task fill-mask --output-dir out\n")) << run.out;
  const ProgramRun without = run_program(arguments, {.environment = {{"PATH", "/nowhere"}}});
  EXPECT_EQ(without.code, 2);
  EXPECT_TRUE(without.said("Fix: install it with torch and transformers")) << without.error;
}

} // namespace hasten::exported_programs_test
