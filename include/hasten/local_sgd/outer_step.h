// Outer steps of Local SGD. At the end of a synchronisation, an outer step computes the new
// parameters from the ranks' mean, instead of taking the mean itself. It is a step of an outer
// optimizer, for which the common change of the ranks is a gradient.
//
//   anchor: the parameters at the previous synchronisation, equal on all ranks
//   mean:   the mean over ranks of the parameters now
//   anchor - mean points from new to old: a gradient (DiLoCo's Delta)
//
// All tensors are flat fp32 (or fp64) buffers. Memory: one copy for the anchor, and the step's own
// state. Threading: the averager's thread.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hasten/core/stateful.h"

namespace torch::optim {
class Optimizer;
}

namespace hasten {

class OuterStep : public Stateful {
 public:
  /// Writes into `anchor` the parameters with which every rank continues. May overwrite `mean`.
  /// `piece` identifies this part of the parameters and is the same in each synchronisation.
  /// `learning_rate` is the inner one of the previous synchronisation. The result must be equal bit
  /// for bit on every rank. Local.
  virtual void step(int64_t piece, at::Tensor anchor, at::Tensor mean, double learning_rate) = 0;
  /// Name and settings; equal on all ranks.
  virtual std::string description() const = 0;
};

namespace detail {
/// An outer step whose state is one momentum tensor for each piece.
class MomentumStep : public OuterStep {
 public:
  void save_state(NamedTensors& tensors, nlohmann::json& values) const override;
  void load_state(const NamedTensors& tensors, const nlohmann::json& values) override;

 protected:
  std::map<int64_t, at::Tensor> momentum_{}; // by piece
};
} // namespace detail

struct SlowMoOptions {
  /// Slow momentum, 0 ≤ slowmo_factor < 1. 0 with slowmo_lr 1 is plain averaging.
  double slowmo_factor = 0.5;
  /// Slow learning rate, > 0.
  double slowmo_lr = 1.0;
};

/// u <- slowmo_factor u + (anchor - mean) / lr; anchor <- anchor - slowmo_lr lr u, with the inner
/// learning rate lr of the previous synchronisation (if that was 0, of this one). Source: Wang, Tantia, Ballas, Rabbat, "SlowMo:
/// Improving Communication-Efficient Distributed SGD with Slow Momentum", ICLR 2020, algorithm 1.
/// Memory: one copy.
class SlowMo : public detail::MomentumStep {
 public:
  /// Throws InputError for options out of range.
  explicit SlowMo(SlowMoOptions options = {});
  /// Throws InputError if learning_rate is 0.
  void step(int64_t piece, at::Tensor anchor, at::Tensor mean, double learning_rate) override;
  std::string description() const override;

 private:
  SlowMoOptions options_;
};

struct DiLoCoOptions {
  /// Outer learning rate, > 0, and momentum, 0 ≤ momentum < 1.
  double lr = 0.7;
  double momentum = 0.9;
  /// False: heavy-ball momentum.
  bool nesterov = true;
};

/// SGD with Nesterov momentum on Delta = anchor - mean, computed as by torch::optim::SGD: v <-
/// momentum v + Delta (at first v = Delta); anchor <- anchor - lr (Delta + momentum v). Source:
/// Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
/// algorithm 1. lr 1 without momentum is plain averaging. Memory: one copy (none without momentum).
class DiLoCo : public detail::MomentumStep {
 public:
  /// Throws InputError for options out of range.
  explicit DiLoCo(DiLoCoOptions options = {});
  void step(int64_t piece, at::Tensor anchor, at::Tensor mean, double learning_rate) override;
  std::string description() const override;

 private:
  DiLoCoOptions options_;
};

/// Uses any of torch's optimizers, or one derived from them, as the outer optimizer:
///   OuterOptimizer([](auto parameters) {
///     return std::make_shared<torch::optim::Adam>(
///         parameters, torch::optim::AdamOptions(0.1).eps(1e-3)); }, "adam 0.1")
class OuterOptimizer : public OuterStep {
 public:
  using Factory =
      std::function<std::shared_ptr<torch::optim::Optimizer>(std::vector<at::Tensor> parameters)>;
  /// `make` is called once per piece, with the anchor as its one parameter. `description` must be
  /// equal on all ranks and differ between different settings.
  OuterOptimizer(Factory make, std::string description);
  void step(int64_t piece, at::Tensor anchor, at::Tensor mean, double learning_rate) override;
  std::string description() const override { return description_; }
  /// Throws InputError for an optimizer type whose state hasten does not know.
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
  /// A state's tensors and JSON, of pieces that have not stepped since.
  std::map<int64_t, std::pair<NamedTensors, std::string>> loaded_{};
};

} // namespace hasten
