"""Times the generator beside the release's, training steps with AVX2 alone beside this machine's
instructions, and the compact stimulus beside all 100 cells. The time is that of the CPU on one
thread, which other programs disturb least.

    python tests/bench.py                              # about five minutes
    python tests/bench.py --model sstfmr --depth 1
"""
import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
import data
import train
from models import module_of

RELEASE = {"distractor iid": 347, "distractor distractors40": 246, "productive depth3": 294,
           "productive depth5": 161, "productive depth7": 115, "productive depth9": 50}  # trials/s
COMPACT = "sstfmr dstfmr crossattn perceiver hypertfmr looptfmr".split()
TRIALS, BATCH, REPEATS, RECIPE = 1_000, 128, 9, train.TRAINING["batch_size"]
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}  # a laptop's instructions


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


def step_time(model, batches, optimize=False):
    """ms of a training step on these batches."""
    optimizers = train.make_optimizers(model, "muon", 1e-3, "matrices") if optimize else []

    def learn(i):
        for batch in batches:
            train.learn(model, optimizers, batch, 1, "cpu")
    return 1000 * seconds(learn) / len(batches)


def recipe(names):
    """Per model, ms of a step of the recipe, with and without its optimizers."""
    batches = [data.trials("productive", f"depth{depth}", RECIPE) for depth in (1, 3)]
    return [[step_time(module_of(name).Model(), batches, optimize) for optimize in (True, False)]
            for name in names]


def elsewhere(names, changes):
    """The same from a process of its own, on one thread, with changes in the environment."""
    code = "import bench, json, sys; print(json.dumps(bench.recipe(sys.argv[1:])))"
    return json.loads(subprocess.check_output(
        [sys.executable, "-c", code, *names], cwd=Path(__file__).parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | changes))


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split(". ")[0], usage=argparse.SUPPRESS)
    parser.add_argument("--model", nargs="+", choices=COMPACT, default=COMPACT,
                        help="the models to time a step of (default: all of these)")
    parser.add_argument("--depth", type=int, choices=(1, 3, 5, 7, 9), default=3,
                        help="of the trials of a step (default: 3)")
    args = parser.parse_args(argv)
    names, depth = args.model, args.depth
    print(f"Trials per second on {torch.get_num_threads()} thread, beside one thread of the "
          "release on another day:")
    for name, release in RELEASE.items():
        rate = TRIALS / seconds(lambda seed: data.trials(*name.split(), TRIALS, seed=seed))
        print(f"{name:24} {rate:7,.0f}   release {release:4}   {rate / release:4.0f} times as many")
    print(f"\nA training step on {RECIPE} trials, depths 1 and 3 in turn, in ms:")
    times = zip(names, elsewhere(names, {}), elsewhere(names, AVX2))
    for name, (here, without), (avx2, avx2_without) in times:
        print(f"{name:10} {here:6.1f}, optimizer {1 - without / here:4.0%}    with AVX2 "
              f"{avx2:6.1f}, optimizer {1 - avx2_without / avx2:4.0%}    {avx2 / here:4.2f} times")
    print(f"\nA training step on {BATCH} trials of depth {depth} without optimizer, in ms:")
    batch = data.trials("productive", f"depth{depth}", BATCH)
    for name in names:
        model = module_of(name).Model()
        compact = step_time(model, [batch])
        model.stimulus.forward = functools.partial(all_cells, model.stimulus)
        every = step_time(model, [batch])
        print(f"{name:10} compact {compact:6.1f}   all cells {every:6.1f}   "
              f"{every / compact:4.1f} times as fast")
    print(f"\nDrawing {BATCH} trials, in percent of a step of sstfmr at that depth:")
    for depth in 1, 3:
        draw = functools.partial(data.trials, "productive", f"depth{depth}", BATCH)
        step = step_time(module_of("sstfmr").Model(), [draw()])
        print(f"depth {depth}: {100_000 * seconds(lambda seed: draw(seed=seed)) / step:4.1f} %")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
