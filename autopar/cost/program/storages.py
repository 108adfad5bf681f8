"""What is known of a step's storages: when each is made, who reads it, and who saves it for backward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.cost.program.priced_program import PricedProgram


@dataclass(frozen=True, slots=True)
class SavedStorage:
    """Memory that backward reads: `maker` is the operator where it first occurs, `keepers`
    those of the operators that keep it, none if it is recomputed, `for_weights` of those that keep it between
    the halves of a split backward too. A stage that has its `maker` and reaches to the operator `until` keeps
    it on the host."""

    name: str  # a tensor that lies in it
    nbytes: int
    maker: int
    keepers: tuple[int, ...]
    for_weights: tuple[int, ...]
    until: int | None = None


@dataclass(frozen=True, slots=True)
class Footing:
    """Memory of operators, one by one: storages saved for backward, bytes `own` of each operator that nobody
    else sees, `own_for_weights` those of them that stay between the halves of a split backward, bytes `held`
    of gradients then, and the `working` bytes beside saved ones while it runs, forward or backward, and those
    of `forward` alone."""

    saved: tuple[SavedStorage, ...]
    own: tuple[int, ...]
    own_for_weights: tuple[int, ...]
    held: tuple[int, ...]
    working: tuple[int, ...]
    forward: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Life:
    """Memory that is not at rest: `maker` makes it, -1 if users pass it; `uses` are the places of the
    operators that read it, `keepers` of those whose backward does. What ranks exchanged is `held` when an
    operator is recomputed."""

    nbytes: int
    maker: int
    held: bool
    uses: tuple[int, ...]
    keepers: tuple[int, ...]


def lives(priced: PricedProgram) -> tuple[Life, ...]:
    """All memory of the largest rank that comes and goes in a step, as if nothing were recomputed."""
    tape = priced.tape
    makers = dict.fromkeys((tape.root[value] for value in tape.users), (-1, True))
    uses: dict[int, list[int]] = {}
    keepers: dict[int, list[int]] = {}
    own, last = [], len(priced.graph.operators) - 1
    for call in tape.calls:
        memory, place = call.memory, min(call.place, last)  # outputs leave at the last
        makers |= {item.value: (place, not memory.repeats) for item in memory.gives if item.alias is None}
        for value in memory.takes:
            uses.setdefault(tape.root[value], []).append(place)
        for root in memory.saves:
            keepers.setdefault(root, []).append(place)
        if memory.own:
            own.append(Life(memory.own, place, not memory.repeats, (), (place,)))
    found = (
        Life(
            nbytes=tape.nbytes[root],
            maker=place,
            held=held,
            uses=tuple(dict.fromkeys(uses.get(root, ()))),
            keepers=tuple(dict.fromkeys(keepers.get(root, ()))),
        )
        for root, (place, held) in makers.items()
        if tape.nbytes[root] and root not in tape.gathered
    )
    return (*found, *own)
