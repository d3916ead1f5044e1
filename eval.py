"""Evaluates trained models: tables, mistakes, a picture of attention.

    python eval.py runs                                # what train.py measured at the end of runs
    python eval.py runs/productive --per-operator      # ... and by the operator that answers
    python eval.py runs/distractor/sstfmr --show 3     # trials that the model got wrong
    python eval.py runs/productive/looptfmr --attention look.png --subset depth5
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
from models import module_of

TEST_TRIALS = 10_000  # per test set


# ---- what a number is compared with -------------------------------------------------------------

@functools.cache
def test_set(split, name, subset, n):  # a set that changed under its name is another subset
    """n Trials; kind of trial -> the numbers of its trials; baseline -> its accuracy."""
    made = data.trials(split, name, n)
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
            for answer in possible:
                share[operator][answer] += 1 / len(pool.leaves) / len(possible)
    return {name: max(counts.values()) / counts.total() for name, counts in share.items()}


def no_binding(node, stimulus, shortcuts):
    """The probability to answer a Solved operator right, for a reader who sees which shapes, colors
    and cells are on the grid, but not which belong together."""
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


def in_distribution(split):
    """The test sets drawn like the training trials, depth by depth. UsageError if there is none."""
    train = data.SPLITS[split]["train"]
    found = [name for name, subset in data.SPLITS[split].items()
             if name != "train" and subset._replace(depths=train.depths) == train
             and set(subset.depths) <= set(train.depths)]
    if not found:
        raise UsageError(f"{split} needs a test set drawn like its training trials")
    return found


def hardest(split):
    """The last test set in distribution, and the last one out of it."""
    return in_distribution(split)[-1], list(data.SPLITS[split])[-1]


def tests_of(split, n):
    """Test set -> the number of its trials, with a hash of the first hundred, as text."""
    return {name: f"{n:,} trials {hash_of(split, name, subset)}"
            for name, subset in data.SPLITS[split].items() if name != "train"}


@functools.cache
def hash_of(split, name, subset):  # subset: as in test_set
    some = b"".join(part.numpy().tobytes() for part in data.trials(split, name, 100))
    return hashlib.sha256(some).hexdigest()[:8]


# ---- accuracy -----------------------------------------------------------------------------------

def devices():
    """Where this machine can compute, the best last."""
    mps, cuda = torch.backends.mps.is_available(), torch.cuda.is_available()
    return ["mps"] * mps + ["cpu"] + ["cuda"] * cuda  # mps is untested


KEYS = {"config.json": ("split", "model", "settings", "seed", "model_args"),
        "result.json": ("accuracy", "baselines", "kinds", "tests", "log")}


def read(path):
    """What a JSON file of a run holds. UsageError where it is missing or damaged."""
    try:
        content = json.loads(path.read_text())
        return content | {key: content[key] for key in KEYS.get(path.name, ())}  # or KeyError
    except Exception as error:  # any failure here means a bad file
        raise UsageError(f"{path} is missing or damaged: {error!r}") from error


def config_of(folder):
    """The config of a run folder."""
    config = read(folder / "config.json")
    if config["split"] not in data.SPLITS:
        raise UsageError(f"there is no split {config['split']!r} any more")
    return config


def code_of(model):
    """File -> a short hash of its code, without comments, layout and docstrings: the files that
    decide what a run computes, if they are there."""
    hashes = {}
    for name in "data.py", "train.py", f"models/{model}.py":
        path = Path(__file__).parent / name
        if path.exists():  # not so for a model that is gone
            code = repr(plain(ast.parse(path.read_text(encoding="utf-8"), path)))
            hashes[name] = hashlib.sha256(code.encode()).hexdigest()[:8]
    return hashes


def plain(node):
    """A syntax tree as lists, the same in all versions of Python, without docstrings."""
    if isinstance(node, list):
        return [plain(item) for item in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
        del node.body[0]
    return [type(node).__name__, *((field, plain(value)) for field, value in ast.iter_fields(node)
                                   if value != [])]  # newer versions have more empty fields


def changed(config):
    """The files that changed since a run began. (Recorded runs name no code: none.)"""
    then = config.get("code", {})
    now = code_of(config["model"]) if then else {}
    return [file for file in then if now.get(file) != then[file]]


def checkpoint_of(folder):
    """What checkpoint.pt of a run holds."""
    path = folder / "checkpoint.pt"
    try:
        with zipfile.ZipFile(path) as file:  # torch.load does not notice a flipped bit
            if file.testzip():
                raise zipfile.BadZipFile
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # any failure here means a bad file
        raise UsageError(f"{path} is {'damaged' if path.exists() else 'missing'}") from error


def load(folder, device="cpu"):
    """The model of a run folder, ready to call, and its config with that device. A line on stderr
    says which code has changed since."""
    folder = Path(folder)
    config = config_of(folder) | {"device": device}
    saved, name = checkpoint_of(folder), config["model"]
    try:
        with torch.random.fork_rng(devices=[]):  # leaves the global generator alone
            model = module_of(name).Model(**config["model_args"])
        model.load_state_dict(saved["model"])
    except Exception as error:  # any failure here means that they do not fit
        raise UsageError(f"its weights do not fit today's models/{name}.py and data.py: was an "
                         f"operator added, or a setting changed? ({error!r:.80})") from error
    if files := changed({"code": saved.get("code", {})} | config):  # recorded weights have it
        print(f"{folder}: {', '.join(files)} changed since this run", file=sys.stderr)
    return model.to(device).eval(), config


@torch.no_grad()
def predict(function, trials, device):
    """The outputs of a model, or of its `features`, for trials (n, ...), a hundred at a time. The
    model gets copies, which it may change."""
    outputs = []
    for tokens in zip(trials.instruction.split(100), trials.stimulus.split(100)):
        outputs.append(function(*(x.to(device, copy=True) for x in tokens)).cpu())
    outputs = torch.cat(outputs)
    if not outputs.isfinite().all():
        raise UsageError("the outputs of the model are not finite")
    return outputs


def score(model, split, n, device):
    """On n trials of each test set: accuracy (0 to 1), baselines, accuracy by kind of trial."""
    result = {"accuracy": {}, "baselines": {}, "kinds": {}, "tests": tests_of(split, n)}
    quiet = True if n < 1000 else None  # None: where stderr is no terminal
    for name in tqdm(result["tests"], f"testing {split}", leave=False, disable=quiet):
        made, kinds, result["baselines"][name] = test_set(split, name, data.SPLITS[split][name], n)
        right = (predict(model, made, device).argmax(1) == made.answer).float()
        result["accuracy"][name] = right.mean().item()
        result["kinds"][name] = {kind: right[where].mean().item() for kind, where in kinds.items()}
    return result


# ---- why: mistakes, and where a model looks -----------------------------------------------------

def mistakes(model, config, n):
    """The first n trials that a model answers wrong, of the first 1,000 of the last test set."""
    made = data.trials(config["split"], hardest(config["split"])[1], 1000)
    says = predict(model, made, config["device"]).argmax(1)
    wrong = (f"{data.show(trial)}\nThe model says: {data.ANSWERS[said]}"
             for trial, said in zip(zip(*made), says) if trial[2] != said)
    return "\n\n".join(itertools.islice(wrong, n)) or "No mistake in 1,000."


def answering(model, kind):
    """The modules of that class through which the token that answers goes: (name, module, row)."""
    reader = getattr(model, "encode_instruction", model)  # the part that chooses a token
    usual = getattr(reader, "read", None) or 0  # -1: EOS; 0: the root, or the first latent
    for name, module in model.named_modules():
        part = getattr(model, name.partition(".")[0], None)
        row = getattr(part, "read", usual)  # None: an encoder of which all tokens go on
        if type(module).__name__ == kind and row is not None:
            yield name, module, row


def looks(model, trial, operator=0):
    """Where the token that answers looks, in Trials of one: its attentions in the order of
    computing, as (name, [(key, weight), ...]), and what the readout gave. A key is a cell with an
    object, or words. A weight is the mean over heads. LoopTfmr answers for any operator."""
    found, said = [], []
    question, grid = keys_of(model, trial)

    def record(module, inputs, _, name, row):
        weights = module.weights(*inputs)[0].mean(0)[row].tolist()
        keys = question if "instruction" in name else question + grid
        if "each_other" in name:
            keys = [f"latent {i}" for i in range(len(weights))]
        keys = keys[-len(weights):]  # some see the grid alone
        found.append((name.removesuffix(".attention"), list(zip(keys, weights))))

    with contextlib.ExitStack() as hooks:
        for name, module, row in answering(model, "Attention"):
            hook = functools.partial(record, name=name, row=operator if row == 0 else row)
            hooks.enter_context(module.register_forward_hook(hook))
        hooks.enter_context(model.readout.register_forward_hook(lambda *call: said.append(call[2])))
        predict(model, trial, next(model.parameters()).device.type)
    return found, said


def keys_of(model, trial):
    """The tokens of a question and of a grid, in the order in which a model reads them."""
    names, letters = ["", *data.OPERATORS], ["", *(f" {letter}" for letter in data.LETTERS)]
    colors = ["", *(f" {color}" for color in data.COLOR_NAMES)]  # 0 is nothing
    loops, tokens = hasattr(model, "answers"), trial.instruction[0].tolist()
    if loops:  # LoopTfmr has no IfElses and no EOS
        tokens = [token for token in tokens if token[0] != data.IF_ELSE]
    first = [names[name] + colors[color] + letters[shape] for name, shape, color, _, _ in tokens]
    second = [names[name] + colors[color] + letters[shape] for name, _, _, shape, color in tokens]
    if hasattr(model, "instruction") and hasattr(model.instruction, "shape2"):
        second = []  # PaperTfmr has one token per operator
    last = [f"answer to {token}" for token in first] if loops else ["EOS of the question"]
    cells = [cell for cell, (shape, _) in zip(data.CELLS, trial.stimulus[0].tolist()) if shape]
    empty = ["empty cells"] if len(cells) < len(data.CELLS) else []
    return first + second + last, cells + empty + ["EOS of the grid"]


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
    """The code, settings and test trials that seeds of one row share, as a set of (name, value).
    Recorded runs name an edition instead of their code."""
    names = "edition steps batch_size train_size optimizer lr decay schedule".split()
    settings = {name: config.get(name) for name in names} | config["model_args"]
    whole = config.get("code", {}) | settings | result["tests"]
    return frozenset((name, str(value)) for name, value in whole.items())


def rows_of(runs):
    """Label of a row -> its runs (config, result), one per seed: of copies, the first. Runs of one
    name that differ in more than the seed have rows of their own: the second one ends in #2."""
    found = {}  # name -> identity -> seed -> run
    for config, result in runs:
        alike = found.setdefault(f"{config['model']} ({config['settings']})", {})
        seeds = alike.setdefault(identity(config, result), {})
        seeds.setdefault(config["seed"], (config, result))
    return {name if i == 1 else f"{name} #{i}": [*seeds.values()]
            for name, alike in found.items() for i, seeds in enumerate(alike.values(), 1)}


def notes(split, rows):
    """Sentences on rows that differ from the first of their name, or from what there is today."""
    for label, [(config, result), *_] in rows.items():
        first = rows[label.partition(" #")[0]][0]
        other = {name for name, _ in identity(*first) ^ identity(config, result)}
        tests = [name for name, test in tests_of(split, TEST_TRIALS).items()
                 if result["tests"].get(name) != test]
        if other:
            yield f"{label} differs from the first row of its name in {', '.join(sorted(other))}."
        if files := changed(config):
            yield f"{label}: {', '.join(files)} changed since."
        if tests:
            yield f"{label} was not tested on today's trials of {', '.join(tests)}."


def split_table(split, runs, per_operator):
    """A row per model and settings, mean and spread over seeds, then notes. Runs are (config,
    result) pairs of one split."""
    rows = rows_of(runs)
    sets = {name: found for _, result in runs for name, found in result["baselines"].items()}
    lines = [[name, *(percent([found.get(name)]) for found in sets.values())]
             for name in max(sets.values(), key=len)]  # at depth 1, none is condition-blind
    for label, seeds in rows.items():
        results = [result for _, result in seeds]
        label += f", {len(results)} seeds" if len(results) > 1 else ""
        lines.append([label, *(percent(r["accuracy"].get(c) for r in results) for c in sets)])
        kinds = dict.fromkeys(kind for r in results for of in r["kinds"].values() for kind in of)
        lines += [[f"  {kind}", *(percent(r["kinds"].get(c, {}).get(kind) for r in results)
                                  for c in sets)] for kind in kinds if per_operator]
    return "\n".join([table([f"{split}, accuracy in %", *sets], lines), *notes(split, rows)])


# ---- a picture ----------------------------------------------------------------------------------

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
        with data.replacing(path) as temporary:
            figure.savefig(temporary, format=Path(path).suffix[1:] or "png", dpi=150,
                           bbox_inches="tight")
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {error}") from error
    print(f"\nDrawn: {path}")


def draw_attention(folder, args):
    """Draws where the token that answers looks in a trial, in LoopTfmr with a row for each loop."""
    model, config = load(folder, devices()[-1])
    split, operator = config["split"], args.operator
    subset = args.subset or hardest(split)[0]
    trial = data.Trials(*(part[-1:] for part in data.trials(split, subset, args.trial + 1)))
    solved = data.evaluate(trial.instruction[0], trial.stimulus[0])
    loops = hasattr(model, "answers")
    if operator and (operator >= len(solved) or not loops):
        raise UsageError(f"--operator: there is none but the root, or LoopTfmr's {len(solved)}")
    found, said = looks(model, trial, operator)
    if not any(key == "EOS of the grid" for _, look in found for key, _ in look):
        raise UsageError(f"{config['model']} has no attention to the grid that could be drawn")
    right = data.ANSWERS[solved[data.descend(solved, operator)[-1]].answer]
    # LoopTfmr reads all operators after each loop, and then the root once more
    logits = said[-2][0, operator] if operator else said[-1][0]
    text = (f"{data.describe(solved, operator)}\n\nRight answer: {right}. "
            f"The model says: {data.ANSWERS[logits.argmax()]}.\n{config['model']} "
            f"({config['settings']}), seed {config['seed']}; {split}, {subset}, trial {args.trial}"
            "\nAttention of the token that answers, in percent (mean over heads; from 0.5 on)\n")
    columns = len({name for name, _ in found})
    rows = math.ceil(len(found) / columns)
    with drawing(args.attention, 4.6 * columns, 2.6 * rows + 0.17 * text.count("\n")) as figure:
        figure.suptitle(text, x=0.01, ha="left", fontsize=9, family="monospace")
        for i, (name, look) in enumerate(found):
            axis = figure.add_subplot(rows, columns, i + 1)
            loop = f", loop {i // columns + 1}" if loops else ""
            axis.set_title(name + loop, fontsize=9, loc="left")
            draw_look(axis, trial.stimulus[0].tolist(), look)


def draw_look(axis, stimulus, look):
    """The grid, and beside it the ten words that weigh most. Shade is attention."""
    from matplotlib.patheffects import withStroke
    shares, size = dict(look), data.GRID
    grid = [[shares.get((row, column), 0) for column in range(size)] for row in range(size)]
    words = [(share, key) for key, share in look if isinstance(key, str) and share >= 0.005]
    words = sorted(words, reverse=True)[:size]
    shade = {"cmap": "gray", "vmin": -0.2, "vmax": 1.2, "edgecolors": "0.35", "linewidth": 0.5}
    axis.pcolormesh(range(size + 1), range(size + 1), grid, **shade)
    if words:
        axis.pcolormesh([11, 12], range(len(words) + 1), [[share] for share, _ in words], **shade)
    axis.set(xlim=(-0.7, 20), ylim=(size, -0.7), aspect="equal")
    axis.set_axis_off()
    edge = {"path_effects": [withStroke(linewidth=1.5, foreground="black")]}  # on bright cells
    bold = {"weight": "bold", "ha": "center", "va": "center", **edge}
    for i in range(size):
        axis.text(-0.3, i + 0.5, i, size=6, color="0.5", ha="center", va="center")
        axis.text(i + 0.5, -0.4, i, size=6, color="0.5", ha="center", va="center")
    for (row, column), (shape, color) in zip(data.CELLS, stimulus):
        share = grid[row][column]
        if shape:
            letter = data.LETTERS[shape - 1]
            axis.text(column + 0.5, row + 0.5, letter, color=BRIGHT[color - 1], **bold)
        if share >= 0.005:
            axis.text(column + 0.97, row + 0.95, f"{100 * share:.0f}", size=5, color="white",
                      ha="right", **edge)
    for row, (share, key) in enumerate(words):
        axis.text(11.5, row + 0.5, f"{100 * share:.0f}", color="white", size=7, **bold)
        axis.text(12.3, row + 0.5, key, size=8, va="center")


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
        description="Evaluate trained models: one table per split.", usage=argparse.SUPPRESS)
    add = parser.add_argument
    add("runs", nargs="*", default=[Path("runs")], type=Path, help="run folders, or folders above "
        "them (default: runs); of copies of a run, the first counts")
    add("--per-operator", action="store_true", help="add a line per operator that answers, and per "
        "operator of the root's condition")
    add("--show", type=between(0, 1000), default=0, metavar="N", help="print N trials that each "
        "model got wrong, of 1,000 (default: 0)")
    add("--attention", type=Path, metavar="FILE", help="instead, draw where the token that answers "
        "looks, in one trial of the first run (needs matplotlib)")
    add("--subset", help="its test set (default: the last one in distribution)")
    add("--trial", type=between(0, 9999), default=0, help="its number (default: 0)")
    add("--operator", type=between(0, 30), default=0, help="whose token, level by level; in "
        "LoopTfmr, all operators answer (default: 0, the root)")
    args = parser.parse_args(argv)
    with data.ending(parser):
        found = [path for above in args.runs for path in sorted(above.rglob("config.json"))]
        folders = list(dict.fromkeys(path.parent.resolve() for path in found))
        if args.attention and folders:
            return draw_attention(folders[0], args)
        splits = {}
        for folder in folders:
            try:
                config = config_of(folder)
                if not (folder / "result.json").exists():
                    raise UsageError("it is unfinished (log.csv says how far it is)")
                run = config, read(folder / "result.json")
                splits.setdefault(config["split"], []).append(run)
                if args.show:
                    wrong = mistakes(*load(folder, devices()[-1]), args.show)
                    print(f"\n{folder}\n\n{wrong}")
            except UsageError as error:
                print(f"not shown: {folder}: {error}", file=sys.stderr)
        if not splits:
            remedy = "" if found else ": train one with train.py"
            raise UsageError(f"no run to show in {', '.join(map(str, args.runs))}{remedy}")
        for split, runs in splits.items():
            print("\n" + split_table(split, runs, args.per_operator))


if __name__ == "__main__":
    main()
