#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <sstream>
#include <tuple>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/core/device.h"
#include "hasten/core/named_tensors.h"
#include "hasten/core/random.h"
#include "hasten/parallel/comm_hook.h"
#include "plain_reduce.h"

namespace hasten {

namespace detail {

// Note [The same bits on every processor]
// Every rank orthonormalises the sum and multiplies the factors itself. Libraries choose their
// kernels by the processor, and for dependent columns a QR may choose any direction. Ranks on
// different processors would then get different factors and drift apart. Therefore both are loops
// with a fixed order of operations.

// Orthonormal columns with the same span (Gram-Schmidt in double). If the columns are dependent,
// the first unit vectors outside the span fill the missing ones.
void orthonormalize_(at::Tensor matrix) {
  const int64_t rows = matrix.size(0);
  const at::Tensor columns = matrix.to(at::kCPU, at::kDouble).t().contiguous();
  double* const values = columns.mutable_data_ptr<double>();
  for (int64_t k = 0; k < columns.size(0); ++k) {
    double* const own = values + k * rows;
    const auto norm_outside = [&] {
      for (int64_t i = 0; i < 2 * k; ++i) { // two passes are enough (Kahan, Parlett)
        const double* other = values + i % k * rows;
        const double along = std::inner_product(own, own + rows, other, 0.0);
        for (int64_t row = 0; row < rows; ++row) {
          own[row] -= along * other[row];
        }
      }
      return std::sqrt(std::inner_product(own, own + rows, own, 0.0));
    };
    double least = 1e-7 * std::sqrt(std::inner_product(own, own + rows, own, 0.0));
    double norm = norm_outside();
    for (int64_t unit = 0; !(norm > least) && unit < rows; ++unit) {
      std::fill(own, own + rows, 0.0);
      own[unit] = 1;
      norm = norm_outside();
      least = std::sqrt(0.5 / static_cast<double>(rows)); // one has more
    }
    columns[k].div_(norm);
  }
  matrix.copy_(columns.t());
}

// P Q^T, summed in the order of the columns.
at::Tensor product_of_factors(const at::Tensor& p, const at::Tensor& q) {
  at::Tensor product = p.select(1, 0).unsqueeze(1) * q.select(1, 0);
  for (int64_t k = 1; k < p.size(1); ++k) {
    product.add_(p.select(1, k).unsqueeze(1) * q.select(1, k));
  }
  return product;
}

} // namespace detail

// One gradient as a matrix, with its factors.
struct PowerSgdHook::Matrix {
  std::string name{};
  at::Tensor gradient{}; // the bucket's, any shape
  at::Tensor m{}; // [rows, columns]: the gradient plus the error kept
  at::Tensor p{}; // [rows, rank]
  at::Tensor q{}; // [columns, rank]
};

struct PowerSgdHook::Pending {
  std::string name{};
  std::vector<Matrix> matrices{};
  std::vector<at::Tensor> others{}; // gradients sent uncompressed
  at::Tensor plain{}, factors{}; // messages: others; all P, then all Q
  Work plain_sum{}, factor_sum{};
};

PowerSgdHook::PowerSgdHook(PowerSgdOptions options) : options_(options) {
  const auto refuse = [](const std::string& what, const char* expected) {
    throw InputError("parallel::PowerSgdHook", what, expected);
  };
  if (options_.matrix_approximation_rank < 1) {
    refuse("matrix_approximation_rank=" + std::to_string(options_.matrix_approximation_rank),
           "1 or more");
  }
  if (!(options_.min_compression_rate > 0)) {
    refuse("min_compression_rate=" + std::to_string(options_.min_compression_rate), "above 0");
  }
  const bool remembers = options_.use_error_feedback || options_.warm_start;
  if (options_.start_powerSGD_iter < (remembers ? 2 : 0)) {
    refuse("start_powerSGD_iter=" + std::to_string(options_.start_powerSGD_iter),
           "2 or more with error feedback or warm start, otherwise 0 or more");
  }
}

void PowerSgdHook::reset() {
  iteration_ = 0;
  factors_.clear();
  errors_.clear();
}

std::string PowerSgdHook::description() const {
  std::ostringstream text;
  text << "powerSGD, rank " << options_.matrix_approximation_rank << ", start "
       << options_.start_powerSGD_iter << ", rate " << options_.min_compression_rate
       << (options_.use_error_feedback ? ", error feedback" : "")
       << (options_.warm_start ? ", warm start" : "") << ", seed " << options_.random_seed;
  return text.str();
}

double PowerSgdHook::compression_rate() const {
  return sent_ == 0 ? 1 : static_cast<double>(numbers_) / static_cast<double>(sent_);
}

bool PowerSgdHook::compresses(const at::Tensor& gradient) const {
  if (gradient.dim() < 2 || gradient.numel() == 0) {
    return false;
  }
  const int64_t rows = gradient.size(0);
  const int64_t columns = gradient.numel() / rows;
  return static_cast<double>((rows + columns) * options_.matrix_approximation_rank) *
             options_.min_compression_rate <
         static_cast<double>(gradient.numel());
}

CommHook::Step PowerSgdHook::reduce(Communicator& communicator, const GradientBucket& bucket) {
  const bool plain = iteration_ < options_.start_powerSGD_iter || bucket.buffer.element_size() == 2;
  Step step;
  if (plain) {
    numbers_ += bucket.buffer.numel();
    sent_ += bucket.buffer.numel();
    step = detail::plain_reduce(communicator, bucket);
  } else {
    auto pending = std::make_shared<Pending>();
    pending->name = detail::bucket_name(bucket);
    for (const BucketGradient& entry : bucket.gradients) {
      numbers_ += entry.gradient.numel();
      if (compresses(entry.gradient)) {
        pending->matrices.push_back(make_matrix(entry));
      } else if (entry.gradient.numel() > 0) {
        pending->others.push_back(entry.gradient);
      }
    }
    start(communicator, *pending);
    step = [this, &communicator, pending, second = false]() mutable {
      if (!std::exchange(second, true) && send_second_factor(communicator, *pending)) {
        return true;
      }
      finish(*pending);
      return false;
    };
  }
  iteration_ += bucket.last;
  return step;
}

PowerSgdHook::Matrix PowerSgdHook::make_matrix(const BucketGradient& entry) {
  Matrix matrix;
  matrix.name = entry.name;
  matrix.gradient = entry.gradient;
  matrix.m = entry.gradient.reshape({entry.gradient.size(0), -1});
  const auto take = [&](at::Tensor& kept, at::IntArrayRef sizes) {
    if (kept.sizes() != sizes) {
      throw InputError(
          "parallel::PowerSgdHook",
          c10::str("the state kept for parameter \"", entry.name, "\" is ", kept.sizes()),
          c10::str(sizes), "use one hook per model, and its own state");
    }
    kept = kept.to(matrix.m.device()); // a loaded state is on the CPU
  };
  if (options_.use_error_feedback) {
    const auto error = errors_.find(entry.name);
    if (error != errors_.end()) {
      take(error->second, matrix.m.sizes());
      matrix.m.add_(error->second);
    }
  }
  const int64_t columns = matrix.m.size(1);
  const int64_t rank = std::min({options_.matrix_approximation_rank, matrix.m.size(0), columns});
  const auto kept = factors_.find(entry.name);
  if (options_.warm_start && kept != factors_.end()) {
    take(kept->second, {columns, rank});
    matrix.q = kept->second;
  } else {
    const uint64_t seed = stream_seed("powerSGD " + entry.name, options_.random_seed,
                                      static_cast<uint64_t>(iteration_));
    matrix.q = at::randn({columns, rank}, detail::seeded_generator(seed),
                         matrix.m.options().device(at::kCPU))
                   .to(matrix.m.device());
  }
  detail::orthonormalize_(matrix.q);
  return matrix;
}

// Sends all uncompressed gradients in one message, and P = M Q of all matrices in another.
void PowerSgdHook::start(Communicator& communicator, Pending& pending) {
  if (!pending.others.empty()) {
    pending.plain = at::flatten_dense_tensors(pending.others);
    sent_ += pending.plain.numel();
    pending.plain_sum = communicator.all_reduce_async(pending.plain, ReduceOp::SUM, pending.name);
  }
  if (pending.matrices.empty()) {
    return;
  }
  for (Matrix& matrix : pending.matrices) {
    matrix.p = at::mm(matrix.m, matrix.q);
    sent_ += matrix.p.numel() + matrix.q.numel();
  }
  sum_factors(communicator, pending, &Matrix::p, ", P");
}

void PowerSgdHook::sum_factors(Communicator& communicator, Pending& pending,
                               at::Tensor Matrix::*factor, const char* name) {
  const auto own = mapped(pending.matrices, factor);
  pending.factors = at::flatten_dense_tensors(own);
  const auto sums = at::unflatten_dense_tensors(pending.factors, own);
  for (size_t i = 0; i < sums.size(); ++i) {
    pending.matrices[i].*factor = sums[i];
  }
  pending.factor_sum =
      communicator.all_reduce_async(pending.factors, ReduceOp::SUM, pending.name + name);
}

// Returns false if there is nothing to send. The sum of P is equal bit for bit on all ranks, and
// so are decisions based on it.
bool PowerSgdHook::send_second_factor(Communicator& communicator, Pending& pending) {
  if (pending.matrices.empty()) {
    return false;
  }
  pending.factor_sum.wait();
  if (!pending.factors.isfinite().all().item<bool>()) {
    // NaN and infinity must reach the gradients, but not the factors and errors that are kept.
    for (Matrix& matrix : pending.matrices) {
      matrix.gradient.fill_(std::numeric_limits<double>::quiet_NaN());
    }
    pending.matrices.clear();
    return false;
  }
  for (Matrix& matrix : pending.matrices) {
    detail::orthonormalize_(matrix.p);
    matrix.q = at::mm(matrix.m.t(), matrix.p);
    if (options_.use_error_feedback) {
      // With this rank's own Q, the errors add up over ranks to the error of the summed product.
      at::Tensor& error = errors_[matrix.name];
      if (!error.defined()) {
        error = at::empty_like(matrix.m, at::MemoryFormat::Contiguous);
      }
      at::addmm_out(error, matrix.m, matrix.p, matrix.q.t(), 1, -1);
    }
  }
  sum_factors(communicator, pending, &Matrix::q, ", Q");
  return true;
}

void PowerSgdHook::finish(Pending& pending) {
  if (pending.plain.defined()) {
    pending.plain_sum.wait();
    at::_foreach_copy_(pending.others, at::unflatten_dense_tensors(pending.plain, pending.others));
  }
  if (pending.matrices.empty()) {
    return;
  }
  pending.factor_sum.wait();
  for (Matrix& matrix : pending.matrices) {
    matrix.gradient.copy_(
        detail::product_of_factors(matrix.p, matrix.q).view(matrix.gradient.sizes()));
    if (options_.warm_start) {
      factors_[matrix.name] = matrix.q.clone();
    }
  }
}

void PowerSgdHook::save_state(NamedTensors& tensors, nlohmann::json& values) const {
  values["iteration"] = iteration_;
  values["numbers"] = numbers_;
  values["sent"] = sent_;
  detail::put_below(tensors, "factor.", factors_);
  detail::put_below(tensors, "error.", errors_);
}

void PowerSgdHook::load_state(const NamedTensors& tensors, const nlohmann::json& values) {
  const auto number = [&](const char* key) {
    if (!values.is_object() || !values.contains(key) || !values[key].is_number_integer()) {
      throw InputError("parallel::PowerSgdHook",
                       std::string("the state has no number \"") + key + "\"",
                       "the state of a PowerSgdHook");
    }
    return values[key].get<int64_t>();
  };
  std::tie(iteration_, numbers_, sent_) =
      std::tuple{number("iteration"), number("numbers"), number("sent")}; // in this order
  factors_ = detail::tensors_below(tensors, "factor.");
  errors_ = detail::tensors_below(tensors, "error.");
  detail::clone_tensors(factors_);
  detail::clone_tensors(errors_);
}

} // namespace hasten
