#include <filesystem>
#include <iostream>

#include "hasten/base/error.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/files.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"
#include "hasten/text/synthetic_reviews.h"
#include "run.h"

namespace hasten {

int run_command(const SynthCommand& command) {
  const std::string extension = std::filesystem::path(command.output).extension();
  const std::string table = synthetic_reviews_table({.rows = command.rows, .seed = command.seed},
                                                    extension == ".jsonl" ? '\0'
                                                    : extension == ".tsv" ? '\t'
                                                                          : ',');
  if (command.output.empty()) {
    std::cout << table << std::flush;
    if (!std::cout) {
      throw Error("cli::synth", "cannot write to stdout");
    }
    return kExitOk;
  }
  write_file_atomically(command.output, table);
  log_info("wrote " + format_count(command.rows) + " reviews to " + command.output);
  return kExitOk;
}

} // namespace hasten
