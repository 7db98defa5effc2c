// Programs that PyTorch exported give PyTorch's results and gradients.
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "exported_rig.h"
#include "hasten/activation_checkpoint/gradient_checkpointing.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/base/log.h"
#include "hasten/core/memory.h"
#include "hasten/parallel/fully_shard.h"
#include "support/error_of.h"
#include "support/temporary_folder.h"

namespace hasten::exported_test {

using testing_support::error_of;

static const std::vector<std::pair<std::string, int>> kPrograms{
    {"encoder", 3}, {"conv_net", 3}, {"experts", 3}, {"two_modes", 2}}; // with their cases

static ExportedModule load(const std::string& name, const ExportedModuleOptions& options = {}) {
  return ExportedModule::load(golden_path(name + ".pt2"), options);
}

static void expect_close(const NamedTensors& got, const NamedTensors& want,
                         const std::string& where) {
  ASSERT_EQ(got.size(), want.size()) << where;
  for (const auto& [name, tensor] : want) {
    ASSERT_TRUE(got.contains(name)) << where << " " << name;
    EXPECT_LE(relative_difference(got.at(name), tensor), 1e-5) << where << " " << name;
  }
}

static NamedTensors gradients_of(const ExportedModule& module) {
  NamedTensors gradients;
  for (const auto& parameter : module->named_parameters()) {
    if (parameter.value().grad().defined()) {
      gradients[parameter.key()] = parameter.value().grad();
    }
  }
  return gradients;
}

TEST(Exported, ResultsGradientsStatisticsAndEvaluationArePyTorchs) {
  for (const auto& [program, cases] : kPrograms) {
    for (int i = 0; i < cases; ++i) {
      for (const bool substitutions : {false, true}) {
        const std::string name = program + "/" + std::to_string(i);
        SCOPED_TRACE(name + (substitutions ? "" : ", PyTorch's operators"));
        const GoldenCase golden = golden_case(name);
        ExportedModule module = load(program, {.substitutions = substitutions});
        const NamedTensors outputs = module->forward(golden.in);
        expect_close(outputs, golden.out, "output");
        loss_of(outputs).backward();
        expect_close(gradients_of(module), golden.grad, "gradient");
        NamedTensors buffers;
        for (const auto& buffer : module->named_buffers()) {
          buffers[buffer.key()] = buffer.value();
        }
        expect_close(buffers, golden.after, "buffer");
        module->eval();
        const at::NoGradGuard no_grad;
        expect_close(module->forward(golden.in), golden.eval, "evaluation");
        for (const auto& [key, buffer] : buffers) { // evaluation writes none
          EXPECT_TRUE(buffer.equal(golden.after.at(key)) ||
                      relative_difference(buffer, golden.after.at(key)) < 1e-5);
        }
      }
    }
  }
}

TEST(Exported, DropoutFollowsTheModuleWhereItWasOn) {
  ExportedModule module = load("dropped");
  const Tensor x = golden_case("dropped/0").in.at("x");
  const auto run = [&] { return module->forward({{"x", x}}); };
  torch::manual_seed(1);
  const NamedTensors first = run();
  const NamedTensors second = run();
  EXPECT_FALSE(first.at("0").equal(second.at("0")));
  EXPECT_FALSE(first.at("1").equal(second.at("1")));
  EXPECT_TRUE(first.at("2").equal(x));
  torch::manual_seed(1);
  EXPECT_TRUE(run().at("0").equal(first.at("0")));
  module->eval();
  EXPECT_LE(relative_difference(run().at("0"), golden_case("dropped/0").eval.at("0")), 1e-5);
  EXPECT_TRUE(run().at("1").equal(run().at("1")));
  EXPECT_LE(relative_difference(run().at("1"), golden_case("dropped/0").eval.at("1")), 1e-5);
}

TEST(Exported, ItsModulesAndNamesAreThoseOfPython) {
  ExportedModule module = load("encoder");
  const auto parameters = module->named_parameters();
  EXPECT_TRUE(parameters.contains("words.weight"));
  EXPECT_FALSE(parameters.contains("head.weight")); // tied: an optimizer must step it once
  EXPECT_TRUE(parameters.contains("layers.1.attention.qkv.bias"));
  EXPECT_FALSE(parameters["frozen"].requires_grad());
  EXPECT_FALSE(module->named_buffers().contains("frequencies")); // not part of Python's state
  EXPECT_EQ(module->unused_parameters(), (std::vector<std::string>{"unused", "still"}));
  EXPECT_EQ(module->block_names(), (std::vector<std::string>{"layers.0", "layers.1", "shared.0"}));
  EXPECT_EQ(repeated_blocks(*module).size(), 3u);
  EXPECT_EQ(module->outputs(), (std::vector<std::string>{"logits", "more.0", "more.1"}));
  EXPECT_EQ(module->describe().substr(0, 18), "input_ids: Long [s");
}

TEST(Exported, AParameterThatIsReplacedIsUsedInTheNextCall) {
  ExportedModule module = load("two_modes");
  const Tensor x = golden_case("two_modes/0").in.at("x");
  const auto weight = module->named_parameters()["linear.weight"];
  {
    const at::NoGradGuard no_grad;
    weight.set_data(at::zeros({4, 4}));
  }
  const Tensor y = module->forward({{"x", x}}).at("y");
  EXPECT_TRUE(y[0].equal(at::tanh(module->named_parameters()["linear.bias"])));
}

TEST(Exported, BlocksAreRecomputedWithTheSameGradients) {
  for (const char* name : {"encoder", "conv_net"}) {
    const GoldenCase golden = golden_case(std::string(name) + "/0");
    NamedTensors gradients[3];
    for (const int way : {0, 1, 2}) {
      ExportedModule module = load(name, {.blocks = way > 0});
      if (way == 2) {
        gradient_checkpointing_enable(module);
      }
      loss_of(module->forward(golden.in)).backward();
      gradients[way] = gradients_of(module);
      EXPECT_EQ(way == 2, gradient_checkpointing_enabled(module.ptr()) &&
                              gradient_checkpointing_called(module.ptr()));
    }
    for (const auto& [key, gradient] : gradients[0]) {
      EXPECT_TRUE(gradient.equal(gradients[1].at(key)) && gradient.equal(gradients[2].at(key)))
          << key;
    }
  }
}

TEST(Exported, ForwardStopsBeforeTheLinearLayerOfAnOutput) {
  const NamedTensors inputs = golden_case("encoder/0").in;
  ExportedModule module = load("encoder");
  EXPECT_EQ(module->output_layer("logits"), "head");
  const auto layer = module->forward_to_output_layer(inputs, "logits");
  ASSERT_TRUE(layer);
  const Tensor logits = module->forward(inputs).at("logits");
  EXPECT_LE(relative_difference(at::linear(layer->input, layer->weight, layer->bias), logits),
            1e-6);
  EXPECT_TRUE(layer->weight.is_same(module->named_parameters()["words.weight"]));
  EXPECT_FALSE(module->forward_to_output_layer(inputs, "more.0"));
}

TEST(Exported, SavesAFolderThatGivesTheSameModule) {
  const testing_support::TemporaryFolder folder;
  ExportedModule module = load("encoder");
  {
    const at::NoGradGuard no_grad;
    for (const Tensor& parameter : module->parameters()) {
      parameter.mul_(1.25);
    }
  }
  module->save(folder.path());
  EXPECT_LT(std::filesystem::file_size(folder.path() / "model.pt2"),
            std::filesystem::file_size(golden_path("encoder.pt2")));
  ExportedModule again = ExportedModule::load(folder.path());
  const GoldenCase golden = golden_case("encoder/1");
  EXPECT_TRUE(
      again->forward(golden.in).at("logits").equal(module->forward(golden.in).at("logits")));
  std::filesystem::remove(folder.path() / "model.safetensors");
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "take 0 bytes",
                      error_of<InputError>([&] { ExportedModule::load(folder.path()); }));
}

TEST(Exported, AnInputThatWasNotExportedIsRefusedByName) {
  ExportedModule module = load("encoder");
  const NamedTensors good = golden_case("encoder/0").in;
  const auto said = [&](const std::string& name, const Tensor& value) {
    NamedTensors inputs = good;
    inputs[name] = value;
    return error_of<InputError>([&] { module->forward(inputs); });
  };
  const auto expect = [](const std::string& part, const std::string& text) {
    EXPECT_PRED_FORMAT2(testing::IsSubstring, part, text);
  };
  const Tensor ids = good.at("input_ids");
  expect("input labels", said("labels", ids));
  expect("export the module with a tensor for it", said("labels", ids));
  expect("input typo", said("typo", ids));
  expect("input input_ids: dtype=Float", said("input_ids", ids.to(at::kFloat)));
  expect("2 sizes of Long", said("input_ids", ids[0]));
  expect("as in input input_ids", said("attention_mask", at::ones({3, 6}, at::kLong)));
  expect("at least 1 at dimension 0", said("input_ids", ids.slice(0, 0, 0)));
  expect("input attention_mask is missing",
         error_of<InputError>([&] { module->forward({{"input_ids", ids}}); }));
  expect("input images: dtype=Float, sizes=[2, 4, 6, 6]. Expected 3 at dimension 1",
         error_of<InputError>(
             [&] { load("conv_net")->forward({{"images", at::zeros({2, 4, 6, 6})}}); }));
  expect("aten.embedding.default of module words (exported.py:", said("input_ids", ids + 100));
}

TEST(Exported, AFileThatIsDamagedIsRefused) {
  const testing_support::TemporaryFolder folder;
  const auto path = folder.path() / "x.pt2";
  const auto said = [&](const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
    return error_of<InputError>([&] { ExportedModule::load(path); });
  };
  const std::string good = read_file(golden_path("two_modes.pt2"));
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "is no file",
                      error_of<InputError>([&] { ExportedModule::load(folder.path() / "y.pt2"); }));
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "damaged", said(""));
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "damaged", said(good.substr(0, good.size() / 2)));
  std::string changed = good;
  changed[changed.find("aten.linear.default")] = 'b';
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "damaged", said(changed)); // its checksum differs
}

using ChangeProgram = std::function<void(nlohmann::json&)>;

/// Writes two_modes.pt2 with another program for training.
static void write_program(const std::filesystem::path& path, const ChangeProgram& change) {
  write_changed(golden_path("two_modes.pt2"), path,
                [&](const std::string& record, std::string& bytes) {
                  if (record == "models/train.json") {
                    nlohmann::json program = nlohmann::json::parse(bytes);
                    change(program);
                    bytes = program.dump();
                  }
                });
}

static nlohmann::json call_of(const std::string& target,
                              const std::vector<std::pair<std::string, nlohmann::json>>& arguments,
                              const nlohmann::json& output) {
  nlohmann::json node{{"target", "torch.ops.aten." + target},
                      {"inputs", nlohmann::json::array()},
                      {"outputs", {output}},
                      {"metadata",
                       {{"nn_module_stack", "L__self__,,M;L__self___linear,linear,Linear"},
                        {"stack_trace", "File \"m.py\", line 3, in forward"}}}};
  for (const auto& [name, value] : arguments) {
    node["inputs"].push_back({{"name", name}, {"arg", value}});
  }
  return node;
}

/// The error of forward() where these calls, of which the last makes "linear", replace the first operator.
static std::string error_of_calls(const std::vector<nlohmann::json>& calls) {
  const testing_support::TemporaryFolder folder;
  write_program(folder / "x.pt2", [&](nlohmann::json& program) {
    nlohmann::json& nodes = program["graph_module"]["graph"]["nodes"];
    nodes.erase(0);
    for (auto call = calls.rbegin(); call != calls.rend(); ++call) {
      nodes.insert(nodes.begin(), *call);
    }
  });
  ExportedModule module = ExportedModule::load(folder / "x.pt2");
  return error_of<InputError>(
      [&] { module->forward({{"x", golden_case("two_modes/0").in.at("x")}}); });
}

static nlohmann::json tensor(const std::string& name) { return {{"as_tensor", {{"name", name}}}}; }
static nlohmann::json whole(int64_t number) { return {{"as_int", number}}; }
static nlohmann::json wholes(const std::vector<int64_t>& numbers) { return {{"as_ints", numbers}}; }

TEST(Exported, AProgramThatThisLibTorchCannotRunIsRefusedByName) {
  const testing_support::TemporaryFolder folder;
  const auto said = [&](const ChangeProgram& change) {
    write_program(folder.path() / "x.pt2", change);
    return error_of<InputError>([&] { ExportedModule::load(folder.path() / "x.pt2"); });
  };
  EXPECT_EQ(said([](nlohmann::json& program) {
              program["schema_version"]["minor"] = 99; // what it adds is empty
              program["later"] = nlohmann::json::object();
            }),
            "");
  const auto inputs = [](nlohmann::json& program) -> nlohmann::json& {
    return program["graph_module"]["signature"]["input_specs"];
  };
  const auto node = [](nlohmann::json& program) -> nlohmann::json& {
    return program["graph_module"]["graph"]["nodes"][0];
  };
  const std::vector<std::pair<std::string, ChangeProgram>> changes{
      {"has version 9.", [](auto& p) { p["schema_version"]["major"] = 9; }},
      {"calls aten.from_file.default",
       [&](auto& p) { node(p)["target"] = "torch.ops.aten.from_file.default"; }},
      {"calls mine.linear.default, an operator of the library mine. Expected PyTorch's own",
       [&](auto& p) { node(p)["target"] = "torch.ops.mine.linear.default"; }},
      {"has higher_order.cond",
       [&](auto& p) { node(p)["target"] = "torch.ops.higher_order.cond"; }},
      {"aten.linear.default has no argument wight",
       [&](auto& p) {
         node(p)["inputs"].push_back(node(p)["inputs"][1]);
         node(p)["inputs"].back()["name"] = "wight";
       }},
      {"lacks its argument weight", [&](auto& p) { node(p)["inputs"].erase(1); }},
      {"aten.linear.default's weight is",
       [&](auto& p) { node(p)["inputs"][1]["arg"] = {{"as_string", "w"}}; }},
      {"reads nothing, which no earlier operator makes",
       [&](auto& p) { node(p)["inputs"][1]["arg"] = {{"as_tensor", {{"name", "nothing"}}}}; }},
      {"makes x twice", [&](auto& p) { node(p)["outputs"][0] = {{"as_tensor", {{"name", "x"}}}}; }},
      {"aten.to.dtype's dtype is",
       [&](auto& p) {
         node(p) =
             call_of("to.dtype", {{"self", tensor("x")}, {"dtype", whole(99)}}, tensor("linear"));
       }},
      {"an object with one entry", [&](auto& p) { inputs(p)[0] = nlohmann::json::object(); }},
      {"no input of the graph, or is there twice", [&](auto& p) { inputs(p)[1] = inputs(p)[0]; }},
      {"that its signature does not have", [&](auto& p) { inputs(p).erase(2); }},
      {"a tensor without a name",
       [&](auto& p) { inputs(p)[0]["parameter"]["parameter_name"] = ""; }},
      {"the program reads the buffer linear.weight, which", // a parameter in the file
       [&](auto& p) {
         inputs(p)[1] = {{"buffer",
                          {{"arg", inputs(p)[1]["parameter"]["arg"]},
                           {"buffer_name", inputs(p)[0]["parameter"]["parameter_name"]},
                           {"persistent", true}}}};
       }},
      {"at most 100 levels",
       [&](auto& p) {
         std::string& name =
             inputs(p)[0]["parameter"]["parameter_name"].template get_ref<std::string&>();
         name = name.assign(400'000, '.') + "x";
       }},
      {"the program has a field later", [](auto& p) { p["later"] = "x"; }},
      {"a graph has a field later", [](auto& p) { p["graph_module"]["graph"]["later"] = {1}; }},
      {"aten.linear.default has a field later", [&](auto& p) { node(p)["later"] = true; }},
      {"an argument of aten.linear.default has a field later",
       [&](auto& p) { node(p)["inputs"][0]["later"] = 1; }},
      {"an input of the signature has a field later",
       [&](auto& p) { inputs(p)[0]["parameter"]["later"] = 1; }},
      {"is damaged", [](auto& p) { p["graph_module"].erase("signature"); }},
      {"is damaged", [](auto& p) { p["graph_module"]["graph"]["nodes"] = 3; }}};
  for (const auto& [part, change] : changes) {
    EXPECT_PRED_FORMAT2(testing::IsSubstring, part, said(change));
  }
}

TEST(Exported, ValuesOutsideOfTheirRecordAreRefused) {
  const testing_support::TemporaryFolder folder;
  write_changed(golden_path("two_modes.pt2"), folder / "x.pt2",
                [](const std::string& record, std::string& bytes) {
                  if (record == "data/weights/train_weights_config.json") {
                    nlohmann::json weights = nlohmann::json::parse(bytes);
                    nlohmann::json& meta = weights["config"]["linear.bias"]["tensor_meta"];
                    meta["sizes"] = meta["strides"] = nlohmann::json::array();
                    meta["storage_offset"] = whole(int64_t{1} << 62); // of elements
                    bytes = weights.dump();
                  }
                });
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "the values of linear.bias take 16 bytes",
                      error_of<InputError>([&] { ExportedModule::load(folder / "x.pt2"); }));
}

TEST(Exported, SizesOutsideOfTheirRangeAreRefused) {
  const testing_support::TemporaryFolder folder;
  write_program(folder / "x.pt2", [](nlohmann::json& program) {
    for (nlohmann::json& range : program["range_constraints"]) {
      range = {{"min_val", 3}, {"max_val", 4}};
    }
  });
  ExportedModule module = ExportedModule::load(folder / "x.pt2");
  const auto said = [&](int64_t size) {
    return error_of<InputError>([&] { module->forward({{"x", at::ones({size, 4})}}); });
  };
  EXPECT_EQ(said(3) + said(4), "");
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "at least 3 at dimension 0", said(2));
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "at most 4 at dimension 0", said(5));
}

TEST(Exported, ANewerProgramAndOneThatDoesNotTrainAreSaidOnce) {
  std::string said;
  set_log_sink([&](LogLevel level, std::string_view line) {
    said += (level == LogLevel::warning ? "warning: " : "") + std::string(line) + "\n";
  });
  const testing_support::TemporaryFolder folder;
  write_changed(golden_path("two_modes.pt2"), folder / "x.pt2",
                [](const std::string& record, std::string& bytes) {
                  nlohmann::json source =
                      record.ends_with(".json") ? nlohmann::json::parse(bytes) : nlohmann::json();
                  if (record.starts_with("models/")) {
                    source["torch_version"] = "99.1.0+cpu";
                  }
                  if (record == "data/weights/train_weights_config.json") {
                    for (nlohmann::json& weight : source["config"]) {
                      weight["tensor_meta"]["requires_grad"] = false;
                    }
                  }
                  bytes = source.is_null() ? bytes : source.dump();
                });
  ExportedModule module = ExportedModule::load(folder / "x.pt2");
  set_log_sink({});
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "warning: ", said);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "is of PyTorch 99.1, which is newer", said);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "evaluates but does not train", said);
  EXPECT_EQ(std::ranges::count(said, '\n'), 2);
  module->eval();
  EXPECT_EQ(module->forward({{"x", at::ones({2, 4})}}).size(), 1u);
}

TEST(Exported, AnOperatorThatNeedsMoreMemoryThanThereIsIsRefusedByName) {
  const auto expect = [](const nlohmann::json& node) {
    const std::string where = node["target"].get<std::string>().substr(10);
    EXPECT_PRED_FORMAT2(testing::IsSubstring,
                        where + " of module linear (m.py:3): ", error_of_calls({node}));
  };
  const auto made = tensor("linear");
  const int64_t left = memory_left();
  expect(call_of("full.default", {{"size", wholes({1 << 20, 1 << 20})}, {"fill_value", whole(1)}},
                 made));
  expect(call_of("empty.memory_format", {{"size", wholes({left})}}, made)); // of floats
  expect(call_of("arange.default", {{"end", whole(int64_t{1} << 50)}}, made));
  expect(call_of("repeat.default", {{"self", tensor("x")}, {"repeats", wholes({left, 1})}}, made));
  expect(call_of("expand.default", {{"self", tensor("x")}, {"size", wholes({4 * left, -1, -1})}},
                 made));
  expect(call_of("constant_pad_nd.default", {{"self", tensor("x")}, {"pad", wholes({left, 0})}},
                 made));
  expect(call_of("tensor_split.sections", {{"self", tensor("x")}, {"sections", whole(1'500'000)}},
                 {{"as_tensors", {{{"name", "linear"}}}}}));
}

TEST(Exported, ArgumentsThatTorchDoesNotCheckAreRefused) {
  const auto expect = [](const std::string& part, const std::vector<nlohmann::json>& calls) {
    EXPECT_PRED_FORMAT2(testing::IsSubstring, part, error_of_calls(calls));
  };
  const auto made = tensor("linear");
  const auto full = [](const std::string& name, const std::vector<int64_t>& size, int64_t value) {
    return call_of(
        "full.default",
        {{"size", wholes(size)}, {"fill_value", whole(value)}, {"dtype", {{"as_scalar_type", 5}}}},
        tensor(name));
  };
  expect("is divided by -1", {full("n", {2}, std::numeric_limits<int64_t>::min()),
                              call_of("div.Scalar_mode",
                                      {{"self", tensor("n")},
                                       {"other", whole(-1)},
                                       {"rounding_mode", {{"as_string", "trunc"}}}},
                                      made)});
  expect("a norm with sizes=[4]",
         {call_of("_weight_norm.default",
                  {{"v", tensor("x")}, {"g", tensor("p_linear_bias")}, {"dim", whole(0)}}, made)});
  // torch writes as many as the repeats say, wherever output_size ends.
  EXPECT_EQ(
      "", error_of_calls(
              {full("n", {3}, 1000),
               call_of("repeat_interleave.Tensor",
                       {{"repeats", tensor("n")}, {"output_size", whole(2)}}, tensor("m")),
               call_of("view.default", {{"self", tensor("m")}, {"size", wholes({3000})}}, made)}));
  expect("its result is a Tensor", {call_of("relu.default", {{"self", tensor("x")}},
                                            {{"as_sym_int", {{"as_name", "linear"}}}})});
}

} // namespace hasten::exported_test
