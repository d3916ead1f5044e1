"""What is measured of hidden states that are known, where it is measured, and the command line."""
import json
import os
import shutil

import pytest
import torch
from torch.nn import functional as F

import claims
import data
import train
import why
from data import Pool, Subset
from eval import load, read
from models import module_of
from test_eval import STATES
from test_train import finished, refusal, trained
from why import alignment, decoding, spearman, states

why.TRIALS = 200


class Known(torch.nn.Module):
    """A model whose features are a known function of the trial."""

    def __init__(self, features):
        super().__init__()
        self.features = features


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
    """... and no more: a vector for each question, seen in training, says nothing of new ones.
    What no root asks for is left out."""
    features, found = ASKED[known]
    model = Known(lambda tokens, _: features(tokens[:, 0, :3]))
    shares = decoding(model, "systematic1", "cpu")["features"]
    assert {*shares} == {f"{where}: {part}" for where in ("in", "out") for part in why.PARTS}
    for part, share in shares.items():
        assert share > 0.97 if found.keys() & {*part.split(": ")} else share < 0.35, part
    letters = dict.fromkeys(("train", "iid", "ood"), Subset((Pool(("GetShape",)),)))
    monkeypatch.setitem(data.SPLITS, "mine", letters)
    shares = decoding(model, "mine", "cpu")["features"]
    assert {part.split()[1] for part in shares} == {"operator", "color"}


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
    found, features = states(model, trials, "cpu"), model.features(*trials[:2])
    assert not any(module._forward_hooks for module in model.modules())
    assert list(found) == others + [f"block {i + 1}" for i in range(blocks)] + ["features"]
    expected = {"features": features}
    if name == "hypertfmr":
        expected["code"] = model.infer(trials.instruction)
    if name in ("sstfmr", "looptfmr"):  # the last block's token is normalized and read
        found["read"], expected["read"] = model.norm(found[f"block {blocks}"].float()), features
    if name == "sstfmr":
        outputs = []
        model.blocks[0].register_forward_hook(lambda *call: outputs.append(call[2]))
        model(*trials[:2])
        expected["block 1"] = outputs[0][:, -1 if "read" in changes else 0]
    for place, state in expected.items():
        torch.testing.assert_close(found[place].float(), state, atol=1e-4, rtol=1e-4)


def test_a_loop_that_only_deeper_trees_need_has_no_place():
    model = module_of("looptfmr").Model(dim=16, layers=1, heads=2)
    found = decoding(model, "productive", "cpu")  # fitted at depth 3, tested at depth 9
    assert list(found) == ["block 1", "block 2", "features"]


def test_the_command_line(finished, tmp_path, capsys):
    """A bad run does not stop the others. What is measured is not measured again."""
    bad = shutil.copytree(finished, tmp_path / "a bad one")  # before the others
    path = finished / "why.json"
    (bad / "checkpoint.pt").write_text("no weights")
    with pytest.raises(SystemExit, match="^2$"):
        why.main([str(tmp_path)])
    assert f"left out: {bad}: {bad / 'checkpoint.pt'} is damaged\n" in capsys.readouterr().err
    assert not (bad / "why.json").exists() and not [*finished.glob("why.[0-9]*")]
    found = json.loads(path.read_text())
    assert list(found) == ["alignment", "decoded", "untrained"]
    assert found["decoded"].keys() == found["untrained"].keys() == {"block 1", "features"}
    model, config = load(finished)
    assert found["decoded"] == decoding(model, "systematic1", "cpu")
    assert found["untrained"] == decoding(why.untrained(config), "systematic1", "cpu")
    path.write_text("{}")
    why.main([str(finished)])
    assert path.read_text() == "{}"
    os.utime(path, (1, 1))  # older than the weights
    why.main([str(finished)])
    assert json.loads(path.read_text()) == found
    claims.main([str(finished)])
    assert "Our models on our trials:" in capsys.readouterr().out
    assert "no run in " in refusal(capsys, why, tmp_path / "nothing")[0]


def test_the_untrained_model_is_the_one_that_training_began_with(finished):
    torch.manual_seed(5)
    config, state = read(finished / "config.json"), torch.get_rng_state()
    model = why.untrained(config)
    assert state.equal(torch.get_rng_state())
    for a, b in zip(model.parameters(), train.build(config)[0].parameters(), strict=True):
        assert a.equal(b)
