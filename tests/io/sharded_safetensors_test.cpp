#include "hasten/io/sharded_safetensors.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "hasten/base/error.h"
#include "support/temporary_folder.h"

namespace hasten {

namespace detail {

constexpr const char* kFirst = "model-00001-of-00002.safetensors";
constexpr const char* kSecond = "model-00002-of-00002.safetensors";

// Three tensors in two shards, and their index.
struct ShardedModel {
  testing_support::TemporaryFolder folder{};
  NamedTensors first{{"a", torch::arange(6, torch::kFloat).view({2, 3})},
                     {"c", torch::tensor({7}, torch::kLong)}};
  NamedTensors second{{"b", torch::ones({4}, torch::kBFloat16)}};
  nlohmann::json map{{"a", kFirst}, {"b", kSecond}, {"c", kFirst}};

  ShardedModel() {
    write_safetensors(folder / kFirst, first);
    write_safetensors(folder / kSecond, second);
  }
  ShardedSafetensorsReader open() const {
    const auto index = folder / "model.safetensors.index.json";
    std::ofstream(index) << nlohmann::json{{"metadata", {{"total_size", 40}}}, {"weight_map", map}};
    return ShardedSafetensorsReader(index);
  }
  // The error of opening the index must contain all parts.
  void expect_error(const std::vector<std::string>& parts) const {
    try {
      open();
      FAIL() << "no error";
    } catch (const InputError& error) {
      const std::string text = error.what();
      for (const auto& part : parts) {
        EXPECT_NE(text.find(part), std::string::npos) << part << "\n" << text;
      }
      EXPECT_NE(text.find("model.safetensors.index.json"), std::string::npos);
    }
  }
};

} // namespace detail

using detail::kFirst;
using detail::kSecond;
using detail::ShardedModel;

TEST(ShardedSafetensors, TensorsOfAllShardsAreReadByName) {
  const ShardedModel model;
  const ShardedSafetensorsReader reader = model.open();
  EXPECT_EQ(reader.names(), (std::vector<std::string>{"a", "b", "c"}));
  const NamedTensors all = reader.read_all();
  for (const auto* shard : {&model.first, &model.second}) {
    for (const auto& [name, tensor] : *shard) {
      EXPECT_TRUE(torch::equal(reader.tensor(name), tensor)) << name;
      EXPECT_TRUE(torch::equal(all.at(name), tensor)) << name;
      EXPECT_EQ(reader.entry(name).dtype, tensor.scalar_type());
    }
  }
  EXPECT_FALSE(reader.contains("d"));
  EXPECT_THROW(reader.tensor("d"), InputError);
}

TEST(ShardedSafetensors, AMissingShardIsNamed) {
  const ShardedModel model;
  std::filesystem::remove(model.folder / kSecond);
  model.expect_error({kSecond, "No such file"});
}

TEST(ShardedSafetensors, AnExtraShardIsNamedAndOtherFilesAreNot) {
  const ShardedModel model;
  write_safetensors(model.folder / "adapter.safetensors", model.second);
  EXPECT_NO_THROW(model.open());
  write_safetensors(model.folder / "model-00003-of-00003.safetensors", model.second);
  model.expect_error({"model-00003-of-00003.safetensors", "not in the index"});
}

TEST(ShardedSafetensors, MissingAndExtraKeysAreNamedTogether) {
  ShardedModel model;
  model.map.erase("c");
  model.map["d"] = kSecond;
  model.expect_error({"\"d\" is missing in " + std::string(kSecond),
                      "\"c\" is in " + std::string(kFirst) + " but not in the index"});
  model.map = {{"a", kSecond}, {"b", kSecond}, {"c", kFirst}};
  model.expect_error({"\"a\" is missing in", "\"a\" is in " + std::string(kFirst) +
                                                 ", the index says " + std::string(kSecond)});
}

TEST(ShardedSafetensors, IndexesThatAreNoneAreRefused) {
  ShardedModel model;
  const auto index = model.folder / "model.safetensors.index.json";
  for (const char* text :
       {"{", "[]", "{}", R"({"weight_map": 1})", R"({"weight_map": {"a": "x", "a": "y"}})",
        R"({"weight_map": {"a": "../x"}})"}) {
    std::ofstream(index) << text;
    EXPECT_THROW(ShardedSafetensorsReader{index}, InputError) << text;
  }
}

} // namespace hasten
