"""Training from the command line: configurations, the files of a run, sharing, interruptions, and what goes wrong."""
import contextlib
import csv
import errno
import inspect
import itertools
import json
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import typing
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.nn import functional as F

import data
import eval as evaluation
import train

TINY = ["--model", "sstfmr", "--split", "systematic1", "--dim", "16", "--layers", "1", "--steps", "6",
        "--batch-size", "8", "--eval-every", "2", "--device", "cpu"]
TESTS = list(data.SPLITS["systematic1"])[1:]
train.LOG_TRIALS = train.TEST_TRIALS = evaluation.RSA_TRIALS = 50  # per test set, in whatever tests run with these


def run(out, *flags):
    """Trains in this process; returns the folders of all runs in `out`."""
    train.main([*TINY, *flags, "--out", str(out)])
    return sorted(p.parent for p in out.rglob("config.json"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder of one finished run, for those who only look at it."""
    out = tmp_path_factory.mktemp("trained")
    run(out)
    return out


@pytest.fixture
def finished(trained, tmp_path):
    """The folder of a finished run below tmp_path, to be spoiled."""
    shutil.copytree(trained, tmp_path, dirs_exist_ok=True)
    return next(tmp_path.rglob("seed0"))


def refusal(capsys, program, arguments):
    """The one line with which a program refuses its arguments, after argparse's usage."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        program.main([str(argument) for argument in arguments])
    error = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and sum("error:" in line for line in error) == 1
    return error[-1]


def refused(capsys, out, *flags):
    return refusal(capsys, train, [*TINY, *flags, "--out", out])


def configurations(*flags):
    return list(train.configurations(train.parse(["--device", "cpu", *flags])[1]))


def weights(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)["model"]


def bits(folder):
    """What the same command gives again: everything but times."""
    log = [line.rsplit(",", 2)[0] for line in (folder / "log.csv").read_text().splitlines()]
    result = evaluation.read(folder / "result.json") | {"seconds": 0, "log": None}
    return {name: value.tolist() for name, value in weights(folder).items()}, log, result


# ---- configurations ---------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["sstfmr", "rnn"])
def test_one_budget_that_a_model_file_may_change(monkeypatch, name):
    module = evaluation.module_of(name)
    own, usual = getattr(module, "TRAINING", {}), {"steps": 4000, "batch_size": 128, "optimizer": "muon", "lr": 1e-3}
    config, = configurations("--model", name)
    assert {key: config[key] for key in usual} == usual | own and config["eval_every"] == 800
    assert config["train_size"] is None and config["settings"] == "default" and config["precision"] == "float32"
    monkeypatch.setattr(module, "TRAINING", {"lr": 0.25, "steps": 11}, raising=False)
    config, = configurations("--model", name, "--optimizer", "adamw")
    assert (config["lr"], config["steps"], config["eval_every"], config["optimizer"]) == (0.25, 11, 3, "adamw")
    assert configurations("--model", name, "--lr", "0.5")[0]["lr"] == 0.5  # a flag counts more


def test_paper_changes_what_the_paper_names(monkeypatch):
    module = evaluation.module_of("sstfmr")
    monkeypatch.setattr(module, "TRAINING", {"lr": 0.25}, raising=False)
    config, = configurations("--paper")
    assert config["model_args"] == config["model_args"] | module.PAPER and config["settings"] == "paper"
    assert [config[key] for key in ("optimizer", "lr", "steps", "batch_size")] == ["adamw", 3e-4, 4000, 128]
    config, = configurations("--paper", "--layers", "4")
    assert config["model_args"] == {**module.PAPER, "layers": 4} and config["settings"] == "paper-layers4"


def test_set_is_typed_by_the_default():
    def student(share=0.5, depth=2, gate=True, kind="plain", width=None, read: typing.Literal[1, "x"] = 1):
        pass

    parameters = inspect.signature(student).parameters
    for text, value in ("share=1", 1.0), ("depth=-3", -3), ("gate=False", False), ("kind=a=b", "a=b"), ("read=1", 1):
        assert repr(train.setting(text, parameters)) == repr((text.split("=")[0], value))
    for text, says in ("gate=0", "gate must be True or False, not '0'"), ("width=3", "width must be NoneType"):
        with pytest.raises(evaluation.UsageError, match=says):  # more of this: tests/test_input.py
            train.setting(text, parameters)


def test_several_values_make_several_runs():
    configs = configurations(*"--split all --model sstfmr rnn --dim 16 32 16 --lr 0.1 0.2 --seed 0 1".split())
    assert len(configs) == len({(c["split"], c["model"], c["settings"], c["seed"]) for c in configs})
    assert len({json.dumps(c | {"settings": ""}) for c in configs}) == len(configs) == 16 * len(data.SPLITS)
    assert [c["model"] for c in configurations("--model", "all")] == evaluation.available()
    pairs = ["read=eos", "tokens=operator"]
    assert configurations("--set", *pairs) == configurations("--set", *reversed(pairs))


@pytest.mark.parametrize("hardware, precision", [(True, "bfloat16"), (False, "float32")])
def test_auto_takes_the_gpu_and_bfloat16_of_its_hardware_alone(monkeypatch, hardware, precision):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation=True: hardware or including_emulation)
    config, = configurations("--device", "auto")
    assert (config["device"], config["precision"]) == ("cuda", precision)
    assert configurations()[0]["precision"] == "float32"


CHANGES = {  # flags and what they must change in config.json
    "--dim 32": ("model_args", {"dim": 32}), "--layers 2": ("model_args", {"layers": 2}),
    "--heads 2": ("model_args", {"heads": 2}), "--set read=eos": ("model_args", {"read": "eos"}),
    "--optimizer adamw": ("optimizer", "adamw"), "--lr 0.01": ("lr", 0.01), "--train-size 16": ("train_size", 16),
    "--seed 3": ("seed", 3), "--paper": ("optimizer", "adamw"), "--precision bfloat16": ("precision", "bfloat16"),
    "--steps 3": ("steps", 3), "--batch-size 4": ("batch_size", 4), "--model rnn": ("model", "rnn"),
    "--split distractor": ("split", "distractor"), "--eval-every 3": ("eval_every", 3)}


@pytest.mark.parametrize("flags", CHANGES)
def test_a_flag_reaches_configuration_folder_and_weights(tmp_path, trained, flags):
    line = [flag for flag in TINY if flag not in ("--layers", "1")] if flags == "--model rnn" else TINY
    train.main([*line, *flags.split(), "--out", str(tmp_path)])
    folder, plain = (next(out.rglob("seed*")) for out in (tmp_path, trained))
    key, value = CHANGES[flags]
    found = evaluation.read(folder / "config.json")[key]
    assert (found == found | value if isinstance(value, dict) else found == value)
    assert (bits(folder)[0] == bits(plain)[0]) == (key == "eval_every")
    assert re.fullmatch(r"[A-Za-z0-9.-]+", folder.parent.name)
    assert folder.parent.name != plain.parent.name or key in ("seed", "precision", "model", "split")


# ---- training ---------------------------------------------------------------------------------------------------

def test_a_run_leaves_files_that_tell_all(tmp_path, capsys):
    folder, = run(tmp_path)
    assert folder == tmp_path / "systematic1/sstfmr/dim16-layers1-steps6-batchsize8-evalevery2/seed0"
    assert {p.name for p in folder.iterdir()} == {"config.json", "log.csv", "checkpoint.pt", "result.json", "lock"}
    result, config = evaluation.read(folder / "result.json"), evaluation.read(folder / "config.json")
    assert list(result["accuracy"]) == TESTS and result["trials"] == 48
    assert result["parameters"] == sum(value.numel() for value in weights(folder).values())
    log = [line.split(",") for line in (folder / "log.csv").read_text().splitlines()]
    assert log[0] == ["step", "trials", "loss", "train", *TESTS, "trials/s", "seconds"]
    assert [line[:2] for line in log[1:]] == [["2", "16"], ["4", "32"], ["6", "48"]]
    assert all(4 < float(line[2]) < 6 for line in log[1:])  # ln 138 = 4.9
    assert config["torch"] == torch.__version__ and config["model_args"]["dim"] == 16 and config["threads"] > 0
    group, = torch.load(folder / "checkpoint.pt", weights_only=True)["optimizers"][0]["param_groups"]
    assert group["lr"] == pytest.approx(3e-3 * train.rate(5, 6))
    out = capsys.readouterr().out
    assert "Runs: 1, to do: 1, on cpu in float32." in out and "no binding" in out
    assert bits(folder) == bits(*run(tmp_path / "again"))
    run(tmp_path)
    assert "Runs: 1, to do: 0" in (out := capsys.readouterr().out) and "systematic1, accuracy in %" in out


def test_rates_and_optimizers():
    assert train.rate(0, 4000) == pytest.approx(0.01, rel=1e-4) and train.rate(2000, 4000) == pytest.approx(0.5)
    assert train.rate(99, 4000) > 0.99 and train.rate(3999, 4000) < 1e-6
    assert train.rate(0, 1) == 1 and train.rate(1, 4) == pytest.approx((1 + math.cos(math.pi / 4)) / 4)
    model = evaluation.module_of("sstfmr").Model(dim=16, layers=1)
    muon, adamw = (optimizer.param_groups[0] for optimizer in train.make_optimizers(model, "muon", 0.5))
    assert (muon["peak"], adamw["peak"]) == (1.5, 0.5)
    names = {id(p): name for name, p in model.named_parameters()}
    by_muon, by_adamw = ({names[id(p)] for p in group["params"]} for group in (muon, adamw))
    assert by_muon | by_adamw == set(names.values()) and not by_muon & by_adamw
    assert "blocks.0.attention.key.weight" in by_muon and {"readout.weight", "stimulus.cells"} < by_adamw
    group, = (g for optimizer in train.make_optimizers(model, "adamw", 0.5) for g in optimizer.param_groups)
    assert group["peak"] == 0.5 and len(group["params"]) == len(names)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_gradients_and_dropout_are_for_training_alone(tmp_path, monkeypatch, precision):
    modes, model = set(), evaluation.module_of("sstfmr").Model
    features = model.features

    def seen(self, *tokens):
        modes.add((self.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return features(self, *tokens)

    monkeypatch.setattr(model, "features", seen)
    run(tmp_path, "--precision", precision)
    low = precision == "bfloat16"
    assert modes == {(True, True, low), (False, False, low), (False, False, False)}  # alignment: always in float32
    modes.clear()
    evaluation.main([str(tmp_path), "--fresh", "--n", "10", "--show", "1", "--attention", "--device", "cpu"])
    assert modes == {(False, False, low), (False, False, False)}


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, capsys):
    line = refused(capsys, tmp_path, "--lr", "1e30", "--optimizer", "adamw")
    assert re.search(r"the loss is (nan|inf) at step \d: try a lower --lr", line)


@pytest.mark.parametrize("error", [ValueError("too many values to unpack"), RuntimeError("a single memory location")])
def test_a_bug_keeps_its_traceback(tmp_path, finished, monkeypatch, error):
    """Whoever changes a model, as every exercise does, must see where it fails."""
    monkeypatch.setattr(evaluation.module_of("sstfmr").Model, "features", Mock(side_effect=error))
    with pytest.raises(type(error), match=str(error)):
        run(tmp_path, "--seed", "1")
    with pytest.raises(type(error), match=str(error)):
        evaluation.main([str(tmp_path), "--fresh", "--n", "10", "--device", "cpu"])


# ---- other code, other test sets --------------------------------------------------------------------------------

def test_the_code_of_a_run_is_what_decides_its_numbers(monkeypatch):
    plain = '\n\ndef f(x):\n    """One."""\n    if x:\n        x = x[:2]\n        x += 1\n    return x - 3\n'
    same = {"One": "Two,\n    at length", "x = x[:2]": "x = (x[:2])  # two", "\n    if x": "\n\n    # why\n    if x",
            "- 3\n": "- 3\nSPLITS = {'mine': {}}\n"}
    other = {"x[:2]": "x[2:]", "- 3": "- 4", "        x += 1": "    else:\n        x += 1", "x - 3": "None"}
    before, code = evaluation.meaning(plain), evaluation.code_of("sstfmr", "systematic1")
    assert all(evaluation.meaning(plain.replace(*change)) == before for change in same.items())
    assert len({before, *(evaluation.meaning(plain.replace(*change)) for change in other.items())}) == 1 + len(other)
    monkeypatch.setitem(data.SPLITS["systematic1"], "more", data.Subset())
    assert evaluation.code_of("sstfmr", "systematic1") == code
    monkeypatch.setitem(data.SPLITS["systematic1"], "train", data.Subset())
    assert evaluation.code_of("sstfmr", "systematic1") != code


def test_results_of_other_code_or_settings_are_refused(finished, tmp_path, monkeypatch, capsys):
    """eval.py takes a copy of the files that decide numbers for its own."""
    monkeypatch.setattr(evaluation, "__file__", str(tmp_path / "eval.py"))
    shutil.copytree(Path(data.__file__).parent / "models", tmp_path / "models")
    shutil.copy(data.__file__, tmp_path)
    files, config = [tmp_path / "models/sstfmr.py", tmp_path / "data.py"], finished / "config.json"
    for file in files:
        file.write_text(file.read_text() + "# only a comment\n")
    (tmp_path / "models/rnn.py").write_text("")
    run(tmp_path)
    config.write_text(config.read_text().replace('"lr": 0.001', '"lr": 0.5'))
    before = {path: path.read_bytes() for path in finished.iterdir()}
    assert "holds another run (lr is 0.5 there, 0.001 here): remove it or choose" in refused(capsys, tmp_path)
    for file in files:
        text = file.read_text()
        file.write_text(text + "NEW = 1\n")
        assert "since the model's file or data.py has changed" in refused(capsys, tmp_path)
        file.write_text(text)
    assert {path: path.read_bytes() for path in finished.iterdir()} == before


def test_other_test_sets_are_evaluated_without_training(finished, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(data.SPLITS["systematic1"], "more", data.Subset(distractors=(7, 7)))
    before = (finished / "checkpoint.pt").stat().st_mtime_ns
    evaluation.main([str(tmp_path)])
    assert f"or has other test sets now (--fresh evaluates it): {finished}" in capsys.readouterr().err
    run(tmp_path)
    assert list(evaluation.read(finished / "result.json")["accuracy"]) == [*TESTS, "more"]
    assert (finished / "checkpoint.pt").stat().st_mtime_ns == before and "to do: 1" in capsys.readouterr().out


def test_a_new_test_set_of_an_unfinished_run_gets_a_column(finished, tmp_path, monkeypatch):
    state = torch.load(finished / "checkpoint.pt", weights_only=True)
    torch.save(state | {"step": 4, "rows": state["rows"][:2]}, finished / "checkpoint.pt")
    (finished / "result.json").unlink()
    monkeypatch.setitem(data.SPLITS["systematic1"], "more", data.Subset(distractors=(7, 7)))
    run(tmp_path)
    rows = list(csv.DictReader((finished / "log.csv").open()))
    assert [bool(row["more"]) for row in rows] == [False, False, True] and all(row["seconds"] for row in rows)


# ---- sharing and interruptions ----------------------------------------------------------------------------------

def test_the_same_command_started_again_shares_the_runs(tmp_path, capsys, monkeypatch):
    """It is started again from within its first run: a lock holds against whoever opens the file a second time."""
    flags, fit, trained = ("--steps", "1", "--seed", "0", "1"), train.fit, []

    def note(config, folder):
        trained.append(config["seed"])
        fit(config, folder)

    def start_again(config, folder):
        monkeypatch.setattr(train, "fit", note)
        run(tmp_path, *flags)
        note(config, folder)

    monkeypatch.setattr(train, "fit", start_again)
    first, _ = run(tmp_path, *flags)
    assert trained == [1, 0] and f"{first} is being trained by another process: left to it" in capsys.readouterr().out


def test_a_file_system_without_locks_is_no_other_process(tmp_path, monkeypatch):
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    folder, = run(tmp_path)
    assert (folder / "result.json").exists()


FORWARD = evaluation.module_of("sstfmr").Model.forward


def with_dropout(self, *tokens):
    """As a student would: random numbers in every training step."""
    return F.dropout(FORWARD(self, *tokens), 0.5, self.training)


def child(arguments, moment):
    """Trains, and kills itself when it is about to put its n-th file in place."""
    sys.stdout = sys.stderr = open(os.devnull, "w")
    train.tqdm.set_lock(threading.RLock())  # its own is shared by processes, and a killed one would leave it behind
    evaluation.module_of("sstfmr").Model.forward = with_dropout
    replace, calls = os.replace, itertools.count(1)

    def replaced(*paths):
        if next(calls) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*paths)

    os.replace = replaced
    train.main(arguments)


@pytest.mark.parametrize("flags, moments", [
    ((), (1, 2, 2, 3, 3, 3)),  # at config.json, log.csv, the first checkpoint, the second log, ..., result.json
    (("--train-size", "24"), (6,))], ids=["fresh", "fixed"])
def test_kills_change_no_bit(tmp_path, monkeypatch, flags, moments):
    context = multiprocessing.get_context("forkserver")  # torch is imported once for all
    context.set_forkserver_preload(["torch._dynamo", "pytest"])
    for moment in moments:
        process = context.Process(target=child, args=([*TINY, *flags, "--out", str(tmp_path / "cut")], moment), daemon=True)
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL and not list(tmp_path.rglob("result.json"))
    assert torch.load(next(tmp_path.rglob("checkpoint.pt")), weights_only=True)["step"] > 0
    monkeypatch.setattr(evaluation.module_of("sstfmr").Model, "forward", with_dropout)
    assert bits(*run(tmp_path / "cut", *flags)) == bits(*run(tmp_path / "whole", *flags))


@pytest.mark.parametrize("program, function, says", [(train, "log", "The same command goes on"), (evaluation, "find", "")])
def test_ctrl_c_ends_with_130(tmp_path, capsys, monkeypatch, program, function, says):
    monkeypatch.setattr(program, function, Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit) as stop:
        program.main([*TINY, "--out", str(tmp_path)] if program is train else [])
    assert stop.value.code == 130 and says in capsys.readouterr().out


# ---- what goes wrong with files ---------------------------------------------------------------------------------

class Attack:
    """A pickle that runs a command when it is loaded."""

    def __reduce__(self):
        return os.mkdir, ("hacked",)


@pytest.mark.parametrize("damage", [
    lambda path: os.truncate(path, 1000), lambda path: torch.save({"model": Attack()}, path),
    lambda path: torch.save(torch.load(path, weights_only=True) | {"model": {}}, path)])
def test_a_damaged_or_foreign_checkpoint_is_refused_and_left_alone(finished, tmp_path, capsys, monkeypatch, damage):
    monkeypatch.chdir(tmp_path)
    (finished / "result.json").unlink()
    damage(finished / "checkpoint.pt")
    before = (finished / "checkpoint.pt").read_bytes()
    line = refused(capsys, tmp_path)
    assert "checkpoint.pt is damaged, or another model's" in line and f"remove {finished} to begin anew" in line
    assert "checkpoint.pt is damaged" in refusal(capsys, evaluation, [tmp_path, "--fresh"])
    assert (finished / "checkpoint.pt").read_bytes() == before and not Path("hacked").exists()


@contextlib.contextmanager
def limited(kind, value):
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@pytest.mark.parametrize("limit, left", [(100, set()), (20_000, {"config.json", "log.csv", "lock"})])
def test_a_full_disk_is_said_and_leaves_no_half_file(tmp_path, trained, capsys, limit, left):
    """A limit on the size of files stands for the disk: it refuses config.json, or the first checkpoint."""
    with limited(resource.RLIMIT_FSIZE, limit):
        assert "File too large" in refused(capsys, tmp_path)
    assert {p.name for p in tmp_path.rglob("*") if p.is_file()} == left
    assert bits(*run(tmp_path)) == bits(next(trained.rglob("seed0")))  # with room again, the same command goes on


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_a_run_names_its_commit_and_whether_files_have_changed_since(tmp_path, monkeypatch):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init"], ["add", "train.py"], ["commit", "--message", "first"]):
        (tmp_path / "train.py").write_text("a")
        subprocess.run([*git, *command], check=True, capture_output=True)
    monkeypatch.setattr(train, "__file__", str(tmp_path / "train.py"))
    clean = train.environment.__wrapped__()["commit"]
    (tmp_path / "train.py").write_text("b")
    assert re.fullmatch("[0-9a-f]{7,}", clean) and train.environment.__wrapped__()["commit"] == f"{clean}-dirty"


def test_too_little_memory_is_said(tmp_path, capsys):
    """100 MiB above what the program has."""
    kib = int(Path("/proc/self/status").read_text().split("VmSize:")[1].split()[0])
    with limited(resource.RLIMIT_AS, (kib + 100_000) * 1024):
        line = refused(capsys, tmp_path, "--dim", "8192")
    assert "there is not enough memory: try a smaller --batch-size or --dim" in line
