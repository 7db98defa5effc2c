#include "hasten/local_sgd/outer_step.h"

#include <ATen/ATen.h>
#include <torch/optim/optimizer.h>

#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/base/json.h"
#include "hasten/core/named_tensors.h"
#include "hasten/optim/optimizer_state.h"

namespace hasten {

namespace detail {

void check_outer_option(const char* where, const char* name, double value, bool good) {
  if (!good) {
    throw InputError(where, std::string(name) + "=" + std::to_string(value),
                     "a rate above 0, a momentum from 0 to below 1");
  }
}

std::string outer_number(double value) { return nlohmann::json(value).dump(); }

void MomentumStep::save_state(NamedTensors& tensors, nlohmann::json&) const {
  for (const auto& [piece, tensor] : momentum_) {
    tensors.emplace("momentum." + std::to_string(piece), tensor);
  }
}

void MomentumStep::load_state(const NamedTensors& tensors, const nlohmann::json&) {
  constexpr std::string_view prefix = "momentum.";
  std::map<int64_t, at::Tensor> pieces;
  for (const auto& [name, tensor] : tensors) {
    if (!name.starts_with(prefix)) {
      throw InputError("parallel::OuterStep", "tensor \"" + name + "\" in the state",
                       "the state of an outer step of this kind");
    }
    pieces.emplace(std::stoll(name.substr(prefix.size())), tensor.clone());
  }
  momentum_ = std::move(pieces);
}

} // namespace detail

SlowMo::SlowMo(SlowMoOptions options) : options_(options) {
  constexpr const char* where = "parallel::SlowMo";
  detail::check_outer_option(where, "slowmo_factor", options.slowmo_factor,
                             options.slowmo_factor >= 0 && options.slowmo_factor < 1);
  detail::check_outer_option(where, "slowmo_lr", options.slowmo_lr, options.slowmo_lr > 0);
}

void SlowMo::step(int64_t piece, at::Tensor anchor, at::Tensor mean, double learning_rate) {
  if (!(learning_rate > 0)) {
    throw InputError(
        "parallel::SlowMo",
        "learning_rate=" + std::to_string(learning_rate) + " at the previous synchronisation",
        "above 0, because the slow momentum is divided by it",
        "end a warm-up from 0 before the first synchronisation, or use DiLoCo");
  }
  at::Tensor& slow = momentum_[piece];
  if (!slow.defined()) {
    slow = at::zeros_like(anchor);
  }
  mean.sub_(anchor).div_(-learning_rate); // (anchor - mean) / lr
  slow.mul_(options_.slowmo_factor).add_(mean);
  anchor.sub_(slow, options_.slowmo_lr * learning_rate);
}

std::string SlowMo::description() const {
  return "slowmo beta=" + detail::outer_number(options_.slowmo_factor) +
         " slowmo_lr=" + detail::outer_number(options_.slowmo_lr);
}

DiLoCo::DiLoCo(DiLoCoOptions options) : options_(options) {
  constexpr const char* where = "parallel::DiLoCo";
  detail::check_outer_option(where, "lr", options.lr, options.lr > 0);
  detail::check_outer_option(where, "momentum", options.momentum,
                             options.momentum >= 0 && options.momentum < 1);
}

void DiLoCo::step(int64_t piece, at::Tensor anchor, at::Tensor mean, double) {
  if (options_.lr == 1 && options_.momentum == 0) {
    anchor.copy_(mean); // without the rounding of a - (a - mean)
    return;
  }
  const at::Tensor delta = mean.sub_(anchor).neg_();
  if (options_.momentum == 0) {
    anchor.sub_(delta, options_.lr);
    return;
  }
  at::Tensor& velocity = momentum_[piece];
  if (velocity.defined()) {
    velocity.mul_(options_.momentum).add_(delta);
  } else {
    velocity = delta.clone();
  }
  if (options_.nesterov) {
    delta.add_(velocity, options_.momentum);
    anchor.sub_(delta, options_.lr);
  } else {
    anchor.sub_(velocity, options_.lr);
  }
}

std::string DiLoCo::description() const {
  return "diloco lr=" + detail::outer_number(options_.lr) +
         " momentum=" + detail::outer_number(options_.momentum) +
         (options_.nesterov ? " nesterov" : "");
}

OuterOptimizer::OuterOptimizer(Factory make, std::string description)
    : make_(std::move(make)), description_(std::move(description)) {
  if (!make_) {
    throw InputError("parallel::OuterOptimizer", "make=null",
                     "a function that makes an optimizer for the given parameters");
  }
}

OuterOptimizer::Piece& OuterOptimizer::piece_of(int64_t index, const at::Tensor& anchor) {
  Piece& piece = pieces_[index];
  if (!piece.optimizer) {
    piece.parameter = anchor.detach();
    piece.optimizer = make_({piece.parameter});
  } else if (piece.parameter.data_ptr() != anchor.data_ptr()) { // the anchor has new memory
    piece.parameter.set_data(anchor);
  }
  return piece;
}

void OuterOptimizer::step(int64_t index, at::Tensor anchor, at::Tensor mean, double) {
  Piece& piece = piece_of(index, anchor);
  if (const auto loaded = loaded_.find(index); loaded != loaded_.end()) {
    const auto& [tensors, values] = loaded->second;
    prepare_optimizer_load(*piece.optimizer, {{piece.parameter.unsafeGetTensorImpl(), "anchor"}},
                           tensors, parse_json("parallel::OuterOptimizer", "the state", values))();
    loaded_.erase(loaded);
  }
  piece.parameter.mutable_grad() = mean.sub_(anchor).neg_();
  piece.optimizer->step();
  piece.parameter.mutable_grad().reset();
}

void OuterOptimizer::save_state(NamedTensors& tensors, nlohmann::json& values) const {
  for (const auto& [index, piece] : pieces_) {
    NamedTensors own;
    nlohmann::json value;
    save_optimizer_state(*piece.optimizer, {{piece.parameter.unsafeGetTensorImpl(), "anchor"}}, own,
                         value);
    detail::put_below(tensors, std::to_string(index) + ".", own);
    values[std::to_string(index)] = std::move(value);
  }
  for (const auto& [index, loaded] : loaded_) {
    const std::string number = std::to_string(index);
    detail::put_below(tensors, number + ".", loaded.first);
    values[number] = parse_json("parallel::OuterOptimizer", "the state", loaded.second);
  }
}

void OuterOptimizer::load_state(const NamedTensors& tensors, const nlohmann::json& values) {
  pieces_.clear();
  loaded_.clear();
  for (const auto& [index, value] : values.items()) {
    auto& [own, text] = loaded_[std::stoll(index)];
    own = detail::tensors_below(tensors, index + ".");
    detail::clone_tensors(own);
    text = value.dump();
  }
}

} // namespace hasten
