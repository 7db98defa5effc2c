// The commands that need LibTorch, as `hasten-worker` runs them.
// Each returns an exit code or throws what exit_code_of() understands. Results
// go to stdout, everything else to the log. Threading: main thread.
#pragma once

#include "hasten/cli/commands.h"

namespace hasten {

/// Collective: every rank of the world in the environment calls it. Rank 0
/// prints and writes.
int run_train(const TrainCommand& command);
/// Collective: the ranks of a world that `hasten` started for one strategy.
int run_compare(const CompareCommand& command);
/// Local: a world of one.
int run_predict(const PredictCommand& command);
int run_eval(const EvalCommand& command);
int run_plan(const PlanCommand& command);
int run_estimate_memory(const EstimateMemoryCommand& command);
int run_state(const StateCommand& command);
int run_tokenizer(const TokenizerCommand& command);
int run_synth(const SynthCommand& command);
int run_env(const EnvCommand& command);

} // namespace hasten
