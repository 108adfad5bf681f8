"""The last few answers of a function that is asked the same again and again for one program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from autopar.core.program import Program

Answer = TypeVar("Answer")


class Recent(Generic[Answer]):
    """Answers by the identity of what they depend on: programs that differ in their recomputed parts alone
    share their mappings. Keeps `size` answers, and what they depend on."""

    def __init__(self, size: int = 4) -> None:
        self.size = size
        self.known: list[tuple[tuple[object, ...], Answer]] = []

    def get(self, key: tuple[object, ...], make: Callable[[], Answer]) -> Answer:
        """The answer for `key`, made if it is not among the last ones."""
        for number, (other, answer) in enumerate(self.known):
            if len(other) == len(key) and all(map(_same, other, key)):
                self.known.append(self.known.pop(number))
                return answer
        self.known = [*self.known[-self.size + 1 :], (key, make())]
        return self.known[-1][1]


def placement_of(program: Program) -> tuple[object, ...]:
    """What is left of a program without its recomputed parts."""
    return (
        program.mesh,
        program.inputs,
        program.strategies,
        program.moves,
        program.outputs,
        program.gatherings,
    )


def _same(one: object, other: object) -> bool:
    return one is other or (isinstance(one, int | float) and one == other)
