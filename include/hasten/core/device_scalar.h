// A number that a device computes: a loss, a norm. Keeping, copying and passing it does not wait for
// the device. Only reading it does.
// Threading: the thread that made the number reads it, on any stream.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>

namespace hasten {

class DeviceScalar {
 public:
  DeviceScalar(double value = 0) : value_(value) {}
  /// The one floating-point element of `tensor`, which must not change until it is read. A tensor
  /// of the CPU is read here.
  explicit DeviceScalar(const at::Tensor& tensor);

  /// The number. The first call waits for the device, and also reads all other numbers of this
  /// thread that were made on the same stream: reading several numbers waits once.
  double item() const;
  operator double() const { return item(); }
  /// True if item() waits.
  bool pending() const;
  /// function(number), computed when it is read, at once if that does not wait.
  DeviceScalar then(std::function<double(double)> function) const;
  /// The number that the tensor has now, after a graph has written it again.
  DeviceScalar again() const;
  /// The number on the device before any then(), [1]; undefined for a number of the CPU, and for the
  /// then() of a number that was read.
  at::Tensor tensor() const;

 private:
  struct Source;

  double value_ = 0;
  std::shared_ptr<Source> source_{}; // null: value_
  std::function<double(double)> function_{}; // of the source; empty: the number itself
};

/// For nlohmann::json. Waits for the device.
template <typename Json>
void to_json(Json& json, const DeviceScalar& number) {
  json = number.item();
}

} // namespace hasten
