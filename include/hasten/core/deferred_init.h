// A model that is larger than one rank should hold: built with its parameters' shapes
// and without their memory, which comes when somebody asks for their values.
//
//   auto model = hasten::deferred_init([&] { return std::make_shared<Gpt>(options); });
//   hasten::FullyShard sharded(communicator, model, blocks); // values unit by unit
//   hasten::materialize(*model);                             // or all of them
//
// The constructor runs as ever, its operators compute, and it may look at what they
// gave; but what is not in use loses its memory, and a log remembers how it was made:
// operators, their arguments, the state of the random generators. So values, when they
// come, are bit for bit those that the constructor gave without deferral, in whatever
// order they are asked for; random numbers drawn afterwards are the same, too; tensors
// that share memory go on sharing it.
// Cost: initialisation twice, in the scope and when values come. Of a parameter that is
// written several times (a layer's own initialisation, then the model's) the last time
// alone is repeated.
//
// What a deferred tensor cannot: be read or written before its values are there, which
// throws c10::Error saying so. Shapes, dtypes, views, requires_grad, optimizers made of
// it: all fine. A pointer into a tensor made in the scope is good until the next
// operator; what is written through one is kept as it is, in memory.
// Tensors from outside that parameters are copied from (a checkpoint's) are held until
// these have their values, and must not change meanwhile.
// Only memory of the CPU is deferred; tensors of other devices have their values.
// Threading: the scope sees operators of its thread. Materialising: one thread a model.
// Design: docs/design/fully_sharded.md
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace hasten {

struct DeferredInitOptions {
  /// Of tensors that keep their memory while the constructor runs, beside those of the
  /// operator that runs: what it made last and is likely to use next. Bytes, >= 0.
  /// Less: what is read again later is computed again.
  int64_t resident_bytes = 64 << 20;
};

namespace detail {

class DeferredRecorder;

// While it lives operators of this thread are recorded. Inside another it is nothing.
class DeferredScope {
 public:
  explicit DeferredScope(const DeferredInitOptions& options);
  DeferredScope(const DeferredScope&) = delete;
  DeferredScope& operator=(const DeferredScope&) = delete;
  ~DeferredScope();
  // Parameters and buffers of the module let go of their memory; all else that the
  // scope made has its values.
  void finish(const torch::nn::Module* module);

 private:
  std::unique_ptr<DeferredRecorder> recorder_;
};

} // namespace detail

/// What `make` gives: a module, by std::shared_ptr or holder, whose parameters and
/// buffers are deferred. What else it made, tensors that are no module's included, has
/// its values. An exception of `make` passes through. Inside another deferred_init it
/// is make(). Local.
/// Throws InputError where `make` gives null, or resident_bytes < 0.
template <typename Make>
auto deferred_init(Make&& make, const DeferredInitOptions& options = {}) {
  detail::DeferredScope scope(options);
  auto made = std::forward<Make>(make)();
  static_assert(std::is_convertible_v<decltype(&*made), const torch::nn::Module*>,
                "deferred_init's function returns a module, by shared_ptr or holder");
  const torch::nn::Module* module = nullptr;
  if (made) {
    module = &*made;
  }
  scope.finish(module);
  return made;
}

/// Whether the tensor, or a parameter or buffer of the module, waits for its values.
bool is_deferred(const at::Tensor& tensor);
/// Whether this thread is inside deferred_init's function, where a copy is made later
/// and keeps what it is made from: a file's mapping takes no memory until then.
bool in_deferred_init();
bool is_deferred(const torch::nn::Module& module);

/// Gives deferred tensors their memory and values; others stay as they are. Random
/// generators stay where they are. Memory: theirs, and one operator's temporaries.
/// Local. Inside the scope it does nothing: there values are at hand.
/// Throws InputError where a tensor from outside, of which values are made, has changed
/// since; then, and when memory runs out, all stay deferred.
void materialize(const std::vector<at::Tensor>& tensors);
void materialize(const torch::nn::Module& module);

namespace detail {

/// Memory without values, for who overwrites them all.
void allocate_deferred(const std::vector<at::Tensor>& tensors);

} // namespace detail
} // namespace hasten
