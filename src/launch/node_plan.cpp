#include "node_plan.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <tuple>

#include "hasten/base/process.h"
#include "hasten/base/text.h"

namespace hasten::detail {

Node own_node(const LaunchOptions& options) {
  Node node{host_name(), ::getpid(), options.nproc, options.rendezvous.node_rank,
            options.rendezvous.same};
  node.same["nnodes"] = std::to_string(options.rendezvous.min_nodes) + ":" +
                        std::to_string(options.rendezvous.max_nodes);
  return node;
}

std::string why_not_together(const std::vector<Node>& nodes, int max_nodes) {
  const Node& first = nodes.front();
  std::map<int, const Node*> taken;
  for (const Node& node : nodes) {
    const auto both = [&](const Node& other, const std::string& name, const std::string& own,
                          const std::string& others) {
      return name + ": host " + node.host + " has " + own + ", host " + other.host + " has " +
             others;
    };
    for (const auto* names : {&first.same, &node.same}) {
      for (const auto& [name, unused] : *names) {
        const auto own = node.same.find(name);
        const auto expected = first.same.find(name);
        if (own == node.same.end() || expected == first.same.end() ||
            own->second != expected->second) {
          return both(first, name, own == node.same.end() ? "none" : own->second,
                      expected == first.same.end() ? "none" : expected->second);
        }
      }
    }
    const bool numbered = node.node_rank >= 0;
    if (numbered != (first.node_rank >= 0)) {
      const auto text = [](const Node& of) {
        return of.node_rank < 0 ? std::string("none") : std::to_string(of.node_rank);
      };
      return both(first, "node_rank", text(node), text(first));
    }
    if (numbered && node.node_rank >= max_nodes) {
      return "node_rank=" + std::to_string(node.node_rank) + " of host " + node.host + " with " +
             std::to_string(max_nodes) + " nodes";
    }
    const auto [other, is_new] = taken.emplace(node.node_rank, &node);
    if (numbered && !is_new) {
      const auto text = [](const Node& of) {
        return "host " + of.host + " (process " + std::to_string(of.pid) + ")";
      };
      return "two launchers have node_rank=" + std::to_string(node.node_rank) + ": " +
             text(*other->second) + " and " + text(node);
    }
  }
  return "";
}

std::vector<size_t> node_order(const std::vector<Node>& nodes) {
  std::vector<size_t> order(nodes.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_sort(order.begin() + 1, order.end(), {}, [&](size_t i) {
    return std::tuple(nodes[i].node_rank, nodes[i].host, nodes[i].pid);
  });
  return order;
}

std::string who_has_come(const std::vector<Node>& nodes, const RendezvousOptions& options) {
  const bool numbered = options.node_rank >= 0;
  std::vector<std::string> here;
  std::vector<std::string> missing;
  for (const Node& node : nodes) {
    here.push_back(node.host +
                   (numbered ? " (node rank " + std::to_string(node.node_rank) + ")" : ""));
  }
  for (int rank = 0; numbered && rank < options.min_nodes; ++rank) {
    if (std::ranges::count(nodes, rank, &Node::node_rank) == 0) {
      missing.push_back(std::to_string(rank));
    }
  }
  return joined(here) +
         (missing.empty() ? std::string()
                          : "; missing: node rank" + std::string(missing.size() == 1 ? " " : "s ") +
                                joined(first_items(missing, 16)));
}

std::vector<std::string> node_texts(const std::vector<Node>& nodes) {
  std::vector<std::string> texts;
  int first = 0;
  for (const Node& node : nodes) {
    const int last = first + node.nproc - 1;
    texts.push_back(node.host + " (node " + std::to_string(texts.size()) +
                    (first == last ? ", rank " : ", ranks ") + std::to_string(first) +
                    (first == last ? "" : "-" + std::to_string(last)) + ")");
    first = last + 1;
  }
  return texts;
}

} // namespace hasten::detail
