// What is known of single operators.
#pragma once

#include <string>
#include <string_view>

#include "graph.h"

namespace hasten::detail {

/// Whether an untrusted graph may call the operator: "aten.add.Tensor".
bool is_allowed_operator(std::string_view target);
/// Operators that only check what the exporting machine had, or what the inputs' sizes promise.
bool is_assertion(std::string_view target);
/// Functions of sizes: "_operator.add", "aten.sym_size.int". Empty if there is none.
GraphFunction size_function(const std::string& target);
/// What hasten runs instead of an operator for every caller, or with `substitutions`. Empty: nothing.
GraphFunction replacement(const std::string& target, const c10::OperatorHandle& op,
                          bool substitutions);
/// For operators that do not check all their arguments. Null for others.
GraphCheck argument_check(const std::string& target);
/// Index of the argument that the module's mode decides, and its value in evaluation. -1: none.
std::pair<int, c10::IValue> mode_argument(const std::string& target);
/// "higher_order.wrap_with_set_grad_enabled" and "…wrap_with_autocast" around `inner`. `settings`: the arguments
/// before it. Empty for other targets.
GraphFunction higher_order(const std::string& target, const GraphValues& settings,
                           const std::shared_ptr<const Graph>& inner);

} // namespace hasten::detail
