"""A parameter or buffer that forward reaches past its module is the graph's input, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.graph import InputKind
from autopar.errors import TraceError
from autopar.trace.export import trace

X = torch.linspace(-1, 1, 12).reshape(2, 6)


class Holder:
    """An object of the user's, no module."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Net(nn.Module):
    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 3)
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0]))
        self.holder = Holder(None)

    def forward(self, x: Tensor) -> Tensor:
        held = self.holder.value
        held = held[0] if isinstance(held, list) else held
        held = torch.from_numpy(held) if not isinstance(held, Tensor | None) else held
        out: Tensor = self.inner(x)
        return out if held is None else out + held.square().sum()


def held_by(net: Net) -> dict[str, Any]:
    weight = net.inner.weight
    return {
        "the parameter": weight,
        "in a list": [weight],
        "the buffer": net.weights,
        "a copy": weight.detach().clone(),
        "detached": weight.detach(),
        "data": weight.data,
        "a row": weight.detach()[1],
        "transposed": weight.T,
        "in NumPy": weight.detach().numpy(),
        "a part of the buffer": net.weights[:2],
    }


SAME = ("the parameter", "in a list", "the buffer")
REFUSED = ("detached", "data", "a row", "transposed", "in NumPy", "a part of the buffer")


def traced(what: str) -> Any:
    net = Net()
    net.holder.value = held_by(net)[what]
    return trace(net, (X,)).graph


@pytest.mark.parametrize("what", SAME)
def test_the_tensor_itself_is_the_models_input(what: str) -> None:
    graph = traced(what)
    assert not [item for item in graph.inputs if item.kind is InputKind.CONSTANT]
    (square,) = (item for item in graph.operators if item.target is torch.ops.aten.square.default)
    assert square.operands == ("weights" if what == "the buffer" else "inner_weight",)
    assert graph.specs[square.name].requires_grad == (what != "the buffer")


@pytest.mark.parametrize("what", REFUSED)
def test_a_part_of_its_memory_is_refused_with_the_line(what: str) -> None:
    with pytest.raises(TraceError) as error:
        traced(what)
    name = "buffer weights" if what.endswith("buffer") else "parameter inner.weight"
    assert "held.square().sum()" in error.value.where and name in error.value.found
    assert len(str(error.value)) <= 400


def test_a_copy_is_a_constant() -> None:
    assert [item.kind for item in traced("a copy").inputs].count(InputKind.CONSTANT) == 1


def test_what_a_loss_holds_of_the_model_is_the_models() -> None:
    net = Net()
    target = torch.tensor([0, 2])
    weights, weight = net.weights, net.inner.weight
    losses = {
        "a module": nn.CrossEntropyLoss(weight=weights),
        "a function": lambda out, y: F.cross_entropy(out, y, weight=weights),
        "a penalty": lambda out, y: F.cross_entropy(out, y, weight=weights) + weight.square().sum(),
    }
    for name, loss_fn in losses.items():
        graph = trace(net, (X, target), loss_fn=loss_fn).graph
        assert not [item for item in graph.inputs if item.kind is InputKind.CONSTANT], name
        assert any("weights" in item.operands for item in graph.operators), name


def test_a_weight_that_a_loss_shares_with_the_model_learns_by_both() -> None:
    class Tied(nn.Module):
        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, out: Tensor) -> Tensor:
            return out.sum() + self.weight.square().sum()

    net = Net()
    graph = trace(net, (X,), loss_fn=Tied(net.inner.weight)).graph
    assert not [item for item in graph.inputs if item.kind is InputKind.CONSTANT]
    assert sum("inner_weight" in item.operands for item in graph.operators) == 2
