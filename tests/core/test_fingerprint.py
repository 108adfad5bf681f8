"""Fingerprints: equal for graphs that are planned alike, and a difference is named where it is."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.core.fingerprint import Fingerprint, fingerprint_of
from autopar.trace.export import trace


class Net(nn.Module):
    def __init__(self, width: int = 8, activation: nn.Module | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 4)
        self.activation = activation or nn.ReLU()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return self.activation(self.linear(x)).sum()


def of(model: nn.Module, x: Tensor) -> Fingerprint:
    return fingerprint_of(trace(model, (x,)).graph)


def test_values_make_no_difference() -> None:
    first, second = of(Net(), torch.zeros(2, 8)), of(Net(), torch.ones(2, 8))
    assert first == second and first.digest == second.digest
    assert first.difference(second) is None


def test_each_thing_that_a_plan_depends_on_makes_a_difference() -> None:
    planned = of(Net(), torch.zeros(2, 8))
    frozen = Net()
    frozen.linear.bias.requires_grad_(False)
    others = {
        "shape": of(Net(), torch.zeros(3, 8)),
        "dtype": of(Net().double(), torch.zeros(2, 8).double()),
        "width": of(Net(7), torch.zeros(2, 7)),
        "operator": of(Net(activation=nn.Tanh()), torch.zeros(2, 8)),
        "argument": of(Net(activation=nn.LeakyReLU(0.2)), torch.zeros(2, 8)),
        "another argument": of(Net(activation=nn.LeakyReLU(0.3)), torch.zeros(2, 8)),
        "gradient": of(frozen, torch.zeros(2, 8)),
        "no more operators": of(Net(activation=nn.Identity()), torch.zeros(2, 8)),
    }
    digests = {planned.digest} | {other.digest for other in others.values()}
    assert len(digests) == len(others) + 1
    assert all(other.difference(planned) is not None for other in others.values())


def test_a_difference_is_named_where_it_is() -> None:
    planned, wider = of(Net(), torch.zeros(2, 8)), of(Net(), torch.zeros(3, 8))
    difference = wider.difference(planned)
    assert difference is not None
    assert difference.where.startswith("input ")
    assert "float32[3,8]" in difference.here and "float32[2,8]" in difference.planned
    tanh = of(Net(activation=nn.Tanh()), torch.zeros(2, 8)).difference(planned)
    assert tanh is not None and tanh.where.startswith("operator ")
    assert "aten.tanh" in tanh.here and "aten.relu" in tanh.planned
    shorter = of(Net(activation=nn.Identity()), torch.zeros(2, 8))
    assert shorter.difference(planned) is not None and planned.difference(shorter) is not None


def test_the_end_of_the_shorter_graph_is_told() -> None:
    difference = Fingerprint(operators=("a",)).difference(Fingerprint(operators=("a", "b")))
    assert difference == ("operator 1", "nothing", "b")
