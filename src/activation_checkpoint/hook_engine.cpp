#include "hook_engine.h"

#include <torch/csrc/autograd/engine.h>

#include <mutex>

namespace hasten::detail {

static thread_local SavedHookFactory* hook_factory = nullptr;

HookScope::HookScope(SavedHookFactory* factory) : before_(hook_factory) { hook_factory = factory; }
HookScope::~HookScope() { hook_factory = before_; }

SavedHookFactory* current_hook_factory() { return hook_factory; }

class HookEngine final : public torch::autograd::Engine {
 public:
  // torch starts the threads of devices for one engine, the first that runs a backward. Both get
  // theirs here.
  HookEngine() {
    get_base_engine().initialize_device_threads_pool();
    start_device_threads();
  }
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return hook_factory == nullptr ? nullptr : hook_factory->make_hooks();
  }
};

// Leaked, because an engine's destructor stops its threads, and these may outlive static
// destructors.
static torch::autograd::Engine& hook_engine() {
  static auto* engine = new HookEngine;
  return *engine;
}

bool hook_engine_installed() {
  using torch::autograd::Engine;
  static std::once_flag once;
  std::call_once(once, [] {
    if (&Engine::get_default_engine() == &Engine::get_base_engine()) {
      torch::autograd::set_default_engine_stub(&hook_engine);
    }
  });
  return &Engine::get_default_engine() == &hook_engine();
}

} // namespace hasten::detail
