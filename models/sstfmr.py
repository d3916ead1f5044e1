"""SSTfmr, the single-stream Transformer: instruction and stimulus are one sequence, encoded together (section 3.1).

    instruction  EOS  stimulus  EOS      T + 1 + 100 + 1 tokens, the streams meet in every block
         |        |      |       |
        [ Block: every token reads all tokens ]  x (layers - 1)
         |        |      |       |
         '--------'------'------>|
        [ Block: the last token reads all tokens ]
                                 |
                              readout -> 138 logits

With one layer (--paper) it cannot learn the task: the last token is the same vector in every trial, so its query
knows nothing of the instruction, and one attention can only sum over tokens what each of them is by itself. Nothing
binds the shape asked for to the color and place of an object. Two layers can.

Differs from the paper: 1) two layers, four heads, width 128; 2) stimulus positions are learned, instruction positions
have wavelengths from 2.5 to 64 tokens; 3) weights start with variance 1 / fan-in, those of queries at 0.3 of that
scale; 4) Muon instead of AdamW; 5) no bias on keys, where it would cancel. --paper undoes 1, 2 and 4.
"""
import math

import torch
from torch import nn
from torch.nn import functional as F

INSTRUCTION, STIMULUS = (10, 27, 11, 27, 11), (27, 11)  # values of each feature of a token, 0 and all letters included
PAPER = {"dim": 256, "layers": 1, "heads": 1, "position": "paper", "optimizer": "adamw"}


class Embedding(nn.Module):
    """A sum of one learned vector per feature: the same as a linear map of the one-hot features."""

    def __init__(self, sizes, dim):
        super().__init__()
        self.table = nn.Parameter(torch.randn(sum(sizes), dim))
        self.register_buffer("first", torch.tensor([sum(sizes[:i]) for i in range(len(sizes))]), persistent=False)

    def forward(self, tokens):  # (B, N, features) -> (B, N, C)
        rows = (tokens + self.first).flatten(0, 1)
        return F.embedding_bag(rows, self.table, mode="sum").unflatten(0, tokens.shape[:2])


WAVELENGTHS = {"sinusoidal": (2.5, 64), "paper": (2 * math.pi, 2 * math.pi * 10_000)}  # shortest, longest, in tokens


def sinusoids(length, shortest, longest, like):
    """Positions 0 .. length - 1 as sines and cosines of unit variance (length, C), on the device of `like`."""
    wavelength = shortest * (longest / shortest) ** torch.linspace(0, 1, like.shape[-1] // 2, device=like.device)
    angle = 2 * math.pi * torch.arange(length, device=like.device)[:, None] / wavelength
    return math.sqrt(2) * torch.cat([angle.sin(), angle.cos()], 1)


class Attention(nn.Module):
    """Multi-head attention of x to context, softmax(q k / sqrt(D) + bias) v."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.query, self.value, self.out = (nn.Linear(dim, dim) for _ in range(3))
        self.key = nn.Linear(dim, dim, bias=False)  # a bias would add the same to every score, and cancel

    def split(self, x):  # (B, N, C) -> (B, H, N, D)
        return x.unflatten(2, (self.heads, -1)).transpose(1, 2)

    def forward(self, x, context, bias=0):
        q = self.split(self.query(x)) / math.sqrt(x.shape[2] // self.heads)  # (B, H, N, D)
        if x.shape[1] * self.heads < x.shape[2]:
            # Few queries: q (W c) = (q W) c, so project the queries into the context's space, not the context into
            # theirs, and sum the context before it is projected (its weights sum to 1, so the bias passes unchanged).
            to_key, to_value = (m.weight.unflatten(0, (self.heads, -1)) for m in (self.key, self.value))  # (H, D, C)
            scores = ((q @ to_key).flatten(1, 2) @ context.mT).unflatten(1, (self.heads, -1))  # (B, H, N, M)
            mixed = ((scores + bias).softmax(3).flatten(1, 2) @ context).unflatten(1, (self.heads, -1))
            mixed = mixed @ to_value.mT + self.value.bias.view(self.heads, 1, -1)  # (B, H, N, D)
        else:
            k, v = self.split(self.key(context)), self.split(self.value(context))
            mixed = (q @ k.mT + bias).softmax(3) @ v  # (B, H, N, D)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A post-norm Transformer block: attention to context, then an MLP, each added and normalized."""

    def __init__(self, dim, heads):
        super().__init__()
        self.attention, self.norm1 = Attention(dim, heads), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, x, context, bias=0):
        x = self.norm1(x + self.attention(x, context, bias))
        return self.norm2(x + self.mlp(x))


class Model(nn.Module):
    """Width `dim`; `position` of the instruction: sinusoidal, relative (a learned bias per head and distance up to 8
    tokens), or paper (sinusoidal with base 10,000 in both streams)."""

    def __init__(self, dim=128, layers=2, heads=4, position="sinusoidal"):
        super().__init__()
        if dim % heads or layers < 1 or position not in ("sinusoidal", "relative", "paper"):
            raise ValueError("heads must divide dim, layers be at least 1 and position be sinusoidal, relative or paper, "
                             f"not heads={heads}, dim={dim}, layers={layers}, position={position}")
        self.position = position
        self.instruction, self.stimulus = Embedding(INSTRUCTION, dim), Embedding(STIMULUS, dim)
        self.eos = nn.Parameter(torch.randn(2, dim))
        self.cells = nn.Parameter(torch.randn(100, dim)) if position != "paper" else None
        self.relative = nn.Parameter(torch.zeros(heads, 17)) if position == "relative" else None
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.readout = nn.Linear(dim, 138)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features ** -0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for block in self.blocks:
            block.attention.query.weight.data.mul_(0.3)  # look everywhere at first: sharp random attention learns late

    def features(self, instruction, stimulus):  # (B, T, 5), (B, S, 2) -> (B, C)
        B, T, S = len(instruction), instruction.shape[1], stimulus.shape[1]
        x, cells = self.instruction(instruction), self.stimulus(stimulus)
        if self.position != "relative":
            x = x + sinusoids(T, *WAVELENGTHS[self.position], like=x)
        cells = cells + (sinusoids(S, *WAVELENGTHS["paper"], like=x) if self.cells is None else self.cells)
        eos = self.eos[:, None, None].expand(2, B, 1, -1)
        x = torch.cat([x, eos[0], cells, eos[1]], 1)  # (B, T + 1 + S + 1, C)
        bias = 0
        if self.position == "relative":
            distance = torch.arange(T, device=x.device)[:, None] - torch.arange(T, device=x.device)
            bias = F.pad(self.relative[:, distance.clamp(-8, 8) + 8], (0, S + 2, 0, S + 2))  # (H, N, N)
        for block in self.blocks[:-1]:
            x = block(x, x, bias)
        return self.blocks[-1](x[:, -1:], x)[:, 0]  # nothing else of the last block is read

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
