"""Evaluates trained models: tables, figures, mistakes, attention, hidden states.

    python eval.py models/recorded                   # a table per split, then the verdicts
    python eval.py runs/productive --per-operator    # ... and accuracy by operator
    python eval.py runs --plot accuracy.png          # bars per model, lines by test set
    python eval.py runs --curves curves.png          # accuracy during training, a line per run
    python eval.py runs/distractor/sstfmr --show 3   # trials that the model got wrong
    python eval.py runs/productive/looptfmr --attention look.png --subset depth5
    python eval.py runs/productive/sstfmr --why      # what its hidden states hold

Accuracy is what train.py measured at the end of a run. The last three need its weights, --why only
the first time: result.json keeps what it measured, until a run is tested again. They build the
model from the copy of its file in the run's folder, and stop where today's data.py draws other
trials than the run was tested on (the first 100 are compared; those of train are not). So an edit
of models/ or data.py changes nothing that is said of a finished run.
"""
import argparse
import collections
import contextlib
import csv
import functools
import glob
import itertools
import json
import math
import os
import pickle
import re
import statistics
import sys
import uuid
import zlib
from pathlib import Path
from typing import NamedTuple

import torch
from torch.nn import functional as F
from tqdm import tqdm

import data
from data import UsageError
from models import ALL, module_of

BASELINES = {"chance": ":", "no binding": "--", "condition-blind": "-."}  # and how they are drawn
LEARNED = 0.95  # in distribution; on the hardest test set, to generalize


# ---- files --------------------------------------------------------------------------------------
def read(path):
    """What a run's JSON file or checkpoint holds. UsageError if it is damaged."""
    try:
        if path.suffix == ".pt":
            return torch.load(path, map_location="cpu", weights_only=True)
        return json.loads(path.read_text())
    except (ValueError, EOFError, RuntimeError, LookupError, pickle.UnpicklingError) as error:
        raise UsageError(f"{path} is damaged: remove it, and train again") from error


def write(path, content):
    """Replaces a file in one step. If that fails, as on a full disk, the old one stays."""
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex}.new")  # another process has another
    try:
        new.write_bytes(content)
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def load(folder, trained=True):
    """The model of a finished run, ready to call, and its config. Or the same before training. It
    is built from the copy of the model's file in the folder. It sets torch's seed to the run's, so
    that an untrained model starts like the run. UsageError if it does not fit today's data.py."""
    folder = Path(folder)
    config = read(folder / "result.json")["config"]
    try:
        torch.manual_seed(config["seed"])  # as in train.py
        model = module_of(config["model"], folder).Model(**config["model_args"])
        if trained:
            model.load_state_dict(read(folder / "checkpoint.pt")["model"])
    except (RuntimeError, AttributeError) as error:  # other sizes; a name that is gone
        raise UsageError(f"{folder} does not fit today's data.py: it needs the one of before "
                         "(was an operator added?)") from error
    return model.eval(), config


@torch.no_grad()
def predict(function, trials, device="cpu"):
    """The outputs of a model, or of its `features`, for trials (n, ...). The model gets copies,
    which it may change."""
    size = 50 if device == "cpu" else 1_000  # on a CPU, a hundred are slower at depth 9
    outputs = []
    for tokens in zip(trials.instruction.split(size), trials.stimulus.split(size)):
        instruction, stimulus = (x.to(device, copy=True) for x in tokens)
        outputs.append(function(instruction, stimulus).cpu())
    return torch.cat(outputs)


def score(model, split, n, device):
    """On n trials of each test set: accuracy (0 to 1), baselines, accuracy by kind of trial.
    UsageError if logits are not finite: the largest of them would be no answer."""
    result = {"accuracy": {}, "baselines": {}, "kinds": {}}
    hidden = True if n < 1000 else None  # None: hidden where stderr is no terminal
    for test in tqdm(data.tests_of(split), f"testing {split}", leave=False, disable=hidden):
        subset = data.find(split, test)
        train = data.find(split, "train")
        trials, kinds, baselines = test_set(split, test, n, subset, train)
        logits = predict(model, trials, device)
        if not logits.isfinite().all():
            raise UsageError(f"on {test} of {split}, logits of the model are not finite")
        right = (logits.argmax(1) == trials.answer).double()  # in float32, 95 of 100 is below 0.95
        result["accuracy"][test] = right.mean().item()
        result["baselines"][test] = baselines
        result["kinds"][test] = {kind: right[where].mean().item() for kind, where in kinds.items()}
    return result


def checksum(split, test):
    """A number that tells the first 100 trials of a test set from others."""
    return zlib.crc32(b"".join(part.numpy().tobytes() for part in data.trials(split, test, 100)))


def trials_of(run, test, n, seed=0):
    """n Trials of a test set of a finished run's split. UsageError if it was tested on others."""
    split = run["config"]["split"]
    tested = test if test in run["checksums"] else run["config"]["hardest"]  # not train
    if run["checksums"][tested] != checksum(split, tested):
        raise UsageError(f"{run['folder']} was tested on other trials of {split}, {tested} than "
                         "today's data.py draws")
    return data.trials(split, test, n, seed=seed)


def mistakes(run, n, subset=None):
    """The first n trials that a run's model answers wrong, of 1,000 of a test set (default: the
    hardest), as text."""
    trials = trials_of(run, subset or run["config"]["hardest"], 1000)
    said = predict(load(run["folder"])[0], trials).argmax(1)
    wrong = (said != trials.answer).nonzero().flatten().tolist()
    text = f"{len(wrong)} of 1,000 are wrong."
    for i in wrong[:n]:
        trial = [part[i] for part in trials]
        text += f"\n\n{data.show(trial)}\nThe model says: {data.ANSWERS[said[i]]}"
    return text


# ---- test sets, and what one can have without solving the task ----------------------------------
@functools.cache
def test_set(split, test, n, subset, train):
    """n Trials; kind of trial -> the indices of its trials; baseline -> its accuracy. `subset` and
    `train` are what the names stand for now: if a notebook edits them, the cache draws again."""
    # "no binding" knows which objects training pairs with an operator, if they are the test's, too
    known = train if subset.pools == train.pools else train._replace(pools=(data.Pool(),))
    trials = data.trials(split, test, n)
    kinds = {}  # in the order of OPERATORS
    for start in "", "if ":
        for operator in data.OPERATORS:
            kinds[start + operator] = []
            kinds[f"{start}{operator}, two objects"] = []
    baselines = collections.Counter()
    for i, (instruction, stimulus, answer) in enumerate(zip(*trials)):
        solved = data.evaluate(instruction, stimulus)
        leaf = solved[data.descend(solved)[-1]]
        kinds[kind_of(leaf)].append(i)
        baselines["chance"] += chance(subset)[leaf.operator] / n
        baselines["no binding"] += no_binding(leaf, stimulus, known) / n
        if len(solved) > 1:
            kinds["if " + kind_of(solved[0])].append(i)
            leaves = solved[len(solved) // 2:]
            answers = [node.answer for node in leaves]
            baselines["condition-blind"] += vote(answers, answer.item()) / n
    return trials, {kind: found for kind, found in kinds.items() if found}, dict(baselines)


def kind_of(node):
    return node.operator + (", two objects" if len(node.selectors) == 2 else "")


@functools.cache
def chance(subset):
    """Operator -> accuracy of the best constant answer to it, in a Subset."""
    share = collections.defaultdict(collections.Counter)  # operator -> answer -> probability
    for pool in subset.pools:
        answers = {"GetLocation": data.CELLS, "GetColor": pool.colors, "GetShape": pool.shapes}
        for operator in pool.leaves:
            possible = answers.get(operator, ("True", "False"))
            for answer in possible:
                share[operator][answer] += 1 / len(pool.leaves) / len(possible)
    return {name: max(counts.values()) / counts.total() for name, counts in share.items()}


def no_binding(node, stimulus, known):
    """The probability to answer a Solved operator right, for a reader who knows which objects a
    Subset pairs with it, and sees how often each shape and each color is on the grid among these
    objects, and in which cells they are, but not which belong together. True or False is a coin for
    this reader, unless there are shortcuts or objects that are never asked for. Then Exist is True
    if its shape and its color occur, and an operator on cells if it is True of these cells more
    often than of the whole grid."""
    pools = [pool for pool in known.pools if node.operator in pool.leaves]
    objects = []
    paired = []
    for cell, (shape, color) in zip(data.CELLS, stimulus.tolist()):
        if shape:
            objects.append((cell, shape, color))
            if any(shape - 1 in pool.shapes and color - 1 in pool.colors for pool in pools):
                paired.append((cell, shape, color))
    seen = paired if paired else objects
    cells = tuple(cell for cell, _, _ in seen)
    shapes = [shape for _, shape, _ in seen]
    colors = [color for _, _, color in seen]
    answers = {"GetLocation": [data.FIRST_CELL + data.CELLS.index(cell) for cell in cells],
               "GetShape": [data.FIRST_SHAPE + shape - 1 for shape in shapes],
               "GetColor": [data.FIRST_COLOR + color - 1 for color in colors]}
    if node.operator in answers:
        return vote(answers[node.operator], node.answer)
    if not known.shortcuts and len(seen) == len(objects):
        return 1 / 2  # companions and decoys leave only a coin
    if node.operator == "Exist":
        shape, color = node.selectors[0]
        guess = shape in shapes and color in colors
    else:
        here = share_true(node.operator, len(node.selectors), cells)
        anywhere = share_true(node.operator, len(node.selectors), tuple(data.CELLS))
        if here == anywhere:
            return 1 / 2
        guess = here > anywhere  # half of all are True
    return float(guess == (node.answer == data.TRUE))


@functools.lru_cache
def share_true(operator, number, cells):
    """The share of places for so many objects, among these cells, of which an operator is True."""
    holds = data.OPERATORS[operator].holds
    return statistics.fmean(bool(holds(places)) for places in itertools.permutations(cells, number))


def vote(values, answer):
    """The probability that a random one of the most frequent values is the answer."""
    best = statistics.multimode(values)
    return (answer in best) / len(best)


# ---- runs and their numbers ---------------------------------------------------------------------
def read_run(folder):
    """What a run's files say: its result or, while it is unfinished, its config and its log."""
    if (folder / "result.json").exists():
        return read(folder / "result.json")
    log = folder / "log.csv"
    lines = log.read_text().splitlines() if log.exists() else []
    rows = [{name: float(x) for name, x in row.items()} for row in csv.DictReader(lines)]
    return {"config": read(folder / "config.json"), "log": rows, "accuracy": {}, "baselines": {},
            "kinds": {}, "checksums": {}}


def find_runs(patterns):
    """All runs in or below folders, with the name of their row. Lines on stderr say what is left
    out. UsageError if nothing is left."""
    runs = {}  # by folder: what is found twice counts once
    for pattern in patterns:
        found = []
        for folder in folders_in(pattern):
            try:
                run = read_run(folder) | {"folder": folder}
                # "ends" are two test sets, near and far: the one like training, and the hardest
                run["ends"] = run["config"]["in_distribution"], run["config"]["hardest"]
                found.append(run)
            except (ValueError, KeyError, TypeError):
                print(f"not shown: {folder}, damaged or not of this train.py", file=sys.stderr)
        for run in sorted(found, key=rank):
            runs.setdefault(run["folder"].resolve(), run)
        if not found:
            print(f"not shown: no run in {pattern}", file=sys.stderr)
    if not runs:
        raise UsageError("there is nothing to show: train a run with train.py")
    name_rows(runs)
    return comparable(runs.values())


def folders_in(pattern):
    """The folders of runs in or below a folder, or in those that match a pattern."""
    top = glob.escape(str(pattern)) if pattern.exists() else pattern  # Windows keeps a *
    paths = glob.glob(f"{top}/**/config.json", recursive=True)  # also behind links
    paths += glob.glob(f"{top}/**/result.json", recursive=True)
    return sorted({Path(path).parent for path in paths})


def name_rows(runs):
    """Gives runs, by folder, the name of their row: model, settings and, where there are several,
    their --out."""
    outs = {folder: folder.parents[:4][-1] for folder in runs}  # <out>/<split>/<model>/...
    for folder, run in runs.items():
        run["row"] = run["config"]["model"]
        if run["config"]["settings"] != "default":
            run["row"] += f" ({run['config']['settings']})"
        if len(set(outs.values())) > 1:
            run["row"] = f"{os.path.relpath(outs[folder])}: {run['row']}"


def comparable(runs):
    """The runs that tables can hold side by side: each seed of a row once, and of a split those
    that were tested on the trials of its first finished one."""
    shown = {}
    first = {}  # split -> its first run
    for run in sorted(runs, key=lambda run: not run["accuracy"]):  # finished ones come first
        split = run["config"]["split"]
        place = split, run["row"], run["config"]["seed"]
        of_first = first.setdefault(split, run)["checksums"]
        both = [test for test in run["checksums"] if test in of_first]
        others = [test for test in both if run["checksums"][test] != of_first[test]]
        if others or run["ends"] != first[split]["ends"]:
            print(f"not shown: {run['folder']}, tested on other trials", file=sys.stderr)
        elif place in shown:
            print(f"not shown: {run['folder']}, a seed that its row has already", file=sys.stderr)
        else:
            shown[place] = run
    return list(shown.values())


def with_weights(runs, subset=None):
    """The runs whose weights are here; with `subset`, those on splits that have it. UsageError if
    there are none."""
    found = [run for run in runs if (run["folder"] / "checkpoint.pt").exists()]
    if not found:
        raise UsageError("none of these runs is finished and has weights (checkpoint.pt); "
                         "models/RESULTS.md names recorded ones that have")
    if subset is None:
        return found
    having = [run for run in found if subset in data.SPLITS.get(run["config"]["split"], ())]
    if not having:
        data.find(found[0]["config"]["split"], subset)  # a UsageError that names those it has
    return having


def rank(run):  # models in the order of ALL, others last; their defaults first
    model = run["config"]["model"]
    settings = run["config"]["settings"]
    place = ALL.index(model) if model in ALL else len(ALL)
    return place, model, settings != "default", settings


def collect(runs):
    """split -> row -> test set -> accuracies, one per seed. The first rows are baselines, with one
    value, that of the most test trials."""
    splits = {}
    for run in sorted(runs, key=lambda run: run["config"]["test_trials"]):  # the last one stays
        rows = splits.setdefault(run["config"]["split"], {name: {} for name in BASELINES})
        for test, baselines in run["baselines"].items():
            for name, value in baselines.items():
                rows[name][test] = [value]
    for run in runs:
        rows = splits[run["config"]["split"]]
        for test, value in run["accuracy"].items():
            rows.setdefault(run["row"], {}).setdefault(test, []).append(value)
    order = [split for split in data.SPLITS if split in splits]
    order += [split for split in splits if split not in data.SPLITS]  # gone since
    found = {}
    for split in order:
        found[split] = {row: tests for row, tests in splits[split].items() if tests}
    return found


def collect_kinds(runs):
    """(split, row) -> kind of trial -> test set -> accuracies, one per seed."""
    found = {}
    for run in runs:
        kinds = found.setdefault((run["config"]["split"], run["row"]), {})
        for test, values in run["kinds"].items():
            for kind, value in values.items():
                kinds.setdefault(kind, {}).setdefault(test, []).append(value)
    return found


# ---- tables -------------------------------------------------------------------------------------
def percent(values, learned=False):
    """A mean in percent, as text. Where there are several values, also their standard deviation
    and, with `learned`, how many of them are at least LEARNED."""
    if not values:
        return ""
    text = f"{100 * statistics.mean(values):.1f}"
    if len(values) > 1:
        text += f"±{100 * statistics.stdev(values):.1f}"
        if learned:
            text += f" ({sum(value >= LEARNED for value in values)}/{len(values)})"
    return text


def table(header, rows):
    """Rows of strings under a header, as Markdown in columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows)]
    rule = ["-" * (width - 1) + ":" for width in widths]
    rule[0] = "-" * widths[0]
    lines = []
    for row in [header, rule] + rows:
        cells = [cell.rjust(width) for cell, width in zip(row, widths)]
        cells[0] = row[0].ljust(widths[0])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def split_table(split, rows, kinds, near):
    """A row per model and settings, a column per test set: mean and spread over seeds. That in
    distribution says how many of several seeds have learned. Kinds of trials are indented."""
    tests = list(dict.fromkeys(test for row in rows.values() for test in row))
    lines = []
    for name, row in rows.items():
        lines.append([name] + [percent(row.get(test, []), test == near) for test in tests])
        for kind, shares in kinds.get((split, name), {}).items():
            lines.append([f"  {kind}"] + [percent(shares.get(test, [])) for test in tests])
    return table([f"{split}, accuracy in %"] + tests, lines)


def verdict(near, far):
    """Do seeds that have learned generalize? In words, with their mean on the hardest test set, or
    with that of all in distribution if none has. `near` and `far` are their accuracies there."""
    learned = [hard for easy, hard in zip(near, far) if easy >= LEARNED]
    seeds = f"({len(learned)}/{len(near)})"
    if not learned:
        return f"not learned {100 * statistics.mean(near):.1f} {seeds}"
    word = "yes" if statistics.mean(learned) >= LEARNED else "no"
    return f"{word} {100 * statistics.mean(learned):.1f} {seeds}"


def verdict_table(names, splits, ends):
    """A row per model and settings, a column per split."""
    lines = {name: [name] for name in names}
    header = ["does it generalize?"]
    for split, rows in splits.items():
        near, far = ends[split]
        header.append(f"{split}: {far}")
        for name, line in lines.items():
            line.append(verdict(rows[name][near], rows[name][far]) if name in rows else "")
    return table(header, [line for line in lines.values() if any(line[1:])])


def print_tables(runs, ends, per_operator):
    """A table per split, then the verdicts: on trials without shortcuts, then on their twins, which
    have them."""
    splits = collect(runs)
    kinds = collect_kinds(runs) if per_operator else {}
    for split, rows in splits.items():
        print(f"\n{split_table(split, rows, kinds, ends[split][0])}")
    names = dict.fromkeys(run["row"] for run in runs)
    for release in False, True:
        alike = {split: rows for split, rows in splits.items()
                 if split.endswith("_release") == release}
        if alike:
            print(f"\n{verdict_table(names, alike, ends)}")
    print("\nNot learned: less than 95 % in distribution (before rounding), which is the number "
          "shown. Baselines: models/RESULTS.md.")


# ---- pictures -----------------------------------------------------------------------------------
BRIGHT = "#ff5c5c #3ccf4e #6c9bff #ffe14d #bd7bff #ff9a2e #ffffff #ff9ad5 #3fe0e0 #c08457".split()
COLORS = """#1f77b4 #ff7f0e #2ca02c #d62728 #9467bd #8c564b #e377c2 #7f7f7f #bcbd22 #17becf
            #5254a3 #8ca252 #bd9e39 #ad494a #a55194 #637939""".split()  # of rows


def empty_figure(width, height):
    try:
        from matplotlib.figure import Figure  # not pyplot, which looks for a display
    except ImportError as error:
        raise UsageError("pictures need matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure, path):
    formats = figure.canvas.get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in formats:
        raise UsageError(f"cannot write {path}, but files in {', '.join(formats)}")
    figure.savefig(path, dpi=150, bbox_inches="tight")
    print(f"\nDrawn: {path}")


def colors_of(runs):
    """Row -> its color. UsageError if there are too many."""
    rows = dict.fromkeys(run["row"] for run in runs)
    if len(rows) > len(COLORS):
        raise UsageError(f"a picture of {len(rows)} rows cannot be read: name folders of at most "
                         f"{len(COLORS)}")
    return dict(zip(rows, COLORS))


def draw_accuracy(splits, ends, colors):
    """A column per split. Above, bars: light in distribution, dark on the hardest test set, hollow
    if no seed has learned, a dot per seed. Below, lines: means by test set. Baselines are dashed,
    above on the hardest test set."""
    names = list(colors)
    figure = empty_figure(3 + 2.2 * len(splits), 4 + 0.35 * len(names))
    axes = figure.subplots(2, len(splits), squeeze=False, sharey="row",
                           height_ratios=(0.5 + 0.35 * len(names), 2.5))
    dashed = {}
    for (split, rows), (bars, lines) in zip(splits.items(), axes.T):
        near, far = ends[split]
        for name, row in rows.items():
            means = {test: 100 * statistics.mean(values) for test, values in row.items()}
            if name in BASELINES:
                style = {"color": "0.3", "linestyle": BASELINES[name], "linewidth": 1}
                bars.axvline(means.get(far, math.nan), zorder=0, **style)
                dashed[name] = lines.plot(means.keys(), means.values(), label=name, **style)[0]
                continue
            y = names.index(name)
            lines.plot(means.keys(), means.values(), ".-", color=colors[name])
            for test, place, alpha in (near, -0.2, 0.4), (far, 0.2, 1):
                bars.barh(y + place, means[test], 0.4, alpha=alpha, color=colors[name],
                          edgecolor=colors[name], fill=max(row[near]) >= LEARNED)
                dots = [100 * value for value in row[test]]
                bars.plot(dots, [y + place] * len(dots), "k.", markersize=3)
        bars.set_title(f"{split}\nlight: {near}\ndark: {far}", fontsize="medium")
        bars.set(xlim=(0, 103), ylim=(len(names) - 0.5, -0.5), yticks=range(len(names)),
                 yticklabels=names)
        lines.set(ylim=(0, 103))
        lines.tick_params(axis="x", rotation=30, labelsize="small")
    for tick, color in zip(axes[0, 0].get_yticklabels(), colors.values()):
        tick.set_color(color)
    axes[1, 0].set_ylabel("accuracy in %")
    figure.legend(handles=list(dashed.values()), loc="outside lower center", ncols=3,
                  fontsize="small", title="hollow: not learned; lines: without solving the task",
                  title_fontsize="small")
    return figure


def draw_curves(runs, splits, ends, colors):
    """A panel per split: accuracy in distribution during training, of the few hundred trials that
    train.py tests on the way. A line per run, in a color per row, with its seed as marker."""
    figure = empty_figure(1 + 5 * len(splits), 4 + 0.2 * len(colors))
    axes = figure.subplots(1, len(splits), squeeze=False, sharey=True)[0]
    panels = dict(zip(splits, axes))
    handles = {}
    for run in runs:
        split = run["config"]["split"]
        near = run["config"]["in_distribution"]
        log = [line for line in run["log"] if near in line]
        steps = [line["step"] for line in log]
        accuracy = [line[near] for line in log]
        lines = panels[split].plot(
            steps, accuracy, label=run["row"], color=colors[run["row"]], linewidth=0.8,
            marker=f"${run['config']['seed']}$", markersize=6, markeredgewidth=0.3)
        handles[run["row"]] = lines[0]  # plot draws one line, in a list
    for split, axis in panels.items():
        near, _ = ends[split]
        axis.set(title=f"{split}: {near}", xlabel="training steps", ylim=(0, 103))
        for name in BASELINES:
            for value in splits[split].get(name, {}).get(near, []):
                handles[name] = axis.axhline(100 * value, color="0.3", linestyle=BASELINES[name],
                                             linewidth=1, zorder=0, label=name)
    axes[0].set_ylabel("accuracy in %")
    figure.legend(handles=list(handles.values()), loc="outside lower center", ncols=3,
                  fontsize="small", title="a line per run, numbers are seeds",
                  title_fontsize="small", markerscale=0)
    return figure


# ---- inside a model: where it looks -------------------------------------------------------------
class Call(NamedTuple):
    """A call of a module that a model names in `looks`."""
    name: str
    module: torch.nn.Module
    inputs: tuple
    output: torch.Tensor
    row: int | str  # of the token that answers; or "selectors", which all look
    groups: str  # what it looks at


@torch.no_grad()
def watch(model, instruction, stimulus):
    """The features of trials, and the Calls of the modules that a model names in `looks`, in the
    order of computing. "blocks" stands for blocks.0, blocks.1 and so on. UsageError if it names
    modules and none is called."""
    names = {module: name for name, module in model.named_modules()}
    calls = []
    looks = getattr(model, "looks", {})

    def note(module, inputs, output):
        name = names.get(module, "")  # "": made in forward
        part = re.sub(r"\.\d+$", "", name)
        if part in looks:
            row, groups = looks[part]
            calls.append(Call(name, module, inputs, output, row, groups))

    with torch.nn.modules.module.register_module_forward_hook(note):  # on every module
        features = model.features(instruction, stimulus)
    if looks and not calls:
        raise UsageError(f"the model has no modules {', '.join(looks)}, which its `looks` names")
    return features, calls


def keys_of(instruction, stimulus):
    """What a model can look at -> its tokens, in the order in which models read them: words, or the
    cells of objects."""
    names = list(data.OPERATORS)
    first = []
    second = []
    selectors = []
    for number, shape1, color1, shape2, color2 in instruction.tolist():
        first.append(f"{names[number - 1]} {data.words(shape1, color1)}".strip())
        second.append(f"{names[number - 1]} {data.words(shape2, color2)}".strip())
        if number != data.IF_ELSE:
            selectors += [first[-1], second[-1]]  # those of an operator side by side
    cells = [cell for cell, (shape, _) in zip(data.CELLS, stimulus.tolist()) if shape]
    return {"question": first + second + ["EOS of the question"],
            "operators": [key for key in first + second if key != "IfElse"],
            "selectors": selectors,
            "answers": [f"answer to {key}" for key in first if key != "IfElse"],
            "objects": cells, "grid": cells + ["empty cells", "EOS of the grid"]}


def attention_of(model, instruction, stimulus):
    """Where the token that answers looks, in one trial: (name, [(key, weight), ...]) of each block
    that a model names, in the order of computing; and the answer. Weights are means over heads. In
    LookTfmr and FindTfmr it is each selector that looks. KeyError or ValueError where a block has
    other tokens than the model says."""
    tokens = keys_of(instruction, stimulus)
    seen = []
    features, calls = watch(model, instruction[None], stimulus[None])
    for call in calls:
        block = call.module
        x, context, bias = call.inputs
        tokens["latents"] = [f"latent {i}" for i in range(context.shape[1])]
        keys = []
        for group in call.groups.split():
            keys += tokens[group]
        weights = block.attention.weights(block.norm1(x), block.norm1(context), bias)[0].mean(0)
        if call.row == "selectors":
            for title, shares in zip(tokens["selectors"], weights.tolist()):
                if title not in data.OPERATORS:  # "SumOdd" alone: no second selector
                    seen.append((title, list(zip(keys, shares, strict=True))))
        else:
            shares = weights[call.row].tolist()
            seen.append((call.name, list(zip(keys, shares, strict=True))))
    return seen, data.ANSWERS[model.readout(features).argmax()]


def draw_attention(run, subset, number):
    """Draws where the token that answers looks in a trial, in LoopTfmr with a row for each loop, or
    where each selector of LookTfmr or FindTfmr does. UsageError if the model has no `looks` at a
    grid, or the run was tested on other trials."""
    model, config = load(run["folder"])
    groups = " ".join(groups for _, groups in getattr(model, "looks", {}).values())
    if "grid" not in groups and "objects" not in groups:
        raise UsageError(f"{config['model']} has no attention to the grid that could be drawn "
                         "(models/README.md: `looks`): name the folder of another model")
    subset = subset or config["in_distribution"]
    trials = trials_of(run, subset, number + 1)
    instruction, stimulus, answer = (part[-1] for part in trials)
    seen, said = attention_of(model, instruction, stimulus)
    text = (f"{data.describe(data.evaluate(instruction, stimulus))}\n\nRight answer: "
            f"{data.ANSWERS[answer]}. The model says: {said}.\n{config['model']} "
            f"({config['settings']}), seed {config['seed']}; {config['split']}, {subset}, trial "
            f"{number}\nWhere the token that answers, or a selector, looks (in percent, mean over "
            "heads)\n")
    names = [name for name, _ in seen]
    loops = names.count(names[0])  # as often as the first block looks
    columns = len(seen) // loops if loops > 1 else min(len(seen), 2)
    rows = math.ceil(len(seen) / columns)
    figure = empty_figure(4.6 * columns, 2.6 * rows + 0.17 * text.count("\n"))
    figure.suptitle(text, x=0.01, ha="left", fontsize=9, family="monospace")
    for i, (name, look) in enumerate(seen):
        axis = figure.add_subplot(rows, columns, i + 1)
        loop = f", loop {i // columns + 1}" if loops > 1 else ""
        axis.set_title(name + loop, fontsize=9, loc="left")
        draw_look(axis, stimulus.tolist(), look)
    return figure


def draw_look(axis, stimulus, look):
    """The grid in shades of attention, and beside it the words that weigh most: ten at most, with
    0.5 % or more."""
    from matplotlib.patheffects import withStroke
    size = data.GRID
    seen = dict(look)
    shares = [seen.get(cell, 0) for cell in data.CELLS]
    edge = {"path_effects": [withStroke(linewidth=1.5, foreground="black")]}
    axis.pcolormesh(torch.tensor(shares).view(size, size), cmap="gray", vmin=-0.2, vmax=1.2,
                    edgecolors="0.35")
    ticks = {"ticks": [i + 0.5 for i in range(size)], "labels": range(size)}
    axis.set_xticks(**ticks)
    axis.set_yticks(**ticks)
    axis.tick_params(length=0, labelsize=5, pad=1)
    axis.spines[:].set_visible(False)
    axis.set(xlim=(0, 20), ylim=(size, 0), aspect="equal")
    for (row, column), (shape, color), share in zip(data.CELLS, stimulus, shares):
        if shape:
            axis.text(column + 0.5, row + 0.5, data.SHAPE_NAMES[shape - 1],
                      color=BRIGHT[color - 1], weight="bold", ha="center", va="center", **edge)
        if share >= 0.005:
            axis.text(column + 0.97, row + 0.95, f"{100 * share:.0f}", size=5, color="white",
                      ha="right", **edge)
    words = sorted(((share, key) for key, share in look if isinstance(key, str)), reverse=True)
    lines = [f"{100 * share:3.0f} % {key}" for share, key in words[:10] if share >= 0.005]
    axis.text(size + 0.5, 0, "\n".join(lines), size=8, va="top")


# ---- inside a model: what its states hold -------------------------------------------------------
PROBES, FIT = 500, 2_000  # trials per test set; to fit a linear map


def states(model, trials):
    """Place -> the states (n, C) of the token that a model names in `looks`, after each of these
    modules, blocks by their number in the order of computing, and the features. Selectors that look
    are no such token."""
    places = collections.defaultdict(list)
    for tokens in zip(trials.instruction.split(50), trials.stimulus.split(50)):
        features, calls = watch(model, *tokens)
        for number, call in enumerate(calls, 1):
            if call.row != "selectors":
                place = f"block {number}" if call.groups else call.name
                places[place].append(call.output[:, call.row])
        places["features"].append(features)
    return {place: torch.cat(parts).double() for place, parts in places.items()}


def similarity_ranks(x):
    """The ranks of the correlations of all pairs of rows (n, C); with a constant row it is 0. Equal
    correlations share a mean rank."""
    first, second = torch.triu_indices(len(x), len(x), 1)
    pairs = torch.corrcoef(x.double())[first, second].nan_to_num().round(decimals=5)
    _, group, size = pairs.unique(return_inverse=True, return_counts=True)  # groups of equal ones
    mean_rank = size.cumsum(0) - (size - 1) / 2  # of each group: its last rank is the cumsum
    return mean_rank[group].double()


def alignment(x, trials):
    """Representational similarity analysis (Ito et al. 2024): are states x (n, C) organized like
    stimuli, instructions, answers? Rank correlations of their similarities with those of one-hot
    codes; 0 where all are equal."""
    ranks = [similarity_ranks(x)]
    for part in trials.stimulus, trials.instruction, trials.answer[:, None]:
        ranks.append(similarity_ranks(F.one_hot(part).flatten(1)))
    return torch.corrcoef(torch.stack(ranks))[0, 1:].nan_to_num().tolist()


def decoding(x, trials, test_x, test_trials):
    """Linear decoding (Redhardt et al. 2025, Kobayashi et al. 2024): the mean share of operator,
    shape and color of the root's question that a linear map, fitted to states x, finds in
    test_x."""
    shares = []
    for i in range(3):  # a token's operator, shape, color
        y = trials.instruction[:, 0, i]
        answer = test_trials.instruction[:, 0, i]
        if y.any() and answer.any():  # 0: this root does not ask for it
            inputs = x[y > 0]
            targets = F.one_hot(y[y > 0]).double()
            mean = inputs.mean(0)
            # rtol: leave out directions in which states hardly differ
            matrix = torch.linalg.pinv(inputs - mean, rtol=1e-3) @ (targets - targets.mean(0))
            said = ((test_x[answer > 0] - mean) @ matrix + targets.mean(0)).argmax(1)
            shares.append((said == answer[answer > 0]).double().mean().item())
    return statistics.mean(shares)


def measure(run):
    """How the hidden states of a run are organized on the hardest test set, and what is decoded
    from each place, after training and before."""
    fit = trials_of(run, run["config"]["in_distribution"], FIT, seed=1)
    test = trials_of(run, run["config"]["hardest"], PROBES)
    found = {}
    for when, trained in ("untrained", False), ("decoded", True):
        model, _ = load(run["folder"], trained)
        x = states(model, fit)
        test_x = states(model, test)
        found[when] = {place: decoding(x[place], fit, test_x[place], test)
                       for place in x if place in test_x}  # depths differ in blocks, in LoopTfmr
        if trained:
            like = alignment(test_x["features"], test)
            found["alignment"] = dict(zip(("stimulus", "instruction", "answer"), like))
    return found


def measure_all(runs):
    """Measures the hidden states of runs with weights, once: result.json keeps what it finds.
    UsageError if no run has weights, and none was measured before."""
    if not any("why" in run for run in runs):
        with_weights(runs)  # for its UsageError
    todo = [run for run in runs if "why" not in run and (run["folder"] / "checkpoint.pt").exists()]
    for run in tqdm(todo, "measuring hidden states", leave=False, disable=None):
        run["why"] = measure(run)
        path = run["folder"] / "result.json"
        write(path, json.dumps(read(path) | {"why": run["why"]}, indent=1).encode())


def why_table(runs):
    """A row per split and model whose hidden states were measured, with means over these seeds. Two
    columns say what is decoded from the best place of each seed, the next what from features; these
    and accuracy have spreads."""
    rows = {}
    for run in runs:
        if "why" in run:
            rows.setdefault(f"{run['config']['split']}, {run['row']}", []).append(run)
    lines = []
    for name, seeds in rows.items():
        whys = [run["why"] for run in seeds]
        line = [name]
        for part in "stimulus", "instruction", "answer":
            line.append(f"{statistics.mean(why['alignment'][part] for why in whys):.2f}")
        line.append(percent([max(why["untrained"].values()) for why in whys]))
        line.append(percent([max(why["decoded"].values()) for why in whys]))
        line.append(percent([why["decoded"]["features"] for why in whys]))
        line.append(percent([run["accuracy"][run["config"]["hardest"]] for run in seeds]))
        lines.append(line)
    return table(["hidden states, on the hardest set", "like stimulus", "like instruction",
                  "like answer", "decoded before training", "after", "from features", "accuracy"],
                 lines)


# ---- the command line ---------------------------------------------------------------------------
def between(low, high, kind=int):
    """A type for argparse: the numbers of a kind, int or float, from low to high."""
    def convert(text):
        with contextlib.suppress(ValueError):
            value = kind(text)
            if low <= value <= high:
                return value
        name = "an integer" if kind is int else "a number"
        raise argparse.ArgumentTypeError(f"must be {name} from {low} to {high}, not {text}")
    return convert


def main(argv=None):
    parser = argparse.ArgumentParser(  # without usage, so that an error is one line
        description="Evaluate trained models: a table per split, then the verdicts.",
        usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("runs", nargs="*", default=[Path("runs")], type=Path, help="run folders, or folders above "
        "them (default: runs); rows are in this order")
    add("--per-operator", action="store_true", help="add a line per operator that answers, and per "
        "operator of the root's condition")
    add("--plot", metavar="FILE", help="draw accuracy (pictures need matplotlib)")
    add("--curves", metavar="FILE", help="draw accuracy in distribution during training, a line "
        "per run, of unfinished runs too")
    add("--show", type=between(0, 1000), default=0, metavar="N", help="print N trials that each "
        "model got wrong, of 1,000 (default: 0)")
    add("--why", action="store_true", help="add a table of hidden states: are they organized like "
        "the answer, and what of the question is decoded from them?")
    add("--attention", metavar="FILE", help="draw where the token that answers looks, in one trial "
        "of the first run that has weights")
    add("--trial", type=between(0, 9999), default=0, help="its number (default: 0)")
    add("--subset", help="the test set of --show (default: the hardest) and of --attention "
        "(default: the one in distribution)")
    args = parser.parse_args(argv)
    with data.ending(parser):
        runs = find_runs(args.runs)
        finished = [run for run in runs if run["accuracy"]]
        if len(finished) < len(runs):
            print(f"not finished: {len(runs) - len(finished)} of {len(runs)} runs; --curves draws "
                  "them, too", file=sys.stderr)
        ends = {run["config"]["split"]: run["ends"] for run in runs}
        if finished:
            print_tables(finished, ends, args.per_operator)
        if args.why:
            measure_all(finished)
            print(f"\n{why_table(finished)}")
        if args.show:
            for run in with_weights(finished, args.subset):
                print(f"\n{run['folder']}: {mistakes(run, args.show, args.subset)}")
        if args.plot and not finished:
            raise UsageError("none of these runs is finished: --curves draws them")
        if args.plot:
            save(draw_accuracy(collect(finished), ends, colors_of(finished)), args.plot)
        if args.curves:
            save(draw_curves(runs, collect(runs), ends, colors_of(runs)), args.curves)
        if args.attention:
            run = with_weights(finished, args.subset)[0]
            save(draw_attention(run, args.subset, args.trial), args.attention)


if __name__ == "__main__":
    main()
