"""No boolean answer can be guessed from cues that ignore which object is where.

A logistic regression on cues is fitted to half of the trials that an operator answers, and must
stay at chance on the other half. On trials with shortcuts it must not. The intervals hold for all
regressions together. `pytest --slow -s` prints them for every test set without shortcuts."""
import random
from statistics import NormalDist

import pytest
import torch
from torch.nn.functional import one_hot

import data
from data import OPERATORS, SPLITS, TRUE, Operator, Pool, Subset, descend, evaluate, trials
from test_data import TEST_SETS, slow

LEVEL = 0.01 / (5 * len(TEST_SETS) + 60)  # a 99 % interval, corrected for the number of regressions


def held_out(x, truth):
    """Which answers to the second half are right, of a logistic regression that Newton's method
    fits to the first."""
    x = torch.cat([(x - x.mean(0)) / (x.std(0) + 1e-9), torch.ones(len(x), 1)], 1).double()
    half, weights = len(x) // 2, x.new_zeros(x.shape[1])
    for _ in range(8):
        p = torch.sigmoid(x[:half] @ weights)
        hessian = (x[:half].T * (p * (1 - p))) @ x[:half] + torch.eye(len(weights))  # ridge 1
        weights -= torch.linalg.solve(hessian, x[:half].T @ (p - truth[:half].double()) + weights)
    return ((x[half:] @ weights > 0) == truth[half:]).double()


def by_chance(right, chance=0.5):
    """Is the share of right answers in the interval around chance?"""
    width = NormalDist().inv_cdf(1 - LEVEL / 2) * (chance * (1 - chance) / len(right)) ** 0.5
    return abs(right.mean() - chance) < width


def cues(instruction, stimulus, asked):
    """(n, number of cues): whether all shapes and colors occur that are asked for, and how often;
    the tree's operators; the number of objects, of each shape, of each color, and in each class
    of cells (row % 2, column % 2); how many rows and how many objects share a row."""
    def count(feature, classes):
        return torch.zeros(len(there), classes).scatter_add_(1, feature.expand(there.shape), there)

    there, cell = (stimulus[:, :, 0] > 0).float(), torch.arange(100)
    shapes, colors = count(stimulus[:, :, 0], 11), count(stimulus[:, :, 1], 11)
    often = torch.stack([shapes.gather(1, asked[:, ::2]), colors.gather(1, asked[:, 1::2])], 2)
    often, rows = often.flatten(1), count(cell // 10, 10)
    return torch.cat([((often > 0) | (asked == 0)).all(1, True), often, there.sum(1, True),
                      one_hot(instruction[:, :, 0]).flatten(1), shapes, colors,
                      count(cell // 10 % 2 * 2 + cell % 2, 4), (rows > 1).any(1, True),
                      (rows > 1).sum(1, True), (rows * (rows > 1)).sum(1, True)], 1).double()


def answered(n, split, subset="train", depth=None):
    """operator -> cues and truths of the trials that it answers."""
    made = trials(split, subset, n, seed=1, depth=depth)
    trees = [*map(evaluate, made.instruction, made.stimulus)]
    paths = [descend(tree)[-1] for tree in trees]
    assert [tree[i].answer for tree, i in zip(trees, paths)] == made.answer.tolist()
    tokens = data.operators_of(made.instruction)[range(n), paths]
    x, truth = cues(made.instruction, made.stimulus, tokens[:, 1:]), made.answer == TRUE
    masks = {name: tokens[:, 0] == number for number, name in enumerate(OPERATORS, 1)
             if name == "Exist" or OPERATORS[name].holds}
    return {name: (x[mask], truth[mask]) for name, mask in masks.items() if mask.any()}


@pytest.mark.parametrize("n, split, subset", [
    (8_000, "distractor", "iid"), (8_000, "distractor_release", "iid"),
    *(pytest.param(40_000, split, subset, marks=slow) for split, subset in TEST_SETS
      if not SPLITS[split][subset].shortcuts)])
def test_cues_stay_at_chance_unless_there_are_shortcuts(n, split, subset):
    shortcuts = SPLITS[split][subset].shortcuts
    for operator, (x, truth) in answered(n, split, subset).items():
        right, occur = held_out(x, truth), (x[:, 0] == truth).double()  # True if both occur
        print(f"\n{split}/{subset} {operator}: {right.mean():.1%}, {occur.mean():.1%}", end="")
        assert by_chance(right) != shortcuts
        if operator == "Exist":
            assert right.mean() > 0.9 and occur.mean() > 0.95 if shortcuts else by_chance(occur)


@pytest.mark.parametrize("operator, chance", [
    ("SumEven", 0.5), ("SumOdd", 0.5), ("ProductEven", 0.75), ("ProductOdd", 0.75)])
def test_neither_of_two_objects_tells_more_than_the_other(operator, chance):
    """The cell of one object tells nothing of a sum. An even cell gives a product away, and either
    object has it in half of the even products."""
    subset, cells, truths = Subset((Pool((operator,), (operator,)),), (3,)), [], []
    for i in range(3_000):
        tree, _, grid = data.draw(subset, 3, random.Random(i))
        where = {pair: row % 2 * 2 + column % 2 for (row, column), pair in grid.items()}
        for node in (node for node in tree if len(node.pairs) == 2):
            cells.append([where[pair] for pair in node.pairs])
            truths.append(node.truth)
    for cell in torch.tensor(cells).T:
        assert by_chance(held_out(one_hot(cell, 4).double(), torch.tensor(truths)), chance)


@pytest.mark.parametrize("name, operator", [
    ("RowEven", Operator("do the rows of the {} add up to an even number?",
                         lambda cells: sum(row for row, _ in cells) % 2 == 0)),
    ("SameRow", Operator("are the {} in the same row?",
                         lambda cells: cells[0][0] == cells[1][0], objects=(2,)))])
@pytest.mark.parametrize("n", [4_000, pytest.param(20_000, marks=slow)])
def test_an_operator_that_a_student_adds(monkeypatch, name, operator, n):
    monkeypatch.setitem(OPERATORS, name, operator)
    mine = Subset((Pool((name,), (name,)),), (1, 3))
    twin = mine._replace(depths=(1,), shortcuts=True)
    monkeypatch.setitem(SPLITS, "mine", {"train": mine, "release": twin})
    for depth in 1, 3:
        assert by_chance(held_out(*answered(n // depth, "mine", depth=depth)[name]))
        shown = data.show([part[0] for part in trials("mine", "train", 1, depth=depth)])
        assert shown.count(f"{name}: {operator.question[:7]}") == depth
    right = held_out(*answered(4_000, "mine", "release")[name])
    assert right.mean() > 0.6 and not by_chance(right)
