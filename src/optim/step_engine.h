// Calls the kernels for the parameters of an optimizer.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <array>
#include <memory>
#include <vector>

#include "hasten/optim/fused_optimizer.h"
#include "step_kernels.h"

namespace hasten::detail {

/// Members of a parameter's state.
struct StateParts {
  int64_t* step = nullptr;
  at::Tensor* master = nullptr;
  std::array<at::Tensor*, 3> moments{}; // in the kernel's order
};

/// One parameter's tensors for ATen's operations: all of one dtype, fp32 or fp64.
struct StepTensors {
  at::Tensor parameter{};
  at::Tensor gradient{}; // already multiplied by the factor; may be overwritten
  std::array<at::Tensor, 3> moments{};
  int64_t step = 0;
};

/// The part of an optimizer that differs between optimizers.
class StepRules {
 public:
  using Options = torch::optim::OptimizerOptions;
  using State = torch::optim::OptimizerParamState;

  virtual ~StepRules() = default;
  virtual const char* where() const = 0; // "optim::AdamW"
  /// Throws InputError if the options have another type or are out of range.
  virtual void check(const Options& options) const = 0;
  /// A number for the set of moments that these options need; it changes when the set changes.
  virtual int64_t state_kind(const Options&) const { return 0; }
  /// Makes the state, or adds what it lacks, without tensors.
  virtual StateParts parts(const at::Tensor& parameter, std::unique_ptr<State>& slot) const = 0;
  /// Moment `which`, filled with 0, of `dtype`; undefined if there is none. It has the parameter's
  /// shape, unless overridden.
  virtual at::Tensor make_moment(int which, const at::Tensor& parameter, const Options& options,
                                 at::ScalarType dtype) const;
  /// `fresh`: moment 0 was made for this step.
  virtual StepNumbers numbers(const Options& options, int64_t step, bool fresh) const = 0;
  /// False: run() needs the whole tensor at a time, and numel > 0.
  virtual bool by_elements() const { return true; }
  /// Whether the kernel uses rows and columns.
  virtual bool by_rows() const { return false; }
  virtual bool rounds_moments() const { return true; }
  virtual void run(const StepArrays& arrays, const StepNumbers& numbers, const StepPass& pass,
                   int64_t begin, int64_t end) const = 0;
  virtual void run(StepTensors& tensors, const StepNumbers& numbers) const = 0;
};

class StepEngine {
 public:
  StepEngine(std::unique_ptr<StepRules> rules, FusedOptions options)
      : rules_(std::move(rules)), options_(options) {}

  /// Verifies the options of all groups and removes repeated parameters.
  void check(torch::optim::Optimizer& optimizer);
  void update(torch::optim::Optimizer& optimizer, const StepPass& pass);

  const StepRules& rules() const { return *rules_; }
  FusedOptions& options() { return options_; }
  /// Uses ATen's operations on the CPU, too.
  void force_tensor_operations() { only_tensors_ = true; }

 private:
  struct Entry {
    c10::TensorImpl* parameter = nullptr;
    torch::optim::OptimizerParamState* state = nullptr; // null: look_at_state() must run
    StateParts parts{};
    std::array<c10::TensorImpl*, 4> known{}; // moments and master
    StepArrays arrays{};
    bool fresh = false;
  };
  struct Group {
    int64_t state_kind = -1;
    std::vector<Entry> entries{}; // in the order of params()
  };
  /// A parameter with a gradient in this step.
  struct StepItem {
    Entry* entry = nullptr;
    const at::Tensor* parameter = nullptr;
    const StepRules::Options* options = nullptr;
    size_t index = 0; // index over all groups
    size_t numbers = 0; // index in numbers_
    bool by_tensors = false;
    at::Tensor copy{}; // the gradient, if its strides differ from the parameter's
  };

  void find_entries(torch::optim::Optimizer& optimizer);
  void rebuild(torch::optim::Optimizer& optimizer);
  void take_gradient(StepItem& work) const;
  void take_state(torch::optim::Optimizer& optimizer, StepItem& work) const;
  void look_at_state(torch::optim::Optimizer& optimizer, StepItem& work) const;
  void run(const StepPass& pass);
  void run_by_tensors(const StepItem& work, const StepPass& pass) const;
  void finish(const StepPass& pass) const;
  size_t numbers_of(const StepItem& work);

  const std::unique_ptr<StepRules> rules_;
  FusedOptions options_;
  bool only_tensors_ = false;
  std::vector<Group> groups_{};
  std::vector<StepItem> work_{};
  std::vector<StepNumbers> numbers_{};
  struct {
    const StepRules::Options* options = nullptr;
    int64_t step = 0;
    bool fresh = false;
  } numbers_for_{};
};

} // namespace hasten::detail
