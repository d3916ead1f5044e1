"""Judges the paper's claims by the runs in a folder, and by a rule that was written before them.

    python tests/claims.py runs [--markdown]

A claim is a list of comparisons of a model with another one, or with a baseline, on one test set.
A comparison counts where the model has learned the split: at least 95 % in distribution, the mean
over at least two seeds. The other model counts as it stands after the same number of trials, with
at least two seeds; the verdict says how many of the others had not learned the split. A model is
better where the difference of the means exceeds its 95 % interval over seeds (Student). A baseline
is exact. A claim holds if all comparisons that can be made agree with it, in part if some do.

Claim 5 is a rank correlation over the paper's models and the splits, learned or not: how much more
hidden states are organized like the answer than like the stimulus, with the accuracy on the last
test set. It holds where the 95 % interval is above 0, and does not hold where it is below. It
cannot be judged from fewer than six pairs of model and split, or where 0 is inside.
"""
import argparse
import math
import re
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import eval as evaluation  # noqa: E402

CROSS, OTHERS = ("crossattn", "perceiver"), ("rnn", "gru", "sstfmr", "dstfmr")
HARDEST = {"distractor": "distractors40", "systematic1": "ood", "systematic3": "ood"}
# claim -> (split, test set, model, what it is compared with, is it better?); [layers]
CLAIMS = {
    "1 distractors: only cross-attention stays accurate":
        [("distractor", "distractors40", a, b, True) for a in CROSS for b in OTHERS],
    "2 systematic: cross-attention does better":
        [(split, "ood", a, b, True) for split in ("systematic1", "systematic3") for a in CROSS
         for b in OTHERS],
    "3 more layers help, but not productive generalization":
        [*((split, test, "sstfmr[4]", "sstfmr[1]", True) for split, test in HARDEST.items()),
         *(("productive", f"depth{d}", "sstfmr[4]", "sstfmr[1]", False) for d in (5, 7, 9))],
    "4 productive: every architecture fails beyond its training":
        [("productive", f"depth{d}", model, baseline, False) for model in OTHERS + CROSS
         for d in (5, 7, 9) for baseline in ("chance", "condition-blind")],
}
# Two-sided 95 % quantiles of Student's distribution for 1 to 8 degrees of freedom
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31)


def better(a, b):
    """Whether the mean of accuracies a (one per seed) exceeds that of b by more than the
    difference's 95 % interval. A single value is exact: a baseline."""
    spread = sum(statistics.variance(x) / len(x) for x in (a, b) if len(x) > 1) ** 0.5
    quantile = STUDENT[min(len(a) + len(b) - 2, 8) - 1]
    return statistics.mean(a) - statistics.mean(b) > quantile * spread


def counts(config, layers=""):
    """Whether a run has the model's own settings, or with `layers` this many of them."""
    if layers and layers != str(config["model_args"]["layers"]):
        return False
    base = re.sub("^layers[0-9]+$", "", config["settings"]) if layers else config["settings"]
    return base in ("", "default")


def accuracies(runs, test, name):
    """The accuracies of a model, `name` or `name[layers]`, one per seed."""
    model, _, layers = name.rstrip("]").partition("[")
    return [r["accuracy"][test] for c, r in runs if c["model"] == model and counts(c, layers)]


def verdict(splits, comparisons):
    """What the comparisons say of a claim. Where none can be made: the first run that is missing,
    or has not learned."""
    agree, unlearned, missing = [], 0, []
    for split, test, name, other, expected in comparisons:
        runs, near = splits.get(split, []), evaluation.in_distribution(split)[-1]
        a, b = (accuracies(runs, test, x) for x in (name, other))
        if other in ("chance", "condition-blind"):
            b = [result["baselines"][test][other] for _, result in runs][:1]
        elif len(b) < 2:
            missing.append(f"{other} on {split}")
            continue
        if len(a) < 2:
            missing.append(f"{name} on {split}")
        elif (learned := statistics.mean(accuracies(runs, near, name))) < 0.95:
            missing.append(f"{name} learned {split} to {100 * learned:.0f} %")
        else:
            agree.append(better(a, b) == expected)
            unlearned += len(b) > 1 and statistics.mean(accuracies(runs, near, other)) < 0.95
    if not agree:
        return f"cannot be judged ({missing[0]})"
    outcome = "holds" if all(agree) else "holds in part" if any(agree) else "does not hold"
    others = f", {unlearned} others not learned" * (unlearned > 0)
    return f"{outcome} ({sum(agree)} of {len(agree)}{others})"


def organized(splits):
    """What claim 5 compares: how much more hidden states are organized like the answer than like
    the stimulus, and the accuracy out of distribution. One value per model and split, means over
    seeds."""
    found = {}  # (split, model) -> (organized like the answer, accuracy) of each seed
    for split, runs in splits.items():
        for config, result in runs:
            if config["model"] in CROSS + OTHERS and counts(config):
                align, far = result["alignment"], evaluation.hardest(split)[1]
                found.setdefault((split, config["model"]), []).append(
                    (align["out: answer"] - align["out: stimulus"], result["accuracy"][far]))
    means = [[statistics.mean(part) for part in zip(*seeds)] for seeds in found.values()]
    return torch.tensor(means).reshape(-1, 2).T


def claim_5(splits):
    """The verdict on claim 5, with the correlation and its 95 % interval (Fisher's transformation,
    of ranks: Fieller et al. 1957)."""
    x, y = organized(splits)
    if len(x) < 6:
        return f"cannot be judged ({len(x)} of 6 pairs)"
    r = evaluation.spearman(x, y)
    center, half = math.atanh(max(-0.999, min(r, 0.999))), 1.96 * 1.03 / (len(x) - 3) ** 0.5
    low, high = math.tanh(center - half), math.tanh(center + half)
    outcome = "holds" if low > 0 else "does not hold" if high < 0 else "cannot be judged"
    return f"{outcome} ({r:.2f}: {low:.2f} to {high:.2f})"


def claims_table(splits, markdown=False):
    """One row per claim."""
    rows = [[claim, verdict(splits, comparisons)] for claim, comparisons in CLAIMS.items()]
    rows.append(["5 organized like the answer: generalizes better", claim_5(splits)])
    return evaluation.table(["claim", "verdict"], rows, markdown)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], usage=argparse.SUPPRESS)
    parser.add_argument("runs", nargs="*", default=[Path("runs")], type=Path,
                        help="run folders, or folders above them (default: runs)")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    args, runs, splits = parser.parse_args(argv), {}, {}
    for path in (path for above in args.runs for path in sorted(above.rglob("result.json"))):
        config = evaluation.read(path.with_name("config.json"))
        name = tuple(config[key] for key in ("split", "model", "settings", "seed"))
        runs[name] = config, evaluation.read(path)  # the same run in two folders is no second seed
    if not runs:
        parser.error(f"no run in {', '.join(map(str, args.runs))}")
    for (split, *_), run in runs.items():
        splits.setdefault(split, []).append(run)
    print(claims_table(splits, args.markdown))


if __name__ == "__main__":
    main()
