"""Judges the claims of three papers by the runs in a folder, by rules written before the runs.
Before the verdicts it prints a table of the models that it judges, and one of their hidden states.

    python tests/claims.py runs

Claims 1 to 5 are of Ito et al. 2024, 6 and 7 of Redhardt et al. 2025, 8 and 9 of Kobayashi et al.
2024. They are judged twice: for our models (CrossAttn with first=read, the paper's order), and for
the authors' (models/authors.py) as released.

A claim is a list of comparisons of a model with another one, or with a baseline, on one test set.
A comparison counts where the model has learned the split: at least 95 % in distribution, the mean
over at least two seeds. The other model counts as it stands after the same number of trials, with
at least two seeds; the verdict says how many of the others had not learned the split. A model is
better where the difference of the means exceeds its 95 % interval over seeds (Welch). A baseline
is exact. A claim holds if all comparisons that can be made agree with it, in part if some do.

Claim 6: on the last test set, the MLP on twenty times the trials, or twice as wide, is better than
the MLP as it is, and has 95 %. What it has learned in distribution does not matter: that too is
what scale should bring.

Claim 5 is a rank correlation over the paper's models and the splits, learned or not: how much more
hidden states are organized like the answer than like the stimulus, with the accuracy on the last
test set. It holds where the 95 % interval is above 0, and does not hold where it is below. It
cannot be judged from fewer than six pairs of model and split, or where 0 is inside.

Claims 7 and 9: the constituents of a task can be decoded where a linear map finds 95 % of what the
root asks about on the last test set (the mean over operator, letter and color, and over at least
two seeds). Claim 7 asks it of every model, in its own settings, and split with 95 % or more on that
test set; claim 9 of the hypernetwork and the plain Transformer on held-out combinations.
"""
import argparse
import math
import statistics
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import data  # noqa: E402
from eval import hardest, in_distribution, percent, read, spearman, table  # noqa: E402

LEARNED = 0.95
CROSS = "crossattn[firstread]", "perceiver"  # in the paper's order
OTHERS = "rnn", "gru", "sstfmr", "dstfmr"
SYSTEMATIC = "systematic1", "systematic3"
HARDEST = {"distractor": "distractors40", "systematic1": "ood", "systematic3": "ood"}
# claim -> (split, test set, model, what it is compared with, is it better?); model[its settings]
CLAIMS = {
    "1 distractors: only cross-attention stays accurate":
        [("distractor", "distractors40", a, b, True) for a in CROSS for b in OTHERS],
    "2 systematic: cross-attention does better":
        [(split, "ood", a, b, True) for split in SYSTEMATIC for a in CROSS for b in OTHERS],
    "3 more layers help, but not productive generalization":
        [*((split, test, "sstfmr[layers4]", "sstfmr[layers1]", True)
           for split, test in HARDEST.items()),
         *(("productive", f"depth{d}", "sstfmr[layers4]", "sstfmr[layers1]", False)
           for d in (5, 7, 9))],
    "4 productive: every architecture fails beyond its training":
        [("productive", f"depth{d}", model, baseline, False) for model in OTHERS + CROSS
         for d in (5, 7, 9) for baseline in ("chance", "condition-blind")],
    "6 scale alone generalizes":
        [(split, HARDEST[split], f"mlp[{scaled}]", other, True)
         for split in ("distractor", "systematic1")
         for scaled in ("steps16000-batchsize640", "dim1024") for other in ("mlp", "learned")],
    "8 held-out pairs: a bottleneck does better":
        [(split, "ood", "hypertfmr", "sstfmr", True) for split in SYSTEMATIC],
}
# Two-sided 95 % quantiles of Student's distribution for 1 to 8 degrees of freedom
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31)


def better(a, b):
    """Whether the mean of accuracies a (one per seed) exceeds that of b by more than the
    difference's 95 % interval (Welch; degrees of freedom rounded down). A single value is exact: a
    baseline."""
    errors = [(statistics.variance(x) / len(x), len(x) - 1) for x in (a, b) if len(x) > 1]
    square = sum(error for error, _ in errors)
    freedom = square ** 2 / sum(error ** 2 / n for error, n in errors) if square else 1
    quantile = STUDENT[min(int(freedom + 1e-9), 8) - 1]
    return statistics.mean(a) - statistics.mean(b) > quantile * square ** 0.5


def name_of(config):
    """model, or model[settings] where they are not its own."""
    return config["model"] + f"[{config['settings']}]" * (config["settings"] != "default")


def results_of(runs, name):
    """The results of a model by its name, one per seed."""
    return [result for config, result in runs if name_of(config) == name]


def accuracies(runs, test, name):
    return [result["accuracy"][test] for result in results_of(runs, name)]


def outcome(agree):
    return "holds" if all(agree) else "holds in part" if any(agree) else "does not hold"


def verdict(splits, comparisons):
    """What the comparisons say of a claim. Where none can be made: the first run that is missing,
    or has not learned."""
    agree, unlearned, missing = [], 0, []
    for split, test, name, other, expected in comparisons:
        runs, near = splits.get(split, []), in_distribution(split)[-1]
        a, b = (accuracies(runs, test, x) for x in (name, other))
        if other in ("chance", "condition-blind"):
            b = [result["baselines"][test][other] for _, result in runs][:1]
        elif len(b) < 2 and other != "learned":
            missing.append(f"{other} on {split}")
            continue
        if len(a) < 2:
            missing.append(f"{name} on {split}")
        elif not name.startswith("mlp") and (
                learned := statistics.mean(accuracies(runs, near, name))) < LEARNED:
            missing.append(f"{name} learned {split} to {100 * learned:.0f} %")
        elif other == "learned":
            agree.append(statistics.mean(a) >= LEARNED)
        else:
            agree.append(better(a, b) == expected)
            unlearned += len(b) > 1 and statistics.mean(accuracies(runs, near, other)) < LEARNED
    if not agree:
        return f"cannot be judged ({missing[0]})"
    others = f", {unlearned} others not learned" * (unlearned > 0)
    return f"{outcome(agree)} ({sum(agree)} of {len(agree)}{others})"


def organized(splits):
    """What claim 5 compares: how much more hidden states are organized like the answer than like
    the stimulus, and the accuracy out of distribution. One value per model and split, means over
    seeds."""
    means = []
    for split, runs in splits.items():
        far = hardest(split)[1]
        for model in CROSS + OTHERS:
            seeds = [(r["alignment"]["out: answer"] - r["alignment"]["out: stimulus"],
                      r["accuracy"][far]) for r in results_of(runs, model)]
            if seeds:
                means.append([statistics.mean(part) for part in zip(*seeds)])
    return torch.tensor(means).reshape(-1, 2).T


def claim_5(splits):
    """The verdict on claim 5, with the correlation and its 95 % interval (Fisher's transformation,
    of ranks: Fieller et al. 1957)."""
    x, y = organized(splits)
    if len(x) < 6:
        return f"cannot be judged ({len(x)} of 6 pairs)"
    r = spearman(x, y)
    center, half = math.atanh(max(-0.999, min(r, 0.999))), 1.96 * 1.03 / (len(x) - 3) ** 0.5
    low, high = math.tanh(center - half), math.tanh(center + half)
    says = "holds" if low > 0 else "does not hold" if high < 0 else "cannot be judged"
    return f"{says} ({r:.2f}: {low:.2f} to {high:.2f})"


def generalizing(splits):
    """The pairs of split and model, in its own settings, with 95 % on the last test set."""
    pairs = [(split, model) for split, runs in splits.items()
             for model in dict.fromkeys(c["model"] for c, _ in runs if c["settings"] == "default")]
    return [(split, model) for split, model in pairs if statistics.mean(
            accuracies(splits[split], hardest(split)[1], model)) >= LEARNED]


def decoded(result, where):
    """The mean of what `decoding` found "in" or "out" of distribution. None in older results."""
    shares = [share for part, share in result.get("decoded", {}).items() if part.startswith(where)]
    return statistics.mean(shares) if shares else None


def decodable(splits, pairs):
    """The verdict on claims 7 and 9 over (split, model) pairs, and how much is decoded."""
    shares = []
    for split, model in pairs:
        found = [decoded(r, "out") for r in results_of(splits.get(split, []), model)]
        if len(found) > 1 and None not in found:
            shares.append(statistics.mean(found))
    if not shares:
        return "cannot be judged (no such runs)"
    agree = [share >= LEARNED for share in shares]
    return (f"{outcome(agree)} ({sum(agree)} of {len(agree)}: {100 * min(shares):.0f} to "
            f"{100 * max(shares):.0f} %)")


def released(runs):
    """The runs of models/authors.py as released, under our models' names."""
    names = {"authors": ("crossattn", "firstread")}
    for settings in ("dim512-architecturernn", "dim512-architecturegru", "architecturesstfmr",
                     "architecturedstfmr", "architectureperceiver"):
        names[f"authors[{settings}]"] = settings.partition("architecture")[2], "default"
    return [(config | dict(zip(("model", "settings"), names[name_of(config)])), result)
            for config, result in runs if name_of(config) in names]


def ours(runs):
    return [run for run in runs if run[0]["model"] != "authors"]


def unchanged(runs):
    """Name -> the results of models with their own settings or in the paper's order."""
    names = {name_of(config) for config, _ in runs
             if name_of(config) in (config["model"], *CROSS)}
    return {name: results_of(runs, name) for name in sorted(names)}


def claims_table(splits):
    """A row per claim, and a column for our models and for the authors'."""
    columns = []
    for part in ours, released:
        chosen = {split: part(runs) for split, runs in splits.items()}
        pairs = [(split, model) for split in SYSTEMATIC for model in ("hypertfmr", "sstfmr")]
        columns.append({
            **{claim: verdict(chosen, comparisons) for claim, comparisons in CLAIMS.items()},
            "5 organized like the answer: generalizes better": claim_5(chosen),
            "7 generalizes: its task can be decoded": decodable(chosen, generalizing(chosen)),
            "9 held-out pairs: both decode the task": decodable(chosen, pairs)})
    return table(["claim", "our models", "the authors' models"],
                 [[claim, *(column[claim] for column in columns)] for claim in sorted(columns[0])])


def summary_table(splits):
    """A row per baseline and per model of `unchanged`, a column per split: accuracy on the last
    test set in distribution, and on the last one out of it with its spread over seeds."""
    rows = {baseline: {} for baseline in ("chance", "no binding", "condition-blind")}
    for split, runs in splits.items():
        near, far = hardest(split)
        baselines = runs[0][1]["baselines"]
        found = {name: [{near: baselines[near].get(name, 1), far: value}]
                 for name, value in baselines[far].items()}
        for name, results in unchanged(ours(runs)).items():
            found[name] = [result["accuracy"] for result in results]
        for name, seeds in found.items():
            left, right = (percent(seed.get(test) for seed in seeds) for test in (near, far))
            rows.setdefault(name, {})[split] = f"{left.partition('±')[0]} -> {right}"
    header = ["accuracy in %", *(f"{split}: {' -> '.join(hardest(split))}" for split in splits)]
    return table(header, [[name, *(cells.get(split, "") for split in splits)]
                          for name, cells in rows.items() if cells])


def alignment_table(splits):
    """A row per split and model of `unchanged`, and of the authors' as released, means over seeds:
    how much hidden states are organized like stimulus, instruction and answer, and what can be
    decoded from them (the mean share of operator, letter and color), in and out of distribution."""
    rows, parts = [], next(iter(splits.values()))[0][1]["alignment"]
    for split, runs in splits.items():
        models = unchanged(ours(runs)).items()
        theirs = (("authors' " + name, r) for name, r in unchanged(released(runs)).items())
        for name, results in (*models, *theirs):
            means = (f"{statistics.mean(r['alignment'][part] for r in results):.2f}"
                     for part in parts)
            found = (percent([decoded(r, where) for r in results]) for where in ("in", "out"))
            out = percent([r["accuracy"].get(hardest(split)[1]) for r in results])
            rows.append([f"{split}, {name}", *means, *found, out])
    header = ["rank correlation of similarities with", *parts, "decoded in", "decoded out"]
    return table([*header, "accuracy out"], rows)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], usage=argparse.SUPPRESS)
    parser.add_argument("runs", nargs="*", default=[Path("runs")], type=Path,
                        help="run folders, or folders above them (default: runs)")
    args, runs, splits = parser.parse_args(argv), {}, {}
    for path in (path for above in args.runs for path in sorted(above.rglob("result.json"))):
        config = read(path.with_name("config.json"))
        name = tuple(config[key] for key in ("split", "model", "settings", "seed"))
        if config["split"] in data.SPLITS:  # it may have been removed
            runs[name] = config, read(path)  # the same run in two folders is no second seed
    if not runs:
        parser.error(f"no run in {', '.join(map(str, args.runs))}")
    for (split, *_), run in runs.items():
        splits.setdefault(split, []).append(run)
    for make in summary_table, alignment_table, claims_table:
        print(f"\n{make(splits)}")


if __name__ == "__main__":
    main()
