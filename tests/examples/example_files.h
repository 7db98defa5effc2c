// Shared by the tests of the examples: the examples' sources, generated reviews, and the difference
// between the tensors of two files.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <vector>

#include "cli/run_program.h"
#include "hasten/io/safetensors.h"

namespace hasten::testing_support {

inline std::vector<std::string> example_lines(const std::string& name) {
  std::ifstream file(std::filesystem::path(HASTEN_EXAMPLES_FOLDER) / name);
  EXPECT_TRUE(file) << name;
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) {
    lines.push_back(line);
  }
  return lines;
}

// `rows` different reviews of 5 to 14 words. Two of the words determine the label.
inline void write_reviews(const std::filesystem::path& path, int rows) {
  uint64_t state = 7;
  const auto below = [&state](uint64_t bound) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return (state >> 33) % bound;
  };
  std::ofstream file(path);
  file << "text,label\n";
  for (int row = 0; row < rows; ++row) {
    const bool good = below(2) == 1;
    file << "take " << row;
    for (uint64_t word = 3 + below(10); word > 0; --word) {
      const uint64_t kind = below(8);
      file << (kind == 0   ? (good ? " warm" : " cold")
               : kind == 1 ? (good ? " quick" : " slow")
                           : " word" + std::to_string(below(60)));
    }
    file << (good ? ",good\n" : ",bad\n");
  }
}

// Runs hasten launch --nproc N PROGRAM …. One process runs without the launcher.
inline ProgramRun run_example(int nproc, std::vector<std::string> command) {
  if (nproc > 1) {
    const auto bin = std::filesystem::read_symlink("/proc/self/exe").parent_path();
    command[0] = (bin / command[0]).string();
    command.insert(command.begin(), {"hasten", "launch", "--nproc", std::to_string(nproc)});
  }
  ProgramRun run = run_program(command);
  EXPECT_EQ(run.code, 0) << command.back() << '\n' << run.error;
  return run;
}

// ‖a - b‖ / ‖a‖ over all tensors; infinity if names or shapes differ.
inline double distance(const NamedTensors& a, const NamedTensors& b) {
  double apart = 0, size = 0;
  bool alike = !a.empty() && a.size() == b.size();
  for (const auto& [name, tensor] : a) {
    const auto other = b.find(name);
    if (other == b.end() || !other->second.sizes().equals(tensor.sizes())) {
      alike = false;
      continue;
    }
    const auto x = tensor.to(torch::kDouble);
    const auto y = other->second.to(torch::kDouble);
    apart += (x - y).square().sum().item<double>();
    size += x.square().sum().item<double>();
  }
  return alike ? std::sqrt(apart / size) : std::numeric_limits<double>::infinity();
}

} // namespace hasten::testing_support
