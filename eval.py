"""Evaluates trained models: tables, figures, mistakes, attention, hidden states.

    python eval.py models/recorded                   # a table per split, then a summary
    python eval.py runs/productive --per-operator    # ... and accuracy by operator
    python eval.py runs --plot accuracy.png          # bars per model, lines by test set
    python eval.py runs/distractor/sstfmr --show 3   # trials that the model got wrong
    python eval.py runs/productive/looptfmr --attention look.png --subset depth5
    python eval.py runs/productive/sstfmr --why      # what its hidden states hold

Accuracy is what train.py measured at the end of a run. The last three need its weights, --why only
the first time: result.json keeps what it measured.
"""
import argparse
import collections
import contextlib
import functools
import itertools
import json
import math
import os
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


@functools.cache
def test_set(split, name, n):
    """n Trials; kind of trial -> the numbers of its trials; baseline -> its accuracy."""
    made, subset = data.trials(split, name, n), data.SPLITS[split][name]
    kinds = {start + operator + end: [] for start in ("", "if ") for operator in data.OPERATORS
             for end in ("", ", two objects")}  # in the order of the table
    baselines = collections.Counter()
    for i, (instruction, stimulus, answer) in enumerate(zip(*made)):
        solved = data.evaluate(instruction, stimulus)
        leaf = solved[data.descend(solved)[-1]]
        kinds[kind_of(leaf)].append(i)
        baselines["chance"] += chance(subset)[leaf.operator] / n
        baselines["no binding"] += no_binding(leaf, stimulus, subset.shortcuts) / n
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


def no_binding(node, stimulus, shortcuts):
    """The probability to answer a Solved operator right, for a reader who sees how often each shape
    and each color is on the grid, and in which cells objects are, but not which belong together.
    (With shortcuts, Exist is True for this reader where its shape and its color occur.)"""
    cells = [cell for cell, (shape, _) in zip(data.CELLS, stimulus.tolist()) if shape]
    shapes, colors = stimulus[stimulus[:, 0] > 0].T.tolist()
    if node.operator == "GetLocation":
        return 1 / len(cells)
    if node.operator == "GetShape":
        return vote(shapes, node.answer - data.FIRST_SHAPE + 1)
    if node.operator == "GetColor":
        return vote(colors, node.answer - data.FIRST_COLOR + 1)
    if not shortcuts:  # companions and decoys leave only a coin
        return 1 / 2
    if node.operator == "Exist":
        (shape, color), = node.selectors
        return float((shape in shapes and color in colors) == (node.answer == data.TRUE))
    here = share_true(node.operator, len(node.selectors), tuple(cells))
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
    """The last test set in distribution, whose trials are drawn like those of training, and the
    last one of all, the hardest. UsageError if none is in distribution."""
    train = data.SPLITS[split]["train"]
    near = [name for name in tests_of(split)
            if data.SPLITS[split][name]._replace(depths=train.depths) == train
            and set(data.SPLITS[split][name].depths) <= set(train.depths)]
    if not near:
        raise UsageError(f"{split} needs a test set drawn like its training trials")
    return near[-1], tests_of(split)[-1]


# ---- accuracy -----------------------------------------------------------------------------------
def read(path):
    """What a run's JSON file or checkpoint holds."""
    if path.suffix == ".pt":
        return torch.load(path, map_location="cpu", weights_only=True)
    return json.loads(path.read_text())


def write(path, content):
    """Replaces a file in one step. If that fails, as on a full disk, the old one stays."""
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    os.replace(new, path)


def load(folder, trained=True):
    """The model of a finished run, ready to call, and its config. Or the same before training."""
    folder = Path(folder)
    config = read(folder / "result.json")["config"]
    saved = read(folder / "checkpoint.pt")["model"] if trained else None
    try:
        torch.manual_seed(config["seed"])  # as in train.py
        model = module_of(config["model"]).Model(**config["model_args"])
        if trained:
            model.load_state_dict(saved)
    except (TypeError, RuntimeError) as error:  # of its arguments, of its weights
        raise UsageError(f"{folder} does not fit today's models/{config['model']}.py and data.py: "
                         "was an operator added, or the model changed?") from error
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
    """On n trials of each test set: accuracy (0 to 1), baselines, accuracy by kind of trial."""
    result = {"accuracy": {}, "baselines": {}, "kinds": {}}
    for name in tqdm(tests_of(split), f"testing {split}", leave=False,
                     disable=n < 1000 or None):  # None: where stderr is no terminal
        made, kinds, result["baselines"][name] = test_set(split, name, n)
        right = (predict(model, made, device).argmax(1) == made.answer).float()
        result["accuracy"][name] = right.mean().item()
        result["kinds"][name] = {kind: right[where].mean().item() for kind, where in kinds.items()}
    return result


def mistakes(model, config, n):
    """The first n trials that a model answers wrong, of 1,000 of the hardest test set, as text."""
    made = data.trials(config["split"], near_and_far(config["split"])[1], 1000)
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
    def rank(run):
        name, settings = run[1]["config"]["model"], run[1]["config"]["settings"]
        place = ALL.index(name) if name in ALL else len(ALL)
        return name not in PAPER, name in PAPER and settings != "default", place, name, settings

    runs = {}
    for above in folders:
        found = {path.parent: read(path) for path in sorted(above.rglob("result.json"))}
        shown = [run for run in found.items() if run[1]["config"]["split"] in data.SPLITS]
        if len(shown) < len(found):
            print(f"not shown: runs in {above} of splits that are gone", file=sys.stderr)
        if not found:
            print(f"not shown: no finished run in {above}", file=sys.stderr)
        runs.update(sorted(shown, key=rank))
    if not runs:
        raise UsageError("there is nothing to show: train a run with train.py")
    return runs


def rows_of(runs):
    """Label of a row -> split -> the results of its seeds. Baselines come first, as if they were
    models. Where --outs differ, labels name them. Runs of one name that differ in config or in
    their copies of the code have rows of their own, which say in what they differ."""
    rows, first = {name: {} for name in BASELINES}, {}  # first: label, split -> identity
    outs = {out_of(folder) for folder in runs}
    for folder, result in runs.items():
        config = result["config"]
        label, split = config["model"], config["split"]
        if config["settings"] != "default":
            label += f" ({config['settings']})"
        if len(outs) > 1:
            label = f"{out_of(folder)}: {label}"
        identity = {name: value for name, value in config.items() if name not in MACHINE}
        identity |= {path.name: path.read_bytes() for path in folder.glob("*.py")}
        while (known := first.setdefault((label, split), identity)) != identity:
            other = [name for name in known | identity if known.get(name) != identity.get(name)]
            label += f", other {', '.join(other)}"
        rows.setdefault(label, {}).setdefault(split, {}).setdefault(config["seed"], result)
        for test, baselines in result["baselines"].items():
            for name, accuracy in baselines.items():  # at depth 1, none is condition-blind
                row = rows[name].setdefault(split, {0: {"accuracy": {}, "kinds": {}}})
                row[0]["accuracy"].setdefault(test, accuracy)
    return {label: {split: [*seeds.values()] for split, seeds in by_split.items()}
            for label, by_split in rows.items()}


def in_split(rows, split):
    """Label -> the results of its seeds, of the rows that have any in a split."""
    return {label: by_split[split] for label, by_split in rows.items() if split in by_split}


def out_of(folder):
    """The name of the --out above a run folder, <out>/<split>/<model>/<settings>/seed<k>."""
    return folder.absolute().parts[-5:][0]


def accuracies(results, test):
    """The accuracies on a test set, one per seed."""
    return [result["accuracy"][test] for result in results if test in result["accuracy"]]


def percent(values):
    """A mean in percent, with its standard deviation where there are several values, as text."""
    values = [100 * value for value in values]
    spread = f"±{statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}" if values else ""


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
    them was tested on."""
    rows, lines = in_split(rows, split), []
    tests = [test for test in tests_of(split)
             if any(accuracies(results, test) for results in rows.values())]
    for label, results in rows.items():
        label += f", {len(results)} seeds" if len(results) > 1 else ""
        lines.append([label, *(percent(accuracies(results, test)) for test in tests)])
        kinds = dict.fromkeys(kind for r in results for of in r["kinds"].values() for kind in of)
        for kind in kinds if per_operator else ():
            cells = [[r["kinds"][test][kind] for r in results if kind in r["kinds"].get(test, ())]
                     for test in tests]
            lines.append([f"  {kind}", *map(percent, cells)])
    return table([f"{split}, accuracy in %", *tests], lines)


def summary_table(splits, rows):
    """A row per model that was trained on several splits, a column per split: in distribution ->
    hardest test set, this one with its spread over seeds. Empty if there is no such model."""
    ends, lines = {split: near_and_far(split) for split in splits}, []
    for label, by_split in rows.items():
        if len(by_split.keys() & ends) > 1:
            cells = [[percent(accuracies(by_split.get(split, []), test)) for test in ends[split]]
                     for split in splits]
            lines.append([label, *(f"{near.partition('±')[0]} -> {far}" if near else ""
                                   for near, far in cells)])
    header = (f"{split}: {near} -> {far}" for split, (near, far) in ends.items())
    models = [label for label, *_ in lines if label not in BASELINES]
    return table(["accuracy in %", *header], lines) if models else ""


# ---- pictures -----------------------------------------------------------------------------------
BRIGHT = "#ff5c5c #3ccf4e #6c9bff #ffe14d #bd7bff #ff9a2e #ffffff #ff9ad5 #3fe0e0 #c08457".split()


@contextlib.contextmanager
def drawing(path, width, height):
    """An empty figure, which is written to `path` at the end."""
    try:
        from matplotlib.figure import Figure  # not pyplot, which looks for a display
    except ImportError as error:
        raise UsageError("pictures need matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    yield figure
    try:
        figure.savefig(path, dpi=150, bbox_inches="tight")
    except ValueError as error:  # there is no such format
        raise UsageError(f"cannot write {path}: {error}") from error
    print(f"\nDrawn: {path}")


def draw_accuracy(figure, splits, rows):
    """A column per split. Above, bars: light in distribution, dark on the hardest test set, a dot
    per seed. Below, lines: means by test set, in the colors of the bars. Baselines are dashed."""
    labels, dashed = [label for label in rows if label not in BASELINES], {}
    axes = figure.subplots(2, len(splits), squeeze=False, sharey="row",
                           height_ratios=(0.5 + 0.35 * len(labels), 2.5))
    for bars, lines, split in zip(*axes, splits):
        (near, far), tests = near_and_far(split), tests_of(split)
        for label, results in in_split(rows, split).items():
            seeds = {test: [100 * a for a in accuracies(results, test)] for test in tests}
            means = [statistics.mean(seeds[test] or [math.nan]) for test in tests]
            if label in BASELINES:
                style = {"color": "0.3", "linestyle": BASELINES[label], "linewidth": 1}
                bars.axvline(means[-1], zorder=0, **style)
                dashed[label], = lines.plot(tests, means, label=label, **style)
                continue
            y, color = labels.index(label), f"C{labels.index(label)}"
            for test, place, alpha in (near, y - 0.2, 0.4), (far, y + 0.2, 1):
                bars.barh(place, means[tests.index(test)], 0.4, color=color, alpha=alpha)
                bars.plot(seeds[test], [place] * len(seeds[test]), "k.", markersize=3)
            lines.plot(tests, means, ".-", color=color)
        bars.set_title(f"{split}\nlight: {near}\ndark: {far}", fontsize="medium")
        bars.set(xlim=(0, 103), ylim=(len(labels) - 0.5, -0.5), yticks=range(len(labels)),
                 yticklabels=labels)
        lines.set(ylim=(0, 103))
        lines.tick_params(axis="x", rotation=30, labelsize="small")
    for i, tick in enumerate(axes[0, 0].get_yticklabels()):
        tick.set_color(f"C{i}")
    axes[1, 0].set_ylabel("accuracy in %")
    figure.legend(handles=[*dashed.values()], loc="outside lower center", ncols=3, fontsize="small",
                  title="what one can have without solving the task (above: on the hardest set)",
                  title_fontsize="small")


# ---- inside a model: where it looks -------------------------------------------------------------
@torch.no_grad()
def calls(model, instruction, stimulus, kind):
    """The features of trials, and what computed the token that answers: (name, module, inputs,
    output, row of that token) of each call of a module of a class, in the order of computing."""
    reader = getattr(model, "encode_instruction", model)  # the part that chooses a token
    usual = getattr(reader, "read", None) or 0  # -1: EOS; 0: the root, or the first latent
    names, found = {module: name for name, module in model.named_modules()}, []

    def note(module, inputs, output):
        part = getattr(model, names[module].partition(".")[0], None)
        row = getattr(part, "read", usual)  # None: an encoder of which all tokens go on
        if type(module).__name__ == kind and row is not None:
            found.append((names[module], module, inputs, output, row))

    with torch.nn.modules.module.register_module_forward_hook(note):  # on every module
        return model.features(instruction, stimulus), found


def keys_of(model, instruction, stimulus):
    """The tokens of a question and of a grid, in the order in which a model reads them. A key is a
    cell with an object, or words."""
    names, letters = ["", *data.OPERATORS], ["", *(f" {letter}" for letter in data.LETTERS)]
    colors = ["", *(f" {color}" for color in data.COLOR_NAMES)]  # 0 is nothing
    loops, tokens = hasattr(model, "answers"), instruction.tolist()
    if loops:  # LoopTfmr has no IfElses and no EOS
        tokens = [token for token in tokens if token[0] != data.IF_ELSE]
    first = [names[name] + colors[color] + letters[shape] for name, shape, color, _, _ in tokens]
    second = [names[name] + colors[color] + letters[shape] for name, _, _, shape, color in tokens]
    last = [f"answer to {token}" for token in first] if loops else ["EOS of the question"]
    cells = [cell for cell, (shape, _) in zip(data.CELLS, stimulus.tolist()) if shape]
    empty = ["empty cells"] if len(cells) < len(data.CELLS) else []
    return first + second + last, cells + empty + ["EOS of the grid"]


def attention_of(model, instruction, stimulus):
    """Where the token that answers looks, in one trial: (name, [(key, weight), ...]) of each of its
    attentions, in the order of computing; and the answer. A weight is the mean over heads.
    ValueError where a model has other tokens than those that keys_of names."""
    question, grid = keys_of(model, instruction, stimulus)
    features, found = calls(model, instruction[None], stimulus[None], "Attention")
    seen = []
    for name, module, inputs, _, row in found:
        weights = module.weights(*inputs)[0].mean(0)[row].tolist()
        keys = question if "instruction" in name else question + grid
        if "each_other" in name:
            keys = [f"latent {i}" for i in range(len(weights))]
        elif "stimulus" in name or "look" in name:
            keys = grid
        seen.append((name.removesuffix(".attention"), list(zip(keys, weights, strict=True))))
    return seen, data.ANSWERS[model.readout(features).argmax()]


def draw_attention(folder, path, subset, number):
    """Draws where the token that answers looks in a trial, in LoopTfmr with a row for each loop."""
    model, config = load(folder)
    subset = subset or near_and_far(config["split"])[0]
    trials = data.trials(config["split"], subset, number + 1)
    instruction, stimulus, answer = (part[-1] for part in trials)
    seen, said = attention_of(model, instruction, stimulus)
    if not any(key == "EOS of the grid" for _, look in seen for key, _ in look):
        raise UsageError(f"{config['model']} has no attention to the grid that could be drawn")
    text = (f"{data.describe(data.evaluate(instruction, stimulus))}\n\nRight answer: "
            f"{data.ANSWERS[answer]}. The model says: {said}.\n{config['model']} "
            f"({config['settings']}), seed {config['seed']}; {config['split']}, {subset}, trial "
            f"{number}\nAttention of the token that answers, in percent (mean over heads)\n")
    rows = sum(name == seen[0][0] for name, _ in seen)  # loops: as often as the first one looks
    columns = math.ceil(len(seen) / rows)
    with drawing(path, 4.6 * columns, 2.6 * rows + 0.17 * text.count("\n")) as figure:
        figure.suptitle(text, x=0.01, ha="left", fontsize=9, family="monospace")
        for i, (name, look) in enumerate(seen):
            axis = figure.add_subplot(rows, columns, i + 1)
            loop = f", loop {i // columns + 1}" if rows > 1 else ""
            axis.set_title(name + loop, fontsize=9, loc="left")
            draw_look(axis, stimulus.tolist(), look)


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
            axis.text(column + 0.5, row + 0.5, data.LETTERS[shape - 1], color=BRIGHT[color - 1],
                      weight="bold", ha="center", va="center", **edge)
        if share >= 0.005:
            axis.text(column + 0.97, row + 0.95, f"{100 * share:.0f}", size=5, color="white",
                      ha="right", **edge)
    words = sorted(((share, key) for key, share in look if isinstance(key, str)), reverse=True)
    lines = [f"{100 * share:3.0f} % {key}" for share, key in words[:10] if share >= 0.005]
    axis.text(size + 0.5, 0, "\n".join(lines), size=8, va="top")


# ---- inside a model: what its states hold -------------------------------------------------------
PROBES, FIT = 500, 2_000  # trials per test set; to fit a linear map


@torch.no_grad()
def states(model, trials):
    """Place -> the states (n, C) of the token that answers: after each block, numbered in the order
    of computing, and the features. HyperTfmr also has a code. What a block of the stimulus's
    encoder gives does not know the question, and is left out."""
    places = collections.defaultdict(list)
    for batch in zip(trials.instruction.split(50), trials.stimulus.split(50)):
        features, found = calls(model, *batch, "Block")
        found = [call for call in found if not call[0].startswith("encode_stimulus")]
        for i, (_, _, _, output, row) in enumerate(found, 1):
            places[f"block {i}"].append(output[:, row])
        if hasattr(model, "infer"):
            places["code"].append(model.infer(batch[0]))
        places["features"].append(features)
    return {place: torch.cat(parts).double() for place, parts in places.items()}


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
    letter and color of the root's question that a linear map, fitted to states x, finds in
    test_x."""
    shares = []
    for i in range(3):  # a token's operator, letter, color
        y, answer = trials.instruction[:, 0, i], test_trials.instruction[:, 0, i]
        if y.any() and answer.any():  # 0: this root does not ask for it
            inputs, targets = x[y > 0], F.one_hot(y[y > 0]).double()
            mean = inputs.mean(0)
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
                                  alignment(test_x["features"], test)))
    return found


def why_table(splits, rows):
    """A row per split and model whose hidden states were measured, with means over these seeds."""
    lines = []
    for split, label in itertools.product(splits, rows):
        results = [result for result in rows[label].get(split, []) if "why" in result]
        if seeds := [result["why"] for result in results]:
            like = [statistics.mean(seed["alignment"][part] for seed in seeds)
                    for part in ("stimulus", "instruction", "answer")]
            lines.append([f"{split}, {label}", *(f"{r:.2f}" for r in like),
                          percent(max(seed["untrained"].values()) for seed in seeds),
                          percent(max(seed["decoded"].values()) for seed in seeds),
                          percent(seed["decoded"]["features"] for seed in seeds),
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
    add("--plot", metavar="FILE", help="draw accuracy (needs matplotlib, as --attention does)")
    add("--show", type=between(0, 1000), default=0, metavar="N", help="print N trials that each "
        "model got wrong, of 1,000 (default: 0)")
    add("--why", action="store_true", help="add a table of hidden states: are they organized like "
        "the answer, and what of the question is decoded from them?")
    add("--attention", metavar="FILE", help="draw where the token that answers looks, in one trial "
        "of the first run that has weights")
    add("--subset", help="its test set (default: the last one in distribution)")
    add("--trial", type=between(0, 9999), default=0, help="its number (default: 0)")
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
            raise UsageError("these runs have no weights (checkpoint.pt)")
        rows, found = rows_of(runs), {result["config"]["split"] for result in runs.values()}
        splits = [split for split in data.SPLITS if split in found]
        for split in splits:
            print(f"\n{split_table(split, rows, args.per_operator)}")
        for release in False, True:  # trials without shortcuts, then their twins
            ground = [split for split in splits if split.endswith("_release") == release]
            if summary := summary_table(ground, rows):
                print(f"\n{summary}")
        if args.why:
            print(f"\n{why_table(splits, rows)}")
        for folder in weights if args.show else ():
            print(f"\n{folder}: {mistakes(*load(folder), args.show)}")
        if args.plot:
            with drawing(args.plot, 3 + 2.2 * len(splits), 3 + 0.35 * len(rows)) as figure:
                draw_accuracy(figure, splits, rows)
        if args.attention:
            draw_attention(weights[0], args.attention, args.subset, args.trial)


if __name__ == "__main__":
    main()
