#include <gtest/gtest.h>

#include <csignal>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>

#include "checks.h"
#include "commands.h"
#include "hasten/base/error.h"
#include "hasten/base/world.h"

namespace hasten {

namespace detail {

std::vector<std::string> words_of(const std::string& line) {
  std::istringstream stream(line);
  std::vector<std::string> words;
  std::string word;
  while (stream >> word) {
    words.push_back(word);
  }
  return words;
}

template <typename T>
T parsed(const std::string& line) {
  return std::get<T>(parse_command_line(words_of(line)));
}

std::string parse_error(const std::string& line) {
  try {
    parse_command_line(words_of(line));
  } catch (const InputError& error) {
    return error.what();
  }
  return "no error";
}

const std::string kTrain = "train --model bert-tiny --train-file t.csv --output-dir out ";

/// Expects that each line is an error that begins with its message.
void expect_mistakes(const std::vector<std::pair<std::string, std::string>>& cases) {
  for (const auto& [line, message] : cases) {
    const std::string error = parse_error(line);
    EXPECT_EQ(error.substr(0, message.size()), message) << line << "\n" << error;
  }
}

} // namespace detail

TEST(CommandLine, TrainTakesEveryTrainingArgumentAsAFlag) {
  // The list is the names of TrainingArguments' fields. A field without a flag fails here.
  const nlohmann::json fields = TrainingArguments{};
  const std::string help = detail::parsed<Answer>("train --help").text;
  for (const auto& [name, value] : fields.items()) {
    std::string flag = "--" + name;
    std::replace(flag.begin(), flag.end(), '_', '-');
    EXPECT_NE(help.find("  " + flag), std::string::npos) << flag;
  }
}

TEST(CommandLine, TrainFlagsReachTheirFields) {
  const auto command = detail::parsed<TrainCommand>(
      "train --model m --train-file t.tsv --output-dir o --text-column=c "
      "--label-column l --delimiter tab --no-header --filter a=b --filter c=[d] "
      "--eval-split 0.25 --nproc 3 --epochs 1.5 --max-steps -1 --lr 1e-4 "
      "--batch-size 16 --eval-strategy steps --save-strategy no "
      "--train_sampling_strategy random --data-seed 7 --greater-is-better true "
      "--overwrite_output_dir --max-train-rows 10 --max-eval-rows 20 --optim lion "
      "--optim-args beta1=0.8 --lr-scheduler-type cosine_with_restarts "
      "--lr-scheduler-kwargs {\"num_cycles\":2} --max-grad-value 0.5 "
      "--grad-norm-type inf --log-gradient-norms layer --auto-find-batch-size "
      "--memory-limit 2GB --backend=gloo");
  EXPECT_EQ(command.model, "m");
  EXPECT_EQ(command.train_file, "t.tsv");
  EXPECT_EQ(command.table.text_column, "c");
  EXPECT_EQ(command.table.label_column, "l");
  EXPECT_EQ(command.table.delimiter, '\t');
  EXPECT_TRUE(command.table.no_header);
  EXPECT_EQ(command.table.filters, (std::vector<std::string>{"a=b", "c=[d]"}));
  EXPECT_EQ(command.eval_split, 0.25);
  EXPECT_EQ(command.nproc, 3);
  EXPECT_TRUE(command.nproc_given);
  EXPECT_EQ(detail::parsed<TrainCommand>(detail::kTrain + " --nproc-per-node cpu").nproc,
            allowed_cores());
  EXPECT_EQ(command.max_train_rows, 10);
  EXPECT_EQ(command.max_eval_rows, 20);
  const TrainingArguments& arguments = command.arguments;
  EXPECT_EQ(arguments.output_dir, "o");
  EXPECT_TRUE(arguments.overwrite_output_dir);
  EXPECT_EQ(arguments.num_train_epochs, 1.5);
  EXPECT_EQ(arguments.max_steps, -1);
  EXPECT_EQ(arguments.learning_rate, 1e-4);
  EXPECT_EQ(arguments.per_device_train_batch_size, 16);
  EXPECT_EQ(arguments.optim, OptimizerType::lion);
  EXPECT_EQ(arguments.optim_args, "beta1=0.8");
  EXPECT_EQ(arguments.lr_scheduler_type, "cosine_with_restarts");
  EXPECT_EQ(arguments.lr_scheduler_kwargs, "{\"num_cycles\":2}");
  EXPECT_EQ(arguments.max_grad_value, 0.5);
  EXPECT_EQ(arguments.grad_norm_type, GradNormType::inf);
  EXPECT_EQ(arguments.log_gradient_norms, LogGradientNorms::layer);
  EXPECT_TRUE(arguments.auto_find_batch_size);
  EXPECT_EQ(arguments.memory_limit, "2GB");
  EXPECT_EQ(arguments.eval_strategy, IntervalStrategy::steps);
  EXPECT_EQ(arguments.save_strategy, SaveStrategy::no);
  EXPECT_EQ(arguments.train_sampling_strategy, SamplingStrategy::random);
  EXPECT_EQ(arguments.data_seed, 7u);
  EXPECT_EQ(arguments.greater_is_better, true);
  EXPECT_FALSE(detail::parsed<TrainCommand>(detail::kTrain).nproc_given);
}

TEST(CommandLine, EstimateMemoryFlagsReachTheirFields) {
  const auto command = detail::parsed<EstimateMemoryCommand>(
      "estimate-memory --model bert-mini --batch 4x64 --optim sgd --optim-args "
      "momentum=0.9 --strategy local_sgd --nproc 3 --vocab-size 99 "
      "--num-labels 5 --gradient-accumulation-steps 2 --json");
  EXPECT_EQ(command.model, "bert-mini");
  EXPECT_EQ(command.rows, 4);
  EXPECT_EQ(command.tokens, 64);
  EXPECT_EQ(command.arguments.optim, OptimizerType::sgd);
  EXPECT_EQ(command.arguments.optim_args, "momentum=0.9");
  EXPECT_EQ(command.strategy, "local_sgd");
  EXPECT_EQ(command.nproc, 3);
  EXPECT_EQ(command.vocab_size, 99);
  EXPECT_EQ(command.num_labels, 5);
  EXPECT_EQ(command.arguments.gradient_accumulation_steps, 2);
  EXPECT_TRUE(command.json);
}

TEST(CommandLine, CompareFlagsReachTheirFields) {
  const auto command = detail::parsed<CompareCommand>(
      "compare --model bert-mini --nproc-per-node 3 --strategies fsdp,ddp "
      "--memory-limit 2G --max-length 64 --mixed-precision bf16 "
      "--gradient-accumulation-steps 2 --max-batch-size 16 --steps 7 --json f --backend gloo "
      "--gradient-checkpointing");
  EXPECT_EQ(command.nproc, 3);
  EXPECT_EQ(command.strategies, (std::vector{Strategy::fsdp, Strategy::ddp}));
  EXPECT_EQ(command.memory_limit_bytes, int64_t{2} << 30);
  EXPECT_EQ(command.arguments.max_length, 64);
  EXPECT_EQ(command.arguments.effective_precision(), Precision::bf16);
  EXPECT_EQ(command.arguments.gradient_accumulation_steps, 2);
  EXPECT_EQ(command.arguments.gradient_checkpointing.text(), "full");
  EXPECT_EQ(command.max_batch_size, 16);
  EXPECT_EQ(command.steps, 7);
  EXPECT_EQ(command.json, "f");
  EXPECT_EQ(
      detail::parsed<CompareCommand>("compare --model m --nproc 4 --strategies hsdp --shard-size 2")
          .arguments.shard_size,
      2);
  EXPECT_EQ(detail::parsed<CompareCommand>("compare --model m").strategies,
            (std::vector{Strategy::ddp, Strategy::zero2, Strategy::fsdp}));
}

TEST(CommandLine, FlagsLeftOutKeepTrainingArgumentsDefaults) {
  TrainingArguments expected;
  expected.output_dir = "out";
  expected.learning_rate = 3e-4; // the default of a model shape
  EXPECT_EQ(nlohmann::json(detail::parsed<TrainCommand>(detail::kTrain).arguments),
            nlohmann::json(expected));
}

TEST(CommandLine, WithoutFilesATenthIsForEvaluationUnlessSaidOtherwise) {
  const std::string train = "train --model bert-tiny --output-dir o ";
  EXPECT_EQ(detail::parsed<TrainCommand>(train).eval_split, 0.1);
  EXPECT_EQ(detail::parsed<TrainCommand>(train + "--eval-split 0").eval_split, 0);
  EXPECT_EQ(detail::parsed<TrainCommand>(train + "--train-data t.jsonl").eval_split, 0);
  EXPECT_EQ(detail::parsed<TrainCommand>(train + "--train-data t.jsonl").train_file, "t.jsonl");
}

TEST(CommandLine, EachMistakeNamesItsFlagAndWhatWasExpected) {
  const std::string& train = detail::kTrain;
  const std::pair<std::string, std::string> cases[] = {
      {"estimate-memory --model bert-base --strategy fsd",
       "[cli::estimate-memory] --strategy=fsd. Expected ddp, zero1, zero2"},
      {train + " --strategy fsd",
       "[cli::train] --strategy=fsd. Expected one of ddp, fsdp, hsdp, zero1,"},
      {train + " --backend glo",
       "[cli::train] --backend=glo. Expected one of auto, gloo, nccl, shm. Fix: write gloo."},
      {"compare --model m --ddp-backend mpi",
       "[cli::compare] --backend=mpi. Expected one of auto, gloo, nccl, shm."},
      {"plan --model bert-base --batch 8x8 --task fill-masks",
       "[cli::plan] --task=fill-masks. Expected one of text-classification, token-classification, "
       "fill-mask, text-generation. Fix: write fill-mask."},
      {"estimate-memory --model bert-base --batch 8",
       "[cli::estimate-memory] --batch=8. Expected samples and tokens"},
      {"trian",
       "[cli::hasten] unknown command: trian. Expected train, predict, generate, eval, "
       "plan, estimate-memory, compare, state, merge, export, tokenizer, synth, download, report, launch or env. "
       "Fix: write hasten train."},
      {train + "--learning-rte 1e-4",
       "[cli::train] unknown flag: --learning-rte. Fix: write --learning-rate."},
      {train + "--zzzzzzzz=1",
       "[cli::train] unknown flag: --zzzzzzzz. Fix: see hasten train --help."},
      {train + "stray", "[cli::train] not a flag: \"stray\". Fix: see hasten train --help."},
      {train + "--seed 1 --seed 2", "[cli::train] --seed is given 2 times."},
      {train + "--seed", "[cli::train] --seed has no value. Expected --seed N."},
      {train + "--learning-rate fast", "[cli::train] --learning-rate=fast. Expected a number."},
      {train + "--learning-rate -1", "[cli::train] --learning-rate=-1.0. Expected 0 or more."},
      {train + "--batch-size 0",
       "[cli::train] --per-device-train-batch-size=0. Expected 1 to 16777216."},
      {train + "--batch-size 1.5",
       "[cli::train] --per-device-train-batch-size=1.5. Expected a whole number."},
      {train + "--optim adamm",
       "[cli::train] --optim=adamm. Expected one of adafactor, adam, adamw, adamw_8bit, "
       "adamw_torch, adamw_torch_fused, lion, sgd. Fix: write adam."},
      {train + "--lr-scheduler-type cosin",
       "[cli::train] --lr-scheduler-type=cosin. Expected one of constant, constant_with_warmup, "
       "cosine, cosine_with_min_lr, cosine_with_restarts, inverse_sqrt, linear, one_cycle, "
       "polynomial, reduce_lr_on_plateau, warmup_stable_decay. Fix: write cosine."},
      {train + "--lr-scheduler-kwargs 2",
       "[cli::train] --lr-scheduler-kwargs=\"2\". Expected a JSON object, e.g. "
       "{\"num_cycles\": 2}."},
      {train + "--eval-strategy never",
       "[cli::train] --eval-strategy=never. Expected one of epoch, no, steps."},
      {train + "--load-best-model-at-end --eval-strategy no",
       "[cli::train] --load-best-model-at-end=true without evaluation: --eval-strategy=no."},
      {train + "--nproc 0", "[cli::train] --nproc=0. Expected 1 to 65536, auto, cpu or gpu."},
      {train + "--eval-split 1", "[cli::train] --eval-split=1. Expected a fraction"},
      {train + "--eval-split 0.1 --eval-file e.csv",
       "[cli::train] --eval-file=e.csv and --eval-split=0.1 exclude each other."},
      {train + "--delimiter ab", "[cli::train] --delimiter=ab. Expected one character, or tab."},
      {"train --train-file t.csv --output-dir out",
       "[cli::train] --model is missing. Expected --model FOLDER|NAME|SHAPE."},
      {train + "--dataloader-num-workers -1",
       "[cli::train] --dataloader-num-workers=-1. Expected 0 to 1024."},
      {"train --train-fil t.csv",
       "[cli::train] unknown flag: --train-fil. Fix: write --train-file."},
      {"train --model m --tokenizer t --train-file t.csv --output-dir o",
       "[cli::train] --tokenizer=t with --model=m."},
      {"predict --model m", "[cli::predict] no text and no --file."},
      {"predict --model m --file f t", "[cli::predict] --file=f together with a text."},
      {"predict --model m t --output o.txt",
       "[cli::predict] --output=o.txt. Expected a file name that ends in .csv or .jsonl."},
      {"predict --model m t --with-logits", "[cli::predict] --with-logits without JSON."},
      {"generate --model m", "[cli::generate] no prompt and no --file."},
      {"generate --model m --file f t", "[cli::generate] --file=f together with a prompt."},
      {"generate --model m t --top-k -1", "[cli::generate] --top-k=-1. Expected 0 to 16777216."},
      {"generate --model m t --output o.csv",
       "[cli::generate] --output=o.csv. Expected a file name that ends in .jsonl."},
      {"predict --model m -x", "[cli::predict] unknown flag: -x."},
      {"eval --model m", "[cli::eval] --file is missing."},
      {"launch --nproc 2", "[cli::launch] no program."},
      {"launch program", "[cli::launch] --nproc is missing."},
      {"launch --nprocs 2 program", "[cli::launch] unknown flag: --nprocs. Fix: write --nproc."},
      {"env --jsn", "[cli::env] unknown flag: --jsn. Fix: write --json."},
      {"env --nproc 0", "[cli::env] --nproc=0. Expected 1 to 65536"},
  };
  detail::expect_mistakes({std::begin(cases), std::end(cases)});
}

TEST(CommandLine, MistakesOfTheCommandsThatMakeDataAreNamedToo) {
  detail::expect_mistakes(
      {{"export --model m --task fill-mask",
        "[cli::export] --model, --task or --output-dir is missing. Expected --model, --task and "
        "--output-dir, or --describe alone."},
       {"export --model m --task fill-mask --output-dir o --describe g",
        "[cli::export] --describe with --model."},
       {"tokenizer", "[cli::tokenizer] the action is missing."},
       {"tokenizer train --output o", "[cli::tokenizer] a file is missing."},
       {"tokenizer train a.txt",
        "[cli::tokenizer] train with --output= and --tokenizer=. Expected --output FOLDER alone."},
       {"tokenizer encode a.txt --output o", "[cli::tokenizer] encode with --output=o"},
       {"synth reviews --rows 0", "[cli::synth] --rows=0. Expected 1 to 10000000."},
       {"synth poems", "[cli::synth] kind of data: poems. Expected reviews"},
       {"synth reviews --output r.xml", "[cli::synth] --output=r.xml."}});
}

TEST(CommandLine, CompareRefusesWhatCannotBeCompared) {
  const std::pair<std::string, std::string> cases[] = {
      {"compare --model m --strategies ddp,fsd",
       "[cli::compare] --strategies=ddp,fsd: \"fsd\" is not a strategy. Expected one of ddp, fsdp, "},
      {"compare --model m --strategies ddp,zero2,ddp",
       "[cli::compare] --strategies=ddp,zero2,ddp: ddp twice."},
      {"compare --model m --strategies ddp,",
       "[cli::compare] --strategies=ddp,: \"\" is not a strategy."},
      {"compare --model m --memory-limit 2X",
       "[cli::compare] --memory-limit=2X. Expected bytes above 0, e.g. 2G"},
      {"compare --model m --nproc-per-node 1",
       "[cli::compare] --nproc=1: strategies differ only on several "
       "processes. Expected 2 or more."},
      {"compare --model m --gradient-checkpointing budget:50%",
       "[cli::compare] --gradient-checkpointing=budget:50%: a budget needs"},
      {"compare --model m --shard-size 2 --nproc 4",
       "[cli::compare] --shard-size=2. Expected a divisor of --nproc, with strategy hsdp only"},
      {"compare --model m --shard-size 2 --nproc 5 --strategies ddp,hsdp",
       "[cli::compare] --shard-size=2. Expected a divisor of --nproc, with strategy hsdp only"},
  };
  for (const auto& [line, message] : cases) {
    const std::string error = detail::parse_error(line);
    EXPECT_EQ(error.substr(0, message.size()), message) << line << "\n" << error;
  }
}

TEST(CommandLine, TheFlagsOfLocalSGDNeedItAndEachOther) {
  const std::string line = "train --model m --output-dir o ", steps = line + "--local-sgd-steps 4 ";
  std::vector<std::pair<std::string, std::string>> cases{
      {steps + "--local-sgd-delay 5", "--local-sgd-delay=5. Expected 0 to --local-sgd-steps=4."},
      {steps + "--local-sgd-outer adam",
       "--local-sgd-outer=adam. Expected one of diloco, none, slowmo."},
      {steps + "--local-sgd-outer-lr 1",
       "--local-sgd-outer-lr=1.0. Expected a number above 0, with --local-sgd-outer=slowmo or diloco."},
      {steps + "--local-sgd-outer slowmo --local-sgd-outer-lr 0", "--local-sgd-outer-lr=0"},
      {steps + "--local-sgd-outer slowmo --local-sgd-outer-momentum 1",
       "--local-sgd-outer-momentum=1.0. Expected 0 or more and below 1"},
      {steps + "--local-sgd-inner-steps 3",
       "--local-sgd-inner-steps=3. Expected 0, or a divisor of --local-sgd-steps=4."},
      {steps + "--local-sgd-group-size 2",
       "--local-sgd-group-size=2. Expected 0 without --local-sgd-inner-steps"}};
  for (const char* flag :
       {"--local-sgd-post-local-start 1", "--local-sgd-delay 1", "--local-sgd-outer slowmo",
        "--local-sgd-outer-lr 1", "--local-sgd-outer-momentum 0", "--local-sgd-inner-steps 1",
        "--local-sgd-group-size 1", "--local-sgd-driver"}) {
    const std::string text = flag;
    cases.emplace_back(line + flag, text.substr(0, text.find(' ')) + "=");
  }
  for (const auto& [arguments, message] : cases) {
    const std::string error = detail::parse_error(arguments);
    EXPECT_EQ(error.find("[cli::train] " + message), 0u) << arguments << "\n" << error;
  }
}

TEST(CommandLine, PredictTextsKeepTheirOrderAndMayLookLikeFlags) {
  const auto command = std::get<PredictCommand>(
      parse_command_line({"predict", "[a,b]", "--model", "m", "second text", "--", "--json", "-"}));
  EXPECT_EQ(command.texts, (std::vector<std::string>{"[a,b]", "second text", "--json", "-"}));
  EXPECT_FALSE(command.json);
  EXPECT_EQ(detail::parsed<PredictCommand>("predict --model m -").texts,
            std::vector<std::string>{"-"});
}

TEST(CommandLine, LaunchLeavesTheProgramsOwnArgumentsAlone) {
  const auto program = [](const std::string& line) {
    return detail::parsed<LaunchCommand>("launch " + line).argv;
  };
  using Words = std::vector<std::string>;
  EXPECT_EQ(program("--nproc 2 ./p --nproc 5 --some_flag -h -- x"),
            (Words{"./p", "--nproc", "5", "--some_flag", "-h", "--", "x"}));
  EXPECT_EQ(program("--nproc 2 -- --odd -- x"), (Words{"--odd", "--", "x"}));
  detail::expect_mistakes({{"env -- --json", "[cli::env] not a flag: \"--json\"."}});
  EXPECT_EQ(program("--nproc=2 -- ./p -- x"), (Words{"./p", "--", "x"}));
  EXPECT_EQ(detail::parsed<LaunchCommand>("launch --nproc 4 ./p --nproc 5").nproc, 4);
  EXPECT_TRUE(detail::parsed<LaunchCommand>("launch --nproc 4 --keep-going ./p").keep_going);
  EXPECT_FALSE(detail::parsed<LaunchCommand>("launch --nproc 4 ./p --keep-going").keep_going);
}

TEST(CommandLine, OutputFlagsOfLaunchAndTrainAreTorchruns) {
  const auto launched = detail::parsed<LaunchCommand>(
      "launch --nproc 2 --log-dir logs --redirects 1:3 --tee 0:1 ./p -- x");
  EXPECT_EQ(launched.logs.log_dir, "logs");
  EXPECT_TRUE(launched.logs.redirects.has(1, Std::err));
  EXPECT_FALSE(launched.logs.redirects.has(0, Std::out));
  EXPECT_TRUE(launched.logs.tee.has(0, Std::out));
  EXPECT_FALSE(launched.logs.tee.has(0, Std::err));
  EXPECT_EQ(launched.argv, (std::vector<std::string>{"./p", "--", "x"}));
  const auto trained =
      detail::parsed<TrainCommand>(detail::kTrain + "--nproc 2 --log_dir logs --tee 2");
  EXPECT_EQ(trained.logs.log_dir, "logs");
  EXPECT_TRUE(trained.logs.tee.has(1, Std::err));
  EXPECT_FALSE(detail::parsed<TrainCommand>(detail::kTrain).logs.any());
  const std::pair<std::string, std::string> mistakes[] = {
      {"launch --nproc 2 --redirects 3 program",
       "[cli::launch] --redirects without --log-dir. Expected --log-dir"},
      {"launch --nproc 2 --tee 2:3 program",
       "[cli::launch] streams of rank 2 with --nproc=2. Expected ranks below"},
      {detail::kTrain + "--tee both",
       "[cli::train] --tee=both. Expected 0, 1 (stdout), 2 (stderr) or 3"},
  };
  for (const auto& [line, message] : mistakes) {
    EXPECT_EQ(detail::parse_error(line).substr(0, message.size()), message);
  }
}

TEST(CommandLine, SignalsFilterAndRestartsOfLaunchAndTrainAreTorchruns) {
  const std::string flags =
      "--local-ranks-filter 0,2 --signals-to-handle SIGUSR1,SIGTERM "
      "--max-restarts 0 --nproc 3 ";
  const auto launched = detail::parsed<LaunchCommand>("launch " + flags + "./p --max-restarts 3");
  EXPECT_EQ(launched.logs.local_ranks_filter, (std::set<int>{0, 2}));
  EXPECT_EQ(launched.signals_to_handle, (std::vector<int>{SIGUSR1, SIGTERM}));
  EXPECT_EQ(launched.argv, (std::vector<std::string>{"./p", "--max-restarts", "3"}));
  const auto trained = detail::parsed<TrainCommand>(detail::kTrain + flags);
  EXPECT_EQ(trained.logs.local_ranks_filter, launched.logs.local_ranks_filter);
  EXPECT_EQ(trained.signals_to_handle, launched.signals_to_handle);
  EXPECT_TRUE(trained.logs.any());
  EXPECT_EQ(detail::parsed<LaunchCommand>("launch --nproc 2 ./p").signals_to_handle,
            LaunchOptions{}.signals_to_handle);
  detail::expect_mistakes(
      {{"launch --nproc 2 --max-restarts 3 ./p",
        "[cli::launch] --max-restarts=3. Expected 0, because hasten does not restart ranks. Fix: "
        "start the run again; hasten train resumes it with --resume-from-checkpoint latest."},
       {detail::kTrain + "--max-restarts 1", "[cli::train] --max-restarts=1. Expected 0,"},
       {"launch --nproc 2 --local-ranks-filter 0,2 ./p",
        "[cli::launch] --local-ranks-filter has rank 2 with --nproc=2. Expected ranks below"},
       {"launch --nproc 2 --local-ranks-filter 0,x ./p",
        "[cli::launch] --local-ranks-filter=0,x. Expected numbers, e.g. 0,1."},
       {"launch --nproc 2 --signals-to-handle SIGTERM,SIGKILL ./p",
        "[cli::launch] --signals-to-handle=SIGTERM,SIGKILL. Expected names of signals"},
       {detail::kTrain + "--signals-to-handle TERM",
        "[cli::train] --signals-to-handle=TERM. Expected names of signals"}});
}

TEST(CommandLine, GradientCheckpointingIsBareOrSaysHow) {
  const auto text = [](const std::string& flags) {
    return detail::parsed<TrainCommand>(detail::kTrain + flags)
        .arguments.gradient_checkpointing.text();
  };
  EXPECT_EQ(text(""), "none");
  EXPECT_EQ(text("--gradient-checkpointing"), "full");
  EXPECT_EQ(text("--activation_checkpointing --seed 3"), "full");
  EXPECT_EQ(text("--gradient-checkpointing every:3"), "every:3");
  EXPECT_EQ(text("--gradient-checkpointing=budget:40%"), "budget:40%");
  const std::string error = detail::parse_error(detail::kTrain + "--gradient-checkpointing some");
  EXPECT_NE(error.find("--gradient-checkpointing=some"), std::string::npos);
  EXPECT_NE(error.find("every:K"), std::string::npos) << error;
}

TEST(CommandLine, PlanTakesABatchAndABudget) {
  const auto plan = detail::parsed<PlanCommand>(
      "plan --model bert-base --batch 8x128 --budget 50% --json p.json");
  EXPECT_EQ(plan.rows, 8);
  EXPECT_EQ(plan.tokens, 128);
  EXPECT_DOUBLE_EQ(plan.budget.budget_share(), 0.5);
  for (const auto& [flags, named] : std::vector<std::pair<std::string, std::string>>{
           {"--batch 8", "--batch=8"},
           {"--batch 0x4", "--batch=0x4"},
           {"--batch 8x4 --budget 0", "--budget=0"},
           {"--batch 8x4 --json p", "--json=p without a budget"}}) {
    const std::string error = detail::parse_error("plan --model bert-tiny " + flags);
    EXPECT_NE(error.find(named), std::string::npos) << error;
  }
}

TEST(CommandLine, HelpGroupsFlagsWithDefaultUnitAndExample) {
  for (const char* name : {"train", "predict", "eval", "plan", "launch", "env"}) {
    const std::string help = detail::parsed<Answer>(std::string(name) + " --help").text;
    EXPECT_NE(help.find(std::string("Usage: hasten ") + name), std::string::npos);
    EXPECT_NE(help.find("\nExample"), std::string::npos);
    EXPECT_NE(help.find("Exit codes: 0 ok, 1 training failed, 2 bad input"), std::string::npos);
    std::istringstream lines(help);
    for (std::string line; std::getline(lines, line);) {
      EXPECT_LE(line.size(), 80u) << line;
    }
  }
  const std::string train = detail::parsed<Answer>("train --help").text;
  EXPECT_NE(train.find("\nOptimizer and schedule:\n"), std::string::npos);
  EXPECT_NE(
      train.find("  --learning-rate, --lr RATE  peak learning rate; 3e-4 for a shape [5e-05]\n"),
      std::string::npos)
      << train;
  EXPECT_NE(train.find("(required)"), std::string::npos);
  EXPECT_EQ(detail::parsed<Answer>("--version").text, "hasten " HASTEN_VERSION "\n");
  EXPECT_EQ(detail::parsed<Answer>("").text, detail::parsed<Answer>("--help").text);
}

TEST(CommandLine, ShardSizeSaysTheSameInEveryCommand) {
  const std::string meaning = "(default: all of one host)";
  for (const char* name : {"train", "estimate-memory", "compare"}) {
    std::string help = detail::parsed<Answer>(std::string(name) + " --help").text;
    help.erase(0, help.find("--shard-size N"));
    help.erase(help.find("\n  --"));
    std::string joined;
    for (const std::string& word : detail::words_of(help)) {
      joined += (joined.empty() ? "" : " ") + word;
    }
    EXPECT_NE(joined.find(meaning), std::string::npos) << name << ": " << joined;
  }
}

TEST(Checks, ADiskWithTooLittleRoomIsNamedWithWhatIsFree) {
  EXPECT_NO_THROW(check_free_space("not/there/yet", 1));
  try {
    check_free_space("not/there/yet", int64_t{1} << 62);
    FAIL();
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("--output-dir=not/there/yet needs "),
              std::string::npos)
        << error.what();
  }
}

TEST(Checks, NprocInsideAWorldNamesBoth) {
  World world;
  EXPECT_NO_THROW(check_nproc("train", 2, false, world));
  world.world_size = 4;
  try {
    check_nproc("train", 2, false, world);
    FAIL();
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what())
                  .find("--nproc=2 inside the world of another launcher: WORLD_SIZE=4"),
              std::string::npos)
        << error.what();
  }
}

} // namespace hasten
