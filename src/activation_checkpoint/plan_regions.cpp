// Regions over several blocks of a model that has its own loop over blocks.
//
// Note [Regions over several calls]
// The model's loop calls block after block, so no single function covers a region. But each call
// passes a Forward that can be run again at any time, and a tensor that leaves one block is the
// same object when it enters the next. So the calls of a pass are recorded as a program: steps with
// numbers for the tensors that go in and out. A region is a range of steps. Its first call opens
// it, the following calls run under its hooks, and its last call closes it. Its recomputation runs
// the range from the program. What the model computes between blocks is not run again: a tensor
// from there is an input of the region and stays in memory.
//
// Forward and recomputation must save the same tensors in the same order. Inputs of an inner region
// count as saved by the outer one, in the order in which the calls first use them.
#include <ATen/SequenceNumber.h>
#include <c10/util/intrusive_ptr.h>

#include <algorithm>
#include <span>
#include <unordered_map>
#include <utility>

#include "block_regions.h"
#include "hasten/activation_checkpoint/op_policy.h"
#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "region.h"

namespace hasten::detail {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, at::UndefinedTensorImpl>;
constexpr int kNoTensor = -1;

static bool contains(const std::vector<int>& values, int value) {
  return std::ranges::find(values, value) != values.end();
}

// One block's call.
struct ProgramStep {
  RegionForward forward{};
  std::vector<int> inputs{}; // numbers of values; kNoTensor if undefined
  std::vector<int> outputs{};
  ForwardState state{}; // at its start
};

// The calls of one pass through the model.
struct Program {
  std::vector<ProgramStep> steps{};
  std::vector<WeakTensor> values{}; // the tensor of each value, while it lives

  int value_of(const at::Tensor& tensor) {
    if (!tensor.defined()) {
      return kNoTensor;
    }
    const c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    for (size_t i = values.size(); i-- > 0;) {
      if (values[i]._unsafe_get_target() == impl && !values[i].expired()) {
        return static_cast<int>(i);
      }
    }
    values.emplace_back(tensor.getIntrusivePtr());
    return static_cast<int>(values.size()) - 1;
  }

  /// Values that steps [first, last) read but do not make, in the order of first use.
  std::vector<int> externals(size_t first, size_t last) const {
    std::vector<int> found;
    for (size_t i = first; i < last; ++i) {
      for (const int value : steps[i].inputs) {
        if (value != kNoTensor && !occurs(value, &ProgramStep::outputs, first, i) &&
            !contains(found, value)) {
          found.push_back(value);
        }
      }
    }
    return found;
  }
  /// Whether one of steps [first, last) has the value in its `list`: &ProgramStep::inputs or outputs.
  bool occurs(int value, std::vector<int> ProgramStep::*list, size_t first, size_t last) const {
    return std::ranges::any_of(
        std::span(steps).subspan(first, last - first),
        [&](const ProgramStep& step) { return contains(step.*list, value); });
  }
};

// A region of the plan as steps of a program.
struct StepRegion {
  size_t first = 0;
  size_t last = 0;
  ActivationCheckpointOptions options{};
};

// Runs the range [first, last) from the program. `given` are its externals. Returns the values in
// `wanted`.
static std::vector<at::Tensor> run_steps(const std::shared_ptr<const Program>& program,
                                         const std::vector<StepRegion>& inner, size_t first,
                                         size_t last, std::vector<at::Tensor> given,
                                         const std::vector<int>& wanted) {
  std::unordered_map<int, at::Tensor> tensors;
  const std::vector<int> externals = program->externals(first, last);
  for (size_t i = 0; i < externals.size(); ++i) {
    tensors[externals[i]] = std::move(given[i]);
  }
  given.clear();
  const auto is_needed = [&](int value, size_t from) {
    return contains(wanted, value) || program->occurs(value, &ProgramStep::inputs, from, last);
  };
  for (size_t at = first; at < last;) {
    const auto region = std::ranges::find_if(
        inner, [&](const StepRegion& candidate) { return candidate.first == at; });
    size_t next = at + 1;
    std::vector<at::Tensor> inputs;
    std::vector<at::Tensor> outputs;
    std::vector<int> made;
    if (region == inner.end()) {
      const ProgramStep& step = program->steps[at];
      for (const int value : step.inputs) {
        inputs.push_back(value == kNoTensor ? at::Tensor() : tensors[value]);
      }
      step.state.restore();
      outputs = step.forward(std::move(inputs));
      made = step.outputs;
    } else {
      next = std::min(region->last, last); // the model may have stopped early
      for (const int value : program->externals(at, next)) {
        inputs.push_back(tensors[value]);
      }
      for (size_t i = at; i < next; ++i) {
        for (const int value : program->steps[i].outputs) {
          if (is_needed(value, next)) {
            made.push_back(value);
          }
        }
      }
      std::vector<StepRegion> deeper; // regions inside this one
      std::copy_if(region + 1, inner.end(), std::back_inserter(deeper),
                   [&](const StepRegion& candidate) { return candidate.first < next; });
      program->steps[at].state.restore();
      outputs = run_region(
          [program, deeper, at, next, made](std::vector<at::Tensor> values) {
            return run_steps(program, deeper, at, next, std::move(values), made);
          },
          std::move(inputs), region->options);
    }
    inputs.clear();
    for (size_t i = 0; i < made.size() && i < outputs.size(); ++i) {
      if (made[i] != kNoTensor) {
        tensors[made[i]] = std::move(outputs[i]);
      }
    }
    outputs.clear();
    std::erase_if(tensors, [&](const auto& entry) { return !is_needed(entry.first, next); });
    at = next;
  }
  return mapped(wanted, [&](int value) { return tensors[value]; });
}

// One pass of a thread through the blocks.
class PlanPass {
 public:
  PlanPass(std::shared_ptr<const ActivationPlan> plan, const ActivationCheckpointOptions& options)
      : plan_(std::move(plan)), options_(options), program_(std::make_shared<Program>()) {}

  int64_t next() const { return next_; }
  bool done() const { return next_ == static_cast<int64_t>(plan_->blocks.size()); }

  std::vector<at::Tensor> call(int64_t index, const std::shared_ptr<torch::nn::Module>& block,
                               std::vector<at::Tensor> inputs, const Forward& forward) {
    next_ = index + 1;
    const size_t step = program_->steps.size();
    if (step == 0) {
      first_block_ = index;
    }
    ProgramStep& written = program_->steps.emplace_back();
    written.forward = block_part(block, forward);
    for (const at::Tensor& input : inputs) {
      written.inputs.push_back(program_->value_of(input));
    }
    written.state = ForwardState::now(inputs, options_.preserve_rng_state);
    // From outermost to innermost, each under the hooks of the region around it.
    for (size_t depth = 0; depth < open_.size(); ++depth) {
      save_inputs(depth, inputs, written.inputs);
      *open_[depth].last_step = program_->steps.size();
    }
    open_regions(index, step, inputs, written.inputs);
    const RegionForward part = written.forward; // the vector of steps may be reallocated
    std::vector<at::Tensor> outputs;
    if (open_.empty()) {
      outputs = part(std::move(inputs));
    } else { // the region's kept results are saved under the hooks of the region around it
      const HookScope under(hooks_around(open_.size() - 1));
      outputs = open_.back().region->run_forward(part, std::move(inputs));
    }
    for (const at::Tensor& output : outputs) {
      program_->steps[step].outputs.push_back(program_->value_of(output));
    }
    while (!open_.empty() && open_.back().blocks.last == index + 1) {
      const OpenRegion closed = std::move(open_.back());
      open_.pop_back();
      closed.region->finish_forward(outputs, closed.first_node);
    }
    return outputs;
  }

 private:
  struct OpenRegion {
    PlanRegion blocks;
    std::shared_ptr<Region> region;
    uint64_t first_node;
    std::shared_ptr<size_t> last_step; // end of its recomputation
    std::vector<int> known{}; // values that are its inputs
  };

  // The hooks of the region around the one at this depth.
  SavedHookFactory* hooks_around(size_t depth) const {
    return depth == 0 ? current_hook_factory() : open_[depth - 1].region.get();
  }

  // Saves inputs that the open region at this depth does not have yet.
  void save_inputs(size_t depth, const std::vector<at::Tensor>& inputs,
                   const std::vector<int>& values) {
    OpenRegion& open = open_[depth];
    const auto first = static_cast<size_t>(std::max<int64_t>(0, open.blocks.first - first_block_));
    for (size_t i = 0; i < inputs.size(); ++i) {
      // A step of the region may make this value.
      if (values[i] != kNoTensor && !contains(open.known, values[i]) &&
          !program_->occurs(values[i], &ProgramStep::outputs, first, program_->steps.size() - 1)) {
        open.known.push_back(values[i]);
        const HookScope under(hooks_around(depth));
        open.region->save_inputs({inputs[i]});
      }
    }
  }

  void open_regions(int64_t index, size_t step, const std::vector<at::Tensor>& inputs,
                    const std::vector<int>& values) {
    for (const PlanRegion& blocks : plan_->regions) {
      const bool inside = blocks.first <= index && index < blocks.last;
      const bool is_open =
          std::ranges::any_of(open_, [&](const OpenRegion& open) { return open.blocks == blocks; });
      if (!inside || is_open) {
        continue;
      }
      OpenRegion open;
      open.blocks = blocks;
      open.region = std::make_shared<Region>(options_of(blocks),
                                             open_.empty() ? nullptr : open_.back().region.get());
      open.region->save_state(inputs);
      open.first_node = at::sequence_number::peek();
      open.last_step = std::make_shared<size_t>(step + 1);
      open.region->set_recompute(recompute_of(blocks, step, open.last_step));
      open_.push_back(std::move(open));
      save_inputs(open_.size() - 1, inputs, values);
    }
  }

  RegionForward recompute_of(const PlanRegion& blocks, size_t step,
                             const std::shared_ptr<size_t>& last_step) {
    std::vector<StepRegion> inner;
    for (const PlanRegion& other : plan_->regions) {
      const bool smaller = other.last - other.first < blocks.last - blocks.first;
      if (smaller && other.first >= blocks.first && other.last <= blocks.last) {
        // Step 0 is the block with which this pass began.
        const int64_t first = std::max<int64_t>(0, other.first - first_block_);
        const int64_t last = other.last - first_block_;
        if (last > 0) {
          inner.push_back(
              {static_cast<size_t>(first), static_cast<size_t>(last), options_of(other)});
        }
      }
    }
    return [program = std::shared_ptr<const Program>(program_), inner, step,
            last_step](std::vector<at::Tensor> given) {
      // No outputs are needed: the recomputation only has to save tensors.
      return run_steps(program, inner, step, *last_step, std::move(given), {});
    };
  }

  ActivationCheckpointOptions options_of(const PlanRegion& blocks) const {
    ActivationCheckpointOptions options = options_;
    const auto name = [&](int64_t block) { return plan_->blocks[static_cast<size_t>(block)]; };
    options.name = name(blocks.first);
    if (blocks.last - blocks.first > 1) {
      options.name += " to " + name(blocks.last - 1);
    }
    if (blocks.choice == BlockChoice::keep_ops && !options.policy) {
      options.policy = OpPolicy::keep_expensive();
    }
    return options;
  }

  std::shared_ptr<const ActivationPlan> plan_;
  ActivationCheckpointOptions options_;
  std::shared_ptr<Program> program_;
  std::vector<OpenRegion> open_{}; // outermost first
  int64_t first_block_ = 0; // of the first step
  int64_t next_ = 0;
};

class PlanHandler final : public BlockHandler {
 public:
  PlanHandler(std::shared_ptr<const ActivationPlan> plan,
              const ActivationCheckpointOptions& options)
      : plan_(std::move(plan)), options_(options) {
    for (size_t i = 0; i < plan_->blocks.size(); ++i) {
      indices_[plan_->blocks[i]] = static_cast<int64_t>(i);
    }
  }

  std::vector<at::Tensor> call(const std::shared_ptr<torch::nn::Module>& block,
                               const std::string& name, std::vector<at::Tensor> inputs,
                               const Forward& forward) override {
    const auto found = indices_.find(name);
    if (found == indices_.end()) {
      throw InputError("activation_checkpoint::plan",
                       "block=" + name + " was called, but the plan does not have it",
                       "the model that was profiled", "profile this model and plan again");
    }
    if (!hook_engine_installed()) {
      // Another engine is installed: each block is a reentrant region of its own.
      const bool recomputed = std::ranges::any_of(plan_->regions, [&](const PlanRegion& region) {
        return region.first <= found->second && found->second < region.last;
      });
      const RegionForward part = block_part(block, forward);
      return recomputed ? run_region(part, std::move(inputs), options_) : part(std::move(inputs));
    }
    // A call that does not continue the order starts another pass.
    std::shared_ptr<PlanPass>& unfinished = unfinished_pass();
    std::shared_ptr<PlanPass> pass = std::exchange(unfinished, nullptr);
    if (!pass || pass->next() != found->second || found->second == 0) {
      pass = std::make_shared<PlanPass>(plan_, options_);
    }
    std::vector<at::Tensor> outputs = pass->call(found->second, block, std::move(inputs), forward);
    if (!pass->done()) {
      unfinished = std::move(pass); // not reached after an exception
    }
    return outputs;
  }

 private:
  // This thread's own.
  std::shared_ptr<PlanPass>& unfinished_pass() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return passes_[std::this_thread::get_id()];
  }

  std::shared_ptr<const ActivationPlan> plan_;
  ActivationCheckpointOptions options_;
  std::unordered_map<std::string, int64_t> indices_{};
  std::mutex mutex_;
  std::map<std::thread::id, std::shared_ptr<PlanPass>> passes_{}; // addresses must stay
};

std::shared_ptr<BlockHandler> make_plan_handler(std::shared_ptr<const ActivationPlan> plan,
                                                const ActivationCheckpointOptions& options) {
  return std::make_shared<PlanHandler>(std::move(plan), options);
}

} // namespace hasten::detail
