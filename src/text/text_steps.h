// The steps of a tokenizer before and after its model: normalizers, pre-tokenizers, post-processors
// and decoders of a tokenizer.json. Each list of steps runs from the first to the last.
// Threading: steps may be called from several threads.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "aligned_text.h"
#include "tokenizer_part.h"

namespace hasten::detail {

using NormalizerStep = std::function<void(AlignedText&)>;

/// A word: bytes [begin, end) of Words::text.
struct Word {
  uint32_t begin = 0;
  uint32_t end = 0;
  int32_t added = -1; // id of the added token that this is
};

struct Words {
  AlignedText text{};
  std::vector<Word> words{};
  std::vector<TextSpan> matches{}; // working memory
};

using PreTokenizerStep = std::function<void(Words&)>;
using DecoderStep = std::function<void(std::vector<std::string>&)>;

/// What goes into the ids of a text or a pair, in order.
struct TemplatePiece {
  int sequence = -1; // 0: the text; 1: its pair; -1: `ids`
  std::vector<int32_t> ids{};
  int64_t type_id = 0;
};

struct PostProcessor {
  /// If set, offsets leave white space out. The value: the text got a space in front.
  std::optional<bool> trim_prefix_space{};
  std::vector<TemplatePiece> single{{.sequence = 0}};
  std::vector<TemplatePiece> pair{{.sequence = 0}, {.sequence = 1, .type_id = 1}};
};

struct PreTokenizer {
  std::vector<PreTokenizerStep> steps{};
  /// The last part is ByteLevel, and its writing of bytes by characters is left to the model.
  bool model_writes_bytes = false;
  /// A step needs to know where a word begins in the original text.
  bool needs_origins = false;
};

/// Appends the steps of a part. All throw InputError for a part that hasten does not have and name
/// it.
void read_normalizer(const TokenizerPart& part, std::vector<NormalizerStep>& steps);
/// `bpe`: the model can write bytes itself.
PreTokenizer read_pre_tokenizer(const TokenizerPart& part, bool bpe);
PostProcessor read_post_processor(const TokenizerPart& part);
void read_decoder(const TokenizerPart& part, std::vector<DecoderStep>& steps);

/// Puts a space in front of each word that has none and is no added token.
void prefix_spaces(Words& words);

/// Joins contractions and punctuation to the word before; `with_do_not` as the decoder does it.
void clean_up_spaces(std::string& text, bool with_do_not);

/// XLM-RoBERTa's table of replacements, which SentencePiece has compiled.
NormalizerStep precompiled_normalizer(const TokenizerPart& part);
/// {"type": "BertNormalizer", …}.
NormalizerStep bert_normalizer(const TokenizerPart& part);

} // namespace hasten::detail
