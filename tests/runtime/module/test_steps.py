"""A loop over `autopar.steps` goes on where a save was, in any epoch; loaders must have a place."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.cluster import ClusterSpec
from autopar.errors import InputError
from autopar.runtime.launch.leaving import LEFT
from autopar.runtime.launch.processes import RankProcess
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.module.sampler import BatchSampler
from autopar.runtime.module.step_reports import StepReport
from autopar.runtime.module.steps import Steps, steps
from tests.pool import Pool

Pools = Callable[[int], Pool]
DATA = TensorDataset(torch.arange(10.0)[:, None], torch.arange(10.0)[:, None])


def run(folder: Path, **options: Any) -> tuple[Steps, nn.Module]:
    """A serial run of two epochs of three batches each."""
    torch.manual_seed(0)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    loader = DataLoader(DATA, batch_sampler=BatchSampler(DATA, batch_size=4, rows=range(4), seed=1))
    words: dict[str, Any] = {"epochs": 2, "save_every": 2} | options
    return steps(model, loader, folder=folder, optimizer=optimizer, **words), model


def take(loop: Steps, model: nn.Module, count: int = 100) -> list[list[float]]:
    """The samples of the steps that are made, until so many are."""
    samples = []
    for x, y in loop:
        samples.append(x.flatten().tolist())
        (model(x) - y).square().sum().backward()
        loop_step(loop)
        if len(samples) == count:
            break
    return samples


def loop_step(loop: Steps) -> None:
    optimizer = loop.others["optimizer"]
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("stop", range(1, 7))
def test_a_loop_goes_on_after_the_newest_save_to_the_same_numbers(stop: int, tmp_path: Path) -> None:
    loop, undisturbed = run(tmp_path / "undisturbed")
    samples = take(loop, undisturbed)
    assert len(samples) == 6 and loop.step == 6 and loop.epoch == 1
    loop, model = run(tmp_path / "saves", extra={"from": stop})
    assert take(loop, model, stop) == samples[:stop]
    loop, model = run(tmp_path / "saves")
    saved = (stop - 1) // 2 * 2  # the loop's body has left its last step undone
    assert take(loop, model) == samples[saved:] and loop.step == 6
    assert loop.extra == ({"from": stop} if saved else None)
    assert torch.equal(model.weight, undisturbed.weight)  # type: ignore[arg-type]
    loop, model = run(tmp_path / "saves")
    assert take(loop, model) == [] and torch.equal(model.weight, undisturbed.weight)  # type: ignore[arg-type]


def test_a_signal_ends_the_loop_after_a_save_and_handlers_are_as_before(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)
    loop, model = run(tmp_path)
    try:
        with pytest.raises(SystemExit) as left:
            for x, _ in loop:
                model(x)
                os.kill(os.getpid(), signal.SIGUSR1)
        assert left.value.code == LEFT and loop.step == 1
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN, "who leaves needs no more of them"
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGUSR1), before, strict=True):
            signal.signal(number, handler)
    loop, model = run(tmp_path)
    assert len(take(loop, model)) == 5
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGUSR1)) == before


# -- gradients that are added up ------------------------------------------------------------------


def accumulate(loop: Steps, model: nn.Module, stop: int | None = None, *, zeros: bool = False) -> list[int]:
    """Step the optimizer after every third batch; the steps made."""
    optimizer, made = loop.others["optimizer"], []
    for x, y in loop:
        (model(x) - y).square().sum().backward()
        made.append(loop.step + 1)
        if made[-1] % 3 == 0:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not zeros)
        if made[-1] == stop:
            break
    return made


@pytest.mark.parametrize("zeros", [False, True])
def test_a_save_waits_for_the_border_where_no_gradient_is_pending(zeros: bool, tmp_path: Path) -> None:
    loop, undisturbed = run(tmp_path / "undisturbed", epochs=4, save_every=100)
    accumulate(loop, undisturbed, zeros=zeros)
    loop, model = run(tmp_path / "saves", epochs=4, save_every=4)
    assert accumulate(loop, model, 8, zeros=zeros) == list(range(1, 9))
    loop, model = run(tmp_path / "saves", epochs=4, save_every=4)
    assert accumulate(loop, model) == list(range(7, 13)), "due after 4, saved after 6"
    assert torch.equal(model.weight, undisturbed.weight)  # type: ignore[arg-type]


def test_a_signal_between_added_gradients_leaves_after_the_step_that_takes_them(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    loop, model = run(tmp_path, epochs=4, save_every=100)
    try:
        with pytest.raises(SystemExit):
            for x, y in loop:
                (model(x) - y).square().sum().backward()
                if loop.step == 3:
                    os.kill(os.getpid(), signal.SIGUSR1)
                if loop.step % 3 == 2:
                    loop_step(loop)
        assert loop.step == 6
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_gradients_that_no_optimizer_ever_takes_are_refused_by_name(tmp_path: Path) -> None:
    loop, model = run(tmp_path, epochs=4)
    words = r"a gradient of weight after each of steps 2 to 4 that no optimizer step has taken"
    with pytest.raises(InputError, match=words) as told:
        for x, y in loop:
            (model(x) - y).square().sum().backward()
            if loop.step == 0:
                with pytest.raises(InputError, match="gradient of weight in step 1"):
                    loop.save()
    assert len(str(told.value)) <= 400 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("stop", [2, 3, 4])
def test_a_body_may_save_after_its_step_and_not_before(stop: int, tmp_path: Path) -> None:
    loop, model = run(tmp_path / "undisturbed")
    samples = take(loop, model)
    loop, other = run(tmp_path / "saves", save_every=100)
    for x, y in loop:
        with pytest.raises(
            InputError, match=rf"step {loop.step + 1} under way, without the optimizer's step"
        ):
            loop.save()
        (other(x) - y).square().sum().backward()
        loop_step(loop)
        if loop.step == stop - 1:
            break
    loop.save()
    loop, again = run(tmp_path / "saves")
    assert take(loop, again) == samples[stop:] and loop.step == 6
    assert torch.equal(again.weight, model.weight)  # type: ignore[arg-type]


def test_a_gradient_that_is_taken_and_still_there_is_not_pending(tmp_path: Path) -> None:
    loop, model = run(tmp_path, epochs=1, save_every=1, keep=9)
    for x, y in loop:
        loop.others["optimizer"].zero_grad()
        (model(x) - y).square().sum().backward()
        loop.others["optimizer"].step()
    assert len(list(tmp_path.iterdir())) == 3


def _adds_up_parts(folder: Path) -> list[object]:
    """Steps at which gradients of split parameters are pending, and the step that was saved."""
    torch.manual_seed(0)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x.repeat(3, 1), x.repeat(3, 1))
    model: ParallelModule = autopar.parallelize(
        nn.Linear(4, 4),
        ClusterSpec.local(2),
        (x, x),
        loss_fn=F.mse_loss,
        force="filter",
        measure=False,
        quiet=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    loader = DataLoader(data, batch_sampler=model.sampler(data))
    loop = autopar.steps(model, loader, folder=folder, epochs=2, save_every=1000, optimizer=optimizer)
    pending: list[object] = []
    for x, y in loop:
        model(x, y).backward()
        if loop.step % 3 == 2:
            optimizer.step()
        try:
            loop.save()
        except InputError as error:
            pending.append(loop.step)
            assert "a gradient of weight in step" in str(error) or "a gradient of bias in step" in str(error)
        if loop.step == 2:
            optimizer.zero_grad()
    return pending


def test_gradients_of_split_parameters_are_pending_until_they_are_taken(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(_adds_up_parts, tmp_path) == [[0, 1, 3, 4]] * 2


def test_a_folder_that_can_not_be_written_or_is_a_save_is_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "a", Path("/proc/no-folder")):
        loop, model = run(folder)
        with pytest.raises(InputError, match=r"autopar\.steps in .*on rank 0"):
            take(loop, model)
        assert loop.step == 0
    take(*run(tmp_path / "saves", keep=1))
    (save,) = (tmp_path / "saves").iterdir()
    loop, model = run(save)
    with pytest.raises(InputError, match=r"a single save, wanted the folder that saves go to"):
        take(loop, model)


def test_a_loader_without_a_place_and_bad_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"DataLoader without a sampler of autopar's.*parallel.sampler"):
        steps(nn.Linear(1, 1), DataLoader(DATA, batch_size=2), folder=tmp_path)
    with pytest.raises(InputError, match="list without a sampler"):
        steps(nn.Linear(1, 1), [DATA[:2]], folder=tmp_path)
    with pytest.raises(InputError, match="save_every=0"):
        run(tmp_path, save_every=0)


def _asked_on_rank_1(folder: Path) -> tuple[object, int]:
    """Only rank 1 is asked to leave, and all do after the same step."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    torch.manual_seed(0)
    cluster = ClusterSpec.local(dist.get_world_size())
    model: ParallelModule = autopar.parallelize(
        nn.Linear(1, 4), cluster, (DATA[:4][0], DATA[:4][1]), loss_fn=_loss, measure=False, quiet=True
    )
    loader = DataLoader(DATA, batch_sampler=model.sampler(DATA))
    loop = autopar.steps(model, loader, folder=folder, epochs=9)
    try:
        for x, y in loop:
            model(x, y).backward()
            if dist.get_rank() == 1 and loop.step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit as left:
        return left.code, loop.step
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return None, loop.step


def _loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, y.expand_as(output))


def test_a_signal_on_one_rank_has_all_leave_after_the_same_step(pools: Pools, tmp_path: Path) -> None:
    assert pools(2).run(_asked_on_rank_1, tmp_path) == [(LEFT, 5)] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["save-000001"]


def _with_an_empty_stage(folder: Path) -> tuple[int, int]:
    """Numbers in this rank's parameters, and steps of a run that was left and went on."""
    torch.manual_seed(0)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.Linear(4, 4), *(nn.Tanh() for _ in range(8)))
    model: ParallelModule = autopar.parallelize(
        net,
        ClusterSpec.local(2),
        (x, x),
        loss_fn=F.mse_loss,
        stages=2,
        micro_batches=2,
        measure=False,
        quiet=True,
    )
    data, optimizer = TensorDataset(x, x), torch.optim.AdamW(model.parameters(), 1e-2)
    loader = DataLoader(data, batch_sampler=model.sampler(data))
    for end in (3, None):
        for batch in (
            loop := autopar.steps(model, loader, folder=folder, optimizer=optimizer, epochs=5, save_every=2)
        ):
            model.train_step(*batch)
            optimizer.step()
            optimizer.zero_grad()
            if loop.step + 1 == end:
                break
    return sum(item.numel() for item in model.parameters()), loop.step


def test_a_run_is_saved_where_a_stage_has_no_weights(pools: Pools, tmp_path: Path) -> None:
    found = pools(2).run(_with_an_empty_stage, tmp_path)
    assert 0 in [held for held, _ in found] and [step for _, step in found] == [5, 5]


def _samples(options: dict[str, int]) -> range:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    model: ParallelModule = autopar.parallelize(
        net, ClusterSpec.local(2), (x, x), loss_fn=F.mse_loss, measure=False, quiet=True, **options
    )
    return model.samples


@pytest.mark.parametrize("options", [{"micro_batches": 2}, {"stages": 2, "micro_batches": 2}], ids=str)
def test_a_sampler_takes_the_whole_batch_of_steps_of_micro_batches(
    options: dict[str, int], pools: Pools
) -> None:
    assert pools(2).run(_samples, options) == [range(8)] * 2


def _report(*own: float) -> StepReport:
    ranks = tuple(RankProcess(rank, 100 + rank, f"node{rank}", "") for rank in range(len(own)))
    return StepReport(200, 0.05, 0.04, own, ranks)


def test_a_rank_that_takes_much_longer_than_the_others_is_named_with_its_host() -> None:
    report = _report(0.010, 0.011, 0.030, 0.012)
    assert [item.rank for item in report.slow] == [2]
    assert str(report) == (
        "step 200: 50 ms a step, 40 ms predicted; rank 2 (pid 102 on node2) takes 2.7 x the others' median"
    )
    assert not _report(0.010, 0.014, 0.012).slow and not _report(0.1).slow
    assert [item.rank for item in _report(0.020, 0.010).slow] == [0]


def _with_a_slow_rank(folder: Path) -> list[tuple[int, list[int | str]]]:
    """Reports of a run in which rank 1 computes for longer."""
    torch.manual_seed(0)
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x.repeat(5, 1), x.repeat(5, 1))
    model: ParallelModule = autopar.parallelize(
        nn.Linear(4, 4),
        ClusterSpec.local(2),
        (x, x),
        loss_fn=F.mse_loss,
        force="batch",
        measure=False,
        quiet=True,
    )
    loader = DataLoader(data, batch_sampler=model.sampler(data))
    reports: list[StepReport] = []
    loop = autopar.steps(
        model, loader, folder=folder, epochs=3, save_every=4, report_every=5, on_report=reports.append
    )
    for batch in loop:
        model(*batch).backward()
        if dist.get_rank() == 1:
            time.sleep(0.15)
    assert all(report.seconds >= 0.15 and report.predicted == model.plan.step_seconds for report in reports)
    return [(report.step, [item.rank for item in report.slow]) for report in reports]


def test_reports_name_the_rank_for_which_others_wait(pools: Pools, tmp_path: Path) -> None:
    first, second = pools(2).run(_with_a_slow_rank, tmp_path)
    assert first == second == [(6, [1]), (11, [1])]
