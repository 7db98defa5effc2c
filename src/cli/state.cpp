#include "hasten/state/saved_state.h"

#include <c10/util/ArrayRef.h>

#include <algorithm>
#include <iostream>
#include <nlohmann/json.hpp>
#include <vector>

#include "hasten/base/exit_code.h"
#include "hasten/base/log.h"
#include "run.h"

namespace hasten {

namespace detail {

void print_state(const nlohmann::json& state) {
  std::cout << "saved by " << state.at("world_size") << " process(es), strategy "
            << state.at("strategy").get<std::string>() << ", after "
            << state.at("windows_completed") << " optimizer steps\n";
  size_t widest = 0;
  for (const auto& tensor : state.at("tensors")) {
    widest = std::max(widest, tensor.at("name").get<std::string>().size());
  }
  for (const auto& tensor : state.at("tensors")) {
    const auto name = tensor.at("name").get<std::string>();
    std::cout << "  " << name << std::string(widest - name.size() + 2, ' ')
              << tensor.at("dtype").get<std::string>() << " "
              << at::IntArrayRef(tensor.at("shape").get<std::vector<int64_t>>());
    if (!tensor.at("rows").is_null()) {
      std::cout << ", rows of dimension 0 by rank:";
      for (const auto& rows : tensor.at("rows")) {
        std::cout << " " << rows.at(2);
      }
    }
    std::cout << "\n";
  }
  std::cout << std::flush;
}

} // namespace detail

int run_command(const StateCommand& command) {
  if (command.action == "consolidate") {
    consolidate_state({command.folders.begin(), command.folders.end()}, command.output,
                      command.model);
    log_info("wrote " + command.output);
    return kExitOk;
  }
  const nlohmann::json state = describe_state(command.folders[0]);
  if (command.json) {
    std::cout << state.dump(2) << '\n' << std::flush;
  } else {
    detail::print_state(state);
  }
  return kExitOk;
}

} // namespace hasten
