// Graphs of the test device. As on CUDA:
// - While a stream captures, its operators are recorded. What the host does that would wait for the
//   stream, or copy memory that is not pinned, is an error.
// - A capture computes nothing: at its end, memory is as it was before, and memory that it took is
//   full of NaN.
// - A replay does the recorded work on the same memory and draws new random numbers. Memory that the
//   capture took stays until the graph goes, also if its tensors are freed. Memory from before that is
//   freed when a replay uses it is an error.
#pragma once

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "support/device_memory.h"

namespace hasten::testing_support::machine {

/// What one operator did.
struct RecordedWork {
  std::string name{};
  std::vector<Operand> operands{};
  std::function<void()> again{};
};

/// A capture, and the graph that it makes.
struct Capture {
  int stream = 0;
  c10::DeviceIndex device = 0;
  uint64_t pool = 0;
  uint64_t first = 0; // blocks with a greater serial are taken by the capture
  std::vector<RecordedWork> work{};
  std::map<uint64_t, std::vector<char>> before{}; // [serial] memory that the capture writes
};

/// The capture of this stream, or nullptr.
Capture* capture_of(int stream);
/// Throws if the calling thread's stream captures.
void refuse_in_capture(const char* what);

} // namespace hasten::testing_support::machine
