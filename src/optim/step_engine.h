// Calls the kernels for the parameters of an optimizer.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <memory>
#include <optional>
#include <vector>

#include "hasten/optim/fused_optimizer.h"
#include "step_kernels.h"

namespace hasten::detail {

/// Empty if the kernels do not have this dtype.
std::optional<StepType> find_step_type(at::ScalarType dtype);

/// Members of a parameter's state.
struct StateMembers {
  int64_t* step = nullptr;
  at::Tensor* master = nullptr;
  std::array<at::Tensor*, 3> moments{}; // in the kernel's order
  std::array<at::Tensor*, 3> absmax{}; // of those moments that may have 8 bits

  std::array<at::Tensor*, 6> tensors() const {
    return {moments[0], moments[1], moments[2], absmax[0], absmax[1], master};
  }
};

/// The tensors of parameters with the same numbers, for ATen's operations on lists: all of one
/// device and dtype, fp32 or fp64; with StepTraits::by_rows of one shape.
struct StepTensors {
  std::vector<at::Tensor> parameters{};
  std::vector<at::Tensor> gradients{}; // already multiplied by the factor
  std::array<std::vector<at::Tensor>, 3> moments{}; // empty: none
  int64_t step = 0;
  std::optional<at::Tensor> found_inf{}; // see FusedOptimizer::set_found_inf

  /// parameters -= lr * directions, unless found_inf.
  void descend(const std::vector<at::Tensor>& directions, double lr);
};

/// What an optimizer's kernel is and needs.
struct StepTraits {
  const char* where; // "optim::AdamW"
  void (*kernel)(const StepArrays& arrays, const StepNumbers& numbers, const StepPass& pass,
                 int64_t begin, int64_t end);
  /// False: the kernel needs the whole tensor at a time, and numel > 0.
  bool by_elements = true;
  /// Whether the kernel uses rows and columns. It then has moments of other shapes, which are never
  /// rounded.
  bool by_rows = false;
};

/// The part of an optimizer that differs between optimizers.
class StepRules {
 public:
  using Options = torch::optim::OptimizerOptions;
  using State = torch::optim::OptimizerParamState;

  explicit StepRules(StepTraits traits) : traits_(traits) {}
  virtual ~StepRules() = default;
  const StepTraits& traits() const { return traits_; }
  const char* where() const { return traits_.where; }
  /// Throws InputError if the options have another type or are out of range. The other functions
  /// take options that were checked.
  virtual void check(const Options& options) const = 0;
  /// Makes the state, or adds what it lacks, without tensors.
  virtual StateMembers parts(const at::Tensor& parameter, std::unique_ptr<State>& slot) const = 0;
  /// Moment `which`, filled with 0, of `dtype`; undefined if there is none. It has the parameter's
  /// shape, unless overridden.
  virtual at::Tensor make_moment(int which, const at::Tensor& parameter, const Options& options,
                                 at::ScalarType dtype) const;
  /// `fresh`: moment 0 was made for this step.
  virtual StepNumbers numbers(const Options& options, int64_t step, bool fresh) const = 0;
  virtual void run(StepTensors& tensors, const StepNumbers& numbers) const = 0;

 private:
  const StepTraits traits_;
};

/// Makes a moment codes of blockwise_8bit.h, or undoes it. One that was loaded for other shards,
/// averaged or cut has none. Returns false, and changes nothing, if codes lack their `absmax`.
bool convert_moment(at::Tensor& moment, at::Tensor& absmax, bool is_signed, bool to_codes);

class StepEngine {
 public:
  StepEngine(std::unique_ptr<StepRules> rules, FusedOptions options)
      : rules_(std::move(rules)), options_(options) {}

  /// Verifies the options of all groups and removes repeated parameters.
  void check(torch::optim::Optimizer& optimizer);
  void update(torch::optim::Optimizer& optimizer, const StepPass& pass);
  /// Makes the state of all parameters and returns its bytes. Call it after check().
  int64_t make_state(torch::optim::Optimizer& optimizer);

  const StepRules& rules() const { return *rules_; }
  FusedOptions& options() { return options_; }
  void set_found_inf(at::Tensor found_inf) { found_inf_ = std::move(found_inf); }
  /// Uses ATen's operations on the CPU, too.
  void force_tensor_operations() { only_tensors_ = true; }

 private:
  /// A parameter in this step.
  struct StepItem {
    const at::Tensor& parameter;
    const StepRules::Options& options;
    uint64_t index; // over all groups
    StateMembers parts{};
    StepArrays arrays{};
    const StepNumbers* numbers = nullptr;
    bool fresh = false;
    bool by_tensors = false;
    bool in_8_bits = false; // moments that may
    at::Tensor copy{}; // the gradient, if its strides differ from the parameter's

    /// Whether one list for ATen may have both; `by_rows`: only tensors of one shape.
    bool alike(const StepItem& other, bool by_rows) const;
  };

  void take_parameter(StepItem& item) const;
  void take_gradient(StepItem& item) const;
  void take_state(torch::optim::Optimizer& optimizer, StepItem& item) const;
  void run(std::vector<StepItem>& items, const StepPass& pass) const;
  void run_list(const std::vector<const StepItem*>& items, const StepPass& pass) const;
  void finish(const std::vector<StepItem>& items, const StepPass& pass) const;

  const std::unique_ptr<StepRules> rules_;
  FusedOptions options_;
  bool only_tensors_ = false;
  at::Tensor found_inf_{};
  std::vector<const void*> known_{}; // [parameter over all groups], at the last check
};

} // namespace hasten::detail
