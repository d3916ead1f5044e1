"""GRU: reads the instruction token by token, and the whole stimulus beside each (section 3.1).

    stimulus (100 cells)  .---------.-- ... --.---------.
                          |         |         |         |
    instruction tokens    1         2         T        EOS   the streams meet in every step
                          |         |         |         |
                    0 -> gates --> gates .. gates --> gates -> LayerNorm -> readout -> 138 logits

Every place of the grid has weights of its own, so what is learned about one cell says nothing about
the others.

Differs from the paper:

    1) weights start with variance 1 / fan-in, those of the input smaller
    2) the input has no bias: its rows hold it
    3) a row for each operator, shape and color of the instruction (in the release a token is a few
       numbers, times one matrix)
"""
import torch
from torch import nn
from torch.nn import functional as F

import data

TRAINING = {"optimizer": "adamw"}  # Muon would take most of a step's time


# ---- as in rnn.py -------------------------------------------------------------------------------
class Rows(nn.Module):
    """The sum of one row of the table per feature. An empty cell has the feature 0 twice, and its
    rows are added like any others. Features left out at the end add nothing."""

    def __init__(self, sizes, dim):
        super().__init__()
        # small: the input is a sum of many
        self.table = nn.Parameter(0.01 * torch.randn(sum(sizes), dim))
        first = torch.tensor([sum(sizes[:i]) for i in range(len(sizes))])
        self.register_buffer("first", first, persistent=False)

    def forward(self, features):  # (..., up to len(sizes)) -> (..., dim)
        rows = features + self.first[:features.shape[-1]]
        x = F.embedding_bag(rows.flatten(0, -2), self.table, mode="sum")
        return x.unflatten(0, features.shape[:-1])


# ---- the model ----------------------------------------------------------------------------------
class Model(nn.Module):
    """A state of `dim` units, a reset and a keep (or update) gate for each."""

    def __init__(self, dim=512):
        super().__init__()
        sizes = len(data.OPERATORS) + 1, data.SHAPES + 1, data.COLORS + 1  # + 1: 0 is none
        self.instruction = Rows(sizes + sizes[1:], 3 * dim)
        self.stimulus = Rows(sizes[1:] * len(data.CELLS), 3 * dim)
        self.eos = nn.Parameter(0.01 * torch.randn(3 * dim))
        self.recurrent = nn.Linear(dim, 3 * dim)
        self.norm = nn.LayerNorm(dim)
        self.readout = nn.Linear(dim, data.CLASSES)
        for module in (self.recurrent, self.readout):
            nn.init.normal_(module.weight, std=dim ** -0.5)
            nn.init.zeros_(module.bias)

    def step(self, x, state):  # (B, 3 C), (B, C) -> (B, C)
        x_reset, x_keep, x_new = x.chunk(3, 1)
        h_reset, h_keep, h_new = self.recurrent(state).chunk(3, 1)
        reset = torch.sigmoid(x_reset + h_reset)
        keep = torch.sigmoid(x_keep + h_keep)
        new = torch.tanh(x_new + reset * h_new)  # reset after the product, as in cuDNN
        return keep * state + (1 - keep) * new

    def features(self, instruction, stimulus):  # (B, T, 5), (B, 100, 2) -> (B, C)
        # W [token, stimulus] = U token + V stimulus, and V stimulus is the same in every step
        stimulus = self.stimulus(stimulus.flatten(1))[:, None]  # (B, 1, 3 C)
        tokens = self.instruction(instruction)  # (B, T, 3 C)
        tokens = torch.cat([tokens, self.eos.expand(len(tokens), 1, -1)], 1)
        inputs = tokens + stimulus  # (B, T + 1, 3 C)
        state = inputs.new_zeros(len(inputs), self.recurrent.in_features)
        for x in inputs.unbind(1):
            state = self.step(x, state)
        return self.norm(state)

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
