"""TreeTfmr: every operator looks at the stimulus by itself, and a learned choice folds the tree (not in the paper).

    operator    selector 1   selector 2                     the same three parts for every operator:
        |            |            |
        |       [ Retrieve ]  [ Retrieve ] <- stimulus      1. attention by content finds the selectors' objects
        |            |            |
        '------>[       Compute       ]                     2. an MLP makes the operator's value of what was found
                          |
            condition ---.|.--- then, else                  3. value = p then + (1 - p) else, p = sigmoid(condition),
                      [ Choose ]                               from the leaves up to the root
                          |
                       readout -> 138 logits

It can read trees deeper than any that it was trained on because nothing in it knows of depth: a choice between two values
is again such a value. What it is given, and the paper's models are not: which token is whose child, and that an
IfElse is a choice between two branches. What it learns: what every operator means, how to find its objects, and that
the value of a condition is to be read as a choice. Its ablations (class arguments) say which of this carries it.

Differs from the paper: all of it.
"""
import torch
from torch import nn
from torch.nn import functional as F

PAPER = {"optimizer": "adamw"}
SHARPNESS, ABSENT = 16.0, 0.75  # initial scale of the scores; initial score of finding nothing, where a match has 1


class Retrieve(nn.Module):
    """Attention by content. A selector and an object of one shape or color share that feature's vector, of length 1;
    their score is the share of the selector's features that the object has, as far as these vectors are
    orthogonal. One more key stands for finding nothing."""

    def __init__(self, dim):
        super().__init__()
        self.features = nn.ParameterList([torch.randn(27, dim), torch.randn(11, dim)])  # of shapes, of colors
        self.cells, self.nothing = nn.Parameter(torch.randn(100, dim)), nn.Parameter(torch.randn(dim))
        self.sharpness, self.absent = nn.Parameter(torch.tensor(SHARPNESS)), nn.Parameter(torch.tensor(ABSENT))

    def forward(self, selectors, stimulus):  # (B, N, 2), (B, S, 2) -> (B, N, C)
        B, N, S = *selectors.shape[:2], stimulus.shape[1]
        score, value = 0, self.cells
        for i, table in enumerate(self.features):
            # Both sides come from one small vocabulary, so look their products up instead of multiplying.
            unit = F.normalize(table, dim=1)
            asks = torch.arange(len(table), device=table.device)[:, None] > 0  # 0 asks for nothing
            same = unit @ unit.T * asks
            score = score + same[selectors[:, :, i]].gather(2, stimulus[:, None, :, i].expand(-1, N, -1))
            value = value + F.embedding(stimulus[:, :, i], table)
        asked = (selectors > 0).sum(2, True)  # 1 or 2 features; 0 where there is no second selector
        score = torch.cat([score / asked.clamp(min=1), self.absent.expand(B, N, 1)], 2) * self.sharpness
        weights = score.softmax(2)  # (B, N, S + 1)
        return (weights[:, :, :S] @ value + weights[:, :, S:] * self.nothing) * (asked > 0)


class Compute(nn.Module):
    """What an operator makes of what its selectors found."""

    def __init__(self, dim):
        super().__init__()
        self.operator = nn.Parameter(torch.randn(10, 4 * dim))
        self.first, self.second = nn.Linear(dim, 4 * dim), nn.Linear(dim, 4 * dim)
        self.value, self.norm = nn.Linear(4 * dim, dim), nn.LayerNorm(dim)

    def forward(self, operator, found):  # (B, O), (B, O, 2, C) -> (B, O, C)
        hidden = F.embedding(operator, self.operator) + self.first(found[:, :, 0]) + self.second(found[:, :, 1])
        return self.norm(self.value(F.gelu(hidden)))


class Model(nn.Module):
    """Width `dim`. Ablations: one query for both selectors (`queries=1`), weights of their own for each level
    (`shared=False`), a free MLP instead of the choice (`choice=False`)."""

    def __init__(self, dim=128, queries=2, shared=True, choice=True):
        super().__init__()
        self.queries, self.shared = queries, shared
        self.retrieve, self.gate = Retrieve(dim), nn.Linear(dim, 1) if choice else None
        self.compute = nn.ModuleList(Compute(dim) for _ in range(1 if shared else 5))
        self.merge = None if choice else nn.Sequential(nn.Linear(3 * dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim),
                                                       nn.LayerNorm(dim))
        self.readout = nn.Linear(dim, 138)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features ** -0.5)
                nn.init.zeros_(module.bias)

    def choose(self, condition, left, right):  # (B, n, C) each
        if self.gate is None:
            return self.merge(torch.cat([condition, left, right], 2))
        p = self.gate(condition).sigmoid()
        return p * left + (1 - p) * right  # stays in the space of values, so a fold has no depth

    def features(self, instruction, stimulus):  # (B, T, 5), (B, S, 2) -> (B, C)
        B, T = instruction.shape[:2]
        levels, start = [], 0  # the operators of each level: as many IfElses follow, except after the last one
        while start < T:
            levels.append(range(start, start + 2 ** len(levels)))
            start += 2 * len(levels[-1])
        tokens = instruction[:, [i for level in levels for i in level]].long()  # (B, O, 5)
        selectors = tokens[:, :, 1:].unflatten(2, (2, 2))  # (B, O, 2, 2)
        found = self.retrieve(selectors.flatten(1, 2), stimulus.long()).unflatten(1, (-1, 2))  # (B, O, 2, C)
        if self.queries == 1:
            found = torch.stack([found.sum(2) / 2, torch.zeros_like(found[:, :, 0])], 2)
        sizes = [len(level) for level in levels]
        values = [self.compute[0 if self.shared else i](o[:, :, 0], f) for i, (o, f) in
                  enumerate(zip(tokens.split(sizes, 1), found.split(sizes, 1)))]
        below = values.pop()
        while values:
            below = self.choose(values.pop(), below[:, 0::2], below[:, 1::2])
        return below[:, 0]

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
