#include "hasten/comm/agree.h"

#include <algorithm>

#include "hasten/base/error.h"
#include "hasten/base/process.h"
#include "hasten/base/recorded_error.h"
#include "hasten/comm/few_sizes.h"
#include "hasten/core/memory.h"

namespace hasten::detail {

nlohmann::json failure_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return {{"what", known.what()},
            {"input", dynamic_cast<const InputError*>(&known) != nullptr},
            {"kind", error_kind(known)}};
  } catch (...) {
    return {{"what", "an unknown exception"}, {"input", false}, {"kind", ErrorKind::other}};
  }
}

void say_once_per_host(const Communicator& communicator, int failed) {
  const std::vector<int> here = ranks_of_host(communicator);
  set_said_by_peer(here.front() != communicator.rank() ||
                   std::ranges::find(here, failed) != here.end());
}

void throw_failure(const std::string& where, const std::string& who,
                   const nlohmann::json& failure) {
  const std::string what = who + ": " + failure.at("what").get<std::string>();
  if (failure.at("input").get<bool>()) {
    throw PeerInputError(where, what);
  }
  throw Error(where, what, {}, {}, failure.at("kind").get<ErrorKind>());
}

std::vector<nlohmann::json> on_every_rank(Communicator& communicator, const std::string& where,
                                          const std::function<nlohmann::json()>& work) {
  std::exception_ptr own;
  nlohmann::json mine;
  try {
    mine["value"] = work();
  } catch (...) {
    own = std::current_exception();
    mine = {{"failure", failure_of(own)}, {"host", host_name()}};
  }
  std::vector<nlohmann::json> all;
  try {
    all = communicator.world_size() == 1 ? std::vector<nlohmann::json>(1, mine)
                                         : communicator.all_gather_object(mine, where);
  } catch (...) { // the group is dead: prefer this rank's own error
    std::rethrow_exception(own ? own : std::current_exception());
  }
  if (own) {
    std::rethrow_exception(own);
  }
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].contains("failure")) {
      say_once_per_host(communicator, static_cast<int>(rank));
      const auto host = all[rank]["host"].get<std::string>();
      throw_failure(
          where,
          "rank " + std::to_string(rank) + (host == host_name() ? "" : " on " + host) + " failed",
          all[rank]["failure"]);
    }
    all[rank] = nlohmann::json(std::move(all[rank]["value"]));
  }
  return all;
}

at::Tensor broadcast_bytes(Communicator& communicator, at::Tensor bytes, int from,
                           const char* name) {
  const bool mine = communicator.rank() == from;
  const at::Tensor size = at::tensor({mine ? bytes.numel() : 0}, at::kLong);
  communicator.broadcast(size, from, name);
  const int64_t count = size.item<int64_t>();
  if (!mine || bytes.numel() != few_sizes(count)) {
    const at::Tensor padded = at::empty({few_sizes(count)}, at::kByte);
    if (mine) {
      padded.narrow(0, 0, count).copy_(bytes);
    }
    bytes = padded;
  }
  communicator.broadcast(bytes, from, name);
  return bytes.narrow(0, 0, count);
}

} // namespace hasten::detail
