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
#include <torch/serialize/archive.h>

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

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
  /// "AdamW".
  virtual std::string name() const = 0;
  /// Whether each number is updated by itself, so that a part of a tensor will do.
  virtual bool by_elements() const = 0;
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

/// ATen's operations on the CPU, too.
void engine_force_tensor_operations(StepEngine& engine);

/// An optimizer of LibTorch, or its base, that steps by an engine. Its files have
/// torch's form.
template <typename Base, typename Options, typename State>
class SteppedByEngine : public Base, public FusedOptimizer {
 public:
  using LossClosure = torch::optim::Optimizer::LossClosure;
  explicit SteppedByEngine(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                           Options defaults = {}, FusedOptions fused = {});
  explicit SteppedByEngine(std::vector<at::Tensor> parameters, Options defaults = {},
                           FusedOptions fused = {});
  /// One update; the gradients stay as they are. Returns the closure's loss, or an
  /// undefined tensor.
  at::Tensor step(LossClosure closure = nullptr) override;
  void step_scaled(double factor) override;
  void step_and_zero(double factor = 1) override;
  std::string name() const override;
  bool by_elements() const override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  StepEngine& engine() const { return *engine_; }

 private:
  std::shared_ptr<StepEngine> engine_{};
};

void write_state_tensor(torch::serialize::OutputArchive& archive, const char* name,
                        const at::Tensor& tensor);
void read_state_tensor(torch::serialize::InputArchive& archive, const char* name,
                       at::Tensor& tensor);

template <typename T>
void read_field(torch::serialize::InputArchive& archive, const char* name, T& value) {
  c10::IValue saved;
  if (archive.try_read(name, saved)) {
    value = saved.to<T>();
  } else {
    constexpr bool optional = std::is_same_v<T, at::Tensor> || requires { value.has_value(); };
    TORCH_CHECK(optional, "no ", name, " in the archive");
  }
}

/// Options or a state, saved as Self::fields() names what it is made of.
template <typename Self, typename Base>
struct SavedByFields : Base {
  void serialize(torch::serialize::InputArchive& archive) override {
    Self::fields(static_cast<Self&>(*this),
                 [&](const char* name, auto& value) { read_field(archive, name, value); });
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    Self::fields(static_cast<const Self&>(*this), [&](const char* name, const auto& value) {
      const c10::IValue saved(value);
      if (!saved.isTensor() || saved.toTensor().defined()) {
        archive.write(name, saved);
      }
    });
  }
};

template <typename Self>
struct SavedOptions : SavedByFields<Self, torch::optim::OptimizerCloneableOptions<Self>> {
  double get_lr() const override { return static_cast<const Self&>(*this).lr(); }
  void set_lr(const double lr) override { static_cast<Self&>(*this).lr(lr); }
};

template <typename Self>
using SavedState = SavedByFields<Self, torch::optim::OptimizerCloneableParamState<Self>>;

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
