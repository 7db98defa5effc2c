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
  kWindowFinished,
  kWindowLeft, // finished ranks that do not join
  kWindowLeftBits, // 2^rank of each of them
  kWindowOutOfDate,
  kWindowIdle,
  kWindowExtra,
  kWindowBuffers,
  kWindowRound,
  kWindowModels,
  kWindowPrint, // fingerprint of what must be equal, < 2^16
  kWindowPrintSquared,
  kWindowDataKnown, // finished ranks whose data is not 0
  kWindowData,
  kWindowDataSquared,
  kWindowRead, // ranks that read something to compare, its print and square
  kWindowRequest = kWindowRead + 3, // the first of kWindowRequests: ranks that have the bit
  kWindowFields = kWindowRequest + kWindowRequests
};

// Multiplicative hashing (Knuth, TAOCP 6.4); small enough that squares of it sum
// exactly in fp64 over a million ranks.
double window_fingerprint(const WindowTotals& window) {
  uint64_t value = window.number * 8 + (window.extra ? 1 : 0) + (window.outside ? 2 : 0) +
                   (window.buffers ? 4 : 0);
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
      "prepare() the loader; or call join_uneven_inputs() on every rank after a loop over "
      "a range that is not prepared; or leave the loop on all ranks, see check_trigger()");
}

} // namespace detail

WindowControl::WindowControl(std::shared_ptr<Communicator> communicator)
    : communicator_(std::move(communicator)) {}

void WindowControl::start(const WindowTotals& mine) {
  using namespace detail;
  std::array<double, kWindowFields> host{};
  range_ = mine.range;
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
  host[kWindowFinished] = mine.finished;
  if (mine.finished == 0) {
    const double print = window_fingerprint(mine);
    host[kWindowIdle] = mine.idle;
    host[kWindowBuffers] = mine.buffers ? 1 : 0;
    host[kWindowExtra] = mine.extra ? 1 : 0;
    host[kWindowRound] = static_cast<double>(mine.round);
    host[kWindowModels] = static_cast<double>(mine.models);
    host[kWindowPrint] = print;
    host[kWindowPrintSquared] = print * print;
    for (int bit = 0; bit < kWindowRequests; ++bit) {
      host[kWindowRequest + bit] = (mine.requests >> bit) & 1u;
    }
  } else {
    const auto data = static_cast<double>(mine.data);
    host[kWindowLeft] = mine.joins ? 0 : 1;
    host[kWindowLeftBits] =
        mine.joins || communicator_->rank() >= kNamedRanks ? 0 : std::exp2(communicator_->rank());
    host[kWindowOutOfDate] = mine.out_of_date;
    host[kWindowDataKnown] = mine.data != 0 ? 1 : 0;
    host[kWindowData] = data;
    host[kWindowDataSquared] = data * data;
  }
  values_ = at::tensor(at::ArrayRef<double>(host), at::kDouble);
  handle_ = communicator_->all_reduce_async(values_, ReduceOp::SUM, "window control");
}

WindowTotals WindowControl::wait() {
  using namespace detail;
  handle_.wait();
  const double* sum = values_.const_data_ptr<double>();
  WindowTotals totals;
  totals.weight = sum[kWindowWeight];
  totals.rows = sum[kWindowRows];
  totals.loss = sum[kWindowLoss];
  totals.non_finite = sum[kWindowNonFinite];
  totals.finished = static_cast<int>(std::lround(sum[kWindowFinished]));
  totals.out_of_date = static_cast<int>(std::lround(sum[kWindowOutOfDate]));
  const double active = communicator_->world_size() - totals.finished;
  if (active > 0 && sum[kWindowLeft] > 0) {
    throw_left(static_cast<uint64_t>(sum[kWindowLeftBits]), std::lround(sum[kWindowLeft]),
               communicator_->world_size());
  }
  const auto compare_read = [&](const double* read) {
    if (!equal_on_ranks(read[0], read[1], read[2])) {
      throw_other_batches(range_);
    }
  };
  if (active == 0) {
    if (!equal_on_ranks(sum[kWindowDataKnown], sum[kWindowData], sum[kWindowDataSquared])) {
      throw CommunicationError(
          "accelerator::PreparedLoader",
          "ranks are at the ends of different loaders, or have done different optimizer steps by now",
          "loops over prepared loaders that end in one order, and the same steps, on every rank",
          "do not decide about steps by a rank's own count of batches; nested loaders "
          "need equally many batches on every rank");
    }
    compare_read(sum + kWindowRead);
    return totals;
  }
  totals.idle = static_cast<int>(std::lround(sum[kWindowIdle]));
  totals.buffers = sum[kWindowBuffers] > 0;
  totals.extra = sum[kWindowExtra] > 0;
  totals.models = static_cast<uint64_t>(sum[kWindowModels] / active);
  totals.round = static_cast<int64_t>(sum[kWindowRound] / active);
  for (int bit = 0; bit < kWindowRequests; ++bit) {
    totals.requests |= sum[kWindowRequest + bit] > 0 ? 1u << bit : 0u;
  }
  if (!equal_on_ranks(active, sum[kWindowPrint], sum[kWindowPrintSquared])) {
    throw CommunicationError(
        "accumulation::GradientWindow",
        "ranks are in different windows, use different models in one, "
        "stepped different optimizers before it, or scale losses differently",
        "the same order of accumulate(), backward() and step() on every rank, "
        "and of evaluations inside windows",
        "find a branch in the loop that depends on the rank or on its number of "
        "batches; accumulate() makes such decisions equally on all ranks");
  }
  compare_read(sum + kWindowRead);
  return totals;
}

} // namespace hasten
