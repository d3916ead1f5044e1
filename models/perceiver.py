"""Perceiver: learned latents ask both streams in turn (section 3.1; Jaegle et al. 2021).

    root ... EOS           objects ... EOS
      |       |               |         |
    [ Encoder ]             [  Encoder  ]
         |                        |
    latents -> [ Block ] -> [ Block ] -> [ Block ] -> [ Block ]    the streams meet in the latents,
                ask the      each         ask the      the first   which know the question when
                instruction  other        stimulus     asks all    they ask the stimulus
                                                          |
                                                     [ LN, MLP ]
                                                          |
                                                       readout -> 138 logits

The second and the fourth Block are the same one. first=read is this order, the paper's. With
first=ask, our change, the third Block comes first: every token of the instruction asks the grid for
its own object, before their Encoder. Then the latents ask the instruction, and the fourth follows
at once.

Differs from the paper:

     1) width 128
     2) learned stimulus positions, instruction positions with wavelengths from 2.5 to 64 tokens
     3) Muon, and norms in front, not behind
     4) empty cells and EOS have no position
     5) keys have no bias
     6) Linears start with variance 1 / fan-in, queries with 0.09 of it, embeddings with 1
     7) a token per selector, and a vector for each operator, shape and color (in the release a
        token is a few numbers, times one matrix)
     8) the latents are learned: in the authors' release they are zeros, and all ten stay the
        same
     9) all four are whole blocks: in the release, where latents ask each other, no MLP follows;
        elsewhere the MLP is one Linear, which reads only what was found; and all the latents'
        steps share a norm
    10) the MLP before the readout has three Linears, not one
    11) no dropout (the release has 0.1)
    12) GELU, not ReLU, and none behind the last Linear of an MLP; an Encoder's has 4 C hidden
        numbers, in the release C
"""
import math
from typing import Literal

import torch
from torch import nn

import data


# ---- as in sstfmr.py ----------------------------------------------------------------------------
def sinusoids(length, dim):  # -> (length, C), of variance 1
    wavelength = 2.5 * (64 / 2.5) ** torch.linspace(0, 1, dim // 2)  # in tokens
    angle = 2 * math.pi * torch.arange(length)[:, None] / wavelength
    return math.sqrt(2) * torch.cat([angle.sin(), angle.cos()], 1)


class Instruction(nn.Module):  # first selectors, second selectors, EOS
    def __init__(self, dim):
        super().__init__()
        if dim % 2:
            raise data.UsageError(f"dim must be even, for sines and cosines, not {dim}")
        self.operator = nn.Embedding(len(data.OPERATORS) + 1, dim)  # + 1: 0 is none
        self.shape = nn.Embedding(data.SHAPES + 1, dim)
        self.color = nn.Embedding(data.COLORS + 1, dim)
        self.second = nn.Parameter(torch.randn(dim))
        self.eos = nn.Parameter(torch.randn(dim))
        self.register_buffer("place", sinusoids(data.LONGEST, dim), persistent=False)

    def forward(self, instruction):  # (B, T, 5) -> (B, N, C), log of their counts (B, N)
        operator, shape1, color1, shape2, color2 = instruction.unbind(2)  # (B, T) each
        x = self.operator(operator) + self.place[:instruction.shape[1]]
        first = x + self.shape(shape1) + self.color(color1)
        second = x + self.shape(shape2) + self.color(color2) + self.second
        one = torch.ones_like(shape1)
        count = torch.cat([one, shape2 > 0, one[:, :1]], 1)  # absent: log 0, no attention
        return torch.cat([first, second, self.eos.expand(len(x), 1, -1)], 1), count.log()


class Stimulus(nn.Module):
    """Objects, one token for all empty cells, EOS. Empty cells have no position, so they are equal,
    and n equal keys weigh as much as one whose score is log n higher."""

    def __init__(self, dim):
        super().__init__()
        self.shape = nn.Embedding(data.SHAPES + 1, dim)
        self.color = nn.Embedding(data.COLORS + 1, dim)
        self.cell = nn.Embedding(len(data.CELLS), dim)
        self.eos = nn.Parameter(torch.randn(dim))

    def forward(self, stimulus):  # (B, 100, 2) -> (B, S, C), log of their counts (B, S)
        is_empty = stimulus[:, :, 0] == 0  # (B, 100)
        most = int((~is_empty).sum(1).max())  # objects of the fullest grid; waits for the GPU
        cell = is_empty.int().argsort(stable=True)[:, :most]  # (B, most), objects first
        shape, color = stimulus.take_along_dim(cell[:, :, None], 1).unbind(2)
        objects = self.shape(shape) + self.color(color) + self.cell(cell)
        empty = (self.shape.weight[0] + self.color.weight[0]).expand(len(cell), 1, -1)
        x = torch.cat([objects, empty, self.eos.expand(len(cell), 1, -1)], 1)
        one = torch.ones_like(cell[:, :1])  # (B, 1)
        # of an object 1, but 0 where a trial has fewer than `most`; of n empty cells n; of EOS 1
        count = torch.cat([shape > 0, is_empty.sum(1, keepdim=True), one], 1)
        return x, count.log()


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        if dim % heads:
            raise data.UsageError(f"dim must be a multiple of heads, not {dim} with {heads} heads")
        self.heads = heads
        self.query = nn.Linear(dim, dim)
        self.value = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim, bias=False)  # a bias shifts all scores of a query alike

    def weights(self, x, context, bias):  # (B, N, C), (B, M, C), attention bias -> (B, H, N, M)
        q = self.query(x).unflatten(2, (self.heads, -1))  # (B, N, H, D): C = H D
        k = self.key(context).unflatten(2, (self.heads, -1))  # (B, M, H, D)
        scores = torch.einsum("bnhd, bmhd -> bhnm", q, k) / math.sqrt(q.shape[3])
        return (scores + bias).softmax(3)

    def forward(self, x, context, bias):  # -> (B, N, C)
        v = self.value(context).unflatten(2, (self.heads, -1))  # (B, M, H, D)
        x = torch.einsum("bhnm, bmhd -> bnhd", self.weights(x, context, bias), v)
        return self.out(x.flatten(2))


class Block(nn.Module):  # norms in front, also of the keys
    def __init__(self, dim, heads):
        super().__init__()
        self.attention = Attention(dim, heads)
        self.norm1 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, x, context, bias):  # -> (B, N, C)
        x = x + self.attention(self.norm1(x), self.norm1(context), bias)
        return x + self.mlp(self.norm2(x))


def init(module):  # Linears: variance 1 / fan-in, biases 0
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=module.in_features ** -0.5)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    if isinstance(module, Attention):  # apply visits its Linears first
        module.query.weight.data.mul_(0.3)  # even attention at first; variance 0.09 / fan-in


# ---- as in dstfmr.py ----------------------------------------------------------------------------
class Encoder(nn.Module):  # with `read`, the last block computes that token alone
    def __init__(self, dim, layers, heads, read=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.read = read

    def forward(self, x, log_count):  # (B, N, C), (B, N) -> (B, N or 1, C)
        bias = log_count[:, None, None]  # (B, 1, 1, N), for all heads and queries
        for block in self.blocks[:-1]:
            x = block(x, x, bias)
        query = x if self.read is None else x[:, self.read, None]
        return self.blocks[-1](query, x, bias)


# ---- the model ----------------------------------------------------------------------------------
class Model(nn.Module):
    def __init__(self, dim=128, layers=1, heads=1, latents=10,
                 first: Literal["read", "ask"] = "read"):
        super().__init__()
        self.instruction = Instruction(dim)
        self.encode_instruction = Encoder(dim, layers, heads)
        self.stimulus = Stimulus(dim)
        self.encode_stimulus = Encoder(dim, layers, heads)
        self.latents = nn.Parameter(torch.randn(latents, dim))
        self.ask_instruction = Block(dim, heads)
        self.ask_stimulus = Block(dim, heads)
        self.ask_each_other = Block(dim, heads)
        self.first = first
        self.norm = nn.LayerNorm(dim)
        self.readout = nn.Linear(dim, data.CLASSES)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, 2 * dim),
                                 nn.GELU(), nn.Linear(2 * dim, dim))
        self.looks = {"ask_instruction": (0, "question"), "ask_each_other": (0, "latents"),
                      "ask_stimulus": (0, "grid")}  # for eval.py; with first=ask, the root's token
        self.apply(init)

    def features(self, instruction, stimulus):  # (B, T, 5), (B, 100, 2) -> (B, C)
        x, x_log_count = self.instruction(instruction)  # (B, N, C), (B, N)
        y, y_log_count = self.stimulus(stimulus)  # (B, S, C), (B, S)
        y = self.encode_stimulus(y, y_log_count)
        y_bias = y_log_count[:, None, None]
        if self.first == "ask":
            x = self.ask_stimulus(x, y, y_bias)
        x = self.encode_instruction(x, x_log_count)
        x_bias = x_log_count[:, None, None]
        latents = self.latents.expand(len(x), -1, -1)  # (B, L, C)
        latents = self.ask_instruction(latents, x, x_bias)
        if self.first == "read":
            latents = self.ask_each_other(latents, latents, 0)  # bias 0: each latent counts once
            latents = self.ask_stimulus(latents, y, y_bias)
        x = self.ask_each_other(latents[:, :1], latents, 0)  # only the first latent is read
        return self.mlp(self.norm(x))[:, 0]

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
