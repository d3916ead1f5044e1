"""TreeTfmr: every operator looks at the stimulus by itself, and a learned choice folds the tree (not in the paper).

    operator    selector 1   selector 2                     the same three parts for every operator:
        |            |            |
        |       [ Retrieve ]  [ Retrieve ] <- stimulus      1. attention by content finds the selectors' objects
        |            |            |
        '------>[       Compute       ]                     2. an MLP makes the operator's value of what was found
                          |
            condition ---.|.--- then, else                  3. value = p then + (1 - p) else, with p =
                      [ Choose ]                               sigmoid(gate(condition)), from the leaves up
                          |
                       readout -> 138 logits

It can read trees deeper than any that it was trained on because nothing in it knows of depth: a choice between two
values is again such a value. What it is given, and the paper's models are not: which token is whose child, that an
IfElse is a choice between two branches, and that a selector fits an object of its shape and color. What it learns:
what every operator means, and that the value of a condition is to be read as a choice. Its ablations (arguments of
Model) say what is needed: a query for each selector and shared weights are; the choice and the fit can be learned too.

Differs from the paper: all of it.
"""
import torch
from torch import nn
from torch.nn import functional as F

PAPER = {"optimizer": "adamw"}
QUICK = {"steps": 4_000}  # a step is cheap: there is no encoder
SHARPNESS, ABSENT = 16.0, 0.75  # at first: scale of the scores; score of finding nothing, where a match has 1


class Retrieve(nn.Module):
    """Attention by content. If tied, a selector and an object of one shape or color share that feature's vector.
    Compared at length 1, their score is the share of the selector's features that the object has, as far as these
    vectors are orthogonal. One more key stands for finding nothing."""

    def __init__(self, dim, tied):
        super().__init__()
        # Short beside the cells' vectors: how an unusual object looks must not disturb where it seems to be.
        self.features = nn.ParameterList([0.5 * torch.randn(27, dim), 0.5 * torch.randn(11, dim)])  # shapes, colors
        self.cells, self.nothing = nn.Parameter(torch.randn(100, dim)), nn.Parameter(torch.randn(dim))
        self.sharpness, self.absent = nn.Parameter(torch.tensor(SHARPNESS)), nn.Parameter(torch.tensor(ABSENT))
        self.asks = None if tied else nn.ParameterList([torch.randn(27, dim), torch.randn(11, dim)])

    def forward(self, selectors, stimulus):  # (B, N, 2), (B, S, 2) -> (B, N, C)
        score, value, S = 0, self.cells, stimulus.shape[1]
        for i in range(selectors.shape[2]):  # shape, color; of two selectors in one query: shape, color, shape, color
            # Both sides come from one small vocabulary, so look their products up instead of multiplying.
            has = F.normalize(self.features[i % 2], dim=1)
            asks = has if self.asks is None else F.normalize(self.asks[i % 2], dim=1)
            something = torch.arange(len(has), device=has.device)[:, None] > 0  # 0 asks for nothing
            same = ((asks @ has.T) * something)[selectors[:, :, i]]
            score = score + same.gather(2, stimulus[:, None, :, i % 2].expand(-1, selectors.shape[1], -1))
        for i, table in enumerate(self.features):
            value = value + F.embedding(stimulus[:, :, i], table)
        asked = (selectors > 0).sum(2, True)  # features; 0 where there is no second selector
        score = torch.cat([score / asked.clamp(min=1), self.absent.expand(score.shape[:2]).unsqueeze(2)], 2)
        weights = (score * self.sharpness).softmax(2)  # (B, N, S + 1)
        return (weights[:, :, :S] @ value + weights[:, :, S:] * self.nothing) * (asked > 0)


class Compute(nn.Module):
    """What an operator makes of what its selectors found: one MLP for all operators, each of which opens and closes its
    hidden units. (Added to them instead, an operator is not heard over objects that it was never asked about.)"""

    def __init__(self, dim):
        super().__init__()
        self.operator = nn.Parameter(torch.randn(10, 4 * dim))
        self.first, self.second = nn.Linear(dim, 4 * dim), nn.Linear(dim, 4 * dim)
        self.value, self.norm = nn.Linear(4 * dim, dim), nn.LayerNorm(dim)

    def forward(self, operator, found):  # (B, O), (B, O, 2, C) -> (B, O, C)
        hidden = F.gelu(self.first(found[:, :, 0]) + self.second(found[:, :, 1]))
        return self.norm(self.value(hidden * F.embedding(operator, self.operator)))


class Model(nn.Module):
    """Width `dim`. Ablations: one query for both selectors (`queries=1`), weights of their own for each level
    (`shared=False`), a free MLP instead of the choice (`choice=False`), vectors of their own for what selectors ask
    (`tied=False`)."""

    def __init__(self, dim=128, queries=2, shared=True, choice=True, tied=True):
        super().__init__()
        self.queries = queries
        self.retrieve, self.gate = Retrieve(dim, tied), nn.Linear(dim, 1) if choice else None
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
        return p * left + (1 - p) * right  # between two values, so it can be folded any number of times

    def fold(self, values):  # the values of each level (B, n, C), root first -> (B, C)
        *conditions, below = values
        for condition in reversed(conditions):
            below = self.choose(condition, below[:, 0::2], below[:, 1::2])
        return below[:, 0]

    def features(self, instruction, stimulus):  # (B, T, 5), (B, S, 2) -> (B, C)
        levels, start = [], 0
        while start < instruction.shape[1]:  # of each level, its 1, 2, 4, ... operators; as many IfElses follow them
            levels.append(instruction[:, start:start + 2 ** len(levels)].long())
            start += 2 * levels[-1].shape[1]
        tokens, widths = torch.cat(levels, 1), [level.shape[1] for level in levels]  # (B, O, 5)
        selectors = tokens[:, :, 1:].unflatten(2, (self.queries, -1)).flatten(1, 2)  # (B, O * queries, 4 / queries)
        found = self.retrieve(selectors, stimulus.long()).unflatten(1, (-1, self.queries))
        found = F.pad(found, (0, 0, 0, 2 - self.queries))  # (B, O, 2, C)
        parts = zip(tokens[:, :, 0].split(widths, 1), found.split(widths, 1))
        return self.fold([self.compute[i if len(self.compute) > 1 else 0](*part) for i, part in enumerate(parts)])

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
