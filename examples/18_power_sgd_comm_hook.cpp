// A communication hook that sends a gradient matrix M [n, m] as two thin factors, P [n, r] and
// Q [m, r]: PowerSGD (Vogels, Karimireddy, Jaggi, NeurIPS 2019). M is about P Q^T. A step of power
// iteration makes the factors of the sum over ranks: P = orth(sum M Q), Q = sum M^T P.
//
//   hasten launch --nproc 2 18_power_sgd_comm_hook examples/reviews.csv
#include <torch/torch.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hooked_training.h"

namespace examples {

constexpr int64_t kRank = 2; // r: more sends more and loses less

class PowerSgdHook final : public hasten::CommHook {
 public:
  explicit PowerSgdHook(bool error_feedback) : error_feedback_(error_feedback) {}

  // Starts to send P of all matrices, and the gradients that are too small to compress.
  Step reduce(hasten::Communicator& ranks, const hasten::GradientBucket& bucket) override {
    auto all = std::make_shared<Pending>();
    for (const hasten::BucketGradient& entry : bucket.gradients) {
      const torch::Tensor& gradient = entry.gradient;
      const int64_t n = gradient.dim() > 1 ? std::max<int64_t>(1, gradient.size(0)) : 1;
      const int64_t columns = gradient.numel() / n;
      numbers_ += gradient.numel();
      if (2 * kRank * (n + columns) > gradient.numel()) {
        all->small.push_back(gradient);
        continue;
      }
      const auto m = gradient.reshape({n, -1}) + kept("lost." + entry.name, torch::zeros({}));
      const auto q = kept("factor." + entry.name, torch::eye(columns, kRank)); // the last step's
      all->matrices.push_back({entry.name, gradient, m});
      all->sent.push_back(m.mm(orthonormal(q)));
    }
    all->sent.insert(all->sent.begin(), all->small.begin(), all->small.end());
    send(ranks, *all);
    // The steps run when backward has started all buckets. True: there is more to wait for.
    return [this, &ranks, all, second = false]() mutable {
      all->work.wait();
      const auto sums = at::unflatten_dense_tensors(all->message, all->sent);
      return std::exchange(second, true) ? finish(*all, sums) : send_second(ranks, *all, sums);
    };
  }
  std::string description() const override { // ranks with another one are an error at the start
    return error_feedback_ ? "PowerSGD with error feedback" : "PowerSGD";
  }
  double bytes_per_number() const override { return numbers_ > 0 ? 4 * sent_ / numbers_ : 4; }
  void reset() override { kept_.clear(); }
  void save_state(hasten::NamedTensors& tensors, nlohmann::json&) const override {
    tensors.insert(kept_.begin(), kept_.end());
  }
  void load_state(const hasten::NamedTensors& tensors, const nlohmann::json&) override {
    kept_ = tensors;
  }

 private:
  struct Matrix {
    std::string name;
    torch::Tensor gradient, m, p{};
  };
  struct Pending { // a bucket
    std::vector<Matrix> matrices{};
    std::vector<torch::Tensor> small{}, sent{};
    torch::Tensor message{};
    hasten::Work work{};
  };
  torch::Tensor kept(const std::string& key, const torch::Tensor& otherwise) const {
    const auto found = kept_.find(key);
    return found == kept_.end() ? otherwise : found->second;
  }
  static torch::Tensor orthonormal(const torch::Tensor& factor) {
    return std::get<0>(torch::linalg_qr(factor));
  }
  bool send(hasten::Communicator& ranks, Pending& all) {
    all.message = at::flatten_dense_tensors(all.sent);
    all.work = ranks.all_reduce_async(all.message, hasten::ReduceOp::SUM, "PowerSGD");
    sent_ += static_cast<double>(all.message.numel());
    return true;
  }
  bool send_second(hasten::Communicator& ranks, Pending& all, auto& sums) {
    all.sent.clear();
    for (size_t i = 0; i < all.small.size(); ++i) {
      all.small[i].copy_(sums[i]);
    }
    for (size_t i = 0; i < all.matrices.size(); ++i) {
      Matrix& of = all.matrices[i];
      // Equal on all ranks, if their processors are of one kind. Else broadcast rank 0's.
      of.p = orthonormal(sums[all.small.size() + i]);
      all.sent.push_back(of.m.t().mm(of.p));
      if (error_feedback_) { // what this rank's share of P Q^T lacks
        kept_["lost." + of.name] = (of.m - of.p.mm(all.sent[i].t())).nan_to_num(0, 0, 0);
      }
    }
    return !all.sent.empty() && send(ranks, all);
  }
  bool finish(Pending& all, auto& sums) {
    for (size_t i = 0; const Matrix& of : all.matrices) {
      of.gradient.copy_(of.p.mm(sums[i].t()).view(of.gradient.sizes()));
      kept_["factor." + of.name] = sums[i++].nan_to_num(0, 0, 0);
    }
    return false;
  }

  const bool error_feedback_;
  double numbers_ = 0, sent_ = 0;
  hasten::NamedTensors kept_{}; // of each matrix: what was lost, and Q
};

void train(const std::string& csv, const std::string& save_to) {
  train_with_hook(csv, save_to, [](bool on) { return std::make_shared<PowerSgdHook>(on); });
}
} // namespace examples

int main(int argc, char** argv) { return examples::run_example(argc, argv, examples::train); }
