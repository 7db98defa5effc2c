#include "hasten/core/recompute.h"

#include <ATen/core/grad_mode.h>

#include <string>
#include <utility>

#include "hasten/base/error.h"

namespace hasten {

namespace detail {

static thread_local int recompute_depth = 0;

RecomputeFlag::RecomputeFlag() { ++recompute_depth; }
RecomputeFlag::~RecomputeFlag() { --recompute_depth; }

OncePlace& once_place() {
  static thread_local OncePlace place;
  return place;
}

OnceScope::OnceScope(OncePlace place) : before_(std::exchange(once_place(), std::move(place))) {}
OnceScope::~OnceScope() { once_place() = std::move(before_); }

} // namespace detail

bool in_recompute() { return detail::recompute_depth > 0; }

std::vector<at::Tensor> run_once(const std::function<std::vector<at::Tensor>()>& make) {
  detail::OncePlace& place = detail::once_place();
  if (!place.store) {
    const at::NoGradGuard no_grad;
    return make();
  }
  if (place.replays && place.next >= place.store->values.size()) {
    throw Error("core::run_once",
                "call " + std::to_string(place.next + 1) +
                    " of a recomputation, but forward only made " +
                    std::to_string(place.store->values.size()),
                "the same calls in both", "let the calls depend only on the region's inputs");
  }
  if (!place.replays) {
    const std::shared_ptr<detail::OnceStore> store = place.store;
    const size_t here = place.next++;
    const at::NoGradGuard no_grad;
    // The recomputation does not run these operators, so it must not count them.
    const detail::UnseenOps unwatched;
    std::vector<at::Tensor> made = make();
    for (at::Tensor& tensor : made) {
      // Detached, because its graph may hold the region, which holds the store.
      tensor = tensor.defined() ? tensor.detach() : tensor;
    }
    store->values.resize(std::max(store->values.size(), here + 1));
    store->values[here] = made;
    return made;
  }
  return place.store->values[place.next++];
}

at::Tensor run_once(const std::function<at::Tensor()>& make) {
  return run_once(
      std::function<std::vector<at::Tensor>()>([&] { return std::vector<at::Tensor>{make()}; }))[0];
}

} // namespace hasten
