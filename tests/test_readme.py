"""The README keeps its word: every command runs at reduced size, every exercise's edit applies, every table is printed
from the recorded runs, links resolve."""
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bench
import claims
import data
import eval as evaluation
import mutants
import train

ROOT = Path(__file__).parents[1]
PAGES = {page: (ROOT / page).read_text() for page in ("README.md",)}
README = PAGES["README.md"]
TABLES = re.findall(r"^<!-- python (\S+) (.*) -->\n\n((?:\|.*\n)+)", README, re.M)  # each with the command that printed it
BLOCKS = re.findall(r"^```\n(.*?)^```", README, re.S | re.M)
SECTION = README.split("## Exercises")[1].split("\n## ")[0]
EXERCISES = [" ".join(text.split()) for text in re.split(r"^\d+\. ", SECTION, flags=re.M)[1:]]
INLINE = [command for text in EXERCISES for command in re.findall(r"`python ([^`]+)`", text)]
COMMANDS = [line.split("#")[0][7:] for block in BLOCKS for line in block.splitlines() if line.startswith("python ")]
SMALLER = {"train.py": ["--steps", "1", "--batch-size", "8", "--device", "cpu"], "eval.py": ["--n", "20"],
           "tests/mutants.py": ["--only", "gru"]}


def run(command):
    """Runs one of the README's commands in this process, smaller."""
    program, *arguments = shlex.split(command)
    if program == "-m":
        assert arguments[0] == "pytest"  # this very run
        return
    if "--plot" in arguments and not importlib.util.find_spec("matplotlib"):
        return  # tests/test_eval.py sees what it says then
    programs = {"train.py": train, "eval.py": evaluation, "data.py": data, "tests/bench.py": bench,
                "tests/claims.py": claims, "tests/mutants.py": mutants}
    assert not programs[program].main(arguments + SMALLER.get(program, [])), command  # no mutant lives


def smaller(monkeypatch):
    for module, name, value in ((train, "LOG_TRIALS", 20), (train, "TEST_TRIALS", 20), (data, "CHUNK", 200),
                                (bench, "REPEATS", 1), (bench, "BATCH", 4), (evaluation, "RSA_TRIALS", 20)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(train, "available", lambda: ["rnn", "treetfmr"])  # what `--model all` stands for


def test_commands_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    smaller(monkeypatch)
    assert len(COMMANDS) > 10
    for command in COMMANDS:
        run(command)
        assert capsys.readouterr().out.strip() or command.startswith("-m"), command


@pytest.mark.parametrize("text", EXERCISES, ids=[text.split(".")[0].strip("*") for text in EXERCISES])
def test_exercises_can_be_done(tmp_path, text):
    """Their edits apply to a copy, to one place each, and their commands run there."""
    for part in ("data.py", "eval.py", "train.py", "models", "tests"):
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, tmp_path / part)
    for file, old, new in re.findall(r"In `(\S+)`, `([^`]+)` becomes `([^`]+)`", text):
        source = (tmp_path / file).read_text()
        assert source.count(old) == 1 and old != new
        (tmp_path / file).write_text(source.replace(old, new))
    assert INLINE
    for command in re.findall(r"`python ([^`]+)`", text):
        program, *arguments = shlex.split(command)
        if program == "-m":
            continue
        setup = "" if program.startswith("tests") else "import train, data; train.LOG_TRIALS = train.TEST_TRIALS = 20; data.CHUNK = 200; "
        code = f"import sys; sys.path[:0] = ['.', 'tests']; {setup}import {program[:-3].replace('/', '.')} as p; p.main(sys.argv[1:])"
        done = subprocess.run([sys.executable, "-c", code, *arguments, *SMALLER.get(program, [])], cwd=tmp_path,
                              capture_output=True, text=True)
        assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The run folders behind the tables, unpacked as the README says."""
    if not (ROOT / "tests" / "recorded.tar.gz").exists():
        pytest.skip("the runs are being recorded")
    folder = tmp_path_factory.mktemp("results")
    shutil.unpack_archive(ROOT / "tests" / "recorded.tar.gz", folder)
    return folder


@pytest.mark.parametrize("program, arguments, table", TABLES, ids=range(len(TABLES)))
def test_tables_are_printed_from_recorded_runs(recorded, monkeypatch, capsys, program, arguments, table):
    """Whatever the code has become since: the next test says whether it is that of the runs."""
    monkeypatch.chdir(recorded)
    monkeypatch.setattr(evaluation, "is_current", lambda config: True)
    monkeypatch.setattr(evaluation, "tests_of", lambda split: evaluation.read(
        next(Path("recorded").rglob(f"{split}/**/result.json")))["tests"])
    {"eval.py": evaluation, "tests/claims.py": claims}[program].main(arguments.split())
    assert table in capsys.readouterr().out


def test_recorded_runs_are_of_this_code(recorded):
    configs = [evaluation.read(path) for path in recorded.rglob("config.json")]
    changed = {(c["model"], c["split"]) for c in configs if not evaluation.is_current(c)}
    assert configs and not changed, f"these have changed since their runs were recorded: {sorted(changed)}"


def test_every_table_of_results_names_its_command():
    found = re.findall(r"^\| (?:claim|rank correlation|[a-z0-9]+, accuracy in %) ", README, re.M)
    assert len(TABLES) == len(found)


def test_links_resolve():
    for page, text in PAGES.items():
        for link in re.findall(r"\]\(([^)#]+)\)", text):
            assert link.startswith("https://") or (ROOT / page).parent.joinpath(link).exists(), (page, link)


def test_every_mutant_has_one_place():
    for (file, _), changes in mutants.MUTANTS.items():
        source = (ROOT / file).read_text()
        assert all(source.count(old) == 1 and old != new for old, new in changes)
