#include "local_windows.h"

#include <ATen/ATen.h>

#include <ATen/ATen.h>
#include "hasten/base/error.h"
#include "mixed_precision.h"
#include "model_set.h"
#include "optimizer_set.h"
#include "state/state_contents.h"
#include "window_set.h"

namespace hasten::detail {

void LocalWindows::open(LocalScope& scope) {
  constexpr const char* where = "accelerator::LocalSGD";
  if (scope_ != nullptr) {
    throw InputError(where, "a scope of this accelerator is open already", "one scope at a time",
                     "call finish() of the other one first");
  }
  if (windows_.in_window(scope.model())) {
    throw InputError(where, "the model is in the middle of a window",
                     "a complete window, or none yet", "open the scope before the loop");
  }
  if (!models_[scope.model()].sync_norms.layers.empty()) {
    throw InputError(where,
                     "the model has synchronised batch norm layers: each forward waits "
                     "for the other ranks",
                     "layers local to a rank, since ranks train independently inside the scope",
                     "set AcceleratorOptions::sync_batchnorm to false");
  }
  scope_ = &scope;
}

bool LocalWindows::is_local() const {
  return scope_ != nullptr && windows_.is_local(scope_->model());
}

void LocalWindows::set_local(bool local) { windows_.set_local(scope_->model(), local); }

void LocalWindows::close() noexcept {
  windows_.set_local(scope_->model(), false);
  scope_ = nullptr;
}

// Inside a scope every rank has its own parameters, buffers and moments.
void LocalWindows::collect(StateToSave& parts) const {
  parts.shared_values["local"] = scope_ != nullptr;
  if (scope_ == nullptr) {
    return;
  }
  const size_t model = scope_->model();
  auto& values = parts.own_values["local"];
  values["scope"] = save_below(*scope_, parts.own, "local.scope.");
  put_below(parts.own, "local.model.", named_model_tensors(*models_[model].parallel->module()));
  values["attempted"] = windows_.attempted(model) == windows_.completed(model);
  optimizers_.collect_local(model, parts);
  if (precision_.scales()) {
    parts.own_values["loss_scale"] = precision_.save();
  }
}

// Before the windows: it says which of them reduce.
void LocalWindows::add_scope_to(StateToLoad& load) {
  const bool saved = load.shared.value("local", false);
  if (saved != (scope_ != nullptr)) {
    refuse_state(
        load.state_file(),
        std::string("it was saved ") + (saved ? "inside" : "outside") + " a LocalSGD scope",
        std::string("a state saved ") + (saved ? "outside" : "inside") +
            " one, as load_state() is called here",
        saved ? "open the scope before load_state()" : "open the scope after load_state()");
  }
  if (saved) {
    load.add(load.rank_file, scope_, tensors_below(load.own_tensors, "local.scope."),
             load.own.at("local").at("scope"));
  }
}

void LocalWindows::add_to(StateToLoad& load) {
  if (scope_ == nullptr) {
    return;
  }
  const size_t model = scope_->model();
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (const auto& [name, target] : named_model_tensors(*models_[model].parallel->module())) {
    const auto found = load.own_tensors.find("local.model." + name);
    if (found == load.own_tensors.end() || found->second.sizes() != target.sizes()) {
      refuse_state(load.rank_file, "\"" + name + "\" is missing or has another shape");
    }
    copies.emplace_back(target, found->second);
  }
  load.copy(std::move(copies));
  optimizers_.add_local_to(model, load);
  const bool attempted = load.own.at("local").at("attempted").get<bool>();
  load.apply.push_back([this, model, attempted] {
    windows_.note_attempt(model, attempted);
    scope_->loaded();
  });
}

} // namespace hasten::detail
