"""RNN: reads the instruction token by token, and the whole stimulus beside each (section 3.1).

    stimulus (100 cells)  .---------.-- ... --.---------.
                          |         |         |         |
    instruction tokens    1         2         T        EOS   the streams meet in every step
                          |         |         |         |
                    0 -> ReLU ---> ReLU ... ReLU ---> ReLU -> LayerNorm -> readout -> 138 logits

Every place of the grid has weights of its own, so what is learned about one cell says nothing about
the others. EOS gives a single operator a second step. Without it the recurrent weights would meet
the state 0 alone: with it, distractor has 41.8 % in distribution, without it 36.1 (2026-11-27).

Differs from the paper:

    1) weights start with variance 1 / fan-in, those of the input smaller
    2) the input has no bias: its rows hold it
    3) a row for each operator, shape and color, in each cell its own (in the release a token is a
       few numbers, times one matrix)
"""
import torch
from torch import nn
from torch.nn import functional as F

import data

TRAINING = {"optimizer": "adamw"}  # Muon would take most of a step's time


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


class Model(nn.Module):
    """A state of `dim` units."""

    def __init__(self, dim=512):
        super().__init__()
        sizes = len(data.OPERATORS) + 1, data.SHAPES + 1, data.COLORS + 1  # + 1: 0 is none
        self.instruction = Rows(sizes + sizes[1:], dim)
        self.stimulus = Rows(sizes[1:] * len(data.CELLS), dim)
        self.eos = nn.Parameter(0.01 * torch.randn(dim))
        self.recurrent = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.readout = nn.Linear(dim, data.CLASSES)
        for module in (self.recurrent, self.readout):
            nn.init.normal_(module.weight, std=dim ** -0.5)
            nn.init.zeros_(module.bias)

    def step(self, x, state):  # (B, C), (B, C) -> (B, C)
        return F.relu(x + self.recurrent(state))

    def features(self, instruction, stimulus):  # (B, T, 5), (B, 100, 2) -> (B, C)
        # W [token, stimulus] = U token + V stimulus, and V stimulus is the same in every step
        stimulus = self.stimulus(stimulus.flatten(1))[:, None]  # (B, 1, C)
        tokens = self.instruction(instruction)  # (B, T, C)
        tokens = torch.cat([tokens, self.eos.expand(len(tokens), 1, -1)], 1)
        inputs = tokens + stimulus  # (B, T + 1, C)
        state = inputs.new_zeros(len(inputs), self.recurrent.in_features)
        for x in inputs.unbind(1):
            state = self.step(x, state)
        return self.norm(state)

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
