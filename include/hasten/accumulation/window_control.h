// The control vector: a small vector by which ranks agree on a window before any gradient is
// reduced. It is summed asynchronously while backward runs.
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

/// Input: this rank's values. Output: the sums over ranks.
struct WindowTotals {
  /// Sums of the batches' weights and of their samples.
  double weight = 0;
  double rows = 0;
  /// Sum of losses, and the number of those that were not finite. 0 for losses on a device, which
  /// are summed there.
  double loss = 0;
  double non_finite = 0;
  /// Number of ranks at the end of their data; input: 1 for such a rank. All ranks must be there,
  /// at the same one, unless they wait.
  int finished = 0;
  /// This finished rank waits for the others, which may synchronise by Local SGD in the meantime.
  bool waits = false;
  /// A hash on which finished ranks must agree: the data that ended, and the step at which it
  /// ended.
  uint64_t data = 0;
  /// Number of ranks whose window has no batches but stand-ins; input: 1 for such a rank.
  int idle = 0;
  /// Number of ranks whose window has no batch at all; input: 1 for such a rank.
  int empty = 0;
  /// Another reduction of a window that was reduced already.
  bool extra = false;
  /// Not a window: the buffers of `models` are synchronised.
  bool buffers = false;
  /// Bit i: model i takes part. Ranks must agree.
  uint64_t models = 0;
  /// Number of the window among those of its models.
  uint64_t number = 0;
  /// If not 0: not a window, but a Local SGD synchronisation of this kind over these models. Output,
  /// on a rank that waits: the others'.
  int64_t round = 0;
  /// The window is one of GradientWindow::backward_outside. Ranks must agree.
  bool outside = false;
  /// WindowShared::steps. Ranks must agree.
  uint64_t steps = 0;
  /// Checksum of the batches that this rank read from a range that all ranks read: of the first
  /// global batch or, at the end of the data, of all. 0 agrees with all. `range` is the range's name.
  uint64_t read = 0;
  std::string range{};
  /// The factor of losses in addition to their weights. Ranks must agree.
  double loss_scale = 1;
  /// Bits below kWindowRequests. Output: those that any rank has set.
  uint32_t requests = 0;
};

namespace detail {
/// Throws because ranks read different batches of `range`.
[[noreturn]] void throw_other_batches(const std::string& range);
} // namespace detail

class WindowControl {
 public:
  explicit WindowControl(std::shared_ptr<Communicator> communicator);

  /// Starts the sum, of host memory on every device. A finished rank's other values are 0.
  /// Collective.
  void start(const WindowTotals& mine);
  /// Waits for the sum. Collective.
  /// Throws CommunicationError on every rank if some ranks are finished without waiting and others
  /// are not finished; if ranks are not in the same window of the same models; if all are finished,
  /// but with different data; or if they read different batches.
  WindowTotals wait();

 private:
  std::shared_ptr<Communicator> communicator_;
  WindowTotals mine_{};
  at::Tensor values_{};
  Work handle_{};
};

} // namespace hasten
