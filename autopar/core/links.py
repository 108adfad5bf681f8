"""Links between devices, and devices that are described by their figures."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from autopar.core.cluster_keys import is_finite
from autopar.errors import InputError, show_value
from autopar.units import show_rate, show_seconds


@dataclass(frozen=True, slots=True)
class Link:
    """A link between two devices: `latency` in seconds, `bandwidth` in bytes per second each way.

    `estimated` marks numbers that nobody gave or measured, `is_measured` those that autopar measured itself,
    so that a plan can say so. Of measured `points`, bytes and seconds that rise, a message takes what lies
    between them.
    """

    latency: float
    bandwidth: float
    estimated: bool = False
    points: tuple[tuple[int, float], ...] = ()
    is_measured: bool = False

    @staticmethod
    def measured(points: tuple[tuple[int, float], ...]) -> Link:
        """The link of measured messages: the smallest one's seconds, and the rate between the last two."""
        (before, early), (last, late) = points[-2:]
        return Link(points[0][1], (last - before) / (late - early), points=points)

    def seconds(self, nbytes: float) -> float:
        """Seconds of one message; the smallest point's below it, and by the bandwidth beyond the largest."""
        if not self.points:
            return self.latency + nbytes / self.bandwidth
        place = bisect_left(self.points, (nbytes, -math.inf))
        if place == 0:
            return self.latency
        (left, early) = self.points[place - 1]
        if place == len(self.points):
            return early + (nbytes - left) / self.bandwidth
        right, late = self.points[place]
        return early + (late - early) * (nbytes - left) / (right - left)

    def __post_init__(self) -> None:
        numbers = is_finite(self.latency) and is_finite(self.bandwidth)
        if not (numbers and self.latency >= 0 and self.bandwidth > 0):
            latency, bandwidth = show_value(self.latency), show_value(self.bandwidth)
            raise InputError(
                where="link",
                found=f"latency {latency} s, bandwidth {bandwidth} bytes/s",
                wanted="a finite latency of at least 0 and a finite bandwidth above 0",
                remedy="give seconds and bytes per second",
            )

        for before, after in pairwise(self.points):
            if not (after[0] > before[0] and after[1] >= before[1]):
                raise InputError(
                    where="link",
                    found=f"points {show_value(before)}, then {show_value(after)}",
                    wanted="bytes that rise, and seconds that don't fall",
                    remedy="sort points by bytes, and measure what takes less than a smaller message anew",
                )

    def __str__(self) -> str:
        mark = " (estimated)" if self.estimated else " (measured)" if self.is_measured else ""
        return f"{show_rate(self.bandwidth)}, {show_seconds(self.latency)}{mark}"


# Stand-ins until the links are measured. Only the first was seen on a machine: two gloo processes with one
# thread each on two cores, a message of 16 bytes one way and the slope up to 10 MB. The others are
# orders of magnitude: PCIe 4.0 x16 at 80 % of its 32 GB/s, and 10 Gbit/s Ethernet through TCP.
LOOPBACK = Link(latency=150e-6, bandwidth=2.5e9, estimated=True)
PCIE = Link(latency=10e-6, bandwidth=25e9, estimated=True)
ETHERNET = Link(latency=50e-6, bandwidth=1.25e9, estimated=True)


@dataclass(frozen=True, slots=True)
class DescribedDevice:
    """A GPU that no data sheet here knows: peak flop/s of dense products by dtype, bytes/s of its memory."""

    flops: tuple[tuple[str, float], ...]
    bandwidth: float
