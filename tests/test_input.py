"""What is asked wrongly, from the command line and from Python: one clear line, exit code 2, and nothing is left."""
import os
import random
import signal
import subprocess
import sys

import pytest
import torch

import claims
import data
import eval as evaluation
import train
from test_oracle import GRID3, TREE3, grid
from test_train import ROOT, TINY, small_test_sets  # noqa: F401


def refusal(capsys, program, arguments):
    """The one line with which a program refuses its arguments, after argparse's usage."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        program.main([str(argument) for argument in arguments])
    error = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and sum("error:" in line for line in error) == 1
    return error[-1]


BAD = {  # flag -> values that it refuses, and what it says is accepted
    "--model": (["nobody", "../../x", "all sstfmr"], "there are crossattn, dstfmr"),
    "--split": (["nowhere", "all distractor"], "there are distractor, systematic1"),
    "--seed": (["-1", "x", "1.5", "99999999999999999999"], "must be an integer from 0 to 9223372036854775807"),
    "--dim": (["0", "-4", "x", "16.0", "9000"], "must be an integer from 1 to 8192"),
    "--layers": (["0", "-1", "x", "101"], "must be an integer from 1 to 100"),
    "--heads": (["0", "-1", "x", "101"], "must be an integer from 1 to 100"),
    "--position": (["sideways"], "position sinusoidal, relative or paper"),
    "--schedule": (["slow"], "choose from"),
    "--steps": (["0", "-1", "x", "1e3"], "must be an integer from 1 to 1000000000"),
    "--batch-size": (["0", "-1", "x", "2000000"], "must be an integer from 1 to 1000000"),
    "--train-size": (["0", "-1", "x"], "must be an integer from 1 to 1000000000"),
    "--optimizer": (["sgd"], "choose from"),
    "--lr": (["0", "-1", "x", "nan", "inf"], "must be a number from 1e-30 to 1e+30"),
    "--eval-every": (["0", "-1", "x"], "must be an integer from 1 to 1000000000"),
    "--device": (["tpu"] + ["cuda"] * (not torch.cuda.is_available()), "there is cpu"),
    "--jobs": (["0", "-1", "x", "101"], "must be an integer from 1 to 100"),
    "--precision": (["float8"], "choose from"),
    "--bogus": (["1"], "unrecognized arguments"),
}
CONTRADICTIONS = {
    "--heads 3": "dim must be even, heads divide it", "--dim 15 --heads 1": "dim must be even",
    "--train-size 7": "train_size must be an integer of at least 8",
    "--split productive --train-size 15": "train_size must be an integer of at least 16",
    "--model rnn --heads 2": "rnn takes no --heads", "--model treetfmr --layers 2": "treetfmr takes no --layers",
    "--model mlp --position relative": "mlp takes no --position",
}


@pytest.mark.parametrize("flags, says", [*((f"{flag} {value}", says) for flag, (values, says) in BAD.items()
                                           for value in values), *CONTRADICTIONS.items()])
def test_training_refuses_and_leaves_nothing(tmp_path, capsys, flags, says):
    says = {"tpu": "choose from"}.get(flags.split()[-1], says)
    assert says in refusal(capsys, train, [*TINY, *flags.split(), "--out", tmp_path])
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("program, flags, says", [
    (evaluation, "--n 0", "must be an integer from 1 to 100000"), (evaluation, "--n x", "must be an integer"),
    (evaluation, "--show -1", "must be an integer from 0 to 1000"), (evaluation, "--device tpu", "choose from"),
    (evaluation, "nowhere", "no run in nowhere: train one with train.py"), (evaluation, "--plot", "expected one"),
    (evaluation, "", "no run in runs: train one"), (claims, "", "no finished run in runs: train one"),
    (claims, "nowhere", "no finished run in nowhere: train one with train.py"),
    (data, "--subset iid", "split productive has no subset 'iid'; it has train, depth1"),
    (data, "--split none", "choose from"), (data, "--n 0", "must be an integer from 1 to 1000000"),
    (data, "--seed -1", "must be an integer from 0 to"), (data, "--depth 4", "choose from"),
    (data, "--subset depth3 --depth 9", "depth of productive/depth3 must be 3, not 9"), (data, "--device tpu", "device must be one that"),
    (data, "--subset train", "depth of productive/train must be 1 or 3, not None"),
    (data, "--bench --device meta", "device must be one that torch has here, not 'meta'")])
def test_the_other_programs_refuse(capsys, monkeypatch, tmp_path, program, flags, says):
    monkeypatch.chdir(tmp_path)
    assert says in refusal(capsys, program, flags.split())


GOOD = {"--model": ["rnn", "mlp", "treetfmr"], "--split": ["distractor", "systematic1", "productive"],
        "--seed": ["0", "3 3", "9223372036854775807"], "--dim": ["2", "12 16", "15"], "--layers": ["1", "1 2"],
        "--heads": ["1", "2 4"], "--position": ["relative", "paper"], "--schedule": ["quick", "full"],
        "--batch-size": ["1", "5"], "--train-size": ["5", "10 20"], "--optimizer": ["adamw", "muon"],
        "--lr": ["1e-30", "0.5"], "--eval-every": ["1", "1000000000"], "--precision": ["bfloat16", "float32"],
        "--paper": [""]}


def random_arguments(i):
    """A list of arguments, and whether one of its values is bad by itself."""
    choose, bad = random.Random(i), False
    arguments = ["--split", "systematic1", "--steps", "1", "--batch-size", "4", "--dim", "8", "--device", "cpu"]
    for flag in choose.sample(list(GOOD), choose.randint(1, 5)):
        wrong = flag in BAD and choose.random() < 0.1
        bad |= wrong
        arguments += [flag, *choose.choice(BAD[flag][0] if wrong else GOOD[flag]).split()]
    return arguments, bad


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_arguments_run_or_are_refused(tmp_path, capsys, monkeypatch, first):
    """Twenty lists at a time: either there is a result, or there is a line that says why not, and nothing else."""
    monkeypatch.setattr(train, "LOG_TRIALS", 5)
    monkeypatch.setattr(train, "TEST_TRIALS", 5)
    monkeypatch.setattr(evaluation, "RSA_TRIALS", 5)
    outcomes = []
    for i in range(first, first + 20):
        arguments, bad = random_arguments(i)
        out = tmp_path / str(i)
        try:
            train.main([*arguments, "--out", str(out)])
            assert not bad and list(out.rglob("result.json")), arguments
        except SystemExit as stop:
            error = capsys.readouterr().err.splitlines()
            said = isinstance(stop.code, str) and "Try a lower --lr" in stop.code
            assert said or stop.code == 2 and "error:" in error[-1], arguments
            assert said or not out.exists(), arguments
        outcomes.append(out.exists())
    assert True in outcomes and False in outcomes


@pytest.mark.parametrize("named, call", [
    ("split", lambda: data.trials("distractors", "iid", 1)),
    ("subset", lambda: data.trials("productive", "iid", 1)),
    ("n must be an integer of at least 1", lambda: data.trials("productive", "depth1", 0)),
    ("n must be an integer", lambda: data.trials("productive", "depth1", 2.5)),
    ("n must be an integer", lambda: data.trials("productive", "depth1", "2")),
    ("seed must be an integer of at least 0", lambda: data.trials("productive", "depth1", 1, seed=-1)),
    ("seed must be an integer", lambda: data.trials("productive", "depth1", 1, seed=1.0)),
    ("device", lambda: data.trials("productive", "depth1", 1, device="tpu")),
    ("depth .* must be 1 or 3, not None", lambda: data.trials("productive", "train", 1)),
    ("depth .* must be 3, not 5", lambda: data.trials("productive", "depth3", 1, depth=5)),
    ("split", lambda: data.batches("distractors", 1, seed=0)),
    ("batch_size must be an integer of at least 1", lambda: data.batches("productive", 0, seed=0)),
    ("batch_size must be an integer", lambda: data.batches("productive", 1.0, seed=0)),
    ("seed must be an integer", lambda: data.batches("productive", 1, seed=None)),
    ("start must be an integer of at least 0", lambda: data.batches("productive", 1, seed=0, start=-1)),
    ("device", lambda: data.batches("productive", 1, seed=0, device="meta")),
    ("train_size must be an integer of at least 12", lambda: data.batches("productive", 6, seed=0, train_size=11)),
    ("train_size must be an integer", lambda: data.batches("productive", 1, seed=0, train_size="all"))])
def test_functions_name_the_wrong_argument(named, call):
    with pytest.raises(ValueError, match=named):
        call()


def twice(tokens):
    return tokens.repeat(2, 1, 1)


def first_is(operator):
    def change(tokens):
        tokens = tokens.clone()
        tokens[0, 0, 0] = operator
        return tokens

    return change


@pytest.mark.parametrize("named, change", [
    *((named, change) for named in ("instruction", "stimulus") for change in (
        lambda x: x[0], lambda x: x[:, :3], lambda x: x[:, :, 1:], twice, lambda x: x.float(),
        lambda x: x > 0, lambda x: x.to(torch.int8), lambda x: x.tolist(), lambda x: None,
        lambda x: x + 11, lambda x: x - 1, lambda x: x[:0])),
    ("stimulus", lambda x: x.to("meta")), ("instruction", lambda x: x.clamp(max=8)),
    ("instruction", lambda x: 0 * x), *(("instruction", first_is(op)) for op in (data.IF_ELSE, data.GET_LOCATION, data.GET_SHAPE))])
def test_the_oracle_names_what_is_no_trial(named, change):
    tokens = {"instruction": torch.tensor([TREE3]), "stimulus": grid(GRID3)}
    tokens[named] = change(tokens[named])
    for function in (data.solve, data.path):
        with pytest.raises(ValueError, match=f"^{'stimulus' if change is twice else named} must"):
            function(**tokens)


@pytest.mark.parametrize("distractors", [(5, 1), (1,), (0.5, 2), None])
def test_the_oracle_names_what_is_no_number_of_distractors(distractors):
    with pytest.raises(ValueError, match="^distractors must be"):
        data.solve(torch.tensor([TREE3]), grid(GRID3), distractors)


@pytest.mark.parametrize("program", ["data.py", "eval.py"])
def test_a_reader_who_has_seen_enough_ends_the_program(program):
    """What `| head` does: it closes the pipe that the program still writes to."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        done = subprocess.run([sys.executable, ROOT / program, "--help"], stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert done.returncode == -signal.SIGPIPE and not done.stderr
