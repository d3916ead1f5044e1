"""HyperTfmr: the instruction becomes the weights of the network that reads the stimulus.

    root ... EOS
      |       |
    [ Encoder ]
         |
    code z (64)            the instruction reaches the answer through z alone
         |
    [ Hypernetwork ]       weights = base + M z, of three layers:
      |     |     |
      v     v     v
    Look, Think, Conclude -> LN -> readout -> 138 logits

Look scores every token of the stimulus, and a softmax of these scores averages their values. Think
and Conclude are an MLP on the average.

Kobayashi et al. 2024 (arXiv 2407.12275): a network can learn to generalize compositionally if a
bottleneck separates inferring the task from solving it. There the task is inferred from examples of
it. gCOG states the task, so here z is only read off the instruction.

Differs from the paper: all of it is new.
"""
import math

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


class Hypernetwork(nn.Module):
    """A linear layer whose weights and biases are affine in a code z, other ones for each trial."""

    def __init__(self, code, inputs, outputs):
        super().__init__()
        self.shape = inputs + 1, outputs
        self.weights = Linear(code, (inputs + 1) * outputs)

    def forward(self, z, x):  # (B, code), (B, N, inputs) -> (B, N, outputs)
        # Parameters are of order 1 and scaled here: an optimizer's step changes all alike.
        weights = self.weights(z).unflatten(1, self.shape) / math.sqrt(x.shape[2])
        return x @ weights[:, 1:] + weights[:, :1]


class Model(nn.Module):
    """`code`: how many numbers z has."""

    def __init__(self, dim=128, layers=1, heads=4, code=64):
        super().__init__()
        self.instruction = Instruction(dim, "selector")
        self.encode_instruction = Encoder(dim, layers, heads, read=0)
        self.code, self.stimulus = Linear(dim, code), Stimulus(dim)
        self.look, self.value = Hypernetwork(code, dim, heads), Linear(dim, dim)
        self.think, self.conclude = (Hypernetwork(code, dim, dim) for _ in range(2))
        for layer in (self.think, self.conclude):
            nn.init.normal_(layer.weights.bias)  # the base, which all instructions share
        self.norm, self.readout = nn.LayerNorm(dim), Linear(dim, data.CLASSES)

    def infer(self, instruction):  # (B, T, 5) -> z (B, code)
        return self.code(self.encode_instruction(*self.instruction(instruction)))[:, 0]

    def execute(self, z, stimulus):  # (B, code), (B, 100, 2) -> (B, C)
        x, bias = self.stimulus(stimulus)  # (B, S, C), (B, 1, 1, S)
        weights = (self.look(z, x).mT + bias[:, 0]).softmax(2)  # (B, H, S)
        values = self.value(x).unflatten(2, (weights.shape[1], -1))  # (B, S, H, D)
        x = torch.einsum("bhs, bshd -> bhd", weights, values).flatten(1)[:, None]  # (B, 1, C)
        return self.norm(self.conclude(z, F.gelu(self.think(z, x))))[:, 0]

    def features(self, instruction, stimulus):  # (B, T, 5), (B, 100, 2) -> (B, C)
        return self.execute(self.infer(instruction), stimulus)

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
