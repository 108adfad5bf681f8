"""Values of options: each is checked, and turned from what the user says into what the search takes.

A reader takes what Python, JSON or the command line says, and raises InputError for what makes no sense. None
of them needs torch or a solver.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeVar

from autopar.core.cluster_keys import MOST_MEMORY_BYTES
from autopar.core.costs import named_optimizer
from autopar.core.force import Force, Parallelism, Pins
from autopar.core.mesh import Mesh
from autopar.core.schedule import ScheduleKind
from autopar.errors import InputError, show_value
from autopar.units import parse_bytes

if TYPE_CHECKING:
    from autopar.planning.asked.optimizer_state import OptimizerLike

AUTO = "auto"
MOST_COUNT = 1_000_000  # pipeline ranks or micro-batches
MOST_SECONDS = 366 * 24 * 3600  # a year: solvers and clocks take no more
PIPELINE = "pipeline"  # the kind of parallelism that no operator has
MOST_IMBALANCE = 1_000_000  # more devices than anyone has
SEQUENCE = "sequence"  # the field's word for a domain of tokens
_DIM = re.compile(r"-?\d{1,9}")
Choice = TypeVar("Choice", bound=Enum)


def as_said(value: Any) -> Any:
    """Take the value as it is."""
    return value


def read_mesh(mesh: Mesh | Sequence[int] | str | None) -> Mesh | tuple[Mesh, ...] | None:
    """Read a mesh: one that is made, its lengths, or a text such as 2x2; of 1+3, stages with meshes of their
    own, all with as many axes."""
    if isinstance(mesh, str) and "+" in mesh:
        meshes = [Mesh.parse(text) for text in mesh.split("+")]
        most = max(len(each.shape) for each in meshes)
        return tuple(with_axes(each, most) for each in meshes)
    if isinstance(mesh, str):
        return Mesh.parse(mesh)
    if mesh is None or isinstance(mesh, Mesh):
        return mesh
    try:
        text = "x".join(map(str, mesh))
    except ValueError:  # of a number that Python doesn't write
        text = "x".join(map(show_value, mesh))
    return Mesh.parse(text)


def with_axes(mesh: Mesh, count: int) -> Mesh:
    """The mesh with so many axes, by major ones of one device."""
    more = count - len(mesh.shape)
    return Mesh((1,) * more + mesh.shape, ((),) * more + mesh.shares if mesh.shares else ())


def read_force(force: Any) -> Force | Pins | None:
    """Read kinds of parallelism by name; None for pipelining, which no operator does."""
    if isinstance(force, (tuple, list)) and all(isinstance(kind, str) for kind in force):
        force = "+".join(force)
    if isinstance(force, (tuple, list)) and not all(isinstance(kind, Parallelism) for kind in force):
        raise _no_force(force)
    if not isinstance(force, str):
        kind: Force | Pins | None = tuple(force) if isinstance(force, list) else force
        return kind
    if force == PIPELINE:
        return None
    kinds = {**{kind.value: kind for kind in Parallelism}, SEQUENCE: Parallelism.DOMAIN}
    names = force.split("+")
    if not kinds.keys() >= set(names):
        raise _no_force(force)
    return kinds[force] if len(names) == 1 else tuple(kinds[name] for name in names)


def _no_force(found: object) -> InputError:
    return InputError(
        where="force",
        found=show_value(found),
        wanted=", ".join((*(kind.value for kind in Parallelism), SEQUENCE, PIPELINE)),
        remedy="choose one kind of parallelism, or join one for each axis by +",
    )


def read_memory(memory: float | str | None) -> int | None:
    """Read bytes, or a text with a unit; None is no cap."""
    if isinstance(memory, str):
        memory = parse_bytes(memory, where="memory")
    if memory is None or 1 <= memory < MOST_MEMORY_BYTES:
        return None if memory is None else int(memory)
    raise InputError(
        where="memory",
        found=f"{show_value(memory)} bytes",
        wanted="a size such as 2GiB",
        remedy='write memory="2GiB"',
    )


def read_time_limit(seconds: float | None) -> float | None:
    """Check the seconds of a search; None is no limit."""
    if seconds is None or 0 < seconds < MOST_SECONDS:
        return seconds
    raise InputError(
        where="--time-limit",
        found=f"{show_value(seconds)} s",
        wanted="more than 0 s, and less than a year",
        remedy="write --time-limit 60, or leave it out for no limit",
    )


def read_measure_seconds(seconds: float) -> float:
    """Check the seconds of measuring, which may be infinite."""
    if 0 <= seconds < MOST_SECONDS or seconds == math.inf:
        return float(seconds)
    raise InputError(
        where="--measure-seconds",
        found=f"{show_value(seconds)} s",
        wanted="at least 0 s, and less than a year",
        remedy="write --measure-seconds 60",
    )


def read_gap(gap: float) -> float:
    """Check the solver's relative gap."""
    if 0 <= gap < 1:
        return gap
    raise InputError(
        where="gap", found=show_value(gap), wanted="at least 0 and less than 1", remedy="write 0.01 for 1 %"
    )


def read_imbalance(imbalance: float | None) -> float | None:
    """Check the rows of the fullest rank of experts, in even shares; None for what is measured."""
    if imbalance is None:
        return None
    if 1 <= imbalance <= MOST_IMBALANCE:
        return float(imbalance)
    raise InputError(
        where="--imbalance",
        found=show_value(imbalance),
        wanted=f"1 to {MOST_IMBALANCE:,}: the fullest rank has no fewer rows than the others",
        remedy="write --imbalance 1.5, or leave it out",
    )


def read_optimizer(optimizer: "OptimizerLike") -> "OptimizerLike":
    """Check the name of an optimizer; whatever else has a state is measured later."""
    if isinstance(optimizer, str):
        named_optimizer(optimizer)
    return optimizer


def read_count(flag: str, value: int | str | None) -> int | None:
    """Read a count of at least 1; None where it is to be chosen."""
    if value is None or value == AUTO:
        return None
    if isinstance(value, str) and value.isdecimal() and len(value) <= len(str(MOST_COUNT)):
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MOST_COUNT:
        return value
    raise InputError(
        where=flag,
        found=show_value(value),
        wanted=f"at least 1 and at most {MOST_COUNT:,}, or auto",
        remedy=f"write {flag} 2",
    )


def read_choice(flag: str, choices: type[Choice], value: str) -> Choice:
    """Read a member of an enumeration by its value."""
    names = {str(choice.value): choice for choice in choices}
    if not isinstance(value, str) or value not in names:
        raise InputError(
            where=flag, found=show_value(value), wanted=", ".join(names), remedy="choose one of these"
        )
    return names[value]


def read_schedule(value: str) -> ScheduleKind | None:
    """Read a schedule by name; None is the fastest of all that can be run."""
    kinds = {kind.value: kind for kind in ScheduleKind}
    if value not in (*kinds, AUTO):
        raise InputError(
            where="--schedule",
            found=show_value(value),
            wanted=", ".join((*kinds, AUTO)),
            remedy="choose one of these",
        )
    return kinds.get(value)


def read_static(said: Sequence[str] | str | None) -> tuple[str, ...]:
    """Read names of tensors, in a text joined by commas: `edge_index,batch`."""
    if isinstance(said, str):
        said = [name.strip() for name in said.split(",")]
    names = tuple(said or ()) if said is None or isinstance(said, Iterable) else (said,)
    if not all(isinstance(name, str) and name for name in names):
        raise InputError(
            where="--static",
            found=show_value(said),
            wanted="names of arguments of forward or of buffers",
            remedy='write --static edge_index,batch, in Python static=("edge_index", "batch")',
        )
    return names


def read_batch_dims(
    said: Mapping[str | int, int | None] | str | None,
) -> Mapping[str | int, int | None] | None:
    """Read the dim of samples by input, from a mapping or a text: `input_0=1,labels=none`."""
    if isinstance(said, str):
        said = dict(map(_batch_dim, said.split(",")))
    if said is None:
        return None
    if not isinstance(said, Mapping):
        raise _wrong_dims(show_value(said))
    wrong = [
        f"{show_value(key)}: {show_value(dim)}"
        for key, dim in said.items()
        if not isinstance(key, str | int) or isinstance(dim, bool) or not isinstance(dim, int | None)
    ]
    if wrong or not said:
        raise _wrong_dims(", ".join(wrong) or "no input")
    return said


def _batch_dim(word: str) -> tuple[str | int, int | None]:
    name, _, text = (part.strip() for part in word.partition("="))
    if not name or not (_DIM.fullmatch(text) or text.lower() == "none"):
        raise _wrong_dims(show_value(word))
    return int(name) if _DIM.fullmatch(name) else name, None if text.lower() == "none" else int(text)


def _wrong_dims(found: str) -> InputError:
    return InputError(
        where="--batch-dims",
        found=found,
        wanted="for each input, by path or number, the dim that holds samples, or none",
        remedy="write --batch-dims input_0=1,input_1=none, in Python batch_dims={0: 1, 1: None}",
    )
