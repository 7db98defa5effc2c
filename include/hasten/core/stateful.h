// The interface of objects with state. State is named tensors and a JSON value; these objects do
// not know files.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>

namespace hasten {

using NamedTensors = std::map<std::string, at::Tensor>;

class Stateful {
 public:
  virtual ~Stateful() = default;
  /// Adds this object's state to `tensors` and `values`. The tensors may alias live ones: the
  /// caller writes or clones them before anything changes. Local.
  virtual void save_state(NamedTensors& tensors, nlohmann::json& values) const = 0;
  /// Restores the state. Throws InputError that names what is missing or has another shape,
  /// before it changes anything of this object. Local.
  virtual void load_state(const NamedTensors& tensors, const nlohmann::json& values) = 0;
};

} // namespace hasten
