// What code may know about recomputation: parts that checkpoint activations run a
// region's forward a second time in backward, to remake what backward needs.
// Threading: every function speaks of the calling thread.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

namespace hasten {

/// True while this thread runs a forward for the second time. A layer with a
/// collective or a side effect in its forward asks it, or uses run_once().
bool in_recompute();

/// The tensors that `make` gives, without gradient. Inside a checkpointed region
/// `make` runs in forward only: recomputation gets the same tensors again, bit for
/// bit, at the cost of keeping them. For collectives, a router's decision, data
/// read from elsewhere. Outside a region: make().
/// Throws Error where recomputation calls it more often than forward did.
std::vector<at::Tensor> run_once(const std::function<std::vector<at::Tensor>()>& make);
at::Tensor run_once(const std::function<at::Tensor()>& make);

namespace detail {

// Marks this thread as recomputing, while it lives.
class RecomputeFlag {
 public:
  RecomputeFlag();
  RecomputeFlag(const RecomputeFlag&) = delete;
  RecomputeFlag& operator=(const RecomputeFlag&) = delete;
  ~RecomputeFlag();
};

// On this key operators are seen by who records or replays them. Torch declares it
// for a mode of its own to come and has no kernels on it.
constexpr auto kOpKey = c10::DispatchKey::Fake;

// While it lives, operators of this thread are no part of a forward: they are
// neither recorded nor kept from writing what existed before.
class UnseenOps {
 private:
  c10::impl::ExcludeDispatchKeyGuard excluded_{kOpKey};
};

// What run_once() kept, in the order of its calls.
struct OnceStore {
  std::vector<std::vector<at::Tensor>> values{};
};

// Where a thread is in a store; regions inside a region share the outer's.
struct OncePlace {
  std::shared_ptr<OnceStore> store{};
  size_t next = 0;
  bool replays = false;
};
OncePlace& once_place();

// Puts a thread's place, and puts back the one before.
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
