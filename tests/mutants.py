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
    ("data.py", "tests/test_data.py -k obey or device or coins"): [  # the generator, operator by operator
        ("(operator == EXIST) & ~truth", "(operator == EXIST) & truth"),
        ("FIRST_CELL + cell), (", "FIRST_CELL + 1 + cell), ("),
        ("(GET_SHAPE, FIRST_SHAPE - 1 + shape)", "(GET_SHAPE, FIRST_SHAPE + shape)"),
        ("(GET_COLOR, FIRST_COLOR - 1 + color)", "(GET_COLOR, FIRST_COLOR - 1 + shape)"),
        ("(operator == SUM_ODD) | (operator == PRODUCT_ODD)", "(operator == SUM_ODD)"),
        ("_below(4, operator, generator), ODD_ODD)", "_below(4, operator, generator), 0)"),  # a product's other object
        ("other_is_odd = has_second & is_sum", "other_is_odd = is_sum"),
        ("node + 1 + (~truth)", "node + 1 + truth"),  # IfElse
        ("(wanted.cumsum(1) - 1)", "(wanted.cumsum(1) // 2)"),  # selectors are distinct
        ("pairs(free_shapes, free_colors) &", "pairs(free_shapes | True, free_colors) &"),  # distractors match none
        ("_among(bound_cell, bound, GRID", "_among(bound_cell, ~bound, GRID"),  # objects share no cell
        ("again = (~obeys)", "again = obeys")],
    ("data.py", "tests/test_oracle.py"): [  # the oracle, operator by operator
        ("(EXIST, (~match[:, :, 0].any(2))", "(EXIST, (match[:, :, 0].any(2))"),
        ("(GET_LOCATION, FIRST_CELL + cell[:, :, 0])", "(GET_LOCATION, FIRST_CELL + cell[:, :, 1])"),
        ("(GET_COLOR, FIRST_COLOR - 1 + at[:, :, 1])", "(GET_COLOR, FIRST_COLOR - 1 + at[:, :, 0])"),
        ("(GET_SHAPE, FIRST_SHAPE - 1 + at[:, :, 0])", "(GET_SHAPE, FIRST_SHAPE + at[:, :, 0])"),
        ("(SUM_EVEN, total), (SUM_ODD, 1 - total)", "(SUM_EVEN, 1 - total), (SUM_ODD, total)"),
        ("(PRODUCT_EVEN, product)", "(PRODUCT_EVEN, 1 - product)"),
        ("torch.where(asked, row * column, 1)", "torch.where(asked, row * column, 0)"),
        ("index = 2 * index + answers", "index = 2 * index + 1 - answers"),
        ("single = (count == 1)", "single = (count >= 1)"),
        ("& asked[:, operator, 0].all(1)", ""),
        ("counted = (objects >= distractors[0])", "counted = (objects >= 0)"),
        ("clash = same_s & (same_c | no_c) | same_c & no_s", "clash = same_s & same_c")],
    ("data.py", "tests/test_data.py -k uniform or held or distractors"): [  # every split's entries
        ("distractors=(m, m)) for m", "distractors=(1, m)) for m"),
        ("= (EXIST, SUM_EVEN, PRODUCT_EVEN, GET_SHAPE)", "= (EXIST, SUM_EVEN, PRODUCT_EVEN, GET_COLOR)"),
        ("(Pool(OPS_A, colors=LOW_COLORS)", "(Pool(OPS_A, colors=HIGH_COLORS)"),
        ("Pool(ops_a, shapes=HIGH_SHAPES, colors=HIGH_COLORS)", "Pool(ops_a, colors=HIGH_COLORS)"),  # as released
        ("Pool(THEN_A, IF_A), Pool(THEN_B, IF_B)", "Pool(THEN_A, IF_A), Pool(THEN_B, IF_A)"),
        ("_below(most - least + 1, each", "_below(most - least, each")],
    ("data.py", "tests/test_shortcuts.py"): [
        ("~odd.gather(1, node)", "odd.gather(1, node)")],  # a decoy on the wrong side
    ("data.py", "tests/test_data.py -k resume or alternates or reshuffled or stream or stay"): [
        ("divmod(i // len(depths), length", "divmod(i, length"),
        ('"order", depth, block)', '"order", depth)'),
        ('_stream("cpu", seed, split, subset, depth, i)', '_stream("cpu", seed, split, depth, i)')],
    ("eval.py", "tests/test_eval.py"): [
        ("len(subset.pools) * len(pool.leaves) * len(possible)", "len(pool.leaves) * len(possible)"),
        ("(data.GET_LOCATION, 1 / objects)", "(data.GET_LOCATION, 1 / objects ** 2)"),
        ("(1, (trials.answer[:, None] - first).clamp(0, 25))[:, 0] / best.sum(1)",
         "(1, (trials.answer[:, None] - first).clamp(0, 25))[:, 0]"),
        ("leaves = answers[:, -((answers.shape[1] + 2) // 3):]", "leaves = answers"),
        (".any(1) / winners", ".any(1)"),
        ("(count.cumsum(0) - (count - 1) / 2)", "count.cumsum(0)")],
    ("train.py", "tests/test_train.py"): [
        ('start=state["step"], device', "start=0, device"),
        ("* rate(step, steps)", "* rate(0, steps)"),
        ("optimizer.load_state_dict(saved)", "pass"),
        ('torch.set_rng_state(state.pop("random"))', 'state.pop("random")'),
        ('"peak": MUON_RATIO * lr', '"peak": lr'),
        ("is_bf16_supported(including_emulation=False)", "is_bf16_supported()"),
        ("    model.train()\n", ""),
        ("if not math.isfinite(loss):", "if False:"),
        ("temporary.unlink(missing_ok=True)", "pass"),
        ("weights_only=True", "weights_only=False"),
        ("fcntl.LOCK_EX |", "fcntl.LOCK_SH |"),
        ("elif not finished(config, folder):", "else:"),
        ("except (UsageError, OSError) as error", "except (ValueError, OSError) as error")],
    ("models/sstfmr.py", "tests/test_models.py -k sstfmr or torch or instruction or sinusoids"): [
        ("> 0, 0, -math.inf)", "> 0, 0, 0)"),  # no key for absent second selectors
        ("-math.inf), (T, 1))", "-math.inf), (0, T + 1))"),
        ("self.embedding(second) + place +", "self.embedding(second) +"),
        ("torch.log((100 - objects)", "torch.log((99 - objects)"),  # the compact stimulus
        ("torch.where(empty, share, 0)", "torch.where(empty, 0, 0)"),
        ("descending=True, ", ""),
        ("cell.masked_fill(empty, 100)", "cell"),
        ("torch.arange(cell.shape[1], device=cell.device)", "torch.arange(cell.shape[1])"),
        ("self.position).to(self.eos.device)", "self.position)"),
        ("(ids, table) for", "(ids, table.bfloat16() if torch.is_autocast_enabled('cpu') else table) for"),
        ("/ math.sqrt(q.shape[3])", "/ q.shape[3]"),
        ("self.key(context), self.value(context)", "self.value(context), self.key(context)"),
        ("self.norm1(x + self.attention", "self.norm1(self.attention"),
        ("self.blocks[-1](x[:, [self.read]]", "self.blocks[-1](x[:, [0]]"),
        ("torch.linspace(0, 1, dim // 2)", "torch.linspace(0, 1, dim // 2 + 1)[:-1]")],
    ("models/dstfmr.py", "tests/test_models.py -k dstfmr"): [
        ('heads, READ["eos"])', 'heads, READ["root"])')],
    ("models/crossattn.py", "tests/test_models.py -k crossattn"): [
        ("x = look(x, y, bias)", "x = look(x, x, 0 * bias[:, :1])")],
    ("models/perceiver.py", "tests/test_models.py -k perceiver"): [
        ("self.ask_each_other(x[:, :1], x, equal)", "self.ask_stimulus(x[:, :1], x, equal)"),
        ("torch.randn(10, dim)", "torch.zeros(10, dim)")],
    ("models/hypertfmr.py", "tests/test_models.py -k hypertfmr"): [
        ("self.execute(self.infer(instruction), stimulus)", "self.execute(self.infer(instruction.flip(0)), stimulus)"),
        ("self.look(z, x).mT + bias[:, None]", "self.look(z, x).mT")],
    ("models/treetfmr.py", "tests/test_models.py -k treetfmr"): [
        ("start += 2 * levels[-1].shape[1]", "start += levels[-1].shape[1]"),
        ("below.unflatten(1, (w, 2))", "below.unflatten(1, (2, w)).transpose(1, 2)"),  # whose branches they are
        (" + self.sides)", ")"),  # left or right
        ("known.repeat_interleave(w, 0)", "known.repeat(w, 1, 1)"),
        ("self.readout(x).softmax(2) @ self.answers", "x"),
        ("if below is None else self.inner", "if below is not None else self.inner")],
    ("models/gru.py", "tests/test_models.py -k gru"): [
        ("keep * state + (1 - keep) *", "(1 - keep) * state + keep *")],
    ("models/rnn.py", "tests/test_models.py -k rnn"): [
        ("state = self.step(x, state)", "state = self.step(x, 0 * state)")],
    ("models/mlp.py", "tests/test_models.py -k mlp"): [
        ("self.first[:features.shape[-1]]", "self.first[-features.shape[-1]:]"),
        ("x = F.gelu(layer(x))", "x = layer(x)")],
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
