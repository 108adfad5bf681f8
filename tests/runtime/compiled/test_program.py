"""Compiled programs train as the serial model does, whatever their plans recompute or gather again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from autopar.core.gathering import Gathering
from autopar.core.mesh import Mesh
from autopar.core.schedule import SPLIT_BACKWARD
from autopar.errors import InputError
from tests.pool import Pool
from tests.runtime.saved.test_regather import PLANS, _collectives, train

Pools = Callable[[int], Pool]
TRACED = "aot_eager_decomp_partition"  # all of torch.compile but the code that Inductor writes
SECONDS = 600.0  # for a C++ compiler on a busy machine
COMPILED = [plan for plan, (_, _, pipeline, _) in PLANS.items() if pipeline.schedule not in SPLIT_BACKWARD]


@contextmanager
def tracing() -> Iterator[list[object]]:
    """Within, programs are compiled without Inductor's code; the list is of what was compiled."""
    compile_, made = torch.compile, list[object]()

    def traced(module: object, *, options: object, **rest: bool) -> object:
        made.append(module)
        return compile_(module, backend=TRACED, **rest)  # type: ignore[call-overload]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", traced)
        yield made


def _train_traced(plan: str, gathering: Gathering, *, together: bool = False) -> None:
    with tracing() as made:
        train(plan, gathering, compiles=True, together=together)
    assert made


@pytest.mark.slow
@pytest.mark.parametrize(
    "plan, gathering",
    [("recomputed", Gathering.REGATHER), ("micro-batches", Gathering.ONCE), ("1f1b", Gathering.REGATHER)],
)
def test_traced_programs_train_as_the_serial_model(plan: str, gathering: Gathering, pools: Pools) -> None:
    shape, _, pipeline, _ = PLANS[plan]
    pools(Mesh(shape).num_devices * pipeline.ranks).run(_train_traced, plan, gathering)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["one batch", "recomputed"])
def test_traced_programs_whose_weights_are_gathered_together_train_as_the_serial_model(
    plan: str, pools: Pools
) -> None:
    pools(2).run(partial(_train_traced, together=True), plan, Gathering.REGATHER)


def _collectives_traced(gathering: Gathering, recomputed: bool) -> dict[str, int]:
    with tracing():
        return _collectives(gathering, recomputed, 2, compiles=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "gathering, recomputed, gathers, scatters",
    [
        (Gathering.ONCE, False, 3, 3),
        (Gathering.KEEP, False, 2 * 3, 2 * 3),
        (Gathering.REGATHER, False, 2 * (3 + 2), 2 * 3),
        (Gathering.REGATHER, True, 2 * (3 + 3), 2 * 3),
    ],
)
def test_compiled_programs_gather_and_scatter_as_often_as_said(
    gathering: Gathering, recomputed: bool, gathers: int, scatters: int, pools: Pools
) -> None:
    """In two micro-batches, of three layers. As eager ones: see there."""
    for counts in pools(2).run(_collectives_traced, gathering, recomputed):
        assert counts == {"all_gather": gathers, "reduce_scatter": scatters}


@pytest.mark.long
@pytest.mark.parametrize("plan, gathering", [*itertools.product(COMPILED, Gathering)])
def test_compiled_programs_train_as_the_serial_model(plan: str, gathering: Gathering, pools: Pools) -> None:
    shape, _, pipeline, _ = PLANS[plan]
    run = partial(train, compiles=True)
    pools(Mesh(shape).num_devices * pipeline.ranks).run(run, plan, gathering, timeout=SECONDS)


def _refused(plan: str, *, offload: bool = False) -> str:
    with pytest.raises(InputError) as raised:
        train(plan, None, offload=offload, compiles=True)
    return str(raised.value)


@pytest.mark.parametrize(
    "plan, offload, wanted", [("zb1p", False, "schedule zb1p"), ("one batch", True, "offloads")]
)
def test_what_cannot_be_compiled_is_refused_by_name(
    plan: str, offload: bool, wanted: str, pools: Pools
) -> None:
    shape, _, pipeline, _ = PLANS[plan]
    found = pools(Mesh(shape).num_devices * pipeline.ranks).run(partial(_refused, offload=offload), plan)
    assert all(wanted in text for text in found)
