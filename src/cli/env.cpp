#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/version.h>

#include <cstdlib>
#include <iomanip>
#include <iostream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <thread>
#include <utility>

#include "core/cuda_library.h"
#include "hasten/base/exit_code.h"
#include "hasten/base/process.h"
#include "hasten/base/text.h"
#include "hasten/base/world.h"
#include "hasten/comm/cost_model.h"
#include "hasten/core/device.h"
#include "hasten/core/linear.h"
#include "hasten/core/precision_probe.h"
#include "run.h"

namespace hasten {

namespace detail {

/// Bytes of a "12345 kB" line of /proc/meminfo.
int64_t memory_bytes(const std::string& key) {
  return std::atoll(proc_value("/proc/meminfo", key).c_str()) * 1024;
}

/// The CPU's features that matter for the speed of LibTorch's kernels.
std::vector<std::string> cpu_features() {
  static const std::set<std::string> wanted{"avx2",        "fma",      "avx512f",  "avx512_vnni",
                                            "avx512_bf16", "amx_bf16", "amx_int8", "asimd",
                                            "bf16",        "sve"};
  std::string flags = proc_value("/proc/cpuinfo", "flags");
  if (flags.empty()) {
    flags = proc_value("/proc/cpuinfo", "Features"); // Arm
  }
  std::istringstream words(flags);
  std::vector<std::string> found(std::istream_iterator<std::string>(words), {});
  std::erase_if(found, [](const std::string& word) { return !wanted.contains(word); });
  return found;
}

nlohmann::ordered_json environment_json() {
  const CudaFacts& cuda = cuda_facts(); // before LibTorch looks
  const int gpus = cuda.devices;
  nlohmann::ordered_json json;
  json["hasten"] = HASTEN_VERSION;
  json["torch"] = TORCH_VERSION;
  json["compiler"] = "g++ " __VERSION__;
  json["cpu"] = proc_value("/proc/cpuinfo", "model name");
  json["cpu_capability"] = at::get_cpu_capability();
  json["cpu_features"] = cpu_features();
  json["cores"] = std::thread::hardware_concurrency();
  json["allowed_cores"] = allowed_cores();
  for (const int ranks : {1, 2, 4}) {
    json["threads_per_rank"][std::to_string(ranks)] = threads_per_rank(ranks);
  }
  const char* threads = std::getenv("OMP_NUM_THREADS");
  json["OMP_NUM_THREADS"] = threads == nullptr ? nlohmann::ordered_json() : threads;
  json["memory_bytes"] = memory_bytes("MemTotal");
  json["memory_available_bytes"] = memory_bytes("MemAvailable");
  json["openmp"] = at::hasOpenMP();
  json["mkl"] = at::hasMKL();
  json["onednn"] = at::hasMKLDNN();
  json["float_products"] = linear_uses_onednn() ? "oneDNN" : at::hasMKL() ? "MKL" : "torch's own";
  for (const auto& [name, dtype] :
       {std::pair("bf16", at::kBFloat16), std::pair("fp16", at::kHalf)}) {
    json["speed_of_fp32"][name] = precision_speedup(dtype);
  }
  json["cuda_devices"] = gpus;
  json["cuda"] = {
      {"torch", cuda.of_torch}, {"libhasten_nccl", cuda.of_hasten}, {"driver", cuda.driver}};
  json["collectives"] = gpus > 0 ? std::vector<std::string>{"nccl", "shm", "gloo"}
                                 : std::vector<std::string>{"shm", "gloo"};
  const World world = world_from_environment();
  json["world"] = {{"source", world.source},
                   {"passed_over", world.passed_over},
                   {"rank", world.rank},
                   {"world_size", world.world_size},
                   {"local_rank", world.local_rank},
                   {"local_world_size", world.local_world_size},
                   {"master_addr", world.master_addr},
                   {"master_port", world.master_port}};
  return json;
}

nlohmann::ordered_json cost_json(const CostModel& model) {
  nlohmann::ordered_json json{{"backend", model.backend},
                              {"world_size", model.world_size},
                              {"barrier_seconds", model.barrier_seconds}};
  for (const OperationCost& operation : model.operations) {
    auto& of = json["operations"][std::string(Collective{operation.kind}.kind_name())];
    of = {{"alpha_seconds", operation.alpha}, {"beta_seconds_per_byte", operation.beta}};
    for (const OperationCost::Point& point : operation.points) {
      of["points"].push_back({{"bytes", point.bytes}, {"seconds", point.seconds}});
    }
  }
  return json;
}

/// For the back end that a run would use, and for Gloo, which also works between hosts. Collective.
nlohmann::ordered_json communication_json(const World& world) {
  nlohmann::ordered_json models = nlohmann::ordered_json::array();
  for (const char* backend : {"auto", "gloo"}) {
    if (!models.empty() && models[0].at("backend") == backend) {
      break;
    }
    CommunicatorOptions options{.backend = backend};
    if (models.empty()) {
      options.device = choose_device("auto", world, false).device;
    }
    const auto group = Communicator::create(world, options);
    models.push_back(cost_json(measure_cost_model(*group)));
    group->close();
  }
  return models;
}

/// A line for each operation: its name, alpha, beta, and bandwidth 1 / beta.
std::string communication_text(const nlohmann::ordered_json& models) {
  std::ostringstream text;
  for (const auto& model : models) {
    const std::string backend = model.at("backend");
    text << "\n"
         << backend << " between " << model.at("world_size") << " processes: barrier "
         << format_fixed(1e6 * model.at("barrier_seconds").get<double>(), 1) << " us\n";
    for (const auto& [name, operation] : model.at("operations").items()) {
      const double beta = operation.at("beta_seconds_per_byte").get<double>();
      text << "  " << std::left << std::setw(16) << name << "alpha (latency) " << std::right
           << std::setw(7) << format_fixed(1e6 * operation.at("alpha_seconds").get<double>(), 1)
           << " us, beta " << std::setw(6) << format_fixed(1e9 * beta, 3) << " ns/byte"
           << (beta > 0 ? " (bandwidth " + format_fixed(1e-9 / beta, 1) + " GB/s)" : "") << "\n";
    }
  }
  return text.str();
}

std::string environment_text(const nlohmann::ordered_json& json) {
  const auto word = [&](const char* key) { return json.at(key).get<std::string>(); };
  const auto bytes = [&](const char* key) { return format_bytes(json.at(key).get<int64_t>()); };
  const auto yes = [&](const char* key) { return json.at(key).get<bool>() ? "yes" : "no"; };
  const auto with = [&](const char* part) {
    return json.at("cuda").at(part).get<bool>() ? "with CUDA" : "without";
  };
  const auto speed = [&](const char* name) {
    const double factor = json.at("speed_of_fp32").at(name).get<double>();
    return std::string(name) + " " + format_digits(factor, 2) + " times" +
           (factor >= kWorthwhileSpeedup ? ""
            : factor > 0.5               ? " (no gain)"
                                         : " (slower; only for experiments)");
  };
  const auto threads = mapped(json.at("threads_per_rank").items(), [](const auto& of) {
    return of.value().dump() + " with " + of.key() + (of.key() == "1" ? " rank" : " ranks");
  });
  const auto features = json.at("cpu_features").get<std::vector<std::string>>();
  const auto& omp = json.at("OMP_NUM_THREADS");
  const auto& world = json.at("world");
  const std::pair<const char*, std::string> lines[] = {
      {"hasten", word("hasten")},
      {"LibTorch", word("torch")},
      {"compiler", word("compiler")},
      {"CPU", word("cpu")},
      {"CPU features",
       word("cpu_capability") + ";" + (features.empty() ? "" : " ") + joined(features, " ")},
      {"cores", json.at("allowed_cores").dump() + " allowed of " + json.at("cores").dump()},
      {"threads per rank", joined(threads)},
      {"OMP_NUM_THREADS", omp.is_null() ? "not set" : omp.get<std::string>()},
      {"memory", bytes("memory_available_bytes") + " available of " + bytes("memory_bytes")},
      {"kernels", std::string("OpenMP ") + yes("openmp") + ", MKL " + yes("mkl") + ", oneDNN " +
                      yes("onednn") + "; float products by " + word("float_products")},
      {"speed vs. fp32", speed("bf16") + ", " + speed("fp16")},
      {"CUDA devices", json.at("cuda_devices").dump()},
      {"CUDA", std::string("LibTorch ") + with("torch") + ", hasten " + with("libhasten_nccl") +
                   (json.at("cuda").at("driver") ? "" : ", no NVIDIA driver")},
      {"collectives", joined(json.at("collectives").get<std::vector<std::string>>())},
      {"world", "rank " + world.at("rank").dump() + " of " + world.at("world_size").dump() + " (" +
                    world.at("source").get<std::string>() + ")"}};
  std::ostringstream text;
  for (const auto& [name, value] : lines) {
    text << std::left << std::setw(18) << name << value << "\n";
  }
  if (json.contains("communication")) {
    text << communication_text(json.at("communication"));
  }
  return text.str();
}

} // namespace detail

int run_command(const EnvCommand& command) {
  nlohmann::ordered_json measured;
  if (command.nproc > 1) {
    const World world = world_from_environment();
    measured = detail::communication_json(world); // before anything else uses the cores
    if (world.rank != 0) {
      return kExitOk;
    }
  }
  auto json = detail::environment_json();
  if (!measured.empty()) {
    json["communication"] = std::move(measured);
  }
  std::cout << (command.json ? json.dump() + "\n" : detail::environment_text(json)) << std::flush;
  return kExitOk;
}

} // namespace hasten
