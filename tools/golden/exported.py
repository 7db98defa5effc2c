#!/usr/bin/env python3
"""Writes tests/golden/exported: programs of torch.export, and what PyTorch computes with them.

Run: python tools/golden/exported.py tests/golden/exported

Each module is exported in training mode. golden.safetensors has for each case "encoder/0/": in/NAME,
out/NAME (in training), grad/PARAMETER of the sum of all outputs times sin(0, 1, 2, …),
after/BUFFER, and then eval/NAME.
"""

import json
import pathlib
import sys

import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim, export
from torch.export.pt2_archive._package import package_pt2


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x, mask, bias):
        b, t, h = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, h // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / (h // self.heads) ** 0.5 + bias
        scores = scores.masked_fill(~mask[:, None, None, :], torch.finfo(torch.float32).min)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, h))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.attention = Attention(width, heads)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x, mask, bias):
        x = x + self.dropout(self.attention(self.norm(x), mask, bias))
        return x + self.down(F.gelu(self.up(x)))


class Encoder(nn.Module):
    """Relative positions, blocks, one block called twice, a tied output layer, unused parameters."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(23, 8)
        self.positions = nn.Embedding(9, 2)
        self.layers = nn.ModuleList([Block(8, 2) for _ in range(2)])
        self.shared = nn.ModuleList([Block(8, 2)])
        self.head = nn.Linear(8, 23)
        self.head.weight = self.words.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.still = nn.Parameter(torch.ones(8))  # read without gradients
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, 8), requires_grad=False)
        self.register_buffer("frequencies", torch.linspace(0.1, 0.9, 8), persistent=False)

    def forward(self, input_ids, attention_mask=None, labels=None):
        t = input_ids.shape[1]
        x = self.words(input_ids)
        with torch.no_grad():
            x = x + torch.sin(torch.arange(t)[:, None] * self.frequencies) * self.still
        with torch.autocast("cpu", enabled=False):
            x = x * self.frozen
        near = (torch.arange(t)[None] - torch.arange(t)[:, None]).clamp(-4, 4) + 4
        bias = self.positions(near).permute(2, 0, 1)[None]
        mask = attention_mask.bool()
        for layer in self.layers:
            x = layer(x, mask, bias)
        for _ in range(2):
            x = self.shared[0](x, mask, bias)
        return {"logits": self.head(x), "more": (x.mean(1), x[:, : t // 2 + 1].amax(1))}


class Bottleneck(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)

    def forward(self, x):
        return F.relu(x + self.norm(self.conv(x)))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.blocks = nn.Sequential(Bottleneck(4), Bottleneck(4))
        self.dropout = nn.Dropout2d(0.0)
        self.classifier = nn.Linear(4, 5)

    def forward(self, images):
        return self.classifier(self.dropout(self.blocks(self.stem(images))).mean((2, 3)))


class Experts(nn.Module):
    """Each sample goes to two of four experts."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.up = nn.Parameter(torch.empty(4, 6, 5))
        self.down = nn.Parameter(torch.empty(4, 5, 6))

    def forward(self, x, scale):
        weights, chosen = self.router(x).softmax(-1).topk(2, -1)
        hidden = F.silu(torch.einsum("bi,bkio->bko", x, self.up[chosen]))
        y = torch.einsum("bko,bkoi->bki", hidden, self.down[chosen])
        return (weights[..., None] * y).sum(1) * scale, weights


class ReaderBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = nn.Linear(6, 6)

    def forward(self, x):
        return x + torch.tanh(self.dense(x))


class Encoding(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.layer = nn.ModuleList([ReaderBlock(), ReaderBlock()])

    def forward(self, ids):
        x = self.words(ids)
        for block in self.layer:
            x = block(x)
        return x


class Reader(nn.Module):
    """Named as a model of transformers is, with the folder that hasten.export writes."""

    def __init__(self):
        super().__init__()
        self.reader = Encoding()
        self.classifier = nn.Linear(6, 3)

    def forward(self, input_ids, attention_mask):
        mask = attention_mask[..., None].float()
        return {"logits": self.classifier((self.reader(input_ids) * mask).sum(1) / mask.sum(1))}


class Conv1D(nn.Module):
    """GPT-2's linear layer, whose weight is [in, out]."""

    def __init__(self, width, out):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, out))
        self.bias = nn.Parameter(torch.empty(out))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class WriterBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn = Conv1D(6, 18)
        self.out = nn.Linear(6, 6)

    def forward(self, x, mask):
        q, k, v = self.c_attn(x).chunk(3, -1)
        return x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


class Decoding(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.places = nn.Embedding(16, 6)
        self.layer = nn.ModuleList([WriterBlock(), WriterBlock()])

    def forward(self, ids, positions, apart):
        t = ids.shape[1]
        mask = torch.ones(t, t, dtype=torch.bool).tril()[None]
        if apart:  # a text begins where the position is not the next one
            text = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
            mask = mask & (text[:, :, None] == text[:, None, :])
        x = self.words(ids) + self.places(positions)
        for block in self.layer:
            x = block(x, mask)
        return x


class Writer(nn.Module):
    """A language model with a tied output layer. `apart`: it keeps the texts of a row apart."""

    def __init__(self, apart=True):
        super().__init__()
        self.apart = apart
        self.writer = Decoding()
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.writer.words.weight

    def forward(self, input_ids, position_ids):
        return {"logits": self.head(self.writer(input_ids, position_ids, self.apart))}


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x):
        y = F.dropout(x * self.weight, 0.5, self.training)
        z = F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None], dropout_p=0.5 if self.training else 0.0)
        return y, z[0, 0], F.dropout(x, 0.0, True)


class TwoModes(nn.Module):
    """Its own code asks for the mode."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        return {"y": torch.tanh(y) if self.training else 2 * y}


READER = {
    "architectures": ["ReaderForSequenceClassification"],
    "id2label": {"0": "bad", "1": "fair", "2": "good"},
    "max_position_embeddings": 32,
    "model_type": "golden-reader",
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "vocab_size": 11,
    "window": [1, 2],
}
WRITER = {
    "architectures": ["WriterLMHeadModel"],
    "max_position_embeddings": 16,
    "model_type": "golden-writer",
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "vocab_size": 11,
}

BATCH, TOKENS = {0: Dim.DYNAMIC}, {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}


def text(batch, length):
    ids = torch.arange(batch * length).mul(7).remainder(23).view(batch, length)
    mask = torch.arange(length)[None] < torch.arange(batch)[:, None] + length - batch + 1
    return {"input_ids": ids, "attention_mask": mask.long()}


def numbers(*shape):
    return torch.sin(torch.arange(torch.Size(shape).numel()) * 0.7).view(shape)


CASES = {
    "encoder": (Encoder, text(3, 5) | {"labels": None}, {"input_ids": TOKENS, "attention_mask": TOKENS, "labels": None}, [text(3, 5), text(1, 7), text(4, 2)]),
    "conv_net": (
        ConvNet,
        {"images": numbers(3, 3, 6, 6)},
        {"images": BATCH},
        [{"images": numbers(b, 3, 6, 6)} for b in (2, 1, 5)],
    ),
    "experts": (
        Experts,
        {"x": numbers(3, 6), "scale": numbers(6)},
        {"x": BATCH, "scale": {}},
        [{"x": numbers(b, 6), "scale": numbers(6)} for b in (2, 1, 4)],
    ),
    "dropped": (Dropped, {"x": numbers(3, 4)}, {"x": BATCH}, [{"x": numbers(6, 4)}]),
    "two_modes": (TwoModes, {"x": numbers(3, 4)}, {"x": BATCH}, [{"x": numbers(b, 4)} for b in (2, 1)]),
}


def make(cls):
    torch.manual_seed(5)
    model = cls()
    with torch.no_grad():
        for index, weight in enumerate(model.parameters()):
            if weight.requires_grad:
                weight.copy_(0.5 * torch.sin(torch.arange(weight.numel()) * 0.37 + index).view_as(weight))
    return model


def exported(model, example, shapes, train):
    program = export(model.train(train), (), example, dynamic_shapes=shapes)
    for module in program.graph_module.modules():
        for node in getattr(module, "graph", torch.fx.Graph()).nodes:  # no folder of this machine
            trace = node.meta.get("stack_trace")
            if trace:
                lines = [line for line in trace.splitlines() if line.strip().startswith("File ") and "forward" in line]
                own = [line for line in lines if "golden/exported.py" in line] or ['File "exported.py", line 1, in forward']
                node.meta["stack_trace"] = own[-1].replace(str(pathlib.Path(__file__).resolve()), "exported.py").strip()
            node.meta.pop("torch_fn", None)
    program._example_inputs = None
    return program


def flat(value, name=""):
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in flat(item, f"{name}.{key}".strip(".")).items()}
    if isinstance(value, tuple):
        return {k: v for i, item in enumerate(value) for k, v in flat(item, f"{name}.{i}".strip(".")).items()}
    return {name or "output": value}


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    golden = {}
    for name, (cls, example, shapes, inputs) in CASES.items():
        model = make(cls)
        programs = {"model": exported(model, example, shapes, True)}
        if cls is TwoModes:
            programs = {"train": programs["model"], "eval": exported(model, example, shapes, False)}
        package_pt2(str(folder / f"{name}.pt2"), exported_programs=programs)
        for case, values in enumerate(inputs):
            model = make(cls).train()
            outputs = flat(model(**values))
            sum((v * torch.sin(torch.arange(v.numel()).float()).view_as(v)).sum() for v in outputs.values()).backward()
            put = lambda kind, tensors: golden.update(
                {f"{name}/{case}/{kind}/{k}": v.detach().clone().contiguous() for k, v in tensors.items()}
            )
            put("in", values)
            put("out", outputs)
            put("grad", {k: p.grad for k, p in model.named_parameters() if p.grad is not None})
            put("after", dict(model.named_buffers()) if cls is ConvNet else {})
            put("eval", flat(model.eval()(**values)))
    inputs = {k: v.remainder(11) for k, v in text(3, 5).items()}
    ids = inputs["input_ids"]
    packed = {"input_ids": ids, "position_ids": torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4], [0, 0, 1, 2, 3]])}
    for name, cls, config, values in (
        ("reader", Reader, READER, inputs),
        ("writer", Writer, WRITER, packed),
        ("mixing_writer", lambda: Writer(apart=False), WRITER | {"model_type": "golden-mixing-writer"}, packed),
    ):
        model = make(cls)
        (folder / name).mkdir(exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        program = exported(model, values, dict.fromkeys(values, TOKENS), True)
        package_pt2(str(folder / name / "model.pt2"), exported_programs={"model": program})
        weights = {k: v for k, v in model.state_dict().items() if k != "head.weight"}  # tied
        safetensors.torch.save_file(weights, str(folder / name / "model.safetensors"), {"format": "pt"})
        golden |= {f"{name}/0/in/{k}": v.clone() for k, v in values.items()}
        golden |= {f"{name}/0/out/logits": model(**values)["logits"].detach()}
    safetensors.torch.save_file(golden, str(folder / "golden.safetensors"))


if __name__ == "__main__":
    main()
