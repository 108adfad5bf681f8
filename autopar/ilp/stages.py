"""Where a chain of operators is cut into stages: so that the slowest stage is as fast as can be.

t_i            seconds of operator i, forward and backward of one micro-batch
c_p            seconds to hand on what crosses the cut before operator p, and its gradient back
T(s, p)        the least slowest-stage time of the first p operators on s stages

T(s, p) = min over q < p of  max(T(s - 1, q), c_q + t_q + ... + t_(p-1))
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from autopar.errors import InputError


def cut(seconds: Sequence[float], crossing: Sequence[float], stages: int) -> tuple[int, ...]:
    """The first operator of each stage; every stage has at least one.

    `crossing[p]` are the seconds of a cut before operator p. Raises InputError for more stages than
    operators.
    """
    count = len(seconds)
    if stages > count:
        raise InputError(
            where="--stages",
            found=f"{stages} stages for {count} operators",
            wanted=f"at most {count}",
            remedy="use fewer stages",
        )
    done = [0.0, *accumulate(seconds)]
    best = [done[p] for p in range(count + 1)]
    chosen: list[list[int]] = []
    for stage in range(1, stages):
        following, start = [float("inf")] * (count + 1), [0] * (count + 1)
        for p in range(stage + 1, count + 1):
            for q in range(stage, p):
                slowest = max(best[q], crossing[q] + done[p] - done[q])
                if slowest < following[p]:
                    following[p], start[p] = slowest, q
        best = following
        chosen.append(start)
    starts, end = [], count
    for start in reversed(chosen):
        end = start[end]
        starts.append(end)
    return (0, *reversed(starts))
