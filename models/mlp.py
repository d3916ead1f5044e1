"""MLP: the whole trial as one long vector of one-hots; every token and cell has weights of its own.

    instruction (T tokens, zero-padded to 46)     stimulus (100 cells)
                        |                             |
                        '------------- + -------------'    the streams meet before the
                                       |                   first nonlinearity
                                [ GELU, Linear ]  x (layers - 1)
                                       |
                                GELU, LayerNorm -> readout -> 138 logits

Redhardt, Akram, Schug 2025 (arXiv 2507.07207) report that scaling data and width alone can lead to
compositional generalization, and that a task's constituents can then be decoded linearly from the
hidden units. So scale --dim, --layers and --steps (or --train-size).

Ito et al. have no MLP.
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
    """`layers` hidden layers of width `dim`."""

    def __init__(self, dim=512, layers=2):
        super().__init__()
        sizes = len(data.OPERATORS) + 1, data.SHAPES + 1, data.COLORS + 1  # + 1: 0 is none
        self.instruction = Rows((sizes + sizes[1:]) * data.LONGEST, dim)
        self.stimulus = Rows(sizes[1:] * len(data.CELLS), dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(layers - 1))
        self.norm = nn.LayerNorm(dim)
        self.readout = nn.Linear(dim, data.CLASSES)
        for module in (*self.layers, self.readout):
            nn.init.normal_(module.weight, std=dim ** -0.5)
            nn.init.zeros_(module.bias)

    def features(self, instruction, stimulus):  # (B, T, 5), (B, 100, 2) -> (B, C)
        x = F.gelu(self.instruction(instruction.flatten(1)) + self.stimulus(stimulus.flatten(1)))
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.norm(x)

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
