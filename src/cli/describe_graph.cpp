#include "hasten/base/exit_code.h"
#include "hasten/exported/exported_module.h"
#include "run.h"

namespace hasten {

int run_command(const ExportCommand& command) {
  const std::filesystem::path path = command.describe;
  const ExportedModule module = ExportedModule::load(path, {.weights = false});
  detail::write_answers("cli::export", "", module->describe() + "\n", 1);
  return kExitOk;
}

} // namespace hasten
