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
        ("{(shape, any_color)", "{(shape, color)"),
        ("place.isdisjoint(matched):", "True:"),
        ("taken = matched | placed", "taken = matched"),
        ("[pair for pair in PAIRS if pair not in matched]", "PAIRS"),
        ("(color + rng.randrange(1, COLORS))", "(color + 0)"),
        ("+= [(shape, color2), (shape2, color)]", "+= pairs"),
        ("rng.random() < 0.5)", "rng.random() < 0.53)"),
        ("if tree[i].truth else 2 * i + 2", "if tree[i].truth else 2 * i + 1"),
        ("for i in path[::-1] +", "for i in path +"),
        ("            if depth == 1:", "            if depth == 9:"),
        ("answer = FIRST_SHAPE + shape", "answer = FIRST_SHAPE + color"),
        ("FIRST_SHAPE = FIRST_CELL + len(CELLS)", "FIRST_SHAPE = 102"),
        (" and not shortcuts]", "]"),
        ("elif not shortcuts:", "else:"),
        ("            check_operator(name, *OPERATORS[name])", "            pass"),
        ("5 < true < 295", "0 <= true < 300"),
        ('["iid"]  # depth 3', '["train"]  # depth 3'),
        ("range(10_000)", "range(1_000_000)")],
    ("data.py", "tests/test_data.py -k held or uniform or stream or batch or stays"): [
        ("rng.randint(*subset.distractors)", "subset.distractors[0]"),
        ("distractors=(m, m)) for m", "distractors=(1, m)) for m"),
        ('(*IF_A, "GetShape")', '(*IF_A, "GetColor")'),
        ("(Pool(OPS_A, colors=LOW)", "(Pool(OPS_A, colors=HIGH)"),
        ("(Pool(THEN_A, IF_A), Pool(THEN_B, IF_B))", "(Pool(THEN_A, IF_A), Pool(THEN_B, IF_A))"),
        ('f"training {seed} {split}"', 'f"set {seed} {split} train"'),
        ("divmod(turn, self.share //", "divmod(i, self.share //"),
        ('f"order {self.name} {depth} {epoch}"', 'f"order {self.name} {depth}"')],
    ("data.py", "tests/test_oracle.py"): [  # the oracle, operator by operator
        ("TRUE if found[0] else FALSE", "FALSE if found[0] else TRUE"),
        ("GRID * row + column, \"GetShape\"", "GRID * column + row, \"GetShape\""),
        ("FIRST_COLOR + color - 1", "FIRST_COLOR + color"),
        ("FIRST_SHAPE + shape - 1", "FIRST_SHAPE + color - 1"),
        ("OPERATORS[operator].holds(cells)", "OPERATORS[operator].holds(cells[:1])"),
        ("sum(row + column for row, column in cells) % 2 == 0",
         "sum(row + column for row, column in cells) % 2 == 1"),
        ("math.prod(row * column for row, column in cells) % 2 == 0",
         "math.prod(row + column for row, column in cells) % 2 == 0"),
        ("if solved[i].answer == TRUE", "if solved[i].answer != TRUE"),
        ("if shape in (0, a) and color in (0, b)]", "if shape in (0, a)]"),
        ("with replacing(args.export) as", "with contextlib.nullcontext(args.export) as"),
        ("temporary.unlink(missing_ok=True)", "pass"),
        ("sys.exit(130)", "raise"),
        ("except BrokenPipeError:", "except EOFError:")],
    ("data.py", "tests/test_shortcuts.py"): [
        ("bool(holds(tuple(others))) != truth", "bool(holds(tuple(others))) == truth"),
        ("replaced = rng.randrange(number)", "replaced = number - 1"),
        ("+= [(shape, color2), (shape2, color)]", "+= [(0, 0), (0, 0)]"),
        ("if shortcuts or bool", "if bool")],
    ("eval.py", "tests/test_eval.py"): [
        ("+= 1 / len(pool.leaves) / len(possible)", "+= 1 / len(possible)"),
        ("return 1 / len(cells)", "return 1 / len(cells) ** 2"),
        ("float((here > anywhere)", "float((here < anywhere)"),
        ("if here == anywhere:", "if False:"),
        ("(shape in shapes and color in colors)", "(shape in shapes)"),
        ("if file.testzip():", "if False:"),
        ("weights_only=True", "weights_only=False"),
        ("with torch.random.fork_rng(devices=[]):", "if True:"),
        ("(answer in best) / len(best)", "(answer in best)"),
        ("solved[len(solved) // 2:]", "solved"),
        ("if trial[2] != answer]", "if trial[2] == answer]"),
        ("[0].mean(0)[row]", "[0].mean(0)[0]"),
        ("keys = keys[-len(weights):]", "pass"),
        ("getattr(part, \"read\", usual)", "0"),
        ("row=operator if row == 0 else row)", "row=row)"),
        ("said[-2][0, operator] if operator else", ""),
        ("first + second + last", "second + first + last"),
        ("*(part[args.trial:]", "*(part[:1]"),
        ("config[\"seed\"] != other[\"seed\"]", "True")],
    ("eval.py", "tests/test_train.py -k wrong"): [("isfinite().all()", "isfinite().any()")],
    ("tests/claims.py", "tests/test_claims.py"): [
        ("square ** 2 / sum(error ** 2 / n", "1e9 / sum(error ** 2 / n"),
        ("difference < -half or abs", "abs"),
        ("abs(difference) + half <= WITHIN", "abs(difference) <= WITHIN"),
        ("if better else (not_higher, higher)", "if True else None"),
        ("(counts != \"late\")", "True"),
        ("if counts == \"all\" or", "if"),
        ("FARTHEST[split] if counts == \"general\" else", "FARTHEST[split] if False else"),
        ("    if not comparable(seeds):\n", "    if False:\n"),
        ("if len(a) < SEEDS or", "if not a or"),
        ("len(b) < SEEDS and not exact", "not b and not exact"),
        ("config[\"split\"] != split + suffix", "False"),
        ("authors != (config[\"model\"] == \"authors\")", "False"),
        ("re.fullmatch(SCALE, config[\"settings\"])", "True"),
        ("if model != without", "if True"),
        ("result |= json.loads(why.read_text())", "pass"),
        ("identity(config, result),)] = config", "str(path),)] = config")],
    ("tests/why.py", "tests/test_why.py"): [
        ("call[2][:, row]", "call[2][:, 0]"),
        ("if not name.startswith(\"encode_stimulus\"):", "if True:"),
        ("        blocks.clear()", "        pass"),
        ("(count.cumsum(0) - (count - 1) / 2)", "count.cumsum(0)"),
        ("data.trials(split, near, FIT_TRIALS, seed=1)", "data.trials(split, far, FIT_TRIALS)"),
        ("torch.random.fork_rng()", "contextlib.nullcontext()"),
        ("decoding(untrained(config).to(device)", "decoding(model"),
        ("why.stat().st_mtime >= weights", "why.stat().st_mtime > 0 * weights"),
        ("            failed = True", "            raise")],
    ("train.py", "tests/test_train.py"): [
        ("Muon(hidden, MUON_RATIO * lr)", "Muon(hidden, lr)"),
        ("for _ in range(5):", "for _ in range(4):"),
        ("gradient.lerp(momentum, MOMENTUM)", "momentum"),
        ('group["peak"] * share', 'group["peak"]'),
        ("generator=torch.Generator()", "generator=None"),
        ("optimizer.load_state_dict(saved)", "pass"),
        ('torch.set_rng_state(state["random"])', "pass"),
        ("    model.train()\n    row", "    row"),
        ("if not math.isfinite(loss):", "if False:"),
        ("recent, since = 0, step", "since = step"),
        ("if shape != (2, width):", "if False:"),
        ("fcntl.lockf(file, fcntl.LOCK_EX |", "fcntl.flock(file, fcntl.LOCK_EX |"),
        ('there.get("code", {}).get(file) != code', "False"),
        ("failed.append(folder)", "raise"),
        ("if folder not in failed and", "if False and")],
    ("models/authors.py", "tests/test_authors.py"): [
        ("pair.maximum(when), when]", "pair, when]"),
        (".masked_fill(back < 0, float(\"-inf\"))", ""),
        ("x = self.dropout(x + place)", "x = x + place"),
        ("y + mlp(y))", "mlp(y))"),
        ("if self.cells is not None:", "if False:")],
}
MODELS = {  # the same of the other files in models/
    "sstfmr": [
        ("[one, shape2 > 0, one[:, :1]]", "[one, one, one[:, :1]]"),
        ("free.sum(1, True) /", "1 /"),  # the compact stimulus
        ("* ~empty[:, :, None]", ""),
        ("/ math.sqrt(q.shape[3])", "/ q.shape[3]"),
        ("self.norm1(context), bias)", "context, bias)"),
        ("x[:, self.read, None], x, bias)", "x[:, 0, None], x, bias)"),
        ("std=module.in_features ** -0.5", "std=1"),
        ("torch.linspace(0, 1, dim // 2)", "torch.linspace(0, 0.9, dim // 2)")],
    "papertfmr": [("self.shape2(shape2)", "self.shape1(shape2)")],
    "dstfmr": [('heads, READ["eos"])', 'heads, READ["root"])')],
    "crossattn": [("self.look(x, y, y_bias), x_log", "self.look(y, y, y_bias)[:, :9], x_log")],
    "perceiver": [("self.ask_each_other(latents[:, :1],", "self.ask_stimulus(latents[:, :1],")],
    "hypertfmr": [("self.look(z, x).mT + log_count[:, None]", "self.look(z, x).mT")],
    "looptfmr": [
        ("LEFT * (column == 2 * row + 1)", "LEFT * (column == row + 1)"),
        ("(column == (row - 1) // 2)", "(column == row // 2)"),
        ("self.scores[1, :, [LEFT, RIGHT]] = 0", "self.scores[1] = 0"),
        ("[:, 2 * w - 2:3 * w - 2]", "[:, w - 1:2 * w - 1]"),
        ('or self.carry == "answer":', "or True:"),
        ("x = x + questions", "x = questions"),
        ("softmax(2) @ self.answers + sides", "softmax(2) @ self.answers")],
    "gru": [("keep * state + (1 - keep) *", "(1 - keep) * state + keep *")],
    "rnn": [("self.step(x, state)", "self.step(x, 0 * state)")],
    "mlp": [("x = F.gelu(layer(x))", "x = layer(x)")],
}
for name, changes in MODELS.items():
    MUTANTS[f"models/{name}.py", f"tests/test_models.py -k {name} or torch or tokens"] = changes


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


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], usage=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="only files whose names contain this")
    only, alive = parser.parse_args(argv).only, 0
    for (file, tests), changes in MUTANTS.items():
        tests, _, chosen = tests.partition(" -k ")
        for old, new in [("", ""), *changes] if only in file else ():  # first without a mutant
            with tempfile.TemporaryDirectory() as folder:
                copy(Path(folder), [(file, old, new)])
                found = red(Path(folder), "-x", tests, "-k", chosen or "test")
            if not old and found:
                sys.exit(f"{found[0]} fails without a mutant: mend it first")
            if old:
                alive += not found
                says = f"caught by {found[0]}" if found else "LIVES"
                print(f"{file}: {' '.join(new.split())}   {says}", flush=True)
    print(f"{alive} mutants live")
    return alive


if __name__ == "__main__":
    sys.exit(main())
