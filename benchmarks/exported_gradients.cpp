// For tools/check_exported.py: exported_gradients MODEL.pt2 torch|hasten IN.safetensors OUT.safetensors
// writes the outputs, and the gradients of the sum of all outputs times sin(0, 1, 2, …).
#include <torch/torch.h>

#include <cstdio>
#include <string>

#include "hasten/exported/exported_module.h"
#include "hasten/io/safetensors.h"

int main(int argc, char** argv) {
  try {
    if (argc != 5) {
      throw std::runtime_error("four arguments");
    }
    at::set_num_threads(1);
    auto module =
        hasten::ExportedModule::load(argv[1], {.substitutions = std::string(argv[2]) == "hasten"});
    hasten::NamedTensors results;
    at::Tensor loss;
    for (const auto& [name, output] :
         module->forward(hasten::SafetensorsReader(argv[3]).read_all())) {
      results["out/" + name] = output.detach().clone();
      const at::Tensor weights =
          at::sin(at::arange(output.numel(), at::kLong).to(output.scalar_type()));
      const at::Tensor part = (output * weights.view_as(output)).sum();
      loss = loss.defined() ? loss + part : part;
    }
    loss.backward();
    for (const auto& parameter : module->named_parameters()) {
      if (parameter.value().grad().defined()) {
        results["grad/" + parameter.key()] = parameter.value().grad().clone();
      }
    }
    hasten::write_safetensors(argv[4], results);
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
