"""The four pages keep their word: every command runs at reduced size, every exercise's edit applies, every table is
printed from the recorded runs, links resolve."""
import importlib.util
import itertools
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
PAGES = {page: (ROOT / page).read_text() for page in ("README.md", "models/README.md", "tests/README.md", "tests/RESULTS.md")}
README, TEXT = PAGES["README.md"], "\n".join(PAGES.values())
TABLES = re.findall(r"^<!-- python (\S+) (.*) -->\n\n((?:\|.*\n)+)", TEXT, re.M)  # each with the command that printed it
PICTURES = re.findall(r"^<!-- drawn by python (\S+) (.* --plot (\S+)) -->$", TEXT, re.M)
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.S | re.M)  # language and text
FIRST = ("eval.py", "recorded/distractor/sstfmr/layers1-heads1/seed0",
         next(block for _, block in BLOCKS if block.startswith("distractor, accuracy")))  # what README's command prints
SECTION = README.split("## Exercises")[1].split("\n## ")[0]
EXERCISES = [" ".join(text.split()) for text in re.split(r"^\d+\. ", SECTION, flags=re.M)[1:]]
COMMANDS = [line.split("#")[0][7:] for _, block in BLOCKS for line in block.splitlines()
            if line.startswith("python ") and not line.startswith("python -m pytest")]  # that is this very run
COMMANDS += [" ".join(command.split()) for command in re.findall(r"`python (?!-m pytest)([^`]+)`", TEXT.replace(SECTION, ""))]
SMALLER = {"train.py": ["--steps", "1", "--batch-size", "8", "--device", "cpu", "--seed", "0"], "eval.py": ["--n", "20"],
           "tests/mutants.py": ["--only", "gru"]}
PROGRAMS = {"train.py": train, "eval.py": evaluation, "data.py": data, "tests/bench.py": bench, "tests/claims.py": claims,
            "tests/mutants.py": mutants}


def test_commands_run(tmp_path, monkeypatch, capsys):
    """In this process, and smaller."""
    monkeypatch.chdir(tmp_path)
    for module, name, value in ((train, "LOG_TRIALS", 20), (train, "TEST_TRIALS", 20), (data, "CHUNK", 200),
                                (bench, "REPEATS", 1), (bench, "BATCH", 4), (evaluation, "RSA_TRIALS", 20),
                                (train, "available", lambda: ["rnn", "treetfmr"])):  # what `--model all` stands for
        monkeypatch.setattr(module, name, value)
    assert len(COMMANDS) > 10
    for command in COMMANDS:
        program, *arguments = shlex.split(command)
        if "--plot" not in command or importlib.util.find_spec("matplotlib"):  # tests/test_eval.py sees what it says then
            assert not PROGRAMS[program].main(arguments + SMALLER.get(program, [])), command  # no mutant lives
            assert capsys.readouterr().out.strip(), command


def test_the_trial_in_the_readme_is_what_its_command_prints(capsys):
    data.main(["--split", "productive", "--subset", "depth3", "--n", "1"])
    assert (trial := capsys.readouterr().out) in README and "Answer: " in trial
    data.main(["--subset", "depth3", "--n", "2", "--seed", "4"])
    assert (others := capsys.readouterr().out).count("Answer: ") == 2 and trial not in others


def edits(text):
    return re.findall(r"In `(\S+)`, `([^`]+)` becomes `([^`]+)`", text)


def test_edits_of_exercises_and_mutants_have_one_place():
    assert len(EXERCISES) > 5 and len([text for text in EXERCISES if edits(text)]) > 3
    changes = [(file, *change) for (file, _), found in mutants.MUTANTS.items() for change in found]
    for file, old, new in [*changes, *edits(" ".join(EXERCISES))]:
        assert (ROOT / file).read_text().count(old) == 1 and old != new


def copy(folder, changes):
    """The repository in another folder, with (file, old, new) changed."""
    for part in ("data.py", "eval.py", "train.py", "README.md", "models", "tests", ".github"):
        (shutil.copytree if (ROOT / part).is_dir() else shutil.copy)(ROOT / part, folder / part)
    for file, old, new in changes:
        (folder / file).write_text((folder / file).read_text().replace(old, new, 1))


def red(folder, *arguments):
    """The names of the tests that fail there."""
    out = subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments], cwd=folder, capture_output=True, text=True).stdout
    assert " passed" in out, out
    return {re.sub(r".*::|\[.*", "", name) for name in re.findall(r"^(?:FAILED|ERROR) (\S+)", out, re.M)}


IN_A_COPY = """
import importlib, shlex, sys
sys.path[:0] = [".", "tests"]
import data, train
train.LOG_TRIALS = train.TEST_TRIALS = 20
data.CHUNK = 200
for command in sys.argv[1:]:
    program, *arguments = shlex.split(command)
    importlib.import_module(program.removesuffix(".py")).main(arguments)
"""


@pytest.mark.slow
@pytest.mark.parametrize("text", EXERCISES, ids=[text.split(".")[0].strip("*") for text in EXERCISES])
def test_exercises_can_be_done(tmp_path, text):
    """In a copy with their edits, their commands run. An edited model turns those tests red that say what it was."""
    copy(tmp_path, edits(text))
    commands = [" ".join([command, *SMALLER.get(command.split()[0], [])]) for command in
                re.findall(r"`python ([^`]+)`", text) if not command.startswith("-m")]
    done = subprocess.run([sys.executable, "-c", IN_A_COPY, *commands], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("accuracy") >= len(commands)
    for file in {file for file, _, _ in edits(text) if file.startswith("models/")}:
        assert red(tmp_path, "tests/test_models.py", "-k", f"{Path(file).stem} or copies") <= {
            "test_classes_of_the_same_name_are_copies", "test_model_equals_its_copy_from_torch_modules",
            "test_compact_stimulus_is_exact", "test_attention_and_block_equal_torch",
            "test_absent_second_selectors_are_not_seen",
            "test_every_trial_gets_logits_of_its_own_at_any_depth"}  # a mean counts the batch's tokens for empty cells


EASY = """SPLITS = {
    "easy": {"train": Subset(), "iid": Subset(), "more": Subset(distractors=(9, 9))},
    "odd": {"train": Subset(depths=(3,), distractors=(2, 4)), "test": Subset(depths=(3,), distractors=(2, 4)),
            "far": Subset(pools=(Pool(leaves=(EXIST, GET_SHAPE)),), distractors=(60, 60))},"""


@pytest.mark.slow
def test_what_a_student_adds_turns_nothing_red(tmp_path):
    """Two splits, a test set and a model: a changed copy, as in exercise 5."""
    more = '"iid": Subset(), "distractors60": Subset(distractors=(60, 60)),'
    copy(tmp_path, [("data.py", '"iid": Subset(),', more), ("data.py", "SPLITS = {", EASY)])
    model = (ROOT / "models" / "gru.py").read_text()
    (tmp_path / "models" / "lstm.py").write_text(model.replace("0.01 *", "0.02 *").replace("self.stimulus", "self.grid"))
    assert red(tmp_path) == set()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The run folders behind the tables, unpacked as the README says."""
    folder = tmp_path_factory.mktemp("results")
    shutil.unpack_archive(ROOT / "tests" / "recorded.tar.gz", folder)
    (folder / ".github").mkdir()  # for the pictures
    return folder


@pytest.mark.parametrize("program, arguments, table", [*TABLES, *PICTURES, FIRST], ids=itertools.count())
def test_tables_and_pictures_come_from_recorded_runs(recorded, monkeypatch, capsys, program, arguments, table):
    """Whatever the code has become since: the next test says whether it is that of the runs. Pictures are only drawn."""
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(recorded)
    monkeypatch.setattr(evaluation, "is_current", lambda config: True)
    monkeypatch.setattr(evaluation, "tests_of", lambda split: evaluation.read(
        next(Path("recorded").rglob(f"{split}/**/result.json")))["tests"])
    PROGRAMS[program].main(arguments.split())
    assert table in capsys.readouterr().out


def test_recorded_runs_are_of_this_code(recorded):
    configs = [evaluation.read(path) for path in recorded.rglob("config.json")]
    changed = {(c["model"], c["split"]) for c in configs if not evaluation.is_current(c)}
    assert configs and not changed, f"these have changed since their runs were recorded: {sorted(changed)}"


def test_every_table_of_results_names_its_command():
    found = re.findall(r"^\| (?:claim|rank correlation|accuracy in %|[a-z0-9]+, accuracy in %) ", TEXT, re.M)
    assert len(TABLES) == len(found)


def test_code_and_sizes_of_models_are_quoted_right():
    sources = [path.read_text().splitlines() for path in (ROOT / "models").glob("*.py")]
    quoted = [line for language, block in BLOCKS if language == "python" for line in block.splitlines()]
    assert len(quoted) > 5 and all(any(line in source for source in sources) for line in quoted)
    sizes = dict(re.findall(r"^\| `(\w+)\.py` .* ([\d,]+) \|$", PAGES["models/README.md"], re.M))
    for name in evaluation.available():
        if name in sizes:  # a student's model has no row
            parameters = sum(p.numel() for p in evaluation.module_of(name).Model().parameters())
            assert sizes[name] == f"{parameters:,}"
    assert len(sizes) == 9


def test_links_resolve():
    for page, text in PAGES.items():
        for link in re.findall(r"\]\(([^)#]+)[^)]*\)", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)):
            assert link.startswith("https://") or (ROOT / page).parent.joinpath(link).exists(), (page, link)
