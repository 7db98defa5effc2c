#include "support/spawn.h"

#include <cxxabi.h>
#include <gtest/gtest.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <stdexcept>
#include <thread>
#include <typeinfo>

#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "support/rank_process.h"

namespace hasten::testing_support {

static std::map<std::string, RankFunction>& rank_functions() {
  static std::map<std::string, RankFunction> functions;
  return functions;
}

bool register_rank_function(const char* name, RankFunction function) {
  return rank_functions().emplace(name, function).second;
}

static std::string type_name(const std::exception& error) {
  const std::unique_ptr<char, void (*)(void*)> name(
      abi::__cxa_demangle(typeid(error).name(), nullptr, nullptr, nullptr), std::free);
  return name ? name.get() : typeid(error).name();
}

/// The part that runs in a rank.
class SpawnedRank : public FaultRank {
 public:
  SpawnedRank()
      : world_(world_from_environment()),
        fault_(nlohmann::json::parse(std::getenv("HASTEN_TEST_FAULT"))) {
    set_error_rank(world_.rank, world_.world_size);
    set_log_rank(world_.rank, world_.world_size);
  }

  const World& world() const override { return world_; }

  bool is_faulty() const override {
    return fault_.at("rank") == world_.rank && fault_.at("kind") != FaultKind::none;
  }

  void fault_here() override {
    if (!is_faulty()) {
      return;
    }
    reports_.send({{"event", "fault"}, {"at", machine_seconds()}});
    switch (fault_.at("kind").get<FaultKind>()) {
      case FaultKind::none:
        break;
      case FaultKind::kill:
        std::raise(SIGKILL);
        break;
      case FaultKind::freeze:
        std::raise(SIGSTOP);
        break;
      case FaultKind::late:
        std::this_thread::sleep_for(
            std::chrono::milliseconds(fault_.at("delay_ms").get<int64_t>()));
        break;
      case FaultKind::fail:
        throw std::runtime_error("planted failure");
    }
  }

  void report(const std::string& key, nlohmann::json value) override {
    reports_.send({{"event", "value"}, {"key", key}, {"value", std::move(value)}});
  }

  ReportWriter& reports() { return reports_; }

 private:
  World world_;
  nlohmann::json fault_;
  ReportWriter reports_;
};

/// Sends failed EXPECTs of a rank to the test that spawned it.
class SpawnedRankListener : public testing::EmptyTestEventListener {
 public:
  explicit SpawnedRankListener(ReportWriter& reports) : reports_(reports) {}
  bool failed() const { return failed_; }

 private:
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (result.failed()) {
      failed_ = true;
      reports_.send({{"event", "failure"},
                     {"file", result.file_name() ? result.file_name() : ""},
                     {"line", result.line_number()},
                     {"message", result.message()}});
    }
  }

  ReportWriter& reports_;
  bool failed_ = false;
};

int run_rank_function() {
  SpawnedRank rank;
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  delete listeners.Release(listeners.default_result_printer());
  auto* listener = new SpawnedRankListener(rank.reports());
  listeners.Append(listener);
  bool threw = false;
  try {
    rank_functions().at(std::getenv("HASTEN_TEST_FUNCTION"))(rank);
  } catch (const std::exception& error) {
    threw = true;
    rank.reports().send({{"event", "error"}, {"what", error.what()}, {"type", type_name(error)}});
  }
  rank.reports().send({{"event", "end"}, {"at", machine_seconds()}});
  const bool failed = listener->failed();
  delete listeners.Release(listener); // it refers to `rank`
  return threw || failed ? 1 : 0;
}

/// The part that runs in the test: the reports so far.
class SpawnedWorld {
 public:
  SpawnedWorld(int world_size, const std::string& function, const EnvironmentList& extra)
      : ranks_(start_ranks(world_size, {"/proc/self/exe"}, environment(function, extra))),
        reports_(ranks_.size()),
        ends_(ranks_.size(), -1) {}

  ~SpawnedWorld() {
    for (RankProcess& rank : ranks_) {
      kill_rank(rank);
    }
  }
  SpawnedWorld(const SpawnedWorld&) = delete;
  SpawnedWorld& operator=(const SpawnedWorld&) = delete;

  void run(const Fault& fault, double deadline) {
    const double limit = machine_seconds() + deadline;
    while (!all_ended(ranks_)) {
      wait_for_reports(ranks_, 50);
      size_t living = 0;
      for (size_t rank = 0; rank < ranks_.size(); ++rank) {
        if (!ranks_[rank].ended) {
          for (const auto& report : read_reports(ranks_[rank])) {
            handle(rank, report);
          }
        }
        living += !ranks_[rank].ended;
      }
      const auto faulty = static_cast<size_t>(fault.rank);
      if (living == 1 && fault.kind == FaultKind::freeze && is_stopped(ranks_.at(faulty))) {
        kill_rank(ranks_[faulty]);
      }
      if (machine_seconds() > limit) {
        for (size_t rank = 0; rank < ranks_.size(); ++rank) {
          reports_[rank].timed_out = !ranks_[rank].ended;
          kill_rank(ranks_[rank]);
        }
      }
    }
  }

  std::vector<RankReport> take() {
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      reports_[rank].end = ranks_[rank].end;
      if (ends_[rank] < 0 && !reports_[rank].timed_out) {
        // Also for ranks without the planted fault, so that the log shows all deaths.
        std::fprintf(stderr, "rank %zu %s\n", rank, describe(reports_[rank].end).c_str());
      }
      if (fault_at_ > 0 && ends_[rank] > 0) {
        reports_[rank].seconds_after_fault = ends_[rank] - fault_at_;
      }
    }
    return std::move(reports_);
  }

 private:
  static EnvironmentList environment(const std::string& function, EnvironmentList extra) {
    extra.emplace_back("HASTEN_TEST_FUNCTION", function);
    return extra;
  }

  void handle(size_t rank, const nlohmann::json& report) {
    const std::string event = report.at("event");
    if (event == "fault") {
      fault_at_ = report.at("at");
    } else if (event == "end") {
      ends_[rank] = report.at("at");
    } else if (event == "value") {
      reports_[rank].values[std::string(report.at("key"))] = report.at("value");
    } else if (event == "error") {
      reports_[rank].error = report.at("what");
      reports_[rank].error_type = report.at("type");
    } else if (event == "failure") {
      ADD_FAILURE_AT(std::string(report.at("file")).c_str(), report.at("line").get<int>())
          << "[rank " << rank << "/" << ranks_.size() << "] " << std::string(report.at("message"));
    }
  }

  std::vector<RankProcess> ranks_;
  std::vector<RankReport> reports_; // [rank]
  std::vector<double> ends_; // [rank] machine_seconds()
  double fault_at_ = -1; // machine_seconds()
};

std::vector<RankReport> spawn(int world_size, const std::string& function, const Fault& fault,
                              const SpawnWorldOptions& options) {
  if (rank_functions().count(function) == 0) {
    throw InputError("spawn", "no rank function is named " + function);
  }
  if (fault.rank < 0 || fault.rank >= world_size) {
    throw InputError("spawn", "fault.rank=" + std::to_string(fault.rank),
                     "0.." + std::to_string(world_size - 1));
  }
  EnvironmentList environment = options.environment;
  environment.emplace_back(
      "HASTEN_TEST_FAULT",
      nlohmann::json{{"kind", fault.kind}, {"rank", fault.rank}, {"delay_ms", fault.delay.count()}}
          .dump());
  SpawnedWorld world(world_size, function, environment);
  world.run(fault, static_cast<double>(options.deadline.count()));
  return world.take();
}

} // namespace hasten::testing_support
