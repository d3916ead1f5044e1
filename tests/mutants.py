"""Breaks the code on purpose, one line at a time, and runs the tests that should notice. A mutant
that lives is a gap.

    python tests/mutants.py             # half an hour; says which test caught each
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
    ("data.py", "tests/test_data.py"): [  # the rules, in their order
        ("match = {(shape, any_color)", "match = {(shape, color)"),
        ("place.isdisjoint(matched):", "True:"),
        (" and (shape, color) not in placed]", "]"),
        ("[pair for pair in PAIRS if pair not in matched])", "PAIRS)"),
        ("(color + rng.randrange(1, COLORS))", "(color + 0)"),
        ("swapped(pairs) if operator", "pairs if operator"),
        ("[rng.random() < 0.5", "[rng.random() < 0.53"),
        ("else left + 1)\n            grid", "else left)\n            grid"),
        ("for i in [*reversed(path), *(", "for i in [*path, *("),
        ("objects[:depth])", "objects[:1])"),
        ("FIRST_SHAPE + shape}.get", "FIRST_SHAPE + color}.get"),
        ("rng.randint(*subset.distractors)", "subset.distractors[0]"),
        ("range(10_000)", "range(1_000_000)")],
    ("data.py", "tests/test_data.py -k held or uniform or stream or shuffled or stays"): [
        ("distractors=(m, m)) for m", "distractors=(1, m)) for m"),
        ('OPS_A = "Exist", "SumEven"', 'OPS_A = "Exist", "SumOdd"'),
        ("(Pool(OPS_A, colors=LOW)", "(Pool(OPS_A, colors=HIGH)"),
        ("(Pool(THEN_A, IF_A), Pool(THEN_B, IF_B))", "(Pool(THEN_A, IF_A), Pool(THEN_B, IF_A))"),
        ('f"training {seed} {split}"', 'f"set {seed} {split} train"'),
        ("divmod(turn, self.share //", "divmod(i, self.share //"),
        ('f"order {self.name} {depth} {epoch}"', 'f"order {self.name} {depth}"')],
    ("data.py", "tests/test_oracle.py"): [  # the oracle, operator by operator
        ("TRUE if found[0] else FALSE", "FALSE if found[0] else TRUE"),
        ("GRID * row + column, \"GetColor\"", "GRID * column + row, \"GetColor\""),
        ("FIRST_COLOR - 1 + color", "FIRST_COLOR + color"),
        ("FIRST_SHAPE - 1 + shape", "FIRST_SHAPE - 1 + color"),
        ("holds([cells[0] for cells in found])", "holds([found[0][0]])"),
        ("sum(map(sum, cells)) % 2 == 0", "sum(map(sum, cells)) % 2 == 1"),
        ("math.prod(map(math.prod, cells)) % 2 == 0", "math.prod(map(sum, cells)) % 2 == 0"),
        ("if solved[path[-1]].answer == TRUE", "if solved[path[-1]].answer != TRUE"),
        ("if shape in (0, a) and color in (0, b)]", "if shape in (0, a)]")],
    ("data.py", "tests/test_shortcuts.py"): [
        ("bool(holds(others)) != truth", "bool(holds(others)) == truth"),
        ("replaced = rng.randrange(number)", "replaced = number - 1"),
        ("swapped(pairs) if operator", "[(0, 0), (0, 0)] if operator")],
    ("eval.py", "tests/test_eval.py"): [
        ("+= 1 / len(pool.leaves) / len(possible)", "+= 1 / len(possible)"),
        ("1 / len(shapes)", "1 / len(shapes) ** 2"),
        ("(answer in best) / len(best)", "(answer in best)"),
        ("solved[len(solved) // 2:]", "solved"),
        ("(count.cumsum(0) - (count - 1) / 2)", "count.cumsum(0)"),
        ("if trial[2] != answer]", "if trial[2] == answer]"),
        ("data.trials(split, near, FIT_TRIALS, seed=1)", "data.trials(split, far, FIT_TRIALS)"),
        ("hooks.enter_context(module", "(module")],
    ("tests/claims.py", "tests/test_claims.py"): [
        ("square ** 2 / sum(error ** 2 / n", "1e9 / sum(error ** 2 / n"),
        ("quantile * square ** 0.5", "quantile * 0"),
        ("agree.append(statistics.mean(a) >= LEARNED)", "agree.append(True)"),
        ('elif not name.startswith("mlp") and (', "elif ("),
        ("if len(found) > 1 and None not in found:", "if None not in found:"),
        ('{"authors": ("crossattn", "firstread")', '{"authors": ("crossattn", "default")'),
        ("if name_of(config) in (config", "if config['model'] in (config")],
    ("train.py", "tests/test_train.py"): [
        ('"peak": MUON_RATIO * lr', '"peak": lr'),
        ('group["peak"] * share', 'group["peak"]'),
        ("generator=torch.Generator()", "generator=None"),
        ("optimizer.load_state_dict(saved)", "pass"),
        ('torch.set_rng_state(state.pop("random"))', 'state.pop("random")'),
        ("    model.train()\n", ""),
        ("if not math.isfinite(loss):", "if False:"),
        ('state["sums"].zero_()', "pass"),
        ("temporary.unlink(missing_ok=True)", "pass"),
        ("weights_only=True", "weights_only=False"),
        ("fcntl.LOCK_EX |", "fcntl.LOCK_SH |"),
        ("if not finished(config, folder):", "if True:"),
        ("    check_code(there)", "    pass"),
        ("    return [*losses, *norms]", "    return [*losses, 0, 0]"),
        ("is_bf16_supported(including_emulation=False)", "is_bf16_supported()"),
        ("failed.append(str(folder))", "raise"),
        ('and "allocate" not in str(error)', "and False")],
    ("models/sstfmr.py", "tests/test_models.py -k sstfmr or torch or instruction"): [
        ("> 0, 0, -math.inf)  #", "> 0, 0, 0)  #"),
        ("(second) + place +", "(second) +"),
        ("free.sum(1, True) /", "1 /"),  # the compact stimulus
        ("torch.where(empty, share, 0)", "torch.where(empty, 0, 0)"),
        (".masked_fill(empty[:, :, None], 0)", ""),
        ("free.int().argsort(stable=True)", "(~free).int().argsort(stable=True)"),
        ("/ math.sqrt(q.shape[3])", "/ q.shape[3]"),
        ("self.norm1(x + self.attention", "self.norm1(self.attention"),
        ("x[:, [self.read]], x, bias)", "x[:, [0]], x, bias)"),
        ("torch.linspace(0, 1, dim // 2)", "torch.linspace(0, 0.9, dim // 2)")],
    ("models/dstfmr.py", "tests/test_models.py -k dstfmr"): [
        ('heads, READ["eos"])', 'heads, READ["root"])')],
    ("models/crossattn.py", "tests/test_models.py -k crossattn"): [
        ("self.look(x, y, bias), own)", "self.look(x, x, own), own)"),
        ('self.first == "ask"', 'self.first == "read"')],
    ("models/perceiver.py", "tests/test_models.py -k perceiver"): [
        ("self.ask_each_other(x[:, :1], x, 0)", "self.ask_stimulus(x[:, :1], x, 0)"),
        ('if self.first == "read":', "if True:"),
        ("torch.randn(latents, dim)", "torch.zeros(latents, dim)")],
    ("models/hypertfmr.py", "tests/test_models.py -k hypertfmr"): [
        ("self.execute(self.infer(instruction), stimulus)",
         "self.execute(self.infer(instruction.flip(0)), stimulus)"),
        ("self.look(z, x).mT + bias[:, 0]", "self.look(z, x).mT")],
    ("models/looptfmr.py", "tests/test_models.py -k looptfmr or relations"): [
        ("LEFT * (column == 2 * row + 1)", "LEFT * (column == row + 1)"),
        ("(column == (row - 1) // 2)", "(column == row // 2)"),
        ("(column == (row - 1) // 2)", "(column == (row - 2) // 2)"),
        ("> 0, 0, -math.inf)  #", "> 0, 0, 0)  #"),
        ("self.scores[1, [LEFT, RIGHT]] = 0", "self.scores[1, :] = 0"),
        ("tokens.repeat(2, 2, 1)", "tokens.repeat_interleave(2, 0).repeat_interleave(2, 1)"),
        ("start += 2 * levels[-1].shape[1]", "start += levels[-1].shape[1]"),
        ("(0, 0, 1, 0))", "(0, 0, 0, 1))"),  # left or right
        ("range(len(levels) + self.more)", "range(1 + self.more)"),
        ('if self.carry == "answer":', "if True:"),
        ("softmax(2) @ self.answers + sides", "softmax(2) @ self.answers")],
    ("models/authors.py", "tests/test_authors.py"): [
        ("pair.maximum(when), when]", "pair, when]"),
        ("stimulus.flip(2)", "stimulus"),
        ("rule[:, -1, -1] = stimulus", "stimulus"),
        ("10_000 ** (torch.arange(0, dim, 2) / dim)", "100 ** (torch.arange(0, dim, 2) / dim)"),
        (".masked_fill(back < 0, float(\"-inf\"))", ""),
        ("scores = ((q @ k.mT + near) /", "scores = (q @ k.mT + near /"),
        ("x = self.dropout(x + place)", "x = x + place"),
        ("nn.Linear(4 * dim, dim), nn.GELU())", "nn.Linear(4 * dim, dim))"),
        ("self.norm2(self.mlp(x))[:, 0]", "self.norm2(x + self.mlp(x))[:, 0]"),
        ("y + mlp(y))", "mlp(y))"),
        ("torch.zeros(latents, dim)", "torch.randn(latents, dim)"),
        ("if self.cells is not None:", "if False:")],
    ("models/gru.py", "tests/test_models.py -k gru"): [
        ("keep * state + (1 - keep) *", "(1 - keep) * state + keep *")],
    ("models/rnn.py", "tests/test_models.py -k rnn"): [
        ("state = self.step(x, state)", "state = self.step(x, 0 * state)")],
    ("models/mlp.py", "tests/test_models.py -k mlp"): [
        ("self.first[:features.shape[-1]]", "self.first[-features.shape[-1]:]"),
        ("x = F.gelu(layer(x))", "x = layer(x)")],
}


def copy(folder, changes):
    """The repository in another folder, with (file, old, new) changed."""
    for part in ("data.py", "eval.py", "train.py", "README.md", "models", "tests", ".github"):
        copier = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copier(ROOT / part, folder / part)
    for file, old, new in changes:
        text = (folder / file).read_text(encoding="utf-8").replace(old, new, 1)
        (folder / file).write_text(text, encoding="utf-8")


def red(folder, *arguments):
    """The tests that fail there."""
    out = subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments], cwd=folder,
                         capture_output=True, text=True).stdout
    assert " passed" in out or " failed" in out or " error" in out, out
    return re.findall(r"^(?:FAILED|ERROR) (?:tests/)?(.*?)(?: - .*)?$", out, re.M)


def caught_by(tests, *changes):
    """The first test that fails with changes, or None."""
    files, _, chosen = tests.partition(" -k ")
    with tempfile.TemporaryDirectory() as folder:
        copy(Path(folder), changes)
        return next(iter(red(Path(folder), "-x", *files.split(), "-k", chosen or "test")), None)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], usage=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="only files whose names contain this")
    only, alive, number = parser.parse_args(argv).only, 0, 0
    for (file, tests), changes in MUTANTS.items():
        if only in file and caught_by(tests):
            sys.exit(f"the tests {tests} fail without a mutant: mend them first")
        for old, new in changes if only in file else ():
            test, number = caught_by(tests, (file, old, new)), number + 1
            alive += test is None
            print(f"{file}: {' '.join(new.split())}   "
                  f"{'caught by ' + test if test else 'LIVES'}", flush=True)
    print(f"{number} mutants, {number - alive} caught")
    return alive


if __name__ == "__main__":
    sys.exit(main())
