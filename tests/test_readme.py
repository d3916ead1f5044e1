"""The five pages keep their word: commands run at reduced size, edits of exercises apply, tables
are printed from the recorded runs, links resolve."""
import importlib.util
import itertools
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import bench
import claims
import data
import eval as evaluation
import mutants
import train
import why
from models import module_of

ROOT = Path(__file__).parents[1]
PAGES = {page: (ROOT / page).read_text(encoding="utf-8") for page in
         "README.md models/README.md models/EXERCISES.md tests/README.md tests/RESULTS.md".split()}
README, TEXT = PAGES["README.md"], "\n".join(PAGES.values())
TABLES = re.findall(r"((?:(?:^\|.*\n)+\n)+)<sub>`python (.*)`</sub>", TEXT, re.M)
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.S | re.M)  # language and text
EXERCISES = re.split(r"^## \d\. ", PAGES["models/EXERCISES.md"], flags=re.M)[1:]
OWN = r"\bex\d|rows|lstm"  # a command of runs that need an edit or a training of one's own
(ROW_EVEN, ROWS), = (block.splitlines() for _, block in BLOCKS if block.startswith('"RowEven"'))
SMALLER = {"train.py": "--steps 1 --batch-size 8 --device cpu --seed 0".split(),
           "tests/mutants.py": ["--only", "gru", "--n", "1"]}
MATPLOTLIB, DRAWS = importlib.util.find_spec("matplotlib"), "--attention|png"
LARGER = pytest.mark.skipif(len(data.OPERATORS) > 9, reason="the archived weights are smaller")


def commands(text):
    """What stands after `python` in blocks and between backticks, but the tests."""
    found = re.findall(r"^python (\S+\.py.*?)(?:#|$)", text, re.M)
    found += re.findall(r"`python\s(\S+\.py[^`]*)`", text)
    return [" ".join(command.split()) for command in found]


def edits(text):
    return re.findall(r"In\s`(\S+)`,\s`([^`]+)`\sbecomes\s`([^`]+)`", text)


def run(command):
    """Runs it in this process, and smaller; what draws, only where matplotlib is."""
    program, *arguments = shlex.split(command)
    if MATPLOTLIB or not re.search(DRAWS, command):
        importlib.import_module(Path(program).stem).main(arguments + SMALLER.get(program, []))


def run_own(folder, text):
    """The commands of a text that only run after its edits, in a copy that has these."""
    for old, new in re.findall(r"Copy\s`(\S+)`\sto\s`(\S+)`", text):
        shutil.copy(folder / old, folder / new)
    code = "import conftest, sys, test_readme; [*map(test_readme.run, sys.argv[1:])]"
    own = [command for command in commands(text) if re.search(OWN, command)]
    done = subprocess.run([sys.executable, "-c", code, *own], cwd=folder / "tests",
                          capture_output=True, text=True)
    assert own and done.returncode == 0, done.stderr
    assert done.stdout.count("accuracy") >= sum("train.py" in command for command in own)


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """The working directory: there the run folders behind the tables are unpacked."""
    for archive in "recorded.tar.gz", "weights.tar.gz":
        shutil.unpack_archive(ROOT / "tests" / archive, tmp_path)
    (tmp_path / ".github").mkdir()  # for the pictures
    monkeypatch.chdir(tmp_path)


@pytest.mark.slow
def test_commands_run(recorded, monkeypatch, capsys):
    for program, name, value in ((bench, "REPEATS", 1), (bench, "TRIALS", 20), (bench, "BATCH", 4),
                                 (why, "TRIALS", 50), (why, "FIT_TRIALS", 50)):
        monkeypatch.setattr(program, name, value)
    found = commands(re.sub("<sub>.*</sub>", "", TEXT))
    assert len(found) > 10
    for command in found:
        if not re.search(f"--help|{OWN}", command):
            run(command.replace("--model all", "--model rnn looptfmr"))
            silent = "--export" if MATPLOTLIB else f"--export|{DRAWS}"
            assert capsys.readouterr().out.strip() or re.search(silent, command), command


@LARGER
@pytest.mark.parametrize("block", [block for _, block in BLOCKS if "evaluation.load" in block])
def test_the_notebook_lines_run(recorded, capsys, block):
    exec(block.replace("1000", "20"), {})
    out = capsys.readouterr().out
    assert out.count("Answer: ") == 3 or out.count("tensor(") == 3  # trials, or loops


def test_the_picture_is_of_the_trial_that_its_command_prints():
    *tokens, answer = next(zip(*data.trials("productive", "depth3", 1)))
    svg = (ROOT / ".github" / "trial.svg").read_text()
    words = " ".join(re.findall(r">([^<>]+)</text>", svg))
    questions = re.findall(r": (.*)", data.describe(data.evaluate(*tokens)))
    assert all(text in words for text in [*questions, data.ANSWERS[answer]])


def test_edits_of_exercises_have_one_place():
    found = edits(PAGES["models/EXERCISES.md"])
    assert len(EXERCISES) > 5 and len(found) > 2
    for file, old, new in found:
        assert (ROOT / file).read_text(encoding="utf-8").count(old) == 1 and old != new, old


@pytest.mark.slow
@pytest.mark.parametrize("text", EXERCISES, ids=[text.split("\n")[0] for text in EXERCISES])
def test_exercises_can_be_done(tmp_path, text):
    """In a copy with their edits, their commands run, and the tests of other models are green."""
    mutants.copy(tmp_path, edits(text))
    run_own(tmp_path, text)
    for name in set(re.findall(r"In\s`models/(\w+)\.py`", text)):
        assert not mutants.red(tmp_path, "tests/test_models.py", "-k", f"not {name} and not copies")


@pytest.mark.slow
def test_what_a_student_adds_turns_nothing_red(tmp_path):
    """The README's operator, split and model, and a test set."""
    last = '"IfElse": Operator("", objects=()),'
    mutants.copy(tmp_path, [
        ("data.py", last, f"{last}\n{ROW_EVEN}"),
        ("data.py", "SPLITS = {", f"SPLITS = {{\n    {ROWS}"),
        ("data.py", '"iid": Subset(),', '"iid": Subset(), "m60": Subset(distractors=(60, 60)),')])
    run_own(tmp_path, README)
    model = tmp_path / "models" / "lstm.py"
    model.write_text(model.read_text().replace("self.stimulus", "self.grid"))
    assert not mutants.red(tmp_path)


@pytest.mark.parametrize("table, command", [
    pytest.param(*found, marks=[pytest.mark.slow, LARGER] if "ways" in found[1] else ())
    for found in TABLES], ids=itertools.count())
def test_tables_come_from_recorded_runs(recorded, monkeypatch, capsys, table, command):
    """Each is printed by the command below it."""
    monkeypatch.setattr(evaluation, "TEST_TRIALS", 10_000)
    run(command)
    assert table.strip() in capsys.readouterr().out


@pytest.mark.parametrize("page, folder, tests", [
    ("README.md", "recorded/fourth/productive", ["depth3", "depth5", "depth7", "depth9"]),
    ("tests/RESULTS.md", "recorded/third/distractor", ["iid", "distractors40"])])
def test_rungs_have_the_numbers_of_their_runs(recorded, page, folder, tests):
    """A numbered row holds the flags of its runs, how many of them have learned, and accuracy."""
    rows = re.findall(r"^\|\d+[bc]?\|[^`]*`([^`]*)`[^|]*\|(.*)\|$", PAGES[page], re.M)
    assert len(rows) > 5
    for flags, cells in rows:
        config, = train.configurations(["--device", "cpu", *flags.split()])
        runs = Path(folder, config["model"], config["settings"]).rglob("result.json")
        found = [evaluation.read(path)["accuracy"] for path in runs]
        expected = [evaluation.percent([accuracy[test] for accuracy in found]) for test in tests]
        learned = sum(accuracy[tests[0]] >= claims.LEARNED for accuracy in found)
        assert cells.split("|") == [f"{learned}/{len(found)}", *expected], flags


def test_runs_of_other_editions_have_rows_of_their_own(recorded, capsys):
    evaluation.main(["recorded/fourth/productive/looptfmr/viewall", "recorded/exercise7"])
    out = capsys.readouterr().out
    assert "(viewall), 5 seeds " in out and "first row of its name in edition." in out


@pytest.mark.slow
def test_recorded_runs_begin_as_today(recorded):
    """Ten steps of every recorded setting give loss and accuracy of the first row of its log."""
    settings = {path.parents[1]: path for path in Path("recorded/fourth").rglob("config.json")}
    assert len(settings) > 8
    for path in settings.values():
        config = evaluation.config_of(path.parent) | {"device": "cpu"}
        model, optimizers = train.build(config)
        batches = data.Batches(*map(config.get, ("split", "batch_size", "seed", "train_size")))
        total = sum(train.learn(model, optimizers, batches[step], train.rate(
            step, config["steps"], config["schedule"]), "cpu") for step in range(10))
        first = evaluation.read(path.with_name("result.json"))["log"][0]
        expected = torch.tensor([first["loss"], first["train"]])
        # on another CPU, rounding may turn an answer or two
        torch.testing.assert_close(total / 10, expected, atol=2e-3, rtol=0, msg=str(path))


def test_claims_are_those_of_the_judge(recorded, capsys):
    claims.main(["recorded/fourth"])
    lines = re.findall(r"^\d\. .* open.*$", PAGES["tests/RESULTS.md"], re.M)
    ours, *_ = capsys.readouterr().out.split("Our models on our trials:")[1].split("\n\nThe ")
    assert ours.strip().splitlines() == lines and len(lines) == 9


def test_code_and_sizes_of_models_are_quoted_right():
    lines = {line for path in (ROOT / "models").glob("*.py")
             for line in path.read_text().splitlines()}
    quoted = {line for language, block in BLOCKS if language == "python" and "import" not in block
              for line in block.splitlines()}
    assert len(quoted) > 5 and quoted <= lines
    sizes = re.findall(r"^\| `(\w+)\.py` .* ([\d,]+) \|$", PAGES["models/README.md"], re.M)
    assert len(sizes) == 11
    for name, size in sizes if len(data.OPERATORS) == 9 else ():  # a student's operator adds rows
        assert size == f"{sum(p.numel() for p in module_of(name).Model().parameters()):,}"


def test_links_resolve_and_tables_of_results_name_their_command():
    titles = r"^\| (?:hidden states|looptfmr at depth 5|(?:\w+, )?accuracy in %)[, ]"
    assert len(TABLES) == len(re.findall(titles, TEXT, re.M))
    for page, text in PAGES.items():
        text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
        for link, heading in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", text):
            path = (ROOT / page).parent / link if link else ROOT / page
            assert link.startswith("https://") or path.exists(), (page, link)
            page_there = path.read_text(encoding="utf-8") if heading else ""
            names = re.findall(r"^#+ (.*)$", page_there, re.M)
            slugs = [re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in names]
            assert not heading or heading in slugs, (page, heading)
