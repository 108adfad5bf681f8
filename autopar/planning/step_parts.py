"""Where the seconds of a step go: compute, communication, waits, gradient sums, the optimizer.

Without stages all is done one after the other, but for what hides behind compute (`StepCost`):

    M (compute + recompute + communication + copies + ties) + sums + optimizer + waits  =  step

where a GPU waits for its host to call the operators.

With stages the simulated step of the average rank is cut at its waits. A rank that computes nothing waits for
its own gradient sums, for a message that is under way to it, or for a stage that still computes:

    rank 1   ....----..====ssu        . waits    . hops, while rank 0 sends    s sums, not overlapped
    sends    ..~~   ~~                communication while a rank computes is hidden
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autopar.core.pipeline import Pipeline
from autopar.core.timeline import Event, RankActivity, Timeline
from autopar.cost.program.offload import wait_seconds
from autopar.cost.program.recompute import recompute_seconds
from autopar.results.plan.step_parts import StepParts
from autopar.schedules.fill_bubbles import order_of
from autopar.schedules.simulate import simulate
from autopar.solve.stages.step import Step

Spans = list[tuple[float, float]]  # apart from each other, in order


def step_parts(step: Step, pipeline: Pipeline) -> StepParts:
    """The parts of a step, which add up to its seconds."""
    priced = step.solution.priced
    repeated = StepParts(
        compute=sum(price.compute for price in priced.operator_prices),
        recompute=recompute_seconds(priced),
        ties=sum(price.tie for price in priced.operator_prices),
    )
    if step.cut is None:
        copies = sum(wait_seconds(priced))
        rest = step.cost.micro_batch - repeated.total - copies
        each = replace(repeated, communication=max(0.0, rest), copies=copies)
        found = replace(
            scaled(each, pipeline.micro_batches),
            sums=step.cost.exposed,
            optimizer=step.cost.update,
            hidden=step.cost.hidden + pipeline.micro_batches * step.cost.beside,
        )
        return replace(found, waits=step.calls - found.total) if step.calls > found.total else found
    return staged_parts(
        scaled(repeated, pipeline.micro_batches / pipeline.ranks),
        simulate(order_of(pipeline), step.cut.stages),
        step.seconds,
    )


def scaled(parts: StepParts, factor: float) -> StepParts:
    """All parts times `factor`."""
    return StepParts(**{name: factor * seconds for name, seconds in parts.as_dict().items()})


def staged_parts(repeated: StepParts, timeline: Timeline, seconds: float) -> StepParts:
    """The parts of a step of so many seconds, as the average rank has them. It does what is `repeated`, and
    waits as the timeline shows."""
    ranks = timeline.schedule.ranks
    sums = hops = busy = update = under_way = 0.0
    for rank in range(ranks):
        own = [event for event in timeline.events if event.rank == rank and event.computes]
        busy_spans = joined(own)
        syncs = [event for event in timeline.events if event.rank == rank and event.kind is RankActivity.SYNC]
        comes = [each for each in timeline.events if _receiver(each, timeline) == rank]
        summing = without(joined(syncs), busy_spans)
        sums += length(summing)
        hops += length(without(without(joined(comes), busy_spans), summing))
        update += sum(event.stop - event.start for event in own if event.kind is RankActivity.UPDATE)
        busy += length(busy_spans)
        under_way += sum(event.stop - event.start for event in (*syncs, *comes))
    sums, hops, busy, update, under_way = (each / ranks for each in (sums, hops, busy, update, under_way))
    work = busy - update
    rest = work - repeated.total  # of what stages do: what operators and conversions exchange
    return replace(
        repeated,
        compute=repeated.compute + min(0.0, rest),
        communication=max(0.0, rest),
        hops=hops,
        sums=sums,
        optimizer=update,
        waits=max(0.0, seconds - busy - hops - sums),
        hidden=max(0.0, under_way - sums - hops),
    )


def _receiver(event: Event, timeline: Timeline) -> int | None:
    """The rank to which a send goes."""
    return None if event.to_stage is None else timeline.schedule.rank_of(event.to_stage)


def joined(events: Sequence[Event]) -> Spans:
    """Spans in which at least one of the events goes on."""
    found: Spans = []
    for start, stop in sorted((event.start, event.stop) for event in events):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def without(spans: Spans, others: Spans) -> Spans:
    """The parts of `spans` in which none of `others` goes on."""
    found: Spans = []
    place = 0  # of the first of the others that isn't over
    for start, stop in spans:
        while place < len(others) and others[place][1] <= start:
            place += 1
        at = place
        while at < len(others) and others[at][0] < stop:
            if others[at][0] > start:
                found.append((start, others[at][0]))
            start = max(start, others[at][1])
            at += 1
        if start < stop:
            found.append((start, stop))
    return found


def length(spans: Spans) -> float:
    """Seconds of all spans together."""
    return sum(stop - start for start, stop in spans)
