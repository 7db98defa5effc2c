#include "hasten/data/prefetch.h"

#include <ATen/Parallel.h>

namespace hasten::detail {

std::thread start_loader_thread(std::function<void()> body) {
  return std::thread([threads = at::get_num_threads(), body = std::move(body)] {
    at::set_num_threads(threads); // OpenMP counts for each thread alone
    body();
  });
}

} // namespace hasten::detail
