#include "rank_output.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <future>
#include <regex>
#include <system_error>
#include <thread>
#include <tuple>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/log.h"
#include "hasten/base/text.h"

namespace hasten {

bool RankStreams::has(int rank, Std stream) const {
  const auto found = ranks.find(rank);
  const Std streams = found == ranks.end() ? others : found->second;
  return (static_cast<int>(streams) & static_cast<int>(stream)) != 0;
}

bool RankStreams::any() const {
  return others != Std::none || std::any_of(ranks.begin(), ranks.end(), [](const auto& entry) {
           return entry.second != Std::none;
         });
}

bool LogsSpecs::on_console(int rank, Std stream) const {
  return (local_ranks_filter.empty() || local_ranks_filter.contains(rank)) &&
         (!redirects.has(rank, stream) || tee.has(rank, stream));
}

RankStreams parse_rank_streams(const std::string& text) {
  const auto number = [&](std::string_view part, int most) {
    const int value = parse_number<int>(part).value_or(-1);
    if (value < 0 || value > most) {
      throw InputError(
          "launch::parse_rank_streams", "streams=" + text,
          "0, 1 (stdout), 2 (stderr) or 3 (both), or RANK:STREAMS for some ranks, like 0:3,1:2");
    }
    return value;
  };
  RankStreams streams;
  if (text.find(':') == std::string::npos) {
    streams.others = static_cast<Std>(number(text, 3));
    return streams;
  }
  for (const std::string_view part : split(text)) {
    const size_t colon = std::min(part.find(':'), part.size() - 1);
    const int rank = number(part.substr(0, colon), 1 << 20);
    streams.ranks[rank] = static_cast<Std>(number(part.substr(colon + 1), 3));
  }
  return streams;
}

namespace detail {

// Longer lines are split, so that memory is bounded.
constexpr size_t kLongestLine = 64 * 1024;
// How much of a file a report shows.
constexpr size_t kTailBytes = 4096;
constexpr int kTailLines = 10;
constexpr const char* kLaunchFolder = "hasten-launch-";

std::string log_line_prefix(const std::string& text, int rank) {
  static const std::regex known(
      R"(\$(\$|\{(rank|local_rank|role_name)\}|(rank|local_rank|role_name)\b))");
  std::string prefix;
  std::smatch found;
  auto at = text.cbegin();
  for (; std::regex_search(at, text.cend(), found, known); at = found[0].second) {
    const std::string name = found[2].str() + found[3].str();
    prefix += found.prefix();
    prefix += name.empty() ? "$" : name == "role_name" ? "default" : std::to_string(rank);
  }
  return prefix.append(at, text.cend());
}

/// A stream that this process copies.
struct TeedStream {
  int pipe = -1; // the reading end; -1: closed
  int file = -1; // -1: none
  int console = -1; // this process's 1 or 2; -1: it cannot be written to any more
  std::string path{}; // of the file
  std::string prefix{};
  std::string line{}; // an incomplete line
};

struct RankOutput::Shared {
  std::vector<TeedStream> streams{};
  int wake = -1; // eventfd: set once all ranks have ended
  std::promise<void> copied{}; // everything is written
  std::future<void> done = copied.get_future();

  ~Shared() {
    for (const TeedStream& stream : streams) {
      for (const int fd : {stream.pipe, stream.file}) {
        if (fd >= 0) {
          ::close(fd);
        }
      }
    }
    if (wake >= 0) {
      ::close(wake);
    }
  }
};

/// 0, or errno.
int write_everything(int fd, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t written = ::write(fd, bytes.data(), bytes.size());
    if (written < 0 && errno == EAGAIN) { // another process made the terminal non-blocking
      pollfd ready{fd, POLLOUT, 0};
      ::poll(&ready, 1, -1);
    } else if (written < 0 && errno != EINTR) {
      return errno;
    } else if (written > 0) {
      bytes.remove_prefix(static_cast<size_t>(written));
    }
  }
  return 0;
}

/// Writes complete lines of `stream`, each after the prefix, in one write. With `all` also the
/// incomplete last line.
void write_lines(TeedStream& stream, bool all) {
  std::string text;
  size_t at = 0;
  for (size_t end = 0; (end = stream.line.find('\n', at)) != std::string::npos; at = end + 1) {
    text += stream.prefix;
    text.append(stream.line, at, end + 1 - at);
  }
  stream.line.erase(0, at);
  if (!stream.line.empty() && (all || stream.line.size() > kLongestLine)) {
    text += stream.prefix + stream.line + '\n';
    stream.line.clear();
  }
  if (stream.console >= 0 && write_everything(stream.console, text) != 0) {
    stream.console = -1;
  }
}

/// Copies what can be read. False at the end of the stream.
bool copy_some(TeedStream& stream) {
  char block[16 * 1024];
  const ssize_t got = ::read(stream.pipe, block, sizeof block);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
    return true;
  }
  if (got > 0) {
    const std::string_view bytes(block, static_cast<size_t>(got));
    const int error = stream.file >= 0 ? write_everything(stream.file, bytes) : 0;
    if (error != 0) {
      log_warning(stream.path + " ends here: " + std::generic_category().message(error));
      ::close(std::exchange(stream.file, -1));
    }
    stream.line += bytes;
    write_lines(stream, false);
    // If there is nowhere left to write, closing the pipe tells the rank so.
    if (stream.console >= 0 || stream.file >= 0) {
      return true;
    }
  }
  write_lines(stream, true);
  ::close(std::exchange(stream.pipe, -1));
  return false;
}

/// Copies until every pipe has ended, or all ranks have ended and nothing is left to read. A
/// process that left its rank's process group may hold a pipe open for ever.
void copy_streams(std::vector<TeedStream>& streams, int wake) {
  bool draining = false;
  while (true) {
    std::vector<pollfd> ready;
    std::vector<TeedStream*> of;
    for (TeedStream& stream : streams) {
      if (stream.pipe >= 0) {
        ready.push_back({stream.pipe, POLLIN, 0});
        of.push_back(&stream);
      }
    }
    if (ready.empty()) {
      return;
    }
    if (!draining) {
      ready.push_back({wake, POLLIN, 0});
    }
    const int count = ::poll(ready.data(), ready.size(), draining ? 0 : -1);
    if (count == 0 && draining) {
      for (TeedStream* stream : of) {
        write_lines(*stream, true);
      }
      return;
    }
    for (size_t i = 0; i < of.size(); ++i) {
      if (ready[i].revents != 0) {
        copy_some(*of[i]);
      }
    }
    draining = draining || (ready.back().fd == wake && ready.back().revents != 0);
  }
}

/// Opens the file, or /dev/null, for appending. Throws InputError.
int open_log(const std::filesystem::path& path) {
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd < 0) {
    throw InputError("launch::launch",
                     "log_dir: " + path.string() + ": " + std::generic_category().message(errno),
                     "a folder that may be written");
  }
  return fd;
}

void check_logs(const LogsSpecs& logs, int nproc) {
  if (logs.redirects.any() && logs.log_dir.empty()) {
    throw InputError("launch::launch", "redirects without log_dir",
                     "a folder for the files (--log-dir)");
  }
  const auto check_rank = [&](const char* what, int highest) {
    if (highest >= nproc) {
      throw InputError("launch::launch",
                       what + std::to_string(highest) + " with nproc=" + std::to_string(nproc),
                       "ranks below nproc");
    }
  };
  for (const RankStreams* streams : {&logs.redirects, &logs.tee}) {
    check_rank("streams of rank ", streams->ranks.empty() ? -1 : streams->ranks.rbegin()->first);
  }
  const auto& filter = logs.local_ranks_filter;
  check_rank("local_ranks_filter has rank ", filter.empty() ? -1 : *filter.rbegin());
}

/// Opens and locks a launcher's folder of this user. -1 if it cannot.
int open_locked(const std::filesystem::path& folder, int wait) {
  const int fd = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
  struct stat status {};
  if (fd >= 0 && ::flock(fd, LOCK_EX | wait) == 0 && ::fstat(fd, &status) == 0 &&
      status.st_uid == ::geteuid() && status.st_nlink > 0) {
    return fd;
  }
  ::close(fd);
  return -1;
}

/// The folder in which launchers create their folders.
std::filesystem::path launch_folders() {
  std::error_code error;
  const auto base = std::filesystem::temp_directory_path(error);
  return error ? "/tmp" : base;
}

/// Creates a folder whose name begins with kLaunchFolder. The descriptor locks it while this
/// process lives. Returns an empty path and -1 if it cannot; then only the order in which ranks end
/// shows the first failure.
std::pair<std::filesystem::path, int> make_temporary_folder() {
  std::error_code error;
  for (int i = 0; i < 100; ++i) { // another launcher may have removed it before it was locked
    std::string pattern = (launch_folders() / kLaunchFolder).string() + "XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) {
      break;
    }
    // On a file system without locks no launcher removes it.
    const int fd = open_locked(pattern, 0);
    if (fd >= 0 || std::filesystem::exists(pattern, error)) {
      return {pattern, fd};
    }
  }
  return {{}, -1};
}

RankOutput::RankOutput(const LaunchOptions& options)
    : logs_(options.logs), shared_(std::make_shared<Shared>()) {
  check_logs(logs_, options.nproc);
  if (!logs_.log_dir.empty() && !logs_.redirects.any() && !logs_.tee.any()) {
    logs_.tee.others = Std::all;
  }
  if (logs_.log_dir.empty()) {
    remove_folders_of_killed_launchers();
    std::tie(temporary_, temporary_lock_) = make_temporary_folder();
  }
  descriptors_.assign(static_cast<size_t>(options.nproc), {-1, -1});
  try {
    for (int rank = 0; rank < options.nproc; ++rank) {
      open_rank(rank);
    }
  } catch (...) {
    close_all();
    throw;
  }
}

void RankOutput::open_rank(int rank) {
  if (!logs_.log_dir.empty()) {
    std::error_code error;
    std::filesystem::create_directories(folder(rank), error);
    if (error) {
      throw InputError("launch::launch",
                       "log_dir: " + folder(rank).string() + ": " + error.message(),
                       "a folder that may be written");
    }
    std::filesystem::remove(error_file(rank), error); // from an earlier run
  }
  for (const int stream : {1, 2}) {
    const Std bit = stream == 1 ? Std::out : Std::err;
    const bool teed = logs_.tee.has(rank, bit);
    const bool on_console = logs_.on_console(rank, bit);
    int& descriptor = descriptors_[static_cast<size_t>(rank)][static_cast<size_t>(stream - 1)];
    int file = -1;
    const auto path = log_file(rank, stream);
    if (!logs_.log_dir.empty() && (teed || logs_.redirects.has(rank, bit))) {
      file = open_log(path);
    }
    if (!teed || !on_console) {
      descriptor = file >= 0 || on_console ? file : open_log("/dev/null");
      continue;
    }
    shared_->streams.push_back({-1,
                                file,
                                stream,
                                path.string(),
                                log_line_prefix(logs_.log_line_prefix_template, rank),
                                {}});
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) {
      throw Error("launch::launch", "no pipe for rank " + std::to_string(rank) + ": " +
                                        std::generic_category().message(errno));
    }
    shared_->streams.back().pipe = ends[0];
    ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
    descriptor = ends[1];
  }
}

RankOutput::~RankOutput() { close_all(); }

void RankOutput::close_descriptors() noexcept {
  for (auto& both : descriptors_) {
    for (int& descriptor : both) {
      if (descriptor >= 0) {
        ::close(std::exchange(descriptor, -1));
      }
    }
  }
}

void RankOutput::close_all() noexcept {
  close_descriptors();
  std::error_code ignored;
  if (!temporary_.empty()) {
    std::filesystem::remove_all(temporary_, ignored);
    ::close(std::exchange(temporary_lock_, -1));
  }
}

int RankOutput::descriptor(int rank, int stream) const {
  return descriptors_[static_cast<size_t>(rank)][static_cast<size_t>(stream - 1)];
}

std::filesystem::path RankOutput::folder(int rank) const {
  return (logs_.log_dir.empty() ? temporary_ : std::filesystem::absolute(logs_.log_dir)) /
         std::to_string(rank);
}

std::filesystem::path RankOutput::log_file(int rank, int stream) const {
  return folder(rank) / (stream == 1 ? "stdout.log" : "stderr.log");
}

std::filesystem::path RankOutput::error_file(int rank) const {
  if (!logs_.log_dir.empty()) {
    return folder(rank) / "error.json";
  }
  return temporary_.empty() ? std::filesystem::path()
                            : temporary_ / (std::to_string(rank) + ".json");
}

void RankOutput::start() {
  close_descriptors();
  if (shared_->streams.empty()) {
    shared_->copied.set_value();
    return;
  }
  shared_->wake = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  std::thread([shared = shared_] {
    // If the console is gone, writing must return an error and not end the launcher.
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
    copy_streams(shared->streams, shared->wake);
    shared->copied.set_value();
  }).detach();
}

void RankOutput::drain() {
  const uint64_t one = 1;
  if (shared_->wake >= 0 && ::write(shared_->wake, &one, sizeof one) < 0) {
    log_warning("output of the ranks may be incomplete");
  }
}

bool RankOutput::drained(std::chrono::milliseconds limit) {
  return shared_->done.wait_for(limit) == std::future_status::ready;
}

std::string RankOutput::stderr_tail(int rank) const {
  if (logs_.log_dir.empty() || logs_.on_console(rank, Std::err) ||
      !(logs_.tee.has(rank, Std::err) || logs_.redirects.has(rank, Std::err))) {
    return {};
  }
  const auto path = log_file(rank, 2);
  std::string text;
  try {
    text = read_file(path);
  } catch (const Error&) {
    return {};
  }
  text.erase(0, text.size() - std::min(text.size(), kTailBytes));
  text.erase(text.find_last_not_of('\n') + 1);
  auto lines = split(text, "\n");
  lines.erase(lines.begin(), lines.end() - std::min<ptrdiff_t>(std::ssize(lines), kTailLines));
  text = joined(lines, "\n");
  return text.empty() ? "nothing in " + path.string()
                      : "the end of " + path.string() + ":\n" + text;
}

} // namespace detail

void remove_folders_of_killed_launchers() {
  std::error_code error;
  std::filesystem::directory_iterator entry(detail::launch_folders(), error);
  for (; entry != std::filesystem::directory_iterator(); entry.increment(error)) {
    if (entry->path().filename().string().starts_with(detail::kLaunchFolder)) {
      if (const int fd = detail::open_locked(entry->path(), LOCK_NB); fd >= 0) {
        std::filesystem::remove_all(entry->path(), error);
        ::close(fd);
      }
    }
  }
}

} // namespace hasten
