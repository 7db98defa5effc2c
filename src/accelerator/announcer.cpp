#include "announcer.h"

#include <ATen/core/Tensor.h>

#include "hasten/base/error.h"

namespace hasten::detail {

Announcer::Announcer(RunContext& run, ModelSet& models, WindowSet& windows)
    : run_(run), models_(models), windows_(windows), control_(run.communicator()) {}

WindowControl& Announcer::control_of(uint64_t models) {
  if (!windows_.has_local(models) || !models_.has_replicas(models)) {
    return control_;
  }
  if (!replica_control_) {
    replica_control_.emplace(models_.shard_group());
  }
  return *replica_control_;
}

// Note [Buffers]
// Buffers are synchronised by a separate collective before a forward. Ranks without more batches
// wait for a control vector, so one announces it. It also finds ranks that are elsewhere, before
// they would wait for each other.
void Announcer::even_out_buffers(uint64_t models, bool forward) {
  uint64_t mask = forward ? models_.synced(models) : 0;
  for (const size_t i : models_.in(models)) {
    if (models_[i].parallel->evens_out_buffers(!forward)) {
      mask |= uint64_t{1} << i;
    }
  }
  uint64_t local = 0; // these concern other ranks than the rest
  for (const size_t i : models_.in(mask)) {
    local |= windows_.is_local(i) ? uint64_t{1} << i : 0;
  }
  for (const uint64_t part : {mask & ~local, local}) {
    if (part != 0) {
      sync_buffers(part, announce_models(part), true);
    }
  }
}

bool Announcer::announce_models(uint64_t models) {
  WindowControl& control = control_of(models);
  control.start({.buffers = true, .models = models, .steps = windows_.shared()->steps});
  return control.wait().finished > 0;
}

// The values of ranks without more batches are out of date.
void Announcer::sync_buffers(uint64_t models, bool joined, bool here) {
  DdpRanks ranks;
  if (joined) {
    refuse_joined(models);
    ranks = ranks_with_batches(*run_.communicator(), here);
  }
  for (const size_t i : models_.in(models)) {
    models_[i].parallel->sync_buffers(ranks);
  }
}

// Note [Forwards that communicate]
// A rank without a batch waits for a control vector, and the others' forwards would wait for that
// rank. Therefore such a vector announces each forward: in accumulate(), or in the first layer of a
// forward outside of it. A rank without more batches is then an error on all ranks. A rank with a
// stand-in batch runs forward and backward with the others; its samples do not count.
void Announcer::announce_forward(uint64_t models) {
  const uint64_t synced = models_.synced(models);
  if (synced != 0 && announce_models(synced)) {
    refuse_joined(synced);
  }
}

void Announcer::announce_forward_outside(size_t model) {
  const uint64_t mask = uint64_t{1} << model;
  if ((std::exchange(announced_, announced_ | mask) & mask) == 0) {
    announce_forward(mask);
  }
}

void Announcer::announce_round(size_t model, uint64_t number, int64_t kind) {
  control_.start({.models = uint64_t{1} << model,
                  .number = number,
                  .round = kind,
                  .steps = windows_.shared()->steps});
  if (control_.wait().out_of_date > 0) {
    share_state(); // of a window before the scope became local
  }
}

bool Announcer::announce_save() {
  control_.start({});
  const WindowTotals totals = control_.wait();
  if (totals.out_of_date > 0) {
    share_state();
  }
  return totals.finished > 0;
}

void Announcer::refuse_joined(uint64_t models) const {
  if (models_.synced(models) == 0) {
    return;
  }
  throw InputError("accelerator::accumulate",
                   "a rank is in join_uneven_inputs() while others train a model that communicates "
                   "in forward: it is sharded, or its batch norm layers are synchronised",
                   "a batch on every rank until the data of all has ended",
                   "prepare() the loader: a rank without samples gets stand-in batches");
}

} // namespace hasten::detail
