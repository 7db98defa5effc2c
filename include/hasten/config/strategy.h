// Which part of a model's training state each rank holds. Without LibTorch.
#pragma once

#include <array>
#include <cstddef>
#include <utility>

#include "hasten/config/spelling.h"

namespace hasten {

/// The figures are bytes per parameter and rank in fp32 training with Adam on N ranks, and the
/// traffic: elements per parameter that a rank sends in an optimizer step of one batch
/// (docs/guides/sharding.md).
enum class Strategy {
  /// All parameters, gradients and optimizer state: 16 bytes; sends 2.
  ddp,
  /// All parameters and gradients, its shard of the optimizer state: 8 + 16 / N; sends 2.
  zero1,
  /// All parameters, its shard of gradients and optimizer state: 4 + 16 / N; sends 2.
  zero2,
  /// Its shard of everything, and the unsharded block that runs: 16 / N; sends 3.
  fsdp,
  /// fsdp in groups of N ranks, each of which holds a replica: 16 / N; sends 3 within the group and
  /// 2 / N between replicas (inside a LocalSGD scope only at synchronisations).
  hsdp,
};

template <>
inline constexpr auto kSpellings<Strategy> = std::array{"ddp", "zero1", "zero2", "fsdp", "hsdp"};
/// The names of torch's ShardingStrategy, which transformers' --fsdp accepts.
template <>
inline constexpr auto kOtherSpellings<Strategy> =
    std::array{std::pair{"no_shard", Strategy::ddp}, std::pair{"shard_grad_op", Strategy::zero2},
               std::pair{"full_shard", Strategy::fsdp}, std::pair{"hybrid_shard", Strategy::hsdp}};

constexpr const char* strategy_name(Strategy strategy) {
  return kSpellings<Strategy>.at(static_cast<size_t>(strategy));
}

} // namespace hasten
