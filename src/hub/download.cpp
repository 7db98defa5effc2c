#include "hasten/hub/download.h"

#include <fcntl.h>
#include <fnmatch.h>
#include <sys/file.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <future>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "checksum.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/log.h"
#include "hasten/base/process.h"
#include "hasten/base/progress_bar.h"
#include "hasten/base/text.h"
#include "hasten/text/pretrained_folder.h"
#include "http.h"
#include "hub_client.h"

namespace hasten {

namespace detail {

namespace files = std::filesystem;
using Names = std::vector<std::string>;

constexpr const char* kDownload = "hub::download";
constexpr const char* kAdapter = "adapter_config.json";
constexpr const char* kIndex = "model.safetensors.index.json";
const Names kConfigs{"config.json", kAdapter};
const Names kTokenizers{"tokenizer.json",
                        "tokenizer_config.json",
                        "special_tokens_map.json",
                        "added_tokens.json",
                        "chat_template.jinja",
                        "vocab.txt",
                        "vocab.json",
                        "merges.txt"};
const Names kWeights{"model.safetensors", "adapter_model.safetensors"};

bool has(const Names& names, const std::string& name) {
  return std::ranges::find(names, name) != names.end();
}

bool has_any(const files::path& folder, const Names& names) {
  return std::ranges::any_of(names, [&](const auto& name) {
    std::error_code error;
    return files::exists(folder / name, error);
  });
}

// The files of an index; nothing if it is damaged.
Names shards_of(const files::path& index) {
  const auto json = nlohmann::json::parse(read_file(index), nullptr, /*allow_exceptions=*/false);
  std::set<std::string> shards;
  if (json.is_object() && json.contains("weight_map") && json["weight_map"].is_object()) {
    for (const auto& shard : json["weight_map"]) {
      shards.insert(shard.is_string() ? shard.get<std::string>() : "");
    }
  }
  return {shards.begin(), shards.end()};
}

bool is_complete(const files::path& folder, HubFiles kind) {
  if (kind != HubFiles::model) {
    return has_any(folder, kind == HubFiles::config ? kConfigs : kTokenizers);
  }
  if (!has_any(folder, kConfigs)) {
    return false;
  }
  if (has_any(folder, kWeights) || has_any(folder, {"model.pt2"})) {
    return true;
  }
  const Names shards = has_any(folder, {kIndex}) ? shards_of(folder / kIndex) : Names();
  return !shards.empty() &&
         std::ranges::all_of(shards, [&](const auto& name) { return has_any(folder, {name}); });
}

// What needs an interpreter of Python's objects, which can run anything.
bool is_pickle(const std::string& path) {
  static const Names ends{".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".joblib", ".npy"};
  return has(ends, files::path(path).extension());
}

bool matches(const Names& patterns, const std::string& path) {
  return std::ranges::any_of(patterns, [&](std::string pattern) {
    pattern += pattern.ends_with('/') ? "*" : "";
    return ::fnmatch(pattern.c_str(), path.c_str(), 0) == 0;
  });
}

void require_safe(const HubClient& client, const std::string& path) {
  const Names parts = split(path, "/");
  const bool control =
      std::ranges::any_of(path, [](unsigned char c) { return c < ' ' || c == '\\' || c == 0x7f; });
  if (control || has(parts, "") || has(parts, ".") || has(parts, "..")) {
    throw InputError(kDownload, client.described() + " lists a file outside of its folder",
                     "paths without .. and control characters", "use another repository");
  }
}

void make_folders(const files::path& folder) {
  std::error_code error;
  files::create_directories(folder, error);
  if (error) {
    throw_file_error(kDownload, folder, error.value());
  }
}

// One repository at one commit, fetched into the cache or a folder.
class Fetch {
 public:
  Fetch(const HubName& name, const DownloadOptions& options)
      : options_(options), client_(name, options), listing_(client_.list()) {
    storage_ = name.folder(hub_cache());
    locks_ = hub_cache() / ".locks" / storage_.filename();
    folder_ = storage_ / "snapshots" / listing_.commit;
    if (!options.local_dir.empty()) {
      folder_ = options.local_dir;
      locks_ = folder_ / ".cache/huggingface/download";
    }
  }

  /// Fetches small files first, so that a folder with weights is complete.
  files::path run(const HubName& name) {
    log_info(client_.described() + ": revision=" + name.revision + ", commit=" + listing_.commit);
    fetch_all(chosen());
    if (options_.include.empty() && options_.files == HubFiles::model) {
      fetch_all(weights());
    }
    if (options_.local_dir.empty()) {
      for (const Names& known : {kConfigs, kTokenizers}) {
        for (const std::string& path : known) {
          if (!has(listing_.files, path)) { // so that nobody asks again
            make_folders(storage_ / ".no_exist" / listing_.commit);
            write_file_atomically(storage_ / ".no_exist" / listing_.commit / path, "");
          }
        }
      }
      if (name.revision != listing_.commit) {
        const auto reference = storage_ / "refs" / name.revision;
        make_folders(reference.parent_path());
        write_file_atomically(reference, listing_.commit);
      }
    }
    return folder_;
  }

 private:
  bool is_local() const { return !options_.local_dir.empty(); }

  Names chosen() const {
    Names names;
    for (const std::string& path : listing_.files) {
      const bool tokens = options_.files != HubFiles::config && has(kTokenizers, path);
      const bool model = options_.files == HubFiles::model &&
                         (path == "generation_config.json" ||
                          (path == kIndex && !has(listing_.files, kWeights[0])));
      const bool wanted = options_.include.empty() ? has(kConfigs, path) || tokens || model
                                                   : matches(options_.include, path);
      if (wanted && !is_pickle(path) && !matches(options_.exclude, path)) {
        names.push_back(path);
      }
    }
    if (names.empty()) {
      throw InputError(
          kDownload,
          client_.described() + " has none of the files: " + joined(first_items(listing_.files, 8)),
          "a model with config.json, or patterns of --include that match; never "
          "pickles",
          "choose another repository or revision, or --include");
    }
    return names;
  }

  Names weights() const {
    Names names;
    for (const std::string& path : kWeights) {
      if (has(listing_.files, path)) {
        names.push_back(path);
      }
    }
    if (!has(names, kWeights[0]) && has_any(folder_, {kIndex})) {
      for (const std::string& shard : shards_of(folder_ / kIndex)) {
        names.push_back(shard);
      }
    }
    if (names.empty()) {
      throw InputError(kDownload,
                       client_.described() + " has no weights in safetensors: " +
                           joined(first_items(listing_.files, 8)),
                       "model.safetensors, or several with an index; hasten reads no pickles",
                       "choose another revision, or save it once by Python's "
                       "from_pretrained(NAME) and save_pretrained(FOLDER)");
    }
    std::erase_if(names, [&](const auto& path) { return matches(options_.exclude, path); });
    return names;
  }

  files::path target(const HubFile& file) const {
    return is_local() ? folder_ / file.path : storage_ / "blobs" / file.etag;
  }
  files::path partial(const HubFile& file) const {
    return (is_local() ? locks_ : storage_ / "blobs") / (file.etag + ".incomplete");
  }
  bool is_there(const HubFile& file) const {
    std::error_code error;
    const auto path = target(file);
    return files::exists(path, error) &&
           (!is_local() || (static_cast<int64_t>(files::file_size(path, error)) == file.size &&
                            has_checksum(path, file.etag)));
  }

  // Several at once. The first error ends the others, and what came of them stays.
  void for_each(const Names& paths, const std::function<void(size_t)>& work) {
    std::atomic<size_t> next{0};
    std::vector<std::future<void>> workers;
    while (std::ssize(workers) <
           std::min(std::max<int64_t>(options_.max_workers, 1), std::ssize(paths))) {
      workers.push_back(std::async(std::launch::async, [&] {
        try {
          for (size_t i = next++; i < paths.size(); i = next++) {
            work(i);
          }
        } catch (const Stopped&) { // another worker has the error
        } catch (...) {
          client_.stop = true;
          throw;
        }
      }));
    }
    std::ranges::for_each(workers, [](auto& worker) { worker.get(); });
  }

  void fetch_all(Names paths) {
    std::erase_if(paths, [&](const std::string& path) {
      require_safe(client_, path);
      std::error_code error;
      return !is_local() && files::exists(folder_ / path, error); // a commit does not change
    });
    std::vector<HubFile> missing(paths.size());
    std::mutex mutex;
    int64_t total = 0, needed = 0, done = 0;
    for_each(paths, [&](size_t i) {
      const HubFile file = missing[i] = client_.look_up(listing_.commit, paths[i]);
      if (!is_there(file)) {
        std::error_code error;
        const auto size = std::max<int64_t>(file.size, 0);
        const auto part = files::file_size(partial(file), error);
        const std::lock_guard lock(mutex);
        total += size;
        needed += size - (error ? 0 : std::min(static_cast<int64_t>(part), size));
      }
    });
    check_space(needed);
    constexpr int64_t kMegabyte = 1'000'000;
    ProgressBar bar("fetching (MB)", std::max<int64_t>(total / kMegabyte, 1), total >= kMegabyte);
    for_each(paths, [&](size_t i) {
      fetch_one(missing[i], [&](int64_t bytes) {
        const std::lock_guard lock(mutex);
        done += bytes;
        bar.update(std::clamp<int64_t>(done / kMegabyte, 0, total / kMegabyte));
      });
    });
    bar.finish();
  }

  void check_space(int64_t needed) const {
    make_folders(folder_);
    std::error_code error;
    const auto space = files::space(folder_, error);
    if (!error && space.available < static_cast<uintmax_t>(needed)) {
      throw InputError(kDownload,
                       client_.described() + " needs " + format_bytes(needed) +
                           ", but the disk of " + folder_.string() + " has " +
                           format_bytes(static_cast<int64_t>(space.available)) + " free",
                       {}, "make room, or set HF_HUB_CACHE to a folder on another disk",
                       ErrorKind::full_disk);
    }
  }

  void fetch_one(const HubFile& file, const std::function<void(int64_t)>& advance) {
    make_folders(locks_);
    make_folders(partial(file).parent_path());
    make_folders(target(file).parent_path());
    make_folders((folder_ / file.path).parent_path());
    const files::path lock_path = locks_ / (file.etag + ".lock");
    const FileDescriptor lock(::open(lock_path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0664));
    if (!lock) {
      throw_file_error(kDownload, lock_path, errno);
    }
    if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0) {
      log_info(client_.described(file.path) + ": another process fetches it");
      while (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
        client_.sleep(std::chrono::milliseconds(100));
      }
      advance(is_there(file) ? file.size : 0);
    }
    for (int attempt = 1; !is_there(file); ++attempt) {
      client_.fetch(listing_.commit, file, partial(file), advance);
      std::error_code error;
      const auto size = static_cast<int64_t>(files::file_size(partial(file), error));
      if ((file.size < 0 || size == file.size) && has_checksum(partial(file), file.etag)) {
        files::rename(partial(file), target(file), error);
        if (error) {
          throw_file_error(kDownload, target(file), error.value());
        }
        break;
      }
      files::remove(partial(file), error);
      advance(-size);
      if (attempt == 2) {
        throw InputError(kDownload,
                         client_.described(file.path) +
                             " came damaged twice: it has not the "
                             "checksum " +
                             file.etag,
                         "what the hub has",
                         "try again; check what HF_ENDPOINT or a proxy changes");
      }
    }
    if (!is_local()) {
      link_to(target(file), folder_ / file.path);
    }
  }

  static void link_to(const files::path& blob, const files::path& link) {
    std::error_code error;
    if (files::exists(link, error)) {
      return;
    }
    files::remove(link, error); // to a blob that is gone
    files::create_symlink(blob.lexically_relative(link.parent_path()), link, error);
    if (error && error != std::errc::file_exists) {
      throw_file_error(kDownload, link, error.value());
    }
  }

  const DownloadOptions& options_;
  HubClient client_;
  HubListing listing_;
  files::path storage_{}; // models--org--name
  files::path locks_{};
  files::path folder_{};
};

HubName hub_name_of(const std::string& text, const DownloadOptions& options) {
  const std::string given = text + (options.revision.empty() ? "" : "@" + options.revision);
  const auto name = hub_name(given);
  if (!name) {
    throw InputError(kDownload, options.given_as + "=" + given + " is no name of a repository",
                     "org/name, name, or one of both with @revision, as in the address of its page",
                     "write it as in org/name --revision v1");
  }
  return *name;
}

bool is_offline() {
  return std::ranges::any_of(std::array{"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"}, [](auto name) {
    std::string value = environment_value(name).value_or("");
    std::ranges::transform(value, value.begin(), [](unsigned char c) { return std::toupper(c); });
    return has({"1", "ON", "YES", "TRUE"}, value);
  });
}

// Returns the folder, which may lack what the hub did not send.
files::path download_one_missing(const std::string& name_or_path, const DownloadOptions& options,
                                 const std::function<void()>& before) {
  std::error_code error;
  const auto name = hub_name(name_or_path);
  if (!name || files::exists(name_or_path, error)) {
    return name_or_path;
  }
  auto cached = hub_snapshot(hub_cache(), *name);
  if (is_complete(cached, options.files) || is_offline()) {
    return cached;
  }
  try {
    before ? before() : void();
    return download(name_or_path, options);
  } catch (const HubUnreachable& unreachable) {
    // Python may have left out what it did not need; this command may not need it either.
    if (!files::is_directory(cached, error)) {
      throw;
    }
    log_warning(unreachable.text());
    return cached;
  }
}

} // namespace detail

bool can_download() {
  return !detail::is_offline() && detail::http_available() && detail::checksum_available();
}

std::filesystem::path download(const std::string& text, const DownloadOptions& options) {
  const detail::HubName name = detail::hub_name_of(text, options);
  auto cached = detail::hub_snapshot(detail::hub_cache(), name);
  const bool ask = options.update || !options.include.empty() || !options.exclude.empty() ||
                   !options.local_dir.empty();
  if (!ask && detail::is_complete(cached, options.files)) {
    return cached;
  }
  if (!can_download()) {
    const bool offline = detail::is_offline();
    throw detail::HubUnreachable(
        detail::kDownload,
        options.given_as + "=" + text + " cannot be fetched: " +
            (offline ? "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
                     : "libcurl or OpenSSL is missing"),
        "a path, a name in " + detail::hub_cache().string() +
            ", or libcurl.so.4 and libcrypto.so.3",
        offline ? "unset the variable"
                : "install libcurl4, with libcurl4-openssl-dev before a build; or " +
                      std::string("hf download ") + name.repository);
  }
  return detail::Fetch(name, options).run(name);
}

void download_missing(const std::string& name_or_path, const DownloadOptions& options,
                      const std::function<void()>& before) {
  const auto folder = detail::download_one_missing(name_or_path, options, before);
  const bool adapter = detail::has_any(folder, {detail::kAdapter});
  const std::string text = adapter ? read_file(folder / detail::kAdapter) : std::string();
  const auto json = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  const auto base = json.find("base_model_name_or_path");
  if (options.files != HubFiles::tokenizer && base != json.end() && base->is_string()) {
    DownloadOptions of_base = options;
    of_base.given_as += "=" + name_or_path + ": base_model_name_or_path";
    detail::download_one_missing(*base, of_base, before);
  }
}

} // namespace hasten
