"""Evaluates trained models and prints one table per split.

    python eval.py runs                                # what train.py measured at the end of every run
    python eval.py runs/productive --per-operator      # ... and by the operator that answers
    python eval.py runs/distractor/sstfmr --show 3     # trials that the model got wrong
    python eval.py runs --fresh                        # evaluate the weights again, unfinished runs included
"""
import argparse
import ast
import collections
import functools
import hashlib
import importlib
import json
import statistics
import sys
from pathlib import Path

import data  # before torch: it says how torch's threads wait
import torch
from torch.nn import functional as F

RSA_TRIALS = 500  # per test set
KEYS = {"config.json": {"split", "model", "settings", "seed", "steps", "model_args", "precision", "device"},
        "result.json": {"accuracy", "baselines", "kinds", "alignment", "tests", "log"}}


class UsageError(ValueError):
    """Shown as one line; every other exception keeps its traceback."""


# ---- test sets and baselines ------------------------------------------------------------------------------------

@functools.cache
def test_set(split, subset, n):
    """Trials, the kinds that each belongs to (name -> bool (n,)), and the accuracy of the baselines on each (n,)."""
    made = data.trials(split, subset, n)
    parts = zip(made.instruction.split(1000), made.stimulus.split(1000))  # all at once would take gigabytes
    answers = torch.cat([data.evaluate_nodes(*part)[0] for part in parts])  # (n, T)
    asked = made.instruction[torch.arange(n), data.descend(answers)[:, -1]]  # (n, 5): the operator that answers
    baselines = {"chance": torch.full((n,), chance(data.SPLITS[split][subset])), "no binding": no_binding(made, asked)}
    kinds = kinds_of(asked, "")
    if made.instruction.shape[1] > 1:
        baselines["condition-blind"] = condition_blind(made, answers)
        kinds |= kinds_of(made.instruction[:, 0], "if ")
    return made, kinds, baselines


def kinds_of(token, prefix):
    """Which trials have each operator, with one object or with two, as their token (n, 5)."""
    kinds = {f"{prefix}{data.OPERATORS[op]}{name}": (token[:, 0] == op) & ((token[:, 3] > 0) == second)
             for op in range(data.EXIST, data.IF_ELSE) for second, name in ((False, ""), (True, ", two objects"))}
    return {name: chosen for name, chosen in kinds.items() if chosen.any()}


def chance(subset):
    """Accuracy of the best constant answer to each operator, by its probability in a Subset."""
    share = collections.defaultdict(collections.Counter)  # operator -> answer -> probability
    for pool in subset.pools:
        answers = {data.GET_LOCATION: range(100), data.GET_COLOR: pool.colors, data.GET_SHAPE: pool.shapes}
        for op in pool.leaves:
            possible = answers.get(op, ("True", "False"))
            for answer in possible:
                share[op][answer] += 1 / (len(subset.pools) * len(pool.leaves) * len(possible))
    return sum(max(of_answers.values()) for of_answers in share.values())


def no_binding(trials, token):
    """Expected accuracy (n,) of a reader who counts shapes, colors and cells, and knows the operator that answers,
    `token` (n, 5). It says that an object exists if its shape and its color occur, guesses a taken cell, and names a
    most frequent color or shape. Parities stay at chance: the decoy makes the cells alike for both answers."""
    def named(counts, first):  # probability that a random one of the most frequent is right
        best = counts[:, 1:] == counts[:, 1:].amax(1, keepdim=True)
        return best.gather(1, (trials.answer[:, None] - first).clamp(0, 25))[:, 0] / best.sum(1)

    operator, shape, color = token[:, :3].long().unbind(1)
    shapes, colors = (F.one_hot(x.long(), 27).sum(1) for x in trials.stimulus.unbind(2))  # (n, 27) counts, 0 is empty
    exists = (shapes.gather(1, shape[:, None]) * colors.gather(1, color[:, None]) > 0)[:, 0]
    right, objects = torch.full((len(token),), 0.5), shapes[:, 1:].sum(1)
    for op, value in ((data.EXIST, (exists == (trials.answer == data.TRUE)).float()), (data.GET_LOCATION, 1 / objects),
                      (data.GET_COLOR, named(colors, data.FIRST_COLOR)),
                      (data.GET_SHAPE, named(shapes, data.FIRST_SHAPE))):
        right = torch.where(operator == op, value, right)
    return right


def condition_blind(trials, answers):
    """Expected accuracy (n,) of a reader who answers as most leaves would; `answers` (n, T) are those of all tokens."""
    leaves = answers[:, -((answers.shape[1] + 2) // 3):]  # the last level
    votes = (leaves[:, :, None] == leaves[:, None]).sum(2)  # for the answer of each leaf
    best = votes == votes.amax(1, keepdim=True)
    winners = (best / votes).sum(1)  # different answers that share the most votes
    return (best & (leaves == trials.answer[:, None])).any(1) / winners


def in_distribution(split):
    """The test sets drawn like the training trials, depth by depth."""
    train = data.SPLITS[split]["train"]
    return [name for name, test in data.SPLITS[split].items() if name != "train" and {*test.depths} <= {*train.depths}
            and (test.pools, test.distractors) == (train.pools, train.distractors)]


# ---- runs and models --------------------------------------------------------------------------------------------

def available():
    """The models: every file in models/ that defines Model."""
    return sorted(p.stem for p in (Path(__file__).parent / "models").glob("*.py") if "\nclass Model(" in p.read_text())


def module_of(name):
    """The module models/<name>.py. UsageError for a name that is no model."""
    if name not in available():
        raise UsageError(f"no model {name!r}; there are {', '.join(available())}")
    return importlib.import_module(f"models.{name}")


def code_of(model, split):
    """A hash of the model's file, data.py and this split's training set, without comments and docstrings. It does not
    notice an edit of train.py."""
    texts = [(Path(__file__).parent / file).read_text() for file in (f"models/{model}.py", "data.py")]
    parts = [repr(data.SPLITS[split]["train"]), *map(meaning, texts)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:12]


@functools.cache
def meaning(text):
    """The syntax tree of a Python file as text, without comments, docstrings and SPLITS. Empty fields are left out:
    they differ between versions of Python."""
    def tell(node):
        if isinstance(node, list):
            return [tell(n) for n in node if not (isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant))]
        if not isinstance(node, ast.AST):
            return node
        return [type(node).__name__, *((key, tell(x)) for key, x in ast.iter_fields(node) if x is not None and x != [])]

    return repr(tell([node for node in ast.parse(text).body if not ast.unparse(node).startswith("SPLITS = ")]))


def is_current(config):
    """Whether the model and the split of a run exist, and are still the code that it was trained with."""
    known = config["model"] in available() and config["split"] in data.SPLITS
    return known and config.get("code") == code_of(config["model"], config["split"])


def pick_device(name):
    """The device of that name; auto is CUDA where it is there, else the CPU. UsageError where it is not there."""
    usable = {"cuda": torch.cuda.is_available(), "cpu": True, "mps": torch.backends.mps.is_available()}
    there = [device for device in usable if usable[device]]
    if name not in ("auto", *there):
        raise UsageError(f"there is no device {name!r} here; there is {', '.join(there)}")
    return there[0] if name == "auto" else name


def read(path):
    """What config.json or result.json of a run folder holds. UsageError where it is damaged."""
    try:
        content = json.loads(path.read_text())
        if missing := KEYS[path.name] - {*content}:
            raise ValueError(f"it has no {', '.join(sorted(missing))}")
        return content
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"{path} is damaged: {error}") from error


def find(paths):
    """Folder and configuration of all runs below the paths, path by path. Those of other code are named in a line and
    left out. UsageError where there are none."""
    found = []
    for folder in dict.fromkeys(file.parent.resolve() for path in paths for file in sorted(path.rglob("config.json"))):
        config = read(folder / "config.json")
        if is_current(config):
            found.append((folder, config))
        else:
            print(f"left out, since its model or data.py has changed: {folder}", file=sys.stderr)
    if not found:
        raise UsageError(f"no run in {', '.join(map(str, paths))}: train one with train.py")
    return found


def finished(config, folder):
    """Whether a run has a result for the test sets that its split has now."""
    path = folder / "result.json"
    return path.exists() and read(path)["tests"] == tests_of(config["split"])


def load(folder, config, device):
    """The model of a run folder, its steps and its log so far. UsageError where the checkpoint is damaged."""
    model = module_of(config["model"]).Model(**config["model_args"])
    try:
        checkpoint = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
    except FileNotFoundError as error:
        raise UsageError(f"{folder} has no checkpoint.pt") from error
    except Exception as error:  # any failure here means a bad file
        raise UsageError(f"{folder / 'checkpoint.pt'} is damaged") from error
    return model.to(device).eval(), checkpoint["step"], checkpoint["rows"]


@torch.no_grad()
def in_parts(function, trials, device, precision="float32"):
    """The outputs of a model, or of its `features`, for trials (n, ...), on the CPU. It sees a hundred at a time."""
    with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
        return torch.cat([function(i.to(device), s.to(device)).float().cpu() for i, s in
                          zip(trials.instruction.split(100), trials.stimulus.split(100))])


def score(model, split, n, device, precision):
    """On n trials of each test set: accuracy (0 to 1), the baselines, accuracy by kind of trial."""
    result = {"accuracy": {}, "baselines": {}, "kinds": {}, "tests": tests_of(split)}
    for subset in result["tests"]:
        made, kinds, baselines = test_set(split, subset, n)
        right = (in_parts(model, made, device, precision).argmax(1) == made.answer).float()
        result["accuracy"][subset] = right.mean().item()
        result["baselines"][subset] = {name: value.mean().item() for name, value in baselines.items()}
        result["kinds"][subset] = {name: right[chosen].mean().item() for name, chosen in kinds.items()}
    return result


def tests_of(split):
    """The test sets of a split in words. A saved result holds for these alone."""
    return {name: repr(subset) for name, subset in data.SPLITS[split].items() if name != "train"}


# ---- why: representations and attention -------------------------------------------------------------------------

def spearman(x, y):
    """Rank correlation of two vectors; equal values share the mean of their ranks. 0 if all values of one are equal."""
    ranks = []
    for values in (x, y):
        _, place, count = values.unique(return_inverse=True, return_counts=True)
        ranks.append((count.cumsum(0) - (count - 1) / 2)[place])
    return torch.corrcoef(torch.stack(ranks).double())[0, 1].nan_to_num().item()


def one_hot(tokens):
    """Tokens (n, N, features) as one long vector of zeros and ones for each trial."""
    return F.one_hot(tokens.long(), 27).flatten(1).float()


def hardest(split):
    """The last test set in distribution, and the last one out of it."""
    return in_distribution(split)[-1], list(data.SPLITS[split])[-1]


def alignment(model, split, device):
    """Representational similarity analysis (claim 5 of the paper), on the test sets of `hardest`. Two trials have more
    or less similar hidden states, stimuli, instructions and answers. The result is the rank correlation, over pairs of
    trials, of the first similarity with each of the others, from "in: stimulus" to "out: answer"."""
    result, (first, second) = {}, torch.triu_indices(RSA_TRIALS, RSA_TRIALS, 1)
    for where, subset in zip(("in", "out"), hardest(split)):
        trials = test_set(split, subset, RSA_TRIALS)[0]
        vectors = (in_parts(model.features, trials, device), one_hot(trials.stimulus), one_hot(trials.instruction),
                   F.one_hot(trials.answer, data.CLASSES).float())
        # Equal similarities stay equal. Those of constant states, which are not defined, are 0.
        states, *others = (torch.corrcoef(x)[first, second].nan_to_num().round(decimals=5) for x in vectors)
        for name, other in zip(("stimulus", "instruction", "answer"), others):
            result[f"{where}: {name}"] = spearman(states, other)
    return result


def attention(model, split, device):
    """Where a model looks in the first trial of the last test set in distribution, as text. A table for each attention,
    with a row per query and a column per head, names the key with the largest weight, and that weight in percent. The
    tokens of the instruction and its EOS are numbered; the key EOS is the stimulus's."""
    trial = test_set(split, hardest(split)[0], 1)[0]
    objects = [f"{data.COLOR_NAMES[color - 1]} {data.LETTERS[shape - 1]}"
               for shape, color in trial.stimulus[0].tolist() if shape]
    text = [data.show(data.Trials(*(x[0] for x in trial)))]

    def note(module, inputs, _, name):
        seen = [] if "instruction" in name or "each_other" in name else [*objects, "empty cells", "EOS"]  # of the grid
        word = "latent" if "each_other" in name else "token"
        keys = [f"{word} {i}" for i in range(module.weights.shape[3] - len(seen))] + seen
        for row, weights in enumerate(module.weights.tolist()):  # treetfmr has a row for every operator of a level
            looks = [[f"{100 * max(w):.0f} {keys[w.index(max(w))]}" for w in heads] for heads in zip(*weights)]
            queries = keys if inputs[0] is inputs[1] else [f"query {i}" for i in range(len(looks))]
            text.append(table([f"{name}, row {row}", *(f"head {head}" for head in range(len(weights)))],
                              [[query, *look] for query, look in zip(queries, looks)]))

    for name, module in model.named_modules():
        if type(module).__name__ == "Attention":
            module.register_forward_hook(functools.partial(note, name=name))
    in_parts(model, trial, device)
    return "\n\n".join(text)


# ---- tables -----------------------------------------------------------------------------------------------------

def percent(values):
    """A mean in percent, with its standard deviation where there are several values. None is no value: "" for none."""
    values = [100 * v for v in values if v is not None]
    spread = f"±{statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.1f}{spread}" if values else ""


def table(header, rows, markdown=False):
    """Rows of strings under a header, as aligned text or as Markdown."""
    first, *others = (max(map(len, column)) for column in zip(header, *rows))  # widths
    lines = [[row[0].ljust(first), *map(str.rjust, row[1:], others)] for row in [header, *rows]]
    rule = ["-" * first, *("-" * (w - 1) + ":" for w in others)]
    if markdown:
        return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])
    return "\n".join("  ".join(line).rstrip() for line in lines)


def by_settings(runs):
    """Label of a model and its settings -> its results, one per seed; runs are (config, result) pairs."""
    rows = {}
    for config, result in runs:
        rows.setdefault(f"{config['model']} ({config['settings']})", []).append(result)
    return rows


def split_table(split, runs, markdown=False, per_operator=False):
    """One row per model and settings, mean and spread over seeds; runs are (config, result) pairs of one split."""
    columns, baselines = list(runs[0][1]["accuracy"]), runs[0][1]["baselines"]  # the same for all runs of a split
    rows = [[name, *(percent([baselines[c].get(name)]) for c in columns)] for name in max(baselines.values(), key=len)]
    for label, results in by_settings(runs).items():
        label += f", {len(results)} seeds" if len(results) > 1 else ""
        rows.append([label, *(percent(r["accuracy"][c] for r in results) for c in columns)])
        kinds = dict.fromkeys(kind for r in results for by_kind in r["kinds"].values() for kind in by_kind)
        for kind in kinds if per_operator else ():
            rows.append([f"  {kind}", *(percent(r["kinds"][c].get(kind) for r in results) for c in columns)])
    return table([f"{split}, accuracy in %", *columns], rows, markdown)


def summary_table(splits, markdown):
    """One row per model with its own settings, one column per split: the accuracy on the last test set in distribution,
    an arrow, and the accuracy on the last one out of it with its spread over seeds."""
    def cell(pairs):
        near, far = zip(*pairs)
        return f"{percent([statistics.mean(near)])} → {percent(far)}"

    baselines, models = {}, {}  # name -> split -> pairs of accuracies, one per seed
    for split, runs in splits.items():
        near, far = hardest(split)
        for config, result in runs:
            if config["settings"] == "default":
                pair = result["accuracy"][near], result["accuracy"][far]
                models.setdefault(config["model"], {}).setdefault(split, []).append(pair)
                for name, value in result["baselines"][far].items():
                    baselines.setdefault(name, {})[split] = [(result["baselines"][near].get(name, 1), value)]
    columns = list(baselines.get("chance", ()))  # the splits that have such runs
    rows = [[name, *(cell(found[split]) if split in found else "" for split in columns)]
            for name, found in (*baselines.items(), *sorted(models.items()))]
    return table(["accuracy in %", *(f"{split}: {' → '.join(hardest(split))}" for split in columns)], rows, markdown)


def rsa_table(splits, markdown):
    """One row per split, model and settings, means over seeds: how much hidden states are organized like stimulus,
    instruction and answer, in and out of distribution."""
    parts = [f"{where}: {what}" for where in ("in", "out") for what in ("stimulus", "instruction", "answer")]
    rows = [[f"{split} {label}", *(f"{statistics.mean(r['alignment'][part] for r in results):.2f}" for part in parts),
             percent([r["accuracy"][hardest(split)[1]] for r in results])]
            for split, runs in splits.items() for label, results in by_settings(runs).items()]
    return table(["rank correlation of similarities with", *parts, "accuracy out"], rows, markdown)


def mistakes(model, split, n, device, precision):
    """The first n trials that the model answers wrong, of the first 1,000 of the last test set, as text."""
    made = test_set(split, hardest(split)[1], 1000)[0]
    predicted = in_parts(model, made, device, precision).argmax(1)
    wrong = (predicted != made.answer).nonzero()[:n, 0].tolist()
    return "\n\n".join(data.show(data.Trials(*(x[i] for x in made)))
                       + f"\nThe model says: {data.name(int(predicted[i]))}" for i in wrong) or "No mistake in 1,000."


COLORBLIND = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8B8B00", "#7F3C8D")


def plot(splits, path):
    """Draws, for each split, accuracy by test set and learning curves: a line per model and settings, the spread over
    seeds shaded. Gray bands reach up to chance and to condition-blind (no binding, where there are no conditions).
    UsageError where matplotlib is missing or cannot write the file."""
    try:
        from matplotlib.figure import Figure  # not pyplot, which looks for a display and keeps every figure
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(9, 3.3 * len(splits)), layout="constrained")
    for (split, runs), (left, right) in zip(splits.items(), figure.subplots(len(splits), 2, squeeze=False)):
        columns, baselines = list(runs[0][1]["accuracy"]), runs[0][1]["baselines"]
        for name, gray in ((list(baselines[columns[-1]])[-1], "0.9"), ("chance", "0.75")):
            left.fill_between(columns, [baselines[c].get(name, 1) for c in columns], color=gray, label=name)
        for i, (label, results) in enumerate(by_settings(runs).items()):
            style = {"color": COLORBLIND[i % 9], "marker": "osD^v<>PXp"[i % 10], "markersize": 4}
            values = torch.tensor([[r["accuracy"][c] for c in columns] for r in results])
            left.plot(columns, values.mean(0), label=label, **style)
            left.fill_between(columns, values.amin(0), values.amax(0), color=style["color"], alpha=0.2)
            for r in results:
                right.plot([row["trials"] / 1000 for row in r["log"]], [row["train"] for row in r["log"]], **style)
        left.set(title=split, ylabel="accuracy on the test set", ylim=(0, 1.02))
        left.tick_params(axis="x", labelsize="x-small")
        right.set(xlabel="training trials, thousands", ylabel="accuracy in training", ylim=(0, 1.02))
        drawn = left.get_legend_handles_labels()
        right.legend(*drawn, fontsize="x-small", loc="lower right", ncols=1 if len(drawn[0]) < 8 else 2)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {error}") from error


def result_of(folder, config, args, device):
    """A run's saved result, or with --fresh the result of its weights. None where there is none."""
    if not args.fresh:
        return read(folder / "result.json") if finished(config, folder) else None
    if (folder / "checkpoint.pt").exists():
        model, step, rows = load(folder, config, device)
        if step < config["steps"]:
            config["settings"] += f", step {step:,} of {config['steps']:,}"
        result = score(model, config["split"], args.n, device, config["precision"])
        return result | {"alignment": alignment(model, config["split"], device), "log": rows}


def evaluate(args):
    """Does what the arguments of the command line ask for."""
    device, splits = pick_device(args.device), {}
    for folder, config in find(args.runs):
        result, split = result_of(folder, config, args, device), config["split"]
        if result is None:
            why = "has no weights" if args.fresh else "is unfinished or has other test sets now (--fresh evaluates it)"
            print(f"left out, since it {why}: {folder}", file=sys.stderr)
            continue
        name = config["model"], config["settings"], config["seed"]  # the same run in two folders is no second seed
        splits.setdefault(split, {})[name] = config, result
        if args.show or args.attention:
            model = load(folder, config, device)[0]
            print(f"\n{folder}")
        if args.show:
            print("\n" + mistakes(model, split, args.show, device, config["precision"]))
        if args.attention:
            print("\n" + attention(model, split, device))
    splits = {split: [*named.values()] for split, named in splits.items()}
    if args.summary:
        print("\n" + summary_table(splits, args.markdown))
    for split, runs in splits.items():
        if not args.summary:
            print("\n" + split_table(split, runs, args.markdown, args.per_operator))
        for key in ("device", "precision"):
            values = sorted({str(config[key]) for config, _ in runs})
            if len(values) > 1:
                print(f"These rows differ in {key}: {', '.join(values)}.")
    if args.plot and splits:
        plot(splits, args.plot)
        print(f"\nDrawn: {args.plot}")
    if args.rsa:
        print("\n" + rsa_table(splits, args.markdown))


def main(argv=None):
    parser = argparse.ArgumentParser(description="Evaluate trained models: one table per split.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("runs", nargs="*", default=[Path("runs")], type=Path,
                        help="run folders, or folders above them; where a run is there twice, the last counts")
    parser.add_argument("--fresh", action="store_true",
                        help="evaluate the weights again, of unfinished runs too, instead of printing saved results")
    parser.add_argument("--n", type=data.between(1, 10 ** 5), default=10_000, help="trials per test set, with --fresh")
    parser.add_argument("--per-operator", action="store_true",
                        help="add a line per operator that answers, and per operator of the root's condition")
    parser.add_argument("--show", type=data.between(0, 1000), default=0, metavar="N",
                        help="print N trials that each model got wrong, of 1,000")
    parser.add_argument("--attention", action="store_true", help="print where each model looks in one trial")
    parser.add_argument("--summary", action="store_true", help="one table of all splits, of runs with default settings")
    parser.add_argument("--rsa", action="store_true", help="add whether hidden states are organized like the answer")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw accuracy and learning (needs matplotlib)")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto", help="where to compute")
    args = parser.parse_args(argv)
    try:
        evaluate(args)
    except (UsageError, OSError) as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
