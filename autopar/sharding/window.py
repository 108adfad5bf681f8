"""Which input rows a range of output rows needs: the algebra behind halos.

Windows are output-driven. A convolution's outputs [o0, o1) need the inputs

    [o0*s - p,  (o1 - 1)*s - p + d*(k - 1) + 1)

and what lies outside the tensor is filled with the operator's own padding value.

    stride 2, kernel 3, padding 1        outputs   0     1     2     3
                                         inputs  -1..1  1..3  3..5  5..7
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol


class RowMap(Protocol):
    """Map from output rows of a windowed factor to input rows, for halos and cuts."""

    @property
    def scale(self) -> Fraction:
        """Output rows for each input row."""

    def needs(self, start: int, stop: int) -> tuple[int, int]:
        """Input rows [low, high) that outputs [start, stop) read."""


def per_dim(value: int | Sequence[int], count: int) -> list[int]:
    """A per-dim argument as a list; torch repeats a single one."""
    values = [value] if isinstance(value, int) else list(value)
    return [int(item) for item in (values * count if len(values) == 1 else values)]


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window (convolution, pooling, crop, pad), or its transpose.

    Source: output-size formulas of torch.nn.Conv2d and torch.nn.ConvTranspose2d.
    """

    kernel: int = 1
    stride: int = 1
    padding: int = 0
    dilation: int = 1
    transposed: bool = False

    @property
    def scale(self) -> Fraction:
        """Output rows for each input row."""
        return Fraction(self.stride) if self.transposed else Fraction(1, self.stride)

    @property
    def reach(self) -> int:
        """Distance from the first to the last row that one output reads, or that one input row adds to."""
        return self.dilation * (self.kernel - 1)

    def length(self, rows: int) -> int:
        """Outputs of `rows` input rows, padded at both ends; of a transpose, without output padding."""
        if self.transposed:
            return (rows - 1) * self.stride - 2 * self.padding + self.reach + 1
        return (rows + 2 * self.padding - self.reach - 1) // self.stride + 1

    def needs(self, start: int, stop: int) -> tuple[int, int]:
        """Input rows [low, high) that outputs [start, stop) read; may reach outside the tensor."""
        reach = self.reach
        if not self.transposed:
            return start * self.stride - self.padding, (stop - 1) * self.stride - self.padding + reach + 1
        # Input row i adds to outputs i*s - p ... i*s - p + d*(k - 1); where the stride is wider than
        # the kernel, rows on both sides of a gap are taken so that the local output covers the gap.
        low = min(-((reach - start - self.padding) // self.stride), (start + self.padding) // self.stride)
        high = (stop - 1 + self.padding) // self.stride + 1
        while (high - 1) * self.stride - self.padding + reach < stop - 1:
            high += 1
        return low, high
