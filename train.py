"""Trains models on gCOG, tests them in and out of distribution, and prints a table.

    python train.py --model sstfmr --split productive
    python train.py --model all --split all --seed 0 1 2
    python train.py --model looptfmr --help                  # with the model's own flags

The same command goes on where it was interrupted. Run in two shells, it splits the work. A run has
a folder, <out>/<split>/<model>/<settings>/seed<k>/, with config.json (all that it was made with),
log.csv (how it went), checkpoint.pt (to go on from), result.json (its accuracies, at the end) and
lock (empty).
"""
import argparse
import contextlib
import inspect
import io
import itertools
import json
import math
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
from data import UsageError
from eval import (between, checkpoint_of, code_of, devices, in_distribution, one_of, read, score,
                  split_table, tests_of)
from models import available, module_of

# One recipe for all models; a model file may set its own TRAINING beside it.
TRAINING = {"steps": 6_000, "batch_size": 64, "train_size": None, "optimizer": "muon", "lr": 1e-3,
            "decay": "matrices", "schedule": "cosine"}
MUON_RATIO = 3  # Muon's learning rate over AdamW's
MOMENTUM, DECAY = 0.95, 0.01  # of Muon; of weights
WARMUP, REPORT_EVERY = 200, 1_000  # steps
LOG_TRIALS = 300  # per test set, on the way


# ---- training -----------------------------------------------------------------------------------

class Muon(torch.optim.Optimizer):
    """Moves each matrix by its momentum, made orthogonal (Jordan et al. 2024): whatever the
    gradient's size, all singular values of a step are near 1. It computes what torch.optim.Muon
    does, but in float32, which every CPU has units for, and with matrices of one shape stacked."""

    def __init__(self, matrices, peak):
        shapes = {}
        for matrix in matrices:
            shapes.setdefault(matrix.shape, []).append(matrix)
        groups = [{"params": same} for same in shapes.values()]
        super().__init__(groups, {"lr": peak, "peak": peak})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            matrices, lr = group["params"], group["lr"]
            gradient = torch.stack([matrix.grad for matrix in matrices])
            state = self.state[matrices[0]]
            momentum = state.setdefault("momentum", torch.zeros_like(gradient))
            momentum.lerp_(gradient, 1 - MOMENTUM)
            steps = orthogonal(gradient.lerp(momentum, MOMENTUM))  # Nesterov's momentum
            scale = max(1, gradient.shape[1] / gradient.shape[2]) ** 0.5
            for matrix, step in zip(matrices, steps):
                matrix.mul_(1 - lr * DECAY).sub_(step, alpha=lr * scale)


def orthogonal(x):  # (matrices, rows, columns)
    """Brings all singular values near 1, between 0.7 and 1.2: five Newton-Schulz iterations, each
    a polynomial of odd powers, which acts on the singular values alone."""
    if x.shape[1] > x.shape[2]:
        return orthogonal(x.mT).mT  # the smaller product
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x


def make_optimizers(model, name, lr, decay="matrices"):
    """AdamW for all, or Muon for the matrices of Linear layers other than the readout and AdamW for
    the rest. Weight decay is for matrices, or for all."""
    hidden = [module.weight for module in model.modules() if name == "muon"
              and isinstance(module, torch.nn.Linear) and module is not model.readout]
    others = [p for p in model.parameters() if all(p is not matrix for matrix in hidden)]
    decayed = [p for p in others if decay == "all" or p.dim() > 1]
    vectors = [p for p in others if decay == "matrices" and p.dim() <= 1]
    adamw = torch.optim.AdamW([{"params": decayed, "peak": lr, "weight_decay": DECAY},
                               {"params": vectors, "peak": lr, "weight_decay": 0}], lr)
    return [adamw, Muon(hidden, MUON_RATIO * lr)] if hidden else [adamw]


def rate(step, steps, schedule):
    """The learning rate at a step, as a share of its peak: a linear warm-up, then half a cosine; or
    constant."""
    if schedule == "constant":
        return 1
    return min(1, (step + 1) / min(WARMUP, steps)) * (1 + math.cos(math.pi * step / steps)) / 2


def learn(model, optimizers, batch, share, config):
    """A training step, at a share of the peak rate. Loss and accuracy, as a tensor (2,)."""
    instruction, stimulus, answer = (x.to(config["device"]) for x in batch)
    with torch.autocast(config["device"], torch.bfloat16, config["precision"] == "bfloat16"):
        logits = model(instruction, stimulus)
    loss = F.cross_entropy(logits.float(), answer)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack([loss.detach(), (logits.argmax(1) == answer).float().mean()])


def fit(model, optimizers, config, folder, workers):
    """Trains a run from where it stands to its end, and writes its result."""
    rows = restore(folder, model, optimizers)
    done, seconds = (rows[-1]["step"], rows[-1]["seconds"]) if rows else (0, 0)
    split, steps, size = config["split"], config["steps"], config["batch_size"]
    batches = DataLoader(data.Batches(split, size, config["seed"], config["train_size"]),
                         batch_size=None, sampler=range(done, steps), num_workers=workers,
                         generator=torch.Generator())  # so that it leaves the global one alone
    began, recent, since = time.perf_counter() - seconds, 0, done  # recent: sums since that step
    with tqdm(total=steps * size, initial=done * size, unit=" trials", unit_scale=True,
              desc=f"{split} {config['model']} seed {config['seed']}", disable=None) as bar:
        for step, batch in enumerate(batches, done + 1):
            share = rate(step - 1, steps, config["schedule"])
            recent = recent + learn(model, optimizers, batch, share, config)
            bar.update(size)
            due = step % REPORT_EVERY == 0 or step in (10, steps)
            if due or step % 10 == 0:  # reading a number waits for the GPU
                loss, accuracy = (recent / (step - since)).tolist()
                if not math.isfinite(loss):
                    raise UsageError(f"the loss is {loss:.0f} at step {step}: "
                                     "try a lower --lr or --precision float32")
                bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{accuracy:.1%}")
            if due:
                rows.append(report(config, model, step, loss, accuracy,
                                   time.perf_counter() - began))
                bar.write("  ".join(f"{key} {value}" for key, value in rows[-1].items()),
                          file=sys.stderr)
                save(folder, rows, model, optimizers)
                recent, since = 0, step
    finish(config, folder, model, rows)


def report(config, model, step, loss, accuracy, seconds):
    """A row of log.csv: training since the row before, and accuracy on the test sets."""
    tested = score(model.eval(), config["split"], LOG_TRIALS, config["device"], config["precision"])
    model.train()
    row = {"loss": loss, "train": accuracy} | tested["accuracy"]
    return {"step": step, "trials": step * config["batch_size"],
            **{key: round(value, 4) for key, value in row.items()}, "seconds": round(seconds, 3)}


def finish(config, folder, model, rows):
    """Measures a trained model, and writes result.json. It keeps what was measured on test sets
    that are gone."""
    result = score(model.eval(), config["split"], evaluation.TEST_TRIALS, config["device"],
                   config["precision"])
    result |= {"trials": config["steps"] * config["batch_size"], "seconds": rows[-1]["seconds"],
               "parameters": sum(p.numel() for p in model.parameters()), "log": rows}
    path = folder / "result.json"
    if path.exists():
        before = read(path)
        result |= {key: before[key] | result[key] for key in ("accuracy", "baselines", "kinds",
                                                              "tests")}
    write(path, json.dumps(result, indent=1).encode())


# ---- what to run --------------------------------------------------------------------------------

FLAGS = {  # of TRAINING: type, and help
    "steps": (between(1, 10 ** 9), "batches to train on"),
    "batch_size": (between(1, 10 ** 6), "trials per batch"),
    "train_size": (between(1, 10 ** 9), "so many trials, again and again; None: all are new"),
    "optimizer": (one_of(["muon", "adamw"]), "muon for matrices of linear layers and adamw for the "
                  "rest, or adamw"),
    "lr": (between(1e-30, 1e30), "AdamW's peak, and a third of Muon's"),
    "decay": (one_of(["matrices", "all"]), "the weights that AdamW and Muon let decay"),
    "schedule": (one_of(["cosine", "constant"]), "the rate, after a warm-up or throughout")}
ORDER = "dim", "layers", "heads", *TRAINING  # in names of settings; then others by name


def parse(argv=None):
    """The parser, and its arguments. The arguments of the chosen models' constructors are flags,
    too."""
    parser = argparse.ArgumentParser(  # without usage, so that an error is one line
        description="Train models on gCOG. Several models, splits or seeds make several runs.",
        usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    add = parser.add_argument_group("what to run").add_argument
    add("--model", nargs="+", default=["sstfmr"], choices=["all", *available()],
        help="which architectures (default: sstfmr)")
    add("--split", nargs="+", default=["productive"], choices=["all", *data.SPLITS],
        help="which splits; all: those without _release (default: productive)")
    add("--seed", nargs="+", type=between(0, 2 ** 63 - 1), default=[0],
        help="of the weights and the training trials (default: 0)")
    add("--out", type=Path, default=Path("runs"), help="where run folders go (default: runs)")
    add = parser.add_argument_group("training").add_argument
    for key, (kind, text) in FLAGS.items():
        add(f"--{key.replace('_', '-')}", type=kind, default=argparse.SUPPRESS,
            help=f"{text} (default: {TRAINING[key]}, unless the model's file says otherwise)")
    add = parser.add_argument_group("the machine").add_argument
    add("--device", choices=devices(), default=devices()[-1],
        help=f"where to compute (default: {devices()[-1]})")
    add("--precision", choices=["float32", "bfloat16"], help="of matrix products (default: "
        "bfloat16 on a GPU that has it, else float32)")
    add("--workers", type=between(0, 64), default=0, help="processes that draw trials: 2 or more "
        "where a GPU waits for them (default: 0)")
    add = parser.add_argument_group("the model, as its file explains").add_argument
    try:
        models = several(parser.parse_known_args(argv)[0].model, available())
        for name, found in model_flags(models).items():
            defaults = ", ".join(f"{parameter.default} in {model}.py"
                                 for model, parameter in found.items())
            kind, text = kind_of(next(iter(found.values())))
            add(f"--{name.replace('_', '-')}", type=kind, default=argparse.SUPPRESS,
                help=f"{text} (default: {defaults})")
    except (UsageError, argparse.ArgumentError) as error:
        parser.error(str(error))
    add("-h", "--help", action="help", help="show this text, with the flags of --model")
    return parser, parser.parse_args(argv)


def several(values, everything):
    """Each value once; "all" stands for everything."""
    return list(everything) if "all" in values else list(dict.fromkeys(values))


def model_flags(models):
    """Name -> model -> parameter, of the constructors of models."""
    flags = {}
    for model in models:
        for name, parameter in inspect.signature(module_of(model).Model).parameters.items():
            if parameter.default is parameter.empty:
                raise UsageError(f"{model}: Model needs a default for {name}")
            flags.setdefault(name, {})[model] = parameter
    return flags


def kind_of(parameter):
    """The type of a constructor's argument for argparse, by its Literal or by its default, and what
    it may be in words."""
    default, choices = parameter.default, typing.get_args(parameter.annotation)
    if isinstance(default, bool):
        choices = True, False
    if choices:
        return one_of(choices), " or ".join(map(str, choices))
    if isinstance(default, int):
        return between(min(1, default), 10 ** 9), "an integer"
    return type(default), type(default).__name__


def training_of(model):
    """TRAINING, with what the model's file says of its own. UsageError for what no flag takes."""
    own = getattr(module_of(model), "TRAINING", {})
    for key, value in own.items():
        if key not in TRAINING:
            raise UsageError(f"models/{model}.py: TRAINING has no {key!r}, only "
                             f"{', '.join(TRAINING)}")
        try:
            FLAGS[key][0](str(value))
        except argparse.ArgumentTypeError as error:
            raise UsageError(f"models/{model}.py: TRAINING: {key} {error}") from error
    return TRAINING | own


def configurations(args):
    """One resolved configuration per run. UsageError for what cannot be run."""
    native = args.device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
    precision = args.precision or ("bfloat16" if native else "float32")
    models = several(args.model, available())
    splits = several(args.split, (name for name in data.SPLITS if not name.endswith("_release")))
    parameters = model_flags(models)
    for split, model in itertools.product(splits, models):
        usual = {name: found[model].default for name, found in parameters.items() if model in found}
        arguments, usual = list(usual), usual | training_of(model)
        flags = {name for name in vars(args) if name in parameters or name in TRAINING}
        if unknown := flags - usual.keys():
            raise UsageError(f"{model} takes no --{', --'.join(sorted(unknown))}")
        order = [*ORDER, *sorted(flags - {*ORDER})]
        given = {name: getattr(args, name) for name in order if name in flags}
        names = [f"{name}{value}" for name, value in given.items() if value != usual[name]]
        whole = usual | given
        check(split, whole)
        for seed in dict.fromkeys(args.seed):
            yield {"split": split, "model": model, "seed": seed,
                   "settings": re.sub(r"[^A-Za-z0-9.-]", "", "-".join(names)) or "default",
                   "model_args": {name: whole[name] for name in arguments},
                   **{name: whole[name] for name in TRAINING},
                   "device": args.device, "precision": precision, "code": code_of(model)}


def check(split, config):
    """UsageError for a split that cannot be drawn."""
    for depth in data.Batches(split, config["batch_size"], 0, config["train_size"]).subset.depths:
        data.trials(split, "train", 1, depth=depth)
    tests_of(split)
    if not in_distribution(split):
        raise UsageError(f"{split} needs a test set drawn like its training trials")


def build(config):
    """A run's model and its optimizers, as they start. UsageError where the model refuses its
    arguments, or what it gives for two trials has another shape than it should."""
    torch.manual_seed(config["seed"])
    module, file = module_of(config["model"]), f"models/{config['model']}.py"
    try:
        model = module.Model(**config["model_args"])
    except ValueError as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__)
                 if frame.filename == module.__file__]
        raise UsageError(f"{file}, line {lines[-1] if lines else '?'}: {error}") from error
    if missing := [name for name in ("features", "readout") if not hasattr(model, name)]:
        raise UsageError(f"{file}: Model needs {' and '.join(missing)}")
    two = data.Batches(config["split"], 2, config["seed"])[0]
    model.eval()
    with torch.no_grad():
        shape = tuple(model.features(two.instruction.clone(), two.stimulus.clone()).shape)
        if len(shape) != 2 or shape[0] != 2:
            raise UsageError(f"{file}: features gives {shape} for two trials, not (2, dim)")
        shape = tuple(model(two.instruction.clone(), two.stimulus.clone()).shape)
        if shape != (2, data.CLASSES):
            raise UsageError(f"{file}: forward gives {shape} for two trials, not "
                             f"(2, {data.CLASSES})")
    model.train().to(config["device"])
    return model, make_optimizers(model, config["optimizer"], config["lr"], config["decay"])


# ---- the files of a run -------------------------------------------------------------------------

def prepare(config, folder):
    """Writes config.json, or checks that the run there is this one. UsageError if it is another, or
    if it or another seed beside it is of other code."""
    seeds = {}
    for other in filter(begun, sorted(folder.parent.glob("seed*"))):
        with contextlib.suppress(UsageError):  # a damaged file is another run's business
            seeds[other] = read(other / "config.json").get("code", {})
    for other, code in seeds.items():
        if files := [file for file, now in config["code"].items() if code.get(file) != now]:
            raise UsageError(f"{', '.join(files)} changed since {other}: choose another --out")
    if not begun(folder):
        gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        whole = config | {  # runs that differ in the machine alone are the same
            "python": platform.python_version(), "torch": torch.__version__, "gpu": gpu,
            "machine": platform.platform(), "threads": torch.get_num_threads()}
        return write(folder / "config.json", json.dumps(whole, indent=1).encode())
    there = read(folder / "config.json")
    here = json.loads(json.dumps(config))  # as a file gives it back: tuples are lists
    if other := [f"{key} is {there.get(key)} there, {value} here" for key, value in here.items()
                 if there.get(key) != value]:
        raise UsageError(f"another run stands there ({'; '.join(other)}): choose another --out")


def begun(folder):
    return (folder / "checkpoint.pt").exists() or (folder / "result.json").exists()


def write(path, content):
    """Replaces a file in one step. OSError if that fails, as on a full disk: the old one stays."""
    with data.replacing(path) as temporary:
        temporary.write_bytes(content)


def save(folder, rows, model, optimizers):
    """Writes log.csv, and a checkpoint: all that a run needs to go on to the same bits."""
    lines = [rows[-1], *([row.get(key, "") for key in rows[-1]] for row in rows)]  # new test sets
    write(folder / "log.csv", "".join(",".join(map(str, line)) + "\n" for line in lines).encode())
    cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    whole = {"rows": rows, "model": model.state_dict(), "random": torch.get_rng_state(),
             "optimizers": [x.state_dict() for x in optimizers], "random_cuda": cuda}
    buffer = io.BytesIO()
    torch.save(whole, buffer)
    write(folder / "checkpoint.pt", buffer.getvalue())


def restore(folder, model, optimizers):
    """Loads a checkpoint into model and optimizers, and returns the rows of its log; none without a
    checkpoint. UsageError where the checkpoint is damaged or another model's."""
    if not (folder / "checkpoint.pt").exists():
        return []
    state = checkpoint_of(folder)
    try:
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
    except (KeyError, ValueError, RuntimeError) as error:
        raise UsageError(f"{folder / 'checkpoint.pt'} is another model's") from error
    torch.set_rng_state(state["random"])
    if state["random_cuda"] is not None:
        torch.cuda.set_rng_state(state["random_cuda"])
    return state["rows"]


def lock(file):
    """Locks an open file for this process alone, until it is closed. False where another one has
    the lock."""
    try:
        import fcntl  # not on Windows
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except (ImportError, OSError):  # nor on all file systems: do not share runs there
        pass
    return True


# ---- all of them --------------------------------------------------------------------------------

def run(config, folder, workers):
    """Trains a run to its end, unless another process does. A result of other test sets is measured
    anew where there are weights."""
    model, optimizers = build(config)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "ab") as file:
        if not lock(file):
            return print(f"{folder} is being trained by another process: left to it")
        prepare(config, folder)
        path = folder / "result.json"
        tested = read(path)["tests"] if path.exists() else {}
        known = tests_of(config["split"]).items() <= tested.items()
        if not path.exists() or (not known and (folder / "checkpoint.pt").exists()):
            print(folder)
            fit(model, optimizers, config, folder, workers)


def main(argv=None):
    parser, args = parse(argv)
    with data.ending(parser):
        configs, failed, done = list(configurations(args)), [], {}
        print(f"Runs: {len(configs)}, on {args.device} in {configs[0]['precision']}.")
        folders = [args.out / config["split"] / config["model"] / config["settings"]
                   / f"seed{config['seed']}" for config in configs]
        for config, folder in zip(configs, folders):
            try:
                run(config, folder, args.workers)
            except KeyboardInterrupt:
                print("\nStopped. The same command goes on from the last checkpoint.")
                raise
            except Exception as error:  # the others go on
                if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
                    error = "too little memory: try a smaller --batch-size or --dim"
                elif not isinstance(error, (UsageError, OSError)):  # perhaps in a student's model
                    traceback.print_exc()
                print(f"{parser.prog}: error: {folder}: {error}", file=sys.stderr)
                failed.append(folder)
        for config, folder in zip(configs, folders):  # also what another process has finished
            if folder not in failed and (folder / "result.json").exists():
                result = read(folder / "result.json")
                done.setdefault(config["split"], []).append((config, result))
        for split, runs in done.items():
            print(f"\n{split_table(split, runs)}")
        if failed:
            names = ", ".join(map(str, failed))
            parser.exit(2, f"Failed: {names}\n" if len(configs) > 1 else "")


if __name__ == "__main__":
    main()
