// What hasten's optimizers share: torch::optim::Optimizers whose step is one pass
// over parameter, gradient and moments.
//
// In all of them:
// - A parameter listed twice (tied weights) is updated once; one without a defined
//   gradient, frozen or unused, is left alone.
// - A parameter written by step() counts as changed, so that a step between a
//   forward and its backward is an error as with torch's own.
// - fp32 and fp64 are computed in themselves. Parameters in bf16 or fp16 have fp32
//   moments and, by FusedOptions, an fp32 copy ("master") that they are rounded
//   from; where a parameter was written from outside, its copy follows it (numbers that
//   the copy rounds to anyway keep it).
//   Gradients may be fp32, fp64, bf16 or fp16 whatever the parameter is.
// - Contiguous or dense in another order (channels_last): as it lies. A gradient
//   that lies otherwise than its parameter is copied first.
// - Devices other than the CPU take ATen's operations, with the same results within
//   rounding.
// - InputError, naming it: a sparse gradient, a parameter whose memory has holes, an
//   option that is negative, NaN or out of range (also one set later).
// - Bits do not depend on the number of threads or the width of vectors.
// Threading: one thread calls; at::get_num_threads() work. All local.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <cstdint>
#include <memory>
#include <utility>

namespace hasten {

class FusedOptimizer {
 public:
  virtual ~FusedOptimizer() = default;
  /// step() with every gradient multiplied by `factor` on the way. Afterwards each
  /// grad() that took part holds the product. Cost: 4 bytes written a number more
  /// than step() in fp32, nothing with factor 1.
  virtual void step_scaled(double factor) = 0;
  /// The same, and leaves zeros in each grad() that took part: the memory stays,
  /// for gradients that lie in buffers.
  virtual void step_and_zero(double factor = 1) = 0;
};

struct FusedOptions {
  /// Keeps an fp32 copy of each 16-bit parameter: 4 bytes a number. Without it
  /// updates below half a unit in the last place (2^-9 of the parameter in bf16)
  /// are lost.
  bool master_weights = true;
  /// Moments in bf16: half their memory; rounded at random, so that their mean is
  /// exact. Only CPU; elsewhere rounded to nearest. Not for fp64 parameters, not
  /// for Adafactor, whose are small.
  bool bf16_moments = false;
  /// Of that rounding: equal seeds, steps and order of parameters give equal bits.
  uint64_t seed = 42;
};

namespace detail {

class StepEngine;

at::Tensor engine_step(StepEngine& engine, torch::optim::Optimizer& optimizer,
                       const torch::optim::Optimizer::LossClosure& closure);
void engine_step_scaled(StepEngine& engine, torch::optim::Optimizer& optimizer, double factor);
void engine_step_and_zero(StepEngine& engine, torch::optim::Optimizer& optimizer, double factor);
/// Options of all groups are in range; repeated parameters go.
void engine_check(StepEngine& engine, torch::optim::Optimizer& optimizer);
/// ATen's operations on the CPU, too.
void engine_force_tensor_operations(StepEngine& engine);

/// An optimizer of LibTorch, or its base, that steps by an engine.
template <typename Base>
class SteppedByEngine : public Base, public FusedOptimizer {
 public:
  using LossClosure = torch::optim::Optimizer::LossClosure;
  /// One update; the gradients stay as they are. Returns the closure's loss, or an
  /// undefined tensor.
  at::Tensor step(LossClosure closure = nullptr) override {
    return engine_step(*engine_, *this, closure);
  }
  void step_scaled(double factor) override { engine_step_scaled(*engine_, *this, factor); }
  void step_and_zero(double factor = 1) override { engine_step_and_zero(*engine_, *this, factor); }
  StepEngine& engine() const { return *engine_; }

 protected:
  using Base::Base;
  std::shared_ptr<StepEngine> engine_{};
};

void write_state_tensor(torch::serialize::OutputArchive& archive, const char* name,
                        const at::Tensor& tensor);
void read_state_tensor(torch::serialize::InputArchive& archive, const char* name,
                       at::Tensor& tensor);

/// The state of one of torch's optimizers and the fp32 copy of a 16-bit parameter.
template <typename State>
struct WithMaster final : State {
  WithMaster() = default;
  explicit WithMaster(const State& state) : State(state) {}
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<WithMaster>(*this);
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    State::serialize(archive);
    read_state_tensor(archive, "master", master_);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    State::serialize(archive);
    write_state_tensor(archive, "master", master_);
  }
  at::Tensor& master() { return master_; }
  const at::Tensor& master() const { return master_; }

 private:
  at::Tensor master_{};
};

} // namespace detail

} // namespace hasten
