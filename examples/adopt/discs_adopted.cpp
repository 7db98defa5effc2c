// Finds a bright disc in a noisy camera image: where it is, how large it is, and how
// wrong that may be. One network measures, a second one judges the first one's error
// from the same image, so that bad shots can be sorted out.
//
//   discs [--epochs N] [--batch N] [--images N] [--lr X] [--seed N]
//         [--every N] [--freeze-norm] [--load PREFIX] [--save PREFIX]
//
// Images are made up, the same ones for the same seed.
#include <hasten/accelerator/accelerator.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "disc_nets.h"

namespace F = torch::nn::functional;

// ---------------------------------------------------------------- command line

struct Options {
  int epochs = 8;
  int64_t batch = 32;
  int64_t images = 2000;
  double lr = 0.02;
  uint64_t seed = 1;
  int every = 1; // epochs from one report to the next
  bool freezeNorm = false; // leave the running statistics as they are
  std::string load;
  std::string save;
};

[[noreturn]] void usage(const std::string& why) {
  std::fprintf(stderr,
               "discs: %s\n"
               "usage: discs [--epochs N] [--batch N] [--images N] [--lr X] [--seed N]\n"
               "             [--every N] [--freeze-norm] [--load PREFIX]\n"
               "             [--save PREFIX]\n",
               why.c_str());
  std::exit(2);
}

Options parseOptions(int argc, char** argv) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--freeze-norm") {
      o.freezeNorm = true;
      continue;
    }
    if (i + 1 == argc) {
      usage(flag + " needs a value");
    }
    const std::string value = argv[++i];
    try {
      if (flag == "--epochs") {
        o.epochs = std::stoi(value);
      } else if (flag == "--batch") {
        o.batch = std::stoll(value);
      } else if (flag == "--images") {
        o.images = std::stoll(value);
      } else if (flag == "--lr") {
        o.lr = std::stod(value);
      } else if (flag == "--seed") {
        o.seed = std::stoull(value);
      } else if (flag == "--every") {
        o.every = std::stoi(value);
      } else if (flag == "--load") {
        o.load = value;
      } else if (flag == "--save") {
        o.save = value;
      } else {
        usage("unknown flag " + flag);
      }
    } catch (const std::logic_error&) {
      usage(flag + " cannot be " + value);
    }
  }
  if (o.batch < 1 || o.images < 1 || o.epochs < 0 || o.every < 1) {
    usage("--batch, --images and --every must be positive");
  }
  return o;
}

// ------------------------------------------------------------------------ data

struct Shots {
  torch::Tensor images; // [N, 1, kSide, kSide]
  torch::Tensor targets; // [N, kTargets]
  int64_t size() const { return images.size(0); }
};

// A disc with a soft rim, uneven light, and noise whose strength varies from image
// to image: that is what the second network has to see.
Shots makeShots(int64_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto uniform = [&random](float low, float high) {
    const auto unit = static_cast<float>(random() >> 40) / 16777216.0f;
    return low + (high - low) * unit;
  };
  Shots shots{torch::empty({count, 1, kSide, kSide}), torch::empty({count, kTargets})};
  auto pixel = shots.images.accessor<float, 4>();
  auto target = shots.targets.accessor<float, 2>();
  for (int64_t n = 0; n < count; ++n) {
    const float x = uniform(6, kSide - 6);
    const float y = uniform(6, kSide - 6);
    const float radius = uniform(2, 6);
    const float slope = uniform(-0.02f, 0.02f);
    const float noise = uniform(0.05f, 0.6f);
    for (int64_t row = 0; row < kSide; ++row) {
      for (int64_t column = 0; column < kSide; ++column) {
        const float dx = static_cast<float>(column) - x;
        const float dy = static_cast<float>(row) - y;
        const float inside = radius - std::sqrt(dx * dx + dy * dy);
        const float disc = 1.0f / (1.0f + std::exp(-3.0f * inside));
        const float light = slope * static_cast<float>(column - kSide / 2);
        // Three uniform numbers make a fair bell.
        const float bell = uniform(-1, 1) + uniform(-1, 1) + uniform(-1, 1);
        pixel[n][0][row][column] = disc + light + noise * bell;
      }
    }
    target[n][0] = (x - kSide / 2) / 6;
    target[n][1] = (y - kSide / 2) / 6;
    target[n][2] = (radius - 4) / 2;
  }
  return shots;
}

// Batches in a new order each time it is iterated, half of the images mirrored.
class ShotLoader {
 public:
  ShotLoader(Shots shots, int64_t batch, uint64_t seed)
      : shots_(std::move(shots)), batch_(batch), random_(seed) {
    order_.resize(static_cast<size_t>(shots_.size()));
    std::iota(order_.begin(), order_.end(), 0);
  }

  class Iterator {
   public:
    Iterator(ShotLoader* loader, int64_t at) : loader_(loader), at_(at) {}
    torch::data::Example<> operator*() const { return loader_->batchAt(at_); }
    Iterator& operator++() {
      at_ = std::min(at_ + loader_->batch_, loader_->shots_.size());
      return *this;
    }
    bool operator!=(const Iterator& other) const { return at_ != other.at_; }

   private:
    ShotLoader* loader_;
    int64_t at_;
  };

  Iterator begin() {
    for (size_t i = order_.size(); i > 1; --i) {
      std::swap(order_[i - 1], order_[random_() % i]);
    }
    mirrored_.clear();
    for (size_t i = 0; i < order_.size(); ++i) {
      mirrored_.push_back(random_() % 2 == 0);
    }
    return {this, 0};
  }
  Iterator end() { return {this, shots_.size()}; }

 private:
  torch::data::Example<> batchAt(int64_t first) const {
    const int64_t last = std::min(first + batch_, shots_.size());
    std::vector<torch::Tensor> images, targets;
    for (int64_t i = first; i < last; ++i) {
      auto image = shots_.images[order_[static_cast<size_t>(i)]];
      auto target = shots_.targets[order_[static_cast<size_t>(i)]].clone();
      if (mirrored_[static_cast<size_t>(i)]) {
        image = image.flip({2});
        // The middle of the image is between two pixels.
        target[0] = -target[0] - 1.0f / 6;
      }
      images.push_back(image);
      targets.push_back(target);
    }
    return {torch::stack(images), torch::stack(targets)};
  }

  Shots shots_;
  int64_t batch_;
  std::mt19937_64 random_;
  std::vector<int64_t> order_;
  std::vector<bool> mirrored_;
};

// ------------------------------------------------------------------ experiment

// Biases and norms are not decayed.
std::vector<torch::optim::OptimizerParamGroup> groupsOf(const DiscNet& net, double lr) {
  std::vector<torch::Tensor> weights, others;
  for (const auto& p : net->named_parameters()) {
    (p.value().dim() > 1 ? weights : others).push_back(p.value());
  }
  using torch::optim::SGDOptions;
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(
      weights, std::make_unique<SGDOptions>(SGDOptions(lr).momentum(0.9).weight_decay(1e-4)));
  groups.emplace_back(others, std::make_unique<SGDOptions>(SGDOptions(2 * lr).momentum(0.9)));
  return groups;
}

class Experiment {
 public:
  explicit Experiment(const Options& options)
      : options(options),
        test(makeShots(400, options.seed + 1000)),
        sgd(groupsOf(net, options.lr), torch::optim::SGDOptions(options.lr)),
        adam(doubt->parameters(), torch::optim::AdamOptions(3e-3)),
        schedule(sgd, 4, 0.5),
        data(makeShots(options.images, options.seed), options.batch, options.seed) {
    if (!options.load.empty()) {
      torch::load(net, options.load + ".net.pt");
      torch::load(doubt, options.load + ".doubt.pt");
      torch::load(sgd, options.load + ".sgd.pt");
      torch::load(adam, options.load + ".adam.pt");
    }
  }

  // [run]
  void run() {
    hasten::Accelerator ranks;
    auto [n, d, s, a, data] = ranks.prepare(net, doubt, sgd, adam, this->data);
    int64_t iteration = 0;
    for (int epoch = 1; epoch <= options.epochs; ++epoch) {
      train(true);
      double sum = 0;
      int64_t count = 0;
      for (const auto& batch : data) {
        const auto measured = net->forward(batch.data);
        const auto error = measured - batch.target;
        const auto logVariance = doubt->forward(batch.data);
        const auto square = error.detach().square();
        const auto judged = square * torch::exp(-logVariance) + logVariance;
        const auto loss = error.square().mean() + judged.mean();

        net->zero_grad();
        ranks.backward(loss);
        torch::nn::utils::clip_grad_norm_(net->parameters(), 2.0);
        sgd.step();
        // The judge learns from two batches at a time.
        if (++iteration % 2 == 0) {
          torch::nn::utils::clip_grad_norm_(doubt->parameters(), 5.0);
          adam.step();
          doubt->zero_grad();
        }
        sum += square.mean().item<double>();
        ++count;
      }
      schedule.step();
      if (ranks.is_main_process() && epoch % options.every == 0) {
        report(epoch, sum / static_cast<double>(count));
      }
    }
    ranks.end_training();
  }
  // [/run]

 private:
  void train(bool on) {
    net->train(on);
    doubt->train(on);
    for (const auto& module : net->modules()) {
      if (options.freezeNorm && module->as<torch::nn::BatchNorm2d>()) {
        module->eval();
      }
    }
  }

  // Prints the error on images that are not in the training set, and saves the model.
  void report(int epoch, double trainError) {
    torch::NoGradGuard noGrad;
    train(false);
    const auto error = net->forward(test.images) - test.targets;
    const auto deviation = torch::exp(0.5 * doubt->forward(test.images));
    const auto within = (error.abs() < deviation).to(torch::kFloat).mean();
    const auto rate = sgd.param_groups()[0].options().get_lr();
    std::printf("epoch %2d  lr %.4f  train %.5f  test %.5f  within one sigma %.3f\n", epoch, rate,
                trainError, error.square().mean().item<double>(), within.item<double>());
    std::fflush(stdout);
    if (!options.save.empty()) {
      torch::save(net, options.save + ".net.pt");
      torch::save(doubt, options.save + ".doubt.pt");
      torch::save(sgd, options.save + ".sgd.pt");
      torch::save(adam, options.save + ".adam.pt");
    }
  }

  Options options;
  Shots test;
  DiscNet net;
  DoubtNet doubt;
  torch::optim::SGD sgd;
  torch::optim::Adam adam;
  torch::optim::StepLR schedule;
  ShotLoader data;
};

int main(int argc, char** argv) {
  const Options options = parseOptions(argc, argv);
  torch::manual_seed(options.seed);
  Experiment experiment(options);
  experiment.run();
  return 0;
}
