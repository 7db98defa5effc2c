#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

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
class MeterHandler final : public BlockHandler {
 public:
  explicit MeterHandler(std::shared_ptr<BlockHandler> inner) : inner_(std::move(inner)) {}

  std::vector<at::Tensor> call(const std::shared_ptr<torch::nn::Module>& block,
                               const std::string& name, std::vector<at::Tensor> inputs,
                               const Forward& forward) override {
    end_stretch("before the first block");
    const size_t number = report.blocks.size();
    report.blocks.push_back({name, 0, 0, 0});
    const int64_t before = memory_stats().live_bytes;
    std::vector<at::Tensor> outputs = inner_ ? inner_->call(block, name, std::move(inputs), forward)
                                             : block_part(block, forward)(std::move(inputs));
    report.blocks[number].saved_bytes = memory_stats().live_bytes - before;
    report.blocks[number].forward_peak = end_stretch("forward of " + name);
    for (const at::Tensor& output : outputs) {
      if (output.defined() && output.requires_grad()) {
        output.register_hook([this, number](const at::Tensor&) {
          end_backward("after the last block");
          derived_ = static_cast<int64_t>(number);
        });
        break;
      }
    }
    return outputs;
  }

  void begin() {
    reset_peak_memory();
    level_ = memory_stats().live_bytes;
  }
  void end() { end_backward("after the last block"); }

  ActivationReport report{};

 private:
  int64_t end_stretch(const std::string& name) {
    const int64_t peak = memory_stats().peak_bytes - level_;
    if (peak > report.peak_bytes) {
      report.peak_bytes = peak;
      report.peak_at = name;
    }
    reset_peak_memory();
    return peak;
  }
  void end_backward(const std::string& without_block) {
    if (derived_ < 0) {
      end_stretch(without_block);
      return;
    }
    BlockMemory& block = report.blocks[static_cast<size_t>(derived_)];
    block.backward_peak = std::max(block.backward_peak, end_stretch("backward of " + block.name));
  }

  std::shared_ptr<BlockHandler> inner_;
  int64_t level_ = 0;
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
  install_memory_meter();
  const detail::Untouched untouched(*model);
  const std::shared_ptr<detail::BlockHandler> inner = detail::attached_handler(model);
  const auto meter = std::make_shared<detail::MeterHandler>(inner);
  const auto put_back = [&] {
    if (inner) {
      detail::attach_handler(model, inner);
    } else {
      gradient_checkpointing_disable(model);
    }
  };
  detail::attach_handler(model, meter);
  const at::AutoGradMode grad_mode(true);
  try {
    meter->begin();
    loss().backward();
    meter->end();
  } catch (...) {
    put_back();
    throw;
  }
  put_back();
  return meter->report;
}

} // namespace hasten
