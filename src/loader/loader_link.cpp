// What prepared loaders ask their accelerator, and their errors.
#include "hasten/base/error.h"
#include "hasten/comm/communicator.h"
#include "hasten/loader/loader_state.h"

namespace hasten::detail {

int LoaderLink::rank() const { return communicator().rank(); }
int LoaderLink::world_size() const { return communicator().world_size(); }

void LoaderLink::refuse_no_row(const std::string& range) const {
  const InputError error("accelerator::PreparedLoader",
                         "this rank has no sample to train on: rank=" + std::to_string(rank()) +
                             " of " + range + ", world_size=" + std::to_string(world_size()),
                         "a sample for every rank from the range's shard()",
                         "start fewer ranks, use more data, or set even_batches or "
                         "dispatch_batches");
  if (world_size() > 1) {
    communicator().abort(error); // they wait for this rank
  }
  throw error;
}

void throw_no_empty_batch() {
  throw InputError("accelerator::PreparedLoader",
                   "the batches cannot be split evenly over ranks, and their type has no tensor "
                   "from which to make a batch without samples",
                   "a batch type with tensors, or with flatten(visit, batch)");
}

void throw_cannot_deal(const char* option) {
  throw InputError("accelerator::PreparedLoader",
                   std::string(option) + " for a range with its own shard()",
                   "set_even_batches() and set_split_batches() of the range",
                   "add them to the range, or set dispatch_batches");
}

void check_configuration(const DataLoaderConfiguration& config, int64_t skip) {
  if (config.prefetch < 0 || skip < 0) {
    throw InputError("accelerator::PreparedLoader",
                     config.prefetch < 0 ? "prefetch=" + std::to_string(config.prefetch)
                                         : "batches to skip=" + std::to_string(skip),
                     "0 or more");
  }
}

} // namespace hasten::detail
