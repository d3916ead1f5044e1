"""Judges the claims of three papers by the runs in a folder, by rules written before the runs.

    python tests/why.py runs       # measures hidden states
    python tests/claims.py runs    # two tables, then the claims

Claims 1 to 5 are of Ito et al. 2024, 6 and 7 of Redhardt et al. 2025, 8 and 9 of Kobayashi et al.
2024. A claim is a list of comparisons. It is judged on three grounds: our models on our trials, the
authors' models on our trials, the authors' models on trials with shortcuts (`<split>_release`).

A comparison says that a model is better than a model, a baseline or 95 %, or that it is no better.
The difference of the means over seeds has a 95 % interval (Welch). A baseline and 95 % are exact.
A model is better if the difference exceeds its interval. It is no better if it is worse by more
than the interval, or if the whole interval lies within 2 points of zero. A comparison ends in

    for      what it says is found (this goes first: a small difference may be both)
    against  the opposite is found
    open     neither is found, or a run or measurement is missing, or a side has fewer than three
             seeds that count, or runs of one name have different code, settings or tests

A seed counts if it has learned its split: 95 % on the last test set in distribution. There are two
exceptions. In claim 6 all seeds count: scale should bring learning, too. In claim 7 a seed counts
if it generalizes: 95 % on the last test set of its split.

Claim 5 is one comparison: a rank correlation over the paper's models and all splits, of accuracy on
the last test set with how much more hidden states are organized like the answer than like the
stimulus. Each value is a mean over at least three seeds that count. The 95 % interval is that of a
jackknife over models. It lies above zero (for), below zero (against) or around it (open). Fewer
than four models leave it open. The correlation over seeds that have not learned is only shown.
Claim 6 compares the MLP of twice the units and twenty times the trials with the default one, and
with 95 %. All else is equal.
Claims 7 and 9 compare with 95 % how much of what the root asks about a linear map finds on the last
test set (the mean of operator, letter and color): in HyperTfmr's code, in the best place, and in
the last place, the features.
"""
import argparse
import itertools
import re
import statistics
import sys
from collections import namedtuple
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import data
from eval import identity, in_distribution, percent, read, table
from why import spearman

LEARNED, WITHIN, SEEDS, MODELS = 0.95, 0.02, 3, 4
OUTCOMES = "for", "against", "open"
CROSS = "crossattn[firstread]", "perceiver"  # in the paper's order
OTHERS = "rnn", "gru", "sstfmr", "dstfmr"
DEFAULT = *OTHERS, "perceiver", "crossattn", "mlp", "hypertfmr", "looptfmr"
FARTHEST = {"distractor": "distractors40", "productive": "depth9", "systematic1": "ood",
            "systematic3": "ood"}
SYSTEMATIC, DEEPER = ("systematic1", "systematic3"), ("depth5", "depth7", "depth9")
BASELINES, PLACES = ("chance", "no binding", "condition-blind"), ("code", "best", "features")
DEEP, SHALLOW = "sstfmr[layers4]", "sstfmr[layers1]"
CORNERS = [f"mlp[{units} units, x{times}]" for units in (512, 1024) for times in (1, 20)]
RELEASED = {"authors": "crossattn[firstread]", "authors[architecturesstfmr]": "sstfmr",
            "authors[architecturedstfmr]": "dstfmr", "authors[dim512-architecturernn]": "rnn",
            "authors[architectureperceiver]": "perceiver", "authors[dim512-architecturegru]": "gru"}
SCALE = r"default|((dim|steps|batchsize)\d+-?)+"  # settings of the four corners
UPSTREAM = " gCOG states the task, so a high share upstream says little: compare untrained models."
GROUNDS = {"Our models on our trials": (False, ""), "The authors' models on our trials": (True, ""),
           "The authors' models on trials with shortcuts": (True, "_release")}
# what: a test set, or a place where the task is decoded. counts: the seeds that have "learned", or
# not ("late"), that are "general" (have 95 % on the last test set), or "all"
Comparison = namedtuple("Comparison", "split what model other better counts",
                        defaults=(True, "learned"))
CLAIMS = {
    "Only models with cross-attention resist distractors":
        [Comparison("distractor", "distractors40", a, b) for a in CROSS for b in OTHERS],
    "Cross-attention and deeper stacks are better on held-out pairs":
        [Comparison(split, "ood", a, b) for split in SYSTEMATIC
         for a, b in [*((a, b) for a in CROSS for b in OTHERS), (DEEP, SHALLOW)]],
    "More layers help, but neither more layers nor more heads help on deeper trees":
        [*(Comparison(split, FARTHEST[split], DEEP, SHALLOW)
           for split in ("distractor", *SYSTEMATIC)),
         *(Comparison("productive", depth, more, less, False) for depth in DEEPER
           for more, less in ((DEEP, SHALLOW), ("sstfmr[heads8]", "sstfmr[heads1]")))],
    "All models fail on deeper trees":
        [Comparison("productive", depth, model, baseline, False)
         for model in OTHERS + CROSS for depth in DEEPER
         for baseline in ("chance", "condition-blind")],
    "Models generalize if hidden states are organized like the answer": [],  # claim_5
    "Scaling model and data leads to compositional generalization":
        [Comparison(split, FARTHEST[split], CORNERS[-1], other, counts="all")
         for split in ("distractor", "systematic1") for other in (CORNERS[0], LEARNED)],
    "Where a model generalizes, its task can be decoded":
        [Comparison(split, place, model, LEARNED, counts="general")
         for split in FARTHEST for model in DEFAULT for place in ("best", "features")],
    "A bottleneck is better on held-out pairs":
        [Comparison(split, "ood", "hypertfmr", "sstfmr") for split in SYSTEMATIC],
    "On held-out pairs, the task can be decoded with and without a bottleneck":
        [Comparison(split, place, model, LEARNED) for split in SYSTEMATIC for place in PLACES
         for model in ("hypertfmr", "sstfmr") if (model, place) != ("sstfmr", "code")],
}
# Two-sided 95 % quantiles of Student's distribution for 1 to 8 degrees of freedom
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31)


def interval(a, b):
    """The difference of the means of a and b (one value per seed), and half its 95 % interval
    (Welch; degrees of freedom rounded down). A single value is exact."""
    errors = [(statistics.variance(x) / len(x), len(x) - 1) for x in (a, b) if len(x) > 1]
    square = sum(error for error, _ in errors)
    freedom = square ** 2 / sum(error ** 2 / n for error, n in errors) if square else 1
    quantile = STUDENT[min(int(freedom + 1e-9), 8) - 1]
    return statistics.mean(a) - statistics.mean(b), quantile * square ** 0.5


def outcome(difference, half, better):
    """Of a comparison that says better, or no better."""
    higher = difference > half
    not_higher = difference < -half or abs(difference) + half <= WITHIN
    found, opposite = (higher, not_higher) if better else (not_higher, higher)
    return "for" if found else "against" if opposite else "open"


def comparable(seeds):
    return len({seed["identity"] for seed in seeds}) == 1


def name_of(config):
    """model, or model[settings] where they are not its own. The third edition's number of trials
    (512,000) is the authors' models' own."""
    settings = config["settings"]
    if config["model"] == "authors":
        settings = re.sub(r"-?steps4000-batchsize128\b-?", "-", settings).strip("-") or "default"
    return config["model"] if settings == "default" else f"{config['model']}[{settings}]"


def shares(places):
    """Place -> the share of operator, letter and color (the mean) decoded out of distribution."""
    return {place: statistics.mean(share for part, share in found.items() if part[:3] == "out")
            for place, found in places.items() if found}


def numbers(config, result):
    """What is known of a seed: accuracies, decoded shares, how much more its hidden states are
    organized like the answer than like the stimulus."""
    seed = {"identity": identity(config, result), **result["accuracy"]}
    seed |= shares(result.get("decoded", {}))
    if "untrained" in result:  # not in archives of the third edition
        seed["best"] = max(shares(result["decoded"]).values(), default=None)
        seed["untrained"] = max(shares(result["untrained"]).values(), default=None)
    if like := result.get("alignment"):
        seed |= like | {"organized": like["out: answer"] - like["out: stimulus"]}
    return seed


def on_ground(runs, authors, suffix=""):
    """(split without suffix, name) -> seeds; a baseline has one. The MLP's also have the name of
    their corner, where x1 is the number of trials of its default run."""
    trials = {(config["split"], name_of(config)): config["steps"] * config["batch_size"]
              for config, _ in runs}
    found = {}
    for config, result in runs:
        split, name = config["split"].removesuffix("_release"), name_of(config)
        if authors != (config["model"] == "authors") or config["split"] != split + suffix:
            continue
        names, once = [RELEASED.get(name, name)], trials.get((config["split"], "mlp"))
        if once and config["model"] == "mlp" and re.fullmatch(SCALE, config["settings"]):
            times = trials[config["split"], name] / once
            names.append(f"mlp[{config['model_args']['dim']} units, x{times:g}]")
        for name in names:
            found.setdefault((split, name), []).append(numbers(config, result))
        for name in BASELINES:
            known = {test: of[name] for test, of in result["baselines"].items() if name in of}
            found.setdefault((split, name), [{"identity": None}])[0].update(known)
    return found


def counted(seeds, split, counts):
    """The seeds that count."""
    test = FARTHEST[split] if counts == "general" else in_distribution(split)[-1]
    return [seed for seed in seeds
            if counts == "all" or (seed.get(test, 0) >= LEARNED) == (counts != "late")]


def values(ground, comparison, name):
    """-> accuracies or decoded shares, one per seed that counts; notes: [(what, whose)]."""
    split, what, *_, counts = comparison
    seeds, whose = ground.get((split, name), []), f"{name} on {split}"
    found = [seed.get(what) for seed in counted(seeds, split, counts)]
    if not seeds:
        return [], [("no run", whose)]
    if not comparable(seeds):
        return [], [("runs of different code, settings or tests", whose)]
    if None in found:
        return [], [("not measured", f"{what} of {whose}")]
    if len(found) == len(seeds) >= SEEDS:
        return found, []
    return found, [("seeds that count", f"{whose} {len(found)} of {len(seeds)}")]


def judge(ground, comparison):
    """-> for, against or open; the difference, or None; notes: [(what, whose)]."""
    split, what, model, other, better, _ = comparison
    exact = other in BASELINES or other == LEARNED
    a, notes = values(ground, comparison, model)
    b, more = ([], []) if exact else values(ground, comparison, other)
    if len(a) < SEEDS or len(b) < SEEDS and not exact:
        return "open", None, notes + more
    if exact:
        b = [ground[split, other][0][what] if other in BASELINES else LEARNED]
    difference, half = interval(a, b)
    return outcome(difference, half, better), difference, notes + more


def correlation(found, without=None):
    pairs = [pair for model in found if model != without for pair in found[model]]
    return spearman(*torch.tensor(pairs).T)


def claim_5(ground):
    """What `judge` gives, for the one comparison of claim 5."""
    says, notes = "open", []
    for counts, word in ("learned", "learned"), ("late", "not learned"):
        found, text = {}, "fewer than four models"  # model -> (organized, accuracy) pairs
        for split, model in itertools.product(FARTHEST, OTHERS + CROSS):
            seeds = ground.get((split, model), [])
            pairs = [(seed["organized"], seed[FARTHEST[split]])
                     for seed in counted(seeds, split, counts) if "organized" in seed]
            if len(pairs) >= SEEDS and comparable(seeds):
                found.setdefault(model, []).append([*map(statistics.mean, zip(*pairs))])
        if (n := len(found)) >= MODELS:
            r, without = correlation(found), [correlation(found, model) for model in found]
            half = STUDENT[n - 2] * statistics.stdev(without) * (n - 1) / n ** 0.5
            text = f"rank correlation {r:.2f}±{half:.2f} over {n} models"
            if counts == "learned" and abs(r) > half:
                says = "for" if r > 0 else "against"
        notes.append((word, text))
    return says, None, notes


def sentence(findings):
    """What was seen in comparisons: their differences, and six notes of a kind."""
    parts, notes = [], {}
    for says, word in zip(OUTCOMES, ("for", "against", "undecided")):
        seen = [round(100 * gap, 1) + 0.0 for was, gap, _ in findings  # no -0.0
                if was == says and gap is not None]
        if seen:
            ends = sorted({min(seen), max(seen)})
            parts.append(f"{word}: {' to '.join(f'{gap:+.1f}' for gap in ends)} points")
    for what, whose in (note for *_, several in findings for note in several):
        notes.setdefault(what, {})[whose] = None  # each once
    for what, whose in notes.items():
        more = f" and {len(whose) - 6} more" if len(whose) > 6 else ""
        parts.append(f"{what}: {', '.join([*whose][:6])}{more}")
    return "; ".join(parts)


def claims_text(runs):
    """For each ground, a line per claim: the three counts, and a sentence of what was seen."""
    lines = []
    for title, which in GROUNDS.items():
        ground = on_ground(runs, *which)
        lines.append(f"\n{title}:\n")
        for number, (claim, comparisons) in enumerate(CLAIMS.items(), 1):
            findings = [judge(ground, c) for c in comparisons] or [claim_5(ground)]
            says = [finding[0] for finding in findings]
            counts = ", ".join(f"{says.count(one)} {one}" for one in OUTCOMES)
            upstream = UPSTREAM if any(c.what in PLACES for c in comparisons) else ""
            lines.append(f"{number}. {claim}: **{counts}**. {sentence(findings)}.{upstream}")
    return "\n".join(lines)


def summary_table(runs):
    """A row per baseline and default model, a column per split: accuracy on the last test set in
    distribution -> on the last one of all, with its spread over seeds."""
    ground, header, rows = on_ground(runs, False), ["accuracy in %"], {}
    for split, far in FARTHEST.items():
        near = in_distribution(split)[-1]
        header.append(f"{split}: {near} -> {far}")
        for name in (*BASELINES, *DEFAULT, *CROSS[:1], *CORNERS[1:]):
            seeds = ground.get((split, name), [])
            left, right = (percent(seed.get(test) for seed in seeds) for test in (near, far))
            is_shown = right and comparable(seeds)
            rows.setdefault(name, [name]).append(
                f"{left.partition('±')[0]} -> {right}" if is_shown else "")
    return table(header, [row for row in rows.values() if any(row[1:])])


def states_table(runs):
    """A row per model and split: rank correlations of hidden states, out of distribution, and the
    share of the task that is decoded in each place, and in the best place before training. Without
    columns that would be empty."""
    like, rows = [f"out: {part}" for part in ("stimulus", "instruction", "answer")], []
    for title, which in GROUNDS.items():
        for (split, name), seeds in sorted(on_ground(runs, *which).items()):
            seeds = [seed for seed in seeds if "organized" in seed]
            if seeds and comparable(seeds) and name in (*DEFAULT, *CROSS):
                means = [statistics.mean(seed[key] for seed in seeds) for key in like]
                cells = [percent(seed.get(key) for seed in seeds)
                         for key in (*PLACES, "untrained", FARTHEST[split])]
                label = f"{title.partition(' on ')[0]}, {split}{which[1]}, {name}"
                rows.append([label, *(f"{mean:.2f}" for mean in means), *cells])
    columns = zip(["hidden states", *like, *PLACES, "untrained", "accuracy"], *rows)
    header, *rows = zip(*(column for column in columns if any(column[1:]) or not rows))
    return table(header, rows)


def runs_below(folders):
    """The runs (config, result) below these folders; of copies, one."""
    runs = {}
    for path in (path for above in folders for path in sorted(above.rglob("result.json"))):
        config, result = read(path.with_name("config.json")), read(path)
        if (why := path.with_name("why.json")).exists():
            result |= read(why)
        elif "decoded" in result:  # an archive of the third edition
            result["decoded"] = {"features": result["decoded"]}
        if config["split"] in data.SPLITS and config["split"].removesuffix("_release") in FARTHEST:
            name = tuple(config[key] for key in ("split", "model", "settings", "seed"))
            runs[name + (identity(config, result),)] = config, result  # a copy is no second seed
    if not runs:
        raise data.UsageError(f"no run in {', '.join(map(str, folders))}")
    return [*runs.values()]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], usage=argparse.SUPPRESS)
    parser.add_argument("runs", nargs="*", default=[Path("runs")], type=Path,
                        help="run folders, or folders above them (default: runs)")
    args = parser.parse_args(argv)
    with data.ending(parser):
        runs = runs_below(args.runs)
        for make in summary_table, states_table, claims_text:
            print(f"\n{make(runs)}")


if __name__ == "__main__":
    main()
