#include "hellos.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <thread>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/json.h"
#include "liveness.h"

namespace hasten::detail {

using std::chrono::milliseconds;

constexpr const char* kHellosWhere = "comm::create";
constexpr const char* kAnswer = "hellos";

static std::string list_key(int64_t index) { return "hello/" + std::to_string(index); }

void say_hello(c10d::Store& store, const Hello& own) {
  if (store.add("taken/" + std::to_string(own.rank), 1) > 1) {
    throw InputError(kHellosWhere, "two processes have RANK=" + std::to_string(own.rank),
                     "a different RANK for each process",
                     "give every process its own RANK, or start with hasten launch");
  }
  if (own.rank == 0) {
    store.set(Liveness::kFailureKey, std::string(Liveness::kNoFailure));
  }
  store.set(Liveness::beat_key(own.rank), std::string(Liveness::kFirstBeat));
  store.set(list_key(store.add("arrived", 1)), nlohmann::json(own).dump());
}

void read_arrived(c10d::Store& store, ArrivedHellos& arrived) {
  for (std::string key = list_key(arrived.count + 1); store.check({key});
       key = list_key(arrived.count + 1)) {
    const auto hello = parse_json(kHellosWhere, key, store.get_to_str(key)).get<Hello>();
    const std::lock_guard<std::mutex> lock(arrived.mutex);
    ++arrived.count;
    if (const auto rank = static_cast<size_t>(hello.rank); rank < arrived.hellos.size()) {
      arrived.hellos[rank] = hello; // another finds out that worlds differ
    }
  }
}

void answer_hellos(c10d::Store& store, ArrivedHellos& arrived) {
  const int64_t before = arrived.count;
  read_arrived(store, arrived);
  if (arrived.count == before) {
    return;
  }
  const std::string difference = first_difference(arrived.hellos);
  const bool all =
      std::ranges::all_of(arrived.hellos, [](const auto& hello) { return hello.has_value(); });
  if (all || !difference.empty()) {
    nlohmann::json answer = {{"difference", difference}};
    nlohmann::json last;
    for (const auto& hello : arrived.hellos) { // ranks of a host have much in common
      nlohmann::json next = hello.value_or(Hello{});
      answer["changes"].push_back(nlohmann::json::diff(last, next));
      last = std::move(next);
    }
    store.set(kAnswer, answer.dump());
  }
}

std::optional<std::vector<Hello>> read_answer(c10d::Store& store,
                                              const std::atomic<bool>& cancelled, const Hello& own,
                                              const World& world) {
  if (!store.check({kAnswer})) {
    return std::nullopt;
  }
  const nlohmann::json answer = parse_json(kHellosWhere, kAnswer, store.get_to_str(kAnswer));
  std::vector<Hello> hellos;
  nlohmann::json next;
  for (const nlohmann::json& changes : answer.at("changes")) {
    next.patch_inplace(changes);
    hellos.push_back(next.get<Hello>());
  }
  auto difference = answer.at("difference").get<std::string>();
  if (difference.empty()) { // rank 0 may not have counted on this rank
    difference = first_difference({hellos[0], own});
  }
  store.add("greeted", 1);
  if (difference.empty()) {
    return hellos;
  }
  // The store must last until all ranks have seen the difference, including those that start a
  // little later.
  const CommClock::time_point until = CommClock::now() + milliseconds(5000);
  while (serves_store(world) && !cancelled && CommClock::now() < until &&
         store.add("greeted", 0) < own.world_size) {
    std::this_thread::sleep_for(milliseconds(10));
  }
  throw InputError(kHellosWhere, difference, "the same on all ranks",
                   "start every rank with the same build and the same command line");
}

std::vector<Hello> exchange_hellos(c10d::Store& store, const std::atomic<bool>& cancelled,
                                   Hello own, const World& world, ArrivedHellos& arrived,
                                   CommClock::time_point deadline) {
  if (!world_on_one_host(world)) {
    const StoreAddress address{.host = world.master_addr, .port = world.master_port};
    own.store_address = peer_address(try_connect(launcher_store(world).value_or(address)));
  }
  say_hello(store, own);
  for (StorePause pause; !cancelled; pause()) {
    if (own.rank == 0) {
      answer_hellos(store, arrived);
    } else if (CommClock::now() > deadline) {
      read_arrived(store, arrived);
    }
    if (auto hellos = read_answer(store, cancelled, own, world)) {
      return *std::move(hellos);
    }
  }
  return {};
}

} // namespace hasten::detail
