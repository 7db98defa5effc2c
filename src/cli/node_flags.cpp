// Flags of hasten launch and hasten train for several hosts.
#include <nlohmann/json.hpp>
#include <set>
#include <string>

#include "checks.h"
#include "flags.h"
#include "hasten/base/json.h"
#include "hasten/base/store_channel.h"
#include "hasten/base/text.h"

namespace hasten::detail {

void declare_nodes(FlagTable& flags, ProcessFlags& processes) {
  NodeFlags& nodes = processes.nodes;
  RendezvousOptions& rendezvous = processes.rendezvous;
  flags.group("Several hosts");
  flags.value("--nnodes", nodes.nnodes, "N|MIN:MAX",
              "number of hosts, each with this command; with 1 the other flags have no effect");
  flags.value("--node-rank", nodes.node_rank, "N",
              "number of this host, with --master-addr; host 0 serves the store",
              NumberRange{0, kMaxWorldSize - 1});
  flags.value("--master-addr", nodes.master_addr, "HOST", "where all hosts reach host 0");
  flags.value("--master-port", nodes.master_port, "PORT", "its port", NumberRange{1, 65535});
  flags.value("--rdzv-endpoint", rendezvous.endpoint, "HOST:PORT",
              "instead of the three: the host with this address is host 0, the others are "
              "numbered by name");
  flags.value("--rdzv-id", rendezvous.rdzv_id, "NAME", "name of the run, the same on all hosts");
  flags.value(
      "--rdzv-conf", nodes.rdzv_conf, "KEY=VALUE,...",
      "join_timeout=600 (seconds to wait for all hosts), last_call_timeout=30 (after MIN of "
      "--nnodes MIN:MAX), is_host=1 (this host is host 0)");
  flags.value("--secret-file", processes.secret_file, "FILE",
              "secret with which processes on several hosts join this run; mode 0600");
}

/// "N" or "MIN:MAX".
static void read_nnodes(const FlagTable& flags, const std::string& text, RendezvousOptions& to) {
  const size_t colon = text.find(':');
  const auto least = parse_number<int>(text.substr(0, colon));
  const auto most = colon == std::string::npos ? least : parse_number<int>(text.substr(colon + 1));
  flags.require(least && most && *least >= 1 && *least <= *most && *most <= kMaxWorldSize,
                "--nnodes=" + text,
                "N or MIN:MAX, with 1 <= MIN <= MAX <= " + std::to_string(kMaxWorldSize));
  to.min_nodes = *least;
  to.max_nodes = *most;
}

static void read_rdzv_conf(const FlagTable& flags, const std::string& text, RendezvousOptions& to) {
  constexpr const char* kKeys = "join_timeout=SECONDS, last_call_timeout=SECONDS or is_host=0 or 1";
  for (const std::string& item : text.empty() ? std::vector<std::string>() : split(text)) {
    const size_t at = item.find('=');
    const std::string key = item.substr(0, at);
    const int64_t value =
        at == std::string::npos ? -1 : parse_number<int64_t>(item.substr(at + 1)).value_or(-1);
    const bool flag = key == "is_host";
    flags.require(value >= (key == "join_timeout" ? 1 : 0) && value <= (flag ? 1 : 10'000'000) &&
                      (flag || key == "join_timeout" || key == "last_call_timeout"),
                  "--rdzv-conf has " + item, kKeys);
    if (flag) {
      to.is_host = value == 1;
    } else {
      (key == "join_timeout" ? to.join_timeout : to.last_call_timeout) =
          std::chrono::seconds(value);
    }
  }
}

void settle_nodes(const FlagTable& flags, ProcessFlags& processes) {
  const NodeFlags& nodes = processes.nodes;
  RendezvousOptions& rendezvous = processes.rendezvous;
  read_nnodes(flags, nodes.nnodes, rendezvous);
  read_rdzv_conf(flags, nodes.rdzv_conf, rendezvous);
  if (!rendezvous.several()) {
    return;
  }
  const std::string said = "--nnodes=" + nodes.nnodes;
  if (!rendezvous.endpoint.empty()) {
    flags.require(!nodes.node_rank && nodes.master_addr.empty(),
                  "--rdzv-endpoint with --node-rank or --master-addr",
                  "either --rdzv-endpoint, or --node-rank and --master-addr");
    try {
      parse_endpoint(rendezvous.endpoint);
    } catch (const InputError&) {
      flags.require(false, "--rdzv-endpoint=" + rendezvous.endpoint,
                    "HOST:PORT, e.g. 10.0.0.1:29500 or [fd00::1]:29500");
    }
    return;
  }
  flags.require(nodes.node_rank && !nodes.master_addr.empty(), said,
                "--node-rank and --master-addr, or --rdzv-endpoint",
                "give host 0's address on every host, and each host its --node-rank");
  flags.require(rendezvous.min_nodes == rendezvous.max_nodes, said + " with --node-rank",
                "a fixed number of hosts", "use --rdzv-endpoint, which numbers those that come");
  flags.require(*nodes.node_rank < rendezvous.max_nodes,
                "--node-rank=" + std::to_string(*nodes.node_rank) + " with " + said,
                "0 to " + std::to_string(rendezvous.max_nodes - 1));
  rendezvous.node_rank = *nodes.node_rank;
  rendezvous.endpoint = StoreAddress{.host = nodes.master_addr, .port = nodes.master_port}.text();
}

} // namespace hasten::detail

namespace hasten {

std::map<std::string, std::string> facts_of_run(const TrainCommand& command) {
  // Ranks compare what files have, and how they communicate.
  static const std::set<std::string> of_host = {"nproc",
                                                "oversubscribe",
                                                "node_rank",
                                                "master_addr",
                                                "master_port",
                                                "rdzv_endpoint",
                                                "rdzv_conf",
                                                "secret_file",
                                                "output_dir",
                                                "logging_dir",
                                                "cache_dir",
                                                "log_dir",
                                                "redirects",
                                                "tee",
                                                "local_ranks_filter",
                                                "train_file",
                                                "eval_file",
                                                "model",
                                                "tokenizer",
                                                "config",
                                                "dataloader_num_workers",
                                                "dataloader_prefetch_factor",
                                                "disable_tqdm",
                                                "offline",
                                                "dry_run",
                                                "overwrite_output_dir",
                                                "resume_from_checkpoint",
                                                "memory_limit"};
  std::map<std::string, std::string> facts;
  const nlohmann::json all = parse_json("cli::train", "the flags", command.run_config);
  for (const auto& [name, value] : all.items()) {
    if (!of_host.contains(name)) {
      facts[name] = json_text(value);
    }
  }
  return facts;
}

} // namespace hasten
