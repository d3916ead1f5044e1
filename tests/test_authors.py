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
PARAMETERS = {"sstfmr": 828_298, "dstfmr": 1_488_522, "crossattn": 1_226_122,
              "perceiver": 1_818_762, "rnn": 494_218, "gru": 1_339_018}  # gru: of three numbers
TRANSFORMERS = [name for name in PARAMETERS if name not in ("rnn", "gru")]
close = partial(torch.allclose, atol=1e-5, rtol=0)


def make(name, dim=16, **changes):
    torch.manual_seed(1)
    return authors.Model(dim, name, **changes).eval()


@pytest.mark.parametrize("name", PARAMETERS)
def test_it_computes_what_the_release_does_and_has_its_size(name):
    model, (*keys, output) = make(name), [key for key in RELEASE if key.startswith(f"{name}/")]
    weights = (RELEASE[key] for key in keys)
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


@pytest.mark.parametrize("embed", ["ids", "onehot"])
def test_onehot_values_have_vectors_of_their_own(embed):
    tokens = torch.zeros(1, 3, 11, dtype=torch.int32)
    tokens[0, :, 1] = torch.arange(1, 4)
    first, second, third = make("sstfmr", embed=embed).encoder.stream.embedding(tokens)[0]
    assert close(first + third, 2 * second) == (embed == "ids")  # numbers: red + blue = 2 green


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_tokens_have_places(name):
    model, (instruction, stimulus) = make(name), TOKENS
    result = model(instruction, stimulus)
    assert not close(result, model(instruction, stimulus.roll(1, 1)))
    assert not close(result, model(instruction[:, [0, 1, 3, 2]], stimulus))


def test_recurrent_models_have_no_embedding():
    with pytest.raises(ValueError, match="no embedding"):
        make("gru", embed="onehot")
