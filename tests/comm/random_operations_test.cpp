// Random operations of all kinds and sizes on several groups, with what the header allows a caller to
// do meanwhile. HASTEN_RANDOM_ROUNDS makes it long, HASTEN_RANDOM_SEED repeats a failure.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <random>
#include <thread>

#include "hasten/base/process.h"
#include "hasten/comm/communicator.h"
#include "support/communicator.h"
#include "support/on_device.h"

namespace hasten::random_operations_test {

using at::Tensor;
using Kind = Collective::Kind;
using Random = std::mt19937_64;

int64_t number_from(const char* variable, int64_t otherwise) {
  return std::stoll(detail::environment_value(variable).value_or(std::to_string(otherwise)));
}

int64_t below(Random& random, int64_t end) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(end));
}

template <typename T>
T one_of(Random& random, const std::vector<T>& all) {
  return all[random() % all.size()];
}

/// A group that this rank is in, and its ranks in the world.
struct Group {
  std::shared_ptr<Communicator> communicator;
  std::vector<int> members;
  int64_t size() const { return std::ssize(members); }
};

/// What all ranks know of an operation. Values are small integers, exact in every dtype.
struct Plan {
  explicit Plan(Random& random, int64_t groups)
      : group(static_cast<size_t>(below(random, groups))),
        kind(static_cast<Kind>(random() % 8)),
        op(one_of<ReduceOp>(random, {ReduceOp::SUM, ReduceOp::SUM, ReduceOp::AVG, ReduceOp::MAX,
                                     ReduceOp::MIN, ReduceOp::PRODUCT})),
        type(one_of<at::ScalarType>(
            random, {at::kFloat, at::kFloat, at::kDouble, at::kBFloat16, at::kLong})),
        count(one_of<int64_t>(random, {1, 3, 100, 3000, 3000, 20'000, 65'536, 70'001, 300'000})),
        salt(below(random, 1000)),
        draw(static_cast<int64_t>(random() % 1000)) {
    if (type == at::kLong && (op == ReduceOp::AVG || kind == Kind::reduce_scatter)) {
      type = at::kFloat;
    }
  }
  size_t group;
  Kind kind;
  ReduceOp op;
  at::ScalarType type;
  int64_t count;
  int64_t salt;
  int64_t draw;

  int root(const Group& in) const { return static_cast<int>(draw % in.size()); }
  bool in_place() const { return kind <= Kind::broadcast; }
  bool rows_in() const {
    return kind == Kind::scatter || kind == Kind::all_to_all || kind == Kind::reduce_scatter;
  }
  bool rows_out() const {
    return kind == Kind::all_gather || kind == Kind::gather || kind == Kind::all_to_all;
  }
  /// What `rank` of the group gives: [count], or [rank of the group, count].
  Tensor given(const Group& in, int64_t rank) const {
    const int64_t numel = rows_in() ? in.size() * count : count;
    const Tensor values = (at::arange(numel) + rank * 7 + salt).remainder(3) + 1;
    return values.to(type).view(rows_in() ? std::vector<int64_t>{in.size(), count}
                                          : std::vector<int64_t>{count});
  }
  /// What this rank has afterwards.
  Tensor expected(const Group& in) const {
    const int64_t rank = in.communicator->rank();
    std::vector<Tensor> all;
    for (int64_t i = 0; i < in.size(); ++i) {
      all.push_back(given(in, i));
    }
    switch (kind) {
      case Kind::broadcast:
        return all[static_cast<size_t>(root(in))];
      case Kind::scatter:
        return all[static_cast<size_t>(root(in))][rank];
      case Kind::all_gather:
      case Kind::gather:
        return at::stack(all);
      case Kind::all_to_all:
        return at::stack(all).select(1, rank).contiguous();
      case Kind::reduce_scatter:
        return at::stack(all).select(1, rank).sum(0);
      default:
        break;
    }
    const Tensor wide = at::stack(all).to(at::kDouble);
    const Tensor result = op == ReduceOp::SUM       ? wide.sum(0)
                          : op == ReduceOp::AVG     ? wide.mean(0)
                          : op == ReduceOp::MAX     ? wide.amax(0)
                          : op == ReduceOp::PRODUCT ? wide.prod(0)
                                                    : wide.amin(0);
    return result.to(type);
  }
};

/// An operation that has started on this rank.
struct Started {
  Plan plan;
  Tensor output;
  Tensor input;
  Work work;

  Started(const Plan& of, const Group& in) : plan(of) {
    Communicator& communicator = *in.communicator;
    const int root = plan.root(in);
    const bool is_root = communicator.rank() == root;
    const auto options = on_device::placed(plan.type);
    const auto make = [&](at::IntArrayRef sizes) { // in memory that peers read, or not
      const int64_t numel = c10::multiply_integers(sizes);
      const Tensor flat = plan.draw % 2 == 0 ? communicator.allocate_tensor(numel, options)
                                             : at::empty({numel}, options);
      return flat.view(sizes).fill_(99);
    };
    if (plan.kind != Kind::scatter || is_root) {
      const Tensor own = plan.given(in, communicator.rank());
      input = make(own.sizes()).copy_(own);
    }
    if (plan.in_place()) {
      output =
          plan.kind == Kind::broadcast && !is_root ? make({plan.count}) : std::exchange(input, {});
    } else if (plan.kind != Kind::gather || is_root) {
      output = plan.rows_out() ? make({in.size(), plan.count}) : make({plan.count});
    }
    work = communicator.start({.kind = plan.kind,
                               .name = "random",
                               .output = output,
                               .input = input,
                               .op = plan.op,
                               .root = root});
    if (plan.kind == Kind::reduce && !is_root) {
      output.fill_(1000); // the header allows it
      output = Tensor();
    }
  }

  void finish(const Group& in) {
    work.wait();
    const Tensor expected = plan.expected(in);
    if (output.defined()) {
      const Tensor found = output.cpu();
      EXPECT_TRUE(plan.op == ReduceOp::AVG && plan.kind <= Kind::reduce
                      ? at::allclose(found.to(at::kDouble), expected.to(at::kDouble), 1e-2)
                      : at::equal(found, expected))
          << "kind " << static_cast<int>(plan.kind) << ", op " << static_cast<int>(plan.op) << ", "
          << plan.count << " of " << c10::toString(plan.type) << ", group " << plan.group;
      output.fill_(77); // nobody needs it any more
    }
    if (input.defined()) {
      input.fill_(55);
    }
  }
};

/// Every rank has the same `plans`; `own` differs between ranks.
static void one_round(const std::vector<Group>& groups, Random& plans, Random& own) {
  std::vector<Started> under_way;
  const bool burst = below(plans, 2) == 0; // of small ones
  const int64_t operations = 1 + below(plans, burst ? 150 : 12);
  int64_t large = 0;
  for (int64_t i = 0; i < operations; ++i) {
    Plan plan(plans, 3);
    plan.count = plan.count > 3000 && (burst || ++large > 6) ? 17 : plan.count;
    const int64_t special = below(plans, burst ? 150 : 40);
    if (plan.group >= groups.size()) { // this rank is not in it
      continue;
    }
    const Group& in = groups[plan.group];
    if (special == 0) {
      in.communicator->barrier("random");
    } else if (special == 1) {
      EXPECT_EQ(in.communicator->all_gather_object(in.communicator->rank(), "random").size(),
                in.members.size());
    } else {
      under_way.emplace_back(plan, in);
    }
    if (below(own, 8) == 0 && !under_way.empty()) {
      one_of(own, under_way).work.done();
    }
    if (below(own, 100) == 0) { // computes
      std::this_thread::sleep_for(std::chrono::microseconds(below(own, 3000)));
    }
  }
  std::ranges::shuffle(under_way, own);
  for (Started& operation : under_way) {
    operation.finish(groups[operation.plan.group]);
  }
}

TEST(RandomOperations, OnSeveralGroupsHaveTheResultsThatOneRankComputesAlone) {
  const auto world = testing_support::fresh_communicator();
  const auto ranks = world->world_size();
  std::vector<int> all;
  for (int rank = 0; rank < ranks; ++rank) {
    all.push_back(rank);
  }
  CommunicatorOptions options = world->options();
  options.name = "second";
  std::vector<Group> groups{{world, all}, {world->duplicate(options), all}};
  const std::vector<int> some = ranks > 2 ? std::vector<int>(all.begin() + 1, all.end()) : all;
  if (std::ranges::find(some, world->rank()) != some.end()) {
    options.name = "some";
    groups.push_back({world->new_group(some, options), some});
  }
  const int64_t seed =
      world
          ->broadcast_object(
              number_from("HASTEN_RANDOM_SEED", static_cast<int64_t>(std::random_device{}() >> 1)),
              "seed")
          .get<int64_t>();
  SCOPED_TRACE("HASTEN_RANDOM_SEED=" + std::to_string(seed));
  Random plans(static_cast<uint64_t>(seed));
  Random own(static_cast<uint64_t>(seed + 1 + world->rank()));
  const int64_t rounds = number_from("HASTEN_RANDOM_ROUNDS", 12);
  for (int64_t round = 0; round < rounds && !testing::Test::HasFailure(); ++round) {
    one_round(groups, plans, own);
  }
  for (size_t i = 1; i < groups.size(); ++i) {
    groups[i].communicator->close();
  }
}

} // namespace hasten::random_operations_test
