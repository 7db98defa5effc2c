// A library that gives the test device to a program that is not linked to it:
//
//   LD_PRELOAD=build/release/bin/test_device.so hasten train --device test_device …
//
// A program that leaves an error between streams prints it at its end, and ends with code 70.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "support/device_backend.h"
#include "support/test_device.h"

namespace hasten::testing_support {

static void end_with_errors() {
  const std::vector<std::string> errors = take_device_errors();
  for (const std::string& error : errors) {
    std::fprintf(stderr, "error: test device: %s\n", error.c_str());
  }
  if (!errors.empty()) {
    std::fflush(nullptr);
    ::_exit(70);
  }
}

[[gnu::constructor]] static void preload() {
  install_test_device();
  register_test_backend();
  std::atexit(end_with_errors);
}

} // namespace hasten::testing_support
