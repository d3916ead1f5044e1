"""Training and evaluation from the command line: every flag, every file, going on after an interruption."""
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import data
import eval as evaluation
import train

ROOT = Path(__file__).parents[1]
TINY = ["--model", "sstfmr", "--split", "distractor", "--dim", "16", "--steps", "6", "--batch-size", "8", "--eval-every", "3",
        "--device", "cpu"]


@pytest.fixture(autouse=True)
def small_test_sets(monkeypatch):
    monkeypatch.setattr(train, "LOG_TRIALS", 50)
    monkeypatch.setattr(train, "TEST_TRIALS", 200)
    monkeypatch.setattr(evaluation, "RSA_TRIALS", 20)


def run(out, *flags):
    """Trains in this process; returns the folders of all runs in `out`."""
    train.main([*TINY, *flags, "--out", str(out)])
    return sorted(p.parent for p in out.rglob("config.json"))


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def weights(folder):
    return torch.load(folder / "checkpoint.pt", weights_only=True)["model"]


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_a_run_leaves_files_that_tell_all(tmp_path, capsys):
    folder, = run(tmp_path)
    assert folder == tmp_path / "distractor/sstfmr/quick-dim16-steps6-batchsize8-evalevery3/seed0"
    assert {p.name for p in folder.iterdir()} == {"config.json", "log.csv", "checkpoint.pt", "result.json", "lock"}
    result = json.loads((folder / "result.json").read_text())
    sets = list(data.SPLITS["distractor"])[1:]
    assert list(result["accuracy"]) == sets and all(0 <= p <= 1 for p in result["accuracy"].values())
    assert all(low <= result["accuracy"][s] <= high for s, (low, high) in result["interval"].items())
    assert result["trials"] == 48 and result["steps"] == 6 and result["seed"] == 0 and result["device"] == "cpu"
    log = (folder / "log.csv").read_text().splitlines()
    assert log[0].split(",") == ["step", "trials", "loss", "train", *sets, "trials/s"]
    assert [line.split(",")[:2] for line in log[1:]] == [["3", "24"], ["6", "48"]]
    config = config_of(folder)
    assert config["format"] == evaluation.FORMAT and config["torch"] == torch.__version__ and config["model_args"]["dim"] == 16
    out = capsys.readouterr().out
    assert "Schedule quick" in out and "no binding" in out and "against iid" in out


def test_a_finished_run_is_skipped_and_another_one_is_not_overwritten(tmp_path, capsys):
    folder, = run(tmp_path)
    before = (folder / "checkpoint.pt").stat().st_mtime_ns
    run(tmp_path)
    assert (folder / "checkpoint.pt").stat().st_mtime_ns == before
    config = config_of(folder) | {"lr": 0.5}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit) as stop:
        run(tmp_path)
    assert stop.value.code == 2 and "lr is 0.5 there, 0.003 here" in capsys.readouterr().err


def test_a_setting_may_be_a_tuple(tmp_path):
    """A file gives it back as a list, and it is the same run."""
    _, args = train.parse(TINY)
    config, = train.configurations(args)
    for size, refused in ((1, 2), contextlib.nullcontext()), ((1, 2), contextlib.nullcontext()), ((1, 3), pytest.raises(ValueError)):
        config["model_args"]["sizes"] = size
        with refused:
            train.prepare(config, tmp_path / "run")


def test_gradients_are_for_training_mode_alone(tmp_path, monkeypatch):
    """Where there is dropout, test sets and hidden states are seen without it."""
    modes, model = set(), evaluation.module_of("sstfmr").Model
    features = model.features

    def seen(self, *tokens):
        modes.add((self.training, torch.is_grad_enabled()))
        return features(self, *tokens)

    monkeypatch.setattr(model, "features", seen)
    run(tmp_path)
    assert modes == {(True, True), (False, False)}
    modes.clear()
    evaluation.main([str(tmp_path), "--n", "10", "--rsa", "--attention", "--device", "cpu"])
    assert modes == {(False, False)}


def test_several_values_make_several_runs_and_one_table(tmp_path, capsys):
    folders = run(tmp_path, "--split", "all", "--seed", "0", "1", "--layers", "1", "2", "--steps", "1", "--eval-every", "1")
    assert len(folders) == 4 * 2 * 2
    flags = ["--dim", "16", "32", "--heads", "1", "2", "--train-size", "16", "32", "16", "--split", "productive"]
    _, args = train.parse([*TINY, *flags])
    assert len({(c["settings"], c["model_args"]["dim"], c["model_args"]["heads"], c["train_size"])
                for c in train.configurations(args)}) == len(list(train.configurations(args))) == 2 * 2 * 2
    out = capsys.readouterr().out
    assert all(f"{split}, accuracy in %" in out for split in data.SPLITS) and "layers1" in out and "±" in out


CHANGES = {  # a flag and what it must change in config.json
    "--layers 3": ("model_args", {"layers": 3}), "--heads 2": ("model_args", {"heads": 2}),
    "--position relative": ("model_args", {"position": "relative"}), "--optimizer adamw": ("optimizer", "adamw"),
    "--lr 0.01": ("lr", 0.01), "--train-size 16": ("train_size", 16), "--seed 3": ("seed", 3),
    "--paper": ("optimizer", "adamw"), "--precision bfloat16": ("precision", "bfloat16"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "LOG_TRIALS", 50)
        patch.setattr(train, "TEST_TRIALS", 200)
        return run(tmp_path_factory.mktemp("plain"))[0]


@pytest.mark.parametrize("flags", CHANGES)
def test_a_flag_reaches_the_configuration_and_the_weights(tmp_path, plain, flags):
    folder, = run(tmp_path, *flags.split())
    key, value = CHANGES[flags]
    found = config_of(folder)[key]
    assert found == value or found == found | value
    assert not same(weights(folder), weights(plain))
    assert re.fullmatch(r"[A-Za-z0-9._-]+", folder.parent.name)
    if flags not in ("--seed 3", "--precision bfloat16"):  # not the settings: the run, and the machine
        assert folder.parent.name != plain.parent.name


def test_schedules(monkeypatch):
    flags = [flag for flag in TINY if flag not in ("--steps", "6", "--batch-size", "8")]
    own = evaluation.module_of("sstfmr").QUICK
    for schedule, expected in ("quick", train.SCHEDULES["quick"] | own), ("full", train.SCHEDULES["full"]):
        _, args = train.parse([*flags, "--schedule", schedule])
        config, = train.configurations(args)
        assert {key: config[key] for key in expected} == expected
    _, args = train.parse(flags)
    assert next(train.configurations(args))["schedule"] == "quick"  # auto, on a CPU
    with monkeypatch.context() as patch:  # Apple's GPU is taken only if asked for
        patch.setattr(torch.backends.mps, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        assert [evaluation.pick_device(name) for name in ("auto", "mps")] == ["cpu", "mps"]


@pytest.mark.parametrize("optimizer", train.LR)
def test_the_learning_rate_is_the_optimizers_unless_given(optimizer):
    for flags, lr in ([], train.LR[optimizer]), (["--lr", "0.5"], 0.5):
        _, args = train.parse([*TINY, "--optimizer", optimizer, *flags])
        assert next(train.configurations(args))["lr"] == lr


def start(out, *flags, **options):
    return subprocess.Popen([sys.executable, ROOT / "train.py", *TINY, *flags, "--out", out], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.parametrize("how, flags", [(signal.SIGKILL, ()), (signal.SIGINT, ("--train-size", "24"))])
def test_an_interrupted_run_goes_on_to_the_same_bits(tmp_path, how, flags):
    flags = ("--steps", "20", "--eval-every", "2", *flags)
    whole, = run(tmp_path / "whole", *flags)
    process = start(tmp_path / "cut", *flags)
    while not list((tmp_path / "cut").rglob("checkpoint.pt")):
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(how)
    out, _ = process.communicate()
    assert process.returncode == (130 if how == signal.SIGINT else -9)
    assert how == signal.SIGKILL or "goes on from the last checkpoint" in out
    step = torch.load(next((tmp_path / "cut").rglob("checkpoint.pt")), weights_only=True)["step"]
    assert 0 < step < 20
    cut, = run(tmp_path / "cut", *flags)
    assert same(weights(cut), weights(whole))
    results = [json.loads((f / "result.json").read_text()) | {"seconds": 0} for f in (cut, whole)]
    assert results[0] == results[1]
    logs = [[line.split(",")[:4] for line in (f / "log.csv").read_text().splitlines()] for f in (cut, whole)]
    assert logs[0] == logs[1]  # step, trials, loss, accuracy on the training trials


@pytest.mark.parametrize("error", [ValueError("too many values to unpack"), RuntimeError("a single memory location")])
def test_a_bug_keeps_its_traceback(tmp_path, monkeypatch, error):
    """Whoever changes a model, as every exercise does, must see where it fails."""
    def features(*tokens):
        raise error

    run(tmp_path)
    monkeypatch.setattr(evaluation.module_of("sstfmr").Model, "features", features)
    with pytest.raises(type(error), match=str(error)):
        run(tmp_path, "--seed", "1")
    with pytest.raises(type(error), match=str(error)):
        evaluation.main([str(tmp_path), "--n", "10", "--device", "cpu"])


def test_jobs_side_by_side_give_the_same_bits(tmp_path, capsys):
    flags = ["--model", "rnn", "--split", "systematic1", "--seed", "0", "1", "--steps", "3"]  # few and quick test sets
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))  # as many as each job has: with others, sums are added in another order
    alone = run(tmp_path / "alone", *flags)
    torch.set_num_threads(threads)
    capsys.readouterr()
    together = run(tmp_path / "together", *flags, "--jobs", "2")
    assert "1 of 2 runs are done" in capsys.readouterr().out
    assert len(together) == 2 and all(same(weights(a), weights(b)) for a, b in zip(alone, together, strict=True))


@pytest.mark.parametrize("where", ["prepare", "make_optimizers", "predict"])
def test_a_ctrl_c_that_python_drops_is_remembered(tmp_path, capsys, monkeypatch, where):
    """Inside a destructor, a KeyboardInterrupt is only printed: here before a run, as it begins, and at an evaluation."""
    original = getattr(train, where)

    def interrupted(*args):
        monkeypatch.setattr(train, where, original)  # once
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return original(*args)

    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(train, where, interrupted)
    with pytest.raises(SystemExit) as stop:
        run(tmp_path)
    assert stop.value.code == 130 and "goes on from the last checkpoint" in capsys.readouterr().out
    assert not list(tmp_path.rglob("result.json")) and signal.getsignal(signal.SIGINT) is before
    run(tmp_path)
    assert list(tmp_path.rglob("result.json"))


@pytest.mark.slow
def test_ctrl_c_saves_all_jobs(tmp_path):
    flags = ("--seed", "0", "1", "2", "--steps", "4000", "--eval-every", "2", "--jobs", "2")
    process = start(tmp_path, *flags, start_new_session=True)
    while len(list(tmp_path.rglob("checkpoint.pt"))) < 2:
        time.sleep(0.01)
        assert process.poll() is None
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "goes on from the last checkpoint" in out and "Traceback" not in err
    assert "\x1b[A" in err  # two lines for two bars: after drawing the lower one, the cursor goes up again
    assert len(list(tmp_path.rglob("checkpoint.pt"))) == 2 and not list(tmp_path.rglob("result.json"))


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, "--lr", "1e30", "--optimizer", "adamw", "--eval-every", "1")
    assert re.search(r"the loss is (nan|inf) at step \d; what .* holds is older. Try a lower --lr", stop.value.code)


def test_evaluation_agrees_with_training(tmp_path, capsys):
    folder, = run(tmp_path)
    result = json.loads((folder / "result.json").read_text())
    capsys.readouterr()
    tables = []
    for flags in ([], ["--saved"]):
        evaluation.main([str(tmp_path), "--n", "200", "--device", "cpu", *flags])
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]
    for value in result["accuracy"].values():
        assert f"{100 * value:.1f}" in tables[0]
    assert "chance" in tables[0] and "no binding" in tables[0]


def test_evaluation_flags(tmp_path, capsys):
    folder, = run(tmp_path)
    run(tmp_path, "--seed", "1")
    capsys.readouterr()

    def output(*flags):
        evaluation.main([str(tmp_path), "--n", "100", *flags])
        return capsys.readouterr().out

    assert "ProductOdd" in output("--per-operator") and "ProductOdd" not in output()
    assert output("--markdown").lstrip().startswith("| distractor, accuracy in %")
    assert "2 seeds" in output() and "±" in output()
    shown = output("--show", "2")
    assert shown.count("The model says:") == 4 and shown.count("Answer:") == 4
    config = config_of(folder)
    (folder / "config.json").write_text(json.dumps(config | {"commit": "abc"}))
    assert "These rows differ in commit" in output() and "counted as several" not in output()
    shutil.copytree(tmp_path, tmp_path / "copy")
    assert "Some of these runs have one model, settings and seed, and are counted as several." in output()


@pytest.mark.parametrize("damage", ["checkpoint", "config", "format", "model", "split", "log", "nothing"])
def test_evaluation_says_what_is_wrong_with_a_folder(tmp_path, capsys, damage):
    folder, = run(tmp_path)
    if damage == "checkpoint":
        os.truncate(folder / "checkpoint.pt", 1000)
    elif damage == "config":
        (folder / "config.json").write_text("{")
    elif damage == "log":
        (folder / "log.csv").write_text("step,trials\n1,8\n")
    elif damage == "nothing":
        (folder / "config.json").unlink()
    else:
        change = {damage: {"format": 99, "model": "../../x", "split": "nowhere"}[damage]}
        (folder / "config.json").write_text(json.dumps(config_of(folder) | change))
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        evaluation.main([str(tmp_path), "--n", "50"])
    assert stop.value.code == 2
    assert {"nothing": "no run in", "checkpoint": "does not hold a readable run"}.get(damage, "is damaged") in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("name", evaluation.available())
def test_peak_memory_of_training(tmp_path, name):
    """Two steps (depths 1 and 3) at batch 512 and width 256, in a process of its own: under 3 GiB, test sets aside."""
    code = ("import resource, sys, train; train.LOG_TRIALS = train.TEST_TRIALS = 10; train.main(sys.argv[1:]); "
            "print('peak', resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)")  # KiB on Linux
    flags = ["--model", name, "--split", "productive", "--dim", "256", "--batch-size", "512", "--steps", "2",
             "--device", "cpu", "--out", tmp_path]
    out = subprocess.run([sys.executable, "-c", code, *flags], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    peak = int(out.split("peak ")[1]) / 2 ** 20
    print(f"{name}: {peak:.2f} GiB")
    assert peak < 3


def test_a_new_file_in_models_is_a_model(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.py").write_text("import torch\n\n\nclass Model(torch.nn.Module):\n    pass\n")
    (tmp_path / "models" / "helper.py").write_text("Model = None\n")
    monkeypatch.setattr(evaluation, "__file__", str(tmp_path / "eval.py"))
    assert evaluation.available() == ["mine"]


def test_wilson_interval():
    """Worked by hand from the formula: 50 of 100 and 0 of 10."""
    assert evaluation.wilson(0.5, 100) == pytest.approx([0.4038, 0.5962], abs=1e-4)
    assert evaluation.wilson(0.0, 10) == pytest.approx([0.0, 0.2775], abs=1e-4)


def test_baselines_by_hand():
    """Four trials of depth 1: three objects, a red a (cell 0), a blue b (cell 1) and a red c (cell 2)."""
    red, blue = 1, 3
    stimulus = torch.zeros(4, 100, 2, dtype=torch.int32)
    stimulus[:, 0], stimulus[:, 1], stimulus[:, 2] = torch.tensor([[1, red], [2, blue], [3, red]])
    instruction = torch.tensor([[[data.EXIST, 1, blue, 0, 0]], [[data.GET_LOCATION, 1, red, 0, 0]], [[data.GET_COLOR, 2, 0, 0, 0]],
                                [[data.GET_SHAPE, 0, blue, 0, 0]]])
    trials = data.Trials(instruction, stimulus, torch.tensor([data.FALSE, data.FIRST_CELL, data.FIRST_COLOR + blue - 1,
                                                              data.FIRST_SHAPE + 1]))
    operator = instruction[:, 0, 0]
    assert evaluation.chance(trials, operator).tolist() == [1, 1, 1, 1]  # one trial per operator: its answer is a constant
    expected = torch.tensor([0, 1 / 3, 2 / 3, 1 / 3])  # a and blue are both there: it says True; two of three are red
    torch.testing.assert_close(evaluation.no_binding(trials, instruction[:, 0]), expected)
