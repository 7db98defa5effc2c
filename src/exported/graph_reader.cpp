#include "graph_reader.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "operators.h"

namespace hasten::detail {

using nlohmann::json;
using Kind = GraphArgument::Kind;

[[noreturn]] static void refuse(const std::string& what, const std::string& expected,
                                const std::string& fix = "export the module again") {
  throw InputError(kExportedLoad, what, expected, fix);
}

at::ScalarType scalar_type_of(int64_t code) {
  static const std::map<int64_t, at::ScalarType> kTypes{
      {1, at::kByte},        {2, at::kChar},          {3, at::kShort},          {4, at::kInt},
      {5, at::kLong},        {6, at::kHalf},          {7, at::kFloat},          {8, at::kDouble},
      {9, at::kComplexHalf}, {10, at::kComplexFloat}, {11, at::kComplexDouble}, {12, at::kBool},
      {13, at::kBFloat16}};
  const auto found = kTypes.find(code);
  if (found == kTypes.end()) {
    refuse("dtype number " + std::to_string(code), "a dtype that hasten knows: 1 to 13");
  }
  return found->second;
}

static int64_t memory_format_of(int64_t code) {
  constexpr at::MemoryFormat kFormats[] = {
      at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast,
      at::MemoryFormat::ChannelsLast3d, at::MemoryFormat::Preserve};
  if (code < 1 || code > 4) {
    refuse("memory format number " + std::to_string(code), "1 to 4");
  }
  return static_cast<int64_t>(kFormats[code - 1]);
}

/// A float is a number, or "Infinity", "-Infinity" or "NaN".
static double number_of(const json& value) {
  if (!value.is_string()) {
    return value.get<double>();
  }
  const auto& text = value.get_ref<const std::string&>();
  const std::map<std::string, double> known{{"Infinity", std::numeric_limits<double>::infinity()},
                                            {"-Infinity", -std::numeric_limits<double>::infinity()},
                                            {"NaN", std::numeric_limits<double>::quiet_NaN()}};
  return known.at(text);
}

static GraphArgument constant(c10::IValue value) {
  GraphArgument argument;
  argument.constant = std::move(value);
  return argument;
}

std::pair<std::string, const json*> entry_of(const json& value) {
  if (!value.is_object() || value.size() != 1) {
    refuse("the program has " + shortened(value.dump(), 80), "an object with one entry");
  }
  return {value.begin().key(), &value.begin().value()};
}

void require_known(const json& object, const std::string& what,
                   std::initializer_list<const char*> known) {
  for (const auto& [name, value] : object.items()) {
    if (std::ranges::find(known, name) == known.end() && !value.empty() && value != false &&
        value != "") {
      refuse(what + " has a field " + shortened(name, 80), "those of version 8.20 of the format",
             "export it with the PyTorch that this LibTorch belongs to");
    }
  }
}

/// What an operator's schema expects of an argument. Null type: there is no schema.
struct Expected {
  c10::TypePtr type{};
  bool optional = false;
  c10::TypePtr element{}; // of a list
};

static Expected expected_of(const c10::TypePtr& schema) {
  Expected expected{.type = schema};
  if (schema && schema->kind() == c10::TypeKind::OptionalType) {
    expected.optional = true;
    expected.type = schema->castRaw<c10::OptionalType>()->getElementType();
  }
  if (expected.type && expected.type->kind() == c10::TypeKind::ListType) {
    expected.element = expected.type->castRaw<c10::ListType>()->getElementType();
  }
  return expected;
}

static bool is_whole(const c10::TypePtr& type) {
  constexpr c10::TypeKind kWhole[] = {c10::TypeKind::IntType, c10::TypeKind::SymIntType,
                                      c10::TypeKind::LayoutType, c10::TypeKind::ScalarTypeType,
                                      c10::TypeKind::MemoryFormatType};
  return type && std::ranges::find(kWhole, type->kind()) != std::end(kWhole);
}

/// Whether a number that is known in a call may be the argument.
static bool takes_numbers(c10::TypeKind kind) {
  using T = c10::TypeKind;
  constexpr T kKinds[] = {T::IntType, T::SymIntType, T::FloatType, T::NumberType, T::BoolType};
  return std::ranges::find(kKinds, kind) != std::end(kKinds);
}

/// Whether torch, which does not ask, has the dtype, layout or memory format.
static bool known_code(c10::TypeKind kind, int64_t code) {
  using T = c10::TypeKind;
  const int64_t last = kind == T::ScalarTypeType     ? static_cast<int64_t>(at::kBFloat16)
                       : kind == T::MemoryFormatType ? 3
                                                     : static_cast<int64_t>(at::kStrided);
  return kind == T::IntType || kind == T::SymIntType || (code >= 0 && code <= last);
}

/// The value in the form that the schema expects; none if it does not fit.
static std::optional<c10::IValue> fitted(const c10::IValue& value, const Expected& expected) {
  using T = c10::TypeKind;
  if (value.isNone()) {
    return expected.optional || expected.type->kind() == T::GeneratorType ? std::optional(value)
                                                                          : std::nullopt;
  }
  const bool number = value.isInt() || value.isDouble() || value.isBool();
  switch (expected.type->kind()) {
    case T::TensorType: // a number stands for a tensor without dimensions
      return number ? std::optional(wrapped_number(value)) : std::nullopt;
    case T::FloatType:
      return value.isInt()      ? std::optional<c10::IValue>(static_cast<double>(value.toInt()))
             : value.isDouble() ? std::optional(value)
                                : std::nullopt;
    case T::NumberType:
      return number ? std::optional(value) : std::nullopt;
    case T::BoolType:
      return value.isBool() ? std::optional(value) : std::nullopt;
    case T::StringType:
      return value.isString() ? std::optional(value) : std::nullopt;
    case T::ListType:
      if (is_whole(expected.element) && value.isInt()) { // one number stands for a list of one
        return c10::List<int64_t>({value.toInt()});
      }
      if (expected.element->kind() == T::FloatType && value.isIntList()) {
        const auto whole = value.toIntVector();
        return std::vector<double>(whole.begin(), whole.end());
      }
      return (is_whole(expected.element) && value.isIntList()) ||
                     (expected.element->kind() == T::FloatType && value.isDoubleList()) ||
                     (expected.element->kind() == T::BoolType && value.isBoolList())
                 ? std::optional(value)
                 : std::nullopt;
    default:
      return is_whole(expected.type) && value.isInt() &&
                     known_code(expected.type->kind(), value.toInt())
                 ? std::optional(value)
                 : std::nullopt;
  }
}

class GraphReader {
 public:
  explicit GraphReader(bool substitutions) : substitutions_(substitutions) {}

  ReadGraph read(const json& source) {
    require_known(
        source, "a graph",
        {"inputs", "outputs", "nodes", "tensor_values", "sym_int_values", "sym_bool_values",
         "sym_float_values", "custom_obj_values", "is_single_tensor_return"});
    for (const json& input : source.at("inputs")) {
      const auto [kind, value] = entry_of(input);
      // A constant input has no value in the graph.
      graph_.inputs.push_back(value->is_object() ? define(name_of(*value), kind == "as_tensor")
                                                 : define("", false));
    }
    for (const json& node : source.at("nodes")) {
      read_node(node);
    }
    for (const json& output : source.at("outputs")) {
      graph_.outputs.push_back(argument_of(output, {}, "the graph's outputs"));
    }
    return {std::move(graph_), std::move(slots_)};
  }

 private:
  static const std::string& name_of(const json& value) {
    return (value.contains("name") ? value.at("name") : value.at("as_name"))
        .get_ref<const std::string&>();
  }

  /// A new slot. An empty name is of a value that nobody reads.
  int define(const std::string& name, bool tensor) {
    const int slot = static_cast<int>(graph_.is_tensor.size());
    if (!name.empty() && !slots_.emplace(name, slot).second) {
      refuse("the graph makes " + name + " twice", "each value once");
    }
    graph_.is_tensor.push_back(tensor);
    graph_.is_leaf.push_back(false);
    return slot;
  }

  GraphArgument slot_argument(const json& value, const std::string& reader) const {
    const std::string& name = name_of(value);
    const auto found = slots_.find(name);
    if (found == slots_.end()) {
      refuse(reader + " reads " + name + ", which no earlier operator makes",
             "a value that exists");
    }
    GraphArgument argument;
    argument.kind = Kind::slot;
    argument.slot = found->second;
    return argument;
  }

  bool is_tensor(const GraphArgument& argument) const { return graph_.tensor(argument.slot); }

  GraphArgument list_argument(Kind kind, const json& values, const std::string& reader) const {
    GraphArgument list;
    list.kind = kind;
    for (const json& value : values) {
      const bool named = value.contains("name") || value.contains("as_name");
      GraphArgument item = named ? slot_argument(value, reader) : argument_of(value, {}, reader);
      const bool fits = item.slot >= 0
                            ? is_tensor(item) == (kind != Kind::numbers)
                            : item.constant.isNone() == (kind == Kind::optional_tensors) &&
                                  (kind != Kind::numbers || item.constant.isInt());
      if (!fits) {
        refuse(reader + " has a list with " + shortened(value.dump(), 80), "values of one kind");
      }
      list.items.push_back(std::move(item));
    }
    return list;
  }

  /// Does not compare it with `expected`, which only decides the kind of a list.
  GraphArgument argument_of(const json& source, const Expected& expected,
                            const std::string& reader) const {
    const auto [kind, value] = entry_of(source);
    if (kind == "as_none") {
      return {};
    }
    if (kind == "as_tensor") {
      return slot_argument(*value, reader);
    }
    if (kind == "as_optional_tensor" || kind == "as_sym_int" || kind == "as_sym_float" ||
        kind == "as_sym_bool") {
      return value->contains("as_name") ? slot_argument(*value, reader)
                                        : argument_of(*value, expected, reader);
    }
    if (kind == "as_tensors" || kind == "as_optional_tensors") {
      const bool optional =
          kind == "as_optional_tensors" ||
          (expected.element && expected.element->kind() == c10::TypeKind::OptionalType);
      return list_argument(optional ? Kind::optional_tensors : Kind::tensors, *value, reader);
    }
    if (kind == "as_sym_ints") {
      return list_argument(Kind::numbers, *value, reader);
    }
    if (kind == "as_device") { // the module's, wherever it was exported
      GraphArgument device;
      device.kind = Kind::device;
      return device;
    }
    return constant(constant_of(kind, *value));
  }

  static c10::IValue constant_of(const std::string& kind, const json& value) {
    if (kind == "as_int") {
      return value.get<int64_t>();
    }
    if (kind == "as_float") {
      return number_of(value);
    }
    if (kind == "as_bool") {
      return value.get<bool>();
    }
    if (kind == "as_string") {
      return value.get<std::string>();
    }
    if (kind == "as_ints") {
      return c10::IValue(value.get<std::vector<int64_t>>());
    }
    if (kind == "as_floats") {
      return c10::IValue(mapped(value, number_of));
    }
    if (kind == "as_bools") {
      c10::List<bool> list;
      for (const json& item : value) {
        list.push_back(item.get<bool>());
      }
      return list;
    }
    if (kind == "as_scalar_type") {
      return static_cast<int64_t>(scalar_type_of(value.get<int64_t>()));
    }
    if (kind == "as_memory_format") {
      return memory_format_of(value.get<int64_t>());
    }
    if (kind == "as_layout" && value == 7) {
      return static_cast<int64_t>(at::kStrided);
    }
    refuse("an argument " + kind + " " + shortened(value.dump(), 80),
           "a kind of argument that hasten reads");
  }

  /// The argument for a parameter of an operator.
  GraphArgument bound(const json& source, const c10::Argument& parameter, const GraphNode& node) {
    const std::string reader = node.target + "'s " + parameter.name();
    const Expected expected = expected_of(parameter.real_type());
    GraphArgument argument = argument_of(source, expected, reader);
    using T = c10::TypeKind;
    bool fits = false;
    switch (argument.kind) {
      case Kind::slot:
        if (expected.type->kind() == T::TensorType && !is_tensor(argument)) {
          argument.kind = Kind::wrapped_number;
          fits = true;
        } else if (expected.element && is_whole(expected.element) && !is_tensor(argument)) {
          GraphArgument list;
          list.kind = Kind::numbers;
          list.items.push_back(std::move(argument));
          argument = std::move(list);
          fits = true;
        } else {
          fits = is_tensor(argument) ? expected.type->kind() == T::TensorType
                                     : takes_numbers(expected.type->kind());
        }
        break;
      case Kind::constant: {
        auto value = fitted(argument.constant, expected);
        fits = value.has_value();
        argument.constant = value.value_or(c10::IValue());
        break;
      }
      case Kind::tensors:
        fits = expected.element && expected.element->kind() == T::TensorType;
        break;
      case Kind::optional_tensors:
        fits = expected.element && expected.element->kind() == T::OptionalType;
        break;
      case Kind::numbers:
        fits = is_whole(expected.element);
        break;
      case Kind::device:
        fits = expected.type->kind() == T::DeviceObjType;
        break;
      case Kind::wrapped_number:
        break;
    }
    if (!fits) {
      refuse(reader + " is " + shortened(source.dump(), 80), parameter.real_type()->str());
    }
    return argument;
  }

  static void refuse_library(const std::string& target) {
    const std::string library = target.substr(0, target.find('.'));
    if (library != "aten" && library != "prims" && library != "higher_order") {
      refuse("the graph calls " + target + ", an operator of the library " + library,
             "PyTorch's own operators: a file could call any function of a library that the "
             "process has loaded, so none is allowed",
             "write the module with PyTorch's operators and export it again");
    }
  }

  void bind_operator(GraphNode& node, const json& source) {
    if (!is_allowed_operator(node.target)) {
      refuse("the graph calls " + node.target, "an operator of PyTorch that computes values",
             "leave it out of the module, or ask for it");
    }
    const size_t space = node.target.find('.');
    const size_t overload = node.target.rfind('.');
    const std::string suffix = node.target.substr(overload + 1);
    node.op = c10::Dispatcher::singleton().findSchema(
        {node.target.substr(0, space) + "::" + node.target.substr(space + 1, overload - space - 1),
         suffix == "default" ? "" : suffix});
    if (!node.op) {
      refuse("this LibTorch has no operator " + node.target,
             "a LibTorch that is not older than the PyTorch that exported the module");
    }
    std::map<std::string, const json*> given;
    for (const json& input : source.at("inputs")) {
      require_known(input, "an argument of " + node.target, {"name", "arg", "kind"});
      given[input.at("name").get<std::string>()] = &input.at("arg");
    }
    for (const c10::Argument& parameter : node.op->schema().arguments()) {
      const auto found = given.find(parameter.name());
      if (parameter.name() == "output_size" && node.target.starts_with("aten.repeat_interleave.")) {
        node.arguments.push_back({}); // torch does not compare it with the repeats
        given.erase(parameter.name());
      } else if (found != given.end()) {
        node.arguments.push_back(bound(*found->second, parameter, node));
        given.erase(found);
      } else if (parameter.default_value()) {
        node.arguments.push_back(constant(*parameter.default_value()));
      } else {
        refuse(node.target + " lacks its argument " + parameter.name(), "each argument");
      }
    }
    if (!given.empty()) {
      refuse(node.target + " has no argument " + given.begin()->first,
             "the arguments of this LibTorch's operator");
    }
    node.without_gradient = node.target == "aten.detach.default";
    bind_mode(node);
  }

  void bind_mode(GraphNode& node) const {
    const auto [index, off] = mode_argument(node.target);
    if (index >= 0) {
      const c10::IValue& flag = node.arguments[static_cast<size_t>(index)].constant;
      const bool on = flag.isBool() ? flag.toBool() : flag.isDouble() && flag.toDouble() != 0;
      node.mode_argument = on ? index : -1;
      node.off = off;
    }
  }

  void bind_higher_order(GraphNode& node, const json& source) {
    GraphValues settings;
    std::shared_ptr<const Graph> inner;
    for (const json& input : source.at("inputs")) {
      const auto [kind, value] = entry_of(input.at("arg"));
      if (kind == "as_graph") {
        inner = std::make_shared<const Graph>(
            GraphReader(substitutions_).read(value->at("graph")).graph);
      } else if (GraphArgument argument = argument_of(input.at("arg"), {}, node.target); inner) {
        node.arguments.push_back(std::move(argument));
      } else {
        settings.push_back(kind == "as_int" ? c10::IValue() : argument.constant); // no dtype is one
      }
    }
    node.without_gradient = node.target == "higher_order.wrap_with_set_grad_enabled" &&
                            settings.size() == 1 && settings[0].isBool() && !settings[0].toBool();
    node.function = inner && inner->inputs.size() == node.arguments.size()
                        ? higher_order(node.target, settings, inner)
                        : GraphFunction();
    if (!node.function) {
      refuse(
          "the graph has " + node.target,
          "a graph without control flow: wrap_with_set_grad_enabled and wrap_with_autocast are known",
          "write the module without torch.cond, scan or while_loop");
    }
  }

  void read_node(const json& source) {
    GraphNode node;
    node.target = source.at("target").get<std::string>();
    require_known(
        source, "the call of " + node.target,
        {"target", "inputs", "outputs", "metadata", "name", "is_hop_single_tensor_return"});
    if (node.target.starts_with("torch.ops.")) {
      node.target.erase(0, std::string_view("torch.ops.").size());
      refuse_library(node.target);
    }
    if (is_assertion(node.target)) {
      return;
    }
    read_origin(node, source.at("metadata"));
    node.function = size_function(node.target);
    if (node.function) {
      for (const json& input : source.at("inputs")) {
        node.arguments.push_back(argument_of(input.at("arg"), {}, node.target));
      }
    } else if (node.target.starts_with("higher_order.")) {
      bind_higher_order(node, source);
    } else {
      bind_operator(node, source);
      node.function = replacement(node.target, *node.op, substitutions_);
      node.check = argument_check(node.target);
    }
    read_outputs(node, source.at("outputs"));
    graph_.nodes.push_back(std::move(node));
  }

  void read_outputs(GraphNode& node, const json& outputs) {
    for (const json& output : outputs) {
      const auto [kind, value] = entry_of(output);
      GraphOutput made{.list = kind == "as_tensors", .tensor = kind == "as_tensor"};
      for (const json& item : made.list ? *value : json::array({*value})) {
        const bool tensor = made.list || kind == "as_tensor";
        made.slots.push_back(item.is_object() ? define(name_of(item), tensor) : -1);
      }
      node.outputs.push_back(std::move(made));
    }
    if (node.op && node.op->schema().returns().size() < node.outputs.size()) {
      refuse(node.target + " has " + std::to_string(node.outputs.size()) + " results",
             "as many as the operator");
    }
  }

  /// Module, block and line of Python, from what export keeps of them.
  static void read_origin(GraphNode& node, const json& metadata) {
    for (const std::string& level : split(metadata.value("nn_module_stack", ""), ";")) {
      const std::vector<std::string> parts = split(level, ","); // key, path, class
      if (parts.size() < 3 || parts[0] == parts[1]) {
        continue;
      }
      node.module = parts[1];
      const size_t dot = parts[1].rfind('.');
      const bool numbered =
          dot != std::string::npos && dot + 1 < parts[1].size() &&
          parts[1].find_first_not_of("0123456789", dot + 1) == std::string::npos &&
          parts[1].find(".parametrizations.") == std::string::npos;
      if (numbered && node.block.empty()) {
        const size_t call = parts[0].find('@');
        node.block = parts[1] + (call == std::string::npos ? "" : parts[0].substr(call));
      }
    }
    // The last line 'File "/usr/lib/model.py", line 12, in forward'.
    const std::string trace = metadata.value("stack_trace", "");
    const size_t file = trace.rfind("File \"");
    const size_t line = trace.find("\", line ", file);
    if (file != std::string::npos && line != std::string::npos) {
      const std::string path = trace.substr(file + 6, line - file - 6);
      const size_t number = line + 8;
      node.line = path.substr(path.rfind('/') + 1) + ":" +
                  trace.substr(number, trace.find_first_not_of("0123456789", number) - number);
    }
  }

  const bool substitutions_;
  Graph graph_{};
  std::map<std::string, int> slots_{};
};

ReadGraph read_graph(const json& source, bool substitutions) {
  return GraphReader(substitutions).read(source);
}

} // namespace hasten::detail
