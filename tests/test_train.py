"""Training from the command line: configurations, a run's files, interruptions, what goes wrong."""
import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal
from unittest.mock import DEFAULT, Mock

import pytest
import torch

import data
import eval as evaluation
import train
from eval import read
from models import available, module_of

TINY = "--split systematic1 --dim 16 --layers 1 --steps 6 --batch-size 8 --device cpu".split()
TESTS, SSTFMR = list(data.SPLITS["systematic1"])[1:], module_of("sstfmr").Model
HERE = Path(__file__).parent


def run(out, *flags):  # in this process -> the folders of all runs in `out`
    train.main([*TINY, *flags, "--out", str(out)])
    return sorted(path.parent for path in out.rglob("config.json"))


def elsewhere(code, *arguments):  # starts Python code in another process
    code = f"import conftest, sys, test_train as t; {code}"
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], cwd=HERE,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):  # the folder of a finished run, to look at
    return run(tmp_path_factory.mktemp("trained"))[0]


@pytest.fixture
def finished(trained, tmp_path):  # the same below tmp_path, to be spoiled
    return shutil.copytree(trained, tmp_path / trained.relative_to(trained.parents[3]))


def change(path, content):  # None removes it, a dict sets keys, a function changes its bytes
    if content is None:
        path.unlink()
    elif isinstance(content, dict):
        path.write_text(json.dumps(json.loads(path.read_text()) | content))
    else:
        path.write_bytes(content(path.read_bytes()) if callable(content) else content.encode())


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def bits(folder):  # what the same command gives again: weights, and the rest but for times
    state = torch.load(folder / "checkpoint.pt")["model"]
    log = [line.rsplit(",", 1)[0] for line in (folder / "log.csv").read_text().splitlines()]
    result = read(folder / "result.json") | {"seconds": 0, "log": None}
    return {name: value.tolist() for name, value in state.items()}, log, result


def refusal(capsys, program, *arguments):  # with exit code 2 -> lines on stderr but progress
    with pytest.raises(SystemExit, match="^2$"):
        program.main([str(argument) for argument in arguments])
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if re.match(r".*: error|Failed", line)]


def configurations(flags):
    return [*train.configurations(["--device", "cpu", *flags.split()])]


def test_several_values_make_several_runs_of_one_budget_that_a_model_may_change(monkeypatch):
    configs = configurations("--split all productive_release --model all --seed 0 1 0 --lr 0.1")
    folders = {(c["split"], c["model"], c["settings"], c["seed"]) for c in configs}
    splits = 1 + sum(not split.endswith("_release") for split in data.SPLITS)
    assert len(folders) == len(configs) == 2 * len(available()) * splits
    assert all(config == config | train.TRAINING | getattr(
        module_of(config["model"]), "TRAINING", {}) for config in configurations("--model all"))
    monkeypatch.setattr(module_of("rnn"), "TRAINING", {"lr": 0.25, "steps": 11})
    config, = configurations("--model looptfmr --view all --carry state --heads 2 --view own "
                             "--more 1")
    assert config["settings"] == "heads2-carrystate-more1"  # the last value, in one order
    config, = configurations("--model rnn --steps 12")  # a flag counts more
    assert (config["lr"], config["steps"], config["settings"]) == (0.25, 12, "steps12")
    assert "(default: 0.25)" in train.parser_of("rnn").format_help()


@pytest.mark.parametrize("own, says", [
    ({"optimizer": "sgd"}, "argument --optimizer: invalid choice: 'sgd'"),
    ({"optimiser": "muon"}, "unrecognized arguments: --optimiser=muon")])
def test_what_a_model_file_says_of_training_is_checked(monkeypatch, capsys, own, says):
    monkeypatch.setattr(module_of("rnn"), "TRAINING", own)
    line, = refusal(capsys, train, "--model", "rnn")
    assert line.startswith("models/rnn.py: TRAINING: error: ") and says in line


def test_a_flag_of_a_model_has_the_type_of_its_default(monkeypatch):
    def model(share=0.5, n=2, least=0, gate=True, kind="", side: Literal["a", "b"] = "a",
              width: "Literal[2, 4]" = 2):
        pass
    monkeypatch.setattr(module_of("rnn"), "Model", model)
    config, = configurations("--model rnn --share 1 --n 3 --no-gate --kind a=b --side b --width 4")
    assert repr(config["model_args"]) == repr(
        {"share": 1.0, "n": 3, "least": 0, "gate": False, "kind": "a=b", "side": "b",
         "width": 4})


def test_code_is_known_without_its_comments(tmp_path, monkeypatch):
    def code(text):
        for file in "data.py", "train.py", "models/mine.py":
            (tmp_path / file).parent.mkdir(exist_ok=True)
            (tmp_path / file).write_text(text)
        return evaluation.code_of("mine")
    monkeypatch.setattr(evaluation, "__file__", str(tmp_path / "eval.py"))
    plain = code("def f(x):\n    return x + 1")
    assert plain == code('"""A."""\n\ndef f(x):  # why\n    """B."""\n    return (x\n     + 1)')
    assert plain != code("def f(x):\n    return x + 2") and [*plain][2] == "models/mine.py"
    (tmp_path / "models/mine.py").unlink()  # then it alone has changed
    assert evaluation.changed({"model": "mine", "code": evaluation.code_of("mine") | {
        "models/mine.py": "gone"}}) == ["models/mine.py"]


CHANGES = ("--dim 32", "--layers 2", "--heads 2", "--read eos", "--optimizer adamw", "--lr 0.01",
           "--decay all", "--schedule constant", "--train-size 16", "--steps 3", "--batch-size 4",
           "--model looptfmr", "--split distractor", "--seed 3", "--workers 2")


@pytest.mark.parametrize("flags", CHANGES)
def test_a_flag_reaches_configuration_folder_and_weights(tmp_path, trained, flags):
    key, value = flags[2:].replace("-", "_").split()
    folder, = run(tmp_path, *flags.split())
    config, same = read(folder / "config.json"), key == "workers"
    assert same or str((config | config["model_args"])[key]) == value
    assert (bits(folder)[0] == bits(trained)[0]) == same
    unnamed = ("model", "split", "seed", "workers")  # the first three are folders
    assert (folder.parent.name == trained.parent.name) == (key in unnamed)


def test_a_run_leaves_files_that_tell_all(tmp_path, capsys):
    folder, = run(tmp_path, "--steps", "12")
    assert folder == tmp_path / "systematic1/sstfmr/dim16-layers1-steps12-batchsize8/seed0"
    assert {*contents(folder)} == {"config.json", "log.csv", "checkpoint.pt", "result.json", "lock"}
    config = read(folder / "config.json")
    assert config["code"] == evaluation.code_of("sstfmr") and config["threads"] > 0
    header, *log = [line.split(",") for line in (folder / "log.csv").read_text().splitlines()]
    assert header == ["step", "trials", "loss", "train", *TESTS, "seconds"]
    assert [row[:2] for row in log] == [[f"{step}", f"{8 * step}"] for step in (3, 6, 9, 10, 12)]
    assert all(3 < float(row[2]) < 12 for row in log)  # ln 138 = 4.9
    before, (out, err) = contents(folder), capsys.readouterr()
    train_accuracy = f"  train {float(log[3][3]):.1%}  iid "
    assert f"{folder}\n" in out and "step 10  trials 80  loss " in err and train_accuracy in err
    assert "Runs: 1, on cpu." in out and "systematic1, accuracy in %" in out
    run(tmp_path, "--steps", "12")  # is done
    assert contents(folder) == before and capsys.readouterr().out == out.replace(f"{folder}\n", "")


def test_rates_and_optimizers(trained):
    rates = [train.rate(*of, "cosine") for of in ((0, 4000), (train.WARMUP - 1, 4000), (2000, 4000),
                                                  (0, 1), (1, 4))]
    assert rates == pytest.approx([1 / train.WARMUP, 1, 0.5, 1, (1 + 0.5 ** 0.5) / 4], abs=0.03)
    assert train.rate(7, 9, "constant") == 1
    states, model = torch.load(trained / "checkpoint.pt")["optimizers"], SSTFMR(dim=16, layers=1)
    last = [state["param_groups"][0]["lr"] / train.rate(5, 6, "cosine") for state in states]
    assert last == pytest.approx([1e-3, 3e-3])
    names = {parameter: name for name, parameter in model.named_parameters()}
    adamw, muon = train.make_optimizers(model, "muon", 1, "matrices")
    decayed, vectors, *hidden = ([names[parameter] for parameter in group["params"]]
                                 for group in [*adamw.param_groups, *muon.param_groups])
    assert sorted(decayed + vectors + sum(hidden, [])) == sorted(names.values())
    matrices = [name for name, p in model.blocks.named_parameters("blocks") if p.dim() > 1]
    assert sorted(sum(hidden, [])) == sorted(matrices)
    assert {"readout.weight", "stimulus.cell.weight"} < {*decayed} and "readout.bias" in vectors
    every, _ = train.make_optimizers(model, "adamw", 1, "all")[0].param_groups
    assert len(every["params"]) == len(names)
    decays = [group["weight_decay"] for group in (*adamw.param_groups, every)]
    assert decays == [train.DECAY, 0, train.DECAY]


def test_muon_computes_what_that_of_torch_does():
    """... up to torch's rounding to bfloat16: five steps of matrices of three shapes."""
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(shape)) for shape in ((8, 8), (8, 8), (4, 16), (16, 4))]
    spare = torch.nn.Parameter(torch.ones(8, 8))  # without a gradient
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    optimizers = (train.Muon([*ours, spare], 0.1),
                  torch.optim.Muon(theirs, lr=0.1, weight_decay=train.DECAY))
    for _ in range(5):
        for a, b in zip(ours, theirs):
            a.grad = torch.randn(a.shape)
            b.grad = a.grad.clone()
        before = [p.detach().clone() for p in ours]
        for optimizer in optimizers:
            optimizer.step()
    for a, b, old in zip(ours, theirs, before):
        assert (a - b).norm() < 0.02 * (a - old).norm() * 5
    assert (spare == 1).all()


def test_gradients_and_dropout_are_for_training_alone(tmp_path):
    modes = set()
    with torch.nn.modules.module.register_module_forward_pre_hook(lambda module, _: modes.add(
            (module.training, torch.is_grad_enabled()))):
        run(tmp_path)
    assert modes == {(True, True), (False, False)}


def spoil(monkeypatch, method, change):  # what a student's model might do to tokens or outputs
    right = getattr(SSTFMR, method)

    def wrong(self, instruction, stimulus):
        output = change(self, right(self, instruction, stimulus))
        stimulus.zero_()
        return output
    monkeypatch.setattr(SSTFMR, method, wrong)


def test_a_model_cannot_spoil_a_test_set(tmp_path, monkeypatch):
    spoil(monkeypatch, "features", lambda model, x: x)
    run(tmp_path)
    iid = data.SPLITS["systematic1"]["iid"]
    assert evaluation.test_set("systematic1", "iid", iid, 50)[0].stimulus.any()


@pytest.mark.parametrize("method, change, says", [
    ("features", lambda model, x: x[:, None], r"features gives \(2, 1, 16\) for two trials, not"),
    ("forward", lambda model, x: x[:, :8], r"forward gives \(2, 8\) for two trials, not"),
    ("forward", lambda model, x: x / 0, "the outputs of the model are not finite"),
    ("forward", lambda model, x: x / 0 if model.training else x,
     "the loss is nan at step 3: try a lower --lr")])
def test_what_a_model_does_wrong_names_the_run(tmp_path, capsys, monkeypatch, method, change, says):
    spoil(monkeypatch, method, change)
    line, = refusal(capsys, train, *TINY, "--out", tmp_path)
    assert re.search(f"error: .*sstfmr.dim16-.*seed0: .*{says}", line)


@pytest.mark.parametrize("error, says", [
    (data.UsageError("refused"), "refused"),
    (MemoryError(), "too little memory: try a smaller --batch-size or --dim"),
    (torch.OutOfMemoryError(), "too little memory"), (RuntimeError("a bug"), "a bug"),
    (OSError("No space left on device"), "No space left on device")], ids=str)
def test_a_failing_run_does_not_stop_the_others(tmp_path, capsys, monkeypatch, error, says):
    fit = Mock(wraps=train.fit, side_effect=[error, DEFAULT, DEFAULT])
    monkeypatch.setattr(train, "fit", fit)
    flags = [*TINY, "--seed", "0", "1", "2", "--out", tmp_path]
    (line, last), failed = refusal(capsys, train, *flags), next(tmp_path.rglob("seed0"))
    assert re.search(f": error: .*seed0: .*{says}", line) and f"{failed}: " in line
    assert last == f"Failed: {failed}"
    assert len([*tmp_path.rglob("result.json")]) == 2


@pytest.mark.parametrize("file", ["data.py", "train.py", "models/sstfmr.py"])
def test_a_seed_joins_runs_of_the_same_code_alone(finished, capsys, monkeypatch, file):
    now = evaluation.code_of("sstfmr") | {file: "another"}
    for program in train, evaluation:
        monkeypatch.setattr(program, "code_of", lambda model: now)
    out, before = finished.parents[3], contents(finished)
    for seed in "0", "1":
        line, = refusal(capsys, train, *TINY, "--seed", seed, "--out", out)
        assert line.endswith(f": {file} changed since {finished}: choose another --out")
    assert contents(finished) == before and not (finished.parent / "seed1/config.json").exists()
    run(out / "other", "--seed", "1")
    capsys.readouterr()
    evaluation.main([str(out)])
    table = capsys.readouterr().out
    assert table.count("| sstfmr (dim16-") == 2 and table.count(f": {file} changed since.\n") == 1
    assert f"batchsize8) #2 differs from the first row of its name in {file}.\n" in table


def flip(content):  # a bit in the middle, which torch.load does not notice
    half = len(content) // 2
    return content[:half] + bytes([content[half] ^ 1]) + content[half + 1:]


def with_code(_):  # a checkpoint that would run code: more than tensors and numbers
    buffer = io.BytesIO()
    torch.save(print, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize("file, content, gone, says", [
    *(("config.json", {"lr": 0.5}, gone, "another run .* .lr is 0.5 there, 0.001 here.: choose an")
      for gone in ("lock", "result.json")),  # a finished run, and an unfinished one
    ("config.json", "{}", "lock", r"config.json is missing or damaged: KeyError\('split'\)"),
    ("config.json", None, "result.json", "config.json is missing or damaged: FileNotFound"),
    ("result.json", "{", "lock", "result.json is missing or damaged"),
    *(("checkpoint.pt", damage, "result.json", "checkpoint.pt is damaged$")
      for damage in ("", with_code, flip))])
def test_another_or_a_damaged_run_is_left_alone(finished, capsys, file, content, gone, says):
    change(finished / file, content)
    change(finished / gone, None)
    before = contents(finished) | {"lock": b""}
    line, = refusal(capsys, train, *TINY, "--out", finished.parents[3])
    assert re.search(says, line) and contents(finished) == before


def test_the_same_command_shares_the_runs(tmp_path, capsys, monkeypatch):
    pytest.importorskip("fcntl")
    flags, other = ["--seed", "0", "1"], []
    fit = train.fit

    def meanwhile(*arguments):  # another process finds the first run taken, and does the second
        if not other:
            other.append(elsewhere("t.run(t.Path(sys.argv[1]), *sys.argv[2:])", tmp_path, *flags))
            other.extend(other[0].communicate())
        fit(*arguments)
    monkeypatch.setattr(train, "fit", meanwhile)
    run(tmp_path, *flags)
    _, out, _ = other
    assert "seed0 is being trained by another process: left to it" in out
    assert "2 seeds" in capsys.readouterr().out and out.count("seed1\n") == 1
    monkeypatch.setattr(sys.modules["fcntl"], "lockf", Mock(side_effect=OSError("No locks")))
    run(tmp_path, "--seed", "2")  # as on some file systems


def dropping(model, *tokens):  # SSTfmr's forward, with dropout
    return torch.dropout(model.readout(model.features(*tokens)), 0.5, model.training)


def run_until(moment, out):  # with dropout, and be killed when about to put the n-th file in place
    SSTFMR.forward = dropping
    replace, left = os.replace, iter(range(moment)[::-1])
    os.replace = lambda *paths: replace(*paths) if next(left) else os.kill(os.getpid(), 9)
    run(Path(out), "--train-size", "24")


@pytest.mark.slow
def test_kills_change_no_bit(tmp_path):
    """Before the first config.json, log 3, checkpoint 3; then, gone on: before log 6 and result."""
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    for out, moment in (cut, 1), (cut, 2), (cut, 3), (cut, 5), (cut, 4), (cut, 9), (whole, 99):
        process = elsewhere("t.run_until(int(sys.argv[1]), sys.argv[2])", moment, out)
        killed = process.wait() in (9, -9)
        assert killed == (moment < 9) == (not list(tmp_path.rglob("result.json")))
    assert bits(next(cut.rglob("seed0"))) == bits(next(whole.rglob("seed0")))


def test_ctrl_c_or_a_full_disk_loses_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(SSTFMR, "forward", dropping)
    whole, = run(tmp_path / "whole")
    tmp_path = tmp_path / "cut"
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="^130$"):
        patch.setattr(train, "report", Mock(wraps=train.report,
                                            side_effect=[DEFAULT, KeyboardInterrupt]))
        run(tmp_path)
    assert "The same command goes on" in capsys.readouterr().out
    assert torch.load(next(tmp_path.rglob("checkpoint.pt")))["rows"][-1]["step"] == 3
    before, resource = {*contents(next(tmp_path.rglob("seed0")))}, pytest.importorskip("resource")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))  # is less than a checkpoint
    try:
        assert "File too large" in refusal(capsys, train, *TINY, "--out", tmp_path)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert {*contents(next(tmp_path.rglob("seed0")))} == before  # no half a file
    assert bits(*run(tmp_path)) == bits(whole)
