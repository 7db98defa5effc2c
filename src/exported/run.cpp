#include <ATen/ScalarOps.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "graph.h"
#include "hasten/base/error.h"
#include "hasten/core/memory.h"
#include "hasten/core/memory_rehearsal.h"

namespace hasten::detail {

c10::IValue wrapped_number(const c10::IValue& value) {
  at::Tensor tensor = c10::scalar_to_tensor(value.toScalar());
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

template <typename T>
static c10::IValue list_of(const GraphArgument& argument, const GraphFrame& frame) {
  c10::List<T> list;
  list.reserve(argument.items.size());
  for (const GraphArgument& item : argument.items) {
    list.push_back((item.slot < 0 ? item.constant : frame[item.slot]).to<T>());
  }
  return list;
}

c10::IValue value_of(const GraphArgument& argument, const GraphFrame& frame,
                     const GraphContext& context) {
  using Kind = GraphArgument::Kind;
  switch (argument.kind) {
    case Kind::slot:
      return frame[argument.slot];
    case Kind::wrapped_number:
      return wrapped_number(frame[argument.slot]);
    case Kind::tensors:
      return list_of<at::Tensor>(argument, frame);
    case Kind::optional_tensors:
      return list_of<std::optional<at::Tensor>>(argument, frame);
    case Kind::numbers:
      return list_of<int64_t>(argument, frame);
    case Kind::device:
      return context.device;
    case Kind::constant:
      break;
  }
  return argument.constant;
}

// Note [Memory of a graph]. Numbers of a graph are untrusted input: full([10^12]) must not end the process.
// An allocation above a MemoryLimit throws. A view costs nothing, but operators that read it need
// a byte and more for each element.

/// Bytes that CPU tensors may have: those alive and what the host has left, which is read once a second.
static int64_t most_bytes(const at::Device& device) {
  if (!device.is_cpu() || in_memory_rehearsal()) { // other devices refuse what they cannot give
    return std::numeric_limits<int64_t>::max();
  }
  using Clock = std::chrono::steady_clock;
  static std::atomic<Clock::rep> read_at{0};
  static std::atomic<int64_t> most{0};
  const Clock::rep now = Clock::now().time_since_epoch().count();
  if (most == 0 || now - read_at > Clock::duration(std::chrono::seconds(1)).count()) {
    const int64_t left = memory_left();
    most = left > 0 ? memory_stats().live_bytes + left : std::numeric_limits<int64_t>::max();
    read_at = now;
  }
  return most;
}

static void keep_outputs(const GraphNode& node, GraphValues& stack, GraphFrame& frame) {
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    const GraphOutput& output = node.outputs[i];
    if (!output.list) {
      if (output.slots[0] >= 0) {
        if (stack.at(i).isTensor() != output.tensor) {
          throw std::invalid_argument("its result is a " + stack[i].tagKind());
        }
        frame[output.slots[0]] = std::move(stack.at(i));
      }
      continue;
    }
    const c10::List<at::Tensor> list = stack.at(i).toTensorList();
    for (size_t k = 0; k < output.slots.size(); ++k) {
      if (output.slots[k] >= 0) {
        frame[output.slots[k]] = list.get(k);
      }
    }
  }
}

static void run_node(const GraphNode& node, GraphValues& stack, GraphFrame& frame,
                     const GraphContext& context, int64_t most) {
  if (!context.training && node.written_buffer >= 0) { // the statistics stay as they are
    stack.assign(1, frame[node.written_buffer]);
    keep_outputs(node, stack, frame);
    return;
  }
  stack.clear();
  for (const GraphArgument& argument : node.arguments) {
    stack.push_back(value_of(argument, frame, context));
  }
  if (!context.training && node.mode_argument >= 0) {
    stack[static_cast<size_t>(node.mode_argument)] = node.off;
  }
  if (node.check != nullptr) {
    node.check(stack);
  }
  if (node.function) {
    node.function(stack, context);
  } else {
    node.op->callBoxed(stack);
  }
  if (!stack.empty() && stack[0].isTensor() && stack[0].toTensor().defined() &&
      stack[0].toTensor().numel() > most) {
    throw std::length_error("its result has sizes=" + c10::str(stack[0].toTensor().sizes()));
  }
  keep_outputs(node, stack, frame);
}

[[noreturn]] static void fail(const GraphNode& node, const std::exception& error) {
  const std::string what = error.what();
  const bool memory = is_out_of_memory(error);
  throw InputError("exported::forward",
                   node.target + (node.module.empty() ? "" : " of module " + node.module) +
                       (node.line.empty() ? "" : " (" + node.line + ")") + ": " +
                       what.substr(0, what.find('\n')),
                   memory ? "results that fit into the memory that is left"
                          : "inputs as those that the module was exported with",
                   memory ? "use a smaller batch" : "compare the inputs with describe()",
                   memory ? ErrorKind::out_of_memory : ErrorKind::other);
}

void run_nodes(const Graph& graph, size_t begin, size_t end, GraphFrame& frame,
               const GraphContext& context) {
  const int64_t most = most_bytes(context.device);
  std::optional<MemoryLimit> limit;
  if (most != std::numeric_limits<int64_t>::max()) {
    limit.emplace(most);
  }
  GraphValues stack;
  for (size_t i = begin; i < end; ++i) {
    const GraphNode& node = graph.nodes[i];
    try {
      run_node(node, stack, frame, context, most);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      if (is_out_of_memory(error) && !context.device.is_cpu()) { // the caller says more
        throw;
      }
      fail(node, error);
    }
    for (const int slot : node.released) {
      frame[slot] = {};
    }
  }
}

} // namespace hasten::detail
