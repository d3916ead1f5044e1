"""Measures how trained models represent trials, and writes why.json beside each result.json.

    python tests/why.py runs

`alignment` is representational similarity analysis (claim 5 of Ito et al. 2024). `decoding` asks
what a linear map finds of the question (claims 7 and 9: Redhardt et al. 2025, Kobayashi et al.
2024), in the trained model and in the same model before training. Runs without result or weights
are passed over, and those whose why.json is not older than the weights.
"""
import argparse
import contextlib
import json
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1]))
import data
from eval import answering, devices, hardest, load, predict
from models import module_of

TRIALS, FIT_TRIALS = 500, 2_000  # per test set; to fit a linear map
PARTS = "operator", "letter", "color"  # of a token, in this order


def states(model, trials, device):
    """Place -> the states (n, C) of the token that answers: after each block, numbered in the order
    of computing, and the features. HyperTfmr also has a code."""
    blocks, places = [], {}

    def look(instruction, stimulus):
        found = {"code": model.infer(instruction)} if hasattr(model, "infer") else {}
        blocks.clear()  # those of infer, which features runs again
        features = model.features(instruction, stimulus)
        found |= {f"block {i}": state for i, state in enumerate(blocks, 1)}
        for place, state in (found | {"features": features}).items():
            places.setdefault(place, []).append(state.double().cpu())
        return features

    with contextlib.ExitStack() as hooks:
        for name, module, row in answering(model, "Block"):
            if not name.startswith("encode_stimulus"):
                hooks.enter_context(module.register_forward_hook(
                    lambda *call, row=row: blocks.append(call[2][:, row])))
        predict(look, trials, device)
    return {place: torch.cat(parts) for place, parts in places.items()}


def spearman(x, y):
    """Rank correlation of two vectors. Equal values share the mean of their ranks. 0 if all values
    of one vector are equal."""
    ranks = []
    for values in (x, y):
        _, place, count = values.unique(return_inverse=True, return_counts=True)
        ranks.append((count.cumsum(0) - (count - 1) / 2)[place])
    return torch.corrcoef(torch.stack(ranks).double())[0, 1].nan_to_num().item()


def similarities(x):  # (n, C) -> the correlation of each pair of rows, 0 for a constant row
    first, second = torch.triu_indices(len(x), len(x), 1)
    return torch.corrcoef(x)[first, second].nan_to_num().round(decimals=5)  # equal ones stay equal


def alignment(model, split, device):
    """How much features are organized like stimuli, instructions and answers: the rank correlation,
    over pairs of trials, of similarities. On both test sets of `hardest`, from "in: stimulus" to
    "out: answer"."""
    result = {}
    for where, subset in zip(("in", "out"), hardest(split)):
        trials = data.trials(split, subset, TRIALS)
        features = similarities(states(model, trials, device)["features"])
        for part in ("stimulus", "instruction", "answer"):
            one_hot = F.one_hot(getattr(trials, part)).reshape(TRIALS, -1).double()
            result[f"{where}: {part}"] = spearman(features, similarities(one_hot))
    return result


def decoding(model, split, device):
    """What a linear map, fitted to trials in distribution, finds of the root's question: place ->
    the share of other trials, on both test sets of `hardest`, from "in: operator" to "out: color".
    Places that only some of these trees have are left out."""
    near, far = hardest(split)
    sets = (data.trials(split, near, FIT_TRIALS, seed=1), data.trials(split, near, TRIALS),
            data.trials(split, far, TRIALS))
    fit, *tests = (states(model, trials, device) for trials in sets)
    result = {place: {} for place in fit if all(place in seen for seen in tests)}
    for i, part in enumerate(PARTS):
        answers = [trials.instruction[:, 0, i] for trials in sets]
        asked = [answer > 0 for answer in answers]  # 0: this root does not ask for it
        if not all(rows.any() for rows in asked):
            continue
        y, *expected = (answer[rows] for answer, rows in zip(answers, asked))
        one_hot = F.one_hot(y).double()
        for place, shares in result.items():
            x, *others = (seen[place][rows] for seen, rows in zip((fit, *tests), asked))
            mean = x.mean(0)
            matrix = torch.linalg.pinv(x - mean, rtol=1e-3) @ (one_hot - one_hot.mean(0))
            for where, x, answer in zip(("in", "out"), others, expected):
                right = ((x - mean) @ matrix + one_hot.mean(0)).argmax(1) == answer
                shares[f"{where}: {part}"] = right.double().mean().item()
    return result


def untrained(config):
    """The model of a run as it was before training."""
    with torch.random.fork_rng():
        torch.manual_seed(config["seed"])
        return module_of(config["model"]).Model(**config["model_args"]).eval()


def measure(folder, device):
    """Writes a run's why.json, in one step."""
    model, config = load(folder, device)
    split = config["split"]
    result = {"alignment": alignment(model, split, device),
              "decoded": decoding(model, split, device),
              "untrained": decoding(untrained(config).to(device), split, device)}
    with data.replacing(folder / "why.json") as temporary:
        temporary.write_text(json.dumps(result, indent=1))


def is_due(folder):
    result, weights, why = (folder / name for name in ("result.json", "checkpoint.pt", "why.json"))
    return result.exists() and weights.exists() and not (
        why.exists() and why.stat().st_mtime >= weights.stat().st_mtime)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], usage=argparse.SUPPRESS)
    parser.add_argument("runs", nargs="*", default=[Path("runs")], type=Path,
                        help="run folders, or folders above them (default: runs)")
    args, failed = parser.parse_args(argv), False
    with data.ending(parser):
        found = [path.parent for above in args.runs for path in sorted(above.rglob("config.json"))]
        if not found:
            raise data.UsageError(f"no run in {', '.join(map(str, args.runs))}")
        for folder in tqdm([folder for folder in found if is_due(folder)], "measuring"):
            try:
                measure(folder, devices()[-1])
            except Exception as error:  # one bad run does not stop the others
                tqdm.write(f"left out: {folder}: {' '.join(str(error).split())}", file=sys.stderr)
                failed = True
        print(f"Hidden states of {sum((folder / 'why.json').exists() for folder in found)} runs.")
        if failed:
            sys.exit(2)


if __name__ == "__main__":
    main()
