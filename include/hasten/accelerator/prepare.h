// How Accelerator::prepare distinguishes models, optimizers, loaders and schedulers and makes their
// handles. Users call nothing here.
#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <functional>
#include <iterator>
#include <memory>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "hasten/accelerator/prepared.h"
#include "hasten/loader/prepared_loader.h"

namespace torch::nn {
class Module;
}
namespace torch::optim {
class LRScheduler;
class Optimizer;
} // namespace torch::optim

namespace hasten::detail {

// The number of steps of one of torch's schedulers.
std::shared_ptr<Stateful> torch_scheduler_state(
    std::shared_ptr<torch::optim::LRScheduler> scheduler);

std::shared_ptr<const LoaderLink> loader_link(std::shared_ptr<AcceleratorCore> core);

// One prepare() call.
class PrepareCall {
 public:
  explicit PrepareCall(std::shared_ptr<AcceleratorCore> core) : core_(std::move(core)) {}

  // Models first, then optimizers and loaders, then tie().
  void add(const std::shared_ptr<torch::nn::Module>& model);
  void add(const std::shared_ptr<torch::optim::Optimizer>& optimizer);
  void add_loader();
  // Ties the loaders to the models.
  void tie();

  // Those of the arguments, in their order.
  std::shared_ptr<OptimizerState> next_optimizer() { return optimizers_.at(next_optimizer_++); }
  std::shared_ptr<LoaderState> next_loader() { return loaders_.at(next_loader_++); }
  std::shared_ptr<SchedulerState> scheduler(std::function<void()> step);
  const std::shared_ptr<AcceleratorCore>& core() const { return core_; }

 private:
  std::shared_ptr<AcceleratorCore> core_;
  std::vector<torch::nn::Module*> models_{};
  std::vector<std::shared_ptr<OptimizerState>> optimizers_{};
  std::vector<std::shared_ptr<LoaderState>> loaders_{};
  size_t next_optimizer_ = 0;
  size_t next_loader_ = 0;
};

// How prepare() holds an object.
template <typename T>
struct Borrowed { // an lvalue: borrowed; the caller keeps it alive
  using Object = std::remove_reference_t<T>;
  static std::shared_ptr<Object> share(Object& object) {
    return std::shared_ptr<Object>(std::shared_ptr<void>(), &object);
  }
};
template <typename O>
struct Borrowed<std::shared_ptr<O>> { // kept
  using Object = O;
  static std::shared_ptr<O> share(std::shared_ptr<O> object) { return object; }
};
template <typename T>
using BorrowedArgument =
    Borrowed<std::conditional_t<std::is_lvalue_reference_v<T>,
                                std::conditional_t<requires(std::decay_t<T> t) {
                                  { std::shared_ptr{t} } -> std::same_as<std::decay_t<T>>;
                                }, std::decay_t<T>, T>, std::decay_t<T>>>;

template <typename T>
concept ModelHolder = requires(const std::decay_t<T>& holder) {
  { holder.ptr() } -> std::convertible_to<std::shared_ptr<torch::nn::Module>>;
} || std::convertible_to<std::decay_t<T>, std::shared_ptr<torch::nn::Module>>;
template <typename T>
concept OptimizerLike =
    std::derived_from<typename BorrowedArgument<T>::Object, torch::optim::Optimizer>;
template <typename T>
concept LoaderLike =
    requires(typename BorrowedArgument<T>::Object& range) { std::begin(range) != std::end(range); };
template <typename T>
concept SchedulerLike =
    !OptimizerLike<T> && requires(typename BorrowedArgument<T>::Object& s) { s.step(); };
// Lvalues and shared_ptrs can be borrowed; holders share models.
template <typename T>
concept Borrowable = std::is_lvalue_reference_v<T> || requires(std::decay_t<T> t) {
  { std::shared_ptr{t} } -> std::same_as<std::decay_t<T>>;
};

// True, or does not compile and gives the reason. T is the type of argument number `Argument`, from
// 1.
template <size_t Argument, typename T>
constexpr bool argument_is_preparable() {
  using Object = std::remove_cvref_t<T>;
  constexpr bool kModel = ModelHolder<T>;
  constexpr bool kModule = std::derived_from<Object, torch::nn::Module>;
  constexpr bool kUnique = requires(Object& owner) { owner.release(); };
  static_assert(!kModule,
                "prepare(): this argument is a module itself. "
                "Fix: pass its holder, net instead of *net, or a std::shared_ptr");
  static_assert(!kUnique,
                "prepare(): this argument is a std::unique_ptr. "
                "Fix: pass the object it points to, *loader, and keep the pointer");
  static_assert(kModel || kModule || kUnique || Borrowable<T>,
                "prepare(): this argument is a temporary, which is destroyed too soon. "
                "Fix: keep it in a variable, or pass a std::shared_ptr");
  static_assert(
      kModel || kModule || kUnique || OptimizerLike<T> || LoaderLike<T> || SchedulerLike<T>,
      "prepare(): this argument is no model, optimizer, scheduler (step()) "
      "or range of batches (begin() and end(), not const)");
  if constexpr (!kModel && !kModule && LoaderLike<T>) {
    static_assert(kHasTensors<RangeValue<typename BorrowedArgument<T>::Object>>,
                  "prepare(): no tensor is found in this range's batches. "
                  "Fix: batches that are a Tensor, a pair, tuple, vector, map or "
                  "struct of Tensors, or a flatten(visit, batch) in their namespace");
  }
  return true;
}

template <ModelHolder Holder>
std::shared_ptr<torch::nn::Module> module_of(const Holder& holder) {
  if constexpr (requires { holder.ptr(); }) {
    return holder.ptr();
  } else {
    return holder;
  }
}

// An argument of Accelerator's functions: a prepared model, by its holder.
class ModelRef {
 public:
  template <ModelHolder Holder>
  ModelRef(const Holder& holder) : module_(module_of(holder).get()) {} // NOLINT: implicit
  torch::nn::Module* get() const { return module_; }

 private:
  torch::nn::Module* module_;
};

// Makes one object's handle. prepare() treats models first, then optimizers, then the rest,
// whatever the order of the arguments.
template <typename Object>
auto prepare_object(Object&& object, PrepareCall& call) {
  using T = Object&&;
  if constexpr (ModelHolder<T>) {
    return std::decay_t<Object>(object);
  } else {
    auto shared = BorrowedArgument<Object>::share(std::forward<Object>(object));
    using Held = typename BorrowedArgument<Object>::Object;
    if constexpr (OptimizerLike<Object>) {
      return PreparedOptimizer<Held>(call.core(), shared, call.next_optimizer());
    } else if constexpr (LoaderLike<Object>) {
      return PreparedLoader<Held>(loader_link(call.core()), std::move(shared), call.next_loader());
    } else {
      auto state = call.scheduler([shared] { shared->step(); });
      if constexpr (std::derived_from<Held, Stateful>) {
        state->stateful = shared;
      } else if constexpr (std::derived_from<Held, torch::optim::LRScheduler>) {
        state->stateful = torch_scheduler_state(shared);
      }
      return PreparedScheduler<Held>(call.core(), shared, std::move(state));
    }
  }
}

// Accelerator::prepare.
template <typename... Objects>
auto prepare_objects(const std::shared_ptr<AcceleratorCore>& core, Objects&&... objects) {
  static_assert(sizeof...(Objects) > 0, "prepare needs an object");
  []<size_t... I>(std::index_sequence<I...>) {
    static_assert((argument_is_preparable<I + 1, Objects>() && ...));
  }(std::index_sequence_for<Objects...>());
  PrepareCall call(core);
  const auto model_pass = [&](auto& object) {
    if constexpr (ModelHolder<decltype(object)>) {
      call.add(module_of(object));
    }
  };
  (model_pass(objects), ...);
  const auto other_pass = [&]<typename Object>(Object& object) {
    using T = Object&;
    if constexpr (ModelHolder<T>) {
      return;
    } else if constexpr (OptimizerLike<T>) {
      call.add(std::shared_ptr<torch::optim::Optimizer>(BorrowedArgument<T>::share(object)));
    } else if constexpr (LoaderLike<T>) {
      call.add_loader();
    }
  };
  (other_pass(objects), ...);
  call.tie();
  // Braces: handles are made in the order of the arguments.
  std::tuple<decltype(prepare_object(std::forward<Objects>(objects), call))...> handles{
      prepare_object(std::forward<Objects>(objects), call)...};
  if constexpr (sizeof...(Objects) == 1) {
    return std::get<0>(std::move(handles));
  } else {
    return handles;
  }
}

} // namespace hasten::detail
