"""Evaluates trained models: rebuilds them from their run folders and prints one table per split.

    python eval.py runs                                # every run, one table per split
    python eval.py runs/productive --per-operator      # ... and by the operator that answers
    python eval.py runs/distractor/sstfmr --show 3     # trials that the model got wrong

Two baselines stand above the models. Chance: the best constant for each answering operator. No binding: the best
guess of a reader who sees which shapes, which colors and which cells are on the grid, but not which belong together;
below it a model has not learned to look anything up.
"""
import argparse
import functools
import importlib
import json
import statistics
import sys
from pathlib import Path

import data  # before torch: it says how torch's threads wait
import torch

FORMAT = 1  # of the run folders


# ---- test sets and baselines ------------------------------------------------------------------------------------

@functools.cache
def test_set(split, subset, n):
    """Trials, the operator that answers each (n,), and the accuracy of the two baselines on each (n,)."""
    made = data.trials(split, subset, n)
    operator = made.instruction[:, :, 0].gather(1, data.path(made.instruction, made.stimulus)[:, -1:])[:, 0]
    return made, operator, chance(made, operator), no_binding(made, operator)


def chance(trials, operator):
    """Accuracy (n,) of the most frequent answer to each operator in these trials."""
    right = torch.zeros(len(operator))
    for op in operator.unique():
        right[operator == op] = (trials.answer == trials.answer[operator == op].mode().values).float()[operator == op]
    return right


def no_binding(trials, operator):
    """Expected accuracy (n,) of a reader who sees which shapes, colors and cells are on the grid, and the question.
    Parities stay at chance: their decoy makes the cells the same whatever the answer."""
    token = data.path(trials.instruction, trials.stimulus)[:, -1:]
    shape, color = trials.instruction.gather(1, token[:, :, None].expand(-1, -1, 5))[:, 0, 1:3].unbind(1)
    on_grid = [torch.zeros(len(operator), 27).scatter_(1, x.long(), 1) for x in trials.stimulus.unbind(2)]
    both = on_grid[0].gather(1, shape[:, None].long()) * on_grid[1].gather(1, color[:, None].long())
    right = chance(trials, operator)
    shapes, colors = (x[:, 1:].sum(1) for x in on_grid)
    objects = (trials.stimulus[:, :, 0] > 0).sum(1)
    for op, value in ((data.EXIST, (both[:, 0] == (trials.answer == data.TRUE)).float()), (data.LOCATION, 1 / objects),
                      (data.COLOR, 1 / colors), (data.SHAPE, 1 / shapes)):
        right = torch.where(operator == op, value, right)
    return right


def in_distribution(split):
    """The test sets drawn like the training trials, depth by depth."""
    train = data.SPLITS[split]["train"]
    return [name for name, subset in data.SPLITS[split].items() if name != "train"
            and subset._replace(depths=train.depths) == train and set(subset.depths) <= set(train.depths)]


def groups(split, subset, operator):
    """The columns of a table that a test set fills: name -> which trials. systematic1 reports its held-out pairs also
    without GetColor and GetShape, whose held-out selectors no operator was ever asked with in that form."""
    columns = {subset: torch.ones_like(operator, dtype=torch.bool)}
    if (split, subset) == ("systematic1", "ood"):
        columns["ood6"] = (operator != data.COLOR) & (operator != data.SHAPE)
    return columns


# ---- models -----------------------------------------------------------------------------------------------------

def available():
    """The models: every file in models/ that defines Model."""
    return sorted(p.stem for p in (Path(__file__).parent / "models").glob("*.py") if "\nclass Model(" in p.read_text())


def module_of(name):
    """The module models/<name>.py. ValueError for a name that is no model."""
    if name not in available():
        raise ValueError(f"no model {name!r}; there are {', '.join(available())}")
    return importlib.import_module(f"models.{name}")


def pick_device(name):
    """The device of that name, or for auto the best one here. ValueError where it is not there."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if name == "auto":
        return next(d for d in there if there[d])
    if not there.get(name):
        raise ValueError(f"there is no device {name!r} here; there is {', '.join(d for d in there if there[d])}")
    return name


def load(folder, device="cpu"):
    """The model of a run folder and its configuration, from the folder alone. ValueError where the files are damaged
    or not of this format."""
    try:
        config = json.loads((folder / "config.json").read_text())
        if config["format"] != FORMAT:
            raise ValueError(f"format {config['format']}, this program reads format {FORMAT}")
        model = module_of(config["model"]).Model(**config["model_args"])
        checkpoint = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(checkpoint["model"])
    except Exception as error:  # whatever is wrong with the files, it is the files
        raise ValueError(f"{folder} does not hold a readable run: {str(error).splitlines()[0]}") from error
    return model.to(device).eval(), config, checkpoint["step"]


@torch.no_grad()
def predict(model, split, n, device, precision="float32"):
    """The model's answers to the first n trials of each test set of a split: subset -> (n,) on the CPU."""
    model.eval()
    predictions = {}
    for subset in list(data.SPLITS[split])[1:]:
        made = test_set(split, subset, n)[0]
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bfloat16"):
            predictions[subset] = torch.cat([model(i.to(device), s.to(device)).argmax(1).cpu() for i, s in
                                             zip(made.instruction.split(100), made.stimulus.split(100))])
    model.train()
    return predictions


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
        right = (predicted == made.answer).float()
        for column, chosen in groups(split, subset, operator).items():
            result["accuracy"][column] = right[chosen].mean().item()
            result["interval"][column] = wilson(result["accuracy"][column], int(chosen.sum()))
            result["chance"][column] = by_chance[chosen].mean().item()
            result["no_binding"][column] = unbound[chosen].mean().item()
            result["per_operator"][column] = {data.OPERATORS[op]: right[chosen & (operator == op)].mean().item()
                                              for op in operator[chosen].unique().tolist()}
    return result


# ---- tables -----------------------------------------------------------------------------------------------------

def percent(values):
    """A mean in percent, with its standard deviation where there are several values."""
    values = [100 * v for v in values]
    return f"{statistics.mean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def table(header, rows, markdown=False):
    """Rows of strings under a header, as aligned text or as Markdown."""
    widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]
    lines = [[c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))]
             for row in [header, *rows]]
    rule = ["-" * w if i == 0 else "-" * (w - 1) + ":" for i, w in enumerate(widths)]
    if markdown:
        return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], rule, *lines[1:]])
    return "\n".join("  ".join(line).rstrip() for line in lines)


def split_table(split, runs, markdown=False, per_operator=False):
    """One row per model and settings, mean and spread over seeds; runs are (config, result) pairs of one split."""
    columns = list(runs[0][1]["accuracy"])
    rows = [[name, *(percent([runs[0][1][key][c]]) for c in columns)] for name, key in
            (("chance", "chance"), ("no binding", "no_binding"))]
    by_row = {}
    for config, result in runs:
        by_row.setdefault((config["model"], config["settings"]), []).append(result)
    for (model, settings), results in by_row.items():
        seeds = f", {len(results)} seeds" if len(results) > 1 else ""
        rows.append([f"{model} ({settings}{seeds})", *(percent([r["accuracy"][c] for r in results]) for c in columns)])
        for op in data.OPERATORS[1:9] if per_operator else ():
            cells = [[r["per_operator"][c][op] for r in results if op in r["per_operator"][c]] for c in columns]
            rows.append([f"  {op}", *(percent(v) if v else "" for v in cells)])
    return table([f"{split}, accuracy in %", *columns], rows, markdown)


def mistakes(model, split, n, device):
    """The first n trials of the last test set that the model answers wrong, as text."""
    subset, predicted = list(predict(model, split, 1000, device).items())[-1]
    made = test_set(split, subset, 1000)[0]
    wrong = (predicted != made.answer).nonzero()[:n, 0].tolist()
    return "\n\n".join(data.show(data.Trials(*(x[i] for x in made)))
                       + f"\nThe model says: {data.name(int(predicted[i]))}" for i in wrong)


def main(argv=None):
    parser = argparse.ArgumentParser(description="Evaluate trained models: one table per split.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("runs", nargs="*", default=["runs"], type=Path, help="run folders, or folders above them")
    parser.add_argument("--n", type=int, default=10_000, help="trials per test set")
    parser.add_argument("--saved", action="store_true", help="print the results saved by train.py instead of new ones")
    parser.add_argument("--per-operator", action="store_true", help="add a line per answering operator")
    parser.add_argument("--show", type=int, default=0, metavar="N", help="print N trials that each model got wrong")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    args = parser.parse_args(argv)
    try:
        evaluate(args)
    except ValueError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def evaluate(args):
    """Does what the arguments of the command line ask for."""
    device = pick_device(args.device)
    if args.n < 1 or args.show < 0:
        raise ValueError(f"--n must be at least 1 and --show at least 0, not {args.n} and {args.show}")
    folders = sorted({c.parent for path in args.runs for c in path.rglob("config.json")})
    if not folders:
        raise ValueError(f"no run in {', '.join(map(str, args.runs))}: train one with train.py")
    splits = {}
    for folder in folders:
        if args.saved and not (folder / "result.json").exists():
            continue
        model, config, step = load(folder, device)
        result = json.loads((folder / "result.json").read_text()) if args.saved else score(
            config["split"], predict(model, config["split"], args.n, device, config["precision"]))
        if step < config["steps"]:
            config["settings"] += f", step {step:,} of {config['steps']:,}"
        splits.setdefault(config["split"], []).append((config, result))
        if args.show:
            print(f"\n{folder}\n\n{mistakes(model, config['split'], args.show, device)}")
    for split, runs in splits.items():
        print("\n" + split_table(split, runs, args.markdown, args.per_operator))
        for key in ("commit", "device"):
            values = sorted({str(config[key]) for config, _ in runs})
            if len(values) > 1:
                print(f"These rows differ in {key}: {', '.join(values)}.")


if __name__ == "__main__":
    main()
