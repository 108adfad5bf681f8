"""Messages between stages whose meshes are unlike, or whose programs lay a value otherwise.

A value leaves a stage as one of its nodes and arrives as one of the next stage's: in each the graph's value
lies in some layout. Of the sender's axes

    S   every rank sends the rows that it has and the receiver wants
    P   every rank sends, and the receiver adds
    R B one rank sends, by turns

and of the receiver's S gets its rows, R and B get all, P is whole on the first rank and zero elsewhere. A
gradient travels the other way round, where a tensor's B stands for P and P for B.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import fx

from autopar.core.graph import Graph
from autopar.core.part import Part
from autopar.core.placement import B, Layout, P, Shard
from autopar.core.stage_borders import StageBorders, StageMessage
from autopar.errors import CheckError
from autopar.results.plan.plan import Plan
from autopar.rewrite.rank_program import RankProgram, rewrite
from autopar.rewrite.split_stages import StageProgram, crossing, one_stage, split
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import dims_of


class MeshSide(NamedTuple):
    """How a value lies on the mesh of one stage."""

    dims: Dims
    layout: Layout


class PartMessage(NamedTuple):
    """What a rank of one mesh sends to a rank of another: parts of the pieces that both have."""

    sender: int
    receiver: int
    sent: Part
    received: Part


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that crosses a cut: its number among what is sent, and among what is received."""

    name: str
    sent: int
    received: int
    source: Layout
    target: Layout
    learns: bool


def messages(name: str, source: MeshSide, target: MeshSide) -> Iterator[PartMessage]:
    """All messages that carry a value from one mesh to another, in one order on all ranks."""
    theirs, ours = _parts(name, source), _parts(name, target)
    for receiver, wanted in enumerate(ours):
        coordinate = target.dims.mesh.coordinate(receiver)
        if any(place and each == P for place, each in zip(coordinate, target.layout, strict=True)):
            continue  # zero there
        for sender in _senders(source, receiver):
            common = _common(theirs[sender], wanted)
            if common is not None:
                own = theirs[sender]
                yield PartMessage(sender, receiver, _within(common, own), _within(common, wanted))


def transposed(layout: Layout) -> Layout:
    """How the gradient of a value that lies so lies itself."""
    return tuple(P if each == B else B if each == P else each for each in layout)


def crossings(graph: Graph, starts: Sequence[int], cut: int, pair: Sequence[RankProgram]) -> list[Crossing]:
    """The values that cross the cut after stage `cut`, from one program to another."""
    before, after = pair
    there: dict[str, list[tuple[fx.Node, Layout]]] = {}
    for node in crossing(before, graph, starts, cut):
        for name, layout in before.named.get(node.name, ()):
            there.setdefault(name, []).append((node, layout))
    sent: dict[fx.Node, int] = {}
    found = []
    for number, node in enumerate(crossing(after, graph, starts, cut)):
        known = [(name, layout) for name, layout in after.named.get(node.name, ()) if name in there]
        if not known:
            raise CheckError(
                where=f"cut before operator {starts[cut + 1]}",
                found=f"{node.name}, which is no value of the stage before",
                wanted="values of the graph, which stages on unlike meshes can exchange",
                remedy="plan stages of one mesh, or other numbers of them",
            )
        name, target = known[0]
        origin, source = min(there[name], key=lambda each: (each[1] != target, P in each[1]))
        place = sent.setdefault(origin, len(sent))
        found.append(Crossing(name, place, number, source, target, graph.specs[name].requires_grad))
    return found


def sent_nodes(
    graph: Graph, starts: Sequence[int], cut: int, before: RankProgram, values: Sequence[Crossing]
) -> list[fx.Node]:
    """The nodes of a rank's program that leave a stage, in the order of `values`' numbers."""
    nodes = crossing(before, graph, starts, cut)
    of = {(name, layout): node for node in nodes for name, layout in before.named.get(node.name, ())}
    found = {each.sent: of[each.name, each.source] for each in values}
    return [found[number] for number in range(len(found))]


def borders(
    place: int,
    here: Dims,
    before: tuple[Dims, Sequence[Crossing]] | None,
    after: tuple[Dims, Sequence[Crossing]] | None,
) -> StageBorders:
    """The messages of the rank at `place` of a stage's mesh with the stages `before` and `after` it."""
    received, sent, received_back, sent_back = (list[StageMessage]() for _ in range(4))
    for each, other in _each_with(before):
        received += _arriving(place, each.received, _onward(each, other, here))
        sent_back += _leaving(place, each.received, _back(each, other, here))
    for each, other in _each_with(after):
        sent += _leaving(place, each.sent, _onward(each, here, other))
        received_back += _arriving(place, each.sent, _back(each, here, other))
    return StageBorders(tuple(received), tuple(sent), tuple(received_back), tuple(sent_back))


def _each_with(neighbour: tuple[Dims, Sequence[Crossing]] | None) -> Iterator[tuple[Crossing, Dims]]:
    """The values that cross to or from a neighbouring stage, if there is one, with the dims there."""
    if neighbour is not None:
        dims, values = neighbour
        yield from ((each, dims) for each in values)


def _arriving(place: int, number: int, items: Iterator[PartMessage]) -> Iterator[StageMessage]:
    """Messages that the rank at `place` receives, of the value with this `number`."""
    return (StageMessage(number, item.sender, item.received) for item in items if item.receiver == place)


def _leaving(place: int, number: int, items: Iterator[PartMessage]) -> Iterator[StageMessage]:
    """Messages that the rank at `place` sends, of the value with this `number`."""
    return (StageMessage(number, item.receiver, item.sent) for item in items if item.sender == place)


def _onward(value: Crossing, sender: Dims, receiver: Dims) -> Iterator[PartMessage]:
    """The messages of a value from one stage to the next."""
    return messages(value.name, MeshSide(sender, value.source), MeshSide(receiver, value.target))


def _back(value: Crossing, sender: Dims, receiver: Dims) -> Iterator[PartMessage]:
    """The messages of a value's gradient, from the value's receivers to its senders."""
    if value.learns:
        source = MeshSide(receiver, transposed(value.target))
        yield from messages(value.name, source, MeshSide(sender, transposed(value.source)))


def _parts(name: str, side: MeshSide) -> list[Part]:
    mesh = side.dims.mesh
    return [side.dims.part(name, side.layout, mesh.coordinate(rank)) for rank in range(mesh.num_devices)]


def _senders(source: MeshSide, receiver: int) -> Iterator[int]:
    """The ranks that send to a receiver what they have of what it wants."""
    mesh = source.dims.mesh
    choices = [
        range(size) if isinstance(each, Shard) or each == P else (receiver % size,)
        for size, each in zip(mesh.shape, source.layout, strict=True)
    ]
    yield from (mesh.rank(coordinate) for coordinate in itertools.product(*choices))


def _common(one: Part, other: Part) -> Part | None:
    """What two parts of a tensor have in common; None if nothing."""
    if one.atoms != other.atoms:
        raise CheckError(
            where="a value between stages",
            found=f"parts of {one.atoms} and of {other.atoms}",
            wanted="parts of the same dims",
            remedy="report this model",
        )
    rows = tuple(
        tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(mine, theirs, strict=True))
        for mine, theirs in zip(one.rows, other.rows, strict=True)
    )
    empty = any(start >= stop for dim in rows for start, stop in dim)
    return None if empty else Part(one.atoms, rows)


def _within(common: Part, own: Part) -> Part:
    """A part of a tensor as a part of a rank's own piece, in which it lies."""
    atoms = tuple(tuple(stop - start for start, stop in dim) for dim in own.rows)
    rows = tuple(
        tuple((a - c, b - c) for (a, b), (c, _) in zip(mine, theirs, strict=True))
        for mine, theirs in zip(common.rows, own.rows, strict=True)
    )
    return Part(atoms, rows)


class UnlikeStages(NamedTuple):
    """What one rank has where each stage has a program of its own: its program of the whole graph, the
    stages, its own as it runs it and the others as any rank of theirs does, and its messages."""

    whole: RankProgram
    stages: Sequence[StageProgram]
    borders: StageBorders


def unlike_stages(
    graph: Graph, plan: Plan, mine: int, place: int, *, device: torch.device | None, exact_random: bool
) -> UnlikeStages:
    """The programs and messages of the rank at `place` of the mesh of stage `mine`."""
    starts, count = plan.pipeline.starts, plan.pipeline.num_stages
    known: dict[int, tuple[Dims, RankProgram]] = {}
    for program in plan.programs:
        if id(program) not in known:
            dims = dims_of(graph, program.mesh)
            known[id(program)] = dims, rewrite(graph, program, dims, rank=0, exact_random=exact_random)
    sides = [known[id(program)] for program in plan.programs]
    dims = sides[mine][0]
    whole = rewrite(graph, plan.programs[mine], dims, rank=place, device=device, exact_random=exact_random)
    between = {
        cut: crossings(graph, starts, cut, (sides[cut][1], sides[cut + 1][1]))
        for cut in (mine - 1, mine)
        if 0 <= cut < count - 1
    }
    leaving = sent_nodes(graph, starts, mine, whole, between[mine]) if mine in between else []
    stages = [
        one_stage(whole, graph, starts, stage, leaving)
        if stage == mine
        else split(sides[stage][1], graph, starts)[stage]
        for stage in range(count)
    ]
    before = (sides[mine - 1][0], between[mine - 1]) if mine - 1 in between else None
    after = (sides[mine + 1][0], between[mine]) if mine in between else None
    return UnlikeStages(whole, stages, borders(place, dims, before, after))
