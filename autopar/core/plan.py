"""The whole decision as data: how every input lies, how every operator runs, what is converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autopar.core.mesh import Mesh
from autopar.core.move import Move
from autopar.core.placement import Layout


@dataclass(frozen=True, slots=True)
class Program:
    """What rewriting needs: layouts of inputs, a strategy for each operator, moves of each tensor.

    A strategy is a tuple of one-axis options, the major axis first. `moves` of a tensor form a
    tree rooted in the layout in which it is made; `outputs` are the layouts in which the graph's
    outputs leave it.
    """

    mesh: Mesh
    inputs: Mapping[str, Layout]
    strategies: Mapping[str, tuple[Any, ...]]
    moves: Mapping[str, tuple[Move, ...]]
    outputs: Mapping[str, Layout]
