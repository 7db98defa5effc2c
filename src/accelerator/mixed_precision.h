// The precision of forwards, and the loss scale of fp16.
#pragma once

#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "hasten/accumulation/gradient_window.h"
#include "hasten/amp/loss_scale.h"
#include "hasten/config/precision.h"
#include "hasten/core/autocast.h"
#include "parts.h"

namespace hasten::detail {

class MixedPrecision {
 public:
  /// Chooses the options' precision. Collective.
  MixedPrecision(RunContext& run, std::shared_ptr<WindowShared> shared);

  /// Agrees on a precision. The loss scale starts anew. Collective.
  void choose(Precision wanted);
  Precision precision() const { return precision_; }
  AutocastOptions autocast_options() const;
  /// The scope of a batch's forward; see Note [Autocast in a window].
  void begin_batch();
  void end_batch(bool batch_closes) noexcept;

  /// Losses are scaled: fp16.
  bool scales() const { return loss_scale_.options().enabled; }
  const LossScale& loss_scale() const { return loss_scale_; }
  void update(bool overflow);
  /// Takes the smallest scale of all ranks. Collective.
  void take_smallest();
  nlohmann::json save() const;
  void load(const nlohmann::json& values);
  /// `loaded` runs after the scale was loaded.
  void add_to(StateToLoad& load, std::function<void()> loaded);

 private:
  void publish() { shared_->loss_scale = loss_scale_.value(); }

  RunContext& run_;
  std::shared_ptr<WindowShared> shared_;
  Precision precision_ = Precision::no;
  LossScale loss_scale_;
  std::optional<Autocast> batch_cast_; // of the open batch, until its backward
  std::optional<AutocastState> before_batch_;
};

} // namespace hasten::detail
