// Positions of prepared loaders, what they need of their accelerator, and their errors.
#include "hasten/loader/loader_state.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/comm/communicator.h"
#include "hasten/core/random.h"

namespace hasten::detail {

std::string range_name(const std::type_info& type, uint64_t index) {
  const std::string text = c10::demangle(type.name());
  return (index > 0 ? "loader " + std::to_string(index) : "a loader") + " (" +
         text.substr(0, std::min<size_t>(text.find('<'), 80)) + ")";
}

at::Tensor order_state(uint64_t seed, uint64_t index, uint64_t epoch) {
  return seeded_generator(stream_seed("loader", seed, index, epoch)).get_state();
}

RangeRandom::RangeRandom(at::Tensor& state)
    : state_(state),
      scope_(state.defined() ? GeneratorStates{GeneratorState(at::kCPU, state)}
                             : GeneratorStates()) {}

RangeRandom::~RangeRandom() {
  if (state_.defined()) {
    state_ = GeneratorState().tensor();
  }
}

void save_position(const LoaderPosition& position, const Stateful* range, NamedTensors& tensors,
                   nlohmann::json& values) {
  const uint64_t epoch = position.active ? position.epoch - 1 : position.epoch;
  const int64_t cursor = position.active ? position.cursor : position.start;
  values["unit"] = position.unit;
  values["epoch"] = epoch;
  values["cursor"] = cursor;
  const at::Tensor& random = position.active ? position.random : position.start_random;
  if (random.defined() && cursor > 0) {
    tensors["random"] = random;
  }
  if (range != nullptr) {
    NamedTensors none;
    nlohmann::json inner;
    range->save_state(none, inner);
    inner["epoch"] = epoch; // without the batch that is read ahead
    inner["cursor"] = cursor;
    values["range"] = std::move(inner);
  }
}

void load_position(LoaderPosition& position, Stateful* range, const NamedTensors& tensors,
                   const nlohmann::json& values) {
  const auto unit = values.at("unit").get<std::string>();
  const auto cursor = values.at("cursor").get<int64_t>();
  if (unit != position.unit && cursor > 0) {
    throw InputError(
        "accelerator::load_state", "the position in the data counts " + unit,
        std::string("a loader of the same kind, whose position counts ") + position.unit);
  }
  if (range != nullptr && values.contains("range")) {
    range->load_state({}, values.at("range")); // throws before anything changed
  }
  const auto random = tensors.find("random");
  position.active = false;
  position.epoch = values.at("epoch").get<uint64_t>();
  position.start = cursor;
  position.cursor = 0;
  position.start_random = random == tensors.end() ? at::Tensor() : random->second.clone();
}

int LoaderLink::rank() const { return communicator().rank(); }
int LoaderLink::world_size() const { return communicator().world_size(); }

void LoaderLink::refuse_no_row(const std::string& range) const {
  const InputError error("accelerator::PreparedLoader",
                         "this rank has no sample to train on: rank=" + std::to_string(rank()) +
                             " of " + range + ", world_size=" + std::to_string(world_size()),
                         "a sample for every rank from the range's shard()",
                         "start fewer ranks, use more data, or set even_batches or "
                         "dispatch_batches");
  communicator().abort(error); // they wait for this rank
  throw error;
}

void throw_no_empty_batch() {
  throw InputError("accelerator::PreparedLoader",
                   "the batches cannot be split evenly over ranks, and their type has no tensor "
                   "from which to make a batch without samples",
                   "a batch type with tensors, or with flatten(visit, batch)");
}

void throw_cannot_distribute(const char* option) {
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
