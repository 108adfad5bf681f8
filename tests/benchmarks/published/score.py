"""How well predictions tell which of the published splits is best, how long it takes, and what fits.

group         runs of one model on as many devices, with the stack in one state
rank          Spearman's correlation of predicted and published seconds a sample, mean over groups; what is
              said not to fit comes last; groups are of three runs or more
regret        1 - (best published speed / that of the split that is predicted best), mean over groups; a split
              that is said not to fit isn't chosen where another fits
error         |predicted / published - 1|, median and ninth decile of runs
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.published.runs import Run

LEAST = 3  # runs of a group


@dataclass(frozen=True, slots=True)
class Score:
    """Of the runs with a throughput: how many, in how many groups, and the figures above."""

    runs: int
    groups: int
    rank: float | None  # None without groups of so many runs
    regret: float | None
    median_error: float
    high_error: float


@dataclass(frozen=True, slots=True)
class Memory:
    """Shares of all runs: told right, and said to fit that ran out of memory."""

    right: float
    missed: float


def score(runs: Sequence[Run], seconds: Sequence[float], fits: Sequence[bool]) -> Score:
    """The score of predicted `seconds` a step and of whether they fit; all runs have a throughput."""
    groups: dict[object, list[tuple[float, float]]] = defaultdict(list)
    errors = []
    for run, guess, fit in zip(runs, seconds, fits, strict=True):
        assert run.seconds is not None and run.seconds_per_sample is not None
        samples = run.seconds / run.seconds_per_sample
        groups[run.group].append((run.seconds_per_sample, guess / samples if fit else math.inf))
        errors.append(abs(guess / run.seconds - 1))
    large = [group for group in groups.values() if len(group) >= LEAST]
    return Score(
        runs=len(runs),
        groups=len(large),
        rank=fmean(spearman(*zip(*group, strict=True)) for group in large) if large else None,
        regret=fmean(map(regret, large)) if large else None,
        median_error=median(errors),
        high_error=float(np.quantile(errors, 0.9)),
    )


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """The correlation of ranks; equal values share theirs."""
    ranks = [ranked(one), ranked(other)]
    spread = [rank - rank.mean() for rank in ranks]
    norm = float(np.sqrt((spread[0] ** 2).sum() * (spread[1] ** 2).sum()))
    return float((spread[0] * spread[1]).sum()) / norm if norm else 0.0


def ranked(values: Sequence[float]) -> NDArray[np.float64]:
    """The rank of each value, from 0; the mean of theirs for equal ones."""
    _, back, counts = np.unique(np.asarray(values), return_inverse=True, return_counts=True)
    middles: NDArray[np.float64] = np.cumsum(counts) - (counts + 1) / 2
    return middles[back]


def regret(group: Iterable[tuple[float, float]]) -> float:
    """What the split that is predicted best loses against the best; of pairs (published, predicted)."""
    pairs = list(group)
    chosen, _ = min(pairs, key=lambda pair: pair[1])
    return 1 - min(published for published, _ in pairs) / chosen


def memory(runs: Sequence[Run], fits: Sequence[bool]) -> Memory:
    """How well it is told what fits."""
    pairs = [(run.seconds is not None, fit) for run, fit in zip(runs, fits, strict=True)]
    return Memory(
        right=fmean(did == fit for did, fit in pairs),
        missed=fmean(fit and not did for did, fit in pairs),
    )
