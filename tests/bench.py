"""Times the generator, training steps with and without their optimizers, and the compact stimulus
beside all 100 cells. The time is that of the CPU on one thread, which other programs disturb least.

    python tests/bench.py  # about a minute
"""
import argparse
import functools
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import data
import train
from models import module_of

SETS = [("distractor", "iid"), ("distractor", "distractors40"), ("productive", "depth3"),
        ("productive", "depth5"), ("productive", "depth7"), ("productive", "depth9")]
COMPACT = "sstfmr dstfmr crossattn perceiver hypertfmr looptfmr findtfmr".split()
TRIALS, BATCH, REPEATS, RECIPE = 1_000, 128, 9, train.TRAINING["batch_size"]


def all_cells(self, stimulus):
    """Stimulus.forward without the shortcut: every cell is a token, there once."""
    shape, color = stimulus.unbind(2)
    x = self.shape(shape) + self.color(color) + self.cell.weight * (shape > 0)[:, :, None]
    x = torch.cat([x, self.eos.expand(len(x), 1, -1)], 1)
    return x, x.new_zeros(x.shape[:2])


def seconds(function):
    """The median time of calls of a function of the call's number."""
    times = []
    for i in range(REPEATS):
        start = time.process_time()
        function(i)
        times.append(time.process_time() - start)
    return statistics.median(times)


def step_time(model, batches, optimizers=()):
    """ms of a training step, the mean over these batches."""
    def learn(i):
        for batch in batches:
            train.learn(model, optimizers, batch, 1, "cpu")
    return 1000 * seconds(learn) / len(batches)


def main(argv=None):
    argparse.ArgumentParser(description=__doc__, usage=argparse.SUPPRESS).parse_args(argv)
    print("Trials per second:")
    for split, subset in SETS:
        rate = TRIALS / seconds(lambda seed: data.trials(split, subset, TRIALS, seed=seed))
        print(f"{split:10} {subset:13} {rate:6,.0f}")
    print(f"\nA training step on {RECIPE} trials, depths 1 and 3 in turn, in ms:")
    batches = [data.trials("productive", f"depth{depth}", RECIPE) for depth in (1, 3)]
    for name in COMPACT + ["looktfmr"]:
        model = module_of(name).Model()
        whole = step_time(model, batches, train.make_optimizers(model, "muon", 1e-3))
        share = 1 - step_time(model, batches) / whole
        print(f"{name:10} {whole:6.1f}, of which the optimizers take {share:4.0%}")
    print(f"\nA training step on {BATCH} trials of depth 3 without optimizers, in ms:")
    batches = [data.trials("productive", "depth3", BATCH)]
    for name in COMPACT:
        model = module_of(name).Model()
        compact = step_time(model, batches)
        model.stimulus.forward = functools.partial(all_cells, model.stimulus)
        every = step_time(model, batches)
        print(f"{name:10} compact {compact:6.1f}   all cells {every:6.1f}   "
              f"{every / compact:4.1f} times as fast")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
