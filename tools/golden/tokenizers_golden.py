"""Writes tests/golden/tokenizers: small tokenizers of each kind and what Python makes of texts.

Run: python tools/golden/tokenizers_golden.py tests/golden/tokenizers

Each KIND has the parts of the family's published tokenizer.json and a vocabulary that is trained
here on our own texts. KIND.json is the tokenizer. KIND.bin has, little-endian: for each of TEXTS
texts a CRC-32 (u32) of ids, byte offsets, types and decoded text; for each of PAIRS pairs one of
the truncated pair; and for each of FULL texts its number of ids (u16) and the ids (u16).
words.bin has for each kind in the order of KINDS: for each of SPLIT texts a CRC-32 of the word ids and
one of the text given as words; and for each of SHOWN texts as words its number of ids (u16), the ids
(u16) and the words (i16, -1 for None). With --words FOLDER only this file is made, of FOLDER's tokenizers.
texts.json has the tables of which tests/text/tokenizer_texts.h makes the same texts. With --texts FILE the
texts go to a file, one JSON string a line, for a comparison by hand.
"""

import json
import pathlib
import struct
import sys
import tempfile
import unicodedata
import zlib

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXTS, PAIRS, FULL, LONGEST = 5000, 1000, 300, 16
SPLIT, SHOWN = 300, 20
LARGE = None  # benchmarks/peers/tokenizer_speed.py sets it: the size of the vocabulary, and texts

# First and last code point. All are in Unicode 6.0, and each range is of assigned ones.
RANGES = [
    (0x61, 0x7A), (0x41, 0x5A), (0x30, 0x39), (0x21, 0x2F), (0x3A, 0x40), (0x5B, 0x60), (0x7B, 0x7E),
    (0xA1, 0xAC), (0xAE, 0xFF), (0x100, 0x17F), (0x180, 0x1BF), (0x1E00, 0x1EFF), (0x3B1, 0x3C9), (0x391, 0x3A1),
    (0x1F00, 0x1F15), (0x400, 0x45F), (0x531, 0x556), (0x561, 0x586), (0x5D0, 0x5EA), (0x5B0, 0x5BC), (0x621, 0x64A),
    (0x64B, 0x652), (0x660, 0x669), (0x905, 0x939), (0x93E, 0x94D), (0x966, 0x96F), (0x995, 0x9A8), (0xB95, 0xB95),
    (0xBBE, 0xBC2), (0xBCA, 0xBCD), (0xE01, 0xE3A), (0xE40, 0xE4E), (0x10D0, 0x10F0), (0x1100, 0x1112), (0x1161, 0x1175), (0x11A8, 0x11C2),
    (0xAC00, 0xD7A3), (0x3041, 0x3096), (0x30A1, 0x30FA), (0x3001, 0x3020), (0x4E00, 0x9FA5), (0x3400, 0x4DB5), (0x20000, 0x2A6D6),
    (0xF900, 0xFA2D), (0x1200, 0x1248), (0x1780, 0x17B3), (0x1820, 0x1877), (0x13A0, 0x13F4), (0xFF01, 0xFF5E),
    (0xFF66, 0xFF9F), (0x1D400, 0x1D454), (0x2460, 0x24FF), (0x2153, 0x2188), (0x2074, 0x208E), (0x20A0, 0x20B5),
    (0x2190, 0x21FF), (0x2200, 0x22FF), (0x2500, 0x257F), (0x2701, 0x2704), (0x1F600, 0x1F610), (0x1F300, 0x1F320), (0x1F1E6, 0x1F1FF),
    (0x300, 0x34E), (0x300, 0x304), (0xFB00, 0xFB06), (0xFE70, 0xFE72), (0x2010, 0x2027), (0x2030, 0x205E), (0x10400, 0x1044F),
]  # fmt: skip
ODD = [
    0x1, 0x8, 0xB, 0xC, 0xE, 0x1F, 0x7F, 0x80, 0x85, 0x9F, 0xA0, 0xAD, 0x1680, 0x2003, 0x2009, 0x200A, 0x200B, 0x200C,
    0x200D, 0x200E, 0x202A, 0x202E, 0x2028, 0x2029, 0x202F, 0x2060, 0x3000, 0xFEFF, 0xFFFD, 0xE000, 0xF8FF, 0xFE0F, 0x20E3,
    0x1F3FB, 0x1F3FF, 0xE0001, 0xF0000, 0x130, 0x131, 0x149, 0x1F0, 0x1E9E, 0x212A, 0x212B, 0x3A3, 0x3C2, 0x344, 0x2581,
]  # fmt: skip
WORDS = [
    " ", " ", " ", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u3000", "don't", "I'll", "WE'RE", "it's", "'S",
    "can't've", "123456789", "3.14", "1,000", "$5.00", "the", "The", "movie", " was", " good", "Hello", " world", "!", "...", "?!", ",",
    ".", "e\u0301", "A\u030a\u0323", "\u1112\u1161\u11ab", "👨‍👩‍👧", "👍🏽", "❤️", "🇩🇪", "שָׁלוֹם", "مَرْحَبًا", "नमस्ते", "สวัสดี", "こんにちは", "안녕하세요",
    "你好世界", "Привет", "Ελλάδα", "İstanbul", "straße", "ﬁn", "Ａｂｃ", "x²", "½", "<mask>", " <mask> ", "[MASK]", "<s>", "</s>", "<unk>",
    "[SEP]", "[CLS]", "<|endoftext|>", "<|begin_of_text|>", "<|im_start|>", "<word>", "a<word>", "New", "new", "_", "__init__", "http://a.b/c?d=e",
    "▁", "##", "<0x41>", "foo(bar)", "\"q\"", "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
]  # fmt: skip

NEVER_UTF8 = [0xC0, 0xC1, *range(0xF5, 0x100)]


class Numbers:
    def __init__(self, seed):
        self.state = seed

    def __call__(self, below):
        self.state = (self.state * 6364136223846793005 + 1442695040888963407) % 2**64
        return (self.state >> 33) % below


def text_bytes(number, seed=1):
    """The bytes of text `number`; one in eight texts is not UTF-8."""
    draw = Numbers(seed * 1000003 + number)
    out = bytearray()
    for _ in range(draw(LONGEST)):
        kind = draw(8)
        if kind < 4:
            out += WORDS[draw(len(WORDS))].encode()
        elif kind < 7:
            first, last = RANGES[draw(len(RANGES))]
            for _ in range(1 + draw(6)):
                out += chr(first + draw(last - first + 1)).encode()
        else:
            out += chr(ODD[draw(len(ODD))]).encode()
    if draw(8) == 0:
        for _ in range(1 + draw(3)):
            at = draw(len(out) + 1)
            byte = NEVER_UTF8[draw(len(NEVER_UTF8))]
            out[at : at + draw(2)] = bytes([byte])
    return bytes(out)


def text_of(number, seed=1):
    return text_bytes(number, seed).decode("utf-8", errors="replace")


SENTENCES = """The movie isn't good, it's wonderful! I'd watch it 10 times; you won't, and they've said so.
Hello world, this is a test of the tokenizer 2024. We're going to the cinema and I'll pay $5.00 for it.
Die Straße heißt GROẞE Straße über Öl. L'été déjà passé, où êtes-vous? Ça va, naïve Noël. El niño comió ¿qué? mañana
Příliš žluťoučký kůň. Zażółć gęślą jaźń. İstanbul'da ılık. Σοφὸς ὁ σοφός. Съешь ещё этих мягких французских булок. Привет мир
שלום עולם السلام عليكم नमस्ते दुनिया ภาษาไทย 한국어 문장입니다 日本語のテキスト 我爱北京天安门 你好世界 ქართული հայերեն አማርኛ
def f(x): return x ** 2 + 1  # comment
New new New York <word> words word's world""".split("\n")


def corpus(generated):
    return SENTENCES * 20 + [text_of(number, seed=2) for number in range(generated)]


def charsmap():
    """A table of replacements as SentencePiece compiles it, of rules of ours."""
    from sentencepiece import sentencepiece_model_pb2  # needs protobuf

    rules = {}
    singles = [*range(0xFF01, 0xFF5F), *range(0xFF66, 0xFFA0), *range(0x2460, 0x2474), *range(0xFB00, 0xFB07), *range(0x2153, 0x215F), 0xB2, 0xBD]
    for code in singles:
        rules[chr(code)] = unicodedata.normalize("NFKC", chr(code))
    for code in [0xA0, 0x1680, 0x2003, 0x2009, 0x200A, 0x202F, 0x3000, 0x9, 0xA, 0xD, 0x2028, 0x2029]:
        rules[chr(code)] = " "
    for code in [*range(1, 9), 0xB, 0xC, *range(0xE, 0x20), 0x7F, 0x8F, 0x9F, 0x200B, 0x200E, 0x200F, 0xFEFF]:
        rules[chr(code)] = ""
    for base in "AEIOUaeioucn":
        for mark in map(chr, range(0x300, 0x330)):
            if len(unicodedata.normalize("NFKC", base + mark)) == 1:
                rules[base + mark] = unicodedata.normalize("NFKC", base + mark)
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        lines = ["%s\t%s" % tuple(" ".join(f"{ord(c):X}" for c in side) for side in rule) for rule in rules.items()]
        (folder / "rules.tsv").write_text("\n".join(lines) + "\n")
        (folder / "text.txt").write_text("\n".join(SENTENCES * 5), encoding="utf-8")
        sentencepiece.SentencePieceTrainer.train(
            input=str(folder / "text.txt"), model_prefix=str(folder / "m"), vocab_size=250, hard_vocab_limit=False,
            normalization_rule_tsv=str(folder / "rules.tsv"), minloglevel=2, num_threads=1)  # fmt: skip
        model = sentencepiece_model_pb2.ModelProto()
        model.ParseFromString((folder / "m.model").read_bytes())
        return model.normalizer_spec.precompiled_charsmap


GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def special(*names, **options):
    return [AddedToken(name, special=True, normalized=False, **options) for name in names]


def trained(tokenizer, trainer, generated=1500):
    if LARGE:
        trainer.vocab_size = LARGE[0]
    tokenizer.train_from_iterator(LARGE[1] if LARGE else corpus(generated), trainer)
    return tokenizer


def bert(lowercase=True):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trained(tokenizer, trainers.WordPieceTrainer(vocab_size=1500, limit_alphabet=500, special_tokens=names, show_progress=False))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])  # fmt: skip
    return tokenizer


def with_first_pieces(tokenizer, names, **model):
    """The unigram tokenizer with these pieces first, as SentencePiece has them."""
    description = json.loads(tokenizer.to_str())
    rest = [piece for piece in description["model"]["vocab"] if piece[0] not in names]
    description["model"].update(vocab=[[name, 0.0] for name in names] + rest, unk_id=names.index("<unk>"), **model)
    description["added_tokens"] = []
    return Tokenizer.from_str(json.dumps(description))


def byte_level(normalizer, pre, specials, **model):
    tokenizer = Tokenizer(models.BPE(**model))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=1000, initial_alphabet=alphabet, special_tokens=specials, show_progress=False))


def roberta():
    names = special("<s>", "<pad>", "</s>", "<unk>") + special("<mask>", lstrip=True)
    tokenizer = byte_level(None, pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True), names, continuing_subword_prefix="", end_of_word_suffix="")
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets=True, add_prefix_space=False)
    return tokenizer


def gpt2():
    tokenizer = byte_level(None, pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True), special("<|endoftext|>"))
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=True, trim_offsets=False)
    return tokenizer


def gpt2_prefix():
    tokenizer = byte_level(None, pre_tokenizers.ByteLevel(add_prefix_space=True), special("<|endoftext|>"))
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=True, trim_offsets=True)
    tokenizer.add_tokens([AddedToken("<word>", single_word=True), AddedToken("new", rstrip=True), AddedToken("New", lstrip=True, rstrip=True)])
    return tokenizer


def modernbert():
    names = special("<|padding|>", "<|endoftext|>", "[UNK]", "[CLS]", "[SEP]", "[PAD]") + special("[MASK]", lstrip=True)
    tokenizer = byte_level(normalizers.NFC(), pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True), names)
    tokenizer.add_tokens([AddedToken(" " * count, normalized=True) for count in range(2, 25)])
    ids = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0", pair="[CLS]:0 $A:0 [SEP]:0 $B:0 [SEP]:0", special_tokens=ids)  # fmt: skip
    return tokenizer


def llama3():
    pre = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(GPT4 % "{1,3}"), "isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=True, use_regex=False)])  # fmt: skip
    tokenizer = byte_level(None, pre, [], ignore_merges=True)
    tokenizer.add_special_tokens(special("<|begin_of_text|>", "<|end_of_text|>"))
    begin = "<|begin_of_text|>"
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(add_prefix_space=True, trim_offsets=True),
        processors.TemplateProcessing(single=f"{begin}:0 $A:0", pair=f"{begin}:0 $A:0 {begin}:1 $B:1",
                                      special_tokens=[(begin, tokenizer.token_to_id(begin))])])  # fmt: skip
    return tokenizer


def qwen():
    pre = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(GPT4 % ""), "isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)])  # fmt: skip
    tokenizer = byte_level(normalizers.NFC(), pre, [], continuing_subword_prefix="", end_of_word_suffix="")
    tokenizer.add_special_tokens(special("<|endoftext|>", "<|im_start|>", "<|im_end|>"))
    tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False)
    return tokenizer


def byte_fallback(metaspace):
    """Llama 2 and Mistral: the normalizer writes spaces, or (metaspace) the pre-tokenizer does."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    names = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trained(tokenizer, trainers.BpeTrainer(vocab_size=1000, limit_alphabet=300, special_tokens=names, show_progress=False))
    description = json.loads(tokenizer.to_str())
    description["added_tokens"] = [token for token in description["added_tokens"] if token["id"] < 3]
    tokenizer = Tokenizer.from_str(json.dumps(description))
    if metaspace:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.pre_tokenizer = None
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s>:0 $A:0", pair="<s>:0 $A:0 <s>:1 $B:1", special_tokens=[("<s>", 1)])
    return tokenizer


def xlm_roberta():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Precompiled(charsmap()), normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    tokenizer.decoder = decoders.Metaspace()
    trained(tokenizer, trainers.UnigramTrainer(vocab_size=1500, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False), 150)
    names = ["<s>", "<pad>", "</s>", "<unk>"]
    tokenizer = with_first_pieces(tokenizer, names)
    tokenizer.add_special_tokens(special(*names) + special("<mask>", lstrip=True))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)])  # fmt: skip
    return tokenizer


def other_unigram():
    """Parts that no kind above has, with tokens of bytes."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Strip(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.Punctuation("merged_with_previous"),
        pre_tokenizers.Metaspace(prepend_scheme="never")])  # fmt: skip
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    trained(tokenizer, trainers.UnigramTrainer(vocab_size=1000, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False), 100)
    tokenizer = with_first_pieces(tokenizer, ["<unk>"] + [f"<0x{byte:02X}>" for byte in range(256)], byte_fallback=True)
    tokenizer.add_tokens([AddedToken("WORLD", normalized=True, lstrip=True), AddedToken("the", normalized=True, single_word=True)])
    return tokenizer


def other_bpe():
    """Parts that no kind above has, with marks at the ends of words."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex("[0-9]"), "#"), normalizers.NFD()])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.Split("o", "merged_with_next"), pre_tokenizers.Split(Regex("l+"), "contiguous"),
        pre_tokenizers.Split(Regex("[^'x]+"), "removed", invert=True)])  # fmt: skip
    tokenizer.decoder = decoders.BPEDecoder()
    return trained(tokenizer, trainers.BpeTrainer(vocab_size=1000, limit_alphabet=300, end_of_word_suffix="</w>", special_tokens=["<unk>"], show_progress=False))


def other_word_piece():
    """WordPiece without BERT's way to split, and BERT's post-processor."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=20))
    tokenizer.normalizer = normalizers.BertNormalizer(clean_text=False, handle_chinese_chars=True, strip_accents=True, lowercase=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Punctuation("contiguous")])
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trained(tokenizer, trainers.WordPieceTrainer(vocab_size=1000, limit_alphabet=300, special_tokens=names, show_progress=False))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


KINDS = {
    "bert": bert, "bert_cased": lambda: bert(False), "roberta": roberta, "gpt2": gpt2, "gpt2_prefix": gpt2_prefix,
    "modernbert": modernbert, "llama3": llama3, "qwen": qwen, "llama2": lambda: byte_fallback(False),
    "mistral": lambda: byte_fallback(True), "xlm_roberta": xlm_roberta, "other_unigram": other_unigram,
    "other_bpe": other_bpe, "other_word_piece": other_word_piece,
}  # fmt: skip


def described(encoding, texts):
    """What the CRC is of: ids, byte offsets, types and special tokens."""
    at = [[0], [0]]
    for number, text in enumerate(texts):
        for character in text:
            at[number].append(at[number][-1] + len(character.encode()))
    lines = []
    for id, offsets, type_id, mask, sequence in zip(
        encoding.ids, encoding.offsets, encoding.type_ids, encoding.special_tokens_mask, encoding.sequence_ids
    ):
        begin, end = (at[sequence or 0][offset] for offset in offsets)
        lines.append(f"{id} {begin} {end} {type_id} {mask}\n")
    return "".join(lines)


def single(tokenizer, number):
    text = text_of(number)
    encoding = tokenizer.encode(text)
    shown = tokenizer.decode(encoding.ids, skip_special_tokens=number % 2 == 0)
    return described(encoding, [text]) + shown, encoding.ids


def pair(tokenizer, number):
    texts = [text_of(number), text_of(number + 1)]
    tokenizer.enable_truncation(
        4 + number % 91, strategy=["longest_first", "only_first", "only_second"][number % 3],
        direction=["right", "left"][number // 3 % 2])  # fmt: skip
    try:
        return described(tokenizer.encode(*texts), texts)
    except Exception:
        return "error"
    finally:
        tokenizer.no_truncation()


def after_spaces(description):
    """The tokenizer with add_prefix_space=True, if its words are bytes."""
    pre = description["pre_tokenizer"] or {"type": None}
    if pre["type"] == "ByteLevel":
        pre["add_prefix_space"] = True
    elif pre["type"] == "Sequence" and pre["pretokenizers"][-1]["type"] == "ByteLevel":
        # The pattern before ByteLevel splits the word with its space.
        steps = [description["normalizer"]] if description["normalizer"] else []
        description["normalizer"] = {"type": "Sequence", "normalizers": steps + [{"type": "Prepend", "prepend": " "}]}
    post = description["post_processor"] or {}
    if post.get("type") in ("ByteLevel", "RobertaProcessing"):
        post["add_prefix_space"] = True
    return Tokenizer.from_str(json.dumps(description))


def described_words(encoding, words):
    lines = []
    for id, (begin, end), mask, word in zip(encoding.ids, encoding.offsets, encoding.special_tokens_mask, encoding.word_ids):
        text = "" if word is None else words[word]
        begin, end = (len(text[:offset].encode()) for offset in (begin, end))
        lines.append(f"{id} {begin} {end} {mask} {-1 if word is None else word}\n")
    return "".join(lines)


def write_words(folder):
    data = b""
    for name in KINDS:
        description = (folder / f"{name}.json").read_text()
        plain, spaced = Tokenizer.from_str(description), after_spaces(json.loads(description))
        crcs, shown = [], b""
        for number in range(SPLIT):
            ids = plain.encode(text_of(number)).word_ids
            crcs.append(zlib.crc32(" ".join(str(-1 if id is None else id) for id in ids).encode()))
            if number % 2:
                spaced.enable_truncation(4 + number % 91, direction=["right", "left"][number // 2 % 2])
            words = text_of(number).split(" ")
            encoding = spaced.encode(words, is_pretokenized=True)
            spaced.no_truncation()
            crcs.append(zlib.crc32(described_words(encoding, words).encode()))
            if number < SHOWN:
                count = len(encoding.ids)
                words = [-1 if word is None else word for word in encoding.word_ids]
                shown += struct.pack(f"<{count + 1}H{count}h", count, *encoding.ids, *words)
        data += struct.pack(f"<{len(crcs)}I", *crcs) + shown
    (folder / "words.bin").write_bytes(data)


def main():
    if "--words" in sys.argv:
        return write_words(pathlib.Path(sys.argv[-1]))
    if "--texts" in sys.argv:
        lines = [json.dumps(text_of(number)) for number in range(TEXTS + 1)]
        pathlib.Path(sys.argv[-1]).write_text("\n".join(lines) + "\n")
        return
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(exist_ok=True)
    tables = {"ranges": RANGES, "odd": ODD, "words": WORDS, "never": NEVER_UTF8, "longest": LONGEST}
    (folder / "texts.json").write_text(json.dumps(tables, separators=(",", ":")) + "\n")
    for name in sys.argv[2:] or KINDS:
        description = KINDS[name]().to_str()
        (folder / f"{name}.json").write_text(json.dumps(json.loads(description), ensure_ascii=False, separators=(",", ":")) + "\n")
        tokenizer = Tokenizer.from_str(description)
        singles = [single(tokenizer, number) for number in range(TEXTS)]
        pairs = [pair(tokenizer, number) for number in range(PAIRS)]
        crcs = [zlib.crc32(text.encode()) for text in [one for one, _ in singles] + pairs]
        data = struct.pack(f"<{len(crcs)}I", *crcs)
        for _, ids in singles[:FULL]:
            data += struct.pack(f"<{len(ids) + 1}H", len(ids), *ids)
        (folder / f"{name}.bin").write_bytes(data)
        print(name, tokenizer.get_vocab_size(), sum(len(ids) for _, ids in singles) / TEXTS, pairs.count("error"), file=sys.stderr)
    write_words(folder)


if __name__ == "__main__":
    main()
