// The programs of tests/golden/exported, and what PyTorch computes with them.
#pragma once

#include <caffe2/serialize/inline_container.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>
#include <vector>

#include "exported_golden.h"
#include "hasten/core/named_tensors.h"
#include "hasten/exported/exported_module.h"
#include "hasten/io/safetensors.h"

namespace hasten::exported_test {

using at::Tensor;

inline std::string golden_path(const std::string& name) { return kGoldenFolder + name; }

/// What PyTorch has for a case of a program, like "encoder/0/".
struct GoldenCase {
  NamedTensors in{};
  NamedTensors out{};
  NamedTensors grad{};
  NamedTensors after{};
  NamedTensors eval{};
};

inline GoldenCase golden_case(const std::string& name) {
  static const NamedTensors all = SafetensorsReader(golden_path("golden.safetensors")).read_all();
  const auto below = [&](const std::string& kind) {
    return detail::tensors_below(all, name + "/" + kind + "/");
  };
  return {below("in"), below("out"), below("grad"), below("after"), below("eval")};
}

/// The sum of all outputs times sin(0, 1, 2, …), as in tools/golden/exported.py.
inline Tensor loss_of(const NamedTensors& outputs) {
  Tensor sum;
  for (const auto& [name, output] : outputs) {
    const Tensor part =
        (output * at::sin(at::arange(output.numel(), output.options())).view_as(output)).sum();
    sum = sum.defined() ? sum + part : part;
  }
  return sum;
}

/// The largest difference, relative to the largest element.
inline double relative_difference(const Tensor& a, const Tensor& b) {
  return ((a - b).abs().max() / b.abs().max().clamp_min(1e-12)).item<double>();
}

/// Copies the file `from` to `to`, each record as `change` leaves it.
inline void write_changed(
    const std::string& from, const std::string& to,
    const std::function<void(const std::string& record, std::string& bytes)>& change) {
  caffe2::serialize::PyTorchStreamReader reader(from);
  caffe2::serialize::PyTorchStreamWriter writer(to);
  for (const std::string& record : reader.getAllRecords()) {
    const auto [data, size] = reader.getRecord(record);
    std::string bytes(static_cast<const char*>(data.get()), size);
    change(record, bytes);
    if (!record.starts_with(".data/") && record != "byteorder") {
      writer.writeRecord(record, bytes.data(), bytes.size());
    }
  }
  writer.writeEndOfFile();
}

} // namespace hasten::exported_test
