// Autocast on the test device, by the lists that CUDA has.
#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include "support/device_memory.h"

namespace hasten::testing_support::machine {

void install_autocast() {
  using namespace at; // the lists name types of at without it, other ones in each version
  using namespace at::autocast;
  static auto others = MAKE_TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1);
  others.fallback(torch::CppFunction::makeFallthrough());
  static auto m = MAKE_TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1);
#define HASTEN_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define HASTEN_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define HASTEN_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define HASTEN_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(HASTEN_LOWER_PRECISION)
  AT_FORALL_FP32(HASTEN_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(HASTEN_FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(HASTEN_PROMOTE)
#undef HASTEN_LOWER_PRECISION
#undef HASTEN_FP32
#undef HASTEN_FP32_SET_OPT_DTYPE
#undef HASTEN_PROMOTE
}

} // namespace hasten::testing_support::machine
