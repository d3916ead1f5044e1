"""Trains models on gCOG, tests them in and out of distribution, and prints a table.

    python train.py --model sstfmr --split productive
    python train.py --model all --split all --seed 0 1 2
    python train.py --model looptfmr --help                  # with the model's own flags

A run has a folder, <out>/<split>/<model>/<settings>/seed<k>/, where <settings> are the flags that
differ from the model's defaults. It holds config.json (all that decides its numbers, and the
machine that it last ran on), copies of data.py, train.py and the model's file, log.csv (how it
went), checkpoint.pt (to go on from) and, at the end, result.json (its accuracies). After a stop at
any moment, the same command goes on, and ends with the same bits if it has as many threads.
"""
import argparse
import ast
import contextlib
import inspect
import io
import itertools
import json
import math
import platform
import re
import signal
import sys
import time
import traceback
import typing
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

import data
import eval as evaluation
from data import UsageError
from eval import between, near_and_far, read, score, write
from models import ALL, available, module_of

# One recipe for all models; a model file may set its own TRAINING beside it.
TRAINING = {"steps": 6_000, "batch_size": 64, "train_size": None, "optimizer": "muon", "lr": 1e-3,
            "decay": "matrices", "schedule": "cosine"}
MUON_RATIO = 3  # Muon's learning rate over AdamW's
MOMENTUM, DECAY = 0.95, 0.01  # of Muon; of weights
WARMUP, REPORT_EVERY, LOG_TRIALS = 200, 500, 300  # steps; steps; per test set, on the way
SAVE_EVERY = 180  # seconds at most between checkpoints; every report makes one, too
SOURCE = Path(__file__).read_bytes()  # as it runs
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]  # the default is the last


# ---- training -----------------------------------------------------------------------------------
def learn(model, optimizers, batch, rate, device):
    """Makes a training step with `rate`, from 0 to 1, times each optimizer's peak learning rate.
    Returns loss and accuracy, (2,)."""
    instruction, stimulus, answer = (x.to(device, non_blocking=True) for x in batch)
    logits = model(instruction, stimulus)
    loss = nn.functional.cross_entropy(logits, answer)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * rate  # make_optimizers sets the peak
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack([loss.detach(), (logits.argmax(1) == answer).float().mean()])


def rate_at(step, steps, schedule):
    """The learning rate at a step, from 0 on, as a share of its peak: a linear warm-up times half a
    cosine; or always 1, if constant."""
    if schedule == "constant":
        return 1
    return min(1, (step + 1) / min(WARMUP, steps)) * (1 + math.cos(math.pi * step / steps)) / 2


def fit(config, folder, again, workers):
    """Trains a run from where it stands to its end, tests it, and writes its result. Nothing is
    left to do for a run that is finished."""
    split, steps, size, device = (config[key] for key in ("split", "steps", "batch_size", "device"))
    batches = data.Batches(split, size, config["seed"], config["train_size"])
    near_and_far(split)  # a split without a test set in distribution is refused at once
    model, optimizers = build(config)
    if prepare(config, folder, again):
        print(f"{folder} is finished", flush=True)
        return
    state = restore(folder, model, optimizers)
    done, rows, recent = state["step"], state["rows"], state["recent"].to(device)
    print(f"{folder}, from step {done:,}" if done else folder, flush=True)
    loader = DataLoader(batches, batch_size=None, sampler=range(done, steps), num_workers=workers,
                        pin_memory=device == "cuda", worker_init_fn=ignore_stops,
                        generator=torch.Generator())  # the default one is the model's
    bar = tqdm(loader, f"{split} {config['model']} seed {config['seed']}", steps, initial=done,
               unit=" trials", unit_scale=size, disable=None)
    saved = time.perf_counter()
    began, stopped = saved - state["seconds"], []
    at_stop(lambda *_: stopped.append(True))  # the loop asks after each step
    for step, batch in enumerate(bar, done + 1):
        rate = rate_at(step - 1, steps, config["schedule"])
        recent += learn(model, optimizers, batch, rate, device)
        due = step % REPORT_EVERY == 0 or step in (10, steps)  # 10: an early sign of life
        if due or step % 10 == 0:  # reading a number waits for the GPU
            since = rows[-1]["step"] if rows else 0
            loss, accuracy = (recent / (step - since)).tolist()
            if not math.isfinite(loss):
                raise UsageError(f"the loss is {loss} at step {step}: try a lower --lr")
            bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{accuracy:.1%}")
        if due:
            tested = score(model.eval(), split, LOG_TRIALS, device)["accuracy"]
            model.train()
            row = {"step": step, "trials": step * size, "loss": loss, "train": accuracy,
                   **tested, "seconds": time.perf_counter() - began}
            rows.append({name: round(value, 4) for name, value in row.items()})
            bar.write("  ".join(f"{name} {value:,}" for name, value in rows[-1].items()),
                      sys.stderr)
            recent.zero_()
        if due or stopped or time.perf_counter() - saved > SAVE_EVERY:
            saved = time.perf_counter()
            save(folder, model, optimizers, step=step, rows=rows, recent=recent.cpu(),
                 seconds=saved - began)
            write_log(folder, rows)
        if stopped:
            print(f"\nStopped after step {step:,}.", flush=True)
            raise KeyboardInterrupt
    at_stop(signal.default_int_handler)
    write_log(folder, rows)  # once more: the run may have been killed before the last one
    result = score(model.eval(), split, config["test_trials"], device)
    whole = {"config": read(folder / "config.json"), **result, "log": rows}
    write(folder / "result.json", json.dumps(whole, indent=1).encode())


def at_stop(handler):  # Ctrl-C, or SIGTERM, which clusters send
    signal.signal(signal.SIGINT, handler)
    signal.signal(signal.SIGTERM, handler)


def ignore_stops(_):  # in a process that draws trials
    at_stop(signal.SIG_IGN)


def build(config):
    """A run's model and its optimizers, as they start."""
    torch.manual_seed(config["seed"])
    model = module_of(config["model"]).Model(**config["model_args"]).to(config["device"])
    return model, make_optimizers(model, config["optimizer"], config["lr"], config["decay"])


# ---- the optimizers -----------------------------------------------------------------------------
def make_optimizers(model, name, lr, decay):
    """AdamW for all, or Muon for the matrices of Linear layers other than the readout and AdamW for
    the rest. Weight decay is for matrices, or for all."""
    linears = [module for module in model.modules()
               if isinstance(module, nn.Linear) and module is not model.readout]
    hidden = [linear.weight for linear in linears] if name == "muon" else []
    others = [p for p in model.parameters() if p not in {*hidden}]  # in a list, == would fail
    decayed = [p for p in others if decay == "all" or p.dim() > 1]
    vectors = [p for p in others if decay == "matrices" and p.dim() <= 1]
    adamw = torch.optim.AdamW([{"params": decayed, "peak": lr, "weight_decay": DECAY},
                               {"params": vectors, "peak": lr, "weight_decay": 0}], fused=True)
    return [adamw, Muon(hidden, MUON_RATIO * lr)] if hidden else [adamw]


class Muon(torch.optim.Optimizer):
    """Moves each matrix by its momentum, made orthogonal (Jordan et al. 2024), so that the
    gradient's size does not matter. A matrix with more rows than columns moves further, by `scale`.
    It computes what torch.optim.Muon does, but in float32, which every CPU has units for."""

    def __init__(self, matrices, peak):
        super().__init__(matrices, {"lr": peak, "peak": peak})

    @torch.no_grad()
    def step(self):
        group, = self.param_groups
        for matrix in group["params"]:
            if (gradient := matrix.grad) is None:
                continue
            state = self.state[matrix]
            momentum = state.setdefault("momentum", torch.zeros_like(matrix))
            momentum.lerp_(gradient, 1 - MOMENTUM)
            update = orthogonal(gradient.lerp(momentum, MOMENTUM))  # Nesterov's momentum
            scale = max(1, matrix.shape[0] / matrix.shape[1]) ** 0.5
            matrix.mul_(1 - group["lr"] * DECAY).sub_(update, alpha=group["lr"] * scale)


def orthogonal(x):  # (rows, columns)
    """Brings singular values that are not tiny near 1, between 0.7 and 1.2: five Newton-Schulz
    iterations, each a polynomial of odd powers, which acts on the singular values alone."""
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.T).T  # smaller products
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        # 3.4445 x - 4.775 (x x.T) x + 2.0315 (x x.T)^2 x
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.775, alpha=2.0315), x, beta=3.4445)
    return x


# ---- the files of a run -------------------------------------------------------------------------
def prepare(config, folder, again):
    """Returns whether the run in a folder is finished. If not, puts config.json and copies of the
    code there. UsageError if the run there was made with other code, unless `again` removes it."""
    model = Path(module_of(config["model"]).__file__)
    code = {Path(data.__file__): data.SOURCE, Path(__file__): SOURCE, model: model.read_bytes()}
    for path in code:
        check_imports(path, code[path])
    result, checkpoint = folder / "result.json", folder / "checkpoint.pt"
    if result.exists() or checkpoint.exists():
        copies = {path.name: path.read_bytes() for path in folder.glob("*.py")}
        other = [f"{path.name} (diff {folder / path.name} {path})" for path in code
                 if copies.get(path.name) != code[path]]
        if other and not again:
            raise UsageError(f"the run there was made with another {', '.join(other)}: choose "
                             "another --out, or add --again to start it anew")
        if other:
            result.unlink(missing_ok=True)
            checkpoint.unlink(missing_ok=True)
        elif result.exists() and read(result)["config"]["test_trials"] == config["test_trials"]:
            return True  # or fit tests it again, without training
    folder.mkdir(parents=True, exist_ok=True)
    machine = {"python": platform.python_version(), "torch": torch.__version__,
               "machine": platform.platform(), "threads": torch.get_num_threads()}
    write(folder / "config.json", json.dumps(config | machine, indent=1).encode())
    for path, content in code.items():
        write(folder / path.name, content)
    return False


def check_imports(path, source):
    """UsageError if a file imports another one from here, of which the run would have no copy. Only
    train.py may import eval and models: they build and test a model, but train none."""
    known = ("data", "eval", "models") if path.name == "train.py" else ("data",)
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = ["models" if node.level else node.module]  # level: `from . import`
        for name in (name.partition(".")[0] for name in names):
            here = Path(__file__).with_name(name)
            if name not in known and (any(here.glob("*.py")) or here.with_suffix(".py").exists()):
                raise UsageError(f"{path.name} imports {name}, of which a run keeps no copy: put "
                                 "the code into one file")


def save(folder, model, optimizers, **state):
    """Writes a checkpoint: all that a run needs to go on to the same bits."""
    buffer = io.BytesIO()  # torch.save to a file does not raise OSError where the disk is full
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    torch.save({**state, "model": model.state_dict(), "random": torch.get_rng_state(), "cuda": cuda,
                "optimizers": [optimizer.state_dict() for optimizer in optimizers]}, buffer)
    write(folder / "checkpoint.pt", buffer.getvalue())


def write_log(folder, rows):
    if rows:
        lines = [rows[0].keys(), *(row.values() for row in rows)]
        text = "".join(",".join(map(str, line)) + "\n" for line in lines)
        with contextlib.suppress(PermissionError):  # on Windows, while another program reads it
            write(folder / "log.csv", text.encode())


def restore(folder, model, optimizers):
    """Loads a checkpoint into model and optimizers, and returns what else `save` was given. Without
    a checkpoint, that is how a run starts."""
    if not (folder / "checkpoint.pt").exists():
        return {"step": 0, "rows": [], "recent": torch.zeros(2), "seconds": 0}
    state = read(folder / "checkpoint.pt")
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    torch.set_rng_state(state["random"])
    torch.cuda.set_rng_state_all(state["cuda"])
    return state


# ---- the command line ---------------------------------------------------------------------------
def parser_of(model=None):
    """The flags: what to run and, of a model, TRAINING and the arguments of its constructor."""
    parser = argparse.ArgumentParser(  # without usage, so that an error is one line
        f"train.py --model {model}" if model else "train.py", usage=argparse.SUPPRESS,
        description="Train models on gCOG. Several models, splits or seeds make several runs.",
        add_help=model is not None, allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    whole = between(1, 10 ** 9)
    add = parser.add_argument_group("what to run").add_argument
    add("--model", nargs="+", default=["sstfmr"], choices=["all", *available()],
        help=f"which ones; all: {', '.join(ALL)}")
    add("--split", nargs="+", default=["productive"], choices=["all", *data.SPLITS],
        help="which ones; all: those without _release")
    add("--seed", nargs="+", type=between(0, 2 ** 63 - 1), default=[0],
        help="of the weights and the training trials")
    add("--test-trials", type=whole, default=2_000,
        help="per test set, at the end; the study's runs have 10000")
    add("--out", type=Path, default=Path("runs"), help="where run folders go")
    add("--again", action="store_true", help="start runs of other code anew")
    add("--device", choices=DEVICES, default=DEVICES[-1], help="where to compute")
    add("--workers", type=between(0, 64), default=4 if "cuda" in DEVICES else 0,
        help="processes that draw trials in the background, where cores are idle; 4 beside a GPU")
    if not model:
        return parser
    add = parser.add_argument_group("training").add_argument
    add("--steps", type=whole, help="batches to train on")
    add("--batch-size", type=whole, help="trials per batch")
    add("--train-size", type=whole, help="so many trials, again and again; None: all are new")
    add("--optimizer", choices=["muon", "adamw"], help="muon for matrices, adamw for the rest")
    add("--lr", type=between(1e-30, 1e30), help="AdamW's peak, and a third of Muon's")
    add("--decay", choices=["matrices", "all"],
        help="which of AdamW's weights decay: matrices and tables, or all; Muon's always do")
    add("--schedule", choices=["cosine", "constant"],
        help="of the rate; cosine: a warm-up, then it falls to 0; constant: neither")
    module = module_of(model)
    parser.set_defaults(**TRAINING | getattr(module, "TRAINING", {}))
    add = parser.add_argument_group("the model, as its file explains").add_argument
    for name, parameter in inspect.signature(module.Model, eval_str=True).parameters.items():
        default, kind = parameter.default, type(parameter.default)
        if kind not in (bool, int, float, str):
            raise UsageError(f"{model}: Model needs a default for {name} that a flag can carry: a "
                             "bool, an int, a float or a str")
        options = {"action": argparse.BooleanOptionalAction} if kind is bool else {
            "type": between(min(1, default), 10 ** 9) if kind is int else kind,
            "choices": typing.get_args(parameter.annotation) or None}  # of a Literal
        try:
            add("--" + name.replace("_", "-"), default=default, help="(default: %(default)s)",
                **options)
        except argparse.ArgumentError as error:
            raise UsageError(f"{model}: Model cannot have an argument {name}: train.py has a flag "
                             "of this name") from error
    return parser


def configurations(args, argv):
    """One resolved configuration per run: all that decides its numbers."""
    splits = [name for name in data.SPLITS if name in args.split
              or "all" in args.split and not name.endswith("_release")]
    parsers = {model: parser_of(model) for model in available()
               if model in args.model or "all" in args.model and model in ALL}
    for split, model, seed in itertools.product(splits, parsers, dict.fromkeys(args.seed)):
        parser = parsers[model]
        values = vars(parser.parse_args(argv))
        common = vars(args) | TRAINING  # all other flags are arguments of Model
        arguments = {name: value for name, value in values.items() if name not in common}
        names = dict.fromkeys(["dim", "layers", "heads", *TRAINING, *sorted(arguments)])
        settings = "-".join(f"{name}{values[name]}" for name in names
                            if values.get(name) != parser.get_default(name))
        yield {"split": split, "model": model, "seed": seed,
               "settings": re.sub(r"[^A-Za-z0-9.-]", "", settings) or "default",
               "model_args": arguments, **{name: values[name] for name in TRAINING},
               "test_trials": args.test_trials, "device": args.device}


def main(argv=None):
    parser = parser_of()
    with data.ending(parser):
        args, _ = parser.parse_known_args(argv)  # configurations parses the rest
        runs = {args.out.joinpath(c["split"], c["model"], c["settings"], f"seed{c['seed']}"): c
                for c in configurations(args, argv)}
        print(f"Runs: {len(runs)}, on {args.device}, with a line every {REPORT_EVERY} steps. After "
              "a stop, the same command goes on.", flush=True)
        at_stop(signal.default_int_handler)
        finished = []
        for folder, config in runs.items():
            try:
                fit(config, folder, args.again, args.workers)
                finished.append(str(folder))
            except Exception as error:  # the others go on
                if not isinstance(error, (UsageError, OSError)):
                    traceback.print_exc()
                print(f"{parser.prog}: error: {folder}: {error}", file=sys.stderr)
            finally:  # a notebook lives on
                at_stop(signal.default_int_handler)
        if finished:
            evaluation.main(finished)
        if len(finished) < len(runs):
            sys.exit(2)


if __name__ == "__main__":
    main()
