"""Baselines, kinds of trials and attention by hand. Then the command line."""
import contextlib
import shutil
import sys

import pytest
import torch
from torch.nn import functional as F

import data
import eval as evaluation
from data import FIRST_COLOR, FIRST_SHAPE, Pool, Subset
from eval import chance, load, looks, mistakes, no_binding, read, score
from models import module_of
from test_oracle import GRID3, TREE3, grid
from test_train import TESTS, change, refusal, run
from test_train import finished, trained


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
    "stimulus": lambda _, stimulus: F.one_hot(stimulus, 11).flatten(1),
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


TRIAL3 = data.Trials(torch.tensor([TREE3]), grid(GRID3), None)


def test_keys_by_hand():
    first, second = ["SumOdd red a", "IfElse", "GetColor b", "ProductEven blue c"], [
        "SumOdd", "IfElse", "GetColor", "ProductEven pink d"]
    question, objects = evaluation.keys_of(module_of("sstfmr").Model(), TRIAL3)
    assert question == first + second + ["EOS of the question"]
    assert objects == [*sorted(GRID3), "empty cells", "EOS of the grid"]
    assert evaluation.keys_of(module_of("papertfmr").Model(), TRIAL3)[0] == first + question[-1:]
    del first[1], second[1]
    question, _ = evaluation.keys_of(module_of("looptfmr").Model(), TRIAL3)
    assert question == first + second + [f"answer to {token}" for token in first]


@pytest.mark.parametrize("name", ["sstfmr", "papertfmr", "looptfmr"])
def test_keys_are_the_tokens_that_a_model_reads(name):
    """If the color of an object changes in question or grid, the token of its key alone does."""
    model, read = module_of(name).Model(), []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: read.append(inputs[1][0]))
    keys = sum(evaluation.keys_of(model, TRIAL3), [])
    model.features(*TRIAL3[:2])
    before = read[0]
    second = "ProductEven blue c" if name == "papertfmr" else "ProductEven pink d"
    for part, place, key in ((0, (0, 0, 2), "SumOdd red a"), (0, (0, 3, 4), second),
                             (1, (0, 33, 1), (3, 3))):
        tokens = [part.clone() for part in TRIAL3[:2]]
        tokens[part][place] += 1
        read.clear()
        model.features(*tokens)
        differs = (read[0] != before).any(1)
        assert [keys[i] for i in differs.nonzero()] == [key] and len(differs) == len(keys)


@pytest.mark.parametrize("name, changes, expected", [  # attentions: row, keys of question and grid
    ("sstfmr", {"layers": 2, "read": "eos"}, [("blocks.0", -1, "qg"), ("blocks.1", 0, "qg")]),
    ("papertfmr", {"layers": 2}, [("blocks.0", 0, "qg"), ("blocks.1", 0, "qg")]),
    ("crossattn", {}, [("look", 0, "g"), ("encode_instruction.blocks.0", 0, "q")]),
    ("crossattn", {"read": "eos"}, [("look", -1, "g"), ("encode_instruction.blocks.0", 0, "q")]),
    ("crossattn", {"first": "read"}, [("encode_instruction.blocks.0", 0, "q"), ("look", 0, "g")]),
    ("dstfmr", {"layers": 2, "read": "eos"}, [
        ("encode_instruction.blocks.0", -1, "q"), ("encode_instruction.blocks.1", 0, "q"),
        ("encode_stimulus.blocks.0", -1, "g"), ("encode_stimulus.blocks.1", 0, "g")]),
    ("perceiver", {}, [("ask_instruction", 0, "q"), ("ask_each_other", 0, "l"),
                       ("ask_stimulus", 0, "g"), ("ask_each_other", 0, "l")]),
    ("perceiver", {"first": "ask"}, [("ask_stimulus", 0, "g"), ("ask_instruction", 0, "q"),
                                     ("ask_each_other", 0, "l")]),
    ("looptfmr", {"layers": 1}, 2 * [("blocks.0", 2, "qg")])])
def test_looks_of_the_token_that_answers(monkeypatch, name, changes, expected):
    """... with as many keys of the grid as latents, which are not taken for each other."""
    same = dict.fromkeys(("train", "iid"), Subset(depths=(3,), distractors=(4, 4)))
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
    ("looptfmr", "--operator 2", 2), ("looptfmr", "", 0), ("sstfmr", "", 0)])
def test_the_picture_shows_these_numbers(tmp_path, monkeypatch, name, flags, operator):
    figure = pytest.importorskip("matplotlib.figure").Figure()
    monkeypatch.setattr(evaluation, "drawing", lambda *_: contextlib.nullcontext(figure))
    folder, = run(tmp_path, "--split", "productive", "--model", name)
    evaluation.main([str(folder), *f"--attention x --subset depth5 --trial 1 {flags}".split()])
    made = data.trials("productive", "depth5", 2)
    trial, model = data.Trials(*(part[1:] for part in made)), load(folder)[0]
    found, said = looks(model, trial, operator)
    for axis, (_, look) in zip(figure.axes, found, strict=True):
        shares, texts = dict(look), [(text.get_position(), text.get_text()) for text in axis.texts]
        shade, words = (mesh.get_array().flatten().tolist() for mesh in axis.collections)
        assert shade == [shares.get(cell, 0) for cell in data.CELLS]
        heaviest = sorted((share for key, share in look if isinstance(key, str)), reverse=True)
        assert words == [share for share in heaviest[:10] if share >= 0.005]
        for (row, column), (shape, _), share in zip(data.CELLS, trial.stimulus[0].tolist(), shade):
            letter = (column + 0.5, row + 0.5), data.LETTERS[shape - 1]
            percent = (column + 0.97, row + 0.95), f"{100 * share:.0f}"
            assert (letter in texts) == (shape > 0) and (percent in texts) == (share >= 0.005)
    solved = data.evaluate(trial.instruction[0], trial.stimulus[0])
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


ADDS = {"--per-operator": "\n|   Exist ", "--show 1": "The model says:",
        "--attention a.png": "Drawn: a.png", "--attention a.png --subset ood --trial 2": "Drawn: a"}


@pytest.mark.parametrize("flags", ADDS)
def test_a_flag_adds_what_it_names(trained, tmp_path, capsys, monkeypatch, flags):
    monkeypatch.chdir(tmp_path)
    if ".png" in flags:
        pytest.importorskip("matplotlib")
    assert ADDS[flags] not in output(capsys, trained).out
    assert ADDS[flags] in output(capsys, trained, *flags.split()).out
    assert not [path for path in tmp_path.iterdir() if path.read_bytes()[:4] != b"\x89PNG"]


@pytest.mark.parametrize("model, flags, says", [
    ("sstfmr", "--attention a.png --subset depth3", "there is no subset 'depth3'; there is train,"),
    ("sstfmr", "--attention a.png --operator 1", "there is none but the root, or LoopTfmr's 1"),
    ("mlp", "--attention a.png", "mlp has no attention to the grid that could be drawn"),
    ("hypertfmr", "--attention a.png", "hypertfmr has no attention to the grid"),
    ("sstfmr", "--attention no/a.png", "cannot write no"),
    ("sstfmr", "--attention a.xyz", "cannot write a.xyz: "),
    ("sstfmr", "--attention a.png", "pictures need matplotlib: pip install matplotlib")])
def test_what_cannot_be_drawn(finished, tmp_path, capsys, monkeypatch, model, flags, says):
    if "cannot" in says:
        pytest.importorskip("matplotlib")
    else:  # as where it is not installed
        monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    folder = run(tmp_path, "--model", model)[0]  # that of sstfmr is finished, and comes last
    monkeypatch.chdir(folder)
    before = [*folder.iterdir()]
    assert says in refusal(capsys, evaluation, ".", *flags.split())[0]
    assert [*folder.iterdir()] == before


@pytest.mark.parametrize("file, content, flags, says", [  # flags that cannot do without it
    ("config.json", {"split": "gone"}, ["", "--show 1"], "there is no split 'gone' any more"),
    ("config.json", {"model": "../x"}, ["--show 1"], "do not fit today's models/../x.py"),
    ("config.json", {"model_args": {"dim": 32}}, ["--show 1"], "do not fit today's models/sstfmr"),
    ("config.json", "[]", [""], "damaged: "), ("result.json", "{}", [""], "KeyError('accuracy')"),
    ("result.json", None, [""], "it is unfinished (log.csv says"),
    ("checkpoint.pt", None, ["--show 1"], "checkpoint.pt is missing")])
def test_what_cannot_be_shown_is_said(finished, trained, capsys, file, content, flags, says):
    change(finished / file, content)
    for flag in {"", *flags}:
        is_said, row_is_lost = flag in flags, "" in flags
        out, err = output(capsys, finished, *[trained] * row_is_lost, *flag.split())
        assert " (dim16-" in out and err.count("\n") == is_said
        assert not is_said or err.startswith("not shown: ") and says in err


def test_loading_warns_of_other_code_and_leaves_the_generator_alone(
        trained, finished, capsys, monkeypatch):
    state = torch.get_rng_state()
    load(trained)
    assert not capsys.readouterr().err and torch.get_rng_state().equal(state)
    now = evaluation.code_of("sstfmr") | {"data.py": "another"}
    monkeypatch.setattr(evaluation, "code_of", lambda model: now)
    load(trained)
    assert capsys.readouterr().err == f"{trained}: data.py changed since this run\n"
    weights = finished / "checkpoint.pt"  # as of recorded runs
    change(finished / "config.json", lambda content: content.replace(b'"code"', b'"other"'))
    torch.save(torch.load(weights) | {"code": {"models/sstfmr.py": "another"}}, weights)
    load(finished)
    assert capsys.readouterr().err == f"{finished}: models/sstfmr.py changed since this run\n"


def test_a_result_of_other_test_sets_is_named(finished, capsys):
    tests = read(finished / "result.json")["tests"] | {"ood": "100 trials"}
    change(finished / "result.json", {"tests": tests})
    evaluation.main([str(finished)])
    assert " was not tested on today's trials of ood.\n" in capsys.readouterr().out
