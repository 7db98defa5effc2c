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
  return others != Std::none ||
         std::ranges::any_of(ranks, [](const auto& entry) { return entry.second != Std::none; });
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
constexpr size_t kLongestLine = size_t{64} * 1024;
// How much of a file a report shows.
constexpr size_t kTailBytes = 4096;
constexpr int kTailLines = 10;
constexpr const char* kLaunchFolder = "hasten-launch-";

std::string log_line_prefix(const std::string& text, int rank, int local_rank) {
  static const std::regex known(
      R"(\$(\$|\{(rank|local_rank|role_name)\}|(rank|local_rank|role_name)\b))");
  std::string prefix;
  std::smatch found;
  auto at = text.cbegin();
  for (; std::regex_search(at, text.cend(), found, known); at = found[0].second) {
    const std::string name = found[2].str() + found[3].str();
    prefix += found.prefix();
    prefix += name.empty()          ? "$"
              : name == "role_name" ? "default"
                                    : std::to_string(name == "rank" ? rank : local_rank);
  }
  return prefix.append(at, text.cend());
}

/// A stream that this process copies.
struct TeedStream {
  FileDescriptor pipe{}; // the reading end; none: closed
  FileDescriptor file{};
  int console = -1; // this process's 1 or 2; -1: it cannot be written to any more
  std::string path{}; // of the file
  std::string prefix{};
  std::string line{}; // an incomplete line
};

struct RankOutput::Shared {
  std::vector<TeedStream> streams{};
  FileDescriptor wake{}; // eventfd: set once all ranks have ended
  std::promise<void> copied{}; // everything is written
  std::future<void> done = copied.get_future();
};

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
  if (stream.console >= 0 && write_all(stream.console, text) != 0) {
    stream.console = -1;
  }
}

/// Copies what can be read, and closes the pipe at the end of the stream.
void copy_some(TeedStream& stream) {
  char block[16 * 1024];
  const ssize_t got = ::read(stream.pipe.get(), block, sizeof block);
  if (got < 0 && (errno == EAGAIN || errno == EINTR)) {
    return;
  }
  if (got > 0) {
    const std::string_view bytes(block, static_cast<size_t>(got));
    const int error = stream.file ? write_all(stream.file.get(), bytes) : 0;
    if (error != 0) {
      log_warning(stream.path + " ends here: " + std::generic_category().message(error));
      stream.file.close();
    }
    stream.line += bytes;
    write_lines(stream, false);
    // If there is nowhere left to write, the rank learns it from the closed pipe.
    if (stream.console >= 0 || stream.file) {
      return;
    }
  }
  write_lines(stream, true);
  stream.pipe.close();
}

/// Copies until every pipe has ended, or all ranks have ended and nothing is left to read. A
/// process that left its rank's process group may hold a pipe open for ever.
void copy_streams(std::vector<TeedStream>& streams, int wake) {
  bool draining = false;
  while (true) {
    std::vector<pollfd> ready;
    std::vector<TeedStream*> of;
    for (TeedStream& stream : streams) {
      if (stream.pipe) {
        ready.push_back({stream.pipe.get(), POLLIN, 0});
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
FileDescriptor open_log(const std::filesystem::path& path) {
  FileDescriptor fd(::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (!fd) {
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

/// Opens and locks a launcher's folder of this user; none if it cannot.
FileDescriptor open_locked(const std::filesystem::path& folder, int wait) {
  FileDescriptor fd(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
  struct stat status {};
  const bool locked = fd && ::flock(fd.get(), LOCK_EX | wait) == 0 &&
                      ::fstat(fd.get(), &status) == 0 && status.st_uid == ::geteuid() &&
                      status.st_nlink > 0;
  return locked ? std::move(fd) : FileDescriptor();
}

/// The folder in which launchers create their folders.
std::filesystem::path launch_folders() {
  std::error_code error;
  const auto base = std::filesystem::temp_directory_path(error);
  return error ? "/tmp" : base;
}

void LaunchFolder::create() {
  std::error_code error;
  for (int i = 0; i < 100; ++i) { // another launcher may have removed it before it was locked
    std::string pattern = (launch_folders() / kLaunchFolder).string() + "XXXXXX";
    if (::mkdtemp(pattern.data()) == nullptr) {
      return;
    }
    // On a file system without locks no launcher removes it.
    lock = open_locked(pattern, 0);
    if (lock || std::filesystem::exists(pattern, error)) {
      path = pattern;
      return;
    }
  }
}

LaunchFolder::~LaunchFolder() {
  std::error_code ignored;
  if (!path.empty()) {
    std::filesystem::remove_all(path, ignored);
  }
}

RankOutput::RankOutput(const LaunchOptions& options, int first_rank)
    : logs_(options.logs), first_rank_(first_rank), shared_(std::make_shared<Shared>()) {
  check_logs(logs_, options.nproc);
  if (!logs_.log_dir.empty() && !logs_.redirects.any() && !logs_.tee.any()) {
    logs_.tee.others = Std::all;
  }
  if (logs_.log_dir.empty()) {
    remove_folders_of_killed_launchers();
    temporary_.create();
  }
  descriptors_.resize(static_cast<size_t>(options.nproc));
  for (int rank = 0; rank < options.nproc; ++rank) {
    open_rank(rank);
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
    auto& descriptor = descriptors_[static_cast<size_t>(rank)][static_cast<size_t>(stream - 1)];
    FileDescriptor file;
    const auto path = log_file(rank, stream);
    if (!logs_.log_dir.empty() && (teed || logs_.redirects.has(rank, bit))) {
      file = open_log(path);
    }
    if (!teed || !on_console) {
      descriptor = file || on_console ? std::move(file) : open_log("/dev/null");
      continue;
    }
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) {
      throw Error("launch::launch", "no pipe for rank " + std::to_string(first_rank_ + rank) +
                                        ": " + std::generic_category().message(errno));
    }
    descriptor = FileDescriptor(ends[1]);
    ::fcntl(ends[0], F_SETFL, O_NONBLOCK);
    shared_->streams.push_back(
        {FileDescriptor(ends[0]),
         std::move(file),
         stream,
         path.string(),
         log_line_prefix(logs_.log_line_prefix_template, first_rank_ + rank, rank),
         {}});
  }
}

int RankOutput::descriptor(int rank, int stream) const {
  return descriptors_[static_cast<size_t>(rank)][static_cast<size_t>(stream - 1)].get();
}

std::filesystem::path RankOutput::folder(int rank) const {
  return (logs_.log_dir.empty() ? temporary_.path : std::filesystem::absolute(logs_.log_dir)) /
         std::to_string(first_rank_ + rank);
}

std::filesystem::path RankOutput::log_file(int rank, int stream) const {
  return folder(rank) / (stream == 1 ? "stdout.log" : "stderr.log");
}

std::filesystem::path RankOutput::error_file(int rank) const {
  if (!logs_.log_dir.empty()) {
    return folder(rank) / "error.json";
  }
  return temporary_.path.empty() ? std::filesystem::path()
                                 : temporary_.path / (std::to_string(rank) + ".json");
}

void RankOutput::start() {
  descriptors_.clear();
  if (shared_->streams.empty()) {
    shared_->copied.set_value();
    return;
  }
  shared_->wake = FileDescriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  std::thread([shared = shared_] {
    // If the console is gone, writing must return an error and not end the launcher.
    sigset_t pipe;
    sigemptyset(&pipe);
    sigaddset(&pipe, SIGPIPE);
    ::pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
    copy_streams(shared->streams, shared->wake.get());
    shared->copied.set_value();
  }).detach();
}

void RankOutput::drain() {
  const uint64_t one = 1;
  if (shared_->wake && ::write(shared_->wake.get(), &one, sizeof one) < 0) {
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
      if (const auto lock = detail::open_locked(entry->path(), LOCK_NB)) {
        std::filesystem::remove_all(entry->path(), error);
      }
    }
  }
}

} // namespace hasten
