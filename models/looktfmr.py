"""LookTfmr: a selector looks at the grid once; an operator thinks about what was found.

    selectors           objects
        |                  |
    [ Look: a selector attends to the grid ]    once, by attention alone
        |
    what it found less what it asked for, and where: two tokens
        |
        |      operator    answers of its left and its right branch
        |         |            |
    [ Block: an operator reads itself and these: at most seven tokens ]   x layers
    LN, readout -> 138 logits -> answers, for the next loop    x levels of the tree

No operator sees the grid, and no selector its operator. Selectors and grid use the same vectors of
shapes and of colors, and no shape or no color is 0, so that they can be subtracted: a red a less a
red a is nothing, so it is there; a red a less an a is red. On new pairs of operator and object,
Exist needs the difference, GetColor the 0 (models/RESULTS.md has what each part is worth).

It is told the tree and the number of levels, like LoopTfmr, and hands on answers in the same way.
Neural Module Networks (arXiv 1511.02799) first find, then compute; MAC networks (1803.03067) hand
on what they read from an image; Slot Attention (2006.15055) makes objects of attention, and
relational bottlenecks (2309.06629) let only comparisons through, such as the difference here.

Differs from the paper: all of it is new.
"""
import math

import torch
from torch import nn

import data

TRAINING = {"steps": 2_000}  # enough for it


# ---- as in sstfmr.py ----------------------------------------------------------------------------
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


# ---- the look -----------------------------------------------------------------------------------
class Search(nn.Module):  # attention with one head, whose values are the objects themselves
    def __init__(self, dim):
        super().__init__()
        self.query = nn.Linear(dim, dim)
        self.key = nn.Linear(dim, dim, bias=False)

    def weights(self, x, context, bias):  # (B, N, C), (B, S, 2, C), (B, 1, 1, S) -> (B, 1, N, S)
        keys = self.key(context[:, :, 0])  # the cell is no cue
        scores = self.query(x) @ keys.mT / math.sqrt(x.shape[2])
        return (scores[:, None] + bias).softmax(3)


class Look(nn.Module):
    """What a selector finds less what it asks for, and the cell."""

    def __init__(self, dim):
        super().__init__()
        self.attention = Search(dim)
        self.norm1 = nn.LayerNorm(dim)

    def forward(self, x, context, bias):  # (B, N, C), (B, S, 2, C) -> (B, N, 2, C)
        weights = self.attention.weights(self.norm1(x), self.norm1(context), bias)[:, 0]
        thing = weights @ context[:, :, 0]  # (B, N, C)
        cell = weights @ context[:, :, 1]  # (B, N, C)
        return torch.stack([thing - x, cell], 2)


class Selectors(nn.Module):
    """What the two selectors of each operator find: two tokens of the first one, two of the other
    one."""

    def __init__(self, dim):
        super().__init__()
        self.shape = nn.Embedding(data.SHAPES + 1, dim, padding_idx=0)  # no shape is 0
        self.color = nn.Embedding(data.COLORS + 1, dim, padding_idx=0)
        self.cell = nn.Embedding(len(data.CELLS), dim)
        self.look = Look(dim)
        self.kinds = nn.Parameter(torch.randn(4, dim))  # thing 1, cell 1, thing 2, cell 2

    def objects(self, stimulus):  # (B, 100, 2) -> (B, S, 2, C), log of their counts (B, S)
        """What each object is, and its cell. Every trial has one; empty cells are left out."""
        is_empty = stimulus[:, :, 0] == 0  # (B, 100)
        most = int((~is_empty).sum(1).max())  # objects of the fullest grid; waits for the GPU
        cell = is_empty.int().argsort(stable=True)[:, :most]  # (B, most), objects first
        shape, color = stimulus.take_along_dim(cell[:, :, None], 1).unbind(2)
        things = self.shape(shape) + self.color(color)
        return torch.stack([things, self.cell(cell)], 2), (shape > 0).log()  # absent: log 0

    def forward(self, operators, stimulus):  # -> (B, O, 4, C), log of their counts (B, O, 4)
        B, O = operators.shape[:2]
        shape = operators[:, :, 1::2]  # columns 1 and 3, of the two selectors: (B, O, 2)
        color = operators[:, :, 2::2]  # columns 2 and 4
        asked = self.shape(shape) + self.color(color)  # (B, O, 2, C)
        objects, log_count = self.objects(stimulus)
        found = self.look(asked.flatten(1, 2), objects, log_count[:, None, None])  # (B, 2 O, 2, C)
        found = found.reshape(B, O, 4, -1)  # thing 1, cell 1, thing 2, cell 2
        asks = shape + color > 0  # (B, O, 2)
        count = torch.stack([asks, asks], 3).flatten(2)  # of thing and cell: (B, O, 4)
        return found + self.kinds, count.log()


# ---- the model ----------------------------------------------------------------------------------
class Model(nn.Module):
    def __init__(self, dim=128, layers=2, heads=4):
        super().__init__()
        self.operator = nn.Embedding(len(data.OPERATORS) + 1, dim)  # + 1: 0 is none
        self.selectors = Selectors(dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.readout = nn.Linear(dim, data.CLASSES)
        self.answers = nn.Parameter(torch.randn(data.CLASSES, dim))
        self.sides = nn.Parameter(torch.randn(2, dim))  # left, right
        self.looks = {"selectors.look": ("selectors", "objects")}  # for eval.py
        self.apply(init)
        self.selectors.look.attention.query.weight.data.mul_(0.3)  # init knows Attention alone

    def features(self, instruction, stimulus):  # (B, T, 5), (B, 100, 2) -> (B, C)
        operators = data.operators_of(instruction)  # (B, O, 5)
        B, O = operators.shape[:2]
        question = self.operator(operators[:, :, 0]).flatten(0, 1)[:, None]  # (B O, 1, C)
        found, log_count = self.selectors(operators, stimulus)  # (B, O, 4, C), (B, O, 4)
        found = found.flatten(0, 1)  # (B O, 4, C)
        own = log_count.new_zeros(B, O, 1)  # log 1
        below = log_count.new_zeros(B, O, 2)
        below[:, O // 2:] = -math.inf  # leaves have no branches: log 0
        bias = torch.cat([own, log_count, below], 2).flatten(0, 1)[:, None, None]  # (B O, 1, 1, 7)
        answers = found.new_zeros(B, O, found.shape[2])  # none yet
        nobody = found.new_zeros(B, O + 1, found.shape[2])  # the branches that leaves do not have
        for _ in range(O.bit_length()):  # levels: 1, 3, 7, 15, 31 operators have 1, 2, 3, 4, 5
            known = torch.cat([answers, nobody], 1)  # (B, 2 O + 1, C)
            # the branches of operator i are 2 i + 1 and 2 i + 2
            branches = known[:, 1:].unflatten(1, (O, 2)) + self.sides  # (B, O, 2, C)
            x = question
            for block in self.blocks:
                x = block(x, torch.cat([x, found, branches.flatten(0, 1)], 1), bias)
            features = self.norm(x[:, 0]).unflatten(0, (B, O))
            answers = self.readout(features).softmax(2) @ self.answers  # (B, O, C)
        return features[:, 0]

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
