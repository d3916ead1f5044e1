"""The models compute what they say: against torch.nn's modules, with and without each shortcut."""
import copy
import inspect

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bench
import data
import eval as evaluation

MODELS = evaluation.available()
BATCH = data.trials("productive", "depth3", 12)


def make(name, **changes):
    torch.manual_seed(1)
    return evaluation.module_of(name).Model(**{"dim": 16} | changes)


def random_parameters(module):
    """Biases and norms start at 0 and 1, where a mistake in them would not show."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("depth", [1, 3, 5, 9])
def test_forward_gives_logits_for_any_depth(name, depth):
    batch = data.trials("productive", f"depth{depth}", 5)
    model = make(name)
    logits = model(batch.instruction, batch.stimulus)
    assert logits.shape == (5, 138) and logits.isfinite().all()
    assert torch.equal(logits, model.readout(model.features(batch.instruction, batch.stimulus)))


POSITIONS = [(name, position) for name in MODELS for position in ("sinusoidal", "relative", "paper")
             if "position" in inspect.signature(evaluation.module_of(name).Model).parameters]


@pytest.mark.parametrize("name, changes", [
    *((name, {}) for name in MODELS), *((name, {"position": position, "layers": 1}) for name, position in POSITIONS)])
def test_every_parameter_gets_a_gradient(name, changes):
    model = random_parameters(make(name, **changes))
    F.cross_entropy(model(BATCH.instruction, BATCH.stimulus), BATCH.answer).backward()
    assert not [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize("name", MODELS)
def test_one_batch_is_overfitted(name):
    model = make(name, dim=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(150):
        loss = F.cross_entropy(model(BATCH.instruction, BATCH.stimulus), BATCH.answer)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.1:
            return
    raise AssertionError(f"the loss is still {loss:.2f}")


@pytest.mark.parametrize("name", MODELS)
def test_trials_of_a_batch_do_not_see_each_other(name):
    model = random_parameters(make(name)).eval()
    together = model(BATCH.instruction, BATCH.stimulus)
    alone = model(BATCH.instruction[3:4], BATCH.stimulus[3:4])
    torch.testing.assert_close(together[3:4], alone, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name, position", POSITIONS)
@pytest.mark.parametrize("layers", [1, 2])
def test_every_position_code_tells_the_order_of_an_instruction(name, position, layers):
    model = random_parameters(make(name, position=position, layers=layers)).double()
    swapped = BATCH.instruction.clone()
    swapped[:, [2, 3]] = swapped[:, [3, 2]]  # the two leaves
    assert (model(swapped, BATCH.stimulus) - model(*BATCH[:2])).abs().max() > 1e-8  # sums in another order: 1e-15


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("stream", ["instruction", "stimulus"])
def test_both_streams_reach_the_answer(name, stream):
    model = random_parameters(make(name)).eval()
    other = BATCH._replace(**{stream: getattr(BATCH, stream).roll(1, 0)})
    assert not torch.allclose(model(*BATCH[:2]), model(*other[:2]))


@pytest.mark.parametrize("queries", [1, 2, 9])
def test_attention_equals_torch(queries):
    """1 query takes the branch that projects queries into the context's space (1 * 4 heads < 7), 9 the other one."""
    module = evaluation.module_of("sstfmr")
    ours = random_parameters(module.Attention(16, 4))
    theirs = nn.MultiheadAttention(16, 4, batch_first=True)
    bench.copy_attention(theirs, ours)
    x, context, bias = torch.randn(3, queries, 16), torch.randn(3, 7, 16), torch.randn(4, queries, 7)
    expected = theirs(x, context, context, attn_mask=bias.repeat(3, 1, 1), need_weights=False)[0]
    torch.testing.assert_close(ours(x, context, bias), expected, atol=1e-5, rtol=1e-5)
    q, k, v = (part.unflatten(2, (4, -1)).transpose(1, 2) for part in (ours.query(x), ours.key(context), ours.value(context)))
    expected = ours.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(ours(x, context), expected, atol=1e-5, rtol=1e-5)


def test_block_equals_torch_and_its_last_token_needs_no_other_query():
    block = random_parameters(evaluation.module_of("sstfmr").Block(16, 2))
    x = torch.randn(3, 9, 16)
    torch.testing.assert_close(block(x, x), bench.encoder_layer(block)(x), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(block(x[:, -1:], x), block(x, x)[:, -1:], atol=1e-5, rtol=1e-5)


def table(model):
    """The weights that a model's instruction meets first."""
    stream = getattr(model.instruction, "embedding", model.instruction)
    return getattr(stream, "table", stream)


@pytest.mark.parametrize("name", bench.BASELINES)
@pytest.mark.parametrize("paper", [False, True])
def test_model_equals_its_copy_from_torch_modules(name, paper):
    """The same loss and, for one parameter, the same gradient as with every token computed by torch.nn."""
    changes = {k: v for k, v in evaluation.module_of(name).PAPER.items() if k != "optimizer"} if paper else {}
    model = random_parameters(make(name, **changes | {"dim": 16}))
    theirs = bench.BASELINES[name](model)
    losses = [F.cross_entropy(m(BATCH.instruction, BATCH.stimulus), BATCH.answer) for m in (model, theirs)]
    torch.testing.assert_close(*losses, atol=1e-5, rtol=1e-5)
    gradients = [torch.autograd.grad(loss, table(m))[0] for loss, m in zip(losses, (model, theirs))]
    if name in ("rnn", "gru", "mlp"):  # torch.nn has both tables in one matrix, a column per feature
        gradients[1] = gradients[1][:, :len(gradients[0])].T
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-4)


def test_embedding_is_a_linear_map_of_the_one_hot_features_and_so_are_its_projections():
    embedding = random_parameters(evaluation.module_of("sstfmr").Embedding(bench.INSTRUCTION, 6))
    layers, places = [nn.Linear(6, 6), nn.Linear(6, 6, bias=False)], torch.randn(4, 6)
    expected = bench.Embedding(embedding, bench.INSTRUCTION)(BATCH.instruction, places)
    x, *projected = embedding(BATCH.instruction, places, layers)
    torch.testing.assert_close(x, expected)
    for layer, result in zip(layers, projected, strict=True):
        torch.testing.assert_close(result, layer(expected))


def test_mlp_refuses_what_it_has_no_weights_for():
    with pytest.raises(ValueError, match="at most 46"):
        make("mlp")(torch.zeros(2, 47, 5, dtype=torch.int32), torch.zeros(2, 100, 2, dtype=torch.int32))
    with pytest.raises(ValueError, match="layers"):
        make("mlp", layers=0)


@pytest.mark.parametrize("depth", [1, 3, 5, 7, 9])
def test_treetfmr_folds_as_the_oracle_does(depth):
    """Values set by hand, the answer of each operator as a one-hot vector, and a gate that opens for True."""
    trials = data.trials("productive", f"depth{depth}", 300)
    model = make("treetfmr", dim=138)
    with torch.no_grad():
        model.gate.weight.zero_()
        model.gate.weight[0, :2] = torch.tensor([100, -100])  # True, False
        answers, _ = data._evaluate(trials.instruction, trials.stimulus)
        levels, start = [], 0
        for level in range(depth // 2 + 1):
            levels.append(F.one_hot(answers[:, start:start + 2 ** level], 138).float())
            start += 2 ** (level + 1)
        assert torch.equal(model.fold(levels).argmax(1), data.solve(trials.instruction, trials.stimulus)[0])


@pytest.mark.parametrize("tied", [True, False])
def test_treetfmr_looks_up_what_multiplying_would_give(tied):
    retrieve = random_parameters(evaluation.module_of("treetfmr").Retrieve(16, tied))
    selectors = torch.tensor([[[3, 4], [3, 0], [0, 4], [0, 0]]]).expand(12, -1, -1)
    stimulus = BATCH.stimulus.long()
    unit = [F.normalize(table, dim=1) for table in retrieve.features]
    asking = unit if tied else [F.normalize(table, dim=1) for table in retrieve.asks]
    asks = [(asking[i][selectors[:, :, i]] * (selectors[:, :, i:i + 1] > 0)) for i in (0, 1)]  # (B, N, C) each
    keys = [unit[i][stimulus[:, :, i]] for i in (0, 1)]  # (B, S, C) each
    count = (selectors > 0).sum(2, True)
    score = sum(q @ k.mT for q, k in zip(asks, keys)) / count.clamp(min=1)
    score = torch.cat([score, retrieve.absent.expand(12, 4, 1)], 2) * retrieve.sharpness
    values = retrieve.cells + sum(table[stimulus[:, :, i]] for i, table in enumerate(retrieve.features))
    values = torch.cat([values, retrieve.nothing.expand(12, 1, -1)], 1)
    torch.testing.assert_close(retrieve(selectors, stimulus), score.softmax(2) @ values * (count > 0), atol=1e-5, rtol=1e-5)


def test_treetfmr_ablations_change_what_they_name():
    plain = make("treetfmr")
    assert (len(make("treetfmr", shared=False).compute), len(plain.compute)) == (5, 1)
    assert make("treetfmr", choice=False).gate is None and plain.merge is None
    assert plain.retrieve.asks is None and len(make("treetfmr", tied=False).retrieve.asks) == 2
    one = make("treetfmr", queries=1)  # a single query for two selectors cannot tell in which order they stand
    swapped = BATCH.instruction.clone()
    swapped[:, :, 1:] = swapped[:, :, [3, 4, 1, 2]]
    torch.testing.assert_close(one(swapped, BATCH.stimulus), one(BATCH.instruction, BATCH.stimulus))
    assert not torch.allclose(plain(swapped, BATCH.stimulus), plain(BATCH.instruction, BATCH.stimulus))


def test_hypertfmr_answers_by_its_code_alone():
    """Swapping the codes of two trials with one stimulus swaps their answers, and a code knows no stimulus."""
    model = random_parameters(make("hypertfmr")).eval()
    instruction, stimulus = BATCH.instruction[:2], BATCH.stimulus[:1].expand(2, -1, -1)
    z = model.infer(instruction)
    answers = model(instruction, stimulus)
    assert not torch.allclose(answers[0], answers[1])
    torch.testing.assert_close(model.readout(model.execute(z.flip(0), stimulus)), answers.flip(0))
    seen = []
    hook = model.code.register_forward_hook(lambda module, inputs, output: seen.append(output))
    model(BATCH.instruction[:2], BATCH.stimulus[2:4])
    hook.remove()
    torch.testing.assert_close(seen[0].flatten(), z.flatten())


@pytest.mark.slow
def test_perceiver_latents_differ_after_training():
    """In the reference all ten are the same. Here neither they nor what they have read become so."""
    torch.manual_seed(1)
    model = evaluation.module_of("perceiver").Model(dim=64)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _, batch in zip(range(150), data.batches("distractor", 64, seed=0)):
        F.cross_entropy(model(batch.instruction, batch.stimulus), batch.answer).backward()
        optimizer.step()
        optimizer.zero_grad()
    read = model.ask_instruction(model.latents.expand(12, -1, -1), model.instruction(BATCH.instruction))
    for latents in (model.latents, read[0]):
        assert torch.pdist(latents).min() > 0.1 * latents.norm(dim=1).mean()


def test_sinusoids_have_the_wavelengths_asked_for():
    waves = evaluation.module_of("sstfmr").sinusoids(9, 4, 8, like=torch.zeros(4))
    assert torch.allclose(waves[0], torch.tensor([0, 0, 2 ** 0.5, 2 ** 0.5]))
    assert torch.allclose(waves[4], torch.tensor([0, 0, 2 ** 0.5, -(2 ** 0.5)]), atol=1e-5)  # one turn of 4, half of 8


def test_relative_positions_depend_on_distances_alone():
    """With a bias of -1e4 for all distances but 0, a block's instruction tokens see themselves (and the stimulus)."""
    model = make("sstfmr", position="relative", heads=2)
    plain = model(BATCH.instruction, BATCH.stimulus)
    with torch.no_grad():
        model.relative[:, :8] = -1e4
        model.relative[:, 9:] = -1e4
    assert not torch.allclose(model(BATCH.instruction, BATCH.stimulus), plain)
    swapped = BATCH.instruction.clone()
    swapped[:, [2, 3]] = swapped[:, [3, 2]]  # no token sees another one: their order cannot matter
    torch.testing.assert_close(model(swapped, BATCH.stimulus), model(BATCH.instruction, BATCH.stimulus), atol=1e-4, rtol=1e-4)
    with torch.no_grad():
        model.relative[:, 9] = 0  # each sees the one before it, too: now it can
    assert not torch.allclose(model(swapped, BATCH.stimulus), model(BATCH.instruction, BATCH.stimulus), atol=1e-3)


def test_classes_of_the_same_name_are_copies():
    """Point 2 of the style: what stands in two model files stands there letter by letter."""
    sources = {}
    for name in MODELS:
        module = evaluation.module_of(name)
        for key, thing in vars(module).items():
            if inspect.getmodule(thing) is module and key != "Model":
                sources.setdefault(key, {}).setdefault(inspect.getsource(thing), []).append(name)
    assert not {key: list(found.values()) for key, found in sources.items() if len(found) > 1}


def test_models_import_nothing_of_each_other():
    for name in MODELS:
        source = open(evaluation.module_of(name).__file__).read()
        for forbidden in ("import models", "from models", "nn.MultiheadAttention", "nn.Transformer", "nn.RNN", "nn.GRU",
                          "scaled_dot_product_attention"):
            assert forbidden not in source, (name, forbidden)
