// Does what hasten does with a device, one thing after the other, and prints which went well.
//   gpu_probe [--device NAME] [--backend NAME]
// The collectives are those of one rank over the real back end, which Communicator::create leaves out
// in a world of one. Ends with 1 if something failed. scripts/gpu_check.sh runs it.
#include <torch/torch.h>

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <stdexcept>
#include <string>

#include "hasten/base/process.h"
#include "hasten/comm/backend.h"
#include "hasten/comm/communicator.h"
#include "hasten/core/device.h"
#include "hasten/core/memory.h"
#include "hasten/core/side_stream.h"
#include "meet/world_link.h"

namespace hasten {

static void require(bool holds, const std::string& what) {
  if (!holds) {
    throw std::runtime_error("not so: " + what);
  }
}

/// Runs `check` and prints how it ended.
static int probe(const char* name, const std::function<void()>& check) {
  try {
    check();
    std::printf("fine    %s\n", name);
    return 0;
  } catch (const std::exception& error) {
    std::printf("FAILED  %s: %s\n", name, error.what());
    return 1;
  }
}

static void probe_memory(const at::Device& device) {
  const int64_t before = memory_stats(device).live_bytes;
  const at::Tensor tensor = at::empty({1 << 20}, at::TensorOptions(device));
  require(memory_stats(device).live_bytes >= before + (4 << 20), "4 MiB more are alive");
  require(memory_left(device) > 0, "memory is left");
}

static void probe_streams(const at::Device& device) {
  const detail::SideStream side(device);
  const at::Tensor host = detail::pinned(torch::arange(1 << 20, at::kFloat));
  const at::Tensor up = side.upload(host);
  side.join();
  const at::Tensor doubled = up * 2;
  const at::Tensor back = detail::pinned(torch::zeros({1 << 20}));
  side.follow();
  side.copy(back, doubled);
  side.mark().synchronize();
  require(at::equal(back, host * 2), "a tensor goes up and down on a side stream");
}

static void probe_random(const at::Device& device) {
  const auto states = detail::generator_states({device});
  const at::Tensor first = torch::rand({100}, at::TensorOptions(device));
  detail::set_generator_states(states);
  require(at::equal(first, torch::rand({100}, at::TensorOptions(device))),
          "a restored generator draws the same numbers");
}

/// Every collective of one rank leaves its values as they are.
static void probe_collectives(Communicator& world, const at::TensorOptions& options) {
  const at::Tensor values = torch::arange(64, at::kFloat).to(options);
  const at::Tensor row = values.view({1, 64});
  const auto same = [&](const char* name, const at::Tensor& result) {
    require(at::equal(result.view({64}), values), name);
  };
  for (const ReduceOp op : {ReduceOp::SUM, ReduceOp::AVG, ReduceOp::MAX, ReduceOp::PRODUCT}) {
    const at::Tensor all = values.clone();
    world.all_reduce(all, op, "probe all_reduce");
    same("all_reduce", all);
  }
  const at::Tensor one = values.clone(), two = values.clone();
  world.reduce_async(one, 0, ReduceOp::SUM, "probe reduce").wait();
  same("reduce", one);
  world.broadcast(one, 0, "probe broadcast");
  same("broadcast", one);
  const std::function<Work(at::Tensor)> moves[] = {
      [&](at::Tensor to) { return world.all_gather_async(std::move(to), values, "probe gather"); },
      [&](at::Tensor to) { return world.gather_async(std::move(to), values, 0, "probe root"); },
      [&](at::Tensor to) { return world.all_to_all_async(std::move(to), row, "probe to all"); },
  };
  for (const auto& move : moves) {
    const at::Tensor to = torch::zeros_like(row);
    move(to).wait();
    same("a gathering collective", to);
  }
  const at::Tensor scattered = torch::zeros_like(values), summed = torch::zeros_like(values);
  world.scatter_async(scattered, row, 0, "probe scatter").wait();
  same("scatter", scattered);
  world.reduce_scatter_async(summed, row, "probe reduce_scatter").wait();
  same("reduce_scatter", summed);
  using Kind = Collective::Kind;
  world.start_together({{Kind::all_reduce, "probe one", one}, {Kind::all_reduce, "probe two", two}})
      .wait();
  same("start_together", two);
  same("all_gather_rows", world.all_gather_rows(row, "probe rows"));
}

static void probe_abort(Communicator& world, const at::Device& device) {
  world.abort("the probe ends it");
  try {
    world.all_reduce(torch::zeros({1}, device), ReduceOp::SUM, "probe after abort");
  } catch (const CommunicationError& error) {
    require(std::strstr(error.what(), "the probe ends it") != nullptr, error.what());
    return;
  }
  require(false, "a collective after abort() throws");
}

static std::shared_ptr<Communicator> world_of_one(const at::Device& device,
                                                  const std::string& backend) {
  const auto [fd, port] = listen_on_loopback();
  ::close(fd);
  World world;
  world.master_port = port;
  CommunicatorOptions options;
  options.timeout = std::chrono::seconds(60);
  options.device = device;
  options.backend = resolved_backend(backend, device);
  const auto link = detail::WorldLink::join(world, options);
  std::printf("        %s\n", options.backend.c_str());
  return backend_factory(options.backend)({link->world(), options, link});
}

static int probe_all(const std::string& name, const std::string& backend) {
  at::Device device = at::kCPU;
  std::shared_ptr<Communicator> world;
  int failed = probe("device", [&] {
    device = detail::choose_device(name, World{}, false).device;
    require(!device.is_cpu(), "device=" + name + " is not the CPU");
    std::printf("        %s\n", device.str().c_str());
  });
  if (failed != 0) {
    return 1;
  }
  failed += probe("memory", [&] { probe_memory(device); });
  failed += probe("streams and pinned memory", [&] { probe_streams(device); });
  failed += probe("random generator", [&] { probe_random(device); });
  failed += probe(("world of one over " + backend).c_str(),
                  [&] { world = world_of_one(device, backend); });
  if (world) {
    for (const auto dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      failed += probe(("collectives in " + std::string(c10::toString(dtype))).c_str(),
                      [&] { probe_collectives(*world, at::TensorOptions(device).dtype(dtype)); });
    }
    failed += probe("abort", [&] { probe_abort(*world, device); });
    world->close();
  }
  detail::synchronize(device);
  return failed == 0 ? 0 : 1;
}

} // namespace hasten

int main(int argc, char** argv) {
  std::string device = "auto", backend = "auto";
  for (int i = 1; i < argc; i += 2) {
    const bool names_device = std::strcmp(argv[i], "--device") == 0;
    if (i + 1 == argc || (!names_device && std::strcmp(argv[i], "--backend") != 0)) {
      std::fprintf(stderr, "usage: gpu_probe [--device NAME] [--backend NAME]\n");
      return 2;
    }
    (names_device ? device : backend) = argv[i + 1];
  }
  hasten::install_memory_meter();
  return hasten::probe_all(device, backend);
}
