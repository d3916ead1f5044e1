"""SSTfmr, the single-stream Transformer: instruction and stimulus are one sequence, encoded together (section 3.1).

    instruction  EOS  stimulus  EOS      T + 1 + 100 + 1 tokens, the streams meet in every block
         |        |      |       |
        [ Block: every token reads all tokens ]  x (layers - 1)
         |        |      |       |
         '--------'------'------>|
        [ Block: the last token reads all tokens ]
                                 |
                              readout -> 138 logits

With one layer (--paper) it does not learn the task: the last token is the same vector in every trial, so its query
knows nothing of the instruction. A head can learn to look at whatever is red, but not at the object that this trial
asks for. With two layers, the last token reads the question first.

Differs from the paper: 1) two layers, four heads, width 128; 2) stimulus positions are learned, instruction positions
have wavelengths from 2.5 to 64 tokens; 3) weights of linear layers start with variance 1 / fan-in, those of queries at
0.3 of that scale, embeddings with variance 1, as sinusoids have; 4) Muon instead of AdamW; 5) no bias on keys, where it
would cancel. --paper undoes 1, 2 and 4.
"""
import math

import torch
from torch import nn
from torch.nn import functional as F

INSTRUCTION, STIMULUS = (10, 27, 11, 27, 11), (27, 11)  # values of each feature of a token, 0 and all letters included
PAPER = {"dim": 256, "layers": 1, "heads": 1, "position": "paper", "optimizer": "adamw"}
QUICK = {"steps": 1_200}  # after 900, parities of depth 1 are known in some runs and not in others


class Embedding(nn.Module):
    """A stream of tokens as vectors. Each is the sum of a learned vector per feature, the same as a linear map of the
    one-hot features, and of a vector for its place. EOS follows: all features 0, and a learned place of its own."""

    def __init__(self, sizes, dim):
        super().__init__()
        self.table, self.eos = nn.Parameter(torch.randn(sum(sizes), dim)), nn.Parameter(torch.randn(1, dim))
        self.register_buffer("first", torch.tensor([sum(sizes[:i]) for i in range(len(sizes))]), persistent=False)

    def forward(self, tokens, places, layers=()):  # (B, N, features), (N, C) -> x (B, N + 1, C), layer(x) of each layer
        rows, places = F.pad(tokens, (0, 0, 0, 1)) + self.first, torch.cat([places, self.eos])
        place = torch.arange(len(places), device=rows.device) + len(self.table)
        rows = torch.cat([rows, place.expand(len(rows), -1)[:, :, None]], 2)  # (B, N + 1, features + 1)
        # A layer is linear, so apply it to the few vectors that tokens are sums of, and look its results up as well.
        vectors = [torch.cat([self.table, places])]
        vectors += [torch.cat([self.table @ layer.weight.T, layer(places)]) for layer in layers]
        return [F.embedding_bag(rows.flatten(0, 1), v, mode="sum").unflatten(0, rows.shape[:2]) for v in vectors]


WAVELENGTHS = {"sinusoidal": (2.5, 64), "paper": (2 * math.pi, 2 * math.pi * 10_000)}  # shortest, longest, in tokens


def sinusoids(length, shortest, longest, like):
    """Positions 0 .. length - 1 as sines and cosines of unit variance (length, C), on the device of `like` (.., C)."""
    wavelength = shortest * (longest / shortest) ** torch.linspace(0, 1, like.shape[-1] // 2, device=like.device)
    angle = 2 * math.pi * torch.arange(length, device=like.device)[:, None] / wavelength
    return math.sqrt(2) * torch.cat([angle.sin(), angle.cos()], 1)


class Attention(nn.Module):
    """Multi-head attention of x to context, softmax(q k / sqrt(D) + bias) v. The projections qkv may be given."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.query, self.value, self.out = (nn.Linear(dim, dim) for _ in range(3))
        self.key = nn.Linear(dim, dim, bias=False)  # a bias would add the same to every score, and cancel

    def forward(self, x, context, bias=0, qkv=None):  # (B, N, C), (B, M, C) -> (B, N, C)
        if qkv is None and x.shape[1] * self.heads < context.shape[1]:
            # Few queries: q (W c) = (q W) c, so project the queries into the context's space, not the context into
            # theirs, and sum the context before it is projected (its weights sum to 1, so the bias passes unchanged).
            q = self.query(x).unflatten(2, (self.heads, -1)) / math.sqrt(x.shape[2] // self.heads)  # (B, N, H, D)
            to_key, to_value = (m.weight.unflatten(0, (self.heads, -1)) for m in (self.key, self.value))  # (H, D, C)
            scores = torch.einsum("bnhc, bmc -> bhnm", torch.einsum("bnhd, hdc -> bnhc", q, to_key), context)
            mixed = torch.einsum("bhnm, bmc -> bnhc", (scores + bias).softmax(3), context)
            mixed = torch.einsum("bnhc, hdc -> bnhd", mixed, to_value) + self.value.bias.view(self.heads, -1)
        else:
            qkv = (self.query(x), self.key(context), self.value(context)) if qkv is None else qkv
            q, k, v = (t.unflatten(2, (self.heads, -1)) for t in qkv)  # (B, N, H, D), (B, M, H, D) twice
            scores = torch.einsum("bnhd, bmhd -> bhnm", q / math.sqrt(q.shape[3]), k)
            mixed = torch.einsum("bhnm, bmhd -> bnhd", (scores + bias).softmax(3), v)
        return self.out(mixed.flatten(2))


class Block(nn.Module):
    """A post-norm Transformer block: attention to context, then an MLP, each added and normalized."""

    def __init__(self, dim, heads):
        super().__init__()
        self.attention, self.norm1 = Attention(dim, heads), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, x, context, bias=0, qkv=None):
        x = self.norm1(x + self.attention(x, context, bias, qkv))
        return self.norm2(x + self.mlp(x))


class Model(nn.Module):
    """Width `dim`; `position` of the instruction: sinusoidal, relative (a learned bias per head and distance up to 8
    tokens), or paper (sinusoidal with base 10,000 in both streams)."""

    def __init__(self, dim=128, layers=2, heads=4, position="sinusoidal"):
        super().__init__()
        if min(heads, layers) < 1 or dim % heads or dim % 2 or position not in ("sinusoidal", "relative", "paper"):
            raise ValueError("dim must be even, heads divide it, layers at least 1, position sinusoidal, relative "
                             f"or paper, not dim={dim}, heads={heads}, layers={layers}, position={position}")
        self.position = position
        self.instruction, self.stimulus = Embedding(INSTRUCTION, dim), Embedding(STIMULUS, dim)
        self.cells = nn.Parameter(torch.randn(100, dim)) if position != "paper" else None
        self.relative = nn.Parameter(torch.zeros(heads, 17)) if position == "relative" else None
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.readout = nn.Linear(dim, 138)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features ** -0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Attention):
                module.query.weight.data.mul_(0.3)  # look everywhere at first: sharp random attention learns late

    def features(self, instruction, stimulus):  # (B, T, 5), (B, S, 2) -> (B, C)
        T, S, like, bias = instruction.shape[1], stimulus.shape[1], self.instruction.table, 0
        if self.position == "relative":
            places, place = like.new_zeros(T, like.shape[1]), torch.arange(T + 1, device=like.device)
            bias = self.relative[:, (place[:, None] - place).clamp(-8, 8) + 8]  # (H, T + 1, T + 1), with EOS
            bias = F.pad(bias, (0, S + 1, 0, S + 1))  # distances to the stimulus are 0
        else:
            places = sinusoids(T, *WAVELENGTHS[self.position], like)
        cells = sinusoids(S, *WAVELENGTHS["paper"], like) if self.cells is None else self.cells
        *blocks, last = self.blocks
        layers = [getattr(block.attention, name) for block in blocks[:1] for name in ("query", "key", "value")]
        streams = self.instruction(instruction, places, layers), self.stimulus(stimulus, cells, layers)
        x, *qkv = (torch.cat(parts, 1) for parts in zip(*streams))  # (B, T + 1 + S + 1, C)
        for block in blocks:
            x, qkv = block(x, x, bias, qkv), None
        # Nothing else of the last block is read. The last token looks back on the instruction from its EOS's place.
        return last(x[:, -1:], x, bias if self.relative is None else bias[:, T:T + 1])[:, 0]

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
