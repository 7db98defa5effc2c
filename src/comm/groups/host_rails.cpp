#include "host_rails.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <utility>

#include "backend_call.h"
#include "hasten/base/text.h"
#include "shm/reduce_rows.h"
#include "tensor_checks.h"

namespace hasten::detail {

using std::chrono::milliseconds;
using Kind = Collective::Kind;

// Less is not sliced: each rail moves all of it, without a third part.
constexpr int64_t kLeastSliced = 16 << 10; // bytes
// A rank's slice in a step. Smaller ones cost more of Gloo's threads, larger ones wait longer for each
// other.
constexpr int64_t kSlice = 1 << 20; // bytes

std::pair<int, int> place_in(const Hosts& hosts, int rank) {
  for (size_t host = 0;; ++host) {
    const auto at = std::ranges::find(hosts[host], rank);
    if (at != hosts[host].end()) {
      return {static_cast<int>(host), static_cast<int>(at - hosts[host].begin())};
    }
  }
}

struct HostRails::Step {
  std::vector<TransferArguments> down{}; // none: begins with the step before
  std::function<c10::intrusive_ptr<c10d::Work>(c10d::Backend&)> rail{}; // may be empty
  std::function<void()> between{}; // after it, in the order of the steps; may be empty
  std::vector<TransferArguments> up{};

  std::shared_ptr<Operation> operation{};
  bool has_crossed = false;
  std::exception_ptr error{};
};

/// A collective, until all its steps have ended or one has failed.
struct HostRails::Operation {
  std::string text;
  std::shared_ptr<GroupCore::Started> state; // null at the end, because it keeps this object
  std::shared_ptr<TransferQueue> down, up;
  std::shared_ptr<TransferQueue::Item> last_down{};
  std::atomic<size_t> steps_left{0};

  std::mutex mutex{}; // guards the members below
  std::condition_variable changed{};
  std::shared_ptr<TransferQueue::Item> last_up{};
  bool ended = false;

  void end(const std::exception_ptr& error) {
    std::shared_ptr<GroupCore::Started> started;
    {
      const std::lock_guard<std::mutex> lock(mutex);
      ended = true;
      started = std::exchange(state, nullptr);
      changed.notify_all();
    }
    if (started) {
      complete(*started, error);
    }
  }

  void end_step(const std::exception_ptr& error) {
    if (error || --steps_left == 0) {
      end(error);
    }
  }

  void goes_up(std::shared_ptr<TransferQueue::Item> item) {
    const std::lock_guard<std::mutex> lock(mutex);
    last_up = std::move(item);
    changed.notify_all();
  }

  /// Moves it on in the thread that calls it. Between its transfers there is only Gloo to wait for.
  void drive(milliseconds limit) {
    if (!last_down->has_ended()) {
      down->drive(*last_down, limit);
      return;
    }
    std::unique_lock<std::mutex> lock(mutex);
    changed.wait_for(lock, limit, [&] { return ended || (last_up && !last_up->has_ended()); });
    const auto item = last_up;
    lock.unlock();
    if (item != nullptr) {
      up->drive(*item, limit);
    }
  }
};

HostRails::HostRails(Hosts hosts, int rank, std::shared_ptr<TransferQueue> down,
                     std::shared_ptr<TransferQueue> up, Rail rail)
    : hosts_(std::move(hosts)),
      world_size_(static_cast<int>(hosts_.size() * hosts_[0].size())),
      down_(std::move(down)),
      up_(std::move(up)),
      rail_(std::move(rail)) {
  const auto [host, index] = place_in(hosts_, rank);
  host_ = static_cast<size_t>(host);
  index_ = static_cast<size_t>(index);
}

void HostRails::start(const Collective& what, const std::string& text,
                      const std::shared_ptr<GroupCore::Started>& state) {
  const auto operation = std::make_shared<Operation>(text, state, down_, up_);
  try {
    Steps steps = steps_of(what);
    operation->steps_left = steps.size();
    if (steps[0].down.empty()) { // so that the ranks compare it
      const auto nothing = std::make_shared<std::vector<std::string>>(hosts_[0].size());
      steps[0].down.push_back({.values = nothing});
    }
    state->drive = [operation](milliseconds limit) { operation->drive(limit); };
    for (size_t i = 0; i < steps.size();) {
      std::vector<TransferArguments> down = std::exchange(steps[i].down, {});
      for (TransferArguments& arguments : down) {
        arguments.text = text;
        operation->last_down = down_->start(std::move(arguments));
      }
      // All that begin with one transfer do so in one call, in their order.
      std::vector<std::shared_ptr<Step>> together;
      for (; i < steps.size() && steps[i].down.empty(); ++i) {
        steps[i].operation = operation;
        together.push_back(std::make_shared<Step>(std::move(steps[i])));
      }
      operation->last_down->on_end([self = shared_from_this(), together](const auto& error) {
        for (const auto& step : together) {
          self->cross(step, error);
        }
      });
    }
    down_->progress_in_thread(); // other hosts wait for its end
  } catch (...) {
    operation->end(std::current_exception());
  }
}

void HostRails::cross(const std::shared_ptr<Step>& step, const std::exception_ptr& error) {
  std::exception_ptr why = error;
  Rail rail;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    crossing_.push_back(step);
    why = error_ ? error_ : why;
    rail = rail_;
  }
  try {
    if (why == nullptr && step->rail) {
      if (!rail) {
        throw std::runtime_error("the group is closed");
      }
      // c10d's own timed wait throws whenever its time ends.
      step->rail(*rail)->getFuture()->addCallback(
          [self = shared_from_this(), step](c10::ivalue::Future& future) {
            self->crossed(step, future.hasError() ? future.exception_ptr() : nullptr);
          });
      return;
    }
  } catch (...) {
    why = std::current_exception();
  }
  crossed(step, why);
}

void HostRails::crossed(const std::shared_ptr<Step>& step, const std::exception_ptr& error) {
  std::unique_lock<std::mutex> lock(mutex_);
  step->has_crossed = true;
  step->error = error;
  if (std::exchange(going_up_, true)) {
    return; // the thread that moves steps up finds it
  }
  while (!crossing_.empty() && crossing_.front()->has_crossed) {
    const std::shared_ptr<Step> next = std::move(crossing_.front());
    crossing_.pop_front();
    error_ = error_ ? error_ : next->error;
    next->error = error_;
    lock.unlock();
    go_up(*next);
    lock.lock();
    error_ = error_ ? error_ : next->error;
  }
  going_up_ = false;
}

/// In case of an error it leaves it in the step: none after it goes up, where the peers of the host may
/// be in another step than this rank.
void HostRails::go_up(Step& step) {
  const auto operation = step.operation;
  std::shared_ptr<TransferQueue::Item> item;
  try {
    if (step.error) {
      std::rethrow_exception(step.error);
    }
    if (step.between) {
      step.between();
    }
    step.rail = nullptr; // and the tensors that it keeps
    step.between = nullptr;
    for (TransferArguments& arguments : std::exchange(step.up, {})) {
      arguments.text = operation->text;
      item = up_->start(std::move(arguments));
    }
  } catch (...) {
    step.error = std::current_exception();
    operation->end(step.error);
    return;
  }
  if (item == nullptr) {
    operation->end_step(nullptr);
    return;
  }
  item->on_end([operation](const std::exception_ptr& error) { operation->end_step(error); });
  operation->goes_up(item);
  up_->progress_in_thread(); // nobody may wait for it
}

/// The elements of a contiguous tensor.
static at::Tensor flat(const at::Tensor& tensor) {
  // A dimension of size 1 may have any stride; view() would keep it.
  return tensor.detach().as_strided({tensor.numel()}, {1});
}

static std::vector<at::Tensor> rows(const at::Tensor& flat, int64_t count) {
  return flat.view({count, flat.numel() / count}).unbind();
}

static void copy_bytes(const at::Tensor& to, const at::Tensor& from) {
  if (to.numel() > 0 && to.data_ptr() != from.data_ptr()) { // an empty tensor has no address
    std::memcpy(to.data_ptr(), from.data_ptr(), from.nbytes());
  }
}

/// Parts of a flat tensor, one for each step: [first element, count]. The first may be small: what is
/// left over if the others are divided by `ranks`.
static std::vector<std::pair<int64_t, int64_t>> parts_of(const at::Tensor& flat, int64_t ranks) {
  const int64_t count = flat.numel();
  const int64_t size = flat.element_size();
  if (count * size <= kLeastSliced) {
    return {{0, count}};
  }
  std::vector<std::pair<int64_t, int64_t>> parts;
  int64_t first = count % ranks;
  if (first > 0) {
    parts.emplace_back(0, first);
  }
  for (const int64_t most = kSlice / size * ranks; first < count;) {
    parts.emplace_back(first, std::min(most, count - first));
    first += parts.back().second;
  }
  return parts;
}

HostRails::Tensors HostRails::rows_of_host(const at::Tensor& all, size_t host) const {
  const Tensors by_rank = rows(flat(all), world_size_);
  return mapped(hosts_[host], [&](int rank) { return by_rank[static_cast<size_t>(rank)]; });
}

HostRails::Steps HostRails::steps_of(const Collective& what) const {
  switch (what.kind) {
    case Kind::all_reduce:
    case Kind::reduce:
      return reduction(what);
    case Kind::broadcast:
      return broadcast(what);
    case Kind::all_gather:
      return all_gather(what);
    case Kind::reduce_scatter:
      return reduce_scatter(what);
    case Kind::gather:
      return {gather(what)};
    case Kind::scatter:
      return {scatter(what)};
    case Kind::all_to_all:
      break;
  }
  return {all_to_all(what)};
}

// Each rank sums its slice in place, in its own tensor. 16-bit slices are summed in an fp32 copy.
HostRails::Steps HostRails::reduction(const Collective& what) const {
  const at::Tensor all = flat(what.output);
  const auto [root_host, root_index] = place_in(hosts_, what.root);
  const bool to_all = what.kind == Kind::all_reduce;
  const bool adds = what.op != ReduceOp::MAX && what.op != ReduceOp::MIN;
  const bool wide = adds && all.element_size() == 2;
  const int divisor = what.op == ReduceOp::AVG ? world_size_ : 1;
  const ReduceOp op = what.op == ReduceOp::AVG ? ReduceOp::SUM : what.op;
  const auto ranks = static_cast<int64_t>(hosts_[0].size());
  Steps steps;
  for (const auto& [first, count] : parts_of(all, ranks)) {
    const at::Tensor part = all.narrow(0, first, count);
    const bool sliced = count % ranks == 0 && count * all.element_size() > kLeastSliced;
    const Tensors slices = sliced ? rows(part, ranks) : Tensors{part};
    const at::Tensor& own = slices[sliced ? index_ : 0];
    const at::Tensor sum = wide ? at::empty(own.sizes(), at::kFloat) : own;
    Step& step = steps.emplace_back();
    step.down.push_back(
        {.what = {.kind = sliced ? Kind::reduce_scatter : Kind::all_reduce, .op = op},
         .inputs = slices,
         .outputs = {sum}});
    if (count > 0) {
      step.rail = [sum, op = c10d_op(op), to_all, root = root_host](c10d::Backend& rail) {
        Tensors tensors{sum};
        return to_all ? rail.allreduce(tensors, {.reduceOp = op})
                      : rail.reduce(tensors, {.reduceOp = op, .rootRank = root});
      };
    }
    const bool has_sum = to_all || root_host == static_cast<int>(host_);
    if (has_sum && (wide || divisor > 1)) {
      step.between = [sum, own, divisor] {
        divide_row(static_cast<const char*>(sum.data_ptr()), divisor, own.scalar_type(),
                   static_cast<char*>(own.data_ptr()), static_cast<size_t>(own.numel()));
      };
    }
    if (has_sum && sliced) {
      const bool gets = to_all || root_index == static_cast<int>(index_);
      step.up.push_back(
          {.what = {.kind = to_all ? Kind::all_gather : Kind::gather, .root = root_index},
           .inputs = {own},
           .outputs = gets ? slices : Tensors()});
    }
  }
  return steps;
}

HostRails::Steps HostRails::broadcast(const Collective& what) const {
  const at::Tensor all = bytes_of(what.output);
  const auto [root_host, root_index] = place_in(hosts_, what.root);
  const bool here = root_host == static_cast<int>(host_);
  const bool gives = here && root_index == static_cast<int>(index_);
  const auto ranks = static_cast<int64_t>(hosts_[0].size());
  Steps steps;
  for (const auto& [first, count] : parts_of(all, ranks)) {
    const at::Tensor part = all.narrow(0, first, count);
    const bool sliced = count % ranks == 0 && count > kLeastSliced;
    const Tensors slices = sliced ? rows(part, ranks) : Tensors{part};
    const at::Tensor& own = slices[sliced ? index_ : 0];
    Step& step = steps.emplace_back();
    if (here) {
      step.down.push_back(
          {.what = {.kind = sliced ? Kind::scatter : Kind::broadcast, .root = root_index},
           .inputs = gives ? slices : Tensors(),
           .outputs = gives && !sliced ? Tensors() : Tensors{own}});
    }
    if (count > 0) {
      step.rail = [own, root = root_host](c10d::Backend& rail) {
        Tensors tensors{own};
        return rail.broadcast(tensors, {.rootRank = root});
      };
    }
    if (sliced) {
      step.up.push_back({.what = {.kind = Kind::all_gather}, .inputs = {own}, .outputs = slices});
    }
  }
  return steps;
}

// Here the rail comes first. What it brings lies in this rank's rows of the output, where the host's
// ranks read it.
HostRails::Steps HostRails::all_gather(const Collective& what) const {
  const at::Tensor input = bytes_of(what.input);
  std::vector<Tensors> outputs; // [host][index]
  for (size_t host = 0; host < hosts_.size(); ++host) {
    outputs.push_back(rows_of_host(bytes_of(what.output), host));
  }
  Steps steps;
  for (const auto& [from, count] : parts_of(input, 1)) {
    const auto part = [first = from, size = count](const at::Tensor& row) {
      return row.narrow(0, first, size);
    };
    const at::Tensor own = part(input);
    const at::Tensor brought = at::empty({std::ssize(hosts_), count}, at::kByte);
    Step& step = steps.emplace_back();
    if (count > 0) {
      step.rail = [own, brought](c10d::Backend& rail) {
        at::Tensor from_here = own, to = brought.view(-1);
        return rail._allgather_base(to, from_here, {});
      };
    }
    Tensors places;
    for (const Tensors& of_host : outputs) {
      const Tensors parts = mapped(of_host, part);
      places.push_back(parts[index_]);
      step.up.push_back(
          {.what = {.kind = Kind::all_gather}, .inputs = {places.back()}, .outputs = parts});
    }
    step.between = [places, brought] {
      for (size_t host = 0; host < places.size(); ++host) {
        copy_bytes(places[host], brought[static_cast<int64_t>(host)]);
      }
    };
  }
  return steps;
}

HostRails::Step HostRails::gather(const Collective& what) const {
  const at::Tensor own = bytes_of(what.input);
  const auto [root_host, root_index] = place_in(hosts_, what.root);
  const bool here = root_host == static_cast<int>(host_);
  const bool gets = here && root_index == static_cast<int>(index_);
  const Tensors brought =
      here ? at::empty({std::ssize(hosts_), own.numel()}, at::kByte).unbind() : Tensors();
  Step step;
  step.rail = [own, brought, root = root_host](c10d::Backend& rail) {
    Tensors from{own};
    std::vector<Tensors> to(brought.empty() ? 0 : 1, brought);
    return rail.gather(to, from, {.rootRank = root});
  };
  for (size_t host = 0; host < brought.size(); ++host) {
    step.up.push_back({.what = {.kind = Kind::gather, .root = root_index},
                       .inputs = {brought[host]},
                       .outputs = gets ? rows_of_host(bytes_of(what.output), host) : Tensors()});
  }
  return step;
}

HostRails::Step HostRails::scatter(const Collective& what) const {
  const at::Tensor own = bytes_of(what.output);
  const auto [root_host, root_index] = place_in(hosts_, what.root);
  const bool here = root_host == static_cast<int>(host_);
  const bool gives = here && root_index == static_cast<int>(index_);
  const Tensors slices =
      here ? at::empty({std::ssize(hosts_), own.numel()}, at::kByte).unbind() : Tensors();
  Step step;
  for (size_t host = 0; host < slices.size(); ++host) {
    step.down.push_back({.what = {.kind = Kind::scatter, .root = root_index},
                         .inputs = gives ? rows_of_host(bytes_of(what.input), host) : Tensors(),
                         .outputs = {slices[host]}});
  }
  step.rail = [own, slices, root = root_host](c10d::Backend& rail) {
    Tensors to{own};
    std::vector<Tensors> from(slices.empty() ? 0 : 1, slices);
    return rail.scatter(to, from, {.rootRank = root});
  };
  return step;
}

// A rank collects what the ranks of its host have for its rail, and sends it there.
HostRails::Step HostRails::all_to_all(const Collective& what) const {
  const at::Tensor input = bytes_of(what.input);
  const at::Tensor own =
      at::empty({std::ssize(hosts_), input.numel() / std::ssize(hosts_)}, at::kByte);
  const at::Tensor brought = at::empty_like(own);
  Step step;
  Tensors places, from;
  for (size_t host = 0; host < hosts_.size(); ++host) {
    const auto count = std::ssize(hosts_[host]);
    step.down.push_back({.what = {.kind = Kind::all_to_all},
                         .inputs = rows_of_host(input, host),
                         .outputs = rows(own[static_cast<int64_t>(host)], count)});
    std::ranges::copy(rows_of_host(bytes_of(what.output), host), std::back_inserter(places));
    std::ranges::copy(rows(brought[static_cast<int64_t>(host)], count), std::back_inserter(from));
  }
  step.rail = [own, brought](c10d::Backend& rail) {
    at::Tensor to = brought.view(-1), given = own.view(-1);
    std::vector<int64_t> even;
    return rail.alltoall_base(to, given, even, even, {});
  };
  step.between = [places, from] {
    for (size_t i = 0; i < places.size(); ++i) {
      copy_bytes(places[i], from[i]);
    }
  };
  return step;
}

// The sums of this host for another one go there while the host makes the next ones. Those for this
// host come last, and with them the sum over the hosts, in their order.
HostRails::Steps HostRails::reduce_scatter(const Collective& what) const {
  const auto hosts = hosts_.size();
  const auto type =
      what.input.scalar_type() == at::kDouble || what.output.scalar_type() == at::kDouble
          ? at::kDouble
          : at::kFloat;
  const int64_t count = what.output.numel();
  const at::Tensor sums = at::empty({std::ssize(hosts_), count}, type);
  const at::Tensor brought = at::empty_like(sums);
  Steps steps;
  for (size_t distance = 1; distance <= hosts; ++distance) {
    const size_t to = (host_ + distance) % hosts, from = (host_ + hosts - distance) % hosts;
    const at::Tensor sum = sums[static_cast<int64_t>(to)];
    Step& step = steps.emplace_back();
    step.down.push_back({.what = {.kind = Kind::reduce_scatter},
                         .inputs = rows_of_host(what.input, to),
                         .outputs = {sum}});
    if (distance < hosts && count > 0) {
      step.rail = [sum, to, from, got = brought[static_cast<int64_t>(from)],
                   hosts](c10d::Backend& rail) {
        std::vector<int64_t> gives(hosts), gets(hosts);
        gives[to] = sum.numel();
        gets[from] = got.numel();
        at::Tensor output = got, input = sum;
        return rail.alltoall_base(output, input, gets, gives, {});
      };
    }
  }
  steps.back().between = [this_host = host_, sums, brought, output = flat(what.output)] {
    std::vector<const char*> all;
    for (int64_t host = 0; host < sums.size(0); ++host) {
      const bool here = std::cmp_equal(host, this_host);
      all.push_back(static_cast<const char*>((here ? sums : brought)[host].data_ptr()));
    }
    reduce_rows(ReduceOp::SUM, sums.scalar_type(), all, output.scalar_type(),
                static_cast<char*>(output.data_ptr()), static_cast<size_t>(output.numel()));
  };
  return steps;
}

void HostRails::progress_in_thread() {
  down_->progress_in_thread();
  up_->progress_in_thread();
}

void HostRails::stop() noexcept {
  down_->stop();
  up_->stop();
  Rail rail;
  const std::unique_lock<std::mutex> lock(mutex_);
  rail.swap(rail_);
}

} // namespace hasten::detail
