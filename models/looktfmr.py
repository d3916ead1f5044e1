"""LookTfmr: a selector looks at the grid once; an operator thinks about what was found.

    selectors          objects, empty cells
        |                    |
    [ Look: a selector attends to the grid ]    once, by attention alone
        |
    the shape, the color and the cell of what it found, and whether it fits: a token each
        |
        |      operator    answers of its left and its right branch
        |         |            |
    [ Block: an operator reads itself and these: at most eleven tokens ]   x layers
    LN, readout -> 138 logits -> answers, for the next loop    x levels of the tree

An operator never sees the grid, and no selector sees its operator (but GetColor and GetShape name
one property, not two). With a token per property, an operator can attend to the one that it needs.
Exist needs only whether there is such an object: the fourth token says how far the shape and the
color that were found are from those that were asked for. Selectors and grid use the same embeddings
of shapes and of colors, so that they can be compared.

It is told the tree and the number of levels, like LoopTfmr, and hands on answers in the same way.
Neural Module Networks (arXiv 1511.02799) first find, then compute; MAC networks (1803.03067) hand
on what they read from an image; Slot Attention (2006.15055) makes objects of attention, and
relational bottlenecks (2309.06629) keep what is seen apart from what is done with it.

Differs from the paper: all of it is new.
"""
import math

import torch
from torch import nn

import data

FOUND = 4  # tokens of a selector: shape, color, cell, whether it fits


# ---- as in sstfmr.py ----------------------------------------------------------------------------
class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        if dim % heads:
            raise data.UsageError(f"dim must be a multiple of heads, not {dim} with {heads} heads")
        self.split = heads, -1  # C = H * D
        self.query, self.value, self.out = (nn.Linear(dim, dim) for _ in range(3))
        self.key = nn.Linear(dim, dim, bias=False)  # a bias shifts all scores of a query alike

    def weights(self, x, context, bias):  # (B, N, C), (B, M, C), attention bias -> (B, H, N, M)
        q, k = self.query(x).unflatten(2, self.split), self.key(context).unflatten(2, self.split)
        scores = torch.einsum("bnhd, bmhd -> bhnm", q, k) / math.sqrt(q.shape[3])
        return (scores + bias).softmax(3)

    def forward(self, x, context, bias):  # -> (B, N, C)
        v = self.value(context).unflatten(2, self.split)
        x = torch.einsum("bhnm, bmhd -> bnhd", self.weights(x, context, bias), v)
        return self.out(x.flatten(2))


class Block(nn.Module):  # norms in front, also of the keys
    def __init__(self, dim, heads):
        super().__init__()
        self.attention, self.norm1 = Attention(dim, heads), nn.LayerNorm(dim)
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


# ---- the model ----------------------------------------------------------------------------------
class Search(nn.Module):
    """Where selectors look, by shapes and colors alone: one head."""

    def __init__(self, dim):
        super().__init__()
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False)

    def weights(self, x, context, bias):  # (B, N, C), (B, S, 3, C), (B, 1, 1, S) -> (B, 1, N, S)
        keys = self.key(context[:, :, 0] + context[:, :, 1])  # the cell is no cue
        scores = self.query(x) @ keys.mT / math.sqrt(x.shape[2])
        return (scores[:, None] + bias).softmax(3)


class Look(nn.Module):
    """The selectors, N = 2 O of O operators, and the shape, color and cell of objects -> four
    tokens for each selector."""

    def __init__(self, dim):
        super().__init__()
        self.attention, self.norm1 = Search(dim), nn.LayerNorm(dim)
        self.fits, self.differs = nn.Parameter(torch.randn(dim)), nn.Parameter(torch.randn(dim))

    def forward(self, x, context, bias):  # (B, N, C), (B, S, 3, C) -> (B, N, 4 C)
        weights = self.attention.weights(self.norm1(x), self.norm1(context), bias)[:, 0]
        found = torch.einsum("bns, bspc -> bnpc", weights, context)  # (B, N, 3, C)
        far = (x - found[:, :, 0] - found[:, :, 1]).pow(2).mean(2)[:, :, None, None]  # 0: it fits
        fit = (self.fits + far * self.differs) / (1 + far)
        return torch.cat([found, fit], 2).flatten(2)


class Model(nn.Module):
    def __init__(self, dim=128, layers=3, heads=4):
        super().__init__()
        self.operator = nn.Embedding(len(data.OPERATORS) + 1, dim)  # + 1: 0 is none
        self.shape = nn.Embedding(data.SHAPES + 1, dim)
        self.color = nn.Embedding(data.COLORS + 1, dim)
        self.cell = nn.Embedding(len(data.CELLS) + 1, dim)  # + 1: the last is no cell
        self.look = Look(dim)
        self.kinds = nn.Parameter(torch.randn(2 * FOUND, dim))  # of found tokens
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm, self.readout = nn.LayerNorm(dim), nn.Linear(dim, data.CLASSES)
        self.answers = nn.Parameter(torch.randn(data.CLASSES, dim))
        self.sides = nn.Parameter(torch.randn(2, dim))  # left, right
        self.looks = {"look": (0, "objects")}  # for eval.py: the root's first selector
        self.apply(init)
        self.look.attention.query.weight.data.mul_(0.3)  # even attention at first

    def properties(self, stimulus):  # (B, 100, 2) -> (B, S, 3, C), log of their counts (B, S)
        """Objects and one token for all empty cells: shape, color, cell of each."""
        is_empty = stimulus[:, :, 0] == 0  # (B, 100)
        most = int((~is_empty).sum(1).max())  # objects of the fullest grid; waits for the GPU
        cell = is_empty.int().argsort(stable=True)[:, :most]  # (B, most), objects first
        shape, color = stimulus.take_along_dim(cell[:, :, None], 1).unbind(2)
        count = torch.cat([shape > 0, is_empty.sum(1, True)], 1)  # 0 for padding
        none = torch.zeros_like(cell[:, :1])
        shape, color = torch.cat([shape, none], 1), torch.cat([color, none], 1)
        cell = torch.cat([cell, none + len(data.CELLS)], 1)
        return torch.stack([self.shape(shape), self.color(color), self.cell(cell)], 2), count.log()

    def found(self, operators, stimulus):  # (B, O, 5), (B, 100, 2) -> (B, O, 8, C)
        _, shape1, color1, shape2, color2 = operators.unbind(2)  # (B, O) each
        first = self.shape(shape1) + self.color(color1)
        second = self.shape(shape2) + self.color(color2)
        objects, log_count = self.properties(stimulus)
        found = self.look(torch.cat([first, second], 1), objects, log_count[:, None, None])
        first, second = found.unflatten(2, (FOUND, -1)).chunk(2, 1)  # (B, O, 4, C) each
        return torch.cat([first, second], 2) + self.kinds

    def bias_of(self, operators):  # (B, O, 5) -> (B, O, 11): 0, or -inf where there is no token
        O = operators.shape[1]
        there = torch.ones_like(operators[:, :, :1]).expand(-1, -1, 1 + 2 * FOUND + 2).clone()
        there[:, :, 1 + FOUND:1 + 2 * FOUND] = operators[:, :, 3:4] > 0  # second selector
        there[:, O // 2:, -2:] = 0  # leaves have no branches
        return there.log()

    def features(self, instruction, stimulus):  # (B, T, 5), (B, 100, 2) -> (B, C)
        operators = data.operators_of(instruction)  # (B, O, 5)
        B, O = operators.shape[:2]
        question = self.operator(operators[:, :, 0]).flatten(0, 1)[:, None]  # (B O, 1, C)
        found = self.found(operators, stimulus).flatten(0, 1)  # (B O, 8, C)
        bias = self.bias_of(operators).flatten(0, 1)[:, None, None]  # (B O, 1, 1, 11)
        known = torch.zeros(B, 2 * O + 1, found.shape[2], device=found.device)  # no answers yet
        for _ in range(O.bit_length()):  # levels: 1, 3, 7, 15, 31 operators have 1, 2, 3, 4, 5
            # (B, O, 2, C): the answers of operators 2 i + 1 and 2 i + 2, the branches of operator i
            branches = known[:, 1:].unflatten(1, (O, 2)) + self.sides
            x = question
            for block in self.blocks:
                x = block(x, torch.cat([x, found, branches.flatten(0, 1)], 1), bias)
            features = self.norm(x[:, 0]).unflatten(0, (B, O))
            answers = self.readout(features).softmax(2) @ self.answers  # (B, O, C)
            known = torch.cat([answers, torch.zeros_like(known[:, O:])], 1)
        return features[:, 0]

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
