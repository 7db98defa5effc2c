#include "hasten/data/text_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "hasten/base/error.h"

namespace hasten {

TextFile::TextFile(std::filesystem::path path) : path_(std::move(path)) {}

TextFile::~TextFile() {
  if (mapped_ != nullptr) {
    ::munmap(mapped_, size_);
  }
}

std::shared_ptr<const TextFile> TextFile::open(
    const std::filesystem::path& path, const char* where) {
  const auto fail = [&](const std::string& reason,
                        const char* expected,
                        const char* fix = "") {
    throw InputError(
        where, "file=" + path.string() + " " + reason, expected, fix);
  };
  const int descriptor = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) {
    fail(
        std::string("cannot be opened: ") + std::strerror(errno),
        "a file that exists and may be read");
  }
  std::shared_ptr<TextFile> file(new TextFile(path));
  struct stat status {};
  std::string problem;
  if (::fstat(descriptor, &status) != 0) {
    problem = std::strerror(errno);
  } else if (S_ISDIR(status.st_mode)) {
    problem = "it is a folder";
  } else if (S_ISREG(status.st_mode) && status.st_size > 0) {
    problem = file->map(descriptor, static_cast<size_t>(status.st_size));
  } else {
    problem = file->drain(descriptor);
  }
  ::close(descriptor);
  if (!problem.empty()) {
    fail("cannot be read: " + problem, "a text file");
  }
  const std::string_view start = file->text().substr(0, 2);
  if (start == "\xFF\xFE" || start == "\xFE\xFF") {
    fail(
        "starts with the byte-order mark of UTF-16",
        "UTF-8",
        "save it as UTF-8, for example with iconv -f UTF-16 -t UTF-8");
  }
  return file;
}

std::shared_ptr<const TextFile> TextFile::of_text(
    std::filesystem::path name, std::string text) {
  std::shared_ptr<TextFile> file(new TextFile(std::move(name)));
  file->read_ = std::move(text);
  return file;
}

// Both return what went wrong, or nothing.

std::string TextFile::map(int file, size_t size) {
  void* memory = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file, 0);
  if (memory == MAP_FAILED) {
    return std::strerror(errno);
  }
  ::madvise(memory, size, MADV_SEQUENTIAL);
  mapped_ = memory;
  size_ = size;
  return {};
}

std::string TextFile::drain(int file) {
  char buffer[1 << 16];
  for (;;) {
    const ssize_t count = ::read(file, buffer, sizeof(buffer));
    if (count > 0) {
      read_.append(buffer, static_cast<size_t>(count));
    } else if (count == 0) {
      return {};
    } else if (errno != EINTR) {
      return std::strerror(errno);
    }
  }
}

std::string_view TextFile::text() const {
  return mapped_ != nullptr
             ? std::string_view(static_cast<const char*>(mapped_), size_)
             : std::string_view(read_);
}

size_t TextFile::mark_bytes() const {
  return text().substr(0, 3) == "\xEF\xBB\xBF" ? 3 : 0;
}

} // namespace hasten
