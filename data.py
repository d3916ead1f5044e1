"""gCOG trials: instruction, stimulus and answer (Ito et al., ICLR 2024, section 2).

A trial asks one question about a grid of objects, each of a shape and a color. Shapes are drawn as
letters. The question is a tree of operators:

    instruction (T, 5)                       stimulus (100, 2)           answer
    0  Exist(red a)                          . . . . . . . . . .
    1  IfElse                            +   . a . . . b . . . .    ->   one of 138 classes
    2    then GetColor(b)                    . . . . c . . a . .         (ANSWERS)
    3    else SumEven(blue c, pink d)        . . d . . . (10 rows)

An instruction token is (operator, shape 1, color 1, shape 2, color 2), 0 = none. A selector is
one shape and color of it, as in "red a", or "b" alone. Tokens come level by level: an operator,
its IfElse, its two branches, their two IfElses, their four branches, and so on. Operators alone
count from 0, the root: operator i leads to operator 2 i + 1 if it is True, else to 2 i + 2. A
stimulus token is (shape, color) of cell 10 * row + column, 0 = empty.

What differs from the authors' own trials (github.com/IBM/gcog) is said where it is done.
"""
import argparse
import contextlib
import math
import os
import random
import sys
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np
import torch

SOURCE = Path(__file__).read_bytes()  # as it runs, for train.py
SHAPES, COLORS, GRID = 10, 10, 10  # the first 10 shapes of 26, like the authors
SHAPE_NAMES = "abcdefghijklmnopqrstuvwxyz"
COLOR_NAMES = "red green blue yellow purple orange white pink cyan brown".split()
CELLS = [(row, column) for row in range(GRID) for column in range(GRID)]
PAIRS = [(shape, color) for shape in range(SHAPES) for color in range(COLORS)]
ANSWERS = ["True", "False", *(f"row {row}, column {column}" for row, column in CELLS),
           *SHAPE_NAMES, *COLOR_NAMES]
TRUE, FALSE, FIRST_CELL, CLASSES = 0, 1, 2, len(ANSWERS)
FIRST_SHAPE, FIRST_COLOR = ANSWERS.index(SHAPE_NAMES[0]), ANSWERS.index(COLOR_NAMES[0])


class UsageError(ValueError):
    """What a person can mend, in one line."""


class Operator(NamedTuple):
    question: str  # {} stands for its objects
    holds: Callable | None = None  # if it asks about places: ((row, column), ...) -> True or False
    objects: tuple = (1, 2)  # how many it may have, 1 or 2; a question of depth 1 has the least


OPERATORS = {  # in the order of their numbers in tokens, from 1; a new operator goes to the end
    "Exist": Operator("is the {} on the grid?", objects=(1,)),
    "GetLocation": Operator("where is the {}?", objects=(1,)),
    "GetColor": Operator("which color is the {}?", objects=(1,)),
    "GetShape": Operator("which shape is {}?", objects=(1,)),
    "SumEven": Operator("do the row and column of the {} add up to an even number?",
        lambda cells: sum(row + column for row, column in cells) % 2 == 0),
    "SumOdd": Operator("do the row and column of the {} add up to an odd number?",
        lambda cells: sum(row + column for row, column in cells) % 2 == 1),
    "ProductEven": Operator("do the row and column of the {} multiply to an even number?",
        lambda cells: math.prod(row * column for row, column in cells) % 2 == 0),
    "ProductOdd": Operator("do the row and column of the {} multiply to an odd number?",
        lambda cells: math.prod(row * column for row, column in cells) % 2 == 1),
    "IfElse": Operator("", objects=()),
}
GETS = "GetLocation", "GetColor", "GetShape"
PARITIES = "SumEven", "SumOdd", "ProductEven", "ProductOdd"
IF_ELSE = list(OPERATORS).index("IfElse") + 1
# start, end: rows start to end - 1 of an instruction are a level's operators; others are IfElses.
LEVELS = (0, 1), (2, 4), (6, 10), (14, 22), (30, 46)
OPERATOR_ROWS = [row for start, end in LEVELS for row in range(start, end)]
LONGEST = OPERATOR_ROWS[-1] + 1  # 46 rows, at depth 9


# ---- the splits ---------------------------------------------------------------------------------
class Pool(NamedTuple):
    """What one kind of trial asks about. Distractors are of all shapes and colors."""
    leaves: tuple = ("Exist", *GETS, *PARITIES)  # the lowest operators; at depth 1, the only one
    conditions: tuple = ("Exist", *PARITIES)  # operators that lead to others
    shapes: range = range(SHAPES)  # of the objects that selectors name
    colors: range = range(COLORS)


class Subset(NamedTuple):
    """A set of trials. With shortcuts, like the authors', it has no companions and no decoys."""
    pools: tuple = (Pool(),)
    depths: tuple = (1,)
    distractors: tuple = (1, 5)  # the least and the largest number
    shortcuts: bool = False


LOW_SHAPES, HIGH_SHAPES = range(SHAPES // 2), range(SHAPES // 2, SHAPES)
LOW_COLORS, HIGH_COLORS = range(COLORS // 2), range(COLORS // 2, COLORS)
# systematic1 holds out pairs of operator and object. In training, operators A ask about low colors
# of any shape, as in Exist(red a), and B about high shapes of any color, as in SumOdd(pink j). In
# the test, A ask about high shapes of high colors, Exist(pink j), B about low ones of low colors,
# SumOdd(red a). (Half of the pairs in the authors' test are also in their training.)
OPERATORS_A = "Exist", "SumEven", "ProductEven", "GetShape"
OPERATORS_B = "SumOdd", "ProductOdd", "GetLocation", "GetColor"
TRAINED1 = Subset((Pool(OPERATORS_A, colors=LOW_COLORS), Pool(OPERATORS_B, shapes=HIGH_SHAPES)))
HELD_OUT1 = Subset((Pool(OPERATORS_A, shapes=HIGH_SHAPES, colors=HIGH_COLORS),
                    Pool(OPERATORS_B, shapes=LOW_SHAPES, colors=LOW_COLORS)))
# systematic3 holds out pairs of condition and leaf. In training, conditions A lead to leaves A, as
# in "if Exist then GetColor", and B to B. In the test A lead to B, "if Exist then SumOdd", B to A.
CONDITIONS_A, CONDITIONS_B = ("Exist", "SumEven", "ProductEven"), ("SumOdd", "ProductOdd")
LEAVES_A = "SumEven", "ProductEven", "GetColor", "GetShape"
LEAVES_B = "Exist", "SumOdd", "ProductOdd", "GetLocation"
TRAINED3 = Subset((Pool(LEAVES_A, CONDITIONS_A), Pool(LEAVES_B, CONDITIONS_B)), depths=(3,))
HELD_OUT3 = Subset((Pool(LEAVES_B, CONDITIONS_A), Pool(LEAVES_A, CONDITIONS_B)), depths=(3,))
# Each split has its training trials, then test sets: iid (in productive depth3) is like training,
# and the hardest one is the last.
SPLITS = {
    "distractor": {"train": Subset(), "iid": Subset(),
                   "distractors10": Subset(distractors=(10, 10)),
                   "distractors20": Subset(distractors=(20, 20)),
                   "distractors30": Subset(distractors=(30, 30)),
                   "distractors40": Subset(distractors=(40, 40))},
    "systematic1": {"train": TRAINED1, "iid": TRAINED1, "ood": HELD_OUT1},
    "systematic3": {"train": TRAINED3._replace(depths=(1, 3)), "iid": TRAINED3, "ood": HELD_OUT3},
    "productive": {"train": Subset(depths=(1, 3)),
                   "depth1": Subset(depths=(1,)), "depth3": Subset(depths=(3,)),
                   "depth5": Subset(depths=(5,)), "depth7": Subset(depths=(7,)),
                   "depth9": Subset(depths=(9,))},
}
# Each of these has a twin with the authors' shortcuts, such as distractor_release.
for split in "distractor", "systematic1", "systematic3", "productive":
    SPLITS[f"{split}_release"] = {name: subset._replace(shortcuts=True)
                                  for name, subset in SPLITS[split].items()}
SPLITS["systematic3_release"]["train"] = SPLITS["systematic3_release"]["iid"]  # depth 3 alone


def find(split, name):
    """A Subset of a split. UsageError for what is easily mistyped in any of them, such as ("Exist")
    without a comma."""
    leaves = [operator for operator in OPERATORS if operator != "IfElse"]
    conditions = [operator for operator in leaves if operator not in GETS]  # True or False
    for operator in leaves:
        check(f"objects of {operator}", OPERATORS[operator].objects, (1, 2))
        if operator not in ("Exist", *GETS) and OPERATORS[operator].holds is None:
            raise UsageError(f"{operator} needs a function of the cells of its objects")
    if split not in SPLITS:
        raise UsageError(f"there is no split {split}; there are {', '.join(SPLITS)}")
    subsets = SPLITS[split]
    for key, subset in subsets.items():
        where = f"{split}/{key}:"
        has_pools = isinstance(subset, Subset) and isinstance(subset.pools, tuple)
        if not has_pools or {type(pool) for pool in subset.pools} != {Pool}:
            raise UsageError(f"{where} must be like Subset((Pool(),)), not {subset}")
        check(f"{where} depths", subset.depths, (1, 3, 5, 7, 9))
        if key != "train" and len(subset.depths) > 1:
            raise UsageError(f"{where} a test set has one depth, not {subset.depths}")
        check(f"{where} distractors", subset.distractors, range(1, len(CELLS) - 1))
        for pool in subset.pools:
            check(f"{where} leaves", pool.leaves, leaves)
            check(f"{where} conditions", pool.conditions, conditions)
            check(f"{where} shapes", pool.shapes, range(SHAPES))
            check(f"{where} colors", pool.colors, range(COLORS))
    if name not in subsets:
        raise UsageError(f"{split} has no subset {name}; it has {', '.join(subsets)}")
    return subsets[name]


def check(what, chosen, allowed):
    """UsageError unless `chosen` is a tuple or range of some of what is allowed."""
    if not isinstance(chosen, (tuple, range)) or not chosen or not set(chosen) <= set(allowed):
        raise UsageError(f"{what} must be some of {', '.join(map(str, allowed))}, as a tuple "
                         f"such as ({allowed[0]!r},), not {chosen!r}")


def tests_of(split):
    """The names of its test sets, the hardest last."""
    return [name for name in SPLITS[split] if name != "train"]


def in_distribution(split):
    """The name of its test set with trials like those of training. UsageError without one."""
    for name in "iid", "depth3":
        if name in SPLITS[split]:
            return name
    raise UsageError(f"{split} needs a test set iid, of trials like those of training")


# ---- drawing a trial ----------------------------------------------------------------------------
# Every trial keeps five rules. Rules 3 and 5 are ours; trials with shortcuts do without them. The
# authors' trials may break 1 or 2: 5 % at depth 3, 24 % at depth 9 are ambiguous (2026-11-27).
#
# 1. All selectors of a tree differ. The shape that a GetColor names and the color that a GetShape
#    names are nobody else's: no other selector's, no distractor's.
# 2. Every selector has exactly one object on the grid, on the answering path or not. Only an Exist
#    that is False has none. No two objects share a cell.
# 3. An Exist needs binding. It has a companion, a pair that nobody names. If the Exist is True, its
#    object and the companion are on the grid. If it is False, the same two are, with their colors
#    swapped. So shapes, colors and their numbers are the same for both answers.
# 4. A boolean operator is True with probability 1/2, independently of everything else.
# 5. While a distractor is left, an operator about places makes one its decoy: if one of the
#    operator's objects, drawn by lot, lay in the decoy's cell, the answer would be the opposite.
#    The operators on the answering path get theirs first.
#
# A draw that cannot keep them is drawn again.
class Node(NamedTuple):
    """An operator of a tree."""
    operator: str
    pairs: list  # (shape, color) of its objects, and of an Exist's companion
    truth: bool  # a Get ignores it


class RunOut(Exception):
    """Shapes, colors or cells have run out."""


def draw(subset, depth, rng):
    """A trial: its Nodes, level by level; indices from root to leaf; {cell: (shape, color)}."""
    pool = rng.choice(subset.pools)
    number = rng.randint(min(subset.distractors), max(subset.distractors))
    inner = 2 ** (depth // 2) - 1  # conditions: 0, 1, 3, 7, 15 at depths 1, 3, 5, 7, 9
    for _ in range(500):  # until a trial keeps all rules
        names = rng.choices(pool.conditions, k=inner) + rng.choices(pool.leaves, k=inner + 1)
        counts = [rng.choice(OPERATORS[name].objects) for name in names]
        if depth == 1:
            counts = [min(OPERATORS[names[0]].objects)]
        # 20 tries with the same operators: if a failure drew new ones at once, operators that fail
        # often would become rare (at depth 9 they still are, a little)
        for _ in range(20):
            try:
                return draw_with(names, counts, pool, number, subset.shortcuts, rng)
            except RunOut:
                continue
    raise UsageError(f"at depth {depth} with {number} distractors, cells or pairs run out, or an "
                     f"operator is almost always True or False: {pool}")


def draw_with(names, counts, pool, number, shortcuts, rng):
    """Such a trial, of these operators, numbers of objects and number of distractors; or RunOut."""
    pairs, spare = draw_pairs(names, counts, pool, shortcuts, rng)
    tree = [Node(name, pairs[i], rng.random() < 0.5) for i, name in enumerate(names)]
    path = []
    i = 0
    while i < len(tree):
        path.append(i)
        i = 2 * i + 1 if tree[i].truth else 2 * i + 2
    distractors = rng.choices(spare, k=number)
    return tree, path, draw_grid(tree, path, distractors, shortcuts, rng)


def draw_pairs(names, counts, pool, shortcuts, rng):
    """Rules 1 and 3: {operator's index: its pairs}, and the pairs that are left for distractors."""
    asked = set()  # pairs that some operator asks for
    shown = set()  # pairs that some operator may put on the grid
    pairs = {}
    first = [i for i, name in enumerate(names) if name in ("GetColor", "GetShape")]
    first += [i for i, name in enumerate(names) if name == "Exist" and not shortcuts]
    for i in first:  # they rule out more pairs than their own
        pairs[i] = draw_apart(names[i], pool, asked, shown, rng)
    others = [i for i in range(len(names)) if i not in pairs]
    free = [(shape, color) for shape, color in PAIRS
            if shape in pool.shapes and color in pool.colors]
    free = [pair for pair in free if pair not in asked and pair not in shown]
    if len(free) < sum(counts[i] for i in others):
        raise RunOut
    rng.shuffle(free)
    for i in others:
        pairs[i] = [free.pop() for _ in range(counts[i])]
        asked.update(pairs[i])
    spare = [pair for pair in PAIRS if pair not in asked]
    if not spare:
        raise RunOut
    return pairs, spare


def draw_apart(operator, pool, asked, shown, rng):
    """The pairs of a GetColor, GetShape or Exist. `asked` and `shown` are the pairs that the
    operators before it ask for, and may put on the grid; its own are added. No operator may put on
    the grid what another one asks for."""
    for _ in range(100):
        shape = rng.choice(pool.shapes)
        color = rng.choice(pool.colors)
        pairs = [(shape, color)]
        asks = {(shape, color)}
        shows = {(shape, color)}
        if operator == "GetColor":  # of b: asks for every b, and shows a red b
            asks = {(shape, any_color) for any_color in range(COLORS)}
        elif operator == "GetShape":  # of red: asks for all that is red, and shows a red b
            asks = {(any_shape, color) for any_shape in range(SHAPES)}
        else:  # Exist(blue c): if False, it shows another color of c and another blue shape
            shape2 = (shape + rng.randrange(1, SHAPES)) % SHAPES
            color2 = (color + rng.randrange(1, COLORS)) % COLORS
            pairs.append((shape2, color2))  # the companion
            shows = {(shape, color), (shape2, color2), (shape, color2), (shape2, color)}
        if asks.isdisjoint(shown) and shows.isdisjoint(asked):
            asked |= asks
            shown |= shows
            return pairs
    raise RunOut


def draw_grid(tree, path, distractors, shortcuts, rng):
    """Rules 2, 3 and 5: {cell: (shape, color)} of all objects. The path gets decoys first."""
    if sum(len(node.pairs) for node in tree) + len(distractors) > len(CELLS):
        raise RunOut
    grid = {}
    anywhere = []  # pairs that may lie in any cell
    others = [i for i in range(len(tree)) if i not in path]
    for i in path[::-1] + others:
        operator, pairs, truth = tree[i]
        holds = OPERATORS[operator].holds
        if holds:
            cells, decoy = draw_cells(holds, truth, len(pairs), grid, shortcuts, rng)
            grid.update(zip(cells, pairs))
            if distractors:
                grid[decoy] = distractors.pop()
        elif truth or operator != "Exist":
            anywhere += pairs
        elif not shortcuts:
            (shape, color), (shape2, color2) = pairs
            anywhere += [(shape, color2), (shape2, color)]
    anywhere += distractors
    free = [cell for cell in CELLS if cell not in grid]
    grid.update(zip(rng.sample(free, len(anywhere)), anywhere))
    return grid


def draw_cells(holds, truth, number, grid, shortcuts, rng):
    """Rule 5: cells that give the drawn truth, and a decoy's cell that would reverse it (with
    `shortcuts`, just another cell)."""
    free = [cell for cell in CELLS if cell not in grid]
    replaced = rng.randrange(number)  # in the decoy's cell, this object would reverse the truth
    for _ in range(300):
        drawn = rng.choices(free, k=number + 1)
        cells = drawn[:-1]
        decoy = drawn[-1]
        with_decoy = list(cells)
        with_decoy[replaced] = decoy
        if len(set(drawn)) < len(drawn) or bool(holds(tuple(cells))) != truth:
            continue
        if shortcuts or bool(holds(tuple(with_decoy))) != truth:
            return cells, decoy
    raise RunOut


# ---- trials as numbers --------------------------------------------------------------------------
class Trials(NamedTuple):
    instruction: torch.Tensor  # (n, T, 5) int64
    stimulus: torch.Tensor  # (n, 100, 2) int64
    answer: torch.Tensor  # (n,) int64


def encode(tree, path, grid):
    """A drawn trial as instruction (T, 5), stimulus (100, 2) and answer."""
    names = list(OPERATORS)
    rows = OPERATOR_ROWS[:len(tree)]
    instruction = [[IF_ELSE, 0, 0, 0, 0]] * (rows[-1] + 1)
    for row, (operator, pairs, _) in zip(rows, tree):
        token = [names.index(operator) + 1]
        asked = pairs[:1] if operator == "Exist" else pairs  # no companion
        for shape, color in asked:
            token.append(0 if operator == "GetShape" else shape + 1)
            token.append(0 if operator == "GetColor" else color + 1)
        instruction[row] = token + [0] * (5 - len(token))
    stimulus = np.zeros((len(CELLS), 2), np.int64)
    for (row, column), (shape, color) in grid.items():
        stimulus[GRID * row + column] = shape + 1, color + 1
    operator, pairs, truth = tree[path[-1]]
    shape, color = pairs[0]
    answer = TRUE if truth else FALSE
    if operator == "GetLocation":
        cell_of = {pair: cell for cell, pair in grid.items()}
        answer = FIRST_CELL + CELLS.index(cell_of[shape, color])
    elif operator == "GetColor":
        answer = FIRST_COLOR + color
    elif operator == "GetShape":
        answer = FIRST_SHAPE + shape
    return instruction, stimulus, answer


def operators_of(instruction):
    """Instructions (..., T, 5) without their IfElses."""
    levels = [instruction[..., start:end, :] for start, end in LEVELS]
    return torch.cat(levels, -2)  # slices: an index would wait for the GPU


def stream(name, subset, depth, numbers):
    """Trials of a Subset by number. Each depends on the stream's name, the depth and its number."""
    drawn = []
    for i in numbers:
        rng = random.Random(f"{name} {depth} {i}")
        tree, path, grid = draw(subset, depth, rng)
        drawn.append(encode(tree, path, grid))
    instruction, stimulus, answer = zip(*drawn)
    return Trials(torch.tensor(instruction), torch.tensor(np.stack(stimulus)), torch.tensor(answer))


def trials(split, subset, n, *, seed=0, depth=None):
    """The first n Trials of a set. A set of several depths needs `depth`. Of "train" these are not
    the trials of Batches. UsageError where a name, n or depth is wrong."""
    chosen = find(split, subset)
    if depth is None and len(chosen.depths) == 1:
        depth = chosen.depths[0]
    if depth not in chosen.depths:
        depths = " or ".join(map(str, chosen.depths))
        raise UsageError(f"{split}/{subset} has trials of depth {depths}: choose one of them")
    if n < 1:
        raise UsageError(f"n must be at least 1, not {n}")
    return stream(f"set {seed} {split} {subset}", chosen, depth, range(n))


class Batches(torch.utils.data.Dataset):
    """A seed's training batches: item i is the Trials of batch i. A batch has one depth (the
    authors' mix them), and the depths take turns."""

    def __init__(self, split, batch_size, seed, train_size=None):
        self.name = f"training {seed} {split}"
        self.subset = find(split, "train")
        self.size = batch_size
        self.per_depth = None  # trials; None: all are new
        if train_size:
            self.per_depth = train_size // len(self.subset.depths)
            self.per_epoch = self.per_depth // batch_size  # batches of a depth
            if self.per_epoch == 0:
                raise UsageError(f"{train_size:,} training trials are less than a batch of each "
                                 "depth")

    def __getitem__(self, i):
        depths = self.subset.depths
        depth = depths[i % len(depths)]
        turn = i // len(depths)  # batch number `turn` of this depth
        numbers = range(turn * self.size, (turn + 1) * self.size)
        if self.per_depth:  # a fixed set, reshuffled each epoch; what fills no batch is left out
            epoch, place = divmod(turn, self.per_epoch)
            seed = random.Random(f"order {self.name} {depth} {epoch}").getrandbits(32)
            order = np.random.RandomState(seed).permutation(self.per_depth)
            numbers = order[place * self.size:(place + 1) * self.size]
        return stream(self.name, self.subset, depth, numbers)


# ---- the oracle: reads tokens only, and shares no function with the generator but `holds` -------
class Solved(NamedTuple):
    """An operator as the oracle reads it."""
    operator: str
    selectors: list  # (shape, color), 0 = any
    found: list  # for each selector, the cells of the objects that it matches
    answer: int


def evaluate(instruction, stimulus):
    """All operators of a trial (T, 5), (100, 2), level by level."""
    grid = {}  # of objects alone
    for cell, (shape, color) in zip(CELLS, stimulus.tolist()):
        if shape:
            grid[cell] = shape, color
    names = list(OPERATORS)
    solved = []
    for number, shape1, color1, shape2, color2 in instruction.tolist():
        if number == IF_ELSE:
            continue
        operator = names[number - 1]
        selectors = [pair for pair in ((shape1, color1), (shape2, color2)) if pair != (0, 0)]
        found = []
        for shape, color in selectors:
            cells = []
            for cell, (its_shape, its_color) in grid.items():
                if shape in (0, its_shape) and color in (0, its_color):  # 0 matches any
                    cells.append(cell)
            found.append(cells)
        solved.append(Solved(operator, selectors, found, answer_of(operator, grid, found)))
    return solved


def answer_of(operator, grid, found):
    """The class that an operator answers, given the cells that its selectors found."""
    if operator == "Exist":
        return TRUE if found[0] else FALSE
    cells = tuple(matches[0] for matches in found)
    holds = OPERATORS[operator].holds
    if holds:
        return TRUE if holds(cells) else FALSE
    row, column = cells[0]
    shape, color = grid[cells[0]]
    if operator == "GetLocation":
        return FIRST_CELL + GRID * row + column
    if operator == "GetShape":
        return FIRST_SHAPE + shape - 1
    return FIRST_COLOR + color - 1  # GetColor


def descend(solved):
    """The way from the root to the operator that answers: indices of Solved."""
    path = []
    i = 0
    while i < len(solved):
        path.append(i)
        i = 2 * i + 1 if solved[i].answer == TRUE else 2 * i + 2
    return path


def solve(instruction, stimulus):
    """The answers (n,) to trials, from their tokens (n, T, 5) and (n, 100, 2) alone."""
    trees = [evaluate(*trial) for trial in zip(instruction, stimulus)]
    return torch.tensor([tree[descend(tree)[-1]].answer for tree in trees])


# ---- for people ---------------------------------------------------------------------------------
def words(shape, color):
    """A selector in words, such as "red a"; 0 is left out."""
    names = []
    if color:
        names.append(COLOR_NAMES[color - 1])
    if shape:
        names.append(SHAPE_NAMES[shape - 1])
    return " ".join(names)


def describe(solved, i=0):
    """The tree below operator i in English, indented."""
    operator = solved[i].operator
    objects = " and the ".join(words(shape, color) for shape, color in solved[i].selectors)
    question = OPERATORS[operator].question.format(objects)
    text = f"{operator}: {question}"
    if 2 * i + 1 < len(solved):
        left = describe(solved, 2 * i + 1)
        right = describe(solved, 2 * i + 2)
        text = f"if {text}\nthen {left}\nelse {right}".replace("\n", "\n  ")
    return text


def show(trial):
    """A trial as text. [Brackets] mark what the answering path asks for, pi is pink."""
    instruction, stimulus, answer = trial
    solved = evaluate(instruction, stimulus)
    asked = []
    for i in descend(solved):
        for cells in solved[i].found:
            asked += cells
    lines = ["  " + "".join(f"{column:>4}  " for column in range(GRID))]
    for (row, column), (shape, color) in zip(CELLS, stimulus.tolist()):
        if column == 0:
            lines.append(f"{row:<3}")
        word = f"{SHAPE_NAMES[shape - 1]}:{COLOR_NAMES[color - 1][:2]}" if shape else " .  "
        lines[-1] += f"[{word}]" if (row, column) in asked else f" {word} "
    picture = "\n".join(line.rstrip() for line in lines)
    return f"{describe(solved)}\n\n{picture}\n\nAnswer: {ANSWERS[answer]}"


@contextlib.contextmanager
def ending(parser):
    """Ends a program with one line and exit code 2 if its input is wrong, with 130 at Ctrl-C."""
    with contextlib.suppress(AttributeError):  # a notebook's stdout takes all characters
        sys.stdout.reconfigure(errors="replace")  # on an ASCII terminal, ± becomes ?
    try:
        yield
        print(end="", flush=True)  # a closed pipe fails here, not at exit; stdout may be None
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:  # its reader has left, as `| head -1` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (UsageError, OSError) as error:
        parser.error(str(error))


def main(argv=None):
    parser = argparse.ArgumentParser(  # without usage, so that an error is one line
        description="Show gCOG trials.", usage=argparse.SUPPRESS,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--split", choices=SPLITS, default="productive", help="which split")
    add("--subset", help="its test set, or train; None: the one like training")
    add("--depth", type=int, help="needed where a training set has several depths")
    add("--n", type=int, default=3, help="number of trials")
    add("--seed", type=int, default=0, help="each has trials of its own; models are tested on 0")
    args = parser.parse_args(argv)
    with ending(parser):
        subset = args.subset or in_distribution(args.split)
        made = trials(args.split, subset, args.n, seed=args.seed, depth=args.depth)
        texts = [show(trial) for trial in zip(*made)]
        print("\n\n\n".join(texts))


if __name__ == "__main__":
    main()
