#include "shared_places.h"

#include <ATen/ATen.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <type_traits>

#include "hasten/base/error.h"

namespace hasten::detail {

/// The memory of this process's tensors.
class SharedTensors {
 public:
  uint64_t add(std::shared_ptr<const SharedMemory> memory) {
    const std::lock_guard<std::mutex> lock(mutex_);
    blocks_[++last_] = std::move(memory);
    return last_;
  }
  void remove(uint64_t number) {
    std::shared_ptr<const SharedMemory> last; // freed without the mutex
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(number);
    last = std::move(found->second);
    blocks_.erase(found);
    ++removed_;
  }
  uint64_t removed() const { return removed_; }
  std::optional<SharedPlace> find(const char* at) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [number, block] : blocks_) {
      if (at >= block->data() && at < block->data() + block->bytes()) {
        return SharedPlace{block, number, static_cast<uint64_t>(at - block->data())};
      }
    }
    return std::nullopt;
  }
  std::shared_ptr<const SharedMemory> memory(uint64_t number) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = blocks_.find(number);
    return found == blocks_.end() ? nullptr : found->second;
  }

 private:
  mutable std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<const SharedMemory>> blocks_{}; // few and large
  uint64_t last_ = 0;
  std::atomic<uint64_t> removed_{0};
};

static SharedTensors& shared_tensors() {
  static auto* const tensors = new SharedTensors; // tensors may outlive static destructors
  return *tensors;
}

at::Tensor shared_zeros(int64_t numel, const at::TensorOptions& options) {
  const size_t bytes =
      static_cast<size_t>(numel) * c10::elementSize(c10::typeMetaToScalarType(options.dtype()));
  if (bytes >= kLeastShared && options.device().is_cpu()) {
    try {
      auto memory = std::make_shared<const SharedMemory>(bytes);
      char* const data = memory->data();
      const uint64_t number = shared_tensors().add(std::move(memory));
      const auto free = [number](void*) { shared_tensors().remove(number); };
      return at::from_blob(data, {numel}, free, options);
    } catch (const Error&) { // too little memory of this kind
    }
  }
  return at::zeros({numel}, options);
}

std::optional<SharedPlace> find_shared(const char* begin) { return shared_tensors().find(begin); }

using Opening = SharedPlaces::Opening;
static_assert(std::is_trivially_copyable_v<Opening>);

void SharedPlaces::write(const std::optional<SharedPlace>& own, char* to) {
  Opening opening;
  if (own) {
    opening.number = own->number;
    opening.offset = own->offset;
    opening.address = own->memory->address();
    named_.insert(own->number);
  }
  std::memcpy(to, &opening, sizeof(opening));
}

uint64_t SharedPlaces::take_freed() {
  const uint64_t removed = shared_tensors().removed();
  if (removed != looked_at_) {
    const auto gone = std::ranges::find_if(
        named_, [](uint64_t number) { return shared_tensors().memory(number) == nullptr; });
    if (gone != named_.end()) {
      return named_.extract(gone).value();
    }
    looked_at_ = removed;
  }
  return 0;
}

void SharedPlaces::forget(int rank, uint64_t freed) {
  if (freed != 0) {
    known_[static_cast<size_t>(rank)].erase(freed);
  }
}

SharedPlaces::Way SharedPlaces::read(const std::vector<const char*>& openings) {
  openings_.resize(openings.size());
  asked_.clear();
  bool copied = false;
  for (size_t i = 0; i < openings.size(); ++i) {
    Opening& opening = openings_[i];
    std::memcpy(&opening, openings[i], sizeof(opening));
    const auto found = known_[i].find(opening.number);
    copied |= opening.number == 0 || (found != known_[i].end() && !found->second);
    if (found == known_[i].end()) {
      asked_.push_back(i);
    }
  }
  return copied ? Way::copied : asked_.empty() ? Way::direct : Way::asked;
}

bool SharedPlaces::map() {
  try {
    for (const size_t i : asked_) {
      const Opening& opening = openings_[i];
      const bool here = opening.address.pid == ::getpid(); // of this rank, or of another thread
      auto memory = here ? shared_tensors().memory(opening.number)
                         : std::make_shared<const SharedMemory>(opening.address);
      if (memory == nullptr) {
        return false;
      }
      known_[i][opening.number] = here && std::cmp_equal(i, rank_) ? nullptr : memory;
    }
    return true;
  } catch (const Error&) {
    return false;
  }
}

SharedPlaces::Way SharedPlaces::settle(const std::vector<const char*>& answers) {
  if (std::ranges::all_of(answers, [](const char* answer) { return *answer != 0; })) {
    return Way::direct;
  }
  for (const size_t i : asked_) {
    known_[i][openings_[i].number] = std::nullopt;
  }
  return Way::copied;
}

std::vector<const char*> SharedPlaces::data() const {
  std::vector<const char*> begins(openings_.size(), nullptr);
  for (size_t i = 0; i < openings_.size(); ++i) {
    if (!std::cmp_equal(i, rank_)) {
      begins[i] = (*known_[i].at(openings_[i].number))->data() + openings_[i].offset;
    }
  }
  return begins;
}

} // namespace hasten::detail
