"""Wrong flags and arguments get one clear line and exit code 2. Nothing is left behind."""
import pytest

import data
import eval as evaluation
import train
from data import Pool, Subset
from test_eval import ADDS
from test_train import CHANGES, refusal, tiny

WRONG = {  # flags of train.py, one by one, then together
    "--model ../x": "invalid choice: '../x' (choose from", "--split all x": "invalid choice: 'x'",
    "--seed -1": "must be an integer from 0 to 9223372036854775807, not -1",
    "--heads x": "must be an integer from 1 to 1000000000, not x", "--dim 16.0": "1 to 1000000000",
    "--layers 0": "must be an integer from 1 to", "--steps 1e3": "1 to 1000000000",
    "--train-size 0": "1 to 1000000000", "--batch-size 0": "1 to",
    "--lr nan": "must be a number from 1e-30 to 1e+30", "--workers 65": "an integer from 0 to 64",
    "--optimizer sgd": "invalid choice: 'sgd'", "--schedule no": "invalid choice: 'no'",
    "--device x": "choose from", "--read x": "invalid choice: 'x'",
    "--bogus 1": "unrecognized arguments: --bogus 1", "--step 2": "unrecog", "--out": "argument",
    "--again x": "unrecognized arguments: x", "--list x": "unrecognized arguments: x",
    "--test-trials 0": "must be an integer from 1 to",
    "--model looptfmr gru --view all": "--model gru: error: unrecognized arguments: --layers 1",
    "--model rnn gru --heads 2": "unrecognized arguments: --layers 1 --heads 2",
    "--heads 3": "seed0: dim must be a multiple of heads, not 16 with 3 heads",
    "--dim 15 --heads 5": "dim must be even, for sines and cosines, not 15",
    "--split productive --train-size 15": "15 training trials are less than a batch of each depth"}


@pytest.mark.parametrize("program, flags, says", [
    *((train, flags, says) for flags, says in WRONG.items()),
    (evaluation, "--show -1", "must be an integer from 0 to 1000"),
    (evaluation, "", "nothing to show: train a run"), (evaluation, "--plot", "expected one"),
    (evaluation, "--trial -1", "an integer from 0 to 9999"),
    (data, "--split none", "choose from"), (data, "--subset x", "has no subset x; it has train,"),
    (data, "--subset train", "depth 1 or 3: choose"), (data, "--depth 4", "depth 3: choose one of"),
    (data, "--n 0", "n must be at least 1, not 0"),
    (data, "--n x", "int"), (data, "--seed x", "int")])
def test_a_program_refuses_and_leaves_nothing(tmp_path, capsys, monkeypatch, program, flags, says):
    monkeypatch.chdir(tmp_path)
    arguments = tiny(*flags.split()) if program is train else flags.split()
    line, = refusal(capsys, program, *arguments)
    assert ": error: " in line and says in line and not list(tmp_path.iterdir())


@pytest.mark.parametrize("split, says", [
    ({"train": Subset(depths=(1, 3)), "iid": Subset(depths=(1, 3))},
     "mine/iid: a test set has one depth, not (1, 3)"),
    ({"train": Subset(), "ood": Subset(depths=(3,))}, "mine needs a test set iid, of trials like"),
    ({"iid": Subset()}, "mine has no subset train; it has iid"),
    ({"train": Subset(), "iid": Pool()}, "mine/iid: must be like Subset((Pool(),)), not Pool("),
    *(({"train": Subset(), "iid": Subset(pools=pools)}, "mine/iid: must be like Subset((Pool(),))")
      for pools in ((), [Pool()], Pool(), (Pool(), Subset()))),
    *(({"train": Subset(depths=depths), "iid": Subset()},
       "mine/train: depths must be some of 1, 3, 5, 7, 9, as a")
      for depths in ((), 3, (2,), "3", [3])),
    *(({"train": Subset(distractors=numbers), "iid": Subset()},
       f"such as (1,), not {numbers!r}") for numbers in (5, (0, 5), (1, 99), [1, 5], "15")),
    *(({"train": Subset((Pool(), Pool(**{field: values}))), "iid": Subset()},
       f"mine/train: {field} must be some of")
      for field, wrong in {"leaves": ["Exist", ("Exists",), ("IfElse",)], "conditions": ["Exist",
                           ("Exists",), ("GetShape",)], "shapes": [5, (-1,), range(10, 15)],
                           "colors": ["red", ("red",), range(11)]}.items()
      for values in ((), [], *wrong))], ids=str)
def test_what_a_student_writes_wrong_is_said(tmp_path, capsys, monkeypatch, split, says):
    monkeypatch.setitem(data.SPLITS, "mine", split)
    line, = refusal(capsys, train, *tiny("--split", "mine", "--out", tmp_path))
    assert says in line and not list(tmp_path.iterdir())  # before a step


@pytest.mark.parametrize("program, tested", [
    (train, [*CHANGES, "--out", "--device", "--again", "--list"]),
    (evaluation, [*ADDS, "--subset", "--trial"]),
    (data, ["--split", "--subset", "--depth", "--n", "--seed"])])
def test_every_flag_has_help_and_its_tests(program, tested, capsys):
    with pytest.raises(SystemExit):
        program.main(["--help"])
    flags = capsys.readouterr().out.split("\n  --")[1:]
    names = {flag.split()[0] for flag in flags}
    tested = {flag.split()[0].strip("-") for flag in tested}
    assert all(len(flag.split("\n\n")[0].split()) > 3 for flag in flags) and names == tested
    assert program is not train or names == {flags.split()[0].strip("-") for flags in WRONG} - {
        "bogus", "step"}
