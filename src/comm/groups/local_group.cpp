// The group of a world of one: no socket, no thread, but the same checks.
#include <ATen/ATen.h>

#include <nlohmann/json.hpp>
#include <utility>

#include "back_ends.h"
#include "group_core.h"
#include "hasten/base/error.h"
#include "tensor_checks.h"

namespace hasten::detail {

class LocalGroup final : public Communicator {
 public:
  explicit LocalGroup(CommunicatorOptions options) : options_(std::move(options)) {}

  int rank() const override { return 0; }
  int world_size() const override { return 1; }
  const CommunicatorOptions& options() const override { return options_; }

  Work start(const Collective& what) override {
    check_collective(what, 0, 1);
    check(what.kind_name(), what.name);
    if (what.kind == Collective::Kind::reduce_scatter) { // in the output's dtype
      what.output.detach().view({what.output.numel()}).copy_(what.input.detach().view({-1}));
    } else if (what.input.defined()) { // everything is this rank's row
      what.output.detach().view_as(what.input).copy_(what.input.detach());
    }
    return joined_work({});
  }
  at::Tensor all_gather_rows(const at::Tensor& rows, std::string_view name) override {
    check_rows(rows);
    check("all_gather_rows", name);
    return rows.detach().clone();
  }
  std::vector<nlohmann::json> exchange(std::string_view operation, std::string_view name,
                                       const nlohmann::json& value) override {
    check(operation, name);
    return std::vector<nlohmann::json>(1, value);
  }
  void barrier(std::string_view name) override { check("barrier", name); }
  void check(std::string_view name) override { check("check", name); }

  void abort(std::string_view reason, ErrorKind kind) noexcept override {
    if (error_.empty()) {
      try {
        kind_ = kind;
        error_ = "rank 0 failed: " + std::string(reason);
      } catch (...) { // out of memory, at the end of the run
      }
    }
  }
  void close() noexcept override { closed_ = true; }

  std::shared_ptr<Communicator> duplicate(const CommunicatorOptions& options) override {
    check("duplicate", options.name);
    return std::make_shared<LocalGroup>(options);
  }
  std::shared_ptr<Communicator> new_group(const std::vector<int>& ranks,
                                          const CommunicatorOptions& options) override {
    check_members(ranks, 0, 1);
    return duplicate(options);
  }

 private:
  void check(std::string_view operation, std::string_view name) {
    if (!error_.empty() || closed_) {
      const std::string& why =
          error_.empty() ? "the group is closed: name=" + options_.name : error_;
      throw CommunicationError("comm::" + std::string(operation),
                               operation_label(operation, name) + ": " + why, {}, {}, kind_);
    }
  }

  const CommunicatorOptions options_;
  std::string error_;
  ErrorKind kind_ = ErrorKind::other; // of error_
  bool closed_ = false;
};

std::shared_ptr<Communicator> make_local_group(const CommunicatorOptions& options) {
  return std::make_shared<LocalGroup>(options);
}

} // namespace hasten::detail
