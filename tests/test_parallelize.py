"""Parallel modules as users make them, with the solver's plans, on real processes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import autopar
from tests.pool import Pool

Pools = Callable[[int], Pool]
EXACT = 1e-12  # sums in another order, float64


def net() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 10)
    )
    return model.double(), (torch.randn(8, 3, 8, 8, dtype=torch.float64), torch.randint(10, (8,)))


def modes() -> list[tuple[float, float]]:
    """(loss, largest difference of a gradient) in eval mode without and with gradients, trained before."""
    model, (x, y) = net()
    serial = copy.deepcopy(model)
    parallel = autopar.parallelize(
        model,
        autopar.ClusterSpec.local(2),
        (x, y),
        loss_fn=nn.functional.cross_entropy,
        measure=False,
        force="batch",
    )
    found = []
    for ours in (False, True):
        side = parallel if ours else serial

        def loss(side: nn.Module = side, ours: bool = ours) -> Tensor:
            result: Tensor = side(x, y) if ours else nn.functional.cross_entropy(side(x), y)
            return result

        loss().backward()  # type: ignore[no-untyped-call]
        side.eval()
        with torch.no_grad():
            silent = loss().item()
        side.zero_grad()
        loud = loss()
        loud.backward()  # type: ignore[no-untyped-call]
        assert loud.item() == pytest.approx(silent, rel=EXACT)
        found.append(silent)
    gaps = [
        float((parallel.gather(name, dict(parallel.named_parameters())[name].grad) - item.grad).abs().max())
        for name, item in serial.named_parameters()
        if item.grad is not None
    ]
    return [(found[0], found[1]), (0.0, max(gaps))]


def told() -> list[tuple[int, int, str]]:
    """What is planned where the environment says it, and where the script does too."""
    model, (x, y) = net()
    given: dict[str, Any] = {"loss_fn": nn.functional.cross_entropy, "measure": False}
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOPAR_OPTIONS", '{"stages": 2, "micro_batches": 4, "schedule": "gpipe", "mesh": "1"}')
        for said in ({}, {"micro_batches": 2}):
            cluster = autopar.ClusterSpec.local(2)
            parallel = autopar.parallelize(copy.deepcopy(model), cluster, (x, y), **given, **said)
            pipeline = parallel.plan.pipeline
            found.append((pipeline.ranks, pipeline.micro_batches, pipeline.schedule.value))
    return found


@pytest.mark.slow
def test_parallelize_takes_from_the_environment_what_the_script_leaves_open(pools: Pools) -> None:
    assert pools(2).run(told) == [[(2, 4, "gpipe"), (2, 2, "gpipe")]] * 2


def stepped() -> tuple[float, int]:
    """The largest difference after a `train_step` without stages or micro-batches, and the programs made."""
    model, (x, y) = net()
    serial = copy.deepcopy(model)
    parallel = autopar.parallelize(
        model,
        autopar.ClusterSpec.local(2),
        (x, y),
        loss_fn=nn.functional.cross_entropy,
        measure=False,
        force="batch",
    )
    loss = nn.functional.cross_entropy(serial(x), y)
    loss.backward()
    gaps = [float((parallel.train_step(x, y) - loss).abs())]
    held = dict(parallel.named_parameters())
    for name, item in serial.named_parameters():
        assert item.grad is not None
        gaps.append(float((parallel.gather(name, held[name].grad) - item.grad).abs().max()))
    return max(gaps), len(parallel._autopar._programs)


def test_a_train_step_without_micro_batches_runs_the_program_that_was_planned(pools: Pools) -> None:
    for worst, programs in pools(2).run(stepped):
        assert worst < EXACT and programs == 1


def test_eval_mode_plans_anew_with_and_without_gradients(pools: Pools) -> None:
    for losses, gaps in pools(2).run(modes):
        assert losses[0] == pytest.approx(losses[1], rel=EXACT)
        assert gaps[1] < EXACT


class Scored(nn.Module):
    """A net with a method that calls it, as training loops do to tell how well it does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.last(self.first(x).tanh())
        return scores

    def accuracy(self, x: Tensor, y: Tensor) -> float:
        return float((self(x).argmax(1) == y).double().mean())


def scored(stages: int) -> tuple[list[float], str]:
    """How far a call without targets is from the serial model's: outputs, gradients through them, a method's
    number, outputs in evaluation; and what a step without targets says."""
    torch.manual_seed(0)
    model, x = Scored().double(), torch.randn(8, 6, dtype=torch.float64)
    y, serial = torch.randint(3, (8,)), copy.deepcopy(model)
    cluster, loss_fn = autopar.ClusterSpec.local(2), nn.functional.cross_entropy
    parallel: Any = autopar.parallelize(
        model, cluster, (x, y), loss_fn=loss_fn, measure=False, stages=stages, micro_batches=stages
    )
    theirs, mine = serial(x), parallel(x)
    gaps = [float((mine - theirs).detach().abs().max()), abs(parallel.accuracy(x, y) - serial.accuracy(x, y))]
    if stages == 1:
        theirs.square().sum().backward()
        mine.square().sum().backward()
        for name, item in parallel.named_parameters():
            gradient = dict(serial.named_parameters())[name].grad
            assert gradient is not None
            gaps.append(float((parallel.gather(name, item.grad) - gradient).abs().max()))
    with torch.no_grad():
        gaps.append(float((parallel.eval()(x) - theirs).abs().max()))
    try:
        parallel.train().train_step(x)
    except autopar.AutoparError as error:
        return gaps, str(error)
    return gaps, ""


@pytest.mark.parametrize("stages", [1, 2])
def test_a_call_without_targets_gives_the_outputs_of_the_model(stages: int, pools: Pools) -> None:
    for gaps, said in pools(2).run(scored, stages):
        assert max(gaps) < EXACT
        told = (
            "loss: found none in the output of the model" if stages == 1 else "loss_fn cross_entropy: found 1"
        )
        assert told in said


def masked() -> list[Tensor]:
    """Losses of a step and of a call after it, serial and parallel, from one seed and with ordinary masks."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.Dropout(0.5), nn.Linear(40, 1)).double()
    serial, x = copy.deepcopy(model), torch.randn(16, 6, dtype=torch.float64)
    parallel = autopar.parallelize(model, autopar.ClusterSpec.local(1), (x,), measure=False)
    losses = []
    for side in (serial, parallel):
        optimizer = torch.optim.SGD(side.parameters(), lr=0.1)
        torch.manual_seed(1)
        loss = side(x).square().mean()
        loss.backward()
        optimizer.step()
        losses += [loss.detach(), side(x).square().mean().detach()]
    return losses


def test_one_process_draws_the_serial_masks(pools: Pools) -> None:
    for first, second, ours, again in pools(1).run(masked):
        assert torch.equal(first, ours) and second.item() == pytest.approx(again.item(), rel=EXACT)


@dataclass(frozen=True)
class Sides:
    left: Tensor
    rest: tuple[Tensor, None]
    norm: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "norm", self.left.square().mean())


class Sided(nn.Module):
    """Dataclasses in a dict and in a list in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.layer(x)
        return {"a": Sides(y, (y + 1, None)), "all": [Sides(y * i, (x, None)) for i in range(2)], "n": 3}


def sided() -> tuple[dict[str, Any], dict[str, Any]]:
    """The serial output and the parallel one."""
    torch.manual_seed(0)
    model, x = Sided().double(), torch.randn(4, 6, dtype=torch.float64)
    serial = copy.deepcopy(model)(x)
    parallel = autopar.parallelize(
        model, autopar.ClusterSpec.local(dist.get_world_size()), (x,), measure=False
    )
    return pytree.tree_map(lambda leaf: leaf.detach(), (flat(serial), flat(parallel(x))))


def flat(output: dict[str, Any]) -> Any:
    """The tensors of all dataclasses by where they are, and what else is there."""
    sides = [output["a"], *output["all"]]
    assert list(output) == ["a", "all", "n"] and output["n"] == 3
    assert all(type(each) is Sides and each.rest[1] is None for each in sides)
    return [(each.left, each.rest[0], each.norm) for each in sides]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_output_has_its_dataclasses_at_any_depth(ranks: int, pools: Pools) -> None:
    for serial, ours in pools(ranks).run(sided):
        torch.testing.assert_close(ours, serial, rtol=EXACT, atol=EXACT)


def drawn_after_rank_0_measured() -> list[float]:
    from autopar.compiler import Compiler  # noqa: PLC0415 -- of this rank

    model, (x, _) = net()
    agree = Compiler.agree

    def measuring(self: Compiler, *args: Any) -> Any:
        if dist.get_rank() == 0:
            torch.rand(7)
        return agree(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Compiler, "agree", measuring)
        autopar.parallelize(model, autopar.ClusterSpec.local(2), (x,), force="batch", measure=False)
    return torch.rand(3).tolist()


def test_what_is_drawn_to_measure_leaves_ranks_in_one_random_state(pools: Pools) -> None:
    first, second = pools(2).run(drawn_after_rank_0_measured)
    assert first == second
