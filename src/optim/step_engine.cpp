#include "step_engine.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <deque>
#include <string>

#include "hasten/base/error.h"
#include "hasten/core/random.h"
#include "hasten/core/vector_kernels.h"

namespace hasten {

static torch::optim::Optimizer& optimizer_of(FusedOptimizer& optimizer) {
  return dynamic_cast<torch::optim::Optimizer&>(optimizer);
}

void FusedOptimizer::step_scaled(double factor) {
  engine_->update(optimizer_of(*this), {factor, detail::GradientAfter::scaled});
}

void FusedOptimizer::step_and_zero(double factor) {
  engine_->update(optimizer_of(*this), {factor, detail::GradientAfter::zero});
}

void FusedOptimizer::set_found_inf(at::Tensor found_inf) {
  engine_->set_found_inf(std::move(found_inf));
}

std::string FusedOptimizer::name() const {
  const std::string where = engine_->rules().where();
  return where.substr(where.rfind(':') + 1);
}

bool FusedOptimizer::by_elements() const { return engine_->rules().traits().by_elements; }

namespace detail {

// Elements of one task, if several threads work.
constexpr int64_t kStepTask = 64 * kStepBlock;

std::optional<StepType> find_step_type(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return StepType::f32;
    case at::kDouble:
      return StepType::f64;
    case at::kBFloat16:
      return StepType::bf16;
    case at::kHalf:
      return StepType::f16;
    default:
      return std::nullopt;
  }
}

StepType step_type_of(const at::Tensor& tensor, const char* where) {
  const auto type = find_step_type(tensor.scalar_type());
  if (!type) {
    throw InputError(
        where,
        "a parameter or gradient has dtype=" + std::string(c10::toString(tensor.scalar_type())),
        "Float, Double, BFloat16 or Half");
  }
  return *type;
}

bool is_16_bit(StepType type) { return type == StepType::bf16 || type == StepType::f16; }

at::Tensor StepRules::make_moment(int, const at::Tensor& parameter, const Options&,
                                  at::ScalarType dtype) const {
  return at::zeros_like(parameter, dtype);
}

// Each step calls it, and a hash set of the parameters is slow for many small tensors. If the groups
// list the same objects as at the last check, none of them is repeated.
void StepEngine::check(torch::optim::Optimizer& optimizer) {
  size_t count = 0;
  bool same = true;
  for (const auto& group : optimizer.param_groups()) {
    rules_->check(group.options());
    for (const at::Tensor& parameter : group.params()) {
      same = same && count < known_.size() &&
             known_[count].parameter == parameter.unsafeGetTensorImpl();
      ++count;
    }
  }
  if (same && count == known_.size()) {
    return;
  }
  known_.clear();
  ska::flat_hash_set<const void*> seen;
  for (auto& group : optimizer.param_groups()) {
    std::erase_if(group.params(), [&](const at::Tensor& parameter) {
      return !seen.insert(parameter.unsafeGetTensorImpl()).second;
    });
    for (const at::Tensor& parameter : group.params()) {
      known_.emplace_back().parameter = parameter.unsafeGetTensorImpl();
    }
  }
}

void StepEngine::update(torch::optim::Optimizer& optimizer, const StepPass& pass) {
  const at::NoGradGuard no_grad;
  check(optimizer);
  std::vector<StepItem> items;
  items.reserve(known_.size());
  uint64_t index = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      if (parameter.grad().defined()) {
        items.push_back({parameter, group.options(), index});
        take_parameter(items.back());
        take_gradient(items.back()); // may throw: nothing has changed so far
      }
      ++index;
    }
  }
  for (StepItem& item : items) {
    take_state(optimizer, item);
  }
  run(items, pass);
  finish(items, pass);
}

int64_t StepEngine::make_state(torch::optim::Optimizer& optimizer) {
  check(optimizer);
  int64_t bytes = 0;
  uint64_t index = 0;
  for (const auto& group : optimizer.param_groups()) {
    for (const at::Tensor& parameter : group.params()) {
      StepItem item{parameter, group.options(), index++};
      take_parameter(item);
      take_state(optimizer, item);
      for (const at::Tensor* tensor : item.parts.tensors()) {
        bytes +=
            tensor != nullptr && tensor->defined() ? static_cast<int64_t>(tensor->nbytes()) : 0;
      }
    }
  }
  return bytes;
}

void StepEngine::take_parameter(StepItem& item) const {
  item.arrays.parameter_type = step_type_of(item.parameter, rules_->where());
  item.arrays.count = item.parameter.numel();
  item.by_tensors = only_tensors_ || !item.parameter.is_cpu();
}

void StepEngine::take_gradient(StepItem& item) const {
  const at::Tensor& parameter = item.parameter;
  const at::Tensor& gradient = parameter.grad();
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
  StepArrays& arrays = item.arrays;
  arrays.gradient_type = step_type_of(gradient, where);
  if (!parameter.is_contiguous() || !gradient.is_contiguous()) {
    if (!parameter.is_non_overlapping_and_dense()) {
      throw InputError(
          where,
          "a parameter's memory has holes or overlaps: strides=" + c10::str(parameter.strides()),
          "a dense tensor", "make it contiguous() before it is registered");
    }
    if (rules_->traits().by_rows && !parameter.is_contiguous()) {
      item.by_tensors = true;
    } else if (parameter.strides() != gradient.strides()) {
      item.copy = at::empty_like(parameter, gradient.scalar_type()).copy_(gradient);
    }
  }
  if (!item.by_tensors) {
    arrays.parameter = parameter.mutable_data_ptr();
    arrays.gradient =
        item.copy.defined() ? item.copy.mutable_data_ptr() : gradient.mutable_data_ptr();
  }
}

bool StepEngine::Known::fits(const StepItem& item) const {
  const at::Tensor& now = item.parameter;
  const auto state = item.parts.tensors();
  return arrays.parameter_type == item.arrays.parameter_type && now.device() == device &&
         now.sizes() == sizes && now.strides() == strides &&
         std::equal(state.begin(), state.end(), tensors.begin(), tensors.end(),
                    [](const at::Tensor* tensor, const WeakTensor& then) {
                      return tensor == nullptr ||
                             tensor->unsafeGetTensorImpl() == then._unsafe_get_target();
                    });
}

void StepEngine::take_state(torch::optim::Optimizer& optimizer, StepItem& item) {
  StepArrays& arrays = item.arrays;
  const at::Tensor& parameter = item.parameter;
  const bool by_rows = rules_->traits().by_rows;
  item.parts = rules_->parts(parameter, optimizer.state()[parameter.unsafeGetTensorImpl()]);
  arrays.moment_type = arrays.parameter_type == StepType::f64 ? StepType::f64
                       : options_.bf16_moments && !by_rows    ? StepType::bf16
                                                              : StepType::f32;
  const at::ScalarType dtype = arrays.moment_type == StepType::f64    ? at::kDouble
                               : arrays.moment_type == StepType::bf16 ? at::kBFloat16
                                                                      : at::kFloat;
  for (int i = 0; i < 3; ++i) {
    at::Tensor* moment = item.parts.moments[static_cast<size_t>(i)];
    if (moment != nullptr && !moment->defined()) {
      *moment = rules_->make_moment(i, parameter, item.options, dtype);
      item.fresh = item.fresh || (i == 0 && moment->defined());
    }
  }
  Known& known = known_[item.index];
  if (known.fits(item)) {
    std::copy_n(known.arrays.moments, 3, arrays.moments);
    arrays.master = known.arrays.master;
    arrays.rows = known.arrays.rows;
    arrays.columns = known.arrays.columns;
    return;
  }
  for (int i = 0; i < 3; ++i) {
    at::Tensor* moment = item.parts.moments[static_cast<size_t>(i)];
    if (moment == nullptr || !moment->defined()) {
      continue;
    }
    if (!by_rows && moment->sizes() != parameter.sizes()) {
      throw InputError(rules_->where(),
                       "the state of a parameter has shape=" + c10::str(moment->sizes()),
                       "the parameter's " + c10::str(parameter.sizes()));
    } else if (moment->scalar_type() != dtype || moment->device() != parameter.device() ||
               (!by_rows && moment->strides() != parameter.strides())) {
      *moment = (by_rows ? at::empty_like(*moment, parameter.options().dtype(dtype))
                         : at::empty_like(parameter, dtype))
                    .copy_(*moment);
    }
    if (!item.by_tensors) {
      arrays.moments[i] = moment->mutable_data_ptr();
    }
  }
  if (is_16_bit(arrays.parameter_type) && options_.master_weights) {
    at::Tensor& master = *item.parts.master;
    if (!master.defined() || master.device() != parameter.device() ||
        master.strides() != parameter.strides()) {
      const at::Tensor from = master.defined() ? master : parameter;
      master = at::empty_like(parameter, at::kFloat).copy_(from);
    }
    arrays.master = item.by_tensors ? nullptr : master.mutable_data_ptr<float>();
  }
  if (by_rows && parameter.dim() >= 2) {
    arrays.rows = parameter.size(-2);
    arrays.columns = parameter.size(-1);
  }
  known.tensors.clear();
  for (const at::Tensor* tensor : item.parts.tensors()) {
    known.tensors.emplace_back((tensor != nullptr ? *tensor : at::Tensor()).getIntrusivePtr());
  }
  known.sizes = parameter.sizes();
  known.strides = parameter.strides();
  known.device = parameter.device();
  known.arrays = arrays;
}

void StepEngine::run(std::vector<StepItem>& items, const StepPass& pass) const {
  struct Task {
    const StepItem* item;
    int64_t begin, end;
  };
  std::vector<Task> tasks;
  std::vector<const StepItem*> listed; // for ATen
  std::deque<StepNumbers> numbers; // addresses must stay
  const bool alone = at::get_num_threads() == 1 || at::in_parallel_region();
  const auto kernel = rules_->traits().kernel;
  const StepItem* last = nullptr; // most parameters have the numbers of the one before
  for (StepItem& item : items) {
    StepArrays& arrays = item.arrays;
    const int64_t step = ++*item.parts.step;
    if (arrays.count == 0) {
      continue;
    }
    item.numbers = last != nullptr && &last->options == &item.options &&
                           *last->parts.step == step && last->fresh == item.fresh
                       ? last->numbers
                       : &numbers.emplace_back(rules_->numbers(item.options, step, item.fresh));
    last = &item;
    if (arrays.moment_type == StepType::bf16) {
      arrays.rounding_key =
          splitmix64(splitmix64(options_.seed, static_cast<uint64_t>(step)), item.index);
    }
    if (item.by_tensors) {
      listed.push_back(&item);
    } else if (alone) {
      kernel(arrays, *item.numbers, pass, 0, arrays.count);
    } else {
      const int64_t size = rules_->traits().by_elements ? kStepTask : arrays.count;
      for (int64_t at = 0; at < arrays.count; at += size) {
        tasks.push_back({&item, at, std::min(at + size, arrays.count)});
      }
    }
  }
  at::parallel_for(0, static_cast<int64_t>(tasks.size()), 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) {
      const Task& task = tasks[static_cast<size_t>(i)];
      kernel(task.item->arrays, *task.item->numbers, pass, task.begin, task.end);
    }
  });
  const auto alike = [](const StepItem* a, const StepItem* b) {
    const auto& mine = a->parts.moments;
    return a->numbers == b->numbers && a->arrays.parameter_type == b->arrays.parameter_type &&
           a->parameter.device() == b->parameter.device() &&
           std::equal(mine.begin(), mine.end(), b->parts.moments.begin(),
                      [](const at::Tensor* x, const at::Tensor* y) {
                        return (x != nullptr && x->defined()) == (y != nullptr && y->defined());
                      });
  };
  for (auto first = listed.begin(); first != listed.end();) {
    const auto last = std::find_if_not(first, listed.end(),
                                       [&](const StepItem* item) { return alike(*first, item); });
    run_list({first, last}, pass);
    first = last;
  }
}

void StepTensors::descend(const std::vector<at::Tensor>& directions, double lr) {
  if (!found_inf) {
    at::_foreach_sub_(parameters, directions, lr);
    return;
  }
  at::_fused_sgd_(parameters, directions, /*momentum_buffer_list=*/{}, /*weight_decay=*/0,
                  /*momentum=*/0, lr, /*dampening=*/0, /*nesterov=*/false, /*maximize=*/false,
                  /*is_first_step=*/false, /*grad_scale=*/{}, found_inf);
}

/// Lists, because on a device each call costs a launch.
void StepEngine::run_list(const std::vector<const StepItem*>& items, const StepPass& pass) const {
  const auto dtype = items[0]->arrays.parameter_type == StepType::f64 ? at::kDouble : at::kFloat;
  const bool masters = is_16_bit(items[0]->arrays.parameter_type) && options_.master_weights;
  StepTensors tensors;
  tensors.step = *items[0]->parts.step;
  if (found_inf_.defined() && found_inf_.device() == items[0]->parameter.device()) {
    tensors.found_inf = found_inf_;
  }
  std::vector<at::Tensor> changed; // the pairs to copy back
  std::vector<at::Tensor> results;
  const auto in_dtype = [&](const at::Tensor& tensor) {
    at::Tensor converted = tensor.to(dtype);
    if (!converted.is_same(tensor)) {
      changed.push_back(tensor);
      results.push_back(converted);
    }
    return converted;
  };
  for (const StepItem* item : items) {
    const at::Tensor& parameter = item->parameter;
    if (masters) {
      at::Tensor& master = *item->parts.master;
      master.copy_(at::where(master.to(parameter.scalar_type()) == parameter, master,
                             parameter.to(at::kFloat)));
      tensors.parameters.push_back(master);
      changed.push_back(parameter);
      results.push_back(master);
    } else {
      tensors.parameters.push_back(in_dtype(parameter));
    }
    tensors.gradients.push_back((item->copy.defined() ? item->copy : parameter.grad()).to(dtype));
    for (size_t i = 0; i < 3; ++i) {
      if (item->parts.moments[i] != nullptr && item->parts.moments[i]->defined()) {
        tensors.moments[i].push_back(in_dtype(*item->parts.moments[i]));
      }
    }
  }
  if (pass.factor != 1) {
    tensors.gradients = at::_foreach_mul(tensors.gradients, pass.factor);
  }
  rules_->run(tensors, *items[0]->numbers);
  if (!changed.empty()) {
    at::_foreach_copy_(changed, results);
  }
}

void StepEngine::finish(const std::vector<StepItem>& items, const StepPass& pass) const {
  std::vector<at::Tensor> listed; // gradients that no kernel has written
  for (const StepItem& item : items) {
    // Neither these kernels nor ATen's increment version counters (LibTorch 2.13).
    torch::autograd::impl::bump_version(item.parameter);
    const bool writes = pass.after == GradientAfter::zero ||
                        (pass.after == GradientAfter::scaled && pass.factor != 1);
    if (!writes) {
      continue;
    }
    at::Tensor& gradient = item.parameter.mutable_grad();
    if (!item.by_tensors && !item.copy.defined()) {
      torch::autograd::impl::bump_version(gradient);
    } else {
      listed.push_back(gradient);
    }
  }
  if (!listed.empty() && pass.after == GradientAfter::zero) {
    at::_foreach_zero_(listed);
  } else if (!listed.empty()) {
    at::_foreach_mul_(listed, pass.factor);
  }
}

void engine_force_tensor_operations(StepEngine& engine) { engine.force_tensor_operations(); }

void write_state_tensor(torch::serialize::OutputArchive& archive, const char* name,
                        const at::Tensor& tensor) {
  if (tensor.defined()) {
    archive.write(name, tensor, /*is_buffer=*/true);
  }
}

} // namespace detail

} // namespace hasten
