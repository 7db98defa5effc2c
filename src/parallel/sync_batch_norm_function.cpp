#include "sync_batch_norm_function.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/custom_class.h>

#include <algorithm>

#include "hasten/base/error.h"
#include "hasten/core/recompute.h"

namespace hasten::detail {

// Note [Joined statistics]
// C channels; rank i has n_i values of each, with mean m_i and variance v_i (divided by n_i). All
// ranks get all (m_i, v_i, n_i); a rank without samples sends zeros. All join them by the same
// operations, so results are equal bit for bit:
//   n = sum n_i,  mean = sum n_i m_i / n,
//   var = sum n_i (v_i + (m_i - mean)^2) / n
// No squares of sums are subtracted, so nothing cancels if a mean is large. In backward, with
// xhat = (x - mean) / sqrt(var + eps), the ranks sum 2 C elements,
//   A = sum dy,  G = sum dy xhat,  dx = w / sqrt(var + eps) (dy - A / n - xhat G / n)
// The weight's gradient is this rank's term of G and the bias's that of A; the data parallel model
// reduces them like all other gradients.
// Samples that do not count (rows_count) are not in n, A and G, so they do not influence other
// samples' dx. Their own dx is w / sqrt(var + eps) dy.

// Every rank sends fp64 elements on the CPU for any dtype of the input; their number depends only
// on C.
static at::TensorOptions numbers() { return at::TensorOptions(at::kDouble).device(at::kCPU); }

// The dtype of statistics.
static at::ScalarType wide_type(const at::Tensor& x) {
  return x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

static at::Tensor wide(const at::Tensor& tensor, const at::Tensor& x) {
  return tensor.defined() ? tensor.to(wide_type(x)) : tensor;
}

void check_sync_input(const SyncLayer& layer, const at::Tensor& x) {
  if (x.defined() && x.dim() >= 2 && x.dim() <= 5 && x.size(1) == layer.channels &&
      x.is_floating_point()) {
    return;
  }
  throw InputError(
      kSyncBatchNorm,
      layer.name + ": input " +
          (x.defined() ? c10::str("has shape ", x.sizes(), " ", c10::toString(x.scalar_type()))
                       : "is undefined"),
      "floating-point [N, " + std::to_string(layer.channels) + ", ...] of 2 to 5 dimensions");
}

// [2 C + 1]: mean and variance of this rank's values, and their number.
static at::Tensor own_statistics(const SyncLayer& layer, const at::Tensor& x, bool counts) {
  at::Tensor mine = at::zeros({2 * layer.channels + 1}, numbers());
  if (!counts || x.numel() == 0) {
    return mine;
  }
  // The kernel takes the dtype of its results from running statistics.
  const at::Tensor unused = at::zeros({layer.channels}, x.options().dtype(wide_type(x)));
  const auto [mean, var] = at::batch_norm_update_stats(x, unused, unused.clone(), 0);
  mine.narrow(0, 0, layer.channels).copy_(mean);
  mine.narrow(0, layer.channels, layer.channels).copy_(var);
  mine[2 * layer.channels].fill_(static_cast<double>(x.numel() / layer.channels));
  return mine;
}

struct JoinedStatistics {
  at::Tensor mean{}; // [C] fp64 on the CPU
  at::Tensor var{};
  double count = 0;
};

// All ranks have all statistics, so all throw the same error.
[[noreturn]] static void refuse_non_finite_input(const SyncLayer& layer, const at::Tensor& all) {
  const at::Tensor finite = all.isfinite().all(1).contiguous();
  const auto* of_rank = finite.const_data_ptr<bool>();
  const auto rank = std::find(of_rank, of_rank + finite.numel(), false);
  throw InputError(kSyncBatchNorm,
                   layer.name + ": the input of rank " + std::to_string(rank - of_rank) +
                       " has no finite mean or variance",
                   "inputs without NaN and infinity on every rank",
                   "check that rank's batch, and the outputs of the layers before");
}

static JoinedStatistics join_statistics(const SyncLayer& layer, const at::Tensor& mine) {
  at::Tensor all = at::empty({layer.communicator->world_size(), mine.size(0)}, numbers());
  layer.communicator->all_gather_async(all, mine, layer.name + " statistics").wait();
  const int64_t c = layer.channels;
  const at::Tensor counts = all.narrow(1, 2 * c, 1);
  JoinedStatistics joined;
  joined.count = counts.sum().item<double>();
  if (joined.count == 0) {
    joined.mean = at::zeros({c}, numbers());
    joined.var = at::ones({c}, numbers());
    return joined;
  }
  const at::Tensor share = counts / joined.count;
  const at::Tensor means = all.narrow(1, 0, c);
  joined.mean = (means * share).sum(0);
  joined.var = ((all.narrow(1, c, c) + (means - joined.mean).square()) * share).sum(0);
  if (!joined.var.isfinite().all().item<bool>()) {
    refuse_non_finite_input(layer, all);
  }
  return joined;
}

// The running variance is the unbiased one (divided by n - 1).
static void update_running(const SyncNormArguments& arguments, const JoinedStatistics& joined) {
  const auto move = [&](at::Tensor running, const at::Tensor& value) {
    if (running.defined()) {
      const at::Tensor before = running.detach().to(numbers());
      running.detach().copy_(before * (1 - arguments.momentum) + value * arguments.momentum);
    }
  };
  move(arguments.running_mean, joined.mean);
  move(arguments.running_var, joined.var * (joined.count / (joined.count - 1)));
}

// Mean, variance (both of the wide type, on x's device), and on the CPU [2] fp64: n and whether
// this rank's samples are included.
static std::vector<at::Tensor> statistics(const SyncLayer& layer, const at::Tensor& x,
                                          const SyncNormArguments& arguments) {
  const bool counts = !layer.rows_count || layer.rows_count();
  const JoinedStatistics joined = join_statistics(layer, own_statistics(layer, x, counts));
  if (joined.count == 1) {
    throw InputError(
        kSyncBatchNorm, layer.name + ": the batch of all ranks has one value per channel",
        "more than one in training", "use larger batches, or drop a last batch of one sample");
  }
  if (joined.count > 0) {
    update_running(arguments, joined);
  }
  const auto options = x.options().dtype(wide_type(x));
  return {joined.mean.to(options), joined.var.to(options),
          at::tensor({joined.count, counts ? 1.0 : 0.0}, numbers())};
}

// (x - mean) / sqrt(var + eps) * weight + bias, per channel, of x's type.
static at::Tensor normalise(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias,
                            const at::Tensor& mean, const at::Tensor& var, double eps) {
  if (x.numel() == 0) {
    return at::empty_like(x);
  }
  return std::get<0>(at::native_batch_norm(x, weight, bias, mean, var, /*training=*/false, 0, eps));
}

// [C] as it is added to x.
static at::Tensor by_channel(const at::Tensor& values, const at::Tensor& x) {
  std::vector<int64_t> shape(static_cast<size_t>(x.dim()), 1);
  shape[1] = -1;
  return values.reshape(shape);
}

struct SyncLayerHolder final : torch::CustomClassHolder {
  explicit SyncLayerHolder(std::shared_ptr<const SyncLayer> of) : layer(std::move(of)) {}
  std::shared_ptr<const SyncLayer> layer;
};

class SyncNorm : public torch::autograd::Function<SyncNorm> {
 public:
  using Context = torch::autograd::AutogradContext;
  using Tensors = torch::autograd::variable_list;

  static at::Tensor forward(Context* context, const at::Tensor& x,
                            const std::optional<at::Tensor>& weight,
                            const std::optional<at::Tensor>& bias,
                            const Tensors& made, // by statistics()
                            double eps, const std::shared_ptr<const SyncLayer>& layer) {
    const at::Tensor w = weight.value_or(at::Tensor());
    const double* figures = made[2].const_data_ptr<double>();
    context->save_for_backward({x, w, made[0], made[1]});
    auto& data = context->saved_data;
    data["count"] = figures[0];
    data["rows_count"] = figures[1] != 0;
    data["eps"] = eps;
    data["derives_x"] = x.requires_grad();
    data["has_bias"] = bias.has_value();
    data["layer"] = c10::IValue::make_capsule(c10::make_intrusive<SyncLayerHolder>(layer));
    return normalise(x, wide(w, x), wide(bias.value_or(at::Tensor()), x), made[0], made[1], eps);
  }

  static Tensors backward(Context* context, Tensors gradients) {
    auto& data = context->saved_data;
    const auto holder =
        c10::static_intrusive_pointer_cast<SyncLayerHolder>(data["layer"].toCapsule());
    const SyncLayer& layer = *holder->layer;
    if (at::GradMode::is_enabled()) {
      throw InputError(kSyncBatchNorm, layer.name + ": backward with create_graph",
                       "only a first derivative, because sums over ranks have no derivative",
                       "do not set create_graph, or do not convert this layer");
    }
    const auto saved = context->get_saved_variables();
    const at::Tensor &x = saved[0], &weight = saved[1];
    const Moments moments{saved[2], saved[3], data["eps"].toDouble()};
    const at::Tensor dy = gradients[0].to(x.scalar_type()).contiguous(x.suggest_memory_format());
    const Sums own = own_sums(x, dy, moments);
    Tensors result(6);
    if (weight.defined()) {
      result[1] = own.dy_xhat;
    }
    if (data["has_bias"].toBool()) {
      result[2] = own.dy;
    }
    // Not by the gradients that this backward needs, which may differ between ranks.
    if (data["derives_x"].toBool()) {
      const bool counts = data["rows_count"].toBool();
      const Sums sums = joined_sums(layer, own, counts);
      const double n = counts ? data["count"].toDouble() : 0;
      result[0] = input_gradient(x, dy, wide(weight, x), moments, sums, n);
    }
    return result;
  }

 private:
  struct Moments {
    at::Tensor mean; // [C]
    at::Tensor var;
    double eps;
  };
  struct Sums {
    at::Tensor dy; // [C]
    at::Tensor dy_xhat;
  };

  static Sums own_sums(const at::Tensor& x, const at::Tensor& dy, const Moments& moments) {
    if (x.numel() == 0) {
      return {at::zeros_like(moments.mean), at::zeros_like(moments.mean)};
    }
    // The derivative for evaluation computes both sums in one pass.
    const auto of_weight_and_bias = at::native_batch_norm_backward(
        dy, x, at::ones_like(moments.mean), moments.mean, moments.var, {}, {},
        /*train=*/false, moments.eps, {false, true, true});
    return {std::get<2>(of_weight_and_bias), std::get<1>(of_weight_and_bias)};
  }

  static Sums joined_sums(const SyncLayer& layer, const Sums& own, bool counts) {
    at::Tensor both = at::zeros({2, layer.channels}, numbers());
    if (counts) {
      both[0].copy_(own.dy);
      both[1].copy_(own.dy_xhat);
    }
    layer.communicator->all_reduce(both, ReduceOp::SUM, layer.name + " gradient sums");
    both = both.to(own.dy.options());
    return {both[0], both[1]};
  }

  // n = 0: the samples are not part of the mean.
  static at::Tensor input_gradient(const at::Tensor& x, const at::Tensor& dy,
                                   const at::Tensor& weight, const Moments& moments,
                                   const Sums& sums, double n) {
    const at::Tensor inverse = (moments.var + moments.eps).rsqrt();
    const at::Tensor slope = weight.defined() ? weight * inverse : inverse;
    const at::ScalarType type = moments.mean.scalar_type();
    if (n == 0 || x.numel() == 0) {
      return (dy.to(type) * by_channel(slope, x)).to(x.scalar_type());
    }
    // Also for 16 bits in fp32, so that the result is rounded once.
    at::Tensor dx = normalise(x.to(type), slope * sums.dy_xhat / -n, slope * sums.dy / -n,
                              moments.mean, moments.var, moments.eps);
    dx.addcmul_(dy.to(type), by_channel(slope, x));
    return dx.to(x.scalar_type());
  }
};

at::Tensor sync_batch_norm(const at::Tensor& x, const SyncNormArguments& arguments,
                           const std::shared_ptr<const SyncLayer>& layer) {
  check_sync_input(*layer, x);
  const auto made = run_once([&] { return statistics(*layer, x.detach(), arguments); });
  const auto given = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
  };
  return SyncNorm::apply(x, given(arguments.weight), given(arguments.bias), made, arguments.eps,
                         layer);
}

} // namespace hasten::detail
