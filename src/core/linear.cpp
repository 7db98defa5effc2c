#include "hasten/core/linear.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/addmm_cpu_dispatch.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/chunk.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/mm_cpu_dispatch.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/rsub.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/tanh_backward.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/library.h>

#include <memory>
#include <optional>
#include <vector>

#include "hasten/core/autocast.h"
#include "hasten/core/gradient_place.h"
#include "hasten/core/memory_rehearsal.h"

// oneDNN's product, which torch itself calls for 16-bit tensors: out = beta out + alpha a b, with
// any strides. LibTorch does not ship its header. In a LibTorch without oneDNN the name is null.
namespace at::native {
__attribute__((weak)) void mkldnn_matmul(const Tensor& a, const Tensor& b, const Tensor& out,
                                         float beta, float alpha);
} // namespace at::native

namespace hasten {

namespace detail {

// oneDNN compiles a kernel of half a megabyte for every shape, and the number of samples times
// tokens differs between batches. So the rows are split into pieces of kFewestRows times a power of
// four. Few kernels then serve all batches.
constexpr int64_t kFewestRows = 32;
constexpr int64_t kMostRows = 512; // per thread

// For fewer columns the call costs more than it saves.
constexpr int64_t kFewestColumns = 16;

[[maybe_unused]] static bool has_onednn() {
  return at::hasMKLDNN() && at::native::mkldnn_matmul != nullptr;
}

/// The largest piece of at most `rows` rows, where rows >= kFewestRows.
static int64_t next_piece(int64_t rows) {
  const int64_t most = kMostRows * at::get_num_threads();
  int64_t piece = kFewestRows;
  while (piece * 4 <= std::min(rows, most)) {
    piece *= 4;
  }
  return piece;
}

/// out = beta out + a b.
static void onednn_matmul(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out,
                          float beta) {
  if (!in_memory_rehearsal()) {
    at::native::mkldnn_matmul(a, b, out, beta, 1.0f);
  }
}

/// Whether products of tensors like `a` are oneDNN's. Otherwise they are torch's own, by its kernels, so
/// that observers see one operator.
static bool by_onednn(const at::Tensor& a) {
  return a.scalar_type() != at::kFloat || linear_uses_onednn();
}

/// a b (+ bias) for a [rows, k] and b [k, n] of any strides; on a CPU rows >= kFewestRows. oneDNN's last
/// piece may overlap rows that are already computed, which get the same values again.
static at::Tensor matrix_product(const at::Tensor& a, const at::Tensor& b,
                                 const std::optional<at::Tensor>& bias) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (!a.is_cpu()) {
    const c10::impl::ExcludeDispatchKeyGuard narrowed(c10::autocast_dispatch_keyset);
    return bias ? at::addmm(*bias, a, b) : at::mm(a, b);
  }
  const int64_t rows = a.size(0);
  at::Tensor out = at::empty({rows, b.size(1)}, a.options());
  if (!by_onednn(a)) {
    if (!in_memory_rehearsal()) {
      bias ? at::cpu::addmm_out(out, *bias, a, b) : at::cpu::mm_out(out, a, b);
    }
    return out;
  }
  for (int64_t done = 0; done < rows;) {
    const int64_t piece = next_piece(std::max(rows - done, kFewestRows));
    done = std::min(done, rows - piece);
    const at::Tensor part = out.narrow(0, done, piece);
    if (bias) {
      part.copy_(bias->expand_as(part));
    }
    onednn_matmul(a.narrow(0, done, piece), b, part, bias ? 1.0f : 0.0f);
    done += piece;
  }
  return out;
}

// torch first converts all of a 16-bit tensor that it adds to fp32. A piece of this size stays in the
// cache, and allocating it costs no page faults.
constexpr int64_t kConvertedPiece = 1 << 16; // elements

/// a^T b in fp32, summed over the rows of a [rows, m] and b [rows, n]; on a CPU in `out` if that is
/// defined, or added to it with `add_to_out` (oneDNN only). oneDNN's last piece is padded with zero
/// rows. In 16 bits the result of each piece is rounded to 16 bits, but their sum is not.
static at::Tensor sum_over_rows(const at::Tensor& a, const at::Tensor& b, at::Tensor out,
                                bool add_to_out = false) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (!a.is_cpu()) {
    return a.is_cuda() ? at::mm(a.t(), b, at::kFloat) : at::mm(a.t(), b).to(at::kFloat);
  }
  const int64_t rows = a.size(0);
  if (!out.defined()) {
    out = at::empty({a.size(1), b.size(1)}, a.options().dtype(at::kFloat));
  }
  if (!by_onednn(a)) {
    if (!in_memory_rehearsal()) {
      at::cpu::mm_out(out, a.t(), b);
    }
    return out;
  }
  at::Tensor narrow;
  if (a.scalar_type() != at::kFloat) {
    narrow = at::empty(out.sizes(), a.options());
  }
  const auto add = [&](const at::Tensor& x, const at::Tensor& y, bool first) {
    if (!narrow.defined()) {
      onednn_matmul(x.t(), y, out, first ? 0.0f : 1.0f);
      return;
    }
    onednn_matmul(x.t(), y, narrow, 0.0f);
    if (first) {
      out.copy_(narrow);
      return;
    }
    const int64_t step = std::max<int64_t>(1, kConvertedPiece / out.size(1));
    for (int64_t row = 0; row < out.size(0); row += step) {
      const int64_t part = std::min(step, out.size(0) - row);
      out.narrow(0, row, part).add_(narrow.narrow(0, row, part));
    }
  };
  int64_t done = 0;
  while (rows - done >= kFewestRows) {
    const int64_t piece = next_piece(rows - done);
    add(a.narrow(0, done, piece), b.narrow(0, done, piece), done == 0 && !add_to_out);
    done += piece;
  }
  if (const int64_t left = rows - done; left > 0) {
    const auto filled = [&](const at::Tensor& x) {
      at::Tensor copy = at::zeros({kFewestRows, x.size(1)}, x.options());
      copy.narrow(0, 0, left).copy_(x.narrow(0, done, left));
      return copy;
    };
    add(filled(a), filled(b), done == 0 && !add_to_out);
  }
  return out;
}

/// Sums over the rows of a [rows, n], in fp32, piece by piece.
static at::Tensor column_sums(const at::Tensor& a) {
  if (a.scalar_type() == at::kFloat) {
    return at::sum(a, {0});
  }
  const int64_t rows = std::max<int64_t>(1, kConvertedPiece / a.size(1));
  at::Tensor sums = at::zeros({a.size(1)}, a.options().dtype(at::kFloat));
  for (int64_t done = 0; done < a.size(0); done += rows) {
    sums.add_(at::sum(a.narrow(0, done, std::min(rows, a.size(0) - done)), {0}, false, at::kFloat));
  }
  return sums;
}

// The product as an operator, so that observers of operators see it (to keep expensive results, or
// to count).
static at::Tensor linear_operator(const at::Tensor& a, const at::Tensor& b,
                                  const std::optional<at::Tensor>& bias) {
  static const auto handle = c10::Dispatcher::singleton()
                                 .findSchemaOrThrow("hasten::linear", "")
                                 .typed<at::Tensor(const at::Tensor&, const at::Tensor&,
                                                   const std::optional<at::Tensor>&)>();
  const at::AutoDispatchBelowADInplaceOrView below;
  return handle.call(a, b, bias);
}

// A product of activation(x) [..., in] with a weight, and its gradients, in fp32, or narrow: in 16 bits
// with a weight of fp32 or of these. On a CPU a converted weight is not kept but converted again in
// backward. On a GPU, where each operator is a launch, it is kept, as torch's autocast does.
//
// It is a node of its own so that it can free x before it computes the gradient of x. That is when
// many blocks need most memory. On a GPU it stands for the eight nodes that autocast and a linear layer
// make, whose time the host would need.
class LinearNode final : public torch::autograd::Node {
 public:
  LinearNode(std::optional<at::ScalarType> narrow, Activation activation, const at::Tensor& x)
      : narrow_(narrow),
        activation_(std::move(activation)),
        x_type_(x.scalar_type()),
        x_sizes_(x.sizes().vec()) {}

  static at::Tensor run(std::optional<at::ScalarType> narrow, const Activation& activation,
                        const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    const at::Tensor rows = x.reshape({-1, x.size(-1)});
    // As backward reads it. It has a graph for the gradient of a gradient, which else would lack x.
    const at::Tensor kept = activation.name.empty() ? in(narrow, rows) : rows;
    at::Tensor product, narrow_weight;
    {
      const at::NoGradGuard no_grad;
      narrow_weight = in(narrow, weight);
      product = linear_operator(in(narrow, activation(kept)), narrow_weight.t(),
                                bias.defined() ? std::optional(in(narrow, bias)) : std::nullopt);
      std::vector<int64_t> sizes = x.sizes().vec();
      sizes.back() = weight.size(0);
      const at::AutoDispatchBelowADInplaceOrView below; // no view, for operators in place
      product = product.view(sizes);
    }
    if (torch::autograd::compute_requires_grad(x, weight, bias)) {
      auto made = std::make_unique<LinearNode>(narrow, activation, x);
      if (weight.requires_grad() || !activation.name.empty()) {
        made->x_ = torch::autograd::SavedVariable(kept, false);
      }
      made->weight_ = torch::autograd::SavedVariable(weight, false);
      if (!x.is_cpu() && x.requires_grad() && !narrow_weight.is_same(weight)) {
        made->narrow_weight_ = torch::autograd::SavedVariable(narrow_weight, false);
      }
      // An intrusive_ptr since LibTorch 2.13, a shared_ptr before.
      const decltype(torch::autograd::Edge::function) node(std::move(made));
      node->set_next_edges(torch::autograd::collect_next_edges(x, weight, bias));
      torch::autograd::set_history(product, node);
    }
    return product;
  }

  std::string name() const override { return "hasten::LinearNode"; }

  void release_variables() override {
    x_.reset_data();
    weight_.reset_data();
    narrow_weight_.reset_data();
  }

 protected:
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    torch::autograd::variable_list made(3); // gradients of x, weight, bias
    if (!gradients[0].defined()) {
      return made;
    }
    at::Tensor gradient = std::move(gradients[0]);
    gradient = in(narrow_, gradient.reshape({-1, gradient.size(-1)})).contiguous();
    at::Tensor x = x_.unpack();
    const at::Tensor weight = weight_.unpack();
    const at::Tensor narrow_weight = narrow_weight_.unpack();
    if (!torch::autograd::get_current_graph_task_keep_graph()) {
      release_variables();
    }
    // A gradient of the gradient needs differentiable operators.
    const bool again = at::GradMode::is_enabled();
    const at::ScalarType type = weight.scalar_type();
    if (task_should_compute_output(1)) {
      const at::Tensor a = in(narrow_, activation_(x));
      // A place of 16 bits would round the sum after each piece.
      const bool placed = weight.is_cpu() && type == at::kFloat;
      const bool by_torch = again || (!weight.is_cpu() && type != at::kFloat);
      made[1] =
          (by_torch ? at::mm(gradient.t(), a)
                    : sum_over_rows(gradient, a, placed ? gradient_place(weight) : at::Tensor()))
              .to(type);
    }
    if (task_should_compute_output(2)) {
      made[2] = again || !weight.is_cpu() ? at::sum(gradient, {0}, false, type)
                                          : column_sums(gradient).to(type);
    }
    if (activation_.name.empty()) {
      x.reset();
    }
    if (task_should_compute_output(0)) {
      const at::Tensor w = narrow_weight.defined() && !again ? narrow_weight : in(narrow_, weight);
      const at::Tensor product =
          again ? at::mm(gradient, w) : matrix_product(gradient, w, std::nullopt);
      made[0] = activation_.backward(product.to(x_type_), x).view(x_sizes_);
    }
    return made;
  }

 private:
  static at::Tensor in(std::optional<at::ScalarType> narrow, const at::Tensor& tensor) {
    return narrow ? tensor.to(*narrow) : tensor;
  }

  std::optional<at::ScalarType> narrow_;
  Activation activation_;
  at::ScalarType x_type_;
  std::vector<int64_t> x_sizes_;
  torch::autograd::SavedVariable x_{}, weight_{}, narrow_weight_{};
};

static bool plain(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.is_cpu() && tensor.scalar_type() == type && tensor.layout() == at::kStrided;
}

/// Whether shapes and types allow oneDNN and the product is large enough to gain.
static bool large_enough(bool gated, const at::Tensor& x, const at::Tensor& weight,
                         const at::Tensor& bias) {
  const at::ScalarType type = weight.scalar_type();
  return at::globalContext().userEnabledMkldnn() && plain(weight, type) && weight.dim() == 2 &&
         (!bias.defined() ||
          (plain(bias, type) && bias.dim() == 1 && bias.size(0) == weight.size(0))) &&
         x.dim() >= 2 && x.size(-1) == (gated ? 2 : 1) * weight.size(1) &&
         weight.size(0) >= kFewestColumns && weight.size(1) >= kFewestColumns &&
         x.numel() / x.size(-1) >= kFewestRows;
}

static bool float_or_bf16(const at::Tensor& tensor) {
  return plain(tensor, at::kFloat) || plain(tensor, at::kBFloat16);
}

/// Whether autocast computes this product in 16 bits on a device. torch's linear has the error for shapes
/// that do not fit.
static bool narrow_on_device(bool gated, const at::Tensor& x, const at::Tensor& weight,
                             const at::Tensor& bias) {
  const auto fits = [&](const at::Tensor& tensor) {
    return tensor.device() == x.device() && tensor.layout() == at::kStrided &&
           (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kBFloat16 ||
            tensor.scalar_type() == at::kHalf);
  };
  return fits(x) && fits(weight) && weight.dim() == 2 &&
         (!bias.defined() || (fits(bias) && bias.dim() == 1 && bias.size(0) == weight.size(0))) &&
         x.dim() >= 2 && x.numel() > 0 && x.size(-1) == (gated ? 2 : 1) * weight.size(1);
}

static const char* gelu_kind(const std::string& name) { return name == "gelu" ? "none" : "tanh"; }

static at::Tensor activate(const std::string& name, const at::Tensor& x) {
  return name == "relu"   ? at::relu(x)
         : name == "silu" ? at::silu(x)
         : name == "tanh" ? at::tanh(x)
                          : at::gelu(x, gelu_kind(name));
}

static at::Tensor activate_backward(const std::string& name, const at::Tensor& gradient,
                                    const at::Tensor& x) {
  if (name == "silu" && at::GradMode::is_enabled()) { // torch's kernel has no derivative
    const at::Tensor s = at::sigmoid(x);
    return gradient * s * (1 + x * (1 - s));
  }
  return name == "relu"   ? at::threshold_backward(gradient, x, 0)
         : name == "silu" ? at::silu_backward(gradient, x)
         : name == "tanh" ? at::tanh_backward(gradient, at::tanh(x))
                          : at::gelu_backward(gradient, x, gelu_kind(name));
}

} // namespace detail

at::Tensor Activation::operator()(const at::Tensor& x) const {
  if (name.empty()) {
    return x;
  }
  if (!gated) {
    return detail::activate(name, x);
  }
  const auto halves = x.chunk(2, -1);
  return detail::activate(name, halves[0]) * halves[1];
}

at::Tensor Activation::backward(const at::Tensor& gradient, const at::Tensor& x) const {
  if (name.empty()) {
    return gradient;
  }
  if (!gated) {
    return detail::activate_backward(name, gradient, x);
  }
  const auto halves = x.chunk(2, -1);
  return at::cat({detail::activate_backward(name, gradient * halves[1], halves[0]),
                  gradient * detail::activate(name, halves[0])},
                 -1);
}

at::Tensor fast_linear(const Activation& activation, const at::Tensor& x, const at::Tensor& weight,
                       const at::Tensor& bias) {
  const auto torch_linear = [&] {
    return at::linear(activation(x), weight, bias.defined() ? std::optional(bias) : std::nullopt);
  };
  const auto dtype = autocast_dtype(x.is_meta() ? at::kCPU : x.device().type());
  if (!x.is_cpu()) {
    return dtype && detail::narrow_on_device(activation.gated, x, weight, bias)
               ? detail::LinearNode::run(dtype, activation, x, weight, bias)
               : torch_linear();
  }
  const bool fp32 = !dtype && detail::plain(x, at::kFloat) && detail::plain(weight, at::kFloat);
  const bool bf16 = dtype == at::kBFloat16 && linear_uses_bf16() && detail::float_or_bf16(x) &&
                    detail::float_or_bf16(weight);
  if ((fp32 || bf16) && detail::large_enough(activation.gated, x, weight, bias)) {
    return detail::LinearNode::run(bf16 ? dtype : std::nullopt, activation, x, weight, bias);
  }
  return torch_linear();
}

at::Tensor fast_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
  return fast_linear(Activation{}, x, weight, bias);
}

void product_over_rows(const at::Tensor& a, const at::Tensor& b, const at::Tensor& out, bool add) {
  const bool narrow = a.scalar_type() != at::kFloat;
  if (at::globalContext().userEnabledMkldnn() && detail::float_or_bf16(a) &&
      detail::plain(b, a.scalar_type()) && detail::plain(out, at::kFloat) && a.size(0) > 0 &&
      (narrow ? linear_uses_bf16() : linear_uses_onednn())) {
    detail::sum_over_rows(a, b, out, add);
  } else if (narrow) {
    const at::Tensor product = at::mm(a.t(), b);
    add ? out.add_(product) : out.copy_(product);
  } else {
    out.addmm_(a.t(), b, add ? 1 : 0);
  }
}

#if defined(__x86_64__) && defined(__GNUC__)
bool linear_uses_onednn() {
  static const bool uses = detail::has_onednn() && at::hasMKL() &&
                           __builtin_cpu_supports("avx512f") && !__builtin_cpu_is("intel");
  return uses;
}

// Where torch itself uses oneDNN for bf16 products.
bool linear_uses_bf16() {
  static const bool uses = detail::has_onednn() && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  return uses;
}
#else
bool linear_uses_onednn() { return false; }
bool linear_uses_bf16() { return false; }
#endif

} // namespace hasten

// a [rows, k] times b [k, n], plus bias.
TORCH_LIBRARY(hasten, library) {
  library.def("linear(Tensor a, Tensor b, Tensor? bias) -> Tensor");
  library.impl("linear", c10::DispatchKey::CompositeExplicitAutograd,
               &hasten::detail::matrix_product);
}
