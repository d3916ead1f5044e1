"""TreeTfmr: the Transformer of sstfmr.py, applied to every operator, from the leaves up.

    root ... EOS    left, right    objects ... EOS      every operator of a level at once
      |       |         |    |         |        |
    [ Block: the operator's tokens read all     ]  x layers, the same ones for every operator
      |
    readout -> 138 logits -> answer ->  left or right of the operator above

Each operator is read like an instruction of depth 1 that also looks at its two branches. A branch
is handed up as its answer: the softmax of its 138 logits, embedded. So the answer of an inner
operator looks like that of a leaf, and the model never needs to know the depth.

The model is told which operators are whose branches, and to work from the leaves up. Everything
else is learned.

Differs from the paper: all of it is new.
"""
import math
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

import data


def sinusoids(length, dim):  # -> (length, C), of unit variance
    wavelength = 2.5 * (64 / 2.5) ** torch.linspace(0, 1, dim // 2)  # in tokens
    angle = 2 * math.pi * torch.arange(length)[:, None] / wavelength
    return math.sqrt(2) * torch.cat([angle.sin(), angle.cos()], 1)


class Embedding(nn.ModuleList):  # a token is the sum of a vector per feature
    def forward(self, tokens):  # (B, N, features) -> (B, N, C)
        return sum(table(ids) for table, ids in zip(self, tokens.unbind(2), strict=True))


class Instruction(nn.Module):  # first selectors, second selectors, EOS; or operators, EOS
    def __init__(self, dim, tokens):
        super().__init__()
        sizes = len(data.OPERATORS) + 1, data.SHAPES + 1, data.COLORS + 1  # + 1: 0 is none
        sizes += sizes[1:] if tokens == "operator" else ()
        self.eos = nn.Parameter(torch.randn(dim))
        self.embedding = Embedding(nn.Embedding(size, dim) for size in sizes)
        self.second = None if tokens == "operator" else nn.Parameter(torch.randn(dim))

    def forward(self, instruction):  # (B, T, 5) -> (B, N, C), attention bias
        B, T, _ = instruction.shape
        place = sinusoids(T, len(self.eos)).to(self.eos.device)
        eos = self.eos.expand(B, 1, -1)
        if self.second is None:
            x = torch.cat([self.embedding(instruction) + place, eos], 1)
            return x, x.new_zeros(B, 1, 1, T + 1)
        first, second = instruction[:, :, [0, 1, 2]], instruction[:, :, [0, 3, 4]]
        x = [self.embedding(first) + place, self.embedding(second) + place + self.second, eos]
        bias = torch.where(second[:, :, 1] > 0, 0, -math.inf)  # absent: no attention
        return torch.cat(x, 1), F.pad(bias, (T, 1))[:, None, None]


class Stimulus(nn.Module):
    """Objects, empty cells, EOS. Empty cells have no position. So they are equal, and n equal keys
    weigh as much as one whose score is log n higher: one token stands for n of them."""

    def __init__(self, dim):
        super().__init__()
        sizes = data.SHAPES + 1, data.COLORS + 1
        self.embedding = Embedding(nn.Embedding(size, dim) for size in sizes)
        self.eos = nn.Parameter(torch.randn(dim))
        self.cells = nn.Parameter(torch.randn(len(data.CELLS), dim))

    def forward(self, stimulus):  # (B, 100, 2) -> (B, S, C), attention bias
        free = stimulus[:, :, 0] == 0
        most = int((~free).sum(1).max())  # the one number that a step reads from the device
        cell = free.int().argsort(stable=True)[:, :most + 1]  # objects first
        empty = free.gather(1, cell)
        place = F.embedding(cell, self.cells).masked_fill(empty[:, :, None], 0)
        x = self.embedding(stimulus.take_along_dim(cell[:, :, None], 1)) + place
        share = (free.sum(1, True) / empty.sum(1, True)).log()  # cells per empty token
        x = torch.cat([x, self.eos.expand(len(x), 1, -1)], 1)
        return x, F.pad(torch.where(empty, share, 0), (0, 1))[:, None, None]


class Linear(nn.Linear):
    def reset_parameters(self):
        nn.init.normal_(self.weight, std=self.in_features ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        if dim % (2 * heads):  # 2: sines and cosines
            raise ValueError(f"dim must be a multiple of 2 * heads, not {dim} with {heads} heads")
        self.split = heads, -1  # C = H * D
        self.query, self.value, self.out = (Linear(dim, dim) for _ in range(3))
        self.key = Linear(dim, dim, bias=False)  # a bias would add the same to every score
        self.query.weight.data.mul_(0.3)  # look everywhere at first: sharp attention learns late

    def weights(self, x, context, bias):  # (B, N, C), (B, M, C), to be added -> (B, H, N, M)
        q, k = self.query(x).unflatten(2, self.split), self.key(context).unflatten(2, self.split)
        scores = torch.einsum("bnhd, bmhd -> bhnm", q, k) / math.sqrt(q.shape[3])
        return (scores + bias).softmax(3)

    def forward(self, x, context, bias):  # -> (B, N, C)
        v = self.value(context).unflatten(2, self.split)
        x = torch.einsum("bhnm, bmhd -> bnhd", self.weights(x, context, bias), v)
        return self.out(x.flatten(2))


class Block(nn.Module):  # post-norm
    def __init__(self, dim, heads):
        super().__init__()
        self.attention, self.norm1 = Attention(dim, heads), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(Linear(dim, 4 * dim), nn.GELU(), Linear(4 * dim, dim))
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, x, context, bias):  # -> (B, N, C)
        x = self.norm1(x + self.attention(x, context, bias))
        return self.norm2(x + self.mlp(x))


class Model(nn.Module):
    """`up`: what goes to the operator above, the answer or the token itself; `shared`: inner
    operators have the leaves' blocks, not blocks of their own."""

    def __init__(self, dim=128, layers=3, heads=4, up: Literal["answer", "token"] = "answer",
                 shared=True):
        super().__init__()
        self.instruction, self.stimulus = Instruction(dim, "selector"), Stimulus(dim)
        self.blocks = self.inner = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        if not shared:
            self.inner = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.readout = Linear(dim, data.CLASSES)
        self.answers = nn.Parameter(torch.randn(data.CLASSES, dim)) if up == "answer" else None
        self.sides = nn.Parameter(torch.randn(2, dim))  # left, right

    def features(self, instruction, stimulus):  # (B, T, 5), (B, 100, 2) -> (B, C)
        levels, start = [], 0
        while start < instruction.shape[1]:  # a level of w operators is followed by w IfElses
            levels.append(instruction[:, start:start + 2 ** len(levels)])
            start += 2 * levels[-1].shape[1]
        (objects, bias), below = self.stimulus(stimulus), None
        for level in reversed(levels):
            below = x = self.solve(level, below, objects, bias)  # (B, w, C)
            if self.answers is not None:
                below = self.readout(x).softmax(2) @ self.answers
        return x[:, 0]

    def solve(self, level, below, known, bias):
        # (B, w, 5), (B, 2 w, C) or None, (B, S, C), (B, 1, 1, S) -> (B, w, C)
        w = level.shape[1]
        x, own_bias = self.instruction(level.flatten(0, 1)[:, None])  # (B w, N, C)
        known, bias = known.repeat_interleave(w, 0), bias.repeat_interleave(w, 0)
        if below is not None:
            branches = (below.unflatten(1, (w, 2)) + self.sides).flatten(0, 1)  # (B w, 2, C)
            known, bias = torch.cat([branches, known], 1), F.pad(bias, (2, 0))
        bias, blocks = torch.cat([own_bias, bias], 3), self.blocks if below is None else self.inner
        for block in blocks[:-1]:
            x = block(x, torch.cat([x, known], 1), bias)
        x = blocks[-1](x[:, :1], torch.cat([x, known], 1), bias)  # no other token is read
        return x[:, 0].unflatten(0, (-1, w))

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
