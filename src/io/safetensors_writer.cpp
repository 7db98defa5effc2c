#include <algorithm>
#include <nlohmann/json.hpp>
#include <tuple>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/io/safetensors.h"
#include "safetensors_dtypes.h"

namespace hasten {

namespace detail {

constexpr const char* kWriterWhere = "io::write_safetensors";

struct TensorToWrite {
  std::string name;
  at::Tensor tensor;
  size_t rank; // index of its dtype in the table
};

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.is_alias_of(b) && a.data_ptr() == b.data_ptr() && a.scalar_type() == b.scalar_type() &&
         a.sizes() == b.sizes() && a.strides() == b.strides();
}

TensorToWrite checked_tensor(const std::string& name, const at::Tensor& tensor) {
  const std::string subject = "tensor \"" + name + "\"";
  if (name == "__metadata__") {
    throw InputError(kWriterWhere, subject + " has a reserved name");
  }
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_meta() ||
      tensor.is_quantized()) {
    throw InputError(kWriterWhere, subject + " is undefined, not dense, quantized or meta",
                     "a defined, dense tensor on a device");
  }
  const size_t rank = safetensors_dtype_rank(tensor.scalar_type());
  if (rank == kSafetensorsDtypes.size()) {
    throw InputError(kWriterWhere, subject + " has dtype=" + c10::toString(tensor.scalar_type()),
                     "a dtype of the safetensors format");
  }
  return {name, tensor.detach(), rank};
}

// Separates further names of the same memory, which go to `metadata`.
std::vector<TensorToWrite> tensors_to_write(const NamedTensors& tensors,
                                            std::map<std::string, std::string>& metadata) {
  std::vector<TensorToWrite> result;
  std::map<const void*, std::vector<size_t>> by_address;
  for (const auto& [name, tensor] : tensors) {
    TensorToWrite item = checked_tensor(name, tensor);
    if (tensor.numel() > 0) {
      auto& same_start = by_address[tensor.data_ptr()];
      const auto tied = std::find_if(same_start.begin(), same_start.end(), [&](size_t i) {
        return same_memory(result[i].tensor, item.tensor);
      });
      if (tied != same_start.end()) {
        if (!metadata.emplace(name, result[*tied].name).second) {
          throw InputError(kWriterWhere, "metadata key \"" + name + "\" is a tied tensor");
        }
        continue;
      }
      same_start.push_back(result.size());
    }
    result.push_back(std::move(item));
  }
  std::sort(result.begin(), result.end(), [](const auto& a, const auto& b) {
    return std::tie(b.rank, a.name) < std::tie(a.rank, b.name);
  });
  return result;
}

// Writes keys in the order and with the spacing of the reference writer.
std::string header_text(const std::vector<TensorToWrite>& tensors,
                        const std::map<std::string, std::string>& metadata) {
  std::string text = "{";
  const auto add = [&](const std::string& key, const nlohmann::ordered_json& value) {
    text += text.size() > 1 ? "," : "";
    text += nlohmann::json(key).dump() + ":" + value.dump();
  };
  try {
    if (!metadata.empty()) {
      add("__metadata__", nlohmann::ordered_json(metadata));
    }
    uint64_t at = 0;
    for (const auto& item : tensors) {
      const uint64_t end = at + static_cast<uint64_t>(item.tensor.nbytes());
      add(item.name, {{"dtype", kSafetensorsDtypes[item.rank].name},
                      {"shape", item.tensor.sizes().vec()},
                      {"data_offsets", {at, end}}});
      at = end;
    }
  } catch (const nlohmann::json::exception& error) {
    throw InputError(kWriterWhere,
                     std::string("a name or metadata value is not UTF-8: ") + error.what());
  }
  text += "}";
  text.append((8 - text.size() % 8) % 8, ' ');
  return text;
}

} // namespace detail

std::string_view safetensors_dtype_name(at::ScalarType dtype) {
  const size_t rank = detail::safetensors_dtype_rank(dtype);
  return rank < detail::kSafetensorsDtypes.size() ? detail::kSafetensorsDtypes[rank].name
                                                  : std::string_view{};
}

void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata) {
  auto all_metadata = metadata;
  const auto items = detail::tensors_to_write(tensors, all_metadata);
  const std::string header = detail::header_text(items, all_metadata);

  detail::FileWriter file("io::write_file", path);
  char length[8];
  for (int i = 0; i < 8; ++i) {
    length[i] = static_cast<char>(header.size() >> (8 * i));
  }
  file.write({length, 8});
  file.write(header);
  for (const auto& item : items) {
    if (item.tensor.numel() > 0) {
      const at::Tensor data = item.tensor.resolve_conj().resolve_neg().cpu().contiguous();
      file.write({static_cast<const char*>(data.data_ptr()), data.nbytes()});
    }
  }
  file.finish();
}

} // namespace hasten
