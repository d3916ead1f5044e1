"""HyperTfmr: the instruction becomes the weights of the network that reads the stimulus.

    root ... EOS
      |       |
    [ Encoder ]
         |
    code z (64)            the instruction reaches the answer through z alone
         |
    [ Hypernetwork ]       weights = Linear(z), of three layers:
      |     |     |
      v     v     v
    Look, Think, Conclude -> LN -> readout -> 138 logits

Look scores every token of the stimulus, and a softmax of these scores averages their values, which
an ordinary Linear makes. Think and Conclude are an MLP on the average.

Kobayashi et al. 2024 (arXiv 2407.12275): a network can learn to generalize compositionally if a
bottleneck separates inferring the task from solving it. There examples tell the task. gCOG states
it, so here z is only read off the instruction.

Differs from the paper: all of it is new.
"""
import math

import torch
from torch import nn
from torch.nn import functional as F

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
class Hypernetwork(nn.Module):  # Linear, with weights and biases of each trial, affine in z
    def __init__(self, code, inputs, outputs):
        super().__init__()
        self.shape = inputs + 1, outputs  # + 1: row 0 is the bias
        self.weights = nn.Linear(code, (inputs + 1) * outputs)

    def forward(self, z, x):  # (B, code), (B, N, inputs) -> (B, N, outputs)
        # The Linear's outputs are of order 1. They are scaled here, not by its first weights, so
        # that an optimizer's step changes small and large layers by the same share.
        weights = self.weights(z).unflatten(1, self.shape) / math.sqrt(x.shape[2])
        return x @ weights[:, 1:] + weights[:, :1]


class Model(nn.Module):
    """`code`: how many numbers z has."""

    def __init__(self, dim=128, layers=1, heads=4, code=64):
        super().__init__()
        self.instruction = Instruction(dim)
        self.encode_instruction = Encoder(dim, layers, heads, read=0)
        self.code = nn.Linear(dim, code)
        self.stimulus = Stimulus(dim)
        self.look = Hypernetwork(code, dim, heads)
        self.value = nn.Linear(dim, dim)
        self.think = Hypernetwork(code, dim, dim)
        self.conclude = Hypernetwork(code, dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.readout = nn.Linear(dim, data.CLASSES)
        self.looks = {"encode_instruction.blocks": (0, "question"), "code": (0, "")}  # for eval.py
        self.apply(init)
        for layer in (self.think, self.conclude):
            nn.init.normal_(layer.weights.bias)  # the part that all instructions share

    def infer(self, instruction):  # (B, T, 5) -> z (B, code)
        x, log_count = self.instruction(instruction)  # (B, N, C), (B, N)
        root = self.encode_instruction(x, log_count)  # (B, 1, C)
        return self.code(root)[:, 0]

    def execute(self, z, stimulus):  # (B, code), (B, 100, 2) -> (B, C)
        x, log_count = self.stimulus(stimulus)  # (B, S, C), (B, S)
        scores = self.look(z, x).mT + log_count[:, None]  # (B, H, S)
        values = self.value(x).unflatten(2, (scores.shape[1], -1))  # (B, S, H, D)
        x = torch.einsum("bhs, bshd -> bhd", scores.softmax(2), values)
        x = x.flatten(1)[:, None]  # (B, 1, C)
        x = F.gelu(self.think(z, x))
        x = self.conclude(z, x)
        return self.norm(x)[:, 0]

    def features(self, instruction, stimulus):  # (B, T, 5), (B, 100, 2) -> (B, C)
        return self.execute(self.infer(instruction), stimulus)

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
