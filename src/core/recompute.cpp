#include "hasten/core/recompute.h"

#include <ATen/core/grad_mode.h>

#include <string>
#include <utility>

#include "hasten/base/error.h"

namespace hasten {

namespace detail {

OncePlace& once_place() {
  static thread_local OncePlace place;
  return place;
}

OncePlace OncePlace::now_or_new() {
  return once_place().store ? once_place() : OncePlace{std::make_shared<OnceStore>()};
}

OnceScope::OnceScope(OncePlace place) : before_(std::exchange(once_place(), std::move(place))) {}
OnceScope::~OnceScope() { once_place() = std::move(before_); }

} // namespace detail

bool in_recompute() { return detail::once_place().replays; }

std::vector<at::Tensor> run_once(const std::function<std::vector<at::Tensor>()>& make) {
  detail::OncePlace& place = detail::once_place();
  if (!place.store) {
    const at::NoGradGuard no_grad;
    return make();
  }
  if (place.replays && place.next >= place.store->size()) {
    throw Error("core::run_once",
                "call " + std::to_string(place.next + 1) +
                    " of a recomputation, but forward only made " +
                    std::to_string(place.store->size()),
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
    store->resize(std::max(store->size(), here + 1));
    (*store)[here] = made;
    return made;
  }
  return (*place.store)[place.next++];
}

at::Tensor run_once(const std::function<at::Tensor()>& make) {
  return run_once(
      std::function<std::vector<at::Tensor>()>([&] { return std::vector<at::Tensor>{make()}; }))[0];
}

} // namespace hasten
