// A communication hook of your own: it sends gradients in 8 bits, a quarter of the bytes. What
// rounding loses in a step is added to the next step's gradient (error feedback), so it is late but
// not lost. The same hook works in Local SGD (AveragerOptions::comm_hook).
//
//   hasten launch --nproc 2 17_int8_comm_hook examples/reviews.csv
#include <torch/torch.h>

#include <map>
#include <memory>
#include <string>

#include "hooked_training.h"

namespace examples {

constexpr int64_t kBlock = 256; // numbers that share a scale

// [blocks, 256] numbers -> [blocks, 4 + 256] bytes: the scale of a block as a float, then the numbers
// as multiples of it. A block with NaN or infinity gets such a scale, and so reaches every rank.
torch::Tensor compress(const torch::Tensor& numbers) {
  const auto scale = (numbers.abs().amax(1, true) / 127).clamp_min(1e-30);
  const auto multiples = (numbers / scale).round().nan_to_num(0).clamp(-127, 127);
  return torch::cat({scale.view(torch::kChar), multiples.to(torch::kChar)}, 1);
}

torch::Tensor decompress(const torch::Tensor& bytes) {
  const auto scale = bytes.narrow(1, 0, 4).contiguous().view(torch::kFloat);
  return scale * bytes.narrow(1, 4, kBlock).to(torch::kFloat);
}

class Int8Hook final : public hasten::CommHook {
 public:
  explicit Int8Hook(bool error_feedback) : error_feedback_(error_feedback) {}

  // An all-reduce of bytes would overflow. So each rank gets its part of every rank's gradients
  // (all-to-all), adds them as floats, and sends the sum to all (all-gather). This function starts
  // the first collective. The steps that it returns run when backward has started all buckets.
  Step reduce(hasten::Communicator& ranks, const hasten::GradientBucket& bucket) override {
    const int64_t world = ranks.world_size(), count = bucket.buffer.numel();
    const int64_t blocks = (count + world * kBlock - 1) / (world * kBlock); // of a rank's part
    std::string name = "int8";
    for (const hasten::BucketGradient& entry : bucket.gradients) {
      name += " " + entry.name; // buckets change once, when DDP has learned their order
    }
    const auto numbers = torch::zeros({world * blocks * kBlock});
    numbers.narrow(0, 0, count).copy_(bucket.buffer);
    const auto sent = compress_with_feedback(numbers.view({-1, kBlock}), name);
    const auto parts = torch::empty_like(sent);
    auto work = ranks.all_to_all_async(parts.view({world, -1}), sent.view({world, -1}), name);
    return [=, this, &ranks, buffer = bucket.buffer, summed = false]() mutable {
      work.wait();
      if (!summed) {
        const auto sum = decompress(parts).view({world, blocks, kBlock}).sum(0);
        const auto own = compress_with_feedback(sum, name + ", sum");
        work = ranks.all_gather_async(sent.view({world, -1}), own.view(-1), name);
        return summed = true; // call this again
      }
      buffer.copy_(decompress(sent).view(-1).narrow(0, 0, count));
      return false;
    };
  }
  // Ranks with other settings are an error at the start.
  std::string description() const override {
    return error_feedback_ ? "int8 with error feedback" : "int8";
  }
  double bytes_per_number() const override { return 1 + 4.0 / kBlock; }

  // What was lost belongs to this rank and to the state of the run.
  void reset() override { lost_.clear(); }
  void save_state(hasten::NamedTensors& tensors, nlohmann::json&) const override {
    tensors.insert(lost_.begin(), lost_.end());
  }
  void load_state(const hasten::NamedTensors& tensors, const nlohmann::json&) override {
    lost_ = tensors;
  }

 private:
  torch::Tensor compress_with_feedback(torch::Tensor numbers, const std::string& name) {
    const auto lost = lost_.find(name);
    if (lost != lost_.end()) {
      numbers = numbers + lost->second;
    }
    const auto bytes = compress(numbers);
    if (error_feedback_) {
      lost_[name] = (numbers - decompress(bytes)).nan_to_num(0, 0, 0);
    }
    return bytes;
  }

  const bool error_feedback_;
  hasten::NamedTensors lost_{};
};

void train(const std::string& csv, const std::string& save_to) {
  train_with_hook(csv, save_to, [](bool feedback) { return std::make_shared<Int8Hook>(feedback); });
}

} // namespace examples

int main(int argc, char** argv) { return examples::run_example(argc, argv, examples::train); }
