"""The decision as a rank's program needs it: how inputs lie, how operators run, what is converted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.core.gathering import Gathering
from autopar.core.mesh import Mesh
from autopar.core.move import Move
from autopar.core.offload import OffloadedTensor
from autopar.core.placement import Layout
from autopar.core.precision import Precision
from autopar.core.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Program:
    """A graph's assignment, as rewriting needs it: layouts of inputs, a strategy for each operator, moves of
    each tensor.

    A strategy is a tuple of one-axis options, the major axis first. `moves` of a tensor form a tree rooted in
    the layout in which it is made; `outputs` are the layouts in which the graph's outputs leave it.
    `recompute` are ranges [first, stop) of operators, by number, whose insides are recomputed in backward.
    `gatherings` says when weights, or their casts, by name, are gathered that are stored in shards; those
    that it leaves out are kept from forward to backward. `offload` are tensors that wait for backward in host
    memory, in the order in which it needs them, the last one first; no part that is recomputed takes or makes
    one. `reduce` is what gradients of cast weights are summed in. `together` are groups of weights that one
    exchange gathers, at the first use of any, as another does their gradients; each has no move but that.
    `on_host` are weights that lie in the host's memory, with their gradients and the optimizer's state. Those
    that come `ahead` are copied while the operator before computes, or in backward the one after.
    """

    mesh: Mesh
    inputs: Mapping[str, Layout]
    strategies: Mapping[str, Strategy]
    moves: Mapping[str, tuple[Move, ...]]
    outputs: Mapping[str, Layout]
    recompute: tuple[tuple[int, int], ...] = ()
    gatherings: Mapping[str, Gathering] = field(default_factory=dict)
    offload: tuple[OffloadedTensor, ...] = ()
    reduce: Precision = Precision.FP32
    together: tuple[tuple[str, ...], ...] = ()
    on_host: tuple[str, ...] = ()
    ahead: tuple[str, ...] = ()

    def gathering(self, name: str) -> Gathering:
        """Moment at which the weight is gathered."""
        return self.gatherings.get(name, Gathering.KEEP)
