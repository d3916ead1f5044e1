"""Baselines, kinds of trials, representations and attention by hand. Then the command line."""
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

import data
import eval as evaluation
from data import FIRST_COLOR, FIRST_SHAPE, Pool, Subset
from eval import (alignment, attention, chance, decoding, load, mistakes, no_binding, read, score,
                  spearman)
from test_oracle import GRID3, TREE3, grid
from test_train import TESTS, change, finished, refusal, run, trained  # noqa: F401


def test_baselines_by_hand():
    pools = Pool(("GetColor", "Exist"), colors=(0, 1)), Pool(("GetColor",), colors=(1, 2, 3, 4))
    color = (1 / 4 + 1 / 4) / (1 / 2 + 1)  # color 1: of half of the trials, and of the others
    assert chance(Subset(pools)) == pytest.approx({"GetColor": color, "Exist": 1 / 2})
    stimulus = grid({(0, 0): (1, 1), (0, 1): (2, 3), (0, 2): (3, 1)})[0]  # two red, one blue
    for operator, answer, expected in (
            ("GetLocation", data.FIRST_CELL, 1 / 3), ("GetShape", FIRST_SHAPE + 1, 1 / 3),
            ("GetColor", FIRST_COLOR, 1), ("GetColor", FIRST_COLOR + 2, 0), ("Exist", 0, 1 / 2)):
        assert no_binding(operator, stimulus, answer) == pytest.approx(expected)
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


STATES = {  # of models that are organized like this
    "stimulus": lambda _, stimulus: F.one_hot(stimulus.long(), 11).flatten(1),
    "answer": lambda *tokens: F.one_hot(data.solve(*tokens), data.CLASSES),
    "nothing": lambda _, stimulus: torch.zeros(len(stimulus), data.CLASSES)}  # says True


def test_spearman_and_alignment_of_known_states(monkeypatch):
    """Ranks 1 2.5 2.5 4 and 2 1 3 4: covariance 3 over the root of 4.5 times 5."""
    x, y = torch.tensor([1.0, 5, 5, 9]), torch.tensor([20.0, 10, 30, 40])
    assert spearman(x, y) == pytest.approx(3 / (4.5 * 5) ** 0.5)
    assert [spearman(x, other) for other in (x ** 3, -x, 0 * x)] == pytest.approx([1, -1, 0])
    monkeypatch.setattr(evaluation, "RSA_TRIALS", 200)
    for like, features in STATES.items():
        result = alignment(SimpleNamespace(features=features), "systematic3", "cpu")
        parts = "stimulus", "instruction", "answer"
        assert list(result) == [f"{where}: {part}" for where in ("in", "out") for part in parts]
        for part, value in result.items():
            assert value == pytest.approx(1, abs=1e-3) if like in part else abs(value) < 0.5
            assert value == 0 or like != "nothing"


ASKED = {  # of models that know more or less of what the root asks; then what can be decoded
    "each": (lambda root: F.one_hot(root, 11).flatten(1), {"in": 1, "out": 1}),
    "whole": (lambda root: F.one_hot(root @ torch.tensor([121, 11, 1]), 1210), {"in": 1}),
    "operator": (lambda root: F.one_hot(root[:, 0], 9), {"operator": 1}),
    "nothing": (lambda root: torch.ones(len(root), 9), {})}


@pytest.mark.parametrize("known", ASKED)
def test_decoding_finds_what_states_hold(known, monkeypatch):
    """... and no more: a vector for each question, seen in training, says nothing of new ones."""
    monkeypatch.setattr(evaluation, "RSA_TRIALS", 200)
    monkeypatch.setattr(evaluation, "FIT_TRIALS", 2000)
    states, found = ASKED[known]
    model = SimpleNamespace(features=lambda tokens, _: states(tokens[:, 0, :3].long()))
    result = decoding(model, "systematic1", "cpu")
    assert list(result) == [f"{where}: {part}" for where in ("in", "out")
                            for part in ("color", "letter", "operator")]
    for part, share in result.items():
        held = found.keys() & {*part.split(": ")}
        assert share > 0.97 if held else share < 0.35, part


def test_what_no_root_asks_for_is_not_decoded(monkeypatch):
    letters = dict.fromkeys(("train", "iid", "ood"), Subset((Pool(("GetShape",)),)))
    monkeypatch.setitem(data.SPLITS, "mine", letters)
    model = SimpleNamespace(features=lambda tokens, _: tokens[:, 0].float())
    assert {part.split()[1] for part in decoding(model, "mine", "cpu")} == {"operator", "color"}


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
        text = attention(evaluation.module_of(name).Model(), "mine", "iid", "cpu")
        assert text.split(f"| {table}.attention ")[1].split("\n| ")[2].startswith(f"{query} 0 ")
    text = attention(evaluation.module_of("rnn").Model(), "mine", "iid", "cpu")
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
    assert output(capsys, tmp_path, folder, "--per-operator").out == table  # one run, once
    table.encode("cp1252")  # for consoles without UTF-8
    saved, (model, config) = read(folder / "result.json"), load(str(folder))
    accuracy = [f"{100 * share:.1f}" for share in saved["accuracy"].values()]
    assert table.split("| looptfmr (")[1].replace("|", "").split()[1:1 + len(TESTS)] == accuracy
    right = model(*(made := data.trials("systematic1", "ood", 50))[:2]).argmax(1) == made.answer
    assert f"{100 * right.float().mean():.1f}" == accuracy[TESTS.index("ood")]
    tested = score(model, "systematic1", evaluation.TEST_TRIALS, "cpu", "float32")
    assert saved | tested == saved and config["device"] == "cpu" and not model.training
    states = alignment(model, "systematic1", "cpu"), decoding(model, "systematic1", "cpu")
    assert (saved["alignment"], saved["decoded"]) == states
    assert "batchsize8), 2 seeds | " in table and "±" in table and "differ" not in table
    change(folder / "config.json", {"device": "abc"})
    assert "These rows differ in device." in output(capsys, tmp_path).out


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
    ("config.json", {"fingerprint": 6 * [5.25]}, LOADED, "and now they are"),
    ("config.json", {"model_args": {}}, LOADED, "it is a run of other code"),
    *(("config.json", text, SAVED, "config.json is damaged: ") for text in ("{", "[]", "{}")),
    ("result.json", '{"tests": {}}', SAVED, "result.json is damaged: it has no accuracy, "),
    ("result.json", None, SAVED, "it is unfinished (log.csv says"),
    *(("checkpoint.pt", text, LOADED, "checkpoint.pt is missing or damaged")
      for text in (None, "csys\nexit\n(tR."))]  # a pickle that calls sys.exit


@pytest.mark.parametrize("file, content, flags, says", LEFT_OUT)
def test_what_cannot_be_had_is_left_out(finished, trained, capsys, file, content, flags, says):
    change(finished / file, content)
    for flag in {*SAVED, *flags}:
        left_out = flag in flags
        out, err = output(capsys, finished, *[trained] * left_out, *flag.split())
        assert " (dim16-" in out and err.count("\n") == left_out
        assert not left_out or err.startswith("left out: ") and says in err


def test_flags_that_fit_no_run(finished, capsys):
    line, _ = refusal(capsys, evaluation, finished, "--attention", "depth3")
    assert "--attention: systematic1 has no test set 'depth3'" in line
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
