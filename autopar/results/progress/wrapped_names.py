"""Names of layers in a table: where a column is too narrow they break behind a dot, else behind a low line.

encoder.layers_of_the_left_tower.0.query     ->     encoder.                at 17 columns
layers_of_the_
left_tower.0.
query
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.text import Text

SEPARATORS = " ._"


@dataclass(frozen=True, slots=True)
class WrappedName:
    """A cell that holds a name."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        for line in wrap_name(self.text, options.max_width):
            yield Text(line, no_wrap=True, overflow="crop")

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        words = re.findall(r"[^ ._]+[._]?", self.text)
        least, most = max(map(len, words), default=0), len(self.text)
        return Measurement(least, most).with_maximum(options.max_width)


def wrap_name(text: str, width: int) -> list[str]:
    """The lines of a name, each of at most `width` characters."""
    return [line.rstrip() for line in _lines(text, width, SEPARATORS)]


def _lines(text: str, width: int, separators: str) -> list[str]:
    """Lines that break behind the first separator, and behind the next ones only in what fits on no line."""
    if not separators:
        return [text[start : start + width] for start in range(0, len(text), width)]
    lines, first = [""], re.escape(separators[0])
    for part in re.findall(f"[^{first}]*{first}|[^{first}]+", text):
        if len(part.rstrip()) > width:
            lines += _lines(part, width, separators[1:])
        elif len((lines[-1] + part).rstrip()) > width:
            lines.append(part)
        else:
            lines[-1] += part
    return lines if lines[0] else lines[1:] or [""]
