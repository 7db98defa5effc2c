#include "core/cuda_library.h"

#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

namespace hasten::detail {

static bool has_driver() {
  for (const char* file : {"/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg"}) {
    if (::access(file, F_OK) == 0) {
      return true;
    }
  }
  void* const library = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (library != nullptr) {
    ::dlclose(library);
  }
  return library != nullptr;
}

static std::string path_beside(const void* address, const std::string& name) {
  Dl_info own{};
  return ::dladdr(address, &own) != 0 && own.dli_fname != nullptr
             ? std::filesystem::path(own.dli_fname).replace_filename(name).string()
             : name;
}

void* open_library_beside(const void* address, const std::string& name, std::string& error) {
  for (const std::string& path : {path_beside(address, name), name}) {
    if (void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL)) {
      return library;
    }
    const char* text = ::dlerror();
    if (error.empty() || std::filesystem::exists(path)) {
      error = text != nullptr ? text : "unknown error";
    }
  }
  return nullptr;
}

static CudaFacts look_for_cuda() {
  CudaFacts facts;
  if (const char* visible = std::getenv("CUDA_VISIBLE_DEVICES")) {
    facts.visible = visible;
  }
  facts.driver = has_driver();
  const void* const of_torch = reinterpret_cast<const void*>(&at::globalContext);
  const void* const own = reinterpret_cast<const void*>(&look_for_cuda);
  facts.of_torch = std::filesystem::exists(path_beside(of_torch, "libtorch_cuda.so"));
  facts.of_hasten = std::filesystem::exists(path_beside(own, "libhasten_nccl.so"));
  if (!facts.driver) {
    return facts;
  }
  if (open_library_beside(of_torch, "libtorch_cuda.so", facts.not_loaded) == nullptr) {
    return facts;
  }
  facts.not_loaded.clear();
  facts.seen = at::globalContext().getAcceleratorHooksInterface(at::kCUDA).isBuilt();
  if (facts.seen && c10::impl::hasDeviceGuardImpl(at::kCUDA)) {
    facts.devices = c10::impl::getDeviceGuardImpl(at::kCUDA)->deviceCount();
  }
  if (facts.devices == 0) {
    try {
      at::empty({1}, at::kCUDA);
    } catch (const std::exception& error) {
      facts.said = error.what();
      facts.said = facts.said.substr(0, facts.said.find('\n'));
    }
  }
  return facts;
}

const CudaFacts& cuda_facts() {
  static const CudaFacts facts = look_for_cuda();
  return facts;
}

Advice why_no_gpu(const CudaFacts& facts) {
  if (!facts.driver) {
    return {"this host has no NVIDIA driver",
            "install the driver and see that nvidia-smi lists a GPU (in a container: start it with "
            "--gpus all), or set device=auto"};
  }
  if (!facts.not_loaded.empty()) {
    return {"this LibTorch is a build without CUDA, or CUDA's libraries are missing (" +
                facts.not_loaded + ")",
            "build hasten with a LibTorch for CUDA (scripts/setup.sh --cuda), or set device=auto"};
  }
  if (!facts.seen) {
    return {"LibTorch looked for CUDA before hasten had loaded its library",
            "make the Accelerator before anything else of LibTorch, such as torch::manual_seed, or "
            "link torch_cuda"};
  }
  if (facts.visible && (facts.visible->empty() || *facts.visible == "-1")) {
    return {"CUDA_VISIBLE_DEVICES=" + *facts.visible + " hides all GPUs",
            "unset CUDA_VISIBLE_DEVICES, or name GPUs in it"};
  }
  if (facts.said.find("driver") != std::string::npos &&
      facts.said.find("old") != std::string::npos) {
    return {"the NVIDIA driver is too old for this LibTorch (" + facts.said + ")",
            "update the driver, or use a LibTorch for an older CUDA"};
  }
  return {"LibTorch finds no GPU" + (facts.said.empty() ? "" : " (" + facts.said + ")"),
          "see that nvidia-smi lists a GPU, or set device=auto"};
}

} // namespace hasten::detail
