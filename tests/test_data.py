"""Do trials obey the rules, are they balanced, does anything leak, are streams reproducible?

`python tests/test_data.py` writes the fingerprints of all trials anew, after a change that is
meant to move them. test_oracle.py tests the oracle that is used here."""
import functools
import hashlib
import itertools
import json
import pathlib
import random
import re
import time
import types
from collections import Counter

import pytest
import torch

import conftest  # the import path, where this file runs as a program
import data
from data import (IF_ELSE, OPERATORS, SPLITS, TRUE, Batches, Pool, Subset, descend, evaluate,
                  trials)

NUMBER = {operator: number for number, operator in enumerate(OPERATORS, 1)}
NAMES = [(split, subset) for split in SPLITS for subset in SPLITS[split]]
TEST_SETS = [(split, subset) for split, subset in NAMES if subset != "train"]
SETS = [(split, subset, depth) for split in SPLITS for subset in SPLITS[split]
        for depth in SPLITS[split][subset].depths]  # also those that a student adds
FINGERPRINTS = pathlib.Path(__file__).parent / "fingerprints.json"
slow = pytest.mark.slow


def few(sets):
    """Of these sets, some run in the fast suite."""
    return [pytest.param(*x, marks=slow if "_" in x[0] or x[1] not in ("train", "ood") else ())
            for x in sets]


@functools.cache
def sample(split, subset, depth):
    """Trials of a seed that no test set has, and their operators' tokens."""
    made = trials(split, subset, 4_000 if depth < 5 else 1_500, seed=1, depth=depth)
    return made, data.operators_of(made.instruction)


def rows(made):
    """Each trial as bytes."""
    parts = [made.instruction.flatten(1), made.stimulus.flatten(1), made.answer[:, None]]
    return [row.tobytes() for row in torch.cat(parts, 1).to(torch.uint8).numpy()]


def check(subset, depth, n):
    """Of n trials, tokens are as they should be, rules 1, 2, 3 and 5 hold, and the generator knows
    what the oracle reads."""
    for i in range(n):
        tree, path, grid = data.draw(subset, depth, random.Random(i))
        instruction, stimulus, answer = map(torch.as_tensor, data.encode(tree, path, grid))
        read = evaluate(instruction, stimulus)
        assert path == descend(read) and read[path[-1]].answer == answer
        check_rows(instruction, depth)
        check_selectors(read, depth)
        distractors = check_objects(tree, read, grid, subset.shortcuts)
        assert subset.distractors[0] <= distractors.total() <= subset.distractors[1]
        if not subset.shortcuts:
            check_decoys(tree, path, read, grid, distractors)


def check_rows(instruction, depth):
    """Level by level: operators, then their IfElses, of which leaves have none."""
    layout = ""
    for width in (1, 2, 4, 8, 16)[:depth // 2 + 1]:
        layout += "o" * width + "i" * width
    for row, kind in zip(instruction.tolist(), layout.rstrip("i"), strict=True):
        assert (row == [IF_ELSE, 0, 0, 0, 0]) == (kind == "i")
    assert data.operators_of(instruction).equal(instruction[instruction[:, 0] != IF_ELSE])


def check_selectors(read, depth):
    """Rule 1, and how many objects an operator asks for, and by what."""
    selectors = [selector for node in read for selector in node.selectors]
    shapes = [shape for shape, _ in selectors]
    colors = [color for _, color in selectors]
    assert len(set(selectors)) == len(selectors)
    for node in read:
        numbers = OPERATORS[node.operator].objects
        assert len(node.selectors) in (numbers if depth > 1 else [min(numbers)])
        for shape, color in node.selectors:
            assert (shape > 0) == (node.operator != "GetShape")
            assert (color > 0) == (node.operator != "GetColor")
        if node.operator == "GetColor":
            assert shapes.count(node.selectors[0][0]) == 1
        if node.operator == "GetShape":
            assert colors.count(node.selectors[0][1]) == 1


def check_objects(tree, read, grid, shortcuts):
    """Rules 2 and 3. Returns how often each pair is left on the grid: the distractors."""
    left = Counter(grid.values())
    for (name, pairs, truth), node in zip(tree, read, strict=True):
        absent = name == "Exist" and not truth
        assert node.operator == name
        assert all(len(cells) == (0 if absent else 1) for cells in node.found)
        assert name.startswith("Get") or truth == (node.answer == TRUE)
        shown = pairs
        if name == "Exist" and not shortcuts:
            (shape, color), (shape2, color2) = pairs
            assert shape != shape2 and color != color2
            if absent:
                shown = [(shape, color2), (shape2, color)]
        elif absent:
            shown = []
        left.subtract(shown)
    assert min(left.values()) >= 0
    return left


def check_decoys(tree, path, read, grid, distractors):
    """Rule 5: as many operators as there are distractors have a decoy, the path's first."""
    places = [cell for cell, pair in grid.items() if distractors[pair]]
    order = path[::-1] + [i for i in range(len(tree)) if i not in path]
    about_places = [i for i in order if OPERATORS[tree[i].operator].holds]
    for i in about_places[:distractors.total()]:
        holds = OPERATORS[tree[i].operator].holds
        cells = [matches[0] for matches in read[i].found]
        reverses = []
        for k in range(len(cells)):
            for place in places:
                moved = cells[:k] + [place] + cells[k + 1:]
                reverses.append(holds(moved) != tree[i].truth)
        assert any(reverses)


@pytest.mark.parametrize("n", [100, pytest.param(200_000 // len(SETS) + 1, marks=slow)])
@pytest.mark.parametrize("split, subset, depth", SETS)
def test_trials_obey_the_rules(split, subset, depth, n):
    check(SPLITS[split][subset], depth, n)


def random_subset(seed, depths):
    rng = random.Random(seed)
    pool = Pool(*(tuple(rng.sample(field, rng.randint(1, len(field)))) for field in Pool()))
    return Subset((pool, Pool()), (rng.choice(depths),), (1, rng.randint(1, 80)), seed % 2 == 1)


ONE = Pool(("GetShape",), colors=(0,))  # at depth 3, each GetShape needs its own color


def test_an_operator_has_one_or_two_objects(monkeypatch):
    monkeypatch.setitem(data.OPERATORS, "Exist", data.OPERATORS["Exist"]._replace(objects=(1, 3)))
    with pytest.raises(data.UsageError, match=r"objects of Exist must be some of 1, 2"):
        trials("productive", "depth3", 1)


def test_an_operator_that_is_none_of_ours_has_a_function(monkeypatch):
    monkeypatch.setitem(data.OPERATORS, "Left", data.Operator("is the {} on the left?", None, (1,)))
    with pytest.raises(data.UsageError, match="Left needs a function"):
        trials("distractor", "iid", 1)


@pytest.mark.parametrize("says, subset", [  # why refused; "": it is met; None: either
    ("depths must", Subset(depths=(2,))), ("distractors must", Subset(distractors=(0, 5))),
    ("conditions must", Subset((Pool(), Pool(conditions=("GetColor",))))),
    ("distractors must", Subset(distractors=(99, 99))),
    ("run out", Subset((Pool(("SumEven",), ("SumEven",), (0, 0, 0), (0, 0)),), (3,))),
    pytest.param("run out", Subset((Pool(), ONE), (3,)), marks=slow),
    pytest.param("run out", Subset(depths=(9,), distractors=(1, 98)), marks=slow),
    *((None, random_subset(seed, (1, 3))) for seed in range(20)),
    *(pytest.param(None, random_subset(seed, (5, 7, 9)), marks=slow) for seed in range(20)),
    *(("", x) for x in (Subset((ONE,)), Subset((Pool(colors=range(5)),), (9,)),
                        Subset(distractors=(97, 98)), Subset(depths=(3,), distractors=(94, 94))))])
def test_a_subset_is_met_or_refused_within_seconds(monkeypatch, says, subset):
    begin = time.process_time()
    monkeypatch.setitem(SPLITS, "mine", {"train": subset})
    try:
        trials("mine", "train", 1)
        check(subset, *subset.depths, 10)
        assert not says
    except data.UsageError as error:
        assert says != "" and re.search(says or "run out", str(error)) and "\n" not in str(error)
    assert time.process_time() - begin < 20


# ---- statistics: whatever is off by more than 5 standard deviations fails -----------------------
def follows(values, weights):
    """Only values with a weight, and as often? Chi-square in Wilson and Hilferty's form."""
    values, weights = values.flatten().long(), Counter(weights)
    counts, k = torch.bincount(values, minlength=max(weights) + 1)[[*weights]], len(weights) - 1
    expected = torch.tensor([*weights.values()]).double() * len(values) / weights.total()
    chi2 = ((counts - expected) ** 2 / expected).sum() / max(k, 1)
    return counts.sum() == len(values) and (
        k == 0 or len(values) == 0 or chi2 ** (1 / 3) < 1 - 2 / (9 * k) + 5 * (2 / (9 * k)) ** 0.5)


@pytest.mark.parametrize("split, subset, depth", few(SETS))
def test_truths_are_fair_coins_whatever_the_number_of_distractors(split, subset, depth):
    """Truths depend neither on each other nor on the number of distractors, which is uniform. Half
    of the parities ask for two objects."""
    made, tokens = sample(split, subset, depth)
    op, two, (low, high) = tokens[:, :, 0], tokens[:, :, 3] > 0, SPLITS[split][subset].distractors
    trees = map(evaluate, made.instruction, made.stimulus)
    truth = torch.tensor([[node.answer == TRUE for node in tree] for tree in trees])
    objects, exist = 1 + two.long(), op == NUMBER["Exist"]
    objects[exist] = truth[exist].long() if SPLITS[split][subset].shortcuts else 2
    count = (made.stimulus[:, :, 0] > 0).sum(1) - objects.sum(1)
    assert follows(count, range(low, high + 1))
    assert depth == 1 or follows(two[(op >= NUMBER["SumEven"]) & (op < IF_ELSE)], (0, 1))
    boolean = (op == NUMBER["Exist"]) | (op >= NUMBER["SumEven"])
    for operator, number in itertools.product(op[boolean].unique(), [None, *count.unique()]):
        chosen = (op == operator) & (number is None or (count == number)[:, None])
        assert follows(truth[chosen], (0, 1))
    sign = torch.where(boolean, truth * 2.0 - 1, 0)  # 0: not boolean
    agree, both = sign.T @ sign, sign.abs().T @ sign.abs()
    assert (agree.abs() <= 5 * both.sqrt())[~torch.eye(len(agree)).bool()].all()


@pytest.mark.parametrize("split, subset, depth", few(x for x in SETS if x[2] < 9))
def test_operators_and_selectors_are_uniform_over_their_pool(split, subset, depth):
    _, operator_tokens = sample(split, subset, depth)
    leaves = operator_tokens.shape[1] // 2 + 1
    for i, tokens in enumerate(operator_tokens.unbind(1), 1):
        operators, queries, seconds = Counter(), Counter(), Counter()
        for pool in SPLITS[split][subset].pools:
            names = pool.leaves if i >= leaves else pool.conditions
            for name, shape, color in itertools.product(names, pool.shapes, pool.colors):
                share = 1 / len(names) / len(pool.shapes) / len(pool.colors)
                operators[NUMBER[name]] += share
                queries[121 * NUMBER[name] + 11 * (shape + 1) * (name != "GetShape")
                        + (color + 1) * (name != "GetColor")] += share
                seconds[11 * (shape + 1) + color + 1] += share * (2 in OPERATORS[name].objects)
        assert follows(tokens[:, 0], operators)
        assert follows(121 * tokens[:, 0] + 11 * tokens[:, 1] + tokens[:, 2], queries)
        second = tokens[tokens[:, 3] > 0]
        assert follows(11 * second[:, 3] + second[:, 4], seconds)


@pytest.mark.parametrize("split", ["distractor", "distractor_release"])
def test_objects_and_answers_are_uniform_where_nothing_binds_them(split):
    instruction, stimulus, answer = sample(split, "iid", 1)[0]
    for name, classes in (("GetLocation", range(2, 102)), ("GetShape", range(102, 112)),
                          ("GetColor", range(128, 138)), ("Exist", range(2))):
        chosen = instruction[:, 0, 0] == NUMBER[name]
        pair = 10 * stimulus[chosen, :, 0] + stimulus[chosen, :, 1] - 11
        assert follows(answer[chosen], classes) and follows(torch.where(pair >= 0)[1], range(100))
        assert name in ("GetColor", "GetShape") or follows(pair[pair >= 0], range(100))


@pytest.mark.parametrize("split, depth, n, sizes", [
    ("systematic1", 1, 3, {"train": 310, "ood": 160}),  # operator, shape and color
    ("systematic3", 3, 1, {"train": 20, "ood": 20})])  # condition and leaf
def test_nothing_held_out_is_trained(split, depth, n, sizes):
    asked = {subset: {(tree[0][0], *leaf[:n]) for tree in sample(split, subset, depth)[1].tolist()
                      for leaf in tree[-2:]} for subset in sizes}
    assert {subset: len(asked[subset]) for subset in sizes} == sizes
    assert not any(asked["train"] & asked[subset] for subset in sizes if subset != "train")


@pytest.mark.parametrize("shapes, colors", [(26, 10), (8, 10), (10, 6)])
def test_as_many_shapes_and_colors_as_one_likes(shapes, colors):
    """... of which systematic1 holds out a half each."""
    source = pathlib.Path(data.__file__).read_text(encoding="utf-8")
    source, found = re.subn(r"(?m)^SHAPES, COLORS, GRID = \d+, \d+,",
                            f"SHAPES, COLORS, GRID = {shapes}, {colors},", source)
    assert found == 1
    edited = types.ModuleType("data")
    edited.__file__ = data.__file__
    exec(source, vars(edited))
    (_, _, _, low), (_, _, high, _) = (pool for pool in edited.TRAINED1.pools)
    assert (low, high) == (range(colors // 2), range(shapes // 2, shapes))
    made = edited.trials("systematic1", "iid", 300)
    assert made.stimulus.amax((0, 1)).tolist() == [shapes, colors]


# ---- streams ------------------------------------------------------------------------------------
@functools.cache
def first(split, subset):
    """The first trials of a test set as bytes, or two training batches, of each depth one."""
    if subset == "train":
        batches = Batches(split, 2_000, seed=0)
        return rows(batches[0]) + rows(batches[1])
    return rows(trials(split, subset, 1_000))


def fingerprint(split, subset):
    return hashlib.sha256(b"".join(first(split, subset))).hexdigest()


@pytest.mark.parametrize("split, subset", NAMES)
def test_trials_stay_what_they_are_and_none_is_trained_and_tested(split, subset):
    """No change moves the benchmark unnoticed. To move it on purpose, run this file."""
    known = json.loads(FINGERPRINTS.read_text())
    assert len(known) == 36
    assert known.get(f"{split}/{subset}") in (None, fingerprint(split, subset))  # None: a student's
    if subset != "train":
        assert set(first(split, "train")).isdisjoint(first(split, subset))


def test_every_name_is_a_stream_of_its_own():
    """Another seed, split or set gives other trials. Fewer trials are the first of more."""
    made = []
    for split, seed in itertools.product(("distractor", "productive"), (0, 1)):
        made += rows(trials(split, "train", 100, seed=seed, depth=1))
        assert rows(trials(split, "train", 10, seed=seed, depth=1)) == made[-100:-90]
        made += rows(trials(split, [*SPLITS[split]][1], 100, seed=seed))
        made += rows(Batches(split, 100, seed)[0])
    assert len({*made}) == len(made) == 1_200


@pytest.mark.parametrize("train_size", [None, 71])
def test_a_batch_depends_on_its_number_alone(train_size):
    """A fixed set is reshuffled every epoch: 71 trials are 35 of each depth, four batches of 8,
    with 3 left out."""
    batches = Batches("productive", 8, 3, train_size)
    made = [rows(batches[i]) for i in range(24)]
    for n in (0, 2):
        loader = torch.utils.data.DataLoader(batches, None, sampler=range(3, 24), num_workers=n)
        assert [rows(batch) for batch in loader] == made[3:]
    for which in (0, 1):
        assert {len(batches[i].instruction[0]) for i in range(which, 8, 2)} == {(1, 4)[which]}
        epochs = [sum(made[i + which:i + which + 8:2], []) for i in (0, 8, 16)]
        assert all(len({*epoch}) == 32 for epoch in epochs) and len({*map(tuple, epochs)}) == 3
        fixed = {*rows(Batches("productive", 35, 3)[which])}
        assert ({*sum(epochs, [])} == fixed) if train_size else len({*sum(epochs, [])}) == 96


if __name__ == "__main__":
    marks = {f"{split}/{subset}": fingerprint(split, subset) for split, subset in NAMES}
    FINGERPRINTS.write_text(json.dumps(marks, indent=1) + "\n")
