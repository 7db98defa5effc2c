// One collective as a sequence of stages (stages.h): what this rank publishes in each, and what it
// does with the others' bytes.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hasten/comm/communicator.h"
#include "shared_places.h"

namespace hasten::detail {

struct TransferArguments {
  /// Its tensors are checked, and kept until the transfer ends.
  Collective what{};
  /// What the ranks compare and errors name: "operation\ntensors", or any text. Equal on all ranks.
  std::string text{};
  /// What this rank gives and what it gets, each nothing, one tensor, or [rank] one for each rank.
  /// Without them: the collective's tensors.
  std::vector<at::Tensor> inputs{};
  std::vector<at::Tensor> outputs{};
  /// Instead of all tensors: each rank gives bytes, of any length, and gets those of all. [rank]
  std::shared_ptr<std::vector<std::string>> values = nullptr;
};

class Transfer {
 public:
  /// Payloads that a rank reads. [rank]
  using Payloads = std::vector<const char*>;

  /// `places`: what this rank knows of the others' tensors, for much data that can be read in place.
  Transfer(TransferArguments arguments, int rank, int world_size, SharedPlaces& places);

  const std::string& text() const { return arguments_.text; }
  uint64_t text_hash() const { return text_hash_; }
  /// Number of stages that are known: those of values and places say how many follow.
  uint32_t stages() const { return stages_; }
  /// Whether there is nothing after so many stages.
  bool ends_at(uint32_t stage) const { return way_ != Way::asked && stage == stages_; }
  /// Whether this rank publishes it in one stage, which waits for nobody.
  bool is_small() const {
    return arguments_.values != nullptr ? value_.size() == value_begin(1)
                                        : stages_ == 1 && way_ == Way::copied;
  }
  /// Whether it reads the data where it is. Known at its end.
  bool is_direct() const { return way_ == Way::direct; }
  size_t bytes(uint32_t stage) const;
  /// Of a small one: what any rank publishes, at most.
  size_t most_bytes() const;
  /// Whether the stage says that this rank has read everything: it publishes it after it has
  /// consumed all before it. Other direct transfers end with the stage of their reads.
  bool closes(uint32_t stage) const {
    return is_direct() && kind_ == Collective::Kind::all_reduce && stage + 1 == stages_;
  }
  /// Whether the stage's bytes are made from what the ranks have published in the one before.
  bool follows(uint32_t stage) const { return two_phases_ && (stage - openings_) % 2 == 1; }
  /// Whether consume() of the stage does nothing, because the next stage reads its bytes.
  bool precedes(uint32_t stage) const {
    return two_phases_ && stage >= openings_ && (stage - openings_) % 2 == 0;
  }
  /// `before`: payloads of the stage before, if follows().
  void publish(uint32_t stage, char* to, const Payloads& before);
  void consume(uint32_t stage, const Payloads& payloads);
  /// It has ended: the tensors go.
  void release();

 private:
  using Way = SharedPlaces::Way;
  struct Part { // of the elements: what a stage moves
    size_t first;
    size_t count;
  };
  void find_rows();
  /// Where this rank's input is, if it is there.
  std::optional<SharedPlace> place() const;
  void count_stages();
  Part chunk(uint32_t step) const;
  /// The elements of a chunk that `rank` reduces if each reduces a slice.
  Part slice(const Part& chunk, int rank) const;
  bool to_each() const; // other bytes for each rank
  void reduce(const Payloads& payloads, size_t skip, const Part& part, char* to) const;
  void read_openings(uint32_t stage, const Payloads& payloads);
  /// Fills the outputs' part with what `payloads` have.
  void take(const Part& part, const Payloads& payloads);
  void consume_values(uint32_t stage, const Payloads& payloads);
  size_t value_begin(uint32_t stage) const;

  TransferArguments arguments_;
  const Collective::Kind kind_;
  const int rank_;
  const int world_size_;
  SharedPlaces& places_;
  std::vector<char*> inputs_{}; // where the rows begin that this rank gives
  std::vector<char*> outputs_{}; // and those that it gets
  size_t count_ = 0; // elements of a row
  c10::ScalarType from_ = c10::kByte;
  c10::ScalarType to_ = c10::kByte;
  size_t from_size_ = 1; // of an element, bytes
  size_t to_size_ = 1;
  size_t chunk_ = 1; // elements of a stage
  bool two_phases_ = false;
  uint32_t stages_ = 1;
  Way way_ = Way::copied; // asked: more stages may follow
  uint32_t openings_ = 0; // stages that settle where the data is
  Payloads data_{}; // [rank] there, if direct
  uint64_t text_hash_ = 0;
  std::string value_{}; // the number of bytes of this rank's value, and the value
  std::vector<size_t> sizes_{}; // [rank] of values
};

} // namespace hasten::detail
