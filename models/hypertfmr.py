"""HyperTfmr: the instruction becomes the weights of the network that looks at the stimulus (not in the paper).

    instruction EOS
         |       |
        [ Encoder ]
                 |
           code z (64)       all that the answer learns of the instruction
                 |
         [ Hypernetwork ]    weights = base + M z, of three layers:
          |      |      |
          v      v      v
    stimulus -> Look -> Think -> Conclude -> LN -> readout -> 138 logits

    Look scores every cell, and the cells' values are averaged by these scores (a softmax); Think and Conclude are an
    MLP on the average.

Kobayashi et al. 2024 (arXiv 2407.12275): where a bottleneck separates finding out the task from solving it, a network
can come to generalize compositionally. There the task is inferred from examples of it; gCOG states the task, so that
here z has only to be read off the instruction.

Differs from the paper: all of it.
"""
import math

import torch
from torch import nn
from torch.nn import functional as F

INSTRUCTION, STIMULUS = (10, 27, 11, 27, 11), (27, 11)  # values of each feature of a token, 0 and all letters included
PAPER = {"optimizer": "adamw"}
QUICK = {"steps": 1_800}  # a step is cheap: no cell reads the others


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


class Encoder(nn.Module):
    """One stream: its tokens and an EOS through a stack of blocks. With `last`, only the EOS leaves the last one."""

    def __init__(self, sizes, dim, layers, heads, position, last):
        super().__init__()
        self.embedding, self.position, self.last = Embedding(sizes, dim), position, last
        self.cells = nn.Parameter(torch.randn(100, dim)) if position == "learned" else None
        self.relative = nn.Parameter(torch.zeros(heads, 17)) if position == "relative" else None
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))

    def forward(self, tokens):  # (B, N, features) -> (B, 1 if last else N + 1, C)
        N, like, bias = tokens.shape[1], self.embedding.table, 0
        if self.position == "learned":
            places = self.cells
        elif self.position == "relative":
            places, place = like.new_zeros(N, like.shape[1]), torch.arange(N + 1, device=like.device)
            bias = self.relative[:, (place[:, None] - place).clamp(-8, 8) + 8]  # (H, N + 1, N + 1), with EOS
        else:
            places = sinusoids(N, *WAVELENGTHS[self.position], like)
        blocks = self.blocks[:-1] if self.last else self.blocks
        layers = [getattr(block.attention, name) for block in blocks[:1] for name in ("query", "key", "value")]
        x, *qkv = self.embedding(tokens, places, layers)
        for block in blocks:
            x, qkv = block(x, x, bias, qkv), None
        if self.last:  # nothing else of the last block is read
            x = self.blocks[-1](x[:, -1:], x, bias if self.relative is None else bias[:, -1:])
        return x


class Hypernetwork(nn.Module):
    """A linear layer whose weights and biases are affine in a code z, other ones for each trial."""

    def __init__(self, code, inputs, outputs):
        super().__init__()
        self.shape, self.weights = (inputs + 1, outputs), nn.Linear(code, (inputs + 1) * outputs)

    def forward(self, z, x):  # (B, code), (B, N, inputs) -> (B, N, outputs)
        # Of order 1, and scaled here, not at the start: a step of the optimizer then changes all weights alike.
        weights = self.weights(z).unflatten(1, self.shape) / math.sqrt(x.shape[2])
        return x @ weights[:, 1:] + weights[:, :1]


class Model(nn.Module):
    """Width `dim`, a code z of `code` numbers; `layers` and `position` (as in the other models) are those of the
    instruction's encoder, `heads` also the number of scores per cell."""

    def __init__(self, dim=128, layers=1, heads=4, position="sinusoidal", code=64):
        super().__init__()
        if min(heads, layers) < 1 or dim % heads or dim % 2 or position not in ("sinusoidal", "relative", "paper"):
            raise ValueError("dim must be even, heads divide it, layers at least 1, position sinusoidal, relative "
                             f"or paper, not dim={dim}, heads={heads}, layers={layers}, position={position}")
        self.instruction = Encoder(INSTRUCTION, dim, layers, heads, position, last=True)
        self.code = nn.Linear(dim, code)
        self.stimulus, self.cells = Embedding(STIMULUS, dim), nn.Parameter(torch.randn(100, dim))
        self.look, self.value = Hypernetwork(code, dim, heads), nn.Linear(dim, dim)
        self.think, self.conclude = Hypernetwork(code, dim, dim), Hypernetwork(code, dim, dim)
        self.norm, self.readout = nn.LayerNorm(dim), nn.Linear(dim, 138)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features ** -0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Attention):
                module.query.weight.data.mul_(0.3)  # look everywhere at first: sharp random attention learns late
        for module in (self.think, self.conclude):
            nn.init.normal_(module.weights.bias)  # the base: what all instructions share, and z only changes; 0 in look

    def infer(self, instruction):  # (B, T, 5) -> z (B, code)
        return self.code(self.instruction(instruction)[:, 0])

    def execute(self, z, stimulus):  # (B, code), (B, S, 2) -> (B, C)
        x, = self.stimulus(stimulus, self.cells)  # (B, S + 1, C)
        weights = self.look(z, x).mT.softmax(2)  # (B, H, S + 1)
        values = self.value(x).unflatten(2, (weights.shape[1], -1))  # (B, S + 1, H, D)
        found = torch.einsum("bhs, bshd -> bhd", weights, values).flatten(1)[:, None]  # (B, 1, C)
        return self.norm(self.conclude(z, F.gelu(self.think(z, found))))[:, 0]

    def features(self, instruction, stimulus):  # (B, T, 5), (B, S, 2) -> (B, C)
        return self.execute(self.infer(instruction), stimulus)

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
