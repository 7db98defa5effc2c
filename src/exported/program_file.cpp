#include "program_file.h"

#include <ATen/ops/empty.h>
#include <caffe2/serialize/inline_container.h>
#include <fcntl.h>
#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "graph_reader.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/json.h"

namespace hasten::detail {

using caffe2::serialize::PyTorchStreamReader;
using nlohmann::json;

[[noreturn]] static void refuse_file(const std::filesystem::path& path, const std::string& what,
                                     const std::string& expected = "a file of torch.export.save()",
                                     const std::string& fix = "export the module again") {
  throw InputError(kExportedLoad, path.string() + ": " + what, expected, fix);
}

template <typename T>
static T number_at(std::string_view bytes, size_t at) {
  T value = 0;
  if (at > bytes.size() || bytes.size() - at < sizeof value) {
    throw std::out_of_range("the zip's directory ends early");
  }
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

static std::string bytes_of(const FileDescriptor& file, size_t begin, size_t count) {
  std::string bytes(count, '\0');
  const ssize_t got = read_at(file.get(), bytes.data(), count, begin);
  bytes.resize(got < 0 ? 0 : static_cast<size_t>(got));
  return bytes;
}

/// The checksum of each record, which LibTorch's reader does not compare, from the zip's central directory
/// (PKWARE's APPNOTE 6.3, 4.3.12 to 4.3.16).
static std::map<std::string, uint32_t> read_checksums(const std::filesystem::path& path) {
  const FileDescriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  const auto size = static_cast<size_t>(std::filesystem::file_size(path));
  const size_t tail_begin = size - std::min<size_t>(size, 22 + 65'535);
  const std::string tail = bytes_of(file, tail_begin, size - tail_begin);
  const size_t end = tail.rfind("PK\5\6");
  auto length = static_cast<uint64_t>(number_at<uint32_t>(tail, end + 12));
  auto begin = static_cast<uint64_t>(number_at<uint32_t>(tail, end + 16));
  if (begin == 0xffffffff || length == 0xffffffff) { // of zip64
    const std::string large = bytes_of(file, number_at<uint64_t>(tail, end - 20 + 8), 56);
    length = number_at<uint64_t>(large, 40);
    begin = number_at<uint64_t>(large, 48);
  }
  const std::string directory = bytes_of(file, begin, std::min<uint64_t>(length, size));
  std::map<std::string, uint32_t> checksums;
  for (size_t at = 0; at < directory.size();) {
    const auto name_length = number_at<uint16_t>(directory, at + 28);
    const std::string name = directory.substr(at + 46, name_length);
    checksums[name.substr(name.find('/') + 1)] = number_at<uint32_t>(directory, at + 16);
    at += 46u + name_length + number_at<uint16_t>(directory, at + 30) +
          number_at<uint16_t>(directory, at + 32);
  }
  return checksums;
}

class Archive {
 public:
  explicit Archive(const std::filesystem::path& path)
      : path_(path), zip_(path.string()), checksums_(read_checksums(path)) {}

  const std::filesystem::path& path() const { return path_; }
  bool has(const std::string& record) { return zip_.hasRecord(record); }
  std::vector<std::string> records() { return zip_.getAllRecords(); }
  std::pair<at::DataPtr, size_t> bytes(const std::string& record) {
    if (zip_.getRecordSize(record) > std::filesystem::file_size(path_)) {
      refuse_file(path_, "its record " + record + " is compressed");
    }
    auto [data, size] = zip_.getRecord(record);
    const auto checksum = ::crc32_z(0, static_cast<const Bytef*>(data.get()), size);
    if (checksum != checksums_.at(record)) {
      refuse_file(path_, "its record " + record + " is damaged: its checksum is another",
                  "the bytes that were written", "copy the file again");
    }
    return {std::move(data), size};
  }
  std::string text(const std::string& record) {
    const auto [data, size] = bytes(record);
    return {static_cast<const char*>(data.get()), size};
  }
  json read_json(const std::string& record) {
    return parse_json(kExportedLoad, path_.string() + ": " + record, text(record));
  }

 private:
  const std::filesystem::path path_;
  PyTorchStreamReader zip_;
  const std::map<std::string, uint32_t> checksums_; // by record
};

static std::vector<int64_t> whole_numbers(const json& values) {
  std::vector<int64_t> numbers;
  for (const json& value : values) {
    numbers.push_back(value.at("as_int").get<int64_t>());
  }
  return numbers;
}

static WeightMeta meta_of(const Archive& archive, const std::string& name, const json& entry) {
  const json& meta = entry.at("tensor_meta");
  if (entry.at("use_pickle").get<bool>() || meta.is_null()) {
    refuse_file(archive.path(), "the weight " + name + " is pickled", "a plain tensor");
  }
  WeightMeta weight{.dtype = scalar_type_of(meta.at("dtype").get<int64_t>()),
                    .sizes = whole_numbers(meta.at("sizes")),
                    .place = entry.at("path_name").get<std::string>() + " " + meta.dump()};
  weight.parameter = entry.at("is_param").get<bool>();
  weight.requires_grad = weight.parameter && meta.at("requires_grad").get<bool>();
  if (std::ranges::any_of(weight.sizes, [](int64_t size) { return size < 0; }) ||
      meta.at("layout") != 7) {
    refuse_file(archive.path(), "the weight " + name + " is described by " + meta.dump());
  }
  return weight;
}

/// The tensor over the bytes of its record, which it keeps.
static at::Tensor read_tensor(Archive& archive, const std::string& name, const std::string& record,
                              const json& meta, const WeightMeta& weight) {
  auto [data, size] = archive.bytes(record);
  const std::vector<int64_t> strides = whole_numbers(meta.at("strides"));
  const auto offset = meta.at("storage_offset").at("as_int").get<int64_t>();
  auto last = static_cast<double>(offset); // does not overflow
  bool fits = offset >= 0 && strides.size() == weight.sizes.size();
  for (size_t i = 0; fits && i < strides.size(); ++i) {
    fits = strides[i] >= 0 && strides[i] <= static_cast<int64_t>(size) &&
           weight.sizes[i] <= static_cast<int64_t>(size);
    last += static_cast<double>(strides[i]) *
            static_cast<double>(std::max<int64_t>(0, weight.sizes[i] - 1));
  }
  const bool empty = std::ranges::find(weight.sizes, 0) != weight.sizes.end();
  const auto bytes =
      (empty ? last : last + 1) * static_cast<double>(c10::elementSize(weight.dtype));
  if (!fits || bytes > static_cast<double>(size)) {
    refuse_file(archive.path(), "the values of " + name + " take " + std::to_string(size) +
                                    " bytes, which is less than its shape needs");
  }
  const at::Storage storage(c10::Storage::use_byte_size_t(), size, std::move(data),
                            /*allocator=*/nullptr, /*resizable=*/false);
  return at::empty({0}, at::TensorOptions(weight.dtype))
      .set_(storage, offset, weight.sizes, strides);
}

static json config_of(Archive& archive, const std::string& record) {
  return archive.has(record) ? archive.read_json(record).at("config") : json::object();
}

static NamedTensors read_constants(Archive& archive, const std::string& program) {
  const std::string folder = "data/constants/";
  NamedTensors constants;
  const json config = config_of(archive, folder + program + "_constants_config.json");
  for (const auto& [name, entry] : config.items()) {
    const WeightMeta weight = meta_of(archive, name, entry);
    constants[name] = read_tensor(archive, name, folder + entry.at("path_name").get<std::string>(),
                                  entry.at("tensor_meta"), weight);
  }
  return constants;
}

static void read_weights(Archive& archive, bool read_values, ProgramFile& file) {
  const std::string folder = "data/weights/";
  std::map<std::string, at::Tensor> by_place;
  // package_pt2() may store the second program's weights again. One module has them once.
  const json config = config_of(archive, folder + file.names[0] + "_weights_config.json");
  for (const auto& [name, entry] : config.items()) {
    const WeightMeta weight = meta_of(archive, name, entry);
    const std::string record = folder + entry.at("path_name").get<std::string>();
    if (read_values) {
      at::Tensor& value = by_place[weight.place];
      if (!value.defined()) {
        value = read_tensor(archive, name, record, entry.at("tensor_meta"), weight);
      }
      file.values[name] = value;
    }
    file.weights.emplace(name, weight);
  }
}

static void check_version(const std::filesystem::path& path, const json& program) {
  const json& version = program.at("schema_version");
  if (version.at("major") != 8) {
    refuse_file(
        path,
        "its format has version " + version.at("major").dump() + "." + version.at("minor").dump(),
        "version 8", "export it with the PyTorch that this LibTorch belongs to");
  }
}

static ProgramFile read_archive(const std::filesystem::path& path, bool read_values) {
  Archive archive(path);
  ProgramFile file{.path = path};
  for (const char* name : {"model", "train", "eval"}) {
    const std::string record = std::string("models/") + name + ".json";
    if (archive.has(record)) {
      file.names.emplace_back(name);
      file.programs.push_back(archive.read_json(record));
      check_version(path, file.programs.back());
      file.constants.push_back(read_constants(archive, name));
    }
  }
  if (file.names.empty()) {
    refuse_file(path, "it has no program",
                "models/model.json, or models/train.json and models/eval.json");
  }
  read_weights(archive, read_values, file);
  return file;
}

ProgramFile read_program_file(const std::filesystem::path& path, bool read_values) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    refuse_file(path, "is no file", "a file of torch.export.save()", "check the path");
  }
  try {
    return read_archive(path, read_values);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& problem) { // of the zip, or JSON in another form
    const std::string text = problem.what();
    refuse_file(path, "it is damaged, or not a file of torch.export (" +
                          text.substr(0, text.find('\n')) + ")");
  }
}

void write_without_weights(const std::filesystem::path& from, const std::filesystem::path& to) {
  try {
    Archive archive(from);
    caffe2::serialize::PyTorchStreamWriter writer(to.string());
    for (const std::string& record : archive.records()) {
      const bool values = record.starts_with("data/weights/") && !record.ends_with(".json");
      const bool own = record.starts_with(".data/") || record == "version" || record == "byteorder";
      if (!own && !record.starts_with("data/sample_inputs/")) {
        const std::string bytes = values ? "" : archive.text(record);
        writer.writeRecord(record, bytes.data(), bytes.size());
      }
    }
    writer.writeEndOfFile();
  } catch (const Error&) {
    throw;
  } catch (const std::exception& problem) {
    const std::string text = problem.what();
    throw Error("exported::save", to.string() + ": " + text.substr(0, text.find('\n')));
  }
}

} // namespace hasten::detail
