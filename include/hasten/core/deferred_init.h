// Builds a model that is larger than one rank should hold. Its parameters have shapes but no
// memory until their values are needed.
//
//   auto model = hasten::deferred_init([&] { return std::make_shared<Gpt>(options); });
//   hasten::FullyShard sharded(communicator, model, blocks); // makes the values unit by unit
//   hasten::materialize(*model);                             // or all of them
//
// The constructor runs as usual: its operators compute, and it may read their results. But a
// tensor that is not in use loses its memory, and a log records how it was made: operators,
// arguments, state of the random generators. Later values are bit for bit those without
// deferral, in whatever order tensors are materialised. Random values drawn afterwards are the
// same, too. Tensors that share memory still share it.
// Cost: initialisation runs twice, in the scope and at materialisation. If a parameter is written
// several times (by the layer's initialisation, then by the model's), only the last one runs
// twice.
//
// Reading or writing a deferred tensor before it has values throws c10::Error. Shapes, dtypes,
// views, requires_grad and building an optimizer work. A pointer into a tensor that was made in
// the scope is valid until the next operator. What is written through it is kept in memory.
// If parameters are copied from tensors outside the scope (of a checkpoint, for example), these
// tensors are held until the parameters have values, and must not change before.
// Only CPU memory is deferred. Tensors on other devices have their values.
// Threading: the scope records the operators of its thread. One thread at a time may materialise
// a model.
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
  /// Bytes of tensors that keep their memory while the constructor runs, in addition to those
  /// of the running operator. These are the latest results, which are likely to be used next.
  /// With a smaller value, tensors that are read again are computed again. >= 0.
  int64_t resident_bytes = 64 << 20;
};

namespace detail {

class DeferredRecorder;

// Records the operators of this thread while the result lives. Null inside another scope.
std::shared_ptr<DeferredRecorder> record_deferred(const DeferredInitOptions& options);
// Frees the memory of the module's parameters and buffers. All other tensors of the scope get
// their values. `recorder` may be null.
void finish_deferred(DeferredRecorder* recorder, const torch::nn::Module* module);

} // namespace detail

/// Returns the result of `make`: a module (std::shared_ptr or holder) whose parameters and
/// buffers are deferred. All other tensors that `make` created have their values. An exception
/// of `make` passes through. Inside another deferred_init it only calls make(). Local.
/// Throws InputError if `make` returns null, or resident_bytes < 0.
template <typename Make>
auto deferred_init(Make&& make, const DeferredInitOptions& options = {}) {
  const auto recorder = detail::record_deferred(options);
  auto made = std::forward<Make>(make)();
  static_assert(std::is_convertible_v<decltype(&*made), const torch::nn::Module*>,
                "deferred_init's function returns a module, by shared_ptr or holder");
  const torch::nn::Module* module = nullptr;
  if (made) {
    module = &*made;
  }
  detail::finish_deferred(recorder.get(), module);
  return made;
}

/// Whether the tensor, or any parameter or buffer of the module, is deferred.
bool is_deferred(const at::Tensor& tensor);
/// Whether this thread is inside the function of deferred_init. A copy is then made later and
/// keeps its source. If the source is a mapping of a file, it takes no memory until then.
bool in_deferred_init();
bool is_deferred(const torch::nn::Module& module);

/// Gives deferred tensors memory and values; other tensors stay as they are. Does not change the
/// state of random generators. Memory: that of the tensors and one operator's temporaries.
/// Local. Does nothing inside the scope, where values can be read.
/// Throws InputError if a tensor outside the scope from which values are copied has changed. Then,
/// and when memory runs out, all tensors stay deferred.
void materialize(const std::vector<at::Tensor>& tensors);
void materialize(const torch::nn::Module& module);
/// Moves the module to the device. Deferred parameters and buffers are made on the CPU one by one,
/// and the CPU's memory of each is freed before the next one. Memory of the CPU: that of the largest
/// and one operator's temporaries.
void materialize(const torch::nn::Module& module, const at::Device& device);

namespace detail {

/// Allocates memory without values, for a caller that overwrites all of it.
void allocate_deferred(const std::vector<at::Tensor>& tensors);

} // namespace detail
} // namespace hasten
