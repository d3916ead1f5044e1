"""Training from the command line: configurations, a run's files, interruptions, what goes wrong."""
import itertools
import multiprocessing
import os
import re
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

TINY = ("--split systematic1 --dim 16 --layers 1 --steps 6 --batch-size 8 --test-trials 50 "
        "--device cpu").split()
TESTS = list(data.SPLITS["systematic1"])[1:]
HERE = Path(__file__).parent
SSTFMR = (HERE.parent / "models" / "sstfmr.py").read_text()
FORWARD = "return self.readout(self.features(instruction, stimulus))"
DROPOUT = SSTFMR.replace(FORWARD, "x = self.features(instruction, stimulus)\n"
                         "        return torch.dropout(self.readout(x), 0.5, self.training)")


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
    return [*train.configurations(train.parser_of().parse_known_args(argv)[0], argv)]


# ---- what is run --------------------------------------------------------------------------------
def test_several_values_make_several_runs_of_one_budget_that_a_model_may_change(student):
    configs = configurations("--split all productive_release --model all --seed 0 1 0 --lr 0.1")
    folders = {(c["split"], c["model"], c["settings"], c["seed"]) for c in configs}
    splits = 1 + sum(not split.endswith("_release") for split in data.SPLITS)
    assert len(folders) == len(configs) == 2 * len(ALL) * splits
    assert [config["model"] for config in configurations("--model all")] == ALL
    assert all(config == config | train.TRAINING | getattr(
        module_of(config["model"]), "TRAINING", {}) for config in configurations("--model all"))
    student("mine", SSTFMR + "TRAINING = {'lr': 0.25, 'steps': 11, 'train_size': None}")
    config, = configurations("--model mine --steps 12 --read root --heads 2 --read root")
    assert config["settings"] == "heads2-steps12-readroot"  # in one order
    assert (config["lr"], config["steps"], config["train_size"]) == (0.25, 12, None)
    assert "(default: 0.25)" in train.parser_of("mine").format_help()


def test_a_flag_of_a_model_has_the_type_of_its_default(student):
    student("mine", '''
from typing import Literal
class Model:
    def __init__(self, share=0.5, n=2, least=0, gate=True, sure: Literal[True, False] = True,
                 kind="", side: Literal["a", "b"] = "a", width: "Literal[2, 4]" = 2):
        pass
''')
    config, = configurations("--model mine --share 1 --n 3 --least 0 --no-gate --no-sure "
                             "--kind a=b --side b --width 4")
    assert repr(config["model_args"]) == repr(
        {"share": 1.0, "n": 3, "least": 0, "gate": False, "sure": False, "kind": "a=b", "side": "b",
         "width": 4})


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
    for width in 7, 11:
        student("mine", f"\nclass Model:\n    width = {width}  # {'-' * width}")
        assert module_of("mine").Model.width == width
        assert [*models.available()] == [*before, "mine"]


CHANGES = ("--dim 32", "--layers 2", "--heads 2", "--read root", "--optimizer adamw", "--lr 0.01",
           "--decay all", "--schedule constant", "--train-size 16", "--steps 3", "--batch-size 4",
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
    assert folder == tmp_path / "systematic1/sstfmr/dim16-layers1-steps12-batchsize8/seed0"
    code = {path.name: path.read_bytes() for path in map(Path, (
        data.__file__, train.__file__, module_of("sstfmr").__file__))}
    files = {"config.json", "log.csv", "checkpoint.pt", "result.json", *code}
    assert {*contents(folder)} == files and contents(folder) == contents(folder) | code
    config, result = read(folder / "config.json"), read(folder / "result.json")
    assert config["threads"] > 0 and result["config"] == config
    header, *log = [line.split(",") for line in (folder / "log.csv").read_text().splitlines()]
    assert header == ["step", "trials", "loss", "train", *TESTS, "seconds"]
    assert [row[:2] for row in log] == [[f"{step}", f"{8 * step}"] for step in (3, 6, 9, 10, 12)]
    assert all(3 < float(row[2]) < 12 and float(row[3]) <= 1 for row in log)  # ln 138 = 4.9
    before, (out, err) = contents(folder), capsys.readouterr()
    assert f"{folder}\n" in out and f"step 10  trials 80  loss {log[3][2]}  train " in err
    assert "Runs: 1, on cpu, with a line every 3 steps." in out
    assert "systematic1, accuracy in %" in out
    run(tmp_path, "--steps", "12")  # is done
    again = capsys.readouterr().out
    assert contents(folder) == before and again == out.replace(f"{folder}\n", f"{folder} is fini"
                                                               "shed\n")


def test_another_number_of_test_trials_tests_again_without_training(finished, monkeypatch):
    before = read(finished / "result.json")
    monkeypatch.setattr(train, "learn", None)
    run(finished.parents[3], "--test-trials", "70")
    after = read(finished / "result.json")
    assert after["config"] == before["config"] | {"test_trials": 70}
    assert after["log"] == before["log"] and after["baselines"] != before["baselines"]


def test_rates_and_optimizers(trained):
    rates = [train.rate_at(*of, "cosine") for of in (
        (0, 4000), (train.WARMUP - 1, 4000), (2000, 4000), (0, 1), (1, 4))]
    assert rates == pytest.approx([1 / train.WARMUP, 1, 0.5, 1, (1 + 0.5 ** 0.5) / 4], rel=0.03)
    assert train.rate_at(7, 9, "constant") == 1
    states, model = torch.load(trained / "checkpoint.pt")["optimizers"], evaluation.load(trained)[0]
    last = [state["param_groups"][0]["lr"] / train.rate_at(5, 6, "cosine") for state in states]
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
        assert (a - b).norm() < 0.1 * (a - old).norm()  # 2 % per step
    assert (spare == 1).all()


def test_orthogonal_is_five_iterations_of_newton_schulz():
    for shape in (6, 6), (4, 16), (16, 4):
        x = torch.randn(shape).double()
        plain = x / x.norm()
        for _ in range(5):
            gram = plain @ plain.T
            plain = 3.4445 * plain - 4.775 * gram @ plain + 2.0315 * gram @ gram @ plain
        torch.testing.assert_close(train.orthogonal(x), plain)


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
    assert evaluation.test_set("systematic1", "iid", 50)[0].stimulus.any()


def test_logits_that_are_not_finite_end_a_run(tmp_path, capsys, student):
    student("mine", SSTFMR.replace(FORWARD, f"{FORWARD} / (instruction.shape[1] < 22)"))
    line, = refusal(capsys, train, *TINY, "--model", "mine", "--split", "productive", "--out",
                    tmp_path)
    assert line.endswith("seed0: on depth7 of productive, logits of the model are not finite")


def test_a_run_keeps_the_code_as_it_was_imported(tmp_path, monkeypatch):
    """... even if the files have changed since."""
    for module in data, train:
        monkeypatch.setattr(module, "SOURCE", f"# {module.__name__}, before an edit".encode())
    folder, = run(tmp_path)
    kept = [(folder / name).read_text() for name in ("data.py", "train.py")]
    assert kept == ["# data, before an edit", "# train, before an edit"]


@pytest.mark.parametrize("line, name", [
    ("from models.gru import Rows", "models"), ("from .gru import Rows", "models"),
    ("import torch, models.gru as other", "models"), ("from eval import percent", "eval")])
def test_a_model_that_needs_another_file_is_refused(tmp_path, capsys, student, line, name):
    """... since a run would not keep a copy of it. In a package, tests of data.py would, too."""
    student("mine", SSTFMR.replace("import data\n", f"import data\ntry:\n    {line}\n"
                                   "except ImportError:\n    pass\n"))
    said, = refusal(capsys, train, *TINY, "--model", "mine", "--out", tmp_path)
    assert said.endswith(f"seed0: mine.py imports {name}, of which a run keeps no copy: put the "
                         "code into one file")
    train.check_imports(Path("train.py"), train.SOURCE)
    with pytest.raises(data.UsageError, match="data.py imports tests"):
        train.check_imports(Path("data.py"), b"def f():\n    import tests.bench")


def test_a_folder_without_code_is_no_module(tmp_path, monkeypatch):
    """... such as wandb/, which the package of this name writes here."""
    monkeypatch.setattr(train, "__file__", str(tmp_path / "train.py"))
    (tmp_path / "wandb").mkdir()
    train.check_imports(Path("mine.py"), b"import wandb")
    (tmp_path / "wandb" / "mine.py").touch()
    with pytest.raises(data.UsageError, match="mine.py imports wandb"):
        train.check_imports(Path("mine.py"), b"import wandb")


def test_a_run_is_saved_every_few_minutes(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "SAVE_EVERY", 0)
    steps, save = [], train.save
    monkeypatch.setattr(train, "save", lambda *of, **state: (steps.append(state["step"]),
                                                             save(*of, **state)))
    run(tmp_path)
    assert steps == [1, 2, 3, 4, 5, 6]


def test_what_happens_is_printed_at_once(tmp_path, monkeypatch):
    """... also into a file, where Python would wait."""
    out = open(tmp_path / "out.txt", "w")
    monkeypatch.setattr(sys, "stdout", out)
    seen, learn = [], train.learn
    monkeypatch.setattr(train, "learn", lambda *of: (
        seen.append((tmp_path / "out.txt").read_text()), learn(*of))[1])
    run(tmp_path)
    assert "Runs: 1, on cpu, with a line every 3 steps." in seen[0] and "seed0\n" in seen[0]


def test_a_log_that_another_program_holds_is_left(finished, monkeypatch):
    """... as on Windows."""
    before = (finished / "log.csv").read_text()
    with monkeypatch.context() as patch:
        patch.setattr(train, "write", Mock(side_effect=PermissionError))
        train.write_log(finished, [{"step": 7}])
    assert (finished / "log.csv").read_text() == before
    train.write_log(finished, [{"step": 7}])
    assert (finished / "log.csv").read_text() == "step\n7\n"


def test_a_loss_that_is_not_finite_ends_a_run(tmp_path, capsys, student):
    student("mine", SSTFMR.replace(FORWARD, f"{FORWARD} / (1 - self.training)"))
    line, = refusal(capsys, train, *TINY, "--model", "mine", "--out", tmp_path)
    assert re.search("error: .*mine.dim16-.*seed0: the loss is nan at step 3: try a lower", line)


def test_a_failing_run_does_not_stop_the_others(tmp_path, capsys, monkeypatch):
    """A mistake in a model shows its traceback."""
    errors = data.UsageError("refused"), OSError("No space left on device"), KeyError("dim")
    monkeypatch.setattr(train, "fit", Mock(wraps=train.fit, side_effect=[*errors, DEFAULT]))
    lines = refusal(capsys, train, *TINY, "--seed", "0", "1", "2", "3", "--out", tmp_path)
    for seed, error in enumerate(errors):
        assert any(re.search(f": error: .*seed{seed}: {error}$", line) for line in lines)
    assert [line for line in lines if line.startswith("Traceback")] == [lines[2]]
    assert "KeyError: 'dim'" in lines and len([*tmp_path.rglob("result.json")]) == 1


@pytest.mark.parametrize("file", ["data.py", "train.py", "sstfmr.py"])
def test_a_run_of_other_code_is_left_alone_or_started_anew(finished, capsys, file):
    """... finished or stopped. A comment is a change, too. Other seeds are not looked at."""
    change(finished / file, lambda text: text + b"# a comment\n")
    out, before = finished.parents[3], contents(finished)
    line, = refusal(capsys, train, *TINY, "--out", out)
    assert line.endswith(": choose another --out, or add --again to start it anew")
    diff, = re.findall(r"made with another (\S+) \(diff (\S+) (\S+)\): ", line)
    assert diff[0] == file and Path(diff[1]) == finished / file and Path(diff[2]).exists()
    assert contents(finished) == before
    (finished / "result.json").rename(out / "kept")
    assert refusal(capsys, train, *TINY, "--out", out) == [line]
    (out / "kept").rename(finished / "result.json")
    run(out, "--seed", "1")
    assert f"| sstfmr ({finished.parent.name}) " in capsys.readouterr().out
    evaluation.main([str(out)])
    assert f"{finished.parent.name}), seed 1, other {file} |" in capsys.readouterr().out
    run(out, "--again")
    assert contents(finished)[file] != before[file] and f"{finished}\n" in capsys.readouterr().out
    change(finished / file, None)
    assert f"with another {file} " in refusal(capsys, train, *TINY, "--out", out)[0]
    run(out, "--again")
    run(out, "--again")  # now the code is the same
    assert f"{finished} is finished" in capsys.readouterr().out


@pytest.mark.skipif(os.name == "nt", reason="Windows has other signals")
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_a_stop_saves_and_the_same_command_goes_on_to_the_same_bits(
        tmp_path, capsys, monkeypatch, student, stop):
    """Ctrl-C, or what clusters send, comes in the middle of step 5, and in the test at the end."""
    student("mine", DROPOUT)
    whole, = run(tmp_path / "whole", "--model", "mine")
    learn, score, calls = train.learn, train.score, itertools.count(1)

    def interrupted(*arguments):
        if next(calls) == 5:
            os.kill(os.getpid(), stop)
        return learn(*arguments)

    monkeypatch.setattr(train, "learn", interrupted)
    flags = [*TINY, "--model", "mine", "--out", str(tmp_path / "cut")]
    with pytest.raises(SystemExit, match="^130$"):
        train.main(flags)
    cut = next(tmp_path.glob("cut/**/seed0"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # a notebook lives on
    assert torch.load(cut / "checkpoint.pt")["step"] == 5 and not (cut / "result.json").exists()
    with pytest.raises(SystemExit, match="^130$"), monkeypatch.context() as patch:
        patch.setattr(train, "score", lambda model, split, n, device: (
            os.kill(os.getpid(), stop) if n == 50 else score(model, split, n, device)))
        patch.setattr(train, "LOG_TRIALS", 40)
        train.main(flags)
    assert f"{cut}, from step 5\n" in capsys.readouterr().out
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
    checkpoint and its log, then, gone on, before the second ones and before the result."""
    student("mine", DROPOUT)
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    cuts = [(cut, moment) for moment in (1, 3, 5, 6, 5, 6, 5)]
    for out, moment in *cuts, (whole, 99):
        process = elsewhere("t.run_until(*sys.argv[1:])", moment, out, tmp_path / "models")
        assert (process.wait() in (9, -9)) == (moment < 99), process.communicate()
    process = elsewhere("t.run_until(*sys.argv[1:])", 99, cut, tmp_path / "models")
    assert process.wait() == 0 and ", from step 6\n" in process.communicate()[0]
    assert bits(next(cut.rglob("seed0"))) == bits(next(whole.rglob("seed0")))


def test_a_full_disk_loses_nothing(finished):
    resource = pytest.importorskip("resource")
    before, limit = contents(finished), resource.getrlimit(resource.RLIMIT_FSIZE)
    model, optimizers = train.build(read(finished / "config.json"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000, limit[1]))  # less than a checkpoint
    try:
        with pytest.raises(OSError, match="File too large"):
            train.save(finished, model, optimizers, step=7, rows=[])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert before.items() <= contents(finished).items()
