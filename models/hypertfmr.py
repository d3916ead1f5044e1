"""HyperTfmr: the instruction becomes the weights of the network that looks at the stimulus (not in the paper).

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

    Look scores every token of the stimulus, and a softmax of these scores averages their values. Think and Conclude
    are an MLP on the average.

Kobayashi et al. 2024 (arXiv 2407.12275): a network can learn to generalize compositionally if a bottleneck separates
inferring the task from solving it. There the task is inferred from examples of it. gCOG states the task, so here z is
only read off the instruction.

Differs from the paper: all of it.
"""
import math
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

READ = {"root": 0, "eos": -1}  # which token of a stream
WAVELENGTHS = {"sinusoidal": (2.5, 64), "paper": (2 * math.pi, 2 * math.pi * 10_000)}  # shortest, longest, in tokens


def sinusoids(length, dim, position):
    """Positions 0 .. length - 1 as sines and cosines of unit variance (length, C)."""
    shortest, longest = WAVELENGTHS[position]
    wavelength = shortest * (longest / shortest) ** torch.linspace(0, 1, dim // 2)
    angle = 2 * math.pi * torch.arange(length)[:, None] / wavelength
    return math.sqrt(2) * torch.cat([angle.sin(), angle.cos()], 1)


class Embedding(nn.Module):
    """A token is the sum of one learned vector per feature: a linear map of its one-hot features."""

    def __init__(self, *sizes, dim):
        super().__init__()
        self.tables = nn.ParameterList(torch.randn(size, dim) for size in sizes)

    def forward(self, tokens):  # (B, N, features) -> (B, N, C)
        return sum(F.embedding(ids, table) for ids, table in zip(tokens.unbind(2), self.tables, strict=True))


class Instruction(nn.Module):
    """The instruction and its EOS as vectors. With tokens="operator" there is one token per operator. With "selector"
    there is one per selector, all first ones, then all second ones. An absent second selector gets no attention."""

    def __init__(self, dim, position, tokens):
        super().__init__()
        self.position, self.eos = position, nn.Parameter(torch.randn(dim))
        if tokens == "operator":
            self.embedding, self.second = Embedding(10, 27, 11, 27, 11, dim=dim), None
        else:
            self.embedding, self.second = Embedding(10, 27, 11, dim=dim), nn.Parameter(torch.randn(dim))

    def forward(self, instruction):  # (B, T, 5) -> (B, N, C), what is added to the scores of these keys (B, N)
        B, T, _ = instruction.shape
        place = sinusoids(T, len(self.eos), self.position).to(self.eos.device)
        eos = self.eos.expand(B, 1, -1)
        if self.second is None:
            return torch.cat([self.embedding(instruction) + place, eos], 1), self.eos.new_zeros(B, T + 1)
        first, second = instruction[:, :, [0, 1, 2]], instruction[:, :, [0, 3, 4]]
        x = torch.cat([self.embedding(first) + place, self.embedding(second) + place + self.second, eos], 1)
        return x, F.pad(torch.where(second[:, :, 1] > 0, 0, -math.inf), (T, 1))  # absent: no attention


class Stimulus(nn.Module):
    """The objects of a grid, its empty cells and its EOS as vectors. Empty cells have no position, so they are equal in
    every layer, and n equal keys weigh as much as one whose score is log n higher: one token stands for all of them.
    (A grid with fewer objects than the fullest one of the batch has several such tokens, which share that weight.)"""

    def __init__(self, dim, position):
        super().__init__()
        self.embedding, self.eos = Embedding(27, 11, dim=dim), nn.Parameter(torch.randn(dim))
        cells = sinusoids(100, dim, position) if position == "paper" else torch.randn(100, dim)
        self.cells = nn.Parameter(cells, requires_grad=position != "paper")

    def forward(self, stimulus):  # (B, 100, 2) -> (B, S, C), what is added to the scores of these keys (B, S)
        taken = stimulus[:, :, 0] > 0
        objects = taken.sum(1, keepdim=True)  # (B, 1)
        most = int(objects.max())  # the one number that a training step reads from the device
        cell = taken.int().argsort(dim=1, descending=True, stable=True)[:, :most + 1]  # objects first, then empty cells
        empty = torch.arange(cell.shape[1], device=cell.device) >= objects
        place = F.embedding(cell.masked_fill(empty, 100), F.pad(self.cells, (0, 0, 0, 1)))  # zeros for an empty cell
        x = self.embedding(stimulus.gather(1, cell[:, :, None].expand(-1, -1, 2))) + place
        share = torch.log((100 - objects) / (cell.shape[1] - objects))  # empty cells, over tokens that stand for them
        return torch.cat([x, self.eos.expand(len(x), 1, -1)], 1), F.pad(torch.where(empty, share, 0), (0, 1))


class Linear(nn.Linear):
    """A linear layer whose weights start with variance 1 / fan-in."""

    def reset_parameters(self):
        nn.init.normal_(self.weight, std=self.in_features ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class Attention(nn.Module):
    """Multi-head attention of x to context. It keeps its weights, for eval.py to draw."""

    def __init__(self, dim, heads):
        super().__init__()
        if dim % (2 * heads):  # 2: half of a position is sines, half is cosines
            raise ValueError(f"dim must be a multiple of 2 * heads, not {dim} with {heads} heads")
        self.heads = heads
        self.query, self.value, self.out = (Linear(dim, dim) for _ in range(3))
        self.key = Linear(dim, dim, bias=False)  # a bias would add the same to every score, and cancel
        self.query.weight.data.mul_(0.3)  # look everywhere at first: sharp random attention learns late

    def forward(self, x, context, bias):  # (B, N, C), (B, M, C), (B, M) -> (B, N, C)
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2)  # (B, H, N, D), (B, H, M, D) twice
                   for part in (self.query(x), self.key(context), self.value(context)))
        weights = (q @ k.mT / math.sqrt(q.shape[3]) + bias[:, None, None]).softmax(3)  # (B, H, N, M)
        self.weights = weights.detach()
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A post-norm Transformer block: attention to context, then an MLP, each added and normalized."""

    def __init__(self, dim, heads):
        super().__init__()
        self.attention, self.norm1 = Attention(dim, heads), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(Linear(dim, 4 * dim), nn.GELU(), Linear(4 * dim, dim))
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, x, context, bias):  # (B, N, C), (B, M, C), (B, M) -> (B, N, C)
        x = self.norm1(x + self.attention(x, context, bias))
        return self.norm2(x + self.mlp(x))


class Encoder(nn.Module):
    """Encodes a stream by a stack of blocks. With `read`, the last block returns that token alone."""

    def __init__(self, stream, dim, layers, heads, read=None):
        super().__init__()
        self.stream, self.read = stream, read
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))

    def forward(self, tokens):  # (B, T, 5) or (B, 100, 2) -> (B, N or 1, C), what is added to their scores (B, N)
        x, bias = self.stream(tokens)
        for block in self.blocks[:-1]:
            x = block(x, x, bias)
        queries = x if self.read is None else x[:, [self.read]]
        return self.blocks[-1](queries, x, bias), bias


class Hypernetwork(nn.Module):
    """A linear layer whose weights and biases are affine in a code z, other ones for each trial."""

    def __init__(self, code, inputs, outputs):
        super().__init__()
        self.shape, self.weights = (inputs + 1, outputs), Linear(code, (inputs + 1) * outputs)

    def forward(self, z, x):  # (B, code), (B, N, inputs) -> (B, N, outputs)
        # Parameters are of order 1, and scaled here: a step of the optimizer then changes all weights alike.
        weights = self.weights(z).unflatten(1, self.shape) / math.sqrt(x.shape[2])
        return x @ weights[:, 1:] + weights[:, :1]


class Model(nn.Module):
    """Width `dim`; a code z of `code` numbers; `position`: place vectors; `read`: which token gives z;
    `tokens`: one per selector or operator."""

    def __init__(self, dim=128, layers=1, heads=4, code=64, position: Literal["sinusoidal", "paper"] = "sinusoidal",
                 read: Literal["root", "eos"] = "root", tokens: Literal["selector", "operator"] = "selector"):
        super().__init__()
        self.instruction = Encoder(Instruction(dim, position, tokens), dim, layers, heads, READ[read])
        self.code, self.stimulus = Linear(dim, code), Stimulus(dim, position)
        self.look, self.value = Hypernetwork(code, dim, heads), Linear(dim, dim)
        self.think, self.conclude = Hypernetwork(code, dim, dim), Hypernetwork(code, dim, dim)
        for layer in (self.think, self.conclude):
            nn.init.normal_(layer.weights.bias)  # the base, which all instructions share and z modifies
        self.norm, self.readout = nn.LayerNorm(dim), Linear(dim, 138)

    def infer(self, instruction):  # (B, T, 5) -> z (B, code)
        return self.code(self.instruction(instruction)[0][:, 0])

    def execute(self, z, stimulus):  # (B, code), (B, 100, 2) -> (B, C)
        x, bias = self.stimulus(stimulus)  # (B, S, C), (B, S)
        weights = (self.look(z, x).mT + bias[:, None]).softmax(2)  # (B, H, S)
        values = self.value(x).unflatten(2, (weights.shape[1], -1))  # (B, S, H, D)
        found = torch.einsum("bhs, bshd -> bhd", weights, values).flatten(1)[:, None]  # (B, 1, C)
        return self.norm(self.conclude(z, F.gelu(self.think(z, found))))[:, 0]

    def features(self, instruction, stimulus):  # (B, T, 5), (B, 100, 2) -> (B, C)
        return self.execute(self.infer(instruction), stimulus)

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
