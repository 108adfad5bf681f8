"""A run that goes on from a save gives the numbers of one that was never stopped."""

from __future__ import annotations

import gc
import os
import random
import resource
import signal
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.cluster import ClusterSpec
from autopar.errors import InputError
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.module.run_state import RunState
from autopar.runtime.module.saves import SaveUnderWay
from tests.pool import Pool

Pools = Callable[[int], Pool]
CLOSE = 1e-9  # float64, sums in another order
BEFORE, STEPS = 3, 6


class Net(nn.Module):
    """Dropout, running statistics, a fused qkv, and a tied matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.qkv, self.out, self.head = nn.Linear(8, 24), nn.Linear(8, 8), nn.Linear(8, 8)
        self.head.weight = self.out.weight
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.drop(torch.tanh(self.norm(self.first(x)))).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(h).unflatten(2, (3, 4, 2)).permute(2, 0, 3, 1, 4).unbind()
        mixed = (torch.softmax(q @ k.transpose(-1, -2), -1) @ v).transpose(1, 2).flatten(2)
        return F.mse_loss(self.head(torch.tanh(self.out(mixed))).mean(1), y)


OPTIONS: dict[str, dict[str, Any]] = {
    "batch": {"force": "batch", "shard_state": "none"},
    "filter": {"force": "filter"},
    "weights in shards": {"force": "batch", "shard_state": "weights"},
    "2 stages": {"stages": 2},
}


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(18, 2, 4, 2, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randn(18, 8, generator=generator, dtype=torch.float64))


def parallel(case: str, **options: Any) -> ParallelModule:
    cluster = ClusterSpec.local(dist.get_world_size())
    example = dataset()[:4]
    model: ParallelModule = autopar.parallelize(
        make_net(), cluster, example, measure=False, quiet=True, **OPTIONS[case], **options
    )
    return model


class Run:
    """A training run with all that a save may have."""

    def __init__(self, model: nn.Module, rate: float = 0.01) -> None:
        self.model = model
        named = [item for item in model.parameters() if item.requires_grad]
        many, few = ([item for item in named if (item.dim() > 1) is wide] for wide in (True, False))
        groups = [{"params": many, "weight_decay": 0.1}, {"params": few, "lr": 2 * rate}]
        self.optimizer = torch.optim.AdamW(groups, rate, amsgrad=True)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.5)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        if isinstance(model, ParallelModule):
            self.sampler = model.sampler(dataset(), seed=3, batch_size=4)
        else:
            self.sampler = autopar.runtime.module.sampler.BatchSampler(
                dataset(), batch_size=4, rows=range(4), seed=3
            )
        self.losses: list[float] = []

    @property
    def state(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("optimizer", "scheduler", "scaler", "sampler")}

    def train(self, steps: int, after: Callable[[int], None] = lambda _: None) -> list[float]:
        """So many more steps, over epochs, in one go."""
        loader, done = DataLoader(dataset(), batch_sampler=self.sampler), 0
        for epoch in range(self.sampler.epoch, 100):
            self.sampler.set_epoch(epoch)
            for x, y in self.sampler.count(loader):
                self.losses.append(self.step(x, y))
                done += 1
                after(done)
                if done == steps:
                    return self.losses
        raise AssertionError

    def step(self, x: Tensor, y: Tensor) -> float:
        self.optimizer.zero_grad()
        if isinstance(self.model, ParallelModule) and self.model.plan.pipeline.is_staged:
            with self.model.scaled_by(self.scaler):
                loss = self.model.train_step(x, y)
        else:
            loss = self.model(x, y)
            self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        return loss.item()

    def numbers(self) -> dict[str, Tensor]:
        """Everything that training has changed, whole and by serial names."""
        state = self.optimizer.state_dict()
        moments = {
            f"{number} {name}": torch.as_tensor(value)
            for number, values in state["state"].items()
            for name, value in values.items()
        }
        rates = torch.tensor([group["lr"] for group in state["param_groups"]])
        scale = torch.tensor(self.scaler.get_scale())
        weights = {name: item.detach().clone() for name, item in self.model.state_dict().items()}
        return weights | moments | {"rates": rates, "scale": scale, "losses": torch.tensor(self.losses[-3:])}


def quiet() -> None:
    warnings.simplefilter("ignore")


# -- the same world, bit for bit ----------------------------------------------------------------


def _undisturbed(case: str, folder: Path, options: dict[str, Any]) -> dict[str, Tensor]:
    """The numbers of a run that saves once, and doesn't stop."""
    quiet()
    run = Run(parallel(case, **options))
    drawn: list[Tensor] = []

    def after(step: int) -> None:
        if step == BEFORE:
            autopar.save(folder, run.model, **run.state, step=step, extra={"name": "a", "at": (1, 2.5)})
            drawn.append(draw())

    run.train(STEPS, after)
    return run.numbers() | {"drawn": drawn[0]}


def draw() -> Tensor:
    return torch.cat([torch.rand(3), torch.tensor([random.random(), numpy.random.rand()])])


def _resumed(case: str, folder: Path, options: dict[str, Any]) -> dict[str, Tensor]:
    """The numbers of a run of other values, rates, modes and random states, that goes on from the save."""
    quiet()
    torch.manual_seed(99 + dist.get_rank())
    random.seed(dist.get_rank())
    run = Run(parallel(case, **options), rate=0.5)
    run.model.eval()
    run.model.drop.train()
    run.sampler.set_epoch(7)
    loaded = autopar.load(folder, run.model, **run.state)
    assert loaded is not None and (loaded.step, loaded.extra) == (BEFORE, {"name": "a", "at": (1, 2.5)})
    assert loaded.samples == run.sampler.samples == 4 * BEFORE and run.sampler.epoch == 0
    assert all(module.training for module in run.model.modules())
    drawn = draw()
    run.train(STEPS - BEFORE)
    return run.numbers() | {"drawn": drawn}


@pytest.mark.slow
@pytest.mark.parametrize("case", OPTIONS)
def test_in_the_same_world_a_resumed_run_with_dropout_is_the_undisturbed_one_bit_for_bit(
    case: str, pools: Pools, tmp_path: Path
) -> None:
    expected = pools(2).run(_undisturbed, case, tmp_path, {})
    found = pools(2).run(_resumed, case, tmp_path, {})
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.keys() == theirs.keys() and len(mine) > 20
        assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


# -- other worlds -------------------------------------------------------------------------------


def _resumed_serially(folder: Path) -> dict[str, Tensor]:
    quiet()
    run = Run(make_net(), rate=0.5)
    assert autopar.load(folder, run.model, **run.state) is not None
    draw()
    run.train(STEPS - BEFORE)
    return run.numbers()


def _check(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, item in found.items():
        torch.testing.assert_close(item, expected[name], rtol=CLOSE, atol=CLOSE, msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "other", "size"),
    [
        ("filter", "batch", 1),
        ("weights in shards", "filter", 2),
        ("filter", "2 stages", 4),
        ("2 stages", "batch", 2),
    ],
)
def test_a_run_goes_on_under_another_plan_and_serially_with_the_same_masks(
    one: str, other: str, size: int, pools: Pools, tmp_path: Path
) -> None:
    exact = {"exact_random": True}
    expected = pools(2).run(_undisturbed, one, tmp_path, exact)
    for found, theirs in zip(pools(size).run(_resumed, other, tmp_path, exact), expected, strict=False):
        _check(found, theirs)
    _check(_resumed_serially(tmp_path), expected[0])


def _without_dropout(case: str, folder: Path, *, begins: bool) -> dict[str, Tensor]:
    """The numbers of a run without dropout, under a plan or serially, that saves once or goes on."""
    quiet()
    model = parallel(case) if dist.is_initialized() else make_net()
    run = Run(model, rate=0.01 if begins else 0.5)
    model.drop.p = 0.0
    if not begins:
        assert autopar.load(folder, model, **run.state) is not None

    def after(step: int) -> None:
        if begins and step == BEFORE:
            autopar.save(folder, model, **run.state)

    run.train(STEPS if begins else STEPS - BEFORE, after)
    return run.numbers()


def _go_around(pools: Pools, one: tuple[str, int], other: tuple[str, int], folder: Path) -> None:
    (case, size), (next_case, next_size) = one, other
    begin, go_on = partial(_without_dropout, begins=True), partial(_without_dropout, begins=False)
    expected = pools(size).run(begin, case, folder) if size else [begin(case, folder)]
    for found in pools(next_size).run(go_on, next_case, folder) if next_size else [go_on(next_case, folder)]:
        _check(found, expected[0])


SERIAL = ("serial", 0)
WAYS = [
    (("2 stages", 2), ("filter", 2)),
    (("filter", 2), ("2 stages", 2)),
    (SERIAL, ("2 stages", 2)),
    (("2 stages", 2), SERIAL),
]
MORE_WAYS = [
    (("2 stages", 2), ("2 stages", 4)),
    (("weights in shards", 4), ("2 stages", 2)),
    (("filter", 4), ("weights in shards", 2)),
    (("batch", 2), ("filter", 4)),
    (("2 stages", 4), ("batch", 1)),
    (SERIAL, ("filter", 4)),
    (("filter", 4), SERIAL),
]


@pytest.mark.parametrize(("one", "other"), WAYS, ids=str)
def test_a_run_goes_on_under_any_plan_and_in_the_serial_model(
    one: tuple[str, int], other: tuple[str, int], pools: Pools, tmp_path: Path
) -> None:
    _go_around(pools, one, other, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), MORE_WAYS, ids=str)
def test_a_run_goes_on_in_any_world(
    one: tuple[str, int], other: tuple[str, int], pools: Pools, tmp_path: Path
) -> None:
    _go_around(pools, one, other, tmp_path)


def _without_room(folder: Path) -> None:
    """Rank 1 can write a few bytes alone; no rank is left waiting, and the last save stays."""
    quiet()
    run = Run(parallel("filter"))
    run.train(1)
    good = autopar.save(folder, run.model, **run.state)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
    try:
        with pytest.raises(InputError, match=r"autopar.save to .* on rank 1: .*make room"):
            autopar.save(folder, run.model, **run.state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    dist.barrier()
    assert [path.name for path in folder.iterdir()] == [good.name]
    assert autopar.load(folder, run.model, **run.state) is not None
    assert autopar.save(folder, run.model, **run.state).name == "save-000002"


def test_a_rank_without_room_fails_the_save_on_all_and_the_last_one_stays(
    pools: Pools, tmp_path: Path
) -> None:
    pools(2).run(_without_room, tmp_path)


class Wrapped(nn.Module):
    """A library's module around the parallel one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def _local_run() -> tuple[ParallelModule, list[torch.optim.Optimizer], Callable[[], float]]:
    """A run in which ranks pass samples of their own, with two optimizers, one weight that learns later."""
    quiet()
    model = parallel("batch", inputs="local")
    bias, weights = model.first.bias, [item for item in model.parameters() if item is not model.first.bias]
    optimizers = [torch.optim.SGD(weights, 0.1, momentum=0.9), torch.optim.Adam([bias], 0.1)]
    x, y = dataset()[model.samples.start : model.samples.stop]

    def step() -> float:
        model.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizers[0].step()
        if dist.is_initialized() and model.training:
            optimizers[1].step()
        return float(loss)

    return model, optimizers, step


def _of_own_samples(folder: Path) -> list[list[float]]:
    """Losses after a save, and after it is loaded into another run: the second optimizer has no state yet."""
    losses = []
    for begins in (True, False):
        model, optimizers, step = _local_run()
        whole = Wrapped(model)
        if begins:
            model.eval()
            step()
            autopar.save(folder, whole, optimizer=optimizers)
        else:
            step()
            assert autopar.load(folder, whole, optimizer=optimizers) is not None
            assert not optimizers[1].state and not model.training
            assert all(item.grad is None for item in model.parameters())
        model.train()
        losses.append([step() for _ in range(3)])
    return losses


def test_state_that_is_not_there_yet_is_not_there_after_loading(pools: Pools, tmp_path: Path) -> None:
    for saved, loaded in pools(2).run(_of_own_samples, tmp_path):
        assert saved == loaded and len(set(saved)) == 3


def _before_the_first_step(case: str, folder: Path) -> list[dict[str, Tensor]]:
    """Numbers of a run that was never saved, of one that was before its first step, and of one from there."""
    quiet()
    numbers = []
    for number in range(3):
        run = Run(parallel(case, exact_random=True) if dist.is_initialized() else make_net())
        torch.manual_seed(5)
        if number == 1:
            autopar.save(folder, run.model, **run.state)
            assert not run.optimizer.state
        if number == 2:
            assert autopar.load(folder, run.model, **run.state) is not None
        run.train(2)
        numbers.append(run.numbers())
    return numbers


@pytest.mark.parametrize("case", ["filter", "2 stages", "serial"])
def test_a_save_before_the_first_step_changes_nothing(case: str, pools: Pools, tmp_path: Path) -> None:
    run = partial(_before_the_first_step, case, tmp_path)
    for never, saved, loaded in [run()] if case == "serial" else pools(2).run(run):
        for numbers in (saved, loaded):
            assert [name for name, item in numbers.items() if not torch.equal(item, never[name])] == []


# -- kills --------------------------------------------------------------------------------------


def _save_until_killed(folder: Path, victim: int, seconds: float) -> None:
    """Saves without end; the victim is killed so long after its first one."""
    quiet()
    model = parallel("filter")
    for step in range(1, 10_000):
        with torch.no_grad():
            for item in model.parameters():
                item.fill_(step)
        autopar.save(folder, model, step=step, keep=2)
        if dist.get_rank() == victim and step == 1:
            threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL)).start()


def _load_any(folder: Path) -> int:
    """The step of the save that is loaded, and is whole."""
    quiet()
    model = parallel("batch")
    loaded = autopar.load(folder, model)
    assert loaded is not None and loaded.step is not None
    assert all(bool((item == loaded.step).all()) for item in model.parameters())
    autopar.save(folder, model, step=0)
    assert not list(folder.glob(".*"))
    return loaded.step


def _kill(pools: Pools, folder: Path, victim: int, seconds: float) -> None:
    with pytest.raises(AssertionError, match=f"rank {victim} of 2:\nthe process died"):
        pools(2).run(_save_until_killed, folder, victim, seconds)
    numbers = sorted(path.name for path in folder.glob("save-*"))
    newest = max(int(name.removeprefix("save-")) for name in numbers)
    assert pools(2).run(_load_any, folder) == [newest] * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_when_a_rank_is_killed_in_a_save_the_newest_one_is_good(
    victim: int, pools: Pools, tmp_path: Path
) -> None:
    _kill(pools, tmp_path, victim, 0.1)


@pytest.mark.slow
def test_the_newest_save_is_good_whenever_ranks_are_killed(pools: Pools, tmp_path: Path) -> None:
    for number in range(10):
        _kill(pools, tmp_path / str(number), number % 2, 0.05 + 0.0171 * number)


# -- in the background ----------------------------------------------------------------------------


def _in_background(case: str, folder: Path) -> list[dict[str, Tensor]]:
    """Numbers after a save and three more steps while it is written, and those of a run from it."""
    quiet()
    run = Run(parallel(case, exact_random=True))

    def after(step: int) -> None:
        if step == BEFORE:
            path = autopar.save(folder, run.model, **run.state, background=True)
            assert not path.exists()

    run.train(STEPS, after)
    autopar.finish_saves()
    assert [path.name for path in folder.iterdir()] == ["save-000001"]
    other = Run(parallel(case, exact_random=True), rate=0.5)
    assert autopar.load(folder, other.model, **other.state) is not None
    other.train(STEPS - BEFORE)
    return [run.numbers(), other.numbers()]


@pytest.mark.parametrize("case", ["filter", "2 stages"])
def test_a_save_in_the_background_has_what_was_when_it_began(case: str, pools: Pools, tmp_path: Path) -> None:
    for begun, loaded in pools(2).run(_in_background, case, tmp_path):
        assert [name for name, item in begun.items() if not torch.equal(item, loaded[name])] == []


def _fails_in_background(folder: Path) -> None:
    """What a thread can't write is an error on all ranks, at the end or in the next save."""
    quiet()
    run = Run(parallel("filter"))
    run.train(1)
    good = autopar.save(folder, run.model, **run.state)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for finish in (autopar.finish_saves, partial(autopar.save, folder, run.model)):
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2048, before[1]))
        try:
            autopar.save(folder, run.model, **run.state, background=True)
            with pytest.raises(InputError, match=r"autopar.save to .* on rank 1: .*make room"):
                finish()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        dist.barrier()
        assert [path.name for path in folder.iterdir()] == [good.name]
    autopar.finish_saves()
    autopar.save(folder, run.model, background=True)
    while not (folder / "save-000002").exists():
        autopar.finish_saves(wait=False)
        time.sleep(0.01)
    gc.collect()
    held = [item for item in gc.get_objects() if type(item) is SaveUnderWay]
    assert not held


def test_a_thread_that_can_not_write_fails_the_save_on_all_ranks(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(_fails_in_background, tmp_path)


# -- bad input ----------------------------------------------------------------------------------


def _refusals(folder: Path) -> None:
    """Errors on every rank, by name, and the good save stays the newest."""
    quiet()
    run = Run(parallel("filter"))
    run.train(1)
    good = autopar.save(folder, run.model, **run.state)
    other = make_net()
    other.qkv = nn.Linear(8, 12).double()
    other.more = nn.Linear(1, 1)
    del other.norm
    blocked = folder / "file"
    if dist.get_rank() == 0:
        blocked.write_text("")
    dist.barrier()
    state = run.state
    sgd = torch.optim.SGD(run.model.parameters(), 0.1)
    plain = torch.optim.AdamW(run.optimizer.param_groups, 0.1, amsgrad=False)
    for group in plain.param_groups:
        group["amsgrad"] = False
    single = torch.optim.AdamW(run.model.parameters(), 0.1, amsgrad=True)
    few = torch.optim.AdamW(run.optimizer.param_groups[1:], 0.1, amsgrad=True)
    acts: dict[str, Callable[[], Any]] = {
        r"autopar.save to .*file/a: found on rank 0: Not a directory": lambda: autopar.save(
            blocked / "a", run.model
        ),
        r"extra with what can't be loaded": lambda: autopar.save(folder, run.model, extra={"a": Path("b")}),
        r"keep=0, wanted at least 1": lambda: autopar.save(folder, run.model, keep=0),
        (
            r"with norm.weight and 4 more, which this model lacks; without more.weight and 1 more; "
            r"with qkv.weight as float64\[24, 8\] \(here float64\[12, 8\]\) and 1 more, wanted"
        ): lambda: autopar.load(folder, other),
        r"the model, optimizer AdamW, .*one of the model, as passed; pass what": lambda: autopar.load(
            folder, run.model
        ),
        r"a save of the model, optimizer AdamW.*optimizer SGD": lambda: autopar.load(
            folder, run.model, **{**state, "optimizer": sgd}
        ),
        r"max_exp_avg_sq.* of .*, kept by AdamW, wanted exp_avg, exp_avg_sq, step": lambda: autopar.load(
            folder, run.model, **{**state, "optimizer": plain}
        ),
        r"AdamW with .* in another group": lambda: autopar.load(
            folder, run.model, **{**state, "optimizer": single}
        ),
        r"AdamW with .* in one of them alone": lambda: autopar.load(
            folder, run.model, **{**state, "optimizer": few}
        ),
        r"sampler: found seed 3 \(here 4\)": lambda: autopar.load(
            folder, run.model, **{**state, "sampler": run.model.sampler(dataset(), seed=4, batch_size=4)}
        ),
        r"no save, wanted a folder that autopar.save has written": lambda: autopar.load(
            folder / "none", run.model
        ),
        r"state of the extra_part on rank 1 unlike that on rank 0": lambda: RunState.of(
            run.model, None, extra_part=_OfRank()
        ).require_alike({"extra_part": dist.get_rank()}),
    }
    for words, act in acts.items():
        with pytest.raises(InputError, match=words) as told:
            act()
        assert len(str(told.value)) <= 400
    assert autopar.load(folder / "none", run.model, missing_ok=True) is None
    loaded = autopar.load(folder, run.model, only_model=True)
    assert loaded is not None and loaded.path == good
    assert [path.name for path in folder.iterdir() if "save" in path.name] == ["save-000001"]


def _extras(folder: Path) -> None:
    """What isn't every rank's is refused by its place in `extra`; whole averages come back as they were."""
    quiet()
    run = Run(parallel("filter"))
    run.train(1)
    average = {name: item.detach().clone() for name, item in run.model.named_parameters()}
    split = next(name for name, item in average.items() if isinstance(item, DTensor))
    whole = {
        name: item.full_tensor() if isinstance(item, DTensor) else item for name, item in average.items()
    }
    rank = dist.get_rank()
    for words, extra in {
        rf"extra\['ema'\]\['{split}'\], a DTensor": {"ema": average},
        rf"extra\['ema'\]\['{split}'\] on rank": {"ema": whole | {split: average[split].to_local()}},
        r"extra\['a'\]\[1\] on rank 1 .*unlike that on rank 0": {"a": [1, rank]},
        r"extra\[0\], a DTensor": (average[split],) if rank else (1,),
    }.items():
        with pytest.raises(InputError, match=words) as told:
            autopar.save(folder, run.model, extra=extra)
        assert len(str(told.value)) <= 400 and "full_tensor" in str(told.value)
        loader = DataLoader(dataset(), batch_sampler=run.sampler)
        with pytest.raises(InputError, match=words):
            next(iter(autopar.steps(run.model, loader, folder=folder, extra=extra)))
    assert not folder.exists()
    autopar.save(folder, run.model, extra={"ema": whole, "none": None, "list": [1.5, "a"]})
    before = autopar.load(folder, run.model)
    assert before is not None and before.extra["list"] == [1.5, "a"]
    assert all(torch.equal(before.extra["ema"][name], item) for name, item in whole.items())


def test_an_extra_that_is_not_every_ranks_is_refused_by_its_place(pools: Pools, tmp_path: Path) -> None:
    pools(2).run(_extras, tmp_path / "saves")


class _OfRank:
    pass


def test_what_can_not_be_saved_or_loaded_is_refused_by_name_on_all_ranks(
    pools: Pools, tmp_path: Path
) -> None:
    pools(2).run(_refusals, tmp_path)
