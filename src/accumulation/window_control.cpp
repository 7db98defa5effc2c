#include "hasten/accumulation/window_control.h"

#include <ATen/ATen.h>

#include <array>
#include <bit>
#include <cmath>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/core/random.h"

namespace hasten {

namespace detail {

// The vector, fp64, summed over ranks.
enum WindowField {
  kWindowWeight,
  kWindowRows,
  kWindowLoss,
  kWindowNonFinite,
  kWindowIdle,
  kWindowEmpty,
  kWindowRound,
  kWindowFinished,
  kWindowLeft, // finished ranks that do not wait
  kWindowLeftBits, // 2^rank of each of them
  kWindowPrint, // fingerprint of what must be equal, < 2^16
  kWindowPrintSquared,
  kWindowRead, // ranks that read something to compare, its print and square
  kWindowRequest = kWindowRead + 3, // the first of kWindowRequests: ranks that have the bit
  kWindowFields = kWindowRequest + kWindowRequests
};

// Multiplicative hashing (Knuth, TAOCP 6.4); small enough that squares of it sum
// exactly in fp64 over a million ranks.
double window_fingerprint(const WindowTotals& window) {
  uint64_t value = window.number * 8 + (window.extra ? 1 : 0) + (window.outside ? 2 : 0) +
                   (window.buffers ? 4 : 0);
  if (window.finished > 0) {
    return static_cast<double>(mix(window.data, window.waits ? 1 : 0) >> 48);
  }
  for (const uint64_t next : {window.models, window.steps, static_cast<uint64_t>(window.round),
                              std::bit_cast<uint64_t>(window.loss_scale)}) {
    value = mix(value, 0) ^ next;
  }
  return static_cast<double>(mix(value, 0) >> 48);
}

// Equality of `count` ranks: the one case in which the sum's square is as large
// as `count` times the sum of squares (Cauchy, Schwarz).
bool equal_on_ranks(double count, double sum, double sum_of_squares) {
  return sum * sum == count * sum_of_squares;
}

void throw_other_batches(const std::string& range) {
  throw CommunicationError(
      "accelerator::PreparedLoader", "ranks read different batches of " + range,
      "the same batches in the same order on every rank",
      "use the same range on all ranks and seed its own generators alike; if "
      "the data set draws random values, or the sampler does so after "
      "begin() and prefetch is on, see DataLoaderConfiguration::compare_batches");
}

// Ranks whose bits are exact in a sum.
constexpr int kNamedRanks = 52;

[[noreturn]] void throw_left(uint64_t bits, int64_t count, int world_size) {
  std::string ranks;
  for (int rank = 0; rank < kNamedRanks; ++rank) {
    if ((bits >> rank & 1) != 0) {
      ranks += (ranks.empty() ? "" : ", ") + std::to_string(rank);
      --count;
    }
  }
  if (count > 0) {
    ranks += (ranks.empty() ? "" : " and ") + std::to_string(count) + " more";
  }
  throw CommunicationError(
      "accumulation::GradientWindow",
      "some ranks have ended their loop and others continue to train: ended=" + ranks +
          ", world_size=" + std::to_string(world_size),
      "equally many batches on every rank",
      "prepare() the loader: a rank without samples gets stand-in batches; or leave the loop on "
      "all ranks, see check_trigger()");
}

} // namespace detail

WindowControl::WindowControl(std::shared_ptr<Communicator> communicator)
    : communicator_(std::move(communicator)) {}

void WindowControl::start(const WindowTotals& mine) {
  using namespace detail;
  std::array<double, kWindowFields> host{};
  mine_ = mine;
  if (mine.read != 0) {
    const auto print = static_cast<double>(mine.read >> 48);
    double* of_read = &host[kWindowRead];
    of_read[0] = 1;
    of_read[1] = print;
    of_read[2] = print * print;
  }
  host[kWindowWeight] = mine.weight;
  host[kWindowRows] = mine.rows;
  host[kWindowLoss] = mine.loss;
  host[kWindowNonFinite] = mine.non_finite;
  host[kWindowIdle] = mine.idle;
  host[kWindowEmpty] = mine.empty;
  host[kWindowRound] = static_cast<double>(mine.round);
  for (int bit = 0; bit < kWindowRequests; ++bit) {
    host[kWindowRequest + bit] = (mine.requests >> bit) & 1u;
  }
  const double print = window_fingerprint(mine);
  if (mine.finished > 0) {
    host[kWindowFinished] = 1;
    host[kWindowLeft] = mine.waits ? 0 : 1;
    host[kWindowLeftBits] =
        mine.waits || communicator_->rank() >= kNamedRanks ? 0 : std::exp2(communicator_->rank());
  }
  if (!mine.waits) { // it agrees with all
    host[kWindowPrint] = print;
    host[kWindowPrintSquared] = print * print;
  }
  values_ = at::tensor(at::ArrayRef<double>(host), at::kDouble);
  handle_ = communicator_->all_reduce_async(values_, ReduceOp::SUM, "window control");
}

WindowTotals WindowControl::wait() {
  using namespace detail;
  handle_.wait();
  const double* sum = values_.const_data_ptr<double>();
  const auto count = [sum](WindowField field) { return static_cast<int>(std::lround(sum[field])); };
  WindowTotals totals = mine_;
  totals.weight = sum[kWindowWeight];
  totals.rows = sum[kWindowRows];
  totals.loss = sum[kWindowLoss];
  totals.non_finite = sum[kWindowNonFinite];
  totals.finished = count(kWindowFinished);
  totals.idle = count(kWindowIdle);
  totals.empty = count(kWindowEmpty);
  const int world = communicator_->world_size();
  const int left = count(kWindowLeft);
  if (left > 0 && totals.finished < world) {
    throw_left(static_cast<uint64_t>(sum[kWindowLeftBits]), left, world);
  }
  const int compared = world - totals.finished + left; // the others wait
  const bool equal = equal_on_ranks(compared, sum[kWindowPrint], sum[kWindowPrintSquared]);
  if (left > 0 && (!equal || left < world)) {
    throw CommunicationError(
        "accelerator::PreparedLoader",
        "ranks are at the ends of different loaders, or have done different optimizer steps by now",
        "loops over prepared loaders that end in one order, and the same steps, on every rank",
        "do not decide about steps by a rank's own count of batches; nested loaders "
        "need equally many batches on every rank");
  }
  if (!equal) {
    throw CommunicationError(
        "accumulation::GradientWindow",
        "ranks are in different windows, use different models in one, "
        "stepped different optimizers before it, or scale losses differently",
        "the same order of accumulate(), backward() and step() on every rank, "
        "and of evaluations inside windows",
        "find a branch in the loop that depends on the rank or on its number of "
        "batches; accumulate() makes such decisions equally on all ranks");
  }
  if (!equal_on_ranks(sum[kWindowRead], sum[kWindowRead + 1], sum[kWindowRead + 2])) {
    throw_other_batches(mine_.range);
  }
  totals.round = compared > 0 ? std::lround(sum[kWindowRound] / compared) : 0;
  totals.requests = 0;
  for (int bit = 0; bit < kWindowRequests; ++bit) {
    totals.requests |= sum[kWindowRequest + bit] > 0 ? 1u << bit : 0u;
  }
  return totals;
}

} // namespace hasten
