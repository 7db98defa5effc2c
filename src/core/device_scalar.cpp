#include "hasten/core/device_scalar.h"

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <optional>
#include <utility>
#include <vector>

#include "hasten/core/side_stream.h"

namespace hasten {

struct DeviceScalar::Source {
  at::Tensor tensor; // [1]
  c10::Stream stream;
  std::optional<double> value{};
  using List = std::vector<std::weak_ptr<Source>>;

  /// Those of this thread that may be unread.
  static List& unread() {
    thread_local List list;
    return list;
  }
};

DeviceScalar::DeviceScalar(const at::Tensor& tensor) {
  if (tensor.is_cpu()) {
    value_ = tensor.item<double>();
    return;
  }
  source_ = std::make_shared<Source>(tensor.detach().reshape({1}),
                                     detail::current_stream(tensor.device()));
  Source::List& unread = Source::unread();
  std::erase_if(unread, [](const auto& source) { return source.expired(); });
  unread.push_back(source_);
}

double DeviceScalar::item() const {
  if (!source_) {
    return value_;
  }
  if (pending()) {
    std::vector<std::shared_ptr<Source>> sources{source_};
    std::vector<at::Tensor> tensors{source_->tensor};
    std::erase_if(Source::unread(), [&](const auto& weak) {
      const auto source = weak.lock();
      if (source && source->stream != source_->stream) {
        return false;
      }
      if (source && source != source_ && !source->value) {
        sources.push_back(source);
        tensors.push_back(source->tensor);
      }
      return true;
    });
    const at::NoGradGuard no_grad;
    const c10::StreamGuard here(source_->stream);
    const c10::impl::ExcludeDispatchKeyGuard no_casts(c10::autocast_dispatch_keyset);
    const at::Tensor values = at::cat(tensors).cpu().to(at::kDouble);
    for (size_t i = 0; i < sources.size(); ++i) {
      sources[i]->value = values.const_data_ptr<double>()[i];
    }
  }
  return function_ ? function_(*source_->value) : *source_->value;
}

bool DeviceScalar::pending() const { return source_ && !source_->value; }

DeviceScalar DeviceScalar::then(std::function<double(double)> function) const {
  if (!pending()) {
    return function(item());
  }
  DeviceScalar result = *this;
  result.function_ = [before = function_, function = std::move(function)](double number) {
    return function(before ? before(number) : number);
  };
  return result;
}

DeviceScalar DeviceScalar::again() const {
  DeviceScalar fresh = source_ ? DeviceScalar(source_->tensor) : *this;
  fresh.function_ = function_;
  return fresh;
}

at::Tensor DeviceScalar::tensor() const { return source_ ? source_->tensor : at::Tensor(); }

} // namespace hasten
