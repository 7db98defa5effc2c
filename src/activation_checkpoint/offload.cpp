#include <ATen/ops/as_strided.h>
#include <ATen/ops/from_blob.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

#include "hasten/activation_checkpoint/saved_memory.h"
#include "hasten/base/error.h"
#include "hasten/base/files.h"
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

// A storage that is in the file.
struct OffloadedStorage {
  OffloadedStorage(std::shared_ptr<OffloadFile> file_in, const void* data, int64_t bytes_in)
      : file(std::move(file_in)), bytes(bytes_in), place(file->write(data, bytes_in)) {}
  OffloadedStorage(const OffloadedStorage&) = delete;
  OffloadedStorage& operator=(const OffloadedStorage&) = delete;
  ~OffloadedStorage() { file->free(place, bytes); }

  std::shared_ptr<OffloadFile> file;
  int64_t bytes;
  int64_t place;
};

// The storages that a thread has written while it makes a graph.
class OffloadFactory final : public SavedHookFactory {
 public:
  explicit OffloadFactory(const SavedTensorOffloadOptions& options)
      : min_bytes_(options.min_bytes),
        file_(std::make_shared<OffloadFile>(
            options.folder.empty() ? std::filesystem::temp_directory_path() : options.folder)) {}
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override;
  int64_t used() const { return file_->used(); }

  bool takes(const at::Tensor& tensor) const {
    const bool parameter = tensor.is_leaf() && tensor.requires_grad();
    const bool of_parameter =
        tensor.is_view() && tensor._base().is_leaf() && tensor._base().requires_grad();
    return !parameter && !of_parameter && tensor.is_cpu() && tensor.layout() == at::kStrided &&
           tensor.has_storage() && static_cast<int64_t>(tensor.storage().nbytes()) >= min_bytes_ &&
           tensor.storage().nbytes() <= 2 * tensor.nbytes();
  }

  std::shared_ptr<OffloadedStorage> write(const at::Tensor& tensor) {
    const auto storage = tensor.storage();
    const auto version = tensor.is_inference() ? 0 : tensor._version();
    Written& known = written_[storage.unsafeGetStorageImpl()];
    auto written = known.written.lock();
    // The entry is valid only while its storage lives, because addresses are reused.
    if (!written || known.storage.expired() || known.version != version) {
      written = std::make_shared<OffloadedStorage>(file_, storage.data(),
                                                   static_cast<int64_t>(storage.nbytes()));
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
  int64_t min_bytes_;
  std::shared_ptr<OffloadFile> file_;
  std::unordered_map<const c10::StorageImpl*, Written> written_{};
};

class OffloadHook final : public torch::autograd::SavedVariableHooks {
 public:
  explicit OffloadHook(OffloadFactory& factory) : factory_(&factory) {}
  void call_pack_hook(const at::Tensor& tensor) override {
    if (!factory_->takes(tensor)) {
      kept_ = tensor.tensor_data();
      return;
    }
    written_ = factory_->write(tensor);
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
    const int64_t bytes = written_->bytes;
    void* memory = written_->file->map(written_->place, bytes);
    const auto item = static_cast<int64_t>(options_.dtype().itemsize());
    const at::Tensor whole = at::from_blob(
        memory, {bytes / item}, [bytes](void* at) { ::munmap(at, static_cast<size_t>(bytes)); },
        options_.requires_grad(false));
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
