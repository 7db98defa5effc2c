// What an optimizer offers whose kernel can scale gradients in the pass that reads
// them.
#pragma once

namespace hasten {

class FusedOptimizer {
 public:
  virtual ~FusedOptimizer() = default;
  /// step() with every gradient multiplied by `factor` on the way. Afterwards each
  /// grad() that took part holds the product. Local.
  virtual void step_scaled(double factor) = 0;
};

} // namespace hasten
