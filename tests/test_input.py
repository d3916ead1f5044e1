"""Wrong flags and arguments get one clear line and, on the command line, exit code 2. Nothing is left behind."""
import pytest
import torch

import data
import eval as evaluation
import train
from test_oracle import GRID3, TREE3, grid
from test_train import CHANGES, TINY, refusal

TRIAL = {"instruction": torch.tensor([TREE3]), "stimulus": grid(GRID3)}
HUGE = "must be an integer from 1 to 1000000000"
BAD = {  # flag -> values that it refuses, and what it says is accepted
    "--model": (["nobody", "../../x", "all sstfmr", "__init__"], f"there are {', '.join(evaluation.available())}"),
    "--split": (["nowhere", "all distractor"], f"there are {', '.join(data.SPLITS)}"),
    "--seed": (["-1", "x", "1.5", "99999999999999999999"], "must be an integer from 0 to 9223372036854775807"),
    "--dim": (["0", "-4", "16.0", "9000"], "must be an integer from 1 to 8192"),
    "--layers": (["0", "x", "101"], "must be an integer from 1 to 100"),
    "--heads": (["0", "x", "101"], "must be an integer from 1 to 100"),
    "--set": (["bogus=1", "layers=0", "lr=1"], "the model has position, read, tokens"),
    "--steps": (["0", "-1", "1e3"], HUGE), "--train-size": (["0", "x"], HUGE), "--eval-every": (["0", "x"], HUGE),
    "--batch-size": (["0", "x", "2000000"], "must be an integer from 1 to 1000000"),
    "--optimizer": (["sgd"], "choose from"), "--precision": (["float8"], "choose from"), "--device": (["tpu"], "choose from"),
    "--lr": (["0", "-1", "x", "nan", "inf"], "must be a number from 1e-30 to 1e+30"),
    "--out": ([""], "expected one argument"), "--paper": (["1"], "unrecognized arguments"),
}
CONTRADICTIONS = {
    "--heads 3": "dim must be a multiple of 2 * heads", "--dim 15": "not 15 with 4 heads (sstfmr.py, line ",
    "--train-size 7": "train_size must be an integer of at least 8", "--bogus 1": "unrecognized arguments",
    "--split productive --train-size 15": "train_size must be an integer of at least 16",
    "--model rnn": "rnn takes no --layers", "--model rnn sstfmr --heads 2": "rnn takes no --heads, --layers",
    "--set read=left": "read must be root or eos, not 'left'", "--set read": "read must be root or eos, not ''",
    "--device mps": "there is no device 'mps' here; there is cpu",
}


@pytest.mark.parametrize("program, flags, says", [
    *((train, f"{flag} {value}", says) for flag, (values, says) in BAD.items() for value in values),
    *((train, flags, says) for flags, says in CONTRADICTIONS.items()),
    (evaluation, "--n 0", "must be an integer from 1 to 100000"), (evaluation, "--n x", "must be an integer"),
    (evaluation, "--show -1", "must be an integer from 0 to 1000"), (evaluation, "--device tpu", "choose from"),
    (evaluation, "--plot", "expected one"), (evaluation, "--saved", "unrecognized arguments"),
    (evaluation, "nowhere", "no run in nowhere: train one with train.py"), (evaluation, "", "no run in runs: train"),
    (data, "--subset iid", "split productive has no subset 'iid'; it has train, depth1"),
    (data, "--split none", "choose from"), (data, "--n 0", "must be an integer from 1 to 1000000"),
    (data, "--seed -1", "must be an integer from 0 to"), (data, "--depth 4", "choose from"),
    (data, "--subset depth3 --depth 9", "depth of productive/depth3 must be 3, not 9"),
    (data, "--subset train", "depth of productive/train must be 1 or 3, not None")])
def test_a_program_refuses_and_leaves_nothing(tmp_path, capsys, monkeypatch, program, flags, says):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert says in refusal(capsys, program, [*(TINY if program is train else []), *flags.split()])
    assert not list(tmp_path.iterdir())


def test_a_split_must_be_trainable(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(data.SPLITS, "mine", {"train": data.Subset(), "ood": data.Subset(distractors=(9, 9))})
    flags = [*TINY, "--split", "mine", "--out", tmp_path / "runs"]
    assert "split mine needs a test set drawn like its training trials" in refusal(capsys, train, flags)
    monkeypatch.setitem(data.SPLITS, "mine", dict.fromkeys(("train", "iid"), data.Subset(depths=(2,))))
    assert "depths of a Subset must be" in refusal(capsys, train, flags)
    monkeypatch.setitem(data.SPLITS, "mine", dict.fromkeys(("train", "iid"), data.Subset(depths=(1, 3))))
    assert "depth of mine/iid must be 1 or 3, not None" in refusal(capsys, train, flags)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("program", [train, evaluation, data])
def test_every_flag_has_help_and_its_tests(program, capsys, monkeypatch):
    with pytest.raises(SystemExit):
        program.main(["--help"])
    flags = capsys.readouterr().out.split("\n  --")[1:]
    assert len(flags) >= 5 and all(len(flag.split("\n\n")[0].split()) > 3 for flag in flags), flags
    names = {"--" + flag.split()[0] for flag in flags}
    if program is train:
        assert names == BAD.keys() and names - {flags.split()[0] for flags in CHANGES} == {"--out", "--device"}


@pytest.mark.parametrize("function, change, says", [
    (data.trials, {"split": "distractors"}, "split"), (data.trials, {"n": 0}, "n must be an integer of at least 1"),
    (data.trials, {"seed": 1.0}, "seed must be an integer"), (data.trials, {"device": "tpu"}, "device"),
    (data.batches, {"batch_size": 0}, "batch_size must be an integer of"),
    (data.batches, {"seed": None}, "seed must be an integer"), (data.batches, {"start": -1}, "start must be an int"),
    *((data.solve, {"distractors": numbers}, "^distractors must be") for numbers in ((5, 1), (1,), (0.5, 2), None))])
def test_functions_name_the_wrong_argument(function, change, says):
    usual = {data.trials: {"split": "productive", "subset": "depth1", "n": 1}, data.solve: TRIAL,
             data.batches: {"split": "productive", "batch_size": 6, "seed": 0}}[function]
    function(**usual)
    with pytest.raises(ValueError, match=says):
        function(**usual | change)


@pytest.mark.parametrize("named, change", [
    *((named, change) for named in ("instruction", "stimulus") for change in (
        lambda x: x[0], lambda x: x[:, :3], lambda x: x[:, :, 1:], lambda x: x.float(), lambda x: x > 0,
        lambda x: x.tolist(), lambda x: x + 11, lambda x: x - 1, lambda x: x[:0])),
    ("stimulus", lambda x: x.to("meta")), ("stimulus", lambda x: x.repeat(2, 1, 1)), ("instruction", lambda x: x.clamp(max=8)),
    *(("instruction", lambda x, op=op: x.index_put((torch.tensor(0),) * 3, torch.tensor(op)))
      for op in (0, data.IF_ELSE, data.GET_SHAPE))])
def test_the_oracle_names_what_is_no_trial(named, change):
    for function in (data.solve, data.path):
        with pytest.raises(ValueError, match=f"^{named} must"):
            function(**TRIAL | {named: change(TRIAL[named])})
