#include <glob.h>

#include <algorithm>
#include <memory>
#include <system_error>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/text/text_file.h"

namespace hasten {

std::vector<std::filesystem::path> matching_files(const std::string& names,
                                                  const std::string& where,
                                                  const std::string& flag) {
  std::error_code error;
  std::vector<std::filesystem::path> found;
  const bool one = std::filesystem::exists(names, error);
  for (const std::string& name : one ? std::vector<std::string>{names} : split(names)) {
    if (name.find_first_of("*?[") == std::string::npos || std::filesystem::exists(name, error)) {
      found.emplace_back(name);
      continue;
    }
    glob_t matches{};
    const int result =
        ::glob(name.c_str(), GLOB_NOSORT, nullptr, &matches); // its order is the locale's
    const std::unique_ptr<glob_t, void (*)(glob_t*)> owner(&matches, ::globfree);
    if (result != 0) {
      throw InputError(where, flag + "=" + names + ": no file matches " + name,
                       "a file, files separated by commas, or a pattern that a file matches");
    }
    std::vector<std::string> sorted(matches.gl_pathv, matches.gl_pathv + matches.gl_pathc);
    std::ranges::sort(sorted);
    found.insert(found.end(), sorted.begin(), sorted.end());
  }
  return found;
}

} // namespace hasten
