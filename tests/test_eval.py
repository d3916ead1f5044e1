"""Baselines, kinds of trials and attention by hand. Then the command line."""
import contextlib
import json
import shutil
import sys

import pytest
import torch
from torch.nn import functional as F

import data
import eval as evaluation
import models
from data import FIRST_COLOR, FIRST_SHAPE, Pool, Subset
from eval import chance, load, looks, mistakes, no_binding, read, score
from models import module_of
from test_oracle import GRID3, TREE3, grid
from test_train import TESTS, change, flip, refusal, run, with_code
from test_train import finished, trained  # noqa: F401


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
    two = grid({(0, 0): (1, 1), (0, 1): (2, 3)})[0]  # half of these cells, and half of all
    assert no_binding(data.Solved("SumEven", [(1, 1)], [], data.TRUE), two, True) == 1 / 2
    leaves = [7, 7], [7, 9], [1, 7, 7, 1], [7, 1, 1, 1]
    assert [evaluation.vote(answers, 7) for answers in leaves] == [1, 1 / 2, 1 / 2, 0]


def test_kinds_and_baselines_of_a_test_set_by_hand(monkeypatch):
    """If red a adds up to an odd number: the color of b, one of five; else: a product of two."""
    odd = grid({**GRID3, (3, 5): (0, 0), (3, 4): (1, 1)})
    answer = torch.tensor([data.TRUE, FIRST_COLOR + 5, FIRST_COLOR + 5])
    made = data.Trials(torch.tensor([TREE3] * 3), torch.cat([grid(GRID3), odd, odd]), answer)
    monkeypatch.setattr(data, "trials", lambda *_: made)
    _, kinds, baselines = evaluation.test_set.__wrapped__(
        "productive", "depth3", data.SPLITS["productive"]["depth3"], 3)
    assert kinds == {"GetColor": [1, 2], "ProductEven, two objects": [0], "if SumOdd": [0, 1, 2]}
    assert baselines == pytest.approx({"chance": (1 / 2 + 2 / 10) / 3, "condition-blind": 1 / 2,
                                "no binding": (1 / 2 + 2 / 5) / 3})


STATES = {  # of models that know a part, the answer or nothing
    "stimulus": lambda _, stimulus: F.one_hot(stimulus.long(), 11).flatten(1),
    "answer": lambda *tokens: F.one_hot(data.solve(*tokens), data.CLASSES),
    "nothing": lambda _, stimulus: torch.zeros(len(stimulus), data.CLASSES)}  # says True


def test_scores_and_mistakes_of_known_answers():
    made, of = data.trials("systematic1", "ood", 500), ("systematic1", 500, "cpu")
    config = {"split": "systematic1", "device": "cpu"}
    right, exist = (made.answer == data.TRUE).float(), made.instruction[:, 0, 0] == 1
    result, perfect = score(STATES["nothing"], *of), score(STATES["answer"], *of)
    assert list(result["accuracy"]) == TESTS and {*perfect["accuracy"].values()} == {1}
    assert result["accuracy"]["ood"] == pytest.approx(right.mean().item())
    assert result["kinds"]["ood"]["Exist"] == pytest.approx(right[exist].mean().item())
    assert mistakes(STATES["answer"], config, 500) == "No mistake in 1,000."
    text = mistakes(STATES["nothing"], config, 3)
    assert text.count("says: True") == text.count("Answer: ") == 3 and "Answer: True" not in text


def test_keys_by_hand():
    trial = data.Trials(torch.tensor([TREE3]), grid(GRID3), None)
    first, second = ["SumOdd red a", "IfElse", "GetColor b", "ProductEven blue c"], [
        "SumOdd", "IfElse", "GetColor", "ProductEven pink d"]
    question, objects = evaluation.keys_of(module_of("sstfmr").Model(), trial)
    assert question == first + second + ["EOS of the question"]
    assert objects == [*sorted(GRID3), "empty cells", "EOS of the grid"]
    assert evaluation.keys_of(module_of("papertfmr").Model(), trial)[0] == first + question[-1:]


def test_keys_of_looptfmr_name_the_vectors_that_it_reads():
    """Recomputed from the words and cells by which keys are called, in the first block."""
    torch.manual_seed(0)
    model, trial = module_of("looptfmr").Model(dim=16), data.trials("productive", "depth3", 1)
    objects, questions, read = model.stimulus, model.questions, []
    model.blocks[0].norm1.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0][0]))
    look = looks(model, trial)[0][0][1]
    expected = {"empty cells": objects.shape.weight[0] + objects.color.weight[0],
                "EOS of the grid": objects.eos}
    for cell, place, (shape, color) in zip(data.CELLS, objects.cell.weight, trial.stimulus[0]):
        if shape:
            expected[cell] = objects.shape.weight[shape] + objects.color.weight[color] + place
    expected = {key: token + model.bind(token) for key, token in expected.items()}
    solved = data.evaluate(trial.instruction[0], trial.stimulus[0])
    for side, node in zip([torch.zeros(16), *model.sides], solved):  # root, left, right
        operator = questions.operator.weight[[*data.OPERATORS].index(node.operator) + 1]
        for i, (shape, color) in enumerate(node.selectors):
            words = node.operator, ["", *data.COLOR_NAMES][color], ["", *data.LETTERS][shape]
            name = " ".join(word for word in words if word)
            token = operator + questions.shape.weight[shape] + questions.color.weight[color]
            expected[name] = token + i * questions.second
            if i == 0:
                expected[f"answer to {name}"] = side
    for (key, _), vector in zip(look, read[1], strict=True):  # read[0]: the queries
        if key not in data.OPERATORS:  # as an absent second selector is called
            torch.testing.assert_close(vector, expected.pop(key), atol=1e-4, rtol=1e-4)
    assert not expected


@pytest.mark.parametrize("name, changes, expected", [  # attentions: row, keys of question and grid
    ("sstfmr", {"layers": 2}, [("blocks.0", 0, "qg"), ("blocks.1", 0, "qg")]),
    ("sstfmr", {"layers": 2, "read": "eos"}, [("blocks.0", -1, "qg"), ("blocks.1", 0, "qg")]),
    ("papertfmr", {"layers": 1}, [("blocks.0", 0, "qg")]),
    ("crossattn", {}, [("look", 0, "g"), ("encode_instruction.blocks.0", 0, "q")]),
    ("crossattn", {"read": "eos"}, [("look", -1, "g"), ("encode_instruction.blocks.0", 0, "q")]),
    ("crossattn", {"first": "read"}, [("encode_instruction.blocks.0", 0, "q"), ("look", 0, "g")]),
    ("dstfmr", {"layers": 1}, [("encode_instruction.blocks.0", 0, "q"),
                               ("encode_stimulus.blocks.0", -1, "g")]),
    ("perceiver", {}, [("ask_instruction", 0, "q"), ("ask_each_other", 0, "l"),
                       ("ask_stimulus", 0, "g"), ("ask_each_other", 0, "l")]),
    ("looptfmr", {"layers": 1}, 2 * [("blocks.0", 2, "qg")])])
def test_looks_of_the_token_that_answers(monkeypatch, name, changes, expected):
    """... with as many keys of the grid as latents, which are not taken for each other."""
    same = dict.fromkeys(("train", "iid"), Subset(depths=(3,), distractors=(2, 2)))
    monkeypatch.setitem(data.SPLITS, "mine", same)
    model, trial, calls = module_of(name).Model(**changes), data.trials("mine", "iid", 1), []
    for module in model.modules():
        if type(module).__name__ == "Attention":
            module.register_forward_hook(lambda *call: calls.append(call[:2]))
    found, said = looks(model, trial, max(row for _, row, _ in expected))
    assert [name for name, _ in found] == [name for name, *_ in expected]
    assert said[-1].equal(model(*trial[:2]))
    for (name, look), (_, row, kinds) in zip(found, expected):
        keys, weights = zip(*look)
        of_grid = (*data.CELLS, "empty cells", "EOS of the grid")
        of_keys = ["l" if "latent" in key else "g" if key in of_grid else "q" for key in keys]
        assert "".join(dict.fromkeys(of_keys)) == kinds
        assert any(module is model.get_submodule(name).attention and torch.allclose(
            module.weights(*inputs)[0].mean(0)[row], torch.tensor(weights))
            for module, inputs in calls)


@pytest.mark.parametrize("name, flags, operator", [
    ("looptfmr", [], 0), ("looptfmr", ["--operator", "2"], 2), ("sstfmr", [], 0)])
def test_the_picture_shows_these_numbers(monkeypatch, name, flags, operator):
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure
    figure, trial = Figure(), data.Trials(*(part[1:] for part in data.trials(
        "productive", "depth5", 2)))
    monkeypatch.setattr(evaluation, "drawing", lambda *_: contextlib.nullcontext(figure))
    torch.manual_seed(0)
    model = module_of(name).Model(layers=2)
    monkeypatch.setattr(evaluation, "load", lambda folder, device: (
        model, {"model": name, "settings": "default", "seed": 0, "split": "productive"}))
    monkeypatch.setattr(evaluation.Path, "rglob", lambda *_: [evaluation.Path("here/config.json")])
    evaluation.main(["--attention", "x.png", "--subset", "depth5", "--trial", "1", *flags])
    found, said = looks(model, trial, operator)
    for axis, (name, look) in zip(figure.axes, found, strict=True):
        shares, texts = dict(look), [text.get_text() for text in axis.texts]
        grid, words = (mesh.get_array() for mesh in axis.collections)
        assert grid.ravel().tolist() == [shares.get(cell, 0) for cell in data.CELLS]
        heaviest = sorted((share for key, share in look if isinstance(key, str)), reverse=True)
        assert words.ravel().tolist() == [share for share in heaviest[:10] if share >= 0.005]
        for (row, column), (shape, color) in zip(data.CELLS, trial.stimulus[0].tolist()):
            there = [text for text in axis.texts if text.get_position() == (column + .5, row + .5)]
            assert [text.get_text() for text in there] == [*data.LETTERS[shape - 1]] * (shape > 0)
            percent = f"{100 * shares.get((row, column), 0):.0f}"
            assert percent == "0" or percent in texts
        assert {key for key, share in look if isinstance(key, str) and share > 0.2} <= {*texts}
    solved = data.evaluate(*(part[0] for part in trial[:2]))
    right = solved[data.descend(solved, operator)[-1]].answer
    logits = said[-2][0, operator] if operator else model(*trial[:2])[0]
    assert figure.get_suptitle().startswith(
        f"{data.describe(solved, operator)}\n\nRight answer: {data.ANSWERS[right]}. "
        f"The model says: {data.ANSWERS[logits.argmax()]}.\n")


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
    assert output(capsys, tmp_path, "--per-operator").out == table  # a copy counts once
    table.encode("cp1252")  # for consoles without UTF-8
    saved, (model, config) = read(folder / "result.json"), load(str(folder))
    accuracy = [f"{100 * share:.1f}" for share in saved["accuracy"].values()]
    assert table.split("| looptfmr (")[1].replace("|", "").split()[1:1 + len(TESTS)] == accuracy
    tested = score(model, "systematic1", evaluation.TEST_TRIALS, "cpu")
    assert saved | tested == saved and config["device"] == "cpu" and not model.training
    assert "batchsize8), 2 seeds | " in table and "±" in table and "differ" not in table


ADDS = {"--per-operator": "\n|   Exist ", "--show 1": "The model says:", "--plot a.png": "Drawn: a",
        "--attention a.png": "Drawn: a.png", "--attention a.png --subset ood --trial 2": "Drawn: a"}


@pytest.mark.parametrize("flags", ADDS)
def test_a_flag_adds_what_it_names(trained, tmp_path, capsys, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    if ".png" in flags:
        pytest.importorskip("matplotlib")
    assert ADDS[flags] not in output(capsys, trained).out
    assert ADDS[flags] in output(capsys, trained, *flags.split()).out
    assert not [path for path in tmp_path.iterdir() if path.read_bytes()[:4] != b"\x89PNG"]


@pytest.mark.parametrize("flags, says", [
    ("--attention a.png --subset depth3", "there is no subset 'depth3'; there is train, iid"),
    ("--attention a.png --operator 1", "there is none but the root, or LoopTfmr's 1"),
    ("--attention no/a.png", "cannot write no"), ("--plot a.xyz", "cannot write a.xyz: ")])
def test_what_cannot_be_drawn(trained, tmp_path, capsys, monkeypatch, flags, says):
    monkeypatch.chdir(tmp_path)
    if "cannot" in says:
        pytest.importorskip("matplotlib")
    assert says in refusal(capsys, evaluation, trained, *flags.split())[0]
    assert not list(tmp_path.iterdir())


def test_nothing_to_draw_or_nothing_to_draw_with(finished, tmp_path, capsys, monkeypatch):
    for name in "mlp", "hypertfmr":
        folder, = run(tmp_path / name, "--model", name)[-1:]
        line, = refusal(capsys, evaluation, folder, "--attention", "a.png")
        assert f"{name} has no attention to the grid" in line
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as where it is not installed
    for flag in "--plot", "--attention":
        line, = refusal(capsys, evaluation, finished, flag, "a.png")
        assert "pictures need matplotlib: pip install matplotlib" in line


SAVED, LOADED = [""], ["--show 1"]  # what needs results, or weights
LEFT_OUT = [
    ("config.json", {"split": "gone"}, SAVED + LOADED, "there is no split 'gone' any more"),
    ("config.json", {"model": "../x"}, LOADED, "do not fit today's models/../x.py"),
    ("config.json", {"model_args": {"depth": 1}}, LOADED, "do not fit today's models/sstfmr.py"),
    ("config.json", {"model_args": {"dim": 32}}, LOADED, "do not fit today's models/sstfmr.py"),
    *(("config.json", text, SAVED, "damaged: ") for text in ("{", "[]", "{}", "1")),
    ("result.json", "{}", SAVED, "result.json is missing or damaged: KeyError('accuracy')"),
    ("result.json", None, SAVED, "it is unfinished (log.csv says"),
    ("checkpoint.pt", None, LOADED, "checkpoint.pt is missing"),
    ("checkpoint.pt", flip, LOADED, "checkpoint.pt is damaged"),
    ("checkpoint.pt", with_code, LOADED, "checkpoint.pt is damaged")]


@pytest.mark.parametrize("file, content, flags, says", LEFT_OUT)
def test_what_cannot_be_had_is_left_out(finished, trained, capsys, file, content, flags, says):
    change(finished / file, content)
    for flag in {*SAVED, *flags}:
        left_out = flag in flags
        out, err = output(capsys, finished, *[trained] * left_out, *flag.split())
        assert " (dim16-" in out and err.count("\n") == left_out
        assert not left_out or err.startswith("left out: ") and says in err


def test_loading_warns_of_other_code_and_leaves_the_generator_alone(
        trained, finished, capsys, monkeypatch):
    state = torch.get_rng_state()
    load(trained)
    assert not capsys.readouterr().err and torch.get_rng_state().equal(state)
    now = evaluation.code_of("sstfmr") | {"data.py": "another"}
    monkeypatch.setattr(evaluation, "code_of", lambda model: now)
    load(trained)
    assert capsys.readouterr().err == f"{trained}: data.py changed since this run\n"
    config, weights = (finished / name for name in ("config.json", "checkpoint.pt"))
    settings = read(config)
    del settings["code"]  # as of recorded runs
    config.write_text(json.dumps(settings))
    torch.save(torch.load(weights) | {"code": {"models/sstfmr.py": "another"}}, weights)
    load(finished)
    assert capsys.readouterr().err == f"{finished}: models/sstfmr.py changed since this run\n"


def test_a_result_of_other_test_sets_is_named(finished, capsys):
    tests = read(finished / "result.json")["tests"] | {"ood": "100 trials"}
    change(finished / "result.json", {"tests": tests})
    evaluation.main([str(finished)])
    assert " was not tested on today's trials of ood.\n" in capsys.readouterr().out


def test_stray_files_in_models_are_passed_over(tmp_path, monkeypatch):
    for name, content in (("._gru", b"\xff\x00"), (".#gru", b"\nclass Model("), ("half", b"\xff"),
                          ("mine", b"\nclass Model("), ("my model", b"\nclass Model(")):
        (tmp_path / f"{name}.py").write_bytes(content)
    (tmp_path / "folder.py").mkdir()
    monkeypatch.setattr(models, "__file__", str(tmp_path / "__init__.py"))
    assert models.available() == ["mine"]
