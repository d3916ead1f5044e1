"""The pages keep their word: commands run at reduced size, edits of exercises apply, tables are
printed from the recorded runs, links resolve."""
import functools
import glob
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
import data
import eval as evaluation
import train
from models import module_of
from test_train import configurations

ROOT = Path(__file__).parents[1]
PAGES = {page: (ROOT / page).read_text(encoding="utf-8") for page in
         "README.md models/README.md models/EXERCISES.md models/RESULTS.md tests/README.md".split()}
README, TEXT = PAGES["README.md"], "\n".join(PAGES.values())
TABLES = re.findall(r"((?:^\|.*\n)+)\n<details>.*<code>python (.*)</code>", TEXT, re.M)
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.S | re.M)  # language and text
EXERCISES = re.split(r"^## \d\. ", PAGES["models/EXERCISES.md"], flags=re.M)[1:]
OWN = r"\bex\d|mine|rows"  # a command of runs that need an edit or a training of one's own
(ROW_EVEN, ROWS), = (block.splitlines() for _, block in BLOCKS if block.startswith('"RowEven"'))
TEMPLATE, = (block for _, block in BLOCKS if "class Model(" in block)
SMALLER = "--steps 1 --batch-size 8 --test-trials 10 --device cpu --seed 0".split()
as_shipped = pytest.mark.skipif(len(data.OPERATORS) > 9, reason="a student has added one")
MATPLOTLIB, DRAWS = importlib.util.find_spec("matplotlib"), "--attention|--plot|--curves"


def commands(text):
    """What stands after `python` in blocks and between backticks, but the tests."""
    found = re.findall(r"^python (\S+\.py.*?)(?:#|$)", text, re.M)
    found += re.findall(r"`python\s(\S+\.py[^`]*)`", text)
    return [" ".join(command.split()) for command in found]


def edits(text):
    return re.findall(r"In\s`(\S+)`,\s`([^`]+)`\sbecomes\s`([^`]+)`", text)


def run(command):
    """Runs it in this process, and smaller; what draws, only where matplotlib is."""
    program, *words = shlex.split(command.split(" > ")[0])
    arguments = [path for word in words for path in sorted(glob.glob(word)) or [word]]
    if MATPLOTLIB or not re.search(DRAWS, command):
        importlib.import_module(Path(program).stem).main(
            arguments + SMALLER * (program == "train.py"))


def run_own(folder, text):
    """The commands of a text that only run after its edits, in a copy that has these."""
    code = ("import conftest, os, sys, test_readme; os.chdir('..'); "
            "[*map(test_readme.run, sys.argv[1:])]")
    own = [command for command in commands(text) if re.search(OWN, command)]
    done = subprocess.run([sys.executable, "-c", code, *own], cwd=folder / "tests",
                          capture_output=True, text=True)
    assert own and done.returncode == 0, done.stderr
    tables = done.stdout.count(", accuracy in % ")
    assert tables >= sum("train.py" in command for command in own)


def copy(folder, changes):
    """The repository in another folder, with (file, old, new) changed."""
    for part in ("data.py", "eval.py", "train.py", "README.md", "models", "tests", ".github"):
        copier = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copier(ROOT / part, folder / part)
    for file, old, new in changes:
        text = (folder / file).read_text(encoding="utf-8")
        assert text.count(old) == 1, (file, old)
        (folder / file).write_text(text.replace(old, new), encoding="utf-8")


def check(folder, *arguments):
    """All tests there pass."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", *arguments], cwd=folder,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    """The working directory: there are the recorded runs."""
    for folder in "models/recorded", "models/exercises":
        shutil.copytree(ROOT / folder, tmp_path / folder)
    monkeypatch.chdir(tmp_path)


@as_shipped
@pytest.mark.slow
def test_commands_run(recorded, monkeypatch, capsys):
    for name, value in {"REPEATS": 1, "TRIALS": 20, "BATCH": 4}.items():
        monkeypatch.setattr(bench, name, value)
    found = dict.fromkeys(commands(TEXT))
    assert len(found) > 10
    for command in found:
        if not re.search(f"--help|{OWN}", command):
            run(command.replace("--model all", "--model rnn looptfmr"))
            drawn = not MATPLOTLIB and re.search(DRAWS, command)
            assert capsys.readouterr().out.strip() or drawn, command


@as_shipped
@pytest.mark.parametrize("block", [block for _, block in BLOCKS if "evaluation.load" in block],
                         ids=itertools.count())
def test_the_scripts_print_what_stands_below_them(capsys, monkeypatch, block):
    monkeypatch.chdir(ROOT)
    exec(block, {})
    printed = capsys.readouterr().out.strip()
    assert printed and printed in TEXT


def test_the_picture_has_question_and_answer_of_the_first_trial():
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
    copy(tmp_path, edits(text))
    run_own(tmp_path, text)
    for name in set(re.findall(r"In\s`models/(\w+)\.py`", text)):
        check(tmp_path, "tests/test_models.py", "-k", f"not {name} and not copies")


@pytest.mark.slow
def test_what_a_student_adds_turns_nothing_red(tmp_path):
    """The pages' operator, split and model, and a test set."""
    last = '"IfElse": Operator("", objects=()),'
    far, ood = '(40, 40))},', '"ood": HELD_OUT1},'
    copy(tmp_path, [
        ("data.py", last, f"{last}\n{ROW_EVEN}"),
        ("data.py", "SPLITS = {", f"SPLITS = {{\n    {ROWS}"),
        ("data.py", far, f'{far[:-2]}, "m60": Subset(distractors=(60, 60))}},'),
        ("data.py", ood, f'{ood[:-2]}, "near": TRAINED1}},')])
    (tmp_path / "models" / "glance.py").write_text(TEMPLATE)
    run_own(tmp_path, README + PAGES["models/README.md"])
    check(tmp_path)
    check(tmp_path, "--slow", "-m", "slow", "-k", "recorded or commands")


@pytest.mark.parametrize("table, command", TABLES, ids=itertools.count())
def test_tables_come_from_recorded_runs(monkeypatch, capsys, table, command):
    """Each is printed by the command below it."""
    monkeypatch.chdir(ROOT)
    run(command)
    assert table.strip() in capsys.readouterr().out


@as_shipped
def test_the_readmes_array_has_as_many_jobs_as_its_list():
    flags, = re.findall(r"^python train.py (.*) --list", README, re.M)
    last, = re.findall(r"--array=1-(\d+)", README)
    assert len(configurations(flags)) == int(last)


def test_rungs_have_the_numbers_of_their_runs():
    """A numbered row holds the flags of its runs, how many of them have learned, and accuracy."""
    rows = re.findall(r"^\|\d\|[^`]*`([^`]*)`[^|]*\|(.*)\|$", README, re.M)
    assert len(rows) == 8
    for flags, cells in rows:
        config, = configurations(f"--model {flags}")
        row = Path("productive", config["model"], config["settings"])
        folder = ROOT / "models/recorded" / row
        found = [evaluation.read(path)["accuracy"] for path in folder.rglob("result.json")]
        expected = [evaluation.percent([accuracy[f"depth{depth}"] for accuracy in found])
                    for depth in (1, 3, 5, 7, 9)]
        learned = sum(accuracy["depth3"] >= evaluation.LEARNED for accuracy in found)
        assert cells.split("|") == [f"{learned}/{len(found)}", *expected], flags


def test_recorded_runs_are_of_todays_defaults_and_test_sets():
    """... in all that their folder's name does not say."""
    checksum = functools.cache(evaluation.checksum)
    paths = [*(ROOT / "models/recorded").rglob("result.json")]
    assert paths
    for path in paths:
        result = evaluation.read(path)
        then = result["config"]
        assert path.parts[-5:-1] == (
            then["split"], then["model"], then["settings"], f"seed{then['seed']}")
        assert (then["test_trials"], then["threads"]) == (10_000, 1)
        assert all(checksum(then["split"], test) == number
                   for test, number in result["checksums"].items())
        now, = configurations(f"--model {then['model']}")
        then, now = then | then["model_args"], now | now["model_args"]
        for key in [*now["model_args"], *train.TRAINING]:
            named = key.replace("_", "") in then["settings"]
            assert named or then[key] == now[key], (path, key)


@as_shipped
@pytest.mark.slow
def test_recorded_weights_compute_today_what_they_did():
    """Elsewhere recorded weights meet the copy of the code in the run's folder; here today's."""
    paths = [*(ROOT / "models/recorded").rglob("checkpoint.pt")]
    assert len(paths) == 5
    for path in paths:
        then, config = evaluation.load(path.parent)
        now = module_of(config["model"]).Model(**config["model_args"])
        now.load_state_dict(then.state_dict())
        for depth, training in ("depth3", True), ("depth9", False):
            batch, logits = data.trials("productive", depth, 12), []
            for model in then.train(training), now.train(training):
                torch.manual_seed(0)
                with torch.no_grad():
                    logits.append(model(*batch[:2]))
            torch.testing.assert_close(*logits, atol=1e-3, rtol=1e-3, msg=str(path))


@as_shipped
@pytest.mark.slow
def test_recorded_runs_begin_as_today():
    """Ten steps of every recorded setting give loss and accuracy of the first row of its log."""
    settings = {path.parents[1]: path for path in (ROOT / "models/recorded").rglob("result.json")}
    assert settings
    for path in settings.values():
        result = evaluation.read(path)
        config = result["config"] | {"device": "cpu"}
        model, optimizers = train.build(config)
        batches = data.Batches(*map(config.get, ("split", "batch_size", "seed", "train_size")))
        total = sum(train.learn(model, optimizers, batches[step], train.rate_at(
            step, config["steps"], config["schedule"]), "cpu") for step in range(10))
        expected = torch.tensor([result["log"][0]["loss"], result["log"][0]["train"] / 100])
        # on another CPU, rounding may turn an answer or two
        torch.testing.assert_close(total / 10, expected, atol=2e-3, rtol=0, msg=str(path))


def test_code_and_sizes_of_models_are_quoted_right():
    texts = [path.read_text() for path in (ROOT / "models").glob("*.py")]
    quoted = [block for language, block in BLOCKS if language == "python" and "import" not in block]
    assert len(quoted) > 5
    assert all(any(block in text for text in texts) for block in quoted)
    sizes = re.findall(r"^\| `(\w+)\.py` .* ([\d,]+) \|$", PAGES["models/README.md"], re.M)
    assert len(sizes) == 12
    for name, size in sizes if len(data.OPERATORS) == 9 else ():  # a student's operator adds rows
        assert size == f"{sum(p.numel() for p in module_of(name).Model().parameters()):,}"


def test_tables_are_whole():
    """A rule below the head, and as many cells in each row."""
    tables = re.findall(r"(?:^\|.*\n)+", TEXT, re.M)
    assert len(tables) > 12
    for head, rule, *rows in map(str.splitlines, tables):
        assert re.fullmatch(r"[|: -]+", rule) and rows, head
        assert {row.count("|") for row in [rule, *rows]} == {head.count("|")}, head


def test_links_resolve_and_tables_of_results_name_their_command():
    titles = r"^\| (?:hidden states,|\w+, accuracy in %|does it generalize\?) "
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
        for path in re.findall(r'src="([^"]+)"', text):
            assert ((ROOT / page).parent / path).exists(), (page, path)
