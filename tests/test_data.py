"""Can the trials be trusted? Rules, statistics, leakage, streams.

`python tests/test_data.py` records the fingerprints of the test sets anew, after a change that is meant to move them.
tests/test_oracle.py checks the oracle that is used here.
"""
import functools
import hashlib
import itertools
import json
import pathlib
import random
import time

import pytest
import torch

import conftest  # noqa: F401  the import path, where this file runs as a program
import data
from data import (EXIST, GET_COLOR, GET_LOCATION, GET_SHAPE, IF_ELSE, PRODUCT_EVEN, PRODUCT_ODD, SUM_EVEN, SUM_ODD,
                  Pool, Subset, batches, solve, trials)

N = 20_000
BOOLEAN = (EXIST, SUM_EVEN, SUM_ODD, PRODUCT_EVEN, PRODUCT_ODD)
RULES = [1, 2, 3, 5]
SPECIFIED = {(split, subset, depth): (1, 5) for split, subsets, depths in (  # set -> its least and most distractors
    ("distractor", "train iid", [1]), ("systematic1", "train iid ood6 ood", [1]), ("systematic3", "train", [1, 3]),
    ("systematic3", "iid ood", [3]), ("productive", "train", [1, 3]),
    *(("productive", f"depth{depth}", [depth]) for depth in (1, 3, 5, 7, 9)))
    for subset in subsets.split() for depth in depths}
SPECIFIED |= {("distractor", f"distractors{number}", 1): (number, number) for number in (10, 20, 30, 40)}
SETS = [(split, subset, depth) for split, subsets in data.SPLITS.items() for subset in subsets
        for depth in subsets[subset].depths]  # those that a student adds, too


@functools.cache
def sample(split, subset, depth):
    """Trials of a stream that is neither a test set nor tested elsewhere."""
    return trials(split, subset, N, seed=1, depth=depth)


def solve_all(x, distractors):
    """solve, in parts that fit in memory."""
    parts = [solve(*part, distractors) for part in zip(x.instruction.split(1000), x.stimulus.split(1000))]
    return [torch.cat(results) for results in zip(*parts)]


def operators_of(instruction):
    """The tokens that are no IfElses. The oracle refuses an instruction that has these elsewhere."""
    return instruction[:, instruction[0, :, 0] != IF_ELSE]


def rows(batch):
    """Each trial as bytes, to compare, to count, and to take fingerprints of."""
    whole = torch.cat([batch.instruction.flatten(1), batch.stimulus.flatten(1), batch.answer[:, None]], 1)
    return [row.tobytes() for row in whole.to(torch.uint8).numpy()]


# ---- all that a set may ask, written out again ----------------------------------------------------------------------

LOW, HIGH, ALL = range(1, 6), range(6, 11), range(1, 11)
A, B = (EXIST, SUM_EVEN, PRODUCT_EVEN, GET_SHAPE), (SUM_ODD, PRODUCT_ODD, GET_LOCATION, GET_COLOR)
IF_A, IF_B = (EXIST, SUM_EVEN, PRODUCT_EVEN), (SUM_ODD, PRODUCT_ODD)
THEN_A, THEN_B = (SUM_EVEN, PRODUCT_EVEN, GET_COLOR, GET_SHAPE), (EXIST, SUM_ODD, PRODUCT_ODD, GET_LOCATION)
GROUPS = {"train": [(IF_A, THEN_A), (IF_B, THEN_B)], "ood": [(IF_A, THEN_B), (IF_B, THEN_A)]}


def queries(operators, shapes, colors):
    """All (operator, selector as it is shown)."""
    return {(op, s * (op != GET_SHAPE), c * (op != GET_COLOR)) for op in operators for s in shapes for c in colors}


QUERIES = {"all": queries(range(EXIST, IF_ELSE), ALL, ALL), "train": queries(A, ALL, LOW) | queries(B, HIGH, ALL),
           "ood": queries(A, HIGH, HIGH) | queries(B, LOW, LOW)}
QUERIES["ood6"] = {query for query in QUERIES["ood"] if query[0] not in (GET_COLOR, GET_SHAPE)}


# ---- every trial is well posed ------------------------------------------------------------------------------------

@pytest.mark.parametrize("split, subset, depth", SETS)
@pytest.mark.parametrize("n", [N, pytest.param(-(-1_000_000 // len(SETS)), marks=pytest.mark.slow)])  # a million in all
def test_every_trial_obeys_the_rules_and_is_answered_right(split, subset, depth, n):
    x = sample(split, subset, depth) if n == N else trials(split, subset, n, seed=2, depth=depth)
    answer, obeys = solve_all(x, SPECIFIED.get((split, subset, depth), data.SPLITS[split][subset].distractors))
    assert obeys.all(), f"broken: {dict(zip(RULES, (~obeys).sum(0).tolist()))}"
    assert torch.equal(answer, x.answer)
    assert x.instruction.shape == (n, {1: 1, 3: 4, 5: 10, 7: 22, 9: 46}[depth], 5)
    op, shape, color, shape2, color2 = operators_of(x.instruction).unbind(2)
    assert torch.equal(shape > 0, op != GET_SHAPE) and torch.equal(color > 0, op != GET_COLOR)
    assert torch.equal(shape2 > 0, color2 > 0) and not shape2[(op < SUM_EVEN) | (depth == 1)].any()


# ---- a subset that anybody can write -------------------------------------------------------------------------------

def refusal(monkeypatch, subset):
    """Checks the trials of a student's own split; why it is refused, or None. Takes seconds at most."""
    monkeypatch.setitem(data.SPLITS, "mine", {"train": subset})
    monkeypatch.setattr(data, "CHUNK", 300)
    begin = time.process_time()
    try:
        x = trials("mine", "train", 300)
    except ValueError as error:
        return str(error)
    finally:
        assert time.process_time() - begin < 30, subset
    answer, obeys = solve_all(x, subset.distractors)
    assert obeys.all() and torch.equal(answer, x.answer), subset


@pytest.mark.parametrize("says, subset", [
    *((None, subset) for subset in (
        Subset(depths=(9,), distractors=(40, 40)), Subset(depths=(3,), distractors=(94, 94)), Subset(distractors=(98, 99)),
        Subset(depths=(9,), distractors=(50, 50)), Subset(pools=(Pool((GET_SHAPE,), colors=(0,)),)))),
    *(("depths of", Subset(depths=depths)) for depths in ((2,), (11,), (), (1, 1), (3.0,), [1])),
    *(("distractors of", Subset(distractors=numbers)) for numbers in ((0, 0), (5, 1), (1, 100), (1,), 5, (1.0, 2.0))),
    *(("pools of", Subset(pools=pools)) for pools in (Pool(), (), [Pool()], ((),))),
    *((f"{field} of", Subset(pools=(Pool(), Pool(**{field: value})))) for field, value in (
        ("leaves", (IF_ELSE,)), ("conditions", (GET_COLOR,)), ("shapes", range(11)), ("colors", (-1,)))),
    *(("this subset cannot be met", subset) for subset in (
        Subset(depths=(9,), distractors=(99, 99)), Subset(depths=(9,), distractors=(1, 99)),  # only small numbers fit
        Subset(depths=(3,), pools=(Pool((GET_SHAPE,), colors=(0,)),)),  # each GetShape needs a color of its own
        Subset(depths=(3,), pools=(Pool(), Pool((GET_SHAPE,), colors=(0,))))))], ids=str)
def test_a_subset_is_met_or_refused(monkeypatch, says, subset):
    reason = refusal(monkeypatch, subset)
    assert reason is None if says is None else reason.startswith(says)


def test_random_subsets_obey_the_rules_or_are_refused(monkeypatch):
    choose, refusals = random.Random(0), []
    for _ in range(40):
        pools = tuple(Pool(*(tuple(choose.sample(full, choose.randint(1, len(full)))) for full in Pool()))
                      for _ in range(choose.randint(1, 3)))
        least = choose.randint(1, 99)
        subset = Subset(pools, (choose.choice((1, 3, 5, 7, 9)),), (least, choose.randint(least, 99)))
        refusals.append(refusal(monkeypatch, subset))
    assert all(reason is None or reason.startswith("this subset cannot be met") for reason in refusals)
    assert 10 < refusals.count(None) < 30


@pytest.mark.parametrize("depth", [1, 3, 9])
def test_the_generator_keeps_to_its_device(depth):
    """torch's meta device refuses to mix with the CPU, and to read a value."""
    pool = torch.zeros(7, dtype=torch.int64, device="meta")
    made, obeys = data._attempt(data.SPLITS["systematic1"]["train"], depth, pool, pool + 1, torch.Generator())
    assert {part.device.type for part in (*made, obeys)} == {"meta"}


# ---- statistics: what is off by more than 4 or 5 standard deviations fails ------------------------------------------

def fair(coins):
    """True half the time?"""
    return abs(2 * coins.sum() - coins.numel()) < 5 * coins.numel() ** 0.5


def uniform(values, choices):
    """Nothing but the choices, each as often as the others? Chi-square in Wilson and Hilferty's approximation."""
    counts, k = torch.bincount(values, minlength=max(choices) + 1)[list(choices)].double(), len(choices) - 1
    chi2 = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    return counts.sum() == len(values) and (chi2 / k) ** (1 / 3) < 1 - 2 / (9 * k) + 4 * (2 / (9 * k)) ** 0.5


@pytest.mark.parametrize("split, subset, depth", SPECIFIED)
def test_boolean_operators_are_fair_coins_whatever_the_number_of_distractors(split, subset, depth):
    """Truths depend neither on each other nor on the number of distractors: as many as the set's name says, or 1 to 5
    alike. Half the parities ask for two objects."""
    x, (low, high) = sample(split, subset, depth), SPECIFIED[split, subset, depth]
    tokens = operators_of(x.instruction)
    count = (x.stimulus > 0).any(2).sum(1) - (tokens[:, :, 1::2] + tokens[:, :, 2::2] > 0).sum((1, 2))
    assert (count == low).all() if low == high else uniform(count, range(low, high + 1))
    parts = zip(tokens.split(1000), x.stimulus.split(1000))
    op, truth = tokens[:, :, 0], torch.cat([data.evaluate_nodes(*part)[0] for part in parts]) == data.TRUE
    assert depth == 1 or fair(tokens[:, :, 3][op >= SUM_EVEN] > 0)  # a second selector
    boolean = torch.isin(op, torch.tensor(BOOLEAN))
    assert fair(truth[boolean])
    for operator, number in itertools.product(BOOLEAN, count.unique()):
        assert fair(truth[(op == operator) & (count == number)[:, None]])
    sign = torch.where(boolean, truth * 2.0 - 1, 0.0)  # 0: not boolean
    agree, both = sign.T @ sign, sign.abs().T @ sign.abs()
    assert (agree.abs() < 5 * both.sqrt())[~torch.eye(len(agree)).bool()].all()


def test_objects_and_answers_are_uniform():
    """Objects over cells where no parity binds them, and over pairs of shape and color where none are reserved."""
    instruction, stimulus, answer = sample("distractor", "iid", 1)
    for op, classes in ((GET_LOCATION, range(2, 102)), (GET_SHAPE, range(102, 112)), (GET_COLOR, range(128, 138))):
        assert uniform(answer[instruction[:, 0, 0] == op], classes)
    for op in (EXIST, GET_LOCATION, GET_COLOR, GET_SHAPE):
        pair = (11 * stimulus[:, :, 0] + stimulus[:, :, 1])[instruction[:, 0, 0] == op]
        assert uniform(pair.nonzero()[:, 1], range(100))
        assert op in (GET_COLOR, GET_SHAPE) or uniform(pair[pair > 0], [11 * s + c for s in ALL for c in ALL])


@pytest.mark.parametrize("split, subset, depth", [
    *(("productive", f"depth{depth}", depth) for depth in (1, 3, 5, 7)), ("systematic3", "train", 1),
    *(("systematic1", subset, 1) for subset in ("train", "iid", "ood", "ood6"))])
def test_operators_and_selectors_are_uniform_over_what_is_allowed(split, subset, depth):
    allowed = QUERIES["train" if subset == "iid" else subset] if split == "systematic1" else QUERIES["all"]
    token, operators = operators_of(sample(split, subset, depth).instruction), {op for op, _, _ in allowed}
    conditions, leaves = token[:, :, 0].split([2 ** (depth // 2) - 1, 2 ** (depth // 2)], 1)
    assert all(uniform(node, BOOLEAN) for node in conditions.T) and all(uniform(node, operators) for node in leaves.T)
    for op in operators:
        asked = token[token[:, :, 0] == op]
        assert uniform(11 * asked[:, 1] + asked[:, 2], [11 * s + c for other, s, c in allowed if other == op])


# ---- leakage ------------------------------------------------------------------------------------------------------

def queries_of(subset):
    return {tuple(token) for token in sample("systematic1", subset, 1).instruction[:, 0, :3].tolist()}


def pairs_of(subset):
    operators = sample("systematic3", subset, 3).instruction[:, :, 0].tolist()
    return {(condition, leaf) for condition, _, *leaves in operators for leaf in leaves}


@pytest.mark.parametrize("of, sizes", [
    (queries_of, {"train": 310, "ood": 160, "ood6": 150}), (pairs_of, {"train": 20, "ood": 20})])
def test_nothing_held_out_is_trained(of, sizes):
    asked = {subset: of(subset) for subset in sizes}
    assert {subset: len(asked[subset]) for subset in asked} == sizes
    assert not any(asked["train"] & asked[subset] for subset in sizes if subset != "train")


@pytest.mark.parametrize("subset", ["train", "iid", "ood"])
def test_systematic3_is_uniform_over_what_is_allowed(subset):
    """A coin chooses the conditions, and both leaves come from the set that goes with them."""
    condition, _, left, right = sample("systematic3", subset, 3).instruction[:, :, 0].T
    assert fair(torch.isin(condition, torch.tensor(IF_A)))
    for group, leaves in GROUPS["train" if subset == "iid" else subset]:
        chosen, triples = torch.isin(condition, torch.tensor(group)), itertools.product(group, leaves, leaves)
        assert uniform((100 * condition + 10 * left + right)[chosen], [100 * c + 10 * x + y for c, x, y in triples])


@pytest.mark.parametrize("split, subset, depth", [s for s in SPECIFIED if s[1] != "train" and s[2] <= 3])
def test_test_sets_share_no_trial_with_training(split, subset, depth):
    """Where depths differ, they cannot. By chance two small trials are the same, at most one in ten thousand."""
    assert len(set(rows(trials(split, subset, 10_000))) & set(rows(trials(split, "train", N, depth=depth)))) < 2


FINGERPRINTS = pathlib.Path(__file__).parent / "fingerprints.json"
TEST_SETS = [(split, subset) for split, subset, _ in SPECIFIED if subset != "train"]


def fingerprint(split, subset):
    return hashlib.sha256(b"".join(rows(trials(split, subset, 10_000)))).hexdigest()


@pytest.mark.parametrize("split, subset", TEST_SETS)
def test_test_sets_stay_what_they_are(split, subset):
    """No change moves the benchmark unnoticed. To move it on purpose, run this file as a program."""
    assert fingerprint(split, subset) == json.loads(FINGERPRINTS.read_text())[f"{split}/{subset}"]


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
    """Another seed, split or set gives other trials."""
    names = [("distractor", "train"), ("distractor", "iid"), ("productive", "train"), ("productive", "depth1")]
    streams = [rows(trials(*name, 100, seed=seed, depth=1)) for name in names for seed in (0, 1)]
    assert len(set().union(*streams)) == 800


@pytest.mark.parametrize("size, train_size", [(700, None), (20, 50)])
def test_batches_resume_anywhere(size, train_size):
    """Sizes such that the generator is called anew, or an epoch ends, before and after where we resume."""
    unbroken = take(10, "productive", size, train_size=train_size)
    for start in (1, 6):
        assert take(4, "productive", size, train_size=train_size, start=start) == unbroken[start:start + 4]


def test_training_alternates_depths_and_repeats_no_trial():
    lengths = [batch.instruction.shape[1] for batch in itertools.islice(batches("productive", 5, seed=3), 6)]
    assert lengths == [1, 4, 1, 4, 1, 4]
    assert len(set().union(*take(8, "productive", 900))) == 8 * 900


@pytest.mark.parametrize("size, per_epoch", [(7, 5), (8, 4)])
def test_a_fixed_training_set_is_reshuffled_every_epoch(size, per_epoch):
    """71 trials over two depths are 35 each: all of them in five batches of 7, 32 of them in four batches of 8."""
    made = take(6 * per_epoch, "productive", size, train_size=71)
    for depth, own in ((1, made[::2]), (3, made[1::2])):
        fixed = set(rows(trials("productive", "train", 35, seed=3, depth=depth)))
        epochs = [sum(own[i:i + per_epoch], []) for i in range(0, len(own), per_epoch)]
        assert all(len(set(epoch)) == size * per_epoch and set(epoch) <= fixed for epoch in epochs)
        assert len(set(map(tuple, epochs))) == 3


if __name__ == "__main__":
    FINGERPRINTS.write_text(json.dumps({f"{split}/{subset}": fingerprint(split, subset) for split, subset in TEST_SETS},
                                       indent=1) + "\n")
