#include <filesystem>

#include "hasten/base/exit_code.h"
#include "hasten/text/synthetic_reviews.h"
#include "run.h"

namespace hasten {

int run_command(const SynthCommand& command) {
  const std::string extension = std::filesystem::path(command.output).extension();
  const std::string table = synthetic_reviews_table({.rows = command.rows, .seed = command.seed},
                                                    extension == ".jsonl" ? '\0'
                                                    : extension == ".tsv" ? '\t'
                                                                          : ',');
  detail::write_answers("cli::synth", command.output, table, command.rows, "reviews");
  return kExitOk;
}

} // namespace hasten
