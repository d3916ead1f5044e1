"""Trains treetfmr without one of its parts at a time, on the productive split: which part carries the generalization?

    python tests/ablations.py --seed 0 1 2      # and any other flag of train.py
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import train  # noqa: E402
from eval import split_table  # noqa: E402

ABLATIONS = {"whole": {}, "one-query": {"queries": 1}, "weights-per-level": {"shared": False},
             "no-choice": {"choice": False}}


def main(argv=None):
    _, args = train.parse(["--model", "treetfmr", "--split", "productive", *(sys.argv[1:] if argv is None else argv)])
    train.keep_freed_memory()
    runs = []
    for name, change in ABLATIONS.items():
        for config in train.configurations(args):
            config |= {"settings": f"{config['settings']}-{name}", "model_args": config["model_args"] | change}
            folder = args.out / "ablations" / config["settings"] / f"seed{config['seed']}"
            train.prepare(config, folder)
            runs.append((config, train.train(config, folder)))
    print("\n" + split_table("productive", runs))


if __name__ == "__main__":
    main()
