"""Every command of the README runs, at reduced size, in the README's order."""
import importlib.util
import inspect
import itertools
import re
import shlex
import shutil
from pathlib import Path

import pytest

import ablations
import bench
import claims
import data
import eval as evaluation
import mutants
import train

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TABLES = re.findall(r"^<!-- python (\S+) (.*) -->\n\n((?:\|.*\n)+)", README, re.M)  # each with the command that printed it
BLOCKS = re.findall(r"^```\n(.*?)^```", README, re.S | re.M)
NAMES = re.findall(r"^`models/(\w+)\.py`$", README, re.M)  # a diagram follows each
COMMANDS = [line.split("#")[0] for block in BLOCKS for line in block.splitlines() if line.startswith("python ")]


def test_readme_commands_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(train, "LOG_TRIALS", 20)
    monkeypatch.setattr(train, "TEST_TRIALS", 20)
    monkeypatch.setattr(data, "CHUNK", 200)
    monkeypatch.setattr(bench, "REPEATS", 1)
    monkeypatch.setattr(bench, "BATCH", 4)
    monkeypatch.setattr(evaluation, "PROBE_TRIALS", 60)
    monkeypatch.setattr(evaluation, "RSA_TRIALS", 60)
    monkeypatch.setattr(train, "available", lambda: ["rnn", "treetfmr"])  # what `--model all` stands for
    programs = {"train.py": (train.main, ["--steps", "1", "--batch-size", "8", "--device", "cpu", "--jobs", "1", "--seed", "0"]),
                "eval.py": (evaluation.main, ["--n", "20"]),
                "data.py": (data.main, []), "tests/bench.py": (bench.main, []),
                "tests/claims.py": (claims.main, []), "tests/mutants.py": (mutants.main, ["--only", "gru"]),
                "tests/ablations.py": (ablations.main, ["--steps", "1", "--batch-size", "8", "--device", "cpu", "--seed", "0"])}
    assert len(COMMANDS) > 10
    for command in COMMANDS:
        program, *arguments = shlex.split(command)[1:]
        if program == "-m":
            assert arguments in (["pytest"], ["pytest", "--slow", "-s"])  # this very run
            continue
        main, smaller = programs[program]
        if "--plot" in arguments and not importlib.util.find_spec("matplotlib"):
            continue  # tests/test_eval.py sees what it says then
        assert not main(arguments + smaller), command  # no mutant lives
        assert capsys.readouterr().out.strip(), command


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The run folders behind the README's tables, unpacked as the README says."""
    folder = tmp_path_factory.mktemp("results")
    shutil.unpack_archive(ROOT / "tests" / "recorded.tar.gz", folder)
    return folder


@pytest.mark.parametrize("program, arguments, table", TABLES, ids=range(len(TABLES)))
def test_readme_tables_are_printed_from_recorded_runs(recorded, monkeypatch, capsys, program, arguments, table):
    monkeypatch.chdir(recorded)
    {"eval.py": evaluation, "tests/claims.py": claims}[program].main(arguments.split())
    assert table in capsys.readouterr().out


def test_every_table_of_results_names_its_command():
    assert len(TABLES) == len(re.findall(r"^\| (claim|rank correlation|[a-z0-9]+, (accuracy|decoded) in %) ", README, re.M)) > 5


def test_every_mutant_has_one_place():
    assert f"in {sum(map(len, mutants.MUTANTS.values()))} places" in README
    for (file, _), changes in mutants.MUTANTS.items():
        source = (ROOT / file).read_text()
        assert all(source.count(old) == 1 and old != new for old, new in changes)


@pytest.mark.parametrize("program", [train, evaluation, data])
def test_every_flag_has_help(program, capsys):
    with pytest.raises(SystemExit):
        program.main(["--help"])
    entries = re.findall(r"^  (--[a-z-]+)(.*(?:\n {4,}.*)*)", capsys.readouterr().out, re.M)
    assert len(entries) > 5 and all(re.search(r"\(default:\s", text) for _, text in entries)  # argparse adds it to a help text only


def test_readme_lists_the_working_sizes():
    for name in NAMES:
        module = evaluation.module_of(name)
        sizes = {key: p.default for key, p in inspect.signature(module.Model).parameters.items()}
        training = train.SCHEDULES["quick"] | {"optimizer": "muon"} | getattr(module, "QUICK", {})
        cells = [name, *(str(sizes.get(key, "")) for key in ("layers", "heads", "dim")),
                 f"{sum(p.numel() for p in module.Model().parameters()):,}", f"{training['steps']:,}",
                 str(training["batch_size"]), training["optimizer"]]
        assert re.search(r"^\| " + r" +\| +".join(map(re.escape, cells)) + r" +\|$", README, re.M), cells


@pytest.mark.parametrize("name", NAMES)
def test_readme_shows_the_diagram_of_every_model(name):
    """It stands in the README as it stands in the file: the indented part of the docstring, up to the first text."""
    assert len(NAMES) == 9
    lines = evaluation.module_of(name).__doc__.split("\n")[2:]
    diagram = list(itertools.takewhile(lambda line: not line or line.startswith("    "), lines))
    assert len(diagram) > 5 and "\n".join(diagram).strip("\n") in README
