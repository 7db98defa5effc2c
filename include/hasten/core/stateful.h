// What everything that has state implements: it saves to and loads from named
// tensors and a JSON value, and knows no file.
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
  /// Adds this object's state. Tensors may alias live ones: the caller writes
  /// or clones them before anything goes on. Local.
  virtual void save_state(NamedTensors& tensors, nlohmann::json& values) const = 0;
  /// Restores it. Throws InputError naming what is missing or has another
  /// shape, before anything of this object was changed. Local.
  virtual void load_state(const NamedTensors& tensors, const nlohmann::json& values) = 0;
};

} // namespace hasten
