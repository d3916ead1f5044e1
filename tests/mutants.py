"""Mutation testing: breaks the code in one place after another, and says which test notices.

    python tests/mutants.py --only looptfmr --n 20     # some minutes

A mutant reverses a comparison, swaps two operations, changes a number or a truth value, or drops a
`not` or a call. One that lives is a gap in the tests, or changes nothing that counts, such as the
text of an error.
"""
import argparse
import ast
import itertools
import random
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = {  # file -> the tests that should notice; of a model, without that of copies
    "data.py": ["tests/test_data.py", "tests/test_oracle.py", "tests/test_shortcuts.py"],
    "eval.py": ["tests/test_eval.py"], "train.py": ["tests/test_train.py"],
    "tests/claims.py": ["tests/test_claims.py"], "tests/why.py": ["tests/test_why.py"],
    **{f"models/{path.name}": ["tests/test_models.py", "-k", f"{path.stem} or torch or tokens"]
       for path in (ROOT / "models").glob("[a-z]*.py")},
    "models/authors.py": ["tests/test_authors.py"]}
PAIRS = [(ast.Eq, ast.NotEq), (ast.Lt, ast.GtE), (ast.Gt, ast.LtE), (ast.In, ast.NotIn),
         (ast.Is, ast.IsNot), (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div),
         (ast.FloorDiv, ast.Mod), (ast.BitAnd, ast.BitOr)]
SWAPS = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}


def breaks(node):
    """Breaks a part of the code, if that is of such a kind. Says whether it is."""
    if isinstance(node, (ast.BinOp, ast.BoolOp, ast.AugAssign)) and type(node.op) in SWAPS:
        node.op = SWAPS[type(node.op)]()
    elif isinstance(node, ast.Compare) and type(node.ops[0]) in SWAPS:
        node.ops[0] = SWAPS[type(node.ops[0])]()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        node.operand = ast.UnaryOp(ast.Not(), node.operand)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (bool, int, float)):
        node.value = not node.value if isinstance(node.value, bool) else node.value + 1
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        node.value = ast.Constant(None)
    else:
        return False
    return True


def mutants(source):
    """A file's mutants in random order: (line number, code there, code instead, the file)."""
    numbers = list(range(len(list(ast.walk(ast.parse(source))))))
    random.Random(0).shuffle(numbers)
    for number in numbers:
        tree = ast.parse(source)
        node = list(ast.walk(tree))[number]
        old = ast.unparse(node) if isinstance(node, (ast.expr, ast.stmt)) else ""
        if old and breaks(node):
            yield node.lineno, old, ast.unparse(node), ast.unparse(tree)


def copy(folder, changes):
    """The repository in another folder, with (file, old, new) changed."""
    for part in ("data.py", "eval.py", "train.py", "README.md", "models", "tests", ".github"):
        copier = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copier(ROOT / part, folder / part)
    for file, old, new in changes:
        text = (folder / file).read_text(encoding="utf-8").replace(old, new, 1)
        (folder / file).write_text(text, encoding="utf-8")


def red(folder, *arguments):
    """The tests that fail there, or that the program hangs."""
    try:
        out = subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments], cwd=folder,
                             capture_output=True, text=True, timeout=900).stdout
    except subprocess.TimeoutExpired:
        return ["its time"]
    assert " passed" in out or " failed" in out or " error" in out, out
    return re.findall(r"^(?:FAILED|ERROR) (?:tests/)?(.*?)(?: - .*)?$", out, re.M)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split(": ")[0], usage=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="only files whose names contain this")
    parser.add_argument("--n", type=int, default=10, help="mutants of each file (default: 10)")
    args, alive = parser.parse_args(argv), 0
    for file in (file for file in TESTS if args.only in file):
        source = (ROOT / file).read_text(encoding="utf-8")
        found = itertools.islice(mutants(source), args.n)
        for line, old, new, text in [(0, "", "", source), *found]:  # first without a mutant
            with tempfile.TemporaryDirectory() as folder:
                copy(Path(folder), [(file, source, text)])
                failed = red(Path(folder), "-x", *TESTS[file])
            if not line and failed:
                sys.exit(f"{failed[0]} fails without a mutant: mend it first")
            if line:
                alive += not failed
                says = f"caught by {failed[0]}" if failed else "LIVES"
                print(f"{file}:{line}: {' '.join(f'{old} -> {new}'.split())}   {says}", flush=True)
    print(f"{alive} mutants live")
    return alive > 0


if __name__ == "__main__":
    sys.exit(main())
