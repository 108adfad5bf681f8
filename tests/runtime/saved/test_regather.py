"""Weights that are stored in shards, on real processes: the serial model's numbers, and less memory."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.comparing.measured_peak import peak_bytes
from autopar.core.gathering import Gathering
from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.core.schedule import ScheduleKind
from autopar.errors import InputError
from autopar.rewrite.render import describe
from autopar.runtime.collectives import groups, transport
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parameters.parameters import local
from autopar.runtime.saved import regather
from tests.deep_net import Deep
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler
from tests.whole_tensors import full_of

Pools = Callable[[int], Pool]
CPU = torch.device("cpu")
EXACT = 1e-12  # sums in another order, float64
STEPS = 3


class Net(nn.Module):
    """Linear layers, one matrix of them used twice, a frozen bias, an embedding, a bias of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 8)
        self.first, self.middle = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.middle.weight
        self.first.bias.requires_grad_(False)
        self.last = nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.first(self.table(x)))
        h = torch.tanh(self.again(torch.tanh(self.middle(h))))
        return F.mse_loss(self.last(h), y)


def make_net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(6, (8,), generator=generator)
    return x, torch.randn(8, 1, generator=generator, dtype=torch.float64)


PLANS: dict[str, tuple[tuple[int, ...], list[str], Pipeline, bool]] = {
    "one batch": ((2,), ["batch"], Pipeline(), False),
    "recomputed": ((2,), ["batch"], Pipeline(), True),
    "micro-batches": ((2,), ["batch"], Pipeline(micro_batches=4), False),
    "two axes": ((2, 2), ["batch", "batch"], Pipeline(micro_batches=2), False),
    "batch x filter": ((2, 2), ["batch", "filter"], Pipeline(), True),
    "1f1b": ((2,), ["batch"], Pipeline(2, 4, ScheduleKind.ONE_F_ONE_B, (0, 4)), False),
    "1f1b recomputed": ((2,), ["batch"], Pipeline(2, 4, ScheduleKind.ONE_F_ONE_B, (0, 4)), True),
    "zb1p": ((2,), ["batch"], Pipeline(2, 4, ScheduleKind.ZB1P, (0, 4)), False),
}


def parallel(
    plan: str,
    gathering: Gathering | None,
    model: nn.Module,
    *,
    offload: bool = False,
    together: bool = False,
    on_host: bool = False,
    ahead: bool = False,
) -> ParallelModule:
    shape, wanted, pipeline, again = PLANS[plan]
    compiler = forced_compiler(
        Mesh(shape),
        wanted,
        pipeline=pipeline,
        gathering=gathering,
        recompute=again,
        together=together,
        offload=offload,
        on_host=on_host,
        ahead=ahead,
    )
    by_steps = pipeline.is_staged or pipeline.micro_batches > 1
    return ParallelModule(model, compiler, describe=describe, device=CPU, by_steps=by_steps)


def gap(ours: Any, theirs: Any) -> float:
    ours = full_of(ours)
    return float((ours.detach() - theirs.detach()).abs().max())


def train(
    plan: str,
    gathering: Gathering | None,
    *,
    offload: bool = False,
    together: bool = False,
    compiles: bool = False,
    on_host: bool = False,
    ahead: bool = False,
) -> None:
    """On a worker: three steps of a plan, and of the serial model."""
    pipeline = PLANS[plan][2]
    words = {"offload": offload, "together": together, "on_host": on_host, "ahead": ahead}
    serial, ours = make_net(), parallel(plan, gathering, make_net(), **words)
    ours.prepare(*batch())
    if compiles:
        ours.compile()
    pair = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in (serial, ours)]
    for step in range(STEPS):
        for optimizer in pair:
            optimizer.zero_grad()
        x, y = batch(step)
        theirs = serial(x, y)
        theirs.backward()
        if pipeline.is_staged or pipeline.micro_batches > 1:
            mine = ours.train_step(x, y)
        else:
            mine = ours(x, y)
            mine.backward()
        assert gap(mine, theirs) < EXACT
        gradients = {name: item.grad for name, item in serial.named_parameters()}
        for name, item in ours.named_parameters():
            assert (item.grad is None) == (gradients[name] is None), name
            if item.grad is not None:
                wanted: Tensor = gradients[name]  # type: ignore[assignment]
                assert local_gap(item.grad, wanted, item) < EXACT, name
        for optimizer in pair:
            optimizer.step()
    wanted = serial.state_dict()
    for name, value in ours.state_dict().items():
        assert gap(value, wanted[name]) < EXACT, name
    with torch.no_grad():
        x, y = batch()
        mine = ours.eval_step(x, y) if pipeline.is_staged else ours(x, y)
        assert gap(mine, serial(x, y)) < EXACT


def local_gap(ours: Any, theirs: Tensor, parameter: Any) -> float:
    """Of a gradient that the ranks of one stage alone can put together."""
    assert type(ours.data) is type(parameter.data)
    assert not isinstance(ours, DTensor) or ours.placements == parameter.placements
    return gap(ours, theirs)


SHORT = [("recomputed", Gathering.REGATHER), ("zb1p", Gathering.REGATHER), ("micro-batches", Gathering.ONCE)]


@pytest.mark.parametrize(
    "plan, gathering",
    [
        pytest.param(*case, marks=[] if case in SHORT else pytest.mark.long, id=f"{case[0]}, {case[1].value}")
        for case in itertools.product(PLANS, Gathering)
    ],
)
def test_training_equals_serial_training(plan: str, gathering: Gathering, pools: Pools) -> None:
    shape, _, pipeline, _ = PLANS[plan]
    pools(Mesh(shape).num_devices * pipeline.ranks).run(train, plan, gathering)


WHOLE = [  # backwards
    pytest.param(plan, marks=pytest.mark.long if pipeline.is_staged else [])
    for plan, (_, _, pipeline, _) in PLANS.items()
    if pipeline.schedule is not ScheduleKind.ZB1P
]


@pytest.mark.parametrize("gathering", [Gathering.KEEP, Gathering.REGATHER], ids=lambda item: item.value)
@pytest.mark.parametrize("plan", WHOLE)
def test_training_with_weights_gathered_together_equals_serial_training(
    plan: str, gathering: Gathering, pools: Pools
) -> None:
    shape, _, pipeline, _ = PLANS[plan]
    pools(Mesh(shape).num_devices * pipeline.ranks).run(partial(train, together=True), plan, gathering)


def _twice_backward() -> None:
    serial, ours = make_net(), parallel("one batch", Gathering.REGATHER, make_net(), together=True)
    losses = serial(*batch()), ours(*batch())
    for _ in range(2):
        for loss in losses:
            loss.backward(retain_graph=True)
    for mine, theirs in zip(ours.parameters(), serial.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        assert mine.grad is None or gap(mine.grad, theirs.grad) < EXACT


def test_weights_of_a_group_come_again_in_each_backward(pools: Pools) -> None:
    pools(2).run(_twice_backward)


# -- memory ---------------------------------------------------------------------------------------

WIDTH = 64
LAYER = WIDTH * WIDTH * 8  # bytes of a full matrix in float64


def _peak(layers: int, gathering: Gathering) -> float:
    """The most that a step holds on this rank beside its shards and their gradients, in full matrices."""
    torch.manual_seed(0)
    compiler = forced_compiler(Mesh((2,)), ["batch"], gathering=gathering)
    ours = ParallelModule(Deep(layers).double(), compiler, describe=describe, device=CPU)
    x = torch.randn(4, WIDTH, dtype=torch.float64)
    ours.prepare(x)

    def step() -> None:
        ours(x).backward()

    step()

    def alive() -> Iterator[Tensor]:
        for item in ours.parameters():
            assert item.grad is not None
            yield from (item, item.grad)

    return (peak_bytes(step, alive(), CPU) - layers * LAYER) / LAYER


def _growth(gathering: Gathering, *, forget: bool = False) -> float:
    """By how many full matrices the peak grows with each further layer."""
    with pytest.MonkeyPatch.context() as patch:
        if forget:
            patch.setattr(regather, "note", lambda *_: None)
        return (_peak(6, gathering) - _peak(3, gathering)) / 3


@pytest.mark.parametrize(
    "gathering, forget, growth",
    [(Gathering.KEEP, False, 1), (Gathering.REGATHER, False, 0), (Gathering.REGATHER, True, 1)],
)
def test_what_is_gathered_again_does_not_stay(
    gathering: Gathering, forget: bool, growth: int, pools: Pools
) -> None:
    """A layer's full matrix is kept beside those of the others, or not; it is if what was gathered is
    not known any more when it is saved."""
    for found in pools(2).run(partial(_growth, forget=forget), gathering):
        assert abs(found - growth) < 0.5  # a gather may be over a little later on a busy machine


def _cast_peak(layers: int, shard_state: str) -> float:
    """The most that a step in bfloat16 holds on this rank beside its shards and their gradients, in full
    matrices of bfloat16; its gradients are those of the serial model under autocast."""
    torch.manual_seed(0)
    serial, x = Deep(layers), torch.randn(4, WIDTH)
    ours = autopar.parallelize(
        copy.deepcopy(serial),
        autopar.ClusterSpec.local(2),
        (x,),
        dtype="bf16",
        force="batch",
        shard_state=shard_state,
        mesh="2",
        stages=1,
        micro_batches=1,
        measure=False,
        quiet=True,
    )

    def step() -> None:
        ours(x).backward()

    step()
    with torch.autocast("cpu", torch.bfloat16):
        loss = serial(x)
    loss.backward()
    for mine, theirs in zip(ours.parameters(), serial.parameters(), strict=True):
        assert gap(mine.grad, theirs.grad) < 0.02 * float(theirs.grad.abs().max())
    alive = [each for item in ours.parameters() for each in (item, item.grad)]
    return peak_bytes(step, alive, CPU) / (WIDTH * WIDTH * 2)


def _cast_growth(shard_state: str) -> float:
    return (_cast_peak(7, shard_state) - _cast_peak(3, shard_state)) / 4


def test_full_copies_of_cast_weights_do_not_stay(pools: Pools) -> None:
    """Of each further layer a shard and its gradient stay in float32; in bfloat16 the full copy, or half."""
    kept, again = (pools(2).run(_cast_growth, level)[0] for level in ("gradients", "weights"))
    assert kept == pytest.approx(3, abs=0.2) and again == pytest.approx(2.5, abs=0.2)


@torch.no_grad()
def _write(ours: nn.Module, how: str) -> None:
    """Change parameters: of a part, of a DTensor, or by an optimizer, which may leave no trace in either."""
    learning = [item for item in ours.parameters() if item.requires_grad]
    if how in ("part", "parameter"):
        for item in learning:
            (local(item) if how == "part" else item).mul_(2)
        return
    for item in learning:
        item.grad = torch.ones_like(item)
    torch.optim.SGD(learning, 0.1, **({} if how == "default" else {how: True})).step()  # type: ignore[arg-type]


def _step_too_early(how: str, together: bool) -> None:
    ours = parallel("one batch", Gathering.REGATHER, make_net(), together=together)
    loss = ours(*batch())
    _write(ours, how)
    with pytest.raises(InputError, match="changed since forward"):
        loss.backward()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("how", ["part", "parameter", "default", "foreach", "fused"])
def test_weights_that_changed_since_forward_are_refused(how: str, together: bool, pools: Pools) -> None:
    pools(2).run(_step_too_early, how, together)


class Heads(nn.Module):
    """Two losses of one body, and a layer that nobody reads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other = nn.Linear(8, 8), nn.Linear(8, 6), nn.Linear(8, 4)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.body(x).tanh()
        return self.one(rows).square().mean(), self.other(rows).exp().mean()


def _one_loss_at_a_time(level: str) -> list[float]:
    torch.manual_seed(0)
    serial, x = Heads().double(), torch.randn(8, 8, dtype=torch.float64)
    ours = autopar.parallelize(
        copy.deepcopy(serial),
        autopar.ClusterSpec.local(2),
        (x,),
        force="batch",
        shard_state=level,
        measure=False,
        quiet=True,
    )
    gaps = []
    for order in ((0,), (1,), (0, 1), (1, 0)):
        for model in (serial, ours):
            model.zero_grad()
            losses = model(x)
            for place in order:
                losses[place].backward(retain_graph=place != order[-1])
        for mine, theirs in zip(ours.parameters(), serial.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            gaps.append(0.0 if theirs.grad is None else gap(full_of(mine.grad), theirs.grad))
    return gaps


@pytest.mark.parametrize("level", ["weights", "gradients"])
def test_a_backward_may_reach_some_weights_of_a_group(level: str, pools: Pools) -> None:
    for gaps in pools(2).run(_one_loss_at_a_time, level):
        assert max(gaps) < EXACT


Counts = dict[str, int]


def _collectives(
    gathering: Gathering,
    recomputed: bool,
    micro_batches: int,
    *,
    compiles: bool = False,
    together: bool = False,
) -> Counts:
    """How often a step gathers weights, and scatters their gradients."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        kernel = getattr(transport, name)

        def call(*args: Any) -> Any:
            counts[name] += 1
            return kernel(*args)

        return call

    pipeline = Pipeline(micro_batches=micro_batches)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "reduce_scatter"):
            patch.setattr(transport, name, counted(name))
        compiler = forced_compiler(
            Mesh((2,)),
            ["batch"],
            pipeline=pipeline,
            gathering=gathering,
            recompute=recomputed,
            together=together,
        )
        model = Block(3) if together else Deep(3)
        ours = ParallelModule(model.double(), compiler, describe=describe, device=CPU, by_steps=True)
        if compiles:
            ours.compile()
        ours.train_step(torch.randn(8, WIDTH, dtype=torch.float64))
    return dict(counts)


@pytest.mark.parametrize(
    "gathering, recomputed, gathers, scatters",
    [
        (Gathering.ONCE, False, 3, 3),
        (Gathering.KEEP, False, 2 * 3, 2 * 3),
        (Gathering.REGATHER, False, 2 * (3 + 2), 2 * 3),
        (Gathering.REGATHER, True, 2 * (3 + 3), 2 * 3),
    ],
)
def test_weights_are_gathered_and_gradients_scattered_as_often_as_said(
    gathering: Gathering, recomputed: bool, gathers: int, scatters: int, pools: Pools
) -> None:
    """In two micro-batches. The samples need no gradient, so that the first layer's weight isn't gathered
    again; a part of the program that is recomputed as a whole gathers it all the same."""
    for counts in pools(2).run(_collectives, gathering, recomputed, 2):
        assert counts == {"all_gather": gathers, "reduce_scatter": scatters}


class Block(Deep):
    """The same layers, as parts of one block."""

    def __init__(self, layers: int) -> None:
        super().__init__(0)
        self.layers = nn.ModuleList([nn.ModuleList(Deep(layers).layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[0]:  # type: ignore[attr-defined]
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.mark.parametrize(
    "gathering, recomputed, gathers",
    [(Gathering.KEEP, False, 2), (Gathering.REGATHER, False, 4), (Gathering.REGATHER, True, 4)],
)
def test_a_block_is_gathered_by_one_exchange(
    gathering: Gathering, recomputed: bool, gathers: int, pools: Pools
) -> None:
    """In each of two micro-batches, forward and in backward; one exchange scatters gradients."""
    run = partial(_collectives, together=True)
    for counts in pools(2).run(run, gathering, recomputed, 2):
        assert counts == {"all_gather": gathers, "reduce_scatter": 2}


def _forget_the_sum(gathering: Gathering) -> None:
    def mine(_: Tensor, parts: Sequence[Tensor], group: str) -> Tensor:
        return parts[groups.index(group)].clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "reduce_scatter", mine)
        with pytest.raises(AssertionError):
            train("micro-batches", gathering)


@pytest.mark.parametrize("gathering", Gathering, ids=lambda item: item.value)
def test_gradients_that_are_cut_but_not_summed_are_found(gathering: Gathering, pools: Pools) -> None:
    pools(2).run(_forget_the_sum, gathering)
