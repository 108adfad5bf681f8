"""The orders of the six pipeline schedules, each a pure generator for one rank.

They are the orders in which `torch.distributed.pipelining` computes, action by action. In the
drawings a line is a rank, a cell a time step; F, I and W take one each, B takes two. The letters are
those of `autopar.core.schedule`, and `rank` counts from 0 to p - 1.

    p  ranks       v  stages per rank       m  micro-batches
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import chain, zip_longest
from typing import TypeAlias

from autopar.core.schedule import (
    Action,
    ActionKind,
    Overlap,
    Schedule,
    ScheduleKind,
    Slot,
    check_schedule,
    micro_batches_per_round,
)

F, B, I, W = ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.INPUT_GRADIENT, ActionKind.WEIGHT_GRADIENT  # noqa: E741
Generator: TypeAlias = Callable[[int, int, int, int], Iterator[Slot]]


def build_schedule(
    kind: ScheduleKind, *, ranks: int, stages_per_rank: int = 1, micro_batches: int
) -> Schedule:
    """The schedule of `kind` for all ranks.

    Raises InputError, naming the rule, if the kind doesn't allow these numbers.
    """
    check_schedule(kind, ranks=ranks, stages_per_rank=stages_per_rank, micro_batches=micro_batches)
    generate = GENERATORS[kind]
    orders = tuple(tuple(generate(rank, ranks, stages_per_rank, micro_batches)) for rank in range(ranks))
    return Schedule(kind, ranks, stages_per_rank, micro_batches, orders)


def gpipe(rank: int, p: int, v: int, m: int) -> Iterator[Slot]:
    """Run all forwards, then all backwards (Huang et al., 2019).

    p = 3, m = 3:

    0  0F0 0F1 0F2                         0B0---- 0B1---- 0B2
    1      1F0 1F1 1F2             1B0---- 1B1---- 1B2
    2          2F0 2F1 2F2 2B0---- 2B1---- 2B2
    """
    yield from (Action(rank, F, n) for n in range(m))
    yield from (Action(rank, B, n) for n in range(m))


def one_f_one_b(rank: int, p: int, v: int, m: int) -> Iterator[Slot]:
    """Run a backward as soon as there is one, then a forward (Narayanan et al., 2019).

    So at most p - rank micro-batches are in flight. p = 3, m = 4:

    0  0F0 0F1 0F2                 0B0---- 0F3 0B1----     0B2----     0B3
    1      1F0 1F1         1B0---- 1F2 1B1---- 1F3 1B2----     1B3
    2          2F0 2B0---- 2F1 2B1---- 2F2 2B2---- 2F3 2B3
    """
    warm = min(m, p - rank)
    yield from (Action(rank, F, n) for n in range(warm))
    for n in range(m):
        yield Action(rank, B, n)
        if warm + n < m:
            yield Action(rank, F, warm + n)


def interleaved(rank: int, p: int, v: int, m: int) -> Iterator[Slot]:
    """1F1B on v short stages per rank: fill and drain take 1/v of the time (Narayanan et al., 2021).

    A stage takes a round of micro-batches, then the rank's next stage takes them. p = 2, v = 2, m = 2:

    0  0F0 0F1 2F0 2F1         2B0----     2B1---- 0B0---- 0B1
    1      1F0 1F1 3F0 3B0---- 3F1 3B1---- 1B0---- 1B1
    """
    forwards, backwards = _rounds(rank, p, v, m)
    warm = min((v - 1) * micro_batches_per_round(p, m) + 2 * (p - 1 - rank), v * m)
    yield from (_action(item, F) for item in forwards[:warm])
    for ahead, behind in zip_longest(forwards[warm:], backwards):
        if ahead:
            yield _action(ahead, F)
        yield _action(behind, B)


def zb1p(rank: int, p: int, v: int, m: int) -> Iterator[Slot]:
    """Run interleaved 1F1B with split backwards (Qi et al., 2024, ZB-H1).

    W comes `rank` backwards after its I, so that no rank has more in flight than the first. p = 3,
    v = 1, m = 4:

    0  0F0 0F1 0F2         0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    1      1F0 1F1     1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    2          2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """
    forwards, backwards = _rounds(rank, p, v, m)
    warm = min((v - 1) * micro_batches_per_round(p, m) + (p - 1 - rank), v * m)
    yield from (_action(item, F) for item in forwards[:warm])
    for step, (ahead, behind) in enumerate(zip_longest(forwards[warm:], backwards)):
        if ahead:
            yield _action(ahead, F)
        yield _action(behind, I)
        if step >= rank:
            yield _action(backwards[step - rank], W)
    yield from (_action(item, W) for item in backwards[max(0, v * m - rank) :])


def zbv(rank: int, p: int, v: int, m: int) -> Iterator[Slot]:
    """Run two stages per rank in a V, with split backwards (Qi et al., 2024, ZB-V).

    If F, I and W take equal times, no rank waits but at the ends. p = 2, m = 3:

    0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 3W2 0I1 0W1 0I2 0W2
    1      1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1I1 2I2 1I2 1W1 2W2 1W2

    With fewer than 2p - 1 micro-batches it is the order for 2p - 1 with the others left out.
    """
    total = max(2 * p - 1, m)
    down, up = rank, 2 * p - 1 - rank  # the rank's stages on the way down and up the V
    take = _Turns()
    order: list[Action] = []
    for _ in range(2 * (p - rank) - 1):
        order += take(down, F)
    for _ in range(rank):
        order += take(up, F) + take(down, F)
    for _ in range(p - rank):
        order += take(up, F, I, W)
    for step in range(total - p):
        order += take(down, F, I, W) if step < total - (2 * p - rank - 1) else take(down, I, W)
        order += take(up, F, I, W)
    for _ in range(rank):
        order += take(down, I) + take(up, I)
    for _ in range(p - rank):
        order += take(down, I, W)
    order += [action for stage in (up, down) for _ in range(rank) for action in take(stage, W)]
    yield from (action for action in order if action.micro_batch < m)


def dualpipev(rank: int, p: int, v: int, m: int) -> Iterator[Slot]:  # noqa: C901  (its eight steps, as drawn)
    """Pair the forward of one stage with the backward of the rank's other in a V (DeepSeek-V3, 2024).

    It is DualPipe in its V form; + ties a pair of the main part. p = 2, m = 4:

    0  0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3+3B1----     3F2+0B0---- 3B2----     3F3+0B1---- 3B3---- 0I2 0W2 0I3 0W3
    1      1F0 2F0 1F1 2F1 1F2 2B0---- 2F2+1B0---- 1F3+2B1---- 2F3+1B1---- 2B2---- 1B2----     2I3 1I3 2W3 1W3

    Backwards are split only where a W fills a wait: [3] in the fill, [6] to [8] in the drain.
    """
    down, up = rank, 2 * p - 1 - rank
    after = p - 1 - rank  # ranks between this one and the turn of the V
    take = _Turns()
    pending: deque[Action] = deque()  # W that wait for a gap

    def split(stage: int) -> list[Action]:
        (action,) = take(stage, I)
        pending.append(Action(stage, W, action.micro_batch))
        return [action]

    def fill() -> list[Action]:
        return [pending.popleft()] if pending else []

    def pair(forward: int, backward: int) -> Overlap:
        return Overlap(*take(forward, F), *take(backward, B))

    for _ in range(2 * after):  # [1]
        yield from take(down, F)
    for _ in range(rank + 1):  # [2]
        yield from chain(take(down, F), take(up, F))
    for _ in range(after):  # [3]
        yield from chain(split(up), fill(), take(up, F))
    for step in range(m - 2 * p + rank + 1):  # [4] the main part
        if step == 0 and rank == p - 1:  # apart at the turn, so that the forward is sent sooner
            yield from chain(take(down, F), take(up, B))
        else:
            yield pair(down, up)
        yield pair(up, down)
    for _ in range(after):  # [5]
        yield from take(up, B)
        yield pair(up, down)
    for step in range(2 * (rank + 1)):  # [6] the later half is split
        stage = down if step % 2 else up
        yield from split(stage) if step > rank else take(stage, B)
    for _ in range(after):  # [7]
        yield from chain(fill(), split(down))
    while pending:  # [8]
        yield from fill()


def _rounds(rank: int, p: int, v: int, m: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The (stage, micro-batch) pairs of an interleaved rank in the order of forwards and of backwards."""
    size = micro_batches_per_round(p, m)

    def order(stages: range) -> list[tuple[int, int]]:
        starts = range(0, m, size)
        return [(stage, n) for start in starts for stage in stages for n in range(start, start + size)]

    stages = range(rank, p * v, p)
    return order(stages), order(stages[::-1])


def _action(item: tuple[int, int], kind: ActionKind) -> Action:
    return Action(item[0], kind, item[1])


class _Turns:
    """Gives each stage its micro-batches in turn: F, W, and backwards, whole or of inputs alone."""

    def __init__(self) -> None:
        self.next: Counter[tuple[int, ActionKind]] = Counter()

    def __call__(self, stage: int, *kinds: ActionKind) -> list[Action]:
        """The stage's next action of each kind."""
        return [self._next(stage, kind) for kind in kinds]

    def _next(self, stage: int, kind: ActionKind) -> Action:
        counted = I if kind is B else kind
        micro_batch = self.next[stage, counted]
        self.next[stage, counted] += 1
        return Action(stage, kind, micro_batch)


GENERATORS: dict[ScheduleKind, Generator] = {
    ScheduleKind.GPIPE: gpipe,
    ScheduleKind.ONE_F_ONE_B: one_f_one_b,
    ScheduleKind.INTERLEAVED: interleaved,
    ScheduleKind.ZB1P: zb1p,
    ScheduleKind.ZBV: zbv,
    ScheduleKind.DUALPIPEV: dualpipev,
}
