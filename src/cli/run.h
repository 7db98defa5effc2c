// The commands that need LibTorch; `hasten-worker` runs them. Each returns an exit code or throws
// an exception of exit_code_of(). Results go to stdout, everything else to the log. Threading:
// main thread.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "commands.h"

namespace hasten {

class Communicator;
struct TokenizedClassification;

namespace detail {

/// Runs `stage` (local work that may throw) and agrees on the result. Collective: one exchange
/// through the store. Blocks until the slowest rank's stage has ended.
/// Throws on all ranks if any failed: the lowest rank that failed rethrows its error, the first rank of
/// each other host repeats it, and the others throw SilentExit with that error's exit code.
void agree_on(Communicator& communicator, const char* name, const std::function<void()>& stage);

/// Throws InputError on all ranks, with their hosts, if the ranks have read other data. Collective.
void require_equal_data(Communicator& communicator, const std::string& model,
                        const TokenizedClassification& data, const char* where);

/// Writes a command's answers to the file `output`, or to stdout if that is empty. Throws Error if
/// it cannot. `what`: the answers in the log's line "wrote 4,000 reviews to …".
void write_answers(const char* where, const std::string& output, const std::string& text,
                   int64_t answers, const std::string& what = "predictions");

} // namespace detail

/// Collective: every rank of the world in the environment calls it. Rank 0
/// prints and writes.
int run_command(const TrainCommand& command);
/// Collective: the ranks of a world that `hasten` started for one strategy.
int run_command(const CompareCommand& command);
int run_command(const EvalCommand& command);
/// Local: a world of one rank.
int run_command(const PredictCommand& command);
int run_command(const GenerateCommand& command);
int run_command(const PlanCommand& command);
int run_command(const EstimateMemoryCommand& command);

/// Bytes of one process, by purpose.
struct MemoryEstimate {
  int64_t parameter_count = 0;
  int64_t trainable_count = 0;
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t optimizer_state = 0;
  int64_t averaging = 0;
  int64_t communication = 0;
  int64_t activations = 0;
  int64_t peak = 0;
  /// No memory: what it sends in an optimizer step, with Local SGD in an average.
  int64_t sent = 0;
};
MemoryEstimate estimate_memory(const EstimateMemoryCommand& command);

int run_command(const StateCommand& command);
int run_command(const MergeCommand& command);
/// Describes a graph.
int run_command(const ExportCommand& command);
int run_command(const TokenizerCommand& command);
int run_command(const SynthCommand& command);
/// Local without --nproc; otherwise collective, and rank 0 prints.
int run_command(const EnvCommand& command);

} // namespace hasten
