"""A parameter server against a ring: numbers that the busiest process sends and receives for N of each.

    server   2 N (P - 1)        in and out of the server
    ring     2 N (P - 1)/P      out of every process, and as many in

Counted from the messages of both, as the priced algorithms list them.
"""

from __future__ import annotations

from collections.abc import Iterable

from autopar.core.sum_schedules import SumSchedule, nested_rings
from tests.benchmarks.sources.figures import FigureRow, FigureTable

PROCESS_COUNTS = (2, 4, 8, 64)


def server_messages(size: int) -> list[tuple[int, int, float]]:
    """Sender, receiver, and share of N: gradients to process 0, which computes too, and weights back."""
    up = [(worker, 0, 1.0) for worker in range(1, size)]
    return up + [(0, worker, 1.0) for worker in range(1, size)]


def ring_messages(schedule: SumSchedule) -> list[tuple[int, int, float]]:
    """The messages of all steps."""
    return [(a, b, count / schedule.parts) for step in schedule.steps for a, b, count in step.traffic]


def busiest(messages: Iterable[tuple[int, int, float]], *, received: bool) -> float:
    """What the busiest process sends, or sends and receives, in parts of N."""
    counts: dict[int, float] = {}
    for sender, receiver, amount in messages:
        counts[sender] = counts.get(sender, 0.0) + amount
        if received:
            counts[receiver] = counts.get(receiver, 0.0) + amount
    return max(counts.values())


def table() -> FigureTable:
    """Both, for some numbers of processes."""
    rows = []
    for size in PROCESS_COUNTS:
        server = busiest(server_messages(size), received=True)
        ring = busiest(ring_messages(nested_rings((size,))), received=False)
        rows.append(FigureRow(f"server, P = {size}", f"{2 * (size - 1)} N", f"{server:g} N", "2 N (P - 1)"))
        formula = f"{2 * (size - 1) / size:.4g} N"
        rows.append(FigureRow(f"ring, P = {size}", formula, f"{ring:.4g} N", "2 N (P - 1)/P"))
    return FigureTable.of("A parameter server against a ring, N numbers", "counted", rows)
