#include "hasten/optim/gradient_norm.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <optional>

#include "hasten/base/error.h"
#include "step_engine.h"

namespace hasten {

namespace detail {

constexpr const char* kNormWhere = "optim::gradient_norm";

double tensor_norm(const at::Tensor& tensor, double p) {
  if (tensor.numel() == 0) {
    return 0;
  }
  const auto type = find_step_type(tensor.scalar_type());
  const bool known = p == 1 || p == 2 || std::isinf(p);
  if (!type || !known || tensor.layout() != at::kStrided ||
      !tensor.is_non_overlapping_and_dense()) {
    return at::linalg_vector_norm(tensor.is_sparse() ? tensor.coalesce().values() : tensor, p,
                                  std::nullopt, false, at::kDouble)
        .item<double>();
  }
  const double sum = norm_sum(tensor.const_data_ptr(), *type, tensor.numel(),
                              p == 1   ? NormKind::l1
                              : p == 2 ? NormKind::l2
                                       : NormKind::max);
  return p == 2 ? std::sqrt(sum) : sum;
}

static void check_norm_type(double norm_type) {
  if (!(norm_type > 0)) {
    throw InputError(kNormWhere, "norm_type=" + c10::str(norm_type),
                     "a number above 0, or infinity");
  }
}

/// Norms of tensors of one device, on it: [tensor] fp64.
static at::Tensor norms_on_device(std::vector<at::Tensor> tensors, double norm_type) {
  for (at::Tensor& tensor : tensors) {
    tensor = tensor.is_sparse() ? tensor.coalesce().values() : tensor;
  }
  return at::stack(at::_foreach_norm(tensors, norm_type, at::kDouble));
}

} // namespace detail

std::vector<double> tensor_norms(const std::vector<at::Tensor>& tensors, double norm_type) {
  detail::check_norm_type(norm_type);
  std::vector<double> norms(tensors.size(), 0.0);
  std::vector<at::Tensor> away; // on a device, which is waited for once
  std::vector<size_t> places;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (tensor.is_cpu()) {
      norms[i] = detail::tensor_norm(tensor, norm_type);
    } else if (tensor.numel() > 0) {
      away.push_back(tensor);
      places.push_back(i);
    }
  }
  if (!away.empty()) {
    const at::Tensor values = detail::norms_on_device(away, norm_type).cpu();
    for (size_t i = 0; i < places.size(); ++i) {
      norms[places[i]] = values[static_cast<int64_t>(i)].item<double>();
    }
  }
  return norms;
}

double norm_of_norms(const std::vector<double>& norms, double norm_type) {
  double sum = 0;
  for (const double norm : norms) {
    if (std::isinf(norm_type)) {
      sum = sum >= norm || std::isnan(sum) ? sum : norm;
    } else {
      sum += norm_type == 2 ? norm * norm : norm_type == 1 ? norm : std::pow(norm, norm_type);
    }
  }
  return norm_type == 2                            ? std::sqrt(sum)
         : norm_type == 1 || std::isinf(norm_type) ? sum
                                                   : std::pow(sum, 1 / norm_type);
}

DeviceScalar gradient_norm(const std::vector<at::Tensor>& tensors, double norm_type) {
  detail::check_norm_type(norm_type);
  std::vector<at::Tensor> away;
  std::ranges::copy_if(tensors, std::back_inserter(away), [&](const at::Tensor& tensor) {
    return !tensor.is_cpu() && tensor.numel() > 0 && tensor.device() == tensors[0].device();
  });
  const auto held = std::ranges::count_if(tensors, [](const auto& t) { return t.numel() > 0; });
  if (!away.empty() && std::ssize(away) == held) {
    return DeviceScalar(
        at::linalg_vector_norm(detail::norms_on_device(away, norm_type), norm_type));
  }
  return norm_of_norms(tensor_norms(tensors, norm_type), norm_type);
}

void clip_by_value_(const std::vector<at::Tensor>& tensors, double clip_value) {
  if (!(clip_value > 0)) {
    throw InputError("optim::clip_by_value_", "clip_value=" + c10::str(clip_value),
                     "a number above 0");
  }
  const at::NoGradGuard no_grad;
  if (std::ranges::none_of(tensors, &at::Tensor::is_cpu) && !tensors.empty()) {
    at::_foreach_clamp_min_(tensors, -clip_value); // a launch for the list
    at::_foreach_clamp_max_(tensors, clip_value);
    return;
  }
  for (const at::Tensor& tensor : tensors) {
    (tensor.is_sparse() ? tensor._values() : tensor).clamp_(-clip_value, clip_value);
  }
}

} // namespace hasten
