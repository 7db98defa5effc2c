#include "attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention_rows.h"
#include "core/dropout.h"
#include "hasten/base/error.h"
#include "hasten/core/autocast.h"
#include "hasten/core/memory_rehearsal.h"

namespace hasten::detail {

static uint16_t* narrow_data(const at::Tensor& tensor) {
  return static_cast<uint16_t*>(tensor.data_ptr());
}

// The part of a matrix without padding.
struct Extent {
  int64_t rows = 0;
  int64_t columns = 0;
};

/// Calls function(row, offset, work) for each row of x [matrices, rows, columns] without padding.
/// `row` counts only these rows.
template <typename Function>
void for_rows(const at::Tensor& x, const Extent& extent, const Function& function) {
  const int64_t rows = in_memory_rehearsal() ? 0 : x.size(0) * extent.rows;
  at::parallel_for(0, rows, 64, [&](int64_t begin, int64_t end) {
    std::vector<float> work(static_cast<size_t>(x.size(2) + kRowStrands));
    for (int64_t row = begin; row < end; ++row) {
      const int64_t place = row / extent.rows * x.size(1) + row % extent.rows;
      function(row, place * x.size(2), work.data());
    }
  });
}

static void zero_padding_rows(const at::Tensor& x, const Extent& extent) {
  if (x.size(1) > extent.rows) {
    x.narrow(1, extent.rows, x.size(1) - extent.rows).zero_();
  }
}

/// x [B, T, heads * width] as [B * heads, padded T, width], contiguous.
static at::Tensor by_head(const at::Tensor& x, int64_t heads) {
  return heads_first(x, heads, padded_tokens(x.size(1))).flatten(0, 1);
}

static at::Tensor from_heads(const at::Tensor& x, int64_t heads, int64_t tokens) {
  return heads_last(x.view({x.size(0) / heads, heads, x.size(1), x.size(2)}), tokens);
}

static at::Tensor dropped(const at::Tensor& p, const Extent& extent, uint64_t seed,
                          double dropout) {
  if (dropout <= 0) {
    return p;
  }
  at::Tensor out = at::empty_like(p);
  for_rows(p, extent, [&](int64_t row, int64_t offset, float* /*work*/) {
    uint16_t* to = narrow_data(out) + offset;
    drop_row(true, narrow_data(p) + offset, block_dropout(seed, row, dropout), p.size(2), to);
  });
  zero_padding_rows(out, extent);
  return out;
}

/// self_attention for q, k, v in bf16; the result is bf16. Saves q, k, v and the probabilities in
/// bf16, and one seed. Scores and probabilities are rounded to bf16; everything between is fp32. Can
/// be differentiated once.
class NarrowAttention : public torch::autograd::Function<NarrowAttention> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& q_in,
                            const at::Tensor& k_in, const at::Tensor& v_in,
                            const std::optional<at::Tensor>& mask, int64_t heads, double dropout) {
    const at::Tensor q = by_head(q_in, heads);
    const at::Tensor k = by_head(k_in, heads);
    const at::Tensor v = by_head(v_in, heads);
    const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(q.size(2))));
    const at::Tensor scores = at::bmm(q, k.transpose(1, 2)).contiguous();
    // Not in place, because an operator policy may keep the product's result.
    const at::Tensor p = at::empty_like(scores);
    const Extent extent{q_in.size(1), k_in.size(1)};
    const int64_t rows_of_text = heads * extent.rows;
    const float* masks = mask && !in_memory_rehearsal() ? mask->const_data_ptr<float>() : nullptr;
    // The mask's row of a text and of a query; 0 where all share one.
    const int64_t of_text = mask && mask->size(0) > 1 ? mask->size(2) : 0;
    const int64_t of_query = mask && mask->size(2) > 1 ? 1 : 0;
    for_rows(scores, extent, [&](int64_t row, int64_t offset, float* work) {
      uint16_t* to = narrow_data(p) + offset;
      const int64_t mask_row = row / rows_of_text * of_text + row % extent.rows * of_query;
      const float* added = masks == nullptr ? nullptr : masks + mask_row * extent.columns;
      softmax_row(true, narrow_data(scores) + offset,
                  {added, scale, extent.columns, p.size(2), work}, to);
    });
    zero_padding_rows(p, extent);
    const uint64_t seed = dropout > 0 ? draw_dropout_seed() : 0;
    context->save_for_backward({q, k, v, p});
    context->saved_data["heads"] = heads;
    context->saved_data["dropout"] = dropout;
    context->saved_data["seed"] = static_cast<int64_t>(seed);
    context->saved_data["queries"] = extent.rows;
    context->saved_data["tokens"] = extent.columns;
    return from_heads(at::bmm(dropped(p, extent, seed, dropout), v), heads, extent.rows);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    refuse_second_derivative();
    const int64_t heads = context->saved_data["heads"].toInt();
    const double dropout = context->saved_data["dropout"].toDouble();
    const auto seed = static_cast<uint64_t>(context->saved_data["seed"].toInt());
    const auto saved = context->get_saved_variables();
    const at::Tensor &q = saved[0], &k = saved[1], &v = saved[2], &p = saved[3];
    const Extent extent{context->saved_data["queries"].toInt(),
                        context->saved_data["tokens"].toInt()};
    const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(q.size(2))));
    const at::Tensor gradient = by_head(gradients[0].to(at::kBFloat16).contiguous(), heads);
    const at::Tensor v_gradient =
        at::bmm(dropped(p, extent, seed, dropout).transpose(1, 2), gradient);
    const at::Tensor p_gradient = at::bmm(gradient, v.transpose(1, 2)).contiguous();
    // The padding is 0 already, as a product with the zeros of gradient or v.
    for_rows(p, extent, [&](int64_t row, int64_t offset, float* work) {
      uint16_t* in_place = narrow_data(p_gradient) + offset;
      softmax_backward_row(true, narrow_data(p) + offset, block_dropout(seed, row, dropout),
                           {nullptr, scale, extent.columns, p.size(2), work}, in_place);
    });
    return {from_heads(at::bmm(p_gradient, k), heads, extent.rows),
            from_heads(at::bmm(p_gradient.transpose(1, 2), q), heads, extent.columns),
            from_heads(v_gradient, heads, extent.columns),
            at::Tensor(),
            at::Tensor(),
            at::Tensor()};
  }
};

static bool takes_narrow_attention(const at::Tensor& x) {
  return x.is_cpu() && x.scalar_type() == at::kBFloat16 && x.numel() > 0;
}

/// x [B, T, heads * width] as [B, heads, T, width].
static at::Tensor split_heads(const at::Tensor& x, int64_t heads) {
  return x.view({x.size(0), x.size(1), heads, x.size(2) / heads}).transpose(1, 2);
}

/// By torch's plain operators. q [B, heads, Q, width]; k, v [B, heads, T, width]. Returns [B, Q, H].
static at::Tensor eager_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                  const at::Tensor& mask, double dropout, double softcap) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(q.size(3)));
  at::Tensor scores = softcapped(at::matmul(q * scale, k.transpose(2, 3)), softcap);
  if (mask.defined()) {
    scores = scores + mask;
  }
  const at::Tensor p = at::softmax(scores, -1).to(v.scalar_type());
  return at::matmul(dropout_add(p, {}, dropout), v).transpose(1, 2).flatten(2);
}

static at::Tensor cached_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                                   const at::Tensor& mask, const AttentionOptions& options,
                                   const AttentionPlace& place) {
  const int64_t heads = options.key_value_heads, shared_by = options.heads / heads;
  auto [keys, values] =
      place.cache->update(place.layer, split_heads(k, heads), split_heads(v, heads));
  const std::optional<at::Tensor> added = mask.defined() ? std::optional(mask) : std::nullopt;
  // The heads of queries that share keys are like several tokens.
  if (q.size(1) == 1 && options.softcap <= 0) {
    const at::Tensor queries = q.view({q.size(0), heads, shared_by, keys.size(3)});
    return at::scaled_dot_product_attention(queries, keys, values, added).reshape(q.sizes());
  }
  if (shared_by > 1) {
    keys = keys.repeat_interleave(shared_by, 1);
    values = values.repeat_interleave(shared_by, 1);
  }
  if (options.softcap > 0) {
    return eager_attention(split_heads(q, options.heads), keys, values, mask, 0, options.softcap);
  }
  return at::scaled_dot_product_attention(split_heads(q, options.heads), keys, values, added)
      .transpose(1, 2)
      .reshape(q.sizes());
}

at::Tensor self_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                          const at::Tensor& mask, int64_t heads, double dropout, bool eager,
                          double softcap) {
  if (!eager && takes_narrow_attention(q) && takes_narrow_attention(k) &&
      takes_narrow_attention(v)) {
    return NarrowAttention::apply(q, k, v, fp32_mask(mask), heads, dropout);
  }
  const auto split = [&](const at::Tensor& x) { return split_heads(x, heads); };
  if (!eager && (dropout <= 0 || !q.is_cpu())) {
    // Not expanded: a kernel that pads the mask's rows would copy it for each head and query.
    const at::Tensor context = at::scaled_dot_product_attention(
        split(q), split(k), split(v), mask.defined() ? std::optional(mask) : std::nullopt,
        std::max(dropout, 0.0));
    if (context.requires_grad() && context.grad_fn()->name().starts_with("ScaledDotProduct")) {
      context.register_hook([](const at::Tensor&) { refuse_second_derivative(); });
    }
    return context.transpose(1, 2).reshape(q.sizes());
  }
  return eager_attention(split(q), split(k), split(v), mask, dropout, softcap);
}

// Each of the fewer heads of keys and values serves several heads of queries.
static at::Tensor repeated_heads(const at::Tensor& x, const AttentionOptions& options) {
  if (options.key_value_heads == options.heads) {
    return x;
  }
  const int64_t heads = options.key_value_heads, shared_by = options.heads / heads;
  const int64_t rows = x.size(0), tokens = x.size(1), width = x.size(2) / heads;
  return x.view({rows, tokens, heads, 1, width})
      .expand({rows, tokens, heads, shared_by, width})
      .reshape({rows, tokens, options.heads * width});
}

at::Tensor decoder_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const at::Tensor& mask, AttentionOptions options,
                             const AttentionPlace& place) {
  if (place.cache != nullptr) {
    return cached_attention(q, k, v, mask, options, place);
  }
  if (place.sliced) {
    options.causal = true;
    return sliced_attention(q, k, v, mask, options);
  }
  return self_attention(q, repeated_heads(k, options), repeated_heads(v, options), mask,
                        options.heads, options.dropout, place.eager || options.softcap > 0,
                        options.softcap);
}

bool slices_attention(const PreTrainedConfig& config, int64_t tokens, const at::Tensor& hidden) {
  constexpr int64_t kFromTokens = 256;
  const at::ScalarType dtype = autocast_dtype(at::kCPU).value_or(hidden.scalar_type());
  return hidden.is_cpu() && hidden.size(0) > 0 && (dtype == at::kFloat || dtype == at::kBFloat16) &&
         (config.attn_implementation == "sdpa" ||
          (config.attn_implementation == "auto" && tokens >= kFromTokens));
}

} // namespace hasten::detail
