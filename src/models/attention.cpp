#include "attention.h"

#include <ATen/ATen.h>

#include <cmath>

#include "dropout.h"
#include "narrow_attention.h"

namespace hasten::detail {

at::Tensor self_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& mask, int64_t heads, double dropout) {
  if (takes_narrow_attention(q, k, v)) {
    return narrow_attention(q, k, v, mask, heads, dropout);
  }
  const int64_t rows = q.size(0);
  const int64_t queries = q.size(1);
  const int64_t width = q.size(2) / heads;
  const auto by_head = [&](const at::Tensor& x) { // [B, heads, T, width]
    return x.view({rows, x.size(1), heads, width}).transpose(1, 2);
  };
  at::Tensor context;
  if (dropout <= 0) {
    std::optional<at::Tensor> bias;
    if (mask.defined()) {
      bias = mask.expand({rows, heads, queries, k.size(1)});
    }
    context = at::scaled_dot_product_attention(by_head(q), by_head(k), by_head(v), bias);
  } else {
    const double scale = 1.0 / std::sqrt(static_cast<double>(width));
    at::Tensor scores = at::matmul(by_head(q) * scale, by_head(k).transpose(2, 3));
    if (mask.defined()) {
      scores = scores + mask;
    }
    context = at::matmul(dropout_add(at::softmax(scores, -1), {}, dropout), by_head(v));
  }
  return context.transpose(1, 2).reshape({rows, queries, heads * width});
}

} // namespace hasten::detail
