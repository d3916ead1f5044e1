"""Trains treetfmr without one of its parts at a time, on the productive split: which part carries the generalization?

    python tests/ablations.py --seed 0 1 2      # and any other flag of train.py
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
import train  # noqa: E402

ABLATIONS = {"whole": {}, "one-query": {"queries": 1}, "weights-per-level": {"shared": False},
             "no-choice": {"choice": False}, "untied": {"tied": False}}


def configurations(args):
    for config in train.configurations(args):
        for name, change in ABLATIONS.items():
            yield config | {"settings": f"{config['settings']}-{name}", "model_args": config["model_args"] | change}


def main(argv=None):
    flags = ["--model", "treetfmr", "--split", "productive", "--out", "runs/ablations"]
    train.main([*flags, *(sys.argv[1:] if argv is None else argv)], configurations)


if __name__ == "__main__":
    main()
