// Which consecutive nodes run as one block, and when values are freed.
#include <algorithm>
#include <map>
#include <set>

#include "graph.h"

namespace hasten::detail {

void each_slot(const GraphArgument& argument, const std::function<void(int)>& visit) {
  if (argument.slot >= 0) {
    visit(argument.slot);
  }
  for (const GraphArgument& item : argument.items) {
    each_slot(item, visit);
  }
}

static void each_input(const GraphNode& node, const std::function<void(int)>& visit) {
  for (const GraphArgument& argument : node.arguments) {
    each_slot(argument, visit);
  }
}

static void each_output(const GraphNode& node, const std::function<void(int)>& visit) {
  for (const GraphOutput& output : node.outputs) {
    std::ranges::for_each(output.slots, [&](int slot) { slot >= 0 ? visit(slot) : void(); });
  }
}

/// Index of the last node that reads the slot; the number of nodes for outputs of the graph. [slot]
static std::vector<size_t> last_uses(const Graph& graph) {
  std::vector<size_t> last(graph.is_tensor.size(), 0);
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    const auto use = [&](int slot) { last[static_cast<size_t>(slot)] = i; };
    each_input(graph.nodes[i], use);
    each_output(graph.nodes[i], use); // one that nobody reads ends where it is made
  }
  for (const GraphArgument& output : graph.outputs) {
    each_slot(output, [&](int slot) { last[static_cast<size_t>(slot)] = graph.nodes.size(); });
  }
  return last;
}

/// One past the last node of the call of a block that begins at `begin`. A node of no block between two
/// of its nodes belongs to it: export puts sizes there. `begin` if other blocks run in between.
static size_t end_of_block(const std::vector<GraphNode>& nodes, size_t begin) {
  const std::string& block = nodes[begin].block;
  size_t end = begin + 1;
  size_t inside = end;
  while (end < nodes.size() && (nodes[end].block.empty() || nodes[end].block == block)) {
    inside = nodes[end].block == block ? end + 1 : inside;
    ++end;
  }
  const bool again = std::any_of(nodes.begin() + static_cast<std::ptrdiff_t>(inside), nodes.end(),
                                 [&](const GraphNode& node) { return node.block == block; });
  return again ? begin : inside;
}

static void find_borders(Graph& graph, bool blocks, std::vector<std::string>& scattered) {
  std::set<std::string> inline_blocks;
  for (size_t i = 0; i < graph.nodes.size();) {
    const std::string& block = graph.nodes[i].block;
    GraphSegment segment{.begin = i, .end = i + 1};
    const size_t end = !blocks || block.empty() || inline_blocks.contains(block)
                           ? i
                           : end_of_block(graph.nodes, i);
    if (end > i) {
      segment.end = end;
      segment.block = block;
    } else if (!block.empty() && blocks && inline_blocks.insert(block).second) {
      scattered.push_back(block.substr(0, block.find('@')));
    }
    i = segment.end;
    if (segment.block.empty() && !graph.segments.empty() && graph.segments.back().block.empty()) {
      graph.segments.back().end = segment.end;
    } else {
      graph.segments.push_back(std::move(segment));
    }
  }
}

static void find_crossing(const Graph& graph, const std::vector<size_t>& last,
                          GraphSegment& segment) {
  std::set<int> made;
  std::set<int> taken;
  const auto take = [&](int slot) {
    if (made.contains(slot) || !taken.insert(slot).second) {
      return;
    }
    (graph.leaf(slot)     ? segment.leaves
     : graph.tensor(slot) ? segment.tensors_in
                          : segment.numbers_in)
        .push_back(slot);
    if (last[static_cast<size_t>(slot)] < segment.end && !graph.leaf(slot)) {
      segment.released.push_back(slot);
    }
  };
  for (size_t i = segment.begin; i < segment.end; ++i) {
    each_input(graph.nodes[i], take);
    each_output(graph.nodes[i], [&](int slot) { made.insert(slot); });
  }
  for (const int slot : made) {
    if (last[static_cast<size_t>(slot)] >= segment.end) {
      (graph.tensor(slot) ? segment.tensors_out : segment.numbers_out).push_back(slot);
    }
  }
}

void find_segments(Graph& graph, bool blocks, std::vector<std::string>& scattered) {
  const std::vector<size_t> last = last_uses(graph);
  find_borders(graph, blocks, scattered);
  for (GraphSegment& segment : graph.segments) {
    find_crossing(graph, last, segment);
  }
  for (size_t i = 0; i < graph.nodes.size(); ++i) {
    std::set<int> ended;
    const auto use = [&](int slot) {
      if (last[static_cast<size_t>(slot)] == i) {
        ended.insert(slot);
      }
    };
    each_input(graph.nodes[i], use);
    each_output(graph.nodes[i], use);
    graph.nodes[i].released.assign(ended.begin(), ended.end());
  }
}

} // namespace hasten::detail
