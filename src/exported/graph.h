// The graph of an exported program, with operators looked up and arguments bound. It does not change
// after it has been read.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace hasten::detail {

inline constexpr const char* kExportedLoad = "exported::load"; // of errors

/// The arguments of a call, then its results.
using GraphValues = std::vector<c10::IValue>;

/// Where a call takes an argument from.
struct GraphArgument {
  enum class Kind { constant, slot, wrapped_number, tensors, optional_tensors, numbers, device };
  Kind kind = Kind::constant;
  int slot = -1;
  c10::IValue constant{};
  std::vector<GraphArgument> items{}; // of a list: slots and constants
};

struct GraphContext {
  at::Device device = at::kCPU;
  bool training = true;
};

/// Takes the arguments of the operator's schema and leaves its results in their place.
using GraphFunction = std::function<void(GraphValues& stack, const GraphContext& context)>;
/// Throws for arguments that would end the process.
using GraphCheck = void (*)(const GraphValues& stack);

struct GraphOutput {
  bool list = false;
  bool tensor = false; // else a number, if it is no list
  std::vector<int> slots{}; // -1: the value is not used
};

struct GraphNode {
  std::optional<c10::OperatorHandle> op{};
  GraphFunction function{}; // if set, it runs instead of `op`
  GraphCheck check = nullptr; // before either
  std::vector<GraphArgument> arguments{};
  std::vector<GraphOutput> outputs{};
  std::vector<int> released{}; // slots whose last use this is
  /// The argument that is off in evaluation, because the mode decides it; -1: none.
  int mode_argument = -1;
  c10::IValue off{};
  /// The slot of the buffer that the operator writes; -1: none.
  int written_buffer = -1;
  bool without_gradient = false; // its results have none
  // For errors and for blocks.
  std::string target{}; // "aten.linear.default"
  std::string module{}; // "encoder.layer.0.output.dense"
  std::string block{}; // "encoder.layer.0", or "encoder.layer.0@1" for its second call
  std::string line{}; // "modeling_bert.py:327"
};

/// Consecutive nodes, and the slots that cross their borders but those of parameters and buffers.
struct GraphSegment {
  size_t begin = 0;
  size_t end = 0;
  std::string block{}; // empty: no block
  std::vector<int> leaves{}; // slots of parameters, buffers and constants that it reads
  std::vector<int> tensors_in{};
  std::vector<int> numbers_in{};
  std::vector<int> tensors_out{};
  std::vector<int> numbers_out{};
  std::vector<int> released{}; // slots of its inputs that no later node reads

  /// "encoder.layer.0" of both calls.
  std::string path() const { return block.substr(0, block.find('@')); }
};

struct Graph {
  std::vector<GraphNode> nodes{};
  std::vector<int> inputs{};
  std::vector<GraphArgument> outputs{};
  std::vector<GraphSegment> segments{};
  std::vector<bool> is_tensor{}; // [slot]
  std::vector<bool> is_leaf{}; // [slot] a parameter, a buffer or a constant

  bool tensor(int slot) const { return is_tensor[static_cast<size_t>(slot)]; }
  bool leaf(int slot) const { return is_leaf[static_cast<size_t>(slot)]; }
};

/// The values of a run, by slot.
class GraphFrame {
 public:
  explicit GraphFrame(const Graph& graph) : values_(graph.is_tensor.size()) {}
  c10::IValue& operator[](int slot) { return values_[static_cast<size_t>(slot)]; }
  const c10::IValue& operator[](int slot) const { return values_[static_cast<size_t>(slot)]; }

 private:
  std::vector<c10::IValue> values_;
};

/// The number as a tensor that takes no part in type promotion, as Python passes it.
c10::IValue wrapped_number(const c10::IValue& value);
/// Runs the nodes [begin, end).
void run_nodes(const Graph& graph, size_t begin, size_t end, GraphFrame& frame,
               const GraphContext& context);
/// The value of an argument or output.
c10::IValue value_of(const GraphArgument& argument, const GraphFrame& frame,
                     const GraphContext& context);

/// Finds the segments, blocks where `blocks`, and where slots are released. `log`: the blocks
/// whose nodes are not consecutive.
void find_segments(Graph& graph, bool blocks, std::vector<std::string>& scattered);
/// Calls `visit` with each slot that the argument reads.
void each_slot(const GraphArgument& argument, const std::function<void(int)>& visit);

} // namespace hasten::detail
