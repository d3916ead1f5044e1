"""CrossAttn: the instruction asks, the stimulus's encoding answers (section 3.1).

    root ... EOS     objects ... EOS
      |       |         |         |
      |       |       [  Encoder  ]
      |       |         |         |
    [  Block  ] <---- keys and values     they meet where a token looks for its object
      |       |
    [ Encoder ]                           then the root reads the tokens of the instruction
      |
    [ LN, MLP ] -> readout -> 138 logits

first=ask is this order. first=read is the paper's: the instruction is encoded, then one token asks.

Differs from the paper: 1) all tokens ask, and before they are encoded; 2) the root's token is read,
not the instruction's EOS; 3) one token per selector; 4) two heads, width 128; 5) learned stimulus
positions, instruction positions with wavelengths from 2.5 to 64 tokens; 6) Muon, not AdamW;
7) empty cells have no position; 8) keys have no bias; 9) Linear starts with variance 1 / fan-in,
queries with 0.09 of it, embeddings with 1; 10) the cross-attention is a whole block, with an MLP
and two norms of its own.
"""
import math
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

import data

READ = {"root": 0, "eos": -1}  # which token of a stream


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

    def weights(self, x, context, bias):  # (B, N, C), (B, M, C), attention bias -> (B, H, N, M)
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


class Encoder(nn.Module):  # with `read`, the last block returns that token alone
    def __init__(self, dim, layers, heads, read=None):
        super().__init__()
        self.blocks, self.read = nn.ModuleList(Block(dim, heads) for _ in range(layers)), read

    def forward(self, x, bias):  # (B, N, C), attention bias -> (B, N or 1, C)
        for block in self.blocks[:-1]:
            x = block(x, x, bias)
        return self.blocks[-1](x if self.read is None else x[:, [self.read]], x, bias)


class Model(nn.Module):
    def __init__(self, dim=128, layers=1, heads=2, first: Literal["ask", "read"] = "ask",
                 read: Literal["root", "eos"] = "root",
                 tokens: Literal["selector", "operator"] = "selector"):
        super().__init__()
        self.instruction = Instruction(dim, tokens)
        self.encode_instruction = Encoder(dim, layers, heads, READ[read])
        self.stimulus, self.encode_stimulus = Stimulus(dim), Encoder(dim, layers, heads)
        self.look, self.first = Block(dim, heads), first
        self.norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(Linear(dim, 2 * dim), nn.GELU(), Linear(2 * dim, 2 * dim),
                                 nn.GELU(), Linear(2 * dim, dim))
        self.readout = Linear(dim, data.CLASSES)

    def features(self, instruction, stimulus):  # (B, T, 5), (B, 100, 2) -> (B, C)
        (x, own), (y, bias) = self.instruction(instruction), self.stimulus(stimulus)
        y = self.encode_stimulus(y, bias)
        if self.first == "ask":
            x = self.encode_instruction(self.look(x, y, bias), own)  # (B, 1, C)
        else:
            x = self.look(self.encode_instruction(x, own), y, bias)
        return self.mlp(self.norm(x))[:, 0]

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
