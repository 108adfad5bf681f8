"""What `--shard-state` asks for: which layouts weights may have, how they may be gathered, and what is said
about it in the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from autopar.convert.moves import gathers
from autopar.core.gathering import Gathering, ShardState
from autopar.core.graph import Graph, InputKind
from autopar.core.move import Move
from autopar.core.placement import Layout, Shard
from autopar.core.program import Program
from autopar.sharding.atoms import Dims
from autopar.solve.choices.gather_phases import completes

_WORDS = {Gathering.REGATHER: "gathered again in backward", Gathering.ONCE: "gathered once a step"}


def ways(level: ShardState, *, stored: bool) -> tuple[Gathering, ...]:
    """Ways to gather weights in shards; where they are `stored` so already, at least one."""
    return level.gatherings or ((Gathering.KEEP,) if stored else ())


def most_sharded(layouts: Sequence[Layout]) -> list[Layout]:
    """Layouts with shards on the most axes: no other has shards there and on one more."""
    sharded = {layout: _axes(layout) for layout in layouts}
    return [layout for layout in layouts if not any(sharded[layout] < axes for axes in sharded.values())]


def _axes(layout: Layout) -> frozenset[int]:
    return frozenset(axis for axis, place in enumerate(layout) if isinstance(place, Shard))


def when(program: Program, name: str, move: Move) -> str:
    """Words of a plan on when a weight's gather is made, such as ", gathered once a step"; "" for other
    moves."""
    words = _WORDS.get(program.gathering(name)) if gathers(move) else None
    return f", {words}" if words else ""


def gathering_notes(graph: Graph, program: Program) -> list[str]:
    """Notes on the number of weights in shards, by the way in which they are gathered."""
    weights = {item.name for item in graph.inputs if item.kind is InputKind.PARAMETER}
    counts = Counter(
        program.gathering(name)
        for name in weights | graph.cast_weights
        if any(map(completes, program.moves.get(name, ())))
    )
    words = {Gathering.KEEP: "kept from forward to backward", **_WORDS}
    found = ", ".join(f"{counts[way]} {words[way]}" for way in Gathering if counts[way])
    together = sum(map(len, program.together))
    count = len(program.together)
    found += f"; {together} of them by {count} exchange{'s' * (count > 1)}" if together else ""
    return [f"weights stored in shards: {found}"] if found else []


def whole_notes(graph: Graph, dims: Dims, program: Program, level: ShardState) -> list[str]:
    """The weights that could not be stored in shards on every axis although that is forced."""
    if not level.is_forced:
        return []
    mesh = dims.mesh
    long = frozenset(axis for axis in mesh.axes if mesh.shape[axis] > 1)
    found = [
        item.target
        for item in graph.inputs
        if item.kind is InputKind.PARAMETER and item.spec.requires_grad
        if not _axes(program.inputs[item.name]) >= long
    ]
    return [f"not in shards on every axis, for want of long dims: {', '.join(found)}"] if found else []
