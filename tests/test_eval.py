"""Baselines, kinds of trials, attention and hidden states by hand. Then the command line."""
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import data
import eval as evaluation
import models
from data import FIRST_COLOR, FIRST_SHAPE, Pool, Subset
from eval import attention_of, chance, load, mistakes, no_binding, read, score
from models import module_of
from test_models import find_objects
from test_oracle import GRID3, TREE3, grid
from test_train import SSTFMR, TESTS, change, contents, refusal, run
from test_train import finished, trained


RELEASE = Subset(shortcuts=True)


def test_baselines_by_hand():
    pools = (Pool(("GetColor", "Exist"), colors=(0, 1)), Pool(("GetColor",), colors=(1, 2, 3, 4)),
             Pool(("GetShape", "GetLocation"), shapes=(0, 1, 2)))
    color = (1 / 4 + 1 / 4) / (1 / 2 + 1)  # color 1: of half of the trials, and of the others
    assert chance(Subset(pools)) == pytest.approx(
        {"GetColor": color, "Exist": 1 / 2, "GetShape": 1 / 3, "GetLocation": 1 / 100})
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
        found = [no_binding(node, stimulus, train) for train in (Subset(), RELEASE)]
        assert found == pytest.approx([ours, release])
    two = grid({(0, 0): (1, 1), (0, 1): (2, 3)})[0]  # half of these cells, and half of all
    assert no_binding(data.Solved("SumEven", [(1, 1)], [], data.TRUE), two, RELEASE) == 1 / 2
    leaves = [7, 7], [7, 9], [1, 7, 7, 1], [7, 1, 1, 1]
    assert [evaluation.vote(answers, 7) for answers in leaves] == [1, 1 / 2, 1 / 2, 0]


def test_no_binding_keeps_objects_that_training_pairs_with_the_operator():
    """Of a red a at (0, 0), a blue b at (0, 1), a green c at (0, 2) and a red d at (0, 4)."""
    stimulus = grid({(0, 0): (1, 1), (0, 1): (2, 3), (0, 2): (3, 2), (0, 4): (4, 1)})[0]
    train = Subset((Pool(("GetShape", "SumEven", "SumOdd", "Exist"), colors=(0,)),
                    Pool(("GetColor",), shapes=(0, 1)), Pool(("GetLocation",), colors=(7,))))
    for operator, selectors, answer, share in (
            ("GetShape", [(0, 1)], FIRST_SHAPE, 1 / 2), ("GetShape", [(0, 2)], FIRST_SHAPE + 2, 0),
            ("GetColor", [(2, 0)], FIRST_COLOR + 2, 1 / 2),
            ("SumEven", [(1, 1)], data.TRUE, 1), ("SumOdd", [(4, 1)], data.FALSE, 1),
            ("Exist", [(1, 1)], data.TRUE, 1), ("Exist", [(1, 2)], data.FALSE, 1),
            ("GetLocation", [(1, 1)], data.FIRST_CELL, 1 / 4)):  # none is known: any may be asked
        node = data.Solved(operator, selectors, [], answer)
        assert no_binding(node, stimulus, train) == pytest.approx(share)


def test_no_binding_knows_the_pairs_of_training_only_where_they_hold():
    iid, ood = (solved("systematic1", name, 300)[2]["no binding"]
                for name in ("iid", "ood"))
    assert iid > 0.55 and 0.5 > ood > 0.35  # 0.27 for a reader that keeps to the wrong objects


def test_kinds_and_baselines_of_a_test_set_by_hand(monkeypatch):
    """If red a adds up to an odd number: the color of b, one of five; else: a product of two."""
    odd = grid({**GRID3, (3, 5): (0, 0), (3, 4): (1, 1)})
    answer = torch.tensor([data.TRUE, FIRST_COLOR + 5, FIRST_COLOR + 5])
    made = data.Trials(torch.tensor([TREE3] * 3), torch.cat([grid(GRID3), odd, odd]), answer)
    monkeypatch.setattr(data, "trials", lambda *_: made)
    _, kinds, baselines = solved("productive", "depth3", 3)
    assert kinds == {"GetColor": [1, 2], "ProductEven, two objects": [0], "if SumOdd": [0, 1, 2]}
    assert baselines == pytest.approx({"chance": (1 / 2 + 2 / 10) / 3, "condition-blind": 1 / 2,
                                "no binding": (1 / 2 + 2 / 5) / 3})


def test_baselines_of_a_set_count_its_leaves_and_know_its_operators():
    made, _, found = solved("productive", "depth9", 50)
    leaves = [[node.answer for node in data.evaluate(*tokens)[15:]] for tokens in zip(*made[:2])]
    shares = map(evaluation.vote, leaves, made.answer.tolist())  # of 16 leaves each
    assert found["condition-blind"] == pytest.approx(sum(shares) / 50)
    made, _, found = solved("systematic1", "ood", 100)
    by_operator = chance(data.SPLITS["systematic1"]["ood"])
    names = [list(data.OPERATORS)[number - 1] for number in made.instruction[:, 0, 0]]
    assert found["chance"] == pytest.approx(sum(map(by_operator.get, names)) / 100)


def solved(split, test, n):
    return evaluation.test_set(split, test, n, data.find(split, test), data.find(split, "train"))


STATES = {  # of models that know a part, the answer or nothing
    "stimulus": lambda _, stimulus: F.one_hot(stimulus, 11).flatten(1),
    "answer": lambda *tokens: F.one_hot(data.solve(*tokens), data.CLASSES),
    "nothing": lambda _, stimulus: torch.zeros(len(stimulus), data.CLASSES)}  # says True
SIGNS = torch.tensor([-1, *[1] * 19])[:, None]  # of 20 trials, one is answered wrong


def test_scores_and_mistakes_of_known_answers(monkeypatch):
    made, of = data.trials("systematic1", "ood", 500), ("systematic1", 500, "cpu")
    right, exist = (made.answer == data.TRUE).float(), made.instruction[:, 0, 0] == 1
    result, perfect = score(STATES["nothing"], *of), score(STATES["answer"], *of)
    assert list(result["accuracy"]) == TESTS and {*perfect["accuracy"].values()} == {1}
    assert result["accuracy"]["ood"] == pytest.approx(right.mean().item())
    assert result["kinds"]["ood"]["Exist"] == pytest.approx(right[exist].mean().item())
    nearly = score(lambda *tokens: STATES["answer"](*tokens) * SIGNS, "systematic1", 20, "cpu")
    assert {*nearly["accuracy"].values()} == {0.95}
    config = {"split": "systematic1", "hardest": "ood"}
    checksums = {"ood": evaluation.checksum("systematic1", "ood")}
    a_run = {"folder": "perfect", "config": config, "checksums": checksums}
    monkeypatch.setattr(evaluation, "load", lambda folder: (STATES[folder], config))
    assert mistakes(a_run | {"folder": "answer"}, 500) == "0 of 1,000 are wrong."
    wrong = (data.trials("systematic1", "iid", 1000).answer != data.TRUE).sum()
    a_run["folder"] = "nothing"
    assert mistakes(a_run, 0, "iid") == f"{wrong} of 1,000 are wrong."
    text = mistakes(a_run, 3)
    first = next(trial for trial in zip(*made) if trial[2] != data.TRUE)  # of the hardest set
    assert data.show(first) in text
    assert text.count("says: True") == text.count("Answer: ") == 3 and "Answer: True" not in text


# ---- where a model looks ------------------------------------------------------------------------
TRIAL3 = torch.tensor(TREE3), grid(GRID3)[0]


def test_keys_by_hand():
    first, second = ["SumOdd red a", "IfElse", "GetColor b", "ProductEven blue c"], [
        "SumOdd", "IfElse", "GetColor", "ProductEven pink d"]
    keys = evaluation.keys_of(*TRIAL3)
    assert keys["question"] == first + second + ["EOS of the question"]
    assert keys["grid"] == [*sorted(GRID3), "empty cells", "EOS of the grid"]
    del first[1], second[1]
    assert keys["operators"] == first + second
    assert keys["selectors"] == [key for pair in zip(first, second) for key in pair]
    assert keys["answers"] == [f"answer to {token}" for token in first]


@pytest.mark.parametrize("name", ["sstfmr", "looptfmr"])
def test_keys_are_the_tokens_that_a_model_reads(name):
    """If the color of an object changes in question or grid, the token of its key alone does."""
    model, read = module_of(name).Model().eval(), []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: read.append(inputs[1][0]))
    row, kinds = model.looks["blocks"]
    keys = sum((evaluation.keys_of(*TRIAL3)[kind] for kind in kinds.split()), [])
    assert name == "sstfmr" or keys[row] == "SumOdd red a"  # the root
    model.features(*(part[None] for part in TRIAL3))
    before = read[0]
    for part, place, key in ((0, (0, 0, 2), "SumOdd red a"), (0, (0, 3, 4), "ProductEven pink d"),
                             (1, (0, 33, 1), (3, 3))):
        tokens = [part.clone()[None] for part in TRIAL3]
        tokens[part][place] += 1
        read.clear()
        model.features(*tokens)
        differs = (read[0] != before).any(1)
        assert [keys[i] for i in differs.nonzero()] == [key] and len(differs) == len(keys)


def test_a_model_that_looks_at_other_tokens_than_it_says():
    model = module_of("sstfmr").Model()
    model._modules = {"layer1": model.blocks[1], **model._modules}
    model.looks = {"layer1": (0, "question grid")}  # a digit that belongs to a name
    assert [name for name, _ in attention_of(model, *TRIAL3)[0]] == ["layer1"]
    for looks, error, message in [
            ({"blocks": (0, "question")}, ValueError, "longer"),
            ({"blocks": (0, "questions grid")}, KeyError, "questions"),
            ({"block": (0, "question grid")}, data.UsageError, "the model has no modules block")]:
        model.looks = looks
        with pytest.raises(error, match=message):
            evaluation.attention_of(model, *TRIAL3)


@pytest.mark.parametrize("name, changes, expected", [  # attentions: row, keys of question and grid
    ("sstfmr", {"layers": 2}, [("blocks.0", -1, "qg"), ("blocks.1", 0, "qg")]),
    ("sstfmr", {"layers": 2, "read": "root"}, [("blocks.0", 0, "qg"), ("blocks.1", 0, "qg")]),
    ("crossattn", {}, [("encode_instruction.blocks.0", 0, "q"), ("look", 0, "g")]),
    ("crossattn", {"first": "ask"}, [("look", -1, "g"), ("encode_instruction.blocks.0", 0, "q")]),
    ("crossattn", {"first": "ask", "read": "root"}, [
        ("look", 0, "g"), ("encode_instruction.blocks.0", 0, "q")]),
    ("dstfmr", {"layers": 2}, [
        ("encode_instruction.blocks.0", -1, "q"), ("encode_instruction.blocks.1", 0, "q"),
        ("encode_stimulus.blocks.0", -1, "g"), ("encode_stimulus.blocks.1", 0, "g")]),
    ("perceiver", {}, [("ask_instruction", 0, "q"), ("ask_each_other", 0, "l"),
                       ("ask_stimulus", 0, "g"), ("ask_each_other", 0, "l")]),
    ("perceiver", {"first": "ask"}, [("ask_stimulus", 0, "g"), ("ask_instruction", 0, "q"),
                                     ("ask_each_other", 0, "l")]),
    ("looptfmr", {"layers": 1}, 2 * [("blocks.0", 0, "qg")])])
def test_looks_of_the_token_that_answers(monkeypatch, name, changes, expected):
    """... with as many keys of the grid as latents, which are not taken for each other."""
    same = dict.fromkeys(("train", "iid"), Subset(depths=(3,), distractors=(4, 4)))
    monkeypatch.setitem(data.SPLITS, "mine", same)
    model, called = module_of(name).Model(**changes).eval(), []
    *trial, _ = (part[0] for part in data.trials("mine", "iid", 1))
    for module in model.modules():
        if type(module).__name__ == "Attention":
            module.register_forward_hook(lambda *call: called.append(call[:2]))
    found, said = attention_of(model, *trial)
    assert [name for name, _ in found] == [name for name, *_ in expected]
    assert said == data.ANSWERS[model(*(part[None] for part in trial)).argmax()]
    for (name, look), (_, row, kinds) in zip(found, expected):
        keys, weights = zip(*look)
        of_grid = (*data.CELLS, "empty cells", "EOS of the grid")
        of_keys = ["l" if "latent" in key else "g" if key in of_grid else "q" for key in keys]
        assert "".join(dict.fromkeys(of_keys)) == kinds
        assert any(module is model.get_submodule(name).attention and torch.allclose(
            module.weights(*inputs)[0].mean(0)[row], torch.tensor(weights))
            for module, inputs in called)


@pytest.mark.parametrize("name", ["looktfmr", "findtfmr"])
def test_each_selector_looks(name):
    """With scores set by hand, at objects like the one that it asks for."""
    model = module_of(name).Model(dim=32).eval()
    find_objects(model)
    found, _ = attention_of(model, *TRIAL3)
    cells = [max(look, key=lambda pair: pair[1])[0] for _, look in found]
    assert [name for name, _ in found] == [
        "SumOdd red a", "GetColor b", "ProductEven blue c", "ProductEven pink d"]
    assert cells == [(3, 5), (0, 0), (3, 3), (2, 5)]


@pytest.mark.parametrize("name, titles", [
    ("looptfmr", [f"blocks.0, loop {i}" for i in (1, 2, 3)]), ("sstfmr", ["blocks.0"]),
    ("looktfmr", None)])  # a selector each
def test_the_picture_shows_these_numbers(tmp_path, monkeypatch, name, titles):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    monkeypatch.setattr(evaluation, "empty_figure", lambda *_: figure)
    monkeypatch.chdir(tmp_path)
    folder, = run(tmp_path, "--split", "productive", "--model", name)
    evaluation.main([str(folder), *"--attention x.png --subset depth5 --trial 1".split()])
    instruction, stimulus, answer = (part[1] for part in data.trials("productive", "depth5", 2))
    found, said = attention_of(load(folder)[0], instruction, stimulus)
    for axis, (_, look) in zip(figure.axes, found, strict=True):
        shares, texts = dict(look), [(text.get_position(), text.get_text()) for text in axis.texts]
        shade = axis.collections[0].get_array().flatten().tolist()
        assert shade == [shares.get(cell, 0) for cell in data.CELLS]
        words = [f"{100 * share:3.0f} % {key}" for key, share in look if isinstance(key, str)]
        listed = texts[-1][1].splitlines()
        assert {*listed} <= {*words} and (name != "looktfmr") <= len(listed) <= 10
        assert [line[:3] for line in listed] == sorted(
            (word[:3] for word in words), reverse=True)[:len(listed)]
        inks = {text.get_position(): text.get_color() for text in axis.texts}
        for (row, column), (shape, color), share in zip(data.CELLS, stimulus.tolist(), shade):
            drawn = (column + 0.5, row + 0.5), data.SHAPE_NAMES[shape - 1]
            assert not shape or inks[drawn[0]] == evaluation.BRIGHT[color - 1]
            percent = (column + 0.97, row + 0.95), f"{100 * share:.0f}"
            assert (drawn in texts) == (shape > 0) and (percent in texts) == (share >= 0.005)
    titles = titles or [name for name, _ in found]
    assert [axis.get_title("left") for axis in figure.axes] == titles
    assert figure.get_suptitle().startswith(
        f"{data.describe(data.evaluate(instruction, stimulus))}\n\nRight answer: "
        f"{data.ANSWERS[answer]}. The model says: {said}.\n")


# ---- what hidden states hold --------------------------------------------------------------------
@pytest.mark.parametrize("name, like", [
    ("stimulus", (1, 0, 0)), ("answer", (0, 0, 1)), ("nothing", (0, 0, 0))])
def test_alignment_of_known_states(name, like):
    made = data.trials("distractor", "iid", 300)
    assert evaluation.alignment(STATES[name](*made[:2]), made) == pytest.approx(like, abs=0.15)
    same = torch.tensor([[0, 1, 2.0], [0, 2, 4], [2, 1, 0], [1, 1, 1]])  # r: 1, -1, -1; else 0
    assert evaluation.similarity_ranks(same).tolist() == [6, 1.5, 4, 1.5, 4, 4]


def test_decoding_of_known_states():
    """From a question's one-hot code all is decoded, wherever its zero is; from nothing, the most
    frequent value."""
    fit, test = (data.trials("distractor", "iid", 1_000, seed=seed) for seed in (1, 0))
    known = [F.one_hot(made.instruction[:, 0], 12).flatten(1).double() for made in (fit, test)]
    known = [x + torch.arange(x.shape[1]) for x in known]
    assert evaluation.decoding(known[0], fit, known[1], test) == 1
    nothing = [torch.zeros(1_000, 2).double()] * 2
    assert evaluation.decoding(nothing[0], fit, nothing[1], test) == pytest.approx(0.11, abs=0.03)


@pytest.mark.parametrize("name, changes, places", [
    ("sstfmr", {"layers": 2}, 2), ("crossattn", {}, 2), ("dstfmr", {}, 2), ("perceiver", {}, 4),
    ("hypertfmr", {}, 2), ("looptfmr", {"layers": 2}, 4), ("looktfmr", {}, 0), ("gru", {}, 0)])
def test_states_are_those_of_the_token_that_answers(name, changes, places):
    """... each trial has its own. A norm of the last ones gives the features of two models."""
    model, made = module_of(name).Model(**changes).eval(), data.trials("productive", "depth3", 120)
    found = evaluation.states(model, made)
    assert len(found) == places + 1 and ("code" in found) == (name == "hypertfmr")
    assert all(len(x) == 120 for x in found.values())
    assert torch.allclose(found["features"].float(), evaluation.predict(model.features, made))
    if name == "sstfmr":  # EOS comes last
        outputs = []
        model.blocks[0].register_forward_hook(lambda *call: outputs.append(call[2]))
        model.features(*(part[:50] for part in made[:2]))
        assert torch.allclose(found["block 1"][:50].float(), outputs[0][:, -1])
    if name in ("sstfmr", "looptfmr"):
        last = model.norm(found[f"block {places}"].float())
        assert torch.allclose(last, found["features"].float(), atol=1e-5)


def test_measured_are_states_before_and_after_training_on_both_sets(trained, monkeypatch):
    weights, answers, states = [], [], evaluation.states

    def note(model, made):
        weights.append(model.readout.weight.clone())
        answers.append(made.answer)
        return states(model, made)
    monkeypatch.setattr(evaluation, "states", note)
    monkeypatch.setattr(evaluation, "FIT", 300)
    found = evaluation.measure(evaluation.read_run(trained) | {"folder": trained})
    near = data.trials("systematic1", "iid", 300, seed=1)
    far = data.trials("systematic1", TESTS[-1], evaluation.PROBES)
    models = before, after = [load(trained, trained=when)[0] for when in (False, True)]
    assert all(map(torch.equal, answers, (near.answer, far.answer) * 2))
    assert all(map(torch.equal, weights, [model.readout.weight for model in (
        before, before, after, after)]))
    for when, model in zip(("untrained", "decoded"), models):
        x, y = (states(model, made)["features"] for made in (near, far))
        assert found[when]["features"] == evaluation.decoding(x, near, y, far)
    assert [*found["alignment"].values()] == evaluation.alignment(y, far)


def test_columns_of_hidden_states():
    """The best place before training and after, then the features."""
    why = {"alignment": {"stimulus": 0.1, "instruction": 0.2, "answer": 0.6},
           "untrained": {"block 1": 0.5, "features": 0.2},
           "decoded": {"block 1": 0.9, "features": 0.4}}
    run = {"row": "rnn", "config": {"split": "s", "hardest": "ood"}, "accuracy": {"ood": 0.7},
           "why": why}
    row = evaluation.why_table([run]).splitlines()[2].split("|")[1:-1]
    assert [cell.strip() for cell in row] == [
        "s, rnn", "0.10", "0.20", "0.60", "50.0", "90.0", "40.0", "70.0"]


# ---- the command line ---------------------------------------------------------------------------
def output(capsys, *arguments):
    capsys.readouterr()
    evaluation.main([str(argument) for argument in arguments])
    return capsys.readouterr()


def test_results_are_those_of_the_saved_weights(tmp_path, capsys):
    for flags in (["--seed", "0", "1"], ["--model", "looptfmr"], ["--split", "distractor"]):
        run(tmp_path, *flags)
    folder = next(tmp_path.rglob("looptfmr/*/seed0"))
    table = output(capsys, tmp_path, "--per-operator").out
    table.encode("cp1252")  # for consoles without UTF-8
    saved, (model, _) = read(folder / "result.json"), load(str(folder))
    accuracy = [f"{100 * share:.1f}" for share in saved["accuracy"].values()]
    row, operators = table.split("| looptfmr (")[1].split("|   Exist ")
    assert row.replace("|", "").split()[1:1 + len(TESTS)] == accuracy
    assert operators.replace("|", "").split()[:len(TESTS)] == [
        f"{100 * saved['kinds'][test]['Exist']:.1f}" for test in TESTS]
    assert saved | score(model, "systematic1", 50, "cpu") == saved and not model.training
    assert "(0/2)" in table and "±" in table


def fake(folder, accuracy, chance=0.3, checksum=7, **changes):
    """A finished run in <out>/<split>/<model>/<settings>/seed<k>, without weights."""
    split, model, settings, seed = folder.parts[-4:]
    tests = data.tests_of(split)
    config = {"split": split, "in_distribution": data.in_distribution(split), "hardest": tests[-1],
              "model": model, "settings": settings, "seed": int(seed[4:]), "test_trials": 10}
    folder.mkdir(parents=True)
    (folder / "result.json").write_text(json.dumps({
        "config": config | changes, "accuracy": dict.fromkeys(tests, accuracy), "kinds": {},
        "log": [], "checksums": dict.fromkeys(tests, checksum),
        "baselines": dict.fromkeys(tests, {"chance": chance} | (
            {"condition-blind": 0.4} if split in ("systematic3", "productive") else {}))}))


def test_rows_have_an_order_and_say_where_they_come_from(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for model in ("looptfmr/default", "mine/default", "authors/default", "sstfmr/default",
                  "rnn/dim7", "rnn/default"):
        for split in "distractor", "productive":
            fake(Path("a") / split / model / "seed0", 0.5)
    fake(Path("a/distractor/rnn/default/seed1"), 0.6)
    fake(Path("b/distractor/rnn/default/seed0"), 0.7)
    fake(Path("a/systematic3/rnn/default/seed0"), 0.96)
    fake(Path("a/distractor_release/rnn/default/seed0"), 0.5)

    def rows(*folders):  # of each table
        tables = output(capsys, *folders).out.split("\n\n")
        return [{line.split("|")[1].strip(): line.split("|")[-2].strip()
                 for line in table.strip().splitlines()[2:]} for table in tables]
    first, _, second, _, summary, release, _ = rows("a")
    order = ["rnn", "rnn (dim7)", "sstfmr", "looptfmr", "authors", "mine"]
    assert [*first] == ["chance", *order] and first["rnn"] == "55.0±7.1"
    assert [*second] == ["chance", "condition-blind", *order]
    assert [*summary] == order and summary["rnn"] == "not learned 50.0 (0/1)"
    assert [*release] == ["rnn"]  # a table of its own
    *_, table, note = output(capsys, "a/systematic3", "a/distractor").out.split("\n\n")
    assert note.startswith("Not learned: less than 95 %")
    hardest = data.tests_of("distractor")[-1]
    assert table.splitlines()[0].split()[5:] == [
        "distractor:", hardest, "|", "systematic3:", "ood", "|"]  # in the order of SPLITS
    assert [cell.strip() for cell in table.splitlines()[2].split("|")[2:4]] == [
        "not learned 55.0 (0/2)", "yes 96.0 (1/1)"]
    several = [*rows("b", "a/distractor/looptfmr", "a/distractor/rnn/dim7")[0]]
    assert several == ["chance", "b: rnn", "a: looptfmr", "a: rnn (dim7)"]  # in the order given
    assert rows("a/distractor", "a/distractor/rnn")[0] == first  # what is named twice counts once
    assert rows("[a]/dis*r/rnn")[0].keys() == {"chance", "rnn", "rnn (dim7)"}  # Windows' shell
    Path("empty").mkdir()
    assert output(capsys, "a", "empty").err == "not shown: no run in empty\n"


@pytest.mark.parametrize("near, far, says", [
    ([0.95, 0.97], [0.94, 0.98], "yes 96.0 (2/2)"), ([0.95, 0.9], [0.94, 0.99], "no 94.0 (1/2)"),
    ([0.96, 0.9], [0.95, 0.1], "yes 95.0 (1/2)"), ([0.5, 0.9], [1, 1], "not learned 70.0 (0/2)")])
def test_a_verdict_is_that_of_the_seeds_that_have_learned(near, far, says):
    assert evaluation.verdict(near, far) == says


def test_what_another_program_wrote_is_passed_over(tmp_path, capsys):
    fake(tmp_path / "distractor/rnn/default/seed0", 0.5)
    for i, (name, text) in enumerate([("result.json", "{}"), ("result.json", '{"config": {}}'),
                                      ("config.json", '{"split": 3}'), ("config.json", "[]"),
                                      ("result.json", '{"checksums": {}}'), ("result.json", "null"),
                                      ("result.json", ""), ("config.json", "// a comment")]):
        (tmp_path / f"other{i}").mkdir()
        (tmp_path / f"other{i}" / name).write_text(text)
    shown = output(capsys, tmp_path)
    assert "| rnn " in shown.out
    lines = shown.err.splitlines()
    assert lines == [f"not shown: {tmp_path / f'other{i}'}, damaged or not of this train.py"
                     for i in range(8)]


def test_unfinished_runs_are_counted_and_drawn(tmp_path, capsys, monkeypatch, trained):
    """... from their log; one has none yet."""
    figure = pytest.importorskip("matplotlib.figure").Figure()
    monkeypatch.setattr(evaluation, "empty_figure", lambda *_: figure)
    monkeypatch.chdir(tmp_path)
    for seed, names in ("seed0", ("config.json", "log.csv")), ("seed1", ("config.json",)):
        (folder := tmp_path / "systematic1/sstfmr/default" / seed).mkdir(parents=True)
        for name in names:
            shutil.copy(trained / name, folder)
    change(folder / "config.json", lambda text: text.replace(b'"seed": 0', b'"seed": 1'))
    shown = output(capsys, tmp_path, "--curves", "x.png")
    assert shown.err == "not finished: 2 of 2 runs; --curves draws them, too\n"
    drawn = {line.get_marker(): line.get_xydata().tolist() for line in figure.axes[0].lines}
    log = read(trained / "result.json")["log"]
    assert drawn == {"$0$": [[row["step"], row["iid"]] for row in log], "$1$": []}
    says = refusal(capsys, evaluation, tmp_path, "--plot", "x.png")[-1]
    assert says.endswith("none of these runs is finished: --curves draws them")
    fake(tmp_path / "systematic1/rnn/default/seed0", 0.5)
    assert "| rnn " in (shown := output(capsys, tmp_path)).out
    assert "sstfmr" not in shown.out and shown.err.startswith("not finished: 2 of 3 runs")


def test_a_copied_folder_does_not_count_twice(tmp_path, capsys):
    fake(tmp_path / "distractor/rnn/default/seed0", 0.5)
    fake(tmp_path / "distractor/rnn/default/seed1", 0.7)
    shutil.copytree(tmp_path / "distractor/rnn/default/seed1", copied := tmp_path /
                    "distractor/rnn/default/seed1 (copy)")
    shown = output(capsys, tmp_path)
    assert " 60.0±14.1 (0/2) " in shown.out
    assert shown.err == f"not shown: {copied}, a seed that its row has already\n"


def test_baselines_are_those_of_the_most_trials(tmp_path, capsys):
    for model, chance, trials in ("rnn", 0.1, 10), ("sstfmr", 0.2, 1_000), ("gru", 0.3, 10):
        fake(tmp_path / f"distractor/{model}/default/seed0", 0.5, chance, test_trials=trials)
    assert re.search(r"\| chance +\| +20.0 ", output(capsys, tmp_path).out)


def test_a_split_that_changes_has_new_test_sets(monkeypatch):
    """... as in a notebook."""
    for operator in "GetColor", "GetShape":
        alone = Subset((Pool((operator,)),))
        monkeypatch.setitem(data.SPLITS, "mine", {"train": alone, "iid": alone})
        assert [*solved("mine", "iid", 5)[1]] == [operator]


ADDS = {"--per-operator": "\n|   Exist ", "--show 1": "The model says:",
        "--why": "\n| hidden states, ", "--plot a.png": "Drawn: a.png",
        "--curves a.png": "Drawn: a.png",
        "--attention a.png --subset ood --trial 2": "Drawn: a.png"}


@pytest.mark.parametrize("flags", ADDS)
def test_a_flag_adds_what_it_names(finished, tmp_path, capsys, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    if ".png" in flags:
        pytest.importorskip("matplotlib")
    assert ADDS[flags] not in output(capsys, finished).out
    assert ADDS[flags] in output(capsys, finished, *flags.split()).out
    drawn = [path.read_bytes()[:4] == b"\x89PNG" for path in tmp_path.iterdir() if path.is_file()]
    assert drawn == [True] * (".png" in flags)
    if flags == "--why":  # is kept in result.json, and printed from there
        change(finished / "checkpoint.pt", None)
        assert ADDS[flags] in output(capsys, finished, *flags.split()).out


def test_mistakes_are_of_the_subset_and_attention_is_the_first_runs(tmp_path, capsys, monkeypatch):
    first, second = run(tmp_path, "--seed", "0", "1")
    monkeypatch.setattr(evaluation, "mistakes", lambda *of: f"asked for {of[2]}")
    assert "asked for iid" in output(capsys, first, "--show", "1", "--subset", "iid").out
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(evaluation, "save", lambda figure, _: drawn.append(figure.get_suptitle()))
    output(capsys, first, second, "--attention", "x.png")
    (first / "checkpoint.pt").unlink()  # now the second is the first with weights
    output(capsys, first, second, "--attention", "x.png")
    assert ", seed 0; systematic1, iid, trial 0\n" in drawn[0]
    assert ", seed 1; systematic1, iid, trial 0\n" in drawn[1]


def test_the_plot_shows_the_table(finished, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    monkeypatch.setattr(evaluation, "empty_figure", lambda *_: figure)
    run(finished.parents[3], "--seed", "1")
    monkeypatch.chdir(finished)
    evaluation.main([str(finished.parents[3]), "--plot", "x.png"])
    bars, lines = figure.axes
    seeds = [read(path)["accuracy"] for path in finished.parent.rglob("result.json")]
    means = {test: 50 * sum(seed[test] for seed in seeds) for test in TESTS}
    widths = [bar.get_width() for bar in bars.patches]
    assert widths == pytest.approx([means["iid"], means[TESTS[-1]]])
    dots = [x for line in bars.lines for x in line.get_xdata() if line.get_marker() == "."]
    assert dots == pytest.approx([100 * seed[test] for test in ("iid", TESTS[-1])
                                  for seed in seeds])
    shown = {line.get_label(): list(line.get_ydata()) for line in lines.lines}
    assert [*means.values()] == pytest.approx([*shown.values()][-1])
    chance = read(finished / "result.json")["baselines"]
    assert shown["chance"] == pytest.approx([100 * chance[test]["chance"] for test in TESTS])
    lines = [line.get_xdata()[0] for line in bars.lines if line.get_marker() != "."]
    assert lines == pytest.approx([100 * share for share in chance[TESTS[-1]].values()])
    assert not any(bar.get_fill() for bar in bars.patches)  # none has learned


def test_a_bar_stands_beside_its_name(tmp_path):
    """... and is hollow if no seed has learned."""
    pytest.importorskip("matplotlib")
    for model, seed, accuracy in ("sstfmr", 0, 0.5), ("looptfmr", 0, 0.96), ("looptfmr", 1, 0.5):
        fake(tmp_path / "distractor" / model / f"default/seed{seed}", accuracy)
    runs = evaluation.find_runs([tmp_path])
    axis, _ = evaluation.draw_accuracy(evaluation.collect(runs), {"distractor": runs[0]["ends"]},
                                       evaluation.colors_of(runs)).axes
    names = [label.get_text() for label in axis.get_yticklabels()]
    shown = {(names[round(bar.get_y() + bar.get_height() / 2)], round(bar.get_width()),
              bar.get_fill()) for bar in axis.patches}
    assert shown == {("sstfmr", 50, False), ("looptfmr", 73, True)}


def test_rows_of_a_picture_have_colors_of_their_own_and_are_not_too_many(tmp_path, capsys):
    for dim in range(16):
        fake(tmp_path / f"distractor/rnn/dim{dim}/seed0", 0.5)
    colors = evaluation.colors_of(evaluation.find_runs([tmp_path]))
    assert len(colors) == len({*colors.values()}) == 16
    fake(tmp_path / "distractor/gru/default/seed0", 0.5)
    for flag in "--plot", "--curves":
        assert "17 rows cannot be read: name folders of at most 16" in refusal(
            capsys, evaluation, tmp_path, flag, tmp_path / "a.png")[-1]


@pytest.mark.parametrize("model, flags, says", [
    ("sstfmr", "--attention a.png --subset depth3",
     "systematic1 has no subset depth3; it has "),
    ("mlp", "--attention a.png", "mlp has no attention to the grid that could be drawn"),
    ("hypertfmr", "--attention a.png", "hypertfmr has no attention to the grid"),
    ("sstfmr", "--attention no/a.png", "No such file or directory: 'no/a.png'"),
    ("sstfmr", "--attention a.xyz", "cannot write a.xyz, but files in "),
    ("sstfmr", "--plot a.png", "pictures need matplotlib: pip install matplotlib")])
def test_what_cannot_be_drawn(tmp_path, capsys, monkeypatch, model, flags, says):
    if "matplotlib" not in says:
        pytest.importorskip("matplotlib")
    else:  # as where it is not installed
        for name in "matplotlib", "matplotlib.figure":
            monkeypatch.setitem(sys.modules, name, None)
    folder, = run(tmp_path, "--model", model)
    monkeypatch.chdir(folder.parent)
    before = [*folder.parent.rglob("*")]
    assert says in refusal(capsys, evaluation, folder, *flags.split())[0]
    assert [*folder.parent.rglob("*")] == before


def other_checksums(text):
    result = json.loads(text)
    return json.dumps(result | {"checksums": dict.fromkeys(result["checksums"], 1)}).encode()


@pytest.mark.parametrize("file, content, flags, says", [  # flags that cannot do without it
    ("result.json", lambda text: text.replace(b'"split": "sys', b'"split": "gone'), "--show 1",
     "there is no split gonetematic1; there are "),
    *(("result.json", other_checksums, flags, "was tested on other trials of systematic1, ")
      for flags in ("--why", "--attention a.png --subset ood")),
    ("result.json", lambda text: text.replace(b'"dim": 16', b'"dim": 32'), "--show 1",
     "does not fit today's data.py"),
    ("result.json", lambda text: b"", "", "there is nothing to show"),
    ("checkpoint.pt", lambda text: text[:999], "--show 1", "checkpoint.pt is damaged: remove it"),
    ("checkpoint.pt", None, "--show 1", "none of these runs is finished and has weights"),
    ("checkpoint.pt", None, "--why", "none of these runs is finished and has weights")],
    ids=["split", "states", "drawn", "dim", "empty", "cut", "no weights", "no states"])
def test_what_cannot_be_shown_is_said(finished, capsys, file, content, flags, says):
    change(finished / file, content)
    if flags:
        assert "-dim16-" in output(capsys, finished).out  # the table does without
    before = contents(finished)
    assert says in refusal(capsys, evaluation, finished, *flags.split())[-1]
    assert contents(finished) == before  # what was measured on other trials is not stored


def test_a_finished_run_is_judged_by_what_it_was(finished, capsys, monkeypatch):
    """... not by today's data.py: other training trials, an order of sets, a new split, a set that
    is gone change nothing. Where an operator means something else, its trials are not shown."""
    table = output(capsys, finished).out
    before = output(capsys, finished, "--per-operator", "--show", "2").out
    subsets = data.SPLITS["systematic1"]
    backwards = dict(reversed(subsets.items()))
    edited = {"more": Subset(), **backwards, "train": Subset(depths=(1, 3, 5))}
    monkeypatch.setattr(data, "SPLITS", {"new": {}, "systematic1": edited})
    assert output(capsys, finished, "--per-operator", "--show", "2").out == before
    even, odd = data.OPERATORS["SumEven"], data.OPERATORS["SumOdd"]
    monkeypatch.setitem(data.OPERATORS, "SumEven", odd)
    monkeypatch.setitem(data.OPERATORS, "SumOdd", even)
    assert output(capsys, finished).out == table
    for flags in ("--show", "2"), ("--show", "2", "--subset", "train"):
        assert "was tested on other trials" in refusal(capsys, evaluation, finished, *flags)[-1]
    monkeypatch.setattr(data, "SPLITS", {})
    assert output(capsys, finished).out == table


def test_runs_of_several_splits_show_those_that_have_the_test_set(tmp_path, capsys):
    for split in "systematic1", "productive":
        run(tmp_path, "--split", split)
    shown = output(capsys, tmp_path, "--show", "1", "--subset", "depth5").out
    assert shown.count(" of 1,000 are wrong.") == 1


def test_a_folder_may_have_any_name(tmp_path, capsys):
    fake(tmp_path / "runs [1] *?/distractor/rnn/default/seed0", 0.5)
    assert "| rnn " in output(capsys, tmp_path / "runs [1] *?").out


def test_a_kind_that_one_seed_lacks_stays_below_its_row(tmp_path, capsys):
    for model, seed, kinds in ("rnn", 0, {}), ("gru", 0, {}), ("rnn", 1, {"iid": {"Exist": 0.5}}):
        fake(folder := tmp_path / f"distractor/{model}/default/seed{seed}", 0.5)
        result = json.loads((folder / "result.json").read_text()) | {"kinds": kinds}
        (folder / "result.json").write_text(json.dumps(result))
    folders = [tmp_path / f"distractor/{name}" for name in (
        "rnn/default/seed0", "gru/default/seed0", "rnn/default/seed1")]
    lines = output(capsys, *folders, "--per-operator").out.splitlines()
    names = [line.split("|")[1].rstrip() for line in lines if line.startswith("|")]
    assert names[2:6] == [" chance", " rnn", "   Exist", " gru"]


def test_runs_of_other_trials_do_not_share_a_table(tmp_path, capsys):
    fake(tmp_path / "distractor/rnn/default/seed0", 0.5)
    fake(other := tmp_path / "distractor/gru/default/seed0", 0.6, checksum=8)
    shown = output(capsys, tmp_path / "distractor/rnn", tmp_path / "distractor/gru")
    assert shown.err == f"not shown: {other}, tested on other trials\n" and "gru" not in shown.out
    fake(other := tmp_path / "distractor/mlp/default/seed0", 0.6, hardest="distractors30")
    shown = output(capsys, tmp_path / "distractor/rnn", tmp_path / "distractor/mlp")
    assert shown.err == f"not shown: {other}, tested on other trials\n" and "mlp" not in shown.out


def test_all_text_can_be_printed_everywhere(finished):
    """... on a terminal without ±, say in a container."""
    program = [sys.executable, str(Path(evaluation.__file__)), str(finished.parents[3])]
    run(finished.parents[3], "--seed", "1")
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run(program, capture_output=True, env=ascii_only)
    assert done.returncode == 0 and b" (0/2) " in done.stdout and not done.stderr


def test_an_edit_of_models_stops_no_evaluation(finished, tmp_path, student, monkeypatch, capsys):
    """... of a run, which has its own code: half of a file, and no file of its model."""
    before = output(capsys, finished, "--show", "1").out
    student("half", "\nclass Model(")
    monkeypatch.setattr(models, "__path__", [str(tmp_path / "models")])
    assert output(capsys, finished, "--show", "1").out == before


def test_learned_seeds_are_counted():
    assert [evaluation.percent(values, learned=True) for values in (
        [0.95, 0.949], [0.95, 0.96], [0.5, 0.6], [0.96], [])] == [
        "95.0±0.1 (1/2)", "95.5±0.7 (2/2)", "55.0±7.1 (0/2)", "96.0", ""]
    assert evaluation.percent([0.95, 0.949]) == "95.0±0.1"


def test_outs_have_their_paths(tmp_path, capsys, monkeypatch):
    """... as one types them here."""
    monkeypatch.chdir(tmp_path)
    for out in "alice/runs", "bob/runs", "alice":  # one --out in another
        fake(Path(out, "distractor/rnn/default/seed0"), 0.5)
    table = output(capsys, "alice/runs", "bob").out
    assert all(f"| {name} " in table for name in ("alice/runs: rnn", "bob/runs: rnn"))
    table = output(capsys, "alice").out
    assert "| alice: rnn " in table and "| alice/runs: rnn " in table


@pytest.mark.skipif(os.name == "nt", reason="Windows lets few make links")
def test_runs_behind_links_are_seen_once(tmp_path, capsys):
    fake(tmp_path / "disk/distractor/rnn/default/seed0", 0.5)
    fake(tmp_path / "runs/distractor/gru/default/seed0", 0.5)
    (tmp_path / "runs/productive").symlink_to(tmp_path / "disk")
    (tmp_path / "runs/again").symlink_to(tmp_path / "disk")
    table = output(capsys, tmp_path / "runs").out
    assert table.count(": rnn ") == table.count(": gru ") == 2 and "±" not in table  # two tables


def test_a_finished_run_is_read_by_its_own_code(finished, student, capsys):
    """An edit of the model's file, here to ReLU, changes nothing that a run shows, of states, too.
    In the run's copy of the file it does."""
    result = (finished / "result.json").read_bytes()

    def shown():
        change(finished / "result.json", lambda _: result)  # states are measured anew
        logits = evaluation.predict(load(finished)[0], data.trials("systematic1", "iid", 9))
        return logits.tolist(), output(capsys, finished, "--show", "3", "--why").out

    before = shown()
    student("sstfmr", SSTFMR.replace("GELU", "ReLU"))
    assert "ReLU" in Path(module_of("sstfmr").__file__).read_text() and shown() == before
    change(finished / "sstfmr.py", lambda text: text.replace(b"GELU", b"ReLU"))
    assert shown()[0] != before[0]


def test_curves_are_those_of_the_logs(finished, monkeypatch):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    monkeypatch.setattr(evaluation, "empty_figure", lambda *_: figure)
    run(finished.parents[3], "--seed", "1")
    run(finished.parents[3], "--split", "productive", "--model", "looptfmr")
    monkeypatch.chdir(finished)
    evaluation.main([str(finished.parents[3]), "--curves", "x.png"])
    left, right = figure.axes
    assert (left.get_title(), right.get_title()) == ("systematic1: iid", "productive: depth3")
    first, second, *baselines = left.lines
    for line, seed in (first, 0), (second, 1):
        log = read(finished.parent / f"seed{seed}" / "result.json")["log"]
        assert list(line.get_xdata()) == [row["step"] for row in log] == [3, 6]
        assert list(line.get_ydata()) == [row["iid"] for row in log]
        assert line.get_marker() == f"${seed}$" and line.get_color() == first.get_color()
    chance = read(finished / "result.json")["baselines"]["iid"]["chance"]
    assert 100 * chance in [line.get_ydata()[0] for line in baselines]
    colors = {line.get_color() for axis in figure.axes for line in axis.lines}
    assert len(colors) == 3  # two models, and the baselines


def test_loading_gives_the_model_after_training_and_before(tmp_path):
    folder, = run(tmp_path, "--seed", "3")
    after, before = load(folder)[0], load(folder, trained=False)[0]
    torch.manual_seed(3)
    fresh = module_of("sstfmr").Model(dim=16, layers=1)
    assert all(a.equal(b) for a, b in zip(fresh.parameters(), before.parameters()))
    assert not after.readout.weight.equal(before.readout.weight)
