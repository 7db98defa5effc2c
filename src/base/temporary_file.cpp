#include "hasten/base/temporary_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <string>

namespace hasten {

int make_beside(const std::filesystem::path& target, const char* mark, std::filesystem::path& made,
                const std::function<int(const std::filesystem::path&)>& make) {
  static std::atomic<unsigned> counter{0};
  int error = EEXIST;
  while (error == EEXIST) {
    made = target;
    made += mark + std::to_string(::getpid()) + "-" + std::to_string(counter.fetch_add(1));
    error = make(made);
  }
  return error;
}

bool is_temporary_name(std::string_view name) {
  constexpr std::string_view kMark = ".tmp-";
  const size_t mark = name.rfind(kMark);
  if (mark == std::string_view::npos) {
    return false;
  }
  const auto end = name.substr(mark + kMark.size());
  const size_t dash = end.find('-');
  const auto is_number = [](std::string_view text) {
    return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
  };
  return dash != std::string_view::npos && is_number(end.substr(0, dash)) &&
         is_number(end.substr(dash + 1));
}

int open_temporary(const std::filesystem::path& target, std::filesystem::path& temporary) {
  int file = -1;
  errno = make_beside(target, ".tmp-", temporary, [&](const auto& name) {
    file = ::open(name.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    return file < 0 ? errno : 0;
  });
  return file;
}

} // namespace hasten
