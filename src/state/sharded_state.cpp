// Note [Sharded state]
// If ranks hold shards of a parameter, each writes its shard, and the moments' shards, into its own
// file as "sharded.<name>". state.json has the whole tensor's shape and dtype under "sharded", and
// which rank has which rows. A load, on any number of ranks and with sharded or unsharded models,
// takes the rows that it needs from the files that have them. Nothing is sent and no rank holds a
// whole model. A moment of 8 bits has one number for each block of a shard. These are in the rank's
// file as "sharded.<name of the moment>_absmax.<parameter>", without an entry in state.json.
#include "state_contents.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <memory>

#include "core/blockwise_8bit.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"
#include "hasten/io/commit.h"
#include "hasten/io/safetensors.h"

namespace hasten {
namespace detail {

constexpr const char* kShardPrefix = "sharded.";

at::Tensor rows_of_whole(const at::Tensor& whole, const HeldRows& held) {
  return whole.dim() == 0 ? whole.reshape({1}).narrow(0, held.first, held.count)
                          : whole.narrow(0, held.first, held.count);
}

// The parameter that a tensor belongs to: "model.0.x" for "optimizer.0.exp_avg.model.0.x".
HeldRowsByName::const_iterator parameter_of(const std::string& tensor, const HeldRowsByName& held) {
  for (size_t at = tensor.find("model."); at != std::string::npos;
       at = tensor.find("model.", at + 1)) {
    const auto found = held.find(tensor.substr(at));
    if (found != held.end() && (at == 0 || tensor[at - 1] == '.')) {
      return found;
    }
  }
  return held.end();
}

// The name of a moment's block maxima: "optimizer.0.exp_avg_absmax.model.0.x".
std::string absmax_name(const std::string& moment) {
  return std::string(moment).insert(std::min(moment.find(".model."), moment.size()), "_absmax");
}

at::Tensor dequantized(const std::string& name, const at::Tensor& codes, const at::Tensor& absmax) {
  return dequantize_blockwise({codes}, {absmax}, name.find(".exp_avg_sq.") == name.npos)[0];
}

// The shape as rows; for a 0-d parameter [1] or [0].
std::vector<int64_t> held_sizes(const HeldRows& held) {
  std::vector<int64_t> sizes = held.sizes.empty() ? std::vector<int64_t>{1} : held.sizes;
  sizes[0] = held.count;
  return sizes;
}

// [rank, first, count] of each rank that writes a shard; see split_shards().
nlohmann::json rows_by_rank(const HeldRows& held, int ranks, const std::vector<int>& writers) {
  const int64_t rows = held.sizes.empty() ? 1 : held.sizes[0];
  const int64_t most = (rows + ranks - 1) / ranks;
  auto list = nlohmann::json::array();
  for (const int rank : writers) {
    const int64_t first = std::min(rank % ranks * most, rows);
    list.push_back({rank, first, std::min(first + most, rows) - first});
  }
  return list;
}

void split_shards(StateToSave& parts, const NamedTensors& models, const HeldRowsByName& held,
                  int ranks, int rank, const std::vector<int>& folder) {
  if (held.empty()) {
    return;
  }
  std::vector<int> writers;
  std::set<std::pair<int, int>> written; // folder, shard
  for (int r = 0; r < std::ssize(folder); ++r) {
    if (written.emplace(folder[static_cast<size_t>(r)], r % ranks).second) {
      writers.push_back(r);
    }
  }
  const bool writes = std::ranges::find(writers, rank) != writers.end();
  auto& noted = parts.shared_values["sharded"];
  noted = nlohmann::json::object();
  const auto note = [&](const std::string& name, const HeldRows& rows, const at::Tensor& tensor) {
    noted[name] = {{"shape", rows.sizes},
                   {"dtype", std::string(safetensors_dtype_name(tensor.scalar_type()))},
                   {"rows", rows_by_rank(rows, ranks, writers)}};
    if (writes) {
      parts.own.emplace(kShardPrefix + name, tensor);
    }
  };
  for (const auto& [name, shard] : models) {
    note(name, held.at(name), shard);
  }
  for (auto it = parts.shared.begin(); it != parts.shared.end();) {
    const auto of = parameter_of(it->first, held);
    const bool absmax = it->first.substr(0, it->first.find(".model.")).ends_with("_absmax");
    if (of == held.end() || (!absmax && it->second.sizes() != held_sizes(of->second))) {
      ++it;
      continue;
    }
    if (!absmax) {
      note(it->first, of->second, it->second);
    } else if (writes) {
      parts.own.emplace(kShardPrefix + it->first, it->second);
    }
    it = parts.shared.erase(it);
  }
}

// The files of the ranks that saved, opened at their first use.
class RankFiles {
 public:
  explicit RankFiles(std::vector<std::filesystem::path> folders) : folders_(std::move(folders)) {}

  // In the first folder that has it.
  std::filesystem::path path(int rank) const {
    std::error_code error;
    for (const auto& folder : folders_) {
      if (std::filesystem::exists(folder / rank_file_name(rank), error)) {
        return folder / rank_file_name(rank);
      }
    }
    return folders_[0] / rank_file_name(rank);
  }
  int far(int rank) const {
    std::error_code error;
    return std::filesystem::exists(path(rank), error) ? 0 : 1;
  }

  // Rows [from, from + count) of what `rank` saved of a tensor. If `absmax` is null, codes become
  // numbers.
  at::Tensor rows(int rank, const std::string& name, at::IntArrayRef sizes, int64_t from,
                  int64_t count, at::Tensor* absmax) {
    auto& reader = readers_[rank];
    const auto path = this->path(rank);
    if (!reader) {
      reader = std::make_unique<SafetensorsReader>(path);
    }
    if (!reader->contains(kShardPrefix + name)) {
      refuse_state(path, "\"" + name + "\" is missing", "the rows that state.json lists");
    }
    at::Tensor shard = reader->tensor(kShardPrefix + name);
    if (shard.sizes() != sizes) {
      refuse_state(path, "\"" + name + "\" has shape " + c10::str(shard.sizes()),
                   "the rows that state.json lists, " + c10::str(sizes));
    }
    const std::string blocks = kShardPrefix + absmax_name(name);
    if (shard.scalar_type() == at::kByte && reader->contains(blocks)) {
      if (absmax != nullptr) {
        *absmax = reader->tensor(blocks);
      } else {
        shard = dequantized(name, shard, reader->tensor(blocks));
        dequantized_any = true;
      }
    }
    return shard.narrow(0, from, count);
  }
  bool dequantized_any = false;

 private:
  std::vector<std::filesystem::path> folders_;
  std::map<int, std::unique_ptr<SafetensorsReader>> readers_{};
};

// Consecutive rows of a tensor, as one rank saved them.
struct SavedRows {
  int rank = 0;
  int64_t first = 0;
  int64_t count = 0;
  int64_t from = 0; // what is read, counted from `first`
  int64_t rows = 0;
};

// What to read for the rows that `held` describes, in their order; see rank_files_read().
std::vector<SavedRows> rows_to_read(const std::string& name, const nlohmann::json& saved,
                                    const HeldRows& held, const std::function<int(int)>& far) {
  std::vector<SavedRows> all;
  for (const auto& entry : saved.at("rows")) {
    all.push_back({entry.at(0).get<int>(), entry.at(1).get<int64_t>(), entry.at(2).get<int64_t>()});
  }
  std::ranges::stable_sort(all, {}, [&](const SavedRows& rows) {
    return std::pair(held.count == 0 ? 0 : rows.first, far(rows.rank));
  });
  std::vector<SavedRows> read;
  int64_t next = held.first;
  const int64_t end = held.first + held.count;
  for (SavedRows& rows : all) {
    const int64_t from = std::max(next, rows.first);
    const int64_t until = std::min(end, rows.first + rows.count);
    if (from >= until && !(held.count == 0 && read.empty())) {
      continue;
    }
    rows.from = held.count == 0 ? 0 : from - rows.first;
    rows.rows = held.count == 0 ? 0 : until - from;
    read.push_back(rows);
    next = std::max(next, until);
  }
  if (next < end) {
    throw InputError("accelerator::load_state",
                     "no rank saved row " + std::to_string(next) + " of \"" + name + "\"",
                     "all rows up to " + std::to_string(end));
  }
  return read;
}

// The rows of the whole tensor that `held` describes, from the files. Codes stay codes, with their
// `absmax`, if one rank saved exactly these rows.
at::Tensor assemble(RankFiles& files, const std::string& name, const nlohmann::json& saved,
                    const HeldRows& held, at::Tensor* absmax) {
  std::vector<int64_t> sizes = held_sizes(held);
  std::vector<at::Tensor> pieces;
  for (const SavedRows& rows :
       rows_to_read(name, saved, held, [&](int rank) { return files.far(rank); })) {
    sizes[0] = rows.count;
    pieces.push_back(
        files.rows(rows.rank, name, sizes, rows.from, rows.rows,
                   rows.first == held.first && rows.count == held.count ? absmax : nullptr));
  }
  return pieces.size() == 1 ? pieces[0] : at::cat(pieces);
}

HeldRows whole_rows(const nlohmann::json& saved) {
  HeldRows all;
  all.sizes = saved.at("shape").get<std::vector<int64_t>>();
  all.count = all.sizes.empty() ? 1 : all.sizes[0];
  return all;
}

// The entries of state.json, by name.
nlohmann::json sharded_tensors(const nlohmann::json& state) {
  const auto found = state.find("sharded");
  return found == state.end() ? nlohmann::json::object() : *found;
}

std::set<int> rank_files_read(const nlohmann::json& state, int rank, int world_size,
                              const HeldRowsByName& held, const std::function<int(int)>& far) {
  std::set<int> ranks;
  const int saved_by = state.at("world_size").get<int>();
  int own = saved_by == world_size ? rank : 0;
  for (int other = 1; saved_by != world_size && other < saved_by; ++other) {
    own = far(other) < far(own) ? other : own; // see read_state_files()
  }
  ranks.insert(own);
  const nlohmann::json sharded = sharded_tensors(state);
  for (const auto& [name, entry] : sharded.items()) {
    const auto of = parameter_of(name, held);
    const HeldRows rows = of == held.end() ? whole_rows(entry) : of->second;
    for (const SavedRows& read : rows_to_read(name, entry, rows, far)) {
      ranks.insert(read.rank);
    }
  }
  return ranks;
}

bool join_shards(StateToLoad& load, const HeldRowsByName& held) {
  const nlohmann::json saved = sharded_tensors(load.shared);
  RankFiles files({load.folder});
  for (auto& [name, tensor] : load.shared_tensors) { // saved whole
    const auto of = parameter_of(name, held);
    if (of != held.end() && tensor.sizes() == of->second.sizes) {
      const auto absmax = load.shared_tensors.find(absmax_name(name));
      if (tensor.scalar_type() == at::kByte && absmax != load.shared_tensors.end() &&
          rows_of_whole(tensor, of->second).numel() != tensor.numel()) {
        tensor = dequantized(name, tensor, absmax->second);
        files.dequantized_any = true;
      }
      tensor = rows_of_whole(tensor, of->second);
    }
  }
  for (const auto& [name, entry] : saved.items()) {
    const auto sizes = entry.at("shape").get<std::vector<int64_t>>();
    const auto of = parameter_of(name, held);
    const HeldRows rows = of != held.end() ? of->second : whole_rows(entry);
    if (sizes != rows.sizes) {
      refuse_state(load.state_file(),
                   "\"" + name + "\" has shape " + c10::str(at::IntArrayRef(sizes)),
                   "the model's " + c10::str(at::IntArrayRef(rows.sizes)));
    }
    at::Tensor absmax;
    at::Tensor tensor = assemble(files, name, entry, rows, &absmax);
    if (absmax.defined()) {
      load.shared_tensors[absmax_name(name)] = absmax;
    }
    load.shared_tensors[name] = of == held.end() && sizes.empty() ? tensor.reshape({}) : tensor;
  }
  return files.dequantized_any;
}

nlohmann::json read_state_json(const std::filesystem::path& folder) {
  const auto path = folder / kStateFile;
  std::error_code error;
  if (!std::filesystem::exists(path, error)) {
    refuse_state(path, "the file is missing", "a folder that save_state() wrote");
  }
  try {
    nlohmann::json state = read_json_file("accelerator::load_state", path);
    state.at("models");
    state.at("world_size");
    return state;
  } catch (const nlohmann::json::exception& failure) {
    refuse_state(path, failure.what(), "a file of a state");
  }
}

} // namespace detail

nlohmann::json describe_state(const std::filesystem::path& folder) {
  const nlohmann::json state = detail::read_state_json(folder);
  const nlohmann::json sharded = detail::sharded_tensors(state);
  auto tensors = nlohmann::json::array();
  const auto add_file = [&](const std::filesystem::path& path, const std::string& prefix) {
    const SafetensorsReader reader(path);
    for (const std::string& name : reader.names()) {
      const SafetensorsEntry& entry = reader.entry(name);
      if (!sharded.contains(prefix + name)) {
        tensors.push_back({{"name", prefix + name},
                           {"dtype", std::string(safetensors_dtype_name(entry.dtype))},
                           {"shape", entry.shape},
                           {"rows", nullptr}});
      }
    }
  };
  for (size_t i = 0; i < state.at("models").size(); ++i) {
    add_file(folder / detail::model_file_name(i), "model." + std::to_string(i) + ".");
  }
  add_file(folder / kStateTensorsFile, "");
  for (const auto& [name, entry] : sharded.items()) {
    tensors.push_back({{"name", name},
                       {"dtype", entry.at("dtype")},
                       {"shape", entry.at("shape")},
                       {"rows", entry.at("rows")}});
  }
  auto optimizers = nlohmann::json::array();
  for (const auto& optimizer : state.at("optimizers")) {
    optimizers.push_back(optimizer.at("values").value("kind", "its own"));
  }
  return {{"world_size", state.at("world_size")},
          {"strategy", state.value("strategy", "ddp")},
          {"windows_completed", state.at("windows_completed")},
          {"optimizers", std::move(optimizers)},
          {"tensors", std::move(tensors)}};
}

void consolidate_state(const std::vector<std::filesystem::path>& folders,
                       const std::filesystem::path& file, int64_t model) {
  constexpr const char* kWhere = "accelerator::consolidate_state";
  if (folders.empty()) {
    throw InputError(kWhere, "no folder", "a saved state");
  }
  const nlohmann::json state = detail::read_state_json(folders[0]);
  for (const auto& folder : folders) {
    verify_manifest(folder);
    if (detail::read_state_json(folder) != state) {
      throw InputError(kWhere,
                       folder.string() + " and " + folders[0].string() + " are of different saves",
                       "the folders of one save");
    }
  }
  if (model < 0 || model >= std::ssize(state.at("models"))) {
    throw InputError(
        kWhere, "model=" + std::to_string(model),
        "a number below the state's " + std::to_string(state.at("models").size()) + " models");
  }
  const SafetensorsReader own(folders[0] / detail::model_file_name(static_cast<size_t>(model)));
  const std::string prefix = "model." + std::to_string(model) + ".";
  NamedTensors tensors;
  for (const std::string& name : own.names()) {
    tensors.emplace(name, own.tensor(name));
  }
  detail::RankFiles files(folders);
  const nlohmann::json sharded = detail::sharded_tensors(state);
  for (const auto& [name, entry] : sharded.items()) {
    if (name.starts_with(prefix)) {
      const detail::HeldRows all = detail::whole_rows(entry);
      tensors[name.substr(prefix.size())] =
          detail::assemble(files, name, entry, all, nullptr).reshape(all.sizes);
    }
  }
  write_safetensors(file, tensors);
}

} // namespace hasten
