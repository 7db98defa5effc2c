#include <algorithm>
#include <iomanip>
#include <sstream>

#include "block_regions.h"
#include "hasten/activation_checkpoint/saved_memory.h"
#include "hasten/base/text.h"
#include "hasten/core/memory.h"

namespace hasten {

namespace detail {

// Divides a step into intervals between events. Each interval has a peak and a name.
class ReportMeter final : public StepMeter {
 public:
  explicit ReportMeter(std::shared_ptr<BlockHandler> inner) : inner_(std::move(inner)) {}

  std::vector<at::Tensor> call(const std::shared_ptr<torch::nn::Module>& block,
                               const std::string& name, std::vector<at::Tensor> inputs,
                               const Forward& forward) override {
    end_stretch("before the first block");
    const size_t number = report.blocks.size();
    report.blocks.push_back({name, 0, 0, 0});
    const int64_t before = memory_stats(device).live_bytes;
    std::vector<at::Tensor> outputs = inner_ ? inner_->call(block, name, std::move(inputs), forward)
                                             : block_part(block, forward)(std::move(inputs));
    report.blocks[number].saved_bytes = memory_stats(device).live_bytes - before;
    report.blocks[number].forward_peak = end_stretch("forward of " + name);
    on_gradient(outputs, [this, number](const at::Tensor&) {
      end_backward();
      derived_ = static_cast<int64_t>(number);
    });
    return outputs;
  }

  void end() override { end_backward(); }

  ActivationReport report{};

 private:
  int64_t end_stretch(const std::string& name) {
    const int64_t peak = memory_stats(device).peak_bytes - level;
    if (peak > report.peak_bytes) {
      report.peak_bytes = peak;
      report.peak_at = name;
    }
    reset_peak_memory(device);
    return peak;
  }
  void end_backward() {
    if (derived_ < 0) {
      end_stretch("after the last block");
      return;
    }
    BlockMemory& block = report.blocks[static_cast<size_t>(derived_)];
    block.backward_peak = std::max(block.backward_peak, end_stretch("backward of " + block.name));
  }

  std::shared_ptr<BlockHandler> inner_;
  int64_t derived_ = -1; // the block whose backward is running
};

} // namespace detail

std::string ActivationReport::text() const {
  std::ostringstream text;
  const auto row = [&](const std::string& name, const std::string& saved,
                       const std::string& forward, const std::string& backward) {
    text << std::left << std::setw(32) << name << std::right << std::setw(12) << saved
         << std::setw(12) << forward << std::setw(12) << backward << "\n";
  };
  row("block", "saved", "forward", "backward");
  for (const BlockMemory& block : blocks) {
    row(block.name, format_bytes(block.saved_bytes), format_bytes(block.forward_peak),
        format_bytes(block.backward_peak));
  }
  text << "peak " << format_bytes(peak_bytes) << ", " << peak_at << "\n";
  return text.str();
}

ActivationReport measure_activations(const std::shared_ptr<torch::nn::Module>& model,
                                     const std::function<at::Tensor()>& loss) {
  const std::shared_ptr<detail::BlockHandler> inner = detail::attached_handler(model);
  const auto meter = std::make_shared<detail::ReportMeter>(inner);
  detail::meter_step(model, meter, inner, loss);
  return meter->report;
}

} // namespace hasten
