"""No boolean answer can be guessed from cues that ignore which object is where.

A logistic regression reads the operators of the tree, the number of objects, and how many there are of each letter,
of each color and in each of the four classes of cells (row % 2, column % 2). It is fitted on one half of the trials
that a boolean operator answers, and must stay at chance on the other half. Positive control: on trials of a broken
generator the same regression must do better than chance. `pytest --slow -s` prints both, for every test set.
"""
from statistics import NormalDist

import pytest
import torch
from torch.nn.functional import one_hot

from data import EXIST, IF_ELSE, OPERATORS, TRUE, evaluate_nodes, path, trials
from test_data import BOOLEAN, TEST_SETS

FAST = [("distractor", "iid", 40_000), ("systematic1", "ood", 40_000), ("productive", "depth3", 40_000)]
SLOW = [(*test_set, 100_000) for test_set in TEST_SETS]
CASES = FAST + [pytest.param(*case, marks=pytest.mark.slow) for case in SLOW]
LEVEL = 0.001 / (len(BOOLEAN) * len(CASES))  # a 99.9 % interval, corrected for the number of regressions


def cues(instruction, stimulus):
    """What the regression reads: (n, number of cues)."""
    shape, color = stimulus.long().unbind(2)
    cell = torch.arange(100)
    cell_class = one_hot(cell // 10 % 2 * 2 + cell % 2)
    return torch.cat([one_hot(instruction[:, :, 0].long(), IF_ELSE + 1).flatten(1), (shape > 0).sum(1, True),
                      one_hot(shape, 11).sum(1)[:, 1:], one_hot(color, 11).sum(1)[:, 1:],
                      (shape > 0).long() @ cell_class], 1).double()


def held_out_accuracy(x, target, ridge=1.0):
    """Accuracy on the second half of a logistic regression that Newton's method fits on the first."""
    x = x[:, x.std(0) > 0]
    x = torch.cat([(x - x.mean(0)) / x.std(0), torch.ones(len(x), 1)], 1)
    half = len(x) // 2
    fit, weights, eye = x[:half], torch.zeros(x.shape[1]).double(), torch.eye(x.shape[1])
    for _ in range(8):
        p = torch.sigmoid(fit @ weights)
        gradient = fit.T @ (p - target[:half].double()) + ridge * weights
        weights -= torch.linalg.solve((fit.T * (p * (1 - p))) @ fit + ridge * eye, gradient)
    return ((x[half:] @ weights > 0) == target[half:]).double().mean().item()


def without_stand_ins(stimulus, truth, generator):
    """Where Exist is False, one object fewer: counting then helps."""
    taken = (torch.rand(stimulus.shape[:2], generator=generator) * (stimulus[:, :, 0] > 0)).argmax(1)
    stimulus[~truth, taken[~truth]] = 0
    return stimulus


def without_decoys(stimulus, token, generator):
    """All objects but those that the operator asks for move to random free cells: counting odd cells then helps."""
    asked = (stimulus == token[:, None, 1:3]).all(2) | (stimulus == token[:, None, 3:5]).all(2) & (stimulus > 0).all(2)
    cell = torch.arange(100.0)
    here = torch.where(asked, cell - 100, cell).argsort(1)  # what is asked for first, in its order
    there = torch.where(asked, cell - 100, torch.rand(asked.shape, generator=generator)).argsort(1)
    moved = stimulus.gather(1, there[:, :, None].expand(-1, -1, 2))
    return torch.zeros_like(stimulus).scatter_(1, here[:, :, None].expand(-1, -1, 2), moved)


@pytest.mark.parametrize("split, subset, n", CASES)
def test_trivial_cues_stay_at_chance_and_give_a_broken_generator_away(split, subset, n):
    """In deep trees one cell among 20 to 50 hardly moves a parity's cues, so there only counting has to be found."""
    instruction, stimulus, answer = trials(split, subset, n, seed=1)
    answering = torch.cat([path(*part)[:, -1] for part in zip(instruction.split(1000), stimulus.split(1000))])
    token = instruction[torch.arange(n), answering]
    generator, wrong = torch.Generator().manual_seed(0), []
    for operator in BOOLEAN:
        chosen = token[:, 0] == operator
        assert chosen.sum() >= 3_000
        asked, grid, truth = instruction[chosen], stimulus[chosen], answer[chosen] == TRUE
        sound = held_out_accuracy(cues(asked, grid), truth)
        grid = (without_stand_ins(grid, truth, generator) if operator == EXIST
                else without_decoys(grid, token[chosen], generator))
        broken = held_out_accuracy(cues(asked, grid), truth)
        width = NormalDist().inv_cdf(1 - LEVEL / 2) / 2 / (len(truth) - len(truth) // 2) ** 0.5  # of the chance interval
        line = f"{OPERATORS[operator]}: {sound:.1%} (chance 50 ± {width:.1%}), broken {broken:.1%}"
        print(f"\n{split}/{subset} {line}", end="")
        missed = broken <= 0.5 + width and (operator == EXIST or subset not in ("depth7", "depth9"))
        if abs(sound - 0.5) >= width or missed:
            wrong.append(line)
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("subset", ["depth3", "depth5"])
def test_trivial_cues_tell_little_of_the_first_condition(subset):
    """With few distractors the root has no decoy, so cues tell a little of its truth. This bounds it."""
    instruction, stimulus, _ = trials("productive", subset, 100_000, seed=1)
    truth = evaluate_nodes(instruction[:, :1], stimulus)[0][:, 0] == TRUE
    for operator in BOOLEAN:
        chosen = instruction[:, 0, 0] == operator
        told = held_out_accuracy(cues(instruction[chosen], stimulus[chosen]), truth[chosen])
        print(f"\nproductive/{subset}, {OPERATORS[operator]} at the root: {told:.1%}", end="")
        assert told < 0.58
