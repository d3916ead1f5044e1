"""Judges the paper's claims by the runs in a folder, and by a rule that was written before the runs.

    python tests/claims.py runs [--markdown]

A model counts on a split only where it has learned it: at least 95 % in distribution, the mean over seeds. It is better
than another one where the difference of their means exceeds its 95 % interval over seeds (Student; at least two seeds).
A claim is a list of comparisons. It holds if all that can be made agree with it, in part if some do. Claim 5 is a rank
correlation, over the paper's models and the splits, learned or not: how much more hidden states are organized like the
answer than like the stimulus, with the accuracy out of distribution. It holds where the 95 % interval is above 0, does
not hold where it is below, and cannot be judged from fewer than six pairs of model and split, or where 0 is inside.
Added after the runs: chance is exact (`better`), and what --paper does not change counts at both sizes (`counts`).
"""
import argparse
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import eval as evaluation  # noqa: E402
import torch  # noqa: E402

CROSS, OTHERS = ("crossattn", "perceiver"), ("rnn", "gru", "sstfmr", "dstfmr")
HARDEST = {"distractor": "distractors40", "systematic1": "ood", "systematic3": "ood"}
CLAIMS = {  # claim -> (split, test set, model, the model that it is compared with, is it better?); layers in brackets
    "1 distractors: only cross-attention stays accurate":
        [("distractor", "distractors40", a, b, True) for a in CROSS for b in OTHERS],
    "2 systematic: cross-attention does better":
        [(split, "ood", a, b, True) for split in ("systematic1", "systematic3") for a in CROSS for b in OTHERS],
    "3 more layers help, but not productive generalization":
        [*((split, test, "sstfmr[4]", "sstfmr[1]", True) for split, test in HARDEST.items()),
         *(("productive", f"depth{d}", "sstfmr[4]", "sstfmr[1]", False) for d in (5, 7, 9))],
    "4 productive: every architecture is at chance or below":
        [("productive", f"depth{d}", model, "chance", False) for model in OTHERS + CROSS for d in (5, 7, 9)],
}
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31)  # two-sided 95 % quantiles for 1 to 8 degrees of freedom


def better(a, b):
    """Whether the mean of accuracies a (one per seed) exceeds that of b by more than the difference's 95 % interval. A
    single value is exact: a baseline."""
    spread = sum(statistics.variance(x) / len(x) for x in (a, b) if len(x) > 1) ** 0.5
    return statistics.mean(a) - statistics.mean(b) > STUDENT[min(len(a) + len(b) - 2, 8) - 1] * spread


def counts(config, settings, layers=""):
    """Whether a run is one of these settings; with layers, one with that many, and else of these settings. What --paper
    would not change (RNN and GRU under `quick`) is a run at the working size and one at the paper's."""
    if layers:
        usual = config["settings"] in (settings, f"{settings}-layers{layers}")
        return usual and config["model_args"]["layers"] == int(layers)
    own, paper = {**config, **config["model_args"]}, evaluation.module_of(config["model"]).PAPER
    unchanged = all(own.get(key) == value for key, value in paper.items())
    return config["settings"] == settings or unchanged and config["settings"] + "-paper" == settings


def cell(runs, split, test, name, settings):
    """The accuracies of one model (one per seed), or none where it has not learned the split: its mean accuracy in
    distribution is below 95 %."""
    model, _, layers = name.rstrip("]").partition("[")
    near = evaluation.in_distribution(split)[-1]
    found = [result for config, result in runs if config["model"] == model and counts(config, settings, layers)]
    learned = found and statistics.mean(r["accuracy"][near] for r in found) >= 0.95
    return [r["accuracy"][test] for r in found] if learned else []


def verdict(splits, comparisons, settings):
    """What comparisons say of a claim; those that miss a learned model or a second seed say nothing."""
    agree = []
    for split, test, name, other, expected in comparisons:
        runs = splits.get(split, [])
        a = cell(runs, split, test, name, settings)
        b = cell(runs, split, test, other, settings)
        if other == "chance":
            b = [runs[0][1]["chance"][test]] if runs else []
        if len(a) > 1 and len(b) >= (1 if other == "chance" else 2):
            agree.append(better(a, b) == expected)
    if not agree:
        return "cannot be judged"
    outcome = "holds" if all(agree) else "holds in part" if any(agree) else "does not hold"
    return f"{outcome} ({sum(agree)} of {len(agree)})"


def organized(splits, settings):
    """What claim 5 compares: how much more hidden states are organized like the answer than like the stimulus, and the
    accuracy out of distribution, one value per pair of model and split, means over seeds."""
    found = {}  # (split, model) -> (organized like the answer rather than the stimulus, accuracy) of each seed
    for split, runs in splits.items():
        for config, result in runs:
            if config["model"] in CROSS + OTHERS and counts(config, settings):
                align, far = result["alignment"], evaluation.ends(split)[1]
                found.setdefault((split, config["model"]), []).append(
                    (align["out: answer"] - align["out: stimulus"], result["accuracy"][far]))
    return torch.tensor([[statistics.mean(part) for part in zip(*seeds)] for seeds in found.values()]).reshape(-1, 2).T


def claim_5(splits, settings):
    """The verdict on claim 5, with the correlation and its 95 % interval (Fisher's transformation)."""
    x, y = organized(splits, settings)
    if len(x) < 6:
        return "cannot be judged"
    r = evaluation.spearman(x, y)
    center, half = math.atanh(max(-0.999, min(r, 0.999))), 1.96 * 1.03 / (len(x) - 3) ** 0.5  # of ranks: Fieller et al. 1957
    low, high = math.tanh(center - half), math.tanh(center + half)
    outcome = "holds" if low > 0 else "does not hold" if high < 0 else "cannot be judged"
    return f"{outcome} ({r:.2f}: {low:.2f} to {high:.2f})"


def schedules(splits):
    """The schedules, at the working sizes and at the paper's, that there are runs of."""
    found = {config["settings"].split("-layers")[0] for runs in splits.values() for config, _ in runs}
    return [c for c in ("quick", "quick-paper", "full", "full-paper") if c in found]


def claims_table(splits, markdown=False):
    """One row per claim, one column for each schedule, at the working sizes and at the paper's."""
    columns = schedules(splits)
    rows = [[claim, *(verdict(splits, comparisons, c) for c in columns)] for claim, comparisons in CLAIMS.items()]
    rows.append(["5 organized like the answer: generalizes better", *(claim_5(splits, c) for c in columns)])
    return evaluation.table(["claim", *columns], rows, markdown)


def within_table(splits, markdown=False):
    """Claim 5 within each split, where it cannot be that some splits are harder than others: the rank correlation over
    the paper's models, where there are at least four."""
    rows = []
    for settings in schedules(splits):
        pairs = [organized({split: runs}, settings) for split, runs in splits.items()]
        rows.append([settings, *(f"{evaluation.spearman(x, y):.2f}" if len(x) > 3 else "" for x, y in pairs)])
    return evaluation.table(["claim 5 within", *splits], rows, markdown)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", nargs="*", default=[Path("runs")], type=Path, help="run folders, or folders above them")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    args, runs, splits = parser.parse_args(argv), {}, {}
    try:
        for file in sorted({file.resolve() for path in args.runs for file in path.rglob("result.json")}):
            config = evaluation.read(file.parent / "config.json")
            name = tuple(config[key] for key in ("split", "model", "settings", "seed"))
            runs[name] = config, evaluation.read(file)  # the same run again, in another folder, is no other seed
        for (split, *_), run in runs.items():
            splits.setdefault(split, []).append(run)
        if not splits:
            raise evaluation.Refused(f"no finished run in {', '.join(map(str, args.runs))}: train one with train.py")
    except evaluation.Refused as error:
        parser.error(str(error))
    print(f"{claims_table(splits, args.markdown)}\n\n{within_table(splits, args.markdown)}")


if __name__ == "__main__":
    main()
