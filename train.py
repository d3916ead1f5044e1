"""Trains models on gCOG, tests them in and out of distribution, and prints a table.

    python train.py --model sstfmr --split productive
    python train.py --model all --split all --seed 0 1 2

The same command goes on where it was interrupted. Run in two shells, it splits the work. A run has
a folder, <out>/<split>/<model>/<settings>/seed<k>/, with config.json (all that it was made with),
log.csv (how it went), checkpoint.pt (to go on from), result.json (its accuracies, at the end) and
lock (empty).
"""
import argparse
import inspect
import io
import itertools
import json
import math
import os
import platform
import re
import sys
import time
import traceback
import typing
from pathlib import Path

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from tqdm import tqdm

import data
import eval as evaluation
from eval import (UsageError, alignment, available, between, check_code, decoding, devices,
                  finished, in_distribution, module_of, read, score, split_table)

# One budget for all models; a model file may set its own TRAINING beside it.
TRAINING = {"steps": 4_000, "batch_size": 128, "train_size": None, "optimizer": "muon", "lr": 1e-3,
            "schedule": "cosine"}  # or constant
MUON_RATIO = 3  # Muon's learning rate over AdamW's
WARMUP, SAVE_EVERY = 100, 200  # steps
EVALUATIONS = 5  # of a run
LOG_TRIALS = 300  # per test set, on the way


# ---- training -----------------------------------------------------------------------------------

def build(config):
    """A run's model and its optimizers, as they start."""
    torch.manual_seed(config["seed"])
    model = module_of(config["model"]).Model(**config["model_args"]).to(config["device"])
    return model, make_optimizers(model, config["optimizer"], config["lr"])


def make_optimizers(model, name, lr):
    """AdamW for all, or Muon for the matrices of Linear layers other than the readout and AdamW for
    the rest."""
    matrices = [module.weight for module in model.modules() if name == "muon"
                and isinstance(module, torch.nn.Linear) and module is not model.readout]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in matrices)]
    adamw = torch.optim.AdamW([{"params": others, "peak": lr}], weight_decay=0.01)
    if not matrices:
        return [adamw]
    muon = torch.optim.Muon([{"params": matrices, "peak": MUON_RATIO * lr}], weight_decay=0)
    return [muon, adamw]


def rate(step, steps, schedule="cosine"):
    """The learning rate at a step, as a share of its peak: a linear warm-up, then half a cosine; or
    constant."""
    if schedule == "constant":
        return 1
    return min(1, (step + 1) / min(WARMUP, steps)) * (1 + math.cos(math.pi * step / steps)) / 2


def learn(model, optimizers, batches, rates, config):
    """Takes a training step on each batch. Yields its loss and accuracy, as tensors."""
    for batch, share in zip(batches, rates):
        instruction, stimulus, answer = (x.to(config["device"]) for x in batch)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak"] * share
        with torch.autocast(config["device"], torch.bfloat16, config["precision"] == "bfloat16"):
            logits = model(instruction, stimulus)
        loss = F.cross_entropy(logits.float(), answer)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        yield loss.detach(), (logits.argmax(1) == answer).float().mean()


def fit(config, folder, workers):
    """Trains one run from where it stands to its end, and writes its result."""
    model, optimizers = build(config)
    state = restore(folder, model, optimizers)
    split, steps, size = config["split"], config["steps"], config["batch_size"]
    todo, began = range(state["step"], steps), time.perf_counter() - state["seconds"]
    batches = DataLoader(data.Batches(split, size, config["seed"], config["train_size"]),
                         batch_size=None, sampler=todo, num_workers=workers,
                         generator=torch.Generator())  # so that it leaves the global one alone
    rates = (rate(step, steps, config["schedule"]) for step in todo)
    with tqdm(total=steps * size, initial=state["step"] * size, unit=" trials", unit_scale=True,
              desc=f"{split} {config['model']} seed {config['seed']}") as bar:
        for loss, accuracy in learn(model, optimizers, batches, rates, config):
            state["step"] += 1
            state["sums"] = state["sums"].to(loss.device) + torch.stack([loss, accuracy])
            bar.update(size)
            due = state["step"] % math.ceil(steps / EVALUATIONS) == 0 or state["step"] == steps
            if due or state["step"] % 10 == 0:  # reading a number waits for the GPU
                if not math.isfinite(loss):
                    raise UsageError(f"the loss is {loss:.0f} at step {state['step']}: "
                                     "try a lower --lr or --precision float32")
                bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{accuracy:.1%}")
            state["seconds"] = time.perf_counter() - began
            if due:
                log(config, folder, state, model)
            if due or state["step"] % SAVE_EVERY == 0:
                save(folder, state, model, optimizers)
    result = score(model.eval(), split, evaluation.TEST_TRIALS, config["device"],
                   config["precision"])
    result |= {"alignment": alignment(model, split, config["device"]),
               "decoded": decoding(model, split, config["device"]), "trials": steps * size,
               "parameters": sum(p.numel() for p in model.parameters()),
               "seconds": state["seconds"], "log": state["rows"]}
    write(folder / "result.json", json.dumps(result, indent=1).encode())


def log(config, folder, state, model):
    """Adds a row to log.csv: training since the row before, and accuracy on the test sets."""
    size, last = config["batch_size"], {"step": 0, "seconds": 0} | dict(*state["rows"][-1:])
    tested = score(model.eval(), config["split"], LOG_TRIALS, config["device"], config["precision"])
    model.train()
    steps, seconds = state["step"] - last["step"], state["seconds"] - last["seconds"]
    loss, accuracy = (state["sums"] / steps).tolist()
    row = {"loss": loss, "train": accuracy} | tested["accuracy"]
    row = {"step": state["step"], "trials": state["step"] * size,
           **{key: round(value, 4) for key, value in row.items()},
           "trials/s": round(steps * size / seconds), "seconds": round(state["seconds"], 3)}
    state["rows"].append(row)
    state["sums"].zero_()
    lines = [row, *([old.get(key, "") for key in row] for old in state["rows"])]  # new test sets
    write(folder / "log.csv", "".join(",".join(map(str, line)) + "\n" for line in lines).encode())


def fingerprint(config):
    """What a run computes, in six numbers: the losses of four training steps on few trials, at
    rates of the whole schedule, then the norms of the optimizers' momentum and of the weights. Code
    that computes the same has the same fingerprint up to rounding (eval.TOLERANCES). The model is
    in float64, since AdamW makes steps of the rounding errors of tiny gradients; Muon's own steps
    are in bfloat16."""
    config = config | {"device": "cpu", "precision": "float32"}
    model, optimizers = build(config)
    model.double()
    steps, size = config["steps"], min(config["batch_size"], 16)
    batches = data.Batches(config["split"], size, config["seed"], config["train_size"])
    rates = [rate(step, steps, config["schedule"]) for step in
             (min(50, steps - 1), steps // 4, steps // 2, 3 * steps // 4)]
    taken = learn(model, optimizers, map(batches.__getitem__, range(4)), rates, config)
    losses = [loss.item() for loss, _ in taken]
    momentum = [value for optimizer in optimizers for state in optimizer.state.values()
                for value in state.values() if value.dim() > 0]
    norms = (torch.nn.utils.get_total_norm(x).item() for x in (momentum, [*model.parameters()]))
    return [*losses, *norms]


# ---- what to run --------------------------------------------------------------------------------

FLAGS = {  # of settings: type or choices, and help
    "dim": (between(1, 8192), "width (default: in the model's file)"),
    "layers": (between(1, 100), "number of blocks (default: in the model's file)"),
    "heads": (between(1, 100), "number of attention heads (default: in the model's file)"),
    "steps": (between(1, 10 ** 9), f"batches to train on (default: {TRAINING['steps']:,})"),
    "batch_size": (between(1, 10 ** 6), f"trials per batch (default: {TRAINING['batch_size']})"),
    "train_size": (between(1, 10 ** 9), "so many trials, again and again (default: all are new)"),
    "optimizer": (["muon", "adamw"], "muon for matrices of linear layers and adamw for the rest "
                  "(default), or adamw (default of rnn, gru, mlp and authors)"),
    "lr": (between(1e-30, 1e30), "AdamW's peak, and a third of Muon's "
           f"(default: {TRAINING['lr']})")}


def parse(argv):
    parser = argparse.ArgumentParser(  # without usage, so that an error is one line
        description="Train models on gCOG. Several values of a flag, except of --set, make several "
        "runs.", usage=argparse.SUPPRESS, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument_group("what to run").add_argument
    add("--model", nargs="+", default=["sstfmr"], help=f"all, or of {', '.join(available())}")
    add("--split", nargs="+", default=["productive"], help=f"all, or of {', '.join(data.SPLITS)}")
    add("--seed", nargs="+", type=between(0, 2 ** 63 - 1), default=[0],
        help="of the weights and the training trials")
    add("--out", type=Path, default=Path("runs"), help="where the run folders go")
    add = parser.add_argument_group("settings").add_argument
    for key, (kind, text) in FLAGS.items():
        allowed = {"choices": kind} if isinstance(kind, list) else {"type": kind}
        name = f"--{key.replace('_', '-')}"
        add(name, nargs="+", help=text, default=argparse.SUPPRESS, **allowed)
    add("--set", nargs="+", action="extend", default=[], metavar="KEY=VALUE",
        help="other arguments of the model's constructor, for example read=eos")
    add = parser.add_argument_group("the machine").add_argument
    add("--device", choices=devices(), default=devices()[-1], help="where to compute")
    add("--precision", choices=["float32", "bfloat16"], help="of matrix products; None: bfloat16 "
        "on a GPU that has it, else float32")
    add("--workers", type=between(0, 64), default=0, help="processes that draw trials: 2 or more "
        "where a GPU waits for them")
    return parser, parser.parse_args(argv)


def setting(text, parameters, model):
    """key=value of --set as (key, value), typed by the default of that parameter. UsageError for
    anything else."""
    key, _, value = text.partition("=")
    if key in FLAGS:
        raise UsageError(f"--set {text}: that has a flag of its own, --{key.replace('_', '-')}")
    if key not in parameters:
        known = [name for name in parameters if name not in FLAGS]
        raise UsageError(f"--set {text}: {model} has {', '.join(known) or 'nothing else to set'}")
    default = parameters[key].default
    kind = between(min(1, default), 10 ** 9) if type(default) is int else type(default)
    choices = (True, False) if kind is bool else typing.get_args(parameters[key].annotation)
    by_name = {str(choice): choice for choice in choices}  # of a Literal
    try:
        return key, by_name[value] if choices else kind(value)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"{key} of {model} {error}") from error
    except (KeyError, ValueError, TypeError) as error:  # TypeError: the default is None
        wanted = " or ".join(by_name) or kind.__name__
        raise UsageError(f"{key} of {model} must be {wanted}, not {value!r}") from error


def configurations(args):
    """One resolved configuration per run. UsageError for what cannot be run."""
    native = args.device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    precision = args.precision or ("bfloat16" if native else "float32")
    models = available() if args.model == ["all"] else args.model
    splits = data.SPLITS if args.split == ["all"] else args.split
    values = (vars(args).get(key, [None]) for key in FLAGS)  # None: not given
    several = map(dict.fromkeys, (splits, models, *values, args.seed))  # each value once
    for split, model, *values, seed in itertools.product(*several):
        module = module_of(model)
        parameters = inspect.signature(module.Model).parameters
        if bare := [key for key, p in parameters.items() if p.default is p.empty]:
            raise UsageError(f"{model}: Model needs a default for {', '.join(bare)}")
        usual = {key: p.default for key, p in parameters.items()} | TRAINING
        usual |= getattr(module, "TRAINING", {})
        given = {key: value for key, value in zip(FLAGS, values) if value is not None}
        others = dict(setting(text, parameters, model) for text in args.set)  # the last counts
        given |= {key: others[key] for key in sorted(others)}
        if unknown := given.keys() - usual.keys():
            raise UsageError(f"{model} takes no --{', --'.join(sorted(unknown))}")
        whole, names = usual | given, [f"{k}{v}" for k, v in given.items() if v != usual[k]]
        config = {"split": split, "model": model, "seed": seed,
                  "settings": re.sub(r"[^A-Za-z0-9.-]", "", "-".join(names)) or "default",
                  "model_args": {key: whole[key] for key in parameters},
                  **{key: whole[key] for key in TRAINING},
                  "device": args.device, "precision": precision}
        if seed == args.seed[0]:
            check(config, module)
        yield config


def check(config, module):
    """UsageError for a split that cannot be drawn, or a model that cannot be built."""
    split = config["split"]
    try:
        data.Batches(split, config["batch_size"], 0, config["train_size"])
        for name, subset in data.SPLITS[split].items():
            for depth in subset.depths if name == "train" else [None]:  # a test set has one
                data.trials(split, name, 1, depth=depth)
        if not in_distribution(split):
            raise UsageError(f"{split} needs a test set drawn like its training trials")
    except ValueError as error:
        raise UsageError(str(error)) from error
    try:
        with torch.device("meta"):  # which takes no memory
            module.Model(**config["model_args"])
    except ValueError as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
                 if frame.filename == module.__file__]
        raise UsageError(f"models/{config['model']}.py, line {lines[-1]}: {error}") from error


# ---- the files of a run -------------------------------------------------------------------------

def prepare(config, folder):
    """Writes config.json, or checks that the run there is this one. UsageError if it is another."""
    path = folder / "config.json"
    if not any((folder / name).exists() for name in ("checkpoint.pt", "result.json")):
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        whole = config | {  # runs that differ in the machine alone are the same
            "fingerprint": fingerprint(config), "python": platform.python_version(), "gpu": gpu,
            "torch": torch.__version__, "machine": platform.platform(),
            "threads": torch.get_num_threads()}
        return write(path, json.dumps(whole, indent=1).encode())
    there = read(path)
    here = json.loads(json.dumps(config))  # as a file gives it back: tuples are lists
    other = [f"{key} is {there.get(key)} there, {value} here" for key, value in here.items()
             if there.get(key) != value]
    if other:
        raise UsageError(f"another run stands there ({'; '.join(other)}): choose another --out")
    check_code(there)


def write(path, content):
    """Replaces a file in one step. OSError if that fails, as on a full disk: the old one stays."""
    temporary = path.with_suffix(f".{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save(folder, state, model, optimizers):
    """Writes a checkpoint: all that a run needs to go on to the same bits."""
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    whole = state | {"model": model.state_dict(), "random": torch.get_rng_state(),
                     "optimizers": [x.state_dict() for x in optimizers], "random_cuda": cuda}
    buffer = io.BytesIO()
    torch.save(whole, buffer)
    write(folder / "checkpoint.pt", buffer.getvalue())


def restore(folder, model, optimizers):
    """Loads a checkpoint into model and optimizers, and returns how far the run is. Without one, it
    is at its start. UsageError where the checkpoint is damaged or another model's."""
    path = folder / "checkpoint.pt"
    if not path.exists():
        return {"step": 0, "seconds": 0.0, "sums": torch.zeros(2), "rows": []}
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
        raise UsageError("its checkpoint.pt is damaged or another model's: remove the folder to "
                         "begin anew") from error


def lock(file):
    """Locks an open file until it is closed. False where another process has the lock."""
    try:
        import fcntl  # not on Windows
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # nor on all file systems: do not share runs there
        pass
    return True


# ---- all of them --------------------------------------------------------------------------------

def run(config, folder, workers):
    """Trains a run that is not finished, unless another process does."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "ab") as file:
        if not lock(file):
            return print(f"{folder} is being trained by another process: left to it")
        prepare(config, folder)
        if not finished(config, folder):
            fit(config, folder, workers)


def main(argv=None):
    parser, args = parse(argv)
    failed, done = [], {}
    try:
        configs = list(configurations(args))
        print(f"Runs: {len(configs)}, on {args.device} in {configs[0]['precision']}.")
        for config in configs:
            folder = args.out / config["split"] / config["model"] / config["settings"]
            folder /= f"seed{config['seed']}"
            try:
                run(config, folder, args.workers)
                if finished(config, folder):
                    result = read(folder / "result.json")
                    done.setdefault(config["split"], []).append((config, result))
            except (UsageError, OSError, MemoryError, RuntimeError) as error:  # the others go on
                if isinstance(error, RuntimeError) and "allocate" not in str(error):
                    raise
                memory = isinstance(error, (MemoryError, RuntimeError))
                why = "too little memory: try a smaller --batch-size or --dim" if memory else error
                print(f"{parser.prog}: error: {folder}: {why}", file=sys.stderr)
                failed.append(str(folder))
    except UsageError as error:
        parser.error(str(error))
    except KeyboardInterrupt:
        print("\nStopped. The same command goes on from the last checkpoint.")
        sys.exit(130)
    for split, runs in done.items():
        print(f"\n{split_table(split, runs)}")
    if failed:
        parser.exit(2, f"Failed: {', '.join(failed)}\n" if len(configs) > 1 else "")


if __name__ == "__main__":
    main()
