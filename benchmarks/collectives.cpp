// Collectives alone, fp32. Started by `hasten launch`, or by hosts.py as ranks of several hosts.
//   collectives shm|gloo|auto [--rounds N] [--large]
// Rank 0 prints one JSON line: for each operation and size the best and the median seconds of a
// call, of the slowest rank. "copy": every rank copies as many bytes in its own memory at the same
// time, the limit of what goes through memory. For all_reduce and copy the size is that of the
// tensor, for reduce_scatter and all_gather that of all rows. The tensors are the group's
// (allocate_tensor), as those of DDP and FSDP are; those of all_reduce_elsewhere are torch's.
// --large: all_reduce of 64 MiB alone.
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "hasten/base/world.h"
#include "hasten/comm/communicator.h"

namespace hasten {

using Clock = std::chrono::steady_clock;

/// Seconds of each call, on the rank that was slowest in it.
static nlohmann::json measure(Communicator& group, int calls, const std::function<void()>& call) {
  at::Tensor seconds = torch::empty({calls}, torch::kDouble);
  for (int i = -3; i < calls; ++i) {
    group.barrier("start");
    const auto start = Clock::now();
    call();
    const std::chrono::duration<double> time = Clock::now() - start;
    if (i >= 0) {
      seconds[i] = time.count();
    }
  }
  group.all_reduce(seconds, ReduceOp::MAX, "times");
  return {{"best", seconds.min().item<double>()}, {"median", seconds.median().item<double>()}};
}

static int run(const std::string& backend, int rounds, bool large) {
  const auto group = Communicator::create(world_from_environment(), {.backend = backend});
  const int64_t world = group->world_size();
  nlohmann::json result;
  if (large) {
    const at::Tensor tensor = group->allocate_tensor(16 << 20, torch::kFloat).fill_(1);
    result["all_reduce_65536k"] = measure(
        *group, 5 * rounds, [&] { group->all_reduce(tensor, ReduceOp::AVG, "all_reduce"); });
  }
  for (const int64_t bytes : {4 << 10, 256 << 10, 4 << 20, 64 << 20}) {
    if (large) {
      break;
    }
    const auto calls = static_cast<int>(std::clamp<int64_t>((256 << 20) / bytes, 10, 400)) * rounds;
    const std::string size = std::to_string(bytes >> 10) + "k";
    const auto allocate = [&](int64_t numel) {
      return group->allocate_tensor(numel, torch::kFloat).fill_(1);
    };
    const at::Tensor tensor = allocate(bytes / 4);
    const at::Tensor other = torch::ones({bytes / 4});
    const at::Tensor rows = allocate(bytes / 4).view({world, -1});
    const at::Tensor row = allocate(bytes / 4 / world);
    const auto note = [&](const char* name, const std::function<void()>& call) {
      result[name + ("_" + size)] = measure(*group, calls, call);
    };
    note("all_reduce", [&] { group->all_reduce(tensor, ReduceOp::AVG, "all_reduce"); });
    note("all_reduce_elsewhere",
         [&] { group->all_reduce(other, ReduceOp::AVG, "all_reduce elsewhere"); });
    note("reduce_scatter",
         [&] { group->reduce_scatter_async(row, rows, "reduce_scatter").wait(); });
    note("all_gather", [&] { group->all_gather_async(rows, row, "all_gather").wait(); });
    note("copy", [&] {
      std::memcpy(other.data_ptr(), tensor.const_data_ptr(), static_cast<size_t>(bytes));
    });
  }
  result["barrier"] = measure(*group, 1000 * rounds, [&] { group->barrier("measured"); });
  result["values"] =
      measure(*group, 300 * rounds, [&] { group->all_gather_object(7, "measured"); });
  if (group->is_main()) {
    std::printf("%s\n", result.dump().c_str());
  }
  group->close();
  return 0;
}

} // namespace hasten

int main(int argc, char** argv) {
  at::set_num_threads(1);
  int rounds = 1;
  bool large = false;
  for (int i = 2; i < argc; ++i) {
    large = large || std::strcmp(argv[i], "--large") == 0;
    rounds =
        std::strcmp(argv[i], "--rounds") == 0 && i + 1 < argc ? std::stoi(argv[i + 1]) : rounds;
  }
  if (argc < 2) {
    std::fprintf(stderr, "collectives shm|gloo|auto [--rounds N] [--large]\n");
    return 2;
  }
  return hasten::run(argv[1], rounds, large);
}
