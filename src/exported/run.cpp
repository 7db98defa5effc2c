#include <ATen/ScalarOps.h>

#include <utility>

#include "graph.h"
#include "hasten/base/error.h"
#include "hasten/core/memory.h"

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

static void keep_outputs(const GraphNode& node, GraphValues& stack, GraphFrame& frame) {
  for (size_t i = 0; i < node.outputs.size(); ++i) {
    const GraphOutput& output = node.outputs[i];
    if (!output.list) {
      if (output.slots[0] >= 0) {
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
                     const GraphContext& context) {
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
  if (node.function) {
    node.function(stack, context);
  } else {
    node.op->callBoxed(stack);
  }
  keep_outputs(node, stack, frame);
}

void run_nodes(const Graph& graph, size_t begin, size_t end, GraphFrame& frame,
               const GraphContext& context) {
  GraphValues stack;
  for (size_t i = begin; i < end; ++i) {
    const GraphNode& node = graph.nodes[i];
    try {
      run_node(node, stack, frame, context);
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      if (is_out_of_memory(error)) { // the caller says more
        throw;
      }
      const std::string what = error.what();
      throw InputError("exported::forward",
                       node.target + (node.module.empty() ? "" : " of module " + node.module) +
                           (node.line.empty() ? "" : " (" + node.line + ")") + ": " +
                           what.substr(0, what.find('\n')),
                       "inputs as those that the module was exported with",
                       "compare the inputs with describe()");
    }
    for (const int slot : node.released) {
      frame[slot] = {};
    }
  }
}

} // namespace hasten::detail
