// Written by tools/golden/optim.py with torch 2.13.0 and transformers 5.23.0.
#pragma once

#include <cstdint>
#include <vector>

namespace hasten::golden {

struct ScheduleCase {
  const char* name;
  int64_t warmup;
  int64_t total;
  std::vector<double> learning_rates; // [completed updates], peak 2e-3
};

inline const std::vector<ScheduleCase> kSchedules = {
    {"linear",
     0,
     8,
     {0.002,
      0.00175,
      0.0015,
      0.00125,
      0.001,
      0.00075000000000000002,
      0.00050000000000000001,
      0.00025000000000000001,
      0,
      0,
      0}},
    {"linear",
     3,
     10,
     {0,
      0.00066666666666666664,
      0.0013333333333333333,
      0.002,
      0.0017142857142857142,
      0.0014285714285714286,
      0.0011428571428571427,
      0.0008571428571428571,
      0.00057142857142857136,
      0.00028571428571428568,
      0,
      0,
      0}},
    {"linear",
     5,
     5,
     {0,
      0.00040000000000000002,
      0.00080000000000000004,
      0.0011999999999999999,
      0.0016000000000000001,
      0,
      0,
      0}},
    {"constant", 0, 4, {0.002, 0.002, 0.002, 0.002, 0.002, 0.002, 0.002}},
    {"constant_with_warmup",
     4,
     7,
     {0,
      0.00050000000000000001,
      0.001,
      0.0015,
      0.002,
      0.002,
      0.002,
      0.002,
      0.002,
      0.002}},
};

/// A leaf module's path and kind; both orders are those of the model.
struct LeafCase {
  const char* path;
  const char* kind;
};

inline const std::vector<LeafCase> kLeaves = {
    {"embeddings.word_embeddings", "Embedding"},
    {"embeddings.LayerNorm", "LayerNorm"},
    {"encoder.layer.0.attention.self.query", "Linear"},
    {"encoder.layer.0.attention.output.LayerNorm", "LayerNorm"},
    {"encoder.layer.0.norm", "Linear"},
    {"encoder.layer.0.pre_norm", "Linear"},
    {"encoder.layer.0.norm1", "Linear"},
    {"encoder.layer.0.normal", "Linear"},
    {"encoder.layer.0.norm.inner", "Linear"},
    {"encoder.layer.0.pre_norm_out", "Linear"},
    {"encoder.layer.0.RMSNormish", "Linear"},
    {"encoder.layer.0.debiased", "Linear"},
    {"h.0.ln_1", "LayerNorm"},
    {"h.0.Norm", "Linear"},
    {"ln_f", "LayerNorm"},
    {"norm", "Linear"},
    {"classifier", "Linear"},
};

inline const std::vector<const char*> kDecayed = {
    "embeddings.word_embeddings.weight",
    "encoder.layer.0.attention.self.query.weight",
    "encoder.layer.0.norm1.weight",
    "encoder.layer.0.normal.weight",
    "encoder.layer.0.pre_norm_out.weight",
    "classifier.weight",
};

} // namespace hasten::golden
