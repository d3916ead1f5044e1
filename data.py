"""gCOG trials: instruction, stimulus and answer, generated on demand (Ito et al., ICLR 2024, section 2).

A trial asks one question about a 10 x 10 grid of colored letters. The question is a tree of operators:

    instruction (T, 5)                          stimulus (100, 2)                answer
    IfElse                                      . . . . . . . . . .
     |- if    Exist(red a)              +       . a . . . b . . . .       ->     one of 138 classes
     |- then  GetColor(b)                       . . . . c . . a . .              0 True, 1 False, 2..101 cells,
     '- else  SumEven(blue c, pink a)           . . d . . . (10 rows)            102..127 letters, 128..137 colors

    instruction token  (operator, shape 1, color 1, shape 2, color 2), 0 = none. Level by level, each level
                       from left (True) to right (False): its operators, then, if it is not the last, its IfElses.
    stimulus token     (shape, color) of cell 10 * row + column, 0 = empty.

Differs from the reference release: 1) every trial is well posed (see solve); 2) two shortcuts to an answer
are closed: stand-ins for missing objects, decoys for parities; 3) the held-out pairs of systematic1 are held
out; 4) systematic3 also trains single operators, which contain no pair; 5) one depth per batch, so nothing is
padded; 6) tokens are integers, not floats; 7) of the two objects of a product, at least one lies on an odd
row and an odd column.
"""
import argparse
import contextlib
import hashlib
import itertools
import os
import sys
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch loads: threads that spin are slow on busy cores
import torch  # noqa: E402

SHAPES, COLORS, GRID = 10, 10, 10  # the first 10 letters, as in the reference's splits; SHAPES may be up to 26
LETTERS = "abcdefghijklmnopqrstuvwxyz"
COLOR_NAMES = ("red", "green", "blue", "yellow", "purple", "orange", "white", "pink", "cyan", "brown")
OPERATORS = ("none", "Exist", "GetLocation", "GetColor", "GetShape", "SumEven", "SumOdd", "ProductEven",
             "ProductOdd", "IfElse")
_, EXIST, GET_LOCATION, GET_COLOR, GET_SHAPE, SUM_EVEN, SUM_ODD, PRODUCT_EVEN, PRODUCT_ODD, IF_ELSE = range(10)
TRUE, FALSE, FIRST_CELL, FIRST_SHAPE, FIRST_COLOR, CLASSES = 0, 1, 2, 102, 128, 138


class Trials(NamedTuple):
    instruction: torch.Tensor  # (n, T, 5) int32
    stimulus: torch.Tensor  # (n, 100, 2) int32
    answer: torch.Tensor  # (n,) int64


# ---- the splits ---------------------------------------------------------------------------------------

class Pool(NamedTuple):
    """What one kind of trial asks: its leaf operators, inner operators, and the objects that its selectors name.

    A Pool restricts selectors only. Distractors come from all shapes and colors."""
    leaves: tuple = (EXIST, GET_LOCATION, GET_COLOR, GET_SHAPE, SUM_EVEN, SUM_ODD, PRODUCT_EVEN, PRODUCT_ODD)
    conditions: tuple = (EXIST, SUM_EVEN, SUM_ODD, PRODUCT_EVEN, PRODUCT_ODD)
    shapes: range = range(SHAPES)
    colors: range = range(COLORS)


class Subset(NamedTuple):
    """A set of trials: each draws one of the pools, and a number of distractors from the least to the most."""
    pools: tuple = (Pool(),)
    depths: tuple = (1,)
    distractors: tuple = (1, 5)


LOW_SHAPES, HIGH_SHAPES = range(SHAPES // 2), range(SHAPES // 2, SHAPES)
LOW_COLORS, HIGH_COLORS = range(COLORS // 2), range(COLORS // 2, COLORS)
OPS_A, OPS_B = (EXIST, SUM_EVEN, PRODUCT_EVEN, GET_SHAPE), (SUM_ODD, PRODUCT_ODD, GET_LOCATION, GET_COLOR)
SYSTEMATIC1 = Subset(pools=(Pool(OPS_A, colors=LOW_COLORS), Pool(OPS_B, shapes=HIGH_SHAPES)))
IF_A, IF_B = (EXIST, SUM_EVEN, PRODUCT_EVEN), (SUM_ODD, PRODUCT_ODD)
THEN_A, THEN_B = (SUM_EVEN, PRODUCT_EVEN, GET_COLOR, GET_SHAPE), (EXIST, SUM_ODD, PRODUCT_ODD, GET_LOCATION)
SYSTEMATIC3 = Subset(pools=(Pool(THEN_A, IF_A), Pool(THEN_B, IF_B)), depths=(3,))


def held_out1(ops_a, ops_b):
    """Questions with these operators about objects that systematic1 trains with the other operators alone."""
    return Subset(pools=(Pool(ops_a, shapes=HIGH_SHAPES, colors=HIGH_COLORS),
                         Pool(ops_b, shapes=LOW_SHAPES, colors=LOW_COLORS)))


SPLITS = {  # split -> {"train": its training distribution, test set: its distribution, ...}; in distribution first
    "distractor": {"train": Subset(), "iid": Subset(),
                   **{f"distractors{m}": Subset(distractors=(m, m)) for m in (10, 20, 30, 40)}},
    "systematic1": {"train": SYSTEMATIC1, "iid": SYSTEMATIC1,
                    "ood6": held_out1(OPS_A[:3], OPS_B[:3]),  # without GetShape and GetColor
                    "ood": held_out1(OPS_A, OPS_B)},
    "systematic3": {"train": SYSTEMATIC3._replace(depths=(1, 3)), "iid": SYSTEMATIC3,
                    "ood": Subset(pools=(Pool(THEN_B, IF_A), Pool(THEN_A, IF_B)), depths=(3,))},
    "productive": {"train": Subset(depths=(1, 3)),
                   **{f"depth{d}": Subset(depths=(d,)) for d in (1, 3, 5, 7, 9)}},
}


def _demand(holds, message):
    if not holds:
        raise ValueError(message)


def _check_subset(subset):
    """ValueError, naming the field, unless this is a Subset of which trials can be asked."""
    def check(field, value, allowed):
        _demand(isinstance(value, (tuple, range)) and len(value) == len(set(value)) > 0
                and all(type(number) is int and number in allowed for number in value),
                f"{field} of a Subset must be a tuple of different numbers of {allowed}, not {value!r}")

    pools, depths, numbers = subset
    check("depths", depths, (1, 3, 5, 7, 9))
    _demand(type(numbers) is tuple and [type(number) for number in numbers] == [int, int]
            and 1 <= numbers[0] <= numbers[1] <= 99,
            f"distractors of a Subset must be two integers from 1 to 99, least and most, not {numbers!r}")
    _demand(type(pools) is tuple and pools and all(isinstance(pool, Pool) for pool in pools),
            f"pools of a Subset must be a tuple of Pools, not {pools!r}")
    for pool in pools:
        for field, value, allowed in zip(Pool._fields, pool, (*Pool()[:2], range(SHAPES), range(COLORS))):
            check(field, value, allowed)


# ---- the generator --------------------------------------------------------------------------------------
# Each step draws something for n trials at once. A tree has O operators in heap order: operator i leads to
# operators 2i + 1 (True) and 2i + 2 (False). A trial has room for 2 O + D objects: the objects of the O first
# selectors, then those of the O second selectors, then at most D distractors.

LOTS = 2 ** 24  # random keys to sort by: equal ones are rare, and all versions of torch draw the same below 2 ** 28
ANYWHERE = 4  # the parity class of an object that may lie in any cell; the others are 2 * (row % 2) + column % 2
ODD_ODD = 3  # the parity class of odd rows and odd columns
REDRAWS = 100  # rounds, each for up to a twentieth of the trials


def _below(limit, like, generator):
    """Random integers from 0 to limit - 1, in the shape of `like` and where it is."""
    return torch.randint(limit, like.shape, generator=generator, device=like.device)


def _deal(allowed, wanted, generator):
    """Shuffles the allowed candidates (n, candidates) and deals them to the places that want one (n, places).

    Returns the index of each place's candidate (n, places), and whether there were enough candidates (n,)."""
    lot = torch.where(allowed, _below(LOTS, allowed, generator), LOTS)
    shuffled = lot.argsort(dim=1, stable=True)  # the forbidden ones have the highest lot, so they come last
    turn = (wanted.cumsum(1) - 1).clamp(0, allowed.shape[1] - 1)  # the k-th place that wants one gets the k-th
    return shuffled.gather(1, turn), wanted.sum(1) <= allowed.sum(1)


def _pick(allowed, wanted, generator):
    """Like _deal, but two places may pick the same candidate."""
    allowed_first, number = (~allowed).argsort(dim=1, stable=True), allowed.sum(1, True)
    turn = _below(LOTS, wanted, generator) % number.clamp(min=1)
    return allowed_first.gather(1, turn), (number[:, 0] > 0) | ~wanted.any(1)


def _among(index, there, size):
    """Marks the candidates (n, size) that occur among the indices (n, places). Only places that are there count."""
    mark = there.new_zeros(len(index), size + 1)  # the last is for places without one
    return mark.scatter_(1, torch.where(there, index, size), True)[:, :-1]


def _in_pool(subset, field, size, pool):
    """Marks the numbers below `size` that the pool of each trial has in this field (n, size)."""
    table = [[number in getattr(p, field) for number in range(size)] for p in subset.pools]
    return torch.tensor(table, device=pool.device)[pool]


def _operators(subset, depth, pool, generator):
    """Draws the operators (n, O), and which of them have a second selector (n, O)."""
    width = 2 ** (depth // 2)  # of the last level
    wanted = torch.ones(len(pool), 2 * width - 1, dtype=torch.bool, device=pool.device)
    conditions, _ = _pick(_in_pool(subset, "conditions", IF_ELSE, pool), wanted[:, width:], generator)
    leaves, _ = _pick(_in_pool(subset, "leaves", IF_ELSE, pool), wanted[:, :width], generator)
    operator = torch.cat([conditions, leaves], 1)
    return operator, (operator >= SUM_EVEN) & (_below(2, operator, generator) == 1) & (depth > 1)


def _features(subset, pool, operator, has_second, has_distractor, generator):
    """Draws the shape and the color of every object (n, 2 O + D), and says where there were enough pairs (n,).

    No other object has the shape that a GetColor asks about, or the color that a GetShape asks about. The second place
    of an Exist holds its stand-in, which takes the object's place on the grid where the Exist is False."""
    def pairs(shapes, colors):
        return (shapes[:, :, None] & colors[:, None]).flatten(1)  # shape * COLORS + color

    get_color, get_shape, size = operator == GET_COLOR, operator == GET_SHAPE, operator.shape[1]
    pool_shapes, pool_colors = _in_pool(subset, "shapes", SHAPES, pool), _in_pool(subset, "colors", COLORS, pool)
    asked_shape, enough1 = _deal(pool_shapes, get_color, generator)
    asked_color, enough2 = _deal(pool_colors, get_shape, generator)
    free_shapes = ~_among(asked_shape, get_color, SHAPES)
    free_colors = ~_among(asked_color, get_shape, COLORS)
    left_shapes, left_colors = pool_shapes & free_shapes, pool_colors & free_colors
    found_shape, enough3 = _pick(left_shapes, get_shape, generator)  # what GetShape answers
    found_color, enough4 = _pick(left_colors, get_color, generator)

    asks_pair = torch.cat([~get_color & ~get_shape, has_second | (operator == EXIST)], 1)
    pair, enough5 = _deal(pairs(left_shapes, left_colors), asks_pair, generator)
    free_pairs = pairs(free_shapes, free_colors) & ~_among(pair, asks_pair, SHAPES * COLORS)
    distractor, enough6 = _pick(free_pairs, has_distractor, generator)

    all_pairs = torch.cat([pair, distractor], 1)
    shape, color = all_pairs // COLORS, all_pairs % COLORS
    shape[:, :size] = torch.where(get_color, asked_shape, torch.where(get_shape, found_shape, shape[:, :size]))
    color[:, :size] = torch.where(get_shape, asked_color, torch.where(get_color, found_color, color[:, :size]))
    return shape + 1, color + 1, enough1 & enough2 & enough3 & enough4 & enough5 & enough6


def _truths(operator, depth, generator):
    """Draws which operators are True (n, O). Also returns the answering path, from the leaf to the root (n, levels)."""
    truth, node = _below(2, operator, generator) == 1, torch.zeros_like(operator[:, :1])
    answering_path = [node]
    for _ in range(depth // 2):
        node = 2 * node + 1 + (~truth).gather(1, node)
        answering_path.insert(0, node)
    return truth, torch.cat(answering_path, 1)


def _deciding_class(is_sum, odd, generator):
    """Draws a parity class in which row and column add up (or multiply) to an odd number, or to an even number."""
    sum_class = torch.where(odd, 1 + _below(2, odd, generator), 3 * _below(2, odd, generator))  # 1 or 2; 0 or 3
    product_class = torch.where(odd, ODD_ODD, _below(3, odd, generator))
    return torch.where(is_sum, sum_class, product_class)


def _parity_classes(operator, has_second, truth, answering_path, has_distractor, generator):
    """Draws the parity classes of the objects (n, at most 2 O + D) such that each operator is as true as was drawn.

    One object decides a sum or a product. The other object, if there is one, lies anywhere (sum) or on an odd row and
    column (product). The first distractors are assigned to the operators on the answering path. One that is assigned to
    a sum or a product is its decoy: it lies where the deciding object would lie if the truth were the opposite."""
    is_parity, is_sum = operator >= SUM_EVEN, operator <= SUM_ODD
    other = torch.where(is_sum, _below(4, operator, generator), ODD_ODD)
    other_is_odd = has_second & is_sum & ((other == 1) | (other == 2))
    # Whether the deciding object's row and column must add up (or multiply) to an odd number.
    odd = other_is_odd ^ (truth == ((operator == SUM_ODD) | (operator == PRODUCT_ODD)))
    deciding = _deciding_class(is_sum, odd, generator)
    swap = has_second & (_below(2, operator, generator) == 1)
    first = torch.where(is_parity, torch.where(swap, other, deciding), ANYWHERE)
    second = torch.where(has_second, torch.where(swap, deciding, other), ANYWHERE)

    node = answering_path[:, :has_distractor.shape[1]]
    decoy = _deciding_class(is_sum.gather(1, node), ~odd.gather(1, node), generator)
    is_decoy = is_parity.gather(1, node) & has_distractor[:, :node.shape[1]]
    return torch.cat([first, second, torch.where(is_decoy, decoy, ANYWHERE)], 1)


def _cells(parity_class, present, generator):
    """Draws the cell of every object (n, 2 O + D), and says where there were enough cells (n,). The objects of a parity
    class are dealt the 25 cells of the class first. The other objects are dealt the cells that are left."""
    half, bound = GRID // 2, parity_class != ANYWHERE
    grid = torch.arange(GRID * GRID, device=present.device).view(half, 2, half, 2)  # row and column, by parity
    bound_cell, enough = torch.zeros_like(parity_class), torch.ones_like(present[:, 0])
    for c in range(ANYWHERE):
        cells, here = grid[:, c // 2, :, c % 2].flatten(), parity_class == c
        place, enough_here = _deal(present.new_ones(len(present), len(cells)), here, generator)
        bound_cell = torch.where(here, cells[place], bound_cell)
        enough &= enough_here
    unbound = present.clone()
    unbound[:, :bound.shape[1]] &= ~bound
    cell, enough_left = _deal(~_among(bound_cell, bound, GRID * GRID), unbound, generator)
    cell[:, :bound.shape[1]] = torch.where(bound, bound_cell, cell[:, :bound.shape[1]])
    return cell, enough & enough_left


def _attempt(subset, depth, pool, distractors, generator):
    """Draws a trial for each pool and number of distractors (n,), and says which trials obey the rules (n,)."""
    operator, has_second = _operators(subset, depth, pool, generator)
    has_distractor = torch.arange(subset.distractors[1], device=pool.device) < distractors[:, None]
    shape, color, enough_pairs = _features(subset, pool, operator, has_second, has_distractor, generator)
    truth, answering_path = _truths(operator, depth, generator)
    parity_class = _parity_classes(operator, has_second, truth, answering_path, has_distractor, generator)
    present = torch.cat([torch.ones_like(has_second), has_second, has_distractor], 1)
    cell, enough_cells = _cells(parity_class, present, generator)

    n, size = operator.shape
    first, second = slice(0, size), slice(size, 2 * size)
    instruction = torch.zeros(n, (3 * size - 1) // 2, 5, dtype=torch.int32, device=pool.device)
    instruction[:, :, 0] = IF_ELSE
    # Before level l stand 2^l - 1 operators and as many IfElses.
    token = [2 * (2 ** level - 1) + i for level in range(depth // 2 + 1) for i in range(2 ** level)]
    instruction[:, token] = torch.stack([
        operator, shape[:, first] * (operator != GET_SHAPE), color[:, first] * (operator != GET_COLOR),
        shape[:, second] * has_second, color[:, second] * has_second], 2).int()

    missing = (operator == EXIST) & ~truth
    for feature in (shape, color):
        feature[:, first] = torch.where(missing, feature[:, second], feature[:, first])
    stimulus = torch.zeros(n, GRID * GRID + 1, 2, dtype=torch.int32, device=pool.device)  # the last: not present
    place = torch.where(present, cell, GRID * GRID)[:, :, None].expand(-1, -1, 2)
    stimulus.scatter_(1, place, torch.stack([shape, color], 2).int())

    node = answering_path[:, :1]
    answer = torch.where(truth.gather(1, node), TRUE, FALSE)
    for asked, value in ((GET_LOCATION, FIRST_CELL + cell), (GET_COLOR, FIRST_COLOR - 1 + color),
                         (GET_SHAPE, FIRST_SHAPE - 1 + shape)):
        answer = torch.where(operator.gather(1, node) == asked, value.gather(1, node), answer)
    return Trials(instruction, stimulus[:, :-1], answer[:, 0]), enough_pairs & enough_cells


def _generate(subset, depth, n, generator):
    """n well-posed trials of one depth, on the generator's device. ValueError where the rules cannot be met.

    A trial that breaks a rule is drawn again, with the same pool and number of distractors."""
    least, most = subset.distractors
    each = torch.empty(n, device=generator.device)
    pool, distractors = _below(len(subset.pools), each, generator), least + _below(most - least + 1, each, generator)
    made, obeys = _attempt(subset, depth, pool, distractors, generator)
    for _ in range(REDRAWS):
        if obeys.all():
            return made
        again = (~obeys).nonzero()[:n // 20 + 1, 0]  # not all at once: a hopeless subset is given up soon
        redrawn, obeys[again] = _attempt(subset, depth, pool[again], distractors[again], generator)
        for old, new in zip(made, redrawn):
            old[again] = new
    raise ValueError(f"this subset cannot be met: cells, or pairs of shape and color, run out at depth {depth} "
                     f"with {least} to {most} distractors")


# ---- streams of trials ----------------------------------------------------------------------------------------

CHUNK = 2_000  # trials per call of the generator; part of what a stream is
MAX_SEED = 2 ** 63 - 1  # of 64 bits with a sign


def _stream(device, *name):
    """A random generator for a named stream: the same name gives the same numbers."""
    digest = hashlib.sha256(" ".join(map(str, name)).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


def _subset(split, subset):
    """The Subset of that name. ValueError where there is none, or where it breaks a rule."""
    _demand(split in SPLITS, f"no split {split!r}; there are {', '.join(SPLITS)}")
    _demand(subset in SPLITS[split], f"split {split} has no subset {subset!r}; it has {', '.join(SPLITS[split])}")
    _check_subset(SPLITS[split][subset])
    return SPLITS[split][subset]


def _check_arguments(device, **numbers):
    """ValueError, naming the argument, unless torch has the device and each value is an integer, at least its least."""
    for name, (value, least) in numbers.items():
        _demand(isinstance(value, int) and value >= least,
                f"{name} must be an integer of at least {least}, not {value!r}")
    try:
        torch.Generator(device)
    except Exception as error:  # torch has one kind for each way to be wrong
        raise ValueError(f"device must be one that torch has here, not {device!r}") from error


def trials(split, subset, n, *, seed=0, depth=None, device="cpu"):
    """The first n trials of a set, generated on the CPU: the same on every machine. A set of several depths needs
    `depth`. Raises ValueError where an argument, or the set, breaks a rule."""
    chosen = _subset(split, subset)
    depth = chosen.depths[0] if depth is None and len(chosen.depths) == 1 else depth
    _demand(depth in chosen.depths,
            f"depth of {split}/{subset} must be {' or '.join(map(str, chosen.depths))}, not {depth}")
    _check_arguments(device, n=(n, 1), seed=(seed, 0))
    chunks = [_generate(chosen, depth, CHUNK, _stream("cpu", seed, split, subset, depth, i))
              for i in range(-(-n // CHUNK))]
    return Trials(*(torch.cat(parts)[:n].to(device) for parts in zip(*chunks)))


def batches(split, batch_size, *, seed, start=0, device="cpu", train_size=None):
    """Endless training batches (Trials) from batch `start` on, each of one depth, the depths in turn. Batch i depends
    on (seed, split, i, batch_size, train_size) and the kind of device alone. Without `train_size` all trials are new.
    With it, that many trials, evenly over the depths, are reshuffled each epoch. Trials that do not fill a batch are
    left out of that epoch. Raises ValueError where an argument, or the set, breaks a rule."""
    subset = _subset(split, "train")
    _check_arguments(device, batch_size=(batch_size, 1), seed=(seed, 0), start=(start, 0))
    if train_size is not None:  # a batch of each depth
        _check_arguments(device, train_size=(train_size, batch_size * len(subset.depths)))
    share = None if train_size is None else train_size // len(subset.depths)  # trials of each depth
    return _batches(split, subset, batch_size, seed, start, device, share)


def _batches(split, subset, batch_size, seed, start, device, share):
    depths, blocks = subset.depths, {}
    fixed = {d: trials(split, "train", share, seed=seed, depth=d, device=device) for d in depths if share}
    length = share or max(CHUNK, batch_size)  # of a block of trials: an epoch, or what one call of the generator makes
    for i in itertools.count(start):
        depth = depths[i % len(depths)]
        block, place = divmod(i // len(depths), length // batch_size)
        if place == 0 or depth not in blocks:
            if share is None:
                blocks[depth] = _generate(subset, depth, length, _stream(device, seed, split, "train", depth, block))
            else:
                order = torch.randperm(share, generator=_stream("cpu", seed, split, "order", depth, block))
                blocks[depth] = Trials(*(x[order.to(device)] for x in fixed[depth]))
        yield Trials(*(x[place * batch_size:(place + 1) * batch_size] for x in blocks[depth]))


# ---- the oracle: reads tokens only, and shares no code with the generator ---------------------------------------

def evaluate_nodes(instruction, stimulus):
    """For every token of the instruction: the class that it would answer (n, T), and which cells hold an object that
    its two selectors match (n, T, 2, 100)."""
    op, shapes, colors = instruction[:, :, 0], instruction[:, :, 1::2], instruction[:, :, 2::2]
    shape, color = stimulus[:, None, None, :, 0], stimulus[:, None, None, :, 1]
    asked = (shapes > 0) | (colors > 0)  # (n, T, 2)
    shape_fits = (shapes == 0)[..., None] | (shapes[..., None] == shape)
    color_fits = (colors == 0)[..., None] | (colors[..., None] == color)
    match = shape_fits & color_fits & asked[..., None] & (shape > 0) & (color > 0)
    cell = match.int().argmax(3)  # the first that matches
    row, column = cell // GRID, cell % GRID
    total = ((row + column) * asked).sum(2) % 2
    product = torch.where(asked, row * column, 1).prod(2) % 2
    at = stimulus.gather(1, cell[:, :, :1].expand(-1, -1, 2))  # the first selector's object
    answer = torch.zeros_like(total)
    for operator, value in ((EXIST, (~match[:, :, 0].any(2)).long()), (GET_LOCATION, FIRST_CELL + cell[:, :, 0]),
                            (GET_COLOR, FIRST_COLOR - 1 + at[:, :, 1]), (GET_SHAPE, FIRST_SHAPE - 1 + at[:, :, 0]),
                            (SUM_EVEN, total), (SUM_ODD, 1 - total),  # TRUE is 0, as an even total is
                            (PRODUCT_EVEN, product), (PRODUCT_ODD, 1 - product)):
        answer = torch.where(op == operator, value, answer)
    return answer, match


def descend(answers):
    """The tokens of the operators from the root to the answer (n, levels), given every token's answer (n, T)."""
    index = torch.zeros_like(answers[:, :1])  # within its level
    tokens, start, width = [index], 0, 1
    while start + width < answers.shape[1]:  # there are IfElses, so a level follows
        index = 2 * index + answers.gather(1, tokens[-1])  # TRUE is 0: left
        start, width = start + 2 * width, 2 * width
        tokens.append(start + index)
    return torch.cat(tokens, 1)


def path(instruction, stimulus):
    """The tokens of the operators on the way from the root to the answer: (n, levels) indices below T. The last one
    is the operator that answers. Raises ValueError where the tensors are no instructions and stimuli."""
    _check(instruction, stimulus)
    return descend(evaluate_nodes(instruction, stimulus)[0])


def solve(instruction, stimulus, distractors=(1, 40)):
    """Answers (n,), and which rules hold, bool (n, 4): selectors are distinct; each has one object; the number of
    distractors is from the least to the most of `distractors`; a cell that has a shape has a color. Takes the tokens
    (n, T, 5) and (n, 100, 2) alone. Raises ValueError where they are no instructions and stimuli, or where
    `distractors` is not two integers in order."""
    _check(instruction, stimulus)
    _demand([type(number) for number in distractors or ()] == [int, int] and distractors[0] <= distractors[1],
            f"distractors must be two integers, least and most, not {distractors!r}")
    answers, match = evaluate_nodes(instruction, stimulus)
    operator = instruction[0, :, 0] != IF_ELSE  # leave out the IfElses before comparing selectors in pairs
    s, c = instruction[:, operator, 1::2].flatten(1), instruction[:, operator, 2::2].flatten(1)
    same_s = (s[:, :, None] == s[:, None]) & (s > 0)[:, None]
    same_c = (c[:, :, None] == c[:, None]) & (c > 0)[:, None]
    no_s, no_c = ((x == 0)[:, :, None] | (x == 0)[:, None] for x in (s, c))  # no shape: GetShape; no color: GetColor
    clash = same_s & (same_c | no_c) | same_c & no_s
    distinct = ~clash.triu(1).any(2).any(1)

    asked, count = (instruction[:, :, 1::2] > 0) | (instruction[:, :, 2::2] > 0), match.sum(3)
    single = (count == 1) | ~asked | (count == 0) & (instruction[:, :, :1] == EXIST)
    objects = (stimulus > 0).any(2).sum(1) - asked.sum((1, 2))
    counted = (objects >= distractors[0]) & (objects <= distractors[1])
    whole = (stimulus[:, :, 0] > 0) == (stimulus[:, :, 1] > 0)
    single = single.all(2).all(1) & asked[:, operator, 0].all(1)
    ok = torch.stack([distinct, single, counted, whole.all(1)], 1)
    return answers.gather(1, descend(answers)[:, -1:])[:, 0], ok


def _check(instruction, stimulus):
    """ValueError, naming the argument, unless these are tokens of instructions and stimuli."""
    for name, tokens, lengths, most in (
            ("instruction", instruction, (1, 4, 10, 22, 46), (IF_ELSE, SHAPES, COLORS, SHAPES, COLORS)),
            ("stimulus", stimulus, (GRID * GRID,), (SHAPES, COLORS))):
        _demand(isinstance(tokens, torch.Tensor) and tokens.dtype in (torch.int32, torch.int64) and tokens.dim() == 3
                and len(tokens) == len(instruction) > 0 and tokens.shape[1] in lengths and tokens.shape[2] == len(most)
                and tokens.device == instruction.device,
                f"{name} must be (n, {' or '.join(map(str, lengths))}, {len(most)}), int32 or int64, on one device")
        _demand(((tokens >= 0) & (tokens <= torch.tensor(most, device=tokens.device))).all(),
                f"{name} must hold integers from 0 to {most}")
    op = instruction[:, :, 0]
    width = (op.shape[1] + 2) // 3  # of the last level
    if_else = [token for level in (1, 2, 4, 8, 16) for token in [False] * level + [True] * level][:op.shape[1]]
    wrong = ((op == IF_ELSE) != torch.tensor(if_else, device=op.device)) | (op == 0)
    wrong[:, :-width] |= (op[:, :-width] >= GET_LOCATION) & (op[:, :-width] <= GET_SHAPE)
    _demand(not wrong.any(), "instruction must have its IfElses after each level but the last, and booleans before them")


# ---- for people -------------------------------------------------------------------------------------------------

QUESTIONS = {EXIST: "is the {} on the grid?", GET_LOCATION: "where is the {}?", GET_COLOR: "which color is the {}?",
             GET_SHAPE: "which letter is {}?", SUM_EVEN: "do the row and column of the {} add up to an even number?",
             SUM_ODD: "do the row and column of the {} add up to an odd number?",
             PRODUCT_EVEN: "do the row and column of the {} multiply to an even number?",
             PRODUCT_ODD: "do the row and column of the {} multiply to an odd number?"}


def describe(instruction, level=0, index=0):
    """An instruction (T, 5) in English, as an indented tree. Level and index name the subtree to begin with."""
    start, width = 2 ** (level + 1) - 2, 2 ** level
    op, *selectors = instruction[start + index].tolist()
    objects = " and the ".join(f"{COLOR_NAMES[color - 1] if color else ''} {LETTERS[shape - 1] if shape else ''}".strip()
                               for shape, color in (selectors[:2], selectors[2:]) if shape or color)
    text = f"{OPERATORS[op]}: {QUESTIONS[op].format(objects)}"
    if start + width == len(instruction):  # the last level
        return text
    branches = (describe(instruction, level + 1, 2 * index + i) for i in (0, 1))
    return "\n".join([f"if {text}", *(f"{'  ' * (level + 1)}{word} {branch}"
                                      for word, branch in zip(("then", "else"), branches))])


def name(answer):
    """An answer class in English."""
    if answer < FIRST_CELL:
        return ("True", "False")[answer]
    if answer < FIRST_SHAPE:
        return f"row {(answer - FIRST_CELL) // GRID}, column {(answer - FIRST_CELL) % GRID}"
    return LETTERS[answer - FIRST_SHAPE] if answer < FIRST_COLOR else COLOR_NAMES[answer - FIRST_COLOR]


ANSI = (196, 40, 33, 226, 129, 208, 255, 218, 51, 130)  # of the ten colors, in a 256-color terminal


def draw(instruction, stimulus, color=None):
    """The grid of one trial as text, [objects] that the answering path asks for in brackets. With color None, colored
    letters on a terminal unless NO_COLOR is set; elsewhere the first letters of the color (pink is pi)."""
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR") if color is None else color
    tokens = path(instruction[None], stimulus[None])[0]
    marked = evaluate_nodes(instruction[None], stimulus[None])[1][0, tokens].any(0).any(0)
    cells, width = [], 1 if color else 4
    for (shape, hue), mark in zip(stimulus.tolist(), marked.tolist()):
        text = LETTERS[shape - 1] + ("" if color else f":{COLOR_NAMES[hue - 1][:2]}") if shape else "."
        text = text.center(width)
        if shape and color:
            text = f"\033[1;38;5;{ANSI[hue - 1]}m{text}\033[0m"
        cells.append(f"[{text}]" if mark else f" {text} ")
    rows = [f"{r}  {''.join(cells[r * GRID:(r + 1) * GRID])}".rstrip() for r in range(GRID)]
    return "\n".join(["   " + "".join(str(c).center(width + 2) for c in range(GRID)).rstrip(), *rows])


def show(trial):
    """One trial for people: question, grid, answer."""
    return "\n\n".join([describe(trial.instruction), draw(trial.instruction, trial.stimulus),
                        f"Answer: {name(int(trial.answer))}"])


def between(low, high):
    """A type for argparse: the numbers from low to high, whole ones unless high is a float."""
    def convert(text):
        with contextlib.suppress(ValueError):
            if low <= (value := type(high)(text)) <= high:
                return value
        kind = "an integer" if isinstance(high, int) else "a number"
        raise argparse.ArgumentTypeError(f"must be {kind} from {low} to {high}, not {text}")
    return convert


def main(argv=None):
    parser = argparse.ArgumentParser(description="Show gCOG trials.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--split", choices=SPLITS, default="productive", help="the split to show trials of")
    parser.add_argument("--subset", help="its test set, or train; None: the first test set")
    parser.add_argument("--depth", type=int, choices=(1, 3, 5, 7, 9), help="where a training set has several")
    parser.add_argument("--n", type=between(1, 10 ** 6), default=3, help="trials to show")
    parser.add_argument("--seed", type=between(0, MAX_SEED), default=0, help="of the stream; models are tested on 0")
    args = parser.parse_args(argv)
    try:
        shown = trials(args.split, args.subset or list(SPLITS[args.split])[1], args.n, seed=args.seed, depth=args.depth)
        for i, trial in enumerate(zip(*shown)):
            print("\n" * (i > 0) + show(Trials(*trial)))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
