// What each rank holds of a model in training. Without LibTorch.
#pragma once

namespace hasten {

/// In bytes a rank for a parameter of fp32 training with Adam on N ranks, and in
/// parameters' worth of numbers that a rank sends in a step of one batch
/// (docs/guides/sharding.md).
enum class Strategy {
  /// Everything: 16 bytes; sends 2.
  ddp,
  /// All parameters and gradients, its part of the optimizer's state: 8 + 8 / N;
  /// sends 2.
  zero1,
  /// All parameters, its part of gradients and of the optimizer's state:
  /// 4 + 12 / N; sends 2.
  zero2,
  /// Its part of everything, and the whole of the block that runs: 16 / N; sends 3.
  fsdp,
  /// fsdp among N ranks that hold a copy together, and further such copies: 16 / N;
  /// sends 3 near by and 2 / N to other copies, or, inside a LocalSGD scope, those
  /// now and then.
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
