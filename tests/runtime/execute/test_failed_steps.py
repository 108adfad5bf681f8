"""A step that raises leaves nothing behind: after `zero_grad` the next one is the serial model's next one.

Every rank raises in the same place, so that none is waited for. Between stages others may wait, and a step
that raises in the middle is the last: only what is refused before it begins may be followed by another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.gathering import Gathering
from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.core.schedule import ScheduleKind
from autopar.errors import InputError
from autopar.rewrite.render import describe
from autopar.runtime.execute.bound_program import Bound
from autopar.runtime.module.parallel_module import ParallelModule
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler
from tests.whole_tensors import full_of

Pools = Callable[[int], Pool]
EXACT = 1e-12  # sums in another order, float64
SAMPLES, WORDS, CLASSES = 14, 6, 4  # micro-batches of 4, 4, 3 and 3 samples, which are two programs
BUCKET_BYTES = 200  # so that some are on their way when a backward raises


class Net(nn.Module):
    """Samples and words, a batch norm, a weight that is used twice, and samples that come late."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.middle, self.table = nn.Linear(8, 8), nn.Embedding(WORDS, 8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, words: Tensor, late: Tensor, y: Tensor) -> Tensor:
        h = self.middle(torch.tanh(self.first(x)))
        h = torch.tanh(self.norm(h)) + self.table(words)
        return F.cross_entropy(self.last(torch.tanh(self.middle(h)) * late), y)


def batch(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, late = torch.randn(2, SAMPLES, 8, generator=generator, dtype=torch.float64).unbind()
    words, y = (torch.randint(most, (SAMPLES,), generator=generator) for most in (WORDS, CLASSES))
    return [x, words, late.requires_grad_(), y]


def pair(
    wanted: Sequence[str],
    pipeline: Pipeline,
    *,
    gathering: Gathering | None = None,
    recompute: bool = False,
) -> tuple[Net, ParallelModule]:
    torch.manual_seed(0)
    serial = Net().double()
    compiler = forced_compiler(
        Mesh((2,) * len(wanted)), list(wanted), pipeline=pipeline, gathering=gathering, recompute=recompute
    )
    ours = ParallelModule(
        copy.deepcopy(serial),
        compiler,
        describe=describe,
        device=torch.device("cpu"),
        bucket_bytes=BUCKET_BYTES,
        by_steps=pipeline.is_staged or pipeline.micro_batches > 1,
    )
    return serial, ours


def learn(model: nn.Module, data: Sequence[Tensor], count: int) -> Tensor:
    """Forward and backward of `count` micro-batches."""
    if isinstance(model, ParallelModule) and count > 1:
        return model.train_step(*data)
    total = torch.zeros((), dtype=torch.float64)
    for part in zip(*(tensor.tensor_split(count) for tensor in data), strict=True):
        loss = model(*part) * (len(part[0]) / len(data[0]))
        loss.backward()
        total += loss.detach()
    return total


def gap(ours: Tensor, theirs: Tensor) -> float:
    ours = full_of(ours)
    return float((ours.detach() - theirs.detach()).abs().max())


def check_step(serial: nn.Module, ours: ParallelModule, data: Sequence[Sequence[Tensor]], count: int) -> None:
    """A step of both, each from its own `data`, is the same in loss, gradients and state."""
    assert gap(learn(ours, data[0], count), learn(serial, data[1], count)) < EXACT
    theirs = dict(serial.named_parameters())
    for name, parameter in ours.named_parameters():
        gradient, wanted = parameter.grad, theirs[name].grad
        assert gradient is not None and wanted is not None and gap(gradient, wanted) < EXACT, name
    state = ours.state_dict()
    for name, value in serial.state_dict().items():
        assert gap(state[name], value) < EXACT, name


def check_released(ours: ParallelModule) -> None:
    """Between steps no program holds gradients, sums that are on their way, or full copies of weights."""
    for program in ours._autopar._programs.cache.programs():
        assert isinstance(program, Bound)
        assert not program._held and not program._sync._rounds and not program._leaves._full


# -- how steps fail -------------------------------------------------------------------------------

Fail = Callable[[list[Tensor], int, int], None]  # of micro-batch number so many, of so many


def in_forward(data: list[Tensor], number: int, count: int) -> None:
    """Words that the table lacks, behind the batch norm."""
    data[1].tensor_split(count)[number].fill_(WORDS)


def in_the_loss(data: list[Tensor], number: int, count: int) -> None:
    """Labels without a class."""
    data[3].tensor_split(count)[number].fill_(CLASSES)


def in_backward(data: list[Tensor], number: int, count: int) -> None:
    """A hook, between the gradients of the last layer and those of the others, raises."""
    gradients: list[Tensor] = []

    def refuse(gradient: Tensor) -> None:
        gradients.append(gradient)
        if len(gradients) > number:
            raise IndexError("no more")

    data[2].register_hook(refuse)


FAILS: dict[str, Fail] = {"forward": in_forward, "loss": in_the_loss, "backward": in_backward}
PLANS: dict[str, tuple[list[str], int, Gathering | None]] = {  # "recomputed" are all parts but the loss
    "one batch": (["batch"], 1, None),
    "micro-batches": (["batch"], 4, None),
    "filter": (["filter"], 4, None),
    "gathered once": (["batch"], 4, Gathering.ONCE),
    "recomputed": (["batch"], 1, None),
    "regathered": (["batch"], 4, Gathering.REGATHER),
}


def _fails(plan: str) -> None:
    wanted, count, gathering = PLANS[plan]
    for fail in FAILS.values():
        pipeline = Pipeline(micro_batches=count)
        serial, ours = pair(wanted, pipeline, gathering=gathering, recompute=plan == "recomputed")
        ours.prepare(*batch(0))
        optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (serial, ours)]
        for number in range(count):
            for model in (serial, ours):
                data = batch(number + 10)
                fail(data, number, count)
                with pytest.raises(IndexError):
                    learn(model, data, count)
                model.zero_grad(set_to_none=number != 1)
                with torch.no_grad():  # as from a checkpoint
                    for parameter in model.parameters():
                        parameter.mul_(1.01)
            if count > 1:  # a call of the program that ran the later micro-batches
                check_step(serial, ours, [[item[:3] for item in batch(number)] for _ in range(2)], 1)
                serial.zero_grad(), ours.zero_grad()
            check_step(serial, ours, [batch(number) for _ in range(2)], count)
            check_released(ours)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan",
    [
        plan if plan in ("filter", "gathered once") else pytest.param(plan, marks=pytest.mark.long)
        for plan in PLANS
    ],
)
def test_nothing_of_a_failed_step_is_left(plan: str, pools: Pools) -> None:
    """Whatever raises, in whichever micro-batch, the serial model's next step is ours."""
    pools(2).run(_fails, plan)


# -- what is refused before a step begins ---------------------------------------------------------


def _refused(schedule: ScheduleKind | None) -> None:
    staged = None if schedule is None else Pipeline(2, 4, schedule, (0, 5))
    serial, ours = pair(["batch"], staged or Pipeline(micro_batches=4))
    plain = [item.detach() for item in batch(0)]
    ours.prepare(*plain)
    x, words, late, y = plain
    narrow, few = [x[:, :5], words, late, y], [item[:3] for item in plain]
    calls: list[tuple[list[Tensor], str]] = [(narrow, "same reduction dim"), (few, "4 for a batch of 3")]
    if schedule is not None:
        calls.append(([x, words, late.clone().requires_grad_(), y], "requires_grad"))
    for seed, (data, message) in enumerate(calls):
        with pytest.raises(InputError, match=message):
            ours.train_step(*data)
        for model in (serial, ours):
            model.zero_grad()
        good = [item.detach() for item in batch(seed)]
        assert gap(ours.train_step(*good), learn(serial, good, 4)) < EXACT
        theirs = dict(serial.named_parameters())
        for name, parameter in ours.named_parameters():
            assert parameter.grad is not None and gap(parameter.grad, theirs[name].grad) < EXACT, name
    state = ours.state_dict()
    assert all(gap(state[name], value) < EXACT for name, value in serial.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [None, ScheduleKind.ONE_F_ONE_B])
def test_a_refused_batch_leaves_the_next_step_alone(schedule: ScheduleKind | None, pools: Pools) -> None:
    pools(2 if schedule is None else 4).run(_refused, schedule)
