#include <ATen/Parallel.h>

#include "hasten/data/ordered_workers.h"

namespace hasten::detail {

std::thread start_worker_thread(std::function<void()> body, int torch_threads) {
  const int threads = torch_threads > 0 ? torch_threads : at::get_num_threads();
  return std::thread([threads, body = std::move(body)] {
    at::set_num_threads(threads); // OpenMP has a setting per thread
    body();
  });
}

} // namespace hasten::detail
