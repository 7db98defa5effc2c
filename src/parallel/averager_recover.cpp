// A round that a peer's death has broken, and the averager behind it.
//
// Note [Recovery]
// A vote that ended well on one rank was entered by every rank, each with the whole
// sum: so where one of those that are left has committed, the others lack nothing
// but the sum of weights, which it tells them. Where none has, none can have gone on
// to what follows, and the round is dropped. Two ranks are never further apart than
// one vote.
#include <ATen/ATen.h>

#include <limits>

#include "averager_impl.h"
#include "hasten/base/error.h"

namespace hasten {

RoundOutcome Averager::Impl::recover() {
  constexpr const char* where = "parallel::Averager";
  if (!options.transactional) {
    throw InputError(where, "recover() with transactional=false",
                     "transactional=true: a broken round has left half-made sums behind");
  }
  const auto all = communicator->all_gather_object(
      {{"rounds", rounds}, {"total", last_total}, {"unsettled", round.open || dropped}},
      "how far the ranks are with an average");
  int64_t most = rounds;
  double total = 0;
  for (const auto& rank : all) {
    if (rank.at("rounds") >= most) {
      most = rank.at("rounds");
      total = rank.at("total");
    }
  }
  bool drop = false;
  for (const auto& rank : all) {
    drop = drop || (rank.at("rounds") == most && rank.at("unsettled"));
  }
  spread = at::Tensor();
  spread_handle = {};
  report.spread = std::numeric_limits<double>::quiet_NaN();
  RoundOutcome outcome = RoundOutcome::none;
  if (rounds < most) {
    if (!round.open || !round.whole || rounds + 1 < most) {
      throw CommunicationError(where,
                               "this rank has made " + std::to_string(rounds) +
                                   " rounds, another one " + std::to_string(most),
                               "ranks that are in one round",
                               "call recover() on all ranks that are left");
    }
    at::NoGradGuard no_grad;
    round.total = total;
    recovering = true;
    commit();
    recovering = false;
    end_round();
    outcome = RoundOutcome::committed;
  } else if (drop) {
    drop_round();
    outcome = RoundOutcome::dropped;
  }
  // An operation of before may still write into the old ones.
  make_buffers();
  if (options.comm_hook) {
    options.comm_hook->reset();
  }
  return outcome;
}

void Averager::Impl::drop_round() {
  at::NoGradGuard no_grad;
  round = {};
  dropped = true;
  bool stepped = false;
  for (Group& group : groups) {
    if (group.anchor_before.defined()) {
      group.anchor.copy_(group.anchor_before);
      group.anchor_before = at::Tensor();
      stepped = true;
    }
  }
  if (stepped) { // its momentum has moved already
    options.outer->load_state({}, nlohmann::json::object());
  }
}

} // namespace hasten
