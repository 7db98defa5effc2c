// A user's program. It uses a part with LibTorch and a part without.
// [program]
#include <ATen/ATen.h>
#include <hasten/base/error.h>
#include <hasten/optim/schedule.h>

#include <iostream>

int main() {
  const auto schedule = hasten::linear_schedule(10, 110);
  const at::Tensor halfway = at::ones({2, 2}) * schedule(60);
  try {
    throw hasten::InputError("consumer::main", "size=0", "1 or more");
  } catch (const hasten::Error& error) {
    std::cout << error.what() << '\n';
  }
  std::cout << "sum " << halfway.sum().item<double>() << '\n';
}
// [/program]
