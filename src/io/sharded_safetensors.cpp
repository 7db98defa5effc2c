#include "hasten/io/sharded_safetensors.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"

namespace hasten {

namespace detail {

constexpr const char* kShardedWhere = "io::ShardedSafetensorsReader";
constexpr const char* kIndexEnding = ".safetensors.index.json";

// Collects all problems of an index for one message.
class IndexProblems {
 public:
  explicit IndexProblems(std::filesystem::path index) : index_(std::move(index)) {}

  void add(const std::string& problem) {
    constexpr int kShown = 8;
    if (++count_ <= kShown) {
      text_ += (text_.empty() ? "" : "; ") + problem;
    }
  }
  void throw_if_any() const {
    if (count_ > 0) {
      throw InputError(kShardedWhere,
                       index_.string() + ": " + text_ +
                           (count_ > 8 ? "; and " + std::to_string(count_ - 8) + " more" : ""),
                       "every tensor of weight_map in the file that it names, and no other tensor",
                       "download or save the whole folder again");
    }
  }

 private:
  std::filesystem::path index_;
  std::string text_{};
  int count_ = 0;
};

// Whether `file` is like "model-00001-of-00002.safetensors" for the base "model".
bool is_numbered_shard(const std::string& file, const std::string& base) {
  const std::string ending = ".safetensors";
  if (file.size() <= base.size() + ending.size() + 1 ||
      file.compare(0, base.size() + 1, base + "-") != 0 ||
      file.compare(file.size() - ending.size(), ending.size(), ending) != 0) {
    return false;
  }
  const std::string numbers =
      file.substr(base.size() + 1, file.size() - base.size() - 1 - ending.size());
  const size_t of = numbers.find("-of-");
  const auto digits = [](const std::string& text) {
    return !text.empty() && text.find_first_not_of("0123456789") == std::string::npos;
  };
  return of != std::string::npos && digits(numbers.substr(0, of)) && digits(numbers.substr(of + 4));
}

// The file of each tensor, by name.
std::map<std::string, std::string> read_weight_map(const std::filesystem::path& index) {
  const nlohmann::json json = read_json_file(kShardedWhere, index, {.unique_keys = true});
  const auto map = json.find("weight_map");
  if (!json.is_object() || map == json.end() || !map->is_object()) {
    throw InputError(kShardedWhere, index.string() + ": no \"weight_map\"",
                     "an object with the file of each tensor");
  }
  std::map<std::string, std::string> files;
  for (const auto& [name, file] : map->items()) {
    const std::string text = file.is_string() ? file.get<std::string>() : std::string();
    if (text.empty() || text.find('/') != std::string::npos) {
      throw InputError(kShardedWhere, index.string() + ": \"" + name + "\" is in " + file.dump(),
                       "the name of a file in the same folder");
    }
    files.emplace(name, text);
  }
  return files;
}

void find_extra_shards(const std::filesystem::path& index,
                       const std::map<std::string, size_t>& known, IndexProblems& problems) {
  std::string base = index.filename().string();
  const std::string ending = kIndexEnding;
  if (base.size() <= ending.size() ||
      base.compare(base.size() - ending.size(), ending.size(), ending) != 0) {
    return;
  }
  base.resize(base.size() - ending.size());
  std::vector<std::string> extra;
  std::error_code error;
  for (std::filesystem::directory_iterator
           entry(std::filesystem::absolute(index).parent_path(), error),
       end;
       !error && entry != end; entry.increment(error)) {
    const std::string file = entry->path().filename().string();
    if (is_numbered_shard(file, base) && !known.contains(file)) {
      extra.push_back(file);
    }
  }
  std::sort(extra.begin(), extra.end());
  for (const std::string& file : extra) {
    problems.add("the shard " + file + " is in the folder but not in the index");
  }
}

} // namespace detail

ShardedSafetensorsReader::ShardedSafetensorsReader(const std::filesystem::path& index)
    : path_(index) {
  const auto map = detail::read_weight_map(index);
  detail::IndexProblems problems(index);
  std::map<std::string, size_t> numbers; // index of each file's reader
  for (const auto& [name, file] : map) {
    numbers.emplace(file, 0);
  }
  for (auto& [file, number] : numbers) {
    const auto path = index.parent_path() / file;
    std::error_code error;
    number = shards_.size();
    if (!std::filesystem::exists(path, error)) {
      problems.add("the shard " + path.string() + ": No such file");
    } else {
      shards_.emplace_back(path);
    }
  }
  detail::find_extra_shards(index, numbers, problems);
  problems.throw_if_any(); // the indices are only right if all files exist
  for (const auto& [name, file] : map) {
    const size_t number = numbers.at(file);
    if (!shards_[number].contains(name)) {
      problems.add("\"" + name + "\" is missing in " + file);
    }
    shard_.emplace(name, number);
  }
  for (const auto& [file, number] : numbers) {
    for (const std::string& name : shards_[number].names()) {
      const auto mapped = map.find(name);
      if (mapped == map.end()) {
        problems.add("\"" + name + "\" is in " + file + " but not in the index");
      } else if (mapped->second != file) {
        problems.add("\"" + name + "\" is in " + file + ", the index says " + mapped->second);
      }
    }
  }
  problems.throw_if_any();
}

std::vector<std::string> ShardedSafetensorsReader::names() const {
  std::vector<std::string> names;
  for (const auto& [name, number] : shard_) {
    names.push_back(name);
  }
  return names;
}

bool ShardedSafetensorsReader::contains(std::string_view name) const {
  return shard_.find(name) != shard_.end();
}

const SafetensorsReader& ShardedSafetensorsReader::shard_of(std::string_view name) const {
  const auto found = shard_.find(name);
  if (found == shard_.end()) {
    const auto all = names();
    const std::string near = nearest_name(name, all.data(), all.data() + all.size());
    throw InputError(detail::kShardedWhere,
                     path_.string() + ": no tensor \"" + std::string(name) + "\"",
                     near.empty() ? std::string() : "\"" + near + "\" perhaps");
  }
  return shards_[found->second];
}

const SafetensorsEntry& ShardedSafetensorsReader::entry(std::string_view name) const {
  return shard_of(name).entry(name);
}

at::Tensor ShardedSafetensorsReader::tensor(std::string_view name) const {
  return shard_of(name).tensor(name);
}

NamedTensors ShardedSafetensorsReader::read_all() const {
  NamedTensors tensors;
  for (const auto& [name, number] : shard_) {
    tensors.emplace(name, shards_[number].read(name));
  }
  return tensors;
}

} // namespace hasten
