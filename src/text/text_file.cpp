#include "hasten/text/text_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"

namespace hasten {

namespace detail {

constexpr size_t kTextPiece = size_t{256} << 10; // bytes

constexpr std::string_view kGzipStart = "\x1F\x8B";

// Formats that users mistake for text tables, by their first bytes. FILE in `fix` is the path.
struct NotText {
  std::string_view start;
  const char* name;
  const char* fix;
};
constexpr NotText kNotTexts[] = {
    {"\xFF\xFE", "UTF-16", "save it as UTF-8, for example with iconv -f UTF-16 -t UTF-8"},
    {"\xFE\xFF", "UTF-16", "save it as UTF-8, for example with iconv -f UTF-16 -t UTF-8"},
    {"PAR1", "a Parquet file",
     "convert it: python -c \"import pandas as pd; pd.read_parquet('FILE').to_json('FILE.jsonl', "
     "orient='records', lines=True)\""},
    {"ARROW1", "an Arrow file", "convert it, for example with pandas.read_feather(file).to_csv(…)"},
    {"\xFF\xFF\xFF\xFF", "an Arrow stream, as Hugging Face's datasets keep them",
     "convert it, for example with Dataset.from_file(file).to_csv(…)"},
    {"PK\x03\x04", "a zip archive or an Excel sheet",
     "unpack it, or save the sheet as CSV in UTF-8"},
    {kGzipStart, "compressed by gzip twice", "unpack it with gunzip"},
    {"\x28\xB5\x2F\xFD", "compressed by zstd", "unpack it: zstd -d FILE"},
};

int64_t modified_ns(const struct stat& status) {
  return static_cast<int64_t>(status.st_mtim.tv_sec) * 1'000'000'000 + status.st_mtim.tv_nsec;
}

} // namespace detail

TextFile::TextFile(std::filesystem::path path) : path_(std::move(path)) {}

std::shared_ptr<const TextFile> TextFile::open(const std::filesystem::path& path,
                                               const char* where) {
  std::shared_ptr<TextFile> file(new TextFile(path));
  detail::FileDescriptor opened(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (opened.get() < 0) {
    throw InputError(where, "file=" + path.string() + " cannot be opened: " + std::strerror(errno),
                     "a file that exists and may be read",
                     errno == EMFILE ? "raise the limit (ulimit -n), or join the files" : "");
  }
  struct stat status {};
  std::string problem;
  if (::fstat(opened.get(), &status) != 0) {
    problem = std::strerror(errno);
  } else if (S_ISDIR(status.st_mode)) {
    problem = "it is a folder";
  } else if (S_ISREG(status.st_mode) && status.st_size > 0) {
    file->size_ = static_cast<size_t>(status.st_size);
    file->changed_ns_ = detail::modified_ns(status);
    file->file_ = std::move(opened);
  } else {
    const int error = detail::read_all(opened.get(), file->read_);
    problem = error != 0 ? std::strerror(error) : "";
    file->size_ = file->read_.size();
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

void TextFile::check_start(const char* where) {
  char bytes[8]{};
  const size_t count = std::min(sizeof(bytes), size_);
  read(0, bytes, count);
  const std::string_view start(bytes, count);
  if (start.starts_with(detail::kGzipStart) && !unpacked_) {
    unpack(where);
    return check_start(where);
  }
  mark_bytes_ = start.starts_with("\xEF\xBB\xBF") ? 3 : 0;
  for (const auto& known : detail::kNotTexts) {
    if (start.starts_with(known.start)) {
      throw InputError(where,
                       "file=" + path_.string() + " is " + known.name + ", as its first bytes show",
                       "text in UTF-8: CSV, TSV or JSON lines",
                       joined(split(known.fix, "FILE"), path_.string()));
    }
  }
}

// Replaces the content by the text of all gzip members in it.
void TextFile::unpack(const char* where) {
  const std::string folder = detail::environment_value("TMPDIR").value_or("/tmp");
  std::string name = folder + "/hasten-XXXXXX";
  detail::FileDescriptor to(::mkostemp(name.data(), O_CLOEXEC));
  int error = to ? 0 : errno;
  ::unlink(name.c_str());
  z_stream stream{};
  int state = ::inflateInit2(&stream, MAX_WBITS + 16); // gzip alone
  const std::unique_ptr<z_stream, int (*)(z_stream*)> owner(&stream, &::inflateEnd);
  std::string from(detail::kTextPiece, '\0'), text(detail::kTextPiece, '\0');
  size_t at = 0, written = 0;
  while (error == 0 && (state == Z_OK || state == Z_STREAM_END)) {
    if (stream.avail_in == 0) {
      throw_if_interrupted();
      const size_t count = std::min(from.size(), size_ - at);
      read(at, from.data(), count);
      at += count;
      stream.next_in = reinterpret_cast<Bytef*>(from.data());
      stream.avail_in = static_cast<uInt>(count);
    }
    if (state == Z_STREAM_END && (stream.avail_in == 0 || ::inflateReset(&stream) != Z_OK)) {
      break;
    }
    stream.next_out = reinterpret_cast<Bytef*>(text.data());
    stream.avail_out = static_cast<uInt>(text.size());
    state = ::inflate(&stream, Z_NO_FLUSH);
    const size_t count = text.size() - stream.avail_out;
    error = detail::write_all(to.get(), {text.data(), count});
    written += count;
  }
  if (error != 0) {
    throw Error(where,
                "file=" + path_.string() + " cannot be unpacked in the folder " + folder + ": " +
                    std::strerror(error),
                "a folder with space for the text",
                "set TMPDIR to another folder, or unpack the file yourself with gunzip",
                kind_of_errno(error));
  }
  if (state != Z_STREAM_END) {
    const std::string what = state == Z_BUF_ERROR ? " is cut off"
                             : stream.msg == nullptr
                                 ? " is damaged"
                                 : " is damaged (" + std::string(stream.msg) + ")";
    throw InputError(where,
                     "file=" + path_.string() + what + ", at byte " +
                         std::to_string(at - stream.avail_in) + " of the gzip file",
                     "a whole gzip file",
                     "copy or download it again; gzip -t shows whether it is whole");
  }
  file_ = std::move(to);
  read_.clear();
  size_ = written;
  unpacked_ = true;
}

void TextFile::read(size_t at, char* to, size_t bytes) const {
  if (file_.get() < 0) {
    read_.copy(to, bytes, at);
    return;
  }
  const int error = detail::read_at(file_.get(), to, bytes, at) < 0 ? errno : 0;
  struct stat status {};
  if (error == 0 && ::fstat(file_.get(), &status) == 0 &&
      static_cast<size_t>(status.st_size) == size_ &&
      (unpacked_ || detail::modified_ns(status) == changed_ns_)) {
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

TextFiles TextFiles::open(const std::string& names, const char* where, const std::string& flag) {
  TextFiles files;
  for (const auto& path : matching_files(names, where, flag)) {
    files.push_back(TextFile::open(path, where));
  }
  return files;
}

int64_t TextFiles::bytes() const {
  return sum_of(*this, [](const auto& file) { return static_cast<int64_t>(file->size()); });
}

std::string TextFiles::names() const {
  return joined(
      first_items(mapped(*this, [](const auto& file) { return file->path().string(); }), 5));
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

std::string RecordReader::sample(std::string_view value) {
  std::string sample;
  size_t characters = 0;
  for (const char c : value) {
    if ((static_cast<unsigned char>(c) & 0xC0) != 0x80 && ++characters > 40) {
      return sample + "...";
    }
    sample += c == '\n' || c == '\r' || c == '\t' ? ' ' : c;
  }
  return sample;
}

void RecordReader::fail_unknown_column(const char* where, const std::string& given,
                                       const std::vector<std::string>& samples) const {
  std::vector<std::string> list;
  for (size_t i = 0; i < columns_.size(); ++i) {
    list.push_back(sample(columns_[i]) + " (\"" + sample(i < samples.size() ? samples[i] : "") +
                   "\")");
  }
  const std::string near = nearest_name(given.substr(given.find('=') + 1), columns_);
  throw InputError(where, given + " is not a column of " + path().string(),
                   "one of: " + joined(first_items(std::move(list), 20)),
                   near.empty() ? "" : "did you mean " + near + "?");
}

} // namespace hasten
