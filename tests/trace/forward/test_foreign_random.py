"""Random numbers that torch doesn't draw are refused by line, wherever their generator is held."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from random import gauss
from typing import Any

import numpy as np
import pytest
import sympy.core.random
import torch
from numpy.random import uniform
from torch import Tensor, nn

from autopar.errors import TraceError
from autopar.trace.export import trace
from autopar.trace.forward import foreign_random

OWN = random.Random(3)
NUMPYS_OWN = np.random.default_rng(3)


class Drawing(nn.Module):
    """Multiplies by what `draw` gives."""

    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.draw()


DRAWS: dict[str, Callable[[], Any]] = {
    "random.random": lambda: random.random(),
    "imported by name": lambda: gauss(0, 1),
    "an own Random": lambda: OWN.random(),
    "numpy.random": lambda: np.random.randint(1, 5),
    "NumPy's by name": lambda: float(uniform()),
    "an own NumPy Generator": lambda: NUMPYS_OWN.random(),
    "a NumPy Generator without a seed": lambda: np.random.default_rng().random(),
    "a Random without a seed": lambda: random.Random().random(),
    "a shuffle": lambda: random.sample([1, 2, 3], 1)[0],
    "the system's": lambda: random.SystemRandom().random(),
    "torch.manual_seed": lambda: torch.manual_seed(0) and torch.rand(4),
    "torch.set_rng_state": lambda: torch.set_rng_state(torch.arange(5056).byte()) or 1,
}


def states() -> list[str]:
    generators = (random.getstate(), OWN.getstate(), np.random.get_state(), NUMPYS_OWN.bit_generator.state)
    return [repr(state) for state in generators] + [repr(torch.get_rng_state().tolist())]


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_that_a_program_would_not_repeat_is_refused_with_its_line_and_leaves_no_trace(
    name: str,
) -> None:
    model, x = Drawing(DRAWS[name]), torch.randn(2, 4)
    before = states()
    with pytest.raises(TraceError, match=r"test_foreign_random\.py:\d+: ") as refusal:
        trace(model, (x,))
    number = DRAWS[name].__code__.co_firstlineno
    assert f"test_foreign_random.py:{number}: " in str(refusal.value)
    assert len(str(refusal.value)) <= 400
    assert states() == before


@pytest.mark.parametrize("name", ["random.random", "an own Random", "numpy.random", "an own NumPy Generator"])
def test_a_generator_of_a_module_is_known_in_a_frozen_heap_too(name: str) -> None:
    """What was there before `gc.freeze` the collector lists no more; the conftest of these tests calls it."""
    assert all(each is not OWN for each in gc.get_objects())
    with pytest.raises(TraceError, match="drawn once"):
        trace(Drawing(DRAWS[name]), (torch.randn(2, 4),))


def test_what_a_tool_draws_for_itself_is_nobodys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sympy, which counts torch's symbols, has several generators; none makes the trace look for a line."""
    own = [item for item in vars(sympy.core.random).values() if isinstance(item, random.Random)]
    monkeypatch.setattr(foreign_random, "_find_line", lambda *_: pytest.fail("a line is looked for"))
    assert own and foreign_random.without_draws(lambda: [item.random() for item in own])


def test_the_seed_that_is_set_already_is_refused_all_the_same() -> None:
    torch.manual_seed(0)
    with pytest.raises(TraceError, match="torch's seed"):
        trace(Drawing(lambda: torch.manual_seed(0) and 1.0), (torch.randn(2, 4),))


class LayerDrop(nn.Module):
    """As the remedy says."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            keep = torch.rand(()) > 0.5
            x = x + keep * layer(x)
        return x


def test_torch_draws_and_fixed_numbers_are_traced_and_move_no_state() -> None:
    fixed, x = Drawing(lambda: np.random.default_rng(7).random()), torch.randn(2, 4)
    layers = LayerDrop()
    before = states()
    graph = trace(layers, (x,)).graph
    assert sum("rand" in str(item.target) for item in graph.operators) == 3
    trace(fixed, (x,))
    assert states() == before


@pytest.mark.parametrize("draw_one", [random.random, np.random.rand, lambda: torch.rand(1)])
def test_what_another_thread_draws_meanwhile_is_not_the_models(draw_one: Callable[[], Any]) -> None:
    over = threading.Event()

    def draw() -> None:
        while not over.is_set():
            draw_one()

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        trace(Drawing(lambda: 2.0), (torch.randn(2, 4),))
    finally:
        over.set()
        thread.join()
