// A deferred model has the same bits in every value as a model that is constructed directly.
#include "hasten/core/deferred_init.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>

#include "hasten/base/error.h"
#include "hasten/core/memory.h"

namespace hasten {

using at::Tensor;

// A model whose constructor uses every kind of initialisation.
struct MixedImpl : torch::nn::Module {
  explicit MixedImpl(const Tensor& given) {
    linear = register_module("linear", torch::nn::Linear(70, 90));
    words = register_module(
        "words", torch::nn::Embedding(torch::nn::EmbeddingOptions(20, 6).padding_idx(3)));
    register_module("convolution", torch::nn::Conv2d(torch::nn::Conv2dOptions(3, 4, 3).groups(1)));
    register_module("norm", torch::nn::LayerNorm(std::vector<int64_t>{9}));
    register_module("batch_norm", torch::nn::BatchNorm2d(4));
    register_module("lstm", torch::nn::LSTM(torch::nn::LSTMOptions(5, 6).num_layers(2)));
    register_module("wide", torch::nn::Linear(4, 4))->to(torch::kDouble);
    register_parameter("head", words->weight); // tied
    const auto add = [this](const char* name, Tensor value) {
      return register_parameter(name, std::move(value));
    };
    namespace init = torch::nn::init;
    init::orthogonal_(add("orthogonal", torch::empty({12, 7})));
    init::xavier_normal_(add("xavier", torch::empty({5, 8})));
    init::sparse_(add("sparse", torch::zeros({6, 5})), 0.4);
    add("turned", torch::randn({3, 4}).t());
    add("given", torch::empty({2, 3})).detach().copy_(given);
    add("part", torch::arange(12.0).view({3, 4})[1]);
    // Like hasten's BERT: first the layer's own values, then the model's.
    const torch::NoGradGuard no_grad;
    linear->weight.normal_(0, 0.02);
    // From a random value.
    add("peak", torch::full({2}, linear->weight.abs().max().item<float>()));
    auto own = torch::make_generator<at::CPUGeneratorImpl>(3);
    add("own", torch::randn({17}, own));
    // Through a pointer, before and after an operator.
    Tensor table = torch::empty({300, 300});
    for (int64_t i = 0; i < table.numel(); ++i) {
      table.data_ptr<float>()[i] = static_cast<float>(i % 77);
    }
    table.mul_(0.5);
    table.data_ptr<float>()[5] = -1;
    register_buffer("table", table);
    register_buffer("sines", torch::sin(table));
    register_buffer("listed", torch::tensor({{1.0, 2.0}, {3.0, 4.0}}));
    register_buffer("positions", torch::arange(9));
    member = torch::rand({3});
  }
  Tensor forward(const Tensor& x) { return linear->forward(x); }
  torch::nn::Linear linear{nullptr};
  torch::nn::Embedding words{nullptr};
  Tensor member{}; // neither parameter nor buffer
};
TORCH_MODULE(Mixed);

static bool same(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && a.strides() == b.strides() && a.dtype() == b.dtype() &&
         torch::equal(a, b);
}

static void expect_same(const torch::nn::Module& a, const torch::nn::Module& b) {
  for (const auto& item : a.named_parameters()) {
    EXPECT_TRUE(same(item.value(), b.named_parameters()[item.key()])) << item.key();
  }
  for (const auto& item : a.named_buffers()) {
    EXPECT_TRUE(same(item.value(), b.named_buffers()[item.key()])) << item.key();
  }
}

static Mixed plain_mixed(const Tensor& given) {
  torch::manual_seed(5);
  return Mixed(given);
}

static Mixed deferred_mixed(const Tensor& given, const DeferredInitOptions& options = {}) {
  torch::manual_seed(5);
  return deferred_init([&] { return Mixed(given); }, options);
}

static std::string c10_error(const std::function<void()>& function) {
  try {
    function();
  } catch (const c10::Error& error) {
    return error.what();
  }
  return "no c10::Error";
}

static std::string deferred_error(const std::function<void()>& function) {
  try {
    function();
  } catch (const InputError& error) {
    return error.what();
  }
  return "no InputError";
}

static bool says(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(DeferredInit, ValuesAndRandomStateAreThoseOfPlainConstruction) {
  const Tensor given = torch::randn({2, 3});
  Mixed plain = plain_mixed(given);
  const Tensor next = torch::randn({5});
  for (const int64_t resident : {int64_t{0}, int64_t{3000}, int64_t{1} << 30}) {
    Mixed deferred = deferred_mixed(given, {.resident_bytes = resident});
    EXPECT_TRUE(torch::equal(next, torch::randn({5}))) << resident;
    EXPECT_TRUE(is_deferred(*deferred));
    EXPECT_TRUE(same(deferred->member, plain->member));
    const Tensor state = at::detail::getDefaultCPUGenerator().get_state();
    materialize(*deferred);
    EXPECT_FALSE(is_deferred(*deferred));
    EXPECT_TRUE(torch::equal(state, at::detail::getDefaultCPUGenerator().get_state()));
    expect_same(*plain, *deferred);
    for (const Tensor& tensor : deferred->parameters()) { // including the tied one
      EXPECT_NE(tensor.storage().data_ptr().get_context(), nullptr) << "its memory is nobody's";
    }
  }
}

TEST(DeferredInit, TensorsGetTheirValuesInAnyOrder) {
  const Tensor given = torch::randn({2, 3});
  Mixed plain = plain_mixed(given);
  Mixed deferred = deferred_mixed(given);
  std::vector<Tensor> parameters = deferred->parameters();
  for (size_t i = parameters.size(); i-- > 0;) {
    materialize({parameters[i]});
    torch::rand({static_cast<int64_t>(i)}); // changes the generator's state
    EXPECT_TRUE(same(parameters[i], plain->parameters()[i])) << i;
  }
}

// Memory from the heap may have these values already, which the next memory need not have.
TEST(DeferredInit, ValuesWrittenThroughAPointerAreKeptWhereTheMemoryHadThem) {
  const auto write = [](int64_t size, float value) {
    std::vector<Tensor> all;
    for (int i = 0; i < 40; ++i) {
      Tensor one = torch::empty({size});
      std::fill_n(one.data_ptr<float>(), size, value);
      all.push_back(one);
    }
    return all;
  };
  for (const int64_t size : {3, 300, 200'000}) {
    write(size, 7);
    const auto model = deferred_init([&] {
      auto made = std::make_shared<torch::nn::Module>();
      made->register_parameter("written", torch::empty({size})).detach().copy_(write(size, 7)[5]);
      return made;
    });
    write(size, 9);
    materialize(*model);
    EXPECT_TRUE(model->parameters()[0].equal(torch::full({size}, 7.0))) << size;
  }
}

TEST(DeferredInit, TensorsKeepTheirShapesAndTies) {
  Mixed deferred = deferred_mixed(torch::randn({2, 3}));
  EXPECT_EQ(deferred->linear->weight.sizes(), (std::vector<int64_t>{90, 70}));
  EXPECT_TRUE(deferred->linear->weight.requires_grad());
  torch::optim::AdamW optimizer(deferred->parameters());
  materialize({deferred->words->weight});
  const Tensor head = deferred->named_parameters()["head"];
  EXPECT_TRUE(head.is_same(deferred->words->weight));
  EXPECT_FALSE(is_deferred(head));
  EXPECT_TRUE(torch::equal(head[3], torch::zeros({6})));
}

// At most one operator's tensors in addition to resident_bytes, and nothing afterwards.
TEST(DeferredInit, ModelsTakeNoMemory) {
  install_memory_meter();
  const auto make = [] {
    torch::nn::Sequential layers;
    for (int i = 0; i < 8; ++i) {
      layers->push_back(torch::nn::Linear(256, 256));
    }
    return layers;
  };
  const int64_t layer = 4 * (256 * 256 + 256);
  const int64_t before = memory_stats().live_bytes;
  reset_peak_memory();
  auto deferred = deferred_init(make, {.resident_bytes = 0});
  EXPECT_LT(memory_stats().peak_bytes - before, 2 * layer);
  // Only the log is left: a generator state for each operator that draws random values.
  EXPECT_LT(memory_stats().live_bytes - before, 8 * layer / 10);
  materialize({deferred->parameters()[0]});
  EXPECT_LT(memory_stats().live_bytes - before, 2 * layer);
  materialize(*deferred);
  EXPECT_EQ(memory_stats().live_bytes - before, 8 * layer); // the log is freed
  EXPECT_LT(memory_stats().peak_bytes - before, 10 * layer);
}

TEST(DeferredInit, ReadingAnUnmadeValueSaysWhatToDo) {
  Mixed deferred = deferred_mixed(torch::randn({2, 3}));
  const Tensor x = torch::randn({1, 70});
  for (const auto& use : std::vector<std::function<void()>>{
           [&] { deferred->forward(x); }, [&] { deferred->linear->bias.abs().max().item<float>(); },
           [&] { deferred->linear->bias.data_ptr<float>(); },
           [&] { deferred->linear->bias.detach().fill_(1); },
           [&] { deferred->to(torch::kDouble); }}) {
    EXPECT_TRUE(says(c10_error(use), "hasten::materialize")) << c10_error(use);
  }
  materialize(*deferred);
  EXPECT_TRUE(deferred->forward(x).defined());
}

TEST(DeferredInit, AnErrorInTheConstructorLeavesNothingBehind) {
  install_memory_meter();
  const int64_t before = memory_stats().live_bytes;
  for (int i = 0; i < 2; ++i) {
    EXPECT_THROW(deferred_init(
                     [] {
                       torch::nn::Linear made(300, 300);
                       throw std::runtime_error("the constructor's own");
                       return made;
                     },
                     {.resident_bytes = 0}),
                 std::runtime_error);
    EXPECT_EQ(memory_stats().live_bytes, before);
  }
  torch::nn::Linear after(3, 3);
  EXPECT_FALSE(is_deferred(*after));
  EXPECT_TRUE(says(deferred_error([] {
                     deferred_init([] { return std::shared_ptr<torch::nn::LinearImpl>(); });
                   }),
                   "null"));
}

TEST(DeferredInit, OutsideTensorsAreReadAsTheyWere) {
  Tensor source = torch::ones({40});
  const auto make = [&] {
    torch::nn::Linear made(40, 1);
    const torch::NoGradGuard no_grad;
    made->weight[0].copy_(source);
    source.mul_(2); // in the scope: the log has the previous value
    made->bias.copy_(source.slice(0, 0, 1));
    return made;
  };
  torch::nn::Linear made = deferred_init(make);
  materialize({made->weight});
  EXPECT_TRUE(torch::equal(made->weight, torch::ones({1, 40})));
  source.mul_(2); // outside the scope: not recorded
  const std::string error = deferred_error([&] { materialize(*made); });
  EXPECT_TRUE(says(error, "changed")) << error;
  EXPECT_TRUE(is_deferred(made->bias));
}

TEST(DeferredInit, OneInsideAnotherIsPartOfIt) {
  const auto make_second = [] { return torch::nn::Linear(3, 3); };
  const auto make_both = [&](bool nested) {
    torch::manual_seed(2);
    torch::nn::Linear first(3, 3);
    torch::nn::Linear second = nested ? deferred_init(make_second) : make_second();
    second->weight.detach().add_(first->weight.detach());
    torch::nn::Sequential both(first, second);
    return both;
  };
  const auto plain = make_both(false);
  const auto deferred = deferred_init([&] { return make_both(true); }, {.resident_bytes = 0});
  materialize(*deferred);
  expect_same(*plain, *deferred);
}

} // namespace hasten
