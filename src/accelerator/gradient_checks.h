// Whether a complete window's gradients are finite.
#pragma once

#include <algorithm>
#include <optional>
#include <vector>

#include "hasten/core/device_scalar.h"
#include "parts.h"

namespace hasten::detail {

class GradientChecks {
 public:
  GradientChecks(const RunContext& run, ModelSet& models, WindowSet& windows,
                 MixedPrecision& precision)
      : run_(run), models_(models), windows_(windows), precision_(precision) {}

  /// The window's gradients are new.
  void completed(const GradientWindow& window);
  void zeroed(size_t model) {
    facts_of(model).non_finite = false;
    facts_of(model).unread.clear();
  }
  /// A backward of the model begins.
  void begins(size_t model);
  /// The norm of the gradients of these lists was computed.
  void note_norm(const std::vector<SlotList>& lists, const DeviceScalar& norm);
  /// Some gradient of the model is infinite or NaN. Reads them once a window.
  bool overflowed(size_t model);
  /// An optimizer over these must not step. The first call for a window also updates the
  /// loss scale, from all models of that window.
  bool leaves_out_step(const std::vector<SlotList>& lists, uint64_t complete);
  bool non_finite(const std::vector<SlotList>& lists);

  bool non_finite(size_t model);
  void set_non_finite(size_t model, bool value) { facts_of(model).non_finite = value; }
  /// The last window that the loss scale followed.
  uint64_t scaled() const { return scaled_serial_; }
  void set_scaled(uint64_t serial) { scaled_serial_ = serial; }

 private:
  struct Facts {
    bool non_finite = false; // the gradients have such a value
    std::vector<DeviceScalar> unread{}; // it has also if one of these is not finite
    DeviceScalar bad_losses{}; // of the last window
    std::optional<DeviceScalar> norm{}; // of all gradients, not read yet
    bool looked = false; // for an overflow, since the last window; found:
    bool overflow = false;
  };
  void note(Facts& facts, const DeviceScalar& value);
  Facts& facts_of(size_t model) {
    facts_.resize(std::max(facts_.size(), model + 1));
    return facts_[model];
  }

  const RunContext& run_;
  ModelSet& models_;
  WindowSet& windows_;
  MixedPrecision& precision_;
  std::vector<Facts> facts_; // [model]
  uint64_t scaled_serial_ = 0;
};

} // namespace hasten::detail
