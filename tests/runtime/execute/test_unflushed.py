"""Pipelines that aren't flushed between steps do what the reference of stale gradients does."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import autopar
from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.errors import InputError
from autopar.rewrite.render import describe
from autopar.runtime.execute.stage import StageModule
from autopar.runtime.launch import worker
from autopar.runtime.launch.launch import run_function
from autopar.runtime.module.parallel_module import ParallelModule, runner_of
from autopar.runtime.module.stale_steps import StaleSteps
from autopar.trace.micro_batches import mask_seed
from autopar.updates.reference import train_stale
from autopar.updates.rules import Stale
from tests.runtime.execute.test_staged_program import Net
from tests.runtime.forced_compiler import forced_compiler

SIZE, SAMPLES, EPOCHS, SEED = 7, 28, 2, 5
TOLERANCE = 1e-9
STARTS = {2: (0, 6), 3: (0, 4, 8)}


class Untied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 8)


def make_net(kind: type[Net] = Net) -> nn.Module:
    torch.manual_seed(0)
    return kind().double()


def parallel(ranks: int, axis: int = 1, kind: type[Net] = Net) -> ParallelModule:
    worker.init()
    compiler = forced_compiler(Mesh((axis,)), ["batch"], pipeline=Pipeline(ranks, 3, starts=STARTS[ranks]))
    made = ParallelModule(
        make_net(kind),
        compiler,
        describe=describe,
        device=torch.device("cpu"),
        by_steps=True,
        exact_random=True,
    )
    made.prepare(*batches()[:SIZE])
    runner_of(made).stale = StaleSteps(Stale())
    return made


def batches(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randn(samples, 8, generator=generator, dtype=torch.float64))


def optimizer_of(tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(tensors), lr=0.1, momentum=0.9)


def train(made: ParallelModule, folder: Path, *, ends: int = 0, clips: float = 0.0) -> tuple[list[Any], Any]:
    """Batches with their losses, and the module's state; the loop is left after step `ends`."""
    samples, optimizer = batches(), optimizer_of(made.parameters())
    loader = DataLoader(samples, batch_sampler=made.sampler(samples, seed=1))
    torch.manual_seed(SEED)
    taken = []
    ahead = 0
    for batch in (
        run := autopar.steps(made, loader, folder=folder, optimizer=optimizer, epochs=EPOCHS, save_every=3)
    ):
        optimizer.zero_grad()
        taken.append((batch, float(made.train_step(*batch))))
        ahead += runner_of(made).stale.under_way is not None  # type: ignore[union-attr]
        if clips:
            made.clip_grad_norm_(clips)
        optimizer.step()
        if run.step + 1 == ends:
            break
    assert ahead >= len(taken) // 2 - 1  # or nothing is proved of what isn't flushed
    return taken, made.state_dict()


def wanted(taken: list[Any], clips: float = 0.0) -> tuple[list[float], nn.Module]:
    """Losses and the model of the reference."""

    def loss_of(model: nn.Module, _: int, step: int) -> Tensor:
        (x, y), _ = taken[step]
        total = torch.zeros(())
        for number, rows in enumerate(torch.arange(SIZE).tensor_split(3)):
            torch.manual_seed(mask_seed(SEED, number))
            total = total + model(x[rows], y[rows]) * (len(rows) / SIZE)
        return total

    def clipped(tensors: Any) -> torch.optim.Optimizer:
        made = optimizer_of(tensors)
        if clips:
            held = made.param_groups[0]["params"]
            made.register_step_pre_hook(lambda *_: nn.utils.clip_grad_norm_(held, clips) and None)
        return made

    steps = list(train_stale(make_net(), len(taken), loss_of, clipped))
    return [float(loss) for loss, _ in steps], steps[-1][1]


def compare(folder: Path, ranks: int, axis: int, clips: float) -> None:
    """On a rank: all of a run, and a run that is broken off after a save and goes on."""
    taken, state = train(parallel(ranks, axis), folder / "whole", clips=clips)
    losses, newest = wanted(taken, clips)
    assert losses == pytest.approx([loss for _, loss in taken], abs=TOLERANCE)
    for name, tensor in newest.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=TOLERANCE)
    assert (newest.state_dict()["deep.weight"] - make_net().state_dict()["deep.weight"]).norm() > 1e-2
    broken = parallel(ranks, axis)
    train(broken, folder / "parts", ends=5, clips=clips)
    broken.eval_step(*batches()[:SIZE])  # no message of what was under way is taken for its own
    _, again = train(parallel(ranks, axis), folder / "parts", clips=clips)
    for name, tensor in state.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "axis", "clips"), [(2, 1, 0.0), (3, 1, 0.1), (2, 2, 0.0)])
def test_stages_are_the_reference(ranks: int, axis: int, clips: float, tmp_path: Path) -> None:
    run_function(compare, ranks * axis, tmp_path, ranks, axis, clips)


def step_seconds(folder: Path, stale: bool) -> float:
    """On a rank: the median of a step's seconds where a stage's forward takes 40 ms, and its backward 80."""
    made, samples = parallel(3, kind=Untied), batches(12 * SIZE)
    if not stale:
        runner_of(made).stale = None
    run, learning = StageModule.run, StageModule.learning

    def slow_run(self: StageModule, *args: Any) -> Any:
        time.sleep(0.04)
        return run(self, *args)

    @contextmanager
    def slow_learning(self: StageModule) -> Iterator[None]:
        time.sleep(0.08)
        with learning(self):
            yield

    StageModule.run, StageModule.learning = slow_run, slow_learning  # type: ignore[method-assign, assignment]
    loader = DataLoader(samples, batch_sampler=made.sampler(samples))
    ends = []
    for batch in autopar.steps(made, loader, folder=folder):
        made.train_step(*batch)
        ends.append(time.perf_counter())
    return statistics.median(b - a for a, b in zip(ends, ends[1:], strict=False))


@pytest.mark.slow
def test_no_rank_waits_for_the_pipeline_to_drain(tmp_path: Path) -> None:
    """Of 3 micro-batches on 3 stages: 3 times 120 ms, in place of 5 times."""
    seconds = {
        stale: max(run_function(step_seconds, 3, tmp_path / str(stale), stale)) for stale in (False, True)
    }
    assert seconds[False] > 0.6
    assert 0.36 < seconds[True] < 0.8 * seconds[False], seconds


def test_copies_of_the_weights_must_fit() -> None:
    plan: Any = SimpleNamespace(parameter_bytes=(10, 30), peak_bytes=100, memory_cap=160)
    StaleSteps(Stale()).require_room(plan)
    plan.memory_cap = 159
    with pytest.raises(InputError, match="plan with memory=99"):
        StaleSteps(Stale()).require_room(plan)


def train_again(folder: Path) -> None:
    """On a rank: two loops of one module, the second from new weights, then one that is broken off and goes
    on."""
    made = parallel(2)
    begun = make_net().state_dict()
    train(made, folder / "before", ends=5)
    made.load_state_dict(begun)
    taken, state = train(made, folder / "whole")
    losses, newest = wanted(taken)
    assert losses == pytest.approx([loss for _, loss in taken], abs=TOLERANCE)
    for name, tensor in newest.state_dict().items():
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=TOLERANCE)
    made.load_state_dict(begun)
    train(made, folder / "parts", ends=5)
    _, again = train(made, folder / "parts")
    for name, tensor in state.items():
        torch.testing.assert_close(again[name], tensor, rtol=0, atol=TOLERANCE)


@pytest.mark.slow
def test_each_loop_begins_at_the_weights_of_then(tmp_path: Path) -> None:
    run_function(train_again, 2, tmp_path)


def step_wrongly(case: str, folder: Path) -> None:
    """On a rank: what the loop can't have."""
    made, samples = parallel(2), batches()
    loader = DataLoader(samples, batch_sampler=made.sampler(samples))
    if case == "outside":
        made.train_step(*samples[:SIZE])
    for number, (x, y) in enumerate(run := autopar.steps(made, loader, folder=folder)):
        if case == "written":
            x.mul_(1.5)
        if case == "other":
            made.train_step(x.clone(), y)
        if case != "none" or not number:
            made.train_step(x, y)
        if case == "twice":
            made.train_step(x, y)
        if case == "save":
            run.save()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "found"),
    [
        ("outside", "outside of autopar.steps"),
        ("other", "of other tensors than the loop's batch"),
        ("written", "of a batch that was written in place"),
        ("twice", "a second step in the body"),
        ("none", "a body without train_step"),
        ("save", "a step in which the next batch has begun"),
    ],
)
def test_what_the_loop_cannot_have(case: str, found: str, tmp_path: Path) -> None:
    with pytest.raises(autopar.AutoparError, match=found):
        run_function(step_wrongly, 2, case, tmp_path)
