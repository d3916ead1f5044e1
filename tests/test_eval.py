"""Evaluation from the command line, and what it prints: baselines, kinds, similarity, attention, tables, pictures."""
import json
import shutil
import sys
import types

import pytest
import torch

import data
import eval as evaluation
from test_oracle import grid
from test_train import TESTS, finished, refusal, run, trained  # noqa: F401


# ---- baselines and kinds, by hand -------------------------------------------------------------------------------

def test_chance_by_hand():
    assert evaluation.chance(data.Subset()) == pytest.approx(5 / 8 / 2 + 1 / 8 / 100 + 1 / 4 / 10)  # 33.9 %
    pools = (data.Pool((data.GET_COLOR, data.EXIST), colors=(0, 1)), data.Pool((data.GET_COLOR,), colors=(1, 2, 3, 4)))
    assert evaluation.chance(data.Subset(pools)) == pytest.approx(1 / 4 / 2 + 1 / 2 / 4 + 1 / 4 / 2)  # color 1; a coin
    baselines = evaluation.test_set("systematic1", "ood", 300)[2]
    assert baselines["chance"].mean().item() == pytest.approx(5 / 8 / 2 + 1 / 8 / 100 + 1 / 4 / 5)  # 36.4 %
    assert "condition-blind" not in baselines


def test_no_binding_by_hand():
    """Questions about a red a, a blue b and a red c: operator, shape, color; answer; how often the reader gives it."""
    red, blue = 1, 3
    tokens, answers, expected = zip(
        ((data.EXIST, 1, red), data.TRUE, 1), ((data.EXIST, 4, red), data.TRUE, 0),
        ((data.EXIST, 1, blue), data.FALSE, 0),  # a and blue are both there: it says True
        ((data.GET_LOCATION, 1, red), data.FIRST_CELL, 1 / 3),
        ((data.GET_COLOR, 2, 0), data.FIRST_COLOR + blue - 1, 0),  # most objects are red
        ((data.GET_COLOR, 2, 0), data.FIRST_COLOR + red - 1, 1),
        ((data.GET_SHAPE, 0, blue), data.FIRST_SHAPE + 1, 1 / 3),
        ((data.SUM_EVEN, 1, red), data.FALSE, 1 / 2), ((data.PRODUCT_ODD, 1, red), data.TRUE, 1 / 2))
    stimulus = grid({(0, 0): (1, red), (0, 1): (2, blue), (0, 2): (3, red)}).expand(len(tokens), -1, -1)
    right = evaluation.no_binding(data.Trials(None, stimulus, torch.tensor(answers)), torch.tensor(tokens))
    torch.testing.assert_close(right, torch.tensor(expected))


def test_condition_blind_by_hand():
    """Depth 3: two leaves, so one answer of two or a tie. Depth 5: four leaves, of which the last four tokens count."""
    def blind(leaves, answer):
        answers = torch.tensor([[0] * (2 * len(leaves) - 2) + leaves])
        return evaluation.condition_blind(data.Trials(None, None, torch.tensor([answer])), answers).item()

    assert blind([7, 7], 7) == 1 and blind([7, 9], 9) == blind([7, 9], 7) == 0.5
    assert blind([1, 1, 1, 7], 1) == blind([7, 1, 8, 1], 1) == 1 and blind([1, 1, 1, 7], 7) == 0
    assert blind([1, 7, 7, 1], 7) == 0.5 and blind([1, 2, 3, 4], 3) == 0.25
    for subset, measured in ("depth3", 0.600), ("depth5", 0.480):  # as in the README
        baselines = evaluation.test_set("productive", subset, 6000)[2]
        assert baselines["condition-blind"].mean().item() == pytest.approx(measured, abs=0.015)


def test_kinds_by_hand():
    token = torch.tensor([[data.SUM_EVEN, 1, 1, 0, 0], [data.SUM_EVEN, 1, 1, 2, 2], [data.EXIST, 1, 1, 0, 0]])
    kinds = {name: chosen.tolist() for name, chosen in evaluation.kinds_of(token, "if ").items()}
    assert kinds == {"if Exist": [False, False, True], "if SumEven": [True, False, False],
                     "if SumEven, two objects": [False, True, False]}
    kinds = evaluation.test_set("systematic3", "iid", 100)[1]
    assert "if SumOdd, two objects" in kinds and "GetShape" in kinds and "if GetShape" not in kinds
    assert sum(chosen.sum() for chosen in kinds.values()) == 200  # one operator that answers, and one condition


# ---- models whose answers are known -----------------------------------------------------------------------------

class Attention(torch.nn.Module):
    def forward(self, instruction, stimulus):
        self.weights = torch.tensor([[[[0.1, 0.7, 0.2], [0.5, 0.2, 0.3]], [[0.0, 0.0, 1.0], [0.4, 0.6, 0.0]]]])
        return stimulus


def see_stimulus(instruction, stimulus):
    return evaluation.one_hot(stimulus)


def see_answer(instruction, stimulus):
    return torch.nn.functional.one_hot(data.solve(instruction, stimulus)[0], 138).float()


def say_true(instruction, stimulus):
    return torch.eye(138)[0].repeat(len(instruction), 1)


def test_spearman_by_hand():
    """Ranks 1 2.5 2.5 4 and 2 1 3 4: covariance 3 over the root of 4.5 times 5."""
    x, y = torch.tensor([1.0, 5, 5, 9]), torch.tensor([20.0, 10, 30, 40])
    assert evaluation.spearman(x, y) == pytest.approx(3 / (4.5 * 5) ** 0.5)
    assert evaluation.spearman(x, x ** 3) == pytest.approx(1) and evaluation.spearman(x, -x) == pytest.approx(-1)
    assert evaluation.spearman(x, 0 * x) == 0


@pytest.mark.parametrize("state, organized_like", [(see_stimulus, "stimulus"), (see_answer, "answer")])
def test_alignment_says_what_hidden_states_are_organized_like(monkeypatch, state, organized_like):
    monkeypatch.setattr(evaluation, "RSA_TRIALS", 200)
    result = evaluation.alignment(types.SimpleNamespace(features=state), "systematic3", "cpu")
    parts = "stimulus", "instruction", "answer"
    assert list(result) == [f"{where}: {part}" for where in ("in", "out") for part in parts]
    for part, value in result.items():
        assert value == pytest.approx(1, abs=1e-3) if organized_like in part else abs(value) < 0.5


def test_equal_hidden_states_are_organized_like_nothing():
    same = types.SimpleNamespace(features=lambda instruction, stimulus: torch.zeros(len(stimulus), 4))
    result = evaluation.alignment(same, "distractor", "cpu")
    assert {*result.values()} == {0}


def test_scores_of_known_answers():
    for answer, right in (see_answer, lambda made: made.answer >= 0), (say_true, lambda made: made.answer == data.TRUE):
        result = evaluation.score(answer, "systematic1", 500, "cpu", "float32")
        for subset in TESTS:
            expected = right(made := data.trials("systematic1", subset, 500)).float()
            exist = made.instruction[:, 0, 0] == data.EXIST
            assert result["accuracy"][subset] == pytest.approx(expected.mean().item())
            assert result["kinds"][subset]["Exist"] == pytest.approx(expected[exist].mean().item())


def test_mistakes_are_what_the_model_got_wrong():
    text = evaluation.mistakes(say_true, "systematic1", 3, "cpu", "float32")
    assert text.count("The model says: True") == text.count("Answer: ") == 3 and "Answer: True" not in text
    assert evaluation.mistakes(see_answer, "systematic1", 3, "cpu", "float32") == "No mistake in 1,000."


def test_attention_is_drawn_where_a_model_looks():
    text = evaluation.attention(Attention(), "systematic1", "cpu").split("\n\n")
    trial = data.Trials(*(x[0] for x in data.trials("systematic1", "iid", 1)))
    names = [f"{data.COLOR_NAMES[c - 1]} {data.LETTERS[s - 1]}" for s, c in trial.stimulus.tolist() if s]
    names += ["empty cells", "EOS"]
    for row, looks in enumerate([[(70, 1), (100, 2)], [(50, 0), (60, 1)]]):
        expected = ["query", str(row)] + " ".join(f"{percent} {names[i]}" for percent, i in looks).split()
        assert text[-1].splitlines()[1 + row].split() == expected
    assert text[-1].split()[:4] == [",", "row", "0", "head"]  # this model is its attention, so it has no name
    assert "\n\n".join(text[:-1]) == data.show(trial)


@pytest.mark.parametrize("model, table, query", [
    ("dstfmr", "instruction.blocks.0.attention", "token 0"), ("perceiver", "ask_instruction.attention", "query 0"),
    ("perceiver", "ask_each_other.attention", "latent 0"), ("perceiver", "ask_stimulus.attention", "query 0")])
def test_attention_names_what_asks(monkeypatch, model, table, query):
    """... also where a trial happens to have as many keys as the Perceiver has latents: eight objects, empty and EOS."""
    monkeypatch.setitem(data.SPLITS, "mine", dict.fromkeys(("train", "iid"), data.Subset(distractors=(7, 7))))
    text = evaluation.attention(evaluation.module_of(model).Model(), "mine", "cpu")
    assert text.split(f"{table}, row 0 ")[1].splitlines()[1].startswith(query + " ")


# ---- the command line -------------------------------------------------------------------------------------------

@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Finished runs of two models, one of them with two seeds, and one of another split."""
    out = tmp_path_factory.mktemp("runs")
    for flags in (["--seed", "0", "1"], ["--model", "treetfmr"], ["--split", "distractor"]):
        run(out, *flags)
    return out


def output(capsys, *arguments):
    capsys.readouterr()
    evaluation.main([*map(str, arguments), "--device", "cpu"])
    return capsys.readouterr().out


def test_saved_and_fresh_results_agree_with_training(runs, capsys):
    table = output(capsys, runs, "--per-operator", "--rsa")
    assert output(capsys, runs, "--per-operator", "--rsa", "--fresh", "--n", "50") == table
    assert output(capsys, runs, "--fresh", "--n", "40") not in table  # other trials, other numbers
    saved = evaluation.read(next(runs.rglob("treetfmr/**/result.json")))
    line, = (line for line in output(capsys, runs / "systematic1" / "treetfmr").splitlines() if "treetfmr" in line)
    assert line.split()[-len(TESTS):] == [f"{100 * p:.1f}" for p in saved["accuracy"].values()]
    assert output(capsys, runs, runs / "systematic1", "--per-operator", "--rsa") == table  # named twice, counted once


def test_flags_add_what_they_name(runs, capsys):  # more of this: the tables in the pages
    assert not any(word in output(capsys, runs) for word in ("Exist", "head 0", "Answer", "rank correlation", "|", "differ in"))
    assert output(capsys, runs, "--show", "2").count("The model says:") == 2 * 4
    assert "blocks.0.attention, row 0 " in output(capsys, runs / "systematic1" / "treetfmr", "--attention")


def test_rows_that_differ_in_the_machine_are_marked(finished, tmp_path, capsys):
    config = evaluation.read(finished / "config.json")
    for copy, changes in ("again", {}), ("other", {"seed": 1, "device": "abc"}):  # the first is no other seed
        shutil.copytree(finished, tmp_path / copy)
        (tmp_path / copy / "config.json").write_text(json.dumps(config | changes))
    assert "These rows differ in device: abc, cpu." in (text := output(capsys, tmp_path)) and "2 seeds" in text


def test_unfinished_runs_are_left_out_unless_fresh(finished, trained, tmp_path, capsys):
    (finished / "result.json").unlink()
    state = torch.load(finished / "checkpoint.pt", weights_only=True)
    torch.save(state | {"step": 4}, finished / "checkpoint.pt")
    evaluation.main([str(tmp_path), str(trained)])
    captured = capsys.readouterr()
    assert captured.err.startswith("left out, since it is unfinished") and captured.err.endswith(f": {finished}\n")
    assert "sstfmr" in captured.out and "seeds" not in captured.out
    assert "evalevery2, step 4 of 6)" in output(capsys, tmp_path, "--fresh", "--n", "20")
    (finished / "checkpoint.pt").unlink()
    evaluation.main([str(tmp_path), "--fresh"])
    assert capsys.readouterr().err == f"left out, since it has no weights: {finished}\n"


@pytest.mark.parametrize("key, value", [("model", "gone"), ("model", "../../x"), ("split", "gone"), ("code", "0" * 12)])
def test_runs_of_what_is_gone_are_left_out(finished, trained, tmp_path, capsys, key, value):
    (finished / "config.json").write_text(json.dumps(evaluation.read(finished / "config.json") | {key: value}))
    for flags in [], ["--fresh", "--n", "20"]:
        evaluation.main([str(tmp_path), str(trained), *flags])
        captured = capsys.readouterr()
        assert captured.err.splitlines() == [f"left out, since its model or data.py has changed: {finished}"]
        assert "sstfmr" in captured.out and "seeds" not in captured.out


@pytest.mark.parametrize("file, damage, flags, says", [
    *(("config.json", damage, [], "config.json is damaged") for damage in ("{", "[]", "{}")),
    ("result.json", '{"accuracy": {}}', [], "result.json is damaged"), ("config.json", None, [], "no run in"),
    ("checkpoint.pt", None, ["--show", "1"], "has no checkpoint.pt")])
def test_evaluation_says_what_is_wrong_with_a_folder(finished, tmp_path, capsys, file, damage, flags, says):
    (finished / file).unlink()
    if damage is not None:
        (finished / file).write_text(damage)
    assert says in refusal(capsys, evaluation, [tmp_path, *flags])


def test_plot(runs, tmp_path, capsys, monkeypatch):
    flags = [runs, "--plot", tmp_path / "a.png"]
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "matplotlib.figure", None)  # as where it is not installed
        assert "--plot needs matplotlib: pip install matplotlib" in refusal(capsys, evaluation, flags)
    pytest.importorskip("matplotlib")
    assert f"Drawn: {tmp_path / 'a.png'}" in output(capsys, *flags)
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    assert "cannot write" in refusal(capsys, evaluation, [runs, "--plot", tmp_path / "nowhere" / "a.png"])
