"""Evaluates trained models and prints one table per split.

    python eval.py runs                                # what train.py measured at the end of runs
    python eval.py runs/productive --per-operator      # ... and by the operator that answers
    python eval.py runs/distractor/sstfmr --show 3     # trials that the model got wrong
"""
import argparse
import ast
import collections
import contextlib
import functools
import hashlib
import itertools
import json
import math
import statistics
import sys
import zipfile
from pathlib import Path

import torch
from tqdm import tqdm

import data
from data import UsageError
from models import available, module_of

TEST_TRIALS = 10_000  # per test set
SETTINGS = ("steps", "batch_size", "train_size", "optimizer", "lr", "decay", "schedule",
            "precision")  # of a run, beside those of its model


# ---- what a number is compared with -------------------------------------------------------------

@functools.cache
def test_set(split, subset, n):
    """Trials, the numbers of those of each kind (kind -> list), and the accuracy of baselines."""
    made, kinds, baselines = data.trials(split, subset, n), {}, collections.Counter()
    for operator in data.OPERATORS:  # in the order of the table
        kinds |= {operator: [], f"{operator}, two objects": []}
    kinds |= {f"if {kind}": [] for kind in kinds}
    chosen = data.SPLITS[split][subset]
    for i, (instruction, stimulus, answer) in enumerate(zip(*made)):
        solved = data.evaluate(instruction, stimulus)
        answering = solved[data.descend(solved)[-1]]
        for prefix, node in [("", answering), ("if ", solved[0])][:len(solved)]:
            two = ", two objects" if len(node.selectors) == 2 else ""
            kinds[f"{prefix}{node.operator}{two}"].append(i)
        baselines["chance"] += chance(chosen)[answering.operator] / n
        baselines["no binding"] += no_binding(answering, stimulus, chosen.shortcuts) / n
        if len(solved) > 1:
            leaves = [node.answer for node in solved[len(solved) // 2:]]
            baselines["condition-blind"] += vote(leaves, answer.item()) / n
    return made, {kind: found for kind, found in kinds.items() if found}, dict(baselines)


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


def no_binding(node, stimulus, shortcuts):
    """Expected accuracy, on the Solved operator that answers, of a reader who sees which shapes,
    colors and cells are on the grid, but not which belong together. Companions and decoys leave
    only a coin for True or False. With shortcuts, an Exist is True where its shape and its color
    occur, and the cells that are taken tell something of a question about places."""
    cells = [cell for cell, (shape, _) in zip(data.CELLS, stimulus.tolist()) if shape]
    shapes, colors = stimulus[stimulus[:, 0] > 0].T.tolist()
    if node.operator == "GetLocation":
        return 1 / len(cells)
    if node.operator == "GetShape":
        return vote(shapes, node.answer - data.FIRST_SHAPE + 1)
    if node.operator == "GetColor":
        return vote(colors, node.answer - data.FIRST_COLOR + 1)
    if not shortcuts:
        return 1 / 2
    if node.operator == "Exist":
        (shape, color), = node.selectors
        return float((shape in shapes and color in colors) == (node.answer == data.TRUE))
    here, anywhere = (share_true(node.operator, len(node.selectors), frozenset(where))
                      for where in (cells, data.CELLS))
    # Bayes: True and False are equally likely, whatever their shares of all places
    odds = here * (1 - anywhere) - (1 - here) * anywhere
    return 1 / 2 if odds == 0 else float((odds > 0) == (node.answer == data.TRUE))


@functools.lru_cache(100_000)
def share_true(operator, number, cells):
    """The share of places for so many objects, among these cells, of which an operator is True."""
    holds = data.OPERATORS[operator].holds
    return statistics.fmean(bool(holds(places))
                            for places in itertools.permutations(sorted(cells), number))


def vote(values, answer):
    """The probability that a random one of the most frequent values is the answer: for leaves that
    answer, a majority vote of a reader who is blind to conditions."""
    best = statistics.multimode(values)
    return (answer in best) / len(best)


def in_distribution(split):
    """The test sets drawn like the training trials, depth by depth."""
    sets, train = data.SPLITS[split], data.SPLITS[split]["train"]
    return [name for name in sets if name != "train" and {*sets[name].depths} <= {*train.depths}
            and sets[name]._replace(depths=train.depths) == train]


def hardest(split):
    """The last test set in distribution, and the last one out of it."""
    return in_distribution(split)[-1], list(data.SPLITS[split])[-1]


def tests_of(split):
    """Test set -> on how many trials a result is measured, with a hash of the first hundred."""
    return {name: f"{TEST_TRIALS:,} trials {hash_of(split, name, subset)}"
            for name, subset in data.SPLITS[split].items() if name != "train"}


@functools.cache
def hash_of(split, name, subset):  # subset: so that a new one is not taken for an old one
    some = b"".join(part.numpy().tobytes() for part in data.trials(split, name, 100))
    return hashlib.sha256(some).hexdigest()[:8]


# ---- runs and models ----------------------------------------------------------------------------

def devices():
    """Where this machine can compute, the best last."""
    there = {"mps": torch.backends.mps.is_available(), "cpu": True,
             "cuda": torch.cuda.is_available()}
    return [name for name in there if there[name]]


KEYS = {"config.json": {"split": str, "model": str, "settings": str, "seed": int,
                        "model_args": dict, "precision": str},
        "result.json": {"accuracy": dict, "baselines": dict, "kinds": dict, "tests": dict,
                        "log": list}}


def read(path):
    """What config.json or result.json of a run holds. UsageError where it is damaged."""
    try:
        content = json.loads(path.read_text())
        for key, kind in KEYS[path.name].items():
            if not isinstance(content[key], kind):
                raise ValueError(f"its {key} is {content[key]!r}")
        return content
    except FileNotFoundError as error:
        raise UsageError(f"there is no {path}") from error
    except KeyError as error:
        raise UsageError(f"{path} is damaged: it has no {error}") from error
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def code_of(model):
    """File -> a short hash of what it says, without comments, layout and docstrings: the files that
    decide what a run computes."""
    hashes, here = {}, Path(__file__).parent
    for name in "data.py", "train.py", f"models/{model}.py":
        tree = ast.parse((here / name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                if ast.get_docstring(node):
                    del node.body[0]
        hashes[name] = hashlib.sha256(ast.unparse(tree).encode()).hexdigest()[:8]
    return hashes


def changed(config):
    """The files that have changed since a run began. Recorded runs name no code, so none."""
    now = code_of(config["model"]) if config["model"] in available() else {}
    return [file for file, then in config.get("code", {}).items() if now.get(file) != then]


def checkpoint_of(folder):
    """What checkpoint.pt of a run holds. UsageError where it is missing or damaged."""
    path = folder / "checkpoint.pt"
    try:
        with zipfile.ZipFile(path) as file:  # torch.load does not notice a flipped bit
            if file.testzip():
                raise zipfile.BadZipFile
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise UsageError(f"there is no {path}") from error
    except Exception as error:  # any failure here means a bad file
        raise UsageError(f"{path} is damaged") from error


def load(folder, device="cpu"):
    """The model of a run folder, ready to call, and its config with that device. A line says which
    code has changed since. UsageError where the model is gone or its weights do not fit it."""
    folder = Path(folder)
    config = read(folder / "config.json") | {"device": device}
    name, weights = config["model"], checkpoint_of(folder)["model"]
    if name not in available():
        raise UsageError(f"there is no model {name!r} any more")
    if files := changed(config):
        print(f"{folder}: {', '.join(files)} changed since this run", file=sys.stderr)
    try:
        with torch.random.fork_rng(devices=[]):
            model = module_of(name).Model(**config["model_args"])
        model.load_state_dict(weights)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"its weights do not fit models/{name}.py as it is now") from error
    return model.to(device).eval(), config


@torch.no_grad()
def predict(function, trials, device, precision="float32"):
    """The outputs of a model, or of its `features`, for trials (n, ...), a hundred at a time. The
    model gets copies, which it may change. UsageError for outputs that are not finite."""
    with torch.autocast(device, torch.bfloat16, precision == "bfloat16"):
        parts = zip(trials.instruction.split(100), trials.stimulus.split(100))
        outputs = torch.cat([function(*(x.to(device, copy=True) for x in part)).float().cpu()
                             for part in parts])
    if not outputs.isfinite().all():
        raise UsageError("the outputs of the model are not finite")
    return outputs


def score(model, split, n, device, precision):
    """On n trials of each test set: accuracy (0 to 1), baselines, accuracy by kind of trial."""
    result = {"accuracy": {}, "baselines": {}, "kinds": {}, "tests": tests_of(split)}
    for subset in tqdm(result["tests"], f"testing {split}", leave=False, disable=n < 1000 or None):
        made, kinds, result["baselines"][subset] = test_set(split, subset, n)
        right = (predict(model, made, device, precision).argmax(1) == made.answer).float()
        result["accuracy"][subset] = right.mean().item()
        result["kinds"][subset] = {kind: right[i].mean().item() for kind, i in kinds.items()}
    return result


# ---- why: attention and mistakes ----------------------------------------------------------------

def attention(model, split, subset, device):
    """Where a model looks in the first trial of a test set, as text: a table for each attention, in
    the order of computing, with a row per query and a column per head. It names the key with the
    largest weight, and that weight in percent."""
    trial = data.trials(split, subset, 1)
    grid = [f"{data.COLOR_NAMES[color - 1]} {data.ANSWERS[data.FIRST_SHAPE + shape - 1]}"
            for shape, color in trial.stimulus[0].tolist() if shape] + ["empty cells", "EOS"]
    text = [data.show(next(zip(*trial)))]

    def note(module, inputs, _, name):
        seen = [] if "instruction" in name or "each_other" in name else grid
        word = "latent" if "each_other" in name else "token"
        weights, = module.weights(*inputs).tolist()  # (H, N, M)
        keys = [f"{word} {i}" for i in range(len(weights[0][0]) - len(seen))] + seen
        looks = [[f"{100 * max(w):.0f} {keys[w.index(max(w))]}" for w in heads]
                 for heads in zip(*weights)]
        queries = keys if inputs[0].equal(inputs[1]) else map("query {}".format, range(len(looks)))
        text.append(table([name, *map("head {}".format, range(len(weights)))],
                          [[query, *look] for query, look in zip(queries, looks)]))

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            if type(module).__name__ == "Attention":
                hook = functools.partial(note, name=name)
                hooks.enter_context(module.register_forward_hook(hook))
        predict(model, trial, device)
    return "\n\n".join(text if len(text) > 1 else [*text, "This model has no Attention."])


def mistakes(model, split, n, device, precision):
    """The first n trials that a model answers wrong, of the first 1,000 of the last test set."""
    made = data.trials(split, hardest(split)[1], 1000)
    says = predict(model, made, device, precision).argmax(1)
    wrong = [f"{data.show(trial)}\nThe model says: {data.ANSWERS[answer]}"
             for trial, answer in zip(zip(*made), says) if trial[2] != answer]
    return "\n\n".join(wrong[:n]) or "No mistake in 1,000."


# ---- tables -------------------------------------------------------------------------------------

def percent(values):
    """A mean in percent, with its standard deviation where there are several values, as text."""
    values = [100 * v for v in values if v is not None]
    spread = f"±{statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}" if values else ""


def table(header, rows):
    """Rows of strings under a header, as Markdown in columns."""
    first, *others = (max(map(len, column)) for column in zip(header, *rows))  # widths
    rule = ["-" * first, *("-" * (width - 1) + ":" for width in others)]
    lines = ([row[0].ljust(first), *map(str.rjust, row[1:], others)]
             for row in [header, rule, *rows])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def identity(config, result):
    """What two runs must share to be seeds of one row: code, settings, test trials, as a set of
    (name, value)."""
    settings = {key: config.get(key) for key in SETTINGS} | config["model_args"]
    whole = config.get("code", {}) | settings | result["tests"]
    return frozenset((name, str(value)) for name, value in whole.items())


def rows_of(runs, names=None):
    """Label of a row, or else the next of `names` -> its runs (config, result), one per seed. Runs
    of one name that differ in more than the seed have rows of their own. UsageError where names and
    rows are not as many."""
    rows, counts = {}, collections.Counter()
    for config, result in runs:
        name = f"{config['model']} ({config['settings']})"
        rows.setdefault((name, identity(config, result)), []).append((config, result))
    if names and len({*names}) != len(rows):
        found = ", ".join(name for name, _ in rows)
        raise UsageError(f"--names: {len(rows)} different names are needed, for {found}")
    if names:
        return dict(zip(names, rows.values()))
    labels = {}
    for (name, _), found in rows.items():
        counts[name] += 1
        labels[name if counts[name] == 1 else f"{name} #{counts[name]}"] = found
    return labels


def notes(split, rows):
    """Sentences on rows that differ from their namesake, or from what there is today."""
    for label, runs in rows.items():
        first, (config, result) = rows.get(label.partition(" #")[0], runs), runs[0]
        other = {name for name, _ in identity(*first[0]) ^ identity(config, result)}
        tests = [name for name, test in tests_of(split).items()
                 if result["tests"].get(name) != test]
        if other:
            yield f"{label} differs from the first row of its name in {', '.join(sorted(other))}."
        if files := changed(config):
            yield f"{label}: {', '.join(files)} changed since."
        if tests:
            yield f"{label} was not tested on today's trials of {', '.join(tests)}."


def split_table(split, runs, per_operator=False, names=None):
    """A row per model and settings, mean and spread over seeds, then notes. Runs are (config,
    result) pairs of one split."""
    baselines, rows = {}, rows_of(runs, names)
    for _, result in runs:  # some may have more test sets
        baselines |= result["baselines"]
    columns = list(baselines)
    lines = [[name, *(percent([baselines[column].get(name)]) for column in columns)]
             for name in max(baselines.values(), key=len)]
    for label, seeds in rows.items():
        results = [result for _, result in seeds]
        label += f", {len(results)} seeds" if len(results) > 1 else ""
        lines.append([label, *(percent(r["accuracy"].get(c) for r in results) for c in columns)])
        kinds = dict.fromkeys(kind for r in results for of in r["kinds"].values() for kind in of)
        for kind in kinds if per_operator else ():
            values = ([r["kinds"].get(c, {}).get(kind) for r in results] for c in columns)
            lines.append([f"  {kind}", *map(percent, values)])
    return "\n".join([table([f"{split}, accuracy in %", *columns], lines), *notes(split, rows)])


COLORBLIND = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000",
              "#8B8B00", "#7F3C8D")


def plot(splits, path, names=None):
    """Draws, for each split, accuracy by test set and learning curves: a numbered line per model
    and settings, and a thin one per seed. Gray bands reach up to chance and to the last baseline.
    UsageError where matplotlib is missing or cannot write."""
    try:
        from matplotlib.figure import Figure  # not pyplot, which looks for a display
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(11, 3.3 * len(splits)), layout="constrained")
    axes = figure.subplots(len(splits), 2, squeeze=False)
    for (split, runs), (left, right) in zip(splits.items(), axes):
        columns, baselines = list(runs[0][1]["accuracy"]), runs[0][1]["baselines"]
        left.set_xticks(range(len(columns)), columns, fontsize="x-small")
        for name, gray in (list(baselines[columns[-1]])[-1], "0.9"), ("chance", "0.75"):
            there = [i for i, column in enumerate(columns) if name in baselines[column]]
            band = [baselines[columns[i]][name] for i in there]
            left.fill_between(there, band, color=gray, label=name)
        for i, (label, seeds) in enumerate(rows_of(runs, names).items()):
            results = [result for _, result in seeds]
            mark = {"marker": "osD^v<>PXp"[i % 10], "markersize": 4, "label": f"{i + 1} {label}"}
            accuracy = [[r["accuracy"].get(column, math.nan) for column in columns]
                        for r in results]
            train = [[row["train"] for row in r["log"]] for r in results]
            trials = [row["trials"] / 1000 for row in results[0]["log"]]
            for axis, x, seeds in (left, range(len(columns)), accuracy), (right, trials, train):
                seeds = torch.tensor(seeds).T  # a column per seed
                axis.plot(x, seeds, color=COLORBLIND[i % 9], linewidth=0.6)
                axis.plot(x, seeds.mean(1), color=COLORBLIND[i % 9], **mark)
        left.set(title=split, xlabel="test set (thin lines: seeds, thick lines: their mean)",
                 ylabel="accuracy on the test set", ylim=(0, 1.02))
        right.set(xlabel="training trials, thousands", ylabel="accuracy in training",
                  ylim=(0, 1.02))
        right.legend(*left.get_legend_handles_labels(), fontsize="x-small", loc="center left",
                     bbox_to_anchor=(1, 0.5))
    try:
        with data.replacing(path) as temporary:
            figure.savefig(temporary, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {error}") from error


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


def one_of(choices):
    """A type for argparse: one of these values, by its name."""
    by_name = {str(choice): choice for choice in choices}

    def convert(text):
        if text not in by_name:
            raise argparse.ArgumentTypeError(f"must be {' or '.join(by_name)}, not {text}")
        return by_name[text]
    return convert


def result_of(folder, args):
    """A run's config and its result. With --show and --attention, also prints what the model does.
    UsageError where that cannot be had."""
    config = read(folder / "config.json")
    split = config["split"]
    if split not in data.SPLITS:
        raise UsageError(f"there is no split {split!r} any more")
    if not (folder / "result.json").exists():
        raise UsageError("it is unfinished (log.csv says how far it is)")
    if args.show or args.attention:
        device = devices()[-1]
        model, _ = load(folder, device)
    if args.show:
        wrong = mistakes(model, split, args.show, device, config["precision"])
        print(f"\n{folder}\n\n{wrong}")
    if args.attention:
        if args.attention not in data.SPLITS[split]:
            raise UsageError(f"--attention: {split} has no test set {args.attention!r}")
        print(f"\n{folder}\n\n{attention(model, split, args.attention, device)}")
    return config, read(folder / "result.json")


def evaluate(args):
    """Does what the arguments of the command line ask for."""
    splits, found = {}, [path for above in args.runs for path in sorted(above.rglob("config.json"))]
    for folder in dict.fromkeys(path.parent.resolve() for path in found):
        try:
            config, result = result_of(folder, args)
            runs = splits.setdefault(config["split"], {})
            run = config["model"], config["settings"], config["seed"], identity(config, result)
            if run in runs:
                raise UsageError("it is a copy of a run above")
            runs[run] = config, result
        except UsageError as error:
            print(f"left out: {folder}: {error}", file=sys.stderr)
    if not any(splits.values()):
        raise UsageError(f"no run to show in {', '.join(map(str, args.runs))}"
                         + ": train one with train.py" * (not found))
    splits = {split: [*runs.values()] for split, runs in splits.items()}
    for split, runs in splits.items():
        print("\n" + split_table(split, runs, args.per_operator, args.names))
    if args.plot:
        plot(splits, args.plot, args.names)
        print(f"\nDrawn: {args.plot}")


def main(argv=None):
    parser = argparse.ArgumentParser(  # without usage, so that an error is one line
        description="Evaluate trained models: one table per split.", usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("runs", nargs="*", default=[Path("runs")], type=Path, help="run folders, or folders above "
        "them (default: runs); of copies of a run, the first counts")
    add("--per-operator", action="store_true", help="add a line per operator that answers, and per "
        "operator of the root's condition")
    add("--show", type=between(0, 1000), default=0, metavar="N", help="print N trials that each "
        "model got wrong, of 1,000 (default: 0)")
    add("--attention", metavar="SET", help="print where each model looks in the first trial of "
        "this test set, such as depth3, with the weight in percent")
    add("--names", nargs="+", metavar="NAME", help="a name for each row of a table, in its order "
        "(default: model and settings)")
    add("--plot", type=Path, metavar="FILE", help="draw accuracy and learning (needs matplotlib)")
    args = parser.parse_args(argv)
    with data.ending(parser):
        evaluate(args)


if __name__ == "__main__":
    main()
