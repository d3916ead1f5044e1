"""Breaks the code on purpose, one line at a time, and runs the tests that should notice. A mutant that lives is a gap.

    python tests/mutants.py             # some minutes; says which test caught each
"""
import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MUTANTS = {  # (file, arguments of pytest) -> [(what stands there, what stands there instead), ...]
    ("data.py", "tests/test_data.py -k obeys or coins"): [  # the generator, operator by operator
        ("& ~truth)[:, :, None]", "& truth)[:, :, None]"),  # Exist
        ("value in ((GET_LOCATION, FIRST_CELL + cell)", "value in ((GET_LOCATION, FIRST_CELL + 1 + cell)"),
        ("(GET_SHAPE, FIRST_SHAPE - 1 + features[:, :, 0])", "(GET_SHAPE, FIRST_SHAPE + features[:, :, 0])"),
        ("(GET_COLOR, FIRST_COLOR - 1 + features[:, :, 1])", "(GET_COLOR, FIRST_COLOR - 1 + features[:, :, 0])"),
        ("truth ^ (op == SUM_EVEN) ^", "truth ^ (op == SUM_ODD) ^"),
        ("^ (op == PRODUCT_EVEN)", "^ (op == PRODUCT_ODD)"),
        ("random.below(4, size), ODD_ODD)", "random.below(4, size), 0)"),  # a product's other object
        ("other_odd = second & is_sum", "other_odd = is_sum"),
        ("2 * path[0] + 1 + (~truth)", "2 * path[0] + 1 + truth"),  # IfElse
        ("rank, number = drawn.cumsum(1) - 1,", "rank, number = drawn.cumsum(1) // 2,"),  # selectors are distinct
        ("free_below, index, right=True)", "free_below, index, right=False)"),  # distractors match no selector
        ("top, left = get_color.sum(1, True), get_shape.sum(1, True)", "top, left = 0 * number, 0 * number"),
        ("place = 25 * cls + _distinct(", "place = 25 * cls + (")],  # objects in one class share no cell
    ("data.py", "tests/test_oracle.py"): [  # the oracle, operator by operator
        ("(EXIST, (~match[:, :, 0].any(2))", "(EXIST, (match[:, :, 0].any(2))"),
        ("(GET_LOCATION, FIRST_CELL + cell[:, :, 0])", "(GET_LOCATION, FIRST_CELL + cell[:, :, 1])"),
        ("(GET_COLOR, FIRST_COLOR - 1 + at[:, :, 1])", "(GET_COLOR, FIRST_COLOR - 1 + at[:, :, 0])"),
        ("(GET_SHAPE, FIRST_SHAPE - 1 + at[:, :, 0])", "(GET_SHAPE, FIRST_SHAPE + at[:, :, 0])"),
        ("(SUM_EVEN, total), (SUM_ODD, 1 - total)", "(SUM_EVEN, 1 - total), (SUM_ODD, 1 - total)"),
        ("(SUM_ODD, 1 - total)", "(SUM_ODD, total)"),
        ("(PRODUCT_EVEN, product)", "(PRODUCT_EVEN, 1 - product)"),
        ("(PRODUCT_ODD, 1 - product)", "(PRODUCT_ODD, product)"),
        ("torch.where(asked, row * column, 1)", "torch.where(asked, row * column, 0)"),
        ("index = 2 * index + answer", "index = 2 * index + 1 - answer"),
        ("single = (count == 1)", "single = (count >= 1)"),
        ("& asked[:, operator, 0].all(1)", ""),
        ("counted = (objects >= distractors[0])", "counted = (objects >= 0)"),
        ("clash = same_s & (same_c | no_c) | same_c & no_s", "clash = same_s & same_c")],
    ("data.py", "tests/test_data.py -k uniform or held or counts or coins or distractors"): [  # every split's entries
        ("distractors=(m, m)) for m", "distractors=(1, m)) for m"),
        ("OPS_A, OPS_B = (EXIST, SUM_EVEN, PRODUCT_EVEN, GET_SHAPE)", "OPS_A, OPS_B = (EXIST, SUM_EVEN, PRODUCT_EVEN, GET_COLOR)"),
        ("(Pool(OPS_A, colors=LOW_COLORS)", "(Pool(OPS_A, colors=HIGH_COLORS)"),
        ("Pool(OPS_B, shapes=HIGH_SHAPES)))", "Pool(OPS_B, shapes=LOW_SHAPES)))"),
        ("Pool(OPS_A, shapes=HIGH_SHAPES, colors=HIGH_COLORS)", "Pool(OPS_A, colors=HIGH_COLORS)"),  # as released
        ("Pool(OPS_B, shapes=LOW_SHAPES, colors=LOW_COLORS)", "Pool(OPS_B, shapes=LOW_SHAPES)"),
        ("Pool(THEN_A, IF_A), Pool(THEN_B, IF_B)", "Pool(THEN_A, IF_A), Pool(THEN_B, IF_A)"),
        ("Pool(THEN_B, IF_A), Pool(THEN_A, IF_B)", "Pool(THEN_B, IF_A), Pool(THEN_A, IF_A)"),
        ("random.below(high - low + 1, 1)", "random.below(high - low, 1)")],
    ("data.py", "tests/test_shortcuts.py"): [
        ("decider(~odd).gather(1, path)", "decider(odd).gather(1, path)")],  # a decoy on the wrong side
    ("data.py", "tests/test_data.py -k resume or alternates or reshuffled or stream or stay"): [
        ('"train": Subset(depths=(1, 3))', '"train": Subset(depths=(1, 3, 5))'),
        ("in itertools.count(start)", "in itertools.count()"),
        ("divmod(i // len(depths), length", "divmod(i, length"),
        ('"order", depth, block)', '"order", depth)'),
        ("_stream(\"cpu\", seed, split, subset, depth, i)", "_stream(\"cpu\", seed, split, depth, i)")],
    ("eval.py", "tests/test_faults.py -k code"): [
        ('map_location="cpu", weights_only=True', 'map_location="cpu", weights_only=False')],
    ("eval.py", "tests/test_train.py tests/test_eval.py -k wilson or baselines or spearman or probe or rising or organized"): [
        ("z * z / (4 * n * n)", "z * z / (4 * n)"),
        ("center, half = p + z * z / (2 * n)", "center, half = p"),
        ("answer[operator == op].mode()", "answer.mode()"),
        ("(data.GET_LOCATION, 1 / objects)", "(data.GET_LOCATION, 1 / objects ** 2)"),
        ("colors[:, 1:].amax(1) / objects", "1 / (colors[:, 1:] > 0).sum(1)"),
        ("(count.cumsum(0) - (count - 1) / 2)", "count.cumsum(0)"),
        ("fit, near = near[:n // 2], near[n // 2:]", "fit, near = near[:n // 2], near[:n // 2]"),
        ('log[-1]["train"] > log[-2]["train"] + 0.01', 'log[-1]["train"] > log[-2]["train"]')],
    ("train.py", "tests/test_train.py tests/test_faults.py -k bits or folder or refused or code or disk or finite or drops or once or bug"): [
        ('seed=config["seed"], start=state["step"]', 'seed=config["seed"], start=0'),
        ('rate(state["step"], steps)', "rate(first, steps)"),
        ("optimizer.load_state_dict(saved)", "pass"),
        ("with hold(folder):", "with open(folder / 'lock', 'ab'):"),
        ("cls.seen = True  # remembered", "cls.seen = False  # remembered"),
        ("temporary.unlink(missing_ok=True)", "pass"),
        ('map_location="cpu", weights_only=True', 'map_location="cpu", weights_only=False'),
        ("if not math.isfinite(value):", "if False:"),
        ('open(folder / "lock", "ab")', 'open(folder / "config.json", "rb+")'),
        ("except (Refused, OSError)", "except (ValueError, OSError)")],
    ("models/sstfmr.py", "tests/test_models.py -k torch or linear or relative or attention or position"): [
        ("return last(x[:, -1:], x, bias", "return last(x[:, :1], x, bias"),  # the last block's shortcut
        ("to_value) + self.value.bias.view(self.heads, -1)", "to_value)"),
        ("layer(places)]) for layer", "places @ layer.weight.T]) for layer"),
        ("bias if self.relative is None else bias[:, T:T + 1]", "0"),
        ("place[:, None] - place).clamp(-8, 8)", "place[:, None] + place).clamp(-8, 8)")],
    ("models/treetfmr.py", "tests/test_models.py -k treetfmr"): [
        ("p * left + (1 - p) * right", "(1 - p) * left + p * right"),  # the gate
        ("below[:, 0::2], below[:, 1::2]", "below[:, :below.shape[1] // 2], below[:, below.shape[1] // 2:]"),
        ("score / asked.clamp(min=1)", "score / 2"),
        ("start += 2 * levels[-1].shape[1]", "start += levels[-1].shape[1]")],
    ("models/gru.py", "tests/test_models.py -k gru"): [
        ("keep * state + (1 - keep) * torch.tanh(x_new + reset * h_new)",
         "(1 - keep) * state + keep * torch.tanh(x_new + reset * h_new)")],
    ("models/perceiver.py", "tests/test_models.py -k perceiver"): [
        ("x = self.ask_each_other(x, x)", "x = self.ask_stimulus(x, x)")],
    ("models/hypertfmr.py", "tests/test_models.py -k hypertfmr or copies"): [
        ("self.execute(self.infer(instruction), stimulus)", "self.execute(self.infer(instruction.flip(0)), stimulus)"),
        ("self.norm2(x + self.mlp(x))", "self.norm2(self.mlp(x))")],
}


def caught_by(file, tests, old, new):
    """The first test that fails with the mutant in place, or None."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*", "runs", "__pycache__"))
        path = Path(folder) / file
        path.write_text(path.read_text().replace(old, new))
        tests, _, chosen = tests.partition(" -k ")
        out = subprocess.run([sys.executable, "-m", "pytest", "-x", "-q", *tests.split(), "-k", chosen or "test"],
                             cwd=folder, capture_output=True, text=True).stdout
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(.*?)(?: - .*)?$", out, re.M)
    return failed and failed[1]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="", help="only the mutants of files whose names contain this")
    only, alive, number = parser.parse_args(argv).only, 0, 0
    for (file, tests), changes in MUTANTS.items():
        if only in file and caught_by(file, tests, "", ""):
            sys.exit(f"the tests {tests} fail without a mutant: mend them first")
        for old, new in changes if only in file else ():
            test, number = caught_by(file, tests, old, new), number + 1
            alive += test is None
            print(f"{file}: {' '.join(new.split())}   {'caught by ' + test if test else 'LIVES'}", flush=True)
    print(f"{number} mutants, {number - alive} caught")
    return alive


if __name__ == "__main__":
    sys.exit(main())
