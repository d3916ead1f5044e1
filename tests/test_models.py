"""The models compute what they say, with each shortcut and without, and beside torch.nn."""
import ast
import functools
import inspect
import math
import re
import typing
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bench
import data
import train
from bench import COMPACT
from models import ALL, available, findtfmr, gru, looptfmr, module_of, sstfmr
from models.looptfmr import LEFT, OTHER, PARENT, RIGHT, SELF


def arguments_of(name):
    return inspect.signature(module_of(name).Model).parameters


SHIPPED = [*ALL, "authors"]
VARIANTS = [(name, {}) for name in available()] + [
    (name, {key: choice}) for name in available()  # each other choice of an argument
    for key, parameter in arguments_of(name).items()
    for choice in typing.get_args(parameter.annotation) if choice != parameter.default]
each = functools.partial(pytest.mark.parametrize, ids=str)
each_shipped = each("name, changes", [variant for variant in VARIANTS if variant[0] in SHIPPED])
near = functools.partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)
trials = functools.cache(data.trials)
BATCH = trials("productive", "depth3", 12)


def make(name, std=0.3, **changes):
    """A small model, all random: a mistake in a bias of 0 or a norm of 1 would not show."""
    torch.manual_seed(1)
    small = {"dim": 16} if "dim" in arguments_of(name) else {}
    model = module_of(name).Model(**small | changes)
    for parameter in model.parameters() if std else ():
        nn.init.normal_(parameter, std=std)
    return model.eval()  # without dropout (of authors)


def gradients(model, batch=BATCH):
    logits = model(*batch[:2])
    return torch.autograd.grad(F.cross_entropy(logits, batch.answer), model.parameters())


@each("name, changes", VARIANTS)
def test_every_trial_gets_logits_of_its_own_and_every_parameter_a_gradient(name, changes):
    model = make(name, **changes)
    for depth in 1, 3, 5, 9:
        instruction, stimulus, _ = trials("productive", f"depth{depth}", 5)
        result = model(instruction, stimulus)
        assert result.shape == (5, data.CLASSES) and result.isfinite().all()
        near(result, model.readout(model.features(instruction, stimulus)))
        near(result[3:4], model(instruction[3:4], stimulus[3:4]))
    assert not changes or not result.equal(make(name)(instruction, stimulus))
    assert all(gradient.any() for gradient in gradients(model))


@each("name", SHIPPED)
def test_every_number_of_a_model_changes_its_answers(name):
    """The choices, like `--read root`, do in the test before."""
    logits = make(name)(*BATCH[:2])
    for key, parameter in arguments_of(name).items():
        if type(parameter.default) is int and key not in ("dim", "strays"):
            assert not make(name, **{key: 2 * parameter.default})(*BATCH[:2]).equal(logits), key
    assert findtfmr.Model(strays=3).strays == 3  # they are for training


@each("name", available())
def test_one_batch_is_overfitted(name):
    model = make(name, 0, dim=32).train()
    optimizers = train.make_optimizers(model, "adamw", 3e-3)
    steps = (train.learn(model, optimizers, BATCH, 1, "cpu") for _ in range(400))
    assert any(loss < 0.1 for loss, accuracy in steps)


@each("name", SHIPPED)
@pytest.mark.parametrize("what, larger", [
    ("SHAPES", data.SHAPES + 1), ("COLORS", data.COLORS + 1),
    ("OPERATORS", data.OPERATORS | {"Added": data.Operator("")})], ids=["shapes", "colors", "ops"])
def test_sizes_follow_data(name, what, larger, monkeypatch):
    changes = {"embed": "onehot"} if name == "authors" else {}  # of numbers, it has no table
    before = sum(p.numel() for p in make(name, **changes).parameters())
    monkeypatch.setattr(data, what, larger)
    model = make(name, **changes)
    assert sum(p.numel() for p in model.parameters()) > before
    if what != "OPERATORS":  # question and grid may name the new one
        instruction, stimulus, part = *map(torch.clone, BATCH[:2]), int(what == "COLORS")
        instruction[:, [0, 2, 3], 1 + part] = larger
        stimulus[:, :9] = 1
        stimulus[:, :9, part] = larger
        assert model(instruction, stimulus).isfinite().all()


@each_shipped
def test_every_feature_and_the_order_of_the_leaves_reach_the_answer(name, changes):
    model, (instruction, stimulus, _) = make(name, **changes).double(), BATCH
    before = model(instruction, stimulus)
    changed = [(instruction[:, [0, 1, 3, 2]], stimulus, torch.ones(12) > 0)]
    for i in range(7):  # five features of an instruction token, two of a stimulus token
        other = instruction.clone(), stimulus.clone()
        feature = other[i // 5][:, :, i % 5]
        feature.copy_((feature > 0) * (feature % 8 + 1))  # another value, but 0 stays
        changed.append((*other, (feature > 0).any(1)))
    for *other, trial in changed:  # sums in another order differ by 1e-15
        assert trial.any() and trial.equal((model(*other) - before).abs().amax(1) > 1e-12)


@each("name", COMPACT)
@each("objects", [(2,), (41,), (99,), (100,), (2, 6, 41, 99), (2, 100)])
def test_compact_stimulus_is_exact(name, objects):
    model = make(name).double()
    objects = torch.tensor(objects).repeat(12 // len(objects))[:, None]
    taken = torch.rand(12, len(data.CELLS)).argsort(1) < objects
    stimulus = taken[:, :, None] * torch.randint(1, data.SHAPES + 1, (*taken.shape, 2))
    batch = BATCH._replace(stimulus=stimulus)
    result, compact = model(*batch[:2]), gradients(model, batch)
    model.stimulus.forward = functools.partial(bench.all_cells, model.stimulus)
    near((result, compact), (model(*batch[:2]), gradients(model, batch)), atol=1e-6, rtol=1e-6)


@each_shipped
def test_a_step_stays_on_its_device_and_reads_one_number_at_most(name, changes, monkeypatch):
    """Torch's meta device computes nothing: what is read from it is 6."""
    reads = []
    monkeypatch.setattr(torch.Tensor, "__int__", lambda tensor: reads.append(tensor) or 6)
    with torch.device("meta"):
        model = make(name, **changes).train()
    gradients(model, data.Trials(*(x.to("meta") for x in BATCH)))
    assert len(reads) == (name in [*COMPACT, "looktfmr", "findtfmr"])


@each("name, kind", [("gru", nn.GRU), ("rnn", functools.partial(nn.RNN, nonlinearity="relu"))])
def test_recurrent_models_equal_torch(name, kind):
    model, (instruction, stimulus, _) = make(name), BATCH
    tokens = model.instruction(instruction)
    inputs = torch.cat([tokens, model.eos.expand(12, 1, -1)], 1)  # EOS is the last step
    inputs = inputs + model.stimulus(stimulus.flatten(1))[:, None]
    layer = kind(inputs.shape[2], 16, batch_first=True)
    layer.weight_ih_l0.data = torch.eye(inputs.shape[2])
    layer.bias_ih_l0.data.zero_()
    layer.weight_hh_l0.data, layer.bias_hh_l0.data = model.recurrent.parameters()
    near(model.features(instruction, stimulus), model.norm(layer(inputs)[0][:, -1]))
    rows = gru.Rows([2, 3], 4)  # the inputs, which have no bias
    near(rows(torch.tensor([[1, 2], [0, 1]])), rows.table[[1, 0]] + rows.table[[2 + 2, 2 + 1]])


def test_attention_and_block_equal_torch():
    block = make("sstfmr", heads=4).blocks[0]
    layer = nn.TransformerEncoderLayer(16, 4, 64, 0, "gelu", batch_first=True, norm_first=True)
    ours, theirs = block.attention, layer.self_attn
    theirs.in_proj_weight.data = torch.cat([p.weight for p in (ours.query, ours.key, ours.value)])
    theirs.in_proj_bias.data = torch.cat([ours.query.bias, torch.zeros(16), ours.value.bias])
    theirs.out_proj, layer.norm1, layer.norm2 = ours.out, block.norm1, block.norm2
    layer.linear1, _, layer.linear2 = block.mlp
    x, mask = torch.randn(3, 7, 16), torch.randn(3, 7)
    mask[0, 2] = -math.inf
    near(block(x[:, 5:], x, mask[:, None, None]), layer(x, src_key_padding_mask=mask)[:, 5:])


@each("name", "sstfmr dstfmr crossattn perceiver looptfmr looktfmr findtfmr".split())
def test_linears_start_with_variance_1_over_fan_in(name):
    for key, module in module_of(name).Model().named_modules():
        if isinstance(module, nn.Linear):
            share = 0.09 if key.endswith("query") else 1
            assert module.weight.var().item() * module.in_features == pytest.approx(share, rel=0.1)
            assert module.bias is None or not module.bias.any()


def test_positions_have_wavelengths_from_2_5_to_64_tokens():
    place = sstfmr.sinusoids(65, 8)  # four sines, four cosines
    near(place.square().mean(1), torch.ones(65))
    near(place[5, [0, 4]], torch.tensor([0, 2 ** 0.5]))  # two waves of 2.5 tokens
    near(place[16, [3, 7]], torch.tensor([2 ** 0.5, 0]))  # a quarter of one of 64


@each("name", [*COMPACT, "looktfmr", "findtfmr"])
def test_absent_second_selectors_are_not_seen(name):
    """What marks second selectors changes nothing at depth 1, where all are absent."""
    for depth, same in ("depth1", True), ("depth3", False):
        model, (instruction, stimulus, _) = make(name), trials("productive", depth, 12)
        before = model(instruction, stimulus)
        marks = dict(model.named_parameters())
        if name in COMPACT:
            next(p for key, p in marks.items() if key.endswith(".second")).data.mul_(-1)
        else:
            marks["selectors.kinds"].data[2:].mul_(-1)  # of the second thing and cell
        assert model(instruction, stimulus).equal(before) == same


def test_relations_of_looptfmr_by_hand():
    assert looptfmr.relations(3).tolist() == [
        [SELF, LEFT, RIGHT], [PARENT, SELF, OTHER], [PARENT, OTHER, SELF]]


@each("name, changes", [("looktfmr", {}), ("looptfmr", {}), ("looptfmr", {"view": "all"}),
                        ("looptfmr", {"carry": "state"})])
def test_a_subtree_is_solved_like_an_instruction_of_its_own(name, changes):
    """Leaves alone have one loop, branches two, and here all have three. So one may as well begin
    with the leaves and go up: the order need not be told. Not so with view or carry."""
    tokens, grid, _ = trials("productive", "depth5", 9)
    model, seen = make(name, 0, **changes), []
    hook = model.readout.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model.features(tokens, grid)
    hook.remove()  # seen[-1]: (B, O, C) after the last loop
    for i, subtree in enumerate(([2, 4, 6, 7], [3, 5, 8, 9], [6], [7], [8], [9]), 1):
        alone = model.features(tokens[:, subtree], grid)
        assert torch.allclose(seen[-1][:, i], alone, atol=1e-4) == (not changes)


@each("carry", ["answer", "state"])
def test_a_loop_of_looptfmr_starts_from_what_it_carries(carry):
    model, starts, ends = make("looptfmr", carry=carry), [], []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: starts.append(inputs[0]))
    model.blocks[-1].register_forward_hook(lambda *call: ends.append(call[2]))
    model(*BATCH[:2])
    expected = {"answer": starts[0], "state": ends[0]}
    near(starts[1], expected[carry])


@each("changes, same", [({}, True), ({"view": "all"}, False)])
def test_looptfmr_hands_up_the_answers_alone(changes, same):
    """Where all operators answer the same, the leaves leave no trace in the root."""
    model, (inner, leaves) = make("looptfmr", 0, **changes), BATCH.instruction.split(2, 1)
    nn.init.zeros_(model.readout.weight)
    other = torch.cat([inner, leaves.roll(1, 0)], 1)  # the leaves of other trials
    x, y = (model.features(tokens, BATCH.stimulus) for tokens in (other, BATCH.instruction))
    assert torch.allclose(x, y, atol=1e-5) == same


def test_digits_of_findtfmr_by_hand():
    assert findtfmr.digits(1) == [0, 0, 0, 0, -1, -1, -1, -1, 1]  # the root, 1
    assert findtfmr.digits(2) == [-1, 0, 0, 0, 1, -1, -1, -1, 1]  # its left branch, 10
    assert findtfmr.digits(13) == [1, -1, 1, 0, 1, 1, 1, -1, 1]  # 1101


@each("O, roots", [(1, 31), (3, 15), (7, 7), (15, 3), (31, 1)])
def test_findtfmr_places_a_tree_anywhere_and_strays_elsewhere(O, roots):
    numbers = findtfmr.place(2_000, O, 12)
    size = {15: 15, 31: 31}.get(O, O + 12)  # 15 may have 16 branches of leaves: no place is free
    assert numbers.shape == (2_000, size) and {*numbers.flatten().tolist()} == {*range(1, 32)}
    assert all(len({*row}) == size for row in numbers.tolist())
    below = numbers[:, O:, None] // 2 == numbers[:, None, :O]
    assert not below.any()
    assert {*numbers[:, 0].tolist()} == {*range(1, roots + 1)}
    for i in range(1, O):  # left, right, left, ...
        assert numbers[:, i].equal(2 * numbers[:, (i - 1) // 2] + (i - 1) % 2)


def find_branches(model):
    """Sets the score by hand: 0 for an operator's branches, at most -100 for others. With digits
    s, k of them, of the one that looks, and t, l of them, of the other one, it is 100 times

        s @ t - k  (0 if t begins like s, or else less)  -  (l - k - 1) ** 2
    """
    digit, there, one = torch.eye(9).split([4, 4, 1])
    there = (there + one) / 2  # 0 or 1
    number, square = there.sum(0), torch.tensor([1.0, 3, 5, 7]) @ there  # 1 + 3 + 5 = 9
    score = digit.mT @ digit + 2 * number.outer(number)
    score -= (square + 3 * number).outer(one[0]) + one[0].outer(square - 2 * number + one[0])
    model.match.data.copy_(100 / findtfmr.SCALE ** 2 * score)


def test_a_score_of_digits_can_tell_branches_from_all_others():
    model, numbers = make("findtfmr"), torch.arange(1, 32)
    find_branches(model)
    scores = model.scores(numbers[None])
    is_branch = (numbers // 2 == numbers[:, None]).expand(1, 4, -1, -1)
    near(scores[is_branch], torch.zeros(30 * 4), atol=1e-3)
    assert (scores[~is_branch] < -99).all()


def test_findtfmr_that_finds_the_branches_is_looktfmr():
    """And it stops by itself, one loop after the last answer."""
    look, find, loops = make("looktfmr"), make("findtfmr"), []
    find.load_state_dict(look.state_dict(), strict=False)
    find_branches(find)
    find.norm.register_forward_hook(lambda *_: loops.append(1))
    for model in look, find:  # sure of its answers
        model.readout.weight.data.mul_(10_000)
    for levels, depth in enumerate((1, 3, 5, 7, 9), 1):
        tokens, grid, _ = trials("productive", f"depth{depth}", 20)
        loops.clear()
        near(find.features(tokens, grid), look.features(tokens, grid))
        assert len(loops) <= levels + 1


def test_findtfmr_knows_operators_by_their_numbers_alone():
    """In other rows, with their numbers, they answer the same; with other numbers they do not."""
    model, (tokens, grid, _) = make("findtfmr", 0), trials("productive", "depth5", 9)
    nn.init.normal_(model.match)
    order = torch.tensor([4, 2, 6, 0, 1, 5, 3])  # the root, 0, comes to row 3
    operators = data.operators_of(tokens)[:, order]
    before, moved = model.features(tokens, grid), model.solve(operators, order[None] + 1, grid)
    near(moved[:, 3], before)
    other = model.solve(operators, order.flip(0)[None] + 1, grid)  # the root has row 3 again
    assert ((other[:, 3] - before).abs().amax(1) > 1e-3).all()


def test_findtfmr_trains_with_strays_and_with_a_loop_more_or_not():
    """Beside three operators are 0 to 12 strays. Half of the steps have three loops, not two."""
    model, seen, loops, numbers = make("findtfmr").train(), [], [], []
    model.blocks[0].register_forward_hook(lambda _, inputs, x: seen.append(inputs[1]))
    others = 3 * 5  # beside the answers: each operator and what it found
    for _ in range(100):
        seen.clear()
        model(*BATCH[:2])
        loops.append(len(seen))
        numbers += [context.shape[1] - others for context in seen]
        known = [context[:, 15:18] for context in seen]  # a loop hands on new answers in all trials
        assert all((x != y).flatten(1).any(1).all() for x, y in zip(known, known[1:]))
    assert {*numbers} == {*range(3, 16)}
    assert {*loops} == {2, 3} and 30 < loops.count(2) < 70


def test_trials_of_findtfmr_share_strays_but_neither_gradients_nor_places():
    model, found, roots = make("findtfmr").train(), [], []
    scores, model.strays = model.scores, 1
    model.scores = lambda numbers: roots.append(numbers[:, 0]) or scores(numbers)
    model.selectors.register_forward_hook(lambda *call: found.append(call[2][0]))
    for seed in range(9):
        torch.manual_seed(seed)
        one = model(*BATCH[:2])[0].sum()
        gradient, = torch.autograd.grad(one, found[-1])
        assert not gradient[1:].any() and len({*roots[-1].tolist()}) > 1


def test_findtfmr_goes_on_while_one_trial_changes_at_most_ten_times():
    model, loops = make("findtfmr"), []

    def unsure(_, inputs, logits):  # of the first trial
        loops.append(1)
        return torch.cat([torch.randn_like(logits[:1]), logits[1:]])
    model.readout.register_forward_hook(unsure)
    model.features(*BATCH[:2])
    assert len(loops) == 10


def test_operators_of_findtfmr_see_the_answers_of_all_others():
    model, biases = make("findtfmr"), []
    model.blocks[0].register_forward_pre_hook(lambda _, inputs: biases.append(inputs[2]))
    model(*BATCH[:2])
    tokens, answers = biases[0].isfinite()[:, 0].split([15, 3], 2)  # (B, 3, 15), (B, 3, 3)
    own = torch.eye(3, dtype=torch.bool).expand(12, -1, -1)
    assert answers.equal(~own) and tokens.unflatten(2, (3, 5)).any(3).equal(own)


def test_randomness_of_findtfmr_is_torchs():
    """So a run that resumes ends with the same bits: train.py saves the state of that generator."""
    model = make("findtfmr").train()
    results = [torch.manual_seed(seed) and model(*BATCH[:2]) for seed in (3, 3, 4)]
    assert results[0].equal(results[1]) and not results[0].equal(results[2])
    torch.manual_seed(3)  # now the other trials are copies of three, so strays are others
    copied = model(*(torch.cat([part[:3], part[:9]]) for part in BATCH[:2]))
    assert ((copied - results[0])[:3].abs() > 1e-3).any()


@each("name", ["looktfmr", "findtfmr"])
def test_no_shape_and_no_color_stay_0(name):
    model = make(name, 0)
    train.learn(model, train.make_optimizers(model, "adamw", 0.1), BATCH, 1, "cpu")
    for table in model.selectors.shape, model.selectors.color:
        assert not table.weight[0].any() and table.weight[1:].all()


def test_looktfmr_sees_the_grid_by_its_looks_alone():
    """With what was found held fixed, another grid changes no answer."""
    model, (tokens, grid, _) = make("looktfmr"), BATCH
    look = model.selectors.look
    found = look(*look_inputs(model, tokens, grid))
    before = model(tokens, grid)
    look.forward = lambda *_: found
    assert model(tokens, grid.roll(1, 0)).equal(before)
    del look.forward
    assert not model(tokens, grid.roll(1, 0)).equal(before)


def test_looks_of_looktfmr_do_not_see_operators():
    model, (tokens, grid, _) = make("looktfmr"), BATCH
    other = tokens.clone()
    other[:, :, 0] = 9 - other[:, :, 0] % 8  # no number stays
    x, y = (look_inputs(model, instruction, grid) for instruction in (tokens, other))
    assert all(map(torch.equal, x, y)) and not model(tokens, grid).equal(model(other, grid))


def look_inputs(model, tokens, grid):  # what the look of LookTfmr gets
    inputs = []
    hook = model.selectors.look.register_forward_pre_hook(lambda _, given: inputs.append(given))
    model.selectors(data.operators_of(tokens), grid)
    hook.remove()
    return inputs[0]


def find_objects(model):
    """Sets what selectors look for by hand, and returns these: shapes and colors are one-hots, of
    other numbers, and scores are 25 for each of the two that fits."""
    selectors = model.selectors
    for table in selectors.shape, selectors.color:
        nn.init.zeros_(table.weight)
    selectors.shape.weight.data[1:, :10] = torch.eye(10)
    selectors.color.weight.data[1:, 10:20] = torch.eye(10)
    selectors.look.norm1 = nn.Identity()
    search = selectors.look.attention
    for layer in search.query, search.key:
        layer.weight.data = 12 * torch.eye(32)  # 12 * 12 / sqrt(32): about 25
    nn.init.zeros_(search.query.bias)
    return selectors


def test_looktfmr_finds_what_a_selector_asks_for():
    """With scores set by hand, the cell is the object's. What was found, less what was asked for,
    is the color, the shape, or nothing at all, unless an Exist is False."""
    model, (tokens, grid, answer) = make("looktfmr", dim=32), trials("distractor", "iid", 400)
    selectors = find_objects(model)
    nn.init.zeros_(selectors.kinds)
    found, _ = selectors(tokens, grid)
    thing, cell, *_ = found[:, 0].unbind(1)  # (B, C) of the first selector
    exist, location, color, shape = (tokens[:, 0, 0] == number for number in (1, 2, 3, 4))
    near(cell[location], selectors.cell.weight[answer[location] - data.FIRST_CELL])
    near(thing[location], torch.zeros_like(thing[location]))
    near(thing[color], selectors.color.weight[answer[color] - data.FIRST_COLOR + 1])
    near(thing[shape], selectors.shape.weight[answer[shape] - data.FIRST_SHAPE + 1])
    nothing = thing[exist].abs().amax(1) < 1e-4
    assert nothing.equal(answer[exist] == data.TRUE)


def test_classes_of_the_same_name_are_copies():
    texts = [Path(module_of(name).__file__).read_text(encoding="utf-8") for name in SHIPPED]
    copies = {}  # name -> the source of each class and function of this name
    for text in texts:
        for node in ast.parse(text).body:
            if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and node.name != "Model":
                copies.setdefault(node.name, []).append(ast.get_source_segment(text, node))
    assert len(copies["Attention"]) == 8
    assert [name for name in copies if len({*copies[name]}) > 1] == []


def test_what_files_call_copies_are_copies():
    """The rule `# ---- as in sstfmr.py ----`, up to the next one; below the last is the model."""
    seen = 0
    for name in SHIPPED:
        text = Path(module_of(name).__file__).read_text(encoding="utf-8")
        # nothing from here but data.py: a run can be built from its copy
        assert not re.search(r"(?m)^\s*(from|import) (\.|models|train|eval|bench)", text)
        sections = re.split(r"(?m)^# ---- (.*?) -+\n", text)
        for title, section in zip(sections[1::2], sections[2::2]):
            if title.startswith("as in "):
                original = (Path(module_of(name).__file__).parent / title[6:]).read_text()
                parts = re.split(r"\n{3,}", section.strip())
                assert all(part in original for part in parts), (name, title)
                seen += len(parts)
        if name not in ("rnn", "authors"):  # which have no copies
            assert sections[-2] == "the model" and "class Model" in sections[-1]
    assert seen > 30
