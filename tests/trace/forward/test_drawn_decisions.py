"""LayerDrop is refused by name, and traced where its probability decides whatever is drawn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace.call.user_source import user_line
from autopar.trace.export import trace


class Dropping(nn.Module):
    """Layers, each of which may be left out."""

    def __init__(self, probability: float, leaves_out: Callable[[float], object]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.probability, self.leaves_out = probability, leaves_out

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.leaves_out(self.probability):
                x = layer(x)
        return x


WAYS: list[Callable[[float], object]] = [
    lambda p: torch.rand([]) < p,
    lambda p: not torch.rand(1) >= p,
    lambda p: not torch.rand(()) > p if p > 0 else False,
    lambda p: torch.rand([]).item() < p if p not in (0, 1) else p,
    lambda p: torch.empty(()).uniform_(0, 1) < p if p not in (0, 1) else p,
    lambda p: all(torch.rand(2) < p) if p not in (0, 1) else p,
    lambda p: torch.stack([torch.rand(())]).topk(1)[0] < p if p not in (0, 1) else p,
]


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_a_draw_that_decides_is_refused_at_its_line(way: int) -> None:
    with pytest.raises(TraceError, match=r"test_drawn_decisions\.py:\d+: .*random number, as LayerDrop"):
        trace(Dropping(0.1, WAYS[way]), (torch.randn(4, 3),))


@pytest.mark.parametrize("way", range(len(WAYS)))
@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_what_every_draw_decides_alike_is_traced(way: int, probability: float) -> None:
    graph = trace(Dropping(probability, WAYS[way]), (torch.randn(4, 3),)).graph
    assert sum("linear" in str(item.target) for item in graph.operators) == 2 * (1 - probability)


def test_the_way_out_is_traced() -> None:
    class Chosen(Dropping):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.where(torch.rand(()) < self.probability, x, layer(x))
            return x

    assert trace(Chosen(0.1, WAYS[0]), (torch.randn(4, 3),)).graph.outputs


def test_the_line_of_a_library_of_models_is_shown_where_there_is_no_users() -> None:
    code = compile("def forward():\n    raise ValueError\n", "/lib/site-packages/models/layers.py", "exec")
    names: dict[str, Callable[[], None]] = {}
    exec(code, names)
    try:
        eval(compile("forward()", "/lib/site-packages/torch/run.py", "eval"), names)
    except ValueError as error:
        error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None
        assert user_line(error).startswith("/lib/site-packages/models/layers.py:2")
