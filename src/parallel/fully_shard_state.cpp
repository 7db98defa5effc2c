// Gathering shards, norms over shards, and the state.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/optim/gradient_norm.h"
#include "hasten/parallel/fully_shard.h"
#include "shard_schedule.h"

namespace hasten {

double FullyShard::grad_norm(double norm_type) {
  std::vector<at::Tensor> gradients;
  for (const ShardedParameter& entry : parameters_) {
    if (entry.parameter.grad().defined()) {
      gradients.push_back(entry.parameter.grad());
    }
  }
  std::vector<double> norms{gradient_norm(gradients, norm_type)};
  reduce_norms(norms, norm_type);
  return norms[0];
}

// Powers are summed. For the infinity norm NaN is sent separately, because a maximum may lose it.
void FullyShard::reduce_norms(std::vector<double>& norms, double norm_type) const {
  const auto count = static_cast<int64_t>(norms.size());
  const bool largest = std::isinf(norm_type);
  const at::Tensor all = at::zeros({largest ? 2 * count : count}, at::TensorOptions(at::kDouble));
  auto* values = all.mutable_data_ptr<double>();
  for (int64_t i = 0; i < count; ++i) {
    const double norm = norms[static_cast<size_t>(i)];
    if (largest) {
      values[i] = std::isnan(norm) ? 0 : norm;
      values[count + i] = std::isnan(norm) ? 1 : 0;
    } else {
      values[i] = std::pow(norm, norm_type);
    }
  }
  communicator_->all_reduce(all, largest ? ReduceOp::MAX : ReduceOp::SUM, "norms of shards");
  for (int64_t i = 0; i < count; ++i) {
    norms[static_cast<size_t>(i)] = !largest                 ? std::pow(values[i], 1 / norm_type)
                                    : values[count + i] != 0 ? std::nan("")
                                                             : values[i];
  }
}

at::Tensor FullyShard::reduce_norm(const at::Tensor& norm, double norm_type) const {
  const at::NoGradGuard no_grad;
  const at::Tensor all = at::empty({communicator_->world_size(), 1}, norm.options());
  communicator_->all_gather_async(all, norm, "norm of shards").wait();
  return at::linalg_vector_norm(all, norm_type, {0});
}

static size_t find_parameter(const std::vector<ShardedParameter>& parameters,
                             const std::string& name) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (parameters[i].name == name) {
      return i;
    }
  }
  throw InputError("parallel::FullyShard", "the model has no parameter \"" + name + "\"",
                   "a name in parameters(); for tied parameters the first one");
}

at::Tensor FullyShard::own_slice(size_t parameter, const at::Tensor& whole) const {
  const ShardedParameter& entry = parameters_[parameter];
  const detail::ShardTensor& tensor = tensor_of(parameter);
  if (whole.sizes() != at::IntArrayRef(entry.sizes)) {
    throw InputError(
        "parallel::FullyShard",
        "a tensor for parameter \"" + entry.name + "\" has shape " + c10::str(whole.sizes()),
        "the unsharded shape " + c10::str(at::IntArrayRef(entry.sizes)));
  }
  const at::Tensor rows = whole.dim() == 0 ? whole.unsqueeze(0) : whole;
  return rows.narrow(0, entry.first_row, entry.rows).reshape(tensor.shard_sizes);
}

at::Tensor FullyShard::gather_like(size_t parameter, const at::Tensor& shard) {
  const at::NoGradGuard no_grad;
  const ShardedParameter& entry = parameters_[parameter];
  const detail::ShardTensor& tensor = tensor_of(parameter);
  if (shard.sizes() != at::IntArrayRef(tensor.shard_sizes)) {
    throw InputError(
        "parallel::FullyShard",
        "a shard of parameter \"" + entry.name + "\" has shape " + c10::str(shard.sizes()),
        c10::str(at::IntArrayRef(tensor.shard_sizes)));
  }
  const int64_t ranks = communicator_->world_size();
  at::Tensor sent = shard.detach().reshape({-1});
  if (sent.numel() < tensor.chunk()) {
    sent = at::constant_pad_nd(sent, {0, tensor.chunk() - sent.numel()});
  }
  at::Tensor chunks = at::empty({ranks, tensor.chunk()}, sent.options());
  communicator_->all_gather_async(chunks, sent, "whole of " + entry.name).wait();
  return chunks.view({-1}).narrow(0, 0, tensor.dim0 * tensor.inner).view(entry.sizes);
}

at::Tensor FullyShard::gather_parameter(const std::string& name) {
  const size_t parameter = find_parameter(parameters_, name);
  return gather_like(parameter, tensor_of(parameter).shard);
}

void FullyShard::for_each_full_parameter(
    const std::function<void(const std::string&, const at::Tensor&)>& function) {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    function(parameters_[i].name, gather_like(i, tensor_of(i).shard));
  }
}

void FullyShard::load_parameter(const std::string& name, const at::Tensor& whole) {
  const at::NoGradGuard no_grad;
  const size_t parameter = find_parameter(parameters_, name);
  at::Tensor(tensor_of(parameter).shard).copy_(own_slice(parameter, whole));
}

void FullyShard::release_buffers() { buffers_->release(); }

ShardReport FullyShard::report() const {
  ShardReport report;
  report.buffer_bytes = buffers_->bytes();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const detail::ShardTensor& tensor = tensor_of(i);
    const int64_t elements = tensor.trainable ? tensor.dim0 * tensor.inner : 0;
    report.unsharded_gradient_bytes +=
        elements * static_cast<int64_t>(c10::elementSize(tensor.flat->summed));
  }
  for (const auto& unit : schedule_->units()) {
    report.unsharded_parameter_bytes += unit->whole_bytes();
    const ShardUnitReport& part = unit->report();
    report.units.push_back(part);
    report.total.gathers += part.gathers;
    report.total.reductions += part.reductions;
    report.total.gathered_bytes += part.gathered_bytes;
    report.total.reduced_bytes += part.reduced_bytes;
    report.total.exposed_seconds += part.exposed_seconds;
  }
  return report;
}

void FullyShard::reset_report() {
  for (const auto& unit : schedule_->units()) {
    unit->report() = {};
    unit->report().name = unit->name();
  }
}

void FullyShard::save_state(NamedTensors& tensors, nlohmann::json& values) const {
  // The last reduction of a backward may still be in flight.
  schedule_->wait();
  values["begun"] = begun_;
  values["final"] = final_;
  values["used"] = nlohmann::json::array();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const detail::ShardTensor& tensor = tensor_of(i);
    const at::Tensor sum = schedule_->units()[parameters_[i].unit]->gradient_of(tensor);
    if (tensor.used) {
      values["used"].push_back(tensor.entry->name);
    }
    if (!begun_) {
      if (parameters_[i].parameter.grad().defined()) {
        tensors["grad." + tensor.entry->name] = parameters_[i].parameter.grad().detach();
      }
      continue;
    }
    if (sum.defined()) {
      tensors["grad." + tensor.entry->name] = sum;
    }
    if (tensor.sum.defined() && communicator_->world_size() > 1) {
      tensors["sum." + tensor.entry->name] = tensor.sum;
    }
    if (tensor.earlier.defined()) {
      tensors["aside." + tensor.entry->name] = tensor.earlier;
    }
  }
}

void FullyShard::load_state(const NamedTensors& tensors, const nlohmann::json& values) {
  const at::NoGradGuard no_grad;
  const auto saved = [&](const char* kind, const detail::ShardTensor& tensor) {
    const auto found = tensors.find(kind + tensor.entry->name);
    return found == tensors.end() ? at::Tensor() : found->second;
  };
  size_t known = 0;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const detail::ShardTensor& tensor = tensor_of(i);
    for (const char* kind : {"grad.", "sum.", "aside."}) {
      const at::Tensor found = saved(kind, tensor);
      const bool whole = std::string(kind) == "sum.";
      if (found.defined() &&
          (!tensor.trainable ||
           found.sizes() != at::IntArrayRef(whole ? tensor.entry->sizes : tensor.shard_sizes))) {
        throw InputError("parallel::FullyShard",
                         kind + tensor.entry->name + " has shape " + c10::str(found.sizes()),
                         "this rank's shard of the same model on the same number of ranks");
      }
      known += found.defined();
    }
  }
  if (known != tensors.size()) {
    throw InputError("parallel::FullyShard",
                     "the state has gradients of parameters that are not trainable here",
                     "the same trainable parameters");
  }
  const bool begun = values.at("begun").get<bool>();
  const bool final = values.at("final").get<bool>();
  const auto& used = values.at("used");
  cancel();
  schedule_->settle();
  for (const auto& unit : schedule_->units()) {
    if (begun) {
      unit->restore_sum();
    }
  }
  for (size_t i = 0; i < parameters_.size(); ++i) {
    detail::ShardTensor& tensor = tensor_of(i);
    tensor.used = std::find(used.begin(), used.end(), tensor.entry->name) != used.end();
    const at::Tensor grad = saved("grad.", tensor);
    const at::Tensor sum = saved("sum.", tensor);
    const at::Tensor earlier = saved("aside.", tensor);
    tensor.sum = sum.defined() ? sum.clone() : sum;
    tensor.earlier = earlier.defined() ? earlier.clone() : earlier;
    if (!grad.defined()) {
      continue;
    }
    if (!begun) {
      parameters_[i].parameter.mutable_grad() = grad.clone();
    } else if (communicator_->world_size() == 1) {
      tensor.sum = grad.clone();
    } else {
      schedule_->units()[parameters_[i].unit]->gradient_of(tensor).copy_(grad);
    }
  }
  begun_ = begun;
  final_ = final;
  if (begun) {
    schedule_->open_window();
  }
}

} // namespace hasten
