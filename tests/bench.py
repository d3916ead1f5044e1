"""Times a training step of each model at its paper's size against the same architecture assembled from torch.nn's
modules, every token computed: same weights, width, batch and precision, in the same run.

    python tests/bench.py
"""
import copy
import functools
import statistics
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
import data  # noqa: E402
import eval as evaluation  # noqa: E402
import train  # noqa: E402
from models.sstfmr import INSTRUCTION, STIMULUS, WAVELENGTHS, sinusoids  # noqa: E402


def linear(new, old):
    """Copies a Linear layer."""
    with torch.no_grad():
        new.weight.copy_(old.weight)
        new.bias.copy_(old.bias)
    return new


def one_hot(tokens, sizes):
    """(B, N, features) -> (B, N, sum(sizes)): the paper's input."""
    return torch.cat([F.one_hot(t.long(), size) for t, size in zip(tokens.unbind(2), sizes)], 2).float()


def copy_attention(new, old):
    """Gives torch.nn.MultiheadAttention the weights of our Attention."""
    with torch.no_grad():
        new.in_proj_weight.copy_(torch.cat([old.query.weight, old.key.weight, old.value.weight]))
        new.in_proj_bias.copy_(torch.cat([old.query.bias, torch.zeros_like(old.query.bias), old.value.bias]))
    linear(new.out_proj, old.out)


def encoder_layer(block):
    """torch.nn's own encoder layer with the weights of one of our blocks."""
    attention = block.attention
    layer = nn.TransformerEncoderLayer(len(block.norm1.weight), attention.heads, block.mlp[0].out_features, 0,
                                       activation="gelu", batch_first=True)
    copy_attention(layer.self_attn, attention)
    linear(layer.linear1, block.mlp[0])
    linear(layer.linear2, block.mlp[2])
    layer.norm1.load_state_dict(block.norm1.state_dict())
    layer.norm2.load_state_dict(block.norm2.state_dict())
    return layer


class Ask(nn.Module):
    """One of our blocks from torch.nn's modules, where the keys are not the queries."""

    def __init__(self, block):
        super().__init__()
        self.attention = nn.MultiheadAttention(len(block.norm1.weight), block.attention.heads, batch_first=True)
        copy_attention(self.attention, block.attention)
        self.norm1, self.mlp, self.norm2 = (copy.deepcopy(m) for m in (block.norm1, block.mlp, block.norm2))

    def forward(self, x, context):
        x = self.norm1(x + self.attention(x, context, context, need_weights=False)[0])
        return self.norm2(x + self.mlp(x))


class Embedding(nn.Module):
    """The embedding of a stream as a linear map of one-hot features, plus the places."""

    def __init__(self, embedding, sizes):
        super().__init__()
        self.sizes = sizes
        self.table, self.eos = (nn.Parameter(p.detach().clone()) for p in (embedding.table, embedding.eos))

    def forward(self, tokens, places):
        return one_hot(F.pad(tokens, (0, 0, 0, 1)), self.sizes) @ self.table + torch.cat([places, self.eos])


class Encoder(nn.Module):
    """A stream of models/dstfmr.py and its neighbors from torch.nn's modules, every token computed."""

    def __init__(self, encoder, sizes, wavelengths):
        super().__init__()
        self.wavelengths = wavelengths
        self.embedding = Embedding(encoder.embedding, sizes)
        self.cells = encoder.cells if encoder.cells is None else nn.Parameter(encoder.cells.detach().clone())
        self.layers = nn.Sequential(*(encoder_layer(b) for b in encoder.blocks))

    def forward(self, tokens):
        like = self.embedding.table
        places = sinusoids(tokens.shape[1], *self.wavelengths, like) if self.cells is None else self.cells
        return self.layers(self.embedding(tokens, places))


class Streams(nn.Module):
    """What models/dstfmr.py, crossattn.py and perceiver.py share, from torch.nn's modules."""

    def __init__(self, model):
        super().__init__()
        position = model.instruction.position
        self.streams = nn.ModuleList([Encoder(model.instruction, INSTRUCTION, WAVELENGTHS[position]),
                                      Encoder(model.stimulus, STIMULUS, WAVELENGTHS["paper"])])
        self.norm, self.mlp, self.readout = (copy.deepcopy(m) for m in (model.norm, model.mlp, model.readout))

    @property
    def instruction(self):
        return self.streams[0].embedding

    def forward(self, instruction, stimulus):
        x = self.meet(self.streams[0](instruction), self.streams[1](stimulus))  # (B, 1 or all L, C)
        return self.readout(self.mlp(self.norm(x))[:, 0])


class DSTfmr(Streams):
    def meet(self, instruction, stimulus):
        return instruction[:, -1:] + stimulus[:, -1:]


class CrossAttn(Streams):
    def __init__(self, model):
        super().__init__(model)
        self.cross = Ask(model.cross)

    def meet(self, instruction, stimulus):
        return self.cross(instruction, stimulus)[:, -1:]


class Perceiver(Streams):
    def __init__(self, model):
        super().__init__(model)
        self.latents = nn.Parameter(model.latents.detach().clone())
        self.ask_instruction, self.ask_stimulus = Ask(model.ask_instruction), Ask(model.ask_stimulus)
        self.ask_each_other = encoder_layer(model.ask_each_other)

    def meet(self, instruction, stimulus):
        x = self.ask_each_other(self.ask_instruction(self.latents.expand(len(instruction), -1, -1), instruction))
        return self.ask_each_other(self.ask_stimulus(x, stimulus))


class SSTfmr(nn.Module):
    """models/sstfmr.py from torch.nn's modules."""

    def __init__(self, model):
        super().__init__()
        self.wavelengths, self.layers = WAVELENGTHS[model.position], nn.Sequential(*(encoder_layer(b) for b in model.blocks))
        self.readout = copy.deepcopy(model.readout)
        self.instruction, self.stimulus = Embedding(model.instruction, INSTRUCTION), Embedding(model.stimulus, STIMULUS)
        self.cells = model.cells if model.cells is None else nn.Parameter(model.cells.detach().clone())

    def forward(self, instruction, stimulus):
        like = self.instruction.table
        cells = sinusoids(100, *self.wavelengths, like) if self.cells is None else self.cells
        places = sinusoids(instruction.shape[1], *self.wavelengths, like)
        x = torch.cat([self.instruction(instruction, places), self.stimulus(stimulus, cells)], 1)
        return self.readout(self.layers(x)[:, -1])


class Recurrent(nn.Module):
    """models/rnn.py and models/gru.py: torch.nn's own layer reads [token, stimulus] as one-hot vectors."""

    def __init__(self, model, layer):
        super().__init__()
        tables = torch.cat([model.instruction.table, model.stimulus.table])
        self.layer = layer(len(tables), model.recurrent.in_features, batch_first=True)
        with torch.no_grad():
            self.layer.weight_ih_l0.copy_(tables.T)
            self.layer.bias_ih_l0.zero_()
            self.layer.weight_hh_l0.copy_(model.recurrent.weight)
            self.layer.bias_hh_l0.copy_(model.recurrent.bias)
        self.norm, self.readout = copy.deepcopy(model.norm), copy.deepcopy(model.readout)

    @property
    def instruction(self):  # the stimulus stands in the same matrix, after it
        return self.layer.weight_ih_l0

    def forward(self, instruction, stimulus):
        grid = one_hot(stimulus, STIMULUS).flatten(1)[:, None].expand(-1, instruction.shape[1], -1)
        x = torch.cat([one_hot(instruction, INSTRUCTION), grid], 2)
        return self.readout(self.norm(self.layer(x)[0][:, -1]))


class MLP(nn.Module):
    """models/mlp.py from nn.Linear on one-hot vectors, the instruction padded with zeros."""

    def __init__(self, model):
        super().__init__()
        tables = torch.cat([model.instruction.table, model.stimulus.table])
        self.first, self.model = nn.Linear(*tables.shape, bias=False), copy.deepcopy(model)
        self.first.weight.data.copy_(tables.T)
        del self.model.instruction, self.model.stimulus

    @property
    def instruction(self):  # the stimulus stands in the same matrix, after it
        return self.first.weight

    def forward(self, instruction, stimulus):
        tokens = F.pad(one_hot(instruction, INSTRUCTION), (0, 0, 0, 46 - instruction.shape[1]))
        x = F.gelu(self.first(torch.cat([tokens.flatten(1), one_hot(stimulus, STIMULUS).flatten(1)], 1)))
        for layer in self.model.layers:
            x = F.gelu(layer(x))
        return self.model.readout(self.model.norm(x))


BATCH, REPEATS = 128, 5
BASELINES = {"sstfmr": SSTfmr, "dstfmr": DSTfmr, "crossattn": CrossAttn, "perceiver": Perceiver, "rnn": functools.partial(Recurrent, layer=nn.RNN),
             "gru": functools.partial(Recurrent, layer=nn.GRU), "mlp": MLP}


def seconds_per_step(models, batch):
    """Median seconds of a training step (forward, backward, AdamW) of each model, taking turns."""
    optimizers = [torch.optim.AdamW(m.parameters()) for m in models]
    times = [[] for _ in models]
    for _ in range(REPEATS + 2):
        for model, optimizer, seconds in zip(models, optimizers, times):
            start = time.perf_counter()
            F.cross_entropy(model(batch.instruction, batch.stimulus), batch.answer).backward()
            optimizer.step()
            optimizer.zero_grad()
            if batch.answer.is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
    return [statistics.median(seconds[2:]) for seconds in times]


def main(argv=None):
    train.keep_freed_memory()
    device = evaluation.pick_device("auto")
    batch = data.trials("distractor", "iid", BATCH, device=device)
    print(f"A training step, batch {BATCH}, float32, {device}, {torch.get_num_threads()} threads:")
    for name, baseline in BASELINES.items():
        module = evaluation.module_of(name)
        model = module.Model(**{k: v for k, v in module.PAPER.items() if k != "optimizer"}).to(device)
        ours, theirs = seconds_per_step([model, baseline(model).to(device)], batch)
        print(f"{name:10} ours {1000 * ours:7.1f} ms   torch.nn {1000 * theirs:7.1f} ms   "
              f"{theirs / ours:5.1f} times as fast")


if __name__ == "__main__":
    main()
