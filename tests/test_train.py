"""Training from the command line: configurations, a run's files, interruptions, what goes wrong."""
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import DEFAULT, Mock

import pytest
import torch

import data
import eval as evaluation
import train
from eval import UsageError, available, check_code, module_of, read

TINY = "--split systematic1 --dim 16 --layers 1 --steps 6 --batch-size 8 --device cpu".split()
TESTS, SSTFMR = list(data.SPLITS["systematic1"])[1:], module_of("sstfmr").Model
HERE = Path(__file__).parent


def run(out, *flags):  # in this process -> the folders of all runs in `out`
    train.main([*TINY, *flags, "--out", str(out)])
    return sorted(path.parent for path in out.rglob("config.json"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory):  # the folder of a finished run, to look at
    return run(tmp_path_factory.mktemp("trained"))[0]


@pytest.fixture
def finished(trained, tmp_path):  # the same below tmp_path, to be spoiled
    return shutil.copytree(trained, tmp_path / trained.relative_to(trained.parents[3]))


def change(path, content):
    """Writes text or, of a dict, its keys. None removes the file."""
    if isinstance(content, dict) and path.suffix == ".pt":
        return torch.save(torch.load(path) | content, path)
    if isinstance(content, dict):
        content = json.dumps(json.loads(path.read_text()) | content)
    path.unlink() if content is None else path.write_text(content)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def bits(folder):  # what the same command gives again: weights, and the rest but for times
    state = torch.load(folder / "checkpoint.pt")["model"]
    log = [line.rsplit(",", 2)[0] for line in (folder / "log.csv").read_text().splitlines()]
    result = read(folder / "result.json") | {"seconds": 0, "log": None}
    return {name: value.tolist() for name, value in state.items()}, log, result


def refusal(capsys, program, *arguments):  # with exit code 2 -> lines on stderr but progress bars
    with pytest.raises(SystemExit, match="^2$"):
        program.main([str(argument) for argument in arguments])
    return [line for line in capsys.readouterr().err.splitlines() if line and "%|" not in line]


def configurations(*flags):
    return [*train.configurations(train.parse(["--device", "cpu", *flags])[1])]


def test_several_values_make_several_runs_of_one_budget_that_a_model_may_change(monkeypatch):
    configs = configurations(*"--split all --model all --lr 0.1 0.2 0.1 --seed 0 1".split())
    folders = {(c["split"], c["model"], c["settings"], c["seed"]) for c in configs}
    assert len(folders) == len(configs) == 4 * len(data.SPLITS) * len(available())
    assert all(config == config | train.TRAINING | getattr(
        module_of(config["model"]), "TRAINING", {}) for config in configurations("--model", "all"))
    built = []  # without memory, before a run
    monkeypatch.setattr(module_of("mlp"), "Model",
                        lambda dim=8: built.append(torch.empty(dim).device.type))
    assert configurations("--model", "mlp") and built == ["meta"]
    monkeypatch.setattr(module_of("rnn"), "TRAINING", {"lr": 0.25, "steps": 11})
    config, = configurations("--set", "tokens=operator", "read=root", "--set", "read=eos")
    assert config["settings"] == "readeos-tokensoperator"  # the last value, in one order
    config, = configurations("--model", "rnn", "--steps", "12")  # a flag counts more
    assert (config["lr"], config["steps"], config["settings"]) == (0.25, 12, "steps12")


def test_set_is_typed_by_the_default():
    student = inspect.signature(lambda share=0.5, n=2, gate=True, kind="", none=None: 0).parameters
    for text, value in ("share=1", 1.0), ("n=3", 3), ("gate=False", False), ("kind=a=b", "a=b"):
        assert repr(train.setting(text, student, "mine")[1]) == repr(value)
    for text in ("gate=0", "n=x", "n=0", "none=3"):
        with pytest.raises(UsageError, match=" of mine must be (True or False|an integer from 1 to "
                                             "1000000000|NoneType), not"):
            train.setting(text, student, "mine")


@pytest.mark.parametrize("hardware, precision", [(True, "bfloat16"), (False, "float32")])
def test_a_gpu_is_taken_and_the_bfloat16_of_its_hardware_alone(monkeypatch, hardware, precision):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported",
                        lambda including_emulation=True: hardware or including_emulation)
    config, = train.configurations(train.parse([])[1])
    assert (config["device"], config["precision"]) == ("cuda", precision)


CHANGES = ("--dim 32", "--layers 2", "--heads 2", "--set read=eos", "--optimizer adamw",
           "--lr 0.01", "--train-size 16", "--steps 3", "--batch-size 4", "--model looptfmr",
           "--split distractor", "--seed 3", "--precision bfloat16", "--workers 2")


@pytest.mark.parametrize("flags", CHANGES)
def test_a_flag_reaches_configuration_folder_and_weights(tmp_path, trained, flags):
    *_, key, value = re.split("[ =]", flags[2:].replace("-", "_"))
    folder, = run(tmp_path, *flags.split())
    config, same = read(folder / "config.json"), key == "workers"
    assert same or str((config | config["model_args"])[key]) == value
    assert (bits(folder)[0] == bits(trained)[0]) == same
    unnamed = ("model", "split", "seed", "precision", "workers")  # the first three are folders
    assert (folder.parent.name == trained.parent.name) == (key in unnamed)


def test_a_run_leaves_files_that_tell_all(tmp_path, capsys, monkeypatch):
    folder, = run(tmp_path)
    assert folder == tmp_path / "systematic1/sstfmr/dim16-layers1-steps6-batchsize8/seed0"
    assert {*contents(folder)} == {"config.json", "log.csv", "checkpoint.pt", "result.json", "lock"}
    config = read(folder / "config.json")
    assert config["fingerprint"] == train.fingerprint(config) and config["threads"] > 0
    header, *log = [line.split(",") for line in (folder / "log.csv").read_text().splitlines()]
    assert header == ["step", "trials", "loss", "train", *TESTS, "trials/s", "seconds"]
    assert [row[:2] for row in log] == [["2", "16"], ["4", "32"], ["6", "48"]]
    assert all(3 < float(row[2]) < 8 for row in log)  # ln 138 = 4.9
    before, out = contents(folder), capsys.readouterr().out
    monkeypatch.setattr(train, "fit", None)
    run(tmp_path)  # is done
    assert contents(folder) == before and capsys.readouterr().out == out
    assert "Runs: 1, on cpu in float32." in out and "systematic1, accuracy in %" in out


def test_rates_and_optimizers(trained):
    rates = [train.rate(*of) for of in ((0, 4000), (99, 4000), (2000, 4000), (0, 1), (1, 4))]
    assert rates == pytest.approx([0.01, 1, 0.5, 1, (1 + 0.5 ** 0.5) / 4], abs=0.002)
    states, model = torch.load(trained / "checkpoint.pt")["optimizers"], SSTFMR(dim=16, layers=1)
    last = [state["param_groups"][0]["lr"] / train.rate(5, 6) for state in states]
    assert last == pytest.approx([3e-3, 1e-3])
    muon, adamw, every = ({*map(id, optimizer.param_groups[0]["params"])} for name in
                          ("muon", "adamw") for optimizer in train.make_optimizers(model, name, 1))
    assert muon | adamw == every == {*map(id, model.parameters())} and not muon & adamw
    assert id(model.blocks[0].attention.key.weight) in muon
    assert {id(model.readout.weight), id(model.stimulus.cells)} < adamw


def test_gradients_and_dropout_are_for_training_alone(tmp_path):
    modes = set()
    with torch.nn.modules.module.register_module_forward_pre_hook(lambda module, _: modes.add(
            (module.training, torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))):
        run(tmp_path, "--precision", "bfloat16")
    assert modes == {(True, True, True), (True, True, False),  # in float32: fingerprint, RSA
                     (False, False, True), (False, False, False)}


@pytest.mark.parametrize("error, says", [
    (DEFAULT, r"the loss is (nan|inf) at step \d: try a lower --lr"),
    (MemoryError(), "too little memory: try a smaller --batch-size or --dim"),
    (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB."), "too little memory"),
    (OSError("No space left on device"), "No space left on device")], ids=str)
def test_a_failing_run_does_not_stop_the_others(tmp_path, capsys, monkeypatch, error, says):
    fit = Mock(wraps=train.fit, side_effect=[error, DEFAULT, DEFAULT])
    monkeypatch.setattr(train, "fit", fit)
    flags = [*TINY, "--optimizer", "adamw", "--lr", "1e30", "1e-3", "1e-2", "--out", tmp_path]
    (line, last), failed = refusal(capsys, train, *flags), next(tmp_path.rglob("*1e30*/seed0"))
    assert re.search(f"error: {failed}: .*{says}", line) and last == f"Failed: {failed}"
    assert len([*tmp_path.rglob("result.json")]) == 2


@pytest.mark.parametrize("error", [ValueError("too many values"), RuntimeError("a single memory")])
def test_a_bug_keeps_its_traceback(tmp_path, monkeypatch, error):
    monkeypatch.setattr(SSTFMR, "features", Mock(side_effect=error))
    with pytest.raises(type(error), match=str(error)):
        run(tmp_path)


CONFIG, = configurations("--dim", "16", "--layers", "1")
COSINE = "(1 + math.cos(math.pi * step / steps)) / 2"
HARMFUL = {"MUON_RATIO = 3": "MUON_RATIO = 3.3", "EVERY = 100": "EVERY = 50",  # WARMUP
           "parameters(), 1.0": "parameters(), 0.5", COSINE: "(1 - step / steps)",
           ".mul_(0.3)": ".mul_(0.4)", "nn.GELU()": "nn.ReLU()", "rng.randrange(number)": "0",
           "rng.random() < 0.5": "rng.random() < 0.6"}
HARMLESS = {COSINE: "math.cos(math.pi * step / steps / 2) ** 2", "truths": "drawn", "# ": "# New: "}


@pytest.mark.parametrize("old, new", [*HARMFUL.items(), *HARMLESS.items()])
def test_a_run_is_known_by_what_it_computes(monkeypatch, old, new):
    config, sources = CONFIG | {"fingerprint": train.fingerprint(CONFIG)}, ""
    for name in ("data", "models/sstfmr", "train"):
        source = (HERE.parent / f"{name}.py").read_text(encoding="utf-8")
        exec(source.replace(old, new), vars(module := type(train)(name)))
        monkeypatch.setitem(sys.modules, name.replace("/", "."), module)
        sources += source
    assert old in sources
    if HARMLESS.get(old) == new:
        return check_code(config)
    with pytest.raises(UsageError, match="now they are"):
        check_code(config)


@pytest.mark.parametrize("model", ["sstfmr", "authors"])
def test_rounding_is_no_other_code(model):  # nor are other instruction sets and more threads
    flags = "--model", model, "--split", "distractor"
    code = (f"import conftest, test_train as t; config, = t.configurations{flags}\n"
            "print(t.train.fingerprint(config))")
    env = os.environ | {"ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "2"}
    there = json.loads(subprocess.check_output([sys.executable, "-c", code], cwd=HERE, env=env))
    config, = configurations(*flags)
    check_code(config | {"fingerprint": there})
    there[3] *= 1 + 3 * evaluation.TOLERANCES[3]
    with pytest.raises(UsageError, match="now they are"):
        check_code(config | {"fingerprint": there})


DAMAGED = "its checkpoint.pt is damaged or another model's: remove the folder to begin anew$"
OTHERS = [
    ("config.json", {"lr": 0.5}, r"another run stands there \(lr is 0.5 there, 0.001 here\): "),
    ("config.json", {"fingerprint": 6 * [5.25]}, "it is a run of other code: bring its code back.*"
     r" were( 5.25){6}, and now they are( \d[\d.]+){6}\)$"),
    ("checkpoint.pt", "half", DAMAGED), ("checkpoint.pt", {"model": {}}, DAMAGED),
    ("checkpoint.pt", "csys\nexit\n(tR.", DAMAGED)]  # a pickle that calls sys.exit


@pytest.mark.parametrize("file, content, says", OTHERS)
def test_another_run_is_left_alone(finished, trained, capsys, file, content, says):
    change(finished / file, content)
    for gone in ("lock", "result.json")[file == "checkpoint.pt":]:  # finished, then unfinished
        change(finished / gone, None)
        before = contents(finished) | {"lock": b""}
        line, = refusal(capsys, train, *TINY, "--out", finished.parents[3])
        assert re.search(says, line) and contents(finished) == before
    change(finished / "checkpoint.pt", None)
    run(finished.parents[3])  # where only config.json is left, it begins anew
    assert bits(finished) == bits(trained)


def test_new_test_sets_are_evaluated_without_training_anew(finished, tmp_path, monkeypatch):
    before = contents(finished)
    monkeypatch.setitem(data.SPLITS["systematic1"], "more", data.Subset(distractors=(7, 7)))
    run(tmp_path)
    after = contents(finished)
    assert [name for name in after if after[name] != before[name]] == ["result.json"]
    assert list(read(finished / "result.json")["accuracy"]) == [*TESTS, "more"]
    rows = torch.load(finished / "checkpoint.pt")["rows"][:2]
    change(finished / "checkpoint.pt", {"step": 4, "rows": rows})
    change(finished / "result.json", None)
    run(tmp_path)  # an unfinished run gets a column
    *old, new = (line.split(",") for line in (finished / "log.csv").read_text().splitlines())
    assert [line[-3] for line in old] == ["more", "", ""] and all([*old[1][-2:], *new[-3:]])


def test_the_same_command_shares_the_runs(tmp_path, capsys, monkeypatch):
    fit, fcntl, flags = train.fit, pytest.importorskip("fcntl"), ["--seed", "0", "1"]
    monkeypatch.setattr(train, "fit", lambda *_: (  # started again from within its first run
        monkeypatch.setattr(train, "fit", fit), run(tmp_path, *flags)))
    run(tmp_path, *flags)
    assert "seed0 is being trained by another process: left to it" in capsys.readouterr().out
    assert [path.parent.name for path in tmp_path.rglob("result.json")] == ["seed1"]
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError("No locks available")))
    run(tmp_path, *flags)  # as on some file systems
    assert len([*tmp_path.rglob("result.json")]) == 2


def run_until(moment, out):  # with dropout, and be killed when about to put the n-th file in place
    SSTFMR.forward = lambda x, *of: torch.dropout(x.readout(x.features(*of)), 0.5, x.training)
    replace, left = os.replace, iter(range(moment)[::-1])
    os.replace = lambda *paths: replace(*paths) if next(left) else os.kill(os.getpid(), 9)
    run(Path(out), "--train-size", "24")


def test_kills_change_no_bit(tmp_path):  # before checkpoint 2, log 4, checkpoint 6, result
    cut, whole = tmp_path / "cut", tmp_path / "whole"
    for out, moment in (cut, 3), (cut, 5), (cut, 4), (cut, 3), (cut, 9), (whole, 99):
        code = f"import conftest, test_train; test_train.run_until({moment}, {str(out)!r})"
        killed = subprocess.run([sys.executable, "-c", code], cwd=HERE).returncode in (9, -9)
        assert killed == (moment < 9) == (not list(tmp_path.rglob("result.json")))
    assert bits(next(cut.rglob("seed0"))) == bits(next(whole.rglob("seed0")))


def test_ctrl_c_or_a_full_disk_loses_nothing(tmp_path, trained, capsys, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="^130$"):
        patch.setattr(train, "log", Mock(wraps=train.log, side_effect=[DEFAULT, KeyboardInterrupt]))
        run(tmp_path)
    assert "The same command goes on" in capsys.readouterr().out
    assert torch.load(next(tmp_path.rglob("checkpoint.pt")))["step"] == train.SAVE_EVERY
    before, resource = {*contents(next(tmp_path.rglob("seed0")))}, pytest.importorskip("resource")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))  # is less than a checkpoint
    try:
        assert "File too large" in refusal(capsys, train, *TINY, "--out", tmp_path)[0]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert {*contents(next(tmp_path.rglob("seed0")))} == before  # no half a file
    assert bits(*run(tmp_path)) == bits(trained)
