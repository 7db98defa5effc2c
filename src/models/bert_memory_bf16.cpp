// Under autocast in bf16: products and what lies between them in 16 bits; sums with
// the residual, norms and parameters' gradients in fp32.
#include "bert_memory_tape.h"
#include "hasten/core/linear.h"

namespace hasten::detail {

// Where it is not ours, torch keeps a converted weight until backward.
static bool keeps_weight(int64_t rows, int64_t in, int64_t out) {
  return !linear_uses_bf16(rows, in, out);
}

void linear_forward_bf16(MemoryTape& tape, int64_t rows, int64_t in, int64_t out, bool converts_x) {
  if (converts_x) {
    tape.take16(rows * in); // saved
  }
  tape.take16(in * out);
  tape.touch16(rows * out); // the caller takes it
  if (!keeps_weight(rows, in, out)) {
    tape.give16(in * out);
  }
}

void linear_backward_bf16(MemoryTape& tape, int64_t rows, int64_t in, int64_t out, bool x_is_fp32) {
  if (keeps_weight(rows, in, out)) {
    tape.take16(rows * in); // of x
    tape.take16(in * out); // of the converted weight
    tape.give16(rows * in + in * out); // what was saved: x, converted weight
    tape.gradient(in * out);
    tape.give16(in * out);
    tape.gradient(out);
  } else {
    tape.take(in * out);
    tape.touch16(in * out); // each piece, rounded
    tape.take(out);
    tape.give16(rows * in); // x
    tape.take16(in * out); // the weight, converted again
    tape.take16(rows * in); // of x
    tape.give16(in * out);
    tape.settle(in * out + out);
  }
  if (x_is_fp32) {
    tape.take(rows * in);
    tape.give16(rows * in);
  }
}

static void attend_forward_bf16(MemoryTape& tape, const LayerSizes& s) {
  const int64_t h = s.hidden;
  tape.take16(s.n()); // the input, converted once: saved
  for (const int64_t rows : {s.rows, s.rows, s.asking}) { // value, key, query
    linear_forward_bf16(tape, rows, h, h, rows != s.rows);
    tape.take16(rows * h);
  }
  tape.take16((s.one_asks ? 0 : s.padded_a()) + 2 * s.padded_n()); // saved
  tape.take16(2 * s.padded_scores); // scores; probabilities, saved
  const int64_t dropped = s.attention_dropout ? s.padded_scores : 0;
  tape.take16(dropped);
  tape.take16(s.padded_a()); // by head
  if (!s.one_asks) {
    tape.take16(s.a()); // context
    tape.give16(s.padded_a());
  }
  tape.give16(s.padded_scores + dropped);
  tape.give16((s.one_asks ? 0 : s.a()) +
              2 * s.n()); // queries, keys, values as the products gave them
}

void layer_forward_bf16(MemoryTape& tape, const LayerSizes& s) {
  if (s.asking != s.rows) {
    tape.take(s.a()); // the asking tokens: live to the block's end
  }
  attend_forward_bf16(tape, s);
  linear_forward_bf16(tape, s.asking, s.hidden, s.hidden, false);
  tape.take16(s.a()); // attention.output: lives to the block's end
  tape.take(s.a()); // sum with the residual: saved
  tape.take(s.a() + 2 * s.asking); // norm: lives to the block's end
  linear_forward_bf16(tape, s.asking, s.hidden, s.wide, true);
  tape.take16(s.w()); // intermediate: saved
  tape.take16(s.w()); // its activation: saved
  linear_forward_bf16(tape, s.asking, s.wide, s.hidden, false);
  tape.take16(s.a()); // output
  tape.take(s.a()); // sum: saved
  tape.give16(s.a()); // output
  tape.take(s.a() + 2 * s.asking); // norm: the layer's output
  tape.give16(s.a()); // attention.output
  tape.give(s.a()); // the first norm
  if (s.asking != s.rows) {
    tape.give(s.a());
  }
  tape.give(s.n()); // the layer's input
}

static void norm_backward_bf16(MemoryTape& tape, const LayerSizes& s) {
  tape.take(s.a()); // of the sum
  tape.gradient(2 * s.hidden);
  tape.give(2 * s.a() + 2 * s.asking); // of the output; the saved sum
  tape.take16(s.a()); // of what was dropped from
}

static void attend_backward_bf16(MemoryTape& tape, const LayerSizes& s) {
  const int64_t copied = s.one_asks ? 0 : s.padded_a();
  const int64_t dropped = s.attention_dropout ? s.padded_scores : 0;
  tape.take16(copied); // of the context, by head
  tape.take16(dropped);
  tape.take16(s.padded_n()); // of values, by head
  tape.give16(dropped);
  tape.take16(s.padded_scores); // of probabilities
  // Of all three, by head and back.
  tape.take16(s.padded_a() + (s.one_asks ? 0 : s.a()));
  tape.take16(s.padded_n() + 2 * s.n());
  // By head, and of probabilities.
  tape.give16(s.padded_scores + s.padded_a() + 2 * s.padded_n());
  tape.give16(copied); // of the context, by head
  if (s.one_asks) {
    tape.take16(s.a()); // queries' is not copied back
  }
  // Of the context; saved.
  tape.give16(s.a() + s.padded_a() + 2 * s.padded_n() + s.padded_scores);
}

void layer_backward_bf16(MemoryTape& tape, const LayerSizes& s) {
  const int64_t h = s.hidden;
  norm_backward_bf16(tape, s);
  linear_backward_bf16(tape, s.asking, s.wide, h, false);
  tape.give16(s.a()); // of output
  tape.take16(s.w()); // of intermediate
  tape.give16(2 * s.w()); // of the activation; its saved input
  linear_backward_bf16(tape, s.asking, h, s.wide, true);
  tape.give16(s.w()); // of intermediate
  tape.give(s.a()); // into the residual's
  norm_backward_bf16(tape, s);
  linear_backward_bf16(tape, s.asking, h, h, false);
  tape.give16(s.a()); // of attention.output
  attend_backward_bf16(tape, s);
  // Beside the residual's gradient, which becomes the input's. Query, key, value.
  if (s.asking != s.rows) {
    linear_backward_bf16(tape, s.asking, h, h, true);
    tape.give16(s.a());
    tape.give(s.a()); // into the residual's
    tape.take(s.n()); // scattered into all
    tape.give(s.a());
  } else {
    linear_backward_bf16(tape, s.asking, h, h, false);
    tape.give16(s.a());
    tape.take16(s.n()); // the saved input goes with the last of three
  }
  linear_backward_bf16(tape, s.rows, h, h, false);
  tape.give16(s.n());
  tape.take16(s.n()); // the saved input is the next one's too
  if (s.asking == s.rows) {
    tape.give16(s.n()); // added to the query's
  }
  linear_backward_bf16(tape, s.rows, h, h, false);
  tape.give16(2 * s.n()); // of value; added
  tape.take(s.n()); // converted back
  tape.give16(s.n());
  tape.give(s.n()); // into the residual's
}

} // namespace hasten::detail
