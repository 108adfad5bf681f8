"""Rows travel to their experts' owners on real processes as they are simulated, and gradients back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from autopar.core.mesh import Mesh, parse_key
from autopar.errors import InputError
from autopar.proof.simulated import Call, simulate
from autopar.runtime.collectives import groups, placement_moves
from autopar.trace.experts.sent_rows import KEYS_OF_COUNTS, ROWS_TO_SEND
from tests.pool import Pool
from tests.runtime.collectives.cases import TIMEOUT, all_keys, groups_of

assert placement_moves  # its import registers the operators
Pools = Callable[[int], Pool]
COUNTS = torch.ops.autopar.expert_counts.default
TRAVEL = torch.ops.autopar.travel.default


@dataclass(frozen=True)
class Routed:
    """Experts of each place of a group, and by rank of the world rows, how many go to each expert, and
    gradients of rows that went and came back."""

    key: str
    lengths: list[int]
    rows: list[Tensor]
    sent: list[Tensor]
    gradients: list[Tensor]

    def counts(self, rank: int, place: int) -> Call:
        return (self.sent[rank], self.lengths, place, self.key), {}

    def travel(self, rank: int, x: Tensor, got: Tensor, *, back: bool) -> Call:
        return (x, self.sent[rank], got, self.lengths, back, 0, self.key), {}


def drawn(key: str, seed: int, dtype: torch.dtype) -> Routed:
    """Some experts get no row, and a rank may have none; places own different numbers of experts."""
    generator = torch.Generator().manual_seed(seed)
    world, size = parse_key(key)[0].num_devices, len(groups_of(key)[0])
    lengths = torch.randint(1, 4, (size,), generator=generator).tolist()
    sent = [torch.randint(0, 3, (sum(lengths),), generator=generator) for _ in range(world)]
    sent[0] *= seed % 2  # none in every second case
    rows, gradients = (
        [torch.randn(int(each.sum()), 3, generator=generator).to(dtype) for each in sent] for _ in range(2)
    )
    return Routed(key, lengths, rows, sent, gradients)


def execute(cases: list[Routed]) -> list[tuple[Tensor, Tensor, Tensor]]:
    mesh = parse_key(cases[0].key)[0]
    groups.setup(mesh, all_keys(mesh), timeout=TIMEOUT)
    rank, found = torch.distributed.get_rank(), []
    for case in cases:
        x = case.rows[rank].clone().requires_grad_()
        got = COUNTS(*case.counts(rank, groups.index(case.key))[0])
        there = TRAVEL(*case.travel(rank, x, got, back=False)[0])
        here = TRAVEL(*case.travel(rank, there.square(), got, back=True)[0])
        here.backward(case.gradients[rank])
        assert x.grad is not None
        found.append((there.detach(), here.detach(), x.grad))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("key", ["a@2", "a@3", "b@2x2", "ab@2x2"])
def test_rows_go_to_their_owners_and_come_back(key: str, dtype: torch.dtype, pools: Pools) -> None:
    cases = [drawn(key, seed, dtype) for seed in range(6)]
    results = pools(parse_key(key)[0].num_devices).run(execute, cases)
    for number, case in enumerate(cases):
        for ranks in groups_of(key):
            leaves = [case.rows[rank].clone().requires_grad_() for rank in ranks]
            got = simulate(COUNTS, [case.counts(rank, place) for place, rank in enumerate(ranks)])
            calls = zip(ranks, leaves, got, strict=True)
            there = simulate(TRAVEL, [case.travel(rank, x, own, back=False) for rank, x, own in calls])
            calls = zip(ranks, [y.square() for y in there], got, strict=True)
            here = simulate(TRAVEL, [case.travel(rank, y, own, back=True) for rank, y, own in calls])
            torch.autograd.backward(here, [case.gradients[rank] for rank in ranks])
            for rank, *wanted in zip(ranks, there, here, [x.grad for x in leaves], strict=True):
                for ours, theirs in zip(results[rank][number], wanted, strict=True):
                    assert theirs is not None and torch.equal(ours, theirs.detach())


def test_the_drawing() -> None:
    """That of `autopar/runtime/collectives/travelling_rows.py`."""
    keys = torch.tensor([2, 0, 1, 2]), torch.tensor([0, 3, 3])
    (sent, picked), (other, _) = (ROWS_TO_SEND(each, 4, [0, 2], [2, 4], 0) for each in keys)
    assert sent.tolist() == [1, 1, 2, 0] and other.tolist() == [1, 0, 0, 2]
    assert picked.tolist() == [1, 2, 0, 3]
    calls: list[Call] = [((each, [2, 2], place, "a@2"), {}) for place, each in enumerate((sent, other))]
    first, second = simulate(COUNTS, calls)
    assert first.tolist() == [1, 1, 1, 0] and second.tolist() == [2, 0, 0, 2]
    assert KEYS_OF_COUNTS(first, 2, 0).tolist() == [0, 1, 0]


def test_an_expert_that_there_is_not_is_refused() -> None:
    with pytest.raises(InputError, match="found expert 4, wanted experts 0 to 3"):
        ROWS_TO_SEND(torch.tensor([0, 4]), 4, [0], [4], 2)


def _check_registration() -> None:
    groups.setup(Mesh((2,)), ["a@2"], timeout=TIMEOUT)
    x, counts = torch.randn(2, 3, requires_grad=True), torch.tensor([1, 1])
    torch.library.opcheck(COUNTS, (counts, [1, 1], torch.distributed.get_rank(), "a@2"))
    torch.library.opcheck(TRAVEL, (x, counts, counts, [1, 1], False, 2, "a@2"))


def test_torch_accepts_the_registration(pools: Pools) -> None:
    pools(2).run(_check_registration)
