"""Evaluates trained models and prints one table per split.

    python eval.py runs                                # what train.py measured at the end of runs
    python eval.py runs/productive --per-operator      # ... and by the operator that answers
    python eval.py runs/distractor/sstfmr --show 3     # trials that the model got wrong
"""
import argparse
import collections
import contextlib
import functools
import importlib
import inspect
import json
import math
import statistics
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from tqdm import tqdm

import data

TEST_TRIALS, RSA_TRIALS, FIT_TRIALS = 10_000, 500, 2_000  # per test set; to fit a decoder
KEYS = {"config.json": {"split", "model", "settings", "seed", "model_args", "precision"},
        "result.json": {"accuracy", "baselines", "kinds", "alignment", "tests", "log"}}
# Relative, for the six numbers of a fingerprint: three or more times what another CPU changes
TOLERANCES = 1e-4, 1e-4, 1e-4, 1e-4, 1e-5, 2e-7


class UsageError(ValueError):
    """Shown as one line."""


# ---- test sets and baselines --------------------------------------------------------------------

@functools.cache
def test_set(split, subset, n):
    """Trials, the numbers of those of each kind (kind -> list), and the accuracy of baselines."""
    made, kinds, baselines = data.trials(split, subset, n), {}, collections.Counter()
    for operator in data.OPERATORS:  # in the order of the table
        kinds |= {operator: [], f"{operator}, two objects": []}
    kinds |= {f"if {kind}": [] for kind in kinds}
    for i, (instruction, stimulus, answer) in enumerate(zip(*made)):
        solved = data.evaluate(instruction, stimulus)
        answering = solved[data.descend(solved)[-1]]
        for prefix, node in [("", answering), ("if ", solved[0])][:len(solved)]:
            two = ", two objects" if len(node.selectors) == 2 else ""
            kinds[f"{prefix}{node.operator}{two}"].append(i)
        baselines["chance"] += chance(data.SPLITS[split][subset])[answering.operator] / n
        baselines["no binding"] += no_binding(answering.operator, stimulus, answer.item()) / n
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


def no_binding(operator, stimulus, answer):
    """Expected accuracy of a reader who sees which shapes, colors and cells are on the grid, but
    not which belong together. Companions and decoys leave only a coin for True or False."""
    shapes, colors = stimulus[stimulus[:, 0] > 0].T.tolist()
    return {"GetLocation": 1 / len(shapes), "GetShape": vote(shapes, answer - data.FIRST_SHAPE + 1),
            "GetColor": vote(colors, answer - data.FIRST_COLOR + 1)}.get(operator, 0.5)


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
    """The test sets of a split in words. A saved result holds for these alone."""
    return {name: repr(subset) for name, subset in data.SPLITS[split].items() if name != "train"}


# ---- runs and models ----------------------------------------------------------------------------

def available():
    """The models: every file in models/ that defines Model."""
    return sorted(path.stem for path in (Path(__file__).parent / "models").glob("*.py")
                  if "\nclass Model(" in path.read_text(encoding="utf-8"))


def module_of(name):
    """The module models/<name>.py. UsageError for a name that is no model."""
    if name not in available():
        raise UsageError(f"there is no model {name!r}; there is {', '.join(available())}")
    return importlib.import_module(f"models.{name}")


def devices():
    """Where this machine can compute, the best last."""
    there = {"mps": torch.backends.mps.is_available(), "cpu": True,
             "cuda": torch.cuda.is_available()}
    return [name for name in there if there[name]]


def read(path):
    """What config.json or result.json of a run holds. UsageError where it is damaged."""
    try:
        content = json.loads(path.read_text())
        if missing := KEYS[path.name] - {*content}:
            raise ValueError(f"it has no {', '.join(sorted(missing))}")
        return content
    except FileNotFoundError as error:
        raise UsageError(f"there is no {path}") from error
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def finished(config, folder):
    """Whether a run has a result for the test sets that its split has now."""
    path = folder / "result.json"
    return path.exists() and read(path)["tests"] == tests_of(config["split"])


def check_code(config):
    """UsageError unless the code still computes what it did when a run was made."""
    import train  # not above, since train.py imports this file
    there, known = config.get("fingerprint"), inspect.signature(module_of(config["model"]).Model)
    if (not there or config["model_args"].keys() != known.parameters.keys()
            or not train.TRAINING.keys() <= config.keys()):
        raise UsageError("it is a run of other code")
    here = train.fingerprint(config)
    if len(here) != len(there) or not all(  # NaN is not itself
            math.isclose(a, b, rel_tol=tolerance) or a != a and b != b
            for a, b, tolerance in zip(here, there, TOLERANCES)):
        then, now = (" ".join(f"{number:.5g}" for number in numbers) for numbers in (there, here))
        raise UsageError("it is a run of other code: bring its code back, or choose another --out "
                         "for train.py (its first losses, then the norms of momentum and weights, "
                         f"were {then}, and now they are {now})")


def load(folder, device="cpu"):
    """The model of a run folder, ready to call, and its config with that device. UsageError where
    it is of other code or has no sound checkpoint."""
    folder = Path(folder)
    config = read(folder / "config.json") | {"device": device}
    check_code(config)
    model = module_of(config["model"]).Model(**config["model_args"])
    try:
        checkpoint = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
    except Exception as error:  # any failure here means a bad file
        raise UsageError("its checkpoint.pt is missing or damaged") from error
    return model.to(device).eval(), config


@torch.no_grad()
def predict(function, trials, device, precision="float32"):
    """The outputs of a model, or of its `features`, for trials (n, ...), a hundred at a time."""
    with torch.autocast(device, torch.bfloat16, precision == "bfloat16"):
        parts = zip(trials.instruction.split(100), trials.stimulus.split(100))
        return torch.cat([function(*(x.to(device) for x in part)).float().cpu() for part in parts])


def score(model, split, n, device, precision):
    """On n trials of each test set: accuracy (0 to 1), baselines, accuracy by kind of trial."""
    result = {"accuracy": {}, "baselines": {}, "kinds": {}, "tests": tests_of(split)}
    for subset in tqdm(result["tests"], f"testing {split}", leave=False, disable=n < 1000):
        made, kinds, result["baselines"][subset] = test_set(split, subset, n)
        right = (predict(model, made, device, precision).argmax(1) == made.answer).float()
        result["accuracy"][subset] = right.mean().item()
        result["kinds"][subset] = {kind: right[i].mean().item() for kind, i in kinds.items()}
    return result


# ---- why: representations and attention ---------------------------------------------------------

def spearman(x, y):
    """Rank correlation of two vectors. Equal values share the mean of their ranks. 0 if all values
    of one vector are equal."""
    ranks = []
    for values in (x, y):
        _, place, count = values.unique(return_inverse=True, return_counts=True)
        ranks.append((count.cumsum(0) - (count - 1) / 2)[place])
    return torch.corrcoef(torch.stack(ranks).double())[0, 1].nan_to_num().item()


def alignment(model, split, device):
    """Representational similarity analysis (claim 5 of the paper), on the test sets of `hardest`.
    Two trials have more or less similar hidden states, stimuli, instructions and answers. The
    result is the rank correlation, over pairs of trials, of the first similarity with each of the
    others, from "in: stimulus" to "out: answer"."""
    result, (first, second) = {}, torch.triu_indices(RSA_TRIALS, RSA_TRIALS, 1)
    for where, subset in zip(("in", "out"), hardest(split)):
        trials = data.trials(split, subset, RSA_TRIALS)
        vectors = (predict(model.features, trials, device),
                   *(F.one_hot(x.long()).reshape(RSA_TRIALS, -1).float()
                     for x in (trials.stimulus, trials.instruction, trials.answer)))
        # Rounded, so that equal similarities stay equal. Those of constant states are 0.
        states, *others = (torch.corrcoef(x)[first, second].nan_to_num().round(decimals=5)
                           for x in vectors)
        for name, other in zip(("stimulus", "instruction", "answer"), others):
            result[f"{where}: {name}"] = spearman(states, other)
    return result


def decoding(model, split, device):
    """How much of what the root asks about can be decoded from hidden states by a linear map
    (Redhardt et al. 2025), fitted by least squares to trials in distribution: the share of other
    trials, on the test sets of `hardest`, from "in: operator" to "out: color"."""
    (near, far), result = hardest(split), {}
    made = (data.trials(split, near, FIT_TRIALS, seed=1), data.trials(split, near, RSA_TRIALS),
            data.trials(split, far, RSA_TRIALS))
    states = [predict(model.features, trials, device).double() for trials in made]
    for i, name in enumerate(("operator", "letter", "color")):  # of the root's token
        values = (trials.instruction[:, 0, i].long() for trials in made)
        (x, y), *tests = sets = [(x[y > 0], y[y > 0]) for x, y in zip(states, values)]  # 0: none
        if not all(len(y) for _, y in sets):
            continue  # one of them never asks for it
        one_hot, mean = F.one_hot(y).double(), x.mean(0)
        matrix = torch.linalg.pinv(x - mean, rtol=1e-3) @ (one_hot - one_hot.mean(0))
        for where, (x, y) in zip(("in", "out"), tests):
            right = ((x - mean) @ matrix + one_hot.mean(0)).argmax(1) == y
            result[f"{where}: {name}"] = right.double().mean().item()
    return dict(sorted(result.items()))


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
        queries = keys if inputs[0] is inputs[1] else map("query {}".format, range(len(looks)))
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


def by_settings(runs, names=None):
    """Label of a model and its settings, or else the next of `names` -> its results, one per seed.
    UsageError where names and rows are not as many."""
    rows = {}
    for config, result in runs:
        rows.setdefault(f"{config['model']} ({config['settings']})", []).append(result)
    if names and len({*names}) != len(rows):
        raise UsageError(f"--names: {len(rows)} different names are needed, for {', '.join(rows)}")
    return dict(zip(names, rows.values())) if names else rows


def split_table(split, runs, per_operator=False, names=None):
    """A row per model and settings, mean and spread over seeds. Runs are (config, result) pairs of
    one split."""
    baselines = {}
    for _, result in runs:  # some may have more test sets
        baselines |= result["baselines"]
    columns = list(baselines)
    rows = [[name, *(percent([baselines[column].get(name)]) for column in columns)]
            for name in max(baselines.values(), key=len)]
    for label, results in by_settings(runs, names).items():
        label += f", {len(results)} seeds" if len(results) > 1 else ""
        rows.append([label, *(percent(r["accuracy"].get(c) for r in results) for c in columns)])
        kinds = dict.fromkeys(kind for r in results for of in r["kinds"].values() for kind in of)
        for kind in kinds if per_operator else ():
            values = ([r["kinds"].get(c, {}).get(kind) for r in results] for c in columns)
            rows.append([f"  {kind}", *map(percent, values)])
    return table([f"{split}, accuracy in %", *columns], rows)


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
        for i, (label, results) in enumerate(by_settings(runs, names).items()):
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
        figure.savefig(path, dpi=150)
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
            name = config["model"], config["settings"], config["seed"]  # twice is no second seed
            splits.setdefault(config["split"], {})[name] = config, result
        except UsageError as error:
            print(f"left out: {folder}: {error}", file=sys.stderr)
    if not splits:
        raise UsageError(f"no run to show in {', '.join(map(str, args.runs))}"
                         + ": train one with train.py" * (not found))
    splits = {split: [*named.values()] for split, named in splits.items()}
    for split, runs in splits.items():
        print("\n" + split_table(split, runs, args.per_operator, args.names))
        for key in ("device", "precision", "tests"):
            if len({str((config | result).get(key)) for config, result in runs}) > 1:
                print(f"These rows differ in {key}.")
    if args.plot:
        plot(splits, args.plot, args.names)
        print(f"\nDrawn: {args.plot}")


def main(argv=None):
    parser = argparse.ArgumentParser(  # without usage, so that an error is one line
        description="Evaluate trained models: one table per split.", usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("runs", nargs="*", default=[Path("runs")], type=Path, help="run folders, or folders above "
        "them (default: runs); of copies of a run, the last counts")
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
    try:
        evaluate(args)
    except (UsageError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
