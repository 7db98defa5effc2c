// What becomes of the ranks' mean at the end of a round of Local SGD, beside
// taking it as it is: a step of an outer optimizer, for which the way the ranks
// went together is a gradient.
//
//   anchor: the parameters that the round began with, equal on all ranks
//   mean:   the mean over ranks of the parameters it ended with
//   anchor - mean points from new to old: a gradient (DiLoCo's Delta)
//
// All of it on flat fp32 (or fp64) buffers. Memory: one copy for the anchor, and
// what the step keeps. Threading: the averager's thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "hasten/core/stateful.h"

namespace torch::optim {
class Optimizer;
}

namespace hasten {

class OuterStep : public Stateful {
 public:
  /// Puts into `anchor` the parameters that every rank goes on with. `mean` may
  /// be overwritten. `piece` names this part of the parameters: the same from
  /// round to round. `learning_rate`: the inner one at the round's beginning.
  /// Must give the same bits on every rank. Local.
  virtual void step(int64_t piece, at::Tensor anchor, at::Tensor mean, double learning_rate) = 0;
  /// Name and settings; the same on all ranks.
  virtual std::string description() const = 0;
};

struct SlowMoOptions {
  /// Slow momentum, 0 ≤ slowmo_factor < 1. 0 with slowmo_lr 1 is plain averaging.
  double slowmo_factor = 0.5;
  /// Slow learning rate, > 0.
  double slowmo_lr = 1.0;
};

/// u <- slowmo_factor u + (anchor - mean) / lr; anchor <- anchor - slowmo_lr lr u, with the
/// inner learning rate lr of the round's beginning. Source: Wang, Tantia, Ballas,
/// Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow
/// Momentum", ICLR 2020, algorithm 1. Memory: one copy.
class SlowMo : public OuterStep {
 public:
  /// Throws InputError for options out of range.
  explicit SlowMo(SlowMoOptions options = {});
  /// Throws InputError where learning_rate is 0.
  void step(int64_t piece, at::Tensor anchor, at::Tensor mean, double learning_rate) override;
  std::string description() const override;
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  SlowMoOptions options_;
  std::map<int64_t, at::Tensor> momentum_{}; // by piece
};

struct DiLoCoOptions {
  /// Outer learning rate, > 0, and momentum, 0 ≤ momentum < 1.
  double lr = 0.7;
  double momentum = 0.9;
  /// False: heavy-ball momentum.
  bool nesterov = true;
};

/// SGD with Nesterov momentum on Delta = anchor - mean, as torch::optim::SGD
/// does it: v <- momentum v + Delta (at first v = Delta);
/// anchor <- anchor - lr (Delta + momentum v). Source: Douillard et al., "DiLoCo:
/// Distributed Low-Communication Training of Language Models", 2023,
/// algorithm 1. lr 1 without momentum is plain averaging. Memory: one copy
/// (none without momentum).
class DiLoCo : public OuterStep {
 public:
  /// Throws InputError for options out of range.
  explicit DiLoCo(DiLoCoOptions options = {});
  void step(int64_t piece, at::Tensor anchor, at::Tensor mean, double learning_rate) override;
  std::string description() const override;
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  DiLoCoOptions options_;
  std::map<int64_t, at::Tensor> momentum_{}; // by piece
};

/// Any of torch's optimizers, or one derived from them, as the outer one:
///   OuterOptimizer([](auto parameters) {
///     return std::make_shared<torch::optim::Adam>(
///         parameters, torch::optim::AdamOptions(0.1).eps(1e-3)); }, "adam 0.1")
class OuterOptimizer : public OuterStep {
 public:
  using Factory =
      std::function<std::shared_ptr<torch::optim::Optimizer>(std::vector<at::Tensor> parameters)>;
  /// `make` is called once a piece, with the anchor as its one parameter.
  /// `description`: the same on all ranks, another for other settings.
  OuterOptimizer(Factory make, std::string description);
  void step(int64_t piece, at::Tensor anchor, at::Tensor mean, double learning_rate) override;
  std::string description() const override { return description_; }
  /// Throws InputError for an optimizer of a type whose state is not known.
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 private:
  struct Piece {
    at::Tensor parameter{};
    std::shared_ptr<torch::optim::Optimizer> optimizer{};
  };
  Piece& piece_of(int64_t piece, const at::Tensor& anchor);

  Factory make_;
  std::string description_;
  std::map<int64_t, Piece> pieces_{};
  NamedTensors loaded_{}; // of pieces that have not stepped since
  std::map<int64_t, std::string> loaded_values_{}; // JSON
};

} // namespace hasten
