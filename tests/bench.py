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


INSTRUCTION, STIMULUS = (10, 27, 11, 27, 11), (27, 11)  # values of each feature of a token


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


class SSTfmr(nn.Module):
    """models/sstfmr.py from torch.nn's modules."""

    def __init__(self, model):
        super().__init__()
        self.model, self.layers = [model], nn.Sequential(*(encoder_layer(b) for b in model.blocks))
        self.readout = linear(nn.Linear(model.readout.in_features, 138), model.readout)
        self.instruction, self.stimulus, self.eos = (nn.Parameter(p.detach().clone()) for p in (
            model.instruction.table, model.stimulus.table, model.eos))

    def forward(self, instruction, stimulus):
        module = evaluation.module_of("sstfmr")
        x = one_hot(instruction, INSTRUCTION) @ self.instruction
        cells = one_hot(stimulus, STIMULUS) @ self.stimulus
        wavelengths = module.WAVELENGTHS[self.model[0].position]
        x = x + module.sinusoids(x.shape[1], *wavelengths, like=x)
        learned = self.model[0].cells
        cells = cells + (module.sinusoids(100, *wavelengths, like=x) if learned is None else learned)
        eos = self.eos[:, None, None].expand(2, len(x), 1, -1)
        return self.readout(self.layers(torch.cat([x, eos[0], cells, eos[1]], 1))[:, -1])


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


REPEATS = 15
BASELINES = {"sstfmr": SSTfmr, "rnn": functools.partial(Recurrent, layer=nn.RNN),
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
    device = evaluation.pick_device("auto")
    batch = data.trials("distractor", "iid", 128, device=device)
    print(f"A training step, batch 128, float32, {device}, {torch.get_num_threads()} threads:")
    for name, baseline in BASELINES.items():
        module = evaluation.module_of(name)
        model = module.Model(**{k: v for k, v in module.PAPER.items() if k != "optimizer"}).to(device)
        ours, theirs = seconds_per_step([model, baseline(model).to(device)], batch)
        print(f"{name:10} ours {1000 * ours:7.1f} ms   torch.nn {1000 * theirs:7.1f} ms   "
              f"{theirs / ours:5.1f} times as fast")


if __name__ == "__main__":
    main()
