// Which part of a model's training state each rank holds. Without LibTorch.
#pragma once

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

/// "ddp", "zero1", "zero2", "fsdp", "hsdp".
constexpr const char* strategy_name(Strategy strategy) {
  switch (strategy) {
    case Strategy::ddp:
      break;
    case Strategy::zero1:
      return "zero1";
    case Strategy::zero2:
      return "zero2";
    case Strategy::fsdp:
      return "fsdp";
    case Strategy::hsdp:
      return "hsdp";
  }
  return "ddp";
}

} // namespace hasten
