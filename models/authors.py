"""The authors' six models as released (IBM/gcog), from torch.nn's own modules: a baseline to
compare with. Tests compare their outputs with the release's.

    instruction            stimulus            sstfmr     one Stream reads both; its last token
      |                       |                dstfmr     last tokens of two Streams, a Linear and a
      |                       |                           ReLU each, summed; MLP
    [ Stream ]             [ Stream ]          crossattn  last rule token asks stimulus; MLP
      |                       |                perceiver  ten latents of zeros ask the rule, each
      '---- architecture -----'                           other, the stimulus, each other
                 |                             rnn, gru   no Stream: rule token by rule token, with
              readout -> 138 logits                       the whole stimulus (theirs: --dim 512)

    Stream: Linear, + positions, dropout, one block

Unlike in the other files, a token is a few numbers, times a matrix: red + red = green. All 101
stimulus tokens have a position. The latents start as zeros, so all ten stay identical.

Known of the authors' training: AdamW at a constant 1e-4, weight decay 0.01, gradients clipped at 1;
demos use batches of 64. Not known: how many trials. A reviewer of the paper speaks of more than 5
million, a follow-up asks for 7,000 to 28,000.

Differs from the release:

    1) logits, not log probabilities
    2) no token that nobody reads
    3) no relative positions, which the release also offers
    4) the GRU reads a stimulus token as the same three numbers as the RNN, in the release as 37
       features
    5) vectors do not decay

embed=onehot learns a vector for each value; rnn and gru do without it.
"""
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

import data

TRAINING = {"optimizer": "adamw", "lr": 1e-4, "schedule": "constant"}
OPERATORS = """Exist GetLocation GetColor GetShape SumEven ProductEven ProductOdd SumOdd
               IfElse""".split()  # in the order of the release's numbers, from 1
LONGEST = data.LONGEST + len(data.CELLS) + 2  # tokens: rule, stimulus, EOS of both


class Numbers(nn.Linear):  # a token is a sum of vectors, each times the number of a feature
    def forward(self, tokens):  # (B, N, features) -> (B, N, C)
        return super().forward(tokens.to(self.weight.dtype))


class Embedding(nn.ModuleList):  # a token is the sum of a vector per feature
    def forward(self, tokens):  # (B, N, features) -> (B, N, C)
        return sum(table(ids) for table, ids in zip(self, tokens.unbind(2), strict=True))


def interleaved(length, dim):  # -> (length, C): wavelengths from 2 pi to almost 20,000 pi tokens
    angle = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, dim, 2) / dim)
    return torch.stack([angle.sin(), angle.cos()], 2).flatten(1)


def relu_layers(*widths):
    layers = []
    for inputs, outputs in zip(widths, widths[1:]):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class Ask(nn.MultiheadAttention):  # one head
    def __init__(self, dim):
        super().__init__(dim, 1, batch_first=True)

    def forward(self, x, context):  # (B, N, C), (B, M, C) -> (B, N, C)
        return super().forward(x, context, context, need_weights=False)[0]


class Stream(nn.Module):
    """Tokens as vectors, with positions, through one block (post-norm)."""

    def __init__(self, dim, sizes, embed, mlp=None):
        super().__init__()
        if embed == "ids":
            self.embedding = Numbers(len(sizes), dim)
        else:
            self.embedding = Embedding(nn.Embedding(size, dim) for size in sizes)
        self.register_buffer("place", interleaved(LONGEST, dim), persistent=False)
        self.dropout = nn.Dropout(0.1)
        self.attention = Ask(dim)
        self.mlp = mlp or relu_layers(dim, dim, dim)
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, tokens, last=False):  # (B, N, features) -> (B, N, C), or the last one alone
        x = self.embedding(tokens)
        x = self.dropout(x + self.place[:x.shape[1]])
        first = -1 if last else 0
        x = self.norm1(x[:, first:] + self.attention(x[:, first:], x))
        return self.norm2(x + self.mlp(x))


class SingleStream(nn.Module):
    def __init__(self, dim, rule, stimulus, embed):
        super().__init__()
        mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.GELU())
        self.stream = Stream(dim, rule + stimulus, embed, mlp)

    def forward(self, rule, stimulus):  # (B, T + 1, 8), (B, 101, 3) -> (B, C), like the others
        rule = F.pad(rule, (0, 3))  # (B, T + 1, 11)
        stimulus = F.pad(stimulus, (8, 0))  # (B, 101, 11)
        return self.stream(torch.cat([rule, stimulus], 1), last=True)[:, 0]


class TwoStreams(nn.Module):
    def __init__(self, dim, rule, stimulus, embed):
        super().__init__()
        self.stimulus = Stream(dim, stimulus, embed)
        self.rule = Stream(dim, rule, embed)


class DualStream(TwoStreams):
    def __init__(self, dim, rule, stimulus, embed):
        super().__init__(dim, rule, stimulus, embed)
        self.rule_mlp = relu_layers(dim, dim)
        self.stimulus_mlp = relu_layers(dim, dim)
        self.norm1 = nn.LayerNorm(dim)
        self.mlp = relu_layers(dim, 2 * dim, 2 * dim, dim)
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, rule, stimulus):
        x = self.rule_mlp(self.rule(rule, last=True))
        x = x + self.stimulus_mlp(self.stimulus(stimulus, last=True))
        return self.norm2(self.mlp(self.norm1(x)))[:, 0]


class CrossAttn(TwoStreams):
    def __init__(self, dim, rule, stimulus, embed):
        super().__init__(dim, rule, stimulus, embed)
        self.ask = Ask(dim)
        self.norm1 = nn.LayerNorm(dim)
        self.mlp = relu_layers(dim, dim, dim)
        self.norm2 = nn.LayerNorm(dim)

    def forward(self, rule, stimulus):
        x = self.rule(rule, last=True)
        stimulus = self.stimulus(stimulus)
        x = x + self.norm1(self.ask(x, stimulus))
        return self.norm2(self.mlp(x))[:, 0]  # nothing is added


class Perceiver(TwoStreams):
    def __init__(self, dim, rule, stimulus, embed):
        super().__init__(dim, rule, stimulus, embed)
        self.register_buffer("zeros", torch.zeros(10, dim), persistent=False)  # the latents
        self.looks = nn.ModuleList(  # at the rule, at the stimulus
            nn.ModuleList([Ask(dim), relu_layers(dim, dim), nn.LayerNorm(dim)]) for _ in range(2))
        self.norm = nn.LayerNorm(dim)
        self.ask = Ask(dim)
        self.mlp = relu_layers(dim, dim)

    def forward(self, rule, stimulus):
        x = self.zeros.expand(len(rule), -1, -1)  # (B, L, C)
        streams = self.rule(rule), self.stimulus(stimulus)
        for tokens, (ask, mlp, norm) in zip(streams, self.looks):
            y = norm(ask(x, tokens))
            x = self.norm(x + y + mlp(y))
            x = self.norm(x + self.ask(x, x))  # each other, with the same weights both times
        return self.mlp(x)[:, -1]


class Recurrent(nn.Module):
    def __init__(self, kind, dim, rule, stimulus, embed):
        super().__init__()
        if embed != "ids":
            raise data.UsageError("rnn and gru have no embedding")
        size = len(rule) + (len(data.CELLS) + 1) * len(stimulus)
        self.cell = kind(size, dim, batch_first=True)
        self.norm = nn.LayerNorm(dim)

    def forward(self, rule, stimulus):
        stimulus = stimulus.flatten(1)[:, None].expand(-1, rule.shape[1], -1)
        _, last = self.cell(torch.cat([rule, stimulus], 2).to(self.norm.weight.dtype))
        return self.norm(last[0])


ARCHITECTURES = {"sstfmr": SingleStream, "dstfmr": DualStream, "crossattn": CrossAttn,
                 "perceiver": Perceiver, "gru": partial(Recurrent, nn.GRU),
                 "rnn": partial(Recurrent, partial(nn.RNN, nonlinearity="relu"))}


class Model(nn.Module):
    def __init__(self, dim=256, architecture: Literal[tuple(ARCHITECTURES)] = "crossattn",
                 embed: Literal["ids", "onehot"] = "ids"):
        super().__init__()
        if dim % 2:
            raise data.UsageError(f"dim must be even, for sines and cosines, not {dim}")
        names = [*dict.fromkeys([*OPERATORS, *data.OPERATORS])]  # new ones come last
        numbers = torch.tensor([0, *(names.index(name) + 1 for name in data.OPERATORS)])
        self.register_buffer("numbers", numbers, persistent=False)  # ours -> the release's
        shape = data.SHAPES + 1  # so many values, with 0
        color = data.COLORS + 1
        rule = [len(numbers), shape, color, 2, shape, color, 2, 2]  # 2: a flag
        stimulus = [color, shape, 2]
        self.encoder = ARCHITECTURES[architecture](dim, rule, stimulus, embed)
        self.readout = nn.Linear(dim, data.CLASSES)

    def translate(self, instruction, stimulus):  # -> rule (B, T + 1, 8), stimulus (B, 101, 3)
        rule = [self.numbers[instruction[:, :, :1]]]
        for pair in instruction[:, :, 1:3], instruction[:, :, 3:]:
            when = (pair > 0).any(2, True).int()  # is there a selector?
            rule += [pair.maximum(when), when]  # no color or no shape is 1, like red or a
        rule = F.pad(torch.cat(rule, 2), (0, 1, 0, 1))
        stimulus = F.pad(stimulus.flip(2), (0, 1, 0, 1))  # color, shape
        rule[:, -1, -1] = stimulus[:, -1, -1] = 1  # EOS
        return rule, stimulus

    def features(self, instruction, stimulus):  # (B, T, 5), (B, 100, 2) -> (B, C)
        return self.encoder(*self.translate(instruction, stimulus))

    def forward(self, instruction, stimulus):  # -> (B, 138)
        return self.readout(self.features(instruction, stimulus))
