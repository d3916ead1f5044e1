"""Trains models on gCOG, evaluates them in and out of distribution, and prints a table.

    python train.py --model sstfmr --split productive
    python train.py --model all --split all --seed 0 1 2

The same command goes on where it was interrupted, and started twice it shares the runs. Every run has a folder,
<out>/<split>/<model>/<settings>/seed<k>/, with config.json (all that it was made with), log.csv (how it went),
checkpoint.pt (to go on from, at most a minute old), result.json (accuracies, at the end) and lock (empty).
"""
import argparse
import functools
import inspect
import io
import itertools
import json
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import time
import traceback
import typing
from pathlib import Path

import data  # before torch: it says how torch's threads wait
import torch
from torch.nn import functional as F
from tqdm import tqdm

from eval import (UsageError, alignment, available, code_of, finished, in_distribution, module_of, pick_device, read,
                  score, split_table)

# One budget for all models; a model file may set its own TRAINING beside it.
TRAINING = {"steps": 4_000, "batch_size": 128, "train_size": None, "optimizer": "muon", "lr": 1e-3, "eval_every": None}
OPTIONS = ("dim", "layers", "heads", "train_size", "steps", "batch_size", "optimizer", "lr", "eval_every")  # have flags
PAPER = {"optimizer": "adamw", "lr": 3e-4}  # our rate: at the paper's width, 1e-3 makes sstfmr answer every trial alike
MUON_RATIO = 3  # Muon's learning rate over AdamW's
WARMUP = 100  # steps
LOG_TRIALS, TEST_TRIALS = 300, 10_000  # per test set, on the way and at the end


# ---- what to run ------------------------------------------------------------------------------------------------

def parse(argv):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0] + " Several values of a flag, other than --set, make several runs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter, argument_default=argparse.SUPPRESS)
    count = data.between(1, 10 ** 9)
    group = parser.add_argument_group("what to run")
    group.add_argument("--model", nargs="+", default=["sstfmr"], help=f"all, or any of {', '.join(available())}")
    group.add_argument("--split", nargs="+", default=["productive"], help=f"all, or any of {', '.join(data.SPLITS)}")
    group.add_argument("--seed", nargs="+", type=data.between(0, data.MAX_SEED), default=[0],
                       help="of the weights and the training trials")
    group.add_argument("--out", type=Path, default=Path("runs"), help="where the run folders go")
    group = parser.add_argument_group("the model, with defaults in its file")
    group.add_argument("--dim", nargs="+", type=data.between(1, 8192), help="width")
    group.add_argument("--layers", nargs="+", type=data.between(1, 100), help="number of blocks")
    group.add_argument("--heads", nargs="+", type=data.between(1, 100), help="number of attention heads")
    group.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE",
                       help="any other argument of the model's constructor, for example read=eos")
    group.add_argument("--paper", action="store_true", default=False,
                       help="the paper's sizes, positions, tokens, read and optimizer, for its Transformers")
    group = parser.add_argument_group("training, with the defaults named unless the model's file has others")
    group.add_argument("--steps", nargs="+", type=count, help=f"batches to train on (default: {TRAINING['steps']:,})")
    group.add_argument("--batch-size", nargs="+", type=data.between(1, 10 ** 6),
                       help=f"trials per batch (default: {TRAINING['batch_size']})")
    group.add_argument("--train-size", nargs="+", type=count,
                       help="train on this many trials, again and again (default: all are new)")
    group.add_argument("--optimizer", nargs="+", choices=["muon", "adamw"],
                       help="muon: for matrices of linear layers, adamw for the rest; or adamw (default: muon)")
    group.add_argument("--lr", nargs="+", type=data.between(1e-30, 1e30),
                       help=f"AdamW's peak rate, a third of Muon's (default: {TRAINING['lr']}; --paper: {PAPER['lr']})")
    group.add_argument("--eval-every", nargs="+", type=count, help="steps between evaluations (default: a fifth)")
    group = parser.add_argument_group("the machine")
    group.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto", help="where to compute")
    group.add_argument("--precision", choices=["auto", "float32", "bfloat16"], default="auto",
                       help="of matrix products; auto is bfloat16 on a GPU that has it")
    return parser, parser.parse_args(argv)


def setting(text, parameters):
    """key=value of --set as (key, value), typed by the default of that parameter. UsageError for anything else."""
    key, _, value = text.partition("=")
    if key not in parameters:
        raise UsageError(f"--set knows no {key!r}; the model has {', '.join(parameters) or 'nothing else to set'}")
    kind = type(parameters[key].default)
    choices = (True, False) if kind is bool else typing.get_args(parameters[key].annotation)  # those of a Literal
    by_name = {str(choice): choice for choice in choices}
    try:
        return key, by_name[value] if choices else kind(value)
    except (KeyError, ValueError, TypeError) as error:  # TypeError: the default is None
        raise UsageError(f"{key} must be {' or '.join(by_name) or kind.__name__}, not {value!r}") from error


def configurations(args):
    """One resolved configuration per run. UsageError for what cannot be run."""
    device = pick_device(args.device)
    native = "bfloat16" if device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"
    precision = native if args.precision == "auto" else args.precision
    models = available() if args.model == ["all"] else args.model
    splits = data.SPLITS if args.split == ["all"] else args.split
    options = (vars(args).get(key, [None]) for key in OPTIONS)  # None: not given
    several = map(dict.fromkeys, (splits, models, *options, args.seed))  # each value once
    for split, model, *values, seed in itertools.product(*several):
        module = module_of(model)
        parameters = inspect.signature(module.Model).parameters
        others = {key: p for key, p in parameters.items() if key not in OPTIONS}
        usual = {key: p.default for key, p in parameters.items()} | TRAINING | getattr(module, "TRAINING", {})
        paper = usual | getattr(module, "PAPER", {})
        base, names = usual, []
        if args.paper and paper != usual:  # rnn and gru are the paper's already, others are not in it
            base, names = paper | PAPER, ["paper"]
        given = {key: value for key, value in zip(OPTIONS, values) if value is not None}
        given.update(sorted(dict(setting(text, others) for text in args.set).items()))  # in one order, for names
        if unknown := given.keys() - usual.keys():
            raise UsageError(f"{model} takes no --{', --'.join(sorted(unknown))}")
        whole = base | given
        whole["eval_every"] = whole["eval_every"] or math.ceil(whole["steps"] / 5)
        config = {"split": split, "model": model, "seed": seed, "model_args": {key: whole[key] for key in parameters},
                  **{key: whole[key] for key in TRAINING}, "device": device, "precision": precision}
        try:  # ValueError for what cannot be
            module.Model(**config["model_args"])
            data.batches(split, whole["batch_size"], seed=seed, train_size=whole["train_size"])
            check(split)
        except ValueError as error:
            place = traceback.extract_tb(error.__traceback__)[-1]  # it may be a bug in a model that a student writes
            raise UsageError(f"{error} ({Path(place.filename).name}, line {place.lineno})") from error
        names += [f"{key}{value}" for key, value in given.items() if value != base[key]]
        yield config | {"settings": re.sub(r"[^A-Za-z0-9.-]", "", "-".join(names)) or "default",
                        "code": code_of(model, split)}


@functools.cache
def check(split):
    """ValueError for a split whose trials cannot be drawn, or that has no test set in distribution."""
    for name, subset in data.SPLITS[split].items():
        for depth in subset.depths if name == "train" else [None]:  # None: a test set has one depth alone
            data.trials(split, name, 1, depth=depth)
    if not in_distribution(split):
        raise ValueError(f"split {split} needs a test set drawn like its training trials")


@functools.cache
def environment():
    """The commit, versions and machine of a run, for config.json. Runs that differ in these alone are the same run."""
    here, commit = Path(__file__).parent, ""
    if (here / ".git").exists() and shutil.which("git"):
        git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        commit = subprocess.run(git, cwd=here, capture_output=True, text=True).stdout.strip()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"commit": commit, "python": platform.python_version(), "torch": torch.__version__, "gpu": gpu,
            "machine": platform.platform(), "threads": torch.get_num_threads()}


# ---- the files of a run -----------------------------------------------------------------------------------------

def write(path, content):
    """Replaces a file in one step. OSError where that fails, as on a full disk: the old file is still there."""
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def prepare(config, folder):
    """Makes the run's folder, or checks that the run there is this one. UsageError where it is another."""
    path, config = folder / "config.json", json.loads(json.dumps(config))  # as a file gives it back: tuples are lists
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return write(path, json.dumps(config | environment(), indent=1).encode())
    there = read(path)
    other = [f"{key} is {there.get(key)} there, {value} here" for key, value in config.items()
             if there.get(key) != value]
    if other:
        hint = "" if there.get("code") == config["code"] else ", since the model's file or data.py has changed"
        raise UsageError(f"{folder} holds another run{hint} ({'; '.join(other)}): remove it or choose another --out")


def lock(file):
    """Locks an open file until it is closed, or this process ends. False where another process has the lock."""
    try:
        import fcntl  # not on Windows
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # nor on all file systems: do not start a command twice there
        pass
    return True


def save(folder, state, model, optimizers):
    """Writes a checkpoint: all that a run needs to go on to the same bits."""
    buffer = io.BytesIO()
    torch.save(state | {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers],
                        "random": torch.get_rng_state(),
                        "random_cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None}, buffer)
    write(folder / "checkpoint.pt", buffer.getvalue())


def restore(folder, model, optimizers):
    """Loads a run's checkpoint into model and optimizers, and returns how far the run is. Without a checkpoint it is at
    its start. UsageError where the checkpoint is damaged or another model's."""
    path = folder / "checkpoint.pt"
    if not path.exists():
        return {"step": 0, "seconds": 0.0, "loss": 0.0, "right": 0.0, "rows": []}
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state.pop("model"))
        for optimizer, saved in zip(optimizers, state.pop("optimizers"), strict=True):
            optimizer.load_state_dict(saved)
        torch.set_rng_state(state.pop("random"))
        if (random := state.pop("random_cuda")) is not None:
            torch.cuda.set_rng_state(random)
        return state
    except Exception as error:  # any failure here means a bad file
        raise UsageError(f"{path} is damaged, or another model's: remove {folder} to begin anew") from error


# ---- one run ----------------------------------------------------------------------------------------------------

def make_optimizers(model, name, lr):
    """AdamW for all, or Muon for the weight matrices of Linear layers other than the readout and AdamW for the rest."""
    matrices = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not model.readout]
    if name == "adamw":
        return [torch.optim.AdamW([{"params": model.parameters(), "peak": lr}], weight_decay=0.01)]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    return [torch.optim.Muon([{"params": matrices, "peak": MUON_RATIO * lr}], weight_decay=0),
            torch.optim.AdamW([{"params": others, "peak": lr}], weight_decay=0.01)]


def rate(step, steps):
    """The learning rate at a step, as a share of its peak: a linear warm-up, then half a cosine to zero."""
    return min(1, (step + 1) / min(WARMUP, steps)) * (1 + math.cos(math.pi * step / steps)) / 2


def fit(config, folder):
    """Trains one run from where it stands to its end, and writes its result."""
    torch.manual_seed(config["seed"])
    split, device, steps, size = (config[key] for key in ("split", "device", "steps", "batch_size"))
    model = module_of(config["model"]).Model(**config["model_args"]).to(device)
    optimizers = make_optimizers(model, config["optimizer"], config["lr"])
    state = restore(folder, model, optimizers)
    batches = data.batches(split, size, seed=config["seed"], start=state["step"], device=device,
                           train_size=config["train_size"])
    recent, clock, saved = [], time.perf_counter(), time.perf_counter()  # recent: (loss, right answers) of each step
    with tqdm(total=steps * size, initial=state["step"] * size, unit=" trials", unit_scale=True,
              desc=f"{split} {config['model']} seed {config['seed']}") as bar:
        for step, batch in zip(range(state["step"], steps), batches):
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * rate(step, steps)
            with torch.autocast(device, torch.bfloat16, enabled=config["precision"] == "bfloat16"):
                logits = model(batch.instruction, batch.stimulus)
            loss = F.cross_entropy(logits.float(), batch.answer)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            recent.append(torch.stack([loss.detach(), (logits.argmax(1) == batch.answer).sum()]))

            evaluate = (step + 1) % config["eval_every"] == 0 or step + 1 == steps
            if not evaluate and time.perf_counter() - clock < 1:
                continue  # reading a number waits for the GPU: once a second is enough
            count(state, recent, size, bar)
            state["seconds"] += time.perf_counter() - clock
            if evaluate:
                log(config, folder, state, model)
            if evaluate or time.perf_counter() - saved > 60:
                save(folder, state, model, optimizers)
                saved = time.perf_counter()
            clock = time.perf_counter()
    result = score(model.eval(), split, TEST_TRIALS, device, config["precision"])
    result |= {"alignment": alignment(model, split, device), "parameters": sum(p.numel() for p in model.parameters()),
               "trials": steps * size, "seconds": state["seconds"], "log": state["rows"]}
    write(folder / "result.json", json.dumps(result, indent=1).encode())


def count(state, recent, size, bar):
    """Adds the losses and right answers of recent steps to the state, and shows them. UsageError where a loss is not
    finite."""
    losses, rights = torch.stack(recent).T.tolist()
    for loss, right in zip(losses, rights):
        state["step"] += 1
        if not math.isfinite(loss):
            raise UsageError(f"the loss is {loss} at step {state['step']}: try a lower --lr or --precision float32")
        state["loss"] += loss
        state["right"] += right
    bar.set_postfix(loss=f"{sum(losses) / len(losses):.3f}", accuracy=f"{sum(rights) / len(rights) / size:.1%}")
    bar.update(len(recent) * size)
    recent.clear()


def log(config, folder, state, model):
    """Adds a row to log.csv: training since the row before (mean loss, accuracy, trials/s), accuracy on test sets."""
    split, size = config["split"], config["batch_size"]
    tested = score(model.eval(), split, LOG_TRIALS, config["device"], config["precision"])["accuracy"]
    model.train()
    before = state["rows"][-1] if state["rows"] else {"step": 0, "seconds": 0}
    steps, seconds = state["step"] - before["step"], state["seconds"] - before["seconds"]
    means = {"loss": state["loss"] / steps, "train": state["right"] / (steps * size), **tested}
    row = {"step": state["step"], "trials": state["step"] * size, **{k: round(v, 4) for k, v in means.items()},
           "trials/s": round(steps * size / seconds), "seconds": round(state["seconds"], 3)}
    state["rows"].append(row)
    state.update(loss=0.0, right=0.0)
    lines = [row.keys(), *([r.get(key, "") for key in row] for r in state["rows"])]  # test sets may be new since then
    write(folder / "log.csv", "".join(",".join(map(str, line)) + "\n" for line in lines).encode())


# ---- all of them ------------------------------------------------------------------------------------------------

def train(runs):
    """Trains the runs (config, folder) that are not finished. One that another process is training is left to it."""
    for config, folder in runs:
        with open(folder / "lock", "ab") as file:
            if not lock(file):
                print(f"{folder} is being trained by another process: left to it")
            elif not finished(config, folder):
                fit(config, folder)
                print(f"\n{folder}\n{split_table(config['split'], [(config, read(folder / 'result.json'))])}\n")


def main(argv=None):
    parser, args = parse(argv)
    try:
        runs = [(c, args.out / c["split"] / c["model"] / c["settings"] / f"seed{c['seed']}")
                for c in configurations(args)]
        for config, folder in runs:
            prepare(config, folder)
        new = sum(not finished(*run) for run in runs)
        first = runs[0][0]
        print(f"Runs: {len(runs)}, to do: {new}, on {first['device']} in {first['precision']}.")
        train(runs)
        done = [(config, read(folder / "result.json")) for config, folder in runs if finished(config, folder)]
        if len(runs) > 1 or not new:
            for split in dict.fromkeys(config["split"] for config, _ in done):
                print(split_table(split, [run for run in done if run[0]["split"] == split]) + "\n")
    except (UsageError, OSError) as error:
        parser.error(str(error))
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "tried to allocate" not in str(error).lower():
            raise
        parser.error("there is not enough memory: try a smaller --batch-size or --dim")
    except KeyboardInterrupt:
        print("\nStopped. The same command goes on from the last checkpoint, which is at most a minute old.")
        sys.exit(130)


if __name__ == "__main__":
    main()
