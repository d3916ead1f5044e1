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
are closed: stand-ins for missing objects, decoys for parities; 3) the held-out pairs of systematic1 are
held out; 4) one depth per batch, so nothing is padded; 5) tokens are integers, not floats; 6) of the two objects of a
product, one at least lies on an odd row and an odd column.
"""
import argparse
import contextlib
import hashlib
import itertools
import os
import signal
import sys
import timeit
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


# ---- the splits -----------------------------------------------------------------------------------------------

class Pool(NamedTuple):
    """What one kind of trial is made of: leaf operators, inner operators, and the objects they ask for."""
    leaves: tuple = (EXIST, GET_LOCATION, GET_COLOR, GET_SHAPE, SUM_EVEN, SUM_ODD, PRODUCT_EVEN, PRODUCT_ODD)
    conditions: tuple = (EXIST, SUM_EVEN, SUM_ODD, PRODUCT_EVEN, PRODUCT_ODD)
    shapes: range = range(SHAPES)
    colors: range = range(COLORS)


class Subset(NamedTuple):
    """A set of trials: each draws one of the pools, and a number of distractors between the two given."""
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

SPLITS = {  # split -> {"train": its training distribution, test set: its distribution, ...}; in distribution first
    "distractor": {"train": Subset(), "iid": Subset(),
                   **{f"distractors{m}": Subset(distractors=(m, m)) for m in (10, 20, 30, 40)}},
    "systematic1": {"train": SYSTEMATIC1, "iid": SYSTEMATIC1,
                    "ood": Subset(pools=(Pool(OPS_A, shapes=HIGH_SHAPES, colors=HIGH_COLORS),
                                         Pool(OPS_B, shapes=LOW_SHAPES, colors=LOW_COLORS)))},
    "systematic3": {"train": SYSTEMATIC3, "iid": SYSTEMATIC3,
                    "ood": Subset(pools=(Pool(THEN_B, IF_A), Pool(THEN_A, IF_B)), depths=(3,))},
    "productive": {"train": Subset(depths=(1, 3)),
                   **{f"depth{d}": Subset(depths=(d,)) for d in (1, 3, 5, 7, 9)}},
}


# ---- the generator --------------------------------------------------------------------------------------------
# n trials at once, without a loop over trials or nodes. O operators, in heap order: the branches of operator i are
# 2i + 1 (True) and 2i + 2 (False). D distractors at most. Objects: two slots per operator, then the distractors.

FAR = 2 ** 14  # beyond all pairs and cells
ODD_ODD = 3  # a cell's parity class is 2 * (row % 2) + column % 2; the 25 cells of class c are numbered 25 c ..
CELLS = torch.arange(GRID * GRID).view(5, 2, 5, 2).permute(1, 3, 0, 2).flatten()  # .. and this is their index


class _Random:
    """Random numbers for n trials; row i belongs to trial i."""

    def __init__(self, n, generator):
        self.n, self.generator, self.device = n, generator, generator.device

    def below(self, limit, size):
        """(n, size) integers, uniform on 0 .. limit - 1 but for a bias under limit / 2**31."""
        draws = torch.empty(self.n, size, dtype=torch.int32, device=self.device).random_(generator=self.generator)
        return draws.long().mul_(limit).bitwise_right_shift_(31)  # draws are below 2**31; `% limit` is much slower

    def coins(self, size):
        return self.below(2, size) == 1


def _distinct(index, group=None):
    """index (n, k): the place of the i-th number drawn among those not drawn before; returns the numbers. With group
    (n, k), only numbers of the same group differ. (A Lehmer code, decoded from its end: each number moves up those
    after it that are not below it.)"""
    index = index.T.to(torch.int16).contiguous()  # (k, n): the loop below then runs over long rows
    group = None if group is None else group.T.to(torch.int16).contiguous()
    for i in reversed(range(len(index) - 1)):
        higher = index[i + 1:] >= index[i]
        index[i + 1:] += higher if group is None else higher & (group[i + 1:] == group[i])
    return index.T.contiguous().long()


def _not_in(taken, index):
    """index (n, k): the place of a number among those not in taken (n, m), FAR for none; returns the numbers."""
    free_below = taken.sort(1).values - torch.arange(taken.shape[1], device=taken.device)  # for each number taken
    return index + torch.searchsorted(free_below, index, right=True)


def _operators(subset, depth, random):
    """The pool of each trial (n,), its operators (n, O), and which of these have a second selector (n, O)."""
    leaves = 2 ** (depth // 2)
    pool = random.below(len(subset.pools), 1)
    op = torch.zeros(random.n, 2 * leaves - 1, dtype=torch.int64, device=random.device)
    for i, p in enumerate(subset.pools):
        drawn = [torch.tensor(choices, device=random.device)[random.below(len(choices), size)]
                 for choices, size in ((p.conditions, leaves - 1), (p.leaves, leaves))]
        op = torch.where(pool == i, torch.cat(drawn, 1), op)
    return pool[:, 0], op, (op >= SUM_EVEN) & random.coins(op.shape[1]) & (depth > 1)


def _features(subset, pool, op, second, random):
    """Shape and color of every object (n, 2 O + D, 2), counted from 1, and whether there were enough pairs (n, 1).

    Shapes and colors, those of the pool first, are the rows and columns of a table of pairs. GetColor takes the
    shapes of the first rows, GetShape the colors of the first columns, and nobody else may use them. All
    other selectors are drawn without replacement from what the pool has left; then distractors, with replacement,
    from all that is left. Exist draws two pairs: its selector, and a stand-in to be there if its object is not."""
    (n, size), device = op.shape, op.device
    get_color, get_shape = op == GET_COLOR, op == GET_SHAPE
    orders, counts = [], []
    for feature, count in (("shapes", SHAPES), ("colors", COLORS)):
        outside = torch.tensor([[x not in getattr(p, feature) for x in range(count)] for p in subset.pools],
                               device=device)[pool]
        order = _distinct(random.below(count - torch.arange(count, device=device), count))
        orders.append(order.gather(1, outside.gather(1, order).sort(dim=1, stable=True).indices))
        counts.append((~outside).sum(1, True))
    drawn = torch.stack([~(get_color | get_shape), second | (op == EXIST)], 2).flatten(1)
    rank, number = drawn.cumsum(1) - 1, drawn.sum(1, True)
    top, left = get_color.sum(1, True), get_shape.sum(1, True)  # reserved rows at the top, columns at the left, (n, 1)
    height, width = counts[0] - top, counts[1] - left  # of what the pool has left
    ok = (height > 0) & (width > 0) & (number <= height * width) & (number < (SHAPES - top) * (COLORS - left))
    top, left = top.clamp(max=SHAPES - 1), left.clamp(max=COLORS - 1)  # so that what is not ok breaks nothing
    height, width = height.clamp(min=1), width.clamp(min=1)

    limit = (height * width - torch.arange(2 * size, device=device)).clamp(min=1)
    pair = _distinct(random.below(limit, 2 * size)).gather(1, rank.clamp(min=0))
    pair = torch.minimum(pair, height * width - 1)
    row = pair // width
    column = pair - row * width
    row[:, ::2] = torch.where(get_shape, random.below(height, size), row[:, ::2])
    column[:, ::2] = torch.where(get_color, random.below(width, size), column[:, ::2])

    height, width = SHAPES - top, COLORS - left
    pair = random.below((height * width - number).clamp(min=1), subset.distractors[1])
    pair = _not_in(torch.where(drawn, row * width + column, FAR), pair)
    pair = torch.minimum(pair, height * width - 1)
    free_row = pair // width
    row[:, ::2] = torch.where(get_color, (get_color.cumsum(1) - 1).clamp(max=SHAPES - 1) - top, row[:, ::2])
    column[:, ::2] = torch.where(get_shape, (get_shape.cumsum(1) - 1).clamp(max=COLORS - 1) - left, column[:, ::2])
    shape = orders[0].gather(1, torch.cat([row, free_row], 1) + top)
    color = orders[1].gather(1, torch.cat([column, pair - free_row * width], 1) + left)
    return torch.stack([shape, color], 2).int() + 1, ok


def _cells(op, second, truth, path, distractors, random):
    """The cell of every object (n, 2 O + D), and whether there were enough of each parity class (n, 1). `path` (n, P)
    are the operators from the answer up to the root, `distractors` (n, D) which of them are there.

    One object decides a parity; the other, if any, lies anywhere (sum) or on an odd row and column (product). The
    first distractors are those of the operators of the path, as far as they reach. That of a sum or product is a decoy:
    it takes a class with which its operator would have been the opposite, so that the grid has the same classes either
    way."""
    size, device = op.shape[1], op.device
    parity, is_sum = op >= SUM_EVEN, op <= SUM_ODD
    odd = truth ^ (op == SUM_EVEN) ^ (op == PRODUCT_EVEN)
    other = torch.where(is_sum, random.below(4, size), ODD_ODD)
    other_odd = second & is_sum & ((other == 1) | (other == 2))  # an odd row or an odd column, not both

    def decider(odd):
        row = random.below(2, size)
        return torch.where(is_sum, 2 * row + (row ^ odd ^ other_odd), torch.where(odd, ODD_ODD, random.below(3, size)))

    deciding, decoy = decider(odd), decider(~odd).gather(1, path)
    swap = second & random.coins(size)
    first, last = torch.where(swap, other, deciding), torch.where(swap, deciding, other)
    bound = torch.stack([parity, second], 2).flatten(1)  # objects that need a cell of their class
    bound = torch.cat([bound, parity.gather(1, path) & distractors[:, :path.shape[1]]], 1)
    cls = torch.where(bound, torch.cat([torch.stack([first, last], 2).flatten(1), decoy], 1), 4)

    one_hot = cls[:, :, None] == torch.arange(5, device=device)
    earlier = one_hot.cumsum(1).gather(2, cls[:, :, None])[:, :, 0] - 1  # objects of the same class
    ok = (~bound | (earlier < 25)).all(1, True)
    place = 25 * cls + _distinct(random.below((25 - earlier).clamp(min=1), cls.shape[1]), cls)
    place = torch.where(bound, place.clamp(max=GRID * GRID - 1), FAR)

    free = GRID * GRID - bound.sum(1, True) - torch.arange(size + distractors.shape[1], device=device)
    free = _not_in(place, _distinct(random.below(free.clamp(min=1), free.shape[1])))
    # One free cell for the two objects of an operator: where it has a second one on the grid, both are bound.
    free = torch.cat([free[:, :size].repeat_interleave(2, 1), free[:, size:]], 1).clamp(max=GRID * GRID - 1)
    free[:, :bound.shape[1]] = torch.where(bound, place, free[:, :bound.shape[1]])
    return CELLS.to(device)[free], ok


def _generate(subset, depth, n, generator):
    """n well-posed trials of one depth, on the generator's device."""
    random = _Random(n, generator)
    pool, op, second = _operators(subset, depth, random)
    size, device = op.shape[1], op.device
    features, enough = _features(subset, pool, op, second, random)
    truth = random.coins(size)
    path = [torch.zeros(n, 1, dtype=torch.int64, device=device)]
    for _ in range(depth // 2):
        path.insert(0, 2 * path[0] + 1 + (~truth).gather(1, path[0]).long())
    node = path[0]  # the operator that answers
    low, high = subset.distractors
    distractors = torch.arange(high, device=device) < low + random.below(high - low + 1, 1)
    cell, room = _cells(op, second, truth, torch.cat(path[:high], 1), distractors, random)
    present = torch.cat([torch.stack([torch.ones_like(second), second], 2).flatten(1), distractors], 1)

    selectors = features[:, :2 * size].reshape(n, size, 4)
    shown = torch.stack([op != GET_SHAPE, op != GET_COLOR, second, second], 2)
    instruction = torch.zeros(n, (3 * size - 1) // 2, 5, dtype=torch.int32, device=device)
    instruction[:, :, 0] = IF_ELSE
    # Before level l stand 2^l - 1 operators and as many IfElses.
    token = [2 * (2 ** l - 1) + i for l in range(depth // 2 + 1) for i in range(2 ** l)]
    instruction[:, token] = torch.cat([op[:, :, None].int(), selectors * shown], 2)

    missing = ((op == EXIST) & ~truth)[:, :, None]
    features[:, 0:2 * size:2] = torch.where(missing, selectors[:, :, 2:], selectors[:, :, :2])
    stimulus = torch.zeros(n, GRID * GRID + 1, 2, dtype=torch.int32, device=device)  # the last for what is not there
    place = torch.where(present, cell, GRID * GRID)[:, :, None].expand(-1, -1, 2)
    stimulus = stimulus.scatter_(1, place, features)[:, :-1]

    answer, asked = (~truth).gather(1, node).long(), op.gather(1, node)
    for operator, value in ((GET_LOCATION, FIRST_CELL + cell), (GET_SHAPE, FIRST_SHAPE - 1 + features[:, :, 0]),
                            (GET_COLOR, FIRST_COLOR - 1 + features[:, :, 1])):
        answer = torch.where(asked == operator, value.gather(1, 2 * node), answer)

    trials, again = Trials(instruction, stimulus, answer[:, 0]), ~(enough & room)[:, 0]
    if again.any():  # rare: a deep tree that ran out of pairs or of cells of a class
        for old, new in zip(trials, _generate(subset, depth, int(again.sum()), generator)):
            old[again] = new
    return trials


# ---- streams of trials ----------------------------------------------------------------------------------------

CHUNK = 10_000  # trials per call of the generator; part of what a stream is
MAX_SEED = 2 ** 63 - 1  # of 64 bits with a sign


def _stream(device, *name):
    """A random generator for a named stream: the same name gives the same numbers."""
    digest = hashlib.sha256(" ".join(map(str, name)).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "big"))


def _subset(split, subset):
    if split not in SPLITS:
        raise ValueError(f"no split {split!r}; there are {', '.join(SPLITS)}")
    if subset not in SPLITS[split]:
        raise ValueError(f"split {split} has no subset {subset!r}; it has {', '.join(SPLITS[split])}")
    return SPLITS[split][subset]


def _check_numbers(device, **numbers):
    """ValueError, naming the argument, unless these are integers from the least allowed up, given as (value, least),
    and the device is there."""
    for name, (value, least) in numbers.items():
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name} must be an integer of at least {least}, not {value!r}")
    try:
        torch.Generator(device)
    except Exception as error:  # torch has one kind for each way to be wrong
        raise ValueError(f"device must be one that torch has here, not {device!r}") from error


def trials(split, subset, n, *, seed=0, depth=None, device="cpu"):
    """The first n trials of a set, generated on the CPU: the same on every machine. A set of several depths needs
    `depth`. Raises ValueError for a split, subset, depth or device that does not exist, and for n below 1."""
    chosen = _subset(split, subset)
    depth = chosen.depths[0] if depth is None and len(chosen.depths) == 1 else depth
    if depth not in chosen.depths:
        raise ValueError(f"depth of {split}/{subset} must be {' or '.join(map(str, chosen.depths))}, not {depth}")
    _check_numbers(device, n=(n, 1), seed=(seed, 0))
    chunks = [_generate(chosen, depth, CHUNK, _stream("cpu", seed, split, subset, depth, i))
              for i in range(-(-n // CHUNK))]
    return Trials(*(torch.cat(parts)[:n].to(device) for parts in zip(*chunks)))


def batches(split, batch_size, *, seed, start=0, device="cpu", train_size=None):
    """Endless training batches (Trials) from batch `start` on, each of one depth, the depths in turn. Batch i depends
    on (seed, split, i, batch_size, train_size) and the kind of device alone. All trials are drawn anew, unless
    `train_size` fixes how many there are: then that many, evenly over the depths, reshuffled each epoch (and those
    that do not fill a batch left out of it). Raises ValueError for a split or device that does not exist and for
    numbers too small."""
    subset = _subset(split, "train")
    _check_numbers(device, batch_size=(batch_size, 1), seed=(seed, 0), start=(start, 0))
    if train_size is not None:  # a batch of each depth
        _check_numbers(device, train_size=(train_size, batch_size * len(subset.depths)))
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

def _evaluate(instruction, stimulus):
    """For every token of the instruction: the class it would answer (n, T), the objects that its selectors match
    (n, T, 2, 100)."""
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
                            (SUM_EVEN, total), (SUM_ODD, 1 - total),
                            (PRODUCT_EVEN, product), (PRODUCT_ODD, 1 - product)):
        answer = torch.where(op == operator, value, answer)
    return answer, match


def _walk(answer):
    """The tokens of the operators from the root to the answer (n, levels), given every token's answer (n, T)."""
    index = torch.zeros_like(answer[:, :1])  # within its level
    tokens, start, width = [index], 0, 1
    while start + width < answer.shape[1]:  # there are IfElses, so a level follows
        index = 2 * index + answer.gather(1, tokens[-1])  # TRUE is 0: left
        start, width = start + 2 * width, 2 * width
        tokens.append(start + index)
    return torch.cat(tokens, 1)


def path(instruction, stimulus):
    """The tokens of the operators on the way from the root to the answer: (n, levels) indices below T. The last one
    is the operator that answers. Raises ValueError where the tensors are no instructions and stimuli."""
    _check(instruction, stimulus)
    return _walk(_evaluate(instruction, stimulus)[0])


def solve(instruction, stimulus, distractors=(1, 40)):
    """Answers (n,), and which of the README's rules hold, bool (n, 4): 1 selectors are distinct, 2 each has one object,
    3 there are as many distractors as given, least and most, 5 a cell holds one object. (4 takes many trials to see.)
    Takes the tokens (n, T, 5) and (n, 100, 2) alone. Raises ValueError where the tensors are no instructions and
    stimuli, or the numbers no two integers in order."""
    _check(instruction, stimulus)
    if [type(number) for number in distractors or ()] != [int, int] or distractors[0] > distractors[1]:
        raise ValueError(f"distractors must be two integers, least and most, not {distractors!r}")
    answer, match = _evaluate(instruction, stimulus)
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
    return answer.gather(1, _walk(answer)[:, -1:])[:, 0], ok


def _check(instruction, stimulus):
    """ValueError, naming the argument, unless these are tokens of instructions and stimuli."""
    for name, tokens in (("instruction", instruction), ("stimulus", stimulus)):
        if not isinstance(tokens, torch.Tensor) or tokens.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be a tensor of int32 or int64, not {getattr(tokens, 'dtype', tokens)}")
    widths = (1, 2, 4, 8, 16)  # of the levels: so many operators, then, if another level follows, so many IfElses
    sizes, is_if_else = [3 * w - 2 for w in widths], [x for w in widths for x in (False, True) for _ in range(w)]
    if instruction.dim() != 3 or not len(instruction) or instruction.shape[1] not in sizes or instruction.shape[2] != 5:
        raise ValueError(f"instruction must be (n, T, 5) with T one of {sizes}, not {tuple(instruction.shape)}")
    if stimulus.shape != (len(instruction), GRID * GRID, 2):
        raise ValueError(f"stimulus must be ({len(instruction)}, {GRID * GRID}, 2), not {tuple(stimulus.shape)}")
    if stimulus.device != instruction.device:
        raise ValueError(f"stimulus must be where instruction is, on {instruction.device}, not on {stimulus.device}")
    for name, tokens, most in (("instruction", instruction, (IF_ELSE, SHAPES, COLORS, SHAPES, COLORS)),
                               ("stimulus", stimulus, (SHAPES, COLORS))):
        if ((tokens < 0) | (tokens > torch.tensor(most, device=tokens.device))).any():
            raise ValueError(f"{name} must hold integers from 0 to {most}")
    op, if_else = instruction[:, :, 0], torch.tensor(is_if_else[:instruction.shape[1]], device=instruction.device)
    if ((op == IF_ELSE) != if_else).any() or (op == 0).any():
        raise ValueError(f"instruction must have IfElse at {if_else.nonzero().flatten().tolist()}, operators elsewhere")
    inner = op[:, :-widths[sizes.index(op.shape[1])]]
    if ((inner >= GET_LOCATION) & (inner <= GET_SHAPE)).any():
        raise ValueError("instruction must have operators that are True or False where an IfElse follows")


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
    marked = _evaluate(instruction[None], stimulus[None])[1][0, tokens].any(0).any(0)
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


def bench(device):
    """Prints trials/s of the generator by depth and number of distractors."""
    for depth, distractors in ((1, 5), (1, 40), (3, 5), (5, 5), (7, 5), (9, 5)):
        subset, generator = Subset(distractors=(distractors, distractors)), _stream(device, "bench")
        _generate(subset, depth, CHUNK, generator)
        # int() waits for the device.
        seconds = timeit.repeat(lambda: int(_generate(subset, depth, CHUNK, generator).answer[-1]), number=1, repeat=10)
        print(f"depth {depth}, {distractors:2} distractors: {CHUNK / sorted(seconds)[5]:9,.0f} trials/s")


def main(argv=None):
    parser = argparse.ArgumentParser(description="Show gCOG trials, or measure how fast they are generated.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--split", choices=SPLITS, default="productive", help="the split to show trials of")
    parser.add_argument("--subset", help="its test set, or train; None: the first test set")
    parser.add_argument("--depth", type=int, choices=(1, 3, 5, 7, 9), help="where a training set has several")
    parser.add_argument("--n", type=between(1, 10 ** 6), default=3, help="trials to show")
    parser.add_argument("--seed", type=between(0, MAX_SEED), default=0, help="of the stream; models are tested on 0")
    parser.add_argument("--bench", action="store_true", help="print trials/s by depth and distractors instead")
    parser.add_argument("--device", default="cpu", help="where --bench generates")
    args = parser.parse_args(argv)
    try:
        _check_numbers(args.device)
        shown = trials(args.split, args.subset or list(SPLITS[args.split])[1], args.n, seed=args.seed, depth=args.depth)
        if args.bench:
            return bench(args.device)
        for i, trial in enumerate(zip(*shown)):
            print("\n" * (i > 0) + show(Trials(*trial)))
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program without a word
    main()
