#include "agreement.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/process.h"

namespace hasten::detail {

void agree_on(Communicator& communicator, std::string_view name,
              const std::function<void()>& stage) {
  std::exception_ptr failure;
  int code = kExitOk;
  try {
    stage();
  } catch (const std::exception& error) {
    failure = std::current_exception();
    const auto* interrupted = dynamic_cast<const Interrupted*>(&error);
    code = interrupted != nullptr                               ? 128 + interrupted->signal()
           : dynamic_cast<const InputError*>(&error) != nullptr ? kExitBadInput
                                                                : kExitFailed;
  }
  const auto codes = communicator.all_gather_object(code, name);
  const auto first = std::find_if(codes.begin(), codes.end(),
                                  [](const nlohmann::json& each) { return each != kExitOk; });
  if (first == codes.end()) {
    return;
  }
  communicator.close();
  if (first - codes.begin() == communicator.rank()) {
    std::rethrow_exception(failure);
  }
  throw SilentExit(first->get<int>());
}

} // namespace hasten::detail
