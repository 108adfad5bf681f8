"""Which weights one exchange gathers, what that takes, and how much of them is there at once."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.comparing.measured_peak import peak_bytes
from autopar.results.plan.plan import Plan
from autopar.runtime.collectives import groups, transport
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.torch_seams.autograd import graph_task
from tests.pool import Pool
from tests.whole_tensors import full_of

Pools = Callable[[int], Pool]
WIDTH = 64


class Block(nn.Module):
    """Layers of one block, one of which is frozen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.still = nn.Linear(width, width).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(self.still(x)))))


class Net(nn.Module):
    """Two blocks that share no weight, and a scale that both use."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.scale, self.head = nn.Parameter(torch.ones(width)), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return self.head(x).square().mean()


def _plan(shard_state: str = "weights", *, width: int = WIDTH, **options: object) -> Plan:
    torch.manual_seed(0)
    given = {"force": "batch", "measure": False, "optimizer": "sgd", "shard_state": shard_state} | options
    return autopar.plan(Net(width), autopar.ClusterSpec.local(2), (torch.randn(8, width),), **given)


@pytest.mark.parametrize("shard_state", ["weights", "gradients"])
def test_weights_of_a_block_that_are_gathered_alike_are_a_group(shard_state: str) -> None:
    found = _plan(shard_state).program
    learning = ("norm_weight", "norm_bias", "up_weight", "up_bias", "down_weight", "down_bias")
    blocks = [tuple(f"blocks_{number}_{name}" for name in learning) for number in range(2)]
    assert [names for names in found.together if names[0].startswith("blocks")] == blocks
    assert all(len(found.moves[name]) == 1 for names in found.together for name in names)


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_casts_of_a_block_that_are_gathered_alike_are_a_group(reduce: str) -> None:
    plan = _plan(dtype="bf16", reduce_dtype=reduce)
    cast = [names for names in plan.program.together if names[0].endswith("_to")]
    assert [len(names) for names in cast[:2]] == [4, 4]  # matrices and biases of two layers a block
    assert plan.program.reduce.value == reduce


@pytest.mark.parametrize("schedule, grouped", [("1f1b", True), ("gpipe", True), ("zb1p", False)])
def test_stages_gather_groups_of_their_own_weights(schedule: str, *, grouped: bool) -> None:
    """Where backward is split gradients of weights are made one by one."""
    torch.manual_seed(0)
    options = {"force": "batch", "measure": False, "shard_state": "weights", "schedule": schedule}
    x = torch.randn(8, WIDTH)
    plan = autopar.plan(Net(), autopar.ClusterSpec.local(4), (x,), stages=2, micro_batches=4, **options)
    assert bool(plan.program.together) == grouped
    owner = {name: names[0].split("_norm")[0] for names in plan.program.together for name in names}
    assert all(name.startswith(block) for name, block in owner.items() if name.startswith("blocks"))


def test_weights_that_are_gathered_once_a_step_or_not_at_all_are_in_no_group() -> None:
    assert not _plan("optimizer").program.together and not _plan("none").program.together


def test_a_weight_as_large_as_a_bucket_of_its_own_travels_alone() -> None:
    found = _plan(width=1024).program.together  # 4 MiB a matrix
    large = {f"blocks_{number}_{name}_weight" for number in range(2) for name in ("up", "down")}
    assert found and large.isdisjoint(name for names in found for name in names)


def test_groups_are_as_small_as_the_cap_asks_for() -> None:
    free = _plan()
    capped = _plan(memory=free.peak_bytes - 1)
    assert capped.peak_bytes < free.peak_bytes
    assert sum(map(len, capped.program.together)) < sum(map(len, free.program.together))


def test_a_group_takes_less_than_its_weights_one_by_one() -> None:
    """On links of 1 ms latency a step spares one of them for each weight but the first, forward and back."""
    link = autopar.Link(latency=1e-3, bandwidth=1e12)
    seconds = {}
    for together in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not together:
                patch.setattr("autopar.cost.program.grouped_gathers._groups", lambda *_: ())
            cluster = autopar.ClusterSpec(nodes=1, devices_per_node=2, intra=link)
            plan = autopar.plan(
                Net(), cluster, (torch.randn(8, WIDTH),), force="batch", measure=False, shard_state="weights"
            )
            seconds[together] = plan.step_seconds
    spared = seconds[False] - seconds[True]
    groups = _plan().program.together
    assert spared == pytest.approx(2e-3 * sum(len(names) - 1 for names in groups), rel=0.5)


class Whole(nn.Module):
    """A block with a batch norm, which every rank computes whole as its samples are few and small."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv1d(2, 8, 3, padding=1), nn.BatchNorm1d(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))).mean(2)).square().mean()


def _train_whole() -> tuple[tuple[str, ...], ...]:
    torch.manual_seed(0)
    serial, x = Whole().double(), torch.randn(4, 2, 3, dtype=torch.float64)
    ours = autopar.parallelize(
        copy.deepcopy(serial),
        autopar.ClusterSpec.local(2),
        (x,),
        force="batch",
        measure=False,
        shard_state="weights",
        quiet=True,
    )
    for model in (serial, ours):
        model(x).backward()
    for (name, mine), theirs in zip(ours.named_parameters(), serial.parameters(), strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert torch.allclose(full_of(mine.grad), theirs.grad, rtol=1e-12, atol=1e-14), name
    return ours.plan.program.together


def test_gradients_that_are_whole_everywhere_are_not_summed(pools: Pools) -> None:
    """A group of its own has the weights of what every rank computes."""
    for found in pools(2).run(_train_whole):
        assert ("norm_weight", "norm_bias") in found and len(found) == 2


def _parallel(x: Tensor, shard_state: str, dtype: str, *, overlap: bool = False) -> ParallelModule:
    torch.manual_seed(0)
    options = {"force": "batch", "measure": False, "quiet": True, "optimizer": "sgd", "overlap": overlap}
    return autopar.parallelize(
        Net(), autopar.ClusterSpec.local(2), (x,), shard_state=shard_state, dtype=dtype, **options
    )


def _trained(shard_state: str, *, overlap: bool) -> tuple[list[Tensor], int]:
    """Weights after three steps without streams, and gathers of groups that started in backward."""
    x, started = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)), [0]
    gather = transport.start_all_gather

    def start_all_gather(*args: Any) -> Any:
        started[0] += graph_task() != -1
        return gather(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "wires", lambda _: None)
        patch.setattr(transport, "start_all_gather", start_all_gather)
        ours = _parallel(x, shard_state, "bf16", overlap=overlap)
        assert len(ours.plan.program.together) >= 3
        optimizer = torch.optim.SGD(ours.parameters(), 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            ours(x).backward()
            optimizer.step()
    return [full_of(item) for item in ours.parameters()], started[0]


def _compare_overlap(shard_state: str) -> None:
    (early, begun), (late, _) = (_trained(shard_state, overlap=overlap) for overlap in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(early, late, strict=True))
    assert bool(begun) == (shard_state == "weights")


@pytest.mark.parametrize("shard_state", ["weights", "gradients"])
def test_groups_that_start_early_train_as_those_that_dont(shard_state: str, pools: Pools) -> None:
    """From the second step on backward starts the group that came next in the one before."""
    pools(2).run(_compare_overlap, shard_state)


def _gradients(together: bool) -> list[Tensor]:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
    with pytest.MonkeyPatch.context() as patch:
        if not together:
            patch.setattr("autopar.cost.program.grouped_gathers._groups", lambda *_: ())
        ours = _parallel(x, "weights", "bf16")
        assert bool(ours.plan.program.together) == together
        ours(x).backward()
    return [full_of(item.grad) for item in ours.parameters() if item.requires_grad]


def _compare_gradients() -> None:
    for one, other in zip(_gradients(True), _gradients(False), strict=True):
        assert torch.equal(one, other) and one.any()


def test_gradients_of_casts_in_groups_are_those_of_each_alone(pools: Pools) -> None:
    pools(2).run(_compare_gradients)


def _peaks(shard_state: str, dtype: str) -> tuple[int, int]:
    """Bytes of a step's peak on this rank, as predicted and as measured."""
    x = torch.randn(8, WIDTH)
    ours = _parallel(x, shard_state, dtype)
    assert ours.plan.program.together

    def step() -> None:
        ours(x).backward()

    for _ in range(2):
        step()
        ours.zero_grad()
    return ours.plan.peak_bytes, peak_bytes(step, [*ours.parameters(), x], torch.device("cpu"))


@pytest.mark.parametrize(
    "shard_state, dtype", [("weights", "fp32"), ("gradients", "fp32"), ("weights", "bf16")]
)
def test_the_predicted_peak_with_groups_is_the_measured_one(
    shard_state: str, dtype: str, pools: Pools
) -> None:
    for predicted, measured in pools(2).run(_peaks, shard_state, dtype):
        assert predicted == pytest.approx(measured, rel=0.05), (predicted, measured)
