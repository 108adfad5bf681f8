r"""The scores of attention that a rank computes, as rectangles and triangles that kernels know.

A causal row r sees the keys [0, r]. Of rows [a, b) and keys [c, d), with s, e the ends of what both are,

        c     s     e  d
     a  .......                    nothing, where the keys come later
     s  [ 1 ][2\                   1  rows [s, b), keys [c, s)        whole
     e  [ 1 ][ 3 ]                 2  rows [s, e), keys [s, e)        a triangle
     b                             3  rows [e, b), keys [s, e)        whole

and every row of a block sees a key of it: kernels give 0 for the log-sum-exp of a row that sees nothing, and
end the process where there are no keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypeAlias

Span: TypeAlias = tuple[int, int]  # [start, stop)


@dataclass(frozen=True, slots=True)
class ScoreBlock:
    """Scores of some rows with some keys, positions in the whole tensors; of a `triangle` the later keys are
    hidden, and it is square."""

    rows: Span
    keys: Span
    triangle: bool = False

    @property
    def scores(self) -> int:
        """Number of scores that rows see."""
        rows, keys = (stop - start for start, stop in (self.rows, self.keys))
        return rows * (rows + 1) // 2 if self.triangle else rows * keys


def score_blocks(rows: Span, keys: Span, *, causal: bool) -> Iterator[ScoreBlock]:
    """The blocks of [1], [2] and [3] in the drawing that have scores."""
    (a, b), (c, d) = rows, keys
    if a >= b or c >= d:
        return
    if not causal or a >= d:
        yield ScoreBlock(rows, keys)
        return
    start, stop = max(a, c), min(b, d)
    if c < start:
        yield ScoreBlock((start, b), (c, start))
    if start < stop:
        yield ScoreBlock((start, stop), (start, stop), triangle=True)
        if stop < b:
            yield ScoreBlock((stop, b), (start, stop))


def seen_keys(rows: Span, keys: Span, *, causal: bool) -> Span:
    """The keys among [start, stop) that some row sees; empty at `start` if none does."""
    start, stop = keys
    if rows[0] >= rows[1]:
        return start, start
    return start, max(start, min(stop, rows[1])) if causal else stop
