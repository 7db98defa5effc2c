// For tools/check_exported.py: exported_gradients MODEL.pt2 torch|hasten|ddp|fsdp IN.safetensors OUT
// writes the outputs, and the gradients of the sum of all outputs times sin(0, 1, 2, …), as
// OUT.safetensors; torch and hasten also the module as the folder OUT. With ddp and fsdp each rank takes
// its part of the rows and writes its outputs as OUT.RANK.safetensors; the gradients are the sums over ranks.
#include <torch/torch.h>

#include <cstdio>
#include <filesystem>
#include <string>

#include "hasten/accelerator/accelerator.h"
#include "hasten/exported/exported_module.h"
#include "hasten/io/safetensors.h"

namespace hasten {

/// The loss. Writes the outputs into `results`.
static at::Tensor run(ExportedModule module, const NamedTensors& inputs, NamedTensors& results) {
  at::Tensor loss;
  for (const auto& [name, output] : module->forward(inputs)) {
    results["out/" + name] = output.detach().clone();
    const at::Tensor weights =
        at::sin(at::arange(output.numel(), at::kLong).to(output.scalar_type()));
    const at::Tensor part = (output * weights.view_as(output)).sum();
    loss = loss.defined() ? loss + part : part;
  }
  return loss;
}

static void run_alone(const ExportedModule& module, const NamedTensors& inputs,
                      const std::string& out) {
  NamedTensors results;
  run(module, inputs, results).backward();
  for (const auto& parameter : module->named_parameters()) {
    if (parameter.value().grad().defined()) {
      results["grad/" + parameter.key()] = parameter.value().grad().clone();
    }
  }
  write_safetensors(out + ".safetensors", results);
  std::filesystem::create_directories(out);
  module->save(out);
}

static void run_on_ranks(const ExportedModule& module, NamedTensors inputs, Strategy strategy,
                         const std::string& out) {
  Accelerator accelerator(AcceleratorOptions{.device = "cpu", .strategy = strategy});
  torch::optim::SGD sgd(module->parameters(), torch::optim::SGDOptions(1));
  auto [model, optimizer] = accelerator.prepare(module, sgd);
  const int64_t rank = accelerator.process_index(), world = accelerator.num_processes();
  for (auto& [name, tensor] : inputs) {
    tensor = tensor.slice(0, tensor.size(0) * rank / world, tensor.size(0) * (rank + 1) / world);
  }
  NamedTensors results;
  {
    auto window = accelerator.accumulate(model);
    accelerator.backward(run(module, inputs, results), 1.0 / static_cast<double>(world));
    const at::NoGradGuard no_grad;
    for (at::Tensor parameter : module->parameters()) {
      parameter.zero_(); // so that the step leaves the negative gradient there
    }
    optimizer.step();
  }
  write_safetensors(out + "." + std::to_string(rank) + ".safetensors", results);
  accelerator.summon_full_params(
      [&] {
        NamedTensors gradients;
        for (const auto& parameter : module->named_parameters()) {
          gradients["grad/" + parameter.key()] = parameter.value().detach().neg();
        }
        if (rank == 0) {
          write_safetensors(out + ".safetensors", gradients);
        }
      },
      model);
  accelerator.end_training();
}

} // namespace hasten

int main(int argc, char** argv) {
  using namespace hasten;
  try {
    if (argc != 5) {
      throw std::runtime_error("four arguments");
    }
    at::set_num_threads(1);
    const std::string way = argv[2];
    auto module = ExportedModule::load(argv[1], {.substitutions = way == "hasten"});
    const NamedTensors inputs = SafetensorsReader(argv[3]).read_all();
    if (way == "ddp" || way == "fsdp") {
      run_on_ranks(module, inputs, way == "ddp" ? Strategy::ddp : Strategy::fsdp, argv[4]);
    } else {
      run_alone(module, inputs, argv[4]);
    }
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
