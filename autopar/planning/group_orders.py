"""Which groups of unlike devices hold which stages: each order of the kinds is cut, and the fastest is taken.

    cluster   fast fast slow        in the file's order   stages 0 1 on fast, 2 on slow   hosts 0 1 2
                                    the other way round   stage 0 on slow, 1 2 on fast    hosts 2 0 1

Parts of one kind hold stages that follow each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, permutations

from autopar.cluster import ClusterSpec
from autopar.cost.program.priced_program import PricedProgram
from autopar.planning.asked.request import Request
from autopar.solve.stages.step import Step
from autopar.units import show_seconds

MOST_ORDERED_KINDS = 4  # of devices; more stay in the file's order


def unlike_blocks(cluster: ClusterSpec, request: Request) -> tuple[ClusterSpec, ...]:
    """The parts that hold pipeline ranks, with the memory that a plan may take of each; none where they are
    alike."""
    if request.pipeline_ranks == 1 or not cluster.groups:
        return ()
    blocks = cluster.blocks(request.pipeline_ranks)
    if request.memory is not None:
        blocks = tuple(replace(part, memory=request.memory) for part in blocks)
    return blocks if len(set(blocks)) > 1 else ()


def orders_of(blocks: Sequence[ClusterSpec]) -> Iterator[tuple[int, ...]]:
    """For each order of the kinds of parts which part holds each pipeline rank, first the file's own."""
    found: dict[ClusterSpec, list[int]] = {}
    for number, part in enumerate(blocks):
        found.setdefault(part, []).append(number)
    own = tuple(range(len(blocks)))
    yield own
    if len(found) <= MOST_ORDERED_KINDS:
        orders = (tuple(chain.from_iterable(kinds)) for kinds in permutations(found.values()))
        yield from (hosts for hosts in orders if hosts != own)


def hosts_of(ranks: Sequence[ClusterSpec], blocks: Sequence[ClusterSpec]) -> tuple[int, ...]:
    """The part that holds each pipeline rank, () where each holds the rank of its own number."""
    left = dict(enumerate(part.places for part in blocks))
    found = []
    for rank in ranks:
        found.append(next(number for number, places in left.items() if places == rank.places))
        del left[found[-1]]
    return () if found == sorted(found) else tuple(found)


def rank_notes(step: Step, micro_batches: int) -> tuple[str, ...]:
    """A note on which groups hold which ranks of the pipeline, and which of them sets the pace."""
    ranks = step.solution.priced.prices.ranks
    if step.cut is None or step.schedule is None or not ranks:
        return ()
    seconds, stages = [0.0] * len(ranks), step.cut.stages
    for stage, cost in enumerate(stages):
        work = cost.forward + cost.input_gradient + cost.weight_gradient
        seconds[step.schedule.rank_of(stage)] += micro_batches * work
    names = [_names(part) for part in ranks]
    slowest = max(range(len(ranks)), key=lambda rank: seconds[rank])
    told = ", ".join(f"{name} {show_seconds(each)}" for name, each in zip(names, seconds, strict=True))
    return (f"rank {slowest} on {names[slowest]} sets the pace: of a step the pipeline's ranks work {told}",)


def _names(part: ClusterSpec) -> str:
    numbers = sorted({number for groups in part.places for number in groups})
    return " and ".join(part.groups[number].name for number in numbers)


def pace_of(priced: PricedProgram) -> float:
    """The part of a program's seconds that it takes if each rank does what it can; 1 for like ranks.

    It is K over the sum of the ranks' speeds against that of the slowest devices of all.
    """
    ranks = priced.prices.ranks
    if not ranks or priced.cost.micro_batch <= 0:
        return 1.0
    kinds = {part: priced.prices.on_rank(rank) for rank, part in enumerate(ranks)}
    seconds = {part: priced.at(prices).cost.micro_batch for part, prices in kinds.items()}
    return len(ranks) / sum(priced.cost.micro_batch / seconds[part] for part in ranks)
