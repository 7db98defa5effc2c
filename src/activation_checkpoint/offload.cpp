#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "hasten/activation_checkpoint/saved_memory.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
#include "hasten/core/recompute.h"
#include "hasten/core/side_stream.h"
#include "hook_engine.h"

namespace hasten {

namespace detail {

constexpr int64_t kOffloadPage = 4096;

// A file without a name. Its pieces are whole pages and are reused.
class OffloadFile {
 public:
  explicit OffloadFile(const std::filesystem::path& folder) {
    std::string name = (folder / "hasten-offload-XXXXXX").string();
    fd_ = ::mkstemp(name.data());
    if (fd_ < 0) {
      throw InputError("activation_checkpoint::SavedTensorOffload",
                       "folder=" + folder.string() + ": " + std::strerror(errno),
                       "a writable folder");
    }
    ::unlink(name.c_str());
  }
  ~OffloadFile() { ::close(fd_); }

  /// Writes `bytes` from `data` to a piece. Returns its offset.
  int64_t write(const void* data, int64_t bytes) {
    const int64_t place = take(pages(bytes));
    const auto* from = static_cast<const char*>(data);
    for (int64_t done = 0; done < bytes;) {
      const ssize_t wrote =
          ::pwrite(fd_, from + done, static_cast<size_t>(bytes - done), place + done);
      if (wrote <= 0 && errno != EINTR) {
        const int error = errno;
        free(place, bytes);
        throw Error("activation_checkpoint::SavedTensorOffload",
                    "cannot write " + std::to_string(bytes) + " bytes: " + std::strerror(error),
                    "free space for saved tensors", "choose another folder, or offload less",
                    kind_of_errno(error));
      }
      done += std::max<ssize_t>(0, wrote);
    }
    return place;
  }

  /// Maps the piece into memory; writes to this memory stay private.
  void* map(int64_t place, int64_t bytes) const {
    void* memory = ::mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE,
                          fd_, place);
    if (memory == MAP_FAILED) {
      throw Error("activation_checkpoint::SavedTensorOffload",
                  std::string("cannot map the file: ") + std::strerror(errno));
    }
    return memory;
  }

  void free(int64_t place, int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    used_ -= pages(bytes);
    free_.emplace(pages(bytes), place);
  }
  int64_t used() const { return used_; }

 private:
  static int64_t pages(int64_t bytes) {
    return (bytes + kOffloadPage - 1) / kOffloadPage * kOffloadPage;
  }
  int64_t take(int64_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    used_ += bytes;
    if (const auto found = free_.extract(bytes)) {
      return found.mapped();
    }
    return std::exchange(end_, end_ + bytes);
  }

  int fd_ = -1;
  std::atomic<int64_t> used_{0};
  std::mutex mutex_;
  std::multimap<int64_t, int64_t> free_{}; // by size
  int64_t end_ = 0;
};

// A storage that is elsewhere.
struct OffloadedStorage {
  OffloadedStorage() = default;
  OffloadedStorage(const OffloadedStorage&) = delete;
  OffloadedStorage& operator=(const OffloadedStorage&) = delete;
  virtual ~OffloadedStorage() = default;
  /// A copy of all its elements.
  virtual at::Tensor read(const at::TensorOptions& options) = 0;
};

class StorageInFile final : public OffloadedStorage {
 public:
  StorageInFile(std::shared_ptr<OffloadFile> file, const c10::Storage& storage)
      : file_(std::move(file)),
        bytes_(static_cast<int64_t>(storage.nbytes())),
        place_(file_->write(storage.data(), bytes_)) {}
  ~StorageInFile() override { file_->free(place_, bytes_); }

  at::Tensor read(const at::TensorOptions& options) override {
    const auto item = static_cast<int64_t>(options.dtype().itemsize());
    return at::from_blob(
        file_->map(place_, bytes_), {bytes_ / item},
        [bytes = bytes_](void* at) { ::munmap(at, static_cast<size_t>(bytes)); }, options);
  }

 private:
  std::shared_ptr<OffloadFile> file_;
  int64_t bytes_;
  int64_t place_;
};

// A storage of a device, in pinned memory of the host. The host waits for no copy.
class StorageOnHost final : public OffloadedStorage {
 public:
  /// `all`: the storage's elements. They must live until the copy on `side` is done.
  /// `before`: what was offloaded before this, because backward is likely to read it next.
  StorageOnHost(const SideStream& side, const at::Tensor& all, std::weak_ptr<StorageOnHost> before,
                std::shared_ptr<std::atomic<int64_t>> used)
      : side_(side),
        before_(std::move(before)),
        used_(std::move(used)),
        host_(at::empty(all.sizes(), all.options().device(at::kCPU).pinned_memory(true))) {
    *used_ += static_cast<int64_t>(host_.nbytes());
    side_.follow();
    side_.copy(host_, all);
  }
  ~StorageOnHost() override { *used_ -= static_cast<int64_t>(host_.nbytes()); }

  at::Tensor read(const at::TensorOptions& options) override {
    const at::NoGradGuard no_grad;
    const UnseenOps unseen;
    at::Tensor device;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      fetch();
      fetched_->block(current_stream(side_.stream().device()));
      device = std::exchange(device_, {});
    }
    if (const auto before = before_.lock()) {
      const std::lock_guard<std::mutex> lock(before->mutex_);
      before->fetch();
    }
    return device.view(c10::typeMetaToScalarType(options.dtype())); // it may be of another dtype
  }

 private:
  void fetch() {
    if (device_.defined()) {
      return;
    }
    device_ =
        at::empty(host_.sizes(), at::TensorOptions(side_.stream().device()).dtype(host_.dtype()));
    device_.record_stream(side_.stream()); // the graph may end before it is read
    side_.follow();
    side_.copy(device_, host_); // after the copy to the host, which this stream made
    fetched_.emplace(side_.mark());
  }

  const SideStream side_;
  const std::weak_ptr<StorageOnHost> before_;
  const std::shared_ptr<std::atomic<int64_t>> used_;
  const at::Tensor host_;

  std::mutex mutex_;
  at::Tensor device_{}; // fetched in advance
  std::optional<c10::Event> fetched_{};
};

// The copies to the host that may run at the same time. Their storages stay on the device.
constexpr size_t kOffloadsInFlight = 2;

// The storages that a thread has offloaded while it makes a graph.
class OffloadFactory final : public SavedHookFactory {
 public:
  explicit OffloadFactory(const SavedTensorOffloadOptions& options)
      : min_bytes_(options.min_bytes),
        file_(std::make_shared<OffloadFile>(
            options.folder.empty() ? std::filesystem::temp_directory_path() : options.folder)) {}
  OffloadFactory(const OffloadFactory&) = delete;
  OffloadFactory& operator=(const OffloadFactory&) = delete;
  ~OffloadFactory() override { end_copies(0); }
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override;
  int64_t used() const { return file_->used() + *host_bytes_; }

  bool takes(const at::Tensor& tensor) const {
    const bool parameter = tensor.is_leaf() && tensor.requires_grad();
    const bool of_parameter =
        tensor.is_view() && tensor._base().is_leaf() && tensor._base().requires_grad();
    return !parameter && !of_parameter && tensor.layout() == at::kStrided && !tensor.is_meta() &&
           tensor.has_storage() && static_cast<int64_t>(tensor.storage().nbytes()) >= min_bytes_ &&
           tensor.storage().nbytes() <= 2 * tensor.nbytes();
  }

  std::shared_ptr<OffloadedStorage> store(const at::Tensor& tensor) {
    const auto& storage = tensor.storage();
    const auto version = tensor.is_inference() ? 0 : tensor._version();
    Written& known = written_[storage.unsafeGetStorageImpl()];
    auto written = known.written.lock();
    // The entry is valid only while its storage lives, because addresses are reused.
    if (!written || known.storage.expired() || known.version != version) {
      written = tensor.is_cpu() ? std::make_shared<StorageInFile>(file_, storage) : to_host(tensor);
      known = {c10::weak_intrusive_ptr<c10::StorageImpl>(storage.getWeakStorageImpl()), version,
               written};
    }
    return written;
  }

 private:
  struct Written {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage{c10::intrusive_ptr<c10::StorageImpl>()};
    int64_t version = 0;
    std::weak_ptr<OffloadedStorage> written{};
  };
  std::shared_ptr<OffloadedStorage> to_host(const at::Tensor& tensor) {
    const at::NoGradGuard no_grad;
    const UnseenOps unseen;
    const at::Device device = tensor.device();
    if (!side_ || side_->stream().device() != device) {
      side_.emplace(device);
    }
    const auto numel = static_cast<int64_t>(tensor.storage().nbytes() / tensor.itemsize());
    const at::Tensor all = at::empty({0}, at::TensorOptions(device).dtype(tensor.dtype()))
                               .set_(tensor.storage(), 0, {numel}, {1});
    const auto stored = std::make_shared<StorageOnHost>(*side_, all, last_, host_bytes_);
    last_ = stored;
    copying_.emplace_back(all, side_->mark());
    end_copies(kOffloadsInFlight);
    return stored;
  }
  // Frees the storages whose copies are not the last `most`. Their memory is used again by later
  // work of the stream, so the stream waits, and the host does not.
  void end_copies(size_t most) {
    for (; copying_.size() > most; copying_.pop_front()) {
      const auto& [all, copied] = copying_.front();
      copied.block(current_stream(all.device()));
    }
  }

  int64_t min_bytes_;
  std::shared_ptr<OffloadFile> file_;
  std::unordered_map<const c10::StorageImpl*, Written> written_{};

  // Of devices.
  std::optional<SideStream> side_{};
  std::shared_ptr<std::atomic<int64_t>> host_bytes_ = std::make_shared<std::atomic<int64_t>>(0);
  std::weak_ptr<StorageOnHost> last_{};
  std::deque<std::pair<at::Tensor, c10::Event>> copying_{};
};

class OffloadHook final : public torch::autograd::SavedVariableHooks {
 public:
  explicit OffloadHook(OffloadFactory& factory) : factory_(&factory) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    if (!factory_->takes(tensor)) {
      kept_ = tensor.tensor_data();
      return;
    }
    written_ = factory_->store(tensor);
    options_ = tensor.options();
    sizes_ = tensor.sizes().vec();
    strides_ = tensor.strides().vec();
    offset_ = tensor.storage_offset();
    factory_ = nullptr; // it may not exist any more in backward
  }
  at::Tensor call_unpack_hook() override {
    if (!written_) {
      return kept_;
    }
    const at::Tensor whole = written_->read(options_.requires_grad(false));
    return whole.as_strided(sizes_, strides_, offset_);
  }

 private:
  OffloadFactory* factory_;
  at::Tensor kept_{};
  std::shared_ptr<OffloadedStorage> written_{};
  at::TensorOptions options_{};
  std::vector<int64_t> sizes_{};
  std::vector<int64_t> strides_{};
  int64_t offset_ = 0;
};

std::unique_ptr<torch::autograd::SavedVariableHooks> OffloadFactory::make_hooks() {
  return std::make_unique<OffloadHook>(*this);
}

} // namespace detail

struct SavedTensorOffload::Impl {
  detail::OffloadFactory factory;
  detail::HookScope scope{&factory};
};

SavedTensorOffload::SavedTensorOffload(const SavedTensorOffloadOptions& options) {
  if (!detail::hook_engine_installed()) {
    throw Error("activation_checkpoint::SavedTensorOffload",
                "another autograd engine (a Python interpreter's) is installed in this process",
                "torch's own engine", "offload in a process without Python");
  }
  impl_.reset(new Impl{detail::OffloadFactory(options)});
}
SavedTensorOffload::~SavedTensorOffload() = default;
int64_t SavedTensorOffload::bytes() const { return impl_->factory.used(); }

} // namespace hasten
