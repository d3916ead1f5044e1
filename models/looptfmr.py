"""LoopTfmr: the blocks of sstfmr.py, applied to all operators at once, again and again.

    root, left, right      root, left, right     objects ... EOS
        as tokens             as answers            |         |
      |    |     |                |                 |         |
    [ Block: an operator reads its own tokens, the answers of  ]  x layers
    [        its left and its right branch, and the stimulus   ]
      |    |     |
    readout -> 138 logits -> answers, for the next loop    x levels of the tree

After one loop the leaves have answered, after two the operators above them, and so on up to the
root. Only the root's answer has a loss. An answer is the softmax of 138 logits, embedded. By
default, an answer stays where its branches' answers do, so more loops change nothing. Arguments:

    view=own      an operator sees its own tokens, its branches' answers and the stimulus
    view=all      all operators see everything; learned scores tell what is their own
    carry=answer  a loop begins again with the question: only answers go on
    carry=state   a loop goes on with the vectors of the loop before, and with answers

Differs from the paper: all of it is new.
"""
import math
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

import data

OTHER, SELF, LEFT, RIGHT, PARENT = range(5)  # what an operator is to another one


def relations(O):  # -> (O, O): what the operator of a column is to that of a row
    row, column = torch.arange(O)[:, None], torch.arange(O)  # a tree, level by level
    return (SELF * (column == row) + LEFT * (column == 2 * row + 1)
            + RIGHT * (column == 2 * row + 2) + PARENT * (column == (row - 1) // 2))


class Embedding(nn.ModuleList):  # a token is the sum of a vector per feature
    def forward(self, tokens):  # (B, N, features) -> (B, N, C)
        return sum(table(ids) for table, ids in zip(self, tokens.unbind(2), strict=True))


class Questions(nn.Module):  # first selectors, then second ones; no positions
    def __init__(self, dim):
        super().__init__()
        sizes = len(data.OPERATORS) + 1, data.SHAPES + 1, data.COLORS + 1  # + 1: 0 is none
        self.embedding = Embedding(nn.Embedding(size, dim) for size in sizes)
        self.second = nn.Parameter(torch.randn(dim))

    def forward(self, operators):  # (B, O, 5) -> (B, 2 O, C), attention bias
        first, second = operators[:, :, [0, 1, 2]], operators[:, :, [0, 3, 4]]
        x = torch.cat([self.embedding(first), self.embedding(second) + self.second], 1)
        bias = torch.where(second[:, :, 1] > 0, 0, -math.inf)  # absent: no attention
        return x, F.pad(bias, (bias.shape[1], 0))[:, None, None]


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


class Model(nn.Module):
    """`more`: loops beyond one per level."""

    def __init__(self, dim=128, layers=3, heads=4, view: Literal["own", "all"] = "own",
                 carry: Literal["answer", "state"] = "answer", more=0):
        super().__init__()
        self.questions, self.stimulus = Questions(dim), Stimulus(dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.readout = Linear(dim, data.CLASSES)
        self.answers = nn.Parameter(torch.randn(data.CLASSES, dim))
        self.sides = nn.Parameter(torch.randn(2, dim))  # left, right
        self.carry, self.more = carry, more
        if view == "all":  # a score per head: of tokens, of answers, by whose they are
            self.scores = nn.Parameter(torch.zeros(2, 5, heads))
        else:
            self.register_buffer("scores", torch.full((2, 5, 1), -math.inf), persistent=False)
            self.scores[0, SELF] = self.scores[1, [LEFT, RIGHT]] = 0

    def view(self, O):  # -> (H or 1, 2 O, 3 O), attention bias
        tokens, answers = self.scores[:, relations(O)]  # (O, O, H or 1)
        # Rows: first tokens, second tokens. Columns: these, and answers
        return torch.cat([tokens.repeat(2, 2, 1), answers.repeat(2, 1, 1)], 1).permute(2, 0, 1)

    def features(self, instruction, stimulus):  # (B, T, 5), (B, 100, 2) -> (B, C)
        levels, start = [], 0
        while start < instruction.shape[1]:  # w operators, w IfElses, 2 w operators, ...
            levels.append(instruction[:, start:start + 2 ** len(levels)])
            start += 2 * levels[-1].shape[1]
        questions, bias = self.questions(torch.cat(levels, 1))  # (B, 2 O, C)
        objects, y_bias = self.stimulus(stimulus)  # (B, S, C)
        O, S = questions.shape[1] // 2, objects.shape[1]
        bias = torch.cat([F.pad(bias, (0, O)), y_bias], 3) + F.pad(self.view(O), (0, S))
        sides = F.pad(self.sides.repeat(O // 2, 1), (0, 0, 1, 0))  # (O, C): the root has none
        x, known = questions, sides.expand(len(questions), -1, -1)  # no answers yet
        for _ in range(len(levels) + self.more):
            if self.carry == "answer":
                x = questions
            for block in self.blocks:
                x = block(x, torch.cat([x, known, objects], 1), bias)  # (B, 2 O, C)
            known = self.readout(x[:, :O]).softmax(2) @ self.answers + sides
        return x[:, 0]

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
