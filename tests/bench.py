"""Times the generator beside the release's, and training steps on the compact stimulus beside all
100 cells. The time is that of the CPU on one thread, which other programs disturb least.

    python tests/bench.py                              # about three minutes
    python tests/bench.py --model sstfmr --depth 1
"""
import argparse
import copy
import inspect
import statistics
import sys
import time
from itertools import repeat
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import data  # noqa: E402
import eval as evaluation  # noqa: E402
import train  # noqa: E402
from models import sstfmr  # noqa: E402

RELEASE = {"distractor iid": 347, "distractor distractors40": 246, "productive depth3": 294,
           "productive depth5": 161, "productive depth7": 115, "productive depth9": 50}  # trials/s
TRIALS, BATCH, REPEATS = 1_000, 128, 9
COMPACT = [name for name in evaluation.available()
           if hasattr(evaluation.module_of(name), "Stimulus") and
           inspect.getsource(evaluation.module_of(name).Stimulus)
           == inspect.getsource(sstfmr.Stimulus)]


class AllCells(nn.Module):
    """A model's Stimulus without the shortcut: every cell is a token, and no attention bias."""

    def __init__(self, stimulus):
        super().__init__()
        self.embedding, self.cells, self.eos = stimulus.embedding, stimulus.cells, stimulus.eos

    def forward(self, stimulus):  # (B, 100, 2) -> (B, 101, C), bias
        x = self.embedding(stimulus) + self.cells * (stimulus[:, :, :1] > 0)
        x = torch.cat([x, self.eos.expand(len(x), 1, -1)], 1)
        return x, x.new_zeros(len(x), 1, 1, x.shape[1])


def with_all_cells(model):
    """A copy of a model that computes all cells, with the same weights."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if type(module).__name__ == "Stimulus":
            model.set_submodule(name, AllCells(module))
    return model


def seconds(function):
    """The median time of calls of a function of the call's number."""
    times = []
    for i in range(REPEATS):
        start = time.process_time()
        function(i)
        times.append(time.process_time() - start)
    return statistics.median(times)


def seconds_per_step(models, batch):
    """Median seconds of a training step of each model, taking turns."""
    config = {"device": "cpu", "precision": "float32"}
    runs = [train.learn(model, train.make_optimizers(model, "muon", 1e-3), repeat(batch), repeat(1),
                        config) for model in models]
    times = [[] for _ in models]
    for _ in range(REPEATS + 2):
        for run, found in zip(runs, times):
            start = time.process_time()
            next(run)
            found.append(time.process_time() - start)
    return [statistics.median(found[2:]) for found in times]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split(". ")[0], usage=argparse.SUPPRESS,
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=COMPACT, default=COMPACT,
                        help="the models to time a step of")
    parser.add_argument("--depth", type=int, choices=(1, 3, 5, 7, 9), default=3,
                        help="of the trials of a step")
    args = parser.parse_args(argv)
    print(f"Trials per second on {torch.get_num_threads()} thread, beside one thread of the "
          "release on another day:")
    for name, release in RELEASE.items():
        rate = TRIALS / seconds(lambda seed: data.trials(*name.split(), TRIALS, seed=seed))
        print(f"{name:24} {rate:7,.0f}   release {release:4}   {rate / release:4.0f} times as many")
    print(f"\nA training step on {BATCH} trials of depth {args.depth}, in ms:")
    batch = data.trials("productive", f"depth{args.depth}", BATCH)
    for name in args.model:
        model = evaluation.module_of(name).Model()
        compact, every = seconds_per_step([model, with_all_cells(model)], batch)
        print(f"{name:10} compact {1000 * compact:6.1f}   all cells {1000 * every:6.1f}   "
              f"{every / compact:4.1f} times as fast")
    print(f"\nDrawing {BATCH} trials, in percent of a training step of sstfmr:")
    for depth, turn in (1, 0), (3, 1):  # the depths in turn
        drawing = seconds(lambda i: data.Batches("productive", BATCH, 0)[2 * i + turn])
        batch = data.trials("productive", f"depth{depth}", BATCH)
        step, = seconds_per_step([sstfmr.Model()], batch)
        print(f"depth {depth}: {100 * drawing / step:4.1f} %")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
