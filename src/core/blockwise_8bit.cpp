#include "blockwise_8bit.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include "hasten/base/text.h"

namespace hasten::detail {

static std::array<float, 256> make_map(bool is_signed) {
  std::array<float, 256> map{0, 1};
  size_t next = 2;
  for (int i = 0; i < 7; ++i) {
    const int parts = 1 << (is_signed ? i : i + 1);
    for (int j = 0; j < parts; ++j) {
      const double value = std::pow(10, i - 6) * (0.1 + 0.9 * (j + 0.5) / parts);
      map[next++] = static_cast<float>(value);
      if (is_signed) {
        map[next++] = static_cast<float>(-value);
      }
    }
  }
  std::ranges::sort(map);
  return map;
}

const std::array<float, 256>& dynamic_map(bool is_signed) {
  static const std::array<float, 256> maps[2] = {make_map(false), make_map(true)};
  return maps[is_signed ? 1 : 0];
}

// A copy for each device, because copying waits. It stays until the process ends.
static at::Tensor map_on(const at::Device& device, bool is_signed) {
  static std::mutex mutex;
  static auto& maps = *new std::map<std::pair<std::string, bool>, at::Tensor>;
  const std::lock_guard lock(mutex);
  at::Tensor& map = maps[{device.str(), is_signed}];
  if (!map.defined()) {
    map = at::tensor(at::ArrayRef<float>(dynamic_map(is_signed)), at::kFloat).to(device);
  }
  return map;
}

// The elements of all tensors, each filled up to whole blocks. [block, kBlock8Bit]
static at::Tensor in_blocks(const std::vector<at::Tensor>& tensors, int64_t fill) {
  const at::Tensor rest = at::full(kBlock8Bit, fill, tensors[0].options());
  std::vector<at::Tensor> pieces;
  for (const at::Tensor& tensor : tensors) {
    pieces.push_back(tensor.reshape(-1));
    pieces.push_back(rest.slice(0, 0, blocks_8bit(tensor.numel()) * kBlock8Bit - tensor.numel()));
  }
  return at::cat(pieces).view({-1, kBlock8Bit});
}

// Views of the elements of each tensor.
static std::vector<at::Tensor> out_of_blocks(const at::Tensor& blocks,
                                             const std::vector<at::Tensor>& like) {
  std::vector<at::Tensor> views;
  int64_t block = 0;
  for (const at::Tensor& tensor : like) {
    views.push_back(blocks.flatten().narrow(0, block * kBlock8Bit, tensor.numel()).view_as(tensor));
    block += blocks_8bit(tensor.numel());
  }
  return views;
}

std::vector<at::Tensor> dequantize_blockwise(const std::vector<at::Tensor>& codes,
                                             const std::vector<at::Tensor>& absmax,
                                             bool is_signed) {
  const at::Tensor blocks = in_blocks(codes, /*the code of 0*/ is_signed ? 127 : 0).to(at::kInt);
  const at::Tensor shares =
      map_on(blocks.device(), is_signed).index_select(0, blocks.flatten()).view_as(blocks);
  return out_of_blocks(shares * at::cat(absmax).unsqueeze(1), codes);
}

void quantize_blockwise(const std::vector<at::Tensor>& values, const std::vector<at::Tensor>& codes,
                        const std::vector<at::Tensor>& absmax, bool is_signed) {
  const at::Tensor blocks = in_blocks(values, 0);
  const at::Tensor largest = blocks.abs().amax(1, /*keepdim=*/true);
  const at::Tensor map = map_on(blocks.device(), is_signed);
  const at::Tensor middles = (map.slice(0, 1) + map.slice(0, 0, -1)) / 2;
  const at::Tensor shares = blocks / largest.clamp_min(std::numeric_limits<float>::min());
  const at::Tensor nearest = at::bucketize(shares, middles, /*out_int32=*/true).to(at::kByte);
  at::_foreach_copy_(codes, out_of_blocks(nearest, codes));
  const auto sizes = mapped(absmax, [](const at::Tensor& list) { return list.numel(); });
  at::_foreach_copy_(absmax, largest.flatten().split_with_sizes(sizes));
}

} // namespace hasten::detail
