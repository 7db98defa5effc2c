#include "sliced_attention.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "attention_rows.h"
#include "core/dropout.h"
#include "hasten/base/error.h"
#include "hasten/core/memory_rehearsal.h"

namespace hasten::detail {

constexpr int64_t kQueriesAtOnce = 128;

static int64_t padded_count(int64_t tokens, bool narrow) {
  return narrow ? padded_tokens(tokens) : tokens;
}

at::Tensor heads_first(const at::Tensor& x, int64_t heads, int64_t padded) {
  const int64_t tokens = x.size(1);
  const at::Tensor y = x.view({x.size(0), tokens, heads, x.size(2) / heads}).transpose(1, 2);
  if (padded == tokens) {
    return y.contiguous();
  }
  at::Tensor whole = at::empty({y.size(0), heads, padded, y.size(3)}, x.options());
  whole.narrow(2, 0, tokens).copy_(y);
  whole.narrow(2, tokens, padded - tokens).zero_();
  return whole;
}

at::Tensor heads_last(const at::Tensor& x, int64_t tokens) {
  return x.narrow(2, 0, tokens).transpose(1, 2).reshape({x.size(0), tokens, x.size(1) * x.size(3)});
}

at::Tensor softcapped(const at::Tensor& x, double softcap) {
  return softcap > 0 ? (x / softcap).tanh() * softcap : x;
}

std::optional<at::Tensor> fp32_mask(const at::Tensor& mask) {
  return mask.defined() ? std::optional(mask.to(at::kFloat).contiguous()) : std::nullopt;
}

void refuse_second_derivative() {
  if (at::GradMode::is_enabled()) {
    throw InputError("models::attention",
                     "a second derivative (create_graph=true) through a kernel of attention",
                     "first derivatives", "set attn_implementation=eager in the model's config");
  }
}

/// One sample's scores of consecutive queries.
struct AttentionSlice {
  int64_t sample = 0;
  int64_t begin = 0, end = 0; // queries, with padding
  int64_t keys = 0; // that they can attend to, with padding
};

/// Attention on q [B, heads, Q, width] and k, v [B, key_value_heads, T, width], padded.
class SlicedScores {
 public:
  SlicedScores(at::Tensor q, at::Tensor k, at::Tensor v, at::Tensor mask,
               const AttentionOptions& options, int64_t queries, int64_t keys, uint64_t seed)
      : q_(std::move(q)),
        k_(std::move(k)),
        v_(std::move(v)),
        mask_(std::move(mask)),
        options_(options),
        queries_(queries),
        keys_(keys),
        seed_(seed),
        shared_by_(options.heads / options.key_value_heads),
        narrow_(q_.scalar_type() == at::kBFloat16),
        product_scale_(static_cast<float>(1.0 / std::sqrt(static_cast<double>(q_.size(3))))),
        scale_(options.softcap > 0 ? 1.0f : product_scale_) {}

  at::Tensor forward() const {
    at::Tensor out = at::empty_like(q_);
    for_slices([&](const AttentionSlice& slice) {
      const at::Tensor p = dropped(probabilities(slice), slice);
      put(out, slice, at::bmm(p, keys_of(v_, slice)));
    });
    return out;
  }

  /// Gradients of q, k and v.
  std::vector<at::Tensor> backward(const at::Tensor& out_gradient) const {
    at::Tensor q_gradient = at::empty_like(q_);
    at::Tensor k_gradient = at::empty_like(k_), v_gradient = at::empty_like(v_);
    const auto wide = k_.options().dtype(at::kFloat);
    at::Tensor k_sum, v_sum; // of a sample's slices
    for_slices([&](const AttentionSlice& slice) {
      if (slice.begin == 0) {
        k_sum = at::zeros(k_.sizes().slice(1), wide);
        v_sum = at::zeros(k_.sizes().slice(1), wide);
      }
      const at::Tensor p = probabilities(slice);
      const at::Tensor g = queries_of(out_gradient, slice);
      add(v_sum, slice, at::bmm(dropped(p, slice).transpose(1, 2), g));
      const at::Tensor s = at::bmm(g, keys_of(v_, slice).transpose(1, 2)).contiguous();
      for_rows_of(slice, [&](const ScoreRow& row, int64_t offset, const BlockDropout& dropout) {
        softmax_backward_row(narrow_, at_offset(p, offset), dropout, row, at_offset(s, offset));
      });
      if (options_.softcap > 0) { // tanh's derivative, of the scores again
        s.mul_((1 - (scores_of(slice) / options_.softcap).square()) * product_scale_);
      }
      put(q_gradient, slice, at::bmm(s, keys_of(k_, slice)));
      add(k_sum, slice, at::bmm(s.transpose(1, 2), queries_of(q_, slice)));
      if (slice.end == q_.size(2)) {
        k_gradient[slice.sample].copy_(k_sum);
        v_gradient[slice.sample].copy_(v_sum);
      }
    });
    return {q_gradient, k_gradient, v_gradient};
  }

 private:
  template <typename Function>
  void for_slices(const Function& function) const {
    for (int64_t sample = 0; sample < q_.size(0); ++sample) {
      for (int64_t begin = 0; begin < q_.size(2); begin += kQueriesAtOnce) {
        const int64_t end = std::min(begin + kQueriesAtOnce, q_.size(2));
        function(AttentionSlice{sample, begin, end, options_.causal ? end : k_.size(2)});
      }
    }
  }

  // The heads of queries that share keys are like more queries: [key_value_heads, n, width].
  at::Tensor queries_of(const at::Tensor& x, const AttentionSlice& slice) const {
    return x[slice.sample]
        .view({options_.key_value_heads, shared_by_, x.size(2), x.size(3)})
        .narrow(2, slice.begin, slice.end - slice.begin)
        .flatten(1, 2);
  }
  void put(const at::Tensor& x, const AttentionSlice& slice, const at::Tensor& values) const {
    const int64_t count = slice.end - slice.begin;
    x[slice.sample]
        .narrow(1, slice.begin, count)
        .copy_(values.view({options_.heads, count, x.size(3)}));
  }
  at::Tensor keys_of(const at::Tensor& x, const AttentionSlice& slice) const {
    return x[slice.sample].narrow(1, 0, slice.keys);
  }
  static void add(const at::Tensor& sum, const AttentionSlice& slice, const at::Tensor& values) {
    sum.narrow(1, 0, slice.keys).add_(values);
  }

  at::Tensor scores_of(const AttentionSlice& slice) const {
    const at::Tensor products =
        at::bmm(queries_of(q_, slice), keys_of(k_, slice).transpose(1, 2)).contiguous();
    return options_.softcap > 0 ? softcapped(products * product_scale_, options_.softcap)
                                : products;
  }
  at::Tensor probabilities(const AttentionSlice& slice) const {
    const at::Tensor scores = scores_of(slice);
    // Not in place, because an operator policy may keep the product's result.
    const at::Tensor p = at::empty_like(scores);
    for_rows_of(slice, [&](const ScoreRow& row, int64_t offset, const BlockDropout&) {
      softmax_row(narrow_, at_offset(scores, offset), row, at_offset(p, offset));
    });
    return p;
  }
  at::Tensor dropped(const at::Tensor& p, const AttentionSlice& slice) const {
    if (options_.dropout <= 0) {
      return p;
    }
    const at::Tensor out = at::empty_like(p);
    for_rows_of(slice, [&](const ScoreRow& row, int64_t offset, const BlockDropout& dropout) {
      drop_row(narrow_, at_offset(p, offset), dropout, row.columns, at_offset(out, offset));
    });
    return out;
  }

  void* at_offset(const at::Tensor& x, int64_t elements) const {
    return static_cast<char*>(x.data_ptr()) + elements * (narrow_ ? 2 : 4);
  }

  /// Calls function(row, its offset, its dropout) for each row of scores. Rows of padding have
  /// nothing to attend to.
  template <typename Function>
  void for_rows_of(const AttentionSlice& slice, const Function& function) const {
    const int64_t count = slice.end - slice.begin;
    const int64_t rows = in_memory_rehearsal() ? 0 : options_.heads * count;
    const float* mask = mask_.defined() && rows > 0 ? mask_.const_data_ptr<float>() : nullptr;
    // The mask's row of a sample and of a query; 0 where all share one.
    const int64_t of_sample = mask != nullptr && mask_.size(0) > 1 ? mask_.size(2) : 0;
    const int64_t of_query = mask != nullptr && mask_.size(2) > 1 ? 1 : 0;
    at::parallel_for(0, rows, 64, [&](int64_t first, int64_t last) {
      std::vector<float> work(static_cast<size_t>(slice.keys + kRowStrands));
      for (int64_t i = first; i < last; ++i) {
        const int64_t head = i / count, query = slice.begin + i % count;
        const bool text = query < queries_;
        const ScoreRow row{
            .mask = mask == nullptr || !text
                        ? nullptr
                        : mask + (slice.sample * of_sample + query * of_query) * keys_,
            .scale = scale_,
            .count = !text             ? 0
                     : options_.causal ? query + 1
                                       : keys_,
            .columns = slice.keys,
            .work = work.data()};
        const int64_t place = (slice.sample * options_.heads + head) * queries_ + query;
        function(row, i * slice.keys, block_dropout(seed_, place, text ? options_.dropout : 0));
      }
    });
  }

  at::Tensor q_, k_, v_, mask_;
  AttentionOptions options_;
  int64_t queries_, keys_; // without padding
  uint64_t seed_;
  int64_t shared_by_;
  bool narrow_;
  float product_scale_; // of products of queries and keys
  float scale_; // of what scores_of returns
};

class SlicedAttention : public torch::autograd::Function<SlicedAttention> {
 public:
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& q_in,
                            const at::Tensor& k_in, const at::Tensor& v_in,
                            const std::optional<at::Tensor>& mask,
                            const AttentionOptions& options) {
    const bool narrow = q_in.scalar_type() == at::kBFloat16;
    const int64_t queries = q_in.size(1), keys = k_in.size(1);
    const at::Tensor q = heads_first(q_in, options.heads, padded_count(queries, narrow));
    const at::Tensor k = heads_first(k_in, options.key_value_heads, padded_count(keys, narrow));
    const at::Tensor v = heads_first(v_in, options.key_value_heads, padded_count(keys, narrow));
    const uint64_t seed = options.dropout > 0 ? draw_dropout_seed() : 0;
    context->save_for_backward({q, k, v, mask.value_or(at::Tensor())});
    context->saved_data["numbers"] = std::vector<int64_t>{
        options.heads, options.key_value_heads,   options.causal ? 1 : 0, queries,
        keys,          static_cast<int64_t>(seed)};
    context->saved_data["dropout"] = options.dropout;
    context->saved_data["softcap"] = options.softcap;
    const SlicedScores scores(q, k, v, mask.value_or(at::Tensor()), options, queries, keys, seed);
    return heads_last(scores.forward(), queries);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    refuse_second_derivative();
    const auto saved = context->get_saved_variables();
    const auto numbers = context->saved_data["numbers"].toIntVector();
    const AttentionOptions options{.heads = numbers[0],
                                   .key_value_heads = numbers[1],
                                   .dropout = context->saved_data["dropout"].toDouble(),
                                   .softcap = context->saved_data["softcap"].toDouble(),
                                   .causal = numbers[2] == 1};
    const int64_t queries = numbers[3], keys = numbers[4];
    const SlicedScores scores(saved[0], saved[1], saved[2], saved[3], options, queries, keys,
                              static_cast<uint64_t>(numbers[5]));
    const at::Tensor gradient = heads_first(gradients[0].to(saved[0].scalar_type()).contiguous(),
                                            options.heads, saved[0].size(2));
    const auto found = scores.backward(gradient);
    return {heads_last(found[0], queries), heads_last(found[1], keys), heads_last(found[2], keys),
            at::Tensor(), at::Tensor()};
  }
};

at::Tensor sliced_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& mask, const AttentionOptions& options) {
  return SlicedAttention::apply(q, k, v, fp32_mask(mask), options);
}

} // namespace hasten::detail
