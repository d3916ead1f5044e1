"""Trains models on gCOG, tests them in and out of distribution, and prints a table.

    python train.py --model sstfmr --split productive
    python train.py --model all --split all --seed 0 1 2
    python train.py --model looptfmr --help                  # with the model's own flags

A run has a folder, <out>/<split>/<model>/<settings>/seed<k>/, where <settings> are the flags that
differ from the model's defaults. It holds config.json (all that decides its numbers, and the
machine that it last ran on), copies of data.py, train.py and the model's file, log.csv (how it
went, in percent), checkpoint.pt (to go on from) and, at the end, result.json (its accuracies).
After a stop at any moment, the same command goes on, and ends with the same bits if it has as many
threads.
"""
import argparse
import collections
import contextlib
import csv
import inspect
import io
import itertools
import json
import math
import platform
import shlex
import signal
import sys
import time
import traceback
import typing
import urllib.parse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

import data
import eval as evaluation
from data import UsageError
from eval import between, checksum, read, read_run, score, write
from models import ALL, available, module_of

# One recipe for all models; a model file may set its own TRAINING beside it.
TRAINING = {"steps": 6_000, "batch_size": 64, "train_size": None, "optimizer": "muon", "lr": 1e-3,
            "schedule": "cooldown"}
MUON_RATIO = 3  # Muon's learning rate over AdamW's
MOMENTUM = 0.95  # of Muon
DECAY = 0.01  # of weights, times the rate
COOLDOWN = 0.2  # the share of the steps in which the rate falls
REPORT_EVERY = 500  # steps: then it tests a little, and saves
EARLY = 100  # the same, in the first thousand steps
LOG_TRIALS = 300  # per test set, in a report
SOURCE = Path(__file__).read_bytes()  # as it runs
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]  # the default is the last


# ---- training -----------------------------------------------------------------------------------
def fit(config, folder, again=False, workers=0):
    """Trains a run from where it stands to its end, tests it, and writes its result. Nothing is
    left to do for a run that is finished."""
    split = config["split"]
    steps = config["steps"]
    size = config["batch_size"]
    device = config["device"]
    batches = data.Batches(split, size, config["seed"], config["train_size"])
    model, optimizers = build(config)  # before `prepare`: if it fails, no folder is made
    finished = prepare(config, folder, again)
    if finished:
        print(f"{folder} is finished", flush=True)
        return
    files = Files(folder)
    state = restore(folder, model, optimizers)
    step = state["step"]
    rows = state["rows"]  # of the log
    since = state["since"]  # the step of the last row
    sums = state["sums"].to(device)  # of loss and accuracy, since then
    print(f"{folder}, from step {step:,}", flush=True)

    # A DataLoader draws a number when it starts: not from torch's own generator, which is the
    # model's (dropout, strays), or a resumed run would end with other bits.
    loader = DataLoader(batches, batch_size=None, sampler=range(step, steps), num_workers=workers,
                        pin_memory=device == "cuda", worker_init_fn=ignore_stops,
                        generator=torch.Generator())
    name = f"{split} {config['model']} seed {config['seed']}"
    bar = tqdm(loader, desc=name, total=steps, initial=step, unit=" trials", unit_scale=size,
               disable=None)  # None: no bar where stderr is no terminal
    began = time.perf_counter() - state["seconds"]
    reports = {10, steps}  # after which steps
    reports.update(range(EARLY, 1_000, EARLY))
    reports.update(range(1_000, steps, REPORT_EVERY))
    stops = []  # the signals that have come: the loop saves and ends after the step they came in
    with on_stop(lambda number, frame: stops.append(number)):
        for batch in bar:
            rate = rate_at(step, steps, config["schedule"])
            sums += learn(model, optimizers, batch, rate, device)
            step += 1
            if step % 10 == 0 or step in reports:  # reading a number waits for the GPU
                loss, accuracy = (sums / (step - since)).tolist()
                bar.set_postfix(loss=f"{loss:.3f}", accuracy=f"{accuracy:.1%}")
                if not math.isfinite(loss):
                    raise UsageError(f"the loss is {loss} at step {step}: try a lower --lr")
            if step in reports:
                row = {"step": step, "trials": step * size, "loss": round(loss, 4),
                       "train": round(100 * accuracy, 1)}
                row |= test_a_little(model, config)
                row["seconds"] = round(time.perf_counter() - began, 1)
                bar.write("  ".join(f"{name} {value:,}" for name, value in row.items()), sys.stderr)
                rows.append(row)
                since = step
                sums.zero_()
            if step in reports or stops:
                state = {"step": step, "rows": rows, "since": since, "sums": sums.cpu(),
                         "seconds": time.perf_counter() - began}
                save(files, model, optimizers, state)
                if stops:
                    break
    if stops:
        print(f"\nStopped after step {step:,}.", flush=True)
        raise KeyboardInterrupt

    result = score(model.eval(), split, config["test_trials"], device)
    result["checksums"] = {test: checksum(split, test) for test in result["accuracy"]}
    result = {"config": read(folder / "config.json"), **result, "log": rows}
    files.write("result.json", json.dumps(result, indent=1).encode())


def test_a_little(model, config):
    """Accuracy in percent on a few hundred trials of each test set."""
    shares = score(model.eval(), config["split"], LOG_TRIALS, config["device"])["accuracy"]
    model.train()
    return {test: round(100 * share, 1) for test, share in shares.items()}


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
    """The learning rate at a step, from 0 on, as a share of its peak: always 1, or with a cooldown,
    in which it falls linearly to 0 (Hägele et al. 2024, arXiv 2405.18392)."""
    if schedule == "constant":
        return 1
    return min(1, (steps - step) / (COOLDOWN * steps))


def build(config):
    """A run's model and its optimizers, as they start."""
    torch.manual_seed(config["seed"])
    model = module_of(config["model"]).Model(**config["model_args"]).to(config["device"])
    return model, make_optimizers(model, config["optimizer"], config["lr"])


@contextlib.contextmanager
def on_stop(handler):
    """Meanwhile, Ctrl-C and SIGTERM, which clusters send, call a handler. For the main thread only:
    Python takes signals nowhere else."""
    before = {}
    for number in signal.SIGINT, signal.SIGTERM:
        before[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, old_handler in before.items():
            signal.signal(number, old_handler)


def ignore_stops(_):  # in a process that draws trials
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


# ---- the optimizers -----------------------------------------------------------------------------
def make_optimizers(model, name, lr):
    """AdamW for all parameters, or Muon for the matrices of Linear layers other than the readout
    and AdamW for the rest. Vectors do not decay. A parameter in two places is moved once."""
    linear = {module.weight for module in model.modules() if isinstance(module, nn.Linear)}
    linear -= set(model.readout.parameters())
    for_muon = []
    decayed = []
    vectors = []
    for p in model.parameters():
        if name == "muon" and p in linear:
            for_muon.append(p)
        elif p.dim() > 1:
            decayed.append(p)
        else:
            vectors.append(p)
    adamw = torch.optim.AdamW([{"params": decayed, "peak": lr, "weight_decay": DECAY},
                               {"params": vectors, "peak": lr, "weight_decay": 0}], fused=True)
    return [adamw, Muon(for_muon, MUON_RATIO * lr)] if for_muon else [adamw]


class Muon(torch.optim.Optimizer):
    """Moves each matrix by its momentum, made orthogonal (Jordan et al. 2024), so that the
    gradient's size does not matter. A matrix with more rows than columns moves further, by `scale`.
    It computes what torch.optim.Muon does, but in float32, which every CPU has units for, and for
    all matrices of a shape at once, which a GPU is faster with."""

    def __init__(self, matrices, peak):
        super().__init__(matrices, {"lr": peak, "peak": peak})
        for matrix in matrices:
            self.state[matrix]["momentum"] = torch.zeros_like(matrix)

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        alike = collections.defaultdict(list)  # shape -> matrices
        for matrix in group["params"]:
            if matrix.grad is not None:
                alike[matrix.shape].append(matrix)
        for (rows, columns), matrices in alike.items():
            gradients = [matrix.grad for matrix in matrices]
            momenta = [self.state[matrix]["momentum"] for matrix in matrices]
            torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
            nesterov = torch._foreach_lerp(gradients, momenta, MOMENTUM)  # Nesterov's momentum
            updates = list(orthogonal(torch.stack(nesterov)))
            scale = max(1, rows / columns) ** 0.5
            torch._foreach_mul_(matrices, 1 - group["lr"] * DECAY)
            torch._foreach_sub_(matrices, updates, alpha=group["lr"] * scale)


def orthogonal(x):  # (matrices, rows, columns)
    """Brings singular values that are not tiny near 1, between 0.7 and 1.2: five Newton-Schulz
    iterations, each a polynomial of odd powers, which acts on the singular values alone."""
    if x.shape[1] > x.shape[2]:
        return orthogonal(x.mT).mT  # smaller products
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.mT
        # 3.4445 x - 4.775 (x x.T) x + 2.0315 (x x.T)^2 x
        factor = torch.baddbmm(gram, gram, gram, beta=-4.775, alpha=2.0315)
        x = torch.baddbmm(x, factor, x, beta=3.4445)
    return x


# ---- the files of a run -------------------------------------------------------------------------
def prepare(config, folder, again):
    """Returns whether the run in a folder is finished. If not, puts config.json and copies of the
    code there. UsageError if this run or another seed beside it was made otherwise: seeds of a row
    must differ in nothing else. With `again`, this run starts anew if it was made otherwise, and
    other seeds are not looked at. UsageError also if a finished run is to be tested with more
    trials, but has no weights."""
    model = available()[config["model"]]
    code = {Path(data.__file__): data.SOURCE, Path(__file__): SOURCE, model: model.read_bytes()}
    result = folder / "result.json"
    if again and differences(folder, config, code):
        for name in "result.json", "checkpoint.pt", "log.csv":
            (folder / name).unlink(missing_ok=True)
    if not again:
        for other in sorted(folder.parent.glob("seed*")):
            different = differences(other, config, code)
            if different:
                raise UsageError(f"{other} was made otherwise ({'; '.join(different)}): choose "
                                 "another --out, or start anew with --again and all seeds")
    if result.exists() and read(result)["config"]["test_trials"] >= config["test_trials"]:
        return True  # else fit tests it again, with more trials
    if result.exists() and not (folder / "checkpoint.pt").exists():
        raise UsageError(f"{folder} has no weights (checkpoint.pt) to test with more trials")
    folder.mkdir(parents=True, exist_ok=True)
    for path, content in code.items():
        write(folder / path.name, content)
    machine = {"python": platform.python_version(), "torch": torch.__version__,
               "machine": platform.platform(), "threads": torch.get_num_threads()}
    write(folder / "config.json", json.dumps(config | machine, indent=1).encode())
    return False


def differences(folder, config, code):
    """In what a run was made otherwise than with this configuration and code: settings, files.
    Before its first checkpoint, at step 10 or at a stop, a run may still change."""
    if not (folder / "result.json").exists() and not (folder / "checkpoint.pt").exists():
        return []
    made = read_run(folder)["config"]
    found = []
    for name in config:
        if name not in ("seed", "device", "test_trials") and made.get(name) != config[name]:
            found.append(f"{name} {made.get(name)}")
    for path, content in code.items():
        copy = folder / path.name
        if copy.exists() and copy.read_bytes() != content:
            found.append(shlex.join(["diff", str(copy), str(path)]))
    return found


class Files:
    """The files of a run, which has one writer. UsageError if its checkpoint or its result is not
    what it was when this process read or wrote it last: then another one has gone on with it."""

    def __init__(self, folder):
        self.folder = folder
        self.known = self.times()

    def times(self):
        paths = self.folder / "checkpoint.pt", self.folder / "result.json"
        return [path.stat().st_mtime_ns if path.exists() else None for path in paths]

    def write(self, name, content):
        if self.times() != self.known:
            raise UsageError("another process has gone on with this run, so this one leaves it")
        write(self.folder / name, content)
        self.known = self.times()


def save(files, model, optimizers, state):
    """Writes log.csv, and a checkpoint: all that a run needs to go on to the same bits."""
    log = io.StringIO()
    names = list(state["rows"][0]) if state["rows"] else []
    writer = csv.DictWriter(log, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(state["rows"])
    files.write("log.csv", log.getvalue().encode())
    buffer = io.BytesIO()  # torch.save to a file does not raise OSError where the disk is full
    cuda = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    torch.save(state | {"model": model.state_dict(), "random": torch.get_rng_state(), "cuda": cuda,
                        "optimizers": [optimizer.state_dict() for optimizer in optimizers]}, buffer)
    files.write("checkpoint.pt", buffer.getvalue())


def restore(folder, model, optimizers):
    """Loads a checkpoint into model and optimizers, and returns the rest of it. Without one, that
    is how a run starts."""
    if not (folder / "checkpoint.pt").exists():
        return {"step": 0, "since": 0, "rows": [], "sums": torch.zeros(2), "seconds": 0}
    state = read(folder / "checkpoint.pt")
    model.load_state_dict(state.pop("model"))
    for optimizer, saved in zip(optimizers, state.pop("optimizers"), strict=True):
        optimizer.load_state_dict(saved)
    torch.set_rng_state(state.pop("random"))
    torch.cuda.set_rng_state_all(state.pop("cuda"))
    return state


# ---- the command line ---------------------------------------------------------------------------
PLAIN = {"usage": argparse.SUPPRESS, "allow_abbrev": False}  # without usage, an error is one line


def parser_of(model):
    """All flags of a model's runs."""
    parser = argparse.ArgumentParser(
        f"train.py --model {model}", parents=[choosing(), recipe_of(model)], **PLAIN,
        description="Train models on gCOG. Several models, splits or seeds make several runs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add_run(parser)
    add_arguments(parser, model)
    return parser


def choosing():
    """The flags that say which runs to make. It has no --help: parser_of prints that, with the
    flags of the model."""
    parser = argparse.ArgumentParser("train.py", add_help=False, **PLAIN)
    add = parser.add_argument_group("which runs").add_argument
    # no default here, because "extend" adds to a default: `configurations` has them
    several = {"nargs": "+", "action": "extend", "default": argparse.SUPPRESS}
    add("--model", choices=["all", *available()], **several,
        help=f"which ones (default: sstfmr); all: {', '.join(ALL)}")
    add("--split", choices=["all", *data.SPLITS], **several,
        help="which ones (default: productive); all: those without _release")
    add("--seed", type=between(0, 2 ** 63 - 1), **several,
        help="of the weights and the training trials (default: 0)")
    add("--list", action="store_true", help="print the flags of each run, a line each, and stop")
    return parser


def add_run(parser):
    add = parser.add_argument_group("each run").add_argument
    add("--test-trials", type=between(1, 10 ** 9), default=2_000,
        help="per test set, at the end; with more, finished runs are tested again")
    add("--out", type=Path, default=Path("runs"), help="where run folders go")
    add("--again", action="store_true", help="start it anew if it was made otherwise; name all its "
        "row's seeds, or tables mix the old and the new")
    add("--device", choices=DEVICES, default=DEVICES[-1], help="where to compute")
    add("--workers", type=between(0, 64), default=4 if "cuda" in DEVICES else 0,
        help="processes that draw trials in the background, where cores are idle; 4 beside a GPU")


def recipe_of(model):
    """Flags of the recipe. Their defaults are TRAINING, above, and that of the model's file, which
    is parsed like flags, so a mistake there ends like one in a flag."""
    parser = argparse.ArgumentParser(f"train.py: TRAINING of {model}", add_help=False, **PLAIN)
    add = parser.add_argument_group("training").add_argument
    whole = between(1, 10 ** 9)
    add("--steps", type=whole, help="batches to train on")
    add("--batch-size", type=whole, help="trials per batch")
    add("--train-size", type=whole, help="so many trials, again and again; without it, all are new")
    add("--optimizer", choices=["muon", "adamw"], help="muon for matrices, adamw for the rest")
    add("--lr", type=between(1e-30, 1e30, float), help="AdamW's peak, and a third of Muon's")
    add("--schedule", choices=["cooldown", "constant"],
        help="of the rate; cooldown: it falls to 0 in the last fifth of the steps")
    parser.set_defaults(**TRAINING)
    typed = []
    for name, value in getattr(module_of(model), "TRAINING", {}).items():
        if name not in TRAINING or value != TRAINING[name]:  # train_size None cannot be typed
            typed.append(f"--{name.replace('_', '-')}={value}")
    its_own = vars(parser.parse_args(typed))
    parser.set_defaults(**its_own)
    return parser


def add_arguments(parser, model):
    """A flag for each argument of the model's constructor. UsageError where there can be none."""
    add = parser.add_argument_group("the model, as its file explains").add_argument
    signature = inspect.signature(module_of(model).Model, eval_str=True)
    for name, parameter in signature.parameters.items():
        default = parameter.default
        kind = type(default)
        if kind not in (bool, int, float, str):
            raise UsageError(f"{model}: Model needs a default for {name} that a flag can carry: a "
                             "bool, an int, a float or a str")
        options = {"type": kind}
        if kind is bool:
            options = {"action": argparse.BooleanOptionalAction}
        elif typing.get_origin(parameter.annotation) is typing.Literal:
            options["choices"] = typing.get_args(parameter.annotation)
        elif kind is int:
            low = min(1, default)  # below 1 only where the default is
            options["type"] = between(low, 10 ** 9)
        flag = f"--{name.replace('_', '-')}"
        try:
            add(flag, default=default, help="(default: %(default)s)", **options)
        except argparse.ArgumentError as error:
            raise UsageError(f"{model}: Model cannot have an argument {name}: train.py has a flag "
                             "of this name") from error


def configurations(chosen, others):
    """For each run its flags as text, `others` parsed, and its configuration. `chosen` are the
    flags that say which runs. `others` are all further ones, as text: only the parser of a model
    can read them, because it knows the model's own flags."""
    asked = {"model": ["sstfmr"], "split": ["productive"], "seed": [0]} | vars(chosen)
    if "all" in asked["model"]:
        asked["model"] = asked["model"] + ALL
    if "all" in asked["split"]:
        ours = [name for name in data.SPLITS if not name.endswith("_release")]
        asked["split"] = asked["split"] + ours
    splits = [name for name in data.SPLITS if name in asked["split"]]
    parsers = {name: parser_of(name) for name in available() if name in asked["model"]}
    seeds = dict.fromkeys(asked["seed"])  # each once
    for split, model, seed in itertools.product(splits, parsers, seeds):
        flags = ["--model", model, "--split", split, "--seed", str(seed)] + others
        args = parsers[model].parse_args(others)
        yield flags, args, configuration(split, model, seed, args, parsers[model])


def configuration(split, model, seed, args, parser):
    """All that decides the numbers of a run."""
    values = vars(args)
    names = inspect.signature(module_of(model).Model).parameters
    arguments = {name: values[name] for name in names}
    recipe = {name: values[name] for name in TRAINING}
    by_name = {name: values[name] for name in sorted(names)}
    return {
        "split": split, "in_distribution": data.in_distribution(split),
        "hardest": data.tests_of(split)[-1], "model": model, "seed": seed,
        "settings": settings_of(recipe | by_name, parser), "model_args": arguments, **recipe,
        "muon_ratio": MUON_RATIO, "momentum": MOMENTUM, "weight_decay": DECAY,
        "cooldown": COOLDOWN, "test_trials": args.test_trials, "device": args.device}


def settings_of(values, parser):
    """The name of a row's folder: the values that differ from the model's defaults."""
    changed = []
    for name, value in values.items():
        if value != parser.get_default(name):
            changed.append(f"{name.replace('_', '')}{value}")
    return urllib.parse.quote("-".join(changed), safe="") or "default"


def main(argv=None):
    parser = choosing()
    with data.ending(parser), on_stop(signal.default_int_handler):
        chosen, others = parser.parse_known_args(argv)
        runs = list(configurations(chosen, others))
        if chosen.list:
            for flags, _, _ in runs:
                print(shlex.join(flags))
            return
        _, _, first = runs[0]
        print(f"Runs: {len(runs)}, on {first['device']}, with a line every {EARLY} steps, later "
              f"{REPORT_EVERY}, accuracy in %. After a stop, the same command goes on.", flush=True)
        finished = []
        for _, args, config in runs:
            row = args.out / config["split"] / config["model"] / config["settings"]
            folder = row / f"seed{config['seed']}"
            try:
                fit(config, folder, args.again, args.workers)
                finished.append(str(folder))
            except BrokenPipeError:  # nobody reads on: `ending` ends the program
                raise
            except Exception as error:  # the others go on
                if not isinstance(error, (UsageError, OSError)):
                    traceback.print_exc()
                print(f"{parser.prog}: error: {folder}: {error}", file=sys.stderr)
        if finished:
            evaluation.main(finished)
        if len(finished) < len(runs):
            sys.exit(2)


if __name__ == "__main__":
    main()
