// The back end "shm" in a program that knows c10d alone: a process group whose collectives of CPU
// tensors go through memory that the processes share. On one host it replaces ProcessGroupGloo.
//
//   hasten launch --nproc 2 16_shared_memory
//   torchrun --nproc-per-node 2 --no-python 16_shared_memory
#include <torch/torch.h>

#include <cstdlib>
#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "hasten/comm/shared_memory_backend.h"

namespace examples {

/// Of the environment variable. Empty if it is not set.
std::string value(const char* variable) {
  const char* text = std::getenv(variable);
  return text == nullptr ? "" : text;
}

void run() {
  if (value("MASTER_PORT").empty()) {
    throw std::runtime_error("MASTER_PORT is not set. Fix: start the program with hasten launch");
  }
  const int rank = std::stoi(value("RANK"));
  const int size = std::stoi(value("WORLD_SIZE"));

  // [group]
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(std::stoi(value("MASTER_PORT")));
  options.isServer = rank == 0 && value("TORCHELASTIC_USE_AGENT_STORE") != "True";
  options.numWorkers = size;
  auto store = c10::make_intrusive<c10d::TCPStore>(value("MASTER_ADDR"), options);

  auto group = c10::make_intrusive<c10d::ProcessGroup>(store, rank, size);
  group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::CUSTOM,
                    hasten::make_shared_memory_backend(store, rank, size));
  // [/group]

  std::vector<torch::Tensor> gradients{torch::full({1'000'000}, rank + 1.0)};
  auto work = group->getBackend(c10::DeviceType::CPU)->allreduce(gradients);
  work->wait();
  std::cout << "rank " + std::to_string(rank) + ": the sum of the ranks' gradients is " +
                   std::to_string(gradients[0][0].item<int>()) + "\n"
            << std::flush;
  group->getBackend(c10::DeviceType::CPU)->barrier()->wait(); // before rank 0's store ends
}

} // namespace examples

int main() {
  try {
    examples::run();
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
}
