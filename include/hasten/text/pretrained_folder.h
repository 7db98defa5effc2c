// The folder of a model or tokenizer that is given by name, as in transformers' from_pretrained: a
// folder, or a repository of Hugging Face's hub in the cache of this machine. Downloads nothing.
//
// Without LibTorch. Local; read-only. Threading: free functions.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace hasten {

/// Returns `name_or_path` if it exists. Else it is the name of a repository, "org/name" or "name",
/// with "@" and a revision if it is not "main": a branch, a tag or a whole commit hash. Then returns
/// the folder of that revision in the cache that huggingface_hub keeps: HF_HUB_CACHE, or else
/// $HF_HOME/hub, or else $XDG_CACHE_HOME/huggingface/hub, or else ~/.cache/huggingface/hub.
/// The folder may lack files that Python did not need.
/// Throws InputError if there is neither. The message begins with `where` and `given_as`, names the
/// cache and the command that downloads the repository, or the nearest of `other_names`, which the
/// caller knows besides.
std::filesystem::path pretrained_folder(const std::string& name_or_path,
                                        const std::string& where = "text::pretrained_folder",
                                        const std::string& given_as = "name",
                                        const std::vector<std::string>& other_names = {});

/// "hf download org/name --revision v1" for the name of a repository; empty if it cannot be one or
/// the path exists. For the "Fix" of an error.
std::string hf_download_command(const std::string& name_or_path);

namespace detail {

/// A repository of the hub.
struct HubName {
  std::string repository{}; // "org/name" or "name"
  std::string revision{};

  /// Its folder in a cache.
  std::filesystem::path folder(const std::filesystem::path& cache) const;
};

/// Empty if the hub allows no such name. A path with ".." never reaches the cache.
std::optional<HubName> hub_name(const std::string& given);
/// A variable that names a file or folder, "~" expanded. Empty if it is not set.
std::optional<std::filesystem::path> environment_path(const std::string& name);
/// HF_HOME, or its default.
std::filesystem::path hf_home();
std::filesystem::path hub_cache();
/// The folder of this revision, which need not exist.
std::filesystem::path hub_snapshot(const std::filesystem::path& cache, const HubName& name);
/// The commit of a repository in the cache; empty for what pretrained_folder() takes from elsewhere.
std::string hub_commit(const std::string& name_or_path);

} // namespace detail

} // namespace hasten
