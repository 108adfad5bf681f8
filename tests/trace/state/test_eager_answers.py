"""Code that is traced hears what eager training would tell it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime.programs.guards import Guard
from autopar.trace.export import trace
from autopar.trace.reads.attribute_reads import recording

KINDS = {type: 4}


def derived() -> Any:
    """What a class has of a metaclass that is made here."""

    class Meta(type):
        def __new__(cls, name: str, bases: Any, body: Any) -> Any:
            return super().__new__(cls, name, bases, {**body, "k": 3})

    class Made(metaclass=Meta):
        k: int

    return Made.k


class OfKinds(nn.Module):
    """Asks for the types of tensors, and of what else there is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Tensor, kinds: Any = (Tensor,)) -> Tensor:
        h: Tensor = self.layer(x)
        asked = (
            type(x) is torch.Tensor,
            type(h) in kinds,
            {Tensor: 1, nn.Parameter: 2}.get(type(self.shift)) == 1,
            type(self.layer.weight) is nn.Parameter,
            type(self.training) is bool and isinstance(Tensor, type) and not isinstance(x, type),
            issubclass(type(OfKinds), type),
            type("Made", (), {"a": 1}).a == 1,
            type(self) is OfKinds,
            type(int) is type and type(type) is type and type is type(type(self.training)),
            KINDS.get(type(int)) == 4 and {type: 4}.get(type(str)) == 4 and type in {type(int)},
            repr(type) == "<class 'type'>" and type.__name__ == "type" and isinstance(type, type),
            derived() == 3,
        )
        return h * sum(2**place for place, answer in enumerate(asked) if answer)


def test_types_of_tensors_are_those_of_eager_training() -> None:
    model, x = OfKinds(), torch.ones(2, 3)
    with recording() as reads:
        graph = trace(model, (x,)).graph
    assert graph.operators[-1].args[1] == 2**12 - 1
    assert torch.equal(model(x), model.layer(x) * (2**12 - 1))
    assert "type" not in globals()
    assert Guard(reads, own=model.modules()).holds()


def test_no_module_keeps_the_answers_if_a_trace_fails() -> None:
    with pytest.raises(Exception, match="divi"):
        trace(Failing(), (torch.ones(2),))
    assert "type" not in globals()


class Failing(nn.Module):
    """Raises in forward."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 // 0)
