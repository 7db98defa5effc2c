// A rank: runs cases together with the other ranks, sends reports, has a watchdog.
#include <ATen/Context.h>
#include <c10/util/Logging.h>
#include <cxxabi.h>
#include <execinfo.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <pthread.h>
#include <resolv.h>
#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>

#include "hasten/base/error.h"
#include "hasten/base/log.h"
#include "support/rank_process.h"
#include "support/run_device.h"
#include "support/world.h"
#include "support/world_run.h"

namespace hasten::testing_support {

using c10::intrusive_ptr;

// Frames of the main thread. A signal handler in that thread stores them.
static void* main_frames[64];
static std::atomic<int> main_frame_count{-1};

static void take_main_frames(int) { main_frame_count = ::backtrace(main_frames, 64); }

/// A line for each frame of the main thread, down to what gtest called.
static std::string main_backtrace() {
  std::string text;
  const int count = main_frame_count;
  char** symbols = count > 0 ? ::backtrace_symbols(main_frames, count) : nullptr;
  for (int i = 2; symbols != nullptr && i < count; ++i) { // 0, 1: the signal's
    const std::string symbol = symbols[i]; // "file(mangled+0x1) [0x2]"
    const size_t begin = symbol.find('(') + 1;
    const std::string mangled = symbol.substr(begin, symbol.find_first_of("+)", begin) - begin);
    const std::unique_ptr<char, void (*)(void*)> name(
        abi::__cxa_demangle(mangled.c_str(), nullptr, nullptr, nullptr), std::free);
    const std::string frame = name ? name.get() : symbol;
    if (frame.find("testing::internal::") != std::string::npos ||
        frame.find("testing::TestInfo::Run") != std::string::npos) {
      break;
    }
    text += "\n    " + frame;
  }
  return text;
}

static constexpr const char* kWaitingPhase = "waiting for the other ranks at its end";

/// Ends the process if a case does not end in time. Has its own thread.
class Watchdog {
 public:
  explicit Watchdog(ReportWriter& reports) : reports_(reports), main_(::pthread_self()) {
    void* warm[1];
    ::backtrace(warm, 1); // loads libraries now, because the handler must not
    std::signal(SIGUSR2, take_main_frames);
    std::thread([this] { watch(); }).detach();
  }

  void arm(double seconds) { deadline_ = machine_seconds() + seconds; }
  void disarm() { deadline_ = 0; }
  /// What the main thread is doing, for the report; a literal.
  void set_phase(const char* phase) { phase_ = phase; }

 private:
  void watch() {
    while (true) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      const double deadline = deadline_;
      if (deadline > 0 && machine_seconds() > deadline) {
        bark();
      }
    }
  }

  [[noreturn]] void bark() {
    const std::string phase = phase_.load();
    std::string message = "did not end in time, " + phase;
    if (phase != kWaitingPhase) {
      ::pthread_kill(main_, SIGUSR2);
      for (int i = 0; i < 50 && main_frame_count < 0; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
      }
      message += main_backtrace();
    }
    reports_.send({{"event", "failure"}, {"message", message}});
    ::_exit(kWatchdogExit);
  }

  ReportWriter& reports_;
  pthread_t main_;
  std::atomic<double> deadline_{0}; // machine_seconds(); 0: none
  std::atomic<const char*> phase_{"in the case"};
};

/// The state of a rank. run_as_rank() makes it once.
class Rank {
 public:
  Rank() : world_(world_from_environment()), watchdog_(reports_) {
    set_error_rank(world_.rank, world_.world_size);
    set_log_rank(world_.rank, world_.world_size);
    c10d::TCPStoreOptions options;
    options.port = static_cast<uint16_t>(std::atoi(std::getenv("HASTEN_TEST_STORE_PORT")));
    options.isServer = world_.is_main();
    options.waitWorkers = false;
    options.timeout = std::chrono::seconds(60);
    if (options.isServer) {
      options.masterListenFd = std::atoi(std::getenv("HASTEN_TEST_STORE_FD"));
    }
    // c10d looks up the name of each address to which it connects, and warns if there is none. The
    // ranks must not wait for a name server.
    res_init();
    const int name_servers = std::exchange(_res.nscount, 0);
    const int level = std::exchange(FLAGS_caffe2_log_level, c10::GLOG_ERROR);
    store_ = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
    FLAGS_caffe2_log_level = level;
    _res.nscount = name_servers;
    wait_until_all_are_up();
  }

  void start_case(const std::string& name) {
    case_name_ = name;
    ++case_index_;
    fresh_worlds_ = 0;
    skipped_ = false;
    watchdog_.set_phase("in the case");
    watchdog_.arm(case_seconds());
    reports_.send({{"event", "start"}, {"case", name}});
    at::manual_seed(static_cast<uint64_t>(world_.rank + 1));
  }

  void part(const testing::TestPartResult& result) {
    if (result.skipped()) {
      skipped_ = true;
      reports_.send({{"event", "skip"}, {"reason", result.message()}});
    } else if (result.failed() && !echo_) {
      const char* file = result.file_name() ? result.file_name() : "";
      const char* base = std::strrchr(file, '/');
      reports_.send(
          {{"event", "failure"},
           {"at", std::string(base ? base + 1 : file) + ":" + std::to_string(result.line_number())},
           {"message", result.message()}});
    }
  }

  /// Exchanges the results of the case with the other ranks.
  void end_case(bool failed) {
    watchdog_.set_phase(kWaitingPhase);
    const char* result = failed ? "fail" : skipped_ ? "skip" : "pass";
    const std::string mine = case_name_ + " " + result;
    std::string others;
    try {
      exchange(mine, others);
    } catch (const std::exception& error) {
      others = std::string("the harness's store is gone: ") + error.what();
      reports_.send({{"event", "failure"}, {"message", others}});
    }
    if (!failed && others.empty()) {
      watchdog_.set_phase("in what it left to its end");
      while (!at_end_.empty()) {
        auto function = std::move(at_end_.back());
        at_end_.pop_back();
        run_at_end(function);
      }
    }
    reports_.send({{"event", "end"}, {"case", case_name_}, {"result", result}});
    if (failed || !others.empty()) {
      say_goodbye();
      std::fflush(nullptr);
      ::_exit(kFailedCaseExit);
    }
    watchdog_.disarm();
  }

  /// Rank 0 serves the store, so it ends last, at most two seconds after the others.
  void say_goodbye() noexcept {
    try {
      if (!world_.is_main()) {
        store_->add("bye", 1);
        return;
      }
      const double limit = machine_seconds() + 2;
      while (store_->add("bye", 0) < world_.world_size - 1 && machine_seconds() < limit) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
      }
    } catch (const std::exception&) { // the parent reports the error
    }
  }

  /// After the last case. The watchdog continues during static destructors.
  void leave() {
    reports_.send({{"event", "done"}, {"cases", case_index_}});
    watchdog_.set_phase("at the program's end");
    watchdog_.arm(case_seconds());
    say_goodbye();
    store_.reset();
  }

  World fresh_world() {
    const std::string key =
        "fresh/" + std::to_string(case_index_) + "/" + std::to_string(fresh_worlds_++);
    if (world_.is_main()) {
      const auto [fd, port] = listen_on_loopback();
      at_end_.push_back([fd = fd] { ::close(fd); }); // keeps the port until then
      ::setenv("MASTER_PORT", std::to_string(port).c_str(), 1);
      store_->set(key, std::to_string(port));
    } else {
      ::setenv("MASTER_PORT", store_->get_to_str(key).c_str(), 1);
    }
    return world_from_environment();
  }

  intrusive_ptr<c10d::Store> case_store() const {
    return c10::make_intrusive<c10d::PrefixStore>("test/" + std::to_string(case_index_), store_);
  }

  const World& world() const { return world_; }
  const std::string& case_name() const { return case_name_; }
  ReportWriter& reports() { return reports_; }
  void at_end(std::function<void()> function) { at_end_.push_back(std::move(function)); }

 private:
  /// The first case's time does not include the start of the processes.
  void wait_until_all_are_up() {
    store_->set("up/" + std::to_string(world_.rank), "");
    for (int peer = 0; peer < world_.world_size; ++peer) {
      store_->get("up/" + std::to_string(peer));
    }
  }

  /// The other ranks have passed already, so only the parent gets a failure here.
  void run_at_end(const std::function<void()>& function) {
    try {
      function();
    } catch (const std::exception& error) {
      reports_.send(
          {{"event", "failure"}, {"message", std::string("after the case: ") + error.what()}});
    }
  }

  void exchange(const std::string& mine, std::string& others) {
    const std::string key = "end/" + std::to_string(case_index_) + "/";
    store_->set(key + std::to_string(world_.rank), mine);
    for (int peer = 0; peer < world_.world_size; ++peer) {
      const std::string theirs = store_->get_to_str(key + std::to_string(peer));
      if (theirs != mine || theirs.ends_with(" fail")) {
        others += "rank " + std::to_string(peer) + ": " + theirs + "; ";
      }
    }
    const bool here_only = mine.ends_with(" fail");
    if (!others.empty() && !here_only) {
      // A peer reports its own failure. A disagreement between ranks is reported here.
      if (others.find(" fail; ") == std::string::npos) {
        reports_.send(
            {{"event", "failure"}, {"message", "ranks disagree: here " + mine + "; " + others}});
      }
      echo_ = true;
      ADD_FAILURE() << others;
      echo_ = false;
    }
  }

  World world_;
  ReportWriter reports_;
  Watchdog watchdog_;
  intrusive_ptr<c10d::Store> store_;
  std::string case_name_;
  int case_index_ = 0;
  int fresh_worlds_ = 0; // in this case
  bool skipped_ = false;
  bool echo_ = false; // a failure that another rank has reported already
  std::vector<std::function<void()>> at_end_;
};

static Rank* this_rank = nullptr;

class RankListener : public testing::EmptyTestEventListener {
  void OnTestProgramStart(const testing::UnitTest& unit) override {
    this_rank->reports().send({{"event", "plan"}, {"cases", unit.test_to_run_count()}});
  }
  void OnTestStart(const testing::TestInfo& info) override {
    this_rank->start_case(std::string(info.test_suite_name()) + "." + info.name());
  }
  void OnTestPartResult(const testing::TestPartResult& result) override { this_rank->part(result); }
  void OnTestEnd(const testing::TestInfo& info) override {
    this_rank->end_case(info.result()->Failed());
  }
};

int run_as_rank() {
  // Never destroyed, because the watchdog's thread uses it until the process ends.
  this_rank = new Rank;
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new RankListener); // owned by gtest
  check_device_after_each_case(); // before RankListener's OnTestEnd
  const int code = RUN_ALL_TESTS();
  this_rank->leave();
  return code;
}

const World& test_world() { return this_rank->world(); }

World fresh_world() { return this_rank->fresh_world(); }

c10::intrusive_ptr<c10d::Store> test_store() { return this_rank->case_store(); }

std::string case_name() { return this_rank->case_name(); }

void at_case_end(std::function<void()> function) { this_rank->at_end(std::move(function)); }

double case_seconds() {
  const char* text = std::getenv("HASTEN_TEST_CASE_SECONDS");
  return text ? std::atof(text) : 300;
}

} // namespace hasten::testing_support
