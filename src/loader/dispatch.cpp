#include "dispatch.h"

#include <ATen/ATen.h>

#include <cstring>
#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "hasten/comm/agree.h"
#include "hasten/comm/communicator.h"
#include "hasten/comm/few_sizes.h"

namespace hasten::detail {

constexpr const char* kDispatch = "batches of rank 0";
constexpr int64_t kTensorAlignment = 64; // any dtype may start there
constexpr int64_t kHeaderStart = sizeof(int64_t);

void describe_failure(DispatchedBatch& sent, const std::exception_ptr& error) {
  sent = {};
  sent.last = true;
  sent.failure = std::make_shared<const nlohmann::json>(failure_of(error));
}

int64_t aligned_bytes(int64_t bytes) {
  return (bytes + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
}

// One buffer: the header's length (int64), the header, aligned, then the tensors at the offsets
// that the header names.
at::Tensor encode_batch(const DispatchedBatch& sent) {
  nlohmann::json header = {{"last", sent.last},
                           {"position", sent.position},
                           {"failure", sent.failure ? *sent.failure : nlohmann::json()}};
  header["parts"] = nlohmann::json::array();
  std::vector<at::Tensor> data;
  int64_t offset = 0;
  for (size_t rank = 0; rank < sent.parts.size(); ++rank) {
    const PackedBatch& part = sent.parts[rank];
    auto tensors = nlohmann::json::array();
    for (const at::Tensor& tensor : part.tensors) {
      if (rank == 0 || !tensor.defined()) {
        tensors.push_back(nullptr); // rank 0 has its own
        continue;
      }
      data.push_back(tensor.detach().cpu().contiguous());
      tensors.push_back({static_cast<int>(tensor.scalar_type()), tensor.sizes().vec(), offset});
      offset += aligned_bytes(static_cast<int64_t>(tensor.nbytes()));
    }
    header["parts"].push_back({{"tensors", std::move(tensors)},
                               {"names", part.names},
                               {"indices", part.indices},
                               {"rows", part.rows},
                               {"lists", part.lists_rows},
                               {"repeated", sent.repeated[rank]}});
  }
  const std::vector<uint8_t> text = nlohmann::json::to_cbor(header);
  const auto header_bytes = static_cast<int64_t>(text.size());
  const int64_t start = aligned_bytes(kHeaderStart + header_bytes);
  at::Tensor buffer = at::empty({few_sizes(start + offset)}, at::kByte);
  auto* to = buffer.mutable_data_ptr<uint8_t>();
  std::memcpy(to, &header_bytes, sizeof header_bytes);
  std::memcpy(to + kHeaderStart, text.data(), text.size());
  to += start;
  for (const at::Tensor& tensor : data) {
    if (tensor.nbytes() > 0) {
      std::memcpy(to, tensor.const_data_ptr(), tensor.nbytes());
    }
    to += aligned_bytes(static_cast<int64_t>(tensor.nbytes()));
  }
  return buffer;
}

DispatchedBatch decode_batch(const at::Tensor& buffer, size_t rank, size_t world) {
  const auto* bytes = buffer.const_data_ptr<uint8_t>();
  int64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes, sizeof header_bytes);
  const auto* text = bytes + kHeaderStart;
  const auto* data = bytes + aligned_bytes(kHeaderStart + header_bytes);
  const auto header = nlohmann::json::from_cbor(text, text + header_bytes);
  DispatchedBatch sent;
  sent.last = header["last"].get<bool>();
  sent.position = header["position"].get<int64_t>();
  if (const auto& failure = header["failure"]; !failure.is_null()) {
    sent.failure = std::make_shared<const nlohmann::json>(failure);
  }
  if (header["parts"].empty()) {
    return sent;
  }
  const auto add = [&](const nlohmann::json& part) {
    PackedBatch batch;
    batch.names = part["names"].get<std::vector<std::string>>();
    batch.indices = part["indices"].get<std::vector<int64_t>>();
    batch.rows = part["rows"].get<int64_t>();
    batch.lists_rows = part["lists"].get<bool>();
    for (const auto& form : part["tensors"]) {
      if (form.is_null()) {
        batch.tensors.emplace_back();
        continue;
      }
      at::Tensor tensor = at::empty(form[1].get<std::vector<int64_t>>(),
                                    static_cast<at::ScalarType>(form[0].get<int>()));
      if (tensor.nbytes() > 0) { // a copy: the buffer holds all ranks' samples
        std::memcpy(tensor.mutable_data_ptr(), data + form[2].get<int64_t>(), tensor.nbytes());
      }
      batch.tensors.push_back(std::move(tensor));
    }
    sent.parts.push_back(std::move(batch));
    sent.repeated.push_back(part["repeated"].get<int64_t>());
  };
  add(header["parts"].at(rank));
  if (header["parts"].size() > world) {
    add(header["parts"].at(world));
  }
  return sent;
}

DispatchedBatch dispatch(Communicator& communicator, DispatchedBatch* sent) {
  at::Tensor buffer;
  std::exception_ptr error;
  if (sent != nullptr) {
    try {
      buffer = encode_batch(*sent);
    } catch (...) { // the others wait for a message
      error = std::current_exception();
      describe_failure(*sent, error);
      buffer = encode_batch(*sent);
    }
  }
  buffer = broadcast_bytes(communicator, std::move(buffer), 0, kDispatch);
  if (error) {
    std::rethrow_exception(error);
  }
  if (sent != nullptr) {
    return {};
  }
  DispatchedBatch received = decode_batch(buffer, static_cast<size_t>(communicator.rank()),
                                          static_cast<size_t>(communicator.world_size()));
  if (received.failure) {
    say_once_per_host(communicator, 0);
    throw_failure("accelerator::PreparedLoader", "rank 0 could not read the next batch",
                  *received.failure);
  }
  return received;
}

} // namespace hasten::detail
