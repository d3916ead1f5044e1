"""Evaluates trained models: rebuilds them from their run folders and prints one table per split.

    python eval.py runs                                # every run, one table per split
    python eval.py runs/productive --per-operator      # ... and by the operator that answers
    python eval.py runs/distractor/sstfmr --show 3     # trials that the model got wrong

Two baselines stand above the models. Chance: for each answering operator, its most frequent answer in the test set. No
binding: what a reader can guess who counts each shape and each color and sees which cells are taken, but not which of
them belong together; below it a model has hardly learned to look anything up.
"""
import argparse
import csv
import functools
import importlib
import json
import signal
import statistics
import sys
from pathlib import Path

import data  # before torch: it says how torch's threads wait
import torch
from torch.nn import functional as F

FORMAT = 2  # of the run folders
KEYS = {"config.json": {"split": str, "model": str, "settings": str, "seed": int, "steps": int, "model_args": dict,
                        "precision": str, "commit": str, "device": str},
        "result.json": {"accuracy": dict, "interval": dict, "chance": dict, "no_binding": dict, "per_operator": dict,
                        "alignment": dict}}
RSA_TRIALS, PROBE_TRIALS = 500, 4_000  # per test set


class Refused(ValueError):
    """What was asked for cannot be done, said in one line. Any other error is a bug, and shows its traceback."""


# ---- test sets and baselines ------------------------------------------------------------------------------------

@functools.cache
def test_set(split, subset, n):
    """Trials, the operator that answers each (n,), and the accuracy of the two baselines on each (n,)."""
    made = data.trials(split, subset, n)
    parts = zip(made.instruction.split(1000), made.stimulus.split(1000))  # all at once would take gigabytes
    token = made.instruction[torch.arange(n), torch.cat([data.path(*part)[:, -1] for part in parts])]  # (n, 5)
    return made, token[:, 0], chance(made, token[:, 0]), no_binding(made, token)


def chance(trials, operator):
    """Accuracy (n,) of the most frequent answer to each operator in these trials."""
    right = torch.zeros(len(operator))
    for op in operator.unique():
        right[operator == op] = (trials.answer == trials.answer[operator == op].mode().values).float()[operator == op]
    return right


def no_binding(trials, token):
    """Expected accuracy (n,) of a reader who counts shapes, colors and cells, and sees the question, of which `token`
    (n, 5) answers: an object exists if its shape and its color do, is on any cell taken, has the most frequent color or
    shape. Parities stay at chance: their decoy makes the cells the same whatever the answer."""
    operator, shape, color = token[:, :3].unbind(1)
    shapes, colors = (torch.zeros(len(operator), 27).scatter_add_(1, x.long(), torch.ones(x.shape))
                      for x in trials.stimulus.unbind(2))  # (n, 27) counts, 0 is empty
    exists = (shapes.gather(1, shape[:, None].long()) * colors.gather(1, color[:, None].long()) > 0)[:, 0]
    right, objects = chance(trials, operator), shapes[:, 1:].sum(1)
    for op, value in ((data.EXIST, (exists == (trials.answer == data.TRUE)).float()), (data.GET_LOCATION, 1 / objects),
                      (data.GET_COLOR, colors[:, 1:].amax(1) / objects),
                      (data.GET_SHAPE, shapes[:, 1:].amax(1) / objects)):
        right = torch.where(operator == op, value, right)
    return right


def in_distribution(split):
    """The test sets drawn like the training trials, depth by depth."""
    train = data.SPLITS[split]["train"]
    return [name for name, subset in data.SPLITS[split].items() if name != "train"
            and subset._replace(depths=train.depths) == train and set(subset.depths) <= set(train.depths)]


# ---- models -----------------------------------------------------------------------------------------------------

def available():
    """The models: every file in models/ that defines Model."""
    return sorted(p.stem for p in (Path(__file__).parent / "models").glob("*.py") if "\nclass Model(" in p.read_text())


def module_of(name):
    """The module models/<name>.py. Refused for a name that is no model."""
    if name not in available():
        raise Refused(f"no model {name!r}; there are {', '.join(available())}")
    return importlib.import_module(f"models.{name}")


def pick_device(name):
    """The device of that name, or for auto the GPU if there is one, else the CPU. Refused where it is not there."""
    there = {"cuda": torch.cuda.is_available(), "cpu": True, "mps": torch.backends.mps.is_available()}
    if name == "auto":
        return next(d for d in there if there[d])
    if not there.get(name):
        raise Refused(f"there is no device {name!r} here; there is {', '.join(d for d in there if there[d])}")
    return name


def reason(error):
    """What an exception says, in one line of at most 300 characters."""
    return " ".join((str(error) or repr(error)).split())[:300]


def read(path):
    """What config.json or result.json of a run folder holds. Refused where it is damaged or not of this format."""
    try:
        content = dict(json.loads(path.read_text()))
        if content["format"] != FORMAT:
            raise Refused(f"it is of format {content['format']}, this program reads {FORMAT}")
        wrong = [key for key, kind in KEYS[path.name].items() if not isinstance(content.get(key), kind)]
        if wrong:
            raise Refused(f"no {', '.join(wrong)} as it should be")
        if path.name == "config.json" and (content["split"] not in data.SPLITS or content["model"] not in available()):
            raise Refused(f"no split {content['split']!r} or no model {content['model']!r}")
        return content
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Refused(f"{path} is damaged: {reason(error)}") from error


def load(folder, config, device):
    """The model of a run folder, and how many steps it has trained. Refused where the files are damaged."""
    try:
        model = module_of(config["model"]).Model(**config["model_args"])
        checkpoint = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
        return model.to(device).eval(), checkpoint["step"]
    except Exception as error:  # whatever is wrong with the files, it is the files
        raise Refused(f"{folder} does not hold a readable run, or one of other code: {reason(error)}") from error


@torch.no_grad()
def in_parts(function, trials, device, precision="float32"):
    """What a model, or its `features`, makes of trials (n, ..): a hundred at a time; the result is on the CPU."""
    with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
        return torch.cat([function(i.to(device), s.to(device)).float().cpu() for i, s in
                          zip(trials.instruction.split(100), trials.stimulus.split(100))])


def predict(model, split, n, device, precision):
    """The model's answers to the first n trials of each test set of a split: subset -> (n,) on the CPU."""
    return {subset: in_parts(model, test_set(split, subset, n)[0], device, precision).argmax(1)
            for subset in list(data.SPLITS[split])[1:]}


def wilson(p, n):
    """The 95 % Wilson score interval of a share p of n trials."""
    z = 1.96
    center, half = p + z * z / (2 * n), z * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
    return [(center - half) / (1 + z * z / n), (center + half) / (1 + z * z / n)]


def score(split, predictions):
    """Accuracy (0 to 1) and 95 % interval by test set, both baselines, and accuracy by answering operator."""
    result = {key: {} for key in ("accuracy", "interval", "chance", "no_binding", "per_operator")}
    for subset, predicted in predictions.items():
        made, operator, by_chance, unbound = test_set(split, subset, len(predicted))
        right, columns = (predicted == made.answer).float(), {subset: operator > 0}  # name -> which trials
        if (split, subset) == ("systematic1", "ood"):
            # GetColor's and GetShape's held-out selectors: no operator was ever asked with them in that form.
            columns["ood6"] = (operator != data.GET_COLOR) & (operator != data.GET_SHAPE)
        for column, chosen in columns.items():
            result["accuracy"][column] = right[chosen].mean().item()
            result["interval"][column] = wilson(result["accuracy"][column], int(chosen.sum()))
            result["chance"][column] = by_chance[chosen].mean().item()
            result["no_binding"][column] = unbound[chosen].mean().item()
            result["per_operator"][column] = {data.OPERATORS[op]: right[chosen & (operator == op)].mean().item()
                                              for op in operator[chosen].unique().tolist()}
    return result


# ---- why: representations, probes, attention --------------------------------------------------------------------

def spearman(x, y):
    """Rank correlation of two vectors; equal values share the mean of their ranks."""
    ranks = []
    for values in (x, y):
        _, place, count = values.unique(return_inverse=True, return_counts=True)
        ranks.append((count.cumsum(0) - (count - 1) / 2)[place])
    return torch.corrcoef(torch.stack(ranks).double())[0, 1].item()


def one_hot(tokens):
    """Tokens (n, N, features) as one long vector of zeros and ones for each trial."""
    return F.one_hot(tokens.long(), 27).flatten(1).float()


def ends(split):
    """The hardest test set in distribution, and out of it."""
    return in_distribution(split)[-1], list(data.SPLITS[split])[-1]


def alignment(model, split, device):
    """Representational similarity analysis (claim 5 of the paper): the rank correlation, over pairs of trials, of how
    similar the model's hidden states are with how similar stimuli, instructions and answers are; for the test sets
    of `ends`, "in: stimulus" to "out: answer"."""
    result, (first, second) = {}, torch.triu_indices(RSA_TRIALS, RSA_TRIALS, 1)
    for where, subset in zip(("in", "out"), ends(split)):
        trials = test_set(split, subset, RSA_TRIALS)[0]
        states, stimuli, instructions = (torch.corrcoef(x)[first, second].round(decimals=5) for x in (  # ties stay ties
            in_parts(model.features, trials, device), one_hot(trials.stimulus), one_hot(trials.instruction)))
        same = (trials.answer[first] == trials.answer[second]).float()
        for name, other in (("stimulus", stimuli), ("instruction", instructions), ("answer", same)):
            result[f"{where}: {name}"] = spearman(states, other)
    return result


def constituents(trials, nodes):
    """What trials are made of, classes (n,) by name: the parts of the operators at these tokens, and the answer."""
    return {f"{part} of operator {k}": trials.instruction[:, node, i].long() for k, node in enumerate(nodes, 1)
            for i, part in enumerate(("kind", "shape", "color"))} | {"answer": trials.answer}


def probe(model, split, device, n, ridge=10.0):
    """How well ridge regressions decode each constituent of a trial: name -> accuracy from the hidden states in and out
    of distribution, then from the raw input in and out of it. Fitted on one half of the trials in distribution; scored
    on the other half and out of distribution, leaving out values of a constituent that the fit has never seen. Also
    returns how many these are, by name."""
    trials = [test_set(split, subset, n)[0] for subset in ends(split)]
    tokens = trials[0].instruction.shape[1]  # a deeper tree begins with the same tokens
    nodes = (trials[0].instruction[0, :, 0] != data.IF_ELSE).nonzero().flatten().tolist()
    classes = [constituents(t, nodes) for t in trials]
    scores, unseen = {}, {}
    for inputs in ([in_parts(model.features, t, device) for t in trials],
                   [torch.cat([one_hot(t.instruction[:, :tokens]), one_hot(t.stimulus)], 1) for t in trials]):
        fit = inputs[0][:n // 2]
        near, far = (torch.cat([(x - fit.mean(0)) / (fit.std(0) + 1e-6), torch.ones(n, 1)], 1) for x in inputs)
        fit, near = near[:n // 2], near[n // 2:]
        factor = torch.linalg.cholesky(fit.T @ fit + ridge * torch.eye(fit.shape[1]))
        for name, target in classes[0].items():
            known = target[:n // 2].unique()
            weights = torch.cholesky_solve(fit.T @ F.one_hot(target[:n // 2], 138).float(), factor)
            for x, target in ((near, target[n // 2:]), (far, classes[1][name])):
                right = ((x @ weights).argmax(1) == target)[torch.isin(target, known)]
                scores.setdefault(name, []).append(right.float().mean().item())
            unseen[name] = len(set(classes[1][name].tolist()) - set(known.tolist()))
    return scores, unseen


class Softmaxes(torch.overrides.TorchFunctionMode):
    """Keeps every softmax that is computed: an attention's weights."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        if function is torch.Tensor.softmax:
            self.seen.append(result)
        return result


@torch.no_grad()
def attention(model, split, device):
    """Where each attention to the stimulus looks in the first trial of the last test set, as text: one grid for each
    head (for each selector in treetfmr), the mean over its queries; 9 is the most that a cell gets."""
    trials = test_set(split, list(data.SPLITS[split])[-1], 1)[0]
    with Softmaxes() as softmaxes:
        model(trials.instruction.to(device), trials.stimulus.to(device))
    text = [data.show(data.Trials(*(x[0] for x in trials)))]
    for i, weights in enumerate((w[0] for w in softmaxes.seen if w.shape[-1] > 100), 1):
        weights = weights.mean(1) if weights.dim() == 3 else weights  # (heads or selectors, keys)
        for j, cells in enumerate(weights[:, -101:-1].cpu(), 1):  # in all models one more key follows the cells
            text.append(f"Attention {i}, {j}: {cells.sum():.0%} on the grid, at most {cells.max():.0%} on a cell")
            digits = (9 * cells / cells.max()).round().int().view(10, 10).tolist() if cells.sum() > 0.01 else []
            text[-1] += "".join("\n   " + "  ".join(str(d) if d else "." for d in row) for row in digits)
    return "\n\n".join(text)


# ---- tables -----------------------------------------------------------------------------------------------------

def percent(values):
    """A mean in percent, with its standard deviation where there are several values."""
    values = [100 * v for v in values]
    return f"{statistics.mean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def table(header, rows, markdown=False):
    """Rows of strings under a header, as aligned text or as Markdown."""
    first, *others = (max(map(len, column)) for column in zip(header, *rows))  # widths
    lines = [[row[0].ljust(first), *map(str.rjust, row[1:], others)] for row in [header, *rows]]
    rule = ["-" * first, *("-" * (w - 1) + ":" for w in others)]
    if markdown:
        return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])
    return "\n".join("  ".join(line).rstrip() for line in lines)


def rising(log):
    """Whether a run was still learning when it ended: its accuracy on training trials rose by more than one point
    between the last two rows of its log."""
    return len(log) > 1 and log[-1]["train"] > log[-2]["train"] + 0.01


def log_of(folder):
    """The rows of a run's log.csv, if there is one yet. Refused where it is damaged."""
    path = folder / "log.csv"
    try:
        lines = path.read_text().splitlines() if path.exists() else []
        return [{key: float(row[key]) for key in ("trials", "train")} for row in csv.DictReader(lines)]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Refused(f"{path} is damaged: {reason(error)}") from error


def by_settings(runs):
    """Label of a model and its settings -> its results, one per seed; runs are (config, result) pairs."""
    rows = {}
    for config, result in runs:
        rows.setdefault(f"{config['model']} ({config['settings']})", []).append(result)
    return rows


def split_table(split, runs, markdown=False, per_operator=False):
    """One row per model and settings, mean and spread over seeds; runs are (config, result) pairs of one split. An
    arrow marks what was below 99 % in distribution, and still rising, when the run ended."""
    columns, near = list(runs[0][1]["accuracy"]), in_distribution(split)
    if any(list(result["accuracy"]) != columns for _, result in runs):
        raise Refused(f"runs of {split} were tested on different sets: name one kind of them alone")
    rows = [[key.replace("_", " "), *(percent([runs[0][1][key][c]]) for c in columns)]
            for key in ("chance", "no_binding")]
    for label, results in by_settings(runs).items():
        seeds = f", {len(results)} seeds" if len(results) > 1 else ""
        arrows = [c for c in near if any(rising(r["log"]) and r["accuracy"][c] < 0.99 for r in results)]
        cells = {c: percent([r["accuracy"][c] for r in results]) for c in columns}
        rows.append([label + seeds, *(cells[c] + "↑" * (c in arrows) for c in columns)])
        for op in data.OPERATORS[1:9] if per_operator else ():
            parts = [[r["per_operator"][c][op] for r in results if op in r["per_operator"][c]] for c in columns]
            rows.append([f"  {op}", *(percent(v) if v else "" for v in parts)])
    return table([f"{split}, accuracy in %", *columns], rows, markdown)


COLORBLIND = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8B8B00", "#7F3C8D")


def plot(splits, path):
    """Draws, for each split, accuracy by test set and learning curves: a line per model and settings, the spread over
    seeds shaded. Refused where matplotlib is missing or cannot write the file."""
    try:
        from matplotlib.figure import Figure  # not pyplot, which looks for a display and keeps every figure
    except ImportError as error:
        raise Refused("--plot needs matplotlib: pip install matplotlib") from error
    styles, lines = {}, {}  # of each label
    figure = Figure(figsize=(6 * len(splits) + 2, 8), layout="constrained")
    axes = figure.subplots(2, len(splits), squeeze=False)
    for (split, runs), (top, bottom) in zip(splits.items(), axes.T):
        columns = list(runs[0][1]["accuracy"])
        lines["chance"], = top.plot(columns, [runs[0][1]["chance"][c] for c in columns], "k--")
        for label, results in by_settings(runs).items():
            i = len(styles)
            style = styles.setdefault(label, {"color": COLORBLIND[i % 9], "marker": "osD^v<>PXp"[i % 10]})
            values = torch.tensor([[r["accuracy"][c] for c in columns] for r in results])
            lines[label], = top.plot(columns, values.mean(0), **style)
            top.fill_between(columns, values.amin(0), values.amax(0), color=style["color"], alpha=0.2)
            for result in results:
                bottom.plot(*zip(*((row["trials"], row["train"]) for row in result["log"])), **style)
        top.set(title=split, ylabel="accuracy on the test set", ylim=(0, 1.02))
        bottom.set(xlabel="training trials", ylabel="accuracy in training", xscale="log", ylim=(0, 1.02))
    figure.legend(lines.values(), lines, loc="outside right upper")
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise Refused(f"cannot write {path}: {error}") from error


def probe_table(model, split, device, markdown):
    """One row per constituent: how well it is decoded from hidden states and, to compare, from the raw input."""
    (scores, unseen), (near, far) = probe(model, split, device, PROBE_TRIALS), ends(split)
    rows = [[name + (f" ({unseen[name]} values never seen)" if unseen[name] else ""), *(percent([v]) for v in values)]
            for name, values in scores.items()]
    return table([f"{split}, decoded in %", near, far, f"input, {near}", f"input, {far}"], rows, markdown)


def rsa_table(splits, markdown):
    """One row per split, model and settings, means over seeds: how much hidden states are organized like stimulus,
    instruction and answer, in and out of distribution."""
    parts = [f"{where}: {what}" for where in ("in", "out") for what in ("stimulus", "instruction", "answer")]
    rows = [[f"{split} {label}", *(f"{statistics.mean(r['alignment'][part] for r in results):.2f}" for part in parts),
             percent([r["accuracy"][ends(split)[1]] for r in results])]
            for split, runs in splits.items() for label, results in by_settings(runs).items()]
    return table(["rank correlation of similarities with", *parts, "accuracy out"], rows, markdown)


def mistakes(model, split, n, device, precision):
    """The first n trials that the model answers wrong, of the first 1,000 of the last test set, as text."""
    made = test_set(split, list(data.SPLITS[split])[-1], 1000)[0]
    predicted = in_parts(model, made, device, precision).argmax(1)
    wrong = (predicted != made.answer).nonzero()[:n, 0].tolist()
    return "\n\n".join(data.show(data.Trials(*(x[i] for x in made)))
                       + f"\nThe model says: {data.name(int(predicted[i]))}" for i in wrong) or "No mistake in 1,000."


def main(argv=None):
    parser = argparse.ArgumentParser(description="Evaluate trained models: one table per split.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("runs", nargs="*", default=[Path("runs")], type=Path, help="run folders, or folders above them")
    parser.add_argument("--n", type=data.between(1, 10 ** 5), default=10_000, help="trials per test set")
    parser.add_argument("--saved", action="store_true", help="print the results saved by train.py instead of new ones")
    parser.add_argument("--per-operator", action="store_true", help="add a line per answering operator")
    parser.add_argument("--show", type=data.between(0, 1000), default=0, metavar="N",
                        help="print N trials that each model got wrong, of 1,000")
    parser.add_argument("--rsa", action="store_true", help="add whether hidden states are organized like the answer")
    parser.add_argument("--probe", action="store_true", help="add what can be decoded linearly from hidden states")
    parser.add_argument("--attention", action="store_true", help="draw where each model looks in one trial")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw accuracy and learning (needs matplotlib)")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto", help="where to compute")
    args = parser.parse_args(argv)
    try:
        evaluate(args)
    except Refused as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def evaluate(args):
    """Does what the arguments of the command line ask for."""
    device, where = pick_device(args.device), ", ".join(map(str, args.runs))
    folders = sorted({c.parent.resolve() for path in args.runs for c in path.rglob("config.json")})
    if not folders:
        raise Refused(f"no run in {where}: train one with train.py")
    needed = "result.json" if args.saved else "checkpoint.pt"
    folders = [folder for folder in folders if (folder / needed).exists()]  # others are not finished, or not begun
    if not folders:
        raise Refused(f"no run in {where} has a {needed}" + ": leave out --saved" * args.saved)
    splits = {}
    for folder in folders:
        config, result = read(folder / "config.json"), read(folder / "result.json") if args.saved else {}
        split = config["split"]
        looks_inside = args.show or args.attention or args.probe
        if looks_inside or not args.saved:
            if not (folder / "checkpoint.pt").exists():
                raise Refused(f"{folder} has no checkpoint.pt, which --show, --attention and --probe need")
            model, step = load(folder, config, device)
        if not args.saved:
            result = score(split, predict(model, split, args.n, device, config["precision"]))
            if args.rsa:
                result["alignment"] = alignment(model, split, device)
            if step < config["steps"]:
                config["settings"] += f", step {step:,} of {config['steps']:,}"
        splits.setdefault(split, []).append((config, result | {"log": log_of(folder)}))
        if looks_inside:
            print(f"\n{folder}")
        if args.show:
            print("\n" + mistakes(model, split, args.show, device, config["precision"]))
        if args.attention:
            print("\n" + attention(model, split, device))
        if args.probe:
            print("\n" + probe_table(model, split, device, args.markdown))
    for split, runs in splits.items():
        print("\n" + split_table(split, runs, args.markdown, args.per_operator))
        for key in ("commit", "device", "precision"):
            values = sorted({str(config[key]) for config, _ in runs})
            if len(values) > 1:
                print(f"These rows differ in {key}: {', '.join(values)}.")
        if len({(config["model"], config["settings"], config["seed"]) for config, _ in runs}) < len(runs):
            print("Some of these runs have one model, settings and seed, and are counted as several.")
    if args.plot:
        plot(splits, args.plot)
        print(f"\nDrawn: {args.plot}")
    if args.rsa:
        print("\n" + rsa_table(splits, args.markdown))


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):  # not on Windows
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program without a word
    main()
