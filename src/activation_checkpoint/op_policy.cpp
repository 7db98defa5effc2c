#include "hasten/activation_checkpoint/op_policy.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <chrono>
#include <map>
#include <utility>

#include "hasten/base/error.h"
#include "op_replay.h"

namespace hasten {

const std::set<std::string>& expensive_ops() {
  static const std::set<std::string> names = {"aten::mm",
                                              "aten::addmm",
                                              "aten::bmm",
                                              "aten::baddbmm",
                                              "aten::convolution",
                                              "aten::mkldnn_rnn_layer",
                                              "aten::_scaled_dot_product_flash_attention_for_cpu",
                                              "aten::_scaled_dot_product_flash_attention",
                                              "aten::_scaled_dot_product_efficient_attention",
                                              "aten::_scaled_dot_product_cudnn_attention",
                                              "aten::_scaled_mm",
                                              "aten::topk",
                                              "hasten::linear"};
  return names;
}

std::shared_ptr<const OpPolicy> OpPolicy::keep(std::set<std::string> names) {
  for (const std::string& name : names) {
    if (name.find("::") == std::string::npos) {
      throw InputError("activation_checkpoint::OpPolicy", "operator=" + name,
                       "a name with its namespace", "write aten::" + name);
    }
  }
  return keep_if([names = std::move(names)](const OpCall& call) {
    return names.count(std::string(call.name)) > 0;
  });
}

std::shared_ptr<const OpPolicy> OpPolicy::keep_expensive() { return keep(expensive_ops()); }

std::shared_ptr<const OpPolicy> OpPolicy::keep_if(std::function<bool(const OpCall&)> decide) {
  if (!decide) {
    throw InputError("activation_checkpoint::OpPolicy", "decide is empty",
                     "a function of an OpCall");
  }
  auto policy = std::make_shared<OpPolicy>();
  policy->decide_ = std::move(decide);
  return policy;
}

std::shared_ptr<const OpPolicy> OpPolicy::keep_by_cost(const std::vector<OpCost>& costs,
                                                       int64_t bytes) {
  std::vector<OpCost> by_value(costs);
  std::stable_sort(by_value.begin(), by_value.end(), [](const OpCost& a, const OpCost& b) {
    return a.seconds * static_cast<double>(b.bytes) > b.seconds * static_cast<double>(a.bytes);
  });
  std::set<std::pair<std::string, int64_t>> chosen;
  for (const OpCost& cost : by_value) {
    if (cost.bytes > 0 && cost.bytes <= bytes) {
      bytes -= cost.bytes;
      chosen.emplace(cost.name, cost.index);
    }
  }
  return keep_if([chosen = std::move(chosen)](const OpCall& call) {
    return chosen.count({std::string(call.name), call.index}) > 0;
  });
}

namespace detail {

// Measures seconds and new bytes of each operator that makes a result.
class OpStopwatch final : public OpObserver {
 public:
  void pass(const OpPassing& passing) override {
    const OpInfo& info = op_info(passing.op);
    const auto start = std::chrono::steady_clock::now();
    writes_.pass(passing); // BatchNorm's statistics do not change
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    if (info.ignored) {
      return;
    }
    const int64_t bytes = info.fresh && info.writes.empty() ? result_bytes(passing) : 0;
    costs.push_back({info.name, next_[&passing.op.schema()]++, bytes, time.count()});
  }
  std::vector<OpCost> costs{};

 private:
  std::map<const c10::FunctionSchema*, int64_t> next_{};
  WriteGuard writes_{};
};

} // namespace detail

std::vector<OpCost> measure_ops(const std::function<void()>& forward) {
  const at::NoGradGuard no_grad;
  const detail::GeneratorScope random(detail::generator_states({}));
  detail::OpStopwatch stopwatch;
  const detail::OpScope scope(&stopwatch);
  forward();
  return std::move(stopwatch.costs);
}

} // namespace hasten
