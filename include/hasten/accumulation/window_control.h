// What ranks tell each other about a window before any gradient is reduced: one
// small vector, summed asynchronously while backward runs.
// Threading: one thread. Lifetime: shares the communicator.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>

#include "hasten/comm/communicator.h"

namespace hasten {

/// Bits of WindowTotals::requests.
inline constexpr int kWindowRequests = 6;

/// A rank's own figures going in, the sum over ranks coming out.
struct WindowTotals {
  /// Sum of the batches' weights, and of their rows.
  double weight = 0;
  double rows = 0;
  /// Sum of losses, and how many were not finite.
  double loss = 0;
  double non_finite = 0;
  /// Ranks whose loop has ended: 1 for such a rank.
  int finished = 0;
  /// A finished rank takes part in what the others still do. Else they must be
  /// finished as well.
  bool joins = false;
  /// Finished ranks that took part in a window since: 1 for such a rank.
  int stale = 0;
  /// What finished ranks must agree on: which data ended, and after what. Below
  /// 2^16; 0 agrees with all.
  uint64_t data = 0;
  /// Ranks whose batches of the window are all stand-ins: 1 for such a rank.
  int idle = 0;
  /// A further reduction of a window that was reduced once already.
  bool extra = false;
  /// No window: the buffers of `models` are evened out.
  bool buffers = false;
  /// Bit i: model i takes part. Agreed on by the ranks that have batches.
  uint64_t models = 0;
  /// Number of the window among those of its models.
  uint64_t number = 0;
  /// Not 0: no window, but a round of Local SGD over these models, of this kind.
  int64_t round = 0;
  /// It was not opened, but is one of GradientWindow::backward_outside. Agreed on.
  bool outside = false;
  /// WindowShared::steps. Agreed on by the ranks that have batches.
  uint64_t steps = 0;
  /// Checksum of what this rank read of a range that all read alike: of the first round,
  /// or, from a finished rank, of all. 0 agrees with all. `range` names it.
  uint64_t read = 0;
  std::string range{};
  /// What losses are multiplied by in addition to their weights. Agreed on.
  double loss_scale = 1;
  /// Bits below kWindowRequests; coming out those that any rank with batches had.
  uint32_t requests = 0;
};

namespace detail {
/// Ranks read other batches of `range`.
[[noreturn]] void throw_other_batches(const std::string& range);
} // namespace detail

class WindowControl {
 public:
  WindowControl(std::shared_ptr<Communicator> communicator, at::Device device);

  /// Begins the sum. `loss_stats` [2] fp64 on the device, or undefined, is added
  /// to `mine`'s loss and non_finite, so that nothing waits for the device here.
  /// A finished rank's other figures are 0. Collective.
  void start(const WindowTotals& mine, const at::Tensor& loss_stats);
  /// Waits. Collective.
  /// Throws CommunicationError, on every rank, where some ranks are finished, do not
  /// join, and others are not finished; where ranks with batches are not in the same
  /// window of the same models; where all are finished, but with different data; or
  /// where they read different batches.
  WindowTotals wait();

 private:
  std::shared_ptr<Communicator> communicator_;
  at::Device device_;
  std::string range_{};
  at::Tensor values_{};
  Work handle_{};
};

} // namespace hasten
