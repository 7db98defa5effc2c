// A cache of Hugging Face's hub as huggingface_hub keeps it.
#pragma once

#include <filesystem>
#include <fstream>
#include <string>

namespace hasten::testing_support {

/// Puts copies of the files of `folder` into `hub` as revision `revision` of `repository`, which is
/// the commit `commit`: the snapshot has symbolic links to blobs. Returns the snapshot.
inline std::filesystem::path add_to_hub_cache(const std::filesystem::path& hub,
                                              std::string repository,
                                              const std::filesystem::path& folder,
                                              const std::string& commit,
                                              const std::string& revision = "main") {
  if (const size_t slash = repository.find('/'); slash != std::string::npos) {
    repository.replace(slash, 1, "--");
  }
  const auto in_cache = hub / ("models--" + repository);
  const auto snapshot = in_cache / "snapshots" / commit;
  const auto reference = in_cache / "refs" / revision;
  std::filesystem::create_directories(snapshot);
  std::filesystem::create_directories(in_cache / "blobs");
  std::filesystem::create_directories(reference.parent_path());
  std::ofstream(reference) << commit;
  for (const auto& file : std::filesystem::directory_iterator(folder)) {
    if (file.is_regular_file()) {
      const auto name = file.path().filename().string();
      std::filesystem::copy(file.path(), in_cache / "blobs" / (commit + name));
      std::filesystem::create_symlink("../../blobs/" + commit + name, snapshot / name);
    }
  }
  return snapshot;
}

} // namespace hasten::testing_support
