// torch's functions that make tensors, on the device of the run (run_device.h). Without a generator
// they draw from that of the device. With a generator of the CPU, values are the same everywhere.
#pragma once

#include <torch/torch.h>

#include <utility>

#include "support/run_device.h"

namespace hasten::on_device {

using at::IntArrayRef;
using at::Scalar;
using at::Tensor;
using at::TensorOptions;

inline TensorOptions placed(const TensorOptions& options) {
  return options.device(testing_support::run_device());
}

inline Tensor moved(const Tensor& tensor) {
  const Tensor there = tensor.detach().to(testing_support::run_device());
  return there.set_requires_grad(tensor.requires_grad());
}
template <typename First, typename Second>
std::pair<First, Second> moved(const std::pair<First, Second>& pair) {
  return {moved(pair.first), moved(pair.second)};
}
/// Of a module or its holder. Moves it in place.
template <typename Module>
  requires requires(Module& module) { module->to(at::kCPU); }
Module moved(Module module) {
  module->to(testing_support::run_device());
  return module;
}

inline Tensor empty(IntArrayRef sizes, const TensorOptions& options = {}) {
  return torch::empty(sizes, placed(options));
}
inline Tensor zeros(IntArrayRef sizes, const TensorOptions& options = {}) {
  return torch::zeros(sizes, placed(options));
}
inline Tensor ones(IntArrayRef sizes, const TensorOptions& options = {}) {
  return torch::ones(sizes, placed(options));
}
inline Tensor full(IntArrayRef sizes, const Scalar& value, const TensorOptions& options = {}) {
  return torch::full(sizes, value, placed(options));
}
inline Tensor eye(int64_t n, const TensorOptions& options = {}) {
  return torch::eye(n, placed(options));
}
inline Tensor arange(const Scalar& end, const TensorOptions& options = {}) {
  return torch::arange(end, placed(options));
}
inline Tensor arange(const Scalar& start, const Scalar& end, const TensorOptions& options = {}) {
  return torch::arange(start, end, placed(options));
}
inline Tensor linspace(const Scalar& start, const Scalar& end, int64_t steps,
                       const TensorOptions& options = {}) {
  return torch::linspace(start, end, steps, placed(options));
}
inline Tensor tensor(const torch::detail::TensorDataContainer& values,
                     const TensorOptions& options = {}) {
  return moved(torch::tensor(values, options));
}
inline Tensor rand(IntArrayRef sizes, const TensorOptions& options = {}) {
  return torch::rand(sizes, placed(options));
}
inline Tensor rand(IntArrayRef sizes, const at::Generator& generator,
                   const TensorOptions& options = {}) {
  return moved(torch::rand(sizes, generator, options));
}
inline Tensor randn(IntArrayRef sizes, const TensorOptions& options = {}) {
  return torch::randn(sizes, placed(options));
}
inline Tensor randn(IntArrayRef sizes, const at::Generator& generator,
                    const TensorOptions& options = {}) {
  return moved(torch::randn(sizes, generator, options));
}
inline Tensor randint(int64_t high, IntArrayRef sizes, const TensorOptions& options = at::kLong) {
  return torch::randint(high, sizes, placed(options));
}
inline Tensor randint(int64_t low, int64_t high, IntArrayRef sizes,
                      const TensorOptions& options = at::kLong) {
  return torch::randint(low, high, sizes, placed(options));
}
inline Tensor randint(int64_t low, int64_t high, IntArrayRef sizes, const at::Generator& generator,
                      const TensorOptions& options = at::kLong) {
  return moved(torch::randint(low, high, sizes, generator, options));
}

} // namespace hasten::on_device
