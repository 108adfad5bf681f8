"""Pipeline stages and micro-batches on real processes do what serial accumulation of gradients does."""

from __future__ import annotations

import copy
import itertools
import math
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.pipelining import PipelineStage

from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.core.schedule import ScheduleKind
from autopar.core.timeline import StageCost
from autopar.errors import InputError, WorkerError
from autopar.proof.precision import raise_model
from autopar.rewrite.render import describe
from autopar.runtime.collectives import transport
from autopar.runtime.execute.stage import StageModule
from autopar.runtime.execute.staged_program import StagedProgram
from autopar.runtime.execute.torch_stage import Sends
from autopar.runtime.launch import worker
from autopar.runtime.launch.launch import run_function
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parameters.parameters import local
from autopar.schedules.fill_bubbles import order_of
from autopar.trace.call.call_signature import flatten_arguments
from autopar.trace.micro_batches import mask_seed, seed_after
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler
from tests.targets import conjugates
from tests.whole_tensors import full_of

Pools = Callable[[int], Pool]
CPU = torch.device("cpu")
EXACT = 1e-12  # sums in another order, float64
PROMPT = 120.0  # seconds: far below the ten minutes after which a rank no longer waits for another
MICRO_BATCHES = 4
NORM_TYPES = (1.0, 2.0, 3.0, math.inf)


class Net(nn.Module):
    """A tied matrix, batch norm and a skip over all that lies between, dropout, a frozen bias, an unused
    parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.middle = nn.Linear(8, 8, bias=False)
        self.dropout = nn.Dropout(0.3)
        self.deep = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.middle.weight
        self.first.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        skip = torch.tanh(self.first(x))
        h = torch.tanh(self.middle(self.norm(skip)))
        h = torch.tanh(self.deep(self.dropout(h)))
        return F.mse_loss(self.last(h + skip), y)


@dataclass
class Shown:
    """What a model gives that computes its own loss, beside others: predictions first."""

    prediction: Tensor
    loss: Tensor


class Showing(Net):
    def forward(self, x: Tensor, y: Tensor) -> Shown:  # type: ignore[override]
        return Shown(torch.tanh(self.first(x)), super().forward(x, y))


STARTS = {1: (0,), 2: (0, 6), 4: (0, 3, 6, 9)}  # of its twelve operators; the tied ones are 4 and 10
SCHEDULED = {
    kind.value: Pipeline(2, MICRO_BATCHES, kind, STARTS[4 if virtual else 2])
    for kind, virtual in (
        (ScheduleKind.GPIPE, False),
        (ScheduleKind.ONE_F_ONE_B, False),
        (ScheduleKind.INTERLEAVED, True),
        (ScheduleKind.ZB1P, False),
        (ScheduleKind.ZBV, True),
        (ScheduleKind.DUALPIPEV, True),
    )
}
FILLED = {  # costs for which weights' gradients move
    ScheduleKind.ZB1P: (StageCost(1.0, 1.0, 2.0), StageCost(3.0, 0.2, 0.2)),
    ScheduleKind.ZBV: tuple(
        StageCost(*each) for each in ((0.2, 0.2, 0.2), (2.0, 1.0, 2.0), (2.0, 1.0, 0.2), (1.0, 3.0, 3.0))
    ),
}
SCHEDULED |= {
    f"{kind.value}-filled": replace(SCHEDULED[kind.value], filling=costs) for kind, costs in FILLED.items()
}
BY_BATCH = [f"{name} x batch" for name in SCHEDULED]
CASES: dict[str, tuple[tuple[int, ...], list[str], Pipeline]] = {
    **{name: ((1,), ["batch"], pipeline) for name, pipeline in SCHEDULED.items()},
    **{name: ((2,), ["batch"], SCHEDULED[name.split()[0]]) for name in BY_BATCH},
    "zbv x filter": ((2,), ["filter"], SCHEDULED["zbv"]),
    "1f1b x filter": ((2,), ["filter"], SCHEDULED["1f1b"]),
    **{f"{name}, offloaded": ((1,), ["batch"], SCHEDULED[name]) for name in ("gpipe", "1f1b", "interleaved")},
    "four ranks": ((1,), ["batch"], Pipeline(4, MICRO_BATCHES, ScheduleKind.ONE_F_ONE_B, STARTS[4])),
    "no stages": ((2,), ["batch"], Pipeline(1, MICRO_BATCHES)),
}
WHOLE = {
    "whole batches": ((1,), ["batch"], Pipeline(2, 1, ScheduleKind.GPIPE, STARTS[2])),
    "whole batches x filter": ((2,), ["filter"], Pipeline(2, 1, ScheduleKind.GPIPE, STARTS[2])),
}


@pytest.mark.parametrize("name", [name for name in SCHEDULED if name.endswith("filled")])
def test_waits_are_filled_here(name: str) -> None:
    assert order_of(SCHEDULED[name]) != order_of(replace(SCHEDULED[name], filling=()))


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(size: int = 8, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 6, generator=generator, dtype=torch.float64)
    return x, torch.randn(size, 8, generator=generator, dtype=torch.float64)


def parallel(
    case: str, model: nn.Module, starts: tuple[int, ...] | None = None, **options: Any
) -> ParallelModule:
    shape, wanted, pipeline = (CASES | WHOLE)[case]
    pipeline = replace(pipeline, starts=starts or pipeline.starts)
    compiler = forced_compiler(Mesh(shape), wanted, pipeline=pipeline, offload=case.endswith("offloaded"))
    return ParallelModule(
        model, compiler, describe=describe, device=CPU, by_steps=True, exact_random=True, **options
    )


def prepared(case: str, **options: Any) -> tuple[Net, ParallelModule]:
    """A serial net and its parallel double."""
    serial, ours = make_net(), parallel(case, make_net(), **options)
    ours.prepare(*batch())
    return serial, ours


def accumulate(model: nn.Module, *tensors: Tensor, seed: int, learn: bool = True) -> Tensor:
    """Serial training: gradients add up over micro-batches, each loss weighted by its share."""
    total = torch.zeros((), dtype=torch.float64)
    parts = zip(*(tensor.tensor_split(MICRO_BATCHES) for tensor in tensors), strict=True)
    for number, part in enumerate(parts):
        torch.manual_seed(mask_seed(seed, number))
        loss = model(*part) * (len(part[0]) / len(tensors[0]))
        if learn:
            loss.backward()
        total += loss.detach()
    return total


def step(model: ParallelModule, *tensors: Tensor, seed: int) -> Tensor:
    torch.manual_seed(seed)
    return model.train_step(*tensors)


def gap(ours: Any, theirs: Any) -> float:
    """The largest difference between two state dicts with the same keys, or two tensors."""
    if isinstance(theirs, Tensor):
        ours = full_of(ours)
        return float((ours.detach() - theirs.detach()).abs().max())
    assert list(ours) == list(theirs)
    return max(gap(ours[name], theirs[name]) for name in theirs)


def check_gradients(ours: ParallelModule, serial: nn.Module) -> None:
    """Those of this rank's stages; None where the serial model has none."""
    theirs = dict(serial.named_parameters())
    for name, parameter in ours.named_parameters():
        wanted = theirs[name].grad
        assert (parameter.grad is None) == (wanted is None), name
        assert wanted is None or gap(parameter.grad, wanted) < EXACT, name


def on_ranks(pools: Pools, case: str, function: Callable[..., Any], *args: Any) -> list[Any]:
    shape, _, pipeline = (CASES | WHOLE)[case]
    return pools(Mesh(shape).num_devices * pipeline.ranks).run(function, case, *args)


every_case = pytest.mark.parametrize("case", CASES)
two_cases = pytest.mark.parametrize("case", ["1f1b", pytest.param("zbv x filter", marks=pytest.mark.long)])


# -- training -----------------------------------------------------------------------------------


def _train(case: str) -> None:
    serial, ours = prepared(case)
    pair = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (serial, ours)]
    for number in range(3):
        for optimizer in pair:
            optimizer.zero_grad(set_to_none=number != 1)
        data = batch(seed=number)
        mine, theirs = step(ours, *data, seed=number), accumulate(serial, *data, seed=number)
        assert gap(mine, theirs) < EXACT and not mine.requires_grad
        check_gradients(ours, serial)
        for optimizer in pair:
            optimizer.step()
    assert gap(ours.state_dict(), serial.state_dict()) < EXACT


@pytest.mark.parametrize(
    "case",
    [
        case
        if case in ("gpipe", "zb1p-filled", "four ranks", *BY_BATCH[:6], "zbv x filter", "gpipe, offloaded")
        else pytest.param(case, marks=pytest.mark.long)
        for case in CASES
        if case != "no stages"
    ],
)
def test_training_equals_serial_accumulation(case: str, pools: Pools) -> None:
    on_ranks(pools, case, _train)


def _once_seeded(run: Callable[[int], Tensor]) -> tuple[list[float], list[float]]:
    """Losses of steps after one seed, and what the user has drawn between them."""
    torch.manual_seed(5)
    pairs = [(run(number).item(), torch.rand((), dtype=torch.float64).item()) for number in range(3)]
    losses, drawn = zip(*pairs, strict=True)
    assert len(set(losses)) == len(set(drawn)) == len(pairs)
    return list(losses), list(drawn)


def _draws_on(case: str) -> None:
    serial, ours = prepared(case)
    count = (CASES | WHOLE)[case][2].micro_batches

    def accumulated(number: int) -> Tensor:
        """Micro-batch 0 goes on from where the generator is, and the next step from there."""
        losses, start, after = [], torch.get_rng_state(), torch.empty(0)
        for micro, (x, y) in enumerate(zip(*(item.chunk(count) for item in batch()), strict=True)):
            if micro:
                torch.manual_seed(seed_after(start, micro))
            losses.append(serial(x, y))
            after = after if micro else torch.get_rng_state()
        torch.set_rng_state(after)
        return torch.stack(losses).mean()

    for mine in (lambda _: ours.train_step(*batch()), lambda _: ours.eval_step(*batch())):
        losses, drawn = _once_seeded(mine)
        theirs, wanted = _once_seeded(accumulated)
        assert drawn == wanted
        assert losses == pytest.approx(theirs, abs=EXACT)
    with torch.no_grad():
        losses, drawn = _once_seeded(lambda _: ours(*batch()))
        theirs, wanted = _once_seeded(lambda _: serial(*batch()))
        assert drawn == wanted and losses == pytest.approx(theirs, abs=EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["zbv", "zbv x filter", "no stages", *WHOLE])
def test_exact_masks_are_new_in_each_step_and_serial_ones_in_its_first_micro_batch(
    case: str, pools: Pools
) -> None:
    on_ranks(pools, case, _draws_on)


class TiedHead(nn.Module):
    """Its last layer, which shares the first one's matrix, is all that learns behind the middle one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Linear(6, 8, bias=False), nn.Linear(8, 6)
        self.last = nn.Linear(6, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(self.last(torch.tanh(self.middle(torch.tanh(self.first(x))))), y)


def _tied_head(case: str) -> None:
    torch.manual_seed(0)
    serial = TiedHead().double()
    ours = parallel(case, copy.deepcopy(serial), (0, 4))  # the last layer and the loss
    ours.prepare(*batch())
    assert gap(step(ours, *batch(), seed=0), accumulate(serial, *batch(), seed=0)) < EXACT
    check_gradients(ours, serial)
    for model in (serial, ours):
        model.middle.requires_grad_(False)
        model.zero_grad()
    assert gap(step(ours, *batch(), seed=0), accumulate(serial, *batch(), seed=0)) < EXACT
    check_gradients(ours, serial)
    with torch.no_grad():
        assert gap(ours.eval_step(*batch()), serial(*batch())) < EXACT
        assert gap(ours(*batch(4)), serial(*batch(4))) < EXACT


def test_a_stage_may_hold_nothing_but_a_tied_weight(pools: Pools) -> None:
    """Programs of other kinds of call leave it there."""
    on_ranks(pools, "1f1b", _tied_head)


def _noted(case: str) -> None:
    for start in range(1, 9):
        torch.manual_seed(0)
        serial, (x, y) = conjugates()
        raise_model(serial)
        data = x.to(torch.complex128), y.double()
        ours = parallel(case, copy.deepcopy(serial), (0, start))
        ours.prepare(*data)
        with torch.no_grad():
            assert gap(ours(*data), serial(*data)) < EXACT
        assert gap(step(ours, *data, seed=0), accumulate(serial, *data, seed=0)) < EXACT
        check_gradients(ours, serial)


@pytest.mark.long
def test_conjugates_and_negatives_that_are_only_noted_cross_every_cut(pools: Pools) -> None:
    on_ranks(pools, "1f1b", _noted)


class Late(nn.Module):
    """A net whose first and last two operators have no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.mse_loss(torch.tanh(self.net(torch.tanh(x * 2.0))), y)


def _without_parameters(case: str, starts: tuple[int, ...]) -> list[int]:
    kinds: list[Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = [
        lambda learned: torch.optim.SGD(learned, 0.1, momentum=0.9),
        lambda learned: torch.optim.AdamW(learned, 0.1),
        lambda learned: torch.optim.Adam(learned, 0.1, foreach=True),
        lambda learned: torch.optim.Adagrad(learned, 0.1),
    ]
    for make, norm_type in zip(kinds, NORM_TYPES, strict=True):
        torch.manual_seed(0)
        serial = Late().double()
        ours = parallel(case, copy.deepcopy(serial), starts)
        ours.prepare(*batch())
        ours.requires_grad_(False)
        ours.net.requires_grad_(True)
        pair = [make([item for item in model.parameters() if item.requires_grad]) for model in (serial, ours)]
        for seed in range(3):
            data = batch(seed=seed)
            assert gap(step(ours, *data, seed=seed), accumulate(serial, *data, seed=seed)) < EXACT
            theirs = nn.utils.clip_grad_norm_(serial.parameters(), 0.1, norm_type)
            assert gap(ours.clip_grad_norm_(0.1, norm_type), theirs) < EXACT
            for model, optimizer in zip((serial, ours), pair, strict=True):
                optimizer.step()
                model.zero_grad()
        assert gap(ours.state_dict(), serial.state_dict()) < EXACT
    return [item.numel() for item in ours.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("starts", [(0, 1), (0, 4)])
def test_a_rank_without_parameters_has_an_optimizer_too(starts: tuple[int, int], pools: Pools) -> None:
    found = on_ranks(pools, "1f1b", _without_parameters, starts)
    assert sorted(found) == [[0], [48, 8]]


def _clipped(case: str) -> None:
    serial, ours = prepared(case)
    for norm_type, max_norm in itertools.product(NORM_TYPES, (0.02, 1e3)):
        for model in (serial, ours):
            model.zero_grad()
        step(ours, *batch(), seed=1), accumulate(serial, *batch(), seed=1)
        theirs = nn.utils.clip_grad_norm_(serial.parameters(), max_norm, norm_type)
        mine = ours.clip_grad_norm_(max_norm, norm_type)
        assert 0.02 < theirs < 1e3 and gap(mine, theirs) < EXACT and mine.dtype == theirs.dtype
        check_gradients(ours, serial)
    for norm_type in (-math.inf, 0.0):
        theirs = nn.utils.clip_grad_norm_(serial.parameters(), 1e9, norm_type)
        assert gap(ours.clip_grad_norm_(1e9, norm_type), theirs) < EXACT


@pytest.mark.slow
@pytest.mark.parametrize("case", ["1f1b", "four ranks", "1f1b x batch", "zbv x filter"])
def test_gradients_are_clipped_by_the_serial_norm(case: str, pools: Pools) -> None:
    """By 1, 2, 3 and inf; a tied weight counts once, what is sharded counts whole."""
    on_ranks(pools, case, _clipped)


def _accumulate(case: str) -> None:
    serial, ours = prepared(case)
    for set_to_none in (True, False):
        for seed in range(2):
            step(ours, *batch(seed=seed), seed=seed)
            accumulate(serial, *batch(seed=seed), seed=seed)
        check_gradients(ours, serial)
        serial.zero_grad(set_to_none=set_to_none)
        ours.zero_grad(set_to_none=set_to_none)
        check_gradients(ours, serial)


@two_cases
def test_gradients_accumulate_over_steps_until_they_are_zeroed(case: str, pools: Pools) -> None:
    on_ranks(pools, case, _accumulate)


def _modes(case: str) -> None:
    serial, ours = prepared(case)
    for training in (True, False, True):
        serial.train(training), ours.train(training)
        for model in (serial, ours):
            model.zero_grad()
        with torch.no_grad():
            theirs = accumulate(serial, *batch(), seed=3, learn=False)
        torch.manual_seed(3)
        assert gap(ours.eval_step(*batch()), theirs) < EXACT
        assert all(item.grad is None for item in ours.parameters())
        assert gap(step(ours, *batch(), seed=4), accumulate(serial, *batch(), seed=4)) < EXACT
        check_gradients(ours, serial)
        assert gap(ours.state_dict(), serial.state_dict()) < EXACT  # running statistics too


@pytest.mark.slow
@two_cases
def test_evaluation_and_both_modes(case: str, pools: Pools) -> None:
    on_ranks(pools, case, _modes)


def _shapes(case: str) -> None:
    serial, ours = prepared(case)
    for size in (12, 8, 10, 12):  # ten samples are micro-batches of 3, 3, 2 and 2
        data = batch(size)
        assert gap(step(ours, *data, seed=size), accumulate(serial, *data, seed=size)) < EXACT
    check_gradients(ours, serial)
    assert gap(ours.state_dict(), serial.state_dict()) < EXACT


@pytest.mark.slow
@two_cases
def test_another_batch_size_runs_other_programs(case: str, pools: Pools) -> None:
    on_ranks(pools, case, _shapes)


def _changed(case: str) -> int:
    """Weights of single stages are frozen and thawed, then all are converted; the number of programs."""
    serial, ours = prepared(case)
    frozen = ("first.weight", "last.bias", "norm.weight")
    for learn in (True, False, True):
        for model in (serial, ours):
            for name, parameter in model.named_parameters():
                if name in frozen:
                    parameter.requires_grad_(learn)
            model.zero_grad()
        for seed in range(2):
            mine, theirs = step(ours, *batch(), seed=seed), accumulate(serial, *batch(), seed=seed)
            assert gap(mine, theirs) < EXACT
        check_gradients(ours, serial)
    serial.float(), ours.float()
    data = [item.float() for item in batch()]
    assert gap(step(ours, *data, seed=5), accumulate(serial, *data, seed=5).float()) < 1e-6
    return len(ours._autopar._programs)


@two_cases
def test_freezing_and_converting_after_planning_runs_other_programs(case: str, pools: Pools) -> None:
    assert set(on_ranks(pools, case, _changed)) == {3}


class Mixed(nn.Module):
    """Every layer computes in its own weights' dtype; the last one keeps a mean of what it makes, in whose
    dtype the loss is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.deep = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.register_buffer("centre", torch.zeros(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        h = torch.tanh(self.norm(h.to(self.norm.weight.dtype)))
        h = self.deep(h.to(self.deep.weight.dtype))
        loss = F.mse_loss((h - self.centre).to(self.centre.dtype), y.to(self.centre.dtype))
        with torch.no_grad():
            self.centre.mul_(0.5).add_(h.mean(0).to(self.centre.dtype))
        return loss


Convert = Callable[[nn.Module], None]
ROUNDING = {torch.float64: EXACT, torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}


def _of_module(path: str, dtype: torch.dtype) -> Convert:
    return lambda model: cast(None, model.get_submodule(path).to(dtype))


def _of_buffer(name: str, dtype: torch.dtype) -> Convert:
    def convert(model: nn.Module) -> None:
        for path, buffer in model.named_buffers():
            if path == name:
                buffer.data = buffer.data.to(dtype)

    return convert


def _converted(case: str, conversions: Sequence[tuple[Any, str, torch.dtype]]) -> set[str]:
    """After each conversion the state and a step are the serial model's; the names that the rank holds."""
    torch.manual_seed(0)
    serial = Mixed().double()
    ours = parallel(case, copy.deepcopy(serial), (0, 4))
    ours.prepare(*batch())
    pair: tuple[nn.Module, ParallelModule] = (serial, ours)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in pair]
    for seed, (kind, name, dtype) in enumerate(conversions):
        ours.load_state_dict(serial.state_dict())
        for model in pair:
            model.zero_grad()
            kind(name, dtype)(model)
        allowed = max(ROUNDING.get(item.dtype, 0.0) for item in serial.state_dict().values())
        _check_tensors(ours, serial, 0.0)
        mine, theirs = step(ours, *batch(), seed=seed), accumulate(serial, *batch(), seed=seed)
        assert gap(mine, theirs) < allowed
        for optimizer in optimizers:
            optimizer.step()
        _check_tensors(ours, serial, allowed)
        with torch.no_grad():
            called, wanted = ours(*batch()), serial(*batch())
        assert gap(called, wanted) < allowed and called.dtype == mine.dtype == wanted.dtype
    return {name for name, _ in (*ours.named_parameters(), *ours.named_buffers())}


def _check_tensors(ours: ParallelModule, serial: nn.Module, allowed: float) -> None:
    """All that the rank holds, with its gradients, and the state dict have the serial dtypes and values."""
    wanted, full = serial.state_dict(), ours.state_dict()
    assert {name: item.dtype for name, item in full.items()} == {k: item.dtype for k, item in wanted.items()}
    assert gap(full, wanted) <= allowed
    for name, buffer in ours.named_buffers():
        assert buffer.dtype == wanted[name].dtype, name
    for name, parameter in ours.named_parameters():
        theirs = serial.get_parameter(name)
        assert local(parameter).dtype == parameter.dtype == theirs.dtype, name
        assert (parameter.grad is None) == (theirs.grad is None), name
        if parameter.grad is not None and theirs.grad is not None:
            assert parameter.grad.dtype == theirs.grad.dtype and gap(parameter.grad, theirs.grad) <= allowed


SINGLE, HALF, DOUBLE = torch.float32, torch.bfloat16, torch.float64


@pytest.mark.slow
@pytest.mark.parametrize("case", ["1f1b", pytest.param("1f1b x filter", marks=pytest.mark.long)])
def test_a_stage_holds_its_weights_in_the_dtype_that_they_are_given(case: str, pools: Pools) -> None:
    conversions = [("deep", SINGLE), ("first", SINGLE), ("", DOUBLE), ("norm", SINGLE), ("", SINGLE)]
    more = [("", HALF), ("deep", torch.float16), ("", DOUBLE)]
    held = on_ranks(pools, case, _converted, [(_of_module, *each) for each in (*conversions, *more)])
    assert held[0].isdisjoint(held[-1])
    assert held[0] | held[-1] == {*Mixed().state_dict()}


@pytest.mark.slow
@pytest.mark.parametrize("case", ["1f1b", pytest.param("zb1p x batch", marks=pytest.mark.long)])
def test_a_buffer_of_a_later_stage_is_converted_for_all(case: str, pools: Pools) -> None:
    conversions = [("centre", SINGLE), ("norm.num_batches_tracked", torch.int32), ("centre", DOUBLE)]
    held = on_ranks(pools, case, _converted, [(_of_buffer, *each) for each in conversions])
    assert "centre" in held[-1] and "centre" not in held[0]


def _unlike(case: str) -> None:
    """The tied weight is frozen on one of the ranks that hold it."""
    _, ours = prepared(case)
    if dist.get_rank() == 0:
        dict(ours.named_parameters())["middle.weight"].requires_grad_(False)
    with pytest.raises(
        InputError, match="middle.weight on rank 1: found torch.float64, learning, wanted .*frozen"
    ):
        step(ours, *batch(), seed=5)


def test_copies_of_a_tied_weight_that_are_unlike_are_refused_everywhere(pools: Pools) -> None:
    on_ranks(pools, "1f1b", _unlike)


class Trunk(nn.Module):
    """Only the head learns, and sees the trunk's first result as well."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8)).requires_grad_(False)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        early = self.trunk[1](self.trunk[0](x))
        return F.mse_loss(self.head(torch.tanh(self.trunk[2](early))) * early, y)


def _trunk(case: str, starts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    serial = Trunk().double()
    torch.manual_seed(0)
    ours = parallel(case, Trunk().double(), starts)
    for seed in range(2):
        mine, theirs = step(ours, *batch(), seed=seed), accumulate(serial, *batch(), seed=seed)
        assert gap(mine, theirs) < EXACT
        check_gradients(ours, serial)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gpipe", "1f1b", "zb1p"])
@pytest.mark.parametrize("starts", [(0, 3), (0, 5), (0, 0), (0, 7)], ids=str)
def test_stages_without_a_gradient_or_without_operators(
    case: str, starts: tuple[int, ...], pools: Pools
) -> None:
    on_ranks(pools, case, _trunk, starts)


class Gated(nn.Module):
    """A mask and a sum that are kept for the gradients of weights, wherever the stages begin."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 8)
        self.other, self.scale = nn.Parameter(torch.randn(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        mask = h > 0.1
        h = self.last(h)
        gated = torch.where(mask, h, self.other)
        return F.mse_loss(torch.relu(gated) * self.scale, y)


def _gated(case: str) -> None:
    for start in range(1, 8):
        torch.manual_seed(0)
        serial = Gated().double()
        ours = parallel(case, copy.deepcopy(serial), (0, start))
        for seed in range(2):
            mine, theirs = step(ours, *batch(), seed=seed), accumulate(serial, *batch(), seed=seed)
            assert gap(mine, theirs) < EXACT
            check_gradients(ours, serial)


@pytest.mark.slow
def test_what_the_second_half_reads_survives_the_first(pools: Pools) -> None:
    on_ranks(pools, "zb1p", _gated)


def _unequal() -> None:
    """Ten samples in micro-batches of 3, 3, 2 and 2, and nine in 3, 2, 2 and 2, without stages."""
    serial, ours = prepared("no stages")
    for seed, samples in enumerate((10, 9)):
        inputs = batch(samples)
        mine, theirs = step(ours, *inputs, seed=seed), accumulate(serial, *inputs, seed=seed)
        assert gap(mine, theirs) < EXACT
        check_gradients(ours, serial)
    assert gap(ours.state_dict(), serial.state_dict()) < EXACT


@pytest.mark.slow
def test_unequal_micro_batches_without_stages(pools: Pools) -> None:
    pools(2).run(_unequal)


def _showing() -> None:
    serial, shows = make_net(), Showing().double()
    shows.load_state_dict(serial.state_dict())
    ours = parallel("no stages", shows)
    for seed in range(2):
        mine, theirs = step(ours, *batch(), seed=seed), accumulate(serial, *batch(), seed=seed)
        assert gap(mine, theirs) < EXACT
        check_gradients(ours, serial)


def test_a_loss_beside_other_outputs_is_all_that_a_step_wants(pools: Pools) -> None:
    pools(2).run(_showing)


def _uneven(case: str) -> None:
    """Trained on micro-batches of 3, 3, 2 and 2 from the start, evaluated on 3, 2, 2 and 2."""
    serial, ours = make_net(), parallel(case, make_net())
    ours.prepare(*batch(10))
    for seed in range(2):
        mine, theirs = step(ours, *batch(10), seed=seed), accumulate(serial, *batch(10), seed=seed)
        assert gap(mine, theirs) < EXACT
        check_gradients(ours, serial)
        with torch.no_grad():
            wanted = accumulate(serial, *batch(9), seed=seed, learn=False)
        torch.manual_seed(seed)
        assert gap(ours.eval_step(*batch(9)), wanted) < EXACT
    assert gap(ours.state_dict(), serial.state_dict()) < EXACT


@pytest.mark.parametrize(
    "case",
    ["dualpipev", *(pytest.param(case, marks=pytest.mark.long) for case in CASES if case != "no stages")],
)
def test_unequal_micro_batches_of_any_schedule(case: str, pools: Pools) -> None:
    on_ranks(pools, case, _uneven)


def _impossible(case: str) -> None:
    """One sample can't be split over two devices, and the plan says so for all micro-batches."""
    _, ours = prepared(case)
    ours.eval()
    with pytest.raises(InputError, match="unequal micro-batches: found .*which can't be"):
        ours.train_step(*batch(7))
    step(ours, *batch(), seed=1)


def test_unequal_micro_batches_that_no_plan_holds_for_are_refused(pools: Pools) -> None:
    on_ranks(pools, "1f1b x batch", _impossible)


# -- sums of gradients beside the schedule --------------------------------------------------------

Event = tuple[
    str, int
]  # a stage's backward that begins or ends, by its number; a sum that starts, by its bytes


def _events(case: str, bucket_bytes: int) -> list[Event]:
    """What a rank does in a step whose gradients are the serial model's, until its schedule is over."""
    serial, ours = prepared(case, bucket_bytes=bucket_bytes)
    found: list[Event] = []
    schedules: list[list[Event]] = []
    start_sum, end = transport.start_sum, Sends.end

    def summing(tensor: Tensor, *args: Any, **rest: Any) -> Any:
        found.append(("sum", tensor.nbytes))
        return start_sum(tensor, *args, **rest)

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: PipelineStage, *args: Any, **rest: Any) -> None:
            found.append(("begin", self.stage_index))
            function(self, *args, **rest)
            found.append(("end", self.stage_index))

        return noted

    def ending(sends: Sends) -> None:
        schedules.append(list(found))
        end(sends)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "start_sum", summing)
        patch.setattr(Sends, "end", ending)
        for name in ("backward_one_chunk", "backward_weight_one_chunk"):
            patch.setattr(PipelineStage, name, noting(getattr(PipelineStage, name)))
        step(ours, *batch(), seed=1)
    accumulate(serial, *batch(), seed=1)
    check_gradients(ours, serial)
    (schedule,) = schedules
    return schedule


def events(pools: Pools, case: str, bucket_bytes: int) -> list[list[Event]]:
    """For each rank of the pipeline; those of its mesh do the same in the same order."""
    found = on_ranks(pools, case, _events, bucket_bytes)
    assert found[0] == found[1] and found[2] == found[3]
    return found[::2]


@pytest.mark.slow
@pytest.mark.parametrize("case", BY_BATCH)
def test_a_stage_that_has_its_gradients_sums_them_while_the_schedule_goes_on(case: str, pools: Pools) -> None:
    for found in events(pools, case, 2**20):
        sums = [place for place, (what, _) in enumerate(found) if what == "sum"]
        begins = {stage: place for place, (what, stage) in enumerate(found) if what == "begin"}
        assert len(sums) == len(begins)
        assert len(begins) == 1 or sums[0] < max(begins.values()), "before another stage's last backward"


@pytest.mark.parametrize("case", BY_BATCH[:3])
def test_whole_backwards_start_each_bucket_when_it_is_full(case: str, pools: Pools) -> None:
    for found in events(pools, case, 1):
        inside, running = [], False
        for what, _ in found:
            if what == "sum":
                inside.append(running)
            running = what == "begin" if what != "sum" else running
        assert len(inside) > 2 and all(inside)


def _rest_waits(case: str) -> None:
    """Sums that are under way when a rank raises: nothing is kept of them, and no step follows."""
    _, ours = prepared(case)
    program = ours._autopar._program(flatten_arguments(batch(), {}), step=True)
    assert isinstance(program, StagedProgram)

    def failing(self: StageModule) -> Any:
        raise ValueError("no time to wait")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StageModule, "take", failing)
        with pytest.raises(ValueError, match="no time to wait"):
            step(ours, *batch(), seed=1)
    for stage in program._stages:
        assert not list(stage.take()) and not stage._leaves._full
    assert all(item.grad is None for item in ours.parameters())
    with pytest.raises(InputError, match="a step before it that raised in the middle"):
        step(ours, *batch(), seed=1)
    dist.barrier()


@pytest.mark.parametrize("case", ["interleaved x batch", "zb1p x batch"])
def test_nothing_stays_of_a_step_that_raises(case: str, pools: Pools) -> None:
    on_ranks(pools, case, _rest_waits)


# -- what a rank holds --------------------------------------------------------------------------


def _state(case: str) -> set[str]:
    serial, ours = prepared(case)
    with torch.no_grad():
        for tensor in (*serial.parameters(), *serial.buffers()):
            tensor.add_(1)
    full = serial.state_dict()
    assert str(ours.load_state_dict(full)) == "<All keys matched successfully>"
    found = ours.state_dict()
    assert all(type(item) is Tensor for item in found.values())
    assert gap(found, full) == 0
    assert gap(step(ours, *batch(), seed=2), accumulate(serial, *batch(), seed=2)) < EXACT
    return {name for name, _ in ours.named_parameters()}


FIRST = {"first.weight", "first.bias", "norm.weight", "norm.bias", "middle.weight", "unused"}
LAST = {"deep.weight", "deep.bias", "last.bias"}


def test_state_dicts_are_the_serial_models_on_all_ranks(pools: Pools) -> None:
    first, last = on_ranks(pools, "1f1b", _state)
    assert first == FIRST
    assert last == LAST | {"middle.weight"}, "the tied weight, by its first name"
    assert all(held >= {"deep.bias"} for held in on_ranks(pools, "zbv x filter", _state)[2:])


def _checkpoint(case: str, folder: str) -> None:
    warnings.simplefilter("ignore")
    flat = StateDictOptions(flatten_optimizer_state_dict=True)  # each stage has parameter groups of its own

    def trained(seed: int, steps: int) -> tuple[ParallelModule, torch.optim.Optimizer]:
        net = make_net()
        net.unused.requires_grad_(False)  # torch wants state for all that need gradients
        model = parallel(case, net)
        model.prepare(*batch())
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01)
        for _ in range(steps):
            optimizer.zero_grad()
            step(model, *batch(seed=seed), seed=seed)
            optimizer.step()
        return model, optimizer

    def state(model: ParallelModule, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        own = get_optimizer_state_dict(model, optimizer, options=flat)
        return {"model": model.state_dict(), "optimizer": own}

    model, optimizer = trained(1, 2)
    dcp.save(state(model, optimizer), checkpoint_id=folder)
    other, fresh = trained(2, 1)
    loaded = state(other, fresh)
    dcp.load(loaded, checkpoint_id=folder)
    other.load_state_dict(loaded["model"])
    set_optimizer_state_dict(other, fresh, loaded["optimizer"], options=flat)
    assert gap(other.state_dict(), model.state_dict()) == 0
    for one, opt in ((model, optimizer), (other, fresh)):
        opt.zero_grad()
        step(one, *batch(seed=3), seed=3)
        opt.step()
    assert gap(other.state_dict(), model.state_dict()) == 0


@two_cases
def test_a_distributed_checkpoint_resumes_training(case: str, pools: Pools) -> None:
    with tempfile.TemporaryDirectory() as folder:
        on_ranks(pools, case, _checkpoint, folder)


def groups_of(model: nn.Module, *, by_layer: bool) -> list[dict[str, Any]]:
    """Groups of an optimizer that all stages have parts of, or of a layer each."""
    named = dict(model.named_parameters())
    if by_layer:
        return [{"params": [item], "lr": 0.01 + 0.001 * len(name)} for name, item in named.items()]
    many, few = ([item for item in named.values() if (item.dim() > 1) is many] for many in (True, False))
    return [{"params": many}, {"params": few, "weight_decay": 0.0}]


def _serial_numbers(case: str) -> None:
    serial, ours = prepared(case)
    full = serial.state_dict()
    for by_layer in (False, True):
        serial.load_state_dict(full)
        ours.load_state_dict(full)
        pair = [torch.optim.Adam(groups_of(model, by_layer=by_layer), 0.01) for model in (serial, ours)]
        for optimizer in pair:
            optimizer.zero_grad()
        accumulate(serial, *batch(), seed=2)
        step(ours, *batch(), seed=2)
        for optimizer in pair:
            optimizer.step()
        theirs, mine = (optimizer.state_dict() for optimizer in pair)
        assert mine["param_groups"] == theirs["param_groups"]
        assert gap(mine["state"], theirs["state"]) < EXACT
        fresh = torch.optim.Adam(groups_of(ours, by_layer=by_layer), 0.5)
        fresh.load_state_dict(theirs)
        assert gap(fresh.state_dict()["state"], theirs["state"]) == 0
        assert [group["lr"] for group in fresh.param_groups] != [0.5] * len(fresh.param_groups)
    turned = torch.optim.Adam(list(ours.parameters())[::-1])
    if len(list(ours.parameters())) > 1:
        with pytest.raises(InputError, match=r"before .* wanted the model's order"):
            turned.state_dict()


def test_state_dicts_of_optimizers_are_the_serial_ones_on_all_stages(pools: Pools) -> None:
    on_ranks(pools, "1f1b", _serial_numbers)


# -- refusals and failures ----------------------------------------------------------------------


def _input_gradient(case: str) -> None:
    _, ours = prepared(case)
    x, y = batch()
    with pytest.raises(InputError, match="input_0 with requires_grad"):
        ours.train_step(x.requires_grad_(), y)


def test_gradients_of_inputs_are_refused(pools: Pools) -> None:
    on_ranks(pools, "1f1b", _input_gradient)


def _raises() -> None:
    """One rank's stage fails at its third micro-batch, while the other waits for its gradients."""
    worker.init("cpu")
    _, ours = prepared("1f1b")
    forward = StageModule.forward

    def failing(self: StageModule, *received: Tensor, micro_batch: Tensor) -> Any:
        if self.executable.stage == 1 and int(micro_batch) == 2:
            raise ValueError("one sample too many")
        return forward(self, *received, micro_batch=micro_batch)

    StageModule.forward = failing  # type: ignore[method-assign]  # in a process of its own
    ours.train_step(*batch())


@pytest.mark.slow
def test_a_stage_that_raises_ends_all_ranks() -> None:
    with pytest.raises(WorkerError, match="rank 1 of 2: found") as caught:
        run_function(_raises, 2, timeout=PROMPT)
    assert "ValueError: one sample too many" in caught.value.traceback


def _raises_between_buckets() -> None:
    """A rank fails in its last backward when the first of its sums has begun, which its peer joins."""
    worker.init("cpu")
    if dist.get_rank() == 3:
        receive = StageModule._receive
        seen: list[int] = []

        def failing(self: StageModule, index: int, gradient: Tensor) -> None:
            if seen:
                raise ValueError("one bucket too many")
            seen.append(index)
            receive(self, index, gradient)

        StageModule._receive = failing  # type: ignore[method-assign]  # in a process of its own
    _, ours = prepared("gpipe x batch", bucket_bytes=1)
    ours.train_step(*batch())


@pytest.mark.long
def test_a_rank_that_raises_between_its_sums_ends_all_ranks() -> None:
    with pytest.raises(WorkerError, match="rank 3 of 4: found") as caught:
        run_function(_raises_between_buckets, 4, timeout=PROMPT)
    assert "ValueError: one bucket too many" in caught.value.traceback


# -- the proof can fail -------------------------------------------------------------------------


def _tied(case: str, *, synced: bool) -> float:
    """The largest error of the tied weight's gradient."""
    serial, ours = prepared(case)
    with pytest.MonkeyPatch.context() as patch:
        if not synced:
            patch.setattr(StagedProgram, "_sum_copies", lambda *_: None)
        step(ours, *batch(), seed=1)
    accumulate(serial, *batch(), seed=1)
    return gap(dict(ours.named_parameters())["middle.weight"].grad, serial.middle.weight.grad)


def _synced(case: str) -> float:
    return _tied(case, synced=True)


def _forgotten(case: str) -> float:
    return _tied(case, synced=False)


def test_copies_of_a_tied_weight_that_are_not_summed_are_caught(pools: Pools) -> None:
    assert max(on_ranks(pools, "1f1b", _synced)) < EXACT
    assert min(on_ranks(pools, "1f1b", _forgotten)) > 1e-3
