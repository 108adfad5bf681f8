"""The fullest rank of a graph is priced, and rows that are exchanged count as they are; by hand, in units."""

from __future__ import annotations

import pytest
import torch

from autopar.core.strategy import Strategy
from autopar.cost.operators.exchanges import INNER_LAUNCHES
from autopar.cost.operators.price import Price
from autopar.cost.operators.prices import Prices
from autopar.proof.operators import OneOperator
from autopar.sharding.rule import Sample
from autopar.sharding.strategies import find_atoms, strategies_of
from autopar.trace.forms.sparse_products import PRODUCT
from tests.cost.operators.test_prices import priced

LENGTH = 8  # four rows on each of two ranks


def prices_of(rows: list[int], columns: list[int]) -> Prices:
    """Of a product with a column of eight numbers of 8 bytes."""
    args = torch.tensor(rows), torch.tensor(columns), torch.ones(len(rows)), torch.ones(LENGTH, 1), LENGTH
    one = OneOperator(Sample(PRODUCT, args, constant=("operand_2",)))
    return priced(one.graph, find_atoms(one.graph))


def strategy(prices: Prices, factor: str) -> Strategy:
    (operation,) = prices.graph.operators
    (found,) = (each for each in strategies_of(operation, prices.dims) if each[0].factor == factor)
    return found


def price(prices: Prices, factor: str) -> Price:
    return prices.operator(prices.graph.operators[0], strategy(prices, factor))


@pytest.mark.parametrize("columns", [[5, 6, 0], [0, 5, 6]])
def test_an_exchange_costs_its_messages_and_its_copies(columns: list[int]) -> None:
    """The first rank reads two rows of the other, which reads none: a message of 16 bytes each way."""
    found = price(prices_of([0, 1, 2], columns), "r")
    copied = 4 * 8 + 2 * 8  # own rows, and those that come
    assert found.communication == 2 * (INNER_LAUNCHES["cuda"] + 2 * copied + 1 + 16)


def test_ranks_that_read_their_own_rows_alone_send_nothing() -> None:
    found = price(prices_of([0, 1, 5], [0, 1, 5]), "r")
    assert found.communication == 0


@pytest.mark.parametrize("factor", ["i", "r"])
def test_the_rank_with_the_most_entries_is_priced(factor: str) -> None:
    """The second rank has four of the five entries, and both have as many rows."""
    prices = prices_of([0, 4, 5, 6, 7], [0, 4, 5, 6, 7])
    *_, call = price(prices, factor).calls
    assert call.args[1].shape == (4,)


def test_a_rank_holds_its_block_in_both_forms() -> None:
    """Of the fullest rank: 4 entries in 4 rows, by rows and by columns, with 4 bytes an index."""
    prices = prices_of([0, 4, 5, 6, 7], [0, 4, 5, 6, 7])
    (operation,) = prices.graph.operators
    rows, entries = 4 + 1, 4
    parts = prices.parts(operation, strategy(prices, "i"))
    indices, values = 4 * (rows + 2 * entries + LENGTH + 1), 8 * entries
    assert sum(parts.values()) == indices + 2 * values


def test_blocks_along_other_axes_are_other_tensors_also_where_the_axes_are_alike() -> None:
    """One that two operators cut along different axes would else be counted once."""
    one = OneOperator(
        Sample(PRODUCT, (*torch.tensor([[0, 2, 5], [1, 3, 4]]), torch.ones(3), torch.ones(8, 1), 8))
    )
    prices = priced(one.graph, find_atoms(one.graph), ranks=(2, 2))
    (operation,) = one.graph.operators
    by = {tuple(map(str, each)): each for each in strategies_of(operation, prices.dims)}
    minor, major = (prices.parts(operation, by[factors]) for factors in (("-", "i"), ("i", "-")))
    assert minor and sum(minor.values()) == sum(major.values()) and minor.keys() != major.keys()
