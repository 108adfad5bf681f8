"""Collectives of compiled graphs keep the order of the program, on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

import autopar.runtime.collectives.placement_moves  # noqa: F401  (registers the operators)
from autopar.core.mesh import Mesh
from autopar.errors import CheckError
from autopar.runtime import registry
from autopar.runtime.collectives import groups
from autopar.runtime.compiled.turns import InTurn
from tests.pool import Pool

Pools = Callable[[int], Pool]
MESH = Mesh((2,))
KEY = MESH.key((0,))
TIMEOUT = timedelta(seconds=60)
OURS = torch.ops.autopar


def _graph(function: Callable[..., Tensor], *tensors: Tensor) -> fx.Graph:
    with groups.as_rank(0):
        return make_fx(function, tracing_mode="fake")(*tensors).graph


def _two_sums(x: Tensor) -> Tensor:
    """Two collectives that don't depend on each other, and a move within the rank."""
    gathered = OURS.s_to_r(x, KEY, 0, 1, [4, 4])
    return (gathered * OURS.p_to_r(x, KEY).sum() + OURS.r_to_p(gathered, KEY)).sum()


def test_collectives_take_turns_in_the_order_of_the_graph() -> None:
    graph = _graph(_two_sums, torch.randn(4))
    InTurn()(graph)
    graph.lint()
    calls = [node for node in graph.nodes if getattr(node.target, "namespace", "") == "autopar"]
    names = [node.target._opname for node in calls]
    assert names == ["begin_turns", "s_to_r_in_turn", "p_to_r_in_turn", "r_to_p"]
    begin, *ordered, local = calls
    assert all(node.args[-1] is begin for node in ordered) and begin not in local.all_input_nodes
    assert begin.args[1] == [KEY]


def test_what_takes_turns_writes_to_its_turn_alone() -> None:
    twin = registry.in_turn(OURS.p_to_r.default)
    written = [item.name for item in twin._schema.arguments if item.alias_info and item.alias_info.is_write]
    assert written == ["turn"] and registry.in_turn(OURS.p_to_r.default) is twin
    assert registry.in_turn(OURS.r_to_s.default) is registry.in_turn(torch.ops.aten.relu.default) is None


def test_a_graph_without_collectives_stays_as_it_is() -> None:
    graph = _graph(lambda x: x.relu().sum(), torch.randn(4))
    before = str(graph)
    InTurn()(graph)
    assert str(graph) == before


def _begin_unlike() -> str:
    groups.setup(MESH, [KEY], timeout=TIMEOUT)
    OURS.begin_turns("aaaa", [KEY])
    with pytest.raises(CheckError) as raised:
        OURS.begin_turns(f"bbb{dist.get_rank()}", [KEY])
    OURS.begin_turns("aaaa", [KEY])
    return str(raised.value)


def test_ranks_with_other_collectives_are_found_at_the_first_call(pools: Pools) -> None:
    for found in pools(2).run(_begin_unlike):
        assert "other collectives, or in another order" in found
