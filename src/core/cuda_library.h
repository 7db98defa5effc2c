// Loads LibTorch's libraries for CUDA where a GPU is asked for. hasten links the CPU's alone, so
// that a run without a GPU neither maps nor starts CUDA.
#pragma once

#include <optional>
#include <string>

namespace hasten::detail {

/// What this process has found of CUDA.
struct CudaFacts {
  bool of_torch = false; // LibTorch is a build with CUDA: libtorch_cuda.so lies beside it
  bool of_hasten = false; // libhasten_nccl.so lies beside hasten
  bool driver = false; // the device file of a GPU, or the driver's library, is there
  std::string not_loaded{}; // why LibTorch's library was not loaded; empty if it was
  bool seen = false; // LibTorch has taken notice of the library
  std::optional<std::string> visible{}; // CUDA_VISIBLE_DEVICES
  int devices = 0;
  std::string said{}; // by LibTorch, where it has no device
};

/// Looks once. Loads LibTorch's library for CUDA if there is a driver. Must come before LibTorch
/// itself looks (at::hasCUDA), as its random generators and accelerators do.
const CudaFacts& cuda_facts();

/// What is wrong, and what helps.
struct Advice {
  std::string what{};
  std::string fix{};
};
/// Why there is no GPU.
Advice why_no_gpu(const CudaFacts& facts);

/// Opens a shared library that lies in the folder of the program or library that has `address`, and
/// elsewhere if it is not there. Null, and why in `error`, if it cannot be loaded.
void* open_library_beside(const void* address, const std::string& name, std::string& error);

} // namespace hasten::detail
