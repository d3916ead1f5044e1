"""Trains models on gCOG, evaluates them in and out of distribution, and prints a table.

    python train.py --model sstfmr --split productive
    python train.py --model all --split all --seed 0 1 2          # interrupted? the same command goes on

Every run has a folder, <out>/<split>/<model>/<settings>/seed<k>/, with config.json (all it was made with), log.csv
(how it went), checkpoint.pt (to go on from, at most a minute old), result.json (accuracies, when it is done) and lock
(empty: no second process may train there).
"""
import argparse
import concurrent.futures
import ctypes
import functools
import inspect
import io
import itertools
import json
import math
import multiprocessing
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import data  # before torch: it says how torch's threads wait
import torch
from torch.nn import functional as F
from tqdm import tqdm

from eval import (FORMAT, Refused, alignment, available, in_distribution, log_of, module_of, pick_device, predict, read,
                  reason, score, split_table, table)

SCHEDULES = {"quick": {"steps": 900, "batch_size": 128}, "full": {"steps": 20_000, "batch_size": 512}}
LR = {"muon": 3e-3, "adamw": 1e-3}  # peak rate of AdamW, beside Muon and alone
MUON_RATIO = 3  # Muon's learning rate over AdamW's
WARMUP = 100  # steps
LOG_TRIALS, TEST_TRIALS = 300, 10_000  # per test set, on the way and at the end


# ---- what to run ------------------------------------------------------------------------------------------------

def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0],
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    group = parser.add_argument_group("what to run; several values make several runs")
    group.add_argument("--model", nargs="+", default=["sstfmr"], help=f"all, or any of {', '.join(available())}")
    group.add_argument("--split", nargs="+", default=["productive"], help=f"all, or any of {', '.join(data.SPLITS)}")
    group.add_argument("--seed", nargs="+", type=data.between(0, data.MAX_SEED), default=[0],
                       help="of the weights and the training trials")
    group.add_argument("--out", type=Path, default=Path("runs"), help="where the run folders go")
    group = parser.add_argument_group("the model; a default of None means the model file's own")
    group.add_argument("--dim", nargs="+", type=data.between(1, 8192), help="width")
    group.add_argument("--layers", nargs="+", type=data.between(1, 100), help="number of blocks")
    group.add_argument("--heads", nargs="+", type=data.between(1, 100), help="number of attention heads")
    group.add_argument("--position", help="position code of the instruction: sinusoidal, relative or paper")
    group.add_argument("--paper", action="store_true", help="the paper's sizes, position codes and optimizer")
    group = parser.add_argument_group("training")
    group.add_argument("--schedule", choices=["auto", *SCHEDULES], default="auto",
                       help="quick: minutes on two cores, for which a model file may set its own steps; full: for a "
                            "GPU; auto: full with a GPU")
    group.add_argument("--steps", type=data.between(1, 10 ** 9), help="batches to train on; None: the schedule's")
    group.add_argument("--batch-size", type=data.between(1, 10 ** 6), help="trials per batch; None: the schedule's")
    group.add_argument("--train-size", nargs="+", type=data.between(1, 10 ** 9),
                       help="train on this many trials, again and again; None: all new")
    group.add_argument("--optimizer", choices=["muon", "adamw"], help="None: the model file's, else muon")
    group.add_argument("--lr", type=data.between(1e-30, 1e30),
                       help=f"peak rate of AdamW, Muon's is {MUON_RATIO} times it; None: "
                       + ", ".join(f"{lr} with {optimizer}" for optimizer, lr in LR.items()))
    group.add_argument("--eval-every", type=data.between(1, 10 ** 9),
                       help="steps between evaluations; None: a fifth of all steps")
    group = parser.add_argument_group("the machine")
    group.add_argument("--device", choices=["auto", "cpu", "cuda", "mps"], default="auto", help="where to compute")
    group.add_argument("--jobs", type=data.between(1, 100), default=1,
                       help="runs side by side, in a process each: on two cores, 2 are done sooner than one by one")
    group.add_argument("--precision", choices=["auto", "float32", "bfloat16"], default="auto",
                       help="of matrix products; auto is bfloat16 on a GPU that has it")
    return parser, parser.parse_args(argv)


def configurations(args):
    """One resolved configuration per run. Refused for what cannot be run."""
    device = pick_device(args.device)
    schedule = args.schedule if args.schedule != "auto" else "quick" if device == "cpu" else "full"
    auto_precision = "bfloat16" if device == "cuda" and torch.cuda.is_bf16_supported() else "float32"
    names = available() if args.model == ["all"] else args.model
    splits = list(data.SPLITS) if args.split == ["all"] else args.split
    several = (splits, names, *(v or [None] for v in (args.train_size, args.dim, args.layers, args.heads)), args.seed)
    for split, name, train_size, dim, layers, heads, seed in itertools.product(*map(dict.fromkeys, several)):
        module = module_of(name)
        defaults = {key: p.default for key, p in inspect.signature(module.Model).parameters.items()}
        given = {"dim": dim, "layers": layers, "heads": heads, "position": args.position}
        given = {key: value for key, value in given.items() if value is not None}
        for key in given:
            if key not in defaults:
                raise Refused(f"{name} takes no --{key}")
        training = SCHEDULES[schedule] | {"train_size": None, "optimizer": "muon", "precision": auto_precision}
        training |= getattr(module, "QUICK", {}) if schedule == "quick" else {}
        usual, paper = defaults | training, module.PAPER if args.paper else {}
        changed = ["paper"] * (usual | paper != usual)  # an RNN under `quick` is the paper's already
        model_args, training = ({k: paper.get(k, v) for k, v in part.items()} for part in (defaults, training))
        training["lr"] = LR[args.optimizer or training["optimizer"]]
        training["eval_every"] = -(-(args.steps or training["steps"]) // 5)
        chosen = vars(args) | {"train_size": train_size}
        chosen = {key: chosen[key] for key in training if chosen[key] not in (None, "auto")}
        try:  # both raise ValueError for what cannot be
            module.Model(**model_args | given)
            data.batches(split, chosen.get("batch_size", training["batch_size"]), seed=seed, train_size=train_size)
        except ValueError as error:
            raise Refused(str(error)) from error
        if not in_distribution(split):
            raise Refused(f"split {split} needs a test set drawn like its training trials")
        different = {k: v for k, v in (given | chosen).items() if v != (model_args | training)[k] and k != "precision"}
        settings = "-".join([schedule, *changed, *(f"{k}{v}" for k, v in different.items())])
        yield {"format": FORMAT, "schedule": schedule, "split": split, "model": name,
               "settings": re.sub(r"[^A-Za-z0-9.-]", "", settings), "seed": seed, "model_args": model_args | given,
               **training, **chosen, "device": device}


@functools.cache
def environment():
    """Where a run was made: written down, but not a part of what it is."""
    here, commit = Path(__file__).parent, ""
    if (here / ".git").exists() and shutil.which("git"):
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True)
        commit = git.stdout.strip()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"commit": commit, "python": platform.python_version(), "torch": torch.__version__, "gpu": gpu,
            "machine": platform.platform()}


# ---- one run ----------------------------------------------------------------------------------------------------

def write(path, content):
    """Replaces a file in one step, so that it is never half there: text, or an object for torch.save. OSError where
    that fails, on a full disk for instance: what was there before is there still."""
    buffer, temporary = io.BytesIO(), path.with_suffix(".tmp")
    buffer.write(content.encode()) if isinstance(content, str) else torch.save(content, buffer)
    try:
        with open(temporary, "wb") as file:
            file.write(buffer.getvalue())
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def prepare(config, folder):
    """Makes the run's folder, or checks that the run there is this one. Refused where it is another."""
    path, config = folder / "config.json", json.loads(json.dumps(config))  # as a file gives it back: tuples are lists
    content = json.dumps(config | environment(), indent=1)
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        return write(path, content)
    try:
        there = read(path)
    except Refused as error:
        raise Refused(f"{error}; remove {folder} or choose another --out") from error
    other = [f"{key} is {there.get(key)} there, {value} here" for key, value in config.items()
             if there.get(key) != value]
    if other:
        raise Refused(f"{folder} holds another run ({'; '.join(other)}): remove it or choose another --out")


def hold(folder):
    """Locks a run's folder for as long as the file returned is open: at most until this process ends, however it
    ends. Refused where another process holds it."""
    file = open(folder / "lock", "ab")  # empty, and never replaced as the other files are
    try:
        if sys.platform == "win32":
            import msvcrt
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        raise Refused(f"another process is training in {folder}: wait for it, or choose another --out") from error
    return file


def restore(folder, model, optimizers):
    """Loads a run's checkpoint into model and optimizers, and returns what else it holds. Refused where it is damaged
    or another model's."""
    try:
        state = torch.load(folder / "checkpoint.pt", map_location="cpu", weights_only=True)
        model.load_state_dict(state.pop("model"))
        for optimizer, saved in zip(optimizers, state.pop("optimizer"), strict=True):
            optimizer.load_state_dict(saved)
        return state
    except Exception as error:  # whatever is wrong with the file, it is the file
        raise Refused(f"{folder / 'checkpoint.pt'} is damaged, or of another run or other code ({reason(error)}): "
                         f"remove {folder} to begin anew") from error


def make_optimizers(model, config):
    """Muon for the weight matrices of Linear layers other than the readout, AdamW for everything else."""
    lr = config["lr"]
    if config["optimizer"] == "adamw":
        return [torch.optim.AdamW([{"params": model.parameters(), "peak": lr}], weight_decay=0.01)]
    matrices = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not model.readout]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    return [torch.optim.Muon([{"params": matrices, "peak": MUON_RATIO * lr}], weight_decay=0),
            torch.optim.AdamW([{"params": others, "peak": lr}], weight_decay=0.01)]


class Interrupt:
    """What Ctrl-C does: it stops at once, but inside a `with Interrupt()` the first one only becomes a flag, so that no
    step is cut in two."""
    seen = False

    def __enter__(self):
        self.before = signal.signal(signal.SIGINT, self.note)
        return self

    @classmethod
    def note(cls, *_):
        cls.seen = True  # of the whole process: no further run begins in it
        signal.signal(signal.SIGINT, cls.stop)

    @classmethod
    def stop(cls, *_):
        cls.seen = True  # remembered, since Python drops what is raised inside a destructor or a callback
        raise KeyboardInterrupt

    def __exit__(self, *_):
        signal.signal(signal.SIGINT, self.before)


def train(config, folder):
    """Trains one run to its end, from its checkpoint if it has one, and returns its result; that of a finished run is
    read. KeyboardInterrupt, with all saved, on Ctrl-C; FloatingPointError where the loss is not finite."""
    if (folder / "result.json").exists():
        return read(folder / "result.json")
    if Interrupt.seen:
        raise KeyboardInterrupt
    with hold(folder):
        return fit(config, folder)


def fit(config, folder):
    """What `train` does, in a folder that is held."""
    torch.manual_seed(config["seed"])
    split, device, steps, size = (config[key] for key in ("split", "device", "steps", "batch_size"))
    model = module_of(config["model"]).Model(**config["model_args"]).to(device)
    optimizers = make_optimizers(model, config)
    state = {"step": 0, "seconds": 0.0, "loss": 0.0, "right": 0, "since": [0, 0.0], "log": []}  # since: the last row
    if (folder / "checkpoint.pt").exists():
        state = restore(folder, model, optimizers)
    bar = tqdm(total=steps * size, initial=state["step"] * size, unit=" trials", unit_scale=True, smoothing=0.1,
               desc=f"{split} {config['model']} seed {config['seed']}", position=bar_line, leave=bar_line == 0)

    def log():
        accuracy = score(split, predict(model.eval(), split, LOG_TRIALS, device, config["precision"]))["accuracy"]
        model.train()
        count, seconds = state["step"] - state["since"][0], state["seconds"] - state["since"][1]
        row = {"loss": state["loss"] / count, "train": state["right"] / (count * size), **accuracy}
        state["log"].append({"step": state["step"], "trials": state["step"] * size,
                             **{key: round(value, 4) for key, value in row.items()},
                             "trials/s": round(count * size / seconds)})
        state.update(loss=0.0, right=0, since=[state["step"], state["seconds"]])
        rows = [state["log"][0].keys(), *(row.values() for row in state["log"])]
        write(folder / "log.csv", "".join(",".join(map(str, row)) + "\n" for row in rows))

    pending, first, saved, clock = [], state["step"], time.perf_counter(), time.perf_counter()
    stream = data.batches(split, size, seed=config["seed"], start=state["step"], device=device,
                          train_size=config["train_size"])
    with Interrupt() as interrupt, bar:
        while state["step"] < steps:
            batch = next(stream)
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = group["peak"] * rate(state["step"], steps)
            with torch.autocast(device, torch.bfloat16, enabled=config["precision"] == "bfloat16"):
                logits = model(batch.instruction, batch.stimulus)
            loss = F.cross_entropy(logits.float(), batch.answer)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            state["step"] += 1
            pending.append(torch.stack([loss.detach(), (logits.argmax(1) == batch.answer).sum()]))

            evaluate = state["step"] % config["eval_every"] == 0 or state["step"] == steps
            if not (len(pending) == 20 or evaluate or interrupt.seen or time.perf_counter() - saved > 60):
                continue  # reading a number waits for the GPU: not at every step
            losses, rights = torch.stack(pending).T.tolist()
            for step, value in enumerate(losses, state["step"] - len(losses) + 1):
                if not math.isfinite(value):
                    raise FloatingPointError(f"the loss is {value} at step {step}; what {folder} holds is older")
                state["loss"] += value
            state["right"] += int(sum(rights))
            bar.set_postfix(loss=f"{sum(losses) / len(losses):.3f}", accuracy=f"{sum(rights) / len(rights) / size:.1%}")
            bar.update(len(pending) * size)
            state["seconds"] += time.perf_counter() - clock
            if state["step"] == first + len(pending):
                left = (steps - state["step"]) * (time.perf_counter() - clock) / len(pending)
                bar.write(f"Expected to end at {time.strftime('%H:%M', time.localtime(time.time() + left))} "
                          f"({left / 60:.1f} minutes), then the test sets.")
            pending.clear()
            if evaluate:
                log()
            if evaluate or interrupt.seen or time.perf_counter() - saved > 60:
                write(folder / "checkpoint.pt", state | {"model": model.state_dict(),
                                                         "optimizer": [o.state_dict() for o in optimizers]})
                saved = time.perf_counter()
            if interrupt.seen:
                raise KeyboardInterrupt
            clock = time.perf_counter()
    result = score(split, predict(model.eval(), split, TEST_TRIALS, device, config["precision"]))
    result |= {"alignment": alignment(model, split, device), "parameters": sum(p.numel() for p in model.parameters()),
               "format": FORMAT, "steps": steps, "trials": steps * size, "seconds": state["seconds"],
               "seed": config["seed"], "device": device, "threads": torch.get_num_threads()}
    write(folder / "result.json", json.dumps(result, indent=1))
    return result


def rate(step, steps):
    """The learning rate at a step, as a share of its peak: a linear warm-up, then half a cosine to zero."""
    return min(1, (step + 1) / min(WARMUP, steps)) * (1 + math.cos(math.pi * step / steps)) / 2


# ---- all of them ------------------------------------------------------------------------------------------------

bar_line = 0  # of the terminal, where this process draws its bar


def explain(args, runs, new):
    """Prints what will run, and why on this schedule; `new` runs are not finished yet."""
    config = runs[0][0]
    why = f"on {config['device']}" if args.schedule == "auto" else "as asked"
    sizes = {}  # how long, and with batches how large -> the models
    for c, _ in runs:
        sizes.setdefault(f"{c['steps']:,} steps of {c['batch_size']} trials", {})[c["model"]] = None
    text = "; ".join(size + f" ({', '.join(models)})" * (len(sizes) > 1) for size, models in sizes.items())
    print(f"{len(runs)} run{'s' * (len(runs) > 1)}, {new} to do. Schedule {config['schedule']} ({why}): {text}, "
          f"in {config['precision']}.")


def in_worker(lock, lines, threads):
    """Prepares a process that trains one run after another, beside others."""
    global bar_line
    bar_line = lines.get()
    tqdm.set_lock(lock)  # of the terminal
    torch.set_num_threads(threads)
    keep_freed_memory()
    signal.signal(signal.SIGINT, Interrupt.note)


def train_all(runs, jobs):
    """The results of runs, in their order, each as soon as it and those before it are there. KeyboardInterrupt, with
    all saved, on Ctrl-C."""
    if jobs == 1:
        yield from (train(*run) for run in runs)
        return
    context = multiprocessing.get_context("spawn")  # a forked process could not use the GPU
    lines, threads = context.Queue(), max(1, torch.get_num_threads() // jobs)
    for line in range(jobs):
        lines.put(line)
    pool = concurrent.futures.ProcessPoolExecutor(jobs, context, in_worker, [context.RLock(), lines, threads])
    try:
        yield from pool.map(train, *zip(*runs))
    finally:
        pool.shutdown(cancel_futures=True)  # where one failed, or at Ctrl-C, those not begun do not begin


def result_table(split, result):
    """One row per test set: accuracy with its 95 % interval, the baselines, the difference to in distribution."""
    reference = in_distribution(split)[-1]
    rows = [[name, f"{100 * p:.1f}", "{:.1f} to {:.1f}".format(*(100 * x for x in result["interval"][name])),
             f"{100 * result['chance'][name]:.1f}", f"{100 * result['no_binding'][name]:.1f}",
             "" if name == reference else f"{100 * (p - result['accuracy'][reference]):+.1f}"]
            for name, p in result["accuracy"].items()]
    return table([split, "accuracy %", "95 % interval", "chance", "no binding", f"against {reference}"], rows)


def keep_freed_memory():
    """Tells the C library (glibc) to keep what tensors free for the next ones: asking the system for the same pages at
    every step costs a CPU run a seventh of its time."""
    if sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt"):
        ctypes.CDLL(None).mallopt(-4, 0)  # M_MMAP_MAX: never map pages for a single tensor
        ctypes.CDLL(None).mallopt(-1, 2 ** 31 - 1)  # M_TRIM_THRESHOLD: never give them back


def main(argv=None, configurations=configurations):
    """Trains what the command line asks for; `configurations` makes the runs of its arguments."""
    before, Interrupt.seen = signal.signal(signal.SIGINT, Interrupt.stop), False
    try:
        parser, args = parse(argv)
        keep_freed_memory()
        runs = [(c, args.out / c["split"] / c["model"] / c["settings"] / f"seed{c['seed']}")
                for c in configurations(args)]
        for config, folder in runs:
            prepare(config, folder)
        new = [not (folder / "result.json").exists() for _, folder in runs]
        explain(args, runs, sum(new))
        results, start = [], time.perf_counter()
        for (config, folder), result in zip(runs, train_all(runs, min(args.jobs, sum(new) or 1))):
            results.append(result | {"log": log_of(folder)})
            print(f"\n{folder}\n{result_table(config['split'], result)}\n")
            done = sum(new[:len(results)])
            if 0 < done < sum(new):
                left = (time.perf_counter() - start) / done * (sum(new) - done) / 60
                print(f"{done} of {sum(new)} runs are done; at this pace the rest takes {left:.0f} minutes.")
        for split in dict.fromkeys(config["split"] for config, _ in runs) if len(runs) > 1 else ():
            print(split_table(split, [(c, r) for (c, _), r in zip(runs, results) if c["split"] == split]) + "\n")
    except (Refused, OSError) as error:
        parser.error(str(error))
    except (RuntimeError, MemoryError) as error:
        killed = isinstance(error, concurrent.futures.BrokenExecutor)  # a job, by the system if memory is short
        if not killed and not isinstance(error, MemoryError) and "tried to allocate" not in str(error).lower():
            raise
        parser.error(f"there is not enough memory: try a smaller --batch-size or --dim ({reason(error)})")
    except FloatingPointError as error:
        sys.exit(f"{error}. Try a lower --lr or --precision float32.")
    except KeyboardInterrupt:
        print("\nStopped. The same command goes on from the last checkpoint.")
        sys.exit(130)
    finally:
        signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    main()
