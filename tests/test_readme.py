"""The four pages keep their word: commands run at reduced size, edits of exercises apply, tables
are printed from the recorded runs, links resolve."""
import contextlib
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
import why
from models import module_of

ROOT = Path(__file__).parents[1]
PAGES = {page: (ROOT / page).read_text(encoding="utf-8") for page in
         ("README.md", "models/README.md", "tests/README.md", "tests/RESULTS.md")}
README, TEXT = PAGES["README.md"], "\n".join(PAGES.values())
TABLES = re.findall(r"((?:^\|.*\n)+)\n<sub>`python (\S+) (.*)`</sub>", TEXT, re.M)
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.S | re.M)  # language and text
SECTION = README.split("## Exercises")[1].split("\n## ")[0]
EXERCISES = [" ".join(text.split()) for text in re.split(r"^\d+\. ", SECTION, flags=re.M)[1:]]
COMMANDS = [line.split("#")[0][7:] for _, block in BLOCKS for line in block.splitlines()
            if line.startswith("python ") and not line.startswith("python -m pytest")]
COMMANDS += [" ".join(command.split()) for command in  # not those below tables
             re.findall(r"`python (?!-m pytest|\S+ (?:recorded|fixed|edited|fourth|tried))([^`]+)`",
                        TEXT.replace(SECTION, ""))]
ROW_EVEN, = (block for _, block in BLOCKS if block.startswith('"RowEven"'))
ROWS, = re.findall(r'`("rows": .*?\})`', " ".join(README.split()))
SMALLER = {"train.py": "--steps 1 --batch-size 8 --device cpu --seed 0".split(),
           "tests/mutants.py": ["--only", "gru"]}
PROGRAMS = {"train.py": train, "eval.py": evaluation, "data.py": data, "tests/bench.py": bench,
            "tests/claims.py": claims, "tests/mutants.py": mutants, "tests/why.py": why}
MATPLOTLIB = importlib.util.find_spec("matplotlib")


@pytest.mark.slow
def test_commands_run(tmp_path, monkeypatch, capsys):
    """In this process, and smaller."""
    monkeypatch.chdir(tmp_path)
    for name, value in ("REPEATS", 1), ("TRIALS", 20), ("BATCH", 4):
        monkeypatch.setattr(bench, name, value)
    for name in "TRIALS", "FIT_TRIALS":
        monkeypatch.setattr(why, name, 50)
    assert len(COMMANDS) > 10
    for command in COMMANDS:
        program, *arguments = shlex.split(command.replace("--model all", "--model rnn looptfmr"))
        if MATPLOTLIB or not re.search("--plot|--attention", command):
            arguments += SMALLER.get(program, [])
            with contextlib.suppress(*[SystemExit] * ("--help" in arguments)):
                assert not PROGRAMS[program].main(arguments), command  # no mutant lives
            assert capsys.readouterr().out.strip() or "--export" in command, command


@pytest.mark.parametrize("block", [  # the rule takes long
    pytest.param(block, marks=pytest.mark.slow if "def held" in block else ())
    for _, block in BLOCKS if "evaluation.load" in block])
def test_the_notebook_lines_run(tmp_path, monkeypatch, capsys, block):
    folder = re.search(r'load\("(\S+)"\)', block)[1]
    monkeypatch.chdir(tmp_path)
    train.main(["--model", folder.split("/")[2], "--steps", "1", "--batch-size", "2", "--device",
                "cpu"])
    shutil.copytree(next(Path("runs").rglob("seed0")), folder)
    capsys.readouterr()
    space = {}
    exec(block, space)
    out = capsys.readouterr().out
    assert out.count("Answer: ") == 3 or out.count("tensor(") == 3  # trials, or loops
    assert space["model"](*data.trials("productive", "depth3", 2)[:2]).shape == (2, 138)


def test_the_operator_in_the_readme_is_the_one_that_is_tested(monkeypatch):
    monkeypatch.setattr(data, "OPERATORS", data.OPERATORS | eval("{" + ROW_EVEN + "}", vars(data)))
    pool = data.Pool(leaves=("RowEven",), conditions=("RowEven", "Exist"))
    monkeypatch.setitem(data.SPLITS, "mine", {"train": data.Subset((pool,), depths=(3,))})
    made = data.trials("mine", "train", 300)
    assert data.solve(*made[:2]).equal(made.answer) and (made.instruction[:, :, 0] == 10).any()
    assert "RowEven: do the rows of" in data.show(next(zip(*made)))


def test_the_picture_is_of_the_trial_that_its_command_prints():
    instruction, stimulus, answer = next(zip(*data.trials("productive", "depth3", 1)))
    assert "`python data.py --subset depth3 --n 1` prints the trial in the picture" in README
    svg = (ROOT / ".github" / "trial.svg").read_text()
    drawn = {(int(y) // 34, int(x) // 34): (letter, color) for x, y, color, letter in
             re.findall(r'x="(\d+)" y="(\d+)" class="object (\w+)">(\w)<', svg)}
    assert drawn == {cell: (data.ANSWERS[data.FIRST_SHAPE + shape - 1], data.COLOR_NAMES[color - 1])
                     for cell, (shape, color) in zip(data.CELLS, stimulus.tolist()) if shape}
    solved = data.evaluate(instruction, stimulus)
    dashed = re.findall(r'<rect x="(\d+)" y="(\d+)" width="30"', svg)
    assert sorted((int(y) // 34, int(x) // 34) for x, y in dashed) == sorted(
        cell for i in data.descend(solved) for cells in solved[i].found for cell in cells)
    words = " ".join(re.findall(r">([^<>]+)</text>", svg))
    questions = re.findall(r": (.*)", data.describe(solved))
    assert all(text in words for text in [*questions, data.ANSWERS[answer]])


def edits(text):
    return re.findall(r"In `(\S+)`, `([^`]+)` becomes `([^`]+)`", text)


def test_edits_of_exercises_and_mutants_have_one_place():
    assert len(EXERCISES) > 5 and len([text for text in EXERCISES if edits(text)]) > 2
    changes = [(file, *change) for (file, _), found in mutants.MUTANTS.items() for change in found]
    for file, old, new in [*changes, *edits(" ".join(EXERCISES))]:
        assert (ROOT / file).read_text(encoding="utf-8").count(old) == 1 and old != new, old


IN_A_COPY = """
import importlib, shlex, sys
sys.path.insert(0, "tests")
import conftest
for command in sys.argv[1:]:
    program, *arguments = shlex.split(command)
    importlib.import_module(program.removesuffix(".py")).main(arguments)
"""


@pytest.mark.slow
@pytest.mark.parametrize("text", EXERCISES, ids=[text.split(".")[0] for text in EXERCISES])
def test_exercises_can_be_done(tmp_path, text):
    """In a copy with their edits, their commands run. An edited model turns those tests red that
    say what it was."""
    mutants.copy(tmp_path, edits(text))
    for old, new in re.findall(r"Copy `(\S+)` to `(\S+)`", text):
        shutil.copy(tmp_path / old, tmp_path / new)
    commands = [" ".join([command, *SMALLER.get(command.split()[0], [])]) for command in
                re.findall(r"`python ([^`]+)`", text) if not command.startswith("-m")]
    done = subprocess.run([sys.executable, "-c", IN_A_COPY, *commands], cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("accuracy") >= len(commands)
    for file in {file for file, _, _ in edits(text) if file.startswith("models/")}:
        found = mutants.red(tmp_path, "tests/test_models.py", "-k", f"{Path(file).stem} or copies")
        assert {re.sub(r".*::|\[.*", "", name) for name in found} <= {
            "test_classes_of_the_same_name_are_copies",
            "test_model_equals_its_copy_from_torch_modules", "test_compact_stimulus_is_exact",
            "test_attention_and_block_equal_torch", "test_absent_second_selectors_are_not_seen",
            "test_every_trial_gets_logits_of_its_own_at_any_depth"}  # a mean counts all tokens


ADDED = """SPLITS = {
    "odd": {"train": Subset((Pool(("RowEven", "GetShape")),), (3,), (2, 4)),
            "test": Subset((Pool(("RowEven", "GetShape")),), (3,), (2, 4)),
            "far": Subset((Pool(leaves=("Exist", "GetShape")),), distractors=(60, 60))},"""


@pytest.mark.slow
def test_what_a_student_adds_turns_nothing_red(tmp_path):
    """An operator, two splits, a test set and a model."""
    mutants.copy(tmp_path, [
        ("data.py", '"iid": Subset(),',
         '"iid": Subset(), "distractors60": Subset(distractors=(60, 60)),'),
        ("data.py", "SPLITS = {", f"{ADDED}\n    {ROWS},"),
        ("data.py", '"IfElse": Operator("", objects=()),',
         '"IfElse": Operator("", objects=()),\n' + ROW_EVEN)])
    model = (ROOT / "models" / "gru.py").read_text()
    changed = model.replace("0.01 *", "0.02 *").replace("self.stimulus", "self.grid")
    (tmp_path / "models" / "lstm.py").write_text(changed)
    assert not mutants.red(tmp_path)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The run folders behind the tables, unpacked as the README says."""
    folder = tmp_path_factory.mktemp("results")
    shutil.unpack_archive(ROOT / "tests" / "recorded.tar.gz", folder)
    (folder / ".github").mkdir()  # for the pictures
    return folder


@pytest.mark.parametrize("table, program, arguments", TABLES, ids=itertools.count())
def test_tables_come_from_recorded_runs(recorded, monkeypatch, capsys, table, program, arguments):
    """Each is printed by the command below it."""
    monkeypatch.chdir(recorded)
    monkeypatch.setattr(evaluation, "TEST_TRIALS", 10_000)
    arguments, *_ = [arguments] if MATPLOTLIB else arguments.split(" --plot")
    PROGRAMS[program].main(shlex.split(arguments))
    assert table in capsys.readouterr().out


@pytest.mark.parametrize("page, split, tests", [
    ("README.md", "productive", ["depth3", "depth5", "depth7", "depth9"]),
    ("tests/RESULTS.md", "distractor", ["iid", "distractors40"])])
def test_rungs_have_the_numbers_of_their_runs(recorded, page, split, tests):
    """A numbered row holds the flags of its runs, and their accuracy."""
    rows = re.findall(r"^\| \d+b? \|[^`]*`([^`]*)`[^|]* \| (.*) \|$", PAGES[page], re.M)
    assert len(rows) > 5
    for flags, cells in rows:
        args = train.parse(["--split", split, "--device", "cpu", *flags.split()])[1]
        config, = train.configurations(args)
        folder = recorded / "recorded" / split / config["model"] / config["settings"]
        found = [evaluation.read(path)["accuracy"] for path in folder.rglob("result.json")]
        expected = [evaluation.percent([accuracy[test] for accuracy in found]) for test in tests]
        assert cells.split(" | ") == expected, flags


def test_claims_are_those_of_the_judge(recorded, monkeypatch, capsys):
    monkeypatch.chdir(recorded)
    claims.main(["recorded"])
    lines = re.findall(r"^\d\. .* open.*$", PAGES["tests/RESULTS.md"], re.M)
    ours, *_ = capsys.readouterr().out.split("Our models on our trials:")[1].split("\n\nThe ")
    assert ours.strip().splitlines() == lines and len(lines) == 9
    counts = [re.search(r"^(.*): \*\*(\d+) for, (\d+) against, (\d+) open", line).groups()
              for line in lines]
    assert re.findall(r"^\| (\d\. .*) \| (\d+) \| (\d+) \| (\d+) \|$", README, re.M) == counts


def test_every_table_of_results_names_its_command():
    found = re.findall(r"^\| (?:hidden states|accuracy in %|[a-z0-9_]+, accuracy in %) ",
                       TEXT, re.M)
    assert len(TABLES) == len(found)


def test_code_and_sizes_of_models_are_quoted_right():
    sources = [path.read_text().splitlines() for path in (ROOT / "models").glob("*.py")]
    quoted = [line for language, block in BLOCKS if language == "python" and "import" not in block
              for line in block.splitlines()]
    assert len(quoted) > 5
    assert not [line for line in quoted if not any(line in source for source in sources)]
    sizes = dict(re.findall(r"^\| `(\w+)\.py` .* ([\d,]+) \|$", PAGES["models/README.md"], re.M))
    assert len(sizes) == 11
    for name in sizes if len(data.OPERATORS) == 9 else ():  # a student's operator adds rows
        parameters = module_of(name).Model().parameters()
        assert sizes[name] == f"{sum(p.numel() for p in parameters):,}"


def test_links_resolve():
    for page, text in PAGES.items():
        text = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
        for link, _, heading in re.findall(r"\]\(([^)#]+)(#([^)]*))?\)", text):
            path = (ROOT / page).parent / link
            assert link.startswith("https://") or path.exists(), (page, link)
            names = re.findall(r"^#+ (.*)$", path.read_text(), re.M) if heading else []
            slugs = [re.sub(r"[^\w -]", "", name.lower()).replace(" ", "-") for name in names]
            assert not heading or heading in slugs, (page, heading)
