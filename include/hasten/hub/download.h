// Models and tokenizers of Hugging Face's hub, fetched by name into the cache that huggingface_hub
// keeps: what one side has fetched, the other finds. Python is not needed.
//
// HF_ENDPOINT is the hub (https://huggingface.co). The token is HF_TOKEN, or the content of
// HF_TOKEN_PATH, or of $HF_HOME/token. It is sent to the host of HF_ENDPOINT alone, and no error
// and no line of the log has it. pretrained_folder.h says where the cache is.
//
// Without LibTorch. Threading: free functions; several processes may fetch the same name, and each
// file is fetched by one of them. Blocking: until all files are there; a transfer that gets no byte
// for a minute has failed.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace hasten {

/// The files that are fetched. Never a pickle.
enum class HubFiles {
  /// Configuration, tokenizer, and the weights in safetensors.
  model,
  tokenizer,
  /// config.json or adapter_config.json.
  config
};

struct DownloadOptions {
  HubFiles files = HubFiles::model;
  /// A branch, a tag or a commit hash. Empty: that in the name after "@", or main.
  std::string revision{};
  /// Patterns of paths in the repository, in which "*" matches "/", too. `include` replaces `files`.
  std::vector<std::string> include{};
  std::vector<std::string> exclude{};
  /// Write the files there and not into the cache.
  std::filesystem::path local_dir{};
  /// Empty: as above.
  std::string token{};
  /// Files fetched at once.
  int64_t max_workers = 8;
  /// Ask the hub for the newest commit even if the cache has one.
  bool update = false;
  /// The name of the argument in errors.
  std::string given_as = "name";
  /// Before a request is repeated; doubles each time.
  std::chrono::milliseconds first_wait{1000};
};

/// False if HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set, if hasten was built without libcurl, or if
/// this machine lacks libcurl or OpenSSL.
bool can_download();

/// Fetches the files of "org/name", "name" or "name@revision" that are missing, and returns their
/// folder. A file that was cut is continued where it ended. Each is compared with the checksum that the
/// hub has of it. Asks nothing if the cache has the name, unless `update`, `include`, `exclude` or
/// `local_dir` is set.
/// Throws InputError for a wrong or unknown name or revision, a repository without access, an
/// unreachable hub, a disk without space, and if can_download() is false. Throws Error for a file
/// that cannot be written. What came stays, and a later call fetches the rest.
std::filesystem::path download(const std::string& name, const DownloadOptions& options = {});

/// download() for the name of a model or tokenizer of which the cache lacks files, and for the base
/// of a model that is an adapter (base_model_name_or_path). Does nothing for an existing path, for
/// what cannot be the name of a repository, and if HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set. Calls
/// `before` before each download.
void download_missing(const std::string& name_or_path, const DownloadOptions& options,
                      const std::function<void()>& before = {});

} // namespace hasten
