"""What a rule wrote for one rank, read once: no device changes its calls, exchanges and tensors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from autopar.core.graph import Call, TensorSpec
from autopar.core.operator_facts import facts_of
from autopar.cost.operators.halo_convolution import strip_calls
from autopar.cost.operators.lowering import LoweredOperator
from autopar.cost.operators.ring_attention import ring_calls
from autopar.cost.operators.saved import SavedTensors, find_saved, stand_ins
from autopar.rewrite.emit import LocalCall


@dataclass(frozen=True, slots=True)
class RankCalls:
    """Calls of one rank: its `own` that torch has, `doubles` of those that exchange, `strips` that they cut,
    masks that are `drawn`. Exchanges within are a target, its arguments and a tensor each."""

    lowered: LoweredOperator
    operands: tuple[TensorSpec, ...]
    own: tuple[Call, ...]
    doubles: tuple[Call, ...]
    strips: tuple[Call, ...]
    drawn: tuple[Call, ...]
    exchanges: Sequence[tuple[Any, Any, Any]]
    saved: SavedTensors

    @staticmethod
    def of(lowered: LoweredOperator, device: str) -> RankCalls:
        """Read what a rule wrote for a rank of this type of `device`."""
        emitter, doubles = lowered.emitter, stand_ins(lowered.emitter)
        made = (*emitter.written, *doubles)
        return RankCalls(
            lowered=lowered,
            operands=lowered.operands,
            own=_local_calls(emitter.written),
            doubles=_local_calls(doubles),
            strips=(*strip_calls(emitter), *ring_calls(emitter)),
            drawn=tuple(item.call for item in emitter.written if not item.is_local),
            exchanges=[(target, emitter.described(args), spec) for target, args, spec in emitter.collectives],
            saved=find_saved(emitter, made, lowered.values, lowered.results, device),
        )


def _local_calls(written: Iterable[LocalCall]) -> tuple[Call, ...]:
    """Torch's own calls, or what they are made of where that is declared."""
    found: list[Call] = []
    for call in (item.call for item in written if item.is_local):
        within = facts_of(call.target).within
        found.extend(within(call.args) if within else (call,))
    return tuple(found)
