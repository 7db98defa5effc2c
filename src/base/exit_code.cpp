#include "hasten/base/exit_code.h"

#include <csignal>
#include <cstring>
#include <string>

#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/base/process.h"
#include "hasten/base/recorded_error.h"
#include "hasten/base/world.h"

namespace hasten {

namespace detail {

int end_by_signal(int signal, int world_size) {
  if (world_size == 1) {
    log_info(std::string("Stopped by ") + (signal == SIGINT ? "Ctrl-C" : strsignal(signal)) +
             ". What was saved before is complete.");
  }
  return 128 + signal;
}

} // namespace detail

int exit_code_of(int local_rank, int world_size, const std::function<int()>& body) {
  try {
    return body();
  } catch (const SilentExit& exit) {
    record_error(PeerInputError("base::exit_code_of", exit.what()));
    return exit.code();
  } catch (const Interrupted& interrupted) {
    return detail::end_by_signal(interrupted.signal(), world_size);
  } catch (const std::exception& error) {
    // If a peer was stopped before this rank, this rank sees a failed peer.
    if (const int signal = interrupt_signal(); signal != 0) {
      return detail::end_by_signal(signal, world_size);
    }
    const bool of_world = dynamic_cast<const CommunicationError*>(&error) != nullptr;
    const bool training = dynamic_cast<const TrainingError*>(&error) != nullptr;
    const bool of_peer = dynamic_cast<const PeerInputError*>(&error) != nullptr;
    const bool peer_says =
        ((of_peer || of_world) && said_by_peer()) || (training && local_rank != 0);
    // Ranks often have an error in common. The launcher prints what the first rank does not.
    const bool launcher_says = (local_rank != 0 || training || of_world) && launcher_says_errors();
    const bool recorded = record_error(error, !peer_says && !launcher_says);
    if (!peer_says && !(launcher_says && recorded)) {
      log_error(detail::message_of_rank(error));
    }
    // A full disk is the user's to fix, in whichever part it was noticed.
    const bool bad_input = dynamic_cast<const InputError*>(&error) != nullptr ||
                           kind_of(error) == ErrorKind::full_disk;
    return bad_input ? kExitBadInput : kExitFailed;
  }
}

namespace detail {

int record_main(const std::function<int()>& main) {
  std::signal(SIGXFSZ, SIG_IGN); // a write beyond ulimit -f fails, with an error that says so
  World world;
  const int code = exit_code_of(0, 1, [&] {
    world = world_from_environment();
    return kExitOk;
  });
  if (code != kExitOk) {
    return code;
  }
  set_log_rank(world.rank, world.world_size);
  return exit_code_of(world.local_rank, world.world_size, main);
}

} // namespace detail

} // namespace hasten
