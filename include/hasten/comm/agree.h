// Work that may fail on some ranks alone, so that all of them learn it.
// Threading: as the communicator.
#pragma once

#include <exception>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "hasten/comm/communicator.h"

namespace hasten::detail {

/// An exception as it is sent to other ranks: its text, and whether it is an InputError.
nlohmann::json failure_of(const std::exception_ptr& error);

/// Throws what a failure of another rank is here: PeerInputError or Error.
[[noreturn]] void throw_failure(const std::string& where, const std::string& who,
                                const nlohmann::json& failure);

/// Runs `work` on every rank and returns what all of them returned, by rank. Where it
/// threw anywhere, every rank throws: those where it did their own error, the others one
/// that repeats the first. Collective, through the store.
std::vector<nlohmann::json> on_every_rank(Communicator& communicator, const std::string& where,
                                          const std::function<nlohmann::json()>& work);

} // namespace hasten::detail
