// Runs work that may fail on only some ranks, and reports the failure on all of them.
// Threading: like the communicator.
#pragma once

#include <exception>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "hasten/comm/communicator.h"

namespace hasten::detail {

/// An exception in the form that is sent to other ranks: its text, its kind, and whether it is an
/// InputError.
nlohmann::json failure_of(const std::exception_ptr& error);

/// Call it before the PeerInputError that repeats the failure of rank `failed`: the first rank of each
/// host prints it, except on that rank's host.
void say_once_per_host(const Communicator& communicator, int failed);

/// Throws another rank's failure on this rank, as PeerInputError or Error.
[[noreturn]] void throw_failure(const std::string& where, const std::string& who,
                                const nlohmann::json& failure);

/// Runs `work` on every rank and returns the results of all ranks. [rank]
/// If `work` throws on a rank, every rank throws: that rank its own error, the others one that
/// repeats the error of the first such rank. Collective, through the store.
std::vector<nlohmann::json> on_every_rank(Communicator& communicator, const std::string& where,
                                          const std::function<nlohmann::json()>& work);

} // namespace hasten::detail
