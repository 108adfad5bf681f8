"""Equal blocks of which some run as one assignment and the others as another, where sums may hide.

    excess of sums over what hides them
      |  .  all as A: faster, but its sums show
      |     .
    --+--------.---------------- blocks
      |           .  all as B: slower, its sums hide with room to spare

        [ B B B B | A A A A A ]     backward comes to A first: its sums have all of the rest to hide behind

Planned alike, blocks choose one of the two, and the bound (multipliers.py) is about what a mixture of both
takes: of deep nets that is a plan, but for one change of assignments. Where blocks should turn follows from
the excess, by the secant; the price of the whole decides.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.core.graph import Graph
from autopar.cost.program.priced_program import PricedProgram
from autopar.solve.choices.fold import Folding
from autopar.solve.stages.mixture import Mixture
from autopar.solve.stages.step import Step

TURN_TRIES = 5  # places at which blocks turn that are priced


def turned(
    hides: Step, shows: Step, folding: Folding, *, count: int, cap: int | None
) -> PricedProgram | None:
    """The fastest program whose first blocks run as one assignment and the last ones as another.

    Of the one sums hide, of the other they show. A step has `count` micro-batches. None if no such program
    meets the cap.
    """
    programs = [each.solution.priced for each in (hides, shows)]
    if any(each.program.recompute or each.program.offload for each in programs):
        return None
    graph, prices = programs[0].graph, programs[0].prices
    mixture = Mixture([each.program for each in programs], prices, joins=True)
    places, found = [0, *seams(graph, folding), len(graph.operators)], list[PricedProgram]()
    low, high = 0, len(places) - 1  # all blocks show, and all hide
    above, below = excess(programs[1]), excess(programs[0])
    for _ in range(TURN_TRIES):
        if high - low < 2 or above <= below:
            break
        middle = low + round((high - low) * above / (above - below))
        middle = min(max(middle, low + 1), high - 1)
        program = mixture.program(mixture.turning(places[middle], 0, 1))
        if program is None:
            break
        priced = PricedProgram(prices, program)
        found.append(priced)
        over = excess(priced)
        low, above = (middle, over) if over > 0 else (low, above)
        high, below = (high, below) if over > 0 else (middle, over)
    found.sort(key=lambda each: each.cost.of(count))
    return next((each for each in found if cap is None or each.peak.nbytes <= cap), None)


def seams(graph: Graph, folding: Folding) -> Sequence[int]:
    """The places between blocks that are equal: where an operator's repetition isn't that of the last one."""
    blocks = [folding.repetition.get(item.name) for item in graph.operators]
    return [
        place for place, pair in enumerate(zip(blocks, blocks[1:], strict=False), 1) if pair[0] != pair[1]
    ]


def excess(priced: PricedProgram) -> float:
    """Seconds by which sums, and what starts early, exceed what they may hide behind."""
    prices, costs = priced.prices, priced.operator_prices
    computed = sum(each.compute if prices.early else each.behind for each in costs)
    cost, weight = priced.cost, prices.step_weight
    return weight * cost.summed + cost.early - prices.overlap * computed * (1.0 if prices.early else weight)
