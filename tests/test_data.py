"""Can the trials be trusted? Rules of the specification, the oracle that checks them, statistics, leakage, streams.

The oracle, data.solve, is itself checked three times: on trials worked by hand, against a slow solver in plain Python,
and on trials corrupted so that it has to object. `pytest --slow -s` adds a million trials and prints the figures.
"""
import functools
import hashlib
import itertools
import json
import pathlib

import pytest
import torch

import data
from data import Trials, batches, path, solve, trials

N = 20_000
EXIST, LOCATION, COLOR, SHAPE, SUM_EVEN, SUM_ODD, PRODUCT_EVEN, PRODUCT_ODD, IF_ELSE = range(1, 10)
BOOLEAN = (EXIST, SUM_EVEN, SUM_ODD, PRODUCT_EVEN, PRODUCT_ODD)
RULES = [1, 2, 3, 5]
SETS = [(split, subset, depth) for split, subsets in data.SPLITS.items() for subset in subsets
        for depth in subsets[subset].depths]
TEST_SETS = [(split, subset) for split, subset, _ in SETS if subset != "train"]
each_set = pytest.mark.parametrize("split, subset, depth", SETS)
each_test_set = pytest.mark.parametrize("split, subset", TEST_SETS)


@functools.cache
def sample(split, subset, depth):
    """Trials of a stream that is neither a test set nor tested elsewhere."""
    return trials(split, subset, N, seed=1, depth=depth)


def solve_all(x, distractors):
    """solve, in parts that fit in memory."""
    parts = [solve(*part, distractors) for part in zip(x.instruction.split(1000), x.stimulus.split(1000))]
    return [torch.cat(results) for results in zip(*parts)]


def distractors_of(subset):
    exact = subset.removeprefix("distractors")
    return (int(exact), int(exact)) if exact != subset else (1, 5)


def operator_tokens(depth):
    """The places of a tree's operators in its instruction: the other tokens are IfElses."""
    levels = range((depth + 1) // 2)
    return [2 * 2 ** level - 2 + index for level in levels for index in range(2 ** level)]


def count_distractors(instruction, stimulus):
    selectors = (instruction[:, :, 1::2] + instruction[:, :, 2::2] > 0).sum((1, 2))
    return (stimulus > 0).any(2).sum(1) - selectors


def rows(batch):
    """Each trial as bytes, to compare, to count, and to take fingerprints of."""
    whole = torch.cat([batch.instruction.flatten(1), batch.stimulus.flatten(1), batch.answer[:, None]], 1)
    return [row.tobytes() for row in whole.to(torch.uint8).numpy()]


# ---- all that a set may ask, as the specification has it ------------------------------------------------------------

LOW, HIGH, ALL = range(1, 6), range(6, 11), range(1, 11)
A, B = (EXIST, SUM_EVEN, PRODUCT_EVEN, SHAPE), (SUM_ODD, PRODUCT_ODD, LOCATION, COLOR)
IF_A, IF_B = (EXIST, SUM_EVEN, PRODUCT_EVEN), (SUM_ODD, PRODUCT_ODD)
THEN_A, THEN_B = (SUM_EVEN, PRODUCT_EVEN, COLOR, SHAPE), (EXIST, SUM_ODD, PRODUCT_ODD, LOCATION)
GROUPS = {"train": [(IF_A, THEN_A), (IF_B, THEN_B)], "ood": [(IF_A, THEN_B), (IF_B, THEN_A)]}


def queries(operators, shapes, colors):
    """All (operator, selector as it is shown)."""
    return {(op, s * (op != SHAPE), c * (op != COLOR)) for op in operators for s in shapes for c in colors}


QUERIES = {"train": queries(A, ALL, LOW) | queries(B, HIGH, ALL), "ood": queries(A, HIGH, HIGH) | queries(B, LOW, LOW)}
PAIRS = {subset: {pair for group in GROUPS[subset] for pair in itertools.product(*group)} for subset in GROUPS}


# ---- every trial is well posed ------------------------------------------------------------------------------------

@each_set
def test_every_trial_obeys_the_rules_and_is_answered_right(split, subset, depth):
    x = sample(split, subset, depth)
    answer, obeys = solve_all(x, distractors_of(subset))
    assert obeys.all(), f"broken: {dict(zip(RULES, (~obeys).sum(0).tolist()))}"
    assert torch.equal(answer, x.answer)


@each_set
def test_tokens_have_the_form_of_the_specification(split, subset, depth):
    instruction, nodes = sample(split, subset, depth).instruction, operator_tokens(depth)
    assert instruction.shape == (N, {1: 1, 3: 4, 5: 10, 7: 22, 9: 46}[depth], 5)
    if_else = instruction[:, [t for t in range(instruction.shape[1]) if t not in nodes]]
    assert (if_else == torch.tensor([IF_ELSE, 0, 0, 0, 0])).all()
    op, shape, color, shape2, color2 = instruction[:, nodes].unbind(2)
    assert ((op >= EXIST) & (op <= PRODUCT_ODD)).all()
    assert torch.equal(shape > 0, op != SHAPE) and torch.equal(color > 0, op != COLOR)
    assert torch.equal(shape2 > 0, color2 > 0) and not shape2[op < SUM_EVEN].any()
    second = shape2[op >= SUM_EVEN] > 0
    assert fair(second) if depth > 1 else not second.any()


@pytest.mark.slow
def test_a_million_trials():
    n, ill_posed, wrong = -(-1_000_000 // len(SETS)), 0, 0
    for split, subset, depth in SETS:
        x = trials(split, subset, n, seed=2, depth=depth)
        answer, obeys = solve_all(x, distractors_of(subset))
        ill_posed += int((~obeys.all(1)).sum())
        wrong += int((answer != x.answer).sum())
    print(f"\n{n * len(SETS):,} trials of {len(SETS)} sets: {ill_posed} ill-posed, {wrong} answered wrongly")
    assert ill_posed == wrong == 0


# ---- the oracle has an oracle -------------------------------------------------------------------------------------

def grid(objects):
    """{(row, column): (shape, color)} as a stimulus (1, 100, 2)."""
    return torch.tensor([[objects.get(divmod(cell, 10), (0, 0)) for cell in range(100)]])


HAND_WORKED = [  # operator, shape, color, shape 2, color 2; {(row, column): (shape, color)}; answer class
    ((EXIST, 1, 1, 0, 0), {(0, 0): (1, 1), (5, 5): (2, 1)}, 0),  # the red a is there
    ((EXIST, 1, 1, 0, 0), {(0, 0): (1, 2), (5, 5): (2, 1)}, 1),  # a green a and a red b are not a red a
    ((LOCATION, 3, 4, 0, 0), {(3, 7): (3, 4), (7, 3): (4, 3)}, 39),  # 2 + cell 37
    ((COLOR, 5, 0, 0, 0), {(9, 9): (5, 9), (0, 1): (6, 9)}, 136),  # cyan, the ninth color: 128 + 8
    ((SHAPE, 0, 10, 0, 0), {(2, 0): (10, 10), (0, 2): (10, 9)}, 111),  # j, the tenth letter: 102 + 9
]
SUM, PRODUCT = (SUM_EVEN, SUM_ODD), (PRODUCT_EVEN, PRODUCT_ODD)
NUMBERS = [  # the sum or product of rows and columns: where it is even, Even answers 0 (True) and Odd answers 1
    (SUM, (1, 1, 0, 0), {(3, 5): (1, 1), (3, 4): (1, 2)}, 8),
    (SUM, (1, 1, 0, 0), {(3, 4): (1, 1), (3, 5): (1, 2)}, 7),
    (SUM, (1, 1, 2, 2), {(3, 4): (1, 1), (0, 1): (2, 2), (5, 6): (3, 3)}, 8),
    (SUM, (1, 1, 2, 2), {(3, 4): (1, 1), (2, 2): (2, 2), (5, 5): (3, 3)}, 11),
    (PRODUCT, (1, 1, 0, 0), {(0, 7): (1, 1), (3, 5): (1, 2)}, 0),
    (PRODUCT, (1, 1, 0, 0), {(3, 5): (1, 1), (3, 4): (1, 2)}, 15),
    (PRODUCT, (1, 1, 2, 2), {(1, 3): (1, 1), (4, 7): (2, 2), (9, 9): (3, 3)}, 84),
    (PRODUCT, (1, 1, 2, 2), {(3, 5): (1, 1), (7, 9): (2, 2), (9, 8): (3, 3)}, 945),
]
# if the red a adds up to an odd number, the color of b, otherwise whether blue c and pink d multiply to an even one
TREE3 = [(SUM_ODD, 1, 1, 0, 0), (IF_ELSE, 0, 0, 0, 0), (COLOR, 2, 0, 0, 0), (PRODUCT_EVEN, 3, 3, 4, 8)]
GRID3 = {(3, 5): (1, 1), (0, 0): (2, 6), (3, 3): (3, 3), (2, 5): (4, 8), (6, 6): (5, 4)}  # e: the one distractor
# if there is a purple f: if red a and green b add up to an even number, where cyan h is, otherwise which color i has
# otherwise: if white g multiplies to an odd number, which letter is brown, otherwise whether blue c adds up to one
TREE5 = [(EXIST, 6, 5, 0, 0), (IF_ELSE, 0, 0, 0, 0), (SUM_EVEN, 1, 1, 2, 2), (PRODUCT_ODD, 7, 7, 0, 0),
         (IF_ELSE, 0, 0, 0, 0), (IF_ELSE, 0, 0, 0, 0),
         (LOCATION, 8, 9, 0, 0), (COLOR, 9, 0, 0, 0), (SHAPE, 0, 10, 0, 0), (SUM_ODD, 3, 3, 0, 0)]
GRID5 = {(1, 1): (1, 1), (2, 3): (2, 2), (7, 9): (7, 7), (8, 8): (8, 9), (5, 5): (9, 8), (4, 4): (10, 10),
         (6, 1): (3, 3), (9, 0): (4, 4), (0, 9): (6, 6)}  # yellow d: distractor; orange f: stands in for the purple f
HAND_WORKED_TREES = [
    (TREE3, GRID3, 0),  # 3 + 5 is even: right; 3 * 3 * 2 * 5 is even
    (TREE3, {**GRID3, (3, 5): (0, 0), (3, 4): (1, 1)}, 133),  # 3 + 4 is odd: left; orange
    (TREE5, GRID5, 111),  # no purple f: right; 7 * 9 is odd: left; the brown letter is j
    (TREE5, {**GRID5, (7, 9): (0, 0), (7, 0): (7, 7)}, 0),  # 7 * 0 is even: right, right; 6 + 1 is odd
    (TREE5, {**GRID5, (0, 9): (6, 5)}, 135),  # purple f: left; 1 + 1 + 2 + 3 is odd: right; the i is pink
    (TREE5, {**GRID5, (0, 9): (6, 5), (2, 3): (0, 0), (2, 2): (2, 2)}, 90),  # 1 + 1 + 2 + 2 is even: left; cell 88
]


@pytest.mark.parametrize("tokens, objects, answer", [
    *(([token], objects, answer) for token, objects, answer in HAND_WORKED),
    *(([(op, *selectors)], objects, (number + odd) % 2) for operators, selectors, objects, number in NUMBERS
      for odd, op in enumerate(operators)),
    *HAND_WORKED_TREES])
def test_hand_worked_trials(tokens, objects, answer):
    solved, obeys = solve(torch.tensor([tokens]), grid(objects), distractors=(1, 1))
    assert solved.tolist() == [answer] and obeys.all()


@pytest.mark.parametrize("rule, tokens, objects", [
    (1, {3: (PRODUCT_EVEN, 3, 3, 3, 3)}, {}),  # one operator asks twice for the blue c
    (1, {3: (PRODUCT_EVEN, 1, 1, 4, 8)}, {}),  # two operators ask for the red a
    (1, {2: (COLOR, 3, 0, 0, 0)}, {}),  # GetColor asks for the c, which has to be its own
    (1, {2: (SHAPE, 0, 8, 0, 0)}, {}),  # GetShape asks for what is pink
    (1, {0: (EXIST, 10, 10, 0, 0), 3: (EXIST, 10, 10, 0, 0)}, {(6, 6): (0, 0)}),  # for a brown j that is not there
    (2, {}, {(6, 6): (4, 8)}),  # two pink d
    (2, {}, {(6, 6): (2, 4)}),  # two b, off the answering path
    (2, {}, {(2, 5): (4, 7)}),  # no pink d
    (2, {}, {(0, 0): (6, 6)}),  # no b, off the answering path
    (3, {}, {(6, 6): (0, 0)}),  # no distractor
    (3, {}, {(8, 8): (5, 5)}),  # two distractors
    (5, {}, {(6, 6): (5, 0)}),  # half an object
    (5, {}, {(6, 6): (0, 4)})])
def test_the_oracle_refuses_on_the_broken_rule_alone(rule, tokens, objects):
    instruction = torch.tensor([[tokens.get(i, token) for i, token in enumerate(TREE3)]])
    _, obeys = solve(instruction, grid({**GRID3, **objects}), distractors=(1, 1))
    assert [r for r, holds in zip(RULES, obeys[0].tolist()) if not holds] == [rule]


def contradict(op, instruction, stimulus):
    """Depth-1 trials of one operator, changed so that another answer is right."""
    instruction, stimulus = instruction.clone(), stimulus.clone()
    if op >= SUM_EVEN:
        instruction[:, :, 0] = {5: 6, 6: 5, 7: 8, 8: 7}[op]  # even for odd, odd for even
    elif op == EXIST:  # remove the object, or put it in the first cell
        found = (stimulus == instruction[:, :, 1:3]).all(2)
        stimulus[found] = 0
        stimulus[:, 0] = torch.where(found.any(1, True), stimulus[:, 0], instruction[:, 0, 1:3])
    elif op == LOCATION:
        stimulus = stimulus.roll(1, 1)  # all objects one cell on
    else:
        feature = stimulus[:, :, int(op == COLOR)]
        feature.copy_(torch.where(feature > 0, feature % 10 + 1, 0))
    return instruction, stimulus


@pytest.mark.parametrize("op", range(EXIST, IF_ELSE), ids=data.OPERATORS[EXIST:IF_ELSE])
def test_the_oracle_notices_a_generator_that_gets_an_operator_wrong(op):
    x = sample("distractor", "iid", 1)
    chosen = x.instruction[:, 0, 0] == op
    answer, _ = solve(*contradict(op, x.instruction[chosen], x.stimulus[chosen]))
    assert (answer != x.answer[chosen]).all()


def reference(instruction, stimulus):
    """The answer of one trial in plain Python: down the tree from level to level, one token at a time."""
    tokens, start, width, index = instruction.tolist(), 0, 1, 0
    while True:
        op, *features = tokens[start + index]
        product, total, found = 1, 0, []
        for want_shape, want_color in (features[:2], features[2:]):
            for cell, (shape, color) in enumerate(stimulus.tolist()):
                if (want_shape or want_color) and want_shape in (0, shape) and want_color in (0, color) and shape:
                    found.append((cell, shape, color))
                    product *= (cell // 10) * (cell % 10)
                    total += cell // 10 + cell % 10
        truth = {EXIST: bool(found), SUM_EVEN: total % 2 == 0, SUM_ODD: total % 2 == 1,
                 PRODUCT_EVEN: product % 2 == 0, PRODUCT_ODD: product % 2 == 1}.get(op)
        if start + width == len(tokens):  # the last level has no IfElses
            if truth is not None:
                return 0 if truth else 1
            cell, shape, color = found[0]
            return {LOCATION: 2 + cell, SHAPE: 101 + shape, COLOR: 127 + color}[op]
        start, width, index = start + 2 * width, 2 * width, 2 * index + (0 if truth else 1)


@each_set
def test_the_oracle_agrees_with_a_slow_solver(split, subset, depth):
    x = Trials(*(part[:200] for part in sample(split, subset, depth)))
    answer, _ = solve(x.instruction, x.stimulus)
    assert answer.tolist() == [reference(*trial) for trial in zip(x.instruction, x.stimulus)]


# ---- statistics: what is off by more than 4 or 5 standard deviations fails ------------------------------------------

def fair(coins):
    """True half the time?"""
    return abs(2 * coins.sum() - coins.numel()) < 5 * coins.numel() ** 0.5


def uniform(values, choices):
    """Nothing but the choices, each as often as the others? Chi-square in Wilson and Hilferty's approximation."""
    counts, k = torch.bincount(values, minlength=max(choices) + 1)[list(choices)].double(), len(choices) - 1
    chi2 = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    return counts.sum() == len(values) and (chi2 / k) ** (1 / 3) < 1 - 2 / (9 * k) + 4 * (2 / (9 * k)) ** 0.5


def selectors_are_uniform(token, allowed):
    """Does the one operator of the allowed queries ask each of them equally often?"""
    (op,) = {op for op, _, _ in allowed}
    asked = token[token[..., 0] == op]
    return uniform(11 * asked[:, 1] + asked[:, 2], [11 * s + c for _, s, c in allowed])


def truths(tokens, stimulus):
    """Whether each boolean operator (n, nodes) is True, by a table of where each pair of shape and color lies."""
    cells = torch.arange(100).expand(N, -1)
    where = torch.full((N, 121), -1).scatter_(1, (11 * stimulus[:, :, 0] + stimulus[:, :, 1]).long(), cells)
    pair = (11 * tokens[:, :, 1::2] + tokens[:, :, 2::2]).long()  # (n, nodes, 2), 0: no second selector
    cell = where.gather(1, pair.flatten(1)).view(pair.shape)
    row, column = cell // 10, cell % 10
    odd_sum = torch.where(pair > 0, row + column, 0).sum(2) % 2 == 1
    odd_product = torch.where(pair > 0, row * column, 1).prod(2) % 2 == 1
    truth = torch.stack([cell[:, :, 0] >= 0, ~odd_sum, odd_sum, ~odd_product, odd_product], 2)  # as in BOOLEAN
    return (truth & (tokens[:, :, :1] == torch.tensor(BOOLEAN))).any(2)


@each_set
def test_boolean_operators_are_fair_coins(split, subset, depth):
    """Each is True half the time, whatever the number of distractors and the truth of each other node."""
    x = sample(split, subset, depth)
    tokens, count = x.instruction[:, operator_tokens(depth)], count_distractors(x.instruction, x.stimulus)
    op, truth = tokens[:, :, 0], truths(tokens, x.stimulus)
    assert depth > 1 or torch.equal(truth[:, 0], x.answer == 0)
    boolean = torch.isin(op, torch.tensor(BOOLEAN))
    assert fair(truth[boolean])
    for operator, number in itertools.product(BOOLEAN, count.unique()):
        assert fair(truth[op == operator]) and fair(truth[(op == operator) & (count == number)[:, None]])
    sign = torch.where(boolean, truth * 2.0 - 1, 0.0)  # 0: not boolean
    agree, both = sign.T @ sign, sign.abs().T @ sign.abs()
    assert (agree.abs() < 5 * both.sqrt())[~torch.eye(len(agree)).bool()].all()


@each_set
def test_numbers_of_distractors(split, subset, depth):
    """1 to 5 alike, or exactly as many as the set's name says: then counting objects tells nothing at all."""
    low, high = distractors_of(subset)
    count = count_distractors(*sample(split, subset, depth)[:2])
    assert (count == low).all() if low == high else uniform(count, range(low, high + 1))


def test_objects_and_answers_are_uniform():
    """Objects over cells where no parity binds them, and over pairs of shape and color where none are reserved."""
    instruction, stimulus, answer = sample("distractor", "iid", 1)
    for op, classes in ((LOCATION, range(2, 102)), (SHAPE, range(102, 112)), (COLOR, range(128, 138))):
        assert uniform(answer[instruction[:, 0, 0] == op], classes)
    for op in (EXIST, LOCATION, COLOR, SHAPE):
        pair = (11 * stimulus[:, :, 0] + stimulus[:, :, 1])[instruction[:, 0, 0] == op]
        assert uniform(pair.nonzero()[:, 1], range(100))
        assert op in (COLOR, SHAPE) or uniform(pair[pair > 0], [11 * s + c for s in ALL for c in ALL])


@pytest.mark.parametrize("depth", [1, 3, 5, 7])
def test_operators_and_selectors_are_uniform(depth):
    token = sample("productive", f"depth{depth}", depth).instruction[:, operator_tokens(depth)]
    conditions, leaves = token[:, :, 0].split([2 ** (depth // 2) - 1, 2 ** (depth // 2)], 1)
    assert all(uniform(node, BOOLEAN) for node in conditions.T)
    assert all(uniform(node, range(EXIST, IF_ELSE)) for node in leaves.T)
    assert all(selectors_are_uniform(token, queries([op], ALL, ALL)) for op in range(EXIST, IF_ELSE))


# ---- leakage ------------------------------------------------------------------------------------------------------

def queries_of(subset):
    return {tuple(token) for token in sample("systematic1", subset, 1).instruction[:, 0, :3].tolist()}


def pairs_of(subset):
    operators = sample("systematic3", subset, 3).instruction[:, :, 0].tolist()
    return {(condition, leaf) for condition, _, *leaves in operators for leaf in leaves}


@pytest.mark.parametrize("name, of, space, sizes", [("systematic1 queries", queries_of, QUERIES, (310, 160)),
                                                    ("systematic3 pairs", pairs_of, PAIRS, (20, 20))])
def test_nothing_held_out_is_trained(name, of, space, sizes):
    trained, tested = of("train"), of("ood")
    print(f"\n{name}: {len(trained)} trained, {len(tested)} tested, {len(trained & tested)} both", end="")
    assert trained == of("iid") == space["train"] and tested == space["ood"]
    assert (len(trained), len(tested)) == sizes and not trained & tested


@pytest.mark.parametrize("subset", ["train", "iid", "ood"])
def test_systematic_sets_are_uniform_over_what_is_allowed(subset):
    """systematic3: a coin chooses the conditions, and both leaves come from the set that goes with them."""
    like = "ood" if subset == "ood" else "train"
    token = sample("systematic1", subset, 1).instruction[:, 0]
    assert uniform(token[:, 0], range(EXIST, IF_ELSE))
    for op in range(EXIST, IF_ELSE):
        assert selectors_are_uniform(token, [query for query in QUERIES[like] if query[0] == op])
    condition, _, left, right = sample("systematic3", subset, 3).instruction[:, :, 0].T
    assert fair(torch.isin(condition, torch.tensor(IF_A)))
    for group, leaves in GROUPS[like]:
        chosen, triples = torch.isin(condition, torch.tensor(group)), itertools.product(group, leaves, leaves)
        assert uniform((100 * condition + 10 * left + right)[chosen], [100 * c + 10 * x + y for c, x, y in triples])


@pytest.mark.parametrize("split, subset, depth", [s for s in SETS if s[1] != "train" and s[2] <= 3])
def test_test_sets_share_no_trial_with_training(split, subset, depth):
    """Where depths differ, they cannot."""
    assert not set(rows(trials(split, subset, 10_000))) & set(rows(trials(split, "train", N, depth=depth)))


@each_test_set
def test_test_sets_stay_what_they_are(split, subset):
    """No change moves the benchmark unnoticed. To move it on purpose, record the fingerprints that fail here."""
    recorded = json.loads((pathlib.Path(__file__).parent / "fingerprints.json").read_text())
    assert len(recorded) == len(TEST_SETS)
    fingerprint = hashlib.sha256(b"".join(rows(trials(split, subset, 10_000)))).hexdigest()
    assert fingerprint == recorded[f"{split}/{subset}"]


# ---- streams ------------------------------------------------------------------------------------------------------

def take(count, split, size, **options):
    """The trials of each of the first batches."""
    return [rows(batch) for batch in itertools.islice(batches(split, size, seed=3, **options), count)]


@pytest.mark.parametrize("split, subset, depth", [("systematic1", "ood", 1), ("productive", "train", 3)])
def test_fewer_trials_are_the_first_of_more(split, subset, depth):
    many = rows(trials(split, subset, data.CHUNK + 20, depth=depth))
    for n in (20, data.CHUNK + 5):
        assert rows(trials(split, subset, n, depth=depth)) == many[:n]


def test_every_name_is_a_stream_of_its_own():
    """The same call gives the same trials; another seed, split or set gives others."""
    names = [("distractor", "train"), ("distractor", "iid"), ("productive", "train"), ("productive", "depth1")]
    streams = [rows(trials(*name, 100, seed=seed, depth=1)) for name in names for seed in (0, 1)]
    assert streams[0] == rows(trials("distractor", "train", 100))
    assert len(set().union(*streams)) == 800


@pytest.mark.parametrize("size, train_size", [(3_000, None), (20, 50)])
def test_batches_resume_anywhere(size, train_size):
    """Sizes such that the generator is called anew, or an epoch ends, before and after where we resume."""
    unbroken = take(10, "productive", size, train_size=train_size)
    for start in (1, 6):
        assert take(4, "productive", size, train_size=train_size, start=start) == unbroken[start:start + 4]


def test_training_alternates_depths_and_repeats_no_trial():
    lengths = [batch.instruction.shape[1] for batch in itertools.islice(batches("productive", 5, seed=3), 6)]
    assert lengths == [1, 4, 1, 4, 1, 4]
    assert len(set().union(*take(8, "productive", 3_000))) == 8 * 3_000


@pytest.mark.parametrize("size, per_epoch", [(7, 5), (8, 4)])
def test_a_fixed_training_set_is_reshuffled_every_epoch(size, per_epoch):
    """71 trials over two depths are 35 each: all of them in five batches of 7, 32 of them in four batches of 8."""
    made = take(6 * per_epoch, "productive", size, train_size=71)
    for depth, own in ((1, made[::2]), (3, made[1::2])):
        fixed = set(rows(trials("productive", "train", 35, seed=3, depth=depth)))
        epochs = [sum(own[i:i + per_epoch], []) for i in range(0, len(own), per_epoch)]
        assert all(len(set(epoch)) == size * per_epoch and set(epoch) <= fixed for epoch in epochs)
        assert len(set(map(tuple, epochs))) == 3


# ---- what is asked wrongly ------------------------------------------------------------------------------------------

@pytest.mark.parametrize("named, call", [
    ("split", lambda: trials("distractors", "iid", 1)),
    ("subset", lambda: trials("productive", "iid", 1)),
    (r"\bn\b", lambda: trials("productive", "depth1", 0)),
    ("depth", lambda: trials("productive", "train", 1)),
    ("depth", lambda: trials("productive", "depth3", 1, depth=5)),
    ("split", lambda: next(batches("distractors", 1, seed=0))),
    ("batch_size", lambda: next(batches("productive", 0, seed=0))),
    ("batch_size", lambda: next(batches("productive", 6, seed=0, train_size=10))),
    ("train_size", lambda: next(batches("productive", 1, seed=0, train_size=0)))])
def test_wrong_arguments_are_named(named, call):
    with pytest.raises(ValueError, match=named):
        call()


@pytest.mark.parametrize("named, change", [(named, change) for named in ("instruction", "stimulus") for change in (
    lambda x: x[0], lambda x: x[:, :3], lambda x: x[:, :, 1:], lambda x: x.repeat(2, 1, 1), lambda x: x.float(),
    lambda x: x + 10, lambda x: x - 1)])
def test_the_oracle_names_what_is_no_trial(named, change):
    tokens = {"instruction": torch.tensor([TREE3]), "stimulus": grid(GRID3)}
    tokens[named] = change(tokens[named])
    for function in (solve, path):
        with pytest.raises(ValueError, match="instruction|stimulus" if len(tokens[named]) == 2 else named):
            function(**tokens)


# ---- for people -----------------------------------------------------------------------------------------------------

def test_names_trees_and_grids():
    assert [data.name(a) for a in (0, 1, 39, 102, 137)] == ["True", "False", "row 3, column 7", "a", "brown"]
    assert data.tree(torch.tensor(TREE3)).split() == ("if SumOdd(red a) then GetColor(b) "
                                                      "else ProductEven(blue c, pink d)").split()
    objects = ("purple f", "red a", "green b", "white g", "cyan h", "the i", "brown", "blue c")
    assert all(text in data.describe(torch.tensor(TREE5)) for text in objects)
    drawn = data.draw(torch.tensor(TREE3), grid(GRID3)[0], color=False)  # brackets: what the answering path asks for
    assert drawn.count("[") == 3 and all(text in drawn for text in ("[a:re", "[c:bl", "[d:pi", " b:or", " e:ye"))


def test_the_command_line_shows_trials(capsys):
    data.main(["--split", "productive", "--subset", "depth5", "--n", "2", "--seed", "4"])
    shown = capsys.readouterr().out
    assert shown.count("Answer:") == 2 and "\033" not in shown
    for trial in map(Trials._make, zip(*trials("productive", "depth5", 2, seed=4))):
        assert data.describe(trial.instruction)[1:] in shown and data.tree(trial.instruction) in shown
        assert data.draw(trial.instruction, trial.stimulus, color=False) in shown
        assert f"Answer: {data.name(int(trial.answer))}" in shown


@pytest.mark.parametrize("terminal, no_color, colored", [(True, "", True), (True, "1", False), (False, "", False)])
def test_color_is_for_terminals_that_want_it(terminal, no_color, colored, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    monkeypatch.setenv("NO_COLOR", no_color)
    data.main(["--n", "1"])
    assert ("\033[" in capsys.readouterr().out) == colored
    assert "\033[" in data.draw(torch.tensor(TREE3), grid(GRID3)[0], color=True)


@pytest.mark.parametrize("argument, value", [("--subset", "iid"), ("--split", "none"), ("--n", "0"), ("--depth", "9")])
def test_the_command_line_refuses_in_one_line(argument, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        data.main([argument, value])
    message = capsys.readouterr().err.strip().splitlines()[-1]
    assert stopped.value.code == 2 and "error:" in message and value in message


def test_the_benchmark_prints_six_rates(monkeypatch, capsys):
    monkeypatch.setattr(data, "CHUNK", 20)
    data.main(["--bench"])
    assert capsys.readouterr().out.count("trials/s") == 6
