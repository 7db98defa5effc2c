#include "hasten/comm/communicator.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Synchronized.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>

#include "groups/back_ends.h"
#include "groups/group_core.h"
#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "hasten/base/process.h"
#include "hasten/base/recorded_error.h"
#include "hasten/base/text.h"
#include "hasten/core/memory.h"
#include "hasten/core/recompute.h"
#include "shm/stages.h"
#include "tensor_checks.h"

namespace hasten {

namespace detail {

struct JoinedWork final : Work::State {
  JoinedWork(std::vector<Work> all_in, std::function<void()> rest_in)
      : all(std::move(all_in)), rest(std::move(rest_in)) {}

  void wait() override {
    for (Work& one : all) {
      one.wait();
    }
    const std::lock_guard<std::mutex> lock(mutex);
    if (rest) {
      rest();
      rest = nullptr;
    }
  }
  bool done() const noexcept override {
    return std::ranges::all_of(all, [](const Work& one) { return one.done(); });
  }
  CommClock::time_point ended() const noexcept override {
    CommClock::time_point last = all.empty() ? made : CommClock::time_point{};
    for (const Work& one : all) {
      last = std::max(last, one.ended());
    }
    return done() ? last : CommClock::time_point{};
  }

  const CommClock::time_point made = CommClock::now();
  std::vector<Work> all;
  std::mutex mutex;
  std::function<void()> rest; // empty once it has run
};

Work joined_work(std::vector<Work> all, std::function<void()> rest) {
  return Work(std::make_shared<JoinedWork>(std::move(all), std::move(rest)));
}

/// `rows` are [rank, …].
static void sum_rows(const at::Tensor& output, const at::Tensor& rows) {
  const at::NoGradGuard no_grad;
  const int64_t count = rows.size(0);
  if (count == 2 && rows.scalar_type() == output.scalar_type()) {
    at::Tensor sum = output;
    at::add_out(sum, rows[0], rows[1]);
    return;
  }
  output.copy_(rows[0]);
  for (int64_t rank = 1; rank < count; ++rank) {
    output.add_(rows[rank]);
  }
}

struct KnownBackend {
  BackendFactory make;
  std::optional<at::DeviceType> type{}; // whose memory it moves
  bool through_host = false;
};

struct KnownBackends {
  std::map<std::string, KnownBackend> by_name{};
  std::map<at::DeviceType, std::string> by_type{};
};

static void add_device_backend(KnownBackends& all, const std::string& name, at::DeviceType type,
                               DeviceBackendFactory factory) {
  all.by_name[name] = {[factory = std::move(factory)](const BackendContext& context) {
                         return make_device_group(context, factory);
                       },
                       type};
  all.by_type[type] = name;
}

static c10::Synchronized<KnownBackends>& backends() {
  static c10::Synchronized<KnownBackends> all = [] {
    KnownBackends known;
    known.by_name["gloo"] = {make_host_group, {}, true};
    known.by_name["shm"] = {make_host_group, {}, true};
    add_device_backend(known, "nccl", at::kCUDA, make_nccl);
    return c10::Synchronized<KnownBackends>(std::move(known));
  }();
  return all;
}

static KnownBackend known_backend(const std::string& name) {
  const KnownBackend found = backends().withLock([&](const auto& all) {
    const auto at = all.by_name.find(name);
    return at == all.by_name.end() ? KnownBackend() : at->second;
  });
  if (!found.make) {
    std::vector<std::string> names = backend_names();
    names.insert(names.begin(), "auto");
    throw InputError("comm::create", "no such back end: backend=" + name, "one of " + joined(names),
                     write_nearest(name, names));
  }
  return found;
}

void check_world(const World& world, const CommunicatorOptions& options) {
  if (world.world_size < 1 || world.rank < 0 || world.rank >= world.world_size) {
    throw InputError(
        "comm::create",
        "rank=" + std::to_string(world.rank) + ", world_size=" + std::to_string(world.world_size),
        "0 <= rank < world_size");
  }
  const std::chrono::milliseconds longest = from_seconds(1e7);
  for (const auto& time : {options.timeout, options.heartbeat_timeout}) {
    if (time.count() <= 0 || time > longest) {
      throw InputError(
          "comm::create",
          "timeout=" + std::to_string(options.timeout.count()) +
              " ms, heartbeat_timeout=" + std::to_string(options.heartbeat_timeout.count()) + " ms",
          "1 ms to 1e7 s each");
    }
  }
  if (world.world_size > 1 && world.store_file.empty() &&
      (world.master_port < 1 || world.master_port > 65535)) {
    throw InputError("comm::create", "master_port=" + std::to_string(world.master_port),
                     "1 to 65535", "set MASTER_PORT, or start with hasten launch");
  }
}

} // namespace detail

void register_backend(const std::string& name, BackendFactory factory) {
  if (name.empty() || !factory) {
    throw InputError("comm::register_backend", "name=" + name, "a name and a factory");
  }
  detail::backends().withLock([&](auto& all) { all.by_name[name] = {std::move(factory)}; });
}

void register_device_backend(const std::string& name, at::DeviceType type,
                             DeviceBackendFactory factory) {
  if (name.empty() || !factory || type == at::kCPU) {
    throw InputError("comm::register_device_backend",
                     "name=" + name + ", type=" + c10::DeviceTypeName(type, true),
                     "a name, a factory, and a type of device that is not the CPU");
  }
  detail::backends().withLock(
      [&](auto& all) { detail::add_device_backend(all, name, type, std::move(factory)); });
}

std::string resolved_backend(const std::string& name, const at::Device& device) {
  if (name == "auto") {
    return detail::backends().withLock([&](const auto& all) {
      const auto at = all.by_type.find(device.type());
      return at == all.by_type.end() ? name : at->second;
    });
  }
  const auto type = detail::known_backend(name).type;
  if (type && *type != device.type()) {
    throw InputError("comm::create", "backend=" + name + " with device=" + device.str(),
                     "a device of type " + c10::DeviceTypeName(*type, true),
                     "set backend=auto, or device=" + c10::DeviceTypeName(*type, true));
  }
  return name;
}

bool uses_scratch(const CommunicatorOptions& options) { return options.backend == "gloo"; }

bool moves_host_memory(const std::string& name) {
  return detail::backends().withLock([&](const auto& all) {
    const auto at = all.by_name.find(name);
    return at != all.by_name.end() && at->second.through_host;
  });
}

std::vector<std::string> backend_names() {
  return detail::backends().withLock([](const auto& all) {
    return mapped(all.by_name, [](const auto& known) { return known.first; });
  });
}

BackendFactory backend_factory(const std::string& name) { return detail::known_backend(name).make; }

std::string_view Collective::kind_name() const {
  constexpr std::array<std::string_view, 8> names{"all_reduce", "reduce",        "broadcast",
                                                  "all_gather", "gather",        "scatter",
                                                  "all_to_all", "reduce_scatter"};
  return names[static_cast<size_t>(kind)];
}

const at::Tensor& Collective::shared() const {
  return kind <= Kind::broadcast || kind == Kind::scatter ? output : input;
}

static double& waited_seconds() {
  static thread_local double seconds = 0;
  return seconds;
}

detail::WaitTime::WaitTime() : before_(waited_seconds()) {}

detail::WaitTime::~WaitTime() {
  if (!in_recompute()) { // set, because waits may be nested
    waited_seconds() = before_ + std::chrono::duration<double>(CommClock::now() - start_).count();
  }
}

void Work::wait() {
  if (state_) {
    const detail::WaitTime time;
    state_->wait();
  }
}

int64_t bytes_sent() { return tcp_bytes_sent() + detail::Stages::bytes_published; }

double seconds_waited() { return waited_seconds(); }

std::chrono::steady_clock::time_point Work::ended() const {
  return state_ ? state_->ended() : std::chrono::steady_clock::time_point{};
}

bool Work::done() const { return !state_ || state_->done(); }

std::shared_ptr<Communicator> Communicator::create(const World& world,
                                                   const CommunicatorOptions& options) {
  detail::check_world(world, options);
  CommunicatorOptions resolved = options;
  resolved.backend = resolved_backend(options.backend, options.device);
  if (world.world_size == 1) {
    return detail::make_local_group(resolved);
  }
  set_error_rank(world.rank, world.world_size);
  set_log_rank(world.rank, world.world_size);
  const auto link = detail::WorldLink::join(world, resolved, detail::transport_options(resolved));
  const BackendContext context{link->world(), resolved, link};
  return resolved.backend == "auto" ? detail::make_host_group(context)
                                    : backend_factory(resolved.backend)(context);
}

std::vector<nlohmann::json> Communicator::all_gather_object(const nlohmann::json& value,
                                                            std::string_view name) {
  return exchange("all_gather_object", name, value);
}

nlohmann::json Communicator::broadcast_object(const nlohmann::json& value, std::string_view name) {
  return exchange("broadcast_object", name, rank() == 0 ? value : nlohmann::json())[0];
}

std::vector<int> detail::ranks_of_host(const Communicator& group) { return group.host_members(); }

void Communicator::abort(const std::exception& error) noexcept {
  try {
    abort(message_of(error), error_kind(error));
  } catch (...) { // out of memory, at the end of the run
  }
}

std::optional<Survivors> Communicator::shrink() { return std::nullopt; }

at::Tensor Communicator::allocate_tensor(int64_t numel, const at::TensorOptions& options) {
  return at::zeros({numel}, options);
}

Work Communicator::reduce_scatter_by_all_to_all(const Collective& what) {
  const at::Tensor rows = what.scratch.defined() ? what.scratch : at::empty_like(what.input);
  return detail::joined_work({all_to_all_async(rows, what.input, what.name)},
                             [to = what.output.detach().view({what.output.numel()}),
                              from = rows.detach().view({world_size(), what.output.numel()})] {
                               detail::sum_rows(to, from);
                             });
}

Work Communicator::start_together(const std::vector<Collective>& what) {
  return detail::joined_work(mapped(what, [this](const Collective& one) { return start(one); }));
}

} // namespace hasten
