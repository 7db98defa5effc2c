#include "hasten/base/process.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/tcp.h>
#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/text.h"

extern char** environ;

namespace hasten {

namespace detail {

ProcessStat process_stat(int pid) {
  std::string text;
  try {
    text = read_file("/proc/" + std::to_string(pid) + "/stat");
  } catch (const InputError&) { // no such process, or it ended between open and read
  }
  // "pid (name) state …": the name may contain any character, so use the last ')'.
  const auto fields = split(text.substr(std::min(text.rfind(')'), text.size())), " ");
  if (fields.size() < 21 || fields[1].empty()) {
    return {};
  }
  constexpr uint64_t kExiting = 4; // PF_EXITING
  return {.state = fields[1][0], // field 3 of the file
          .ending = (parse_number<uint64_t>(fields[7]).value_or(0) & kExiting) != 0,
          .parent = parse_number<int>(fields[2]).value_or(0),
          .start_time = parse_number<uint64_t>(fields[20]).value_or(0)};
}

std::optional<std::string> environment_value(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr || *value == '\0' ? std::nullopt : std::optional<std::string>(value);
}

// Everything that the child needs, made before vfork. Between vfork and exec the child shares this
// process's memory and may only make system calls.
struct ChildSetup {
  const char* path = nullptr;
  char* const* argv = nullptr;
  char* const* environment = nullptr;
  const SpawnOptions* options = nullptr;
  pid_t parent = 0;
  long open_files = 0; // upper bound of descriptors, for old kernels
  volatile int error = 0; // errno of the call that failed in the child
};

/// Marks every descriptor from 3 up close-on-exec.
void close_others_on_exec(long open_files) {
#ifdef SYS_close_range
  constexpr unsigned kCloseRangeCloexec = 4;
  if (::syscall(SYS_close_range, 3u, ~0u, kCloseRangeCloexec) == 0) {
    return;
  }
#endif
  for (int fd = 3; fd < open_files; ++fd) { // kernels before 5.11
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  }
}

/// Makes the requested descriptors the child's 0, 1 and 2. False with errno set.
bool place_standard_descriptors(const SpawnOptions& options) {
  const int wanted[] = {options.stdin_fd, options.stdout_fd, options.stderr_fd};
  // A source below 3 could be overwritten before it is used, so duplicate it first.
  int sources[3];
  for (int i = 0; i < 3; ++i) {
    sources[i] = wanted[i];
    if (wanted[i] >= 0 && wanted[i] < 3) {
      sources[i] = ::fcntl(wanted[i], F_DUPFD_CLOEXEC, 3);
      if (sources[i] < 0) {
        return false;
      }
    }
  }
  for (int i = 0; i < 3; ++i) {
    if (sources[i] >= 0 && ::dup2(sources[i], i) < 0) {
      return false;
    }
  }
  return true;
}

/// Resets handlers, which do not exist in the child. Ignored signals stay ignored (nohup). Unblocks
/// all signals.
void reset_child_signals() {
  for (int signal = 1; signal < NSIG; ++signal) {
    struct sigaction action {};
    if (::sigaction(signal, nullptr, &action) == 0 && action.sa_handler != SIG_DFL &&
        action.sa_handler != SIG_IGN) {
      struct sigaction standard {};
      standard.sa_handler = SIG_DFL;
      ::sigaction(signal, &standard, nullptr);
    }
  }
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
}

[[noreturn]] void run_child(ChildSetup& setup) {
  const SpawnOptions& options = *setup.options;
  if (options.die_with_parent) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    // The parent may have died before the line above took effect.
    if (::getppid() != setup.parent) {
      ::_exit(127);
    }
  }
  bool good = !options.new_process_group || ::setpgid(0, 0) == 0;
  good = good && place_standard_descriptors(options);
  if (good) {
    close_others_on_exec(setup.open_files);
    for (const int fd : options.keep_fds) {
      good = good && (fd < 3 || ::fcntl(fd, F_SETFD, 0) == 0);
    }
  }
  if (good) {
    reset_child_signals();
    ::execve(setup.path, setup.argv, setup.environment);
  }
  setup.error = errno;
  ::_exit(127);
}

// A separate function, so that nothing that is used after vfork is in registers.
__attribute__((noinline)) pid_t vfork_and_run(ChildSetup& setup) {
  const pid_t pid = ::vfork(); // NOLINT: the child only prepares and calls exec
  if (pid == 0) {
    run_child(setup);
  }
  if (pid < 0) {
    setup.error = errno;
  }
  return pid;
}

/// argv[0] if it has a slash, otherwise the first executable of that name in PATH.
std::string find_program(const std::string& name) {
  if (name.find('/') != std::string::npos) {
    return name;
  }
  const char* path = std::getenv("PATH");
  for (const std::string& folder : split(path ? path : "/usr/local/bin:/usr/bin:/bin", ":")) {
    const std::string candidate = (folder.empty() ? "." : folder) + "/" + name;
    std::error_code ignored;
    if (::access(candidate.c_str(), X_OK) == 0 &&
        !std::filesystem::is_directory(candidate, ignored)) {
      return candidate;
    }
  }
  return {};
}

/// This process's environment with `changes`. If a name occurs several times, the last one counts.
std::vector<std::string> merged_environment(
    const std::vector<std::pair<std::string, std::string>>& changes) {
  std::vector<std::string> merged;
  for (char** entry = environ; entry && *entry; ++entry) {
    merged.emplace_back(*entry);
  }
  for (const auto& [name, value] : changes) {
    std::erase_if(merged, [&name = name](const std::string& entry) {
      return entry.substr(0, entry.find('=')) == name;
    });
    merged.push_back(name + "=" + value);
  }
  return merged;
}

std::vector<char*> pointers_to(const std::vector<std::string>& strings) {
  auto pointers =
      mapped(strings, [](const std::string& text) { return const_cast<char*>(text.c_str()); });
  pointers.push_back(nullptr);
  return pointers;
}

// The latest of SIGINT and SIGTERM, 0 if none. Lock-free, because a handler writes it.
volatile std::sig_atomic_t remembered_signal = 0;

extern "C" void hasten_remember_signal(int signal) {
  if (remembered_signal == signal) {
    ::_exit(128 + signal);
  }
  remembered_signal = signal;
}

} // namespace detail

pid_t spawn_process(const std::vector<std::string>& argv, const SpawnOptions& options) {
  constexpr const char* kWhere = "base::spawn_process";
  if (argv.empty() || argv[0].empty()) {
    throw InputError(kWhere, "no program to start", "argv[0]");
  }
  const std::string path = detail::find_program(argv[0]);
  if (path.empty()) {
    throw InputError(kWhere, "program=" + argv[0] + " is not in PATH", "an executable",
                     "give its path");
  }
  const auto arguments = detail::pointers_to(argv);
  const auto environment = detail::merged_environment(options.environment);
  const auto variables = detail::pointers_to(environment);
  detail::ChildSetup setup;
  setup.path = path.c_str();
  setup.argv = arguments.data();
  setup.environment = variables.data();
  setup.options = &options;
  setup.parent = ::getpid();
  setup.open_files = std::min(::sysconf(_SC_OPEN_MAX), 65536L);

  // No handler of this process may run in the child while it shares our memory.
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  ::pthread_sigmask(SIG_SETMASK, &all, &before);
  const pid_t pid = detail::vfork_and_run(setup);
  ::pthread_sigmask(SIG_SETMASK, &before, nullptr);

  if (const int error = setup.error) {
    if (pid > 0) {
      while (::waitpid(pid, nullptr, 0) < 0 && errno == EINTR) {
      }
    }
    const std::string what = "program=" + path + ": " + std::generic_category().message(error);
    if (error == ENOENT || error == EACCES || error == ENOEXEC || error == ENOTDIR) {
      throw InputError(kWhere, what, "an executable");
    }
    throw Error(kWhere, what);
  }
  return pid;
}

ProcessEnd process_end(int wait_status) {
  if (WIFSIGNALED(wait_status)) {
    const int signal = WTERMSIG(wait_status);
    return {.code = 128 + signal, .signal = signal};
  }
  return {.code = WEXITSTATUS(wait_status), .signal = 0};
}

std::string describe(const ProcessEnd& end) {
  if (end.signal == 0) {
    return "exited with code " + std::to_string(end.code);
  }
  const char* text = ::sigdescr_np(end.signal);
  const char* limit = end.signal == SIGXFSZ ? "; raise ulimit -f" : "";
  return "was killed by signal " + std::to_string(end.signal) + " (" + (text ? text : "unknown") +
         limit + ")";
}

std::pair<int, int> listen_on_loopback() {
  detail::FileDescriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  auto* generic = reinterpret_cast<sockaddr*>(&address);
  if (fd.get() < 0 || ::bind(fd.get(), generic, size) != 0 || ::listen(fd.get(), SOMAXCONN) != 0 ||
      ::getsockname(fd.get(), generic, &size) != 0) {
    throw Error("base::listen_on_loopback", "127.0.0.1: " + std::generic_category().message(errno));
  }
  return {fd.release(), ntohs(address.sin_port)};
}

std::string host_name() {
  if (const auto name = detail::environment_value("HASTEN_TEST_HOST")) {
    return *name;
  }
  char name[256] = {};
  return ::gethostname(name, sizeof name - 1) == 0 ? name : "localhost";
}

std::string shell_quoted(const std::string& word) {
  constexpr const char* kPlain =
      "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./+:@%,=";
  return !word.empty() && word.find_first_not_of(kPlain) == std::string::npos
             ? word
             : "'" + joined(split(word, "'"), "'\\''") + "'";
}

std::string command_line() {
  std::ifstream file("/proc/self/cmdline");
  std::string word;
  std::getline(file, word, '\0');
  std::string line = std::filesystem::path(word).filename().string();
  if (line == "hasten-worker") {
    line = "hasten"; // which started it with its own arguments
  }
  while (std::getline(file, word, '\0')) {
    line += " " + shell_quoted(word);
  }
  return line;
}

std::string proc_value(const char* path, const std::string& key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with(key)) {
      const size_t at = line.find_first_not_of(" \t", line.find(':') + 1);
      return at == std::string::npos ? std::string() : line.substr(at);
    }
  }
  return {};
}

int64_t tcp_bytes_sent() {
  uint64_t bytes = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd", error)) {
    tcp_info info{}; // stays 0 for other descriptors, and on kernels that do not count
    socklen_t size = sizeof info;
    ::getsockopt(std::atoi(entry.path().filename().c_str()), IPPROTO_TCP, TCP_INFO, &info, &size);
    bytes += info.tcpi_bytes_sent;
  }
  return static_cast<int64_t>(bytes);
}

void install_interrupt_handlers() {
  struct sigaction action {};
  action.sa_handler = detail::hasten_remember_signal;
  // Restart system calls, because some libraries do not handle EINTR.
  action.sa_flags = SA_RESTART;
  sigemptyset(&action.sa_mask);
  for (const int signal : {SIGINT, SIGTERM}) {
    ::sigaction(signal, &action, nullptr);
  }
}

int interrupt_signal() { return detail::remembered_signal; }

static std::atomic<int> termination_deferrals{0};

TerminationDeferral::TerminationDeferral() { ++termination_deferrals; }
TerminationDeferral::~TerminationDeferral() { --termination_deferrals; }

void throw_if_interrupted() {
  const int signal = interrupt_signal();
  if (signal != 0 && (signal != SIGTERM || termination_deferrals == 0)) {
    throw Interrupted(signal);
  }
}

uint64_t process_start_time(int pid) { return detail::process_stat(pid).start_time; }

ProcessState process_state(int pid, uint64_t start_time) {
  const detail::ProcessStat stat = detail::process_stat(pid);
  if (stat.state == '\0' || stat.state == 'Z' || stat.state == 'X' ||
      (start_time != 0 && stat.start_time != start_time)) {
    return ProcessState::ended;
  }
  return stat.state == 'T' ? ProcessState::stopped : ProcessState::running;
}

bool is_ending(int pid) {
  const std::string file = "/proc/" + std::to_string(pid) + "/status";
  const std::string pending = proc_value(file.c_str(), "SigPnd:");
  return process_state(pid, 0) == ProcessState::ended || detail::process_stat(pid).ending ||
         (std::strtoull(pending.c_str(), nullptr, 16) >> (SIGKILL - 1) & 1) != 0;
}

} // namespace hasten
