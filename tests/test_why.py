"""What is measured of hidden states that are known, where it is measured, and the command line."""
import json
import os

import pytest
import torch
from torch.nn import functional as F

import claims
import data
import train
import why
from data import Pool, Subset, UsageError
from eval import load, read
from models import module_of
from test_train import finished, refusal, trained  # noqa: F401
from why import alignment, decoding, spearman, states


class Known(torch.nn.Module):
    """A model whose features are a known function of the trial."""

    def __init__(self, features):
        super().__init__()
        self.features = features


@pytest.fixture(autouse=True)
def few_trials(monkeypatch):
    monkeypatch.setattr(why, "TRIALS", 200)


STATES = {  # of models that are organized like this
    "stimulus": lambda _, stimulus: F.one_hot(stimulus.long(), 11).flatten(1),
    "answer": lambda *tokens: F.one_hot(data.solve(*tokens), data.CLASSES),
    "nothing": lambda _, stimulus: torch.zeros(len(stimulus), data.CLASSES)}


def test_spearman_and_alignment_of_known_states():
    """Ranks 1 2.5 2.5 4 and 2 1 3 4: covariance 3 over the root of 4.5 times 5."""
    x, y = torch.tensor([1.0, 5, 5, 9]), torch.tensor([20.0, 10, 30, 40])
    assert spearman(x, y) == pytest.approx(3 / (4.5 * 5) ** 0.5)
    assert [spearman(x, other) for other in (x ** 3, -x, 0 * x)] == pytest.approx([1, -1, 0])
    for like, features in STATES.items():
        result = alignment(Known(features), "systematic3", "cpu")
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
    monkeypatch.setattr(why, "FIT_TRIALS", 2000)
    features, found = ASKED[known]
    model = Known(lambda tokens, _: features(tokens[:, 0, :3].long()))
    result = decoding(model, "systematic1", "cpu")
    assert list(result) == ["features"]
    assert {*result["features"]} == {f"{where}: {part}" for where in ("in", "out")
                                     for part in why.PARTS}
    for part, share in result["features"].items():
        held = found.keys() & {*part.split(": ")}
        assert share > 0.97 if held else share < 0.35, part


def test_what_no_root_asks_for_is_not_decoded(monkeypatch):
    letters = dict.fromkeys(("train", "iid", "ood"), Subset((Pool(("GetShape",)),)))
    monkeypatch.setitem(data.SPLITS, "mine", letters)
    model = Known(lambda tokens, _: tokens[:, 0].float())
    found = decoding(model, "mine", "cpu")["features"]
    assert {part.split()[1] for part in found} == {"operator", "color"}


def test_states_that_are_not_finite_are_refused():
    for measure in alignment, decoding:
        with pytest.raises(UsageError, match="outputs of the model are not finite"):
            measure(Known(lambda *tokens: torch.full((len(tokens[0]), 4), torch.nan)),
                    "systematic1", "cpu")


@pytest.mark.parametrize("name, changes, blocks, others", [
    ("sstfmr", {"layers": 3}, 3, []), ("sstfmr", {"layers": 2, "read": "eos"}, 2, []),
    ("dstfmr", {"layers": 2}, 2, []),  # those of the instruction
    ("crossattn", {"layers": 2}, 3, []), ("hypertfmr", {"layers": 2, "heads": 2}, 2, ["code"]),
    ("looptfmr", {"layers": 3, "heads": 2}, 6, []),  # two loops at depth 3
    ("perceiver", {}, 4, []), ("gru", {}, 0, []), ("authors", {}, 0, [])])
def test_places_are_where_the_answering_token_is(name, changes, blocks, others):
    torch.manual_seed(0)
    model, trials = module_of(name).Model(**{"dim": 16} | changes).eval(), data.trials(
        "productive", "depth3", 130)  # more than predict takes at a time
    outputs = []  # of all tokens
    if name == "sstfmr":
        model.blocks[0].register_forward_hook(lambda *call: outputs.append(call[-1]))
    found = states(model, trials, "cpu")
    if name == "sstfmr":
        token = -1 if changes.get("read") == "eos" else 0
        answering = torch.cat([output[:, token] for output in outputs])
        torch.testing.assert_close(found["block 1"], answering.double())
        model.blocks[0]._forward_hooks.clear()
    assert list(found) == others + [f"block {i + 1}" for i in range(blocks)] + ["features"]
    features = model.features(*trials[:2])
    torch.testing.assert_close(found["features"].float(), features, atol=1e-4, rtol=1e-4)
    if name in ("sstfmr", "looptfmr"):  # the last block's token is normalized and read
        read = model.norm(found[f"block {blocks}"].float())
        torch.testing.assert_close(read, features, atol=1e-4, rtol=1e-4)
    if name == "hypertfmr":
        torch.testing.assert_close(found["code"].float(), model.infer(trials.instruction),
                                   atol=1e-4, rtol=1e-4)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_loop_that_only_deeper_trees_need_has_no_place():
    model = module_of("looptfmr").Model(dim=16, layers=1, heads=2)
    found = decoding(model, "productive", "cpu")  # fitted at depth 3, tested at depth 9
    assert list(found) == ["block 1", "block 2", "features"]


def test_the_command_line(finished, capsys):
    path = finished / "why.json"
    why.main([str(finished)])
    found = json.loads(path.read_text())
    assert list(found) == ["alignment", "decoded", "untrained"]
    assert found["decoded"].keys() == found["untrained"].keys() == {"block 1", "features"}
    model, config = load(finished)
    assert found["decoded"] == decoding(model, "systematic1", "cpu")
    assert found["untrained"] == decoding(why.untrained(config), "systematic1", "cpu")
    assert not [*finished.glob("why.[0-9]*")]
    path.write_text("{}")
    why.main([str(finished)])
    assert path.read_text() == "{}"  # measured already
    os.utime(path, (1, 1))  # older than the weights
    why.main([str(finished)])
    assert json.loads(path.read_text()) == found
    claims.main([str(finished)])
    assert "Our models on our trials:" in capsys.readouterr().out


def test_the_untrained_model_is_the_one_that_training_began_with(finished):
    torch.manual_seed(5)
    config, state = read(finished / "config.json"), torch.get_rng_state()
    model = why.untrained(config)
    assert state.equal(torch.get_rng_state())
    for a, b in zip(model.parameters(), train.build(config)[0].parameters(), strict=True):
        assert a.equal(b)


def test_a_bad_run_does_not_stop_the_others(finished, tmp_path, capsys):
    bad = tmp_path / "a bad one"  # before the others
    bad.mkdir()
    for name in ("config.json", "result.json", "checkpoint.pt"):
        (bad / name).write_bytes((finished / name).read_bytes())
    (bad / "checkpoint.pt").write_text("no weights")
    with pytest.raises(SystemExit, match="^2$"):
        why.main([str(tmp_path)])
    assert f"left out: {bad}: {bad / 'checkpoint.pt'} is damaged\n" in capsys.readouterr().err
    assert (finished / "why.json").exists() and not (bad / "why.json").exists()
    assert "no run in " in refusal(capsys, why, tmp_path / "nothing")[0]
