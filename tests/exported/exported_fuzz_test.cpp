// Changed programs are errors, or run. HASTEN_RANDOM_ROUNDS makes it long, HASTEN_RANDOM_SEED begins at that
// change. What ends the process stays in the temporary folder.
#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <climits>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>

#include "exported_rig.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/process.h"
#include "hasten/core/memory.h"
#include "support/temporary_folder.h"

namespace hasten::exported_test {

using nlohmann::json;
using Random = std::mt19937_64;

static int64_t number_from(const char* variable, int64_t otherwise) {
  return std::stoll(detail::environment_value(variable).value_or(std::to_string(otherwise)));
}

template <typename T>
static T& one_of(Random& random, std::vector<T>& all) {
  return all[random() % all.size()];
}

/// An operator that takes these arguments, if one out of some does. Not all are allowed.
static std::string like(Random& random, const json& node) {
  static std::vector<c10::OperatorName> all = [] {
    auto names = c10::Dispatcher::singleton().getAllOpNames();
    std::ranges::sort(names, {}, [](const auto& name) { return c10::toString(name); });
    return names;
  }();
  for (int i = 0; i < 1000; ++i) {
    const c10::OperatorName& name = one_of(random, all);
    const auto op = c10::Dispatcher::singleton().findSchema(name);
    if (name.name.starts_with("aten::") && op &&
        std::ranges::all_of(node.at("inputs"), [&](const json& input) {
          return op->schema().argumentIndexWithName(input.value("name", "")).has_value();
        })) {
      const std::string overload = name.overload_name.empty() ? "default" : name.overload_name;
      return "torch.ops.aten." + name.name.substr(6) + "." + overload;
    }
  }
  return "torch.ops.aten.relu.default";
}

/// A value somewhere below.
static json& somewhere(Random& random, json& root) {
  json* at = &root;
  while (at->is_structured() && !at->empty() && random() % 10 != 0) {
    at = &*std::next(at->begin(), static_cast<int64_t>(random() % at->size()));
  }
  return *at;
}

static json changed_number(Random& random, const json& value) {
  static std::vector<json> odd{0,         1,   -1,        2,         3,          7,
                               -2,        100, 1'000'000, 1LL << 31, 1LL << 40,  LLONG_MAX,
                               LLONG_MIN, 0.5, 1e30,      "NaN",     "Infinity", nullptr};
  const int64_t near = value.is_number_integer() ? value.get<int64_t>() % (1 << 20) : 1;
  return random() % 2 == 0 ? one_of(random, odd) : json(near + (random() % 2 == 0 ? 1 : -1));
}

/// Changes the value, or what is directly below it.
static void change_value(Random& random, json& value, json& whole) {
  if (value.is_structured() && !value.empty() && random() % 4 != 0) {
    const auto child = std::next(value.begin(), static_cast<int64_t>(random() % value.size()));
    const auto other = std::next(value.begin(), static_cast<int64_t>(random() % value.size()));
    const auto way = random() % 3;
    if (way == 0) {
      value.erase(child);
    } else if (way == 1 && value.is_array()) {
      value.push_back(json(*child));
    } else {
      std::swap(*child, *other);
    }
  } else if (value.is_number()) {
    value = changed_number(random, value);
  } else if (value.is_boolean()) {
    value = !value.get<bool>();
  } else { // a value of the same kind from elsewhere
    json other = somewhere(random, whole);
    for (int i = 0; i < 20 && other.type() != value.type(); ++i) {
      other = somewhere(random, whole);
    }
    value = other;
  }
}

static void change_program(Random& random, json& program) {
  json& graph = program.at("graph_module").at("graph");
  json& nodes = graph.at("nodes");
  json& node = nodes.at(random() % std::max<size_t>(1, nodes.size()));
  switch (random() % 8) {
    case 0:
      node["target"] = like(random, node);
      break;
    case 1: { // an argument of another operator
      json& other = nodes.at(random() % nodes.size());
      change_value(random, somewhere(random, node["inputs"]), other["inputs"]);
      break;
    }
    case 2:
      change_value(random, nodes, nodes);
      break;
    case 3: // something beside the nodes
      change_value(random, somewhere(random, program), program);
      break;
    case 4:
      change_value(random, somewhere(random, program.at("graph_module").at("signature")), program);
      break;
    default:
      change_value(random, somewhere(random, random() % 4 == 0 ? node : node["inputs"]), nodes);
  }
}

static void change_record(Random& random, const std::string& name, std::string& bytes) {
  if (name.ends_with(".json")) {
    json source = json::parse(bytes);
    const bool model = name.starts_with("models/");
    try {
      for (auto changes = 1 + random() % 2; changes > 0; --changes) {
        model ? change_program(random, source)
              : change_value(random, somewhere(random, source), source);
      }
    } catch (const json::exception&) { // the first left no place for the second
    }
    bytes = source.dump();
  } else if (!bytes.empty()) {
    bytes[random() % bytes.size()] ^= static_cast<char>(1u << (random() % 8));
    bytes.resize(bytes.size() - (random() % 4 == 0 ? random() % bytes.size() : 0));
  }
}

/// Writes a changed program: mostly its graph, sometimes what is beside it, or bytes of the zip.
static void write_random(Random& random, const std::string& from, const std::string& to) {
  const auto part = random() % 20;
  if (part == 0) {
    std::string bytes = read_file(from);
    change_record(random, "", bytes);
    std::ofstream(to, std::ios::binary) << bytes;
    return;
  }
  write_changed(from, to, [&](const std::string& name, std::string& bytes) {
    const bool model = name.starts_with("models/");
    if (part < 3 ? !model && random() % 3 == 0 : model) {
      change_record(random, name, bytes);
    }
  });
}

/// 0: refused when it was loaded. 1: refused when it was called. 2: an operator failed. 3: it ran.
static int end_of(const std::string& path, const NamedTensors& inputs, Random& random) {
  std::optional<ExportedModule> module;
  try {
    module = ExportedModule::load(path, {.substitutions = random() % 2 == 0});
  } catch (const Error&) {
    return 0;
  }
  for (const std::string& output : (*module)->outputs()) {
    (*module)->output_layer(output);
  }
  (*module)->describe();
  (*module)->train(random() % 4 != 0);
  NamedTensors outputs;
  try {
    outputs = (*module)->forward(inputs);
  } catch (const Error& error) {
    return error.text().starts_with("aten.") || error.text().starts_with("_operator.") ? 2 : 1;
  }
  try {
    for (const auto& [name, output] : outputs) {
      if (output.requires_grad() && random() % 2 == 0) {
        output.sum().backward();
      }
    }
  } catch (const std::exception&) { // of LibTorch, whose backward it is
  }
  return 3;
}

TEST(ExportedFuzz, AChangedProgramIsAnErrorOrRuns) {
  std::vector<std::string> programs{"encoder", "conv_net", "conv_net", "experts",
                                    "experts", "dropped",  "two_modes"};
  const testing_support::TemporaryFolder folder;
  const std::string path = folder.path() / "x.pt2";
  const MemoryLimit limit(memory_stats().live_bytes + (int64_t{1} << 28));
  const int64_t rounds = number_from("HASTEN_RANDOM_ROUNDS", 300);
  const int64_t first = number_from("HASTEN_RANDOM_SEED", 0);
  int64_t ends[4] = {};
  for (int64_t round = first; round < first + rounds; ++round) {
    Random random(static_cast<uint64_t>(round));
    torch::manual_seed(static_cast<uint64_t>(round));
    const std::string& program = one_of(random, programs);
    SCOPED_TRACE("HASTEN_RANDOM_SEED=" + std::to_string(round) + " " + program);
    write_random(random, golden_path(program + ".pt2"), path);
    ASSERT_NO_THROW(++ends[end_of(path, golden_case(program + "/0").in, random)]);
  }
  EXPECT_GE(5 * (ends[2] + ends[3]), rounds) << "too few reach an operator";
  std::printf("refused: %ld, input refused: %ld, operator failed: %ld, ran: %ld\n", ends[0],
              ends[1], ends[2], ends[3]);
}

} // namespace hasten::exported_test
