"""Prints tests/text/wordpiece_golden.h: texts and the ids transformers gives them.

Run: python tools/golden/wordpiece_golden.py > tests/text/wordpiece_golden.h

The vocabulary is made here: special tokens, some English pieces, and the characters of
the texts themselves as the reference normalises them, but for one in seven, so that
[UNK] occurs too. Characters are of Unicode 3.2 where the script picks them: the
reference's tables are old, and newer characters can differ between implementations.
"""

import json
import sys
import unicodedata
import zlib

import tokenizers
import transformers
from transformers import BertTokenizerFast

CONFIGS = {
    "uncased": dict(do_lower_case=True),
    "cased": dict(do_lower_case=False),
    "lower_with_accents": dict(
        do_lower_case=True, strip_accents=False, tokenize_chinese_chars=False
    ),
}
SPECIAL = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PIECES = """the a un ##aff ##able hello world ##ing play ##ed ##s movie good ##ness Good The
review ##er caf cafe ##é fiancé ##e straße strasse ##sse İstanbul istanbul σοφος σοφοσ ##ly no
##t it ' don isn . , ! ## # hug ##ging face ##' 2024 20 ##24 ##00 won ##der ##ful""".split()

CATEGORIES = [
    "Lu", "Ll", "Lt", "Lm", "Lo", "Mn", "Mc", "Me", "Nd", "Nl", "No", "Pc", "Pd", "Ps", "Pe",
    "Pi", "Pf", "Po", "Sm", "Sc", "Sk", "So", "Zs", "Zl", "Zp", "Cc", "Cf", "Co",
]

LANGUAGES = [
    "The movie isn't good, it's wonderful!", "Die Straße heißt GROẞE Straße über Öl",
    "L'été déjà passé, où êtes-vous? Ça va, naïve Noël", "El niño comió ¿qué? ¡Olé! mañana",
    "Příliš žluťoučký kůň úpěl ďábelské ódy", "Zażółć gęślą jaźń ŁÓDŹ", "Þetta er íslenska, ÐÆÖ",
    "İstanbul'da ılık IŞIK ışık DİYARBAKIR", "Σοφὸς ὁ σοφός ΟΔΥΣΣΕΥΣ ΣΑΣ Ἀθῆναι ᾧ ᾼ",
    "Съешь ещё этих мягких французских булок, ЁЖИК й Й", "Їжак і ґудзик, Ўладзімір",
    "בְּרֵאשִׁית בָּרָא אֱלֹהִים׃ שלום״ לך", "السَّلَامُ عَلَيْكُمْ، كيف؟ آأإ", "यह हिन्दी है। क्षत्रिय ज़रा ड़",
    "বাংলা ভাষা কো ড়", "தமிழ் மொழி கொ", "ภาษาไทย น้ำ กำ", "ພາສາລາວ", "မြန်မာဘာသာ", "ქართული ენა Ⴀ",
    "Հայերեն լեզու և։", "አማርኛ ቋንቋ።", "ᏣᎳᎩ ꮳꮃꭹ", "ខ្មែរ ភាសា", "བོད་སྐད།", "ᠮᠣᠩᠭᠣᠯ ᠪᠢᠴᠢᠭ᠌",
    "한국어 문장입니다. 가힣 각", "\u1112\u1161\u11ab\u1100\u1173\u11af jamo", "日本語のテキスト、カタカナとひらがな。ガガ",
    "我爱北京天安门,hello世界。", "繁體中文「測試」", "Tiếng Việt Đặng Ệ ữ", "ʻŌlelo Hawaiʻi", "Yorùbá ẹ̀kọ́",
    "𐐀𐐨 Deseret", "ꦗꦮ", "മലയാളം", "ಕನ್ನಡ ಕೊ", "తెలుగు", "ગુજરાતી", "ਪੰਜਾਬੀ ਸ਼", "සිංහල කො", "ⵜⴰⵎⴰⵣⵉⵖⵜ", "Ⲁⲁ ϢϢ",
]

EDGES = [
    "", " ", "\t\n\r", "a\tb\nc\rd\r\ne", "a\u00a0b\u2003c\u3000d\u202fe\u1680f", "a\u2028b\u2029c\u0085d\u000be\u000cf",
    "zero\u200bwidth\u200cnon\u200djoiner\ufeffbom", "soft\u00adhyphen", "a\u0000b\ufffdc\u0001\u001f\u007f\u009fd",
    "e\u0301 e\u0300\u0323 e\u0323\u0300 é ệ", "\u0301alone", "a\u0301\u0001\u0323b", "a\u0323\u200d\u0301b", "\u0344 \u0340 \u0341",
    "İ I ı i I\u0307 i\u0307", "Σ σ ς ΑΣ ΑΣΑ", "ß ẞ SS ss", "K k \u212a \u212b Å å", "ﬁ ﬂ ﬃ ﬅ", "Ａｂｃ１２３！", "x² H₂O ½ Ⅷ ⅷ ①",
    "Ǆ ǅ ǆ Ǉ ǈ", "\u037e \u1fef \u2000\u2001x", "Ω Ω µ μ", "ŉ ǰ ΐ ẖ", "Ⅳ ⓐ Ⓐ", "\u1e9e\u0130\u0131\u017f", "ſ long s",
    "😀 👍🏽 👨‍👩‍👧‍👦 🇩🇪 ❤️ ☃", "word😀word", "(╯°□°)╯︵ ┻━┻", "a😀\u200d😀b",
    "don't can't won't it's", "U.S.A. e.g. 3.14 1,000", "$5 £5 €5 ¥5 ₹5", "a+b=c <tag> x^y `code` ~tilde |pipe|",
    "«quoted» “quoted” ‘q’ „q‟ ‹q›", "dash-dash–dash—dash―dash‐dash", "ellipsis… ‥ ․", "§ ¶ † ‡ • ° © ® ™", "__init__ snake_case",
    "!!!???...", "#hashtag ##pieces @user", "http://example.com/a?b=c&d=e#f", "me@example.org", "C:\\path\\file",
    "unaffable unaffablely playing played plays goodness Goodness", "huggingface hugging faces", "20242024 2000 20",
    "x" * 99, "x" * 100, "x" * 101, "é" * 100, "e\u0301" * 100, "é" * 101, "中" * 101, "x" * 100 + " " + "y" * 101 + " z",
    "x" * 101 + "." + "the", "the" * 33 + "a", "\u0301" * 101 + "the", "Ω" * 101,
    "[CLS] in [SEP] text [MASK] [PAD] [UNK]", "[MASK]", "x[MASK]y", "[mask] [Mask] [cls]", "[[MASK]]", "[MASK", "[unused0]",
    "e[SEP]\u0301x", "[SEP][SEP]", "caf[MASK]é", " [SEP] ",
    "中文abc中文", "\u3400\u4dbf\u4e00\u9fff", "\uf900\ufaff \ufa10 豈", "\U00020000\U0002a6df x", "\U0002a700\U0002b73f\U0002b740\U0002b81f",
    "\U0002b820\U0002b91f\U0002b920\U0002ceaf", "\U0002f800\U0002fa1d", "々〆〇ヶ", "ㄅㄆㄇ ﾊﾝｶｸ", "、。「」『』【】・", "a中b 中 中中",
    "\u0378\ufdd0\ufffe", "\ue000\uf8ff\U000f0000", "\U000e0001\U000e0020", "\u061c\u2066\u2069\u202a\u202e", "\u06dd\u070f\u180e",
    "café CAFÉ Cafe\u0301", "fiancé fiancée FIANCÉE", "straße STRASSE", "istanbul İstanbul ISTANBUL", "σοφος σοφός ΣΟΦΟΣ",
    "résumé naïve coöperate", "a\u20ddb \u20e3 1\ufe0f\u20e3", "\u0903\u093e\u0940 \u302e\u0301\u302fx", "a\u302e\u0323\u302fb",
    "\U0001d165\U0001d16e\U0001d15e", "ᾳ\u0345 ᾼ", "Ѐ ѐ Ё", "\u0958\u0959", "\u09dc\u0b5c", "\u2adc \ufb1d \ufb2a",
    "\u1100\u1161\u11a8 각", "\uac00\uac01\ud7a3", "A\u030a\u0323 Ạ\u030a", "x\u0338= ≠ ≮", "tab\tend\t", "  leading and trailing  ",
    "new\nlines\n\nmany", "a.b.c", "...", "'", "''''", "\"quoted\"", "100%", "50€", "a/b", "a\\b", "{}[]()", "<br /><br />",
    "one\u2009thin\u200aspace", "word\u2060joiner", "\u2061\u2062\u2063", "a\u034fb", "a\u180bb\ufe0fc\U000e0100d",
    "I loved it 10/10!!! would WATCH again :)", "worst. movie. ever.", "it was sooooo goooood", "TheMovieWasGood", "THE GOOD",
    "\u200e\u200fmarks", "\ufff9a\ufffab\ufffb", "no-break\u2011hyphen", "\u00b7 \u0387 \u30fb", "\u02bc \u2019 \u0027",
]


def category_texts():
    old = unicodedata.ucd_3_2_0
    texts = []
    for category in CATEGORIES:
        points = [
            c
            for c in map(chr, range(0x80 if category not in ("Cc",) else 1, 0x110000))
            if unicodedata.category(c) == category == old.category(c)
        ]
        picks = sorted({points[0], points[len(points) // 2], points[-1]})
        texts += [f"a{c}b {c} {c}{c}1" for c in picks]
    return texts


def make_vocab(texts):
    words = set()
    for config in CONFIGS.values():
        reference = BertTokenizerFast(vocab={t: i for i, t in enumerate(SPECIAL)}, **config)
        backend = reference.backend_tokenizer
        for text in texts:
            normal = backend.normalizer.normalize_str(text)
            words |= {w for w, _ in backend.pre_tokenizer.pre_tokenize_str(normal)}
    characters = sorted({c for word in words for c in word})
    kept = [c for c in characters if ord(c) < 128 or zlib.crc32(c.encode()) % 7]
    vocab = SPECIAL + PIECES + [f"{p}{c}" for p in ("", "##") for c in kept]
    return list(dict.fromkeys(vocab))


def main():
    texts = list(dict.fromkeys(category_texts() + LANGUAGES + EDGES))
    vocab = make_vocab(texts)
    references = {
        name: BertTokenizerFast(vocab={t: i for i, t in enumerate(vocab)}, **config)
        for name, config in CONFIGS.items()
    }
    versions = f"transformers {transformers.__version__}, tokenizers {tokenizers.__version__}"
    print(f"// Written by tools/golden/wordpiece_golden.py with {versions}.")
    print("#pragma once\n\nnamespace hasten::golden {\n")
    print('inline constexpr const char* kWordpiece = R"json(')
    print('{"configs": ' + json.dumps(CONFIGS) + ',\n"vocab": ' + json.dumps(vocab) + ',\n"cases": [')
    lines = []
    for text in texts:
        ids = {name: reference(text)["input_ids"] for name, reference in references.items()}
        lines.append(json.dumps({"text": text, **ids}, separators=(",", ":")))
    print(",\n".join(lines))
    print('],\n"truncated": [')
    lines = []
    for text in ("", "the", "the movie isn't good", "unaffable " * 10, "[SEP] the [MASK] a"):
        for length in (2, 3, 4, 5, 8):
            encoded = references["uncased"](text, truncation=True, max_length=length)
            case = {"text": text, "max_length": length, "ids": encoded["input_ids"]}
            lines.append(json.dumps(case, separators=(",", ":")))
    print(",\n".join(lines))
    print(']}\n)json";\n\n} // namespace hasten::golden')
    print(f"{len(texts)} texts, {len(vocab)} pieces", file=sys.stderr)


if __name__ == "__main__":
    main()
