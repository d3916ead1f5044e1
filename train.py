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
from torch.utils.data import DataLoader
from tqdm import tqdm

import data
import eval as evaluation
from data import UsageError
from eval import between, checkpoint_of, code_of, devices, read, score
from models import available, module_of

# One recipe for all models; a model file may set its own TRAINING beside it.
TRAINING = {"steps": 6_000, "batch_size": 64, "train_size": None, "optimizer": "muon", "lr": 1e-3,
            "decay": "matrices", "schedule": "cosine"}
MUON_RATIO = 3  # Muon's learning rate over AdamW's
MOMENTUM, DECAY = 0.95, 0.01  # of Muon; of weights
WARMUP, REPORT_EVERY = 200, 1_000  # steps
LOG_TRIALS = 300  # per test set, on the way


# ---- training -----------------------------------------------------------------------------------

def learn(model, optimizers, batch, share, device):
    """Makes a training step, at a share of the peak rate. Returns loss and accuracy, (2,)."""
    instruction, stimulus, answer = (x.to(device, non_blocking=True) for x in batch)
    logits = model(instruction, stimulus)
    loss = torch.nn.functional.cross_entropy(logits, answer)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * share  # make_optimizers sets the peak
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack([loss.detach(), (logits.argmax(1) == answer).float().mean()])


def fit(model, optimizers, config, folder, workers):
    """Trains a run from where it stands to its end, and writes its result."""
    rows = restore(folder, model, optimizers)
    done, seconds = (rows[-1]["step"], rows[-1]["seconds"]) if rows else (0, 0)
    split, steps, size = config["split"], config["steps"], config["batch_size"]
    batches = DataLoader(data.Batches(split, size, config["seed"], config["train_size"]),
                         batch_size=None, sampler=range(done, steps),  # an item is a batch
                         num_workers=workers, pin_memory=config["device"] == "cuda",
                         generator=torch.Generator())  # leaves the global one alone
    began = time.perf_counter() - seconds
    recent, since = 0, done  # the sum of loss and accuracy over the steps after `since`
    with tqdm(total=steps * size, initial=done * size, unit=" trials", unit_scale=True,
              desc=f"{split} {config['model']} seed {config['seed']}", disable=None) as bar:
        for step, batch in enumerate(batches, done + 1):
            share = rate(step - 1, steps, config["schedule"])
            recent += learn(model, optimizers, batch, share, config["device"])
            bar.update(size)
            due = step % REPORT_EVERY == 0 or step in (10, steps)  # 10: soon a checkpoint
            if due or step % 10 == 0:  # reading a number waits for the GPU
                loss, accuracy = (recent / (step - since)).tolist()
                if not math.isfinite(loss):
                    raise UsageError(f"the loss is {loss:.0f} at step {step}: try a lower --lr")
                bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{accuracy:.1%}")
            if due:
                rows.append(report(config, model, step, loss, accuracy,
                                   time.perf_counter() - began))
                shown = (f"{key} {value:.1%}" if key in data.SPLITS[split]  # also "train"
                         else f"{key} {value}" for key, value in rows[-1].items())
                bar.write("  ".join(shown), file=sys.stderr)
                save(config, folder, rows, model, optimizers)
                recent, since = 0, step
    result = score(model.eval(), split, evaluation.TEST_TRIALS, config["device"])
    result |= {"trials": steps * size, "seconds": rows[-1]["seconds"],
               "parameters": sum(p.numel() for p in model.parameters()), "log": rows}
    write(folder / "result.json", json.dumps(result, indent=1).encode())


def rate(step, steps, schedule):
    """The learning rate at a step, as a share of its peak: a linear warm-up times half a cosine; or
    constant."""
    if schedule == "constant":
        return 1
    return min(1, (step + 1) / min(WARMUP, steps)) * (1 + math.cos(math.pi * step / steps)) / 2


def report(config, model, step, loss, accuracy, seconds):
    """A row of log.csv: training since the row before, accuracy on the test sets, all seconds."""
    tested = score(model.eval(), config["split"], LOG_TRIALS, config["device"])
    model.train()
    row = {"loss": loss, "train": accuracy} | tested["accuracy"]
    return {"step": step, "trials": step * config["batch_size"],
            **{key: round(value, 4) for key, value in row.items()}, "seconds": round(seconds, 3)}


# ---- the optimizers -----------------------------------------------------------------------------

def make_optimizers(model, name, lr, decay):
    """AdamW for all, or Muon for the matrices of Linear layers other than the readout and AdamW for
    the rest. Weight decay is for matrices, or for all."""
    linears = [module for module in model.modules()
               if isinstance(module, torch.nn.Linear) and module is not model.readout]
    hidden = dict.fromkeys(module.weight for module in linears) if name == "muon" else {}
    others = [p for p in model.parameters() if p not in hidden]
    decayed = [p for p in others if decay == "all" or p.dim() > 1]
    vectors = [p for p in others if decay == "matrices" and p.dim() <= 1]
    adamw = torch.optim.AdamW([{"params": decayed, "peak": lr, "weight_decay": DECAY},
                               {"params": vectors, "peak": lr, "weight_decay": 0}], lr)
    return [adamw, Muon(hidden, MUON_RATIO * lr)] if hidden else [adamw]


class Muon(torch.optim.Optimizer):
    """Moves each matrix by its momentum, made orthogonal (Jordan et al. 2024): whatever the
    gradient's size, all singular values of a step are near 1. It computes what torch.optim.Muon
    does, but in float32, which every CPU has units for, and with matrices of one shape stacked."""

    def __init__(self, matrices, peak):
        shapes = dict.fromkeys(matrix.shape for matrix in matrices)
        groups = [{"params": [m for m in matrices if m.shape == shape]} for shape in shapes]
        super().__init__(groups, {"lr": peak, "peak": peak})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            matrices, lr = group["params"], group["lr"]
            gradient = torch.stack([torch.zeros_like(matrix) if matrix.grad is None else matrix.grad
                                    for matrix in matrices])
            state = self.state[matrices[0]]
            momentum = state.setdefault("momentum", torch.zeros_like(gradient))
            momentum.lerp_(gradient, 1 - MOMENTUM)
            updates = orthogonal(gradient.lerp(momentum, MOMENTUM))  # Nesterov's momentum
            scale = max(1, gradient.shape[1] / gradient.shape[2]) ** 0.5
            for matrix, update in zip(matrices, updates):
                if matrix.grad is not None:
                    matrix.mul_(1 - lr * DECAY).sub_(update, alpha=lr * scale)


def orthogonal(x):  # (matrices, rows, columns)
    """Brings singular values that are not tiny near 1, between 0.7 and 1.2: five Newton-Schulz
    iterations, each a polynomial of odd powers, which acts on the singular values alone."""
    if x.shape[1] > x.shape[2]:
        return orthogonal(x.mT).mT  # the smaller product
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x


# ---- what to run --------------------------------------------------------------------------------

def general_parser():
    """The flags that say what to run, and where."""
    parser = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False, allow_abbrev=False)
    add = parser.add_argument_group("what to run").add_argument
    add("--model", nargs="+", default=["sstfmr"], choices=["all", *available()], help="which ones")
    add("--split", nargs="+", default=["productive"], choices=["all", *data.SPLITS],
        help="which ones; all: those without _release")
    add("--seed", nargs="+", type=between(0, 2 ** 63 - 1), default=[0],
        help="of the weights and the training trials")
    add("--out", type=Path, default=Path("runs"), help="where run folders go")
    add = parser.add_argument_group("the machine").add_argument
    add("--device", choices=devices(), default=devices()[-1], help="where to compute")
    add("--workers", type=between(0, 64), default=4 if devices()[-1] == "cuda" else 0,
        help="processes that draw trials, 4 beside a GPU")
    return parser


def parser_of(model):
    """The parser of a model. Its flags are those above, the keys of TRAINING, for which the model's
    file may set other defaults, and the arguments of its constructor."""
    parser = argparse.ArgumentParser(  # without usage, so that an error is one line
        f"models/{model}.py: TRAINING", parents=[general_parser()], usage=argparse.SUPPRESS,
        description="Train models on gCOG. Several models, splits or seeds make several runs.",
        allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add, whole = parser.add_argument_group("training").add_argument, between(1, 10 ** 9)
    add("--steps", type=whole, help="batches to train on")
    add("--batch-size", type=whole, help="trials per batch")
    add("--train-size", type=whole, help="so many trials, again and again; None: all are new")
    add("--optimizer", choices=["muon", "adamw"], help="muon for matrices, adamw for the rest")
    add("--lr", type=between(1e-30, 1e30), help="AdamW's peak, and a third of Muon's")
    add("--decay", choices=["matrices", "all"], help="which weights decay")
    add("--schedule", choices=["cosine", "constant"], help="how the rate falls")
    parser.set_defaults(**TRAINING)
    own = getattr(module_of(model), "TRAINING", {})  # parsed as if typed, so that it is checked
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in own.items()]
    parser.set_defaults(**vars(parser.parse_args(flags)))
    parser.prog = f"train.py --model {model}"
    add = parser.add_argument_group("the model, as its file explains").add_argument
    signature = inspect.signature(module_of(model).Model, eval_str=True)  # also texts as types
    for name, parameter in signature.parameters.items():
        try:
            add(f"--{name.replace('_', '-')}", default=parameter.default,
                help="(default: %(default)s)", **options_of(parameter))
        except argparse.ArgumentError as error:  # a name that is taken
            parser.error(str(error))
    return parser


def options_of(parameter):
    """What argparse must know of a constructor's argument, by its Literal or its default."""
    default, kind = parameter.default, type(parameter.default)
    if default in (parameter.empty, None):
        raise UsageError(f"Model needs a default for {parameter.name}, other than None")
    if typing.get_origin(parameter.annotation) is typing.Literal:
        return {"choices": typing.get_args(parameter.annotation), "type": kind}
    if kind is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": between(min(1, default), 10 ** 9) if kind is int else kind}


def configurations(argv=None):
    """One resolved configuration per run. UsageError for what cannot be run."""
    args, _ = general_parser().parse_known_args(argv)
    splits = [name for name in data.SPLITS if name in args.split
              or "all" in args.split and not name.endswith("_release")]
    models = [name for name in available() if {name, "all"} & {*args.model}]
    codes = {model: code_of(model) for model in models}
    for split, model, seed in itertools.product(splits, codes, dict.fromkeys(args.seed)):
        parser = parser_of(model)
        values = vars(parser.parse_args(argv))
        arguments = {name: values[name] for name in values if name not in vars(args) | TRAINING}
        names = dict.fromkeys(["dim", "layers", "heads", *TRAINING, *sorted(arguments)])
        settings = "-".join(f"{name}{values[name]}" for name in names
                            if values.get(name) != parser.get_default(name))
        yield {"split": split, "model": model, "seed": seed,
               "settings": re.sub(r"[^A-Za-z0-9.-]", "", settings) or "default",
               "model_args": arguments, **{name: values[name] for name in TRAINING},
               "device": args.device, "code": codes[model]}


def build(config):
    """A run's model and its optimizers, as they start. UsageError where trials cannot be drawn, or
    the model refuses its arguments, or gives another shape for two trials than it should."""
    split, seed = config["split"], config["seed"]
    data.Batches(split, config["batch_size"], seed, config["train_size"])  # raises if too small
    for depth in data.SPLITS[split]["train"].depths:
        data.trials(split, "train", 1, depth=depth)  # raises where cells or pairs run out
    evaluation.tests_of(split, 1)  # likewise
    evaluation.in_distribution(split)  # raises where there is none
    torch.manual_seed(seed)
    model = module_of(config["model"]).Model(**config["model_args"]).eval()
    trials = data.Batches(split, 2, seed)[0]
    for name, function, width in (("features", model.features, model.readout.in_features),
                                  ("forward", model, data.CLASSES)):
        shape = tuple(evaluation.predict(function, trials, "cpu").shape)
        if shape != (2, width):
            raise UsageError(f"{name} gives {shape} for two trials, not (2, {width})")
    model.train().to(config["device"])
    return model, make_optimizers(model, config["optimizer"], config["lr"], config["decay"])


# ---- the files of a run -------------------------------------------------------------------------

def compare(config, folder):
    """UsageError if another run stands in the folder, or if it or another seed beside it is of
    other code."""
    paths = {*folder.parent.glob("seed*/config.json")}
    if (folder / "checkpoint.pt").exists():
        paths.add(folder / "config.json")  # which must not be missing
    for path in sorted(paths):
        there = read(path)
        for file, code in config["code"].items():
            if there.get("code", {}).get(file) != code:
                raise UsageError(f"{file} changed since {path.parent}: choose another --out")
        if path.parent == folder:
            here = json.loads(json.dumps(config))  # as a file gives it back: tuples are lists
            if other := [f"{key} is {there.get(key)} there, {value} here"
                         for key, value in here.items() if there.get(key) != value]:
                raise UsageError(f"another run stands there ({'; '.join(other)}): choose another "
                                 "--out")


def write(path, content):
    """Replaces a file in one step. OSError if that fails, as on a full disk: the old one stays."""
    with data.replacing(path) as temporary:
        temporary.write_bytes(content)


def save(config, folder, rows, model, optimizers):
    """Writes config.json, log.csv, and a checkpoint: all that a run needs to go on to the same
    bits."""
    cuda = torch.cuda.is_initialized()
    whole = config | {  # runs that differ in the machine alone are the same
        "python": platform.python_version(), "torch": torch.__version__,
        "machine": platform.platform(), "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if cuda else None}
    write(folder / "config.json", json.dumps(whole, indent=1).encode())
    lines = [rows[0].keys(), *(row.values() for row in rows)]
    write(folder / "log.csv", "".join(",".join(map(str, line)) + "\n" for line in lines).encode())
    buffer = io.BytesIO()  # torch.save to a file does not raise OSError where the disk is full
    torch.save({"rows": rows, "model": model.state_dict(), "random": torch.get_rng_state(),
                "optimizers": [optimizer.state_dict() for optimizer in optimizers],
                "random_cuda": torch.cuda.get_rng_state() if cuda else None}, buffer)
    write(folder / "checkpoint.pt", buffer.getvalue())


def restore(folder, model, optimizers):
    """Loads a checkpoint into model and optimizers, and returns the rows of its log; none without a
    checkpoint. UsageError where it is damaged."""
    if not (folder / "checkpoint.pt").exists():
        return []
    state = checkpoint_of(folder)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
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
    """Trains a run to its end, unless another process does."""
    model, optimizers = build(config)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "ab") as file:
        if not lock(file):
            return print(f"{folder} is being trained by another process: left to it")
        compare(config, folder)
        if (folder / "result.json").exists():
            read(folder / "result.json")  # raises where it is damaged
        else:
            print(folder)
            fit(model, optimizers, config, folder, workers)


def main(argv=None):
    parser = general_parser()
    with data.ending(parser):
        args, _ = parser.parse_known_args(argv)  # configurations parses the rest
        runs, failed = {}, []
        for config in configurations(argv):
            parts = config["split"], config["model"], config["settings"], f"seed{config['seed']}"
            runs[args.out.joinpath(*parts)] = config
        print(f"Runs: {len(runs)}, on {args.device}.")
        for folder, config in runs.items():
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
        finished = [str(folder) for folder in runs  # also what another process has finished
                    if folder not in failed and (folder / "result.json").exists()]
        if finished:
            evaluation.main(finished)
        if failed:
            names = ", ".join(map(str, failed))
            parser.exit(2, f"Failed: {names}\n" if len(runs) > 1 else "")


if __name__ == "__main__":
    main()
