"""models/authors.py computes what the authors' release does: release.npz holds random weights of
its models at width 16, in its order, and what it computes from them without dropout."""
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import data
from models import authors

RELEASE = {key: torch.from_numpy(array) for key, array in
           np.load(Path(__file__).parent / "release.npz").items()}
TOKENS = RELEASE["instruction"].int(), RELEASE["stimulus"].int()
PARAMETERS = {"sstfmr": 828_298, "dstfmr": 1_488_522, "dstfmr_relative": 1_448_330,
              "crossattn": 1_226_122, "perceiver": 1_818_762, "rnn": 494_218, "gru": 1_339_018}
TRANSFORMERS = [name for name in PARAMETERS if name not in ("rnn", "gru")]
close = partial(torch.allclose, atol=1e-5, rtol=0)


def make(name, dim=16, **changes):
    torch.manual_seed(1)
    changes |= {"positions": "relative"} if "_" in name else {}
    return authors.Model(dim, name.split("_")[0], **changes).eval()


@pytest.mark.parametrize("name", PARAMETERS)
def test_it_computes_what_the_release_does_and_has_its_size(name):
    model, (*keys, output) = make(name), [key for key in RELEASE if key.startswith(f"{name}/")]
    weights = [RELEASE[key].flip(0) if key.endswith(".Er") else RELEASE[key]  # distance 0 is last
               for key in keys]
    model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
    assert close(model(*TOKENS).log_softmax(1), RELEASE[output])
    model.train()  # with dropout
    assert model(*TOKENS).equal(model(*TOKENS)) == (name not in TRANSFORMERS)
    whole = make(name, 256 if name in TRANSFORMERS else 512)
    assert sum(p.numel() for p in whole.parameters()) == PARAMETERS[name]


def test_tokens_are_those_of_the_release(monkeypatch):
    rule, stimulus = make("sstfmr").translate(*TOKENS)
    assert rule.equal(RELEASE["rule_input"].long()) and stimulus.equal(RELEASE["stim_input"].int())
    monkeypatch.setitem(data.OPERATORS, "RowEven", data.OPERATORS["SumEven"])
    instruction = torch.tensor([[[number, 2, 0, 0, 0] for number in range(1, 11)]])
    rule, _ = make("sstfmr").translate(instruction, TOKENS[1][:1])
    assert rule[0, :, 0].tolist() == [1, 2, 3, 4, 5, 8, 6, 7, 9, 10, 0]


def test_relative_positions_look_back_alone():
    attention, x = authors.AskBack(16), torch.randn(2, 5, 16)
    assert close(attention(x[:, :3], x[:, :3]), attention(x, x)[:, :3])


@pytest.mark.parametrize("embed", ["ids", "onehot"])
def test_onehot_values_have_vectors_of_their_own(embed):
    tokens = torch.zeros(1, 3, 11, dtype=torch.int32)
    tokens[0, :, 1] = torch.arange(1, 4)
    first, second, third = make("sstfmr", embed=embed).encoder.stream.embedding(tokens)[0]
    assert close(first + third, 2 * second) == (embed == "ids")  # numbers: red + blue = 2 green


@pytest.mark.parametrize("name", ["sstfmr", "dstfmr", "crossattn", "perceiver"])
@pytest.mark.parametrize("positions", ["paper", "learned"])
def test_learned_positions_are_those_of_the_stimulus_alone(name, positions):
    model, (instruction, stimulus) = make(name, positions=positions), TOKENS
    for key, vectors in model.named_parameters():
        if key.endswith("cells"):
            vectors.data.zero_()  # then nothing tells the order of the cells
    result = model(instruction, stimulus)
    assert close(result, model(instruction, stimulus.roll(1, 1))) == (positions == "learned")
    assert not close(result, model(instruction[:, [0, 1, 3, 2]], stimulus))


@pytest.mark.parametrize("name, embed, says", [
    ("sstfmr_relative", "ids", "no stream of rules alone"), ("gru", "onehot", "no embedding")])
def test_what_cannot_be_is_refused(name, embed, says):
    with pytest.raises(ValueError, match=says):
        make(name, embed=embed)
