// Inputs for runs of the programs that take about a second.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "cli/run_program.h"

namespace hasten::testing_support {

/// `rows` reviews of two labels that differ by one word.
inline std::string small_reviews(int rows, int first = 0) {
  std::string text = "text,label\n";
  for (int row = first; row < first + rows; ++row) {
    text += "film number " + std::to_string(row) +
            (row % 2 == 0 ? " was good fun,pos\n" : " was bad work,neg\n");
  }
  return text;
}

/// The command line of hasten train on folder/train.csv into folder/out, followed by `more`.
inline std::vector<std::string> train_arguments(const std::filesystem::path& folder,
                                                const std::vector<std::string>& more = {},
                                                const std::string& model = "bert-tiny") {
  std::vector<std::string> arguments{"hasten",       "train",        "--model",
                                     model,          "--train-file", folder / "train.csv",
                                     "--output-dir", folder / "out"};
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

} // namespace hasten::testing_support
