"""LoopTfmr: the blocks of sstfmr.py, applied to all operators at once, again and again.

    root, left, right      root, left, right     objects ... EOS
        as tokens             as answers            |         |
      |    |     |                |                 |         |
    [ Block: an operator reads its own tokens, the answers of  ]  x layers
    [        its left and its right branch, and the stimulus   ]
    LN, readout -> 138 logits -> answers, for the next loop    x levels of the tree

It is told which operators are whose branches and how many levels there are, like Neural Module
Networks (arXiv 1511.02799) and Tree-LSTMs (1503.00075). The leaves have answered after one loop,
the operators above them after two, and by default further loops do not change these answers.
Universal Transformers (1807.03819) loop like this. An answer is the softmax of 138 logits,
embedded. Only the root's has a loss. No block changes an object, so an MLP of its own, `bind`,
joins its shape and its color, a mere sum before. Differs from the paper: all of it is new.
Arguments:

    view=own      an operator sees its own tokens, its branches' answers and the stimulus
    view=all      all operators see everything; learned scores tell what is their own
    carry=answer  a loop begins again with the question: only answers go on
    carry=state   a loop goes on with the vectors of the loop before, and with answers
"""
import math
from typing import Literal

import torch
from torch import nn

import data

OTHER, SELF, LEFT, RIGHT, PARENT = range(5)  # what an operator is to another one


# ---- the tree and its questions -----------------------------------------------------------------
def relations(O):  # -> (O, O): what the operator of a column is to that of a row
    table = torch.full((O, O), OTHER)
    for i in range(O):
        table[i, i] = SELF
        if i > 0:
            table[i, (i - 1) // 2] = PARENT
        if 2 * i + 2 < O:
            table[i, 2 * i + 1] = LEFT
            table[i, 2 * i + 2] = RIGHT
    return table


class Questions(nn.Module):  # first selectors, second selectors; no positions
    def __init__(self, dim):
        super().__init__()
        self.operator = nn.Embedding(len(data.OPERATORS) + 1, dim)  # + 1: 0 is none
        self.shape = nn.Embedding(data.SHAPES + 1, dim)
        self.color = nn.Embedding(data.COLORS + 1, dim)
        self.second = nn.Parameter(torch.randn(dim))

    def forward(self, operators):  # (B, O, 5) -> (B, 2 O, C), log of their counts (B, 2 O)
        operator, shape1, color1, shape2, color2 = operators.unbind(2)  # (B, O) each
        x = self.operator(operator)
        first = x + self.shape(shape1) + self.color(color1)
        second = x + self.shape(shape2) + self.color(color2) + self.second
        count = torch.cat([torch.ones_like(shape1), shape2 > 0], 1)  # absent: log 0
        return torch.cat([first, second], 1), count.log()


# ---- as in sstfmr.py ----------------------------------------------------------------------------
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


# ---- the model ----------------------------------------------------------------------------------
class Model(nn.Module):
    def __init__(self, dim=128, layers=3, heads=4, view: Literal["own", "all"] = "own",
                 carry: Literal["answer", "state"] = "answer"):
        super().__init__()
        self.questions = Questions(dim)
        self.stimulus = Stimulus(dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.bind = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(),
                                  nn.Linear(4 * dim, dim))
        self.norm = nn.LayerNorm(dim)
        self.readout = nn.Linear(dim, data.CLASSES)
        self.answers = nn.Parameter(torch.randn(data.CLASSES, dim))
        self.sides = nn.Parameter(torch.randn(2, dim))  # left, right
        self.carry = carry
        self.looks = {"blocks": (0, "operators answers grid")}  # for eval.py
        self.register_buffer("relations", relations(len(data.OPERATOR_ROWS)), persistent=False)
        if view == "all":  # [0]: of tokens, [1]: of answers; by head, by relation
            self.scores = nn.Parameter(torch.zeros(2, heads, 5))
        else:
            self.register_buffer("scores", torch.full((2, 1, 5), -math.inf), persistent=False)
            self.scores[0, :, SELF] = 0
            self.scores[1, :, [LEFT, RIGHT]] = 0
        self.apply(init)

    def bias_of(self, O, S):  # -> (H or 1, 2 O, 3 O + S), by whose a key is
        table = self.relations[:O, :O]
        tokens = self.scores[0][:, table]  # (H or 1, O, O)
        answers = self.scores[1][:, table]
        rows = torch.cat([tokens, tokens, answers, tokens.new_zeros(len(tokens), O, S)], 2)
        return torch.cat([rows, rows], 1)  # of first and of second tokens; all see the stimulus

    def features(self, instruction, stimulus):  # (B, T, 5), (B, 100, 2) -> (B, C)
        operators = data.operators_of(instruction)  # (B, O, 5)
        questions, x_log_count = self.questions(operators)  # (B, 2 O, C), (B, 2 O)
        objects, y_log_count = self.stimulus(stimulus)  # (B, S, C), (B, S)
        objects = objects + self.bind(objects)
        B, O = operators.shape[:2]
        zeros = x_log_count.new_zeros(B, O)  # log 1: an answer is there once
        bias = torch.cat([x_log_count, zeros, y_log_count], 1)[:, None, None]  # (B, 1, 1, 3 O + S)
        bias = bias + self.bias_of(O, objects.shape[1])  # (B, H or 1, 2 O, 3 O + S)
        no_side = torch.zeros_like(self.sides[:1])  # the root's; then left, right in turn
        sides = torch.cat([no_side, self.sides.repeat(O // 2, 1)])
        known = sides.expand(B, -1, -1)  # no answers yet
        for loop in range(O.bit_length()):  # levels: 1, 3, 7, 15, 31 operators have 1, 2, 3, 4, 5
            if loop == 0 or self.carry == "answer":
                x = questions
            for block in self.blocks:
                x = block(x, torch.cat([x, known, objects], 1), bias)  # (B, 2 O, C)
            features = self.norm(x[:, :O])  # (B, O, C)
            known = self.readout(features).softmax(2) @ self.answers + sides
        return features[:, 0]

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
