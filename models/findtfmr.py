"""FindTfmr: LookTfmr that is not told which operators are whose branches. It finds them by itself.

    operator      what its selectors found      answers of all other operators,
        |            (looktfmr.py)                 by a score for each
        |                  |                               |
    [ Block: an operator reads itself and these                ]  x layers
    LN, readout -> 138 logits -> answers, for the next loop    in training x levels, or one more;
                                                               later until no answer changes, at
                                                               most ten times

Number the operators in the order of the instruction, from 1, and write this in binary. A branch has
its condition's number and one more digit, 0 for left and 1 for right:

                        1
              10                  11
         100      101        110      111        ... 11111 at depth 9

How much an operator looks at another one's answer depends on a score, too: bilinear in the digits
of both numbers, learned, and 0 at first. It is told which answers are of a left and of a right
branch, by the last digit, and in training the number of levels. Four things are there so that what
it learns from trees of one and of three operators holds in larger ones (models/RESULTS.md has what
each is worth):

    1) In training a tree lies anywhere in the largest one, so all digits are trained, as with
       randomized positions (arXiv 2305.16843).
    2) Strays lie around it, answers of operators drawn from the batch, so what is no branch is
       ignored. None lies where a branch of a leaf would be.
    3) Half of the steps, by lot, have one loop more than levels, so what is solved stays solved,
       as where loops are random in number (2202.05826).
    4) An operator does not see its own last answer, so it cannot hold on to it.

The Neural Data Router (2110.07732) also learns which operator feeds which, by gates and a search
for the nearest match. All else is as in looktfmr.py. Differs from the paper: all of it is new.
Arguments:

    strays=12     each step draws their number, from 0 to this (at least 1)
"""
import math

import torch
from torch import nn

import data

TRAINING = {"steps": 2_000}  # enough for it
LEVELS = len(data.LEVELS)  # 5, of the largest tree, depth 9
LARGEST = len(data.OPERATOR_ROWS)  # 31, its operators
SCALE = 2  # of digits: so a training step moves their scores four times as far


# ---- numbers ------------------------------------------------------------------------------------
def digits(number):  # 9 numbers
    """101, say, is -1, 1, 0, 0, then 1, 1, -1, -1, then 1: the digits behind the first one (0 is
    written as -1, none as 0), whether each is there (1 or -1), and a constant."""
    way = [2 * int(digit) - 1 for digit in f"{number:b}"[1:]]
    none = LEVELS - 1 - len(way)
    return way + [0] * none + [1] * len(way) + [-1] * none + [1]


def place(B, O, strays):  # -> numbers (B, at most O + strays), for training
    """Lays the tree of O operators, in each trial, somewhere in the largest one. Strays lie on
    places of that one that are free: not in the tree, and no branches of it."""
    strays = min(strays, max(0, LARGEST - (2 * O + 1)))  # so many places are always free
    rows = []
    for _ in range(B):
        level = torch.randint(LEVELS + 1 - O.bit_length(), ()).item()
        tree = [2 ** level + torch.randint(2 ** level, ()).item()]
        for i in range(O // 2):
            tree += [2 * tree[i], 2 * tree[i] + 1]
        free = [n for n in range(1, LARGEST + 1) if n not in tree and n // 2 not in tree]
        chosen = torch.randperm(len(free))[:strays].tolist()
        rows.append(tree + [free[i] for i in chosen])
    return torch.tensor(rows)


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


# ---- as in looktfmr.py ---------------------------------------------------------------------------
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
    def __init__(self, dim=128, layers=2, heads=4, strays=12):
        super().__init__()
        self.operator = nn.Embedding(len(data.OPERATORS) + 1, dim)  # + 1: 0 is none
        self.selectors = Selectors(dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.readout = nn.Linear(dim, data.CLASSES)
        self.answers = nn.Parameter(torch.randn(data.CLASSES, dim))
        self.sides = nn.Parameter(torch.randn(2, dim))  # left, right
        self.strays = strays
        self.looks = {"selectors.look": ("selectors", "objects")}  # for eval.py
        table = torch.tensor([digits(number) for number in range(1, LARGEST + 1)]).float()
        self.register_buffer("table", SCALE * table, persistent=False)  # (31, 9)
        self.match = nn.Parameter(torch.zeros(heads, 9, 9))  # digits of who looks, of who is seen
        self.apply(init)
        self.selectors.look.attention.query.weight.data.mul_(0.3)  # init knows Attention alone

    def scores(self, numbers):  # (1 or B, N) -> (1 or B, H, N, N), of who looks, of who is seen
        d = self.table[numbers - 1]  # (1 or B, N, 9)
        return torch.einsum("bni, hij, bmj -> bhnm", d, self.match, d)

    def bias_of(self, numbers, log_count):  # (1 or B, N), (B, O, 5) -> (B, H, O, 5 O + N)
        """What is added to an operator's scores. Of the 5 O tokens it sees its own five, of the N
        answers all but its own."""
        B, O, _ = log_count.shape
        N = numbers.shape[1]
        own_answer = torch.eye(O, N, dtype=torch.bool, device=numbers.device)  # (O, N)
        own_tokens = own_answer[:, :O].repeat_interleave(5, 1)  # (O, 5 O)
        of_answers = self.scores(numbers)[:, :, :O].masked_fill(own_answer, -math.inf)
        of_answers = of_answers.expand(B, -1, -1, -1)  # (B, H, O, N)
        of_tokens = log_count.flatten(1)[:, None].masked_fill(~own_tokens, -math.inf)  # (B, O, 5 O)
        of_tokens = of_tokens[:, None].expand(-1, of_answers.shape[1], -1, -1)  # (B, H, O, 5 O)
        return torch.cat([of_tokens, of_answers], 3)

    def solve(self, operators, numbers, stimulus):  # (B, O, 5), (1 or B, N), (B, 100, 2)
        """The vectors from which operators answer, (B, O, C). N numbers: theirs, then strays'."""
        question = self.operator(operators[:, :, 0])  # (B, O, C)
        found, log_count = self.selectors(operators, stimulus)  # (B, O, 4, C), (B, O, 4)
        one = log_count.new_zeros(*log_count.shape[:2], 1)  # log 1
        bias = self.bias_of(numbers, torch.cat([one, log_count], 2))
        sides = self.sides[numbers % 2].expand(len(operators), -1, -1)  # (B, N, C); odd is right
        if self.training:
            return self.solve_in_training(question, found, sides, bias)
        return self.solve_until_no_change(question, found, sides, bias)

    def loop(self, question, found, known, bias):  # -> (B, O, C)
        x = question
        for block in self.blocks:
            tokens = torch.cat([x[:, :, None], found], 2).flatten(1, 2)  # (B, 5 O, C)
            x = block(x, torch.cat([tokens, known], 1), bias)  # (B, O, C)
        return self.norm(x)

    def solve_in_training(self, question, found, sides, bias):  # -> (B, O, C)
        B, O, _ = question.shape
        strays = sides.shape[1] - O
        drawn = torch.randint(B * O, (B, strays)).to(sides.device)  # whose answers are strays
        known = sides  # no answers yet
        loops = O.bit_length() + torch.randint(2, ()).item()  # one for each level, or one more
        for _ in range(loops):
            features = self.loop(question, found, known, bias)
            answers = self.readout(features).softmax(2) @ self.answers  # (B, O, C)
            borrowed = answers.detach().flatten(0, 1)[drawn]  # (B, strays, C)
            known = torch.cat([answers, borrowed], 1) + sides  # (B, N, C)
        return features

    def solve_until_no_change(self, question, found, sides, bias):  # -> (B, O, C)
        known = sides  # no answers yet
        said = torch.full(question.shape[:2], -1, device=sides.device)  # (B, O)
        for _ in range(2 * LEVELS):  # at most
            features = self.loop(question, found, known, bias)
            logits = self.readout(features)  # (B, O, 138)
            before = said
            said = logits.argmax(2)
            changed = (said != before).any(1)  # (B,)
            if not changed.any():
                break
            # a trial that is done keeps what it knows: for it, more loops repeat the last one
            answers = logits.softmax(2) @ self.answers + sides  # (B, O, C)
            known = torch.where(changed[:, None, None], answers, known)
        return features

    def features(self, instruction, stimulus):  # (B, T, 5), (B, 100, 2) -> (B, C)
        operators = data.operators_of(instruction)  # (B, O, 5)
        B, O = operators.shape[:2]
        numbers = torch.arange(1, O + 1)[None]
        if self.training:
            strays = torch.randint(self.strays + 1, ()).item()
            numbers = place(B, O, strays)  # (B, N)
        return self.solve(operators, numbers.to(operators.device), stimulus)[:, 0]

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
