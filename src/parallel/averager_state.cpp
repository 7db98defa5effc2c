// The state of an Averager: its rounds, what it keeps between them, and a round
// between its two parts.
#include <ATen/ATen.h>

#include "averager_impl.h"
#include "hasten/base/error.h"
#include "hasten/core/named_tensors.h"

namespace hasten {

namespace detail {

void check_saved_round(int ranks, int ranks_here, int64_t fragment, int64_t fragments_here) {
  if (ranks != ranks_here) {
    throw InputError("parallel::Averager",
                     "the state has a round under way of " + std::to_string(ranks) + " ranks",
                     std::to_string(ranks_here) + " ranks, as here",
                     "go on with as many ranks, or save between rounds");
  }
  if (fragment < Averager::kAll || fragment >= fragments_here) {
    throw InputError("parallel::Averager",
                     "the state has a round under way of fragment=" + std::to_string(fragment),
                     "below " + std::to_string(fragments_here));
  }
}

} // namespace detail

// What was sent has been received by the time it is saved: the state of a round
// under way is the sum. So that it can be told from the state alone.
void Averager::save_state(NamedTensors& tensors, nlohmann::json& values) const {
  Impl::Round& round = impl_->round;
  if (round.open) {
    impl_->await_data();
  }
  values["rounds"] = impl_->rounds;
  values["open"] = round.open;
  values["ranks"] = round.open ? round.ranks : 0;
  values["weight"] = round.weight;
  values["fragment"] = round.fragment;
  values["learning_rate"] = round.learning_rate;
  for (size_t g = 0; g < impl_->groups.size(); ++g) {
    const auto& group = impl_->groups[g];
    const std::string number = std::to_string(g);
    if (group.anchor.defined()) {
      tensors.emplace("anchor." + number, group.anchor);
    }
    if (round.open && group.snapshot.defined()) { // not of a rank alone
      tensors.emplace("sum." + number, group.buffer);
      tensors.emplace("snapshot." + number, group.snapshot);
    }
  }
  const auto save = [&](const Stateful& part, const std::string& name) {
    NamedTensors own;
    nlohmann::json value = nlohmann::json::object();
    part.save_state(own, value);
    values[name] = std::move(value);
    for (const auto& [key, tensor] : own) {
      tensors.emplace(name + "." + key, tensor);
    }
  };
  if (impl_->options.outer) {
    save(*impl_->options.outer, "outer");
  }
  if (impl_->options.comm_hook) {
    save(*impl_->options.comm_hook, "hook");
  }
}

void Averager::load_state(const NamedTensors& tensors, const nlohmann::json& values) {
  constexpr const char* where = "parallel::Averager";
  const bool open = values.at("open").get<bool>();
  const int ranks = impl_->communicator->world_size();
  const bool sent = open && (ranks > 1 || impl_->has_anchor());
  const auto fragment = values.at("fragment").get<int64_t>();
  if (open) {
    detail::check_saved_round(values.at("ranks").get<int>(), ranks, fragment,
                              impl_->fragment_count);
  }
  const auto find = [&](const std::string& name, size_t g) {
    const auto found = tensors.find(name + "." + std::to_string(g));
    const int64_t numel = impl_->groups[g].numel;
    if (found == tensors.end() || found->second.numel() != numel ||
        found->second.scalar_type() != impl_->groups[g].dtype) {
      throw InputError(where,
                       "\"" + name + "." + std::to_string(g) + "\" in the state " +
                           (found == tensors.end() ? "is missing" : "has another size"),
                       std::to_string(numel) + " elements",
                       "go on with the model and settings that it was saved with");
    }
    return found->second;
  };
  for (const char* part : {"outer", "hook"}) {
    const bool here = std::string_view(part) == "outer" ? impl_->options.outer != nullptr
                                                        : impl_->options.comm_hook != nullptr;
    if (values.contains(part) != here) {
      throw InputError(where,
                       std::string("the state has ") + (here ? "no " : "an ") + part +
                           ", the options have " + (here ? "one" : "none"),
                       "the options that it was saved with");
    }
  }
  for (size_t g = 0; g < impl_->groups.size(); ++g) { // all is looked at first
    if (impl_->has_anchor()) {
      find("anchor", g);
    }
    if (sent) {
      find("sum", g);
      find("snapshot", g);
    }
  }
  if (impl_->options.outer) {
    impl_->options.outer->load_state(detail::tensors_below(tensors, "outer."), values["outer"]);
  }
  if (impl_->options.comm_hook) {
    impl_->options.comm_hook->load_state(detail::tensors_below(tensors, "hook."), values["hook"]);
  }
  at::NoGradGuard no_grad;
  if (!impl_->round.operations.empty()) { // they may still write into the old
    impl_->make_buffers();
  }
  for (size_t g = 0; g < impl_->groups.size(); ++g) {
    auto& group = impl_->groups[g];
    if (impl_->has_anchor()) {
      group.anchor.copy_(find("anchor", g));
    }
    if (sent) {
      group.buffer.copy_(find("sum", g));
      group.snapshot = find("snapshot", g).clone();
    }
  }
  impl_->rounds = values.at("rounds").get<int64_t>();
  impl_->report = {};
  impl_->report.round = impl_->rounds;
  impl_->spread = at::Tensor();
  impl_->spread_handle = {};
  impl_->round = {};
  impl_->round.open = open;
  impl_->round.ranks = ranks;
  impl_->round.corrects = open;
  impl_->round.weight = values.at("weight").get<double>();
  impl_->round.total = ranks == 1 ? 1 : -1;
  impl_->round.fragment = fragment;
  impl_->round.learning_rate = values.at("learning_rate").get<double>();
}

} // namespace hasten
