"""gCOG trials: instruction, stimulus and answer (Ito et al., ICLR 2024, section 2).

A trial asks one question about a grid of colored letters. The question is a tree of operators:

    instruction (T, 5)                       stimulus (100, 2)           answer
    IfElse                                   . . . . . . . . . .
     |- if    Exist(red a)               +   . a . . . b . . . .    ->   one of 138 classes
     |- then  GetColor(b)                    . . . . c . . a . .         (ANSWERS)
     '- else  SumEven(blue c, pink d)        . . d . . . (10 rows)
    instruction token  (operator, shape 1, color 1, shape 2, color 2), 0 = none. Level by level:
                       its operators from left (True) to right (False), then, if it is not the
                       last level, its IfElses.
    stimulus token     (shape, color) of cell 10 * row + column, 0 = empty.

Differs from the reference release: 1) every trial is well posed; 2) companions of Exist and decoys
close two shortcuts; 3) the held-out pairs of systematic1 are held out; 4) systematic3 also trains
single operators, which contain no pair; 5) one depth per batch; 6) tokens are integers. Each split
has a twin, such as productive_release, that follows the release in 2) and 4).
"""
import argparse
import contextlib
import functools
import itertools
import math
import os
import pathlib
import random
import sys
from typing import Callable, NamedTuple

import numpy as np
import torch

SHAPES, COLORS, GRID = 10, 10, 10  # the first 10 letters, as in the release's splits
COLOR_NAMES = "red green blue yellow purple orange white pink cyan brown".split()
LETTERS = "abcdefghijklmnopqrstuvwxyz"
CELLS = [(row, column) for row in range(GRID) for column in range(GRID)]
PAIRS = [(shape, color) for shape in range(SHAPES) for color in range(COLORS)]
ANSWERS = ["True", "False", *(f"row {row}, column {column}" for row, column in CELLS),
           *LETTERS, *COLOR_NAMES]
TRUE, FALSE, FIRST_CELL, CLASSES = 0, 1, 2, len(ANSWERS)
FIRST_SHAPE = FIRST_CELL + len(CELLS)
FIRST_COLOR = FIRST_SHAPE + len(LETTERS)


class UsageError(ValueError):
    """What somebody has written wrong, in one line."""


class Operator(NamedTuple):
    """A question about objects, {}. For a question about places, holds(cells) says whether it is
    True of the cells of its objects, a tuple of (row, column). `objects` are the numbers of objects
    that it may ask about, one or two; depth 1 uses the first."""
    question: str
    holds: Callable | None = None
    objects: tuple = (1, 2)


OPERATORS = {  # in the order of their numbers in tokens, from 1; a new operator goes to the end
    "Exist": Operator("is the {} on the grid?", objects=(1,)),
    "GetLocation": Operator("where is the {}?", objects=(1,)),
    "GetColor": Operator("which color is the {}?", objects=(1,)),
    "GetShape": Operator("which letter is {}?", objects=(1,)),
    "SumEven": Operator("do the row and column of the {} add up to an even number?",
                        lambda cells: sum(map(sum, cells)) % 2 == 0),
    "SumOdd": Operator("do the row and column of the {} add up to an odd number?",
                       lambda cells: sum(map(sum, cells)) % 2 == 1),
    "ProductEven": Operator("do the row and column of the {} multiply to an even number?",
                            lambda cells: math.prod(map(math.prod, cells)) % 2 == 0),
    "ProductOdd": Operator("do the row and column of the {} multiply to an odd number?",
                           lambda cells: math.prod(map(math.prod, cells)) % 2 == 1),
    "IfElse": Operator("", objects=()),
}
GETS = "GetLocation", "GetColor", "GetShape"
IF_ELSE = [*OPERATORS].index("IfElse") + 1


# ---- the splits ---------------------------------------------------------------------------------

class Pool(NamedTuple):
    """What one kind of trial asks: the operators of its leaves and of its conditions (the inner
    nodes), and the objects that selectors name. Distractors are of all shapes and colors."""
    leaves: tuple = ("Exist", "GetLocation", "GetColor", "GetShape", "SumEven", "SumOdd",
                     "ProductEven", "ProductOdd")
    conditions: tuple = ("Exist", "SumEven", "SumOdd", "ProductEven", "ProductOdd")
    shapes: range = range(SHAPES)
    colors: range = range(COLORS)


class Subset(NamedTuple):
    """A set of trials: the pools, the depths, the least and the largest number of distractors.
    With shortcuts, as in the release, there are no companions and no decoys (rules 3 and 5). The
    object of a False Exist is merely absent, and distractors lie anywhere. So the letters, colors
    and cells that are taken give many answers away."""
    pools: tuple = (Pool(),)
    depths: tuple = (1,)
    distractors: tuple = (1, 5)
    shortcuts: bool = False


LOW, HIGH = range(SHAPES // 2), range(SHAPES // 2, SHAPES)  # halves of shapes, and of colors
OPS_A = "Exist", "SumEven", "ProductEven", "GetShape"
OPS_B = "SumOdd", "ProductOdd", "GetLocation", "GetColor"
TRAINED1 = Subset((Pool(OPS_A, colors=LOW), Pool(OPS_B, shapes=HIGH)))
HELD_OUT1 = Subset((Pool(OPS_A, shapes=HIGH, colors=HIGH), Pool(OPS_B, shapes=LOW, colors=LOW)))
HELD_OUT6 = Subset((Pool(OPS_A[:3], shapes=HIGH, colors=HIGH),  # without GetShape and GetColor
                    Pool(OPS_B[:3], shapes=LOW, colors=LOW)))
IF_A, IF_B = ("Exist", "SumEven", "ProductEven"), ("SumOdd", "ProductOdd")
THEN_A = "SumEven", "ProductEven", "GetColor", "GetShape"
THEN_B = "Exist", "SumOdd", "ProductOdd", "GetLocation"
TRAINED3 = Subset((Pool(THEN_A, IF_A), Pool(THEN_B, IF_B)), depths=(3,))
HELD_OUT3 = Subset((Pool(THEN_B, IF_A), Pool(THEN_A, IF_B)), depths=(3,))

SPLITS = {  # split -> {"train": its training trials, then test sets, in distribution first}
    "distractor": {"train": Subset(), "iid": Subset(),
                   **{f"distractors{m}": Subset(distractors=(m, m)) for m in (10, 20, 30, 40)}},
    "systematic1": {"train": TRAINED1, "iid": TRAINED1, "ood6": HELD_OUT6, "ood": HELD_OUT1},
    "systematic3": {"train": TRAINED3._replace(depths=(1, 3)), "iid": TRAINED3, "ood": HELD_OUT3},
    "productive": {"train": Subset(depths=(1, 3)),
                   **{f"depth{d}": Subset(depths=(d,)) for d in (1, 3, 5, 7, 9)}},
}
SPLITS |= {f"{split}_release": {name: sets[name]._replace(shortcuts=True) for name in sets}
           for split, sets in SPLITS.items()}
SPLITS["systematic3_release"]["train"] = SPLITS["systematic3_release"]["iid"]  # depth 3 alone


def check(subset):
    """ValueError, in a sentence, for what is easily written wrong in a Subset or in an Operator."""
    pools, depths, number, shortcuts = subset
    if not (isinstance(pools, tuple) and pools and all(isinstance(pool, Pool) for pool in pools)):
        raise UsageError(f"pools must be a tuple of Pools, such as (Pool(),), not {pools!r}")
    if not (isinstance(number, tuple) and [*map(type, number)] == [int, int]
            and 1 <= number[0] <= number[1] < len(CELLS)):
        raise UsageError(f"distractors must be two integers from 1 to {len(CELLS) - 1} in order, "
                         f"not {number!r}")
    if not isinstance(shortcuts, bool):
        raise UsageError(f"shortcuts must be True or False, not {shortcuts!r}")
    leaves = [name for name in OPERATORS if name != "IfElse"]
    conditions = [name for name in leaves if name not in GETS]
    fields = [("depths", depths, (1, 3, 5, 7, 9))]
    for pool in pools:
        fields += zip(Pool._fields, pool, (leaves, conditions, range(SHAPES), range(COLORS)))
    for field, value, allowed in fields:
        if not (isinstance(value, (tuple, range)) and len({*value} & {*allowed}) == len(value) > 0):
            raise UsageError(f"{field} must be a tuple of some of {*allowed,}, not {value!r}")
    for pool in pools:
        for name in pool.leaves + pool.conditions:
            check_operator(name)


def check_operator(name):
    """ValueError, in a sentence, for what is easily written wrong in an Operator."""
    _, holds, objects = OPERATORS[name]
    if objects not in ((1,), (2,), (1, 2), (2, 1)):
        raise UsageError(f"operator {name}: objects must be (1,), (2,) or (1, 2), not {objects!r}")
    if name != "Exist" and name not in GETS:
        check_holds(name, holds, objects)


@functools.cache  # once is enough
def check_holds(name, holds, objects):
    for number, truth, i in itertools.product(objects, (True, False), range(50)):
        try:
            draw_cells(holds, truth, number, CELLS, True, random.Random(i))  # True: without a decoy
        except RunOut:
            raise UsageError(f"operator {name} is hardly ever {truth} of {number} cell(s)")
        except Exception as error:
            raise UsageError(f"operator {name}: holds must be a function of a tuple of {number} "
                             f"cell(s), but raises {error!r}")


# ---- drawing a trial by the rules of the README -------------------------------------------------

class Node(NamedTuple):
    """An operator of a tree, the pairs (shape, color) of its objects, its truth (a Get ignores it).
    The second pair of an Exist is its companion, which no selector names."""
    operator: str
    pairs: list
    truth: bool


class RunOut(Exception):
    """Shapes, colors or cells have run out."""


def draw(subset, depth, rng):
    """A trial as (tree, grid, answering): its Nodes, level by level; {cell: (shape, color)}; the
    Node that answers. ValueError where the rules can hardly be met."""
    pool, number = rng.choice(subset.pools), rng.randint(*subset.distractors)
    inner = 2 ** (depth // 2) - 1
    options = 1 if depth == 1 else 2  # at depth 1, the first number of objects is the only one
    for attempt in range(10_000):  # until one keeps all rules
        if attempt % 20 == 0:  # not each time: trees that need many pairs fail, and would be rare
            operators = rng.choices(pool.conditions, k=inner)
            operators += rng.choices(pool.leaves, k=inner + 1)
            sizes = [rng.choice(OPERATORS[name].objects[:options]) for name in operators]
        with contextlib.suppress(RunOut):
            pairs, spare = draw_pairs(operators, sizes, pool, subset.shortcuts, rng)
            truths = [rng.random() < 0.5 for _ in operators]  # rule 4
            tree, path = [*map(Node, operators, pairs, truths)], [0]
            while (left := 2 * path[-1] + 1) < len(tree):
                path.append(left if truths[path[-1]] else left + 1)
            distractors = rng.choices(spare, k=number)
            grid = draw_grid(tree, path, distractors, subset.shortcuts, rng)
            return tree, grid, tree[path[-1]]
    raise UsageError(f"at depth {depth} with {number} distractors, cells or pairs run out or an "
                     f"operator is hardly ever True or False: {pool}")


def draw_pairs(operators, sizes, pool, shortcuts, rng):
    """Rules 1 and 3: the pairs of each operator, and the pairs that are left for distractors.

    No selector may match an object of another operator. `matched` are the pairs that selectors
    match so far, `placed` those that may be on the grid. For example, GetColor(b) matches each b,
    and places a red b. Exist(blue c) matches the blue c alone. Its companion is a pink d, so it
    places blue c and pink d, or pink c and blue d. If one of them were a b, it is drawn again."""
    matched, placed, pairs = set(), set(), {}
    first = [i for i, operator in enumerate(operators) if operator in ("GetColor", "GetShape")]
    if not shortcuts:
        first += [i for i, operator in enumerate(operators) if operator == "Exist"]
    for i in first:  # they need more pairs than they ask about
        for _ in range(100):
            pairs[i], match, place = draw_greedy(operators[i], pool, rng)
            if match.isdisjoint(placed) and place.isdisjoint(matched):
                break
        else:  # none of the hundred would do
            raise RunOut
        matched |= match
        placed |= place
    others = [i for i in range(len(operators)) if i not in first]
    free = [(shape, color) for shape in pool.shapes for color in pool.colors
            if (shape, color) not in matched and (shape, color) not in placed]
    if len(free) < sum(sizes[i] for i in others):
        raise RunOut
    rng.shuffle(free)
    for i in others:
        pairs[i] = [free.pop() for _ in range(sizes[i])]
        matched.update(pairs[i])
    spare = [pair for pair in PAIRS if pair not in matched]
    if not spare:
        raise RunOut
    return [pairs[i] for i in range(len(operators))], spare


def draw_greedy(operator, pool, rng):
    """The pairs of a GetColor, a GetShape, or an Exist with its companion; the pairs that its
    selector matches; the pairs that it may place on the grid."""
    shape, color = asked = rng.choice(pool.shapes), rng.choice(pool.colors)
    if operator == "GetColor":
        return [asked], {(shape, any_color) for any_color in range(COLORS)}, {asked}
    if operator == "GetShape":
        return [asked], {(any_shape, color) for any_shape in range(SHAPES)}, {asked}
    shape2 = (shape + rng.randrange(1, SHAPES)) % SHAPES  # another shape
    color2 = (color + rng.randrange(1, COLORS)) % COLORS  # another color
    place = {(shape, color), (shape2, color2), (shape, color2), (shape2, color)}
    return [asked, (shape2, color2)], {asked}, place


def draw_grid(tree, path, distractors, shortcuts, rng):
    """Rules 2, 3 and 5: {cell: (shape, color)} of all objects. Operators on the path get their
    cells and decoys first, from the leaf to the root."""
    if sum(len(node.pairs) for node in tree) + len(distractors) > len(CELLS):
        raise RunOut
    grid, anywhere = {}, []
    for i in path[::-1] + [i for i in range(len(tree)) if i not in path]:
        operator, pairs, truth = tree[i]
        if holds := OPERATORS[operator].holds:
            free = [cell for cell in CELLS if cell not in grid]
            cells, decoy = draw_cells(holds, truth, len(pairs), free, shortcuts, rng)
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


def draw_cells(holds, truth, number, free, shortcuts, rng):
    """Rule 5: cells of objects that give the drawn truth, and a decoy's cell from which one object
    would reverse it. Which one is drawn by lot: else one object alone would decide a product. With
    shortcuts, the decoy may lie anywhere, like any distractor."""
    replaced = rng.randrange(number)
    for _ in range(300):
        drawn = rng.choices(free, k=number + 1)
        cells, decoy = tuple(drawn[:number]), drawn[number]
        others = cells[:replaced] + (decoy,) + cells[replaced + 1:]
        if len({*drawn}) == number + 1 and bool(holds(cells)) == truth:
            if shortcuts or bool(holds(others)) != truth:
                return cells, decoy
    raise RunOut


# ---- trials as numbers --------------------------------------------------------------------------

class Trials(NamedTuple):
    instruction: torch.Tensor  # (n, T, 5) int64
    stimulus: torch.Tensor  # (n, 100, 2) int64
    answer: torch.Tensor  # (n,) int64


def encode(tree, grid, answering):
    """A drawn trial as instruction (T, 5), stimulus (100, 2) and answer."""
    names, tokens, instruction = list(OPERATORS), [], []
    for operator, pairs, _ in tree:
        token = [names.index(operator) + 1]
        for shape, color in pairs[:1] if operator == "Exist" else pairs:
            token += [0 if operator == "GetShape" else shape + 1,
                      0 if operator == "GetColor" else color + 1]
        tokens.append(token + [0] * (5 - len(token)))
    width = 1  # of a level of the tree: 1, 2, 4, ... operators
    while tokens:
        instruction += tokens[:width]
        tokens = tokens[width:]
        if tokens:
            instruction += [[IF_ELSE, 0, 0, 0, 0]] * width
        width *= 2
    stimulus = np.zeros((len(CELLS), 2), np.int64)
    for (row, column), (shape, color) in grid.items():
        stimulus[GRID * row + column] = shape + 1, color + 1
    operator, pairs, truth = answering
    shape, color = pairs[0]
    if operator == "GetLocation":
        answer = FIRST_CELL + [grid.get(cell) for cell in CELLS].index(pairs[0])
    elif operator == "GetColor":
        answer = FIRST_COLOR + color
    elif operator == "GetShape":
        answer = FIRST_SHAPE + shape
    else:
        answer = TRUE if truth else FALSE
    return instruction, stimulus, answer


def stream(name, subset, depth, numbers):
    """Trials by their numbers in a stream. A trial depends on the stream's name, the depth and its
    number alone, and is the same on every machine."""
    drawn = [encode(*draw(subset, depth, random.Random(f"{name} {depth} {i}"))) for i in numbers]
    instruction, stimulus, answer = zip(*drawn)
    return Trials(torch.tensor(instruction), torch.from_numpy(np.stack(stimulus)),
                  torch.tensor(answer))


def subset_of(split, name):
    """The Subset of that name. ValueError where there is none, or where it is written wrong."""
    for what, word, known in ("split", split, SPLITS), ("subset", name, SPLITS.get(split)):
        if word not in known:
            raise UsageError(f"there is no {what} {word!r}; there is {', '.join(known)}")
    check(SPLITS[split][name])
    return SPLITS[split][name]


def trials(split, subset, n, *, seed=0, depth=None):
    """The first n Trials of a set. A set of several depths needs `depth`. ValueError for a set or a
    depth that is not there, and where the rules can hardly be met."""
    chosen = subset_of(split, subset)
    depth = chosen.depths[0] if depth is None and len(chosen.depths) == 1 else depth
    if depth not in chosen.depths:
        raise UsageError(f"{split}/{subset} needs --depth {' or '.join(map(str, chosen.depths))}")
    if n < 1:
        raise UsageError(f"n must be at least 1, not {n}")
    return stream(f"set {seed} {split} {subset}", chosen, depth, range(n))


class Batches(torch.utils.data.Dataset):
    """A seed's training batches: item i is batch i, Trials of one depth, the depths in turn. With
    `train_size`, so many trials are reshuffled each epoch; what fills no batch is left out."""

    def __init__(self, split, batch_size, seed, train_size=None):
        self.name, self.subset = f"training {seed} {split}", subset_of(split, "train")
        self.size, self.share = batch_size, train_size and train_size // len(self.subset.depths)
        if train_size is not None and self.share < batch_size:
            raise UsageError(f"{train_size:,} training trials are less than a batch of each depth")

    def __getitem__(self, i):
        turn, which = divmod(i, len(self.subset.depths))
        depth, numbers = self.subset.depths[which], range(turn * self.size, (turn + 1) * self.size)
        if self.share:
            epoch, place = divmod(turn, self.share // self.size)
            seed = random.Random(f"order {self.name} {depth} {epoch}").getrandbits(32)
            order = np.random.RandomState(seed).permutation(self.share)
            numbers = order[place * self.size:(place + 1) * self.size]
        return stream(self.name, self.subset, depth, numbers)


# ---- the oracle: reads tokens only, and shares nothing with the generator but OPERATORS ---------

class Solved(NamedTuple):
    """An operator as the oracle reads it: its selectors (shape, color), 0 = any; the cells of the
    objects that each matches; its answer."""
    operator: str
    selectors: list
    found: list
    answer: int


def evaluate(instruction, stimulus):
    """All operators of a trial (T, 5), (100, 2), level by level: operator i leads to 2 i + 1 (True)
    and 2 i + 2 (False). IndexError where an object is missing."""
    grid = {cell: (shape, color) for cell, (shape, color) in zip(CELLS, stimulus.tolist()) if shape}
    names, solved = list(OPERATORS), []
    for number, *features in instruction.tolist():
        if number != IF_ELSE:
            selectors = [pair for pair in (features[:2], features[2:]) if any(pair)]
            found = [[cell for cell, (a, b) in grid.items() if shape in (0, a) and color in (0, b)]
                     for shape, color in selectors]
            answer = answer_of(names[number - 1], grid, found)
            solved.append(Solved(names[number - 1], selectors, found, answer))
    return solved


def answer_of(operator, grid, found):
    """The class that an operator answers, given the cells that its selectors found."""
    if operator == "Exist":
        return TRUE if found[0] else FALSE
    if holds := OPERATORS[operator].holds:
        return TRUE if holds(tuple(cells[0] for cells in found)) else FALSE
    (row, column), (shape, color) = found[0][0], grid[found[0][0]]
    return {"GetLocation": FIRST_CELL + GRID * row + column, "GetColor": FIRST_COLOR - 1 + color,
            "GetShape": FIRST_SHAPE - 1 + shape}[operator]


def descend(solved, i=0):
    """The way from operator i (the root) to the one that answers for it: indices of Solved."""
    path = [i]
    while (left := 2 * path[-1] + 1) < len(solved):
        path.append(left if solved[path[-1]].answer == TRUE else left + 1)
    return path


def solve(instruction, stimulus):
    """The answers (n,) to trials, from their tokens (n, T, 5) and (n, 100, 2) alone."""
    trees = map(evaluate, instruction, stimulus)
    return torch.tensor([tree[descend(tree)[-1]].answer for tree in trees])


# ---- for people ---------------------------------------------------------------------------------

def describe(solved, i=0):
    """The tree below operator i in English, indented."""
    objects = [" ".join([*COLOR_NAMES[color - 1:color], *ANSWERS[FIRST_SHAPE:][shape - 1:shape]])
               for shape, color in solved[i].selectors]
    question = OPERATORS[solved[i].operator].question.format(" and the ".join(objects))
    text = f"{solved[i].operator}: {question}"
    if 2 * i + 1 < len(solved):
        left, right = (describe(solved, 2 * i + k).replace("\n", "\n  ") for k in (1, 2))
        text = f"if {text}\n  then {left}\n  else {right}"
    return text


def picture(solved, stimulus):
    """The grid as text. [Brackets] mark what the answering path asks for. (pi is pink.)"""
    asked = [cell for i in descend(solved) for cells in solved[i].found for cell in cells]
    text = "  " + "".join(f"{column:>4}  " for column in range(GRID))
    for cell, (shape, color) in zip(CELLS, stimulus.tolist()):
        letter, hue = ANSWERS[FIRST_SHAPE + shape - 1], COLOR_NAMES[color - 1][:2]
        word = f"{letter}:{hue}" if shape else " .  "
        text += "" if cell[1] else f"\n{cell[0]:<3}"
        text += f"[{word}]" if cell in asked else f" {word} "
    return "\n".join(line.rstrip() for line in text.split("\n"))


def show(trial):
    """One trial (instruction, stimulus, answer) for people: question, grid, answer."""
    instruction, stimulus, answer = trial
    solved = evaluate(instruction, stimulus)
    return f"{describe(solved)}\n\n{picture(solved, stimulus)}\n\nAnswer: {ANSWERS[answer]}"


@contextlib.contextmanager
def replacing(path):
    """A temporary path beside `path`, which replaces it if all goes well. Where writing fails, as
    on a full disk, the old file stays."""
    path = pathlib.Path(path)
    temporary = path.with_name(f"{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def ending(parser):
    """How a program ends: with exit code 2 and one line where its input is wrong, with 130 at
    Ctrl-C, and quietly where its reader has left, as `| head -1` does."""
    sys.stdout.reconfigure(errors="replace")  # for consoles that lack ±
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (UsageError, OSError) as error:
        parser.error(str(error))


def main(argv=None):
    parser = argparse.ArgumentParser(  # without usage, so that an error is one line
        description="Show gCOG trials, or export them.", usage=argparse.SUPPRESS,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--split", choices=SPLITS, default="productive", help="which split")
    add("--subset", help="its test set, or train; None: the first test set")
    add("--depth", type=int, help="needed where a training set has several depths")
    add("--n", type=int, default=3, help="number of trials")
    add("--seed", type=int, default=0, help="each has trials of its own; models are tested on 0")
    add("--export", metavar="FILE.npz", help="write numpy arrays instead of showing the trials")
    args = parser.parse_args(argv)
    with ending(parser):
        made = trials(args.split, args.subset or list(SPLITS[args.split])[1], args.n,
                      seed=args.seed, depth=args.depth)
        if args.export:
            with replacing(args.export) as temporary, open(temporary, "wb") as file:
                np.savez_compressed(file, operators=list(OPERATORS), **made._asdict())
        else:
            print("\n\n\n".join(map(show, zip(*made))))


if __name__ == "__main__":
    main()
