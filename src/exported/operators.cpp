#include "operators.h"

#include <ATen/Dispatch.h>
#include <ATen/ops/_safe_softmax.h>
#include <ATen/ops/masked_fill.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/result_type.h>
#include <ATen/ops/softmax.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <stdexcept>
#include <utility>

#include "core/dropout.h"
#include "hasten/base/error.h"
#include "hasten/core/autocast.h"
#include "hasten/core/linear.h"

namespace hasten::detail {

// Sorted. tools/golden/exported_operators.py writes it.
constexpr const char* kAllowedOperators[] = {
#include "tables/exported_operators.inc"
};

bool is_allowed_operator(std::string_view target) {
  return std::ranges::binary_search(kAllowedOperators, target, {},
                                    [](const auto& name) { return std::string_view(name); });
}

bool is_assertion(std::string_view target) {
  constexpr std::array<std::string_view, 6> kAssertions{"aten._assert_async.msg",
                                                        "aten._assert_scalar.default",
                                                        "aten._assert_tensor_metadata.default",
                                                        "aten.sym_constrain_range.default",
                                                        "aten.sym_constrain_range_for_size.default",
                                                        "aten._assert_async.default"};
  return std::ranges::find(kAssertions, target) != kAssertions.end();
}

// Python's numbers: int, float and bool.
using Numbers = GraphValues;

static double real(const c10::IValue& value) { return value.toScalar().toDouble(); }
static int64_t whole(const c10::IValue& value) { return value.toScalar().toLong(); }
/// Throws for a number that is no size.
static int64_t whole_of(double value) {
  if (!(std::abs(value) < 0x1p63)) {
    throw InputError("exported::forward", "a size of " + std::to_string(value));
  }
  return static_cast<int64_t>(value);
}

template <typename F>
static GraphFunction of_numbers(F f) {
  return [f](GraphValues& stack, const GraphContext&) {
    c10::IValue result = f(std::as_const(stack));
    stack.assign(1, result);
  };
}

/// For +, -, *, min and max: an int of ints, else a float.
template <typename F>
static GraphFunction arithmetic(F f) {
  return of_numbers([f](const Numbers& v) -> c10::IValue {
    if (v.at(0).isDouble() || v.at(1).isDouble()) {
      return f(real(v[0]), real(v[1]));
    }
    whole_of(f(real(v[0]), real(v[1])));
    return static_cast<int64_t>(f(whole(v[0]), whole(v[1])));
  });
}

template <typename F>
static GraphFunction comparison(F f) {
  return of_numbers(
      [f](const Numbers& v) -> c10::IValue { return bool(f(real(v.at(0)), real(v.at(1)))); });
}

static int64_t floored(int64_t a, int64_t b) {
  if (b == 0 || (a == std::numeric_limits<int64_t>::min() && b == -1)) {
    throw InputError("exported::forward",
                     "a division of sizes: " + std::to_string(a) + " // " + std::to_string(b));
  }
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

static c10::IValue floor_division(const Numbers& v) {
  if (v.at(0).isDouble() || v.at(1).isDouble()) {
    return std::floor(real(v[0]) / real(v[1]));
  }
  return floored(whole(v[0]), whole(v[1]));
}

static c10::IValue modulo(const Numbers& v) {
  const int64_t a = whole(v.at(0));
  const int64_t b = whole(v.at(1));
  floored(a, b); // refuses what % does not take
  const int64_t rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

static c10::IValue power(const Numbers& v) {
  const double result = std::pow(real(v.at(0)), real(v.at(1)));
  return v[0].isDouble() || v[1].isDouble() || real(v[1]) < 0 ? c10::IValue(result)
                                                              : c10::IValue(whole_of(result));
}

GraphFunction size_function(const std::string& target) {
  using V = const Numbers&;
  const auto add = arithmetic([](auto a, auto b) { return a + b; });
  static const std::map<std::string, GraphFunction> kFunctions{
      {"aten.sym_size.int",
       of_numbers([](V v) -> c10::IValue { return v.at(0).toTensor().size(v.at(1).toInt()); })},
      {"aten.sym_numel.default",
       of_numbers([](V v) -> c10::IValue { return v.at(0).toTensor().numel(); })},
      {"_operator.add", add},
      {"_operator.sub", arithmetic([](auto a, auto b) { return a - b; })},
      {"_operator.mul", arithmetic([](auto a, auto b) { return a * b; })},
      {"torch.sym_max", arithmetic([](auto a, auto b) { return a < b ? b : a; })},
      {"torch.sym_min", arithmetic([](auto a, auto b) { return b < a ? b : a; })},
      {"_operator.floordiv", of_numbers(floor_division)},
      {"_operator.mod", of_numbers(modulo)},
      {"_operator.pow", of_numbers(power)},
      {"_operator.truediv",
       of_numbers([](V v) -> c10::IValue { return real(v.at(0)) / real(v.at(1)); })},
      {"_operator.neg", of_numbers([](V v) -> c10::IValue {
         return v.at(0).isDouble() ? c10::IValue(-real(v[0])) : c10::IValue(whole_of(-real(v[0])));
       })},
      {"_operator.ge", comparison(std::greater_equal<>())},
      {"_operator.gt", comparison(std::greater<>())},
      {"_operator.le", comparison(std::less_equal<>())},
      {"_operator.lt", comparison(std::less<>())},
      {"_operator.eq", comparison(std::equal_to<>())},
      {"_operator.ne", comparison(std::not_equal_to<>())},
      {"torch.sym_float", of_numbers([](V v) -> c10::IValue { return real(v.at(0)); })},
      {"torch.sym_int",
       of_numbers([](V v) -> c10::IValue { return whole_of(std::trunc(real(v.at(0)))); })},
      {"torch.sym_not", of_numbers([](V v) -> c10::IValue { return !v.at(0).toBool(); })},
      {"torch._sym_sqrt", of_numbers([](V v) -> c10::IValue { return std::sqrt(real(v.at(0))); })},
      {"math.sqrt", of_numbers([](V v) -> c10::IValue { return std::sqrt(real(v.at(0))); })},
      {"math.trunc",
       of_numbers([](V v) -> c10::IValue { return whole_of(std::trunc(real(v.at(0)))); })},
      {"math.floor",
       of_numbers([](V v) -> c10::IValue { return whole_of(std::floor(real(v.at(0)))); })},
      {"math.ceil",
       of_numbers([](V v) -> c10::IValue { return whole_of(std::ceil(real(v.at(0)))); })},
  };
  const auto found = kFunctions.find(target);
  return found == kFunctions.end() ? GraphFunction() : found->second;
}

// The lowest number of the dtype that was exported is a constant of masks. The dtype that runs may be
// narrower, where torch refuses it.
static void fill_with_finite(GraphValues& stack, const GraphContext&) {
  const at::Tensor x = stack[0].toTensor();
  c10::Scalar value = stack[2].toScalar();
  if (value.isFloatingPoint() && std::isfinite(value.toDouble()) &&
      at::isFloatingType(x.scalar_type())) {
    AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, x.scalar_type(), "masked_fill", [&] {
      const double most = static_cast<double>(std::numeric_limits<scalar_t>::max());
      value = std::clamp(value.toDouble(), -most, most);
    });
  }
  at::Tensor result = at::masked_fill(x, stack[1].toTensor(), value);
  stack.assign(1, std::move(result));
}

static void linear(GraphValues& stack, const GraphContext&) {
  at::Tensor result = fast_linear(stack[0].toTensor(), stack[1].toTensor(),
                                  stack[2].isNone() ? at::Tensor() : stack[2].toTensor());
  stack.assign(1, std::move(result));
}

static void dropout(GraphValues& stack, const GraphContext&) {
  at::Tensor result =
      dropout_add(stack[0].toTensor(), {}, stack[2].toBool() ? stack[1].toDouble() : 0.0);
  stack.assign(1, std::move(result));
}

/// torch has no kernel for attention with dropout on a CPU. Whether its operators are called one by one.
static bool composes_attention(const GraphValues& stack) {
  const at::Tensor q = stack[0].toTensor();
  return stack[4].toDouble() > 0 && !stack[5].toBool() && !stack[7].toBool() && q.is_cpu() &&
         q.scalar_type() == at::kFloat && !autocast_dtype(at::kCPU);
}

// softmax(q k^T scale + mask), dropout, times v, as torch composes it.
static void attention(const c10::OperatorHandle& op, GraphValues& stack) {
  if (!composes_attention(stack)) {
    return op.callBoxed(stack);
  }
  const at::Tensor q = stack[0].toTensor();
  const double scale = stack[6].isNone() ? 1.0 / std::sqrt(static_cast<double>(q.size(-1)))
                                         : stack[6].toScalar().toDouble();
  at::Tensor scores = at::matmul(q * scale, stack[1].toTensor().transpose(-2, -1));
  const bool masked = !stack[3].isNone();
  if (masked) {
    const at::Tensor mask = stack[3].toTensor();
    scores = mask.scalar_type() == at::kBool
                 ? scores.masked_fill(mask.logical_not(), -std::numeric_limits<float>::infinity())
                 : scores + mask;
  }
  // A row without a token to attend to has probabilities of 0.
  const at::Tensor p = masked ? at::_safe_softmax(scores, -1) : at::softmax(scores, -1);
  at::Tensor result = at::matmul(dropout_add(p, {}, stack[4].toDouble()), stack[2].toTensor());
  stack.assign(1, std::move(result));
}

GraphFunction replacement(const std::string& target, const c10::OperatorHandle& op,
                          bool substitutions) {
  if (target == "aten.masked_fill.Scalar") {
    return fill_with_finite;
  }
  if (!substitutions) {
    return {};
  }
  if (target == "aten.scaled_dot_product_attention.default") {
    return [op](GraphValues& stack, const GraphContext&) { attention(op, stack); };
  }
  return target == "aten.linear.default"    ? linear
         : target == "aten.dropout.default" ? dropout
                                            : GraphFunction();
}

static void require(bool good, const std::string& problem) {
  if (!good) {
    throw std::invalid_argument(problem);
  }
}

/// Tensors of a list take memory that no limit counts.
static void require_few(int64_t tensors) {
  require(tensors <= 1'000'000, "it makes " + std::to_string(tensors) + " tensors");
}

static int64_t size_at(const GraphValues& stack, size_t dim) {
  return stack[0].toTensor().size(stack[dim].toInt());
}

static int64_t pieces_at(const GraphValues& stack) {
  return std::max<int64_t>(1, stack[1].toInt());
}

/// The processor refuses the lowest integer divided by -1, which ends the process.
static void check_division(const GraphValues& stack) {
  const auto tensor = [](const c10::IValue& value) {
    return value.isTensor() ? value.toTensor() : wrapped_number(value).toTensor();
  };
  const at::Tensor a = stack[0].toTensor();
  const at::Tensor b = tensor(stack[1]);
  const at::ScalarType type = at::result_type(a, b);
  if (a.is_cpu() && (type == at::kInt || type == at::kLong) && stack[2].isString() &&
      stack[2].toStringRef() == "trunc") {
    const int64_t lowest = type == at::kInt ? std::numeric_limits<int32_t>::min()
                                            : std::numeric_limits<int64_t>::min();
    require(!b.eq(-1).any().item<bool>() || !a.eq(lowest).any().item<bool>(),
            std::to_string(lowest) + " is divided by -1");
  }
}

static void check_weight_norm(const GraphValues& stack) {
  const at::Tensor v = stack[0].toTensor();
  const at::Tensor g = stack[1].toTensor();
  const int64_t dim = stack[2].toInt();
  require(v.numel() > 0 && v.dim() > 0 && (dim == 0 || dim == v.dim() - 1) &&
              g.numel() == v.size(dim) && g.scalar_type() == v.scalar_type(),
          "a norm with sizes=" + c10::str(g.sizes()));
}

static void check_lstm(const GraphValues& stack) {
  const auto states = stack[1].toTensorVector();
  require(states.size() == 2 && states[0].dim() == 3 && states[1].dim() == 3 &&
              states[0].size(0) == states[1].size(0),
          "states of different sizes");
}

GraphCheck argument_check(const std::string& target) {
  using V = const GraphValues&;
  static const std::map<std::string, GraphCheck> kChecks{
      {"aten.unbind.int", [](V v) { require_few(size_at(v, 1)); }},
      {"aten.split.Tensor", [](V v) { require_few(size_at(v, 2) / pieces_at(v)); }},
      {"aten.chunk.default", [](V v) { require_few(std::min(size_at(v, 2), pieces_at(v))); }},
      {"aten.tensor_split.sections", [](V v) { require_few(pieces_at(v)); }},
      {"aten.div.Tensor_mode", check_division},
      {"aten.div.Scalar_mode", check_division},
      {"aten.divide.Tensor_mode", check_division},
      {"aten.divide.Scalar_mode", check_division},
      {"aten._weight_norm.default", check_weight_norm},
      {"aten._weight_norm_interface.default", check_weight_norm},
      {"aten.lstm.input", check_lstm}};
  const auto found = kChecks.find(target);
  return found == kChecks.end() ? nullptr : found->second;
}

std::pair<int, c10::IValue> mode_argument(const std::string& target) {
  static const std::map<std::string, std::pair<int, c10::IValue>> kArguments{
      {"aten.dropout.default", {2, false}},
      {"aten.feature_dropout.default", {2, false}},
      {"aten.alpha_dropout.default", {2, false}},
      {"aten.batch_norm.default", {5, false}},
      {"aten.scaled_dot_product_attention.default", {4, 0.0}}};
  const auto found = kArguments.find(target);
  return found == kArguments.end() ? std::pair(-1, c10::IValue()) : found->second;
}

static void run_inner(const Graph& inner, size_t settings, GraphValues& stack,
                      const GraphContext& context) {
  GraphFrame frame(inner);
  for (size_t i = 0; i < inner.inputs.size(); ++i) {
    frame[inner.inputs[i]] = stack.at(settings + i);
  }
  stack.clear();
  run_nodes(inner, 0, inner.nodes.size(), frame, context);
  for (const GraphArgument& output : inner.outputs) {
    stack.push_back(value_of(output, frame, context));
  }
}

GraphFunction higher_order(const std::string& target, const GraphValues& settings,
                           const std::shared_ptr<const Graph>& inner) {
  const size_t count = settings.size();
  if (target == "higher_order.wrap_with_set_grad_enabled" && count == 1) {
    return
        [inner, enabled = settings[0].toBool()](GraphValues& stack, const GraphContext& context) {
          const c10::AutoGradMode mode(enabled);
          run_inner(*inner, 0, stack, context);
        };
  }
  if (target == "higher_order.wrap_with_autocast" && count == 4) {
    const auto dtype =
        settings[1].isNone() ? std::nullopt : std::optional(settings[1].toScalarType());
    return [inner, dtype, enabled = settings[2].toBool()](GraphValues& stack,
                                                          const GraphContext& context) {
      const Autocast scope({.device = context.device.type(),
                            .dtype = dtype,
                            .enabled = enabled,
                            .fp32_ops = Fp32Ops::torch_list}); // as Python's
      run_inner(*inner, 0, stack, context);
    };
  }
  return {};
}

} // namespace hasten::detail
