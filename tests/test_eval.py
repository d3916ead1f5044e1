"""Baselines, kinds of trials and attention by hand. Then the command line."""
import shutil
import sys

import pytest
import torch
from torch.nn import functional as F

import data
import eval as evaluation
import models
from data import FIRST_COLOR, FIRST_SHAPE, Pool, Subset
from eval import attention, chance, load, mistakes, no_binding, read, score
from models import module_of
from test_oracle import GRID3, TREE3, grid
from test_train import TESTS, change, finished, refusal, run, trained  # noqa: F401


def test_baselines_by_hand():
    pools = Pool(("GetColor", "Exist"), colors=(0, 1)), Pool(("GetColor",), colors=(1, 2, 3, 4))
    color = (1 / 4 + 1 / 4) / (1 / 2 + 1)  # color 1: of half of the trials, and of the others
    assert chance(Subset(pools)) == pytest.approx({"GetColor": color, "Exist": 1 / 2})
    stimulus = grid({(0, 0): (1, 1), (0, 1): (2, 3), (0, 2): (3, 1)})[0]  # two red, one blue
    for operator, selectors, answer, ours, release in (
            ("GetLocation", [(1, 1)], data.FIRST_CELL, 1 / 3, 1 / 3),
            ("GetShape", [(0, 3)], FIRST_SHAPE + 1, 1 / 3, 1 / 3),
            ("GetColor", [(1, 0)], FIRST_COLOR, 1, 1),
            ("GetColor", [(2, 0)], FIRST_COLOR + 2, 0, 0),
            ("Exist", [(2, 1)], data.TRUE, 1 / 2, 1),  # an i and a red object are there
            ("Exist", [(2, 1)], data.FALSE, 1 / 2, 0), ("Exist", [(5, 1)], data.FALSE, 1 / 2, 1),
            ("SumEven", [(1, 1)], data.TRUE, 1 / 2, 1),  # two of three cells, half of all
            ("SumOdd", [(1, 1)], data.TRUE, 1 / 2, 0),
            ("ProductOdd", [(1, 1)], data.FALSE, 1 / 2, 1),  # none, a quarter of all
            ("SumEven", [(1, 1), (2, 3)], data.TRUE, 1 / 2, 0)):  # two of six pairs
        node = data.Solved(operator, selectors, [], answer)
        found = [no_binding(node, stimulus, shortcuts) for shortcuts in (False, True)]
        assert found == pytest.approx([ours, release])
    leaves = [7, 7], [7, 9], [1, 7, 7, 1], [7, 1, 1, 1]
    assert [evaluation.vote(answers, 7) for answers in leaves] == [1, 1 / 2, 1 / 2, 0]


def test_kinds_and_baselines_of_a_test_set_by_hand(monkeypatch):
    """If red a adds up to an odd number: the color of b, one of five; else: a product of two."""
    odd = grid({**GRID3, (3, 5): (0, 0), (3, 4): (1, 1)})
    answer = torch.tensor([data.TRUE, FIRST_COLOR + 5, FIRST_COLOR + 5])
    made = data.Trials(torch.tensor([TREE3] * 3), torch.cat([grid(GRID3), odd, odd]), answer)
    monkeypatch.setattr(data, "trials", lambda *_: made)
    _, kinds, baselines = evaluation.test_set.__wrapped__("productive", "depth3", 3)
    assert kinds == {"GetColor": [1, 2], "ProductEven, two objects": [0], "if SumOdd": [0, 1, 2]}
    assert baselines == pytest.approx({"chance": (1 / 2 + 2 / 10) / 3, "condition-blind": 1 / 2,
                                "no binding": (1 / 2 + 2 / 5) / 3})


STATES = {  # models that know nothing, or everything
    "answer": lambda *tokens: F.one_hot(data.solve(*tokens), data.CLASSES),
    "nothing": lambda _, stimulus: torch.zeros(len(stimulus), data.CLASSES)}  # says True


def test_scores_and_mistakes_of_known_answers():
    made, of = data.trials("systematic1", "ood", 500), ("systematic1", 500, "cpu", "float32")
    right, exist = (made.answer == data.TRUE).float(), made.instruction[:, 0, 0] == 1
    result, perfect = score(STATES["nothing"], *of), score(STATES["answer"], *of)
    assert list(result["accuracy"]) == TESTS and {*perfect["accuracy"].values()} == {1}
    assert result["accuracy"]["ood"] == pytest.approx(right.mean().item())
    assert result["kinds"]["ood"]["Exist"] == pytest.approx(right[exist].mean().item())
    assert mistakes(STATES["answer"], *of) == "No mistake in 1,000."
    text = mistakes(STATES["nothing"], "systematic1", 3, *of[2:])
    assert text.count("says: True") == text.count("Answer: ") == 3 and "Answer: True" not in text


def test_attention_is_drawn_where_a_model_looks(monkeypatch):
    looks = torch.tensor([[[[0.1, 0.7, 0.2], [0.5, 0.2, 0.3]], [[0, 0, 1], [0.4, 0.6, 0]]]])
    known = {"weights": lambda *_: looks, "forward": lambda *tokens: tokens[-1]}
    model = type("Attention", (torch.nn.Module,), known)()
    *text, table = attention(model, "systematic1", "iid", "cpu").split("\n\n")
    trial = [part[0] for part in data.trials("systematic1", "iid", 1)]
    assert "\n\n".join(text) == data.show(trial) and not model._forward_hooks
    a, b, c, *_ = [f"{data.COLOR_NAMES[color - 1]} {data.ANSWERS[FIRST_SHAPE + shape - 1]}"
                   for shape, color in trial[1].tolist() if shape] + ["empty cells", "EOS"]
    header, _, *rows = ([cell.strip() for cell in line.split("|")] for line in table.splitlines())
    assert header == ["", "", "head 0", "head 1", ""]
    assert rows == [["", "query 0", f"70 {b}", f"100 {c}", ""],
                    ["", "query 1", f"50 {a}", f"60 {b}", ""]]
    same = dict.fromkeys(("train", "iid"), Subset(distractors=(7, 7)))  # 10 keys and 10 latents
    monkeypatch.setitem(data.SPLITS, "mine", same)
    for name, table, query in (
            ("dstfmr", "encode_instruction.blocks.0", "token"),
            ("perceiver", "ask_instruction", "query"), ("perceiver", "ask_stimulus", "query"),
            ("perceiver", "ask_each_other", "latent")):
        text = attention(module_of(name).Model(), "mine", "iid", "cpu")
        assert text.split(f"| {table}.attention ")[1].split("\n| ")[2].startswith(f"{query} 0 ")
    text = attention(module_of("rnn").Model(), "mine", "iid", "cpu")
    assert text.endswith("\n\nThis model has no Attention.")


def output(capsys, *arguments):  # -> tables, and what is left out
    capsys.readouterr()
    evaluation.main([str(argument) for argument in arguments])
    return capsys.readouterr()


def test_results_are_those_of_the_saved_weights(tmp_path, capsys):
    for flags in (["--seed", "0", "1"], ["--model", "looptfmr"], ["--split", "distractor"]):
        run(tmp_path, *flags)
    folder = next(tmp_path.rglob("looptfmr/*/seed0"))
    table = output(capsys, tmp_path, "--per-operator").out
    shutil.copytree(folder, tmp_path / "zcopy" / "seed0")
    twice = output(capsys, tmp_path, "--per-operator")
    assert twice.out == table and twice.err.count("seed0: it is a copy of a run above\n") == 1
    table.encode("cp1252")  # for consoles without UTF-8
    saved, (model, config) = read(folder / "result.json"), load(str(folder))
    accuracy = [f"{100 * share:.1f}" for share in saved["accuracy"].values()]
    assert table.split("| looptfmr (")[1].replace("|", "").split()[1:1 + len(TESTS)] == accuracy
    right = model(*(made := data.trials("systematic1", "ood", 50))[:2]).argmax(1) == made.answer
    assert f"{100 * right.float().mean():.1f}" == accuracy[TESTS.index("ood")]
    tested = score(model, "systematic1", evaluation.TEST_TRIALS, "cpu", "float32")
    assert saved | tested == saved and config["device"] == "cpu" and not model.training
    assert "batchsize8), 2 seeds | " in table and "±" in table and "differ" not in table


ADDS = {"--per-operator": "\n|   Exist ", "--show 1": "The model says:",
        "--attention iid": "head 0", "--names mine": "| mine "}


@pytest.mark.parametrize("flags", ADDS)
def test_a_flag_adds_what_it_names(finished, trained, capsys, flags):
    assert ADDS[flags] not in output(capsys, finished, trained).out
    assert ADDS[flags] in output(capsys, finished, trained, *flags.split()).out


SAVED, LOADED = [""], ["--show 1", "--attention iid"]  # what needs results, or weights
LEFT_OUT = [
    ("config.json", {"split": "gone"}, SAVED + LOADED, "there is no split 'gone' any more"),
    ("config.json", {"model": "../x"}, LOADED, "there is no model '../x'"),
    ("config.json", {"model_args": {"depth": 1}}, LOADED, "do not fit models/sstfmr.py as it is"),
    ("config.json", {"model_args": {"dim": 32}}, LOADED, "do not fit models/sstfmr.py as it is"),
    *(("config.json", text, SAVED, "config.json is damaged: ") for text in ("{", "[]", "{}")),
    ("result.json", "{}", SAVED, "result.json is damaged: it has no 'accuracy'"),
    ("result.json", {"accuracy": 1}, SAVED, "result.json is damaged: its accuracy is 1"),
    ("result.json", None, SAVED, "it is unfinished (log.csv says"),
    ("checkpoint.pt", None, LOADED, "there is no "),
    ("checkpoint.pt", "csys\nexit\n(tR.", LOADED, "checkpoint.pt is damaged")]  # sys.exit, pickled


@pytest.mark.parametrize("file, content, flags, says", LEFT_OUT)
def test_what_cannot_be_had_is_left_out(finished, trained, capsys, file, content, flags, says):
    change(finished / file, content)
    for flag in {*SAVED, *flags}:
        left_out = flag in flags
        out, err = output(capsys, finished, *[trained] * left_out, *flag.split())
        assert " (dim16-" in out and err.count("\n") == left_out
        assert not left_out or err.startswith("left out: ") and says in err


def test_flags_that_fit_no_run(finished, capsys):
    _, err = output(capsys, finished, "--show", "1", "--attention", "iid")
    assert not err
    with pytest.raises(SystemExit):
        evaluation.main([str(finished), "--attention", "depth3"])
    assert "--attention: systematic1 has no test set 'depth3'" in capsys.readouterr().err
    line, = refusal(capsys, evaluation, finished, "--names", "a", "b")
    assert "--names: 1 different names are needed, for sstfmr (dim16-" in line


def test_plot(finished, tmp_path, capsys, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)  # as where it is not installed
        line, = refusal(capsys, evaluation, finished, "--plot", "a.png")
    assert "--plot needs matplotlib: pip install matplotlib" in line
    pytest.importorskip("matplotlib")
    assert "Drawn: " in output(capsys, finished, "--plot", tmp_path / "a.png").out
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert "cannot write" in refusal(capsys, evaluation, finished, "--plot", "no/a.png")[0]


def test_loading_warns_of_other_code_and_leaves_the_generator_alone(trained, capsys, monkeypatch):
    state = torch.get_rng_state()
    load(trained)
    assert not capsys.readouterr().err and torch.get_rng_state().equal(state)
    now = evaluation.code_of("sstfmr") | {"data.py": "another"}
    monkeypatch.setattr(evaluation, "code_of", lambda model: now)
    load(trained)
    assert capsys.readouterr().err == f"{trained}: data.py changed since this run\n"


def test_stray_files_in_models_are_passed_over(tmp_path, monkeypatch):
    for name, content in (("._gru", b"\xff\x00"), (".#gru", b"\nclass Model("), ("half", b"\xff"),
                          ("mine", b"\nclass Model("), ("my model", b"\nclass Model(")):
        (tmp_path / f"{name}.py").write_bytes(content)
    (tmp_path / "folder.py").mkdir()
    monkeypatch.setattr(models, "__file__", str(tmp_path / "__init__.py"))
    assert models.available() == ["mine"]
