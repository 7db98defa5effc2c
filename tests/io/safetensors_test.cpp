#include "hasten/io/safetensors.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <ctime>
#include <fstream>
#include <random>

#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "support/temporary_folder.h"

namespace hasten {

using testing_support::TemporaryFolder;

// A file with the given header and number of data bytes.
static std::string safetensors_bytes(std::string header, size_t data_bytes) {
  header.append((8 - header.size() % 8) % 8, ' ');
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) {
    bytes[i] = static_cast<char>(header.size() >> (8 * i));
  }
  return bytes + header + std::string(data_bytes, '\1');
}

static std::string open_error(const std::string& bytes) {
  const TemporaryFolder folder;
  write_file_atomically(folder / "weights.safetensors", bytes);
  try {
    SafetensorsReader reader(folder / "weights.safetensors");
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("weights.safetensors"), std::string::npos);
    return error.what();
  }
  return {};
}

// The tensors of tools/golden/safetensors_golden.py.
static NamedTensors golden_tensors() {
  const auto range = [](int64_t n) { return torch::arange(n); };
  return {
      {"layer.weight", range(12).to(torch::kFloat).view({3, 4})},
      {"layer.bias", range(3).to(torch::kFloat)},
      {"half", range(5).to(torch::kHalf)},
      {"brain", range(5).to(torch::kBFloat16)},
      {"ids", range(4)},
      {"double", range(2).to(torch::kDouble)},
      {"mask", range(3) > 0},
      {"bytes", range(7).to(torch::kByte)},
      {"short", range(3).to(torch::kShort)},
      {"int", range(3).to(torch::kInt)},
      {"complex", range(2).to(torch::kComplexFloat)},
      {"scalar", torch::tensor(2.5f)},
      {"empty", torch::empty({0, 3})},
      {"n\xc3\xa4me \"x\"\n", range(1).to(torch::kFloat)},
  };
}

TEST(Safetensors, FileEqualsTheReferenceWritersByteForByte) {
  const TemporaryFolder folder;
  write_safetensors(folder / "a", golden_tensors());
  // Printed by tools/golden/safetensors_golden.py.
  EXPECT_EQ(hash_hex(read_file(folder / "a")), "5cbfbbe82d3fb862");
}

TEST(Safetensors, TensorsComeBackAsTheyWereWritten) {
  const TemporaryFolder folder;
  const auto tensors = golden_tensors();
  write_safetensors(folder / "a", tensors, {{"format", "pt"}, {"step", "7"}});
  auto reader = std::make_unique<SafetensorsReader>(folder / "a");
  EXPECT_EQ(reader->names().size(), tensors.size());
  EXPECT_EQ(reader->metadata().at("step"), "7");
  EXPECT_EQ(reader->entry("layer.weight").shape, (std::vector<int64_t>{3, 4}));
  NamedTensors views;
  for (const auto& [name, tensor] : tensors) {
    views[name] = reader->tensor(name);
  }
  const auto copies = reader->read_all();
  reader.reset(); // the views keep the mapping
  std::filesystem::remove(folder / "a");
  for (const auto& [name, tensor] : tensors) {
    EXPECT_EQ(views[name].scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(torch::equal(views[name], tensor)) << name;
    EXPECT_TRUE(torch::equal(copies.at(name), tensor)) << name;
  }
}

TEST(Safetensors, ViewsAreNoCopiesAndWritingOneLeavesTheFile) {
  const TemporaryFolder folder;
  write_safetensors(folder / "a", {{"x", torch::ones({4})}});
  const SafetensorsReader reader(folder / "a");
  auto x = reader.tensor("x");
  EXPECT_EQ(x.data_ptr(), reader.tensor("x").data_ptr());
  x.fill_(5);
  EXPECT_TRUE(torch::equal(SafetensorsReader(folder / "a").tensor("x"), torch::ones({4})));
}

TEST(Safetensors, TiedTensorsAreStoredOnceAndFoundUnderBothNames) {
  const TemporaryFolder folder;
  const auto weight = torch::randn({100, 10});
  // A view of the same memory with another shape is stored as another tensor.
  write_safetensors(folder / "a",
                    {{"head", weight}, {"embed", weight}, {"flat", weight.view({-1})}});
  const SafetensorsReader reader(folder / "a");
  EXPECT_EQ(reader.names(), (std::vector<std::string>{"embed", "flat"}));
  EXPECT_EQ(reader.metadata().at("head"), "embed");
  EXPECT_TRUE(reader.contains("head"));
  EXPECT_TRUE(torch::equal(reader.tensor("head"), weight));
  const auto all = reader.read_all();
  EXPECT_TRUE(all.at("head").is_alias_of(all.at("embed")));
}

TEST(Safetensors, StridedTensorsAreWrittenInRowOrder) {
  const TemporaryFolder folder;
  const auto base = torch::randn({4, 6});
  write_safetensors(folder / "a", {{"t", base.t()}, {"s", base.slice(1, 1, 6, 2)}});
  const SafetensorsReader reader(folder / "a");
  EXPECT_TRUE(torch::equal(reader.tensor("t"), base.t()));
  EXPECT_TRUE(torch::equal(reader.tensor("s"), base.slice(1, 1, 6, 2)));
}

TEST(Safetensors, BadlyAlignedDataIsRead) {
  // 5 bytes of "b" push the floats of "f" to an odd address.
  const std::string header = R"({"b":{"dtype":"U8","shape":[5],"data_offsets":[0,5]},)"
                             R"("f":{"dtype":"F32","shape":[2],"data_offsets":[5,13]}})";
  const TemporaryFolder folder;
  std::string bytes = safetensors_bytes(header, 13);
  const float values[2] = {1.5f, -2.0f};
  bytes.replace(bytes.size() - 8, 8, reinterpret_cast<const char*>(values), 8);
  write_file_atomically(folder / "a", bytes);
  EXPECT_TRUE(
      torch::equal(SafetensorsReader(folder / "a").tensor("f"), torch::tensor({1.5f, -2.0f})));
}

TEST(Safetensors, LyingFilesAreNamedWithTheTensor) {
  const auto one = [](const std::string& entry, size_t data_bytes) {
    return open_error(safetensors_bytes("{\"w\":" + entry + "}", data_bytes));
  };
  const auto both = [](const std::string& a, const std::string& b) {
    return open_error(safetensors_bytes(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + a +
                                            R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" +
                                            b + "}}",
                                        8));
  };
  const auto good = R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})";
  EXPECT_EQ(one(good, 8), "");
  EXPECT_EQ(both("[0,4]", "[4,8]"), "");
  EXPECT_EQ(both("[4,8]", "[0,4]"), ""); // any order is allowed
  EXPECT_EQ(open_error(safetensors_bytes("{}", 0)), "");
  const std::pair<std::string, std::string> cases[] = {
      {open_error(""), "0 bytes"},
      {open_error("1234567"), "7 bytes"},
      {open_error(std::string(8, '\xff')), "header length="},
      {open_error(safetensors_bytes("[1]", 0)), "does not start with"},
      {open_error(safetensors_bytes("{\"w\":", 0)), "not a valid JSON object"},
      {open_error(safetensors_bytes("{\"\xff\":1}", 0)), "not a valid JSON object"},
      {one(good, 7), "\"w\" ends at byte 8"},
      {one(good, 9), "take 8 bytes of a data section of 9"},
      {one(R"({"dtype":"F31","shape":[2],"data_offsets":[0,8]})", 8),
       "\"w\" has an unknown dtype=F31"},
      {one(R"({"dtype":"F32","shape":[3],"data_offsets":[0,8]})", 8), "\"w\" takes 8 bytes"},
      {one(R"({"dtype":"F32","shape":[-2],"data_offsets":[0,8]})", 8), "\"w\" has shape=[-2]"},
      {one(R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})", 8),
       "\"w\" has data_offsets=[8,0]"},
      {one(R"({"dtype":"F32","shape":[4294967296,4294967296,4],)"
           R"("data_offsets":[0,8]})",
           8),
       "needs too many"},
      {one(R"({"dtype":"F32","shape":[2]})", 8), "\"w\" is described by"},
      {one("3", 8), "\"w\" is described by"},
      {both("[0,4]", "[0,4]"), "\"b\" starts at byte 0"},
      {both("[0,4]", "[3,7]"), "\"b\" starts at byte 3"},
      {open_error(safetensors_bytes(std::string("{\"w\":") + good + ",\"w\":" + good + "}", 8)),
       "\"w\" occurs twice"},
      {open_error(safetensors_bytes("{\"__metadata__\":{\"a\":1}}", 0)), "__metadata__ \"a\""},
      {open_error(safetensors_bytes("{\"a\":" + std::string(100'000, '[') + "}", 0)), "nested"},
  };
  for (const auto& [message, part] : cases) {
    EXPECT_NE(message.find(part), std::string::npos) << part << " in: " << message;
  }
}

TEST(Safetensors, MutatedFilesAreRefusedOrReadWithinTheirBounds) {
  const TemporaryFolder folder;
  write_safetensors(folder / "good", golden_tensors());
  const std::string good = read_file(folder / "good");
  const size_t header_bytes =
      static_cast<unsigned char>(good[0]) + 256u * static_cast<unsigned char>(good[1]);
  std::mt19937 random(7);
  const auto below = [&](size_t bound) { return random() % bound; };
  int refused = 0;
  constexpr int kMutations = 600;
  for (int i = 0; i < kMutations; ++i) {
    std::string bytes = good;
    const int kind = i % 4;
    if (kind == 0) { // another byte in length or header
      bytes[below(8 + header_bytes)] ^= static_cast<char>(1 + below(255));
    } else if (kind == 1) { // another digit
      size_t at = 8 + below(header_bytes);
      while (bytes[at] < '0' || bytes[at] > '9') {
        at = at + 1 < 8 + header_bytes ? at + 1 : 8;
      }
      bytes[at] = static_cast<char>('0' + below(10));
    } else if (kind == 2) {
      bytes.resize(below(bytes.size()));
    } else { // a piece of the header twice
      const size_t from = 8 + below(header_bytes);
      bytes.insert(from, good.substr(from, 1 + below(20)));
    }
    std::ofstream(folder / "bad") << bytes; // no fsync
    try {
      const SafetensorsReader reader(folder / "bad");
      for (const auto& [name, tensor] : reader.read_all()) {
        EXPECT_LE(tensor.nbytes(), bytes.size()) << name;
      }
    } catch (const InputError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, kMutations / 2);
}

// Eight times as many tensors must take about eight times as long. If each were compared with all
// others it would be 64 times. Measures the time of this thread, because machines are busy.
TEST(Safetensors, AHeaderTakesLinearTime) {
  const TemporaryFolder folder;
  const auto seconds = [&](int tensors) {
    std::string header = "{";
    for (int i = 0; i < tensors; ++i) {
      header += (i == 0 ? "\"t" : ",\"t") + std::to_string(i) +
                R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
    }
    std::ofstream(folder / "many") << safetensors_bytes(header + "}", 0);
    double best = 1e9;
    for (int i = 0; i < 2; ++i) {
      const auto now = [] {
        timespec time{};
        ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
        return static_cast<double>(time.tv_sec) + time.tv_nsec * 1e-9;
      };
      const double before = now();
      const SafetensorsReader reader(folder / "many");
      EXPECT_EQ(reader.names().size(), static_cast<size_t>(tensors));
      best = std::min(best, now() - before);
    }
    return best;
  };
  EXPECT_LT(seconds(16'000), 28 * seconds(2'000));
}

TEST(Safetensors, AFileThatShrinksBeforeItIsReadIsNamed) {
  const TemporaryFolder folder;
  const auto path = folder / "w.safetensors";
  write_safetensors(path, {{"w", torch::ones({100'000})}});
  const SafetensorsReader reader(path);
  const NamedTensors before = reader.read_all();
  EXPECT_TRUE(before.at("w").equal(torch::ones({100'000})));
  std::filesystem::resize_file(path, 5000);
  try {
    reader.read_all();
    FAIL();
  } catch (const InputError& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find(path.string() + " shrank"), std::string::npos) << message;
  }
}

TEST(Safetensors, UnknownNamesOfferTheNearest) {
  const TemporaryFolder folder;
  write_safetensors(folder / "a", golden_tensors());
  try {
    SafetensorsReader(folder / "a").tensor("layer.weigth");
    FAIL();
  } catch (const InputError& error) {
    EXPECT_NE(std::string(error.what()).find("\"layer.weight\" perhaps"), std::string::npos);
  }
  EXPECT_THROW(SafetensorsReader(folder / "missing"), InputError);
  EXPECT_THROW(SafetensorsReader{folder.path()}, InputError);
}

TEST(Safetensors, WhatTheFormatLacksIsRefusedByName) {
  const TemporaryFolder folder;
  for (const auto& tensor : {torch::zeros({2}, torch::kComplexDouble),
                             torch::zeros({2, 2}).to_sparse(), torch::Tensor()}) {
    try {
      write_safetensors(folder / "a", {{"odd", tensor}});
      FAIL();
    } catch (const InputError& error) {
      EXPECT_NE(std::string(error.what()).find("\"odd\""), std::string::npos);
    }
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "a"));
}

} // namespace hasten
