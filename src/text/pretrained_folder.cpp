#include "hasten/text/pretrained_folder.h"

#include <algorithm>
#include <optional>
#include <regex>
#include <system_error>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"

namespace hasten {

namespace detail {

std::filesystem::path HubName::folder(const std::filesystem::path& cache) const {
  return cache / ("models--" + joined(split(repository, "/"), "--"));
}

std::optional<HubName> hub_name(const std::string& given) {
  static const std::regex form(R"(((?:\w[\w.-]*/)?\w[\w.-]*)(?:@(\w[\w./-]*))?)");
  std::smatch parts;
  if (given.size() > 300 || given.find("..") != std::string::npos ||
      !std::regex_match(given, parts, form) || parts[1].str().find("--") != std::string::npos) {
    return std::nullopt;
  }
  return HubName{parts[1], parts[2].matched ? parts[2].str() : "main"};
}

std::optional<std::filesystem::path> environment_path(const std::string& name) {
  auto path = environment_value(name);
  if (path && (path == "~" || path->starts_with("~/"))) { // huggingface_hub expands it, too
    path->replace(0, 1, environment_value("HOME").value_or(""));
  }
  return path;
}

std::filesystem::path hf_home() {
  if (const auto home = environment_path("HF_HOME")) {
    return *home;
  }
  const std::filesystem::path user = environment_value("HOME").value_or("");
  return environment_path("XDG_CACHE_HOME").value_or(user / ".cache") / "huggingface";
}

std::filesystem::path hub_cache() {
  return environment_path("HF_HUB_CACHE").value_or(hf_home() / "hub");
}

// A branch or tag is a file with the hash of its commit. Other revisions are such hashes.
std::filesystem::path hub_snapshot(const std::filesystem::path& cache, const HubName& name) {
  const auto folder = name.folder(cache);
  const auto reference = folder / "refs" / name.revision;
  std::error_code error;
  std::string commit = name.revision;
  if (std::filesystem::is_regular_file(reference, error)) {
    commit = read_file(reference);
    commit.resize(std::min(commit.size(), commit.find_first_of(" \r\n")));
  }
  return folder / "snapshots" / commit;
}

std::string hub_commit(const std::string& name_or_path) {
  std::error_code error;
  const auto name = hub_name(name_or_path);
  const auto folder = name ? hub_snapshot(hub_cache(), *name) : std::filesystem::path();
  const bool cached = std::filesystem::is_directory(folder, error);
  return cached && !std::filesystem::exists(name_or_path, error) ? folder.filename() : "";
}

} // namespace detail

std::filesystem::path pretrained_folder(const std::string& name_or_path, const std::string& where,
                                        const std::string& given_as,
                                        const std::vector<std::string>& other_names) {
  std::error_code error;
  if (std::filesystem::exists(name_or_path, error)) {
    return name_or_path;
  }
  std::string problem = given_as + "=" + name_or_path + " does not exist";
  if (const auto name = detail::hub_name(name_or_path)) {
    const auto cache = detail::hub_cache();
    const auto folder = detail::hub_snapshot(cache, *name);
    if (std::filesystem::is_directory(folder, error)) {
      return folder;
    }
    problem += ", and revision=" + name->revision + " of a repository with this name is not in " +
               cache.string();
  }
  const std::string command = hf_download_command(name_or_path);
  throw InputError(where, problem,
                   "a Hugging Face folder, or the name of a repository in Hugging Face's cache" +
                       (other_names.empty() ? "" : ", or one of " + joined(other_names)),
                   write_nearest(name_or_path, other_names, command));
}

std::string hf_download_command(const std::string& name_or_path) {
  std::error_code error;
  const auto name = detail::hub_name(name_or_path);
  if (!name || std::filesystem::exists(name_or_path, error)) {
    return {};
  }
  return "hf download " + name->repository +
         (name->revision == "main" ? "" : " --revision " + name->revision);
}

} // namespace hasten
