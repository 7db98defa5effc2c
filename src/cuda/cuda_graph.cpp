// The library hasten_cuda_graph: torch's CUDAGraph as LibTorch's graph of any device. LibTorch itself
// registers none for CUDA.
#include <ATen/core/GraphImplInterface.h>
#include <ATen/cuda/CUDAGraph.h>

namespace hasten::detail {

class CudaGraph final : public at::GraphImplInterface {
 public:
  explicit CudaGraph(const at::GraphImplArgs& args) : graph_(args.keep_graph) {}

  void capture_begin(at::MempoolId_t pool, at::GraphCaptureMode mode) override {
    graph_.capture_begin(
        pool, mode == at::GraphCaptureMode::ThreadLocal ? cudaStreamCaptureModeThreadLocal
              : mode == at::GraphCaptureMode::Relaxed   ? cudaStreamCaptureModeRelaxed
                                                        : cudaStreamCaptureModeGlobal);
  }
  void capture_end() override { graph_.capture_end(); }
  void instantiate() override { graph_.instantiate(); }
  void replay() override { graph_.replay(); }
  void reset() override { graph_.reset(); }
  at::MempoolId_t pool() const override { return graph_.pool(); }
  void enable_debug_mode() override { graph_.enable_debug_mode(); }
  void debug_dump(const std::string& path) override { graph_.debug_dump(path); }

 private:
  mutable at::cuda::CUDAGraph graph_; // its pool() is not const
};

} // namespace hasten::detail

namespace at {

REGISTER_GRAPH_IMPL(CUDA, hasten::detail::CudaGraph)

} // namespace at
