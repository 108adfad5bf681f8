"""Ranks that pass their own samples train as the serial model does on the whole batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.core.mesh import Mesh
from autopar.errors import InputError
from autopar.rewrite.render import describe
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.module.sampler import BatchSampler
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler
from tests.runtime.module.test_parallel_module import CPU, EXACT, PLANS, gap, make_net
from tests.runtime.module.test_parallel_module import batch as images

Pools = Callable[[int], Pool]


class Net(nn.Module):
    """Images to classes; `bias`, a table that is no part of the batch, is passed whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Conv2d(4, 8, 3, stride=2, padding=1)
        self.last = nn.Linear(8, 6)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        h = self.second(self.first(x)).relu().mean((2, 3))
        out: Tensor = self.last(h) + bias
        return out


def make() -> Net:
    torch.manual_seed(0)
    return Net().double()


def data(size: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Images, a table of 6 numbers (in one test the batch is as long), and classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 2, 12, 8, generator=generator, dtype=torch.float64)
    bias = torch.randn(6, generator=generator, dtype=torch.float64)
    return x, bias, torch.randint(6, (size,), generator=generator)


def local(ours: ParallelModule, x: Tensor, bias: Tensor, *targets: Tensor) -> tuple[Tensor, ...]:
    rows = slice(ours.samples.start, ours.samples.stop)
    return x[rows], bias, *(item[rows] for item in targets)


# The sample factor of every operator that has one, the loss too, so that nobody takes a whole batch.
SAMPLES = {"first.0": "n", "second": "n", "last": "n0", "cross_entropy_loss": "d0"}


def parallel(size: int, mesh: str, force: Any, costs: str, **options: Any) -> ParallelModule:
    if force == "samples":
        force = {name: [factor] * len(Mesh.parse(mesh).shape) for name, factor in SAMPLES.items()}
    return autopar.parallelize(
        make(),
        autopar.ClusterSpec.local(Mesh.parse(mesh).num_devices),
        data(size),
        mesh=mesh,
        force=force,
        loss_fn=F.cross_entropy,
        measure=False,
        costdb=costs,
        inputs="local",
        **options,
    )


@pytest.fixture
def costs(tmp_path: Path) -> str:
    return str(tmp_path / "costs.db")


def on_ranks(pools: Pools, function: Callable[..., Any], mesh: str, *args: Any) -> list[Any]:
    return pools(Mesh.parse(mesh).num_devices).run(function, mesh, *args)


# -- training -----------------------------------------------------------------------------------


def _train(mesh: str, force: str | None, size: int, costs: str) -> range:
    serial, ours = make(), parallel(size, mesh, force, costs)
    pair = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (serial, ours)]
    for step in range(3):
        x, bias, classes = data(size, seed=step)
        theirs = F.cross_entropy(serial(x, bias), classes)
        mine = ours(*local(ours, x, bias, classes))
        for loss, optimizer in zip((theirs, mine), pair, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        assert gap(mine, theirs) < EXACT
        for a, b in zip(ours.parameters(), serial.parameters(), strict=True):
            assert gap(a.grad, b.grad) < EXACT
    assert gap(ours.state_dict(), serial.state_dict()) < EXACT
    return ours.samples


FORCED = [None, "batch", "samples", "domain", "filter"]
FEW = {*(("2x2", force, 7) for force in FORCED), ("2", None, 7), ("2", "samples", 6), ("4", "samples", 7)}
MANY = {(mesh, force, size) for mesh in ("2", "4", "2x2") for force in FORCED for size in (6, 7)}


@pytest.mark.parametrize(
    ("mesh", "force", "size"),
    [
        *sorted(FEW, key=str),
        *(pytest.param(*each, marks=pytest.mark.long) for each in sorted(MANY - FEW, key=str)),
    ],
)
def test_training_with_local_inputs_equals_serial_training(
    mesh: str, force: str | None, size: int, pools: Pools, costs: str
) -> None:
    rows = on_ranks(pools, _train, mesh, force, size, costs)
    if force == "samples":
        assert [row for rank in rows for row in rank] == list(range(size))  # nothing is loaded twice
        assert max(map(len, rows)) - min(map(len, rows)) <= 1
    elif force is not None:  # the targets are taken whole at least
        assert rows == [range(size)] * len(rows)


def _mixed(mesh: str, costs: str) -> range:
    """Samples over one axis, space over the other."""
    pins = {name: ["n", "h"] for name in ("first.0", "second")} | {"cross_entropy_loss": ["d0", None]}
    return parallel(6, mesh, pins, costs).samples


def test_ranks_that_share_samples_load_the_same_rows(pools: Pools, costs: str) -> None:
    assert on_ranks(pools, _mixed, "2x2", costs) == [range(3)] * 2 + [range(3, 6)] * 2


# -- data loaders -------------------------------------------------------------------------------


def _loader(mesh: str, force: str | None, costs: str) -> None:
    x, bias, classes = data(22)
    dataset = TensorDataset(x, classes)
    serial, ours = make(), parallel(6, mesh, force, costs)
    sampler = ours.sampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_sampler=sampler)
    whole = BatchSampler(dataset, batch_size=6, rows=range(6), seed=3)
    pair = [torch.optim.SGD(model.parameters(), 0.1) for model in (serial, ours)]
    for epoch in range(2):
        sampler.set_epoch(epoch)
        whole.set_epoch(epoch)
        assert len(loader) == 4
        for (part, labels), rows in zip(loader, whole, strict=True):
            losses = F.cross_entropy(serial(x[rows], bias), classes[rows]), ours(part, bias, labels)
            assert gap(*losses) < EXACT
            for loss, optimizer in zip(losses, pair, strict=True):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()


@pytest.mark.parametrize(("mesh", "force"), [("2", "samples"), ("2x2", None)])
def test_with_a_loader_the_losses_are_those_of_the_serial_run(
    mesh: str, force: str | None, pools: Pools, costs: str
) -> None:
    on_ranks(pools, _loader, mesh, force, costs)


# -- other kinds of call ------------------------------------------------------------------------


def _kinds(mesh: str, force: str, costs: str) -> None:
    serial, ours = make(), parallel(6, mesh, force, costs)
    first, (x, bias, classes) = ours.samples, data(6)
    for model in (serial, ours):
        model.eval()
    mine = local(ours, x, bias, classes)
    with torch.no_grad():
        assert gap(ours(*mine), F.cross_entropy(serial(x, bias), classes)) < EXACT
    for model in (serial, ours):
        model.train()
        model.get_parameter("last.weight").requires_grad_(False)
    ours(*mine).backward()
    F.cross_entropy(serial(x, bias), classes).backward()
    for a, b in zip(ours.parameters(), serial.parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None) and (b.grad is None or gap(a.grad, b.grad) < EXACT)
    assert ours.samples == first
    # another global batch
    x, bias, classes = data(15)
    rank = dist.get_rank()
    with pytest.raises(InputError, match=rf"on rank {rank}: .*input_0 float64\[15.*parallel.prepare\(...\)"):
        ours(x, bias, classes)
    with pytest.raises(InputError, match=r"batch_size: found 15, wanted a global batch that is prepared: 6"):
        ours.sampler(TensorDataset(x), batch_size=15)
    ours.prepare(x, bias, classes)
    assert ours.samples == first
    (rows,) = ours.sampler(TensorDataset(x), batch_size=15, shuffle=False)
    assert gap(ours(x[rows], bias, classes[rows]), F.cross_entropy(serial(x, bias), classes)) < EXACT
    assert gap(ours(*local(ours, *data(6))), F.cross_entropy(serial(*data(6)[:2]), data(6)[2])) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "force"), [("2", "samples"), ("2x2", "samples"), ("2x2", "filter")])
def test_modes_gradients_and_prepared_batches_keep_each_ranks_rows(
    mesh: str, force: str, pools: Pools, costs: str
) -> None:
    on_ranks(pools, _kinds, mesh, force, costs)


def _alike(mesh: str, costs: str) -> None:
    ours = parallel(7, mesh, "samples", costs)
    with pytest.raises(InputError, match=r"rank 0 .*\[4, 2, 12, 8\].* of two global batches, .*\[8, 2, 12, "):
        ours.prepare(*data(8))
    x, bias, classes = data(7)
    assert ours(*local(ours, x, bias, classes)).isfinite()


def test_global_batches_that_a_rank_cannot_tell_apart_are_refused_on_all(pools: Pools, costs: str) -> None:
    on_ranks(pools, _alike, "2", costs)


def _by_steps(costs: str) -> None:
    for words in ({"micro_batches": 2}, {"stages": 2}):
        with pytest.raises(InputError, match='inputs="local": found . stages and . micro-batches'):
            autopar.parallelize(
                make(),
                autopar.ClusterSpec.local(dist.get_world_size()),
                data(4),
                inputs="local",
                measure=False,
                quiet=True,
                costdb=costs,
                **words,  # type: ignore[arg-type]
            )


def test_steps_take_whole_batches(pools: Pools, costs: str) -> None:
    pools(2).run(_by_steps, costs)


def _wrong(mesh: str, costs: str) -> None:
    ours = parallel(6, mesh, "samples", costs)
    x, bias, classes = data(6)
    for wrong in (
        (x, bias, classes),
        (*local(ours, x, bias), classes),
        local(ours, x, bias.float(), classes),
    ):
        with pytest.raises(InputError, match=r"wanted this rank's samples: input_0 float64\[3, 2, 12, 8\], "):
            ours(*wrong)


def test_what_is_no_ranks_part_is_refused(pools: Pools, costs: str) -> None:
    on_ranks(pools, _wrong, "2", costs)


def test_local_inputs_want_examples_and_options_their_words() -> None:
    cluster = autopar.ClusterSpec.local(2)
    with pytest.raises(InputError, match='inputs="local": found no example inputs'):
        autopar.parallelize(make(), cluster, inputs="local")
    with pytest.raises(InputError, match="inputs: found 'mine', wanted 'global' or 'local'"):
        autopar.parallelize(make(), cluster, data(4), inputs="mine")  # type: ignore[arg-type]


def _global(plan: str) -> None:
    shape, wanted = PLANS[plan]
    ours = ParallelModule(make_net(), forced_compiler(Mesh(shape), wanted), describe=describe, device=CPU)
    with pytest.raises(InputError, match="pass example_inputs"):
        _ = ours.samples
    ours.prepare(*images(6))
    assert ours.samples == range(6)
    assert list(ours.sampler(TensorDataset(torch.arange(4)), shuffle=False)) == [[0, 1, 2, 3, 0, 1]]


def test_with_global_inputs_every_rank_loads_the_whole_batch(pools: Pools) -> None:
    pools(2).run(_global, "batch")


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, times: int) -> Tensor:
        return (self.weight * times).sum()


def _no_batch(mesh: str) -> None:
    ours = ParallelModule(
        Counter(),
        forced_compiler(Mesh.parse(mesh), ["batch"]),
        describe=describe,
        device=CPU,
        local_inputs=True,
    )
    ours.prepare(3)
    assert ours(3) == 12
    with pytest.raises(InputError, match="a call without tensors that have dims"):
        _ = ours.samples
    with pytest.raises(InputError, match="found no tensors"):
        ours(4)


def test_a_call_without_a_batch_runs_and_has_no_samples(pools: Pools) -> None:
    on_ranks(pools, _no_batch, "2")


# -- gradients of inputs ------------------------------------------------------------------------


def _input_gradient(mesh: str, plan: str, size: int) -> None:
    shape, wanted = PLANS.get(plan, ((2,), [plan]))
    serial = make_net()
    ours = ParallelModule(
        make_net(), forced_compiler(Mesh(shape), wanted), describe=describe, device=CPU, local_inputs=True
    )
    x, y = images(size)
    whole = x.clone().requires_grad_()
    ours.prepare(whole, y)
    rows = slice(ours.samples.start, ours.samples.stop)
    part = x[rows].clone().requires_grad_()
    serial(whole, y).backward()
    ours(part, y[rows]).backward()
    assert whole.grad is not None
    assert gap(part.grad, whole.grad[rows]) < EXACT


@pytest.mark.parametrize("plan", [*PLANS, "domain"])
def test_the_gradient_of_an_input_is_that_of_the_rows_passed(plan: str, pools: Pools) -> None:
    mesh = "x".join(map(str, PLANS.get(plan, ((2,), None))[0]))
    on_ranks(pools, _input_gradient, mesh, plan, 7)
