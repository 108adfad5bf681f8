"""NCCL's collectives by hand, and what their forms have in common."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.cluster import Link
from autopar.core.costs import Collective
from autopar.cost.machine.nccl import LL, SIMPLE, RankGroup, ring, seconds, tree

AR, AG, RS = Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.REDUCE_SCATTER
NODE = RankGroup(8, 1, Link(0.0, 450e9), None)
FOUR = RankGroup(32, 4, Link(0.0, 450e9), Link(0.0, 50e9))


def test_an_all_reduce_of_a_few_bytes_within_a_node_takes_what_nccl_says() -> None:
    """15 us with the low-latency protocol, 56 us with the simple one."""
    assert ring(AR, NODE, LL).at(0) == pytest.approx((6.6 + 14 * 0.6) * 1e-6)
    assert ring(AR, NODE, SIMPLE).at(0) == pytest.approx((8.4 + 14 * 3.4) * 1e-6)
    assert seconds(AR, 8, NODE) == pytest.approx(15e-6, rel=0.01)


def test_large_messages_take_what_the_links_let_through() -> None:
    nbytes = 1 << 40
    assert seconds(AR, nbytes, NODE) == pytest.approx(2 * 7 / 8 * nbytes / 450e9, rel=1e-3)
    assert seconds(AG, nbytes, NODE) == pytest.approx(7 / 8 * nbytes / 450e9, rel=1e-3)
    assert seconds(RS, nbytes, FOUR) == pytest.approx(31 / 32 * nbytes / 400e9, rel=1e-3)


def test_ranks_of_a_group_on_one_node_send_through_all_their_cards() -> None:
    alone, pair = (RankGroup(4 * count, 4, Link(0.0, 450e9), Link(0.0, 50e9)) for count in (1, 2))
    assert (alone.bandwidth, pair.bandwidth, FOUR.bandwidth) == (50e9, 100e9, 400e9)
    assert RankGroup(64, 4, Link(0.0, 450e9), Link(0.0, 50e9)).bandwidth == 450e9


def test_a_ring_between_nodes_crosses_as_many_networks_as_there_are_nodes() -> None:
    hops = 3 * 2.7 + 28 * 0.6
    assert ring(AG, FOUR, LL).at(0) == pytest.approx((6.6 + hops) * 1e-6)
    assert ring(AG, FOUR, SIMPLE).at(0) == pytest.approx(1.4 * (8.4 + 3 * 14 + 28 * 3.4) * 1e-6)
    assert tree(FOUR, LL).at(0) == pytest.approx((6.8 + 2 * (7 * 0.6 + 2 * 5.0)) * 1e-6)


def test_a_link_that_is_known_to_be_slower_counts() -> None:
    slow = RankGroup(32, 4, Link(0.0, 450e9), Link(1e-3, 50e9))
    assert seconds(AG, 0, slow) == pytest.approx(3e-3, rel=0.1)


def test_trees_are_chosen_where_rings_have_too_many_hops() -> None:
    many = RankGroup(512, 64, Link(0.0, 450e9), Link(0.0, 50e9))
    assert seconds(AR, 1 << 10, many) == tree(many, LL).at(1 << 10)
    assert seconds(AR, 1 << 40, many) == ring(AR, many, SIMPLE).at(1 << 40)


def test_messages_have_no_form_and_one_rank_pays_nothing() -> None:
    assert seconds(Collective.SEND_RECV, 8, NODE) is None and seconds(Collective.ALL_TO_ALL, 8, NODE) is None
    assert seconds(AR, 1 << 20, RankGroup(1, 1, Link(1.0, 1.0), None)) == 0.0


@given(st.integers(0, 1 << 34), st.integers(0, 1 << 34), st.sampled_from([AR, AG, RS]))
def test_more_bytes_never_take_less(one: int, other: int, kind: Collective) -> None:
    less, more = sorted((one, other))
    found = [seconds(kind, nbytes, FOUR) for nbytes in (less, more)]
    assert found[0] is not None and found[1] is not None and found[0] <= found[1]
