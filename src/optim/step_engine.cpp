#include "step_engine.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <string>
#include <unordered_set>

#include "hasten/base/error.h"
#include "hasten/core/random.h"

namespace hasten::detail {

// Elements of one task, if several threads work.
constexpr int64_t kStepTask = 64 * kStepBlock;

StepType step_type_of(const at::Tensor& tensor, const char* where) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return StepType::f32;
    case at::kDouble:
      return StepType::f64;
    case at::kBFloat16:
      return StepType::bf16;
    case at::kHalf:
      return StepType::f16;
    default:
      throw InputError(
          where,
          "a parameter or gradient has dtype=" + std::string(c10::toString(tensor.scalar_type())),
          "Float, Double, BFloat16 or Half");
  }
}

bool is_16_bit(StepType type) { return type == StepType::bf16 || type == StepType::f16; }

at::Tensor StepRules::make_moment(int, const at::Tensor& parameter, const Options&,
                                  at::ScalarType dtype) const {
  return at::zeros_like(parameter, dtype);
}

void StepEngine::check(torch::optim::Optimizer& optimizer) {
  std::unordered_set<const void*> seen;
  for (auto& group : optimizer.param_groups()) {
    rules_->check(group.options());
    std::erase_if(group.params(), [&](const at::Tensor& parameter) {
      return !seen.insert(parameter.unsafeGetTensorImpl()).second;
    });
  }
}

void StepEngine::rebuild(torch::optim::Optimizer& optimizer) {
  check(optimizer);
  groups_.clear();
  for (const auto& group : optimizer.param_groups()) {
    Group& known = groups_.emplace_back();
    known.entries.resize(group.params().size());
    for (size_t i = 0; i < known.entries.size(); ++i) {
      known.entries[i].parameter = group.params()[i].unsafeGetTensorImpl();
    }
  }
}

void StepEngine::find_entries(torch::optim::Optimizer& optimizer) {
  const auto& groups = optimizer.param_groups();
  bool same = groups.size() == groups_.size();
  for (size_t g = 0; same && g < groups.size(); ++g) {
    const auto& params = groups[g].params();
    const auto& entries = groups_[g].entries;
    same = params.size() == entries.size() &&
           std::equal(params.begin(), params.end(), entries.begin(),
                      [](const at::Tensor& parameter, const Entry& entry) {
                        return parameter.unsafeGetTensorImpl() == entry.parameter;
                      });
  }
  if (!same) {
    rebuild(optimizer);
  }
}

void StepEngine::update(torch::optim::Optimizer& optimizer, const StepPass& pass) {
  const at::NoGradGuard no_grad;
  find_entries(optimizer);
  work_.clear();
  size_t index = 0;
  for (size_t g = 0; g < groups_.size(); ++g) {
    const auto& group = optimizer.param_groups()[g];
    rules_->check(group.options());
    const int64_t kind = rules_->state_kind(group.options());
    for (size_t i = 0; i < group.params().size(); ++i, ++index) {
      Entry& entry = groups_[g].entries[i];
      if (kind != groups_[g].state_kind) {
        entry.state = nullptr;
      }
      if (!entry.parameter->grad().defined()) {
        continue;
      }
      StepItem& work = work_.emplace_back();
      work.entry = &entry;
      work.parameter = &group.params()[i];
      work.options = &group.options();
      work.index = index;
      take_gradient(work); // may throw: nothing has changed so far
    }
    groups_[g].state_kind = kind;
  }
  for (StepItem& work : work_) {
    take_state(optimizer, work);
  }
  run(pass);
  finish(pass);
  work_.clear();
}

void StepEngine::take_gradient(StepItem& work) const {
  const at::Tensor& parameter = *work.parameter;
  const at::Tensor& gradient = work.entry->parameter->grad();
  const char* where = rules_->where();
  if (gradient.layout() != at::kStrided) {
    throw InputError(where, "a gradient is sparse: shape=" + c10::str(gradient.sizes()),
                     "dense gradients", "build the embedding with sparse=false");
  }
  if (gradient.numel() != parameter.numel() || gradient.device() != parameter.device()) {
    throw InputError(
        where,
        "a gradient has shape=" + c10::str(gradient.sizes()) + " on " + gradient.device().str(),
        "its parameter's " + c10::str(parameter.sizes()) + " on " + parameter.device().str());
  }
  StepArrays& arrays = work.entry->arrays;
  const StepType type = step_type_of(parameter, where);
  if (type != arrays.parameter_type || parameter.numel() != arrays.count) {
    work.entry->state = nullptr;
  }
  arrays.parameter_type = type;
  arrays.count = parameter.numel();
  arrays.gradient_type = step_type_of(gradient, where);
  work.by_tensors = only_tensors_ || !parameter.is_cpu();
  if (!parameter.is_contiguous() || !gradient.is_contiguous()) {
    if (!parameter.is_non_overlapping_and_dense()) {
      throw InputError(
          where,
          "a parameter's memory has holes or overlaps: strides=" + c10::str(parameter.strides()),
          "a dense tensor", "make it contiguous() before it is registered");
    }
    if (rules_->by_rows() && !parameter.is_contiguous()) {
      work.by_tensors = true;
    } else if (parameter.strides() != gradient.strides()) {
      work.copy = at::empty_like(parameter, gradient.scalar_type()).copy_(gradient);
    }
  }
  if (!work.by_tensors) {
    arrays.parameter = parameter.mutable_data_ptr();
    arrays.gradient =
        work.copy.defined() ? work.copy.mutable_data_ptr() : gradient.mutable_data_ptr();
  }
}

void StepEngine::take_state(torch::optim::Optimizer& optimizer, StepItem& work) const {
  Entry& entry = *work.entry;
  const auto found = optimizer.state().find(entry.parameter);
  bool known = entry.state != nullptr && found != optimizer.state().end() &&
               found->second.get() == entry.state;
  for (size_t i = 0; known && i < 4; ++i) {
    const at::Tensor* tensor = i < 3 ? entry.parts.moments[i] : entry.parts.master;
    known = tensor == nullptr || tensor->unsafeGetTensorImpl() == entry.known[i];
  }
  if (!known) {
    look_at_state(optimizer, work);
  }
}

void StepEngine::look_at_state(torch::optim::Optimizer& optimizer, StepItem& work) const {
  Entry& entry = *work.entry;
  StepArrays& arrays = entry.arrays;
  const at::Tensor& parameter = *work.parameter;
  auto& slot = optimizer.state()[entry.parameter];
  entry.parts = rules_->parts(parameter, slot);
  entry.state = slot.get();
  arrays.moment_type = arrays.parameter_type == StepType::f64              ? StepType::f64
                       : options_.bf16_moments && rules_->rounds_moments() ? StepType::bf16
                                                                           : StepType::f32;
  const at::ScalarType dtype = arrays.moment_type == StepType::f64    ? at::kDouble
                               : arrays.moment_type == StepType::bf16 ? at::kBFloat16
                                                                      : at::kFloat;
  for (int i = 0; i < 3; ++i) {
    const auto at = static_cast<size_t>(i);
    at::Tensor* moment = entry.parts.moments[at];
    arrays.moments[i] = nullptr;
    if (moment == nullptr) {
      continue;
    }
    if (!moment->defined()) {
      *moment = rules_->make_moment(i, parameter, *work.options, dtype);
      entry.fresh = entry.fresh || (i == 0 && moment->defined());
    } else if (!rules_->by_rows() && moment->sizes() != parameter.sizes()) {
      throw InputError(rules_->where(),
                       "the state of a parameter has shape=" + c10::str(moment->sizes()),
                       "the parameter's " + c10::str(parameter.sizes()));
    } else if (moment->scalar_type() != dtype || moment->device() != parameter.device() ||
               (!rules_->by_rows() && moment->strides() != parameter.strides())) {
      *moment = (rules_->by_rows() ? at::empty_like(*moment, parameter.options().dtype(dtype))
                                   : at::empty_like(parameter, dtype))
                    .copy_(*moment);
    }
    entry.known[at] = moment->unsafeGetTensorImpl();
    if (moment->defined() && !work.by_tensors) {
      arrays.moments[i] = moment->mutable_data_ptr();
    }
  }
  at::Tensor& master = *entry.parts.master;
  arrays.master = nullptr;
  if (is_16_bit(arrays.parameter_type) && options_.master_weights) {
    if (!master.defined() || master.device() != parameter.device() ||
        master.strides() != parameter.strides()) {
      const at::Tensor from = master.defined() ? master : parameter;
      master = at::empty_like(parameter, at::kFloat).copy_(from);
    }
    arrays.master = work.by_tensors ? nullptr : master.mutable_data_ptr<float>();
  }
  entry.known[3] = master.unsafeGetTensorImpl();
  const bool factored = rules_->by_rows() && parameter.dim() >= 2;
  arrays.rows = factored ? parameter.size(-2) : 0;
  arrays.columns = factored ? parameter.size(-1) : 0;
}

size_t StepEngine::numbers_of(const StepItem& work) {
  const int64_t step = *work.entry->parts.step;
  auto& last = numbers_for_;
  if (numbers_.empty() || last.options != work.options || last.step != step ||
      last.fresh != work.entry->fresh) {
    last = {work.options, step, work.entry->fresh};
    numbers_.push_back(rules_->numbers(*work.options, step, work.entry->fresh));
  }
  return numbers_.size() - 1;
}

void StepEngine::run(const StepPass& pass) {
  numbers_.clear();
  struct Task {
    const StepItem* work;
    int64_t begin, end;
  };
  std::vector<Task> tasks;
  const bool alone = at::get_num_threads() == 1 || at::in_parallel_region();
  for (StepItem& work : work_) {
    StepArrays& arrays = work.entry->arrays;
    ++*work.entry->parts.step;
    if (arrays.count == 0) {
      continue;
    }
    work.numbers = numbers_of(work);
    if (arrays.moment_type == StepType::bf16) {
      arrays.rounding_key = splitmix64(
          splitmix64(options_.seed, static_cast<uint64_t>(*work.entry->parts.step)), work.index);
    }
    if (work.by_tensors) {
      run_by_tensors(work, pass);
    } else if (alone) {
      rules_->run(arrays, numbers_[work.numbers], pass, 0, arrays.count);
    } else {
      const int64_t size = rules_->by_elements() ? kStepTask : arrays.count;
      for (int64_t at = 0; at < arrays.count; at += size) {
        tasks.push_back({&work, at, std::min(at + size, arrays.count)});
      }
    }
  }
  at::parallel_for(0, static_cast<int64_t>(tasks.size()), 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const Task& task = tasks[static_cast<size_t>(i)];
      rules_->run(task.work->entry->arrays, numbers_[task.work->numbers], pass, task.begin,
                  task.end);
    }
  });
}

void StepEngine::run_by_tensors(const StepItem& work, const StepPass& pass) const {
  const Entry& entry = *work.entry;
  const at::Tensor& parameter = *work.parameter;
  const auto dtype = entry.arrays.parameter_type == StepType::f64 ? at::kDouble : at::kFloat;
  StepTensors tensors;
  tensors.step = *entry.parts.step;
  if (is_16_bit(entry.arrays.parameter_type) && options_.master_weights) {
    at::Tensor& master = *entry.parts.master;
    master.copy_(at::where(master.to(parameter.scalar_type()) == parameter, master,
                           parameter.to(at::kFloat)));
    tensors.parameter = master;
  } else {
    tensors.parameter = parameter.to(dtype);
  }
  tensors.gradient = (work.copy.defined() ? work.copy : entry.parameter->grad()).to(dtype);
  if (pass.factor != 1) {
    tensors.gradient = tensors.gradient.mul(pass.factor);
  }
  for (size_t i = 0; i < 3; ++i) {
    if (entry.parts.moments[i] != nullptr && entry.parts.moments[i]->defined()) {
      tensors.moments[i] = entry.parts.moments[i]->to(dtype);
    }
  }
  rules_->run(tensors, numbers_[work.numbers]);
  for (size_t i = 0; i < 3; ++i) {
    if (tensors.moments[i].defined() && !tensors.moments[i].is_same(*entry.parts.moments[i])) {
      entry.parts.moments[i]->copy_(tensors.moments[i]);
    }
  }
  if (!tensors.parameter.is_same(parameter)) {
    parameter.copy_(tensors.parameter);
  }
}

void StepEngine::finish(const StepPass& pass) const {
  for (const StepItem& work : work_) {
    work.entry->fresh = false;
    // Neither these kernels nor ATen's increment version counters (LibTorch 2.13).
    torch::autograd::impl::bump_version(*work.parameter);
    const bool writes = pass.after == GradientAfter::zero ||
                        (pass.after == GradientAfter::scaled && pass.factor != 1);
    if (!writes) {
      continue;
    }
    at::Tensor& gradient = work.entry->parameter->mutable_grad();
    if (!work.by_tensors && !work.copy.defined()) {
      torch::autograd::impl::bump_version(gradient);
    } else if (pass.after == GradientAfter::zero) {
      gradient.zero_();
    } else {
      gradient.mul_(pass.factor);
    }
  }
}

void engine_force_tensor_operations(StepEngine& engine) { engine.force_tensor_operations(); }

void write_state_tensor(torch::serialize::OutputArchive& archive, const char* name,
                        const at::Tensor& tensor) {
  if (tensor.defined()) {
    archive.write(name, tensor, /*is_buffer=*/true);
  }
}

void read_state_tensor(torch::serialize::InputArchive& archive, const char* name,
                       at::Tensor& tensor) {
  archive.try_read(name, tensor, /*is_buffer=*/true);
}

} // namespace hasten::detail
