// Precision, recall and F1 of entities for token classification, as the Python package seqeval
// computes them by default (Ramshaw and Marcus, 1995; the rules of conlleval). An entity counts only
// if its type, begin and end are right.
// Threading: one instance per thread. Nothing here communicates (hasten/metrics/metric.h).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "hasten/trainer/evaluation_metrics.h"

namespace hasten {

/// The words [begin, end) of a sentence.
struct Entity {
  std::string type{};
  int64_t begin = 0, end = 0;
  bool operator==(const Entity&) const = default;
};

/// The entities of a sentence's tags: "B-PER" begins one, "I-PER" continues it, "O" is none. E- and S-
/// of IOBES are known. An I- after another type or after O begins an entity. "_" is the type of a tag
/// that has none.
std::vector<Entity> entities_of(const std::vector<std::string>& tags);

/// "precision", "recall" and "f1" of all entities together (micro), and "accuracy" of the words;
/// 0 where nothing was found, or there is nothing to find. Outputs are logits [B, T, num_labels]; the
/// batch's `labels_name` [B, T] has -100 for tokens that do not count. Each sample is a sentence.
/// report(): {"per_class": {type: {"precision", "recall", "f1", "support"}}}.
/// Exact for any split into batches and ranks. Memory: 24 bytes for each type of entity.
ComputeMetrics entity_metrics(std::vector<std::string> label_names,
                              std::string labels_name = "labels");

} // namespace hasten
