#include "hasten/io/sharded_safetensors.h"

#include <algorithm>
#include <ranges>
#include <regex>
#include <system_error>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/base/text.h"

namespace hasten {

namespace detail {

constexpr const char* kShardedWhere = "io::ShardedSafetensorsReader";

void throw_if_any(const std::filesystem::path& index, const std::vector<std::string>& problems) {
  if (!problems.empty()) {
    throw InputError(kShardedWhere, index.string() + ": " + joined(first_items(problems, 8), "; "),
                     "every tensor of weight_map in the file that it names, and no other tensor",
                     "download or save the whole folder again");
  }
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

// Files like "model-00001-of-00002.safetensors" next to "model.safetensors.index.json" that it does
// not name.
std::vector<std::string> extra_shards(const std::filesystem::path& index,
                                      const std::map<std::string, size_t>& known) {
  const std::string name = index.filename().string();
  constexpr std::string_view kEnding = ".safetensors.index.json";
  if (name.size() <= kEnding.size() || !name.ends_with(kEnding)) {
    return {};
  }
  const std::string base = name.substr(0, name.size() - kEnding.size());
  const std::regex numbers("-[0-9]+-of-[0-9]+\\.safetensors");
  std::vector<std::string> extra;
  std::error_code error;
  for (std::filesystem::directory_iterator
           entry(std::filesystem::absolute(index).parent_path(), error),
       end;
       !error && entry != end; entry.increment(error)) {
    const std::string file = entry->path().filename().string();
    if (file.starts_with(base) && std::regex_match(file.substr(base.size()), numbers) &&
        !known.contains(file)) {
      extra.push_back(file);
    }
  }
  std::ranges::sort(extra);
  return extra;
}

} // namespace detail

ShardedSafetensorsReader::ShardedSafetensorsReader(const std::filesystem::path& index)
    : path_(index) {
  const auto map = detail::read_weight_map(index);
  std::vector<std::string> problems;
  std::map<std::string, size_t> numbers; // index of each file's reader
  for (const auto& [name, file] : map) {
    numbers.emplace(file, 0);
  }
  for (auto& [file, number] : numbers) {
    const auto path = index.parent_path() / file;
    std::error_code error;
    number = shards_.size();
    if (!std::filesystem::exists(path, error)) {
      problems.push_back("the shard " + path.string() + ": No such file");
    } else {
      shards_.emplace_back(path);
    }
  }
  for (const std::string& file : detail::extra_shards(index, numbers)) {
    problems.push_back("the shard " + file + " is in the folder but not in the index");
  }
  detail::throw_if_any(index, problems); // the indices are only right if all files exist
  for (const auto& [name, file] : map) {
    const size_t number = numbers.at(file);
    if (!shards_[number].contains(name)) {
      problems.push_back("\"" + name + "\" is missing in " + file);
    }
    shard_.emplace(name, number);
  }
  for (const auto& [file, number] : numbers) {
    for (const std::string& name : shards_[number].names()) {
      const auto mapped = map.find(name);
      if (mapped == map.end()) {
        problems.push_back("\"" + name + "\" is in " + file + " but not in the index");
      } else if (mapped->second != file) {
        problems.push_back("\"" + name + "\" is in " + file + ", the index says " + mapped->second);
      }
    }
  }
  detail::throw_if_any(index, problems);
}

std::vector<std::string> ShardedSafetensorsReader::names() const {
  const auto names = std::views::keys(shard_);
  return {names.begin(), names.end()};
}

bool ShardedSafetensorsReader::contains(std::string_view name) const {
  return shard_.find(name) != shard_.end();
}

const SafetensorsReader& ShardedSafetensorsReader::shard_of(std::string_view name) const {
  const auto found = shard_.find(name);
  if (found == shard_.end()) {
    const std::string near = nearest_name(name, names());
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
