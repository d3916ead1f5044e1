"""Evaluates trained models: tables, figures, mistakes, attention, hidden states.

    python eval.py models/recorded                   # a table per split, then a summary
    python eval.py runs/productive --per-operator    # ... and accuracy by operator
    python eval.py runs --plot accuracy.png          # bars per model, lines by test set
    python eval.py runs --curves curves.png          # accuracy during training, a line per seed
    python eval.py runs/distractor/sstfmr --show 3   # trials that the model got wrong
    python eval.py runs/productive/looptfmr --attention look.png --subset depth5
    python eval.py runs/productive/sstfmr --why      # what its hidden states hold

Accuracy is what train.py measured at the end of a run. The last three need its weights, --why only
the first time: result.json keeps what it measured. They build the model from the copy of its file
in the run's folder, so that an edit of models/ changes no run that is finished.
"""
import argparse
import collections
import contextlib
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
from pathlib import Path

import torch
from torch.nn import functional as F
from tqdm import tqdm

import data
from data import UsageError
from models import ALL, PAPER, module_of


# ---- what a number is compared with -------------------------------------------------------------
BASELINES = {"chance": ":", "no binding": "--", "condition-blind": "-."}  # and how they are drawn
LEARNED = 0.95  # in distribution


def test_set(split, test, n):
    """n Trials; kind of trial -> the numbers of its trials; baseline -> its accuracy."""
    subsets = (data.SPLITS[split][name] for name in (test, "train"))
    return solved_set(split, test, n, data.trials, *subsets)  # drawn anew where one of these is new


@functools.cache
def solved_set(split, test, n, draw, subset, train):
    known = train if subset.pools == train.pools else train._replace(pools=(data.Pool(),))
    made = draw(split, test, n)
    kinds = {start + operator + end: [] for start in ("", "if ") for operator in data.OPERATORS
             for end in ("", ", two objects")}  # in the order of OPERATORS
    baselines = collections.Counter()
    for i, (instruction, stimulus, answer) in enumerate(zip(*made)):
        solved = data.evaluate(instruction, stimulus)
        leaf = solved[data.descend(solved)[-1]]
        kinds[kind_of(leaf)].append(i)
        baselines["chance"] += chance(subset)[leaf.operator] / n
        baselines["no binding"] += no_binding(leaf, stimulus, known) / n
        if len(solved) > 1:
            kinds["if " + kind_of(solved[0])].append(i)
            answers = [node.answer for node in solved[len(solved) // 2:]]  # of the last level
            baselines["condition-blind"] += vote(answers, answer.item()) / n
    return made, {kind: found for kind, found in kinds.items() if found}, dict(baselines)


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
            share[operator].update({a: 1 / len(pool.leaves) / len(possible) for a in possible})
    return {name: max(counts.values()) / counts.total() for name, counts in share.items()}


def no_binding(node, stimulus, known):
    """The probability to answer a Solved operator right, for a reader who knows which objects a
    Subset pairs with it, and sees how often each shape and each color is on the grid among these
    objects, and in which cells they are, but not which belong together. True or False is a coin for
    this reader, unless there are shortcuts or objects that are never asked for. Then Exist is True
    if its shape and its color occur, and an operator on cells if it is True of these cells more
    often than of the whole grid."""
    objects = [(cell, shape, color) for cell, (shape, color) in zip(data.CELLS, stimulus.tolist())
               if shape]
    pools = [pool for pool in known.pools if node.operator in pool.leaves]
    kept = [(cell, shape, color) for cell, shape, color in objects
            if any(shape - 1 in pool.shapes and color - 1 in pool.colors for pool in pools)]
    cells, shapes, colors = zip(*(kept or objects))
    if node.operator == "GetLocation":
        return vote(cells, data.CELLS[node.answer - data.FIRST_CELL])
    if node.operator == "GetShape":
        return vote(shapes, node.answer - data.FIRST_SHAPE + 1)
    if node.operator == "GetColor":
        return vote(colors, node.answer - data.FIRST_COLOR + 1)
    if not known.shortcuts and len(cells) == len(objects):
        return 1 / 2  # companions and decoys leave only a coin
    if node.operator == "Exist":
        (shape, color), = node.selectors
        return float((shape in shapes and color in colors) == (node.answer == data.TRUE))
    here = share_true(node.operator, len(node.selectors), cells)
    anywhere = share_true(node.operator, len(node.selectors), tuple(data.CELLS))
    if here == anywhere:
        return 1 / 2
    return float((here > anywhere) == (node.answer == data.TRUE))  # half of all are True


@functools.lru_cache
def share_true(operator, number, cells):
    """The share of places for so many objects, among these cells, of which an operator is True."""
    holds = data.OPERATORS[operator].holds
    return statistics.fmean(bool(holds(places)) for places in itertools.permutations(cells, number))


def vote(values, answer):
    """The probability that a random one of the most frequent values is the answer."""
    best = statistics.multimode(values)
    return (answer in best) / len(best)


def tests_of(split):
    return [name for name in data.SPLITS[split] if name != "train"]


def near_and_far(split):
    """The last test set in distribution, with trials drawn like those of training, and the last one
    of all, the hardest, as SPLITS has them. UsageError if none is in distribution."""
    train = data.SPLITS[split]["train"]
    near = [name for name in tests_of(split)
            if data.SPLITS[split][name]._replace(depths=train.depths) == train
            and set(data.SPLITS[split][name].depths) <= set(train.depths)]
    if not near:
        raise UsageError(f"{split} needs a test set drawn like its training trials")
    return near[-1], tests_of(split)[-1]


# ---- accuracy -----------------------------------------------------------------------------------
def read(path):
    """What a run's JSON file or checkpoint holds. UsageError if it is damaged."""
    try:
        if path.suffix == ".pt":
            return torch.load(path, map_location="cpu", weights_only=True)
        return json.loads(path.read_text())
    except (ValueError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        raise UsageError(f"{path} is damaged: remove it, and train again") from error


def write(path, content):
    """Replaces a file in one step. If that fails, as on a full disk, the old one stays."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    os.replace(new, path)


def load(folder, trained=True):
    """The model of a finished run, ready to call, and its config. Or the same before training. It
    is built from the copy of the model's file in the folder."""
    folder = Path(folder)
    config = read(folder / "result.json")["config"]
    saved = read(folder / "checkpoint.pt")["model"] if trained else None
    try:
        torch.manual_seed(config["seed"])  # as in train.py
        model = module_of(config["model"], folder).Model(**config["model_args"])
        if trained:
            model.load_state_dict(saved)
    except RuntimeError as error:  # its weights have other sizes
        raise UsageError(f"{folder} does not fit today's data.py: was an operator added?"
                         ) from error
    return model.eval(), config


@torch.no_grad()
def predict(function, trials, device="cpu"):
    """The outputs of a model, or of its `features`, for trials (n, ...). Fifty at a time: at depth
    9 that is faster than a hundred. The model gets copies, which it may change."""
    outputs = []
    for tokens in zip(trials.instruction.split(50), trials.stimulus.split(50)):
        outputs.append(function(*(x.to(device, copy=True) for x in tokens)).cpu())
    return torch.cat(outputs)


def score(model, split, n, device):
    """On n trials of each test set: accuracy (0 to 1), baselines, accuracy by kind of trial.
    UsageError if logits are not finite: the largest of them would be no answer."""
    result = {"accuracy": {}, "baselines": {}, "kinds": {}}
    for test in tqdm(tests_of(split), f"testing {split}", leave=False,
                     disable=n < 1000 or None):  # None: where stderr is no terminal
        made, kinds, result["baselines"][test] = test_set(split, test, n)
        logits = predict(model, made, device)
        if not logits.isfinite().all():
            raise UsageError(f"on {test} of {split}, logits of the model are not finite")
        right = (logits.argmax(1) == made.answer).double()  # 95 of 100 are LEARNED
        result["accuracy"][test] = right.mean().item()
        result["kinds"][test] = {kind: right[where].mean().item() for kind, where in kinds.items()}
    return result


def mistakes(model, config, n, subset=None):
    """The first n trials that a model answers wrong, of 1,000 of a test set (default: the hardest),
    as text."""
    made = data.trials(config["split"], subset or near_and_far(config["split"])[1], 1000)
    said = predict(model, made).argmax(1)
    wrong = [f"{data.show(trial)}\nThe model says: {data.ANSWERS[answer]}"
             for trial, answer in zip(zip(*made), said) if answer != trial[2]]
    return "\n\n".join([f"{len(wrong)} of 1,000 are wrong.", *wrong[:n]])


# ---- tables -------------------------------------------------------------------------------------
MACHINE = "seed device python torch machine threads".split()  # may differ within a row


def runs_below(folders):
    """Folder -> result, of the finished runs in folders or below them. Below one folder, the
    paper's six come first, in its order, then our changes to them, then all other models. Lines on
    stderr say what is not shown. UsageError if nothing is left."""
    def rank(folder):
        name, settings = (runs[folder]["config"][key] for key in ("model", "settings"))
        place = ALL.index(name) if name in ALL else len(ALL)
        return name not in PAPER, name in PAPER and settings != "default", place, name, settings

    runs, order, seen = {}, [], set()
    for above in folders:
        found = glob.glob("**/result.json", root_dir=above, recursive=True)  # also behind links
        new = []
        for path in sorted(above / name for name in found):
            if path.resolve() not in seen:
                seen.add(path.resolve())
                new.append(path.parent)
                runs[path.parent] = read(path)
        shown = [folder for folder in new if runs[folder]["config"]["split"] in data.SPLITS]
        if len(shown) < len(new):
            print(f"not shown: runs in {above} of splits that are gone", file=sys.stderr)
        if not found:
            print(f"not shown: no finished run in {above}", file=sys.stderr)
        order += sorted(shown, key=rank)
    if not order:
        raise UsageError("there is nothing to show: train a run with train.py")
    return {folder: runs[folder] for folder in order}


def rows_of(runs):
    """(split, row) -> the results of its seeds. Baselines come first, from the most test trials.
    Then come models with their settings, and with their --out if there are several. A run that
    differs from those before it in config or code has a row of its own, which says in what. A seed
    that a row has already is left out, with a line on stderr."""
    rows, known = {}, collections.defaultdict(dict)  # known: how the runs of a row were made
    outs = {folder: folder.absolute().parents[:4][-1] for folder in runs}  # <out>/<split>/...
    common = Path(os.path.commonpath({*outs.values()}))
    common = common.parent if common in outs.values() else common
    for folder, result in runs.items():
        config = result["config"]
        split, row = config["split"], config["model"]
        if config["settings"] != "default":
            row += f" ({config['settings']})"
        if len({*outs.values()}) > 1:
            row = f"{outs[folder].relative_to(common).as_posix()}: {row}"
        made = {name: value for name, value in config.items() if name not in MACHINE}
        made |= {path.name: path.read_bytes() for path in folder.glob("*.py")}
        before = known[split, row]
        if other := [name for name in made if before.get(name, made[name]) != made[name]]:
            row += f", seed {config['seed']}, other {', '.join(other)}"
        else:
            before.update(made)
        seeds = rows.setdefault((split, row), {})
        if seeds.setdefault(config["seed"], result) is not result:
            print(f"not shown: {folder}, a seed that {split}, {row} has already", file=sys.stderr)
    rows = {key: [*seeds.values()] for key, seeds in rows.items()}
    for result in sorted(runs.values(), key=lambda result: -result["config"]["test_trials"]):
        for test, baselines in result["baselines"].items():
            for name, accuracy in baselines.items():  # at depth 1, none is condition-blind
                same, = rows.setdefault((result["config"]["split"], name),
                                        [{"accuracy": {}, "kinds": {}}])
                same["accuracy"].setdefault(test, accuracy)
    names = dict.fromkeys([*BASELINES, *(row for _, row in rows)])
    return {(split, row): rows[split, row] for row in names for split in data.SPLITS
            if (split, row) in rows}


def names_of(rows):
    """The splits, and the rows that are models, each once and in order."""
    splits, names = zip(*rows)
    return ([split for split in data.SPLITS if split in splits],
            [row for row in dict.fromkeys(names) if row not in BASELINES])


def accuracies(results, test, kind=""):
    """The accuracies on a test set, or on its trials of a kind, one per seed."""
    if kind:
        kinds = [result["kinds"].get(test, {}) for result in results]
        return [accuracy[kind] for accuracy in kinds if kind in accuracy]
    return [result["accuracy"][test] for result in results if test in result["accuracy"]]


def percent(values, learned=False):
    """A mean in percent, with its standard deviation where there are several values, as text. With
    `learned`, also how many of them are at least LEARNED."""
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
    widths, lines = [max(map(len, column)) for column in zip(header, *rows)], []
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    for row in [header, rule, *rows]:
        cells = [cell.rjust(width) for cell, width in zip(row, widths)]
        cells[0] = row[0].ljust(widths[0])
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def split_table(split, rows, per_operator):
    """A row per model and settings, mean and spread over seeds. A column per test set that any of
    them was tested on. That in distribution says how many of how many seeds have learned."""
    shown = {row: results for (of, row), results in rows.items() if of == split}
    tests = [test for test in tests_of(split)
             if any(accuracies(results, test) for results in shown.values())]
    near, lines = near_and_far(split)[0], []
    for row, results in shown.items():
        lines.append([row, *(percent(accuracies(results, test), test == near) for test in tests)])
        kinds = dict.fromkeys(kind for r in results for of in r["kinds"].values() for kind in of)
        for kind in kinds if per_operator else ():
            lines.append([f"  {kind}", *(percent(accuracies(results, test, kind))
                                         for test in tests)])
    return table([f"{split}, accuracy in %", *tests], lines)


def summary_table(splits, rows):
    """A row per model that was trained on several splits, a column per split: in distribution,
    with how many of how many seeds have learned -> hardest test set. Empty if there is no such
    model."""
    ends, lines = {split: near_and_far(split) for split in splits}, []
    for row in dict.fromkeys(row for split, row in rows if split in ends):
        cells = []
        for split, (near, far) in ends.items():
            results = rows.get((split, row), [])
            left = percent(accuracies(results, near), learned=True)
            right = percent(accuracies(results, far))
            cells.append(f"{left} -> {right}" if left else "")
        if sum(map(bool, cells)) > 1:
            lines.append([row, *cells])
    header = (f"{split}: {near} -> {far}" for split, (near, far) in ends.items())
    models = [line for line in lines if line[0] not in BASELINES]
    return table(["accuracy in %", *header], lines) if models else ""


# ---- pictures -----------------------------------------------------------------------------------
BRIGHT = "#ff5c5c #3ccf4e #6c9bff #ffe14d #bd7bff #ff9a2e #ffffff #ff9ad5 #3fe0e0 #c08457".split()


def empty_figure(width, height):
    try:
        from matplotlib.figure import Figure  # not pyplot, which looks for a display
    except ImportError as error:
        raise UsageError("pictures need matplotlib: pip install matplotlib") from error
    return Figure(figsize=(width, height), layout="constrained")


def save(figure, path):
    try:
        figure.savefig(path, dpi=150, bbox_inches="tight")
    except ValueError as error:  # there is no such format
        raise UsageError(f"cannot write {path}: {error}") from error
    print(f"\nDrawn: {path}")


def colors_of(rows):
    """Row -> its color: for a model of ALL the same in all pictures, darker for a further row."""
    from matplotlib import colormaps
    ten, colors = colormaps["tab10"].colors, {}
    shades, order = collections.Counter(), {model: place for place, model in enumerate(ALL)}
    for (_, row), results in rows.items():
        if row not in BASELINES and row not in colors:
            place = order.setdefault(results[0]["config"]["model"], len(order)) % len(ten)
            colors[row] = tuple(0.7 ** shades[place] * part for part in ten[place])
            shades[place] += 1
    return colors


def draw_accuracy(rows):
    """A column per split. Above, bars: light in distribution, dark on the hardest test set, a dot
    per seed. Below, lines: means by test set, in the colors of the bars. Baselines are dashed, and
    beside a bar those of its test set."""
    splits, models = names_of(rows)
    figure, dashed = empty_figure(3 + 2.2 * len(splits), 4 + 0.35 * len(models)), {}
    colors = colors_of(rows)
    axes = figure.subplots(2, len(splits), squeeze=False, sharey="row",
                           height_ratios=(0.5 + 0.35 * len(models), 2.5))
    columns = dict(zip(splits, axes.T))
    for (split, row), results in rows.items():
        (bars, lines), (near, far), tests = columns[split], near_and_far(split), tests_of(split)
        seeds = {test: [100 * share for share in accuracies(results, test)] for test in tests}
        means = {test: statistics.mean(seeds[test] or [math.nan]) for test in tests}
        halves = (near, -0.2, 0.4), (far, 0.2, 1)  # of a row: test set, place, opacity
        if row in BASELINES:
            style = {"color": "0.3", "linestyle": BASELINES[row], "linewidth": 1}
            for test, place, _ in halves:
                for y in range(len(models)):
                    bars.vlines(means[test], y + place - 0.2, y + place + 0.2, zorder=0, **style)
            dashed[row], = lines.plot(tests, means.values(), label=row, **style)
            continue
        y, color = models.index(row), colors[row]
        for test, place, alpha in halves:
            bars.barh(y + place, means[test], 0.4, color=color, alpha=alpha)
            bars.plot(seeds[test], [y + place] * len(seeds[test]), "k.", markersize=3)
        lines.plot(tests, means.values(), ".-", color=color)
    for split, (bars, lines) in columns.items():
        near, far = near_and_far(split)
        bars.set_title(f"{split}\nlight: {near}\ndark: {far}", fontsize="medium")
        bars.set(xlim=(0, 103), ylim=(len(models) - 0.5, -0.5), yticks=range(len(models)),
                 yticklabels=models)
        lines.set(ylim=(0, 103))
        lines.tick_params(axis="x", rotation=30, labelsize="small")
    for i, tick in enumerate(axes[0, 0].get_yticklabels()):
        tick.set_color(colors[models[i]])
    axes[1, 0].set_ylabel("accuracy in %")
    figure.legend(handles=[*dashed.values()], loc="outside lower center", ncols=3, fontsize="small",
                  title="what one can have without solving the task", title_fontsize="small")
    return figure


def draw_curves(rows):
    """A panel per split: accuracy in distribution during training, of the few hundred trials that
    train.py tests on the way. A line per run, in a color per row, with its seed as marker."""
    splits, models = names_of(rows)
    figure, handles = empty_figure(1 + 5 * len(splits), 4 + 0.2 * len(models)), {}
    colors = colors_of(rows)
    panels = dict(zip(splits, figure.subplots(1, len(splits), squeeze=False, sharey=True)[0]))
    for (split, row), results in rows.items():
        axis, near = panels[split], near_and_far(split)[0]
        axis.set(title=f"{split}: {near}", xlabel="training steps", ylim=(0, 103))
        if row in BASELINES:
            for share in accuracies(results, near):
                handles[row] = axis.axhline(100 * share, color="0.3", linestyle=BASELINES[row],
                                            linewidth=1, zorder=0, label=row)
            continue
        for result in results:
            log = [line for line in result["log"] if near in line]
            handles[row], = axis.plot(
                [line["step"] for line in log], [100 * line[near] for line in log], label=row,
                color=colors[row], linewidth=0.8, marker=f"${result['config']['seed']}$",
                markersize=6, markeredgewidth=0.3)
    panels[splits[0]].set_ylabel("accuracy in %")
    figure.legend(handles=[*handles.values()], loc="outside lower center", ncols=3,
                  fontsize="small", title="a line per run, numbers are seeds",
                  title_fontsize="small", markerscale=0)
    return figure


# ---- inside a model: where it looks -------------------------------------------------------------
@torch.no_grad()
def watch(model, instruction, stimulus):
    """The features of trials, and the calls of the modules that a model names in `looks`, in the
    order of computing: (name, module, inputs, output, row of a token, what it looks at). "blocks"
    stands for blocks.0, blocks.1 and so on."""
    names, calls = {module: name for name, module in model.named_modules()}, []
    looks = getattr(model, "looks", {})

    def note(module, inputs, output):
        part = re.sub(r"\.\d+$", "", names[module])
        if part in looks:
            calls.append((names[module], module, inputs, output, *looks[part]))

    with torch.nn.modules.module.register_module_forward_hook(note):  # on every module
        return model.features(instruction, stimulus), calls


def keys_of(instruction, stimulus):
    """What a model can look at -> its tokens, in the order in which models read them: words, or the
    cells of objects."""
    names, shapes = ["", *data.OPERATORS], ["", *(f" {shape}" for shape in data.SHAPE_NAMES)]
    colors = ["", *(f" {color}" for color in data.COLOR_NAMES)]  # 0 is nothing
    tokens = instruction.tolist()
    first = [names[name] + colors[color] + shapes[shape] for name, shape, color, _, _ in tokens]
    second = [names[name] + colors[color] + shapes[shape] for name, _, _, shape, color in tokens]
    cells = [cell for cell, (shape, _) in zip(data.CELLS, stimulus.tolist()) if shape]
    empty = ["empty cells"] if len(cells) < len(data.CELLS) else []
    return {"question": [*first, *second, "EOS of the question"],
            "operators": [key for key in first + second if key != "IfElse"],
            "answers": [f"answer to {key}" for key in first if key != "IfElse"],
            "grid": [*cells, *empty, "EOS of the grid"]}


def attention_of(model, instruction, stimulus):
    """Where the token that answers looks, in one trial: (name, [(key, weight), ...]) of each block
    that a model names, in the order of computing; and the answer. Weights are means over heads.
    UsageError where a block has other tokens than the model says."""
    tokens, seen = keys_of(instruction, stimulus), []
    features, calls = watch(model, instruction[None], stimulus[None])
    for name, block, (x, context, bias), _, row, groups in calls:
        tokens["latents"] = [f"latent {i}" for i in range(context.shape[1])]
        keys = [key for group in groups.split() for key in tokens[group]]
        weights = block.attention.weights(block.norm1(x), block.norm1(context), bias)
        weights = weights[0].mean(0)[row].tolist()
        if len(weights) != len(keys):
            raise UsageError(f"{name} looks at {len(weights)} tokens, but {groups!r} in `looks` "
                             f"are {len(keys)}")
        seen.append((name, [*zip(keys, weights)]))
    return seen, data.ANSWERS[model.readout(features).argmax()]


def draw_attention(folder, subset, number):
    """Draws where the token that answers looks in a trial, in LoopTfmr with a row for each loop."""
    model, config = load(folder)
    if not any("grid" in groups for _, groups in getattr(model, "looks", {}).values()):
        raise UsageError(f"{config['model']} has no attention to the grid that could be drawn "
                         "(models/README.md: `looks`)")
    subset = subset or near_and_far(config["split"])[0]
    trials = data.trials(config["split"], subset, number + 1)
    instruction, stimulus, answer = (part[-1] for part in trials)
    seen, said = attention_of(model, instruction, stimulus)
    text = (f"{data.describe(data.evaluate(instruction, stimulus))}\n\nRight answer: "
            f"{data.ANSWERS[answer]}. The model says: {said}.\n{config['model']} "
            f"({config['settings']}), seed {config['seed']}; {config['split']}, {subset}, trial "
            f"{number}\nAttention of the token that answers, in percent (mean over heads)\n")
    rows = sum(name == seen[0][0] for name, _ in seen)  # loops: as often as the first one looks
    columns = math.ceil(len(seen) / rows)
    figure = empty_figure(4.6 * columns, 2.6 * rows + 0.17 * text.count("\n"))
    figure.suptitle(text, x=0.01, ha="left", fontsize=9, family="monospace")
    for i, (name, look) in enumerate(seen):
        axis = figure.add_subplot(rows, columns, i + 1)
        loop = f", loop {i // columns + 1}" if rows > 1 else ""
        axis.set_title(name + loop, fontsize=9, loc="left")
        draw_look(axis, stimulus.tolist(), look)
    return figure


def draw_look(axis, stimulus, look):
    """The grid in shades of attention, and beside it the ten words that weigh most."""
    from matplotlib.patheffects import withStroke
    size, seen = data.GRID, dict(look)
    shares = [seen.get(cell, 0) for cell in data.CELLS]
    edge = {"path_effects": [withStroke(linewidth=1.5, foreground="black")]}
    axis.pcolormesh(torch.tensor(shares).view(size, size), cmap="gray", vmin=-0.2, vmax=1.2,
                    edgecolors="0.35")
    axis.set(xlim=(0, 20), ylim=(size, 0), aspect="equal")
    axis.set_axis_off()
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
    """Place -> the states (n, C) of the tokens that a model names in `looks`, after each of these
    modules, blocks by their number in the order of computing, and the features. Left out are blocks
    that not all trials have: FindTfmr loops until its answers stay."""
    places = collections.defaultdict(list)
    for tokens in zip(trials.instruction.split(50), trials.stimulus.split(50)):
        features, calls = watch(model, *tokens)
        for number, (name, _, _, output, row, groups) in enumerate(calls, 1):
            places[f"block {number}" if groups else name].append(output[:, row])
        places["features"].append(features)
    whole = {place: torch.cat(parts).double() for place, parts in places.items()}
    return {place: x for place, x in whole.items() if len(x) == len(trials.answer)}


def similarity_ranks(x):
    """The ranks of the correlations of all pairs of rows (n, C); with a constant row it is 0. Equal
    correlations share a mean rank."""
    first, second = torch.triu_indices(len(x), len(x), 1)
    pairs = torch.corrcoef(x.double())[first, second].nan_to_num().round(decimals=5)
    _, place, count = pairs.unique(return_inverse=True, return_counts=True)
    return (count.cumsum(0) - (count - 1) / 2)[place].double()


def alignment(x, trials):
    """Representational similarity analysis (Ito et al. 2024): are states x (n, C) organized like
    stimuli, instructions, answers? Rank correlations of their similarities with those of one-hot
    codes; 0 where all are equal."""
    parts = trials.stimulus, trials.instruction, trials.answer[:, None]
    ranks = [similarity_ranks(x), *(similarity_ranks(F.one_hot(part).flatten(1)) for part in parts)]
    return torch.corrcoef(torch.stack(ranks))[0, 1:].nan_to_num().tolist()


def decoding(x, trials, test_x, test_trials):
    """Linear decoding (Redhardt et al. 2025, Kobayashi et al. 2024): the mean share of operator,
    shape and color of the root's question that a linear map, fitted to states x, finds in
    test_x."""
    shares = []
    for i in range(3):  # a token's operator, shape, color
        y, answer = trials.instruction[:, 0, i], test_trials.instruction[:, 0, i]
        if y.any() and answer.any():  # 0: this root does not ask for it
            inputs, targets = x[y > 0], F.one_hot(y[y > 0]).double()
            mean = inputs.mean(0)
            # rtol: leave out directions in which states hardly differ
            matrix = torch.linalg.pinv(inputs - mean, rtol=1e-3) @ (targets - targets.mean(0))
            said = ((test_x[answer > 0] - mean) @ matrix + targets.mean(0)).argmax(1)
            shares.append((said == answer[answer > 0]).double().mean().item())
    return statistics.mean(shares)


def measure(folder):
    """How the hidden states of a run are organized on the hardest test set, and what is decoded
    from each place, after training and before."""
    found = {}
    for when, trained in ("untrained", False), ("decoded", True):
        model, config = load(folder, trained)
        near, far = near_and_far(config["split"])
        fit = data.trials(config["split"], near, FIT, seed=1)
        test = data.trials(config["split"], far, PROBES)
        x, test_x = states(model, fit), states(model, test)
        found[when] = {place: decoding(x[place], fit, test_x[place], test)
                       for place in x if place in test_x}  # depths differ in blocks, in LoopTfmr
    found["alignment"] = dict(zip(("stimulus", "instruction", "answer"),
                                  alignment(test_x["features"], test)))  # of the trained one
    return found


def why_table(rows):
    """A row per split and model whose hidden states were measured, with means over these seeds. Two
    columns say what is decoded from the best place of each seed, the next what from features."""
    lines = []
    for (split, row), results in rows.items():
        results = [result for result in results if "why" in result]
        if seeds := [result["why"] for result in results]:
            like = [statistics.mean(seed["alignment"][part] for seed in seeds)
                    for part in ("stimulus", "instruction", "answer")]
            lines.append([f"{split}, {row}", *(f"{r:.2f}" for r in like),
                          percent([max(seed["untrained"].values()) for seed in seeds]),
                          percent([max(seed["decoded"].values()) for seed in seeds]),
                          percent([seed["decoded"]["features"] for seed in seeds]),
                          percent(accuracies(results, near_and_far(split)[1]))])
    return table(["hidden states, on the hardest set", "like stimulus", "like instruction",
                  "like answer", "decoded before training", "after", "from features", "accuracy"],
                 lines)


# ---- the command line ---------------------------------------------------------------------------
def between(low, high):
    """A type for argparse: the numbers from low to high, whole ones unless high is a float."""
    def convert(text):
        with contextlib.suppress(ValueError):
            if low <= (value := type(high)(text)) <= high:
                return value
        kind = "an integer" if isinstance(high, int) else "a number"
        raise argparse.ArgumentTypeError(f"must be {kind} from {low} to {high}, not {text}")
    return convert


def main(argv=None):
    parser = argparse.ArgumentParser(  # without usage, so that an error is one line
        description="Evaluate trained models: a table per split, then a summary.",
        usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("runs", nargs="*", default=[Path("runs")], type=Path, help="run folders, or folders above "
        "them (default: runs); rows are in this order")
    add("--per-operator", action="store_true", help="add a line per operator that answers, and per "
        "operator of the root's condition")
    add("--plot", metavar="FILE", help="draw accuracy (pictures need matplotlib)")
    add("--curves", metavar="FILE", help="draw accuracy in distribution during training, a line "
        "per run")
    add("--show", type=between(0, 1000), default=0, metavar="N", help="print N trials that each "
        "model got wrong, of 1,000 (default: 0)")
    add("--why", action="store_true", help="add a table of hidden states: are they organized like "
        "the answer, and what of the question is decoded from them?")
    add("--attention", metavar="FILE", help="draw where the token that answers looks, in one trial "
        "of the first run that has weights")
    add("--trial", type=between(0, 9999), default=0, help="its number (default: 0)")
    add("--subset", help="the test set of --show (default: the hardest) and of --attention "
        "(default: the last one in distribution)")
    args = parser.parse_args(argv)
    with data.ending(parser):
        runs = runs_below(args.runs)
        weights = [folder for folder in runs if (folder / "checkpoint.pt").exists()]
        new = [folder for folder in weights if args.why and "why" not in runs[folder]]
        for folder in tqdm(new, "measuring hidden states", leave=False, disable=None):
            runs[folder]["why"] = measure(folder)
            write(folder / "result.json", json.dumps(runs[folder], indent=1).encode())
        unmeasured = args.why and not any("why" in result for result in runs.values())
        if (args.show or args.attention or unmeasured) and not weights:
            recorded = Path(__file__).parent.glob("models/recorded/**/checkpoint.pt")
            has = ", ".join(sorted(os.path.relpath(path.parent) for path in recorded))
            raise UsageError(f"these runs have no weights (checkpoint.pt). These have: {has}")
        rows = rows_of(runs)
        splits, _ = names_of(rows)
        for split in splits:
            print(f"\n{split_table(split, rows, args.per_operator)}")
        for release in False, True:  # trials without shortcuts, then their twins
            ground = [split for split in splits if split.endswith("_release") == release]
            if summary := summary_table(ground, rows):
                print(f"\n{summary}")
        if args.why:
            print(f"\n{why_table(rows)}")
        for folder in weights if args.show else ():
            print(f"\n{folder}: {mistakes(*load(folder), args.show, args.subset)}")
        if args.plot:
            save(draw_accuracy(rows), args.plot)
        if args.curves:
            save(draw_curves(rows), args.curves)
        if args.attention:
            save(draw_attention(weights[0], args.subset, args.trial), args.attention)


if __name__ == "__main__":
    main()
