// The parts of an Averager: the list of tensors, its layout in flat buffers, slices.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <sstream>
#include <unordered_set>

#include "averager_impl.h"
#include "hasten/base/error.h"
#include "hasten/base/text.h"
#include "hasten/core/named_tensors.h"
#include "parallel/verify.h"

namespace hasten {

namespace detail {

constexpr const char* kAveragerWhere = "parallel::Averager";

void check_averager_options(const AveragerOptions& options) {
  const auto refuse = [](const std::string& what, const char* expected) {
    throw InputError(kAveragerWhere, what, expected);
  };
  if (!(options.slice_mb > 0) || options.slice_mb > 4096) {
    refuse("slice_mb=" + std::to_string(options.slice_mb), "above 0, to 4096");
  }
  if (options.fragments < 1) {
    refuse("fragments=" + std::to_string(options.fragments), "1 or more");
  }
  if (options.alpha && !(*options.alpha >= 0 && *options.alpha < 1)) {
    refuse("alpha=" + std::to_string(*options.alpha), "from 0, below 1");
  }
  if (options.sync == SyncStrategy::driver && options.comm_hook) {
    refuse("sync=driver with a hook", "one of them, because hooks use an all-reduce");
  }
  if (!options.transactional && (options.outer || options.comm_hook || options.fragments > 1 ||
                                 options.sync == SyncStrategy::driver)) {
    refuse("transactional=false with an outer step, a hook, fragments or a driver",
           "one of them, because these need the buffers of transactions");
  }
}

void check_averaged_tensor(const std::string& name, const at::Tensor& tensor) {
  const bool dense =
      tensor.defined() && !tensor.is_sparse() && tensor.is_non_overlapping_and_dense();
  if (dense && tensor.is_floating_point()) {
    return;
  }
  std::ostringstream what;
  what << "tensor \"" << name << "\" ";
  if (!tensor.defined()) {
    what << "is undefined";
  } else {
    what << "is " << tensor.sizes() << " " << tensor.scalar_type()
         << (dense ? "" : ", with gaps or overlaps in memory");
  }
  throw InputError(kAveragerWhere, what.str(), "floating-point tensors, dense in memory");
}

} // namespace detail

Averager::Impl::Impl(std::shared_ptr<Communicator> group, const NamedTensorList& tensors,
                     AveragerOptions settings)
    : communicator(std::move(group)), options(std::move(settings)) {
  detail::check_averager_options(options);
  add_entries(tensors);
  lay_out();
  cut_slices();
  compare_ranks();
}

void Averager::Impl::add_entries(const NamedTensorList& tensors) {
  std::unordered_set<const void*> seen;
  for (const auto& [name, tensor] : tensors) {
    detail::check_averaged_tensor(name, tensor);
    if (tensor.numel() == 0 || !seen.insert(tensor.unsafeGetTensorImpl()).second) {
      continue;
    }
    Entry entry;
    entry.name = name;
    entry.tensor = tensor; // the tensor itself, because its storage may be exchanged
    entry.dtype = tensor.scalar_type();
    entry.numel = tensor.numel();
    entry.sizes = tensor.sizes().vec();
    entry.strides = tensor.strides().vec();
    if (!tensor.is_cpu()) {
      entry.staging =
          at::empty_like(tensor, tensor.options().device(at::kCPU).pinned_memory(true)).detach();
    }
    entry.direct = !options.transactional && tensor.is_cpu() &&
                   (entry.dtype == at::kFloat || entry.dtype == at::kDouble) &&
                   static_cast<int64_t>(tensor.nbytes()) >= detail::kTravelsAlone;
    entries.push_back(std::move(entry));
  }
}

void Averager::Impl::lay_out() {
  const int64_t total = sum_of(entries, &Entry::numel);
  fragment_count = std::max<int64_t>(1, std::min(options.fragments, std::ssize(entries)));
  int64_t before = 0;
  int64_t last = -1;
  for (Entry& entry : entries) {
    // The fragment in which the tensor's middle lies; no fragment stays empty.
    const int64_t wanted =
        (before + entry.numel / 2) * fragment_count / std::max<int64_t>(1, total);
    entry.fragment = std::min({wanted, last + 1, fragment_count - 1});
    last = entry.fragment;
    before += entry.numel;
    const at::ScalarType dtype = entry.dtype == at::kDouble ? at::kDouble : at::kFloat;
    auto group = std::ranges::find_if(groups, [&](const Group& g) { return g.dtype == dtype; });
    if (group == groups.end()) {
      groups.push_back({dtype});
      group = groups.end() - 1;
    }
    entry.group = static_cast<size_t>(group - groups.begin());
    if (!entry.direct) {
      entry.offset = group->numel;
      group->numel += entry.numel;
    }
  }
  fragment_count = last + 1 > 0 ? last + 1 : 1;
  make_buffers();
}

void Averager::Impl::make_buffers() {
  for (Group& group : groups) {
    const auto tensor_options = at::TensorOptions().dtype(group.dtype);
    group.buffer = options.allocator ? options.allocator(group.numel, tensor_options)
                                     : communicator->allocate_tensor(group.numel, tensor_options);
  }
}

// Note [Slices]
// A slice is a contiguous part of one group's buffer: pieces of consecutive tensors. A tensor that
// is larger than a slice is in several. With a hook slices contain only complete tensors. Every
// element is in exactly one slice (tested), no slice is in two fragments, and ranks have the same
// slices in the same order.
void Averager::Impl::cut_slices() {
  for (int64_t fragment = 0; fragment < fragment_count; ++fragment) {
    for (size_t g = 0; g < groups.size(); ++g) {
      const auto limit = std::max<int64_t>(
          1, static_cast<int64_t>(options.slice_mb * (1 << 20) /
                                  static_cast<double>(c10::elementSize(groups[g].dtype))));
      Slice open;
      const auto close = [&] {
        if (open.count > 0) {
          all_slices.push_back(std::move(open));
        }
        open = {};
      };
      for (size_t i = 0; i < entries.size(); ++i) {
        const Entry& entry = entries[i];
        if (entry.group != g || entry.fragment != fragment) {
          continue;
        }
        for (int64_t begin = 0; begin < entry.numel;) {
          if (entry.direct) {
            const int64_t count = std::min(limit, entry.numel - begin);
            const Piece piece{static_cast<int64_t>(i), begin, count, fragment};
            all_slices.push_back({g, fragment, begin, count, true, {piece}});
            begin += count;
            continue;
          }
          const int64_t room = options.comm_hook ? entry.numel : limit - open.count;
          const int64_t count = std::min(room, entry.numel - begin);
          if (open.count == 0) {
            open.group = g;
            open.fragment = fragment;
            open.begin = entry.offset + begin;
          }
          open.pieces.push_back({static_cast<int64_t>(i), begin, count, fragment});
          open.count += count;
          begin += count;
          if (open.count >= limit) {
            close();
          }
        }
      }
      close();
    }
  }
}

void Averager::Impl::compare_ranks() {
  if (communicator->world_size() == 1) {
    return;
  }
  auto mine = nlohmann::json::array();
  for (const Entry& entry : entries) {
    mine.push_back({"tensor \"" + entry.name + "\"", detail::describe_tensor(entry.tensor, false) +
                                                         detail::describe_strides(entry.tensor)});
  }
  std::ostringstream how;
  how << "slices of " << options.slice_mb << " MiB, " << fragment_count << " fragments"
      << (options.transactional ? "" : ", not transactional") << (drives() ? ", by a driver" : "")
      << (options.measure_spread ? "" : ", without spread")
      << (options.alpha ? ", alpha=" + std::to_string(*options.alpha) : "")
      << (options.outer ? ", " + options.outer->description() : "")
      << (options.comm_hook ? ", " + options.comm_hook->description() : "");
  mine.push_back({"the settings", how.str()});
  detail::require_equal_lists(*communicator, mine, detail::kAveragerWhere, "list",
                              "the same tensors and settings on every rank",
                              "build models and options from the same values everywhere");
}

char* Averager::Impl::data_of(const Entry& entry) const {
  const at::Tensor& where = entry.staging.defined() ? entry.staging : entry.tensor;
  return static_cast<char*>(where.data_ptr());
}

char* Averager::Impl::address(const at::Tensor& buffer, int64_t element) const {
  return static_cast<char*>(buffer.data_ptr()) + element * buffer.element_size();
}

void Averager::Impl::check_tensors() const {
  for (const Entry& entry : entries) {
    if (entry.tensor.sizes() != at::IntArrayRef(entry.sizes) ||
        entry.tensor.strides() != at::IntArrayRef(entry.strides) ||
        entry.tensor.scalar_type() != entry.dtype ||
        entry.tensor.is_cpu() == entry.staging.defined()) {
      std::ostringstream what;
      what << "tensor \"" << entry.name << "\" is " << entry.tensor.sizes() << " "
           << entry.tensor.scalar_type() << " on " << entry.tensor.device() << " now, and was "
           << at::IntArrayRef(entry.sizes) << " " << entry.dtype << " on "
           << (entry.staging.defined() ? "a device" : "cpu");
      throw InputError(detail::kAveragerWhere, what.str(), "the tensors at construction");
    }
  }
}

Averager::Averager(std::shared_ptr<Communicator> communicator, const NamedTensorList& tensors,
                   AveragerOptions options)
    : impl_(std::make_unique<Impl>(std::move(communicator), tensors, std::move(options))) {
  reset_anchor();
}

Averager::~Averager() = default;

const AverageReport& Averager::average(double weight, double learning_rate, int64_t fragment) {
  impl_->begin(weight, learning_rate, fragment, false);
  impl_->complete();
  return impl_->report;
}

void Averager::start(double weight, double learning_rate, int64_t fragment) {
  impl_->begin(weight, learning_rate, fragment, true);
}

const AverageReport& Averager::finish() {
  if (!impl_->round.open) {
    throw InputError("parallel::Averager", "finish() without start()",
                     "a call of start() before it");
  }
  impl_->complete();
  return impl_->report;
}

bool Averager::started() const { return impl_->round.open; }

bool Averager::ready() const {
  const auto& operations = impl_->round.operations;
  return std::ranges::all_of(
      operations, [](const auto& operation) { return !operation.step && operation.handle.done(); });
}

const AverageReport& Averager::report() {
  impl_->settle_spread();
  return impl_->report;
}

RoundOutcome Averager::recover(std::shared_ptr<Communicator> remaining) {
  return impl_->recover(std::move(remaining));
}

int64_t Averager::numel() const { return sum_of(impl_->entries, &Impl::Entry::numel); }

int64_t Averager::nbytes() const {
  return sum_of(impl_->entries,
                [](const auto& entry) { return static_cast<int64_t>(entry.tensor.nbytes()); });
}

int64_t Averager::fragments() const { return impl_->fragment_count; }

std::vector<std::vector<Averager::Piece>> Averager::slices() const {
  return mapped(impl_->all_slices, [](const auto& slice) { return slice.pieces; });
}

void Averager::reset_anchor() {
  if (!impl_->has_anchor()) {
    return;
  }
  at::NoGradGuard no_grad;
  impl_->stage_in();
  for (auto& group : impl_->groups) {
    if (!group.anchor.defined()) {
      group.anchor = at::empty_like(group.buffer);
    }
  }
  for (const auto& slice : impl_->all_slices) {
    const auto& anchor = impl_->groups[slice.group].anchor;
    impl_->for_pieces(slice, [&](const auto& entry, char* data, int64_t offset, int64_t count) {
      detail::load_elements(data, entry.dtype, impl_->address(anchor, offset), count, 1);
    });
  }
}

namespace detail {

void check_saved_round(int ranks, int ranks_here, int64_t fragment, int64_t fragments_here) {
  if (ranks != ranks_here) {
    throw InputError("parallel::Averager",
                     "the state has an open synchronisation of " + std::to_string(ranks) + " ranks",
                     std::to_string(ranks_here) + " ranks, as in this world",
                     "resume with as many ranks, or save between synchronisations");
  }
  if (fragment < Averager::kAll || fragment >= fragments_here) {
    throw InputError(
        "parallel::Averager",
        "the state has an open synchronisation of fragment=" + std::to_string(fragment),
        "below " + std::to_string(fragments_here));
  }
}

} // namespace detail

// Saving waits for the messages, so the state of an open round contains the sum.
void Averager::save_state(NamedTensors& tensors, nlohmann::json& values) const {
  Impl::Round& round = impl_->round;
  if (round.open) {
    impl_->await_data();
  }
  values["rounds"] = impl_->report.round;
  values["last_total"] = impl_->last_total;
  values["open"] = round.open;
  values["ranks"] = round.open ? round.ranks : 0;
  values["weight"] = round.weight;
  values["fragment"] = round.fragment;
  values["learning_rate"] = round.learning_rate;
  for (size_t g = 0; g < impl_->groups.size(); ++g) {
    const auto& group = impl_->groups[g];
    const std::string number = std::to_string(g);
    if (group.anchor.defined()) {
      tensors.emplace("anchor." + number, group.anchor);
    }
    if (round.open && group.snapshot.defined()) { // only with several ranks
      tensors.emplace("sum." + number, group.buffer);
      tensors.emplace("snapshot." + number, group.snapshot);
    }
  }
  for (const auto& [name, part] : impl_->parts()) {
    if (part != nullptr) {
      values[name] = detail::save_below(*part, tensors, std::string(name) + ".");
    }
  }
}

void Averager::load_state(const NamedTensors& tensors, const nlohmann::json& values) {
  constexpr const char* where = "parallel::Averager";
  const bool open = values.at("open").get<bool>();
  const int ranks = impl_->communicator->world_size();
  const bool sent = open && (ranks > 1 || impl_->has_anchor());
  const auto fragment = values.at("fragment").get<int64_t>();
  if (open) {
    detail::check_saved_round(values.at("ranks").get<int>(), ranks, fragment,
                              impl_->fragment_count);
  }
  const auto find = [&](const std::string& name, size_t g) {
    const auto found = tensors.find(name + "." + std::to_string(g));
    const int64_t numel = impl_->groups[g].numel;
    if (found == tensors.end() || found->second.numel() != numel ||
        found->second.scalar_type() != impl_->groups[g].dtype) {
      throw InputError(where,
                       "\"" + name + "." + std::to_string(g) + "\" in the state " +
                           (found == tensors.end() ? "is missing" : "has another size"),
                       std::to_string(numel) + " elements",
                       "use the model and settings that it was saved with");
    }
    return found->second;
  };
  for (const auto& [name, part] : impl_->parts()) {
    if (values.contains(name) != (part != nullptr)) {
      throw InputError(where,
                       std::string("the state has ") + (part ? "no " : "an ") + name +
                           ", the options have " + (part ? "one" : "none"),
                       "the options with which it was saved");
    }
  }
  for (size_t g = 0; g < impl_->groups.size(); ++g) { // checks all before changing any
    if (impl_->has_anchor()) {
      find("anchor", g);
    }
    if (sent) {
      find("sum", g);
      find("snapshot", g);
    }
  }
  for (const auto& [name, part] : impl_->parts()) {
    if (part != nullptr) {
      part->load_state(detail::tensors_below(tensors, std::string(name) + "."), values[name]);
    }
  }
  at::NoGradGuard no_grad;
  if (!impl_->round.operations.empty()) { // they may still write into the old buffers
    impl_->make_buffers();
  }
  for (size_t g = 0; g < impl_->groups.size(); ++g) {
    auto& group = impl_->groups[g];
    if (impl_->has_anchor()) {
      group.anchor.copy_(find("anchor", g));
    }
    if (sent) {
      group.buffer.copy_(find("sum", g));
      group.snapshot = find("snapshot", g).clone();
    }
  }
  impl_->report = {.round = values.at("rounds").get<int64_t>()};
  impl_->last_total = values.value("last_total", -1.0); // older states have none
  impl_->forget_spread();
  impl_->round = {};
  impl_->round.open = open;
  impl_->round.ranks = ranks;
  impl_->round.corrects = open;
  impl_->round.whole = open && impl_->options.sync != SyncStrategy::driver; // the state has the sum
  impl_->round.weight = values.at("weight").get<double>();
  impl_->round.total = ranks == 1 ? 1 : -1;
  impl_->round.fragment = fragment;
  impl_->round.learning_rate = values.at("learning_rate").get<double>();
}

} // namespace hasten
