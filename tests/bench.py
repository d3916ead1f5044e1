"""Times the generator, training steps with and without their optimizers, and the compact stimulus
beside all 100 cells. On a CPU, the time is that of one thread, which other programs disturb least.

    python tests/bench.py  # about a minute
    python tests/bench.py --device cuda
"""
import argparse
import functools
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[1]))
import data
import train
from models import ALL, module_of

SETS = [("distractor", "iid"), ("distractor", "distractors40"), ("productive", "depth3"),
        ("productive", "depth5"), ("productive", "depth7"), ("productive", "depth9")]
COMPACT = "sstfmr dstfmr crossattn perceiver hypertfmr looptfmr".split()
TRIALS, BATCH, REPEATS, RECIPE = 1_000, 128, 9, train.TRAINING["batch_size"]


def all_cells(self, stimulus):
    """Stimulus.forward without the shortcut: every cell is a token, there once."""
    shape, color = stimulus.unbind(2)
    x = self.shape(shape) + self.color(color) + self.cell.weight * (shape > 0)[:, :, None]
    x = torch.cat([x, self.eos.expand(len(x), 1, -1)], 1)
    return x, x.new_zeros(x.shape[:2])


def seconds(function, device="cpu"):
    """The median time of calls of a function of the call's number."""
    def now():
        if device == "cpu":
            return time.process_time()
        torch.cuda.synchronize()
        return time.perf_counter()
    times = []
    for i in range(REPEATS):
        start = now()
        function(i)
        times.append(now() - start)
    return statistics.median(times)


def step_time(model, batches, optimizers=(), device="cpu"):
    """ms of a training step, the mean over these batches."""
    def learn(i):
        for batch in batches:
            train.learn(model, optimizers, batch, 1, device)
    return 1000 * seconds(learn, device) / len(batches)


class Operations(TorchDispatchMode):
    """Counts what torch computes, for a GPU the launched operations. Views are none."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        aliases = [result.alias_info for result in function._schema.returns]
        self.count += not any(alias and not alias.is_write for alias in aliases)
        return function(*args, **kwargs or {})


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda, for training steps")
    device = parser.parse_args(argv).device
    print("Trials per second:")
    for split, subset in SETS:
        rate = TRIALS / seconds(lambda seed: data.trials(split, subset, TRIALS, seed=seed))
        print(f"{split:10} {subset:13} {rate:6,.0f}")
    print(f"\nA training step on {RECIPE} trials, depths 1 and 3 in turn, in ms:")
    batches = [data.trials("productive", f"depth{depth}", RECIPE) for depth in (1, 3)]
    for name in ALL:
        module = module_of(name)
        kind = getattr(module, "TRAINING", {}).get("optimizer", train.TRAINING["optimizer"])
        model = module.Model().to(device)
        optimizers = train.make_optimizers(model, kind, 1e-3)
        whole = step_time(model, batches, optimizers, device)
        share = 1 - step_time(model, batches, (), device) / whole
        with Operations() as operations:
            for batch in batches:
                train.learn(model, optimizers, batch, 1, device)
        print(f"{name:10} {whole:6.1f}, of which the optimizers take {share:4.0%}; "
              f"{operations.count / len(batches):5.0f} operations")
    print(f"\nA training step on {BATCH} trials of depth 3 without optimizers, in ms:")
    batches = [data.trials("productive", "depth3", BATCH)]
    for name in COMPACT:
        model = module_of(name).Model().to(device)
        compact = step_time(model, batches, (), device)
        model.stimulus.forward = functools.partial(all_cells, model.stimulus)
        every = step_time(model, batches, (), device)
        print(f"{name:10} compact {compact:6.1f}   all cells {every:6.1f}   "
              f"{every / compact:4.1f} times as fast")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
