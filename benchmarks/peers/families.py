"""Makes the folders of models that both sides fine-tune: shapes as published, random weights, and
tokenizers whose vocabularies are trained on the lines of TEXTS.

    families.py TEXTS FOLDER KIND…    KIND: distilbert, roberta, modernbert
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[2] / "tools/golden"))
import tokenizers_golden
import transformers
from transformers import AutoModel, PreTrainedTokenizerFast

PIECES = 16000
# The kind of tokenizer, the configuration, and the special tokens.
BERT = dict(unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]", pad_token="[PAD]", mask_token="[MASK]")
ROBERTA = dict(unk_token="<unk>", cls_token="<s>", sep_token="</s>", pad_token="<pad>", mask_token="<mask>")
KINDS = {
    "distilbert": ("bert", transformers.DistilBertConfig, {}, BERT),
    "roberta": ("roberta", transformers.RobertaConfig, dict(max_position_embeddings=514, type_vocab_size=1), ROBERTA),
    "modernbert": ("modernbert", transformers.ModernBertConfig, {}, BERT),
}


def main():
    transformers.utils.logging.set_verbosity_error()
    tokenizers_golden.LARGE = PIECES, pathlib.Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    for kind in sys.argv[3:]:
        pieces, config, shape, special = KINDS[kind]
        folder = pathlib.Path(sys.argv[2]) / kind
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers_golden.KINDS[pieces](), model_max_length=512, **special)
        ids = dict(pad_token_id=tokenizer.pad_token_id, bos_token_id=None, eos_token_id=None, cls_token_id=None, sep_token_id=None)
        transformers.set_seed(1)
        AutoModel.from_config(config(vocab_size=len(tokenizer), **shape, **ids)).save_pretrained(folder)
        tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main()
