// Base of hasten's optimizers: torch::optim::Optimizers whose step makes one pass over parameter,
// gradient and moments.
//
// For all of them:
// - A parameter that is listed twice (tied weights) is updated once. A parameter without a gradient
// (frozen or unused) does not change.
// - step() increments a parameter's version counter. As in torch, a step between a forward and its
// backward is therefore an error.
// - fp32 and fp64 parameters are computed in their own precision. bf16 and fp16 parameters have
// fp32 moments and, by FusedOptions, an fp32 master copy. The step updates the master and rounds it
// to the parameter. If other code writes the parameter, the master takes those elements that no
// longer equal its rounded value. Gradients may be fp32, fp64, bf16 or fp16 for any parameter.
// - A parameter may be contiguous or dense in another order (channels_last). A gradient with other
// strides than its parameter is copied first.
// - Devices other than the CPU use ATen's operations, with the same results within rounding.
// - They throw InputError for a sparse gradient, a parameter whose memory has holes, and an option
// that is negative, NaN or out of range (also if it is set later).
// - A state may be replaced, loaded or cleared between steps, and so may its tensors. Replace them
// by assignment: a step does not see set_data() of a moment.
// - Results are bit for bit independent of the number of threads and the vector width.
// Threading: call it from one thread; at::get_num_threads() threads compute. Local.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace hasten {

struct OptimizerSettings;

namespace detail {
class NamedOptions;
class StepEngine;
} // namespace detail

class FusedOptimizer {
 public:
  /// step() with every gradient multiplied by `factor`. Afterwards each grad() that was used has
  /// the product. Cost over step(): 4 bytes written per fp32 element; nothing with factor 1.
  void step_scaled(double factor);
  /// step_scaled() that fills each used grad() with zeros. It keeps their memory, for gradients
  /// that are views of buffers.
  void step_and_zero(double factor = 1);
  /// torch's found_inf: while this fp32 element on the parameters' device is 1, steps leave the
  /// parameters as they are, which takes no wait for the device; moments may become NaN. Undefined:
  /// none. Kernels of the CPU ignore it.
  void set_found_inf(at::Tensor found_inf);
  /// For example "AdamW".
  std::string name() const;
  /// Whether each element is updated independently of the others, so that a shard of a tensor can
  /// be updated alone.
  bool by_elements() const;
  detail::StepEngine& engine() const { return *engine_; }

 protected:
  explicit FusedOptimizer(std::shared_ptr<detail::StepEngine> engine)
      : engine_(std::move(engine)) {}
  virtual ~FusedOptimizer() = default;

 private:
  std::shared_ptr<detail::StepEngine> engine_;
};

struct FusedOptions {
  /// Keeps an fp32 copy of each 16-bit parameter: 4 bytes per element. Without it, updates below
  /// half a unit in the last place (2^-9 of the parameter in bf16) are lost.
  bool master_weights = true;
  /// Keeps moments in bf16, which halves their memory. Stochastic rounding keeps their mean exact;
  /// devices other than the CPU round to nearest. Ignored for fp64 parameters and by Adafactor,
  /// whose moments are small.
  bool bf16_moments = false;
  /// Keeps moments of Adam and AdamW in 8 bits, if a tensor has so many elements. See AdamW8bit.
  uint64_t min_8bit_size = UINT64_MAX;
  /// Seed of the stochastic rounding. Equal seeds, steps and order of parameters give equal bits.
  uint64_t seed = 42;
  /// Groups keep their options when a state is loaded; a schedule sets the learning rate.
  bool keep_options = false;
};

namespace detail {

/// Uses ATen's operations on the CPU, too.
void engine_force_tensor_operations(StepEngine& engine);

/// Base class of the optimizers: one of LibTorch's, or their base, with a StepEngine for the step.
/// Files have torch's format.
template <typename Base, typename Options, typename State>
class SteppedByEngine : public Base, public FusedOptimizer {
 public:
  using OwnOptions = Options;
  using OwnState = State;
  using LossClosure = torch::optim::Optimizer::LossClosure;
  explicit SteppedByEngine(const std::vector<torch::optim::OptimizerParamGroup>& param_groups,
                           Options defaults = {}, FusedOptions fused = {});
  explicit SteppedByEngine(std::vector<at::Tensor> parameters, Options defaults = {},
                           FusedOptions fused = {});
  /// Makes one optimizer step. Gradients do not change. Returns the closure's loss, or an undefined
  /// tensor.
  at::Tensor step(LossClosure closure = nullptr) override;
  void save(torch::serialize::OutputArchive& archive) const override;
  void load(torch::serialize::InputArchive& archive) override;
  /// The options that make_optimizer() uses.
  static Options named_options(NamedOptions& args, const OptimizerSettings& settings);
};

void write_state_tensor(torch::serialize::OutputArchive& archive, const char* name,
                        const at::Tensor& tensor);

/// Options or a state whose saved fields are those that Self::fields() lists.
template <typename Self, typename Base>
struct SavedByFields : Base {
  void serialize(torch::serialize::InputArchive& archive) override {
    Self::fields(static_cast<Self&>(*this), [&]<typename T>(const char* name, T& value) {
      c10::IValue saved;
      if (archive.try_read(name, saved)) {
        value = saved.to<T>();
      } else {
        constexpr bool optional = std::is_same_v<T, at::Tensor> || requires { value.has_value(); };
        TORCH_CHECK(optional, "no ", name, " in the archive");
      }
    });
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

/// Adam's or AdamW's state, with the fp32 copy of a 16-bit parameter. Moments of 8 bits are uint8
/// with the largest absolute value of each block, fp32 [block].
template <typename State>
struct WithMaster final : State {
  WithMaster() = default;
  explicit WithMaster(const State& state) : State(state) {}
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<WithMaster>(*this);
  }
  void serialize(torch::serialize::InputArchive& archive) override {
    State::serialize(archive);
    archive.try_read("master", master_, /*is_buffer=*/true);
    archive.try_read("exp_avg_absmax", exp_avg_absmax(), /*is_buffer=*/true);
    archive.try_read("exp_avg_sq_absmax", exp_avg_sq_absmax(), /*is_buffer=*/true);
  }
  void serialize(torch::serialize::OutputArchive& archive) const override {
    State::serialize(archive);
    write_state_tensor(archive, "master", master_);
    write_state_tensor(archive, "exp_avg_absmax", exp_avg_absmax());
    write_state_tensor(archive, "exp_avg_sq_absmax", exp_avg_sq_absmax());
  }
  at::Tensor& master() { return master_; }
  const at::Tensor& master() const { return master_; }
  TORCH_ARG(at::Tensor, exp_avg_absmax);
  TORCH_ARG(at::Tensor, exp_avg_sq_absmax);

 private:
  at::Tensor master_{};
};

} // namespace detail

} // namespace hasten
