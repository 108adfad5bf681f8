"""What ranks must share is compared in the first calls, and now and then after them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.core.mesh import Mesh
from autopar.core.pipeline import Pipeline
from autopar.errors import InputError
from autopar.rewrite.render import describe
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parameters.parameters import local
from autopar.runtime.programs.agreement import FIRST_CALLS, STRIDE, Agreement
from autopar.trace.call.call_signature import flatten_arguments
from tests.pool import Pool
from tests.runtime.forced_compiler import forced_compiler

Pools = Callable[[int], Pool]
CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor, *, scale: float = 1.0, note: Any = None) -> Tensor:
        return F.cross_entropy(self.second(self.norm(self.first(x))) * scale, y)


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(6, 4, generator=generator), torch.tensor([0, 1, 2, 0, 1, 2])


def parallel(*, steps: bool = False, exact: bool = False) -> ParallelModule:
    pipeline = Pipeline(micro_batches=2) if steps else None
    compiler = forced_compiler(Mesh((2,)), ["batch"], pipeline=pipeline)
    ours = ParallelModule(Net(), compiler, describe=describe, device=CPU, by_steps=steps, exact_random=exact)
    ours.prepare(*batch())
    return ours


def _other_input(ours: ParallelModule) -> None:
    x, y = batch()
    x[3, 2] += dist.get_rank()
    ours(x, y)


def _other_labels(ours: ParallelModule) -> None:
    x, y = batch()
    ours(x, y.roll(dist.get_rank()))


def _other_rows(ours: ParallelModule) -> None:
    x, y = batch()
    ours(x[: 4 + dist.get_rank()], y[: 4 + dist.get_rank()])


def _other_constant(ours: ParallelModule) -> None:
    ours(*batch(), scale=1.0 + dist.get_rank())


def _other_structure(ours: ParallelModule) -> None:
    ours(*batch(), **({"scale": 1.0} if dist.get_rank() else {}))


def _other_number(ours: ParallelModule) -> None:
    net: Any = ours
    net(*batch())
    net.norm.eps = 0.5 + dist.get_rank()
    net(*batch())


def _other_mode(ours: ParallelModule) -> None:
    ours.norm.train(dist.get_rank() == 0)  # type: ignore[union-attr]
    ours(*batch())


def _no_gradients(ours: ParallelModule) -> None:
    with torch.set_grad_enabled(dist.get_rank() == 0):
        ours(*batch())


def _other_weight(ours: ParallelModule) -> None:
    with torch.no_grad():
        local(dict(ours.named_parameters())["second.bias"]).add_(dist.get_rank())
    ours(*batch())


def _other_example(ours: ParallelModule) -> None:
    x, y = batch()
    ours.prepare(x[: 4 + dist.get_rank()], y[: 4 + dist.get_rank()])


DIFFERENCES: dict[str, Callable[[ParallelModule], None]] = {
    r"input input_0 on rank 1 .* inputs=.local.": _other_input,
    r"input input_1 on rank 1 .* inputs=.local.": _other_labels,
    r"input input_0 .*whole batch": _other_rows,
    r"a constant argument .*same calls": _other_constant,
    r"structure of the arguments .*same calls": _other_structure,
    r"BatchNorm1d.eps, which forward reads, on rank 1 .*all ranks": _other_number,
    r"train or eval mode .*same calls": _other_mode,
    r"is_grad_enabled.*same calls": _no_gradients,
    r"parameter or buffer second.bias .*load_state_dict": _other_weight,
    r"input input_0 on rank 1 .*whole batch": _other_example,
}


def _refused(pattern: str) -> None:
    ours = parallel()
    with pytest.raises(InputError, match=rf"test_agreement.py:\d+: .*{pattern}") as told:
        DIFFERENCES[pattern](ours)
    assert len(str(told.value)) < 400


@pytest.mark.parametrize("pattern", DIFFERENCES)
def test_a_difference_is_an_error_on_every_rank(pools: Pools, pattern: str) -> None:
    pools(2).run(_refused, pattern, timeout=30.0)


def _right_after_others() -> None:
    ours = parallel()
    x, y = (torch.cat([item] * 100) for item in batch())  # too long to be compared byte by byte
    for _ in range(FIRST_CALLS):
        with pytest.raises(InputError, match="input input_0"):
            ours(x[: 599 + dist.get_rank()], y[: 599 + dist.get_rank()])
    for _ in range(FIRST_CALLS + 1):
        ours(x, y)


def test_calls_that_are_alike_pass_after_others_that_were_not(pools: Pools) -> None:
    pools(2).run(_right_after_others, timeout=60.0)


def _right_after_a_call_of_another_kind() -> None:
    ours = parallel()
    x, y = batch()
    out = ours(x, y).sum()
    with pytest.raises(InputError, match="another call"):
        ours(x, y) if dist.get_rank() else out.backward()
    for _ in range(FIRST_CALLS + 1):
        ours(x, y)


def test_calls_that_are_alike_pass_after_one_that_only_some_ranks_made(pools: Pools) -> None:
    pools(2).run(_right_after_a_call_of_another_kind, timeout=60.0)


def _steps() -> None:
    ours = parallel(steps=True)
    x, y = batch()
    ours.train_step(x, y)
    with pytest.raises(InputError, match="input input_0 on rank 1"):
        ours.eval_step(x + dist.get_rank(), y)


def test_steps_are_compared_too(pools: Pools) -> None:
    pools(2).run(_steps, timeout=30.0)


def _exact() -> None:
    ours = parallel(exact=True)
    torch.manual_seed(dist.get_rank())
    with pytest.raises(InputError, match="the default generator on rank 1 .*seed all ranks alike"):
        ours(*batch())


def test_exact_masks_need_one_random_state(pools: Pools) -> None:
    pools(2).run(_exact, timeout=30.0)


class Plain:
    """Whose repr tells its address."""


def _alike() -> None:
    ours = parallel()
    torch.manual_seed(dist.get_rank())
    kept = [Plain() for _ in range(dist.get_rank() + 1)]
    for _ in range(4):
        ours(*batch(), note=kept[-1])


def test_what_needs_not_be_alike_is_let_pass(pools: Pools) -> None:
    pools(2).run(_alike, timeout=30.0)


def _later(size: int) -> list[int]:
    """The calls in which another value of one element was found, of an agreement without a program."""
    agreement, found = Agreement(CPU, local_inputs=False), []
    for number in range(1, 2 * STRIDE + 1):
        x = torch.zeros(size)
        if number > 3:
            x[1] += dist.get_rank()
        try:
            agreement.check(flatten_arguments((x,), {}), [True], ())
        except InputError as error:
            assert re.search("input_0 on rank 1", str(error))
            found.append(number)
    return found


def test_every_call_compares_a_sample_and_some_all(pools: Pools) -> None:
    assert pools(2).run(_later, 64) == [list(range(4, 2 * STRIDE + 1))] * 2
    # Of 2048 elements every 32nd is sampled; what was found once is compared until it is mended.
    assert pools(2).run(_later, 2048) == [list(range(STRIDE, 2 * STRIDE + 1))] * 2


def _apart(gap: float) -> tuple[float, str]:
    """By how much what rank 1 holds differs from rank 0's after a call, and what the call was refused for."""
    agreement, word = Agreement(CPU, local_inputs=False), ""
    mean = torch.tensor([1.0, -3.0]) * (1 + gap if dist.get_rank() else 1)
    try:
        agreement.check(flatten_arguments((torch.zeros(2),), {}), [True], [("mean", mean), ("one", mean[:1])])
    except InputError as error:
        word = str(error)
    theirs = mean.clone()
    dist.broadcast(theirs, src=0)
    return float((mean - theirs).abs().max()), word


def test_replicas_that_a_rounding_has_driven_apart_are_brought_together(pools: Pools) -> None:
    assert pools(2).run(_apart, 2e-7) == [(0.0, "")] * 2
    for _, word in pools(2).run(_apart, 1e-5):
        assert "mean on rank 1 unlike that on rank 0" in word
    assert pools(2).run(_apart, float("nan"))[1][1]
