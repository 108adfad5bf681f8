"""Copies of weights on the host hide behind what is computed meanwhile, and behind nothing else."""

from __future__ import annotations

from random import Random

import pytest
import torch

from autopar.cluster import Link
from autopar.core.mesh import Mesh
from autopar.cost.operators.prices import Prices
from autopar.cost.program.offload import clock, wait_seconds
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.program.streams import AheadCopy, hidden, most_streamed
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from tests.deep_net import Deep
from tests.forced_programs import force_kinds, traced
from tests.planning.test_out_of_core import LAYER, LAYERS, WIDTH, cluster
from tests.runtime.forced_compiler import ROUGH


def streaming(link: Link) -> PricedProgram:
    """The deep net, all of its weights ahead from a host at the end of a link."""
    graph, _ = traced(Deep(LAYERS), torch.randn(8, WIDTH))
    dims = Dims(graph, find_atoms(graph), Mesh((1,)))
    names = tuple(item.name for item in graph.inputs if item.spec.requires_grad)
    prices = Prices(graph, dims, cluster(host=link), ROUGH)
    return PricedProgram(prices, force_kinds(graph, dims, ["batch"])).hosting(names).remedied(ahead=names)


def test_behind_long_operators_the_first_copies_and_the_last_gradient_show() -> None:
    once = 1e-9
    priced = streaming(Link(bandwidth=LAYER * 1e12, latency=once - 1e-12))
    assert wait_seconds(priced) == pytest.approx((once, 2 * once))
    assert wait_seconds(priced.remedied(ahead=())) == pytest.approx((LAYERS * once, (2 * LAYERS - 1) * once))


def test_behind_short_operators_as_much_hides_as_is_computed() -> None:
    priced = streaming(Link(bandwidth=1.0, latency=1.0))
    whole, shown = wait_seconds(priced.remedied(ahead=())), wait_seconds(priced)
    times, matrices = clock(priced), [item.startswith("linear") for item in names(priced)]
    first, last = matrices.index(True), len(matrices) - 1 - matrices[::-1].index(True)
    assert whole[0] - shown[0] == pytest.approx(times.forward[last] - times.forward[first], abs=1e-6)
    assert 0.0 < whole[1] - shown[1] <= times.backward[0]
    assert sum(whole) == pytest.approx(most_streamed(priced.prices))


def names(priced: PricedProgram) -> list[str]:
    return [item.name for item in priced.graph.operators]


def test_ahead_of_none_but_some_the_others_are_waited_for() -> None:
    once = 1e-9
    priced = streaming(Link(bandwidth=LAYER * 1e12, latency=once - 1e-12))
    some = priced.remedied(ahead=priced.program.on_host[:4])
    assert wait_seconds(some)[0] == pytest.approx((LAYERS - 3) * once)
    assert wait_seconds(some)[1] == pytest.approx((2 * LAYERS - 1 - 6) * once)  # 3 reads, 3 gradients


@pytest.mark.parametrize("seed", range(20))
def test_what_hides_is_what_a_clock_that_ticks_finds(seed: int) -> None:
    random, copies, now = Random(seed), list[AheadCopy](), 0
    for _ in range(random.randint(1, 8)):
        begins = now
        now += random.randint(0, 5)
        copies.append(AheadCopy(random.randint(1, 6), begins, now))
        if random.random() < 0.5:
            copies.append(AheadCopy(random.randint(1, 4), begins, now + random.randint(0, 3)))
    copies.sort(key=lambda copy: (copy.begins, copy.needed))
    assert hidden(copies) == pytest.approx(sum(copy.seconds for copy in copies) - ticked(copies))


def ticked(copies: list[AheadCopy]) -> float:
    """By how much the copies delay the end, second by second: one copies, or one computes and copies."""
    computed = late = 0
    left = [copy.seconds for copy in copies]
    end = max(copy.needed for copy in copies)
    while computed < end or any(left):
        begun = [place for place, copy in enumerate(copies) if left[place] and copy.begins <= computed]
        waits = any(left[place] and copy.needed <= computed for place, copy in enumerate(copies))
        late += waits
        computed += not waits
        if begun:
            left[begun[0]] -= 1
    return late
