"""The models compute what they say: with and without each shortcut, and beside torch.nn's own modules."""
import functools
import inspect
import math
import typing

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bench
import data
import eval as evaluation
import train

SHIPPED = ("crossattn", "dstfmr", "gru", "hypertfmr", "mlp", "perceiver", "rnn", "sstfmr", "treetfmr")
MODELS = evaluation.available()
VARIANTS = [(name, {}) for name in MODELS] + [  # every model, and with each other choice of each argument
    (name, {key: choice}) for name in MODELS
    for key, p in inspect.signature(evaluation.module_of(name).Model).parameters.items()
    for choice in typing.get_args(p.annotation) if choice != p.default]
trials = functools.cache(data.trials)
BATCH = trials("productive", "depth3", 12)
SIZES = (data.IF_ELSE + 1, 27, 11, 27, 11)


def make(name, **changes):
    """A small model. Biases and norms start at 0 and 1, where a mistake in them would not show: here all is random."""
    torch.manual_seed(1)
    model = evaluation.module_of(name).Model(**{"dim": 16} | changes)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def logits(name, model, batch):
    """The logits of a batch. A student's model may refuse a depth with a ValueError; ours do not."""
    try:
        return model(batch.instruction, batch.stimulus)
    except ValueError as error:
        if name in SHIPPED:
            raise
        pytest.skip(f"{name} refuses it: {error}")


# ---- any model --------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("depth", [1, 3, 5, 9])
def test_every_trial_gets_logits_of_its_own_at_any_depth(name, depth):
    batch, model = trials("productive", f"depth{depth}", 5), make(name).eval()
    result = logits(name, model, batch)
    assert result.shape == (5, 138) and result.isfinite().all()
    torch.testing.assert_close(result, model.readout(model.features(batch.instruction, batch.stimulus)))
    alone = model(batch.instruction[3:4], batch.stimulus[3:4])
    torch.testing.assert_close(result[3:4], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name, changes", VARIANTS, ids=str)
def test_every_parameter_gets_a_gradient(name, changes):
    model = make(name, **changes)
    F.cross_entropy(logits(name, model, BATCH), BATCH.answer).backward()
    assert not [key for key, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())]


@pytest.mark.parametrize("name", MODELS)
def test_one_batch_is_overfitted(name):
    torch.manual_seed(1)
    model = evaluation.module_of(name).Model(dim=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(400):
        loss = F.cross_entropy(logits(name, model, BATCH), BATCH.answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.1:
            return
    raise AssertionError(f"the loss is still {loss:.2f}")


# ---- ours: exact shortcuts, reduced precision, other devices ----------------------------------------------------

@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name, changes", [v for v in VARIANTS if v[0] in SHIPPED], ids=str)
def test_every_feature_and_the_order_of_the_leaves_reach_the_answer(name, changes, float64):
    model, swapped = make(name, **changes).eval(), BATCH.instruction.clone()
    swapped[:, [2, 3]] = swapped[:, [3, 2]]
    others = [BATCH._replace(instruction=swapped)]
    for stream, sizes in (("instruction", (data.IF_ELSE - 1, 26, 10, 26, 10)), ("stimulus", (26, 10))):
        for column, size in enumerate(sizes):
            tokens = getattr(BATCH, stream).clone()
            feature = tokens[:, :, column]  # what is there becomes the next one; an IfElse stays
            feature.copy_(torch.where((feature > 0) & (feature <= size), feature % size + 1, feature))
            others.append(BATCH._replace(**{stream: tokens}))
    expected = model(*BATCH[:2])
    for other in others:
        changed = sum((new != old).flatten(1).sum(1) for new, old in zip(other[:2], BATCH)) > 0
        answered_otherwise = (model(*other[:2]) - expected).abs().amax(1) > 1e-12  # sums in another order: 1e-15
        assert changed.any() and answered_otherwise.equal(changed)


@pytest.mark.parametrize("name", bench.COMPACT)
@pytest.mark.parametrize("objects", [(2,), (6,), (41,), (99,), (100,), (2, 6, 41, 99), (2, 41, 100)], ids=str)
def test_compact_stimulus_is_exact(name, objects, float64):
    """The same logits and gradients as with all 100 cells, for trials with so many objects."""
    model, results = make(name), []
    taken = torch.rand(12, 100).argsort(1) < torch.tensor(objects).repeat(12 // len(objects))[:, None]
    stimulus = taken[:, :, None] * torch.randint(1, 11, (12, 100, 2))
    for of in (model, bench.with_all_cells(model)):
        result = of(BATCH.instruction, stimulus)
        F.cross_entropy(result, BATCH.answer).backward()
        results.append([result, *(p.grad for _, p in sorted(of.named_parameters()) if p.requires_grad)])
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("name", SHIPPED)
def test_gradients_in_bfloat16_are_near_those_in_float32(name):
    """The batch is so large that sums in bfloat16, which end at 256 times what is added, would be off by a half."""
    torch.manual_seed(1)
    batch, model = trials("productive", "depth3", 512), evaluation.module_of(name).Model(dim=32)
    parameters = {key: p for key, p in model.named_parameters() if p.requires_grad and p.numel() >= 64}
    gradients = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            result = model(batch.instruction, batch.stimulus)
        loss = F.cross_entropy(result.float(), batch.answer)
        gradients.append(torch.autograd.grad(loss, parameters.values()))
    for key, exact, near in zip(parameters, *gradients):
        assert (near - exact).norm() < 0.08 * exact.norm(), key


@pytest.mark.parametrize("name", SHIPPED)
def test_a_training_step_stays_on_its_device(name, monkeypatch):
    """torch's meta device refuses to mix with the CPU, as a GPU does, and has no values. One may be read, here as 6."""
    reads = []
    monkeypatch.setattr(torch.Tensor, "__int__", lambda tensor: reads.append(tensor) or 6)
    with torch.device("meta"):
        model = evaluation.module_of(name).Model()
    batch = data.Trials(*(x.to("meta") for x in BATCH))
    optimizers = train.make_optimizers(model, "muon", 1e-3) + train.make_optimizers(model, "adamw", 1e-3)
    F.cross_entropy(model(batch.instruction, batch.stimulus), batch.answer).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
    assert len(reads) == hasattr(evaluation.module_of(name), "Stimulus")


# ---- ours: beside torch.nn --------------------------------------------------------------------------------------

def one_hot(tokens, sizes=SIZES):
    """(B, N, features) -> (B, N, sum(sizes)): the paper's input."""
    return torch.cat([F.one_hot(t.long(), size) for t, size in zip(tokens.unbind(2), sizes)], 2).float()


def copy_of(name, model, read, instruction, stimulus):
    """The logits of a model from torch.nn's modules. Of ours, Block is tested by itself: here every token of every
    block is computed, and `read` is the one that is then taken out."""
    grid = one_hot(stimulus, (27, 11)).flatten(1)
    if name == "mlp":
        tokens = F.pad(one_hot(instruction), (0, 0, 0, 46 - instruction.shape[1])).flatten(1)
        x = tokens @ model.instruction.table + grid @ model.stimulus.table
        return model.readout(model.norm(nn.Sequential(nn.GELU(), *model.layers, nn.GELU())(x)))
    if name == "sstfmr":
        x, bias = (torch.cat(parts, 1) for parts in zip(model.instruction(instruction), model.stimulus(stimulus)))
        for block in model.blocks:
            x = block(x, x, bias)
        return model.readout(x[:, read])
    if name == "perceiver":
        x, equal = model.latents.expand(len(grid), -1, -1), torch.zeros(len(grid), 10)
        x = model.ask_instruction(x, *model.instruction(instruction))
        x = model.ask_each_other(x, x, equal)
        x = model.ask_stimulus(x, *model.stimulus(stimulus))
        x = model.ask_each_other(x, x, equal)
        return model.readout(model.mlp(model.norm(x[:, 0])))
    layer = getattr(nn, name.upper())(sum(SIZES) + 3800, model.recurrent.in_features, batch_first=True)
    layer.weight_ih_l0.data = torch.cat([model.instruction.table, model.stimulus.table]).T
    layer.weight_hh_l0.data, layer.bias_hh_l0.data = model.recurrent.weight, model.recurrent.bias
    layer.bias_ih_l0.data.zero_()
    x = torch.cat([one_hot(instruction), grid[:, None].expand(-1, instruction.shape[1], -1)], 2)
    return model.readout(model.norm(layer(x)[0][:, -1]))


@pytest.mark.parametrize("name, changes", [v for v in VARIANTS if v[0] in ("rnn", "gru", "mlp", "sstfmr", "perceiver")],
                         ids=str)
def test_model_equals_its_copy_from_torch_modules(name, changes):
    model = make(name, **changes)
    expected = copy_of(name, model, {"root": 0, "eos": -1}[changes.get("read", "root")], *BATCH[:2])
    torch.testing.assert_close(model(*BATCH[:2]), expected, atol=1e-4, rtol=1e-4)


def test_attention_and_block_equal_torch():
    """With a bias for every key, by which absent ones are left out and others weigh more."""
    block = make("sstfmr", heads=4).blocks[0]
    ours, theirs = block.attention, nn.MultiheadAttention(16, 4, batch_first=True)
    theirs.in_proj_weight.data = torch.cat([ours.query.weight, ours.key.weight, ours.value.weight])
    theirs.in_proj_bias.data = torch.cat([ours.query.bias, 0 * ours.query.bias, ours.value.bias])
    theirs.out_proj.load_state_dict(ours.out.state_dict())
    x, context, bias = torch.randn(3, 9, 16), torch.randn(3, 7, 16), torch.randn(3, 7)
    bias[0, 2] = -math.inf
    expected = theirs(x, context, context, key_padding_mask=bias, need_weights=False)[0]
    torch.testing.assert_close(ours(x, context, bias), expected, atol=1e-5, rtol=1e-5)
    assert not ours.weights[0, :, :, 2].any() and not ours.weights.requires_grad
    layer = nn.TransformerEncoderLayer(16, 4, 64, 0, "gelu", batch_first=True)
    layer.self_attn, layer.norm1, layer.norm2 = theirs, block.norm1, block.norm2
    layer.linear1, _, layer.linear2 = block.mlp
    expected = layer(context, src_key_padding_mask=bias)
    torch.testing.assert_close(block(context, context, bias), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(block(context[:, [5]], context, bias), expected[:, [5]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tokens", ["selector", "operator"])
def test_instruction_is_a_linear_map_of_one_hot_features_with_one_token_per_selector_or_operator(tokens):
    stream, instruction = make("sstfmr", tokens=tokens).instruction, BATCH.instruction
    matrix, place = torch.cat([*stream.embedding.tables]), evaluation.module_of("sstfmr").sinusoids(4, 16, "sinusoidal")
    eos, absent = stream.eos.expand(12, 1, 16), instruction[:, :, 3] == 0
    x, bias = stream(instruction)
    if tokens == "operator":
        expected, keys = torch.cat([one_hot(instruction) @ matrix + place, eos], 1), torch.zeros(12, 5)
    else:
        first, second = (one_hot(instruction[:, :, [0, i, i + 1]]) @ matrix + place for i in (1, 3))
        expected = torch.cat([first, second + stream.second, eos], 1)
        keys = torch.tensor([[0] * 4 + [-math.inf if a else 0 for a in row] + [0] for row in absent.tolist()])
    torch.testing.assert_close(x, expected)
    assert keys.equal(bias) and absent.any() and not absent.all()


@pytest.mark.parametrize("name", [n for n in SHIPPED if n in bench.COMPACT])
def test_absent_second_selectors_are_not_seen(name):
    """What marks second selectors changes nothing at depth 1, where all are absent."""
    model, batches = make(name), (trials("productive", "depth1", 12), BATCH)
    before = [model(*batch[:2]) for batch in batches]
    for key, parameter in model.named_parameters():
        if key.endswith(".second"):
            parameter.data.mul_(-1)
    after = [model(*batch[:2]) for batch in batches]
    assert after[0].equal(before[0]) and not after[1].equal(before[1])


@pytest.mark.parametrize("position, shortest, longest", [
    ("sinusoidal", 2.5, 64), ("paper", math.tau, 10_000 * math.tau)])
def test_sinusoids_have_the_wavelengths_asked_for(position, shortest, longest):
    waves = evaluation.module_of("sstfmr").sinusoids(100, 6, position)
    turns = torch.arange(100)[:, None] / torch.tensor([shortest, (shortest * longest) ** 0.5, longest])
    expected = [(math.tau * turns).sin(), (math.tau * turns).cos()]
    torch.testing.assert_close(waves, math.sqrt(2) * torch.cat(expected, 1), atol=1e-3, rtol=0)


# ---- ours: one by one -------------------------------------------------------------------------------------------

def test_mlp_refuses_what_it_has_no_weights_for():
    with pytest.raises(ValueError, match="at most 46"):
        make("mlp")(torch.zeros(2, 47, 5, dtype=torch.int32), BATCH.stimulus[:2])
    with pytest.raises(ValueError, match="layers"):
        make("mlp", layers=0)


def test_treetfmr_reads_a_subtree_as_an_instruction_of_its_own(float64):
    """An operator sees its own subtree and the stimulus alone, whatever the depth and whatever stands beside it."""
    batch, model, seen = trials("productive", "depth5", 12), evaluation.module_of("treetfmr").Model(dim=16), []
    hook = model.readout.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    model.features(*batch[:2])
    hook.remove()
    for states, subtrees in zip(seen, ([[6], [7], [8], [9]], [[2, 4, 6, 7], [3, 5, 8, 9]])):
        for i, tokens in enumerate(subtrees):
            alone = model.features(batch.instruction[:, tokens], batch.stimulus)
            torch.testing.assert_close(states[:, i], alone)
    assert len(seen) >= 2


def test_treetfmr_hands_up_the_answers_alone():
    """Where all leaves answer the same, they leave no trace in the root, unless their tokens are handed up."""
    other = BATCH.instruction.clone()
    other[:, 2:] = other[:, 2:].roll(1, 0)  # the leaves of other trials
    for up in ("answer", "token"):
        model = evaluation.module_of("treetfmr").Model(dim=16, up=up)
        for same in (False, up == "answer"):
            assert torch.allclose(model.features(other, BATCH.stimulus), model.features(*BATCH[:2]), atol=1e-5) == same
            for parameter in model.readout.parameters():
                nn.init.zeros_(parameter)


def test_treetfmr_can_have_a_block_for_inner_operators():
    model, leaves = make("treetfmr", shared=False), BATCH.instruction[:, 2:3]
    before = [model(tokens, BATCH.stimulus) for tokens in (leaves, BATCH.instruction)]
    model.inner[0].mlp[0].weight.data.mul_(2)
    after = [model(tokens, BATCH.stimulus) for tokens in (leaves, BATCH.instruction)]
    assert before[0].equal(after[0]) and not torch.allclose(before[1], after[1], atol=1e-3)


def test_classes_of_the_same_name_are_copies():
    """What stands in two of our files stands there letter by letter."""
    sources = {}
    for name in SHIPPED:
        module = evaluation.module_of(name)
        for key, thing in vars(module).items():
            if inspect.getmodule(thing) is module and key != "Model":
                sources.setdefault(key, {}).setdefault(inspect.getsource(thing), []).append(name)
    assert not {key: list(found.values()) for key, found in sources.items() if len(found) > 1}
