"""Rows that a graph names travel on real processes as they are simulated; gradients add up at home."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from autopar.core.mesh import Mesh, parse_key
from autopar.proof.simulated import Call, simulate
from autopar.runtime.collectives import groups, placement_moves
from tests.pool import Pool
from tests.runtime.collectives.cases import TIMEOUT, all_keys, groups_of

assert placement_moves  # its import registers the operators
Pools = Callable[[int], Pool]
NEEDED = torch.ops.autopar.needed_rows.default


@dataclass(frozen=True)
class Named:
    """Each rank's own rows, which of them it sends, how many to and from whom, gradients of all."""

    key: str
    inputs: list[Tensor]
    rows: list[Tensor]
    sends: list[list[int]]
    receives: list[list[int]]
    gradients: list[Tensor]

    def call(self, rank: int, x: Tensor) -> Call:
        return (x, self.key, self.rows[rank], self.sends[rank], self.receives[rank]), {}


def drawn(key: str, seed: int) -> Named:
    """A graph in which any rank may read any row of another's, or none, and some rank has no row."""
    generator = torch.Generator().manual_seed(seed)
    world = parse_key(key)[0].num_devices
    empty = Named(key, [torch.empty(0)] * world, [torch.empty(0)] * world, [[]] * world, [[]] * world, [])
    gradients: dict[int, Tensor] = {}
    for ranks in groups_of(key):
        lengths = torch.randint(0, 5, (len(ranks),), generator=generator).tolist()
        sent = [
            [
                torch.empty(0, dtype=torch.int64)
                if me == to or not length
                else torch.randint(0, length, (int(torch.randint(0, 4, (), generator=generator)),))
                for to in range(len(ranks))
            ]
            for me, length in enumerate(lengths)
        ]
        for me, rank in enumerate(ranks):
            empty.inputs[rank] = torch.randn(lengths[me], 2, dtype=torch.float64, generator=generator)
            empty.rows[rank] = torch.cat(sent[me])
            empty.sends[rank] = [len(each) for each in sent[me]]
            empty.receives[rank] = [len(each[me]) for each in sent]
            shape = lengths[me] + sum(empty.receives[rank]), 2
            gradients[rank] = torch.randn(shape, dtype=torch.float64, generator=generator)
    empty.gradients.extend(gradients[rank] for rank in range(world))
    return empty


def execute(cases: list[Named]) -> list[tuple[Tensor, Tensor]]:
    mesh = parse_key(cases[0].key)[0]
    groups.setup(mesh, all_keys(mesh), timeout=TIMEOUT)
    rank, found = torch.distributed.get_rank(), []
    for case in cases:
        x = case.inputs[rank].clone().requires_grad_()
        y = NEEDED(*case.call(rank, x)[0])
        y.backward(case.gradients[rank])
        assert x.grad is not None
        found.append((y.detach(), x.grad))
    return found


@pytest.mark.parametrize("key", ["a@2", "a@3", "b@2x2", "ab@2x2"])
def test_named_rows_are_exchanged_as_they_are_simulated(key: str, pools: Pools) -> None:
    cases = [drawn(key, seed) for seed in range(8)]
    results = pools(parse_key(key)[0].num_devices).run(execute, cases)
    for number, case in enumerate(cases):
        for ranks in groups_of(key):
            leaves = [case.inputs[rank].clone().requires_grad_() for rank in ranks]
            wanted = simulate(NEEDED, [case.call(rank, x) for rank, x in zip(ranks, leaves, strict=True)])
            torch.autograd.backward(wanted, [case.gradients[rank] for rank in ranks])
            for rank, x, y in zip(ranks, leaves, wanted, strict=True):
                torch.testing.assert_close(results[rank][number][0], y.detach())
                slope = torch.zeros_like(x) if x.grad is None else x.grad
                torch.testing.assert_close(results[rank][number][1], slope)


def test_own_rows_come_first_and_others_by_owner() -> None:
    """The drawing of `autopar/sharding/needed_rows.py`."""
    left, right = torch.arange(4.0)[:, None], torch.arange(4.0, 8.0)[:, None]
    calls: list[Call] = [
        ((left, "a@2", torch.tensor([0]), [0, 1], [0, 2]), {}),
        ((right, "a@2", torch.tensor([1, 2]), [2, 0], [1, 0]), {}),
    ]
    first, second = simulate(NEEDED, calls)
    assert first[:, 0].tolist() == [0, 1, 2, 3, 5, 6] and second[:, 0].tolist() == [4, 5, 6, 7, 0]


def _check_registration() -> None:
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    x, rows = torch.randn(3, 2, requires_grad=True), torch.tensor([2, 0])
    me = torch.distributed.get_rank()
    counts = [0, 2] if me == 0 else [2, 0]
    torch.library.opcheck(NEEDED, (x, "a@2", rows, counts, counts))


def test_torch_accepts_the_registration(pools: Pools) -> None:
    pools(2).run(_check_registration)
