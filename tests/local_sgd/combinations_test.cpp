// Every pair of features, and all features together, on worlds 1, 2 and 4. Either the training
// equals its reference, or it is an error that gives the reason. tools/combinations.py makes
// docs/combinations.md from the results.
#include <cstdlib>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>

#include "accelerator/combinations_rig.h"
#include "accelerator/state_rig.h"
#include "hasten/local_sgd/local_sgd.h"
#include "hasten/models/lora.h"

namespace hasten::combinations_test {

const std::vector<std::string> kFeatures = {"accumulation",
                                            "checkpointing",
                                            "bf16",
                                            "fp16",
                                            "ddp",
                                            "zero1",
                                            "zero2",
                                            "fsdp",
                                            "hsdp",
                                            "Local SGD",
                                            "SyncBatchNorm",
                                            "static graph",
                                            "channels last",
                                            "integer buffers",
                                            "torch's loader",
                                            "resume",
                                            "empty rank",
                                            "LoRA"};

// Features of Local SGD that only the full stacks have: which rank sums, and sums that are applied
// one step later.
const std::vector<std::string> kRoundFeatures = {"driver", "delay"};

// Features that exclude each other.
const std::vector<Features> kChoices = {{"bf16", "fp16"},
                                        {"ddp", "zero1", "zero2", "fsdp", "hsdp"}};

// Combinations that are errors on several ranks, and a part of the message.
struct Refusal {
  Features features{};
  std::string says{};
};
const std::vector<Refusal> kRefused = {
    {{"Local SGD", "zero1"}, "shards of one replica"},
    {{"Local SGD", "zero2"}, "shards of one replica"},
    {{"Local SGD", "fsdp"}, "shards of one replica"},
    {{"Local SGD", "SyncBatchNorm"}, "synchronised batch norm layers"}};

// A model in training, from its beginning or from a state.
struct Run {
  Run(const Features& features, std::shared_ptr<Communicator> communicator)
      : features(features),
        accelerator(options_for(features, communicator->world_size()), communicator),
        net(made(accelerator.process_index())),
        own(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9)) {}

  Net made(int rank) const {
    torch::manual_seed(40 + static_cast<uint64_t>(rank)); // prepare() broadcasts rank 0's values
    Net fresh(features);
    fresh->to(narrow(features) ? at::kFloat : at::kDouble);
    if (features.count("integer buffers") > 0) {
      fresh->add_integer_buffers();
    }
    if (features.count("LoRA") > 0) {
      get_peft_model(fresh.ptr(), {.r = 2, .target_modules = {"all-linear"}});
      fresh->to(narrow(features) ? at::kFloat : at::kDouble); // A and B too
    }
    if (features.count("checkpointing") > 0) {
      gradient_checkpointing_enable(fresh);
    }
    return fresh;
  }

  // Runs epochs [first, last). May load a state before them and save one after them.
  void train(std::vector<Rows> data, int first, int last, const std::filesystem::path& load,
             const std::filesystem::path& save) {
    if (features.count("torch's loader") > 0) { // with its default RandomSampler
      const auto batch = static_cast<size_t>(data[0].second.size(0));
      auto drawn = torch::data::make_data_loader(SingleRows(data), batch);
      train_on(*drawn, first, last, load, save);
    } else {
      train_on(data, first, last, load, save);
    }
  }
  template <typename Range>
  void train_on(Range& data, int first, int last, const std::filesystem::path& load,
                const std::filesystem::path& save) {
    auto [model, optimizer, loader] = accelerator.prepare(net, own, data);
    LocalSGD local(accelerator, model,
                   {.local_sgd_steps = 3,
                    .enabled = features.count("Local SGD") > 0,
                    .delay = features.count("delay") > 0 ? 1 : 0,
                    .average = {.sync = features.count("driver") > 0 ? SyncStrategy::driver
                                                                     : SyncStrategy::all_reduce}});
    if (!load.empty()) {
      accelerator.load_state(load);
    }
    for (int epoch = first; epoch < last; ++epoch) {
      for (const auto& rows : loader) {
        const Rows& batch = rows;
        const auto labels = (batch.second != kNoLabel).sum().item<double>();
        auto window = features.count("empty rank") > 0
                          ? accelerator.accumulate(loader, labels, model)
                          : accelerator.accumulate(model);
        const Tensor loss =
            torch::nn::functional::cross_entropy(net->forward(rows.first), rows.second);
        accelerator.backward(loss);
        if (accelerator.sync_gradients()) {
          losses.push_back(accelerator.last_window().loss);
          accelerator.clip_grad_norm_(model, 0.5);
        }
        optimizer.step();
        optimizer.zero_grad();
        local.step();
      }
    }
    if (!save.empty()) {
      accelerator.save_state(save);
    }
    local.finish();
    accelerator.summon_full_params(
        [&] {
          for (const Tensor& parameter : net->parameters()) {
            parameters.push_back(parameter.detach().to(at::kDouble).clone());
          }
        },
        net);
    if (net->steps.defined()) { // equal on all ranks: rank 0's number of steps
      parameters.push_back(net->steps.to(at::kDouble));
      const Tensor own = torch::cat({net->steps, net->seen});
      const Tensor all = accelerator.gather(own.unsqueeze(0));
      EXPECT_TRUE(torch::equal(all, own.expand_as(all))) << all;
    }
    accelerator.end_training();
  }

  Features features;
  Accelerator accelerator;
  Net net;
  torch::optim::SGD own;
  std::vector<double> losses{};
  std::vector<Tensor> parameters{}; // rank 0's
};

struct Trained {
  std::vector<Tensor> parameters{};
  std::vector<double> losses{}; // of the second epoch
};

Trained train(const Features& features, const std::vector<Rows>& data,
              const std::shared_ptr<Communicator>& communicator,
              const std::filesystem::path& place = {}) {
  Trained result;
  if (features.count("resume") == 0) {
    Run run(features, communicator);
    run.train(data, 0, 2, {}, {});
    const auto half = static_cast<int64_t>(run.losses.size() / 2);
    result = {run.parameters, {run.losses.begin() + half, run.losses.end()}};
  } else {
    Run(features, communicator).train(data, 0, 1, {}, place);
    Run run(features, communicator);
    run.train(data, 1, 2, place, {});
    result = {run.parameters, run.losses};
  }
  return result;
}

// The reference has only the features that change results. It runs on one rank, or with Local SGD
// on one rank for each replica. Such a rank reads what all ranks of the tested run or replica read.
class Reference {
 public:
  explicit Reference(std::shared_ptr<Communicator> everyone) : everyone_(std::move(everyone)) {}

  const Trained& of(const Features& features) {
    const int world = everyone_->world_size();
    const bool copies = features.count("hsdp") > 0 && world > 1;
    const int ranks = features.count("Local SGD") == 0 ? 1 : copies ? 2 : world;
    Features kept;
    for (const char* name :
         {"accumulation", "bf16", "fp16", "Local SGD", "SyncBatchNorm", "delay", "channels last",
          "integer buffers", "torch's loader", "empty rank", "LoRA"}) {
      if (features.count(name) > 0) {
        kept.insert(name);
      }
    }
    const auto key = std::pair(kept, ranks);
    if (known_.count(key) == 0 && everyone_->rank() < ranks) {
      known_[key] = ::hasten::combinations_test::train(
          kept, joined(rows_of(world, kept), static_cast<size_t>(world / ranks)), group(ranks));
    }
    return known_[key];
  }

 private:
  std::shared_ptr<Communicator> group(int ranks) {
    auto& found = groups_[ranks];
    if (!found) {
      std::vector<int> list(static_cast<size_t>(ranks));
      std::iota(list.begin(), list.end(), 0);
      CommunicatorOptions options = everyone_->options();
      options.name += " reference of " + std::to_string(ranks);
      found = everyone_->new_group(list, options);
    }
    return found;
  }

  std::shared_ptr<Communicator> everyone_;
  std::map<int, std::shared_ptr<Communicator>> groups_{};
  std::map<std::pair<Features, int>, Trained> known_{};
};

std::string text_of(const Features& features) {
  std::string text;
  for (const auto* names : {&kFeatures, &kRoundFeatures}) {
    for (const std::string& name : *names) {
      if (features.count(name) > 0) {
        text += (text.empty() ? "" : " + ") + name;
      }
    }
  }
  return text;
}

std::string refusal_of(const Features& features, int world) {
  for (const Refusal& refusal : kRefused) {
    if (world > 1 && std::includes(features.begin(), features.end(), refusal.features.begin(),
                                   refusal.features.end())) {
      return refusal.says;
    }
  }
  return {};
}

bool possible(const Features& features) {
  return std::all_of(kChoices.begin(), kChoices.end(), [&](const Features& choice) {
    return std::count_if(choice.begin(), choice.end(),
                         [&](const std::string& name) { return features.count(name) > 0; }) <= 1;
  });
}

// Results go where tools/combinations.py looks for them.
void note(const Features& features, int world, const std::string& found) {
  const char* folder = std::getenv("HASTEN_COMBINATIONS");
  if (folder != nullptr && testing_support::test_world().rank == 0) {
    std::ofstream(std::filesystem::path(folder) / "accelerator.jsonl", std::ios::app)
        << nlohmann::json{{"features", text_of(features)}, {"world", world}, {"found", found}}
               .dump()
        << "\n";
  }
}

void expect_combination(const Features& features, Reference& reference,
                        const std::shared_ptr<Communicator>& everyone,
                        const std::filesystem::path& folder) {
  SCOPED_TRACE(text_of(features));
  const int world = everyone->world_size();
  const std::string refused = refusal_of(features, world);
  if (!refused.empty()) {
    const std::string error =
        state_test::input_error([&] { train(features, rows_of(world, features), everyone); });
    EXPECT_NE(error.find(refused), std::string::npos) << error;
    note(features, world, "refused");
    return;
  }
  const Trained& expected = reference.of(features);
  const Trained found =
      train(features, rows_of(world, features), everyone, folder / text_of(features));
  const double most = narrow(features) ? 2e-2 : 1e-10;
  double apart = 0;
  if (everyone->rank() == 0) {
    ASSERT_EQ(found.parameters.size(), expected.parameters.size());
    for (size_t i = 0; i < found.parameters.size(); ++i) {
      apart = std::max(apart,
                       (found.parameters[i] - expected.parameters[i]).abs().max().item<double>());
    }
    EXPECT_LE(apart, most);
  }
  const bool local = features.count("Local SGD") > 0 && world > 1;
  for (size_t i = 0; !local && everyone->rank() == 0 && i < found.losses.size(); ++i) {
    EXPECT_NEAR(found.losses[i], expected.losses[i], most) << i;
  }
  note(features, world, apart <= most ? "equal" : "differs");
  everyone->barrier("compared");
}

// Tests each of `features` with each feature that comes later in the list. Four ranks are slow, so
// they test pairs only when the table is made. Otherwise they test only the full stacks.
void expect_pairs_with(std::initializer_list<size_t> features) {
  const auto everyone = testing_support::fresh_communicator();
  if (everyone->world_size() > 2 && std::getenv("HASTEN_COMBINATIONS") == nullptr) {
    return;
  }
  const auto folder = state_test::common_folder();
  Reference reference(everyone);
  for (const size_t first : features) {
    for (size_t second = first; second < kFeatures.size(); ++second) {
      const Features pair{kFeatures[first], kFeatures[second]};
      if (possible(pair)) {
        expect_combination(pair, reference, everyone, folder);
      }
    }
  }
}

TEST(Combinations, AccumulationWithEachOther) { expect_pairs_with({0}); }
TEST(Combinations, CheckpointingWithEachOther) { expect_pairs_with({1}); }
TEST(Combinations, Bf16WithEachOther) { expect_pairs_with({2}); }
TEST(Combinations, Fp16WithEachOther) { expect_pairs_with({3}); }
TEST(Combinations, CopiesWithTheRest) { expect_pairs_with({4, 8}); }
TEST(Combinations, ShardsWithTheRest) { expect_pairs_with({5, 6, 7}); }
TEST(Combinations, LocalSGDAndSyncBatchNormWithTheRest) { expect_pairs_with({9, 10}); }
TEST(Combinations, GraphsFormatsBuffersLoadersResumeAndLoraWithEachOther) {
  expect_pairs_with({11, 12, 13, 14, 15, 16, 17});
}

TEST(Combinations, TheFullStacks) {
  const auto everyone = testing_support::fresh_communicator();
  if (everyone->world_size() == 3) {
    return; // hsdp needs an even world
  }
  const auto folder = state_test::common_folder();
  Reference reference(everyone);
  for (const Features& features :
       {Features{"accumulation", "checkpointing", "bf16", "hsdp", "Local SGD", "resume"},
        Features{"accumulation", "checkpointing", "fp16", "fsdp", "SyncBatchNorm", "resume"},
        Features{"accumulation", "checkpointing", "ddp", "Local SGD", "resume"},
        Features{"accumulation", "ddp", "static graph", "channels last", "integer buffers",
                 "torch's loader", "resume"},
        Features{"accumulation", "checkpointing", "hsdp", "SyncBatchNorm"},
        Features{"accumulation", "checkpointing", "bf16", "fsdp", "resume", "LoRA"},
        // The save is between the two parts of a round.
        Features{"Local SGD", "resume", "driver", "delay"},
        Features{"Local SGD", "resume", "delay"},
        Features{"accumulation", "bf16", "hsdp", "Local SGD", "resume", "driver", "delay"}}) {
    expect_combination(features, reference, everyone, folder);
  }
}

} // namespace hasten::combinations_test
