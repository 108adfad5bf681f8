"""One tree of errors; every message says where, what was found, what was wanted, and the remedy."""

from __future__ import annotations

import math
import re
import signal
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from reprlib import Repr
from typing import Any

LONGEST_MESSAGE = 400  # characters of a message: more nobody reads, and what is wrong may be a file of 100 MB
SHOWN_CHARACTERS = 80  # characters of a value that a message repeats
SHOWN_DIGITS = 40  # of a whole number that it repeats
_READ = 10_000  # of a text, that are looked at
_FIELDS = ("where", "found", "wanted", "remedy")
_FORM = "{where}: found {found}, wanted {wanted}; {remedy}"
# Of three parts or more; begun where a part begins and never tried again, or long words take their square.
_PATH = re.compile(r"(?<![\w.@+-])/?[\w.@+-]++(?:/[\w.@+-]++){2,}")
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
INTERRUPTED = 128 + signal.SIGINT  # the command line's exit code, 130, as shells count


def cut_text(text: str, length: int) -> str:
    """A text of at most so many characters, for messages of at most 400: a longer one ends in dots."""
    return text if len(text) <= length else f"{text[: length - 3]}..."


def cut_paths(text: str, length: int) -> str:
    """The text, of whose paths only the folder and the file are told if it is longer than that."""
    return text if len(text) <= length else _PATH.sub(_ending, text)


def _ending(path: re.Match[str]) -> str:
    return ".../" + "/".join(path.group().split("/")[-2:])


class _Shown(Repr):
    """Python's own short `repr`, of huge numbers and of objects that only have an address too."""

    def repr_int(self, number: int, _: int) -> str:
        if abs(number) < 10**SHOWN_DIGITS:
            return repr(number)
        return f"a number of {int(math.log10(abs(number))) + 1:,} digits"

    def repr_float(self, number: float, _: int) -> str:
        return f"{number:g}"

    def repr_str(self, text: str, _: int) -> str:
        text = cut_paths(text[:_READ], SHOWN_CHARACTERS - 2)
        return cut_text(
            repr(text[:SHOWN_CHARACTERS]) + text[SHOWN_CHARACTERS : SHOWN_CHARACTERS + 1], SHOWN_CHARACTERS
        )

    def repr_instance(self, value: object, _: int) -> str:
        try:
            text = repr(value)
        except Exception:  # the user's class may raise anything
            return f"a {type(value).__name__}"
        return f"a {type(value).__name__}" if _ADDRESS.search(text) else cut_text(text, SHOWN_CHARACTERS)


_SHOWN = _Shown()


def show_value(value: object) -> str:
    """A value as messages repeat it: at most `SHOWN_CHARACTERS` characters, without addresses."""
    return cut_text(_SHOWN.repr(value), SHOWN_CHARACTERS)


def fit(texts: Mapping[str, str], room: int) -> dict[str, str]:
    """The texts, of at most `room` characters together: paths lose their beginnings, then the longest texts
    are cut, to equal lengths."""
    fitted: dict[str, str] = {}
    if sum(map(len, texts.values())) > room:
        texts = {name: cut_paths(text[:_READ], SHOWN_CHARACTERS) for name, text in texts.items()}
    for index, name in enumerate(sorted(texts, key=lambda name: len(texts[name]))):
        fitted[name] = cut_text(texts[name], room // (len(texts) - index))
        room -= len(fitted[name])
    return fitted


class AutoparError(Exception):
    """Base of all errors that autopar raises on purpose.

    A message has at most `LONGEST_MESSAGE` characters: its longest parts are cut. `exit_code` is what the
    command line returns for it: 1 a check failed, 2 bad input or infeasible, 3 no incumbent in time,
    4 a worker failed.
    """

    exit_code: int = 2

    def __init__(self, *, where: str, found: str, wanted: str, remedy: str) -> None:
        texts = {"where": where, "found": found, "wanted": wanted, "remedy": remedy}
        texts = {name: _ADDRESS.sub("", text) for name, text in texts.items()}
        texts = fit(texts, LONGEST_MESSAGE - len(_FORM.format(**dict.fromkeys(texts, ""))))
        self.where, self.found, self.wanted, self.remedy = (texts[name] for name in _FIELDS)
        super().__init__(_FORM.format(**texts))

    def __reduce__(self) -> tuple[Any, ...]:
        """Rank 0 sends its errors to the others."""
        fields = {name: value for name, value in vars(self).items() if not name.startswith("__")}
        return partial(type(self), **fields), ()

    def add_remedy(self, remedy: str) -> None:
        """One more way out."""
        remedy = f"{self.remedy}; or {remedy}"
        AutoparError.__init__(self, where=self.where, found=self.found, wanted=self.wanted, remedy=remedy)

    def as_words(self) -> dict[str, str]:
        """The error's fields, of which another class of the tree can be made."""
        return {name: getattr(self, name) for name in _FIELDS}

    def as_dict(self) -> dict[str, str]:
        """The error as the command line's JSON shows it."""
        return {"kind": type(self).__name__, **self.as_words()}


class InputError(AutoparError):
    """The user's input cannot be used."""


class TraceError(InputError):
    """The model cannot be traced; `where` is the user's own source line if it is known."""


class ValuesAskedError(TraceError):
    """A number or size in forward depends on values of tensors.

    `inputs` are the paths of the arguments that these follow from; empty where that isn't of inputs alone.
    """

    inputs: frozenset[str] = frozenset()


class RuleError(AutoparError):
    """An operator's rule is incomplete or contradicts the operator."""


class InfeasibleError(AutoparError):
    """No plan meets the caps; says the least that would do.

    `least` is that in bytes per device, None where bytes are not what is missing.
    """

    def __init__(self, *, where: str, found: str, wanted: str, remedy: str, least: int | None = None) -> None:
        super().__init__(where=where, found=found, wanted=wanted, remedy=remedy)
        self.least = least

    @property
    def would_do(self) -> float:
        """Bytes per device that are known to do, without looking for the least."""
        return math.inf if self.least is None else self.least


class OverCapError(InfeasibleError):
    """No plan meets the memory cap: its words, which take seconds to find, are sought when they are read.

    Most are caught by who knows another way. `known` bytes would do, as far as is known before.
    """

    def __init__(self, tell: Callable[[], InfeasibleError], *, known: float = math.inf) -> None:
        Exception.__init__(self)
        self._tell, self._known = tell, known
        self._remedies: list[str] = []

    @cached_property
    def told(self) -> InfeasibleError:
        """The error with its words."""
        error = self._tell()
        for remedy in self._remedies:
            error.add_remedy(remedy)
        return error

    @property
    def would_do(self) -> float:
        return self._known

    def add_remedy(self, remedy: str) -> None:
        if "told" in vars(self):
            self.told.add_remedy(remedy)
        else:
            self._remedies.append(remedy)

    def as_words(self) -> dict[str, str]:
        """The error's fields, of which another class of the tree can be made."""
        return self.told.as_words()

    def as_dict(self) -> dict[str, str]:
        return self.told.as_dict()

    def __getattr__(self, name: str) -> Any:
        if name in (*_FIELDS, "least"):
            return getattr(self.told, name)
        raise AttributeError(name)

    def __str__(self) -> str:
        return str(self.told)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.told.__reduce__()


class SolverError(AutoparError):
    """The solver stopped without an answer."""

    exit_code = 3


class OutOfTimeError(SolverError):
    """A search had to end before it had an answer."""


class CostMissingError(AutoparError):
    """A cost that is needed was neither measured nor can be estimated."""


class CheckError(AutoparError):
    """A law between two passes, or a proof, does not hold."""

    exit_code = 1


class WorkerError(AutoparError):
    """A worker process failed; `traceback` is that worker's own, empty if it left none. What autopar itself
    refused there has the exit code that it would have had here.

    `is_lost` where the process was killed or stopped, and so its device may be gone, `is_end` where the run's
    time is up. `step` is the last one that a rank has told of, `flights` where each was.
    """

    def __init__(
        self,
        *,
        where: str,
        found: str,
        wanted: str,
        remedy: str,
        traceback: str = "",
        exit_code: int = 4,
        is_lost: bool = False,
        is_end: bool = False,
        step: int | None = None,
        flights: str = "",
    ) -> None:
        super().__init__(where=where, found=found, wanted=wanted, remedy=remedy)
        self.traceback, self.exit_code, self.is_lost = traceback, exit_code, is_lost
        self.is_end, self.step, self.flights = is_end, step, flights

    @property
    def details(self) -> str:
        """Lines to print above the error: the rank's traceback, or where ranks were; may be empty."""
        return self.traceback or (self.flights and f"where ranks were last:\n{self.flights}")
