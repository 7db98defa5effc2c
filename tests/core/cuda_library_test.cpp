#include "core/cuda_library.h"

#include <gtest/gtest.h>

#include <string>
#include <tuple>

#include "hasten/base/error.h"
#include "hasten/core/device.h"
#include "support/error_of.h"

namespace hasten::detail {

using testing::IsSubstring;

static CudaFacts loaded() { return {.driver = true, .seen = true}; }

TEST(WhyNoGpu, SaysWhatIsMissingAndWhatHelps) {
  CudaFacts hidden = loaded();
  hidden.visible = "";
  CudaFacts minus = loaded();
  minus.visible = "-1";
  CudaFacts old = loaded();
  old.said = "The NVIDIA driver on your system is too old (found version 11040).";
  CudaFacts odd = loaded();
  odd.visible = "0";
  odd.said = "CUDA error: unknown error";
  for (const auto& [facts, what, fix] :
       {std::tuple(CudaFacts{}, "this host has no NVIDIA driver", "install the driver"),
        std::tuple(CudaFacts{.driver = true, .not_loaded = "libtorch_cuda.so: No such file"},
                   "a build without CUDA, or CUDA's libraries are missing (libtorch_cuda.so: No",
                   "scripts/setup.sh --cuda"),
        std::tuple(CudaFacts{.driver = true}, "LibTorch looked for CUDA before", "make the Accel"),
        std::tuple(hidden, "CUDA_VISIBLE_DEVICES= hides all GPUs", "unset CUDA_VISIBLE_DEVICES"),
        std::tuple(minus, "CUDA_VISIBLE_DEVICES=-1 hides all GPUs", "name GPUs in it"),
        std::tuple(old, "driver is too old for this LibTorch (The NVIDIA driver on", "update"),
        std::tuple(odd, "finds no GPU (CUDA error: unknown error)", "nvidia-smi")}) {
    EXPECT_PRED_FORMAT2(IsSubstring, what, why_no_gpu(facts).what);
    EXPECT_PRED_FORMAT2(IsSubstring, fix, why_no_gpu(facts).fix);
  }
}

TEST(WhyNoGpu, ADeviceThatIsAskedForAndNotThereIsAnError) {
  if (cuda_facts().devices > 0) {
    GTEST_SKIP() << "this host has a GPU";
  }
  const std::string text = testing_support::error_of([] { choose_device("cuda", World{}, false); });
  EXPECT_PRED_FORMAT2(IsSubstring, "device=cuda: " + why_no_gpu(cuda_facts()).what, text);
  EXPECT_PRED_FORMAT2(IsSubstring, why_no_gpu(cuda_facts()).fix, text);
}

TEST(OpenLibraryBeside, SaysWhyNot) {
  std::string error;
  EXPECT_EQ(open_library_beside(nullptr, "libno_such_thing.so", error), nullptr);
  EXPECT_PRED_FORMAT2(IsSubstring, "libno_such_thing.so", error);
}

} // namespace hasten::detail
