r"""The scores of attention that a rank computes, as rectangles and triangles that kernels know.

Under a band row r sees the keys [r - before, r + after]; one that is causal has no `before`, and 0 for
`after`. Of rows [a, b) and keys [c, d), with s, e the ends of what both are, causal

        c     s     e  d
     a  .......                    nothing, where the keys come later
     s  [ 1 ][2\                   1  rows [s, b), keys [c, s)        whole
     e  [ 1 ][ 3 ]                 2  rows [s, e), keys [s, e)        a triangle
     b                             3  rows [e, b), keys [s, e)        whole

Another `after` moves the keys. A `before` is the same upside down: counted from the last row and the last key
it is an `after`, and triangles are *turned*. With both, rows are taken a few at a time, so that no key is on
both edges.

                          rows [s, e), e - s <= before + after + 1
     s  \---------\
     e    \---------\     turned, whole, a triangle

Every row of a block sees a key of it: kernels give 0 for the log-sum-exp of a row that sees nothing, and
end the process where there are no keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

Span: TypeAlias = tuple[int, int]  # [start, stop)


@dataclass(frozen=True, slots=True)
class Band:
    """The keys that rows see: row r those of [r - before, r + after]; None where there is no end."""

    before: int | None = None
    after: int | None = None

    @property
    def hides(self) -> bool:
        """Whether some score may be hidden."""
        return self.before is not None or self.after is not None

    def shows_each_row(self, rows: int, keys: int) -> bool:
        """Whether each of so many rows sees one of the keys."""
        ends = (0, 1), (rows - 1, rows)
        empty = self.before is not None and self.after is not None and self.before + self.after < 0
        return not empty and all(first < stop for first, stop in (self.seen(row, (0, keys)) for row in ends))

    def seen(self, rows: Span, keys: Span) -> Span:
        """The keys among [start, stop) that some row sees; empty at `start` if none does."""
        start, stop = keys
        if rows[0] >= rows[1]:
            return start, start
        first = start if self.before is None else max(start, rows[0] - self.before)
        last = stop if self.after is None else min(stop, rows[1] + self.after)
        return (first, last) if first < last else (start, start)


CAUSAL, EVERY_KEY = Band(after=0), Band()


@dataclass(frozen=True, slots=True)
class ScoreBlock:
    """Scores of some rows with some keys, positions in the whole tensors; of a `triangle` the later keys are
    hidden, of one that is `turned` the earlier ones, and it is square."""

    rows: Span
    keys: Span
    triangle: bool = False
    turned: bool = False

    @property
    def scores(self) -> int:
        """Number of scores that rows see."""
        rows, keys = (stop - start for start, stop in (self.rows, self.keys))
        return rows * (rows + 1) // 2 if self.triangle else rows * keys


def score_blocks(rows: Span, keys: Span, band: Band) -> Iterator[ScoreBlock]:
    """The blocks of rows and keys that have scores."""
    if band.before is None:
        yield from _upper(rows, keys, band.after)
    elif band.after is None:
        yield from _lower(rows, keys, band.before)
    else:
        width = band.before + band.after + 1
        for start in range(rows[0], rows[1] if width > 0 else rows[0], max(1, width)):
            few = start, min(start + width, rows[1])
            middle = min(max(start + band.after + 1, keys[0]), keys[1])  # before it no key is too late
            yield from _lower(few, (keys[0], middle), band.before)
            yield from _upper(few, (middle, keys[1]), band.after)


def _lower(rows: Span, keys: Span, before: int) -> Iterator[ScoreBlock]:
    """Blocks of rows that see the keys from r - `before` on."""
    for block in _upper(_turned(rows), _turned(keys), before):
        yield ScoreBlock(_turned(block.rows), _turned(block.keys), block.triangle, block.triangle)


def _turned(span: Span) -> Span:
    """A span counted from the last row."""
    return 1 - span[1], 1 - span[0]


def _upper(rows: Span, keys: Span, after: int | None) -> Iterator[ScoreBlock]:
    """Blocks of rows that see the keys up to r + `after`: [1], [2] and [3] in the drawing."""
    (a, b), (c, d) = rows, keys
    if a >= b or c >= d:
        return
    if after is None or a + after >= d - 1:
        yield ScoreBlock(rows, keys)
        return
    c, d = c - after, d - after
    start, stop = max(a, c), min(b, d)
    if c < start:
        yield ScoreBlock((start, b), (c + after, start + after))
    if start < stop:
        yield ScoreBlock((start, stop), (start + after, stop + after), triangle=True)
        if stop < b:
            yield ScoreBlock((stop, b), (start + after, stop + after))
