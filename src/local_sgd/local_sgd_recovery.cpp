// A scope that continues with the remaining ranks.
//
// Note [Going on] Inside a scope all ranks do the same steps in one order: a synchronisation (its
// announcement, statistics, moments and parameters are one step), an average of the groups, the end
// of the data. If one rank has completed a step, every rank has begun it. So when a peer is lost,
// two ranks are at most one step apart. The remaining ranks compare. A step that one of them has
// completed is completed for all: a synchronisation by Averager::recover(), the end of the data by
// taking its clocks, a group's average by skipping it. A step that no rank has completed is
// repeated. When a delayed synchronisation is dropped, one rank may be at its start and another at
// its end or at a group's average in between. All of them then average everything without delay,
// whatever they were about to do.
#include <algorithm>

#include "hasten/base/error.h"
#include "local_sgd_scope.h"

namespace hasten {

void LocalSGD::Impl::make_round(Part part, int64_t fragment) {
  for (;;) {
    const int64_t rounds = progress.rounds;
    const int64_t inner_rounds = progress.inner_rounds;
    try {
      announce(part, fragment);
      run(part, fragment);
      return;
    } catch (const CommunicationError&) {
      if (!recover()) {
        throw;
      }
    }
    if (outcome == RoundOutcome::dropped) {
      part = Part::whole;
      fragment = Averager::kAll;
    } else if (progress.rounds > rounds || progress.inner_rounds > inner_rounds) {
      return;
    }
  }
}

// In the last exchange a rank may have left already. The others then wait for it as for a late one.
void LocalSGD::Impl::finish_moments() {
  for (;;) {
    try {
      moments->average(1);
      if (survives()) { // no rank leaves that a peer may still need
        core->run.communicator()->barrier("end of a LocalSGD scope");
      }
      return;
    } catch (const CommunicationError&) {
      if (!recover()) {
        throw;
      }
    }
  }
}

bool LocalSGD::Impl::survives() const {
  return options.on_peer_failure == PeerFailure::survivors && local && active;
}

bool LocalSGD::Impl::recover() {
  outcome = RoundOutcome::none;
  ended = false;
  if (!survives() || !core->run.shrink()) {
    return false;
  }
  for (;;) {
    try {
      open_groups();
      settle_round();
      settle_clocks();
      open_parts();
      return true;
    } catch (const CommunicationError&) { // one more
      if (!core->run.shrink()) {
        throw;
      }
    }
  }
}

void LocalSGD::Impl::settle_round() {
  outcome = averager->recover(transfers);
  if (outcome == RoundOutcome::committed) {
    if (closing != kNothing) {
      close_round(closing);
    }
    committed();
  }
  closing = kNothing;
  for (size_t f = 0; f < progress.own_weight.size(); ++f) {
    progress.own_weight[f] += std::exchange(progress.taken_weight[f], 0);
  }
  progress.group_weight += std::exchange(taken_group_weight, 0);
}

void LocalSGD::Impl::settle_clocks() {
  const auto all = core->run.communicator()->all_gather_object(
      {{"inner_rounds", progress.inner_rounds}, {"ends", ends}, {"end_clocks", end_clocks}},
      "how far the ranks are in a scope");
  int64_t most_ends = 0;
  int64_t inner_rounds = 0;
  for (const auto& rank : all) {
    most_ends = std::max(most_ends, rank.at("ends").get<int64_t>());
    inner_rounds = std::max(inner_rounds, rank.at("inner_rounds").get<int64_t>());
  }
  progress.inner_rounds = inner_rounds;
  if (ends < most_ends) {
    for (const auto& rank : all) {
      if (rank.at("ends") == most_ends) {
        const auto theirs = rank.at("end_clocks").get<std::vector<int64_t>>();
        take_clocks(theirs.data());
        break;
      }
    }
    ended = true;
  }
}

} // namespace hasten
