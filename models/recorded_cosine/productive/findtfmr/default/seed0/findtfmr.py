"""FindTfmr: LoopTfmr that is not told which operators are whose branches. It finds them by itself.

    root, left, right     root, left, right, others     objects ... EOS
        as tokens                 as answers               |         |
      |    |     |                     |                   |         |
    [ Block: an operator reads its own tokens, the answers of all ]  x layers
    [        others by a score for each, and the stimulus         ]
    LN, readout -> 138 logits -> answers, for the next loop          until no answer changes

Number the operators in the order of the instruction, and write the numbers in binary. A branch has
its condition's number and one more digit, 0 for left and 1 for right:

                        1
              10                  11
         100      101        110      111        ... 11111 at depth 9

How much an operator looks at another one's answer is a score that is bilinear in the digits of both
numbers, learned, and 0 at first. Four things make what it learns from trees of one and of three
operators a rule that holds in larger ones:

    1) In training a tree lies anywhere in the largest one, so all digits are trained, as with
       randomized positions (arXiv 2305.16843).
    2) Strays lie around it, answers from other trials, so what is no branch is ignored. None is
       where a branch of a leaf would be.
    3) Half of the steps, by lot, have one loop more than levels, so what is solved stays solved,
       as where loops are random in number (2202.05826, 2409.15647).
    4) An operator does not see its own last answer, so it cannot hold on to it.

The Neural Data Router (2110.07732) also learns which operator feeds which, by gates and a search
for the nearest match. All else is as in looptfmr.py. Differs from the paper: all of it is new.
Arguments:

    strays=12     at most so many; each step draws their number
"""
import math

import torch
from torch import nn

import data

LEVELS = 5  # of the largest tree, depth 9
LARGEST = 2 ** LEVELS - 1  # its operators
SCALE = 2  # of digits: so a step moves their scores four times as far


def digits(number):  # 9 numbers
    """The digits behind the first, -1 or 1, or 0 where there is none; 1 where there is one, or -1;
    and a 1."""
    way = [2 * int(digit) - 1 for digit in f"{number:b}"[1:]]
    none = LEVELS - 1 - len(way)
    return way + [0] * none + [1] * len(way) + [-1] * none + [1]


def place(B, O, strays):  # -> numbers (B, O + strays), for training
    """Lays a tree of O operators on any level of the largest one, and strays around it."""
    level = torch.randint(LEVELS + 1 - O.bit_length(), (B, 1))
    root = 2 ** level + (torch.rand(B, 1) * 2 ** level).long()
    number = torch.arange(1, O + 1)
    tree = number + (root - 1) * 2 ** number.log2().long()
    order = torch.rand(B, 2 * LARGEST + 2)  # of all numbers: by lot, but branches of leaves last
    order.scatter_(1, 2 * tree, 1).scatter_(1, 2 * tree + 1, 1)
    order.scatter_(1, tree, torch.arange(-O, 0.).expand(B, O))  # and the tree first
    return order[:, 1:LARGEST + 1].argsort(1)[:, :O + strays] + 1


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


class Stimulus(nn.Module):
    """Objects, empty cells, EOS. Empty cells have no position. So they are equal, and n equal keys
    weigh as much as one whose score is log n higher: one token stands for n of them."""

    def __init__(self, dim):
        super().__init__()
        self.shape = nn.Embedding(data.SHAPES + 1, dim)
        self.color = nn.Embedding(data.COLORS + 1, dim)
        self.cell = nn.Embedding(len(data.CELLS), dim)
        self.eos = nn.Parameter(torch.randn(dim))

    def forward(self, stimulus):  # (B, 100, 2) -> (B, S, C), log of their counts (B, S)
        empty_cell = stimulus[:, :, 0] == 0
        most = int((~empty_cell).sum(1).max())  # the one number that a step reads from the device
        cell = empty_cell.int().argsort(stable=True)[:, :most + 1]  # objects first
        shape, color = stimulus.take_along_dim(cell[:, :, None], 1).unbind(2)
        empty_token = shape == 0
        x = self.shape(shape) + self.color(color) + self.cell(cell) * ~empty_token[:, :, None]
        share = empty_cell.sum(1, True) / empty_token.sum(1, True)
        count = torch.cat([share.masked_fill(~empty_token, 1), torch.ones_like(share)], 1)
        return torch.cat([x, self.eos.expand(len(x), 1, -1)], 1), count.log()


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        if dim % heads:
            raise data.UsageError(f"dim must be a multiple of heads, not {dim} with {heads} heads")
        self.split = heads, -1  # C = H * D
        self.query, self.value, self.out = (nn.Linear(dim, dim) for _ in range(3))
        self.key = nn.Linear(dim, dim, bias=False)  # a bias would add the same to every score

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
    if isinstance(module, Attention):  # it comes after its Linears
        module.query.weight.data.mul_(0.3)  # look everywhere at first: sharp attention learns late


class Model(nn.Module):
    def __init__(self, dim=128, layers=3, heads=4, strays=12):
        super().__init__()
        self.questions, self.stimulus = Questions(dim), Stimulus(dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.bind = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(),
                                  nn.Linear(4 * dim, dim))
        self.norm, self.readout = nn.LayerNorm(dim), nn.Linear(dim, data.CLASSES)
        self.answers = nn.Parameter(torch.randn(data.CLASSES, dim))
        self.sides = nn.Parameter(torch.randn(2, dim))  # left, right
        self.strays = strays
        self.looks = {"blocks": (0, "operators answers grid")}  # for eval.py
        table = torch.tensor([digits(number) for number in range(1, LARGEST + 1)]).float()
        self.register_buffer("digits", SCALE * table, persistent=False)
        self.match = nn.Parameter(torch.zeros(heads, 9, 9))  # digits of who looks, of who is seen
        self.apply(init)

    def scores(self, numbers):  # (1 or B, N) -> (1 or B, H, N, N), of who looks, of who is seen
        d = self.digits[numbers - 1]  # (1 or B, N, 9)
        return torch.einsum("bni, hij, bmj -> bhnm", d, self.match, d)

    def bias_of(self, numbers, O, S):  # -> (1 or B, H, 2 O, 2 O + N + S)
        own = torch.eye(O, numbers.shape[1], device=numbers.device) > 0  # (O, N)
        answers = self.scores(numbers)[:, :, :O].masked_fill(own, -math.inf)  # of all others
        tokens = torch.zeros_like(answers[..., :O]).masked_fill(~own[:, :O], -math.inf)
        stimulus = torch.zeros_like(answers[..., :1]).expand(-1, -1, -1, S)
        rows = torch.cat([tokens, tokens, answers, stimulus], 3)
        return torch.cat([rows, rows], 2)  # of first and of second tokens; all see the stimulus

    def solve(self, operators, numbers, stimulus):  # (B, O, 5), (1 or B, N), (B, 100, 2)
        """The vectors from which operators answer, (B, O, C). Numbers are theirs, then strays'."""
        questions, x_log_count = self.questions(operators)  # (B, 2 O, C), (B, 2 O)
        objects, y_log_count = self.stimulus(stimulus)  # (B, S, C), (B, S)
        objects = objects + self.bind(objects)
        B, O, S, N = *operators.shape[:2], objects.shape[1], numbers.shape[1]
        one = x_log_count.new_zeros(B, N)  # log 1: an answer is there once
        bias = torch.cat([x_log_count, one, y_log_count], 1)[:, None, None]
        bias = bias + self.bias_of(numbers, O, S)
        others = torch.randint(B * O, (B, N - O)).to(numbers.device)
        sides = self.sides[numbers % 2].expand(B, -1, -1)  # (B, N, C)
        known, said = sides, torch.full_like(operators[:, :, 0], -1)  # no answers yet
        loops = 2 * LEVELS  # at most
        if self.training:
            loops = O.bit_length() + torch.randint(2, ()).item()  # one for each level, or one more
        for _ in range(loops):
            x = questions
            for block in self.blocks:
                x = block(x, torch.cat([x, known, objects], 1), bias)  # (B, 2 O, C)
            features = self.norm(x[:, :O])  # (B, O, C)
            answers = self.readout(features).softmax(2)  # (B, O, 138)
            before, said = said, answers.argmax(2)
            changed = self.training | (said != before).any(1)[:, None, None]  # (B, 1, 1)
            if not (self.training or changed.any()):
                break
            answers = answers @ self.answers  # (B, O, C)
            strays = answers.detach().flatten(0, 1)[others]
            # a trial that is done keeps what it knows: for it, more loops repeat the last one
            known = torch.where(changed, torch.cat([answers, strays], 1) + sides, known)
        return features

    def features(self, instruction, stimulus):  # (B, T, 5), (B, 100, 2) -> (B, C)
        operators = data.operators_of(instruction)  # (B, O, 5)
        B, O = operators.shape[:2]
        numbers = torch.arange(1, O + 1)[None]
        if self.training:
            numbers = place(B, O, torch.randint(self.strays + 1, ()).item())
        return self.solve(operators, numbers.to(operators.device), stimulus)[:, 0]

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
