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

#include "core/blockwise_8bit.h"
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

// Elements of one list on a device; a larger tensor is alone. It bounds the memory of temporaries.
constexpr int64_t kListElements = int64_t{1} << 25;

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
      same = same && count < known_.size() && known_[count] == parameter.unsafeGetTensorImpl();
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
      known_.push_back(parameter.unsafeGetTensorImpl());
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
  item.in_8_bits = item.parameter.is_contiguous() && item.arrays.count > 0 &&
                   item.arrays.parameter_type != StepType::f64 &&
                   static_cast<uint64_t>(item.arrays.count) >= options_.min_8bit_size;
}

void StepEngine::take_gradient(StepItem& item) const {
  const at::Tensor& parameter = item.parameter;
  const at::Tensor& gradient = parameter.grad();
  const char* where = rules_->where();
  if (gradient.layout() != at::kStrided) {
    throw InputError(where, "a gradient is sparse: shape=" + c10::str(gradient.sizes()),
                     "dense gradients",
                     "build the embedding with sparse=false, or use torch::optim::SGD or Adagrad");
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

bool convert_moment(at::Tensor& moment, at::Tensor& absmax, bool is_signed, bool to_codes) {
  const bool codes = moment.defined() && moment.scalar_type() == at::kByte;
  if (codes && (!absmax.defined() || absmax.numel() != blocks_8bit(moment.numel()))) {
    return false;
  }
  if (codes && !to_codes) {
    moment = dequantize_blockwise({moment}, {absmax}, is_signed)[0];
  } else if (to_codes && !codes) {
    const at::Tensor values = moment.to(at::kFloat);
    moment = at::empty(values.sizes(), values.options().dtype(at::kByte));
    absmax = at::empty({blocks_8bit(values.numel())}, values.options());
    quantize_blockwise({values}, {moment}, {absmax}, is_signed);
  }
  absmax = to_codes ? absmax : at::Tensor();
  return true;
}

// The state's tensors are looked at in each step, because others hold them: set_data(), resize_() and a
// loaded state change them in place.
void StepEngine::take_state(torch::optim::Optimizer& optimizer, StepItem& item) const {
  StepArrays& arrays = item.arrays;
  const at::Tensor& parameter = item.parameter;
  const at::IntArrayRef sizes = parameter.sizes(), strides = parameter.strides();
  const at::Device device = parameter.device();
  const bool by_rows = rules_->traits().by_rows, contiguous = parameter.is_contiguous();
  item.parts = rules_->parts(parameter, optimizer.state()[parameter.unsafeGetTensorImpl()]);
  arrays.moment_type = arrays.parameter_type == StepType::f64 ? StepType::f64
                       : options_.bf16_moments && !by_rows    ? StepType::bf16
                                                              : StepType::f32;
  const at::ScalarType dtype = arrays.moment_type == StepType::f64    ? at::kDouble
                               : arrays.moment_type == StepType::bf16 ? at::kBFloat16
                                                                      : at::kFloat;
  const auto refuse = [&](const at::Tensor& state, const std::string& expected) {
    throw InputError(rules_->where(),
                     "the state of a parameter has shape=" + c10::str(state.sizes()) +
                         ", bytes=" + std::to_string(state.storage().nbytes()),
                     expected + ", of a parameter " + c10::str(parameter.sizes()));
  };
  // The kernels read the memory in the parameter's order.
  const auto take = [&](at::Tensor& state, at::ScalarType type, bool in_rows) {
    const bool ordered = in_rows
                             ? item.by_tensors || state.is_contiguous()
                             : (contiguous && state.is_contiguous()) || state.strides() == strides;
    if (state.scalar_type() != type || state.device() != device || !ordered) {
      state = (in_rows ? at::empty(state.sizes(), parameter.options().dtype(type))
                       : at::empty_like(parameter, type))
                  .copy_(state);
    }
    void* const data = item.by_tensors ? nullptr : state.mutable_data_ptr();
    if (data == nullptr && !item.by_tensors && arrays.count > 0) {
      refuse(state, "its memory");
    }
    return data;
  };
  for (size_t i = 0; i < 3; ++i) {
    at::Tensor* moment = item.parts.moments[i];
    if (moment == nullptr) {
      continue;
    }
    at::Tensor* absmax = item.parts.absmax[i];
    const bool codes = item.in_8_bits && absmax != nullptr;
    if (!moment->defined()) {
      *moment = rules_->make_moment(static_cast<int>(i), parameter, item.options,
                                    codes ? at::kByte : dtype);
      if (codes) {
        *absmax = at::zeros(blocks_8bit(arrays.count), parameter.options().dtype(at::kFloat));
      }
      item.fresh = item.fresh || (i == 0 && moment->defined());
      if (!moment->defined()) {
        continue;
      }
    }
    const bool in_rows = by_rows && i < 2 && parameter.dim() >= 2;
    if (in_rows && moment->numel() * parameter.size(i == 0 ? -1 : -2) != arrays.count) {
      refuse(*moment, "a mean for each row or column");
    } else if (!in_rows && moment->sizes() != sizes) {
      refuse(*moment, "the parameter's");
    }
    if (absmax != nullptr) {
      if (!convert_moment(*moment, *absmax, i == 0, codes)) {
        refuse(*moment, "one absmax for each block");
      }
      arrays.absmax[i] = codes ? static_cast<float*>(take(*absmax, at::kFloat, true)) : nullptr;
    }
    arrays.moments[i] = take(*moment, codes ? at::kByte : dtype, in_rows);
  }
  if (is_16_bit(arrays.parameter_type) && options_.master_weights) {
    at::Tensor& master = *item.parts.master;
    if (!master.defined()) {
      master = at::empty_like(parameter, at::kFloat).copy_(parameter);
    } else if (master.sizes() != sizes) {
      refuse(master, "the parameter's");
    }
    arrays.master = static_cast<float*>(take(master, at::kFloat, false));
  }
  if (by_rows && parameter.dim() >= 2) {
    arrays.rows = parameter.size(-2);
    arrays.columns = parameter.size(-1);
  }
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
  for (auto first = listed.begin(); first != listed.end();) {
    const StepItem* const head = *first; // its list: the items like it, up to kListElements
    int64_t count = 0;
    const auto last = std::stable_partition(first, listed.end(), [&](const StepItem* item) {
      const bool taken = item == head || (item->alike(*head, rules_->traits().by_rows) &&
                                          count + item->arrays.count <= kListElements);
      count += taken ? item->arrays.count : 0;
      return taken;
    });
    run_list({first, last}, pass);
    first = last;
  }
}

bool StepEngine::StepItem::alike(const StepItem& other, bool by_rows) const {
  const auto has = [](const at::Tensor* x, const at::Tensor* y) {
    return (x != nullptr && x->defined()) == (y != nullptr && y->defined());
  };
  const auto& moments = parts.moments;
  return numbers == other.numbers && in_8_bits == other.in_8_bits &&
         arrays.parameter_type == other.arrays.parameter_type &&
         arrays.gradient_type == other.arrays.gradient_type &&
         parameter.device() == other.parameter.device() &&
         (!by_rows || parameter.sizes() == other.parameter.sizes()) &&
         std::equal(moments.begin(), moments.end(), other.parts.moments.begin(), has);
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

// The memory of dense tensors as vectors.
std::vector<at::Tensor> laid_out(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> vectors;
  for (const at::Tensor& tensor : tensors) {
    vectors.push_back(tensor.as_strided({tensor.numel()}, {1}));
  }
  return vectors;
}

// A parameter that was changed by others is its master's new value: each element of a master that
// does not round to the parameter's is set to it.
void follow_parameters(const std::vector<at::Tensor>& masters,
                       const std::vector<at::Tensor>& parameters) {
  const auto vectors = laid_out(masters);
  const at::Tensor given = at::cat(laid_out(parameters));
  const at::Tensor own = at::cat(vectors);
  std::vector<int64_t> sizes;
  for (const at::Tensor& vector : vectors) {
    sizes.push_back(vector.numel());
  }
  const at::Tensor now = at::where(own.to(given.scalar_type()) == given, own, given);
  at::_foreach_copy_(vectors, now.split_with_sizes(sizes));
}

/// Lists, because on a device each call costs a launch.
void StepEngine::run_list(const std::vector<const StepItem*>& items, const StepPass& pass) const {
  const StepItem& first = *items[0];
  const auto dtype = first.arrays.parameter_type == StepType::f64 ? at::kDouble : at::kFloat;
  StepTensors tensors;
  tensors.step = *first.parts.step;
  if (found_inf_.defined() && found_inf_.device() == first.parameter.device()) {
    tensors.found_inf = found_inf_;
  }
  std::vector<at::Tensor> parameters, masters, absmax[3];
  for (const StepItem* item : items) {
    parameters.push_back(item->parameter);
    tensors.gradients.push_back(item->copy.defined() ? item->copy : item->parameter.grad());
    for (size_t i = 0; i < 3; ++i) {
      if (item->parts.moments[i] != nullptr && item->parts.moments[i]->defined()) {
        tensors.moments[i].push_back(*item->parts.moments[i]);
      }
      if (item->in_8_bits && item->parts.absmax[i] != nullptr) {
        absmax[i].push_back(*item->parts.absmax[i]);
      }
    }
    if (is_16_bit(item->arrays.parameter_type) && options_.master_weights) {
      masters.push_back(*item->parts.master);
    }
  }
  const auto in_dtype = [&](const std::vector<at::Tensor>& list) {
    if (list.empty() || list[0].scalar_type() == dtype) {
      return list;
    }
    std::vector<at::Tensor> converted;
    for (const at::Tensor& tensor : list) {
      converted.push_back(at::empty_like(tensor, dtype));
    }
    at::_foreach_copy_(converted, list);
    return converted;
  };
  if (!masters.empty()) {
    follow_parameters(masters, parameters);
  }
  tensors.parameters = masters.empty() ? in_dtype(parameters) : masters;
  const auto gradients = in_dtype(tensors.gradients);
  tensors.gradients = pass.factor != 1 ? at::_foreach_mul(gradients, pass.factor) : gradients;
  const auto moments = tensors.moments;
  for (size_t i = 0; i < 3; ++i) {
    tensors.moments[i] = absmax[i].empty() ? in_dtype(moments[i])
                                           : dequantize_blockwise(moments[i], absmax[i], i == 0);
  }
  rules_->run(tensors, *first.numbers);
  const auto store = [](const std::vector<at::Tensor>& stored,
                        const std::vector<at::Tensor>& from) {
    if (!stored.empty() && !stored[0].is_same(from[0])) {
      at::_foreach_copy_(stored, from);
    }
  };
  store(parameters, tensors.parameters);
  for (size_t i = 0; i < 3; ++i) {
    absmax[i].empty() ? store(moments[i], tensors.moments[i])
                      : quantize_blockwise(tensors.moments[i], moments[i], absmax[i], i == 0);
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
