"""What goes wrong with files: one line says what happened, and nothing that was good is lost."""
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import eval as evaluation
import train
from test_input import refusal
from test_train import ROOT, TINY, run, same, small_test_sets, start, weights  # noqa: F401


def refused(capsys, out, *flags):
    return refusal(capsys, train, [*TINY, *flags, "--out", out])


def unfinished(out):
    """A run of which only the result is missing, so that it goes on from its checkpoint."""
    folder, = run(out)
    (folder / "result.json").unlink()
    return folder


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


def other_model(path):
    torch.save(torch.load(path, weights_only=True) | {"model": {"readout.weight": torch.zeros(2)}}, path)


def one_optimizer(path):
    state = torch.load(path, weights_only=True)
    torch.save(state | {"optimizer": state["optimizer"][:1]}, path)


@pytest.mark.parametrize("damage", [truncate, other_model, one_optimizer, lambda path: path.write_bytes(b"")])
def test_a_damaged_or_foreign_checkpoint_is_refused_and_left_alone(tmp_path, capsys, damage):
    folder = unfinished(tmp_path)
    damage(folder / "checkpoint.pt")
    before = (folder / "checkpoint.pt").read_bytes()
    line = refused(capsys, tmp_path)
    assert "checkpoint.pt is damaged, or of another run or other code (" in line and f"remove {folder} to begin anew" in line
    assert (folder / "checkpoint.pt").read_bytes() == before


def test_a_checkpoint_is_data_and_never_code(tmp_path, capsys):
    """A pickle that would run a command when loaded is refused, and the command is not run."""
    class Attack:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'hacked'}",)

    folder = unfinished(tmp_path)
    torch.save({"model": Attack()}, folder / "checkpoint.pt")
    assert "is damaged" in refused(capsys, tmp_path)
    with pytest.raises(SystemExit):
        evaluation.main([str(tmp_path)])
    assert "does not hold a readable run" in capsys.readouterr().err and not (tmp_path / "hacked").exists()


def test_two_processes_do_not_train_in_one_folder(tmp_path, capsys):
    flags = ("--steps", "4000", "--eval-every", "2")
    process = start(tmp_path, *flags)
    while not list(tmp_path.rglob("checkpoint.pt")):
        time.sleep(0.01)
        assert process.poll() is None
    assert "another process is training in" in refused(capsys, tmp_path, *flags)
    process.send_signal(signal.SIGKILL)  # a killed process leaves no lock behind
    process.communicate()
    train.hold(next(tmp_path.rglob("checkpoint.pt")).parent).close()


def test_two_processes_that_begin_at_once_do_not_train_in_one_folder(tmp_path):
    """Both have seen that there is no config.json yet: one holds the folder when the other one writes it again."""
    config, = train.configurations(train.parse(TINY)[1])
    train.prepare(config, tmp_path)
    with train.hold(tmp_path):
        train.write(tmp_path / "config.json", (tmp_path / "config.json").read_text())
        with pytest.raises(evaluation.Refused, match="another process is training in"):
            train.hold(tmp_path)


@pytest.mark.parametrize("limit", [100, 30_000])
def test_a_full_disk_is_said_and_leaves_no_half_file(tmp_path, limit):
    """A limit on the size of files stands for the disk: it refuses config.json, or the first checkpoint."""
    code = (f"import resource, sys, train; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
            "train.LOG_TRIALS = train.TEST_TRIALS = 20; train.main(sys.argv[1:])")
    process = subprocess.run([sys.executable, "-c", code, *TINY, "--out", tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert process.returncode == 2 and "Traceback" not in process.stderr
    assert process.stderr.splitlines()[-1].endswith("File too large")
    assert {p.name for p in tmp_path.rglob("*.*")} == (set() if limit == 100 else {"config.json", "log.csv"})
    whole, = run(tmp_path)  # with room again, the same command goes on
    assert same(weights(whole), weights(run(tmp_path / "other")[0]))


def test_a_folder_that_cannot_be_made(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert "file" in refused(capsys, tmp_path / "file")


def test_a_folder_that_cannot_be_written(tmp_path, capsys, monkeypatch):
    """As if the disk had become read-only, which to root a folder never is."""
    folder = unfinished(tmp_path)
    before = {path: path.read_bytes() for path in folder.iterdir()}

    def read_only(path, mode="r", **options):
        if set(mode) & set("wax+"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open(path, mode, **options)

    monkeypatch.setattr(train, "open", read_only, raising=False)
    assert "Permission denied" in refused(capsys, tmp_path)
    assert {path: path.read_bytes() for path in folder.iterdir()} == before


def test_too_little_memory_is_said(tmp_path):
    """300 MiB above what the program has when it starts."""
    code = ("import resource, sys, train; kib = int(open('/proc/self/status').read().split('VmSize:')[1].split()[0]); "
            "limit = (kib + 300_000) * 1024; resource.setrlimit(resource.RLIMIT_AS, (limit, limit)); train.main(sys.argv[1:])")
    process = subprocess.run([sys.executable, "-c", code, *TINY, "--dim", "2048", "--out", tmp_path], cwd=ROOT,
                             capture_output=True, text=True)
    assert process.returncode == 2 and "Traceback" not in process.stderr
    assert "there is not enough memory: try a smaller --batch-size or --dim" in process.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_killed_job_is_said_and_can_go_on(tmp_path):
    """What a system does that runs out of memory."""
    flags = ("--seed", "0", "1", "--steps", "4000", "--eval-every", "2", "--jobs", "2")
    process = start(tmp_path, *flags)
    while len(list(tmp_path.rglob("checkpoint.pt"))) < 2:
        time.sleep(0.01)
        assert process.poll() is None
    jobs = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    job = next(int(pid) for pid in jobs if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text())
    os.kill(job, signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and "there is not enough memory" in err.splitlines()[-1] and "Traceback" not in err
    assert not list(tmp_path.rglob("*.tmp")) and len(list(tmp_path.rglob("checkpoint.pt"))) == 2


def test_the_same_command_gives_the_same_files(tmp_path):
    """But for times, and on a CPU with as many threads: with others, sums are added in another order."""
    first, second = (run(tmp_path / name, "--split", "productive")[0] for name in ("first", "second"))
    results = [json.loads((folder / "result.json").read_text()) | {"seconds": 0} for folder in (first, second)]
    logs = [[line.rsplit(",", 1)[0] for line in (folder / "log.csv").read_text().splitlines()] for folder in (first, second)]
    assert results[0] == results[1] and logs[0] == logs[1] and len(logs[0]) == 3
    assert same(weights(first), weights(second))
    assert (first / "config.json").read_text() == (second / "config.json").read_text()


@pytest.mark.parametrize("text", ["{", "[]", "7", json.dumps({"format": 99})])
def test_an_edited_config_is_refused(tmp_path, capsys, text):
    folder = unfinished(tmp_path)
    (folder / "config.json").write_text(text)
    line = refused(capsys, tmp_path)
    assert "config.json is damaged" in line and f"remove {folder}" in line


KILLED_AGAIN_AND_AGAIN = """
import os, pathlib, random, signal, sys, time, train
out, how, *flags = sys.argv[1:]
train.LOG_TRIALS, train.TEST_TRIALS = 50, 200
random.seed(0)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # until a new process is ready for it
for kills in range(11):  # the eleventh process may end
    process = os.fork()
    if process == 0:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # before train.main takes it
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
        try:
            train.main([*flags, "--out", out])
            os._exit(0)
        except SystemExit as stop:
            os._exit(stop.code)
    while kills < 10 and not list(pathlib.Path(out).rglob("checkpoint.pt")):
        time.sleep(0.001)
    if kills < 10:
        time.sleep(random.uniform(0, 0.3))
        os.kill(process, int(how))
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("flags", [(), ("--train-size", "24")], ids=["fresh", "fixed"])
@pytest.mark.parametrize("model", ["sstfmr", "gru", "treetfmr"])
def test_ten_kills_change_no_bit(tmp_path, model, flags, how):
    """At random moments, the writing of checkpoints included: there is one after every step."""
    flags = ("--model", model, "--split", "systematic1", "--steps", "300", "--eval-every", "1", *flags)
    whole, = run(tmp_path / "whole", *flags)
    process = subprocess.run([sys.executable, "-c", KILLED_AGAIN_AND_AGAIN, tmp_path / "cut", str(int(how)), *TINY, *flags],
                             cwd=ROOT, capture_output=True, text=True, check=True)
    codes = [int(line) for line in process.stdout.splitlines() if re.fullmatch("-?[0-9]+", line)]
    assert codes == 10 * [130 if how == signal.SIGINT else -9] + [0], process.stderr
    cut = next((tmp_path / "cut").rglob("result.json")).parent
    assert same(weights(cut), weights(whole))
    assert not list(cut.glob("*.tmp"))
