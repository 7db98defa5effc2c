// The interface between layers and activation checkpointing. A checkpointed region runs its
// forward a second time in backward to compute the tensors that backward needs.
// Threading: every function is about the calling thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <functional>
#include <memory>
#include <vector>

namespace hasten {

/// True while this thread recomputes a forward. A layer with a collective or a side effect in its
/// forward checks this, or uses run_once().
bool in_recompute();

/// Returns the tensors that `make` returns, without gradient. Inside a checkpointed region `make`
/// runs only in forward. The results are kept, and a recomputation gets the same tensors, bit for
/// bit. For collectives, the decision of a router, or data that is read. Outside a region it
/// calls make(). Throws Error if the recomputation calls it more often than forward did.
std::vector<at::Tensor> run_once(const std::function<std::vector<at::Tensor>()>& make);
at::Tensor run_once(const std::function<at::Tensor()>& make);

namespace detail {

// The dispatch key at which observers see operators. Torch reserves it for a mode and has no
// kernels on it.
constexpr auto kOpKey = c10::DispatchKey::Fake;

// While it lives, operators of this thread are not part of a forward: they are not recorded, and
// they may write tensors that existed before.
class UnseenOps {
 private:
  c10::impl::ExcludeDispatchKeyGuard excluded_{kOpKey};
};

// The results that run_once() kept, in the order of its calls.
using OnceStore = std::vector<std::vector<at::Tensor>>;

// A thread's position in a store. Nested regions share the store of the outer one.
struct OncePlace {
  std::shared_ptr<OnceStore> store{};
  size_t next = 0;
  bool replays = false; // this thread recomputes

  // Of this thread, or the first one of a new store.
  static OncePlace now_or_new();
};
OncePlace& once_place();

// Sets a thread's position and restores the previous one at its end.
class OnceScope {
 public:
  explicit OnceScope(OncePlace place);
  OnceScope(const OnceScope&) = delete;
  OnceScope& operator=(const OnceScope&) = delete;
  ~OnceScope();

 private:
  OncePlace before_;
};

} // namespace detail
} // namespace hasten
