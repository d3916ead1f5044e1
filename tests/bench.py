"""Times the generator beside the release's, training steps with AVX2 alone beside this machine's
instructions, and the compact stimulus beside all 100 cells. The time is that of the CPU on one
thread, which other programs disturb least.

    python tests/bench.py                              # about five minutes
    python tests/bench.py --model sstfmr --depth 1
"""
import argparse
import copy
import inspect
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import data  # noqa: E402
import train  # noqa: E402
from models import available, module_of, sstfmr  # noqa: E402

RELEASE = {"distractor iid": 347, "distractor distractors40": 246, "productive depth3": 294,
           "productive depth5": 161, "productive depth7": 115, "productive depth9": 50}  # trials/s
TRIALS, BATCH, REPEATS = 1_000, 128, 9
COMPACT = [name for name in available() if hasattr(module_of(name), "Stimulus")
           and inspect.getsource(module_of(name).Stimulus) == inspect.getsource(sstfmr.Stimulus)]


class AllCells(nn.Module):
    """A model's Stimulus without the shortcut: every cell is a token, there once."""

    def __init__(self, stimulus):
        super().__init__()
        self.shape, self.color = stimulus.shape, stimulus.color
        self.cell, self.eos = stimulus.cell, stimulus.eos

    def forward(self, stimulus):  # (B, 100, 2) -> (B, 101, C), log of their counts (B, 101)
        shape, color = stimulus.unbind(2)
        x = self.shape(shape) + self.color(color) + self.cell.weight * (shape > 0)[:, :, None]
        x = torch.cat([x, self.eos.expand(len(x), 1, -1)], 1)
        return x, x.new_zeros(x.shape[:2])


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


def seconds_per_step(models, batches, optimize=True):
    """Median seconds of a training step of each model on these batches, taking turns."""
    config = {"device": "cpu", "precision": "float32"}
    optimizers = [train.make_optimizers(model, "muon", 1e-3) for model in models]
    times = [[] for _ in models]
    for i in range(REPEATS + 2):
        for model, found, own in zip(models, times, optimizers):
            start = time.process_time()
            for batch in batches:
                train.learn(model, own if optimize else [], batch, 1e-3, config)
            found.append((time.process_time() - start) / len(batches))
    return [statistics.median(found[2:]) for found in times]


def steps_of(names):
    """Name of a model -> ms of a step of the recipe, depths 1 and 3 in turn, and without the
    optimizers."""
    batches = [data.Batches("productive", train.TRAINING["batch_size"], 0)[i] for i in range(2)]
    models = {name: module_of(name).Model() for name in names}
    whole, without = (seconds_per_step([*models.values()], batches, optimize)
                      for optimize in (True, False))
    return {name: (1000 * a, 1000 * b) for name, a, b in zip(models, whole, without)}


AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}  # a laptop's instructions
STEPS = "import bench, json, sys; print(json.dumps(bench.steps_of(sys.argv[1:])))"


def print_steps(names):
    """As this machine is, and with AVX2 alone, each in a process of its own, on one thread."""
    size = train.TRAINING["batch_size"]
    print(f"\nA training step on {size} trials, depths 1 and 3 in turn, in ms:")
    found = []
    for changes in {}, AVX2:
        printed = subprocess.check_output([sys.executable, "-c", STEPS, *names], text=True,
                                          cwd=Path(__file__).parent,
                                          env=os.environ | {"OMP_NUM_THREADS": "1"} | changes)
        found.append(json.loads(printed))
    for name in names:
        (here, without), (avx2, avx2_without) = (times[name] for times in found)
        print(f"{name:10} {here:6.1f}, optimizer {1 - without / here:4.0%}    with AVX2 "
              f"{avx2:6.1f}, optimizer {1 - avx2_without / avx2:4.0%}    {avx2 / here:4.2f} times")


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
    print_steps(args.model)
    print(f"\nA training step on {BATCH} trials of depth {args.depth} without optimizer, in ms:")
    batch = data.trials("productive", f"depth{args.depth}", BATCH)
    for name in args.model:
        model = module_of(name).Model()
        compact, every = seconds_per_step([model, with_all_cells(model)], [batch], optimize=False)
        print(f"{name:10} compact {1000 * compact:6.1f}   all cells {1000 * every:6.1f}   "
              f"{every / compact:4.1f} times as fast")
    print(f"\nDrawing {BATCH} trials, in percent of such a step of sstfmr:")
    for depth, turn in (1, 0), (3, 1):  # the depths in turn
        drawing = seconds(lambda i: data.Batches("productive", BATCH, 0)[2 * i + turn])
        batch = data.trials("productive", f"depth{depth}", BATCH)
        step, = seconds_per_step([sstfmr.Model()], [batch], optimize=False)
        print(f"depth {depth}: {100 * drawing / step:4.1f} %")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
