"""What models answer on the way, and where one looks: the figures of models/README.md, from the
weights of recorded runs (seed 0 of each, 1,000 trials).

    python tests/ways.py recorded/fourth     # after tar xzf tests/recorded.tar.gz, weights.tar.gz
"""
import argparse
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import data
from eval import load, looks, percent, table

TRIALS = 1_000
BRANCHES = [2, 1, 6, 7], [3, 1, 8, 9]  # their tokens in a tree of depth 5: a tree of depth 3 each


@torch.no_grad()
def answers(model, instruction, stimulus):
    """The classes that a model answers, one tensor per call of its readout: (trials, operators), or
    (trials,) where the root alone is read."""
    said = []
    with model.readout.register_forward_hook(lambda *call: said.append(call[2].argmax(-1))):
        model(instruction, stimulus)
    return said


def held(tree, i, loop):
    """The rule: what operator i holds after a loop. First its own answer, then what the branch
    held that this answer chooses."""
    if loop == 1:
        return tree[i].answer
    branch = 2 * i + 1 if held(tree, i, loop - 1) == data.TRUE else 2 * i + 2
    return held(tree, branch, loop - 1)


def loops(model):
    """A row of the first table."""
    row = []
    for depth in 5, 7:
        instruction, stimulus, _ = data.trials("productive", f"depth{depth}", TRIALS)
        trees = list(map(data.evaluate, instruction, stimulus))
        *said, last = answers(model, instruction, stimulus)
        if depth == 5:
            right = torch.tensor([[tree[data.descend(tree, i)[-1]].answer for i in range(7)]
                                  for tree in trees])  # (trials, operators)
            one, two, three = (said[loop] == right for loop in range(3))
            alone = [answers(model, instruction[:, tokens], stimulus)[-1] == right[:, 1 + i]
                     for i, tokens in enumerate(BRANCHES)]
            row = [one[:, 3:], two[:, 1:3], three[:, 0], three[:, 3:], torch.stack(alone)]
        rule = torch.tensor([held(tree, 0, (depth + 1) // 2) for tree in trees])
        row.append(last == rule)
    return [percent([right.float().mean().item()]) for right in row]


def branch_rule(model):
    """The share of trees of depth 5 that get what the chosen branch asks, not what it leads to."""
    instruction, stimulus, _ = data.trials("productive", "depth5", TRIALS)
    trees = list(map(data.evaluate, instruction, stimulus))
    asks = torch.tensor([tree[data.descend(tree)[1]].answer for tree in trees])
    return [percent([(answers(model, instruction, stimulus)[-1] == asks).float().mean().item()])]


def nothing(model):
    """The attention, in a True Exist, to the object; in a False one, to the empty cells."""
    made, shares = data.trials("distractor", "iid", TRIALS), {data.TRUE: [], data.FALSE: []}
    for i, trial in enumerate(zip(*made)):
        solved, = data.evaluate(*trial[:2])
        if solved.operator == "Exist":
            (_, look), = looks(model, data.Trials(*(part[i:i + 1] for part in made)))[0]
            key = solved.found[0][0] if solved.answer == data.TRUE else "empty cells"
            shares[solved.answer].append(dict(look)[key])
    return [percent([statistics.mean(values)]) for values in shares.values()]


TABLES = [  # header, runs, what fills a row
    (["looptfmr at depth 5", "leaves after loop 1", "branches after 2", "root after 3",
      "leaves after 3", "branches alone", "rule, depth 5", "rule, depth 7"],
     "productive/looptfmr/*", loops),
    (["sstfmr at depth 5", "gives the chosen condition's answer"],
     "productive/sstfmr/*", branch_rule),
    (["attention of an Exist", "True: to the object", "False: to empty cells"],
     "distractor/sstfmr/layers1-heads1", nothing)]


def main(argv=None):
    parser = argparse.ArgumentParser(description="Print figures from recorded weights.",
                                     usage=argparse.SUPPRESS)
    parser.add_argument("folder", type=Path, help="above productive/ and distractor/")
    folder = parser.parse_args(argv).folder
    with data.ending(parser):
        if not (folder / "productive").is_dir():
            raise data.UsageError(f"there is no folder {folder / 'productive'}")
        for header, runs, measure in TABLES:
            paths = sorted(folder.glob(f"{runs}/seed0/checkpoint.pt"))
            rows = [[path.parents[1].name, *measure(load(path.parent)[0])] for path in paths]
            print(f"\n{table(header, rows)}")


if __name__ == "__main__":
    main()
