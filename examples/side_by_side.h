// What the programs of docs/guides/side-by-side.md share: a small data set, a small model, and a
// function that runs one section and prints its final loss.
#pragma once

#include <torch/torch.h>

#include <cstdint>
#include <cstdio>
#include <memory>
#include <numeric>
#include <vector>

#include "hasten/base/exit_code.h"
#include "hasten/base/world.h"
#include "hasten/core/block_call.h"
#include "hasten/core/random.h"
#include "hasten/data/dataset.h"
#include "hasten/data/loader.h"

namespace side_by_side {

using torch::Tensor;
namespace F = torch::nn::functional;
using Data = std::shared_ptr<const hasten::Dataset>;

constexpr int64_t kEpochs = 10;

// Eight random numbers for each sample. The label says which of the first four is the largest.
class Samples : public hasten::Dataset {
 public:
  Samples(int64_t count, uint64_t seed) {
    torch::manual_seed(seed);
    inputs_ = torch::randn({count, 8});
    labels_ = inputs_.narrow(1, 0, 4).argmax(1);
  }
  int64_t size() const override { return inputs_.size(0); }
  hasten::Batch collate(const std::vector<int64_t>& indices) const override {
    const Tensor rows = torch::tensor(indices, torch::kLong);
    hasten::Batch batch;
    batch.tensors["inputs"] = inputs_.index_select(0, rows); // [B, 8]
    batch.tensors["labels"] = labels_.index_select(0, rows); // [B]
    batch.indices = indices;
    return batch;
  }

 private:
  Tensor inputs_, labels_;
};

inline Data samples(int64_t count, uint64_t seed) { return std::make_shared<Samples>(count, seed); }

// [net]
struct NetImpl : torch::nn::Module {
  NetImpl()
      : hidden(register_module("hidden", torch::nn::Linear(8, 16))),
        output(register_module("output", torch::nn::Linear(16, 4))) {}
  Tensor forward(const Tensor& inputs) {
    return output(torch::relu(hasten::call_block(hidden, inputs)));
  }
  torch::nn::Linear hidden, output;
};
TORCH_MODULE(Net);
// [/net]

// The mean loss of the model over all samples. Local, except for sharded models.
template <typename Model>
double final_loss(Model& model, const Data& data) {
  const torch::NoGradGuard no_grad;
  std::vector<int64_t> all(static_cast<size_t>(data->size()));
  std::iota(all.begin(), all.end(), 0);
  const hasten::Batch batch = data->collate(all);
  model->eval();
  const Tensor outputs = model(batch["inputs"]);
  return F::cross_entropy(outputs, batch["labels"]).item<double>();
}

// Every rank runs the section. Rank 0 prints its name and its final loss.
inline void run(const char* name, double (*section)(const Data& train)) {
  const Data train = samples(128, 1);
  hasten::set_seed(42); // as the constructor of hasten::Accelerator does
  const double loss = section(train);
  if (hasten::world_from_environment().rank == 0) {
    std::printf("%s: final loss %.6f\n", name, loss);
  }
}

} // namespace side_by_side
