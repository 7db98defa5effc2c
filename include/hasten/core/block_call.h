// The one place where something may step between a model and its repeated
// blocks: C++ modules have no forward hooks, so a model calls
//   hidden = hasten::call_block(layer, hidden, mask);
// which is layer->forward(hidden, mask) until something is attached to `layer`.
// Cost while nothing is attached to any block: one relaxed atomic load.
// Threading: every function may be called from any thread; an attachment made or
// dropped during a call takes effect at the next call.
// Lifetime: blocks are held weakly. A block that dies takes its attachments
// along, and a later block at the same address inherits nothing.
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

/// The place of an interceptor in the chain, outermost first, whatever the order
/// of attachment: sharding gathers a block's parameters before a checkpoint
/// decides what to keep.
enum class BlockStage { shard = 0, checkpoint = 1 };

/// What an interceptor is told about a call.
struct BlockCall {
  /// The block called; kept alive by whoever keeps this or the Forward.
  std::shared_ptr<torch::nn::Module> block{};
  BlockStage stage = BlockStage::shard;
};

/// The rest of the chain and, last, the block itself: tensors in, tensors out,
/// the same numbers of them as in the call. It owns all it needs, so it may be
/// called again, or much later (in backward), each time from given inputs.
using Forward = std::function<std::vector<at::Tensor>(std::vector<at::Tensor>)>;

/// Something that steps in between. May replace inputs and outputs and call
/// `forward` any number of times. Exceptions pass through unchanged.
class BlockInterceptor {
 public:
  virtual ~BlockInterceptor() = default;
  /// `inputs` are the tensors found in the arguments, in order; undefined where
  /// an optional is empty. Other arguments are bound inside `forward` by value.
  /// Returns as many tensors as the block's result holds.
  virtual std::vector<at::Tensor> intercept(const BlockCall& call, std::vector<at::Tensor> inputs,
                                            Forward forward) = 0;
  /// Around a run of the block's forward in backward that does not come through
  /// intercept(): recomputation begins inside the place of the checkpoint. For who
  /// must have the block's parameters there. Also where the run ends early.
  virtual void before_recompute(const BlockCall&) {}
  virtual void after_recompute(const BlockCall&) noexcept {}
};

/// Keeps an interceptor attached while it lives.
class [[nodiscard]] BlockAttachment {
 public:
  BlockAttachment() = default;
  BlockAttachment(BlockAttachment&& other) noexcept;
  BlockAttachment& operator=(BlockAttachment&& other) noexcept;
  ~BlockAttachment();
  /// Detaches now; a second call does nothing.
  void detach() noexcept;

 private:
  friend BlockAttachment attach_block(const std::shared_ptr<torch::nn::Module>&, BlockStage,
                                      std::shared_ptr<BlockInterceptor>);
  const torch::nn::Module* block_ = nullptr;
  uint64_t id_ = 0;
};

/// Attaches `interceptor` to this very block. Local. The interceptor must not own
/// the block, which could then never die.
/// Throws InputError if one is attached at that stage already or an argument is
/// empty.
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
std::vector<at::Tensor> run_block_chain(std::shared_ptr<const BlockChain> chain,
                                        std::vector<at::Tensor> inputs, Forward block_forward);
// Tells the interceptors outside the checkpoint about a recomputation of the block,
// while it lives.
class RecomputeNotice {
 public:
  explicit RecomputeNotice(const torch::nn::Module* block);
  RecomputeNotice(const RecomputeNotice&) = delete;
  RecomputeNotice& operator=(const RecomputeNotice&) = delete;
  ~RecomputeNotice();

 private:
  std::shared_ptr<const BlockChain> chain_;
  size_t told_ = 0; // links that know
};
[[noreturn]] void throw_tensor_count(const torch::nn::Module& block, std::string_view what,
                                     size_t got, size_t expected);

// Walks every tensor inside a value; TensorTaker moves them out, TensorPutter in.
// Members of other kinds are left alone.
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

// What a call leaves behind for rebuilding its result: the result without its
// tensors. Kept only until call_block returns, so that a Forward held for
// backward keeps no output alive.
template <typename Result>
struct ResultShape {
  bool wanted = true;
  std::optional<Result> shape{};
};

template <typename T>
inline constexpr bool kBorrows = false; // points at what the caller owns
template <typename T>
inline constexpr bool kBorrows<c10::ArrayRef<T>> = true;
template <typename T>
inline constexpr bool kBorrows<std::basic_string_view<T>> = true;

// An argument as the caller wrote it: lvalues stay lvalues, rvalues rvalues.
template <typename A>
using Passed =
    std::conditional_t<std::is_array_v<std::remove_reference_t<A>>, std::decay_t<A>&, A&&>;

template <typename Result, typename Block, typename... Args>
Result call_intercepted(Block& block, std::shared_ptr<const BlockChain> chain, Args&&... args) {
  static_assert((!kBorrows<std::decay_t<Args>> && ...),
                "call_block binds arguments by value: pass a std::vector or a "
                "std::string instead of a view");
  using Bound = std::tuple<std::decay_t<Args>...>;
  auto bound = std::make_shared<Bound>(std::forward<Args>(args)...);
  TensorTaker inputs;
  inputs(*bound);
  const size_t input_count = inputs.tensors.size();
  auto result = std::make_shared<ResultShape<Result>>();

  // It owns the block, but not the chain: an interceptor may keep a Forward.
  Forward block_forward = [&block, owner = chain->block, bound, result,
                           input_count](std::vector<at::Tensor> tensors) {
    if (tensors.size() != input_count) {
      throw_tensor_count(*owner, "inputs", tensors.size(), input_count);
    }
    Bound values = *bound;
    TensorPutter put(std::move(tensors));
    put(values);
    Result output = std::apply(
        [&block](auto&... value) { return block.forward(static_cast<Passed<Args>>(value)...); },
        values);
    TensorTaker outputs;
    outputs(output);
    if (result->wanted) {
      result->shape.emplace(std::move(output));
    }
    return std::move(outputs.tensors);
  };

  std::vector<at::Tensor> outputs =
      run_block_chain(chain, std::move(inputs.tensors), std::move(block_forward));
  result->wanted = false;
  if (!result->shape) {
    // Nobody ran the block: only a result of plain tensors can be rebuilt.
    if constexpr (std::is_default_constructible_v<Result>) {
      result->shape.emplace();
    } else {
      throw_tensor_count(*chain->block, "outputs without the block", 0, 0);
    }
  }
  Result value = std::move(*result->shape);
  result->shape.reset();
  const size_t output_count = outputs.size();
  TensorPutter put(std::move(outputs));
  put(value);
  if (put.used != output_count) {
    throw_tensor_count(*chain->block, "outputs", output_count, put.used);
  }
  return value;
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

/// block->forward(args...), through whatever is attached to the block. `block`
/// is a ModuleHolder, a shared_ptr to a module, or a module.
/// Tensors are found in arguments and results that are Tensor, optional<Tensor>,
/// vector, pair or tuple of such, or a struct with, in its own namespace,
///   template <typename Visit>
///   void flatten(Visit& visit, Output& output) { visit(output.logits); … }
/// All other arguments are copied where the call is intercepted: what forward
/// writes into them is lost then.
/// Grad mode, autocast and random state are the caller's. Local.
/// Throws what forward throws; InputError where an interceptor returns another
/// number of tensors than the result holds.
template <typename Block, typename... Args>
auto call_block(Block&& holder, Args&&... args) {
  auto& block = detail::block_of(holder);
  using Result = std::decay_t<decltype(block.forward(std::forward<Args>(args)...))>;
  static_assert(!std::is_void_v<Result>, "a block returns tensors");
  if (detail::attached_blocks.load(std::memory_order_relaxed) == 0) {
    return Result(block.forward(std::forward<Args>(args)...));
  }
  auto chain = detail::find_block_chain(&block);
  if (!chain) {
    return Result(block.forward(std::forward<Args>(args)...));
  }
  return detail::call_intercepted<Result>(block, std::move(chain), std::forward<Args>(args)...);
}

} // namespace hasten
