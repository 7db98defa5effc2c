#include "hasten/optim/adafactor.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <memory>

#include "step_block.h"
#include "step_options.h"

namespace hasten::detail {

template <typename T>
HASTEN_VECTOR_CLONES void add_squares_loop(const T* __restrict g, double* __restrict sums,
                                           int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    sums[i] += static_cast<double>(g[i]) * static_cast<double>(g[i]);
  }
}
template <typename T>
HASTEN_VECTOR_CLONES void multiply_loop(const T* __restrict g, const T* __restrict by,
                                        T* __restrict out, int64_t n, T factor) {
  for (int64_t i = 0; i < n; ++i) {
    out[i] = g[i] * (by[i] * factor);
  }
}
// v is the mean square; out = g / sqrt(v).
template <typename T>
HASTEN_VECTOR_CLONES void over_root_loop(const T* __restrict g, T* __restrict v, T* __restrict out,
                                         int64_t n, T beta, T share, T eps) {
  for (int64_t i = 0; i < n; ++i) {
    v[i] = v[i] * beta + (g[i] * g[i] + eps) * share;
    out[i] = g[i] / std::sqrt(v[i]);
  }
}
// p <- keep p - m, m <- beta m + share u; without m, p <- keep p - share u.
template <typename T>
HASTEN_VECTOR_CLONES void adafactor_apply_loop(T* __restrict p, const T* __restrict u,
                                               T* __restrict m, int64_t n, T keep, T beta,
                                               T share) {
  if (m == nullptr) {
    for (int64_t i = 0; i < n; ++i) {
      p[i] = p[i] * keep - u[i] * share;
    }
    return;
  }
  for (int64_t i = 0; i < n; ++i) {
    m[i] = m[i] * beta + u[i] * share;
    p[i] = p[i] * keep - m[i];
  }
}

template <typename T>
class AdafactorStep {
 public:
  AdafactorStep(const StepArrays& a, const StepNumbers& k, const StepPass& pass)
      : a_(a),
        k_(k),
        block_(a, pass),
        beta2_(static_cast<T>(k.beta2)),
        share2_(static_cast<T>(1 - k.beta2)),
        eps_(static_cast<T>(k.eps)),
        rows_(a.columns > 0 ? a.rows : 1),
        columns_(a.columns > 0 ? a.columns : a.count),
        matrices_(a.count / (rows_ * columns_)) {}

  void run() {
    double rms = 0;
    if (k_.scale_parameter) {
      for (int64_t at = 0; at < a_.count; at += kStepBlock) {
        const int64_t n = std::min(kStepBlock, a_.count - at);
        rms += block_square_sum(block_.parameter(at, n), n);
      }
      rms = std::sqrt(rms / static_cast<double>(a_.count));
    }
    const double lr = k_.lr * (k_.scale_parameter ? std::max(k_.eps_scale, rms) : 1.0);
    if (a_.columns > 0) {
      row_factors_.resize(static_cast<size_t>(matrices_ * rows_));
      column_factors_.resize(static_cast<size_t>(matrices_ * columns_));
      for (int64_t matrix = 0; matrix < matrices_; ++matrix) {
        take_squares(matrix);
      }
    }
    double squares = 0;
    walk([&](int64_t, const T* u, int64_t n) { squares += block_square_sum(u, n); }, false);
    const double length = std::sqrt(squares / static_cast<double>(a_.count));
    const double size = lr / std::max(1.0, length / k_.clip_threshold);
    const bool mean = a_.moments[2] != nullptr;
    const auto keep = static_cast<T>(1 - (1 - k_.keep) * lr);
    walk(
        [&](int64_t at, const T* u, int64_t n) {
          T* p = block_.parameter(at, n);
          T* m = mean ? block_.moment(2, at, n) : nullptr;
          adafactor_apply_loop(p, u, m, n, keep, static_cast<T>(k_.beta1),
                               static_cast<T>(mean ? (1 - k_.beta1) * size : size));
          block_.store_parameter(p, at, n);
        },
        true);
  }

 private:
  // Writes sums of squares by row and column into the moments, and their inverse roots.
  void take_squares(int64_t matrix) {
    T* row_moments = static_cast<T*>(a_.moments[0]) + matrix * rows_;
    T* column_moments = static_cast<T*>(a_.moments[1]) + matrix * columns_;
    T* row_factors = row_factors_.data() + matrix * rows_;
    T* column_factors = column_factors_.data() + matrix * columns_;
    column_sums_.assign(static_cast<size_t>(columns_), 0.0);
    double mean_of_rows = 0;
    for (int64_t row = 0; row < rows_; ++row) {
      double sum = 0;
      for (int64_t column = 0; column < columns_; column += kStepBlock) {
        const int64_t n = std::min(kStepBlock, columns_ - column);
        const T* g = block_.gradient((matrix * rows_ + row) * columns_ + column, n, false);
        sum += block_square_sum(g, n);
        add_squares_loop(g, column_sums_.data() + column, n);
      }
      const double square = sum / static_cast<double>(columns_) + k_.eps;
      row_moments[row] = row_moments[row] * beta2_ + static_cast<T>(square) * share2_;
      mean_of_rows += static_cast<double>(row_moments[row]);
    }
    mean_of_rows /= static_cast<double>(rows_);
    for (int64_t row = 0; row < rows_; ++row) {
      row_factors[row] =
          static_cast<T>(std::sqrt(mean_of_rows / static_cast<double>(row_moments[row])));
    }
    for (int64_t column = 0; column < columns_; ++column) {
      const double square =
          column_sums_[static_cast<size_t>(column)] / static_cast<double>(rows_) + k_.eps;
      column_moments[column] = column_moments[column] * beta2_ + static_cast<T>(square) * share2_;
      column_factors[column] =
          static_cast<T>(1 / std::sqrt(static_cast<double>(column_moments[column])));
    }
  }

  /// Calls use(at, update, n) over the whole tensor. If not factored, the first walk (`last` false)
  /// updates the mean square.
  template <typename Use>
  void walk(const Use& use, bool last) {
    alignas(64) T update[kStepBlock];
    for (int64_t row = 0; row < matrices_ * rows_; ++row) {
      for (int64_t column = 0; column < columns_; column += kStepBlock) {
        const int64_t n = std::min(kStepBlock, columns_ - column);
        const int64_t at = row * columns_ + column;
        const T* g = block_.gradient(at, n, last);
        if (a_.columns > 0) {
          const int64_t matrix = row / rows_;
          multiply_loop(g, column_factors_.data() + matrix * columns_ + column, update, n,
                        row_factors_[static_cast<size_t>(row)]);
        } else {
          over_root_loop(g, static_cast<T*>(a_.moments[0]) + at, update, n, last ? T(1) : beta2_,
                         last ? T(0) : share2_, last ? T(0) : eps_);
        }
        use(at, update, n);
      }
    }
  }

  const StepArrays& a_;
  const StepNumbers& k_;
  StepBlock<T> block_;
  const T beta2_, share2_, eps_;
  const int64_t rows_, columns_, matrices_;
  std::vector<double> column_sums_{};
  std::vector<T> row_factors_{}, column_factors_{};
};

/// Moments: mean square by row, by column (not factored: mean square, null), mean (null without
/// beta1). Whole tensors, in three passes.
static void adafactor_step(const StepArrays& a, const StepNumbers& k, const StepPass& pass, int64_t,
                           int64_t) {
  in_step_type(a, [&]<typename T>(T) { AdafactorStep<T>(a, k, pass).run(); });
}

template <>
class Rules<AdafactorOptions> final : public RulesOf<AdafactorOptions> {
 public:
  Rules()
      : RulesOf({"optim::Adafactor", adafactor_step, /*by_elements=*/false, /*by_rows=*/true}) {}
  void check_own(const AdafactorOptions& options) const override {
    const auto [eps, least_rms] = options.eps();
    require_option(eps > 0 && std::isfinite(eps), where(), "eps[0]", eps, "above 0");
    require_not_negative(where(), "eps[1]", least_rms);
    require_option(options.clip_threshold() > 0, where(), "clip_threshold",
                   options.clip_threshold(), "above 0");
    require_option(options.decay_rate() < 0 && std::isfinite(options.decay_rate()), where(),
                   "decay_rate", options.decay_rate(), "below 0");
    if (options.beta1()) {
      require_beta(where(), "beta1", *options.beta1());
    }
    if (options.warmup_init() && !options.relative_step()) {
      throw InputError(where(), "warmup_init=true with relative_step=false", "both or neither");
    }
  }
  StateMembers parts(const at::Tensor& parameter, std::unique_ptr<State>& slot) const override {
    auto& state = state_in<AdafactorParamState>(slot);
    return {&state.step(),
            &state.master(),
            {parameter.dim() >= 2 ? &state.exp_avg_sq_row() : &state.exp_avg_sq(),
             &state.exp_avg_sq_col(), &state.exp_avg()}};
  }
  at::Tensor make_moment(int which, const at::Tensor& parameter, const Options& options,
                         at::ScalarType dtype) const override {
    if (which == 2) {
      return own(options).beta1() ? at::zeros_like(parameter, dtype) : at::Tensor();
    }
    auto shape = parameter.sizes().vec();
    if (shape.size() >= 2) {
      shape.erase(which == 0 ? shape.end() - 1 : shape.end() - 2);
    } else if (which == 1) {
      return {};
    }
    return at::zeros(shape, parameter.options().dtype(dtype));
  }
  StepNumbers numbers(const Options& options, int64_t step, bool) const override {
    const AdafactorOptions& o = own(options);
    const auto k = static_cast<double>(step);
    StepNumbers numbers;
    numbers.lr = o.lr();
    if (o.relative_step()) {
      numbers.lr = std::min(o.warmup_init() ? 1e-6 * k : 1e-2, 1 / std::sqrt(k));
    }
    numbers.weight_decay = o.weight_decay();
    numbers.keep = 1 - o.weight_decay(); // the kernel applies the learning rate
    numbers.beta1 = o.beta1().value_or(0);
    numbers.beta2 = 1 - std::pow(k, o.decay_rate());
    std::tie(numbers.eps, numbers.eps_scale) = o.eps();
    numbers.clip_threshold = o.clip_threshold();
    numbers.scale_parameter = o.scale_parameter();
    return numbers;
  }
  static void take(AdafactorOptions& options, NamedOptions& args, const OptimizerSettings&) {
    options.scale_parameter(false);
    options.relative_step(false);
    args.take("eps1", std::get<0>(options.eps()));
    args.take("eps2", std::get<1>(options.eps()));
    args.take("clip_threshold", options.clip_threshold());
    args.take("decay_rate", options.decay_rate());
    if (double beta1 = 0; args.take("beta1", beta1) && beta1 != -1) {
      options.beta1(beta1);
    }
    args.take("scale_parameter", options.scale_parameter());
    args.take("relative_step", options.relative_step());
    args.take("warmup_init", options.warmup_init());
  }
  void run(StepTensors& t, const StepNumbers& k) const override {
    const at::Tensor parameters = stacked(t.parameters); // [tensor, ...], as all below
    const at::Tensor gradients = stacked(t.gradients);
    const auto rms = [](const at::Tensor& x) {
      return x.square().reshape({x.size(0), -1}).mean(1).sqrt_().view(per_tensor(x));
    };
    at::Tensor rate = at::full({}, k.lr, parameters.options());
    if (k.scale_parameter) {
      rate = rms(parameters).clamp_min_(k.eps_scale).mul_(rate);
    }
    at::Tensor update = gradients.square().add_(k.eps);
    if (parameters.dim() > 2) {
      const at::Tensor row = decay(t.moments[0], update.mean(-1), k.beta2);
      const at::Tensor column = decay(t.moments[1], update.mean(-2), k.beta2);
      update = (row / row.mean(-1, true)).rsqrt_().unsqueeze(-1) * column.unsqueeze(-2).rsqrt();
      update.mul_(gradients);
    } else {
      update = decay(t.moments[0], update, k.beta2).rsqrt().mul_(gradients);
    }
    update.div_((rms(update).div_(k.clip_threshold)).clamp_min_(1)).mul_(rate);
    if (!t.moments[2].empty()) {
      update = decay(t.moments[2], update, k.beta1);
    }
    if (k.weight_decay != 0) {
      update = update + parameters * (rate * k.weight_decay);
    }
    t.descend(update.unbind(), 1);
  }

 private:
  /// A copy, or a view of one tensor alone.
  static at::Tensor stacked(const std::vector<at::Tensor>& tensors) {
    return tensors.size() == 1 ? tensors[0].unsqueeze(0) : at::stack(tensors);
  }
  static std::vector<int64_t> per_tensor(const at::Tensor& x) {
    std::vector<int64_t> shape(static_cast<size_t>(x.dim()), 1);
    shape[0] = x.size(0);
    return shape;
  }
  /// Moves the means towards `value`, [tensor, ...], and returns them stacked.
  static at::Tensor decay(const std::vector<at::Tensor>& means, const at::Tensor& value,
                          double beta) {
    at::_foreach_mul_(means, beta);
    at::_foreach_add_(means, value.unbind(), 1 - beta);
    return stacked(means);
  }
};

template class SteppedByEngine<torch::optim::Optimizer, AdafactorOptions, AdafactorParamState>;

} // namespace hasten::detail
