"""Modules and buffers under several names, which are one object: patterns as in patterns.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.border.patterns import Wrap, X, equal, seen, train


@equal
def one_activation_at_two_places(wrap: Wrap) -> list[Any]:
    torch.manual_seed(0)
    act = nn.ReLU()
    model = wrap(nn.Sequential(nn.Linear(6, 8), act, nn.Linear(8, 8), act, nn.Linear(8, 3)).double(), X)
    return [*train(model), seen(model)]


@equal
def one_block_three_times(wrap: Wrap) -> list[Any]:
    """Its statistics are written three times a call."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh())
    model = wrap(nn.Sequential(*[block] * 3, nn.Linear(6, 3)).double(), X, force="filter")
    return [*train(model), seen(model), {name: place for place, name in enumerate(model.state_dict())}]


class Names(nn.Module):
    """Runs its children, of which torch gives each once, and asks which are the same."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.act = nn.SiLU()
        self.again = self.act
        self.body = nn.Sequential(nn.Linear(6, 6), self.act)
        self.last, self.head = self.body, nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Any:
        for _, child in self.named_children():
            x = child(x)
        return x * (2 if self.body[1] is self.again and self.last in [self.body] else 3)


@equal
def children_under_two_names_run_once(wrap: Wrap) -> list[Any]:
    model = wrap(Names(), X)
    return [*train(model), seen(model)]


class Scaled(nn.Module):
    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Any:
        if self.training:
            with torch.no_grad():
                self.table.mul_(0.9).add_(0.1)
        return self.layer(x * self.table).tanh()


@equal
def one_buffer_of_two_modules(wrap: Wrap) -> list[Any]:
    torch.manual_seed(0)
    table = torch.linspace(0.5, 1.5, 6, dtype=torch.float64)
    layers = Scaled(table).double(), Scaled(table).double()
    layers[1].table = layers[0].table
    model = wrap(nn.Sequential(*layers, nn.Linear(6, 3, dtype=torch.float64)), X, force="filter")
    return [*train(model), seen(model)]
