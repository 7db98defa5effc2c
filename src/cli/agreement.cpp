#include "agreement.h"

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
  } catch (const InputError&) {
    failure = std::current_exception();
    code = kExitBadInput;
  } catch (const Interrupted& interrupted) {
    failure = std::current_exception();
    code = 128 + interrupted.signal();
  } catch (const std::exception&) {
    failure = std::current_exception();
    code = kExitFailed;
  }
  const auto codes = communicator.all_gather_object(code, name);
  for (int rank = 0; rank < communicator.world_size(); ++rank) {
    const int theirs = codes[rank].get<int>();
    if (theirs == kExitOk) {
      continue;
    }
    communicator.close();
    if (rank == communicator.rank()) {
      std::rethrow_exception(failure);
    }
    throw SilentExit(theirs);
  }
}

} // namespace hasten::detail
