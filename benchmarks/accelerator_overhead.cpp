// What the accelerator costs where it has nothing to do: one process, one batch a
// step. Its loop compared with LibTorch's own, step by step in turns, one thread.
//   accelerator_overhead [--steps N] [--smoke]
// Prints one JSON line per case: {"case", "steps", "ours", "plain"}, the median
// seconds of a step: batch from the loader, forward, backward, AdamW, zero_grad.
#include <torch/torch.h>

#include <chrono>
#include <functional>

#include "hasten/accelerator/accelerator.h"
#include "hasten/optim/adamw.h"
#include "overhead.h"

namespace hasten {

// Five layers: ten parameters, and a step that is nothing but overhead.
struct TenParametersImpl : torch::nn::Module {
  TenParametersImpl() {
    for (int i = 0; i < 5; ++i) {
      layers->push_back(torch::nn::Linear(4, 4));
    }
    register_module("layers", layers);
  }
  torch::nn::Sequential layers;
};
TORCH_MODULE(TenParameters);

// The same batch again and again: an epoch of 512.
struct Repeated {
  std::vector<Batch> batches;
  auto begin() const { return batches.begin(); }
  auto end() const { return batches.end(); }
};

Repeated repeat(Batch batch, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) {
    batch.indices.push_back(row);
  }
  return {std::vector<Batch>(512, batch)};
}

// Turns through a range for ever: `step` is called with one batch of it.
template <typename Range>
class Turns {
 public:
  explicit Turns(Range& range) : range_(range), at_(range.begin()), end_(range.end()) {}
  template <typename Step>
  double next(const Step& step) {
    const auto start = std::chrono::steady_clock::now();
    if (!(at_ != end_)) {
      at_ = range_.begin();
    }
    step(*at_);
    ++at_;
    const std::chrono::duration<double> time = std::chrono::steady_clock::now() - start;
    return time.count();
  }

 private:
  Range& range_;
  decltype(std::declval<Range&>().begin()) at_;
  decltype(std::declval<Range&>().end()) end_;
};

template <typename Model>
using LossOf = std::function<at::Tensor(Model&, const Batch&)>;

// `make` gives the same model each time.
template <typename Model>
void compare(const char* name, int64_t steps, const std::function<Model()>& make,
             const LossOf<Model>& loss_of, Repeated data) {
  const auto options = torch::optim::AdamWOptions(1e-4);
  Model plain = make();
  AdamW plain_optimizer(plain->parameters(), options);
  Model ours = make();
  AdamW adamw(ours->parameters(), options);
  Accelerator accelerator({.seed = {}, .device = "cpu"});
  at::set_num_threads(1);
  auto [model, optimizer, loader] = accelerator.prepare(ours, adamw, data);

  Turns plain_turns(data);
  Turns our_turns(loader);
  std::vector<double> plain_seconds, our_seconds;
  const auto plain_step = [&] {
    return plain_turns.next([&](const Batch& batch) {
      loss_of(plain, batch).backward();
      plain_optimizer.step();
      plain_optimizer.zero_grad();
    });
  };
  const auto our_step = [&, &model = model, &optimizer = optimizer] {
    return our_turns.next([&](const Batch& batch) {
      auto window = accelerator.accumulate(model);
      accelerator.backward(loss_of(model, batch));
      optimizer.step();
      optimizer.zero_grad();
    });
  };
  for (int64_t step = -steps / 10 - 1; step < steps; ++step) {
    // Who goes first changes: the first finds other things in the caches.
    double first, second;
    if (step % 2 == 0) {
      first = plain_step();
      second = our_step();
    } else {
      second = our_step();
      first = plain_step();
    }
    if (step >= 0) {
      plain_seconds.push_back(first);
      our_seconds.push_back(second);
    }
  }
  print_case(name, our_seconds, plain_seconds);
  accelerator.end_training();
}

void compare_bert_mini(int64_t steps) {
  constexpr int64_t kRows = 8, kTokens = 32;
  Batch batch;
  batch.tensors["input_ids"] = torch::randint(1, 30'000, {kRows, kTokens});
  batch.tensors["labels"] = torch::randint(0, 2, {kRows});
  compare<PreTrainedModel>(
      "bert_mini", steps, seeded_bert_mini,
      [](PreTrainedModel& model, const Batch& b) {
        return torch::nn::functional::cross_entropy(model->forward({b["input_ids"]}).logits,
                                                    b["labels"]);
      },
      repeat(batch, kRows));
}

void compare_ten_parameters(int64_t steps) {
  Batch batch;
  batch.tensors["x"] = torch::randn({8, 4});
  compare<TenParameters>(
      "ten_parameters", steps,
      [] {
        set_seed(1);
        return TenParameters();
      },
      [](TenParameters& model, const Batch& b) {
        return model->layers->forward(b["x"]).square().mean();
      },
      repeat(batch, 8));
}

} // namespace hasten

int main(int argc, char** argv) {
  const int64_t steps = hasten::steps_of(argc, argv, 100, 3);
  if (steps == 0) {
    return 2;
  }
  hasten::compare_bert_mini(steps);
  hasten::compare_ten_parameters(100 * steps);
  return 0;
}
