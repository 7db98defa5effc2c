#include "hasten/core/block_call.h"

#include <torch/nn/module.h>

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>

#include "hasten/base/error.h"

namespace hasten {

namespace detail {

std::atomic<int64_t> attached_blocks{0};

struct BlockEntry {
  std::weak_ptr<torch::nn::Module> block;
  std::vector<BlockLink> links; // outermost first
};

// Note [Block registry]
// The key is the address, but the weak pointer decides. An entry whose block was destroyed counts
// as absent and is removed at the next attachment. The registry is never destroyed: attachments
// may be dropped during static destruction.
struct BlockRegistry {
  std::shared_mutex mutex;
  std::unordered_map<const torch::nn::Module*, BlockEntry> entries;
  uint64_t last_id = 0;
};

BlockRegistry& block_registry() {
  static auto* registry = new BlockRegistry;
  return *registry;
}

std::shared_ptr<const BlockChain> find_block_chain(const torch::nn::Module* block) {
  BlockRegistry& registry = block_registry();
  std::shared_lock lock(registry.mutex);
  const auto it = registry.entries.find(block);
  auto alive = it == registry.entries.end() ? nullptr : it->second.block.lock();
  if (!alive) {
    return nullptr;
  }
  return std::make_shared<const BlockChain>(BlockChain{std::move(alive), it->second.links});
}

std::vector<at::Tensor> run_block_chain(const std::shared_ptr<const BlockChain>& chain,
                                        std::vector<at::Tensor> inputs, Forward forward) {
  for (size_t i = chain->links.size(); i-- > 0;) {
    forward = [chain, i, next = std::move(forward)](std::vector<at::Tensor> tensors) {
      const BlockLink& here = chain->links[i];
      return here.interceptor->intercept(BlockCall{chain->block, here.stage}, std::move(tensors),
                                         next);
    };
  }
  return forward(std::move(inputs));
}

RecomputeNotice::RecomputeNotice(const torch::nn::Module* block) : chain_(find_block_chain(block)) {
  for (; chain_ && notified_ < chain_->links.size() &&
         chain_->links[notified_].stage < BlockStage::checkpoint;
       ++notified_) {
    const BlockLink& link = chain_->links[notified_];
    link.interceptor->before_recompute(BlockCall{chain_->block, link.stage});
  }
}

RecomputeNotice::~RecomputeNotice() {
  while (notified_ > 0) {
    const BlockLink& link = chain_->links[--notified_];
    link.interceptor->after_recompute(BlockCall{chain_->block, link.stage});
  }
}

void throw_tensor_count(const torch::nn::Module& block, std::string_view what, size_t got,
                        size_t expected) {
  throw InputError("core::call_block",
                   "an interceptor of block " + block.name() + " passed " + std::string(what) +
                       "=" + std::to_string(got) + " tensors",
                   std::to_string(expected) + ", as many as the call has",
                   "pass as many tensors as the call has, and call forward at least once unless "
                   "the result has only tensors");
}

} // namespace detail

BlockAttachment attach_block(const std::shared_ptr<torch::nn::Module>& block, BlockStage stage,
                             std::shared_ptr<BlockInterceptor> interceptor) {
  if (!block || !interceptor) {
    throw InputError("core::attach_block", block ? "interceptor=null" : "block=null",
                     "a live block and an interceptor");
  }
  detail::BlockRegistry& registry = detail::block_registry();
  // Entries of destroyed blocks. They end outside the lock, because an interceptor's destructor may
  // call functions of this file.
  std::vector<detail::BlockEntry> dead;
  std::unique_lock lock(registry.mutex);
  std::erase_if(registry.entries, [&](auto& entry) {
    if (!entry.second.block.expired()) {
      return false;
    }
    detail::attached_blocks -= static_cast<int64_t>(entry.second.links.size());
    dead.push_back(std::move(entry.second));
    return true;
  });
  auto& entry = registry.entries[block.get()];
  entry.block = block;
  const auto place =
      std::ranges::find_if(entry.links, [stage](const auto& link) { return link.stage >= stage; });
  if (place != entry.links.end() && place->stage == stage) {
    throw InputError("core::attach_block",
                     "block " + block->name() + " already has an interceptor for " +
                         (stage == BlockStage::shard ? "sharding" : "checkpointing"),
                     "one interceptor for each stage", "detach the first one");
  }
  const uint64_t id = ++registry.last_id;
  entry.links.insert(place, detail::BlockLink{stage, std::move(interceptor), id});
  ++detail::attached_blocks;
  return {block.get(), id};
}

void detail::BlockDetacher::operator()(const torch::nn::Module* block) const noexcept {
  detail::BlockLink dropped; // destroyed after the lock is released
  detail::BlockRegistry& registry = detail::block_registry();
  std::unique_lock lock(registry.mutex);
  const auto it = registry.entries.find(block);
  if (it == registry.entries.end()) {
    return; // the block was destroyed and its entry removed
  }
  auto& links = it->second.links;
  const auto link = std::ranges::find(links, id, &detail::BlockLink::id);
  if (link == links.end()) {
    return; // another block lives here by now
  }
  dropped = std::move(*link);
  links.erase(link);
  --detail::attached_blocks;
  if (links.empty()) {
    registry.entries.erase(it);
  }
}

} // namespace hasten
