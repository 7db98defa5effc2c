// Hooks between a model and its repeated blocks. C++ modules have no forward hooks, so a model
// calls
//   hidden = hasten::call_block(layer, hidden, mask);
// This is layer->forward(hidden, mask) unless an interceptor is attached to `layer`.
// Cost while nothing is attached to any block: one relaxed atomic load.
// Threading: any thread may call every function. Attaching or detaching during a call takes
// effect at the next call.
// Lifetime: blocks are held weakly. When a block is destroyed its attachments end. A later block
// at the same address does not have them.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace torch::nn {
class Module;
}

namespace hasten {

/// The place of an interceptor in the chain, outermost first. It does not depend on the order of
/// attachment: sharding must gather a block's parameters before a checkpoint decides what to
/// keep.
enum class BlockStage { shard = 0, checkpoint = 1 };

/// Describes a call to an interceptor.
struct BlockCall {
  /// The block that is called. This object and the Forward keep it alive.
  std::shared_ptr<torch::nn::Module> block{};
  BlockStage stage = BlockStage::shard;
};

/// Runs the rest of the chain and then the block itself. Takes and returns the same numbers of
/// tensors as the call. It owns all it needs, so it may be called several times or later (in
/// backward), each time with the inputs that are passed.
using Forward = std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)>;

/// Runs around the call of a block. It may replace inputs and outputs and may call `forward` any
/// number of times. Exceptions pass through unchanged.
class BlockInterceptor {
 public:
  virtual ~BlockInterceptor() = default;
  /// `inputs` are the tensors in the arguments, in order; undefined for an empty optional.
  /// `forward` holds copies of all other arguments. Returns as many tensors as the block's
  /// result contains.
  virtual std::vector<at::Tensor> intercept(const BlockCall& call, std::vector<at::Tensor> inputs,
                                            Forward forward) = 0;
  /// Called around a run of the block's forward in backward that does not go through intercept():
  /// a recomputation starts at the checkpoint, inside of this interceptor. An interceptor that
  /// provides the block's parameters does so here. after_recompute is also called if the run
  /// ends early.
  virtual void before_recompute(const BlockCall&) {}
  virtual void after_recompute(const BlockCall&) noexcept {}
};

namespace detail {

// Detaches an interceptor of a block that may have been destroyed.
struct BlockDetacher {
  uint64_t id = 0; // of the attachment
  void operator()(const torch::nn::Module* block) const noexcept;
};

} // namespace detail

/// Keeps an interceptor attached while it lives.
class [[nodiscard]] BlockAttachment {
 public:
  BlockAttachment() = default;
  /// attach_block() makes it.
  BlockAttachment(const torch::nn::Module* block, uint64_t id) : block_(block, {id}) {}
  /// Detaches the interceptor. A second call does nothing.
  void detach() noexcept { block_.reset(); }

 private:
  std::unique_ptr<const torch::nn::Module, detail::BlockDetacher> block_{};
};

/// Attaches `interceptor` to this block object. Local. The interceptor must not own the block,
/// or the block is never destroyed.
/// Throws InputError if an interceptor is attached at that stage or an argument is empty.
BlockAttachment attach_block(const std::shared_ptr<torch::nn::Module>& block, BlockStage stage,
                             std::shared_ptr<BlockInterceptor> interceptor);

namespace detail {

extern std::atomic<int64_t> attached_blocks;

struct BlockLink {
  BlockStage stage = BlockStage::shard;
  std::shared_ptr<BlockInterceptor> interceptor{};
  uint64_t id = 0; // of its attachment
};
// The live block and its interceptors, outermost first.
struct BlockChain {
  std::shared_ptr<torch::nn::Module> block{};
  std::vector<BlockLink> links{};
};
// Null where nothing is attached to `block`.
std::shared_ptr<const BlockChain> find_block_chain(const torch::nn::Module* block);
// `forward` is the block's own.
std::vector<at::Tensor> run_block_chain(const std::shared_ptr<const BlockChain>& chain,
                                        std::vector<at::Tensor> inputs, Forward forward);
// While it lives, the block is being recomputed. Notifies the interceptors outside the
// checkpoint.
class RecomputeNotice {
 public:
  explicit RecomputeNotice(const torch::nn::Module* block);
  RecomputeNotice(const RecomputeNotice&) = delete;
  RecomputeNotice& operator=(const RecomputeNotice&) = delete;
  ~RecomputeNotice();

 private:
  std::shared_ptr<const BlockChain> chain_;
  size_t notified_ = 0; // number of links
};
[[noreturn]] void throw_tensor_count(const torch::nn::Module& block, std::string_view what,
                                     size_t got, size_t expected);

// Visits every tensor inside a value. TensorTaker moves them out, TensorPutter moves them in.
// Members of other types are left alone.
template <typename Derived>
struct TensorVisitor {
  Derived& self() { return static_cast<Derived&>(*this); }

  void operator()(at::Tensor& tensor) { self().slot(tensor); }
  void operator()(std::optional<at::Tensor>& optional) {
    at::Tensor tensor = optional ? std::move(*optional) : at::Tensor();
    self().slot(tensor);
    if (optional || tensor.defined()) {
      optional = std::move(tensor);
    }
  }
  template <typename T>
  void operator()(std::vector<T>& values) {
    if constexpr (!std::is_same_v<T, bool>) {
      for (T& value : values) {
        (*this)(value);
      }
    }
  }
  template <typename A, typename B>
  void operator()(std::pair<A, B>& values) {
    (*this)(values.first);
    (*this)(values.second);
  }
  template <typename... T>
  void operator()(std::tuple<T...>& values) {
    std::apply([this](auto&... value) { ((*this)(value), ...); }, values);
  }
  template <typename T>
  void operator()(T& value) {
    if constexpr (requires(TensorVisitor& visit) { flatten(visit, value); }) {
      flatten(*this, value);
    }
  }
};

struct TensorTaker : TensorVisitor<TensorTaker> {
  std::vector<at::Tensor> tensors{};
  void slot(at::Tensor& tensor) {
    tensors.push_back(std::move(tensor));
    tensor = at::Tensor();
  }
};

struct TensorPutter : TensorVisitor<TensorPutter> {
  explicit TensorPutter(std::vector<at::Tensor> from) : tensors(std::move(from)) {}
  std::vector<at::Tensor> tensors;
  size_t used = 0;
  void slot(at::Tensor& tensor) {
    if (used < tensors.size()) {
      tensor = std::move(tensors[used]);
    }
    ++used;
  }
};

template <typename T>
inline constexpr bool kBorrows = false; // refers to memory of the caller
template <typename T>
inline constexpr bool kBorrows<c10::ArrayRef<T>> = true;
template <typename T>
inline constexpr bool kBorrows<std::basic_string_view<T>> = true;

// An argument as the caller wrote it: lvalues stay lvalues, rvalues rvalues.
template <typename A>
using Passed =
    std::conditional_t<std::is_array_v<std::remove_reference_t<A>>, std::decay_t<A>&, A&&>;

// A call of `fn` whose tensors are apart from its other arguments and from the rest of its result.
// What it holds is enough to run it again in backward.
template <typename Result, typename Fn, typename... Args>
struct TensorCall {
  static_assert((!kBorrows<std::decay_t<Args>> && ...),
                "call_block and activation_checkpoint bind arguments by value: pass a std::vector "
                "or a std::string instead of a view");
  Fn fn;
  std::tuple<std::decay_t<Args>...> arguments;
  // The result without its tensors. It is kept only until the call returns, so that a Forward that
  // is held for backward keeps no output alive.
  bool shape_wanted = true;
  std::optional<Result> shape{};

  std::vector<at::Tensor> take_inputs() {
    TensorTaker inputs;
    inputs(arguments);
    return std::move(inputs.tensors);
  }
  std::vector<at::Tensor> run(std::vector<at::Tensor> inputs) {
    auto values = arguments;
    TensorPutter put(std::move(inputs));
    put(values);
    Result output = std::apply(
        [this](auto&... value) { return std::invoke(fn, static_cast<Passed<Args>>(value)...); },
        values);
    TensorTaker outputs;
    outputs(output);
    if (shape_wanted) {
      shape.emplace(std::move(output));
    }
    return std::move(outputs.tensors);
  }
  // Empty if it did not run.
  std::optional<Result> take_shape() {
    shape_wanted = false;
    return std::exchange(shape, std::nullopt);
  }
};

template <typename Result, typename Block, typename... Args>
Result call_intercepted(Block& block, const std::shared_ptr<const BlockChain>& chain,
                        Args&&... args) {
  const auto run = [&block](auto&&... value) {
    return block.forward(std::forward<decltype(value)>(value)...);
  };
  using Call = TensorCall<Result, decltype(run), Args...>;
  const std::shared_ptr<Call> call(new Call{run, {std::forward<Args>(args)...}});
  std::vector<at::Tensor> inputs = call->take_inputs();
  // It owns the block, but not the chain: an interceptor may keep a Forward.
  Forward block_forward = [owner = chain->block, call,
                           input_count = inputs.size()](std::vector<at::Tensor> tensors) {
    if (tensors.size() != input_count) {
      throw_tensor_count(*owner, "inputs", tensors.size(), input_count);
    }
    return call->run(std::move(tensors));
  };
  std::vector<at::Tensor> outputs =
      run_block_chain(chain, std::move(inputs), std::move(block_forward));
  std::optional<Result> value = call->take_shape();
  if (!value) {
    // The block did not run: only a result of plain tensors can be built.
    if constexpr (std::is_default_constructible_v<Result>) {
      value.emplace();
    } else {
      throw_tensor_count(*chain->block, "outputs without the block", 0, 0);
    }
  }
  const size_t output_count = outputs.size();
  TensorPutter put(std::move(outputs));
  put(*value);
  if (put.used != output_count) {
    throw_tensor_count(*chain->block, "outputs", output_count, put.used);
  }
  return std::move(*value);
}

template <typename Block>
auto& block_of(Block& block) {
  if constexpr (std::is_base_of_v<torch::nn::Module, std::decay_t<Block>>) {
    return block;
  } else {
    return *block; // a ModuleHolder or a shared_ptr
  }
}

} // namespace detail

/// Calls block->forward(args...) through the interceptors of the block. `block` is a ModuleHolder,
/// a shared_ptr to a module, or a module.
/// Interceptors see the tensors in arguments and results of type Tensor, optional<Tensor>, vector,
/// pair or tuple of these, or of a struct that has, in its own namespace,
///
///     template <typename Visit>
///     void flatten(Visit& visit, Output& output) { visit(output.logits); … }
///
/// If the call is intercepted, all other arguments are copied: what forward writes into them is
/// lost.
/// Grad mode, autocast and random state are the caller's. Local.
/// Throws what forward throws, and InputError if an interceptor returns another number of tensors
/// than the result contains.
template <typename Block, typename... Args>
auto call_block(Block&& holder, Args&&... args) {
  auto& block = detail::block_of(holder);
  using Result = std::decay_t<decltype(block.forward(std::forward<Args>(args)...))>;
  static_assert(!std::is_void_v<Result>, "a block returns tensors");
  if (detail::attached_blocks.load(std::memory_order_relaxed) == 0) {
    return Result(block.forward(std::forward<Args>(args)...));
  }
  const auto chain = detail::find_block_chain(&block);
  if (!chain) {
    return Result(block.forward(std::forward<Args>(args)...));
  }
  return detail::call_intercepted<Result>(block, chain, std::forward<Args>(args)...);
}

} // namespace hasten
