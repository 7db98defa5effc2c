// What the programs share that compare a loop of ours with one written by hand.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "hasten/core/random.h"
#include "hasten/models/auto_model.h"
#include "median.h"

namespace hasten {

inline PreTrainedModel seeded_bert_mini() {
  set_seed(1);
  return AutoModelForSequenceClassification::from_config(AutoConfig::from_shape("bert-mini"));
}

/// Medians of the seconds that steps of either loop took.
inline void print_case(const char* name, const std::vector<double>& ours,
                       const std::vector<double>& plain) {
  std::printf("{\"case\": \"%s\", \"steps\": %zu, \"ours\": %.9f, \"plain\": %.9f}\n", name,
              ours.size(), median_of(ours), median_of(plain));
  std::fflush(stdout);
}

/// --steps N, or --smoke for the least that makes sense; 0 after having said so for
/// anything else.
inline int64_t steps_of(int argc, char** argv, int64_t usual, int64_t least) {
  int64_t steps = usual;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--smoke") == 0) {
      steps = least;
    } else if (std::strcmp(argv[i], "--steps") == 0 && i + 1 < argc) {
      steps = std::max<int64_t>(least, std::atoll(argv[++i]));
    } else {
      std::fprintf(stderr, "usage: %s [--steps N] [--smoke]\n", argv[0]);
      return 0;
    }
  }
  return steps;
}

} // namespace hasten
