// Loaded before a program (LD_PRELOAD), it makes the host's time of day five minutes late, as the
// clocks of two hosts can differ.
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
  const auto result = static_cast<int>(::syscall(SYS_clock_gettime, clock, time));
  if (result == 0 && clock == CLOCK_REALTIME) {
    time->tv_sec -= 300;
  }
  return result;
}
