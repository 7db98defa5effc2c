// Starts the built programs as a user does: commands that do not use LibTorch, and errors for bad
// input.
#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/small_reviews.h"

namespace hasten {

using testing_support::ProgramRun;
using testing_support::run_program;
using testing_support::small_reviews;
using testing_support::TemporaryFolder;
using testing_support::train_arguments;

TEST(Programs, HastenDoesNotMapLibTorch) {
  // Reads the loader's own list of what it would map.
  const ProgramRun run =
      run_program({"hasten", "--version"}, {.environment = {{"LD_TRACE_LOADED_OBJECTS", "1"}}});
  EXPECT_NE(run.out.find("libc.so"), std::string::npos) << run.out;
  // Only names: an address (0x00007f66b3ac1000) may hold the letters of c10.
  EXPECT_EQ(run.out.find("libtorch"), std::string::npos) << run.out;
  EXPECT_EQ(run.out.find("libc10"), std::string::npos) << run.out;
}

TEST(Programs, HelpAnswersOnStdoutWithCodeZeroWithin50Milliseconds) {
  using Arguments = std::vector<std::string>;
  for (const Arguments& arguments : {Arguments{"hasten"},
                                     {"hasten", "--help"},
                                     {"hasten", "--version"},
                                     {"hasten", "train", "--help"},
                                     {"hasten", "launch", "--help"}}) {
    double best = 1;
    for (int attempt = 0; attempt < 5; ++attempt) { // other processes use the machine
      const ProgramRun run = run_program(arguments);
      EXPECT_EQ(run.code, 0);
      EXPECT_FALSE(run.out.empty());
      EXPECT_EQ(run.error, "");
      best = std::min(best, run.seconds);
    }
    EXPECT_LT(best, 0.05);
  }
}

TEST(Programs, MistakesOnTheCommandLineEndWithCode2AndOneLine) {
  const ProgramRun unknown = run_program({"hasten", "trian"});
  EXPECT_EQ(unknown.code, 2);
  EXPECT_EQ(unknown.out, "");
  EXPECT_EQ(
      unknown.error,
      "error: [cli::hasten] unknown command: trian. Expected train, predict, "
      "generate, eval, plan, estimate-memory, compare, state, merge, export, tokenizer, synth, download, report, "
      "launch or env. Fix: write hasten train.\n");
  EXPECT_EQ(run_program({"hasten", "env", "--jsn"}).code, 2);
}

TEST(Programs, InputThatNeedsNoTorchIsRefusedBeforeAnythingIsWritten) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.csv", small_reviews(4));
  write_file_atomically(folder / "empty.csv", "");
  std::filesystem::create_directories(folder / "old/checkpoint-7");
  std::filesystem::create_directories(folder / "weights");
  struct Case {
    std::vector<std::string> arguments;
    std::string message;
  };
  const std::string train = folder / "train.csv";
  const auto with = [&](const std::string& file, const std::string& model) {
    return std::vector<std::string>{"hasten",  "train", "--train-file", file,
                                    "--model", model,   "--output-dir", folder / "out"};
  };
  const Case cases[] = {
      {with(folder / "none.csv", "bert-tiny"), "none.csv does not exist"},
      {with(folder / "empty.csv", "bert-tiny"), "empty.csv is empty"},
      {with(folder.path(), "bert-tiny"), " is a folder"},
      {with(train, "bert-tyni"), "Fix: write bert-tiny"},
      {with(train, folder / "weights"), "is a folder without config.json"},
      {train_arguments(folder.path(), {"--eval-file", folder / "none.tsv"}),
       "--eval-file=" + (folder / "none.tsv").string() + " does not exist"},
      {{"hasten", "train", "--train-file", train, "--model", "bert-tiny", "--output-dir",
        folder / "old"},
       "old holds another run: checkpoint-7"},
      {{"hasten", "train", "--train-file", train, "--model", "bert-tiny", "--output-dir",
        train + "/out"},
       "is inside a file"},
      {{"hasten", "predict", "--model", folder / "out", "a text"}, "out does not exist"},
      {{"hasten", "eval", "--model", folder / "weights", "--file", train},
       "is a folder without config.json"},
  };
  for (const Case& bad : cases) {
    const ProgramRun run = run_program(bad.arguments);
    EXPECT_EQ(run.code, 2) << run.error;
    EXPECT_TRUE(run.said(bad.message)) << bad.message << "\n" << run.error;
    EXPECT_EQ(run.out, "");
    EXPECT_EQ(std::count(run.error.begin(), run.error.end(), '\n'), 1);
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "out"));
}

TEST(Programs, PlanPrintsTheCurveAndWritesPlanAndPicture) {
  const TemporaryFolder folder;
  const ProgramRun run =
      run_program({"hasten", "plan", "--model", "bert-tiny", "--batch", "2x16", "--budget", "20MB",
                   "--json", folder / "plan.json", "--svg", folder / "curve.svg"});
  EXPECT_EQ(run.code, 0) << run.error;
  for (const char* line : {"keep everything", "sqrt(n) regions", "each block", "observed"}) {
    EXPECT_NE(run.out.find(line), std::string::npos) << run.out;
  }
  const auto plan = nlohmann::json::parse(read_file(folder / "plan.json"));
  EXPECT_EQ(plan.at("blocks").size(), 2);
  EXPECT_LE(plan.at("observed_peak_bytes").get<int64_t>(), plan.at("budget_bytes").get<int64_t>());
  EXPECT_EQ(read_file(folder / "curve.svg").rfind("<svg", 0), 0);
}

TEST(Programs, NprocInsideAWorldNamesBothOnce) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "train.csv", small_reviews(4));
  for (const auto& [local_rank, lines] : {std::pair("0", 1), {"1", 0}}) {
    const ProgramRun run = run_program(train_arguments(folder.path(), {"--nproc", "2"}),
                                       {.environment = {{"RANK", local_rank},
                                                        {"WORLD_SIZE", "2"},
                                                        {"LOCAL_RANK", local_rank},
                                                        {"LOCAL_WORLD_SIZE", "2"},
                                                        {"MASTER_ADDR", "127.0.0.1"},
                                                        {"MASTER_PORT", "1"}}});
    EXPECT_EQ(run.code, 2);
    EXPECT_EQ(run.said("--nproc=2 inside the world of another launcher: WORLD_SIZE=2"), lines == 1);
    EXPECT_EQ(std::count(run.error.begin(), run.error.end(), '\n'), lines);
  }
}

TEST(Programs, LaunchGivesEachRankItsPlaceAndTheFirstFailuresCode) {
  const ProgramRun good = run_program({"hasten", "launch", "--nproc", "2", "/bin/sh", "-c",
                                       "printf '%s\\n' \"$RANK/$WORLD_SIZE\""});
  EXPECT_EQ(good.code, 0) << good.error;
  EXPECT_NE(good.out.find("0/2\n"), std::string::npos) << good.out;
  EXPECT_NE(good.out.find("1/2\n"), std::string::npos) << good.out;
  const ProgramRun failed = run_program({"hasten", "launch", "--nproc", "2", "/bin/sh", "-c",
                                         "[ $RANK = 0 ] && exec sleep 1; exit 7"});
  EXPECT_EQ(failed.code, 7);
  EXPECT_TRUE(failed.said("rank 1 exited with code 7 first")) << failed.error;
}

TEST(Programs, BashCompletesByTheScript) {
  const std::string bash = "/bin/bash";
  const auto program = std::filesystem::read_symlink("/proc/self/exe").parent_path() / "hasten";
  const std::string script = run_program({"hasten", "completion", "bash"}).out;
  const TemporaryFolder folder;
  write_file_atomically(folder / "hasten.bash", script);
  const ProgramRun checked = run_program({bash, "-n", (folder / "hasten.bash").string()});
  EXPECT_EQ(checked.code, 0) << checked.error;
  const ProgramRun run =
      run_program({bash, "-c",
                   "source \"$1\"; COMP_WORDS=(\"$0\" train --strategy z); COMP_CWORD=3; _hasten; "
                   "echo \"${COMPREPLY[@]}\"; COMP_WORDS=(\"$0\" pr); COMP_CWORD=1; _hasten; "
                   "echo \"${COMPREPLY[@]}\"",
                   program.string(), (folder / "hasten.bash").string()});
  EXPECT_EQ(run.out, "zero1 zero2\npredict\n") << run.error;
}

/// Runs the shell's program with "hasten" in PATH, its completion's script and the file train.csv.
/// Nothing if this machine does not have the shell.
static std::optional<ProgramRun> complete_by(const std::string& shell, const std::string& flag,
                                             const std::string& program) {
  if (run_program({"/bin/sh", "-c", "command -v " + shell}).code != 0) {
    return std::nullopt;
  }
  const TemporaryFolder folder;
  write_file_atomically(folder / "script", run_program({"hasten", "completion", shell}).out);
  write_file_atomically(folder / "program", program);
  write_file_atomically(folder / "train.csv", "");
  const auto bin = std::filesystem::read_symlink("/proc/self/exe").parent_path().string();
  return run_program(
      {"/bin/sh", "-c",
       "cd \"$0\" && PATH=$1:$PATH HOME=$0 TERM=xterm exec " + shell + " " + flag + " ./program",
       folder.path().string(), bin});
}

TEST(Programs, FishCompletesByTheScript) {
  const auto run = complete_by("fish", "--no-config", R"(source script
for line in 'hasten tr' 'hasten train --report-to' 'hasten train --config=tr' 'hasten train tr'
  complete -C $line | string replace -r '\t.*' ''
end
)");
  if (!run) {
    GTEST_SKIP() << "no fish in PATH (Debian: fish)";
  }
  EXPECT_EQ(run->out, "train\n--report-to\n--config=train.csv\ntrain.csv\n") << run->error;
}

TEST(Programs, ZshCompletesByTheScript) {
  // An interactive zsh, because only its line editor completes.
  const auto run = complete_by("zsh", "-f", R"(zmodload zsh/zpty
zpty z zsh -f -i
zpty -w z 'PROMPT= ; autoload -Uz compinit; compinit -D -u; source ./script'
zpty -w z 'show() { print -r -- "<$BUFFER>"; BUFFER=; zle accept-line }; zle -N show'
zpty -w z 'bindkey "^T" show; print rea""dy'
zpty -r z text '*ready*'
for line in 'hasten tr' 'hasten train --report-to' 'hasten train --config=tr' 'hasten train tr'; do
  zpty -w -n z "$line"$'\t\C-T'
  zpty -r z text '*<*>*'
  print -r -- "${${text##*<}%%>*}"
done
)");
  if (!run) {
    GTEST_SKIP() << "no zsh in PATH (Debian: zsh)";
  }
  EXPECT_EQ(run->out,
            "hasten train \nhasten train --report-to \nhasten train --config=train.csv \n"
            "hasten train train.csv \n")
      << run->error;
}

TEST(Programs, EnvMeasuresWhatMovesTensorsBetweenProcesses) {
  const ProgramRun text = run_program({"hasten", "env", "--nproc", "2"});
  ASSERT_EQ(text.code, 0) << text.error;
  EXPECT_EQ(text.error, "");
  for (const char* line :
       {"\ngloo between 2 processes: barrier ", "\n  all_reduce      alpha (latency)",
        "\n  reduce_scatter ", "\n  all_gather ", "\n  broadcast "}) {
    EXPECT_NE(text.out.find(line), std::string::npos) << text.out;
  }
  EXPECT_EQ(text.out.rfind("hasten ", 0), 0u) << text.out;
  EXPECT_EQ(text.out.find("\nhasten "), std::string::npos) << text.out; // rank 0 alone prints
  const ProgramRun run = run_program({"hasten", "env", "--nproc", "2", "--json"});
  ASSERT_EQ(run.code, 0) << run.error;
  const auto models = nlohmann::json::parse(run.out).at("communication");
  ASSERT_GE(models.size(), 1u);
  EXPECT_EQ(models.back().at("backend"), "gloo");
  for (const auto& model : models) {
    EXPECT_EQ(model.at("world_size"), 2);
    EXPECT_GT(model.at("barrier_seconds").get<double>(), 0);
    EXPECT_EQ(model.at("operations").size(), 4u);
    for (const auto& operation : model.at("operations")) {
      EXPECT_GE(operation.at("alpha_seconds").get<double>(), 0);
      EXPECT_LT(operation.at("alpha_seconds").get<double>(), 1);
      EXPECT_GE(operation.at("beta_seconds_per_byte").get<double>(), 0);
      EXPECT_LT(operation.at("beta_seconds_per_byte").get<double>(), 1e-6);
      EXPECT_GE(operation.at("points").size(), 1u);
    }
  }
  EXPECT_FALSE(nlohmann::json::parse(run_program({"hasten", "env", "--json"}).out)
                   .contains("communication"));
}

TEST(Programs, WaitingThreadsSleepUnlessTheUserSaysOtherwise) {
  const std::vector<std::string> show = {
      "hasten", "launch", "--nproc", "1", "/bin/sh", "-c", "echo $OMP_WAIT_POLICY"};
  EXPECT_EQ(run_program(show).out, "passive\n");
  EXPECT_EQ(run_program(show, {.environment = {{"OMP_WAIT_POLICY", "active"}}}).out, "active\n");
}

} // namespace hasten
