"""The models compute what they say, with each shortcut and without, and beside torch.nn."""
import contextlib
import functools
import inspect
import math
import re
import typing

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bench
import data
import eval as evaluation
import train
from models import looptfmr

SHIPPED = """authors crossattn dstfmr gru hypertfmr looptfmr mlp papertfmr perceiver rnn
             sstfmr""".split()
MODELS = evaluation.available()
VARIANTS = [(name, {}) for name in MODELS] + [
    (name, {key: choice}) for name in MODELS  # each other choice of an argument
    for key, p in inspect.signature(evaluation.module_of(name).Model).parameters.items()
    for choice in typing.get_args(p.annotation) if choice != p.default]
of_each = functools.partial(pytest.mark.parametrize, ids=str)
near = functools.partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)
trials = functools.cache(data.trials)
BATCH = trials("productive", "depth3", 12)
SIZES = [len(data.OPERATORS) + 1, *2 * [data.SHAPES + 1, data.COLORS + 1]]


def make(name, std=0.3, **changes):
    """A small model, all random: a mistake in a bias of 0 or a norm of 1 would not show."""
    torch.manual_seed(1)
    model = evaluation.module_of(name).Model(**{"dim": 16} | changes)
    for parameter in model.parameters() if std else ():
        nn.init.normal_(parameter, std=std)
    return model.eval()  # without dropout (of authors)


def untrained(model, batch):
    F.cross_entropy(model(*batch[:2]), batch.answer).backward()
    return [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()]


@of_each("name", MODELS)
@of_each("depth", [1, 3, 5, 9])
def test_every_trial_gets_logits_of_its_own_at_any_depth(name, depth):
    batch, model = trials("productive", f"depth{depth}", 5), make(name)
    result = model(*batch[:2])
    assert result.shape == (5, data.CLASSES) and result.isfinite().all()
    near(result, model.readout(model.features(*batch[:2])))
    near(result[3:4], model(batch.instruction[3:4], batch.stimulus[3:4]))


@of_each("name, changes", VARIANTS)
def test_every_parameter_gets_a_gradient(name, changes):
    assert not untrained(make(name, **changes), BATCH)


@of_each("name", MODELS)
def test_one_batch_is_overfitted(name):
    model = make(name, 0, dim=32).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(400):
        loss = F.cross_entropy(model(*BATCH[:2]), BATCH.answer)
        if loss < 0.1:
            return
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    raise AssertionError(f"the loss is still {loss:.2f}")


@of_each("name", SHIPPED)
def test_sizes_follow_data(name, monkeypatch):
    changes = {"embed": "onehot"} if name == "authors" else {}  # of numbers, it has no table
    before = sum(p.numel() for p in make(name, **changes).parameters())
    operator = data.Operator("even rows: {}?", lambda cells: sum(row for row, _ in cells) % 2 == 0)
    monkeypatch.setitem(data.OPERATORS, "Added", operator)
    pools = data.Pool(leaves=("Added",)),
    monkeypatch.setitem(data.SPLITS, "mine", {"train": data.Subset(pools, depths=(3,))})
    batch, model = data.trials("mine", "train", 12), make(name, **changes)
    assert (batch.instruction[:, 2:, 0] == len(data.OPERATORS)).all()
    assert not untrained(model, batch) and sum(p.numel() for p in model.parameters()) > before
    code = re.sub(r'""".*?"""|#.*?\n', "", inspect.getsource(inspect.getmodule(model)), flags=re.S)
    assert not re.search(r"(?<![=\d])(10|11|27|100|138)\b", code)  # a default may be 10


@of_each("name, changes", [v for v in VARIANTS if v[0] in SHIPPED])
def test_every_feature_and_the_order_of_the_leaves_reach_the_answer(name, changes):
    model = make(name, **changes).double()
    others = [(BATCH.instruction[:, [0, 1, 3, 2]], BATCH.stimulus)]
    for i, size in enumerate([data.IF_ELSE, *SIZES[1:], *SIZES[1:3]]):
        other = [tokens.clone() for tokens in BATCH[:2]]
        old = other[i // 5][:, :, i % 5]  # it becomes the next one; an IfElse stays
        old.copy_(torch.where((old > 0) & (old < size), old % (size - 1) + 1, old))
        others.append(other)
    for other in others:
        changed = sum((new != old).flatten(1).sum(1) for new, old in zip(other, BATCH)) > 0
        difference = (model(*other) - model(*BATCH[:2])).abs().amax(1)
        assert changed.any() and changed.equal(difference > 1e-12)  # sums in another order: 1e-15


@of_each("name", bench.COMPACT)
@of_each("objects", [(2,), (41,), (99,), (100,), (2, 6, 41, 99), (2, 100)])
def test_compact_stimulus_is_exact(name, objects):
    model, results = make(name).double(), []
    objects = torch.tensor(objects).repeat(12 // len(objects))[:, None]
    taken = torch.rand(12, len(data.CELLS)).argsort(1) < objects
    stimulus = taken[:, :, None] * torch.randint(1, data.SHAPES + 1, (*taken.shape, 2))
    for of in (model, bench.with_all_cells(model)):
        result = of(BATCH.instruction, stimulus)
        F.cross_entropy(result, BATCH.answer).backward()
        results.append([result, *(p.grad for _, p in sorted(of.named_parameters()))])
    near(*results, atol=1e-6, rtol=1e-6)


@of_each("name", SHIPPED)
def test_gradients_in_bfloat16_are_near_those_in_float32(name):
    """Sums in bfloat16 end at 256 times what is added: here they would be half too small."""
    batch, model, grads = trials("productive", "depth3", 512), make(name, 0, dim=32), []
    parameters = [p for p in model.parameters() if p.numel() >= 64]
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            result = model(*batch[:2])
        grads.append(torch.autograd.grad(F.cross_entropy(result.float(), batch.answer), parameters))
    assert all((near - exact).norm() < 0.08 * exact.norm() for exact, near in zip(*grads))


class Devices(TorchDispatchMode):
    """The devices of all that torch's operations take and return."""
    seen = frozenset()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        leaves = tree_leaves([args, kwargs, result])
        self.seen |= {x.device.type for x in leaves if isinstance(x, torch.Tensor)}
        return result


@of_each("name, changes", [v for v in VARIANTS if v[0] in SHIPPED])
def test_a_training_step_stays_on_its_device(name, changes, monkeypatch):
    """No tensor is made on the CPU and copied. What is read from torch's meta device is 6."""
    reads = []
    monkeypatch.setattr(torch.Tensor, "__int__", lambda tensor: reads.append(tensor) or 6)
    with torch.device("meta"):
        model, batch = make(name, **changes), data.Trials(*(x.to("meta") for x in BATCH))
    with Devices() as devices:
        F.cross_entropy(model(*batch[:2]), batch.answer).backward()
    assert devices.seen == {"meta"}
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in train.make_optimizers(model, "muon", 1e-3):
        optimizer.step()
    assert len(reads) == (name in bench.COMPACT)  # one read for the compact stimulus


def one_hot(tokens, sizes=SIZES):  # (B, N, features) -> (B, N, sum(sizes)): the paper's input
    return torch.cat([*map(F.one_hot, tokens.long().unbind(2), sizes)], 2).float()


@of_each("name, changes", [v for v in VARIANTS if v[0] in "gru mlp papertfmr rnn sstfmr".split()])
def test_model_equals_its_copy_from_torch_modules(name, changes):
    model, (instruction, stimulus, _) = make(name, **changes), BATCH
    x, grid = one_hot(instruction), one_hot(stimulus, SIZES[1:3]).flatten(1)
    if name in ("papertfmr", "sstfmr"):
        (x, x_count), (y, y_count) = model.instruction(instruction), model.stimulus(stimulus)
        x, bias = torch.cat([x, y], 1), torch.cat([x_count, y_count], 1)[:, None, None]
        for block in model.blocks:
            x = block(x, x, bias)
        x = model.norm(x[:, -1 if "read" in changes else 0])
    elif name == "mlp":
        x = F.pad(x, (0, 0, 0, 46 - x.shape[1])).flatten(1) @ model.instruction.table
        layers = nn.Sequential(nn.GELU(), *model.layers, nn.GELU(), model.norm)
        x = layers(x + grid @ model.stimulus.table)
    else:
        x = torch.cat([x, grid[:, None].expand(-1, x.shape[1], -1)], 2)
        kind = {"gru": nn.GRU, "rnn": functools.partial(nn.RNN, nonlinearity="relu")}[name]
        layer = kind(x.shape[2], 16, batch_first=True)
        layer.weight_ih_l0.data = torch.cat([model.instruction.table, model.stimulus.table]).T
        layer.weight_hh_l0.data, layer.bias_hh_l0.data = model.recurrent.parameters()
        layer.bias_ih_l0.data.zero_()
        x = model.norm(layer(x)[0][:, -1])
    near(model(instruction, stimulus), model.readout(x))


def test_attention_and_block_equal_torch(monkeypatch):
    block = make("sstfmr", heads=4).blocks[0]
    ours, theirs = block.attention, nn.MultiheadAttention(16, 4, batch_first=True)
    theirs.in_proj_weight.data = torch.cat([p.weight for p in (ours.query, ours.key, ours.value)])
    theirs.in_proj_bias.data = torch.cat([ours.query.bias, torch.zeros(16), ours.value.bias])
    theirs.out_proj.load_state_dict(ours.out.state_dict())
    x, context, bias = torch.randn(3, 9, 16), torch.randn(3, 7, 16), torch.randn(3, 7)
    bias[0, 2], kept = -math.inf, {**vars(ours)}
    inputs = x, context, bias[:, None, None]
    weights = ours.weights(*inputs)
    expected = theirs(x, context, context, key_padding_mask=bias, average_attn_weights=False)
    near((ours(*inputs), weights), expected)
    assert not weights[0, :, :, 2].any() and vars(ours) == kept  # nothing stays behind
    layer = nn.TransformerEncoderLayer(16, 4, 64, 0, "gelu", batch_first=True, norm_first=True)
    layer.self_attn, layer.norm1, layer.norm2 = theirs, block.norm1, block.norm2
    layer.linear1, _, layer.linear2 = block.mlp
    near(block(context[:, 5:], *inputs[1:]), layer(context, src_key_padding_mask=bias)[:, 5:])
    monkeypatch.setattr(ours, "weights", lambda *inputs: 0 * weights)  # forward uses them
    assert ours(*inputs).equal(ours.out.bias.expand(3, 9, 16))


@of_each("name", ["papertfmr", "sstfmr"])
def test_instruction_has_tokens_for_operators_or_selectors_with_positions(name):
    stream, instruction = make(name).instruction, BATCH.instruction
    tables = torch.cat([x.weight for x in stream.children()])  # of operators, shapes, colors, ...
    turns = math.tau * torch.arange(4)[:, None] / torch.logspace(math.log10(2.5), math.log10(64), 8)
    place = math.sqrt(2) * torch.cat([turns.sin(), turns.cos()], 1)
    if name == "papertfmr":
        x, count = [one_hot(instruction) @ tables + place], torch.ones(12, 5)
    else:
        x = [one_hot(instruction[:, :, [0, i, i + 1]]) @ tables + place for i in (1, 3)]
        x, count = [x[0], x[1] + stream.second], torch.ones(12, 9)
        count[:, 4:8][instruction[:, :, 3] == 0] = 0  # absent
    near(stream(instruction), (torch.cat([*x, stream.eos.expand(12, 1, 16)], 1), count.log()))


@of_each("name", sorted({*SHIPPED} & {*bench.COMPACT} - {"papertfmr"}))
def test_absent_second_selectors_are_not_seen(name):
    """What marks second selectors changes nothing at depth 1, where all are absent."""
    model, batches = make(name), (trials("productive", "depth1", 12), BATCH)
    before = [model(*batch[:2]) for batch in batches]
    next(p for key, p in model.named_parameters() if key.endswith(".second")).data.mul_(-1)
    after = [model(*batch[:2]) for batch in batches]
    assert after[0].equal(before[0]) and not after[1].equal(before[1])


@of_each("name, first, asked", [
    ("crossattn", "ask", "look 9, encode_instruction 9"),
    ("crossattn", "read", "encode_instruction 9, look 1"),
    ("perceiver", "ask", "ask_stimulus 9, encode_instruction 9, ask_instruction 10, "
     "ask_each_other 1"),
    ("perceiver", "read", "encode_instruction 9, ask_instruction 10, ask_each_other 10, "
     "ask_stimulus 10, ask_each_other 1")])
def test_tokens_or_latents_ask_in_order(name, first, asked):
    model, queries = make(name, first=first), []
    for key, part in model.named_children():
        if key.startswith(("look", "ask", "encode_i")):
            part.register_forward_pre_hook(
                lambda _, inputs, key=key: queries.append(f"{key} {inputs[0].shape[1]}"))
    model(*BATCH[:2])
    assert ", ".join(queries) == asked


def test_relations_in_a_tree_by_hand():
    """Operator 0 has the branches 1 and 2, operator 1 has 3 and 4, operator 2 has 5 and 6."""
    words, other = looptfmr.relations(7).tolist(), looptfmr.OTHER
    found = {(i, j): word for i, row in enumerate(words) for j, word in enumerate(row)
             if word != other}
    of = {"SELF": [(i, i) for i in range(7)], "LEFT": [(0, 1), (1, 3), (2, 5)],
          "RIGHT": [(0, 2), (1, 4), (2, 6)],
          "PARENT": [(1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (6, 2)]}
    assert found == {pair: getattr(looptfmr, word) for word, pairs in of.items() for pair in pairs}


def loops_of(changes, tokens, grid):
    """The vectors of all operators after each loop of looptfmr."""
    model, seen = make("looptfmr", 0, **changes), []
    model.readout.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    model.features(tokens, grid)
    return model, seen  # loops of (B, O, C)


@of_each("changes", [{}, {"view": "all"}, {"carry": "state"}, {"carry": "recall"}])
def test_looptfmr_ends_where_more_loops_change_nothing(changes):
    """... to the last bit, since all that an operator reads stays: not so with view or carry."""
    tokens, grid, _ = trials("productive", "depth7", 9)
    _, seen = loops_of({"more": 2, **changes}, tokens, grid)
    assert len(seen) == 6
    for loop, (before, after) in enumerate(zip(seen, seen[1:])):
        same = (before == after).all(2).all(0)  # of each operator: root, two, four, eight leaves
        assert same.tolist() == [not changes and loop >= 3 - (i + 1).bit_length() + 1
                                 for i in range(15)]


def test_looptfmr_recalls_the_question_at_the_start_of_each_later_loop():
    model, starts, ends = make("looptfmr", carry="recall"), [], []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: starts.append(inputs[0]))
    model.blocks[-1].register_forward_hook(lambda _, inputs, output: ends.append(output))
    model(*BATCH[:2])
    question, _ = model.questions(BATCH.instruction[:, [0, 2, 3]])  # without the IfElse
    assert len(starts) == 2 and starts[0].equal(question) and starts[1].equal(ends[0] + question)
    for depth, same in ("depth1", True), ("depth3", False):  # one loop, two loops
        batch = trials("productive", depth, 12)[:2]
        assert model(*batch).equal(make("looptfmr", carry="state")(*batch)) == same


def test_looptfmr_solves_a_subtree_like_an_instruction_of_its_own():
    """So one may as well begin with the leaves and go up: the order need not be told."""
    tokens, grid, _ = trials("productive", "depth5", 9)
    model, (*_, last) = loops_of({}, tokens, grid)
    for i, subtree in enumerate(([2, 4, 6, 7], [3, 5, 8, 9], [6], [7], [8], [9])):
        near(last[:, i + 1], model.features(tokens[:, subtree], grid))


def test_looptfmr_hands_up_the_answers_alone():
    """Where all operators answer the same, the leaves leave no trace in the root."""
    inner, leaves = BATCH.instruction.split(2, 1)
    other = torch.cat([inner, leaves.roll(1, 0)], 1)  # the leaves of other trials
    for changes, same in ({}, True), ({"view": "all"}, False):
        model = make("looptfmr", 0, **changes)
        nn.init.zeros_(model.readout.weight)
        x, y = (model.features(tokens, BATCH.stimulus) for tokens in (other, BATCH.instruction))
        assert torch.allclose(x, y, atol=1e-5) == same


@of_each("name", sorted({*SHIPPED} & {*bench.COMPACT}))
def test_weights_start_with_variance_1_over_fan_in_and_embeddings_with_1(name):
    for key, module in make(name, 0, dim=64).named_modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            share = 0.3 if key.endswith("query") else 1
            expected = share * getattr(module, "in_features", 1) ** -0.5
            assert 0.8 < module.weight.std() / expected < 1.2, key


@of_each("name", sorted({*SHIPPED} & {*bench.COMPACT}))
def test_dims_and_heads_that_do_not_fit_are_refused(name):
    make(name, dim=18, heads=6)
    with pytest.raises(ValueError, match="dim must be a multiple of heads, not 16 with 3 heads"):
        make(name, heads=3)
    sines = pytest.raises(ValueError, match="dim must be even, for sines and cosines, not 15")
    with contextlib.nullcontext() if name == "looptfmr" else sines:
        make(name, dim=15, heads=3)(*BATCH[:2])


def test_classes_of_the_same_name_are_copies():
    """... but for the tokens of papertfmr.py, its one difference from sstfmr.py."""
    copies = {(key, inspect.getsource(thing)) for module in map(evaluation.module_of, SHIPPED)
              for key, thing in vars(module).items()
              if inspect.getmodule(thing) is module and key != "Model"
              and (module.__name__, key) != ("models.papertfmr", "Instruction")}
    assert sorted(key for key, _ in copies) == sorted(dict(copies))
