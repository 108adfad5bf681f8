"""Calls with local inputs: every rank passes its own samples, and the global call is told from them.

    prepare   the global batch of 7  --> a program, and the rows that each rank loads
    call      rank 0 passes 4 rows --.
              rank 1 passes 3 rows ---+-> the global batch of 7 again, in shapes, to look up or make a program

The ranks don't ask each other which batch it is. So two global batches from which some rank would
load parts of equal shapes are refused when the second is prepared. The rows that the ranks load of a
batch of one size are those of the first program for it; every later one must do with them.

Structure, as a graph's edges, every rank passes whole; or, once it is known, like it on the meta device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from autopar.core.samples import Samples
from autopar.errors import InputError
from autopar.runtime.tree.serial_model import without_memory
from autopar.trace.call.call_signature import Arguments, require_values
from autopar.trace.values.structure import digest_of

Key = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A global call, with tensors that hold no memory, and by place the digests of its structure: those of
    every such call that was prepared."""

    call: Arguments
    structure: dict[int, set[str]] = field(default_factory=dict)

    def check(self, place: int, given: torch.Tensor) -> None:
        """Raise InputError for a structure without values, where it may be several."""
        digests = self.structure[place]
        if given.is_meta and len(digests) > 1:
            raise InputError(
                where=f"input {self.call.paths[place]}",
                found=f"a tensor on the meta device for one of {len(digests)} graphs of its shape",
                wanted="the graph itself, since several were prepared",
                remedy="pass the tensor with its values",
            )

    def digest(self, place: int, given: torch.Tensor) -> str:
        """The digest of a structure as it is given, on the meta device any that is known."""
        return min(self.structure[place]) if given.is_meta else digest_of(given)


class LocalInputs:
    """The global batches that one rank knows of, and the rows that each rank loads of them."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._rows: dict[int, tuple[range, ...]] = {}  # by the number of samples of the global batch
        self._known: dict[tuple[int, Key], PreparedCall] = {}  # by rank and local key
        self._shapes: dict[Key, str] = {}  # global key -> what this rank passes, for errors

    def rows(self, size: int) -> range:
        """The rows of a global batch of `size` samples that this rank loads.

        Raises InputError for a size that no program was made for.
        """
        if size not in self._rows:
            raise InputError(
                where="batch_size",
                found=str(size),
                wanted="a global batch that is prepared: " + " or ".join(map(str, self._rows)),
                remedy="call parallel.prepare(...) on every rank with an example of that batch",
            )
        return self._rows[size][self._rank]

    def settle(self, samples: Samples) -> Samples:
        """`samples` with the rows that are loaded already; raises InputError where they don't do."""
        rows = self._rows.setdefault(samples.size, samples.rows)
        for rank, (loaded, needed) in enumerate(zip(rows, samples.rows, strict=True)):
            if needed.start < loaded.start or needed.stop > loaded.stop:
                raise InputError(
                    where=f"a second kind of call with a global batch of {samples.size}",
                    found=f"a program that takes rows {_show(needed)} on rank {rank}",
                    wanted=f"one that takes rows {_show(loaded)} alone, which the rank loads",
                    remedy='prepare first the call that needs more rows, or parallelize with inputs="global"',
                )
        exact = samples.exact if rows == samples.rows else frozenset[str]()
        return replace(samples, rows=rows, exact=exact)

    def learn(self, call: Arguments, samples: Samples | None, structure: frozenset[int]) -> None:
        """Know the global `call` again by what this rank passes of it; `structure` are places in it."""
        template = replace(
            call,
            tensors=tuple(
                tensor.to("meta") if place in structure else without_memory(tensor)
                for place, tensor in enumerate(call.tensors)
            ),
        )
        ranks = range(len(samples.rows)) if samples else (self._rank,)
        shapes_of = {rank: _shapes(call, samples, rank) for rank in ranks}
        keys = {rank: (rank, call.key_for(shapes)) for rank, shapes in shapes_of.items()}
        for rank, shapes in shapes_of.items():
            known = self._known[keys[rank]].call if keys[rank] in self._known else call
            if known.key != call.key:
                raise InputError(
                    where=f"rank {rank} of the parallel module with local inputs",
                    found=f"parts of shapes {_list(call, shapes)} of two global batches, "
                    f"{_list(known, _whole(known))} and {_list(call, _whole(call))}",
                    wanted="global batches whose parts differ in shape on every rank",
                    remedy="prepare batch sizes that are further apart, or fill the smaller batch up",
                )
        before = self._known.get(keys[self._rank], PreparedCall(call)).structure
        digests = {place: before.get(place, set()) | {digest_of(call.tensors[place])} for place in structure}
        self._known |= dict.fromkeys(keys.values(), PreparedCall(template, digests))
        self._shapes[call.key] = _list(call, shapes_of[self._rank])

    def whole(self, call: Arguments) -> Arguments:
        """The global call of which this is the rank's part, with tensors that hold no memory."""
        known = self._known.get((self._rank, call.key))
        if known is None:
            raise InputError(
                where=f"call of the parallel module on rank {self._rank}",
                found=_list(call, _whole(call)),
                wanted="this rank's samples: " + (" or ".join(self._shapes.values()) or "none is prepared"),
                remedy="load them with parallel.sampler(dataset), or call parallel.prepare(...) on every "
                "rank with an example of a new global batch",
            )
        require_values(call, but=known.structure)
        for place in known.structure:
            known.check(place, call.tensors[place])
        pairs = zip(known.call.tensors, call.tensors, strict=True)
        whole = [
            part if place in known.structure else full.detach().requires_grad_(part.requires_grad)
            for place, (full, part) in enumerate(pairs)
        ]
        return replace(known.call, tensors=tuple(whole))

    def structure(self, call: Arguments) -> Iterator[tuple[str, bytes]]:
        """Structure of this rank's part of a call that ranks must pass alike: a name and a digest for each
        input."""
        known = self._known.get((self._rank, call.key))
        for place in sorted(known.structure) if known else ():
            assert known is not None
            yield f"input {call.paths[place]}", known.digest(place, call.tensors[place]).encode()


def _shapes(call: Arguments, samples: Samples | None, rank: int) -> list[tuple[int, ...]]:
    """The shapes of the parts that `rank` passes."""
    pairs = zip(call.paths, _whole(call), strict=True)
    return [samples.shape(path, shape, rank) if samples else shape for path, shape in pairs]


def _whole(call: Arguments) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in call.tensors]


def _list(call: Arguments, shapes: list[tuple[int, ...]]) -> str:
    rows = zip(call.paths, call.tensors, shapes, strict=True)
    found = (
        f"{path} {str(tensor.dtype).removeprefix('torch.')}{list(shape)}" for path, tensor, shape in rows
    )
    return ", ".join(found) or "no tensors"


def _show(rows: range) -> str:
    return f"[{rows.start}, {rows.stop})"
