#include "hasten/data/prefetch.h"

#include <ATen/Parallel.h>

#include "hasten/data/ordered_workers.h"

namespace hasten::detail {

std::thread start_loader_thread(std::function<void()> body) {
  return std::thread([threads = at::get_num_threads(), body = std::move(body)] {
    at::set_num_threads(threads); // OpenMP has a setting per thread
    body();
  });
}

std::thread start_worker_thread(std::function<void()> body) {
  return std::thread([body = std::move(body)] {
    at::set_num_threads(1); // there may be as many workers as cores
    body();
  });
}

} // namespace hasten::detail
