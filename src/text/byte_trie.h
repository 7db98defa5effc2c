// Pieces of a vocabulary as a trie over bytes, and the hash table under it.
// Threading: const functions may be called from several threads.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace hasten::detail {

/// A hash table from numbers to numbers. It only grows. The key ~0 is not allowed.
class NumberMap {
 public:
  /// A pointer to the value of `key`, or null.
  const uint64_t* find(uint64_t key) const {
    for (size_t i = place(key);; i = (i + 1) & mask_) {
      if (slots_[i].key == key) {
        return &slots_[i].value;
      }
      if (slots_[i].key == kEmpty) {
        return nullptr;
      }
    }
  }
  /// The value of `key`, which is `value` if it was missing.
  uint64_t& emplace(uint64_t key, uint64_t value) {
    if (2 * (size_ + 1) > slots_.size()) {
      grow();
    }
    size_t i = place(key);
    while (slots_[i].key != key && slots_[i].key != kEmpty) {
      i = (i + 1) & mask_;
    }
    if (slots_[i].key == kEmpty) {
      slots_[i] = {key, value};
      ++size_;
    }
    return slots_[i].value;
  }

 private:
  static constexpr uint64_t kEmpty = ~uint64_t{0};
  struct Slot {
    uint64_t key = kEmpty;
    uint64_t value = 0;
  };

  size_t place(uint64_t key) const {
    return static_cast<size_t>((key * 0x9E3779B97F4A7C15ull) >> 32) & mask_;
  }
  void grow() {
    std::vector<Slot> old(2 * slots_.size());
    old.swap(slots_);
    mask_ = slots_.size() - 1;
    size_ = 0;
    for (const Slot& slot : old) {
      if (slot.key != kEmpty) {
        emplace(slot.key, slot.value);
      }
    }
  }

  std::vector<Slot> slots_ = std::vector<Slot>(16);
  size_t mask_ = 15;
  size_t size_ = 0;
};

class ByteTrie {
 public:
  /// Adds a piece. One that is there gets the new id.
  void insert(std::string_view piece, int32_t id) { ids_[static_cast<size_t>(node(piece))] = id; }
  /// The node of all pieces that begin with `prefix`. A search may begin there.
  int32_t node(std::string_view prefix) {
    int32_t node = 0;
    for (const char byte : prefix) {
      const auto fresh = static_cast<uint64_t>(ids_.size());
      const uint64_t next = edges_.emplace(key(node, byte), fresh);
      if (next == fresh) {
        ids_.push_back(-1);
      }
      node = static_cast<int32_t>(next);
    }
    return node;
  }

  /// Calls visit(id, bytes) for each piece that `text` starts with, the shortest first.
  template <typename Visit>
  void each_prefix(std::string_view text, Visit&& visit, int32_t node = 0) const {
    for (size_t i = 0; i < text.size(); ++i) {
      const uint64_t* next = edges_.find(key(node, text[i]));
      if (next == nullptr) {
        return;
      }
      node = static_cast<int32_t>(*next);
      if (const int32_t id = ids_[static_cast<size_t>(node)]; id >= 0) {
        visit(id, i + 1);
      }
    }
  }

  struct Found {
    int32_t id = -1; // -1: none
    size_t bytes = 0;
  };
  /// The longest piece that `text` starts with.
  Found longest(std::string_view text, int32_t node = 0) const {
    Found best;
    each_prefix(text, [&](int32_t id, size_t bytes) { best = {id, bytes}; }, node);
    return best;
  }

 private:
  static uint64_t key(int32_t node, char byte) {
    return static_cast<uint64_t>(node) << 8 | static_cast<unsigned char>(byte);
  }

  NumberMap edges_{}; // key() to the next node
  std::vector<int32_t> ids_{-1}; // [node] id of the piece that ends there, or -1
};

} // namespace hasten::detail
