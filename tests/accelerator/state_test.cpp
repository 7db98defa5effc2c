// A user's loop that is interrupted anywhere and continues in fresh objects.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "accelerator/state_rig.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/core/device.h"
#include "hasten/io/commit.h"
#include "hasten/io/safetensors.h"
#include "support/on_device.h"
#include "support/rounding_hook.h"

namespace hasten::state_test {

namespace files = std::filesystem;

std::string place_name(Place place) {
  return "state-" + std::to_string(place.epoch) + "-" + std::to_string(place.turn);
}

TEST(AcceleratorState, RunResumedAnywhereEqualsTheUninterruptedOneBitForBit) {
  // 49 rows: in the last turn only one rank has rows. It saves while the others wait at their
  // loader's end.
  const auto communicator = testing_support::fresh_communicator();
  const int world = communicator->world_size();
  const auto folder = common_folder();
  Session plain(communicator, 3, 49);
  plain.train();
  const auto expected = plain.everything();

  Session saving(communicator, 3, 49);
  const int64_t turns = (49 + 2 * world - 1) / (2 * world);
  const std::vector<Place> places{{0, 0}, {0, 1}, {1, 2}, {1, turns - 1}, {1, -1}};
  saving.train([&](Place here) {
    for (const Place place : places) {
      if (place.epoch == here.epoch && place.turn == here.turn) {
        saving.accelerator.save_state(folder / place_name(place));
      }
    }
  });
  expect_equal_bits(saving.everything(), expected); // saving changes nothing

  for (const Place place : places) {
    SCOPED_TRACE(place_name(place));
    Session resumed(communicator, 3, 49, /*weights=*/99);
    resumed.prepared();
    const LoadedState loaded = resumed.accelerator.load_state(folder / place_name(place));
    EXPECT_EQ(loaded.world_size, world);
    resumed.train();
    expect_equal_bits(resumed.everything(), expected);
    EXPECT_EQ(resumed.accelerator.last_window().loss, plain.accelerator.last_window().loss);
  }
}

// Each rank has its own errors, also if no window is open and the gradients are zero.
TEST(AcceleratorState, ARunWithAHookGoesOnWithWhatEachRankKept) {
  const auto communicator = testing_support::fresh_communicator();
  const int world = communicator->world_size();
  const auto folder = common_folder();
  Session saving(communicator, 2, 49);
  saving.hook = std::make_shared<testing_support::RoundingHook>();
  const std::vector<Place> places{{1, 0}, {1, 1}, {1, -1}}; // {1, 0}: in an open window
  saving.train([&](Place here) {
    for (const Place place : places) {
      if (place.epoch == here.epoch && place.turn == here.turn) {
        saving.accelerator.save_state(folder / place_name(place));
      }
    }
  });
  const auto expected = saving.everything();
  for (const Place place : places) {
    SCOPED_TRACE(place_name(place));
    if (world > 1) {
      std::vector<at::Tensor> errors;
      for (int rank = 0; rank < world; ++rank) {
        const SafetensorsReader file(folder / place_name(place) /
                                     ("state_rank_" + std::to_string(rank) + ".safetensors"));
        errors.push_back(file.tensor("gradients.0.comm_hook.lost.first.weight").clone());
        EXPECT_GT(errors.back().abs().sum().item<double>(), 0);
      }
      EXPECT_FALSE(torch::equal(errors.front(), errors.back()));
    }
    Session resumed(communicator, 2, 49, /*weights=*/99);
    resumed.hook = std::make_shared<testing_support::RoundingHook>();
    resumed.prepared();
    resumed.accelerator.load_state(folder / place_name(place));
    resumed.train();
    expect_equal_bits(resumed.everything(), expected);
  }
  Session without(communicator, 2, 49);
  without.prepared();
  const auto text =
      input_error([&] { without.accelerator.load_state(folder / place_name(places[0])); });
  EXPECT_NE(text.find("rounding"), text.npos) << text;
}

/// Rows seen by all ranks of `communicator`, sorted.
std::vector<int64_t> rows_of_all(Communicator& communicator, const std::vector<int64_t>& mine) {
  const at::Tensor all =
      communicator.all_gather_rows(on_device::tensor(mine, torch::kLong), "rows seen").cpu();
  std::vector<int64_t> rows(all.const_data_ptr<int64_t>(),
                            all.const_data_ptr<int64_t>() + all.numel());
  std::sort(rows.begin(), rows.end());
  return rows;
}

TEST(AcceleratorState, AtAnotherWorldSizeEveryRowOfTheEpochIsSeenOnce) {
  const auto everyone = testing_support::fresh_communicator();
  const int world = everyone->world_size();
  const auto folder = common_folder();
  const int64_t rows = 50;
  std::vector<int64_t> expected(rows);
  std::iota(expected.begin(), expected.end(), 0);
  for (const bool to_more : {false, true}) {
    SCOPED_TRACE(to_more ? "one rank, then all" : "all ranks, then one");
    const auto alone = Communicator::create(World{});
    const auto& before = to_more ? alone : everyone;
    const auto& after = to_more ? everyone : alone;
    const auto path = folder / (to_more ? "one" : "all");
    std::vector<int64_t> seen;
    const bool saves = !to_more || everyone->is_main();
    if (saves) {
      Session first(before, 1, rows, 3, StateScope::shared);
      first.train([&](Place place) {
        if (place.epoch == 1 && place.turn == 1) {
          first.accelerator.save_state(path);
          seen = first.rows;
        }
      });
    }
    everyone->barrier("saved");
    // The rows of epoch 1 that all ranks got until then.
    const auto all_seen = rows_of_all(*everyone, seen);
    const auto in_epoch = static_cast<int64_t>(all_seen.size()) - rows;
    EXPECT_EQ(in_epoch, 2 * 2 * (to_more ? 1 : world));

    if (to_more || everyone->is_main()) {
      Session then(after, 1, rows, 99, StateScope::shared);
      then.prepared();
      const auto loaded = then.accelerator.load_state(path);
      EXPECT_EQ(loaded.world_size, to_more ? 1 : world);
      std::vector<int64_t> later;
      then.train([&](Place place) {
        if (place.epoch == 1 && place.turn == -1) {
          later = then.rows;
        }
      });
      std::vector<int64_t> all = rows_of_all(*after, later);
      EXPECT_EQ(static_cast<int64_t>(all.size()), rows - in_epoch);
      all.insert(all.end(), all_seen.begin(), all_seen.end());
      std::sort(all.begin(), all.end());
      // Each row occurs twice: in epoch 0, and in epoch 1 before or after the save.
      std::vector<int64_t> twice = expected;
      twice.insert(twice.end(), expected.begin(), expected.end());
      std::sort(twice.begin(), twice.end());
      EXPECT_EQ(all, twice);
    }
    everyone->barrier("compared");
  }
}

TEST(AcceleratorState, OpenWindowAtAnotherWorldSizeIsRefusedByName) {
  const auto everyone = testing_support::fresh_communicator();
  if (everyone->world_size() == 1) {
    return; // the same size
  }
  const auto folder = common_folder();
  Session first(everyone, 3, 50);
  first.train([&](Place place) {
    if (place.epoch == 0 && place.turn == 1) {
      first.accelerator.save_state(folder / "open");
    }
  });
  Session then(Communicator::create(World{}), 3, 50);
  then.prepared();
  const auto text = input_error([&] { then.accelerator.load_state(folder / "open"); });
  EXPECT_NE(text.find("state.json: it was saved in the middle of an accumulation window by " +
                      std::to_string(everyone->world_size()) + " processes"),
            text.npos)
      << text;
  everyone->barrier("looked");
}

TEST(AcceleratorState, AnOpenWindowGoesOnToRefuseABackwardThatIsNotWeighed) {
  const auto communicator = testing_support::fresh_communicator();
  const auto folder = common_folder();
  Session first(communicator, 3, 50);
  first.train([&](Place place) {
    if (place.epoch == 0 && place.turn == 1) {
      first.accelerator.save_state(folder / "open");
    }
  });
  Session then(communicator, 3, 50, 99);
  then.prepared();
  then.accelerator.load_state(folder / "open");
  const auto text =
      input_error([&] { then.net->forward(on_device::ones({1, 5})).sum().backward(); });
  EXPECT_NE(text.find("reached parameter \"second."), text.npos) << text;
}

TEST(AcceleratorState, DamagedStateIsRefusedByFileAndNothingChanges) {
  const auto communicator = testing_support::fresh_communicator();
  const auto folder = common_folder();
  Session first(communicator, 2, 20);
  first.train([&](Place place) {
    if (place.epoch == 0 && place.turn == 0) {
      first.accelerator.save_state(folder / "good");
    }
  });
  const auto expected = first.everything();
  const auto damage = [&](const std::string& name, const std::string& file,
                          const std::function<void(std::string&)>& change) {
    if (communicator->is_main()) {
      files::copy(folder / "good", folder / name);
      std::string bytes = read_file(folder / name / file);
      change(bytes);
      files::remove(folder / name / file);
      if (!bytes.empty()) {
        std::ofstream(folder / name / file, std::ios::binary) << bytes;
      }
    }
    communicator->barrier("damaged");
    return folder / name;
  };
  const auto flip = [](std::string& bytes) { bytes[bytes.size() / 2] ^= 4; };
  const auto cut = [](std::string& bytes) { bytes.resize(bytes.size() - 9); };
  const auto lose = [](std::string& bytes) { bytes.clear(); };
  Session then(communicator, 2, 20, 99);
  then.prepared();
  const detail::GeneratorState random(testing_support::run_device());
  const auto before = then.everything();
  int number = 0;
  for (const auto& [file, change] :
       std::vector<std::pair<std::string, std::function<void(std::string&)>>>{
           {"model.safetensors", flip},
           {"state.safetensors", flip},
           {"state_rank_0.safetensors", cut},
           {"state.json", flip},
           {"state.json", lose},
           {"manifest.json", lose}}) {
    const auto path = damage(std::to_string(number++), file, change);
    const auto text = input_error([&] { then.accelerator.load_state(path); });
    EXPECT_NE(text.find((path / file).string()), text.npos) << text;
    random.restore();
    expect_equal_bits(then.everything(), before);
  }
  random.restore();
  then.accelerator.load_state(folder / "good");
  then.train();
  expect_equal_bits(then.everything(), expected);
}

TEST(AcceleratorState, AModelFileOfTheUsersWithOtherValuesDoesNotReplaceTheModels) {
  const auto communicator = testing_support::fresh_communicator();
  const auto folder = common_folder();
  Session saving(communicator, 2, 20);
  saving.train();
  const auto write_zeros = [&](const files::path& place) {
    NamedTensors zeros;
    for (const auto& item : saving.net->named_parameters()) {
      zeros.emplace(item.key(), torch::zeros_like(item.value()));
    }
    write_safetensors(place / "model.safetensors", zeros);
  };
  saving.accelerator.save_state(folder / "state", {.also_write = write_zeros});
  Session then(communicator, 2, 20, /*weights=*/99);
  then.prepared();
  then.accelerator.load_state(folder / "state");
  expect_equal_bits(then.net->parameters(), saving.net->parameters());
}

TEST(AcceleratorState, StateOfAnotherModelOrOtherObjectsIsRefused) {
  const auto communicator = testing_support::fresh_communicator();
  const auto folder = common_folder();
  Session first(communicator, 1, 20);
  first.prepared();
  first.accelerator.save_state(folder / "a"); // before the first step, too
  const auto says = [&](Accelerator& accelerator, const std::string& part) {
    const auto text = input_error([&] { accelerator.load_state(folder / "a"); });
    EXPECT_NE(text.find(part), text.npos) << text;
  };
  {
    Accelerator other(session_options(1), communicator);
    DropNet wide(16);
    AdamW adamw(wide->parameters(), torch::optim::AdamWOptions(0.05));
    const at::Tensor weight = wide->first->weight.detach().clone();
    auto handles = other.prepare(wide, adamw);
    const at::Tensor mine = wide->first->weight.detach().clone();
    says(other, (folder / "a" / "model.safetensors").string() +
                    ": tensor \"first.bias\" has shape [8] Float. Expected the model's [16] Float");
    EXPECT_TRUE(torch::equal(wide->first->weight, mine));
  }
  {
    Accelerator other(session_options(1), communicator);
    DropNet net;
    torch::optim::SGD sgd(net->parameters(), 0.1);
    LRScheduler schedule(sgd, constant_schedule());
    DataLoader loader(std::make_shared<RowsOfLengths>(20), {.batch_size = 2});
    auto handles = other.prepare(net, sgd, loader, schedule);
    says(other, "optimizer=\"AdamW\"");
  }
  {
    Session more(communicator, 1, 20);
    Session::Notes notes;
    Session::Notes others;
    more.prepared();
    more.accelerator.register_for_checkpointing("more", notes);
    says(more.accelerator, "lacks the state of \"more\"");
    const auto text =
        input_error([&] { more.accelerator.register_for_checkpointing("more", others); });
    EXPECT_NE(text.find("name=\"more\" is taken"), text.npos) << text;
  }
  if (communicator->is_main()) {
    files::create_directories(folder / "home");
    write_file_atomically(folder / "home" / "diary.txt", "mine");
  }
  communicator->barrier("made");
  const auto text = input_error([&] { first.accelerator.save_state(folder / "home"); });
  EXPECT_NE(text.find("holds something other than a state"), text.npos) << text;
  EXPECT_TRUE(files::exists(folder / "home" / "diary.txt"));
  communicator->barrier("looked");
}

/// Rejects a state on request, and counts in tensors of its own.
struct Stubborn : Stateful {
  void save_state(NamedTensors&, nlohmann::json& values) const override { values["rank"] = rank; }
  void load_state(const NamedTensors&, const nlohmann::json& values) override {
    if (refuses) {
      throw InputError("test::Stubborn", "I will not");
    }
    values.at("rank").get_to(rank);
  }
  int rank = -1;
  bool refuses = false;
};

TEST(AcceleratorState, ObjectThatRefusesUndoesTheOthersOnEveryRank) {
  const auto communicator = testing_support::fresh_communicator();
  const auto folder = common_folder();
  const int last = communicator->world_size() - 1;
  Stubborn saved;
  saved.rank = communicator->rank();
  Session first(communicator, 1, 20);
  first.accelerator.register_for_checkpointing("mine", saved, StateScope::per_rank);
  first.train();
  first.accelerator.save_state(folder / "a");
  const auto expected = first.everything();

  Session then(communicator, 1, 20, 99);
  Stubborn loaded;
  loaded.refuses = communicator->rank() == last;
  then.accelerator.register_for_checkpointing("mine", loaded, StateScope::per_rank);
  then.prepared();
  const detail::GeneratorState random(testing_support::run_device());
  const auto before = then.everything();
  const auto text = input_error([&] { then.accelerator.load_state(folder / "a"); });
  EXPECT_NE(text.find("I will not"), text.npos) << text;
  EXPECT_EQ(loaded.rank, -1);
  random.restore();
  expect_equal_bits(then.everything(), before);

  loaded.refuses = false;
  then.accelerator.load_state(folder / "a");
  EXPECT_EQ(loaded.rank, communicator->rank());
  expect_equal_bits(then.everything(), expected);
}

/// A user's range that torch's generator shuffles at each begin().
struct Shuffled {
  std::vector<Batch>::const_iterator begin() {
    const at::Tensor order = torch::randperm(static_cast<int64_t>(all.size()));
    batches.clear();
    for (int64_t i = 0; i < order.numel(); ++i) {
      batches.push_back(all[static_cast<size_t>(order[i].item<int64_t>())]);
    }
    return batches.begin();
  }
  std::vector<Batch>::const_iterator end() const { return batches.end(); }
  std::vector<Batch> all{};
  std::vector<Batch> batches{};
};

TEST(AcceleratorState, TorchsOptimizersSchedulersAndAnyRangeGoOnToo) {
  // Only with one rank, because each rank's own generator would give another order.
  const auto communicator = Communicator::create(World{});
  const testing_support::TemporaryFolder folder;
  const auto run = [&](std::optional<uint64_t> seed, bool save, const std::string& from) {
    auto options = session_options(2);
    options.seed = seed;
    Accelerator accelerator(options, communicator);
    DropNet net = (torch::manual_seed(save ? 1 : 2), DropNet());
    std::vector<torch::optim::OptimizerParamGroup> groups;
    groups.emplace_back(net->first->parameters());
    groups.emplace_back(net->second->parameters());
    torch::optim::SGD sgd(groups, torch::optim::SGDOptions(0.1).momentum(0.9));
    torch::optim::StepLR decay(sgd, 2, 0.5);
    Shuffled range;
    const RowsOfLengths rows(22);
    for (int64_t i = 0; i < 22; i += 2) {
      range.all.push_back(rows.collate({i, i + 1}));
    }
    auto [model, optimizer, batches, scheduler] = accelerator.prepare(net, sgd, range, decay);
    if (!from.empty()) {
      accelerator.load_state(folder / from);
    }
    for (auto epoch = batches.epoch(); epoch < 2; ++epoch) {
      batches.set_epoch(epoch);
      int turn = 0;
      for (const Batch& batch : batches) {
        auto window = accelerator.accumulate(model);
        accelerator.backward(
            torch::nn::functional::cross_entropy(model->forward(batch["x"]), batch["y"]));
        optimizer.step();
        scheduler.step();
        optimizer.zero_grad();
        if (save && epoch == 1 && turn++ == 4) {
          accelerator.save_state(folder / "a");
        }
      }
    }
    auto all = net->parameters();
    all.push_back(on_device::tensor(sgd.param_groups()[0].options().get_lr()));
    return all;
  };
  // Without a seed the order of the interrupted epoch is known from the state alone.
  for (const std::optional<uint64_t> seed :
       {std::optional<uint64_t>(42), std::optional<uint64_t>()}) {
    const auto expected = run(seed, true, "");
    expect_equal_bits(run(seed, false, "a"), expected);
  }
}

} // namespace hasten::state_test
