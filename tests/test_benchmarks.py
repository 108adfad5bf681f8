"""The benchmarks' statistics, by hand, and one short run of the harness."""

from __future__ import annotations

import math

import pytest

from tests.benchmarks.__main__ import measure
from tests.benchmarks.cases import BENCHMARKS
from tests.benchmarks.statistics import order, ratio


@pytest.mark.parametrize(("count", "rank"), [(5, 1), (6, 1), (20, 6), (100, 40)])
def test_order_statistics_that_enclose_the_median(count: int, rank: int) -> None:
    assert order(count) == rank
    outside = 2 * sum(math.comb(count, k) for k in range(rank)) / 2**count
    assert outside <= 0.05 or rank == 1


def test_ratios_are_paired() -> None:
    found = ratio([2.0 * drift for drift in range(1, 21)], [1.0 * drift for drift in range(1, 21)])
    assert (found.median, found.low, found.high) == (2.0, 2.0, 2.0)


@pytest.mark.long
def test_a_benchmark_reports_both_sides(tmp_path: object) -> None:
    row = measure(
        next(item for item in BENCHMARKS if item.name == "one-device digits"), "tuned", 5, str(tmp_path)
    )
    assert row.rounds == 5 and set(row.seconds) == {"auto", "eager"}
    assert row.predicted["auto"] and row.ratio.low <= row.ratio.median <= row.ratio.high
