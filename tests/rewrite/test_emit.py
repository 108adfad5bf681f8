"""While a program is written each call is evaluated on meta tensors, equal ones once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from autopar.core.graph import TensorSpec
from autopar.ops import recurrent
from autopar.rewrite.emit import GraphEmitter

aten = torch.ops.aten


class Counting:
    """An operator that counts how often it is evaluated."""

    def __init__(self, target: Any) -> None:
        self.target, self.count = target, 0
        self.__name__ = self.__qualname__ = "counting"

    def __call__(self, *args: Any) -> Any:
        self.count += 1
        return self.target(*args)


def given(emitter: GraphEmitter, target: Any, shape: tuple[int, ...]) -> Tensor:
    x = emitter.placeholder("x", TensorSpec(shape, torch.float32, requires_grad=True))
    return emitter.meta[emitter.call(target, (x,))]


def test_calls_that_differ_by_sizes_follow_from_two_that_are_evaluated_and_others_are_anew() -> None:
    square = Counting(aten.square.default)
    first, second = given(GraphEmitter(), square, (3, 4)), given(GraphEmitter(), square, (3, 4))
    assert square.count == 2  # at small sizes and at large ones
    assert first.shape == second.shape == (3, 4)
    assert second.requires_grad
    assert second.grad_fn is None
    assert given(GraphEmitter(), square, (4, 3)).shape == (4, 3)
    assert square.count == 2
    with torch.no_grad():
        assert not given(GraphEmitter(), square, (3, 4)).requires_grad
    assert square.count == 4
    assert given(GraphEmitter(), square, (4, 4)).shape == (4, 4)
    assert square.count == 6


def test_a_view_that_only_other_strides_allow_is_refused() -> None:
    emitter = GraphEmitter()
    spec = TensorSpec((3, 4), torch.float32)
    x, turned = emitter.placeholder("x", spec), emitter.placeholder("y", TensorSpec((4, 3), torch.float32))
    assert emitter.shape(emitter.call(aten.view.default, (x, [12]))) == (12,)
    turned = emitter.call(aten.t.default, (turned,))
    assert emitter.shape(turned) == (3, 4)
    with pytest.raises(RuntimeError, match="view"):
        emitter.call(aten.view.default, (turned, [12]))


def test_several_results_and_the_default_dtype() -> None:
    emitter = GraphEmitter()
    x = emitter.placeholder("x", TensorSpec((6,), torch.int64))
    parts = emitter.call(aten.split.Tensor, (x, 4))
    assert [emitter.shape(part) for part in parts] == [(4,), (2,)]
    assert emitter.meta[emitter.call(aten.div.Tensor, (x, 2))].dtype == torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert emitter.meta[emitter.call(aten.div.Tensor, (x, 2))].dtype == torch.float64
    finally:
        torch.set_default_dtype(before)


def test_a_recurrent_layer_is_written_as_if_all_its_steps_were_run() -> None:
    """Shapes and order in memory, of which many steps have what two have."""
    for batch_first in (True, False):
        emitter, layer = GraphEmitter(), torch.nn.LSTM(3, 4, 2, batch_first=batch_first)
        for steps, samples in ((recurrent.MANY_STEPS + 1, 5), (2, 5)):
            shape = (samples, steps, 3) if batch_first else (steps, samples, 3)
            x = emitter.placeholder("x", TensorSpec(shape, torch.float32, requires_grad=True))
            states = [emitter.placeholder("h", TensorSpec((2, 5, 4), torch.float32)) for _ in range(2)]
            weights = [
                emitter.placeholder("w", TensorSpec(tuple(each.shape), torch.float32, requires_grad=True))
                for each in layer.parameters()
            ]
            options = True, 2, 0.0, True, False, batch_first
            given = emitter.call(aten.lstm.input, (x, states, weights, *options))
            real = layer(torch.zeros(shape))
            whole = [real[0], *real[1]]
            found = [emitter.meta[node] for node in given]
            assert [each.shape for each in found] == [each.shape for each in whole]
            assert found[0].stride() == whole[0].stride() and found[0].requires_grad
