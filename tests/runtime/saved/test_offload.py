"""Activations that wait in the host's memory: the serial model's numbers, and less memory on the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage, nn

from autopar.comparing.measured_peak import StorageTracker, peak_bytes
from autopar.core.costs import OptimizerState
from autopar.core.gathering import Gathering
from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.core.schedule import ScheduleKind
from autopar.cost.operators.prices import Prices
from autopar.cost.program.priced_program import PricedProgram
from autopar.cost.stages.intervals import intervals
from autopar.errors import InputError
from autopar.rewrite.render import describe
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.saved import offload
from autopar.runtime.saved.offload import AHEAD, HostStorage, saving_there
from autopar.schedules.in_flight import scheduled
from autopar.sharding.atoms import Dims
from autopar.sharding.strategies import find_atoms
from autopar.solve.stages import cut_search
from tests.pool import Pool
from tests.runtime.forced_compiler import ROUGH, forced_compiler
from tests.runtime.saved.test_regather import train

Pools = Callable[[int], Pool]
Patch = pytest.MonkeyPatch
CPU = torch.device("cpu")
N = 8000  # bytes of a vector


# -- a few calls, by hand ---------------------------------------------------------------------------------


def chain(x: Tensor, count: int) -> Tensor:
    """Each result is kept by the next one's backward; all of them are moved."""
    for number in range(count):
        x = offload.offload(x.tanh(), number)
    return x.sum()


def vector() -> Tensor:
    return torch.linspace(-1, 0, N // 8, dtype=torch.float64).requires_grad_()


def slope(x: Tensor, count: int) -> Tensor:
    (gradient,) = torch.autograd.grad(chain(x, count), x)
    return gradient


def moved_slope(x: Tensor, count: int) -> Tensor:
    with saving_there():
        y = chain(x, count)
    (gradient,) = torch.autograd.grad(y, x)
    return gradient


def test_only_what_leaves_or_comes_is_on_the_device() -> None:
    x, count = vector(), 8
    with StorageTracker([x]) as tracker, saving_there():
        y = chain(x, count)
        assert tracker.nbytes <= (1 + AHEAD + 1) * N
    del y
    before = peak_bytes(lambda: slope(x, count), [x], CPU)
    assert before >= (1 + count) * N
    # x, the gradients of two results, and the result that is read with those that come after it
    assert peak_bytes(lambda: moved_slope(x, count), [x], CPU) <= (1 + 2 + 1 + AHEAD) * N + 16


def test_a_storage_is_moved_once_however_many_views_are_saved(monkeypatch: Patch) -> None:
    sizes: list[int] = []
    there = offload._to_host

    def counted(storage: UntypedStorage) -> Any:
        sizes.append(storage.nbytes())
        return there(storage)

    monkeypatch.setattr(offload, "_to_host", counted)
    x = vector()

    def run() -> Tensor:
        y = offload.offload(x * 2, 0)
        return (y[::2] * y[1::2] * y.view(2, -1)[0]).sum() + torch.view_as_complex(y.view(-1, 2)).abs().sum()

    (wanted,) = torch.autograd.grad(run(), x)
    with saving_there():
        z = run()
    (found,) = torch.autograd.grad(z, x)
    assert sizes == [N] and torch.equal(found, wanted)


def test_without_gradients_nothing_is_moved() -> None:
    with StorageTracker() as tracker, torch.no_grad(), saving_there():
        kept = offload.offload(torch.ones(N), 0)
        assert tracker.nbytes == kept.untyped_storage().nbytes()
    assert not isinstance(kept.untyped_storage(), HostStorage)


def test_a_graph_that_is_kept_gives_the_same_twice() -> None:
    x = vector()
    wanted = slope(x, 5)
    with saving_there():
        y = chain(x, 5)
    for keep in (True, False):
        (found,) = torch.autograd.grad(y, x, retain_graph=keep)
        assert torch.equal(found, wanted)


def test_passes_under_way_at_the_same_time_do_not_meet() -> None:
    first, second = vector(), (vector() * 0.5).detach().requires_grad_()
    with saving_there():
        one = chain(first, 4)
    with saving_there():
        two = chain(second, 3)
    for y, x, count in ((one, first, 4), (two, second, 3)):
        (found,) = torch.autograd.grad(y, x)
        assert torch.equal(found, slope(x, count))


def test_what_changed_since_forward_is_refused_unless_it_was_moved() -> None:
    x, weight = vector(), vector()
    for moved in (False, True):
        with saving_there():
            y = x * 2
            y = offload.offload(y, 0) if moved else y
            z = (y * weight).sum()
        with torch.no_grad():
            y.mul_(3)
        wanted = x.detach() * 2
        if moved:
            assert torch.equal(torch.autograd.grad(z, weight)[0], wanted)
        else:
            with pytest.raises(InputError, match="changed in place since forward"):
                torch.autograd.grad(z, weight)


# -- copies that take their time --------------------------------------------------------------------------


class Later:
    """Copies as a stream of its own makes them: each when somebody waits for it, or for a later one."""

    def __init__(self, monkeypatch: Patch, *, waits: bool = True) -> None:
        self.waiting: list[tuple[Tensor, Tensor]] = []
        self.log: list[str] = []
        self.waits = waits
        monkeypatch.setattr(offload, "_to_host", self.to_host)
        monkeypatch.setattr(offload, "_to_device", self.to_device)
        monkeypatch.setattr(offload, "wait", self.wait)

    def to_host(self, storage: UntypedStorage) -> Any:
        self.log.append("out")
        return self.begin(HostStorage(storage.nbytes()), storage)

    def to_device(self, host: UntypedStorage, device: torch.device) -> Any:
        self.log.append("back")
        return self.begin(UntypedStorage(host.nbytes()), host)

    def begin(self, target: UntypedStorage, source: UntypedStorage) -> Any:
        whole = offload._bytes(target)
        whole.fill_(255)  # NaN
        self.waiting.append((whole, offload._bytes(source)))
        return target, len(self.waiting)

    def wait(self, count: int | None, device: torch.device) -> None:
        for target, source in self.waiting[: count if self.waits else 0]:
            target.copy_(source)


def test_nothing_is_read_or_given_back_before_its_copy_is_complete(monkeypatch: Patch) -> None:
    x = vector()
    wanted = slope(x, 6)
    copies = Later(monkeypatch)
    assert torch.equal(moved_slope(x, 6), wanted)
    assert copies.log == ["out"] * 6 + ["back"] * 6


def test_who_forgets_to_wait_is_found(monkeypatch: Patch) -> None:
    x = vector()
    wanted = slope(x, 6)
    Later(monkeypatch, waits=False)
    assert not torch.equal(moved_slope(x, 6), wanted)


def test_what_is_fetched_for_another_is_found(monkeypatch: Patch) -> None:
    x = vector()
    wanted = slope(x, 6)
    fetch = offload.Offloading.fetch
    hosts: list[UntypedStorage] = []

    def another(self: offload.Offloading, kept: Any) -> None:
        hosts.append(kept.host)
        kept.host = hosts[0]
        fetch(self, kept)

    monkeypatch.setattr(offload.Offloading, "fetch", another)
    assert not torch.equal(moved_slope(x, 6), wanted)


# -- whole programs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan, gathering",
    [
        ("one batch", None),
        ("one batch", Gathering.REGATHER),
        ("micro-batches", None),
        ("two axes", Gathering.ONCE),
    ],
)
def test_training_equals_serial_training(plan: str, gathering: Gathering | None, pools: Pools) -> None:
    ranks = 4 if plan == "two axes" else 2
    pools(ranks).run(partial(train, offload=True), plan, gathering)


ROWS, WIDTH = 4096, 16
ACTIVATION = ROWS // 2 * WIDTH * 8  # bytes on one of two ranks


class Deep(nn.Module):
    """Activations beside which all else is small; in the end `copies` of the last one, for a moment."""

    def __init__(self, layers: int, copies: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))
        self.copies = copies

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return (torch.cat([x] * self.copies, 1).sum(1) if self.copies else x).square().mean()


def peaks(layers: int, *, offloaded: bool, copies: int = 0) -> tuple[float, float]:
    """The most that a step holds on this rank, as predicted and as measured, in activations."""
    torch.manual_seed(0)
    compiler = forced_compiler(Mesh((2,)), ["batch"], offload=offloaded)
    ours = ParallelModule(Deep(layers, copies).double(), compiler, describe=describe, device=CPU)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64)
    ours.prepare(x)
    graph = compiler.graphs[0]
    dims = Dims(graph, find_atoms(graph), Mesh((2,)))
    prices = Prices(graph, dims, compiler.cluster, ROUGH, optimizer=OptimizerState(0.0))
    predicted = PricedProgram(prices, ours.plan.program).peak

    def step() -> None:
        ours.zero_grad()
        ours(x).backward()

    step()
    step()

    def alive() -> Iterator[Tensor]:
        yield from ours.parameters()
        for item in ours.parameters():
            assert item.grad is not None
            yield item.grad
        yield x

    return predicted.nbytes / ACTIVATION, peak_bytes(step, alive(), CPU) / ACTIVATION


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize(
    ("layers", "copies"),
    [
        (10, 0),  # in the midst of backward
        (3, 0),  # when backward begins, and what it reads next comes
        (10, 8),  # when forward ends, and what is still leaving is there
    ],
)
def test_the_predicted_peak_is_the_measured_one(
    offloaded: bool, layers: int, copies: int, pools: Pools
) -> None:
    for predicted, measured in pools(2).run(partial(peaks, offloaded=offloaded, copies=copies), layers):
        assert predicted == pytest.approx(measured, abs=0.1)


def staged_peaks(kind: ScheduleKind, *, offloaded: bool) -> tuple[float, float]:
    """The most that a step of two stages holds on this rank, as predicted and as measured, in activations."""
    torch.manual_seed(0)
    starts = (0, 10, 20, 30) if kind is ScheduleKind.INTERLEAVED else (0, 20)
    pipeline = Pipeline(2, 4, kind, starts)
    compiler = forced_compiler(Mesh((1,)), ["batch"], pipeline=pipeline, offload=offloaded)
    ours = ParallelModule(Deep(20, 0).double(), compiler, describe=describe, device=CPU, by_steps=True)
    x = torch.randn(2 * ROWS, WIDTH, dtype=torch.float64)
    ours.prepare(x)
    graph, program = compiler.graphs[0], ours.plan.program
    dims = Dims(graph, find_atoms(graph), Mesh((1,)))
    prices = Prices(graph, dims, compiler.cluster.stage(2), ROUGH, optimizer=OptimizerState(0.0))
    prices.micro_batches, prices.accumulates = 4, True
    places = range(len(graph.operators) + 1)
    table = intervals(PricedProgram(prices, program), compiler.cluster.intra, places=places, starts=starts)
    schedule = scheduled(kind, 2, len(starts) // 2, 4)
    predicted = cut_search.cut_at(table, schedule, starts).rank_bytes[dist.get_rank()]

    def step() -> None:
        ours.zero_grad(set_to_none=False)
        ours.train_step(x)

    step()
    step()

    def alive() -> Iterator[Tensor]:
        yield from ours.parameters()
        yield from (item.grad for item in ours.parameters() if item.grad is not None)
        yield x

    return predicted / ACTIVATION, peak_bytes(step, alive(), CPU) / ACTIVATION


@pytest.mark.slow
@pytest.mark.parametrize("kind", [ScheduleKind.GPIPE, ScheduleKind.ONE_F_ONE_B, ScheduleKind.INTERLEAVED])
def test_stages_hold_less_while_what_they_save_is_offloaded(kind: ScheduleKind, pools: Pools) -> None:
    kept, less_kept = (
        pools(2).run(partial(staged_peaks, offloaded=offloaded), kind) for offloaded in (False, True)
    )
    for (expected, measured), (less_expected, less) in zip(kept, less_kept, strict=True):
        assert expected == pytest.approx(measured, rel=0.1)
        assert less_expected == pytest.approx(less, rel=0.1)
        assert less < 0.75 * measured


@pytest.mark.slow
def test_a_deeper_net_needs_no_more_memory_on_the_device(pools: Pools) -> None:
    for offloaded, growth in ((False, 4), (True, 0)):
        few, many = (pools(2).run(partial(peaks, offloaded=offloaded), layers) for layers in (6, 10))
        for (_, before), (_, after) in zip(few, many, strict=True):
            assert after - before == pytest.approx(growth, abs=0.3)
