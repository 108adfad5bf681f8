"""What a rank says where all ranks meet: the call that it makes, and parts of what they have in common.

rank 0   12 forward, lr 0.1 --.
rank 1   12 forward, lr 0.5 --+-> lr on rank 1 (0.5) unlike that on rank 0 (0.1)

Lines of code aren't compared, since ranks may make one call from several places; errors show them.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from itertools import zip_longest
from typing import NamedTuple

from autopar.errors import InputError
from autopar.trace.call.user_source import shown_path

DIGEST_BYTES = 7  # a number that fits an int64 with either sign
BACKWARD = "backward of"  # begins the name of a call that autograd makes
LONGEST_SHOWN_VALUE = 60  # characters of a value that an error repeats
REMEDY = (
    "call state_dict, and whatever reads sharded tensors, on every rank, and save on one; "
    "change what forward reads on every rank alike"
)
_PAIRS = (
    "call the module as often on every rank, and take as many backwards: loaders of one length, no early end"
)
_SAME_CALLS = "make the same calls on all ranks, in the same modes"


class CollectiveCall(NamedTuple):
    """A collective call, and the line of the user's code that makes it."""

    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.name} ({self.place})"

    @property
    def place(self) -> str:
        """File and line, as errors show them."""
        return f"{shown_path(self.file)}:{self.line}" if self.file else "outside of user code"


class StatementPart(NamedTuple):
    """A part of what ranks must have in common: its name, what to do where they differ in it, its value."""

    name: str
    remedy: str
    value: bytes


class Said(NamedTuple):
    """A part as other ranks are told of it: a value in as many words as fit into an error."""

    name: str
    remedy: str
    digest: bytes
    shown: str


class Statement(NamedTuple):
    """All that one rank says: the number of its call, the call, and parts."""

    number: int
    call: CollectiveCall
    parts: tuple[Said, ...]


def digest_of(number: int, call: CollectiveCall, parts: Iterable[StatementPart]) -> bytes:
    """A digest that is equal on ranks which say the same, from whatever lines."""
    digest = hashlib.blake2b(f"{number} {call.name}".encode(), digest_size=DIGEST_BYTES)
    for name, _, value in parts:
        digest.update(f"{name} {len(value)}".encode())
        digest.update(value)
    return digest.digest()


def stated(number: int, call: CollectiveCall, parts: Iterable[StatementPart]) -> Statement:
    """The statement that a rank sends to others where digests differ."""
    return Statement(number, call, tuple(map(_said, parts)))


def _said(part: StatementPart) -> Said:
    digest = hashlib.blake2b(part.value, digest_size=DIGEST_BYTES).digest()
    is_text = (
        len(part.value) <= LONGEST_SHOWN_VALUE and part.value.isascii() and part.value.decode().isprintable()
    )
    return Said(part.name, part.remedy, digest, part.value.decode() if is_text else "")


def other_call(statements: Sequence[Statement], rank: int) -> InputError | None:
    """The error of this rank if ranks make different calls; None if all make the same one."""
    pair = _odd([(each.number, each.call.name) for each in statements])
    if pair is None:
        return None
    mine = statements[rank]
    alike = (mine.number, mine.call.name) == (statements[pair[1]].number, statements[pair[1]].call.name)
    other = pair[0] if alike else pair[1]
    return made_another(mine.call, rank, other, statements[other].call)


def made_another(call: CollectiveCall, rank: int, other: int, instead: CollectiveCall) -> InputError:
    """The error of a rank in `call` when rank `other` makes another call instead."""
    is_pair = any(each.name.startswith(BACKWARD) for each in (call, instead))
    return InputError(
        where=f"{call.name} on rank {rank} ({call.place})",
        found=f"rank {other} made another call instead, {instead}",
        wanted="the same collective calls on all ranks",
        remedy=_PAIRS if is_pair else REMEDY,
    )


def unlike(statements: Sequence[Statement], where: str) -> InputError:
    """The error that all ranks raise where parts of some differ from those of most."""
    name, remedy, places = _difference(statements)
    return InputError(where=where, found=f"{name} {places}", wanted="the same on all ranks", remedy=remedy)


def _difference(statements: Sequence[Statement]) -> tuple[str, str, str]:
    """First difference between statements: its name, the remedy, and the ranks' positions."""
    for parts in zip_longest(*(each.parts for each in statements)):
        pair = _odd([part and (part.name, part.digest) for part in parts])
        if pair is not None and all(part is not None for part in parts):
            odd, usual = pair
            name, remedy, _, shown = parts[odd]
            values = (f" ({shown})", f" ({parts[usual].shown})") if shown else ("", "")
            return name, remedy, _places(statements, odd, usual, values)
    odd, usual = _odd([len(each.parts) for each in statements]) or (len(statements) - 1, 0)
    return "the number of arguments", _SAME_CALLS, _places(statements, odd, usual)


def _places(statements: Sequence[Statement], odd: int, usual: int, values: tuple[str, str] = ("", "")) -> str:
    """The odd rank and the usual one, with their values and, where these differ, their lines."""
    lines = statements[odd].call.place, statements[usual].call.place
    at = (f", at {lines[0]}", f", at {lines[1]}") if lines[0] != lines[1] else ("", "")
    return f"on rank {odd}{values[0]}{at[0]} unlike that on rank {usual}{values[1]}{at[1]}"


def _odd(values: Sequence[Hashable]) -> tuple[int, int] | None:
    """The first rank whose value isn't that of most, and the first whose value is; None if all agree."""
    (usual, count), *_ = Counter(values).most_common(1)
    if count == len(values):
        return None
    return next(rank for rank, value in enumerate(values) if value != usual), values.index(usual)
