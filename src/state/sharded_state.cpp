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

nlohmann::json rows_by_rank(const HeldRows& held, int ranks) {
  const int64_t rows = held.sizes.empty() ? 1 : held.sizes[0];
  const int64_t most = (rows + ranks - 1) / ranks;
  auto list = nlohmann::json::array();
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t first = std::min(rank * most, rows);
    list.push_back({rank, first, std::min(first + most, rows) - first});
  }
  return list;
}

void split_shards(StateToSave& parts, const NamedTensors& models, const HeldRowsByName& held,
                  int ranks, bool writes) {
  if (held.empty()) {
    return;
  }
  auto& noted = parts.shared_values["sharded"];
  noted = nlohmann::json::object();
  const auto note = [&](const std::string& name, const HeldRows& rows, const at::Tensor& tensor) {
    noted[name] = {{"shape", rows.sizes},
                   {"dtype", std::string(safetensors_dtype_name(tensor.scalar_type()))},
                   {"rows", rows_by_rank(rows, ranks)}};
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
  explicit RankFiles(const std::filesystem::path& folder) : folder_(folder) {}

  // Rows [from, from + count) of what `rank` saved of a tensor. If `absmax` is null, codes become
  // numbers.
  at::Tensor rows(int rank, const std::string& name, at::IntArrayRef sizes, int64_t from,
                  int64_t count, at::Tensor* absmax) {
    auto& reader = readers_[rank];
    const auto path = folder_ / rank_file_name(rank);
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
  std::filesystem::path folder_;
  std::map<int, std::unique_ptr<SafetensorsReader>> readers_{};
};

// The rows of the whole tensor that `held` describes, from the files. Codes stay codes, with their
// `absmax`, if one rank saved exactly these rows.
at::Tensor assemble(RankFiles& files, const std::string& name, const nlohmann::json& saved,
                    const HeldRows& held, at::Tensor* absmax) {
  std::vector<int64_t> sizes = held_sizes(held);
  std::vector<at::Tensor> pieces;
  int64_t next = held.first;
  const int64_t end = held.first + held.count;
  for (const auto& entry : saved.at("rows")) {
    const auto first = entry.at(1).get<int64_t>();
    const auto count = entry.at(2).get<int64_t>();
    const int64_t from = std::max(next, first);
    const int64_t until = std::min(end, first + count);
    if (from >= until && !(held.count == 0 && pieces.empty())) {
      continue;
    }
    sizes[0] = count;
    pieces.push_back(files.rows(entry.at(0).get<int>(), name, sizes,
                                held.count == 0 ? 0 : from - first,
                                held.count == 0 ? 0 : until - from,
                                first == held.first && count == held.count ? absmax : nullptr));
    next = std::max(next, until);
  }
  if (next < end) {
    throw InputError("accelerator::load_state",
                     "no rank saved row " + std::to_string(next) + " of \"" + name + "\"",
                     "all rows up to " + std::to_string(end));
  }
  return pieces.size() == 1 ? pieces[0] : at::cat(pieces);
}

// The entries of state.json, by name.
nlohmann::json sharded_tensors(const nlohmann::json& state) {
  const auto found = state.find("sharded");
  return found == state.end() ? nlohmann::json::object() : *found;
}

bool join_shards(StateToLoad& load, const HeldRowsByName& held) {
  const nlohmann::json saved = sharded_tensors(load.shared);
  RankFiles files(load.folder);
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
    HeldRows rows = of != held.end() ? of->second : HeldRows{};
    if (of == held.end()) {
      rows.sizes = sizes;
      rows.count = sizes.empty() ? 1 : sizes[0];
    } else if (sizes != rows.sizes) {
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

void consolidate_state(const std::filesystem::path& folder, const std::filesystem::path& file,
                       int64_t model) {
  verify_manifest(folder);
  const nlohmann::json state = detail::read_state_json(folder);
  if (model < 0 || model >= std::ssize(state.at("models"))) {
    throw InputError(
        "accelerator::consolidate_state", "model=" + std::to_string(model),
        "a number below the state's " + std::to_string(state.at("models").size()) + " models");
  }
  const SafetensorsReader own(folder / detail::model_file_name(static_cast<size_t>(model)));
  const std::string prefix = "model." + std::to_string(model) + ".";
  NamedTensors tensors;
  for (const std::string& name : own.names()) {
    tensors.emplace(name, own.tensor(name));
  }
  detail::RankFiles files(folder);
  const nlohmann::json sharded = detail::sharded_tensors(state);
  for (const auto& [name, entry] : sharded.items()) {
    if (!name.starts_with(prefix)) {
      continue;
    }
    detail::HeldRows all;
    all.sizes = entry.at("shape").get<std::vector<int64_t>>();
    all.count = all.sizes.empty() ? 1 : all.sizes[0];
    tensors[name.substr(prefix.size())] =
        detail::assemble(files, name, entry, all, nullptr).reshape(all.sizes);
  }
  write_safetensors(file, tensors);
}

} // namespace hasten
