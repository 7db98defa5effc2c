#include "hasten/text/text_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "hasten/base/error.h"

namespace hasten {

namespace detail {

constexpr size_t kTextPiece = size_t{256} << 10; // bytes

// Formats that users mistake for text tables, by their first bytes.
struct NotText {
  std::string_view start;
  const char* name;
  const char* fix;
};
constexpr NotText kNotTexts[] = {
    {"\xFF\xFE", "UTF-16", "save it as UTF-8, for example with iconv -f UTF-16 -t UTF-8"},
    {"\xFE\xFF", "UTF-16", "save it as UTF-8, for example with iconv -f UTF-16 -t UTF-8"},
    {"PAR1", "a Parquet file", "convert it, for example with pandas.read_parquet(file).to_csv(…)"},
    {"ARROW1", "an Arrow file", "convert it, for example with pandas.read_feather(file).to_csv(…)"},
    {"\xFF\xFF\xFF\xFF", "an Arrow stream, as Hugging Face's datasets keep them",
     "convert it, for example with Dataset.from_file(file).to_csv(…)"},
    {"PK\x03\x04", "a zip archive or an Excel sheet",
     "unpack it, or save the sheet as CSV in UTF-8"},
    {"\x1F\x8B", "compressed by gzip", "unpack it with gunzip"},
    {"\x28\xB5\x2F\xFD", "compressed by zstd", "unpack it with unzstd"},
};

int64_t modified_ns(const struct stat& status) {
  return static_cast<int64_t>(status.st_mtim.tv_sec) * 1'000'000'000 + status.st_mtim.tv_nsec;
}

} // namespace detail

TextFile::TextFile(std::filesystem::path path) : path_(std::move(path)) {}

TextFile::~TextFile() {
  if (file_ >= 0) {
    ::close(file_);
  }
}

std::shared_ptr<const TextFile> TextFile::open(const std::filesystem::path& path,
                                               const char* where) {
  std::shared_ptr<TextFile> file(new TextFile(path));
  file->file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file->file_ < 0) {
    throw InputError(where, "file=" + path.string() + " cannot be opened: " + std::strerror(errno),
                     "a file that exists and may be read");
  }
  struct stat status {};
  std::string problem;
  if (::fstat(file->file_, &status) != 0) {
    problem = std::strerror(errno);
  } else if (S_ISDIR(status.st_mode)) {
    problem = "it is a folder";
  } else if (S_ISREG(status.st_mode) && status.st_size > 0) {
    file->size_ = static_cast<size_t>(status.st_size);
    file->changed_ns_ = detail::modified_ns(status);
  } else {
    problem = file->drain(std::exchange(file->file_, -1));
  }
  if (!problem.empty()) {
    throw InputError(where, "file=" + path.string() + " cannot be read: " + problem, "a text file");
  }
  file->check_start(where);
  return file;
}

std::shared_ptr<const TextFile> TextFile::of_text(std::filesystem::path name, std::string text) {
  std::shared_ptr<TextFile> file(new TextFile(std::move(name)));
  file->size_ = text.size();
  file->read_ = std::move(text);
  file->mark_bytes_ = file->read_.starts_with("\xEF\xBB\xBF") ? 3 : 0;
  return file;
}

// Reads the whole `file` and closes it. Returns the error, or an empty string.
std::string TextFile::drain(int file) {
  char buffer[1 << 16];
  ssize_t count = 0;
  while ((count = ::read(file, buffer, sizeof(buffer))) != 0) {
    if (count > 0) {
      read_.append(buffer, static_cast<size_t>(count));
    } else if (errno != EINTR) {
      break;
    }
  }
  const int error = errno;
  ::close(file);
  size_ = read_.size();
  return count < 0 ? std::strerror(error) : "";
}

void TextFile::check_start(const char* where) {
  char bytes[8]{};
  const size_t count = std::min(sizeof(bytes), size_);
  read(0, bytes, count);
  const std::string_view start(bytes, count);
  mark_bytes_ = start.starts_with("\xEF\xBB\xBF") ? 3 : 0;
  for (const auto& known : detail::kNotTexts) {
    if (start.starts_with(known.start)) {
      throw InputError(where,
                       "file=" + path_.string() + " is " + known.name + ", as its first bytes show",
                       "text in UTF-8: CSV, TSV or JSON lines", known.fix);
    }
  }
}

void TextFile::read(size_t at, char* to, size_t bytes) const {
  if (file_ < 0) {
    read_.copy(to, bytes, at);
    return;
  }
  ssize_t count = 0;
  for (size_t done = 0; done < bytes; done += static_cast<size_t>(count)) {
    count = ::pread(file_, to + done, bytes - done, static_cast<off_t>(at + done));
    if (count < 0 && errno == EINTR) {
      count = 0;
    } else if (count <= 0) {
      break;
    }
  }
  const int error = count < 0 ? errno : 0;
  struct stat status {};
  if (error == 0 && ::fstat(file_, &status) == 0 && static_cast<size_t>(status.st_size) == size_ &&
      detail::modified_ns(status) == changed_ns_) {
    return;
  }
  throw InputError("data::TextFile",
                   "file=" + path_.string() +
                       (error != 0 ? std::string(" cannot be read: ") + std::strerror(error)
                                   : " changed while it was read: it had " + std::to_string(size_) +
                                         " bytes and has " + std::to_string(status.st_size)),
                   "a file that does not change until training has begun",
                   error != 0 ? "" : "use a copy of the file, or replace it by a rename");
}

TextWindow::TextWindow(std::shared_ptr<const TextFile> file) : file_(std::move(file)) { move(0); }

void TextWindow::move(size_t bytes) {
  begin_ += bytes;
  text_.remove_prefix(bytes);
  if (const auto all = file_->content()) {
    text_ = all->substr(begin_);
    return;
  }
  const size_t left = file_->size() - begin_;
  const size_t kept = text_.size();
  const size_t size = std::min(std::max(2 * kept, detail::kTextPiece), left);
  // A new buffer, because copies of the window may use the old one.
  auto buffer = std::make_shared_for_overwrite<char[]>(size);
  text_.copy(buffer.get(), kept);
  file_->read(begin_ + kept, buffer.get() + kept, size - kept);
  buffer_ = std::move(buffer);
  text_ = {buffer_.get(), size};
}

bool TextWindow::next_line(size_t& at, std::string_view& line) {
  size_t end = text_.find('\n', at);
  while (end == std::string_view::npos && !reaches_end()) {
    move(std::exchange(at, 0));
    end = text_.find('\n', at);
  }
  if (at == text_.size()) {
    return false;
  }
  line = text_.substr(at, end - at);
  at = std::min(end, text_.size() - 1) + 1;
  return true;
}

} // namespace hasten
