// NCCL is in a library of its own, hasten_nccl, because only it links LibTorch's libraries for
// CUDA. It is loaded with the first group that needs it.
#include <dlfcn.h>

#include "back_ends.h"
#include "hasten/base/error.h"
#include "meet/store.h"

namespace hasten::detail {

/// hasten_make_nccl() in src/cuda/nccl.cpp.
using MakeNccl = c10d::Backend*(c10d::Store& store, int rank, int world_size, int device);

static MakeNccl* load_nccl() {
  std::string why;
  const void* const own = reinterpret_cast<const void*>(&make_nccl);
  void* const library = open_library_beside(own, "libhasten_nccl.so", why);
  void* const made = library != nullptr ? ::dlsym(library, "hasten_make_nccl") : nullptr;
  if (made == nullptr) {
    throw InputError("comm::create", "backend=nccl: its library was not loaded (" + why + ")",
                     "libhasten_nccl.so in the folder of libhasten.so, from a build with CUDA",
                     "build hasten with a LibTorch for CUDA (scripts/setup.sh --cuda), or set "
                     "backend=gloo");
  }
  silence_torch(); // its watchdog logs errors of NCCL
  return reinterpret_cast<MakeNccl*>(made);
}

c10::intrusive_ptr<c10d::Backend> make_nccl(const DeviceBackendContext& context) {
  static MakeNccl* const make = load_nccl();
  return c10::intrusive_ptr<c10d::Backend>::reclaim(
      make(*context.store, context.rank, context.world_size, context.device.index()));
}

Advice connection_advice(const std::string& text) {
  const auto has = [&](const char* part) { return text.find(part) != std::string::npos; };
  if (const size_t at = text.find("Duplicate GPU"); at != std::string::npos) {
    // "Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1b000"
    const size_t ranks = text.find("rank", at);
    return {"two ranks are on one GPU: " +
                (ranks == std::string::npos ? std::string()
                                            : text.substr(ranks, text.find('\n', ranks) - ranks)),
            "give each rank its own GPU, or use --backend gloo"};
  }
  if (has("no socket interface found") || has("NCCL_SOCKET_IFNAME")) {
    return {"NCCL found no network interface",
            "set NCCL_SOCKET_IFNAME to an interface that all hosts have, or unset it"};
  }
  return {};
}

} // namespace hasten::detail
