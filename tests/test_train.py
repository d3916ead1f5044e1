"""Training from the command line: configurations, a run's files, interruptions, what goes wrong."""
import itertools
import json
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest
import torch

import data
import eval as evaluation
import models
import train
from eval import read
from models import ALL, module_of

TINY = "--dim 16 --layers 1 --steps 6 --batch-size 8 --test-trials 50 --device cpu".split()
TESTS = list(data.SPLITS["systematic1"])[1:]
HERE = Path(__file__).parent
SSTFMR = (HERE.parent / "models" / "sstfmr.py").read_text()
FORWARD = "return self.readout(self.features(instruction, stimulus))"
DROPOUT = SSTFMR.replace(FORWARD, "x = self.features(instruction, stimulus)\n"
                         "        return torch.dropout(self.readout(x), 0.5, self.training)")


def tiny(*flags):  # a small run's, of systematic1 unless they say otherwise
    split = [] if "--split" in flags else ["--split", "systematic1"]
    return [*TINY, *split, *map(str, flags)]


def run(out, *flags):  # in this process -> the folders of all runs in `out`
    train.main(tiny(*flags, "--out", out))
    return sorted(path.parent for path in out.rglob("config.json"))


def elsewhere(code, *arguments):  # starts Python code in another process
    code = f"import conftest, sys, test_train as t; {code}"
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)], cwd=HERE,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True)


@pytest.fixture(scope="session")
def trained(tmp_path_factory):  # the folder of a finished run, to look at
    return run(tmp_path_factory.mktemp("trained"))[0]


@pytest.fixture
def finished(trained, tmp_path):  # the same below tmp_path, to be spoiled
    return shutil.copytree(trained, tmp_path / trained.relative_to(trained.parents[3]))


def change(path, edit):  # None removes it, a function changes its bytes
    if edit is None:
        path.unlink()
    else:
        path.write_bytes(edit(path.read_bytes()))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def bits(folder):  # what the same command gives again: weights, and the rest but for times
    state = torch.load(folder / "checkpoint.pt")["model"]
    log = [line.rsplit(",", 1)[0] for line in (folder / "log.csv").read_text().splitlines()]
    result = read(folder / "result.json") | {"log": None}
    return {name: value.tolist() for name, value in state.items()}, log, result


def refusal(capsys, program, *arguments):  # with exit code 2 -> lines on stderr but progress
    with pytest.raises(SystemExit, match="^2$"):
        program.main([str(argument) for argument in arguments])
    lines = capsys.readouterr().err.splitlines()
    return [line for line in lines if not line.startswith(("step ", "not shown: "))]


def configurations(flags):
    argv = ["--device", "cpu", *flags.split()]
    chosen, others = train.choosing().parse_known_args(argv)
    return [config for _, _, config in train.configurations(chosen, others)]


# ---- what is run --------------------------------------------------------------------------------
def test_several_values_make_several_runs_of_one_budget_that_a_model_may_change(student):
    configs = configurations("--split all productive_release --model all --seed 0 1 0 --lr 0.1")
    folders = {(c["split"], c["model"], c["settings"], c["seed"]) for c in configs}
    splits = 1 + sum(not split.endswith("_release") for split in data.SPLITS)
    assert len(folders) == len(configs) == 2 * len(ALL) * splits
    assert [config["model"] for config in configurations("--model all")] == ALL
    authors, = configurations("--model authors")
    assert (authors["optimizer"], authors["lr"], authors["schedule"]) == ("adamw", 1e-4, "constant")
    assert all(config == config | train.TRAINING | getattr(
        module_of(config["model"]), "TRAINING", {}) for config in configurations("--model all"))
    student("mine", SSTFMR + "TRAINING = {'lr': 0.25, 'steps': 11, 'train_size': None}")
    config, = configurations("--model mine --steps 12 --read root --heads 2 --read root")
    assert config["settings"] == "steps12-heads2-readroot"  # in one order
    assert (config["lr"], config["steps"], config["train_size"]) == (0.25, 12, None)
    assert "(default: 0.25)" in train.parser_of("mine").format_help()


@pytest.mark.parametrize("flag", ["--model sstfmr rnn", "--split distractor productive",
                                  "--seed 0 1"])
def test_a_flag_that_is_given_twice_adds_to_the_first(flag):
    name, first, second = flag.split()
    twice = configurations(f"{name} {first} {name} {second}")
    assert len(twice) == 2 and twice == configurations(f"{name} {first} {second}")


@pytest.mark.parametrize("training, says", [
    ("{'optimizer': 'sgd'}", "argument --optimizer: invalid choice: 'sgd'"),
    ("{'optimizer': None}", "argument --optimizer: invalid choice: 'None'"),
    ("{'schedule': 'linear'}", "argument --schedule: invalid choice: 'linear'"),
    ("{'lr': 'high'}", "argument --lr: must be a number from"),
    ("{'steps': 0}", "argument --steps: must be an integer from 1"),
    ("{'optimiser': 'adamw'}", "unrecognized arguments: --optimiser=adamw"),
    ("{'seed': 1}", "unrecognized arguments: --seed=1")])
def test_a_mistake_in_the_training_of_a_model_ends_like_one_in_a_flag(
        tmp_path, student, capsys, training, says):
    student("mine", SSTFMR + f"TRAINING = {training}")
    line, = refusal(capsys, train, *tiny("--model", "mine", "--out", tmp_path))
    assert line.startswith(f"train.py: TRAINING of mine: error: {says}")
    assert not list(tmp_path.glob("*/*/*/seed0"))


@pytest.mark.parametrize("flag, values", [
    ("kind", "* / ? é"), ("kind", "A a"), ("share", "1e30 130.0")])
def test_settings_that_differ_have_folders_that_do(student, flag, values):
    """A name of a file holds less than a string."""
    student("mine", SSTFMR.replace("dim=128,", 'dim=128, kind="", share=1.0,'))
    names = [configurations(f"--model mine --{flag} {value}")[0]["settings"]
             for value in values.split()]
    assert len({*names}) == len(names) and re.fullmatch("[A-Za-z0-9.%-]+", "".join(names))


def test_settings_of_one_folder_are_told_apart(tmp_path, student):
    """On a Mac, names of files have no large letters."""
    student("mine", SSTFMR.replace("dim=128,", 'dim=128, kind="",'))
    first, second = (configurations(f"--model mine --kind {kind}")[0] for kind in "Aa")
    train.prepare(second, tmp_path / "seed0", False)
    train.prepare(first, tmp_path / "seed0", False)  # nothing is learned so far: it starts anew
    (tmp_path / "seed0/checkpoint.pt").touch()
    with pytest.raises(data.UsageError, match="was made otherwise .settings kindA; model_"):
        train.prepare(second, tmp_path / "seed0", False)


def test_a_flag_of_a_model_has_the_type_of_its_default(student):
    student("mine", '''
from typing import Literal
class Model:
    def __init__(self, share=0.5, n=2, least=0, gate=True, sure: Literal[True, False] = True,
                 kind="", side: Literal["a", "b"] = "a", width: "Literal[0, 2, 4]" = 2,
                 size: int | None = 5):
        pass
''')
    config, = configurations("--model mine --share 1 --n 3 --least 0 --no-gate --no-sure "
                             "--kind a=b --side b --width 0 --size 6")
    assert repr(config["model_args"]) == repr(
        {"share": 1.0, "n": 3, "least": 0, "gate": False, "sure": False, "kind": "a=b", "side": "b",
         "width": 0, "size": 6})


@pytest.mark.parametrize("name", ["steps", "seed", "lr", "device", "test_trials", "help"])
def test_an_argument_of_a_model_has_no_name_of_a_flag(student, capsys, name):
    student("mine", f"\nclass Model:\n    def __init__(self, {name}=1): pass")
    line, = refusal(capsys, train, "--model", "mine")
    assert line == (f"train.py: error: mine: Model cannot have an argument {name}: train.py has a "
                    "flag of this name")


@pytest.mark.parametrize("default", ["", "=None", "=(32, 32)", "=int"])
def test_a_flag_needs_a_default_that_it_can_carry(student, capsys, default):
    student("mine", f"\nclass Model:\n    def __init__(self, sizes{default}): pass")
    line, = refusal(capsys, train, "--model", "mine")
    assert line.startswith("train.py: error: mine: Model needs a default for sizes that a flag")


def test_models_are_found_and_a_file_is_read_anew(student):
    """... as in a notebook that has run an older version of it."""
    before = [*models.available()]
    for name, text in ("._mine", SSTFMR), ("a-b", SSTFMR), ("helper", "x = 1\n"):
        student(name, text)  # what systems and editors leave
    assert [*models.available()] == before
    student("mine", "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            "@dataclass\nclass Size:\n    n: int = 3\n\nclass Model:\n    width = Size().n")
    assert module_of("mine").Model.width == 3  # dataclass looks for the module by its name
    for width in 7, 11:
        student("mine", f"\nclass Model:\n    width = {width}  # {'-' * width}")
        assert module_of("mine").Model.width == width
        assert [*models.available()] == [*before, "mine"]


CHANGES = ("--dim 32", "--layers 2", "--heads 2", "--read root", "--optimizer adamw", "--lr 0.01",
           "--schedule constant", "--train-size 16", "--steps 3", "--batch-size 4",
           "--model looptfmr", "--split distractor", "--seed 3", "--workers 2", "--test-trials 60")


@pytest.mark.parametrize("flags", CHANGES)
def test_a_flag_reaches_configuration_folder_and_weights(tmp_path, trained, flags):
    key, value = flags[2:].replace("-", "_").split()
    folder, = run(tmp_path, *flags.split())
    config, same = read(folder / "config.json"), key in ("workers", "test_trials")
    assert key == "workers" or str((config | config["model_args"])[key]) == value
    assert (bits(folder)[0] == bits(trained)[0]) == same
    unnamed = ("model", "split", "seed", "workers", "test_trials")  # the first three are folders
    assert (folder.parent.name == trained.parent.name) == (key in unnamed)


def test_a_seed_is_of_weights_and_of_trials(tmp_path, monkeypatch):
    learn, weights, grids = train.learn, [], []

    def note(model, optimizers, batch, *others):
        weights.append(model.readout.weight.detach().clone())
        grids.append(batch.stimulus)
        return learn(model, optimizers, batch, *others)
    monkeypatch.setattr(train, "learn", note)
    run(tmp_path, "--seed", "0", "3", "--steps", "1")
    assert not torch.equal(*weights) and not torch.equal(*grids)


def test_workers_draw_in_the_background(tmp_path, monkeypatch):
    learn, children = train.learn, []
    monkeypatch.setattr(train, "learn", lambda *of: (
        children.append(len(multiprocessing.active_children())), learn(*of))[1])
    run(tmp_path, "--workers", "2")
    assert children[0] == 2


def test_a_step_reports_accuracy_and_clips_gradients():
    model, norms = module_of("mlp").Model(dim=16), []
    model.readout.weight.data.mul_(1_000)
    spy = Mock(param_groups=[{"peak": 1}], step=lambda: norms.append(
        sum(p.grad.norm() ** 2 for p in model.parameters()).item() ** 0.5))
    batch = data.trials("distractor", "iid", 8)
    said = model(*batch[:2]).argmax(1)
    answer = said.where(torch.arange(8) < 6, (said + 1) % data.CLASSES)  # 6 of 8 are right
    assert train.learn(model, [spy], batch._replace(answer=answer), 1, "cpu")[1] == 6 / 8
    assert norms == pytest.approx([1], abs=1e-3)  # 1 at most


# ---- training -----------------------------------------------------------------------------------
def test_a_run_leaves_files_that_tell_all(tmp_path, capsys):
    folder, = run(tmp_path, "--steps", "12")
    assert folder == tmp_path / "systematic1/sstfmr/steps12-batchsize8-dim16-layers1/seed0"
    code = {path.name: path.read_bytes() for path in map(Path, (
        data.__file__, train.__file__, module_of("sstfmr").__file__))}
    files = {"config.json", "log.csv", "checkpoint.pt", "result.json", *code}
    assert {*contents(folder)} == files and contents(folder) == contents(folder) | code
    config, result = read(folder / "config.json"), read(folder / "result.json")
    assert config["threads"] > 0 and result["config"] == config
    header, *log = [line.split(",") for line in (folder / "log.csv").read_text().splitlines()]
    assert header == ["step", "trials", "loss", "train", *TESTS, "seconds"]
    assert [row[:2] for row in log] == [[f"{step}", f"{8 * step}"] for step in (3, 6, 9, 10, 12)]
    assert all(3 < float(row[2]) < 12 for row in log)  # ln 138 = 4.9
    assert [float(x) for x in log[-1][4:-1]] == [  # in percent, here of the same 50 trials
        round(100 * share, 1) for share in result["accuracy"].values()]
    train_shares = [float(row[3]) / 100 * 8 for row in log]  # of 3, 3, 3, 1 and 2 batches of 8
    assert all(abs(share * n - round(share * n)) < 0.1
               for share, n in zip(train_shares, (3, 3, 3, 1, 2)))
    assert result["log"][-1]["step"] == 12 and [*result["log"][0]] == header
    before, (out, err) = contents(folder), capsys.readouterr()
    assert f"{folder}, from step 0\n" in out and f"step 10  trials 80  loss {log[3][2]}" in err
    assert "Runs: 1, on cpu, with a line every 3 steps, later 500, accuracy in %." in out
    assert "systematic1, accuracy in %" in out
    run(tmp_path, "--steps", "12")  # is done
    again = capsys.readouterr().out
    assert contents(folder) == before
    assert again == out.replace(f"{folder}, from step 0\n", f"{folder} is finished\n")


def test_reports_are_often_at_first(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "EARLY", 100)
    monkeypatch.setattr(train, "learn", lambda *of: torch.zeros(2))
    monkeypatch.setattr(data.Batches, "__getitem__", lambda *of: 0)
    folder, = run(tmp_path, "--steps", "2100")
    steps = [row["step"] for row in read(folder / "result.json")["log"]]
    assert steps == [10, *range(100, 1001, 100), 1500, 2000, 2100]


def test_another_number_of_test_trials_tests_again_without_training(finished, monkeypatch, capsys):
    before = read(finished / "result.json")
    (finished / "result.json").write_text(json.dumps(before | {"why": {}}))
    monkeypatch.setattr(train, "learn", None)
    run(finished.parents[3], "--test-trials", "70")
    after = read(finished / "result.json")
    assert after["config"] == before["config"] | {"test_trials": 70}
    assert after["log"] == before["log"] and after["baselines"] != before["baselines"]
    assert "why" not in after
    run(finished.parents[3], "--test-trials", "60")  # fewer replace nothing
    assert read(finished / "result.json") == after
    (finished / "checkpoint.pt").unlink()
    more = tiny("--out", finished.parents[3], "--test-trials", "80")
    assert "has no weights (checkpoint.pt) to test with more" in refusal(capsys, train, *more)[0]
    assert read(finished / "result.json") == after


def test_rates_and_optimizers(trained):
    rates = [train.rate_at(step, 4000, "cooldown") for step in (0, 3200, 3600, 3999, 4000)]
    assert rates == pytest.approx([1, 1, 0.5, 1 / 800, 0])
    assert train.rate_at(7, 9, "constant") == 1
    states, model = torch.load(trained / "checkpoint.pt")["optimizers"], evaluation.load(trained)[0]
    last = [state["param_groups"][0]["lr"] / train.rate_at(5, 6, "cooldown") for state in states]
    assert last == pytest.approx([1e-3, 3e-3])
    names = {parameter: name for name, parameter in model.named_parameters()}
    adamw, muon = train.make_optimizers(model, "muon", 1)
    decayed, vectors, *hidden = ([names[parameter] for parameter in group["params"]]
                                 for group in [*adamw.param_groups, *muon.param_groups])
    assert sorted(decayed + vectors + sum(hidden, [])) == sorted(names.values())
    matrices = [name for name, p in model.blocks.named_parameters("blocks") if p.dim() > 1]
    assert sorted(sum(hidden, [])) == sorted(matrices)
    assert {"readout.weight", "stimulus.cell.weight"} < {*decayed} and "readout.bias" in vectors
    assert [group["weight_decay"] for group in adamw.param_groups] == [train.DECAY, 0]
    alone, = train.make_optimizers(model, "adamw", 1)
    assert sum(len(group["params"]) for group in alone.param_groups) == len(names)


def test_a_shared_parameter_is_moved_once():
    """Two Linears with one matrix, which is Muon's."""
    model = module_of("sstfmr").Model(dim=16)
    first, second = model.blocks[0].attention, model.blocks[1].attention
    first.query.weight = second.query.weight
    adamw, muon = train.make_optimizers(model, "muon", 1)
    held = [p for optimizer in (adamw, muon) for group in optimizer.param_groups
            for p in group["params"]]
    assert len(held) == len({*held}) == len([*model.parameters()])
    assert first.query.weight in {*muon.param_groups[0]["params"]}


def test_muon_moves_no_part_of_a_readout():
    model = module_of("sstfmr").Model(dim=16)
    model.readout = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 138))
    _, muon = train.make_optimizers(model, "muon", 1)
    assert {*model.readout.parameters()}.isdisjoint(muon.param_groups[0]["params"])


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
        assert (a - b).norm() < 0.1 * (a - old).norm()  # 2 % per step
    assert (spare == 1).all()


def test_orthogonal_is_five_iterations_of_newton_schulz():
    for shape in (6, 6), (4, 16), (16, 4):
        x = torch.randn(shape).double()
        plain = x / x.norm()
        for _ in range(5):
            gram = plain @ plain.T
            plain = 3.4445 * plain - 4.775 * gram @ plain + 2.0315 * gram @ gram @ plain
        stack = torch.stack([x, torch.randn(shape)])  # each by itself
        torch.testing.assert_close(train.orthogonal(stack)[0], plain)


def test_gradients_and_dropout_are_for_training_alone(tmp_path):
    modes = set()
    with torch.nn.modules.module.register_module_forward_pre_hook(lambda module, _: modes.add(
            (module.training, torch.is_grad_enabled()))):
        run(tmp_path)
    assert modes == {(True, True), (False, False)}


# ---- what goes wrong ----------------------------------------------------------------------------
def test_a_model_cannot_spoil_a_test_set(tmp_path, student):
    student("mine", SSTFMR.replace(FORWARD, "x = self.features(instruction, stimulus)\n"
                                   "        stimulus.zero_()\n        return self.readout(x)"))
    run(tmp_path, "--model", "mine")
    subsets = data.find("systematic1", "iid"), data.find("systematic1", "train")
    assert evaluation.test_set("systematic1", "iid", 50, *subsets)[0].stimulus.any()


def test_logits_that_are_not_finite_end_a_run(tmp_path, capsys, student):
    student("mine", SSTFMR.replace(FORWARD, f"{FORWARD} / (instruction.shape[1] < 22)"))
    line, = refusal(capsys, train, *tiny("--model", "mine", "--split", "productive", "--out",
                                         tmp_path))
    assert line.endswith("seed0: on depth7 of productive, logits of the model are not finite")


def test_a_run_keeps_the_code_as_it_was_imported(tmp_path, monkeypatch):
    """... even if the files have changed since."""
    for module in data, train:
        monkeypatch.setattr(module, "SOURCE", f"# {module.__name__}, before an edit".encode())
    folder, = run(tmp_path)
    kept = [(folder / name).read_text() for name in ("data.py", "train.py")]
    assert kept == ["# data, before an edit", "# train, before an edit"]


def test_what_happens_is_printed_at_once(tmp_path, monkeypatch):
    """... also into a file, where Python would wait."""
    out = open(tmp_path / "out.txt", "w")
    monkeypatch.setattr(sys, "stdout", out)
    seen, learn = [], train.learn
    monkeypatch.setattr(train, "learn", lambda *of: (
        seen.append((tmp_path / "out.txt").read_text()), learn(*of))[1])
    run(tmp_path)
    assert "Runs: 1, on cpu, with a line every 3 steps, later 500, accuracy in %." in seen[0]
    assert "seed0, from step 0" in seen[0]


def test_a_loss_that_is_not_finite_ends_a_run(tmp_path, capsys, student):
    student("mine", SSTFMR.replace(FORWARD, f"{FORWARD} / (1 - self.training)"))
    line, = refusal(capsys, train, *tiny("--model", "mine", "--out", tmp_path))
    assert re.search("error: .*mine.*dim16.*seed0: the loss is nan at step 3: try a lower", line)


def test_a_failing_run_does_not_stop_the_others(tmp_path, capsys, monkeypatch):
    """A mistake in a model shows its traceback."""
    errors = data.UsageError("refused"), OSError("No space left on device"), KeyError("dim")
    monkeypatch.setattr(train, "fit", Mock(wraps=train.fit, side_effect=[*errors, DEFAULT]))
    lines = refusal(capsys, train, *tiny("--seed", "0", "1", "2", "3", "--out", tmp_path))
    for seed, error in enumerate(errors):
        assert any(re.search(f": error: .*seed{seed}: {error}$", line) for line in lines)
    assert [line for line in lines if line.startswith("Traceback")] == [lines[2]]
    assert "KeyError: 'dim'" in lines and len([*tmp_path.rglob("result.json")]) == 1


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such pipes")
def test_a_closed_pipe_ends_all_runs(tmp_path):
    """... as `| head -1` closes it, without an error for each run."""
    flags = tiny("--seed", "0", "1", "--out", tmp_path)
    command = [sys.executable, str(HERE.parent / "train.py"), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline().startswith("Runs: 2")
    process.stdout.close()
    assert "error" not in process.stderr.read() and process.wait() == 1


@pytest.mark.parametrize("file", ["data.py", "train.py", "sstfmr.py"])
def test_a_run_of_other_code_is_left_alone_or_started_anew(finished, capsys, file):
    """... finished or stopped. A comment is a change, too. Seeds of a row are of the same code."""
    change(finished / file, lambda text: text + b"# a comment\n")
    out, before = finished.parents[3], contents(finished)
    line, = refusal(capsys, train, *tiny("--out", out))
    assert line.endswith(": choose another --out, or start anew with --again and all seeds")
    diff, = re.findall(r"seed0 was made otherwise \((diff .*)\): ", line)
    _, old, new = shlex.split(diff)  # to be pasted
    assert Path(old) == finished / file and Path(new).name == file and Path(new).exists()
    assert contents(finished) == before
    (finished / "config.json").rename(out / "config")  # as in models/recorded
    assert refusal(capsys, train, *tiny("--out", out)) == [line]
    (out / "config").rename(finished / "config.json")
    (finished / "result.json").rename(out / "kept")
    assert refusal(capsys, train, *tiny("--out", out)) == [line]
    (out / "kept").rename(finished / "result.json")
    assert "seed0 was made" in refusal(capsys, train, *tiny("--out", out, "--seed", "1"))[0]
    assert not (finished.parent / "seed1").exists()
    (finished / "log.csv").write_text("of the old code")
    run(out, "--again", "--seed", "1")  # looks at no other seed
    run(out, "--again")
    assert contents(finished)[file] != before[file]
    assert f"{finished}, from step 0\n" in capsys.readouterr().out
    run(out, "--again")  # now the code is the same
    assert f"{finished} is finished" in capsys.readouterr().out


@pytest.mark.parametrize("constant", ["MUON_RATIO", "MOMENTUM", "DECAY", "COOLDOWN"])
def test_a_run_of_other_constants_is_another(finished, capsys, monkeypatch, constant):
    """... as a notebook sets them."""
    monkeypatch.setattr(train, constant, 0.5)
    for seed in "0", "1":
        line, = refusal(capsys, train, *tiny("--out", finished.parents[3], "--seed", seed))
        name = "weight_decay" if constant == "DECAY" else constant.lower()
        assert f"seed0 was made otherwise ({name} {read(finished / 'config.json')[name]})" in line


@pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")
@pytest.mark.parametrize("stop, threads", [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_stop_saves_and_the_same_command_goes_on_to_the_same_bits(
        tmp_path, capsys, monkeypatch, request, student, stop, threads):
    """Ctrl-C, or what clusters send, comes in the middle of step 5, after the last step, and in the
    test at the end."""
    torch.set_num_threads(threads)
    request.addfinalizer(lambda: torch.set_num_threads(1))
    student("mine", DROPOUT)
    whole, = run(tmp_path / "whole", "--model", "mine")
    learn, score, calls = train.learn, train.score, itertools.count(1)

    def interrupted(*arguments):
        if next(calls) == 5:
            os.kill(os.getpid(), stop)
        return learn(*arguments)

    monkeypatch.setattr(train, "learn", interrupted)
    flags = tiny("--model", "mine", "--out", tmp_path / "cut")
    with pytest.raises(SystemExit, match="^130$"):
        train.main(flags)
    cut = next(tmp_path.glob("cut/**/seed0"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a notebook lives on
    assert torch.load(cut / "checkpoint.pt")["step"] == 5 and not (cut / "result.json").exists()

    class Late(train.tqdm):
        def __iter__(self):
            yield from super().__iter__()
            os.kill(os.getpid(), stop)

    with pytest.raises(SystemExit, match="^130$"), monkeypatch.context() as patch:
        patch.setattr(train, "tqdm", Late)
        train.main(flags)
    out = capsys.readouterr().out
    assert f"{cut}, from step 5\n" in out and out.endswith("Stopped after step 6.\n")
    with pytest.raises(SystemExit, match="^130$"), monkeypatch.context() as patch:
        patch.setattr(train, "score", lambda model, split, n, device: (
            os.kill(os.getpid(), stop) if n == 50 else score(model, split, n, device)))
        patch.setattr(train, "LOG_TRIALS", 40)
        train.main(flags)
    assert f"{cut}, from step 6\n" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    train.main(flags)
    assert f"{cut}, from step 6\n" in capsys.readouterr().out and bits(cut) == bits(whole)
    seconds = [row["seconds"] for row in read(cut / "result.json")["log"]]
    assert seconds == sorted(seconds)  # they go on, too


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_does_not_end_the_processes_that_draw(tmp_path, monkeypatch, stop):
    """Terminals and clusters send it to them, too. They are started afresh, as on a Mac."""
    monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context",
                        multiprocessing.get_context("spawn"))
    learn, calls = train.learn, itertools.count(1)

    def interrupted(*arguments):
        for process in multiprocessing.active_children() if next(calls) == 3 else ():
            os.kill(process.pid, stop)
        return learn(*arguments)

    monkeypatch.setattr(train, "learn", interrupted)
    assert (run(tmp_path, "--workers", "2", "--steps", "12")[0] / "result.json").exists()


def run_until(moment, out, folder):  # with dropout; killed when about to put the n-th file in place
    models.__path__.append(folder)
    replace, calls = os.replace, itertools.count(1)
    os.replace = lambda *paths: (
        os.kill(os.getpid(), 9) if next(calls) == int(moment) else replace(*paths))
    run(Path(out), "--model", "mine", "--train-size", "24")


@pytest.mark.slow
def test_kills_change_no_bit(tmp_path, student):
    """Each start puts config.json and three copies in place. Killed before these, before the first
    log and its checkpoint, then, gone on, before the second ones and before the result."""
    student("mine", DROPOUT)
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    cuts = [(cut, moment) for moment in (1, 3, 5, 6, 7, 6, 7)]
    for out, moment in *cuts, (whole, 99):
        process = elsewhere("t.run_until(*sys.argv[1:])", moment, out, tmp_path / "models")
        assert (process.wait() in (9, -9)) == (moment < 99), process.communicate()
    process = elsewhere("t.run_until(*sys.argv[1:])", 99, cut, tmp_path / "models")
    assert process.wait() == 0 and ", from step 6\n" in process.communicate()[0]
    assert bits(next(cut.rglob("seed0"))) == bits(next(whole.rglob("seed0")))


def test_a_full_disk_loses_nothing(finished):
    resource = pytest.importorskip("resource")
    before, limit = contents(finished), resource.getrlimit(resource.RLIMIT_FSIZE)
    log = read(finished / "result.json")["log"]
    model, optimizers = train.build(read(finished / "config.json"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limit[1]))  # less than a checkpoint
    try:
        with pytest.raises(OSError, match="File too large"):
            train.save(train.Files(finished), model, optimizers, {"rows": log})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert before == contents(finished)


# ---- many runs, and many processes --------------------------------------------------------------
def test_a_list_of_runs_is_made_by_xargs(tmp_path, capsys):
    if not shutil.which("xargs"):
        pytest.skip("needs xargs")
    flags = ("--model rnn gru --split distractor systematic1 --seed 0 1 --dim 16 --steps 2 "
             "--batch-size 8 --test-trials 5 --device cpu --out").split()
    flags.append(str(tmp_path / "two words"))
    train.main(["--list"])
    assert capsys.readouterr().out == "--model sstfmr --split productive --seed 0\n"  # no blank
    train.main([*flags, "--list"])
    listed = capsys.readouterr().out
    assert listed.count("\n") == len({*listed.splitlines()}) == 8 and not [*tmp_path.iterdir()]
    command = ["xargs", "-P", "2", "-L", "1", sys.executable, str(HERE.parent / "train.py")]
    subprocess.run(command, input=listed, text=True, check=True, stdout=subprocess.DEVNULL,
                   stderr=subprocess.DEVNULL)
    evaluation.main([str(tmp_path)])
    assert capsys.readouterr().out.count("(0/2)") == 8  # two models, two splits, two tables
    train.main(flags)
    assert capsys.readouterr().out.count(" is finished\n") == 8


def overtaken(out):  # the first of two processes: after its first checkpoint, another one finishes
    learn, calls = train.learn, itertools.count(1)

    def wait_and_learn(*arguments):
        if next(calls) == 5:
            print("waits", flush=True)
            sys.stdin.readline()
        return learn(*arguments)
    train.learn = wait_and_learn
    run(Path(out), "--steps", "40")


@pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")
@pytest.mark.parametrize("end", ["goes on", "is told to stop"])
def test_of_two_processes_on_a_run_the_second_goes_on(tmp_path, end):
    """... as where a cluster takes a node for dead. The first one ends with one line."""
    first = elsewhere("t.overtaken(sys.argv[1])", tmp_path)
    while first.stdout.readline() != "waits\n":
        assert first.poll() is None
    folder, = run(tmp_path, "--steps", "40")
    before = contents(folder)
    if end == "is told to stop":
        first.terminate()
    _, err = first.communicate("\n")
    said = [line for line in err.splitlines() if not line.startswith("step ")]
    assert said == [f"train.py: error: {folder}: another process has gone on with this run, so "
                    "this one leaves it"]
    assert first.returncode == 2 and contents(folder) == before
    assert torch.load(folder / "checkpoint.pt")["step"] == 40


def test_two_processes_may_write_a_file_at_once(tmp_path):
    code = "[evaluation.write(Path(sys.argv[1]), b'%d' % i * 99_999) for i in range(200)]"
    code = f"import eval as evaluation; from pathlib import Path; {code}"
    writers = [elsewhere(code, tmp_path / "file") for _ in range(2)]
    while any(writer.poll() is None for writer in writers):
        if (tmp_path / "file").exists():
            content = (tmp_path / "file").read_bytes()
            number = content[:len(content) // 99_999]
            assert content and content == number * 99_999  # whole, and of one writer
    assert [writer.communicate()[1] for writer in writers] == ["", ""]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")
def test_signal_handlers_of_the_caller_come_back(tmp_path):
    before = signal.signal(signal.SIGTERM, mine := Mock())
    run(tmp_path)
    assert signal.signal(signal.SIGTERM, before) is mine
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
