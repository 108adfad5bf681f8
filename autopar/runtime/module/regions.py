"""Regions of an input that a rank's program reads: a box of the global tensor.

    volume of 8 planes on 4 ranks, split by planes      rank 1 reads planes [2, 4)

Rows that a window needs of its neighbours aren't in it: ranks send each other these, as halos. Nothing else
of an input is read where ranks pass their own samples, so a file that is mapped into memory is read in parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.core.graph import InputKind
from autopar.errors import InputError
from autopar.runtime.executable import Executable, InputPart, StagedExecutable


def region_of(
    name: str, made: Executable | StagedExecutable, *, batch: int | None, takes_steps: bool
) -> tuple[slice, ...]:
    """The smallest box that has all that this rank's program reads of the input `name`.

    Steps read all samples of a `batch`, by micro-batches. Raises InputError for another name.
    """
    users = [item for item in _inputs(made) if item.kind is InputKind.USER]
    parts = [item for item in users if item.target == name]
    if not parts:
        known = sorted({item.target for item in (*users, *_all_users(made))})
        if name in known:  # another stage's
            return ()
        raise InputError(
            where="region of the parallel module",
            found=f"input {name}",
            wanted=f"one of {', '.join(known) or 'no inputs'}",
            remedy="name it as here: positional inputs by their number, those of the loss at their end",
        )
    box = [_hull(item.part.span(dim) for item in parts) for dim in range(len(parts[0].spec.shape))]
    if takes_steps and batch is not None and box:
        box[0] = slice(0, batch)
    return tuple(box)


def _inputs(made: Executable | StagedExecutable) -> Sequence[InputPart]:
    if isinstance(made, Executable):
        return made.inputs
    return [item for stage in made.stages for item in stage.inputs]


def _all_users(made: Executable | StagedExecutable) -> Iterable[InputPart]:
    return [item for item in made.inputs if item.kind is InputKind.USER]


def _hull(spans: Iterable[range]) -> slice:
    rows = [span for span in spans if len(span)]
    if not rows:
        return slice(0, 0)
    return slice(min(span.start for span in rows), max(span.stop for span in rows))
